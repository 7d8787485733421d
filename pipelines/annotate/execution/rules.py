"""Reasons to drop a segment: thresholds by name, rules that compare measured values with them, and presets of both.

What the published pipelines state is in the presets; where a model of theirs is not at hand, the preset asks for it by
name and does not quietly go on without. Emilia's and Curator's own diarizers are pretrained: `--speakers
pyannote=FOLDER` and `sortformer=FILE.nemo`; without, the step `speakers` tells voices apart by itself.

Sources: Emilia: open-mmlab/Amphion, preprocessors/Emilia (30 s, DNSMOS OVRL 3, language 0.8, 1.5 interquartile ranges);
Granary: NVIDIA/NeMo-speech-data-processor, dataset_configs/multilingual/granary, and arXiv 2505.13404; Curator:
NVIDIA-NeMo/Curator, tutorials and advanced_pipelines of its audio stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from pipelines.steps.rules import Drop, Rule, find_broken
from pipelines.steps.step import Value


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
    min_quality_score: float | None = None
    """Smallest score of `steps.quality.scorer`."""
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
    no_text_loop: bool | None = True
    """True: refuse a text in which a model repeats itself, or that is longer than the segment can hold."""
    max_text_compression_ratio: float | None = Field(2.4, gt=0)
    """Largest ratio of a model's text to the same text compressed by zlib (Whisper's own limit)."""
    max_no_speech_probability: float | None = Field(0.2, ge=0, le=1)
    """Largest probability of a Whisper that nobody speaks. Whisper's own limit is 0.6; over barks and tones of a second
    Whisper base gives 0.42 to 0.85, over speech up to 0.12 (the half of the recordings on which it was chosen)."""
    min_mean_log_probability: float | None = -1.0
    """Smallest mean log probability of a model's tokens, in nats (Whisper's own limit)."""
    min_text_vote_share: float | None = Field(0.6, ge=0, le=1)
    """Smallest mean share of recognizers behind a word; 0.5 for two recognizers without a common word."""


@dataclass(frozen=True)
class AnnotationRule(Rule):
    """A rule about segments.

    Args:
        sounds: it holds for segments without speech, too.
        of_text: it refuses a recognized text (`trust.py`), and the segment stays.
    """

    sounds: bool = False
    of_text: bool = False

    def reason(self, value: Any, limit: Any) -> str:
        explanation = super().reason(value, limit)
        return (
            f"a known phrase: {explanation}" if self.operation == "is" and not self.of_text else explanation
        )

    def as_row(self, limit: Any) -> dict[str, Any]:
        return {**super().as_row(limit), "sounds": self.sounds, "of_text": self.of_text}


RULES: tuple[AnnotationRule, ...] = (
    AnnotationRule("min_duration_s", "segment", "duration_s", ">=", "too short", " s", sounds=True),
    AnnotationRule("max_duration_s", "segment", "duration_s", "<=", "too long", " s", sounds=True),
    AnnotationRule("max_overlap_share", "segment", "overlap_share", "<=", "several speakers at once"),
    AnnotationRule("min_speech_share", "segment", "speech_share", ">=", "too little speech"),
    AnnotationRule("min_sample_rate", "probe", "sample_rate", ">=", "sample rate too low", " Hz", sounds=True),
    AnnotationRule("min_level_dbfs", "signal", "level_dbfs", ">=", "too quiet", " dBFS", sounds=True),
    AnnotationRule("max_clipped_share", "signal", "clipped_share", "<=", "clipped", " of the samples", sounds=True),
    AnnotationRule("min_dnsmos_sig", "quality", "dnsmos.sig", ">=", "speech sounds bad", option="dnsmos"),
    AnnotationRule("min_dnsmos_bak", "quality", "dnsmos.bak", ">=", "background sounds bad", option="dnsmos"),
    AnnotationRule("min_dnsmos_ovr", "quality", "dnsmos.ovr", ">=", "sounds bad", option="dnsmos"),
    AnnotationRule("min_snr_db", "quality", "snr_db", ">=", "too noisy", " dB", option="snr"),
    AnnotationRule("min_bandwidth_hz", "quality", "bandwidth_hz", ">=", "bandwidth too low", " Hz", option="bandwidth"),
    AnnotationRule("max_rt60_s", "quality", "rt60_s", "<=", "too reverberant", " s", option="reverberation"),
    AnnotationRule("min_utmos", "quality", "utmos", ">=", "sounds unnatural (UTMOS)", option="utmos"),
    AnnotationRule("min_quality_score", "quality", "score", ">=", "sounds bad (scorer)", option="scorer"),
    AnnotationRule("min_sigmos_noise", "quality", "sigmos.noise", ">=", "too noisy (SIGMOS)", option="sigmos"),
    AnnotationRule("min_sigmos_ovrl", "quality", "sigmos.ovrl", ">=", "sounds bad (SIGMOS)", option="sigmos"),
    AnnotationRule("max_pairwise_wer", "consensus", "pairwise_wer", "<=", "recognizers disagree"),
    AnnotationRule("min_vote_share", "consensus", "vote_share", ">=", "words without a majority"),
    AnnotationRule("languages", "language", "language", "in", "other language"),
    AnnotationRule("min_language_probability", "language", "probability", ">=", "language in doubt"),
    AnnotationRule("min_characters", "repetition", "characters", ">=", "too little text", " characters"),
    AnnotationRule("min_unique_word_share", "repetition", "unique_word_share", ">=", "words repeat"),
    AnnotationRule("max_word_characters", "repetition", "longest_word", "<=", "a word too long", " characters"),
    AnnotationRule("max_longest_ratio", "repetition", "longest_ratio", "<=", "one word stands out by length"),
    AnnotationRule("max_ngram_count", "repetition", "max_ngram_count", "<=", "phrases repeat", " times"),
    AnnotationRule("max_longest_loop", "repetition", "longest_loop", "<=", "words in a loop", " times"),
    AnnotationRule("max_characters_per_s", "repetition", "characters_per_s", "<=", "more text than can be said", " /s"),
    AnnotationRule("no_known_hallucination", "repetition", "phrase", "is", "made up by a recognizer"),
    AnnotationRule("no_foreign_text", "text", "foreign", "is", "not the recognizer's language", of_text=True),
    AnnotationRule("min_text_speech_share", "text", "speech_share", ">=", "text on too little speech", of_text=True),
    AnnotationRule("max_text_other_sound", "text", "other_sound", "<=", "another sound than speech", of_text=True),
    AnnotationRule(
        "min_text_language_probability", "text", "language_probability", ">=", "text of a language in doubt",
        of_text=True,
    ),
    AnnotationRule(
        "min_pocketsphinx_words", "text", "pocketsphinx_words", ">=", "too few words to judge", of_text=True
    ),
    AnnotationRule(
        "min_pocketsphinx_confidence", "text", "pocketsphinx_confidence", ">=", "unsure words", of_text=True
    ),
    AnnotationRule(
        "min_pocketsphinx_fit", "text", "pocketsphinx_fit", ">=", "words that do not fit the sound",
        " nats per frame", of_text=True,
    ),
    AnnotationRule(
        "min_grammar_fit", "text", "grammar_fit", ">=", "not one of the grammar's texts", " nats per frame",
        of_text=True,
    ),
    AnnotationRule("no_text_loop", "text", "loop", "is", "a model in a loop", of_text=True),
    AnnotationRule(
        "max_text_compression_ratio", "text", "compression_ratio", "<=", "a model in a loop", of_text=True
    ),
    AnnotationRule(
        "max_no_speech_probability", "text", "no_speech_probability", "<=", "a model that hears no speech", of_text=True
    ),
    AnnotationRule(
        "min_mean_log_probability", "text", "mean_log_probability", ">=", "unsure words of a model", " nats",
        of_text=True,
    ),
    AnnotationRule("min_token_confidence", "text", "token_confidence", ">=", "unsure words of a model", of_text=True),
    AnnotationRule("min_text_vote_share", "text", "vote_share", ">=", "texts that disagree", of_text=True),
)  # fmt: skip


def first_broken(
    rules: Sequence[AnnotationRule], thresholds: Thresholds, step: str, value: Value, kind: str
) -> Drop | None:
    """The first rule about a step's value that a segment of this kind breaks. A missing value breaks none."""
    holding = (rule for rule in rules if kind != "sound" or rule.sounds)
    return find_broken(holding, thresholds, step, value)


@dataclass(frozen=True)
class Preset:
    """Steps and thresholds that a preset's name stands for.

    Args:
        about: the corpora that the preset is for.
        steps: optional steps with their settings; the others (probe, voice_activity, segments, signal, consensus) are
            always there.
        outlier_iqr: interquartile ranges outside the quartiles of a file's seconds per character from which a segment
            is dropped; null: drop none.
    """

    about: str
    thresholds: Thresholds
    steps: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    outlier_iqr: float | None = None
    drop_duplicates: bool = False


_LEVEL = {"min_level_dbfs": -60.0, "max_clipped_share": 0.1}
# Granary drops at these very values (0.4, 25 characters, four times as long); rules keep what is at their limit
_MADE_UP: Mapping[str, Any] = {
    "min_unique_word_share": 0.401,
    "max_word_characters": 24,
    "max_longest_ratio": 3.99,
    "max_longest_loop": 3,
    "no_known_hallucination": True,
}

PRESETS: Mapping[str, Preset] = {
    "quickstart": Preset(
        "short, clean clips: nothing is dropped but what cannot be trained on",
        Thresholds(min_duration_s=0.1, max_duration_s=30.0, **_LEVEL),
    ),
    "small": Preset(
        "sentences that people say, written down by one Whisper or two on one machine",
        Thresholds(min_duration_s=0.5, max_duration_s=20.0, max_characters_per_s=40.0, **_MADE_UP, **_LEVEL),
        {"language": {}, "repetition": {}},
    ),
    "emilia": Preset(
        "speech in the wild for TTS, one speaker at a time (Emilia)",
        Thresholds(
            min_duration_s=3.0,
            max_duration_s=30.0,
            max_overlap_share=0.0,
            min_dnsmos_ovr=3.0,
            languages=["zh", "en", "fr", "ja", "ko", "de"],
            min_language_probability=0.8,
            min_characters=2,
            **_LEVEL,
        ),
        {
            "segments": {"merge_gap_s": 2.0},
            "speakers": {},
            "quality": {},
            "language": {},
            "repetition": {},
        },
        outlier_iqr=1.5,
    ),
    "granary": Preset(
        "transcripts for recognition in many languages: made-up text is found (Granary)",
        Thresholds(
            min_duration_s=0.1,
            max_duration_s=40.0,
            min_language_probability=0.7,
            min_characters=1,
            **_MADE_UP,
            **_LEVEL,
        ),
        {"language": {}, "repetition": {}},
    ),
    "curator-asr": Preset(
        "transcripts on which two recognizers agree (NeMo Curator)",
        Thresholds(min_duration_s=5.0, max_duration_s=20.0, max_pairwise_wer=0.10, **_MADE_UP, **_LEVEL),
        {"repetition": {}},
    ),
    "curator-tts": Preset(
        "studio-like speech: wide band, natural, one speaker (NeMo Curator)",
        Thresholds(
            min_duration_s=2.0,
            max_duration_s=60.0,
            max_overlap_share=0.0,
            min_bandwidth_hz=8000.0,
            min_utmos=3.4,
            min_sigmos_noise=4.0,
            min_sigmos_ovrl=3.5,
            **_LEVEL,
        ),
        {"speakers": {}, "quality": {"dnsmos": False}},
    ),
    "audioverse": Preset(
        "all that can be heard, measured and described, speech and sounds",
        Thresholds(
            min_duration_s=0.5,
            max_duration_s=30.0,
            min_dnsmos_ovr=2.0,
            min_language_probability=0.5,
            max_pairwise_wer=0.5,
            max_ngram_count=3,
            max_characters_per_s=40.0,
            **_MADE_UP,
            **_LEVEL,
        ),
        {
            "segments": {"cover": "all"},
            "speakers": {},
            "quality": {},
            "prosody": {},
            "events": {},
            "language": {},
            "repetition": {},
            "fingerprint": {},
        },
        drop_duplicates=True,
    ),
}
