"""Settings of the stage `audiocot`: input, steps, thresholds, answerers, and the machines that it runs on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from audiollm.errors import suggestion
from audiollm.recipe.stages import StageConfig, check_input, located
from pipelines.audiocot.chain import BUILT_IN, STEPS, step_config
from pipelines.audiocot.rules import PRESETS, ClipPreset, ClipThresholds
from pipelines.execution.engine import available_cpus
from pipelines.steps.chain import paths_of
from pipelines.steps.inputs import is_address
from pipelines.steps.step import Resources

ClipPresetName = Literal["thinksound", "everything"]
_NEARLY_WHOLE = 0.995


class AnswerBudget(BaseModel):
    """Limits to the new answers of endpoints and models, over all runs in one folder; null: no limit."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    calls: int | None = Field(None, ge=0)
    """New answers, those that are refused included. A request that nobody answers (no connection, a time-out, an error
    of the server) does not count."""
    tokens: int | None = Field(None, ge=0)
    """Tokens of requests and replies, as endpoints and models count them."""


class MadeConfig(BaseModel):
    """Sounds that are made of kept clips."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    sample_rate: int = Field(44_100, ge=8_000, le=192_000)
    channels: int = Field(2, ge=1, le=2)
    pairs: bool = True
    """Stage 2: each clip that has an object, beside a reference clip whose sounds are to be avoided."""
    edits: list[Literal["extend", "inpaint", "add", "remove"]] = ["extend", "inpaint", "add", "remove"]
    """Stage 3: operations that are carried out on each clip."""


class AudioCotConfig(StageConfig):
    """Settings of the stage `audiocot`."""

    incidental: ClassVar[frozenset[str]] = frozenset(
        {"workers", "engine", "ray_address", "gpus", "budget", "max_unpacked_gb"}
    )

    input: str | list[str]
    """A folder, a file, a glob, a list (CSV or JSONL with a column path, or samples such as `scenes.jsonl`), a tar or
    an address; several in a list."""
    preset: ClipPresetName = "thinksound"
    """Named set of steps and thresholds, which the settings below change."""
    clip_s: float | Literal["preset"] | None = "preset"
    """Length of every clip in seconds; null: a file is one clip."""
    steps: dict[str, dict[str, Any] | None] = Field(default={})
    """Step -> its settings, over those of the preset; null: without this step."""
    thresholds: dict[str, Any] = Field(default={})
    """Threshold -> value, over those of the preset; null: without this threshold."""
    use_truth: bool = True
    """Let `measured` write from the truth of composed scenes, where the list has it."""
    missing_scorer: Literal["fail", "skip"] = "fail"
    """Reaction to a missing model of a step or threshold; skip: go on, and report what was not applied."""
    made: MadeConfig = Field(default_factory=MadeConfig)
    little_evidence: Literal["leave_out", "keep"] = "leave_out"
    """In `thinking.jsonl`, questions about clips whose loudest sound the tagger could not name."""
    held_out: float = Field(0.0, ge=0, lt=1)
    """Share of the files without a split of their own that become the split `test`, which no training learns from; by
    content, so that a file that is added moves no other."""
    review_share: float = Field(0.05, ge=0, le=1)
    """Share of the kept clips that is listed for accepting or rejecting."""
    budget: AnswerBudget = Field(default_factory=AnswerBudget)
    shards: bool = True
    """Write the kept clips with their sound as shards, too."""
    samples_per_shard: int = Field(256, ge=1)
    max_unpacked_gb: float = Field(100, gt=0)
    """Limit, in GB, to what all archives unpack to; members beyond it are set aside."""
    workers: int | None = Field(None, ge=0)
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

    @field_validator("input")
    @classmethod
    def _inputs_exist(cls, value: str | list[str], info: ValidationInfo) -> str | list[str]:
        for text in [value] if isinstance(value, str) else value:
            if not is_address(text) and not any(mark in text for mark in "*?["):
                check_input(Path(text), info)
        return value

    @field_validator("steps", mode="before")
    @classmethod
    def _steps_are_known(cls, value: Any) -> Any:
        for name, settings in value.items() if isinstance(value, dict) else ():
            if name not in STEPS:
                raise ValueError(f"no step {name!r}: {suggestion(name, list(STEPS))}")
            if settings is None and name in BUILT_IN:
                raise ValueError(f"the step {name} is always there")
        return value

    @model_validator(mode="after")
    def _go_together(self, info: ValidationInfo) -> AudioCotConfig:
        for name in self.resources:
            if name not in STEPS:
                raise ValueError(f"resources: no step {name!r}: {suggestion(name, list(STEPS))}")
        if self.clip_s not in ("preset", None) and not float(self.clip_s) > 0:
            raise ValueError("clip_s must be above 0")
        _ = self.limits
        steps = self.step_settings()
        if "describe" in steps and "objects" not in steps:
            raise ValueError("steps: describe needs the step objects: add `objects: {}`")
        for step, settings in steps.items():
            for name, path in paths_of(settings).items():
                with located("steps", step, name):
                    check_input(path, info)
        return self

    @property
    def inputs(self) -> list[str]:
        """All inputs."""
        paths = [self.input] if isinstance(self.input, str) else self.input
        return [text if is_address(text) else str(Path(text).expanduser()) for text in paths]

    @property
    def num_workers(self) -> int:
        """Worker processes: the setting, or one per CPU."""
        return max(1, available_cpus() if self.workers is None else self.workers)

    @property
    def chosen_preset(self) -> ClipPreset:
        return PRESETS[self.preset]

    @property
    def clip_length_s(self) -> float | None:
        """Length of every clip; None: a file is one clip."""
        return self.chosen_preset.clip_s if self.clip_s == "preset" else self.clip_s

    @property
    def limits(self) -> ClipThresholds:
        """Thresholds of the preset, overridden by those set by hand; clips of less than the cut length are short."""
        threshold_fields = ClipThresholds.model_fields
        for name in self.thresholds:
            if name not in threshold_fields:
                raise ValueError(f"thresholds: no {name!r}: {suggestion(name, list(threshold_fields))}")
        values = {**self.chosen_preset.thresholds.model_dump(), **self.thresholds}
        if (
            values["min_duration_s"] is None
            and self.clip_length_s
            and "min_duration_s" not in self.thresholds
        ):
            values["min_duration_s"] = round(_NEARLY_WHOLE * self.clip_length_s, 3)
        return ClipThresholds(**values)

    def step_settings(self) -> dict[str, BaseModel]:
        """Typed settings of all steps."""
        step_values: dict[str, Mapping[str, Any]] = {name: {} for name in BUILT_IN}
        step_values |= self.chosen_preset.steps
        for name, overrides in self.steps.items():
            if overrides is None:
                step_values.pop(name, None)
            else:
                step_values[name] = {**step_values.get(name, {}), **overrides}
        step_values["clips"] = {"clip_s": self.clip_length_s}
        typed: dict[str, BaseModel] = {}
        for name, settings in step_values.items():
            with located("steps", name):
                typed[name] = step_config(name).model_validate(settings)
        return typed
