"""Reference voices: a recording is read, checked, cut to a length that a model has seen, and brought to one level.

Shapes: K codebooks, T code frames, N samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from audiollm.audio import AudioError, Waveform, load, normalize_rms, peak_dbfs, probe
from audiollm.audio.samples import SILENCE_DBFS
from audiollm.codec import Codec
from audiollm.data.records.sample import AudioPart
from audiollm.data.text.forms import prompt_form
from audiollm.errors import ConfigError
from audiollm.generation.speaking.long_text import trim

LONGEST_REFERENCE_S, SHORTEST_REFERENCE_S = 15.0, 0.2
"""Bounds of a reference. More than 15 s of a voice tells a model little more, and costs a row per 40 ms."""
LEVEL_DBFS = -23.0
"""RMS level that codecs and models of the recipes are trained at."""


@dataclass(frozen=True)
class Voice:
    """A reference in the form that prompts take."""

    audio_part: AudioPart
    waveform: Waveform
    """One channel at the codec's rate, at `LEVEL_DBFS`."""
    codes_KT: Tensor
    text: str | None
    """Transcript of the reference in its spoken form; None: not known."""
    notes: tuple[str, ...] = ()
    """Warnings about the reference: it was cut."""


def read_voice(
    reference: str | Path | Waveform, text: str | None, codec: Codec, language: str | None = None
) -> Voice:
    """Read a recording as a voice; a longer one than `LONGEST_REFERENCE_S` is cut at a pause and loses its text.

    Raises:
        ConfigError: it cannot be read, is silent, or has less than `SHORTEST_REFERENCE_S` of sound in it.
    """
    name = "the reference" if isinstance(reference, Waveform) else str(reference)
    waveform, whole_s = _read_reference_recording(reference, name, codec.sample_rate)
    if peak_dbfs(waveform.samples_CN) < SILENCE_DBFS:
        remedy = f"give a recording of a voice (the first {2 * LONGEST_REFERENCE_S:g} s are looked at)"
        raise ConfigError(f"{name}: contains only silence", "reference", remedy)
    loud_s = trim(waveform.samples_CN, waveform.sample_rate, kept_s=0.0).shape[1] / waveform.sample_rate
    if loud_s < SHORTEST_REFERENCE_S:
        remedy = (
            f"give at least {SHORTEST_REFERENCE_S:g} s of one voice, better 3 to {LONGEST_REFERENCE_S:g} s"
        )
        raise ConfigError(f"{name}: {loud_s:.2f} s of sound is too short to be a voice", "reference", remedy)
    waveform = Waveform(trim(waveform.samples_CN, waveform.sample_rate, kept_s=0.1), waveform.sample_rate)
    transcript = prompt_form(text, language) if text else None
    notes: tuple[str, ...] = ()
    if waveform.duration_s > LONGEST_REFERENCE_S:
        waveform = Waveform(waveform.samples_CN[:, : _pause(waveform)], waveform.sample_rate)
        dropped = ", and its text, which tells of more, is not used" if transcript else ""
        notes = (
            f"{name}: {whole_s:.0f} s long; its first {waveform.duration_s:.1f} s are the reference{dropped}",
        )
        transcript = None
    waveform = Waveform(normalize_rms(waveform.samples_CN, LEVEL_DBFS), waveform.sample_rate)
    audio_part = AudioPart(path=name)
    return Voice(audio_part, waveform, codec.encode(waveform.samples_CN), transcript or None, notes)


# Private


def _read_reference_recording(
    reference: str | Path | Waveform, name: str, sample_rate: int
) -> tuple[Waveform, float]:
    """Read the needed part of a recording, mono at the codec's rate, with the duration of the whole."""
    if isinstance(reference, Waveform):
        if not bool(torch.isfinite(reference.samples_CN).all()) or reference.num_samples == 0:
            raise ConfigError(
                f"{name}: no samples, or some that are not finite", "reference", "mend the recording"
            )
        end = round(2 * LONGEST_REFERENCE_S * reference.sample_rate)
        head = Waveform(reference.samples_CN[:, :end], reference.sample_rate)
        return head.mono().resample(sample_rate), reference.duration_s
    try:
        whole_s = probe(reference).duration_s
        head = load(reference, end_s=2 * LONGEST_REFERENCE_S, sample_rate=sample_rate, mono=True)
    except AudioError as error:
        raise ConfigError(str(error), "reference", "give a sound file with one voice in it") from error
    return head, max(head.duration_s, whole_s or 0.0)


def _pause(waveform: Waveform) -> int:
    """Return the sample in the middle of the quietest 0.1 s of the last third before `LONGEST_REFERENCE_S`."""
    rate = waveform.sample_rate
    end, start = round(LONGEST_REFERENCE_S * rate), round(LONGEST_REFERENCE_S * rate * 2 / 3)
    block = round(0.1 * rate)
    power_N = waveform.samples_CN[0, start:end].double().square()
    mean_N = torch.nn.functional.avg_pool1d(power_N[None, None], block, stride=max(1, block // 10))[0, 0]
    return start + int(mean_N.argmin()) * max(1, block // 10) + block // 2
