"""Signal metrics against librosa, naive numpy, closed forms and the packages themselves; n/a where undefined."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from audiollm.audio import resample
from audiollm.evaluate.codec.signal_metrics import (
    MEL_BANDS,
    MEL_WINDOWS,
    MetricError,
    dnsmos,
    mel_distance,
    pesq,
    si_sdr,
    stft_distance,
    stoi,
)

RATE = 24_000
PAIRWISE = (mel_distance, stft_distance, si_sdr, pesq, stoi)


def voice(seconds: float, seed: int = 0) -> Tensor:
    """Harmonics of a moving pitch in syllables, with pauses: enough for PESQ and STOI to find speech, [1, N]."""
    random = np.random.default_rng(seed)
    time_N = np.arange(int(seconds * RATE)) / RATE
    pitch_N = 120 + 30 * np.sin(2 * np.pi * 0.7 * time_N)
    phase_N = 2 * np.pi * np.cumsum(pitch_N) / RATE
    harmonics = sum(np.sin(k * phase_N) / k for k in range(1, 30))
    syllables_N = np.clip(np.sin(2 * np.pi * 3.1 * time_N), 0, 1) * (np.sin(2 * np.pi * 0.5 * time_N) > -0.7)
    samples_N = 0.2 * harmonics * syllables_N + 1e-4 * random.standard_normal(len(time_N))
    return torch.tensor(samples_N, dtype=torch.float32)[None]


def noisy(reference_1N: Tensor, level: float = 0.02) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return reference_1N + level * torch.randn(reference_1N.shape, generator=generator)


def test_mel_distance_is_that_of_librosa() -> None:
    import librosa

    reference_1N = voice(1.0)
    decoded_1N = noisy(reference_1N)
    expected = 0.0
    for window, bands in zip(MEL_WINDOWS, MEL_BANDS, strict=True):
        logs = [
            np.log10(
                np.maximum(
                    librosa.feature.melspectrogram(
                        y=samples[0].double().numpy(),
                        sr=RATE,
                        n_fft=window,
                        hop_length=window // 4,
                        n_mels=bands,
                        power=1.0,
                        pad_mode="reflect",
                    ),
                    1e-5,
                )
            )
            for samples in (reference_1N, decoded_1N)
        ]
        expected += np.abs(logs[0] - logs[1]).mean()
    assert mel_distance(reference_1N, decoded_1N, RATE) == pytest.approx(expected, abs=2e-4)


def test_stft_distance_is_that_of_naive_frames() -> None:
    reference_1N = voice(0.5)
    decoded_1N = noisy(reference_1N)
    expected = 0.0
    for window in (2048, 512):
        taper = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(window) / window)
        spectra = []
        for samples in (reference_1N, decoded_1N):
            padded = np.pad(samples[0].double().numpy(), window // 2, mode="reflect")
            starts = range(0, len(padded) - window + 1, window // 4)
            spectra.append(np.abs([np.fft.rfft(padded[s : s + window] * taper) for s in starts]))
        logs = [np.log10(np.maximum(spectrum, 1e-5) ** 2) for spectrum in spectra]
        expected += np.abs(logs[0] - logs[1]).mean() + np.abs(spectra[0] - spectra[1]).mean()
    assert stft_distance(reference_1N, decoded_1N, RATE) == pytest.approx(expected, abs=1e-3)


def test_distances_of_a_quieter_copy_follow_from_the_gain() -> None:
    """Halved noise, all above the clamp: log10 2 a scale, twice that for the squared STFT."""
    reference_1N = torch.randn(1, RATE, generator=torch.Generator().manual_seed(0)).clamp(-1, 1)
    linear = stft_distance(reference_1N, 0.5 * reference_1N, RATE) - 4 * math.log10(2)
    spectra = [torch.stft(reference_1N, w, w // 4, window=torch.hann_window(w), return_complex=True).abs()
               for w in (2048, 512)]  # fmt: skip
    assert linear == pytest.approx(sum(float(s.mean()) / 2 for s in spectra), rel=1e-4)
    mel = mel_distance(reference_1N, 0.5 * reference_1N, RATE)
    assert 6 * math.log10(2) < mel <= 7 * math.log10(2) + 1e-6  # bands narrower than a bin are empty, and 0


def test_si_sdr_of_orthogonal_noise_is_the_ratio_whatever_gain_and_offset() -> None:
    time_N = torch.arange(RATE, dtype=torch.float64) / RATE
    signal, noise = torch.sin(2 * math.pi * 100 * time_N), torch.cos(2 * math.pi * 100 * time_N)
    decoded = (0.3 * (signal + 0.1 * noise) + 0.2).float()[None]
    assert si_sdr(signal.float()[None], decoded, RATE) == pytest.approx(20.0, abs=1e-3)


def test_pesq_is_that_of_the_package_at_16_khz() -> None:
    package = pytest.importorskip("pesq")
    reference_1N = voice(3.0)
    decoded_1N = noisy(reference_1N, 0.005)
    both = [resample(samples, RATE, 16_000)[0].numpy() for samples in (reference_1N, decoded_1N)]
    expected = package.pesq(16_000, *both, "wb")
    assert 1.05 < expected < 4.5
    assert pesq(reference_1N, decoded_1N, RATE) == pytest.approx(expected, abs=1e-6)


def test_pesq_of_a_long_clip_is_the_mean_of_equal_parts() -> None:
    package = pytest.importorskip("pesq")
    reference_1N = voice(22.0)
    decoded_1N = noisy(reference_1N, 0.005)
    both = [resample(samples, RATE, 16_000)[0].numpy() for samples in (reference_1N, decoded_1N)]
    parts = [
        package.pesq(16_000, *(samples[s : s + 176_000] for samples in both), "wb") for s in (0, 176_000)
    ]
    assert parts[0] != parts[1]
    assert pesq(reference_1N, decoded_1N, RATE) == pytest.approx(np.mean(parts), abs=1e-6)


def test_stoi_is_that_of_the_package() -> None:
    from pystoi import stoi as package

    reference_1N = voice(2.0)
    decoded_1N = noisy(reference_1N, 0.05)
    expected = package(reference_1N[0].double().numpy(), decoded_1N[0].double().numpy(), RATE)
    assert 0.1 < expected < 0.99
    assert stoi(reference_1N, decoded_1N, RATE) == pytest.approx(expected, abs=1e-9)


def test_identical_signals_are_as_good_as_a_metric_can_say() -> None:
    pytest.importorskip("pesq")
    reference_1N = voice(2.0)
    assert mel_distance(reference_1N, reference_1N, RATE) == 0.0
    assert stft_distance(reference_1N, reference_1N, RATE) == 0.0
    assert pesq(reference_1N, reference_1N, RATE) == pytest.approx(4.644, abs=1e-3)
    assert stoi(reference_1N, reference_1N, RATE) == pytest.approx(1.0, abs=1e-6)
    with pytest.raises(MetricError, match="infinite"):
        si_sdr(reference_1N, 0.5 * reference_1N, RATE)


@pytest.mark.parametrize(
    ("metric", "reason"),
    [
        (si_sdr, "the reference is constant"),
        (pesq, "the reference is silent"),
        (stoi, "the reference is silent"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_silent_reference_has_no_value(metric: Callable[..., float], reason: str) -> None:
    with pytest.raises(MetricError, match=reason):
        metric(torch.zeros(1, RATE), voice(1.0), RATE)


@pytest.mark.parametrize("metric", [si_sdr, pesq, stoi], ids=lambda metric: metric.__name__)
def test_a_silent_output_has_no_value_either(metric: Callable[..., float]) -> None:
    with pytest.raises(MetricError, match="the decoded sound is"):
        metric(voice(1.0), torch.zeros(1, RATE), RATE)


@pytest.mark.parametrize("metric", PAIRWISE, ids=lambda metric: metric.__name__)
def test_nan_is_named(metric: Callable[..., float]) -> None:
    decoded_1N = voice(1.0)
    decoded_1N[0, 7] = float("nan")
    with pytest.raises(MetricError, match="the decoded sound holds NaN"):
        metric(voice(1.0), decoded_1N, RATE)
    with pytest.raises(ValueError, match="different shapes"):
        metric(voice(1.0), voice(0.5), RATE)


@pytest.mark.parametrize(
    ("metric", "seconds", "reason"),
    [
        (mel_distance, 0.04, "shorter than 43 ms"),
        (stft_distance, 0.04, "shorter than 43 ms"),
        (pesq, 0.2, "BufferTooShort"),
        (stoi, 0.2, "0.4 s"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_clip_that_is_too_short_is_named(metric: Callable[..., float], seconds: float, reason: str) -> None:
    if metric is pesq:
        pytest.importorskip("pesq")
    reference_1N = voice(1.0)[:, 2000 : 2000 + int(seconds * RATE)]
    with pytest.raises(MetricError, match=reason):
        metric(reference_1N, noisy(reference_1N), RATE)


def test_dnsmos_hears_noise_and_refuses_what_it_cannot_hear() -> None:
    clean = voice(1.0)
    assert dnsmos(noisy(clean, 0.1).clamp(-1, 1), RATE).overall < dnsmos(clean.clamp(-1, 1), RATE).overall
    for samples_1N, reason in (
        (torch.zeros(1, RATE), "silent"),
        (2 * torch.ones(1, RATE), r"\[-1, 1\]"),
        (clean[:, :1000], "0.25 s"),
        (clean * float("nan"), "NaN"),
    ):
        with pytest.raises(MetricError, match=reason):
            dnsmos(samples_1N, RATE)
