"""Reward functions by name: checked against prompts and policy before any work, and loaded as a recipe asks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from audiollm.data.records.sample import Sample
from audiollm.data.text.option_forms import option_form
from audiollm.errors import ConfigError
from audiollm.evaluate.report.store import RowStore
from audiollm.recipe.stages import required
from audiollm.rl.policy_gradient.reward_shaping import overlong_penalty
from audiollm.rl.rewards import models, speech, texts
from audiollm.rl.rewards.batch import RewardBatch, RewardFunction, RewardValue, SampledAnswer, each_answer
from audiollm.rl.rewards.catalog import RewardTerm, import_reward
from audiollm.rl.rewards.settings import (
    VERDICTS,
    AccuracySettings,
    CosineSettings,
    JudgeSettings,
    OverlongSettings,
)
from audiollm.rl.rewards.texts import accuracy

_BY_RULE: dict[str, Callable[[Any, Any], RewardValue]] = {
    "accuracy": texts.accuracy,
    "format": texts.form,
    "think": texts.think,
    "cosine": texts.cosine_length,
    "repetition": texts.repetition,
    "language": texts.language,
    "steps": texts.audible_steps,
    "length": speech.length_score,
}
_LOADED: dict[str, Callable[[Any], RewardFunction]] = {
    "reward_model": models.load_model_reward,
    "step_model": models.load_model_reward,
    "overlong": lambda settings: partial(overlong_scores, settings=settings),
    "words": lambda settings: each_answer(speech.words_reward(settings)),
    "voice": lambda settings: each_answer(speech.voice_reward(settings)),
    "quality": lambda settings: each_answer(speech.quality_reward()),
    "ends": lambda settings: each_answer(speech.ends_by_itself),
}


def load_rewards(
    terms: Sequence[RewardTerm], folder: Path | None = None, rank: int = 0
) -> dict[str, RewardFunction]:
    """Load the functions of all terms, by name.

    Args:
        folder: of the stage, where a judge's verdicts are kept unless its settings name a file; None: they are not.
        rank: of this process; each has a file of its own.

    Raises:
        ConfigError: a model or a judge is not there, or a user's function cannot be imported.
    """
    return {term.name: _load_reward(term, folder, rank) for term in terms}


def verdict_store(named: Path | None, folder: Path | None, rank: int) -> RowStore:
    """Open what a judge has said: in the named file or in the stage's folder; other ranks' and stages' files are read.

    Args:
        named: file of the first rank; the others have `NAME-1`, `NAME-2`, ... beside it.
    """
    if named is None and folder is None:
        return RowStore(None)
    first = named if named is not None else required(folder) / VERDICTS / "judge.jsonl"
    store_path = first.with_stem(f"{first.stem}-{rank}") if rank else first
    verdict_paths = {first, *first.parent.glob(f"{first.stem}-*{first.suffix}")}
    if folder is not None:
        verdict_paths |= set(folder.parent.glob(f"*/{VERDICTS}/*.jsonl"))
    return RowStore(
        store_path, sorted(path for path in verdict_paths if path != store_path and path.exists())
    )


def _load_reward(term: RewardTerm, folder: Path | None, rank: int) -> RewardFunction:
    if term.is_plug_in:
        function: RewardFunction = import_reward(term.name)
        return function
    if term.name in _BY_RULE:
        rule = _BY_RULE[term.name]
        return each_answer(lambda answer: rule(answer, term.settings))
    if isinstance(term.settings, JudgeSettings):
        return models.JudgeReward(term.settings, verdict_store(term.settings.store, folder, rank))
    return _LOADED[term.name](term.settings)


NAMED = 5
"""Prompts that an error names."""


def check_rewards(
    terms: Sequence[RewardTerm], samples: Sequence[Sample], speaks: bool, where: str = ""
) -> None:
    """Refuse rewards that cannot score the answers of this policy to these prompts.

    Args:
        speaks: whether the policy answers in speech.
        where: the recipe's place, for errors.

    Raises:
        ConfigError: a reward of speech for a policy that cannot speak, a user's function that cannot be imported, a
            prompt without answer key, with a key that is none of its options or that would not be right as an answer,
            or options that are there twice.
    """
    for sample in samples:
        _check_choices(sample)
    for term in terms:
        if term.speech and not speaks:
            raise ConfigError(
                f"rewards.{term.name}: scores speech, and the policy answers in words",
                where,
                "leave it out, or train a DualFFN that speaks",
            )
        if term.is_plug_in:
            import_reward(term.name)
        if term.needs_key:
            _check_keys(term, samples, where)


def _check_keys(term: RewardTerm, samples: Sequence[Sample], where: str) -> None:
    lacking = [sample.id for sample in samples if not SampledAnswer(sample, "", 0).key]
    if lacking:
        raise ConfigError(
            f"rewards.{term.name}: {len(lacking)} prompts have no answer key, the first is {lacking[0]!r}",
            where,
            "end the messages of each with the assistant's right answer",
        )
    settings = term.settings
    assert isinstance(settings, AccuracySettings | CosineSettings)
    for sample in samples if settings.match in ("auto", "letter") else ():
        answer = SampledAnswer(sample, "", 0)
        if (answer.choices or settings.match == "letter") and answer.key not in answer.choices:
            raise ConfigError(
                f"sample {sample.id!r}: its answer key {answer.key!r} is none of its options",
                where,
                "give the options in metadata.choices, and one of them as the key",
            )
    unread = [sample for sample in samples if not _is_key_right(sample, settings)]
    if unread:
        first = ", ".join(
            f"{sample.id!r} ({SampledAnswer(sample, '', 0).key!r})" for sample in unread[:NAMED]
        )
        raise ConfigError(
            f"rewards.{term.name}: of {len(unread)} prompts the answer key, given as an answer, would not be right: "
            f"{first}{', ...' if len(unread) > NAMED else ''}",
            where,
            "mend the keys, remove the prompts, or compare in another way by `match`",
        )


def _is_key_right(sample: Sample, settings: AccuracySettings | CosineSettings) -> bool:
    """Whether an answer that is the key, in the form that the prompt wants, earns `accuracy`."""
    key = SampledAnswer(sample, "", 0)
    form = key.form if settings.form == "prompt" else settings.form
    reply = {"tags": f"<answer>{key.key}</answer>", "boxed": rf"\boxed{{{key.key}}}", "free": key.key}[form]
    tolerance = getattr(settings, "tolerance", AccuracySettings().tolerance)
    compared = AccuracySettings(match=settings.match, form=form, tolerance=tolerance)
    return accuracy(SampledAnswer(sample, reply or "", 0), compared) == 1.0


def _check_choices(sample: Sample) -> None:
    choices = SampledAnswer(sample, "", 0).choices
    form = option_form(choices)
    counts = Counter(form(choice) or choice for choice in choices)
    twice = [choice for choice, count in counts.items() if count > 1]
    if twice:
        raise ConfigError(
            f"sample {sample.id!r}: the option {twice[0]!r} is there twice",
            "metadata.choices",
            "remove one of them",
        )


def overlong_scores(batch: RewardBatch, settings: OverlongSettings) -> list[float | None]:
    """DAPO's penalty on answers close to their limit, from 0 down to -1; see `overlong_penalty`.

    Text is counted in tokens and speech in frames; of an answer with both, the larger penalty counts.
    """
    frames = [0 if answer.codes_KT is None else answer.codes_KT.shape[1] for answer in batch]
    words = [answer.num_tokens - num_frames for answer, num_frames in zip(batch, frames, strict=True)]
    penalty_A = torch.zeros(len(batch), dtype=torch.float64)
    for lengths, limit in ((words, settings.max_tokens), (frames, settings.max_frames)):
        if limit is not None:
            limit_penalty_A = overlong_penalty(
                torch.tensor(lengths, dtype=torch.float64), limit, settings.buffer
            )
            penalty_A = torch.minimum(penalty_A, limit_penalty_A)
    return [float(value) for value in penalty_A]
