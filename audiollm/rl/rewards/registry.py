"""Reward functions by name, loaded as a recipe asks for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from audiollm.evaluate.report.store import RowStore
from audiollm.recipe.stages import required
from audiollm.rl.rewards import models, speech, texts
from audiollm.rl.rewards.batch import RewardFunction, RewardValue, each_answer
from audiollm.rl.rewards.catalog import RewardTerm, import_reward
from audiollm.rl.rewards.lengths import overlong_scores
from audiollm.rl.rewards.settings import VERDICTS, JudgeSettings

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
        return each_answer(partial(_ruled, rule, term.settings))
    if isinstance(term.settings, JudgeSettings):
        return models.JudgeReward(term.settings, verdict_store(term.settings.store, folder, rank))
    return _LOADED[term.name](term.settings)


def _ruled(rule: Callable[[Any, Any], RewardValue], settings: Any, answer: Any) -> RewardValue:
    return rule(answer, settings)
