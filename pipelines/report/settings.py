"""The stage `report`: one self-contained page of a run, and its figures as JSON."""

from __future__ import annotations

from pydantic import Field, field_validator

from audiollm.pages.sections import ALL, section_names
from audiollm.recipe.plug_ins import is_import_path
from audiollm.recipe.stages import StageConfig


class ReportConfig(StageConfig):
    """Settings of the stage `report`."""

    samples: int = Field(default=24, ge=0)
    """Generated samples shown, over all stages: evenly over texts and speakers, wrong ones among them."""
    players: bool = True
    """Whether the page holds the sound; without it the page is smaller and silent."""
    sections: tuple[str, ...] = (ALL,)
    """Sections in their order: `all` (those of the run's stages), names of `audiollm list sections`, or functions of
    your own (`package.module:name`)."""

    @field_validator("sections")
    @classmethod
    def _are_sections(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name != ALL and not is_import_path(name) and name not in section_names():
                known = ", ".join((ALL, *section_names()))
                raise ValueError(f"{name!r} is none of {known}, and no package.module:name of your own")
        return names
