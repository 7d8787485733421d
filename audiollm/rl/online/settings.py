"""The settings of `train_policy`. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from audiollm.errors import ConfigError
from audiollm.recipe.plug_ins import is_import_path, plug_in_facts
from audiollm.recipe.stages import InputModel, Size, required
from audiollm.rl.critic.settings import CriticChoice
from audiollm.rl.online.objectives import SELECTIONS, FreshObjective, fresh_objective
from audiollm.rl.placement.settings import PlacementChoice
from audiollm.rl.policy_gradient.catalog import (
    AdvantageTerm,
    PolicyTerm,
    advantage_term,
    kl_controller_settings,
    policy_term,
)
from audiollm.rl.policy_gradient.settings import (
    CorrectionSettings,
    KLSettings,
    ProcessAdvantageSettings,
    ReinforceSettings,
    VESPOSettings,
)
from audiollm.rl.preference.settings import PTXChoice, SourceList, weights_of
from audiollm.rl.rewards.catalog import RewardTerm, reward_terms, with_checked_folders
from audiollm.rl.rollouts.settings import EngineChoice
from audiollm.train.settings import ModelTrainingConfig


class PolicySizeRule(BaseModel):
    """The settings that follow from `size`. An adapter learns at ten times the rate."""

    batch_size: int
    learning_rate: float
    max_tokens: int


SIZES: dict[Size, PolicySizeRule] = {
    "tiny": PolicySizeRule(batch_size=8, learning_rate=1e-4, max_tokens=8_192),
    "small": PolicySizeRule(batch_size=16, learning_rate=5e-6, max_tokens=16_384),
    "300m": PolicySizeRule(batch_size=32, learning_rate=1e-6, max_tokens=16_384),
    "1b": PolicySizeRule(batch_size=32, learning_rate=1e-6, max_tokens=16_384),
    "3b": PolicySizeRule(batch_size=32, learning_rate=1e-6, max_tokens=16_384),
}
ADAPTER_RATE_FACTOR = 10.0
STEPS = 100


class NamedChoice(BaseModel):
    """A name, and its own settings beside it."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str

    @property
    def values(self) -> Mapping[str, Any]:
        """The settings beside the name."""
        return self.model_extra or {}


class KLChoice(KLSettings):
    """The KL from the reference: where it counts, how it is estimated, and its weight."""

    controller: NamedChoice = NamedChoice(name="fixed")
    """`fixed` (`coefficient`), `proportional`, `exponential` or `horizon` (`coefficient`, `target`, ...)."""
    audio: NamedChoice | None = Field(None, exclude_if=lambda value: value is None)
    """Controller of the KL of codes of speech, as `controller`, which then is that of text tokens; None: both have one
    KL and one coefficient."""

    @field_validator("controller", "audio", mode="before")
    @classmethod
    def _name_or_settings(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _is_known(self) -> KLChoice:
        for choice in (self.controller, self.audio):
            if choice is not None:
                _as_value_error(partial(kl_controller_settings, choice.name, choice.values))
        return self


class RefillChoice(BaseModel):
    """Dynamic sampling: fresh prompts in place of those whose groups teach nothing."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
    most: int = Field(3, ge=1)
    """Most refills of a step; it then trains with what it has."""


class OverlongChoice(BaseModel):
    """A penalty on answers close to their limit: the reward `overlong` (DAPO)."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
    buffer: int = Field(16, ge=1)
    """Tokens, or frames of speech, before the limit over which the penalty falls to -1."""
    weight: float = 1.0
    """Weight of the penalty beside the rewards."""


class RefreshChoice(BaseModel):
    """The reference follows the policy (TRL's `sync_ref_model`: every 512 steps, mixed by 0.6)."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
    every: int = Field(512, ge=1)
    """Steps from one refresh to the next."""
    mix: float = Field(1.0, gt=0, le=1)
    """Share of the policy's weights in the new reference; 1: the policy itself."""


class PolicyTrainingConfig(ModelTrainingConfig):
    """Settings of `train_policy`. What is None follows from `size`, that of the model."""

    kind: ClassVar[str] = "train_policy"
    """Name of the stage, for what it sets aside."""
    incidental: ClassVar[frozenset[str]] = ModelTrainingConfig.incidental | {
        "reward_timeout_s",
        "eval_prompts",
        "placement",
    }

    samples: SourceList
    """Prompts with their right answers (the last message of each): a .jsonl or a folder of shards, or a list of these
    and of `{path, weight}`."""
    start: InputModel
    """The model to begin from: a folder in Hugging Face layout, or that of a training stage."""
    rewards: dict[str, Any] = Field(min_length=1)
    """Weights of the rewards by name, or their settings (`{think: {weight: 0.5, max_words: 40}}`): `accuracy`,
    `format`, ..., or functions of one's own (`package.module:function`)."""
    on_error: Literal["skip", "stop"] = "skip"
    """What follows when a reward has no value for an answer: it is left out and named, or the run stops."""
    advantage: NamedChoice = NamedChoice(name="grpo")
    """How rewards become advantages, with its settings (`{name: rloo, whiten: true}`)."""
    objective: NamedChoice = NamedChoice(name="grpo")
    """The loss of the sampled tokens, with its settings (`{name: dapo, epsilon_high: 0.3}`), or an objective on the
    best and worst answers (`{name: online_dpo, beta: 0.1}`) or on the best (`{name: online_rft, least: 1.0}`)."""
    rollouts: EngineChoice | None = None
    """The engine that samples the answers: `vllm` or `sglang`, with its settings (`{name: vllm, python:
    ~/vllm/bin/python}`), or one's own (`package.module:Engine`); None: ours, or transformers'."""
    placement: PlacementChoice | None = None
    """Rollouts, rewards and reference in Ray actors (`{rollout: {actors: 2, gpus: 0.5}}`); None: everything runs with
    the training ranks."""
    codec: InputModel | None = None
    """Codec that decodes speech for the rewards that hear it; None: the `train_tokenizer` of the model's run. Where
    functions of one's own are the only rewards, they get recordings if it is set."""
    kl: KLChoice | None = None
    """The KL from the reference; None: there is no reference."""
    reference: InputModel | None = None
    """The model that the policy is held to; None: the one that it begins from."""
    refresh_reference: RefreshChoice | None = Field(None, exclude_if=lambda value: value is None)
    """When the reference is refreshed with the policy; `{}`: every 512 steps; None: never. An adapter's reference is
    then a second model, with the adapter merged into it at each refresh."""
    critic: CriticChoice | None = None
    """The critic, whose values GAE reads: its settings, or the folder that it begins from; `{}`: the policy's model;
    None: there is none."""
    ptx: PTXChoice | None = None
    """Supervised samples that are trained on in every update, too; None: there are none."""
    correction: CorrectionSettings | None = None
    """Importance weights for the mismatch between sampling and training; None: it is measured, and not corrected."""
    ahead: Literal[0, 1] = Field(0, exclude_if=lambda value: not value)
    """Steps that sampling is ahead of training: with 1, a second process samples the answers of the next step, from
    the weights before the updates of this one, while this one trains. Policy gradients then need `correction`."""
    group_size: int = Field(8, ge=1)
    """Answers to each prompt."""
    answer: Literal["text", "audio", "any"] = "text"
    """What the policy answers in: text, speech, or both by turns."""
    temperature: float = Field(1.0, gt=0)
    """Of sampling, and of all log-probabilities."""
    max_answer_tokens: int = Field(64, ge=1)
    """Longest text of an answer, in tokens."""
    max_frames: int = Field(250, ge=1)
    """Longest speech of an answer, in code frames."""
    truncated: Literal["keep", "leave_out"] = "keep"
    """Whether answers that a limit cut are trained on."""
    overlong: OverlongChoice | None = None
    """A penalty on answers close to `max_answer_tokens` or `max_frames`; None: there is none."""
    refill: RefillChoice | None = None
    """Fresh prompts in place of those whose groups teach nothing; None: such groups stay in the step."""
    max_skipped_steps: int = Field(10, ge=1)
    """Steps in a row without anything to train on after which the run stops; each is skipped."""
    updates: int = Field(1, ge=1)
    """Optimizer steps on the answers of a step."""
    entropy_weight: float = 0.0
    """Weight of the mean entropy per token, which is rewarded."""
    top_entropy: float = Field(1.0, gt=0, le=1)
    """Share of the step's tokens, those of the highest entropy, that the objective is trained on (0.2 in arXiv
    2506.01939)."""
    codebooks: int | None = Field(None, ge=1, exclude_if=lambda value: value is None)
    """Codes of speech of the first so many codebooks have advantages, those of the finer ones have none (the KL counts
    all); None: all have."""
    max_tokens: int | None = Field(None, ge=64)
    """Tokens in memory at a time, with padding; a step takes as many such batches as its answers need."""
    reward_timeout_s: float = Field(60.0, gt=0)
    """Seconds for a reward and the answers of a step, where its settings give none."""
    strict: bool = False
    """Stop at the first bad sample or missing reward; otherwise it is set aside, counted and left out."""
    evaluations: int = Field(4, ge=1)
    """Evaluations on the held-out samples (metadata `split: test`), evenly over the steps."""
    eval_prompts: int = Field(64, ge=1)
    """Held-out prompts that are answered at each evaluation, greedily."""
    keep_best: bool = Field(False, exclude_if=lambda value: not value)
    """End with the weights of the best held-out reward, the start's included, and not of the last step."""
    patience: int = Field(3, ge=0, exclude_if=lambda value: value == 3)
    """Evaluations in a row below the start's held-out reward, or without its format, that end the training; 0: none do.
    Without `keep_best` that is an error."""
    ema_decay: float = Field(0.0, ge=0, lt=1)
    """Decay of the averaged weights that the run ends with; 0: no averaging."""
    weight_decay: float = Field(0.0, ge=0)
    """Of matrices; norms and biases have none."""

    @field_validator("advantage", "objective", "rollouts", mode="before")
    @classmethod
    def _name_or_settings(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @field_validator("critic", mode="before")
    @classmethod
    def _folder_or_settings(cls, value: Any) -> Any:
        return {"start": value} if isinstance(value, str | Path) else value

    @field_validator("rewards")
    @classmethod
    def _are_known(cls, rewards: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        _as_value_error(lambda: reward_terms(rewards))
        return with_checked_folders(rewards, info.context or {})

    @model_validator(mode="after")
    def _follow_size(self) -> PolicyTrainingConfig:
        rule = SIZES[self.size]
        factor = ADAPTER_RATE_FACTOR if self.trained == "adapter" else 1.0
        self.follow_size(STEPS, None, rule.batch_size, rule.learning_rate * factor)
        self.max_tokens = self.max_tokens or rule.max_tokens
        _as_value_error(lambda: self.advantage_term)
        _as_value_error(lambda: self.policy_term if self.fresh_objective is None else None)
        self._check_fresh_objective()
        self._check_overlong_and_refill()
        self._check_steps()
        self._check_kl_place()
        self._check_critic()
        self._check_placement()
        self._check_lagged()
        self._check_codebooks()
        speech = [term.name for term in self.reward_terms if term.speech]
        if speech and self.answer == "text":
            raise ValueError(
                f"rewards.{speech[0]}: scores speech, and answer is text: leave it out, or set answer: audio"
            )
        words = [term.name for term in self.reward_terms if term.words]
        if words and self.answer == "audio":
            raise ValueError(
                f"rewards.{words[0]}: scores words, and answer is audio: leave it out, or set answer: any"
            )
        if self.server and self.answer != "text":
            raise ValueError(
                f"rollouts: {self.server} samples words alone, and answer is {self.answer}: leave rollouts out, or set "
                "answer: text"
            )
        if self.kl is not None and self.kl.audio is not None and self.answer == "text":
            raise ValueError("kl.audio is set, and answer is text: leave it out, or set answer: any")
        may_hear = self.answer != "text" and any(map(is_import_path, self.rewards))
        if self.codec is not None and not speech and not may_hear:
            raise ValueError("codec is set, but no reward hears speech: leave it out")
        if self.reference is not None and not self.needs_reference:
            raise ValueError("reference is set, but kl is not, and the objective reads none: leave it out")
        if self.group_size == 1 and self.fresh_objective is None and self.compares_answers:
            raise ValueError(
                f"advantage: {self.advantage.name} compares the answers of a group: group_size is 1"
            )
        return self

    def _check_fresh_objective(self) -> None:
        fresh = self.fresh_objective
        if fresh is None:
            return
        unread = {
            "advantage": self.advantage != NamedChoice(name="grpo"),
            "kl": self.kl is not None,
            "correction": self.correction is not None,
            "entropy_weight": self.entropy_weight != 0,
            "top_entropy": self.top_entropy != 1,
            "codebooks": self.codebooks is not None,
        }
        if unread_keys := [key for key, is_set in unread.items() if is_set]:
            raise ValueError(f"objective: {fresh.name} does not read {unread_keys[0]}: leave it out")
        if fresh.holds_for_one_update and self.updates > 1:
            raise ValueError(
                f"objective: {fresh.term.name} needs figures of the whole step before each update: set updates: 1"
            )
        if fresh.kind == "pairs" and self.group_size == 1:
            raise ValueError(
                f"objective: {fresh.name} makes pairs of the answers of a group: group_size is 1"
            )

    def _check_critic(self) -> None:
        if self.reads_values and self.critic is None:
            raise ValueError(
                f"advantage: {self.advantage.name} reads the values of a critic: set critic ({{}}: the policy's model "
                "with a value head)"
            )
        if self.critic is None:
            return
        if not self.reads_values:
            raise ValueError(
                f"critic is set, but advantage: {self.advantage.name} reads none: leave it out, or set advantage: gae"
            )
        if self.critic.lora is not None and (self.critic.trained or self.trained) != "adapter":
            raise ValueError("critic.lora is set, but no adapter of the critic is trained: leave it out")

    def _check_placement(self) -> None:
        shares = {} if self.placement is None else self.placement.shares
        max_actors = {"rollout": required(self.batch_size), "reward": len(self.reward_terms)}
        of_what = {"rollout": "prompts", "reward": "rewards"}
        for role, count in max_actors.items():
            if role in shares and shares[role].actors > count:
                raise ValueError(
                    f"placement.{role}.actors: {shares[role].actors} actors for {count} {of_what[role]} of a step"
                )
        if "reference" in shares and not self.needs_reference:
            raise ValueError("placement.reference is set, but there is no reference: leave it out, or set kl")
        fresh = self.fresh_objective
        if "reference" in shares and fresh is not None and "kl_T" in fresh.term.needs.fields:
            raise ValueError(
                f"placement.reference: {fresh.term.name} reads the reference's whole distributions in every update, "
                "which do not travel: leave it with the ranks"
            )
        if "reference" in shares and self.refresh_reference is not None:
            raise ValueError(
                "placement.reference: a reference that is refreshed is with the ranks: leave it out"
            )
        if "rollout" in shares and self.server:
            raise ValueError(
                f"placement.rollout: rollouts: {self.server} samples in a process of its own: leave one of them out"
            )
        if "rollout" in shares and self.ahead:
            raise ValueError(
                "placement.rollout: ahead: 1 samples in a process of its own: leave one of them out"
            )

    def _check_codebooks(self) -> None:
        if self.codebooks is None:
            return
        if self.answer == "text":
            raise ValueError("codebooks is set, and answer is text: leave it out, or set answer: audio")
        settings = self.policy_term.settings
        if isinstance(settings, VESPOSettings) or getattr(settings, "level", "") in ("sequence", "product"):
            raise ValueError(
                f"codebooks: the ratios of objective: {self.objective.name} are those of whole answers, with all their "
                "codes: leave it out, or take an objective of tokens (grpo, dapo, gspo_token)"
            )

    def _check_lagged(self) -> None:
        if self.refresh_reference is not None and not self.needs_reference:
            raise ValueError(
                "refresh_reference is set, but kl is not, and the objective reads no reference: leave it out"
            )
        if self.ahead and self.fresh_objective is None and self.correction is None:
            raise ValueError(
                "ahead: 1 trains on answers of earlier weights: set correction, as {level: token, mode: truncate}"
            )

    def _check_steps(self) -> None:
        if not self.reads_steps:
            return
        if not any(term.scores_steps for term in self.reward_terms):
            raise ValueError(
                f"advantage: {self.advantage.name} reads rewards of steps: add `steps`, `step_model` or a function "
                "that returns ScoredSteps to rewards"
            )

    def _check_kl_place(self) -> None:
        is_penalty = self.kl is not None and self.kl.place == "reward"
        if is_penalty and not {"reward_A", "reward_T"} & set(self.advantage_term.reads):
            raise ValueError(
                f"kl.place: reward is not read by advantage: {self.advantage.name}: set kl.place: loss"
            )

    def _check_overlong_and_refill(self) -> None:
        if self.overlong is not None and "overlong" in self.rewards:
            raise ValueError("overlong is given twice, beside rewards and among them: leave one out")
        limits = self._answer_limits
        if self.overlong is not None and self.overlong.buffer > min(limits.values()):
            raise ValueError(
                f"overlong.buffer is {self.overlong.buffer}, and an answer has at most {min(limits.values())}: lower "
                f"it, or raise {' and '.join(limits)}"
            )
        if self.refill is not None and self.fresh_objective is None and not self.compares_answers:
            raise ValueError(
                f"refill: {self.advantage.name} does not compare the answers of a group: leave refill out"
            )

    @property
    def reward_terms(self) -> list[RewardTerm]:
        """The rewards with their checked settings, and the penalty on long answers where there is one."""
        rewards = self.rewards
        if self.overlong is not None:
            names = {"max_answer_tokens": "max_tokens", "max_frames": "max_frames"}
            limits = {names[key]: limit for key, limit in self._answer_limits.items()}
            rewards = {**rewards, "overlong": {**self.overlong.model_dump(), **limits}}
        return reward_terms(rewards)

    @property
    def _answer_limits(self) -> dict[str, int]:
        """The limits of an answer of the kind that is sampled, by the name of the setting."""
        limits = {} if self.answer == "audio" else {"max_answer_tokens": self.max_answer_tokens}
        return limits if self.answer == "text" else {**limits, "max_frames": self.max_frames}

    @property
    def advantage_term(self) -> AdvantageTerm:
        """The advantage with its checked settings."""
        return advantage_term(self.advantage.name, self.advantage.values)

    @property
    def policy_term(self) -> PolicyTerm:
        """The objective with its checked settings."""
        return policy_term(self.objective.name, self.objective.values)

    @property
    def fresh_objective(self) -> FreshObjective | None:
        """The objective on pairs or single answers; None: it is a policy gradient."""
        if self.objective.name not in SELECTIONS:
            return None
        return fresh_objective(self.objective.name, self.objective.values)

    @property
    def compares_answers(self) -> bool:
        """Whether the advantage of an answer depends on the other answers of its group."""
        reads = self.advantage_term.reads
        return "group_A" in reads and "greedy_reward_G" not in reads

    @property
    def learns_from_differences(self) -> bool:
        """Whether a group whose answers have equal rewards teaches nothing."""
        fresh = self.fresh_objective
        if fresh is not None:
            return fresh.kind == "pairs"
        return self.compares_answers and "reward_A" in self.advantage_term.reads

    @property
    def server(self) -> str | None:
        """The server that samples the answers, vllm or sglang; None: the family's engine, or a user's."""
        return self.rollouts.name if self.rollouts is not None and self.rollouts.is_server else None

    @property
    def reads_values(self) -> bool:
        """Whether the advantage reads the values of a critic."""
        return "value_T" in self.advantage_term.reads

    @property
    def needs_reference(self) -> bool:
        """Whether the KL or the objective reads a reference."""
        fresh = self.fresh_objective
        return self.kl is not None or (fresh is not None and fresh.term.needs.reference)

    @property
    def reads_steps(self) -> bool:
        """Whether the advantage reads rewards of steps."""
        settings = self.advantage_term.settings
        return "step_reward_S" in self.advantage_term.reads or (
            isinstance(settings, ReinforceSettings) and settings.steps
        )

    @property
    def reads_outcome(self) -> bool:
        """Whether rewards of whole answers count beside those of steps."""
        settings = self.advantage_term.settings
        return not isinstance(settings, ProcessAdvantageSettings) or settings.outcome

    def own_part_facts(self) -> list[str]:
        """Return a user's own engine, advantage, objective and KL controllers with the digests of their sources, for
        the fingerprint of a stage (`Stage.facts`)."""
        controllers = () if self.kl is None else (self.kl.controller, self.kl.audio)
        choices = (self.advantage, self.objective, *controllers)
        names = [choice.name for choice in choices if choice is not None]
        return [*([] if self.rollouts is None else self.rollouts.facts()), *plug_in_facts(names)]

    @property
    def weights(self) -> list[float] | None:
        """The weights of the sources; None: by their sizes."""
        return weights_of(self.samples)


def _as_value_error(check: Any) -> None:
    """Turn a `ConfigError` into the error that pydantic reports with its key."""
    try:
        check()
    except ConfigError as error:
        raise ValueError("; ".join(filter(None, [error.message, error.remedy]))) from None
