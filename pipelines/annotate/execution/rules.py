"""Reasons to drop a segment: thresholds by name, and the rules that compare measured values with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from pipelines.annotate.step import Value

Operation = Literal[">=", "<=", "in", "is"]


class Thresholds(BaseModel):
    """Limits that a kept segment must meet; null: no limit. A preset sets them, and each may be set by hand."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    min_duration_s: float | None = Field(None, ge=0)
    max_duration_s: float | None = Field(None, ge=1)
    """Longest segment in seconds; longer speech is cut to it."""
    max_overlap_share: float | None = Field(None, ge=0, le=1)
    """Largest share of the segment in which several speakers speak at once."""
    min_speech_share: float | None = Field(None, ge=0, le=1)
    """Smallest share of the segment in which somebody speaks."""
    min_sample_rate: int | None = Field(None, ge=1)
    min_level_dbfs: float | None = None
    max_clipped_share: float | None = Field(None, ge=0, le=1)
    """The largest share of samples at full scale."""
    min_dnsmos_sig: float | None = None
    min_dnsmos_bak: float | None = None
    min_dnsmos_ovr: float | None = None
    min_snr_db: float | None = None
    min_bandwidth_hz: float | None = None
    max_rt60_s: float | None = None
    min_utmos: float | None = None
    min_sigmos_noise: float | None = None
    min_sigmos_ovrl: float | None = None
    max_pairwise_wer: float | None = Field(None, ge=0)
    """Largest mean word error rate between recognizers; needs two of them."""
    min_vote_share: float | None = Field(None, ge=0, le=1)
    """Smallest mean share of recognizers behind a word of the consensus; needs two of them."""
    languages: list[str] | None = None
    """Allowed languages, as ISO 639-1 codes."""
    min_language_probability: float | None = Field(None, ge=0, le=1)
    min_characters: int | None = Field(None, ge=0)
    min_unique_word_share: float | None = Field(None, ge=0, le=1)
    max_word_characters: int | None = Field(None, ge=1)
    max_longest_ratio: float | None = Field(None, ge=1)
    """Largest ratio of the longest word's length to that of the second longest."""
    max_ngram_count: int | None = Field(None, ge=1)
    """Most occurrences of the most frequent sequence of ten words."""
    max_longest_loop: int | None = Field(None, ge=1)
    """Most repetitions in a row of a word or a group of words."""
    max_characters_per_s: float | None = Field(None, gt=0)
    no_known_hallucination: bool | None = None
    """True: drop texts that recognizers are known to make up."""
    min_text_speech_share: float | None = Field(0.2, ge=0, le=1)
    """Smallest share of the segment with speech for a recognized text to be trusted. Where this threshold or one below
    is not met, the segment is kept without a text."""
    max_text_other_sound: float | None = Field(0.5, ge=0, le=1)
    """Largest score of a sound event where no kind of speech is among the tags."""
    no_foreign_text: bool | None = True
    """True: refuse the text of a recognizer of another language than the one that is given, or of which another
    recognizer is sure."""
    min_text_language_probability: float | None = Field(0.5, ge=0, le=1)
    """Smallest probability that a recognizer gives to its language."""
    min_pocketsphinx_confidence: float | None = Field(0.6, ge=0, le=1)
    """Smallest mean posterior probability of the words; open vocabulary."""
    min_pocketsphinx_words: int | None = Field(3, ge=1)
    """Fewest words of a trusted text: fewer cannot tell speech from other sounds; open vocabulary."""
    min_pocketsphinx_fit: float | None = -3.7
    """Smallest log-likelihood ratio of the words to the best acoustic units, in nats per frame; open vocabulary."""
    min_grammar_fit: float | None = -4.0
    """Smallest fit of pocketsphinx's text where it hears with a grammar."""
    min_token_confidence: float | None = Field(0.37, ge=0, le=1)
    """Smallest mean probability of the tokens of faster_whisper, transformers and endpoints, where they tell it."""
    min_text_vote_share: float | None = Field(0.6, ge=0, le=1)
    """Smallest mean share of recognizers behind a word; 0.5 for two recognizers without a common word."""


@dataclass(frozen=True)
class Rule:
    """One threshold against one measured value.

    Args:
        threshold: its name in `Thresholds`.
        step: whose value it reads; `segment` for what the segment itself tells.
        value: where the number is below that step's value, by dots.
        title: what is wrong with a segment that breaks it; it is counted by this.
        sounds: it holds for segments without speech, too.
        option: the setting of the step without which there is no such value.
        of_text: it refuses a recognized text (`trust.py`), and the segment stays.
    """

    threshold: str
    step: str
    value: str
    operation: Operation
    title: str
    unit: str = ""
    sounds: bool = False
    option: str = ""
    of_text: bool = False


RULES: tuple[Rule, ...] = (
    Rule("min_duration_s", "segment", "duration_s", ">=", "too short", " s", sounds=True),
    Rule("max_duration_s", "segment", "duration_s", "<=", "too long", " s", sounds=True),
    Rule("max_overlap_share", "segment", "overlap_share", "<=", "several speakers at once"),
    Rule("min_speech_share", "segment", "speech_share", ">=", "too little speech"),
    Rule("min_sample_rate", "probe", "sample_rate", ">=", "sample rate too low", " Hz", sounds=True),
    Rule("min_level_dbfs", "signal", "level_dbfs", ">=", "too quiet", " dBFS", sounds=True),
    Rule("max_clipped_share", "signal", "clipped_share", "<=", "clipped", " of the samples", sounds=True),
    Rule("min_dnsmos_sig", "quality", "dnsmos.sig", ">=", "speech sounds bad", option="dnsmos"),
    Rule("min_dnsmos_bak", "quality", "dnsmos.bak", ">=", "background sounds bad", option="dnsmos"),
    Rule("min_dnsmos_ovr", "quality", "dnsmos.ovr", ">=", "sounds bad", option="dnsmos"),
    Rule("min_snr_db", "quality", "snr_db", ">=", "too noisy", " dB", option="snr"),
    Rule("min_bandwidth_hz", "quality", "bandwidth_hz", ">=", "bandwidth too low", " Hz", option="bandwidth"),
    Rule("max_rt60_s", "quality", "rt60_s", "<=", "too reverberant", " s", option="reverberation"),
    Rule("min_utmos", "quality", "utmos", ">=", "sounds unnatural (UTMOS)", option="utmos"),
    Rule("min_sigmos_noise", "quality", "sigmos.noise", ">=", "too noisy (SIGMOS)", option="sigmos"),
    Rule("min_sigmos_ovrl", "quality", "sigmos.ovrl", ">=", "sounds bad (SIGMOS)", option="sigmos"),
    Rule("max_pairwise_wer", "consensus", "pairwise_wer", "<=", "recognizers disagree"),
    Rule("min_vote_share", "consensus", "vote_share", ">=", "words without a majority"),
    Rule("languages", "language", "language", "in", "other language"),
    Rule("min_language_probability", "language", "probability", ">=", "language in doubt"),
    Rule("min_characters", "repetition", "characters", ">=", "too little text", " characters"),
    Rule("min_unique_word_share", "repetition", "unique_word_share", ">=", "words repeat"),
    Rule("max_word_characters", "repetition", "longest_word", "<=", "a word too long", " characters"),
    Rule("max_longest_ratio", "repetition", "longest_ratio", "<=", "one word stands out by length"),
    Rule("max_ngram_count", "repetition", "max_ngram_count", "<=", "phrases repeat", " times"),
    Rule("max_longest_loop", "repetition", "longest_loop", "<=", "words in a loop", " times"),
    Rule("max_characters_per_s", "repetition", "characters_per_s", "<=", "more text than can be said", " /s"),
    Rule("no_known_hallucination", "repetition", "phrase", "is", "made up by a recognizer"),
    Rule("no_foreign_text", "text", "foreign", "is", "not the recognizer's language", of_text=True),
    Rule("min_text_speech_share", "text", "speech_share", ">=", "text on too little speech", of_text=True),
    Rule("max_text_other_sound", "text", "other_sound", "<=", "another sound than speech", of_text=True),
    Rule(
        "min_text_language_probability", "text", "language_probability", ">=", "text of a language in doubt",
        of_text=True,
    ),
    Rule("min_pocketsphinx_words", "text", "pocketsphinx_words", ">=", "too few words to judge", of_text=True),
    Rule("min_pocketsphinx_confidence", "text", "pocketsphinx_confidence", ">=", "unsure words", of_text=True),
    Rule(
        "min_pocketsphinx_fit", "text", "pocketsphinx_fit", ">=", "words that do not fit the sound",
        " nats per frame", of_text=True,
    ),
    Rule(
        "min_grammar_fit", "text", "grammar_fit", ">=", "not one of the grammar's texts", " nats per frame",
        of_text=True,
    ),
    Rule("min_token_confidence", "text", "token_confidence", ">=", "unsure words of a model", of_text=True),
    Rule("min_text_vote_share", "text", "vote_share", ">=", "texts that disagree", of_text=True),
)  # fmt: skip


@dataclass(frozen=True)
class Drop:
    """Why a segment is left out."""

    step: str
    rule: str
    kind: str
    reason: str
    value: Any = None
    threshold: Any = None

    def as_row(self) -> dict[str, Any]:
        """Return the drop as a dictionary of the rows."""
        return {
            "step": self.step,
            "rule": self.rule,
            "kind": self.kind,
            "value": self.value,
            "threshold": self.threshold,
            "reason": self.reason,
        }


def first_broken(
    rules: tuple[Rule, ...], thresholds: Thresholds, step: str, value: Value, kind: str
) -> Drop | None:
    """The first rule about a step's value that a segment of this kind breaks. A missing value breaks none."""
    for rule in rules:
        limit = getattr(thresholds, rule.threshold)
        if rule.step != step or limit is None or (kind == "sound" and not rule.sounds):
            continue
        found = lookup(value, rule.value)
        if found is not None and not keeps(found, rule.operation, limit):
            return Drop(step, rule.threshold, rule.title, _reason(rule, found, limit), found, limit)
    return None


def lookup(value: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path; None where there is nothing."""
    found: Any = value
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def keeps(found: Any, operation: Operation, limit: Any) -> bool:
    """Whether a value meets its limit."""
    if operation == ">=":
        return bool(found >= limit)
    if operation == "<=":
        return bool(found <= limit + 1e-6)
    if operation == "in":
        return found in limit
    return not limit  # a phrase was found


def _reason(rule: Rule, found: Any, limit: Any) -> str:
    shown = f"{found:.4g}" if isinstance(found, (int, float)) else str(found)
    if rule.operation == "is":
        return shown if rule.of_text else f"a known phrase: {shown}"
    bound = ", ".join(limit) if isinstance(limit, list) else f"{limit}{rule.unit}"
    return f"{shown}{rule.unit}, the limit is {bound}"
