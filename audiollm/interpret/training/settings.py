"""The settings of `train_interpreter`. Loads no torch."""

from __future__ import annotations

import re
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from audiollm.errors import ConfigError, suggestion
from audiollm.evaluate.judges.text_scorers import check_text_scorer
from audiollm.rl.critic.settings import CriticChoice
from audiollm.rl.online.settings import NamedChoice, PolicyTrainingConfig
from audiollm.rl.rewards.catalog import RewardTerm
from audiollm.rl.rewards.settings import RewardSettings

ACTION_REWARDS = ("detection", "initiative", "quality", "timing", "format", "process_quality")
"""Rewards of single actions."""
SEQUENCE_REWARDS = ("lagging", "sequence_quality")
"""Rewards of whole streams, which stand at the last action; without them it is the paper's first stage."""


OF_GROUPS = ("grouped", "seqpo", "gated")
"""Combinations that compare the rollouts of a stream."""
OF_WHOLE_STREAMS = ("seqpo", "gated")
"""Combinations that give a rollout one number, from `sequence_quality` and `lagging`."""


class CombineChoice(BaseModel):
    """How rewards become one number."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
    name: Literal["sum_z", "grouped", "seqpo", "gated"] = "sum_z"
    """`sum_z`: the weighted sum of standard scores over the step, those of streams at their last action (Seed
    LiveInterpret 2.0); `grouped`: standard scores among the rollouts of a stream, chunk by chunk (GRPO over streams);
    `seqpo` (SeqPO-SiMT) and `gated` (HPO): a number for each rollout, from quality and latency."""
    floor: float = -1.0
    """Of `seqpo`: standard score of the latency below which less earns nothing more. The paper's is not known."""
    threshold: float = 0.5
    """Of `gated`: similarity of a sentence, from 0 to 1, below which its latency counts as the worst (HPO has -5 of
    MetricX)."""
    max_latency_s: float = Field(10.0, gt=0)
    """Of `gated`: latency in seconds beyond which more costs nothing (HPO: 10)."""

    @model_validator(mode="after")
    def _check_own(self) -> CombineChoice:
        combination_of = {"floor": "seqpo", "threshold": "gated", "max_latency_s": "gated"}
        for name in self.model_fields_set & combination_of.keys():
            if self.name != combination_of[name]:
                raise ValueError(
                    f"{name} is of {combination_of[name]}, and combine is {self.name}: leave it out"
                )
        return self


class StreamRewardTerm(RewardTerm):
    """A reward of streams as a recipe asks for it; rewards of single answers may have its name."""

    @property
    def is_plug_in(self) -> bool:
        """True: it is none of the catalog of rewards of single answers."""
        return True


class InterpreterTrainingConfig(PolicyTrainingConfig):
    """Settings of `train_interpreter`: those of `train_policy`, over streams."""

    kind: ClassVar[str] = "train_interpreter"
    incidental: ClassVar[frozenset[str]] = PolicyTrainingConfig.incidental

    rewards: dict[str, Any] = Field(
        default_factory=lambda: {"detection": 1.0, "initiative": 1.0, "quality": 1.0, "format": 1.0},
        min_length=1,
    )
    """Weights of the rewards by name: of actions (`detection`, `initiative`, `quality`, `timing`, `format`,
    `process_quality`) and of streams (`lagging`, `sequence_quality`). Each is standardised over the step."""
    combine: CombineChoice = Field(CombineChoice(), exclude_if=lambda value: value == CombineChoice())
    """How rewards become one number for each action, or for each rollout: `sum_z`, `grouped`, `seqpo`, `gated`, or a
    name with settings (`{name: seqpo, floor: -1}`). The weights are those of `rewards`."""
    latency: Literal["lagging", "AL", "LAAL"] = Field("lagging", exclude_if=lambda value: value == "lagging")
    """Latency of a rollout in `seqpo`: the mean wait beyond `allowed_wait` in chunks, or average lagging in seconds."""
    advantage: NamedChoice = NamedChoice.model_validate({"name": "gae", "steps": True})
    """How rewards become advantages: `{name: gae, steps: true}` with a value for each token, or with `level: step` for
    each action; `reinforce_plus_plus` with `steps: true` needs no critic. `combine: grouped` gives advantages already:
    `{name: reinforce_plus_plus, steps: true, level: step, gamma: 0, whiten: false}`. `seqpo` and `gated` also take
    advantages of whole answers, as `{name: grpo, scale: none}`."""
    critic: CriticChoice | None = CriticChoice()
    """See `train_policy`."""
    group_size: int = Field(1, ge=1)
    """Rollouts of each stream."""
    language: str = "en"
    """Language of the outputs, which decides BLEU's tokenizer, and whether latency counts words or characters."""
    similarity: str = "chrf"
    """Similarity of output and reference: `chrf`, `bleu`, `word_accuracy`, or `command:PYTHON SCRIPT`, a scorer in
    another process. chrF hardly minds words that are too many, with which a policy can lower its lag."""
    similarity_range: tuple[float, float] = (0.0, 100.0)
    """Scores that become 0 and 1."""
    waiting: Literal["run", "lag"] = "lag"
    """The wait before a segment: `run`, silent chunks before it; `lag`, chunks since its source was over (metadata
    `source_ends`)."""
    allowed_wait: float = Field(1.0, ge=0)
    """Chunks of waiting that cost nothing."""
    timing_target: Literal["reference", "source"] = "reference"
    """Duration that `timing` compares speech with."""
    pattern: str = r"[^<>]*"
    """Regular expression that the whole text of an action must match for the reward `format`."""
    process_share: float = Field(0.5, ge=0, le=1)
    """Weight of the output so far in `process_quality`; the rest is that of the whole output."""
    process_every: int = Field(1, ge=1)
    """Chunks between two values of `process_quality`."""

    @field_validator("combine", mode="before")
    @classmethod
    def _name_or_settings_of_combine(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @field_validator("similarity")
    @classmethod
    def _is_a_scorer(cls, scorer: str) -> str:
        try:
            check_text_scorer(scorer, "")
        except ConfigError as error:
            raise ValueError("; ".join(filter(None, [error.message, error.remedy]))) from None
        return scorer

    @field_validator("pattern")
    @classmethod
    def _is_a_pattern(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
        return pattern

    @field_validator("rewards")
    @classmethod
    def _are_known(cls, weights: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        known_rewards = (*ACTION_REWARDS, *SEQUENCE_REWARDS)
        for name, weight in weights.items():
            if name not in known_rewards:
                raise ValueError(f"there is no reward {name!r} of streams; {suggestion(name, known_rewards)}")
            if isinstance(weight, bool) or not isinstance(weight, int | float):
                raise ValueError(f"{name}: the weight must be a number, not {weight!r}")
        return weights

    @model_validator(mode="after")
    def _check_streams(self) -> InterpreterTrainingConfig:
        low, high = self.similarity_range
        if not low < high:
            raise ValueError(f"similarity_range must rise, not {low} to {high}")
        self._check_combine()
        if not self.reads_steps and self.combine.name not in OF_WHOLE_STREAMS:
            raise ValueError(
                f"advantage: {self.advantage.name} as set does not read the rewards of actions: set "
                "{name: gae, steps: true}, or {name: reinforce_plus_plus, steps: true}"
            )
        for name in ("overlong", "refill"):
            if getattr(self, name) is not None:
                raise ValueError(f"{name} is of single answers: leave it out")
        if self.placement is not None and self.placement.reward is not None:
            raise ValueError("placement.reward: rewards of streams are computed by the ranks: leave it out")
        if self.server:
            raise ValueError(
                f"rollouts: {self.server} answers whole prompts, and streams are open: leave rollouts out"
            )
        if self.answer == "audio":
            raise ValueError("answer: audio has no silent actions: set text, or any")
        return self

    def _check_combine(self) -> None:
        name = self.combine.name
        if name in OF_GROUPS and self.group_size == 1:
            raise ValueError(f"combine: {name} compares the rollouts of a stream: group_size is 1")
        if name in OF_WHOLE_STREAMS and self.rewards.keys() != {"sequence_quality", "lagging"}:
            raise ValueError(
                f"combine: {name} reads quality and latency: set rewards to {{sequence_quality: ..., lagging: ...}}"
            )
        if self.latency != "lagging" and name != "seqpo":
            raise ValueError(f"latency is of seqpo, and combine is {name}: leave it out")

    @property
    def reward_terms(self) -> list[RewardTerm]:
        """The rewards with their weights."""
        return [
            StreamRewardTerm(name, float(weight), RewardSettings()) for name, weight in self.rewards.items()
        ]
