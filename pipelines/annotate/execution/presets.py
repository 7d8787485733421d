"""Named sets of steps and thresholds. What the published pipelines state is here; where a model of theirs is not at
hand, the preset asks for it by name and does not quietly go on without.

Sources: Emilia: open-mmlab/Amphion, preprocessors/Emilia (30 s, DNSMOS OVRL 3, language 0.8, 1.5 interquartile ranges);
Granary: NVIDIA/NeMo-speech-data-processor, dataset_configs/multilingual/granary, and arXiv 2505.13404; Curator:
NVIDIA-NeMo/Curator, tutorials and advanced_pipelines of its audio stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipelines.annotate.execution.rules import Thresholds


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
        {"speakers": {}, "quality": {}, "language": {}, "repetition": {}},
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
