"""The settings of `train_preference`. Loads no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from audiollm.data.records.video_clips import PictureSettings
from audiollm.errors import ConfigError
from audiollm.recipe.stages import InputModel, Size
from audiollm.rl.critic.settings import CriticStart
from audiollm.rl.groups import PairChoice
from audiollm.rl.objectives.catalog import (
    CATALOG,
    GroupKind,
    ObjectiveNeeds,
    ObjectiveTerm,
    WhatIsRead,
    objective_term,
)
from audiollm.train.settings import FrozenPlacement, ModelTrainingConfig
from audiollm.train.supervised_settings import SourceConfig


def _one_or_many(value: Any) -> Any:
    sources = value if isinstance(value, list) else [value]
    return [{"path": source} if not isinstance(source, dict | SourceConfig) else source for source in sources]


def _all_or_no_weights(sources: list[SourceConfig]) -> list[SourceConfig]:
    if 0 < sum(source.weight is not None for source in sources) < len(sources):
        raise ValueError("give every one of the samples a weight, or none")
    return sources


SourceList = Annotated[
    list[SourceConfig], Field(min_length=1), BeforeValidator(_one_or_many), AfterValidator(_all_or_no_weights)
]
"""A path, or a list of paths and of `{path, weight}`."""


def weights_of(sources: Sequence[SourceConfig]) -> list[float] | None:
    """Return the weights of sources; None: they follow from their sizes."""
    return [source.weight for source in sources if source.weight is not None] or None


class PTXChoice(BaseModel):
    """Supervised samples beside the answers of a step: a cross entropy term in every update (PTX)."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
    samples: SourceList
    """Samples whose last message is the answer to learn; as `samples` of the stage."""
    weight: float = Field(1.0, gt=0)
    """Weight of the mean cross entropy per token beside the loss of the answers (InstructGPT: 27.8)."""
    batch_size: int | None = Field(None, ge=1)
    """Samples of a step, over all ranks; None: as many as the stage's own."""


@dataclass(frozen=True)
class PreferenceSizeRule:
    """The settings that follow from `size`. An adapter learns at ten times the rate (as TRL advises)."""

    batch_size: int
    learning_rate: float
    max_tokens: int
    passes: float = 1.0


SIZES: dict[Size, PreferenceSizeRule] = {
    "tiny": PreferenceSizeRule(16, 5e-5, 4_096, 3.0),
    "small": PreferenceSizeRule(32, 1e-5, 8_192),
    "300m": PreferenceSizeRule(64, 3e-6, 8_192),
    "1b": PreferenceSizeRule(64, 1e-6, 8_192),
    "3b": PreferenceSizeRule(64, 5e-7, 8_192),
}
ADAPTER_RATE_FACTOR = 10.0


class ObjectiveChoice(BaseModel):
    """An objective by name, its weight in a mix, and its own settings beside them."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str
    weight: float = Field(1.0, gt=0)

    @model_validator(mode="after")
    def _is_known(self) -> ObjectiveChoice:
        try:
            self.term()
        except ConfigError as error:
            raise ValueError("; ".join(filter(None, [error.message, error.remedy]))) from None
        return self

    def term(self) -> ObjectiveTerm:
        """The objective with its checked settings."""
        return objective_term(self.name, self.model_extra or {}, self.weight)


class AnswerTrainingConfig(ModelTrainingConfig):
    """Settings that trainings on judged answers share. What is None follows from `size`, that of the model."""

    samples: SourceList
    """Records with answers to choose among: a .jsonl or a folder of shards, or a list of these and of
    `{path, weight}`."""
    start: InputModel
    """The model to begin from: a folder in Hugging Face layout, or that of a training stage."""
    objective: list[ObjectiveChoice] = Field(min_length=1)
    """The objective by name, with settings (`{name: dpo, beta: 0.2}`), or a list of these with `weight`."""
    pairs: PairChoice = "best_worst"
    """The pairs that are made of more than two answers."""
    max_tokens: int | None = Field(None, ge=64)
    """Tokens in memory at a time, with padding; a step takes as many such batches as its samples need."""
    strict: bool = False
    """Stop at the first bad sample; otherwise it is set aside, counted and left out."""
    evaluations: int = Field(4, ge=1)
    """Evaluations on the held-out samples (metadata `split: test`), evenly over the steps."""
    ema_decay: float = Field(0.0, ge=0, lt=1)
    """Decay of the averaged weights that the run ends with; 0: no averaging."""
    weight_decay: float = Field(0.0, ge=0)
    """Of matrices; norms and biases have none."""

    _reads: ClassVar[tuple[WhatIsRead, ...]] = ("log_probs",)
    """What objectives of this training may read."""
    _other_stage: ClassVar[str] = "train_reward"
    """The stage of the objectives that read something else."""

    @field_validator("objective", mode="before")
    @classmethod
    def _one_or_many_objectives(cls, value: Any) -> Any:
        objectives = value if isinstance(value, list) else [value]
        return [{"name": objective} if isinstance(objective, str) else objective for objective in objectives]

    @model_validator(mode="after")
    def _follow_size(self) -> AnswerTrainingConfig:
        rule = SIZES[self.size]
        factor = ADAPTER_RATE_FACTOR if self.trained == "adapter" else 1.0
        self.follow_size(None, rule.passes, rule.batch_size, rule.learning_rate * factor)
        self.max_tokens = self.max_tokens or rule.max_tokens
        self.group_kind  # noqa: B018  # raises where the objectives do not go together
        return self

    @property
    def terms(self) -> list[ObjectiveTerm]:
        """The objectives with their settings and weights."""
        return [choice.term() for choice in self.objective]

    @property
    def needs(self) -> list[ObjectiveNeeds]:
        """What each objective needs."""
        return [term.needs for term in self.terms]

    @property
    def group_kind(self) -> GroupKind:
        """The kind of groups that all objectives take.

        Raises:
            ValueError: there is none, or an objective is one of another stage.
        """
        for term in self.terms:
            if term.needs.reads not in self._reads:
                raise ValueError(
                    f"objective: {term.name} reads {term.needs.reads}, not {' or '.join(self._reads)}: use the "
                    f"stage {self._other_stage}, or {' or '.join(self._usable_objectives())}"
                )
        shared = [kind for kind in self.needs[0].groups if all(kind in needs.groups for needs in self.needs)]
        if not shared:
            takes = "; ".join(f"{term.name} takes {' or '.join(term.needs.groups)}" for term in self.terms)
            raise ValueError(f"objective: these do not go together: {takes}")
        # cross entropy alone learns from conversations, too, which are single answers
        return "singles" if all(term.name == "sft" for term in self.terms) else shared[0]

    @property
    def weights(self) -> list[float] | None:
        """The weights of the sources; None: by their sizes."""
        return weights_of(self.samples)

    def _usable_objectives(self) -> list[str]:
        return sorted(name for name, entry in CATALOG.items() if entry.reads in self._reads)[:4]


class PreferenceConfig(AnswerTrainingConfig):
    """Settings of `train_preference`."""

    incidental: ClassVar[frozenset[str]] = ModelTrainingConfig.incidental | {
        "reference_placement",
        "eval_answers",
    }

    reference: InputModel | None = None
    """The model that the policy is held to; None: the one that it begins from."""
    reference_placement: FrozenPlacement = "whole"
    """`whole` on every rank, `sharded` over the ranks, or on the `cpu` and copied layer by layer; the training is the
    same."""
    eval_answers: int = Field(8, ge=0)
    """Held-out prompts that the policy answers at every evaluation, greedily; 0: none."""
    pictures: PictureSettings | None = Field(None, exclude_if=lambda value: value is None)
    """How the pictures of videos are shown to a model that sees (`{per_second: 2, side: 224}`); None: samples with
    videos are set aside."""
    ptx: PTXChoice | None = Field(None, exclude_if=lambda value: value is None)
    """Other samples (conversations) that are learned by cross entropy in the same steps, by weight; None: none."""
    critic: CriticStart | None = Field(None, exclude_if=lambda value: value is None)
    """The value head that `dro` trains beside the policy, on a model of its own: its settings, or the folder that it
    begins from; None: the policy's model with a new head, where the objective reads values."""

    @field_validator("critic", mode="before")
    @classmethod
    def _folder_or_settings(cls, value: Any) -> Any:
        return {"start": value} if isinstance(value, str | Path) else value

    @model_validator(mode="after")
    def _averages_over_the_same_tokens(self) -> PreferenceConfig:
        over_tokens = [term for term in self.terms if "tokens_per_answer" in term.needs.figures]
        with_prompts = [term.name for term in over_tokens if term.needs.prompts]
        without = [term.name for term in over_tokens if not term.needs.prompts]
        if with_prompts and without:
            raise ValueError(
                f"objective: {with_prompts[0]} with sft_on: prompt_and_answer and {without[0]} average a cross entropy "
                f"over different tokens: set sft_average (or average) of one of them to sequence"
            )
        return self

    @model_validator(mode="after")
    def _steps_have_other_records(self) -> PreferenceConfig:
        for term in self.terms:
            if self.batch_size == 1 and (term.needs.mismatched_answers or term.needs.altered_recordings):
                raise ValueError(
                    f"batch_size: {term.name} reads other records of the step, and a step of 1 has none: give 2 or more"
                )
        return self

    @model_validator(mode="after")
    def _critic_is_read(self) -> PreferenceConfig:
        reads = any(needs.value_head for needs in self.needs)
        if self.critic is not None and not reads:
            names = ", ".join(choice.name for choice in self.objective)
            raise ValueError(
                f"critic is set, but {names} reads no values: leave it out, or set objective: dro"
            )
        if reads:
            self.critic = self.critic or CriticStart()
            if self.critic.lora is not None and (self.critic.trained or self.trained) != "adapter":
                raise ValueError("critic.lora is set, but no adapter of the critic is trained: leave it out")
        return self

    @model_validator(mode="after")
    def _reference_is_read(self) -> PreferenceConfig:
        if self.reference is not None and not self.needs_reference:
            names = ", ".join(choice.name for choice in self.objective)
            raise ValueError(f"reference is set, but {names} has none: leave it out")
        return self

    @property
    def needs_reference(self) -> bool:
        """Whether any objective reads a reference."""
        return any(needs.reference for needs in self.needs)
