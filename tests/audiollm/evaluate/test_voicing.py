"""Voicing and pitch: closed forms on made voices, whispers, and what the suites make of them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor

from audiollm.audio import save
from audiollm.evaluate.judges.judging import SpeechClip
from audiollm.evaluate.judges.voicing import (
    Voicing,
    close_pitch_share,
    harmonicity,
    periodicity_error,
    pitch_error_cents,
    track_voicing,
    voicing_f1,
)
from audiollm.evaluate.report.metric_error import MetricError
from audiollm.evaluate.speech.voices import voicing_scores
from audiollm.recipe.runner import Context

RATE = 16_000


def voice(hz: float, seconds: float = 1.0, noise: float = 0.0, seed: int = 0) -> Tensor:
    """A voice with vibrato, `[1, N]`: harmonics to the band's edge, between two silences of 0.3 s."""
    time_N = torch.arange(round(seconds * RATE)) / RATE
    turns_N = (hz * (1 + 0.02 * torch.sin(2 * math.pi * 5 * time_N)) / RATE).cumsum(0)
    count = int(0.95 * RATE / 2 / hz)
    made_N = sum(torch.cos(2 * math.pi * k * turns_N) / k**0.5 for k in range(1, count + 1))
    dice = torch.Generator().manual_seed(seed)
    made_N = (1 - noise) * made_N / made_N.std() + noise * torch.randn(len(time_N), generator=dice)
    silence_N = 1e-4 * torch.randn(round(0.3 * RATE), generator=dice)
    return torch.cat([silence_N, 0.1 * made_N, silence_N])[None]


def test_a_voice_is_like_itself_and_a_whisper_is_not() -> None:
    real, whisper = track_voicing(voice(140), RATE), track_voicing(voice(140, noise=1.0), RATE)
    assert real.voiced_share == pytest.approx(1.0 / 1.6, abs=0.05)
    assert real.mean_pitch_hz == pytest.approx(140, rel=0.005)
    assert (voicing_f1(real, real), close_pitch_share(real, real), periodicity_error(real, real)) == (1, 1, 0)
    assert voicing_f1(real, whisper) < 0.2 and close_pitch_share(real, whisper) < 0.05
    assert periodicity_error(real, whisper) > 0.05


@pytest.mark.parametrize(("cents", "close"), [(30, 1.0), (-30, 1.0), (80, 0.0)])
def test_pitch_that_is_off_by_so_many_cents(cents: float, close: float) -> None:
    real, other = track_voicing(voice(150), RATE), track_voicing(voice(150 * 2 ** (cents / 1200)), RATE)
    assert pitch_error_cents(real, other) == pytest.approx(
        abs(cents), abs=12
    )  # pYIN's classes are 10 cents apart
    assert close_pitch_share(real, other) == pytest.approx(close, abs=0.07)
    assert voicing_f1(real, other) > 0.95


def test_harmonicity_is_the_periodic_share_of_the_band() -> None:
    def of(noise: float) -> float:
        sound_1N = voice(140, noise=noise)
        pitch_hz_F = np.full(161, np.nan)
        pitch_hz_F[35:125] = 140.0
        return harmonicity(Voicing(sound_1N[0].numpy(), pitch_hz_F, np.ones(161)))

    assert of(0.0) > 0.85
    assert 0.3 < of(0.5) < 0.7
    assert of(1.0) < 0.25


def test_what_has_no_voice_has_no_score() -> None:
    real, silence = track_voicing(voice(140), RATE), track_voicing(torch.zeros(1, RATE), RATE)
    for measure in (voicing_f1, close_pitch_share):
        with pytest.raises(MetricError, match="no voiced frame"):
            measure(silence, real)
    with pytest.raises(MetricError, match="voiced in both"):
        pitch_error_cents(real, silence)
    with pytest.raises(MetricError, match="no voiced frame"):
        harmonicity(silence)
    with pytest.raises(MetricError, match="0.1 s"):
        track_voicing(torch.zeros(1, 1000), RATE)


def test_generated_voices_are_compared_with_their_speakers(tmp_path: Path) -> None:
    def clip(name: str, speaker: str, samples_1N: Tensor) -> SpeechClip:
        save(tmp_path / f"{name}.wav", samples_1N, RATE)
        return SpeechClip(name, "one", tmp_path / f"{name}.wav", speaker=speaker)

    real = [clip(f"r{n}", "ann", voice(210 + n, 0.5)) for n in range(3)]
    real += [clip(f"q{n}", "bob", voice(105 + n, 0.5)) for n in range(3)]
    generated = [
        clip("right", "ann", voice(200, 0.5)),
        clip("low", "ann", voice(150, 0.5)),
        clip("whisper", "bob", voice(105, 0.5, noise=1.0)),
        clip("octave", "bob", voice(210, 0.5)),
        SpeechClip("gone", "one", tmp_path / "gone.wav", speaker="bob"),
    ]
    context = Context(tmp_path, None, Console(quiet=True), {})  # type: ignore[arg-type]
    found = voicing_scores({"real": real, "generated": generated}, context)
    assert found["real"]["pitch_right"] == 1.0 and found["real"]["by_speaker"]["ann"] == pytest.approx(
        211, rel=0.01
    )
    assert found["generated"]["n"] == 4 and found["generated"]["pitch_right"] == 0.25
    assert found["generated"]["voiced_share"] < found["real"]["voiced_share"]
