"""Trust in recognized text: the evidence for each recognizer's text, and the choice of the text to keep.

Figures by name, each where it was measured; the rules of the step `text` in `rules.py` compare them:

    speech_share               of the segment, by voice activity
    other_sound                score of the likeliest sound event where no kind of speech is among the tags
    foreign                    "en, spoken fr": the recognizer's language is not the one that is given or told
    language_probability       how sure the recognizer is of its language
    pocketsphinx_words         their number (open vocabulary)
    pocketsphinx_confidence    mean posterior probability of its words (open vocabulary)
    pocketsphinx_fit           how well the sound fits its words, in nats per frame (open vocabulary)
    grammar_fit                the same with a grammar, which has no posterior probabilities
    loop                       why the text of a model is a loop (`audiollm.data.text.repeated_words`)
    compression_ratio          how far zlib shortens the text of a model: loops are shortened more than speech
    no_speech_probability      Whisper's probability that nobody speaks
    mean_log_probability       of the tokens of a model that tells it, in nats
    token_confidence           mean probability of the tokens of a model that tells it
    vote_share                 mean share of recognizers behind a word; of two and more recognizers
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from audiollm.data.text.repeated_words import loop_reason
from pipelines.annotate.execution.rules import RULES, Thresholds, first_broken
from pipelines.annotate.steps.language import base_code
from pipelines.steps.rules import Drop
from pipelines.steps.step import Value

STEP = "text"
"""Name under which the rules find the evidence and rows hold it."""
NO_WORDS = Drop("recognizers", "", "no words recognized", "")
_SPEECH_LABELS = (
    "speech", "conversation", "narration", "monologue", "babbling", "whispering", "shout", "yell", "chatter"
)  # fmt: skip
"""Parts of the names of AudioSet's classes in which somebody speaks."""
_SURE_OF_LANGUAGE = 0.8
"""Probability from which a recognizer's language counts against a text in another language."""


class Judged(NamedTuple):
    """The kept text of a segment, or the reason why there is none.

    Args:
        source: the recognizer's name, or `consensus`; None without a text.
        figures: those of the text that is kept, else of the first that is refused.
        language: of the text that is kept, as its recognizer tells it.
    """

    text: str
    source: str | None
    figures: Value
    refused: Drop | None
    language: str | None = None


def judge_text(
    values: Mapping[str, Value],
    kinds: Mapping[str, str],
    language: str | None,
    speech_share: float,
    thresholds: Thresholds,
    duration_s: float = math.inf,
) -> Judged:
    """The text of the recognizers that are trusted: of one alone its own, of several their consensus.

    Args:
        values: of the steps so far, with `consensus`.
        kinds: recognizer -> its kind, in their order.
        language: that is given with the recording.
        duration_s: length of the segment: more text than it can hold is a loop.
    """
    names = [name for name in kinds if name in values]
    expected_languages = {name: _expect_language(name, names, values, language) for name in names}
    figures = {
        name: _collect_trust_figures(
            kinds[name], values[name], values, expected_languages[name], speech_share, duration_s
        )
        for name in names
    }
    refused = {name: _broken(figures[name], thresholds) for name in names if values[name]["text"]}
    trusted = [name for name in names if refused.get(name) is None]
    if not any(values[name]["text"] for name in trusted):
        first = next((name for name, drop in refused.items() if drop is not None), None)
        return Judged("", None, figures[first or names[0]], refused[first] if first else NO_WORDS)
    if len(trusted) == 1:
        value = values[trusted[0]]
        return Judged(value["text"], trusted[0], figures[trusted[0]], None, value["language"])
    shared = {"vote_share": values["consensus"]["vote_share"]}
    drop = _broken(shared, thresholds) if values["consensus"]["text"] else NO_WORDS
    if drop:
        return Judged("", None, shared, drop)
    surest = max(trusted, key=lambda name: values[name]["language_probability"] or 0.0)
    return Judged(values["consensus"]["text"], "consensus", shared, None, values[surest]["language"])


def _broken(figures: Value, thresholds: Thresholds) -> Drop | None:
    return first_broken(RULES, thresholds, STEP, figures, "speech")


def _collect_trust_figures(
    kind: str,
    value: Value,
    values: Mapping[str, Value],
    expected_language: str | None,
    speech_share: float,
    duration_s: float,
) -> Value:
    language = base_code(value["language"]) if value["language"] else None
    figures: Value = {
        "speech_share": speech_share,
        "other_sound": _other_sound(values.get("events") or {}),
        "foreign": f"{language}, spoken {expected_language}"
        if language and expected_language and language != expected_language
        else None,
        "language_probability": value["language_probability"],
    }
    if kind != "pocketsphinx":
        figures |= _signals(value, duration_s)
    elif value["confidence"] is None:
        figures["grammar_fit"] = value["acoustic_fit"]
    else:
        figures["pocketsphinx_words"] = len(value["words"])
        figures["pocketsphinx_confidence"] = value["confidence"]
        figures["pocketsphinx_fit"] = value["acoustic_fit"]
    return {name: figure for name, figure in figures.items() if figure is not None}


def _signals(value: Value, duration_s: float) -> Value:
    """A model's own signals of doubt; the mean log probability is more than the mean confidence of words."""
    log_probability = value["mean_log_probability"]
    return {
        "loop": loop_reason(value["text"], duration_s),
        "compression_ratio": value["compression_ratio"],
        "no_speech_probability": value["no_speech_probability"],
        "mean_log_probability": log_probability,
        "token_confidence": value["confidence"] if log_probability is None else None,
    }


def _expect_language(
    name: str, names: Sequence[str], values: Mapping[str, Value], given_language: str | None
) -> str | None:
    """The given language, else that of which another recognizer is sure."""
    if given_language:
        return base_code(given_language)
    other_values = [values[other_name] for other_name in names if other_name != name]
    sure = [value for value in other_values if (value["language_probability"] or 0.0) >= _SURE_OF_LANGUAGE]
    likeliest = max(sure, key=lambda value: value["language_probability"], default=None)
    return base_code(likeliest["language"]) if likeliest and likeliest["language"] else None


def _other_sound(events: Mapping[str, Any]) -> float | None:
    """None where no events were measured, and where somebody speaks among them."""
    tags = events.get("tags") or ()
    if any(speech_label in tag["label"].lower() for tag in tags for speech_label in _SPEECH_LABELS):
        return None
    return max((tag["score"] for tag in tags), default=None)
