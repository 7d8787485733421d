"""Reward functions by name, loaded as a recipe asks for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from audiollm.evaluate.report.store import RowStore
from audiollm.rl.rewards import models, speech, texts
from audiollm.rl.rewards.batch import RewardFunction, RewardValue, each_answer
from audiollm.rl.rewards.catalog import RewardTerm, import_reward
from audiollm.rl.rewards.lengths import overlong_scores

_BY_RULE: dict[str, Callable[[Any, Any], RewardValue]] = {
    "accuracy": texts.accuracy,
    "format": texts.form,
    "think": texts.think,
    "cosine": texts.cosine_length,
    "repetition": texts.repetition,
    "language": texts.language,
    "steps": texts.heard_steps,
    "length": speech.length_score,
}
_LOADED: dict[str, Callable[[Any], RewardFunction]] = {
    "reward_model": models.load_model_reward,
    "step_model": models.load_model_reward,
    "overlong": lambda settings: partial(overlong_scores, settings=settings),
    "judge": lambda settings: models.JudgeReward(settings, RowStore(settings.store)),
    "words": lambda settings: each_answer(speech.words_reward(settings)),
    "voice": lambda settings: each_answer(speech.voice_reward(settings)),
    "quality": lambda settings: each_answer(speech.quality_reward()),
    "ends": lambda settings: each_answer(speech.ends_by_itself),
}


def load_rewards(terms: Sequence[RewardTerm]) -> dict[str, RewardFunction]:
    """Load the functions of all terms, by name.

    Raises:
        ConfigError: a model or a judge is not there, or a user's function cannot be imported.
    """
    return {term.name: _load(term) for term in terms}


def _load(term: RewardTerm) -> RewardFunction:
    if term.is_plug_in:
        function: RewardFunction = import_reward(term.name)
        return function
    if term.name in _BY_RULE:
        rule = _BY_RULE[term.name]
        return each_answer(partial(_ruled, rule, term.settings))
    return _LOADED[term.name](term.settings)


def _ruled(rule: Callable[[Any, Any], RewardValue], settings: Any, answer: Any) -> RewardValue:
    return rule(answer, settings)
