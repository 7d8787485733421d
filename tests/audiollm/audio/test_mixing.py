"""Channels that cancel each other: their mean is silence, so one of them is heard, and its level is measured."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import soundfile
import torch
from scipy.signal import lfilter
from torch import Tensor

from audiollm.audio import LevelMeter, load, normalize_rms, peak_dbfs, rms_dbfs, to_mono
from audiollm.audio.mixing import BLOCK_SAMPLES, Mixdown, mono_channel
from audiollm.audio.streams import stream_mono

RATE = 22050


def voice(seed: int, samples: int = 4 * RATE) -> Tensor:
    """Noise below 1 kHz, as loud as speech, `[N]`."""
    noise_N = torch.randn(samples, generator=torch.Generator().manual_seed(seed)).numpy()
    low_N = torch.from_numpy(lfilter([0.06], [1.0, -0.94], noise_N)).float()
    return 0.1 * low_N / low_N.square().mean().sqrt()


def inverted(name: str) -> Tensor:
    """A recording whose mean has lost the sound of its channels, `[C, N]`."""
    one_N, two_N = voice(0), voice(1)
    late_N = torch.roll(one_N, 3)
    return {
        "inverted": torch.stack([one_N, -one_N]),
        "quieter": torch.stack([0.6 * one_N, -one_N]),
        "late": torch.stack([one_N, -late_N]),
        "noisy": torch.stack([one_N + 0.1 * two_N, -one_N]),
        "half the time": torch.stack([one_N, torch.cat([one_N[: 2 * RATE], -one_N[2 * RATE :]])]),
        "5.1": torch.stack([one_N, -one_N, 0.1 * two_N, 0 * one_N, 0.05 * one_N, -0.05 * one_N]),
    }[name]


INVERTED = ("inverted", "quieter", "late", "noisy", "half the time", "5.1")


@pytest.mark.parametrize("name", INVERTED)
def test_of_channels_that_cancel_each_other_the_loudest_is_heard(name: str) -> None:
    samples_CN = inverted(name)
    loudest = int(samples_CN.square().sum(dim=1).argmax())
    assert torch.equal(to_mono(samples_CN)[0], samples_CN[loudest])
    assert rms_dbfs(samples_CN) == pytest.approx(rms_dbfs(samples_CN[loudest : loudest + 1]))
    assert peak_dbfs(samples_CN) == pytest.approx(peak_dbfs(samples_CN[loudest : loudest + 1]))


@pytest.mark.parametrize(
    "channels_CN",
    [
        torch.stack([voice(0), voice(1)]),
        torch.stack([voice(0), voice(0)]),
        torch.stack([voice(0), torch.zeros(4 * RATE)]),
        torch.stack([voice(0), -0.2 * voice(0)]),
        torch.stack([voice(0), -0.25 * voice(0) + 0.97 * voice(1)]),
        torch.stack([voice(seed) for seed in range(6)]),
        torch.stack([torch.cat([sign * voice(0)[:RATE], 3 * voice(0)[RATE:]]) for sign in (-1, 1)]),
        torch.zeros(2, 100),
    ],
    ids=["apart", "equal", "one is silent", "a faint echo", "hardly related", "six", "a faint start", "silence"],
)  # fmt: skip
def test_other_channels_are_averaged(channels_CN: Tensor) -> None:
    assert mono_channel(channels_CN) is None
    assert torch.equal(to_mono(channels_CN), channels_CN.mean(dim=0, keepdim=True))


def test_the_level_is_that_of_the_mix() -> None:
    """Two unrelated channels are heard 3 dB below each of them; no average of their powers says so."""
    both_CN = torch.stack([voice(0), voice(1)])
    assert rms_dbfs(both_CN) == pytest.approx(-23.01, abs=0.1)
    assert rms_dbfs(both_CN) == rms_dbfs(to_mono(both_CN))
    assert rms_dbfs(normalize_rms(both_CN, -26.0)) == pytest.approx(-26.0, abs=1e-3)
    assert rms_dbfs(torch.zeros(2, 9)) == -math.inf


@pytest.mark.parametrize("length", [1, 500, BLOCK_SAMPLES - 1, BLOCK_SAMPLES + 9])
def test_channels_of_a_short_clip_cancel_each_other_too(length: int) -> None:
    samples_CN = inverted("inverted")[:, :length]
    assert torch.equal(to_mono(samples_CN)[0], samples_CN[0]) and rms_dbfs(samples_CN) > -60


def test_the_level_of_pieces_is_that_of_the_whole() -> None:
    """The loudest piece may be the first."""
    samples_1N = torch.cat([voice(0), 0.1 * voice(1), torch.zeros(7)])[None]
    meter = LevelMeter()
    for piece_1N in samples_1N.split(5000, dim=1):
        meter.push(piece_1N)
    meter.push(samples_1N[:, :0])
    assert meter.num_samples == samples_1N.shape[1]
    assert meter.rms_dbfs == pytest.approx(rms_dbfs(samples_1N))
    assert meter.peak_dbfs == pytest.approx(20 * math.log10(float(samples_1N.abs().max())))
    assert meter.gain_to(0.0, 0.5) == pytest.approx(0.5 / float(samples_1N.abs().max()))


@pytest.mark.parametrize("length", [1, BLOCK_SAMPLES - 1, BLOCK_SAMPLES, 5 * BLOCK_SAMPLES + 77])
def test_pieces_of_any_size_are_mixed_as_the_whole(length: int) -> None:
    for name in ("half the time", "5.1"):
        samples_CN = inverted(name)[:, :length]
        mixdown = Mixdown()
        for piece_CN in samples_CN.split(max(1, min(1000, length // 2)), dim=1):
            mixdown.push(piece_CN)
        assert mixdown.channel() == mono_channel(samples_CN)


@pytest.mark.parametrize("name", INVERTED)
def test_a_stream_is_mixed_as_the_file_is(tmp_path: Path, name: str) -> None:
    path = tmp_path / "a.wav"
    soundfile.write(path, inverted(name).T.numpy(), RATE, subtype="FLOAT")
    whole = load(path, sample_rate=16000, mono=True)
    pieces = torch.cat(list(stream_mono(path, 16000)), dim=1)
    assert torch.allclose(pieces, whole.samples_CN, atol=1e-6)
    assert rms_dbfs(pieces) > -22.0
