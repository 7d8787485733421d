"""Rewards of answers in words, by rule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from audiollm.data.text.forms import recognition_form
from audiollm.data.text.languages import is_written_in, language_code, language_of
from audiollm.data.text.words import words_of
from audiollm.evaluate.listening.answer_parts import answer_in_form
from audiollm.rl.rewards import settings as s
from audiollm.rl.rewards.batch import SampledAnswer, ScoredStep, thought_steps
from audiollm.rl.rewards.matching import is_right


def accuracy(answer: SampledAnswer, settings: s.AccuracySettings) -> float | None:
    """1 where the answer is the key, and where the prompt wants it, else 0; None without a key."""
    if answer.key is None:
        return None
    form = answer.form if settings.form == "prompt" else settings.form
    reply = answer_in_form(answer.text, form)
    if reply is None:
        return 0.0
    is_free = form == "free"
    language = answer.sample.language
    return float(
        is_right(reply, answer.key, answer.choices, settings.match, settings.tolerance, is_free, language)
    )


def form(answer: SampledAnswer, settings: s.FormatSettings) -> float:
    """1 where each tag stands once, in order and around at least a word, with nothing before or behind them, else 0.

    Ke-Omni-R's pattern `<think>.*?</think>\\s*<answer>.*?</answer>` also accepts doubled tags.
    """
    parts = answer.parts
    return float(parts.thinks_well if settings.think else parts.answers_well)


def think(answer: SampledAnswer, settings: s.ThinkSettings) -> float:
    """1 where the thought is closed, has between 1 and `max_words` words, and the answer comes to an end, else 0."""
    parts = answer.parts
    is_thought = parts.has_thought and parts.thought_words <= settings.max_words
    return float(is_thought and not answer.is_truncated)


def cosine_length(answer: SampledAnswer, settings: s.CosineSettings) -> float | None:
    """long + (short - long) / 2 * (1 + cos(pi * L / L_max)) for an answer of L tokens, right or wrong.

    Source: arXiv 2502.03373.
    """
    right = accuracy(answer, s.AccuracySettings(match=settings.match, form=settings.form))
    if right is None:
        return None
    short, long = (
        (settings.right_short, settings.right_long) if right else (settings.wrong_short, settings.wrong_long)
    )
    share = min(1.0, answer.num_tokens / settings.max_tokens)
    return long + (short - long) / 2 * (1 + math.cos(math.pi * share))


def repetition(answer: SampledAnswer, settings: s.RepetitionSettings) -> float:
    """max_penalty * (1 - distinct n-grams / n-grams) of the words (arXiv 2502.03373); 0 for fewer than n words."""
    words = words_of(answer.text)
    count = len(words) - settings.ngram + 1
    if count < 1:
        return 0.0
    distinct = {tuple(words[start : start + settings.ngram]) for start in range(count)}
    return settings.max_penalty * (1 - len(distinct) / count)


def language(answer: SampledAnswer, settings: s.LanguageSettings) -> float:
    """1 where thought and answer are in the script of the language asked for, else 0.

    The script of most words counts, so that a foreign word in a thought changes nothing. Han without kana is Chinese,
    not Japanese; other languages of one script (English and German) are not told apart.
    """
    parts = answer.parts
    target = language_code(settings.language) or language_code(answer.sample.language)
    target = target or language_of(" ".join(answer.sample.texts("user")))
    return float(is_written_in(f"{parts.thought} {parts.answer}", target))


def scored_steps(answer: SampledAnswer, settings: s.StepsSettings) -> list[ScoredStep]:
    """Score each step by what it names that is heard and that no step before it has named.

    The score is 1 for any such name, else 0; with `settings.names`, the share of these among all names in the step.
    """
    unnamed = {recognition_form(text) for text in _audible_texts(answer, settings)} - {""}
    names = {recognition_form(text) for text in settings.names} - {""} | unnamed
    steps = []
    for step in thought_steps(answer, settings.split):
        step_words = f" {recognition_form(step.text)} "
        named = {name for name in names if f" {name} " in step_words}
        right = named & unnamed
        unnamed -= right
        among = len(named) if settings.names else 1
        steps.append(ScoredStep(step.text, min(1.0, len(right) / max(1, among)), step.end))
    return steps


def audible_steps(answer: SampledAnswer, settings: s.StepsSettings) -> list[ScoredStep] | None:
    """The thought's scored steps; without a thought, one step of score 0; None where nothing is told to be heard."""
    if not _audible_texts(answer, settings):
        return None
    return scored_steps(answer, settings) or [ScoredStep("", 0.0)]


def _audible_texts(answer: SampledAnswer, settings: s.StepsSettings) -> list[str]:
    """What can be heard by the metadata and, where the settings say so, the right answer."""
    audible = metadata_texts(answer, settings.keys)
    return [*audible, answer.key] if settings.answer and answer.key else audible


def metadata_texts(answer: SampledAnswer, keys: Sequence[str]) -> list[str]:
    """What the metadata says can be heard."""
    texts: list[str] = []
    for key in keys:
        value: Any = answer.sample.metadata.get(key)
        texts += [str(entry) for entry in value] if isinstance(value, list | tuple) else []
        texts += [str(value)] if isinstance(value, str | int | float) else []
    return texts
