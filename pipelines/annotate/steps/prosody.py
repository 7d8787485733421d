"""The step `prosody`: pitch, its movement, energy, rate and pauses of a segment.

Shapes: F frames of 10 ms, N samples.
"""

from __future__ import annotations

import importlib.util
import re
import unicodedata
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from audiollm.data.text.forms import spoken_form
from audiollm.onnx_models import package_file
from pipelines.annotate.step import Segment, SegmentStep
from pipelines.steps.step import StepConfig, Value

_SAMPLE_RATE = 16000
_HOP, _WINDOW = 160, 400
_FRAME_S = _HOP / _SAMPLE_RATE
_SILENCE_DB = -120.0
_QUIET_DB, _LOUD_DB, _MARGIN = 30.0, 9.0, 0.3
"""Sound is what is above the noise by this share of the way up to the loud, at most so far below the loud: what is
within the second is sound in any case."""
_MIN_VOICED = 10


class ProsodyConfig(StepConfig):
    """Settings of `prosody`."""

    min_pause_s: float = Field(0.25, ge=0.05)
    """A shorter silence between two sounds belongs to speech (the closure of a stop) and is no pause."""


class Prosody(SegmentStep[ProsodyConfig]):
    """Pitch, energy, rate and pauses of a segment of speech."""

    name = "prosody"
    settings = ProsodyConfig
    needs: tuple[str, ...] = ("consensus", "language")

    def missing(self) -> str | None:
        if importlib.util.find_spec("pocketsphinx") is None:
            return "prosody: the package pocketsphinx (its dictionary) is missing: pip install pocketsphinx"
        return None

    def process(self, item: Segment) -> Value:
        """Values by name; null for what cannot be told: no voice, no text, silence.

        `pitch_hz` is the median; `pitch_deviation_semitones` half the distance between the pitches at 16 and 84 % (a
        standard deviation that octave errors do not move), `pitch_range_semitones` that between 5 and 95 %.
        `energy_db` is the mean power while there is sound, in dB of full scale; `rate_syllables_s` leaves out pauses.
        """
        samples_N = item.samples(_SAMPLE_RATE)
        activity = _activity(samples_N, self.config.min_pause_s)
        value: Value = {"energy_db": None, "energy_deviation_db": None}
        if activity is not None:
            value["energy_db"] = round(activity.energy_db, 1)
            value["energy_deviation_db"] = round(activity.energy_deviation_db, 1)
        return value | _pitch(samples_N) | _tempo(item, activity)


class _Activity(NamedTuple):
    """Activity of a segment: its level, the seconds from first to last sound less the pauses, and the pauses."""

    energy_db: float
    energy_deviation_db: float
    spoken_s: float
    pauses_s: list[float]


def _activity(samples_N: NDArray[np.float32], min_pause_s: float) -> _Activity | None:
    """None where there is silence alone, or less than one frame."""
    if len(samples_N) < _WINDOW:
        return None
    frames_FN = np.lib.stride_tricks.sliding_window_view(samples_N, _WINDOW)[::_HOP].astype(np.float64)
    power_F = frames_FN.var(axis=1)
    level_F = 10 * np.log10(np.maximum(power_F, 10 ** (_SILENCE_DB / 10)))
    floor_db, loud_db = np.percentile(level_F, (5, 95))
    if loud_db <= _SILENCE_DB:
        return None
    above_noise_db = min(floor_db + _MARGIN * (loud_db - floor_db), loud_db - _LOUD_DB)
    active_F = level_F >= max(loud_db - _QUIET_DB, above_noise_db)
    frames = np.flatnonzero(active_F)
    silences_s = (np.diff(frames) - 1) * _FRAME_S
    pauses_s = silences_s[silences_s >= min_pause_s].tolist()
    spoken_s = float((frames[-1] - frames[0] + 1) * _FRAME_S) - sum(pauses_s)
    energy_db = float(10 * np.log10(power_F[active_F].mean()))
    return _Activity(energy_db, float(level_F[active_F].std()), spoken_s, pauses_s)


def _pitch(samples_N: NDArray[np.float32]) -> Value:
    from audiollm.audio.pitch import track_pitch

    names = ("pitch_hz", "pitch_deviation_semitones", "pitch_range_semitones")
    pitch_hz_F, voiced_F = track_pitch(samples_N)
    value: Value = dict.fromkeys(names)
    value["voiced_share"] = round(float(voiced_F.mean()), 3) if len(voiced_F) else None
    if voiced_F.sum() < _MIN_VOICED:
        return value
    semitones_F = 12 * np.log2(pitch_hz_F[voiced_F])
    lowest, low, middle, high, highest = np.percentile(semitones_F, (5, 16, 50, 84, 95))
    figures = (2 ** (middle / 12), (high - low) / 2, highest - lowest)
    return value | {name: round(float(figure), 2) for name, figure in zip(names, figures, strict=True)}


def _tempo(item: Segment, activity: _Activity | None) -> Value:
    """Syllables of the text that is given, or else of the recognizers', over the seconds in which it is spoken."""
    text = item.metadata.text or (item.values.get("consensus") or {}).get("text") or ""
    language = item.metadata.language or (item.values.get("language") or {}).get("language")
    syllables = count_syllables(text, language)
    value: Value = {"syllables": syllables or None, "rate_syllables_s": None}
    if activity is None:
        return value | {"pauses": None, "pause_s": None}
    if syllables and activity.spoken_s > 0:
        value["rate_syllables_s"] = round(syllables / activity.spoken_s, 2)
    return value | {"pauses": len(activity.pauses_s), "pause_s": round(float(sum(activity.pauses_s)), 2)}


_DICTIONARY = "model/en-us/cmudict-en-us.dict"
_VOWEL_PHONES = frozenset(
    ("AA", "AE", "AH", "AO", "AW", "AY", "EH", "ER", "EY", "IH", "IY", "OW", "OY", "UH", "UW")
)
# one character is one syllable: Chinese, kana and their mark of length (a mora, to be exact), Hangul
_SIGNS = re.compile(r"[\u3041-\u3096\u30a1-\u30fa\u30fc\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7a3\uf900-\ufaff]")
# small kana belong to the character before them
_SMALL_KANA = re.compile(
    r"[\u3041\u3043\u3045\u3047\u3049\u3083\u3085\u3087\u308e\u30a1\u30a3\u30a5\u30a7\u30a9\u30e3\u30e5\u30e7\u30ee]"
)
_VOWELS = "aeiouyæøœıаеёиоуыэюяєіїαεηιουω"
_VOWEL_GROUP = re.compile(f"[{_VOWELS}]+")
_SINGLE_VOWEL = re.compile("[аеёиоуыэюяєії]")  # Cyrillic: each is a syllable
_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*")
_DIGIT = re.compile("[0-9]")


def count_syllables(text: str, language: str | None = None) -> int:
    """Syllables of a text, numbers read out; an estimate by spelling for words that are not in the dictionary.

    Args:
        language: the one in which numbers are read; None: by the script.
    """
    read_out = spoken_form(text, language)
    if _DIGIT.search(read_out):  # a language whose numbers nobody reads
        read_out = spoken_form(read_out, "en")
    read_out = read_out.lower()
    signs = len(_SIGNS.findall(read_out)) - len(_SMALL_KANA.findall(read_out))
    words = _WORD.findall(_SIGNS.sub(" ", read_out))
    return signs + sum(_word_syllables(word.replace("’", "'"), language or "en") for word in words)


def dictionary_path() -> Path:
    """Return the path of the dictionary.

    Raises:
        FileNotFoundError: pocketsphinx is not installed.
    """
    return package_file("pocketsphinx", _DICTIONARY)


# Private


def _word_syllables(word: str, language: str) -> int:
    if language[:2].lower() == "en" and (count := _dictionary().get(word)):
        return count
    plain = unicodedata.normalize("NFKD", word)
    plain = "".join(letter for letter in plain if not unicodedata.combining(letter))
    if num_vowels := len(_SINGLE_VOWEL.findall(plain)):
        return num_vowels
    groups = len(_VOWEL_GROUP.findall(plain))
    silent = (
        language[:2].lower() in ("en", "fr")
        and re.search(f"[^{_VOWELS}]e$", plain)
        and not plain.endswith("le")
    )
    return max(1, groups - bool(silent and groups > 1))


@lru_cache(maxsize=1)
def _dictionary() -> dict[str, int]:
    """Number of vowels in the first pronunciation of each word."""
    counts: dict[str, int] = {}
    for line in dictionary_path().read_text(encoding="utf-8").splitlines():
        word, *phones = line.split()
        if not word.endswith(")"):  # `read(2)`: another pronunciation
            counts[word] = sum(phone in _VOWEL_PHONES for phone in phones)
    return counts
