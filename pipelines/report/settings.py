"""The stage `report`: one self-contained page of a run, and its figures as JSON."""

from __future__ import annotations

from pydantic import Field

from audiollm.recipe.stages import StageConfig


class ReportConfig(StageConfig):
    """Settings of the stage `report`."""

    samples: int = Field(default=24, ge=0)
    """Generated samples shown, over all stages: evenly over texts and speakers, wrong ones among them."""
    players: bool = True
    """Whether the page holds the sound; without it the page is smaller and silent."""
