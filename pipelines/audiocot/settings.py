"""Settings of the stage `audiocot`: input, steps, thresholds, answerers, and the machines that it runs on."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, model_validator

from audiollm.recipe.stages import check_input, located
from pipelines.audiocot.chain import STEPS
from pipelines.audiocot.rules import PRESETS, ClipPreset, ClipThresholds
from pipelines.steps.chain import StepCatalog, paths_of
from pipelines.steps.settings import StepsConfig

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


class AudioCotConfig(StepsConfig):
    """Settings of the stage `audiocot`."""

    catalog: ClassVar[StepCatalog] = STEPS
    incidental: ClassVar[frozenset[str]] = StepsConfig.incidental | {"budget"}

    input: str | list[str]
    """A folder, a file, a glob, a list (CSV or JSONL with a column path, or samples such as `scenes.jsonl`), a tar or
    an address; several in a list."""
    preset: ClipPresetName = "thinksound"
    """Named set of steps and thresholds, which the settings below change."""
    clip_s: float | Literal["preset"] | None = "preset"
    """Length of every clip in seconds; null: a file is one clip."""
    use_truth: bool = True
    """Let `measured` write from the truth of composed scenes, where the list has it."""
    made: MadeConfig = Field(default_factory=MadeConfig)
    """Sounds that are made of kept clips."""
    little_evidence: Literal["leave_out", "keep"] = "leave_out"
    """In `thinking.jsonl`, questions about clips whose loudest sound the tagger could not name."""
    held_out: float = Field(0.0, ge=0, lt=1)
    """Share of the files without a split of their own that become the split `test`, which no training learns from; by
    content, so that a file that is added moves no other."""
    review_share: float = Field(0.05, ge=0, le=1)
    """Share of the kept clips that is listed for accepting or rejecting."""
    budget: AnswerBudget = Field(default_factory=AnswerBudget)
    """Limits to the new answers of endpoints and models."""
    shards: bool = True
    """Write the kept clips with their sound as shards, too."""
    samples_per_shard: int = Field(256, ge=1)
    """Most samples of a shard."""

    @model_validator(mode="after")
    def _go_together(self, info: ValidationInfo) -> AudioCotConfig:
        if self.clip_s not in ("preset", None) and not float(self.clip_s) > 0:
            raise ValueError("clip_s must be above 0")
        _ = self.limits
        steps = self.step_settings()
        self.check_resources({*STEPS.built_in, *STEPS.value_names(steps)})
        if "describe" in steps and "objects" not in steps:
            raise ValueError("steps: describe needs the step objects: add `objects: {}`")
        for step, settings in steps.items():
            for name, path in paths_of(settings).items():
                with located("steps", step, name):
                    check_input(path, info)
        return self

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
        values = self.merge_thresholds(self.chosen_preset.thresholds)
        if (
            values["min_duration_s"] is None
            and self.clip_length_s
            and "min_duration_s" not in self.thresholds
        ):
            values["min_duration_s"] = round(_NEARLY_WHOLE * self.clip_length_s, 3)
        return ClipThresholds(**values)

    def step_settings(self) -> dict[str, BaseModel]:
        """Typed settings of all steps."""
        step_values = self.merge_steps(self.chosen_preset.steps)
        step_values["clips"] = {"clip_s": self.clip_length_s}
        return STEPS.typed_settings(step_values)
