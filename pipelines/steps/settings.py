"""Settings of every stage that is a chain of steps: input, steps, thresholds, and the machines that it runs on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, Field, ValidationInfo, field_validator

from audiollm.errors import suggestion
from audiollm.processes import available_cpus
from audiollm.recipe.stages import StageConfig, check_input
from pipelines.steps.chain import StepCatalog
from pipelines.steps.inputs import is_address
from pipelines.steps.step import Resources


class StepsConfig(StageConfig):
    """Base of the settings of such stages."""

    catalog: ClassVar[StepCatalog]
    """The steps that there are."""
    incidental: ClassVar[frozenset[str]] = frozenset(
        {"workers", "engine", "ray_address", "gpus", "max_unpacked_gb"}
    )

    input: str | list[str] | None
    preset: str
    steps: dict[str, dict[str, Any] | None] = Field(default={})
    """Step (`package.module:Name` for one of your own) -> its settings, over those of the preset; null: without this
    step."""
    thresholds: dict[str, Any] = Field(default={})
    """Threshold -> value, over those of the preset; null: without this threshold."""
    missing_scorer: Literal["fail", "skip"] = "fail"
    """Reaction to a missing model of a step or threshold; skip: go on, and report what was not applied."""
    max_unpacked_gb: float = Field(default=100, gt=0)
    """Limit, in GB, to what all archives unpack to; members beyond it are set aside."""
    workers: int | None = Field(default=None, ge=0)
    """Worker processes; 0 and 1: work in this process; null: one per CPU."""
    engine: Literal["local", "ray"] = "local"
    """Processes of this machine, or actors of a Ray cluster."""
    ray_address: str | None = None
    """Address of the Ray cluster; null: start one on this machine."""
    gpus: float = Field(0.0, ge=0)
    """GPUs that the steps may share."""
    resources: dict[str, Resources] = Field(default={})
    """Step -> what one worker of it takes."""
    retry_failed: bool = False
    """Try again what failed in an earlier run."""
    seed: int = 0
    """Seed of everything that is drawn: synthetic speech, samples that are looked at closer."""

    @field_validator("input")
    @classmethod
    def _inputs_exist(cls, value: str | list[str] | None, info: ValidationInfo) -> str | list[str] | None:
        for text in [value] if isinstance(value, str) else value or ():
            if not is_address(text) and not any(mark in text for mark in "*?["):
                check_input(Path(text), info)
        return value

    @field_validator("steps", mode="before")
    @classmethod
    def _steps_are_known(cls, value: Any) -> Any:
        cls.catalog.check(value)
        return value

    @property
    def inputs(self) -> list[str]:
        """All inputs."""
        paths = [self.input] if isinstance(self.input, str) else self.input or []
        return [text if is_address(text) else str(Path(text).expanduser()) for text in paths]

    @property
    def num_workers(self) -> int:
        """Worker processes: the setting, or one per CPU."""
        return max(1, available_cpus() if self.workers is None else self.workers)

    def check_resources(self, step_names: set[str]) -> None:
        """Raises: ValueError: resources of a step that there is not."""
        for name in self.resources:
            if name not in step_names:
                raise ValueError(f"resources: no step {name!r}: {suggestion(name, step_names)}")

    def merge_thresholds(self, preset: BaseModel) -> dict[str, Any]:
        """Thresholds of the preset, overridden by those set by hand."""
        known = type(preset).model_fields
        for name in self.thresholds:
            if name not in known:
                raise ValueError(f"thresholds: no {name!r}: {suggestion(name, list(known))}")
        return {**preset.model_dump(), **self.thresholds}

    def merge_steps(self, preset: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
        """Settings of the required steps and of those of the preset, overridden by those set by hand."""
        step_values: dict[str, Mapping[str, Any]] = {name: {} for name in self.catalog.required}
        step_values |= preset
        for name, overrides in self.steps.items():
            if overrides is None:
                step_values.pop(name, None)
            else:
                step_values[name] = {**step_values.get(name, {}), **overrides}
        return step_values
