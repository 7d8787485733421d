"""Distances between a decoded sound and its reference: pure functions on waveforms; n/a with a reason where undefined.

Every function takes float32 `[1, N]` in [-1, 1] and its rate in Hz, and returns a number or raises
`MetricError` with the reason: no row is ever filled with a default.

Shapes: N samples, W window samples, T frames, F frequency bins, M mel bands.
"""

from __future__ import annotations

import math
import warnings
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from audiollm.audio import resample
from audiollm.evaluate.report.metric_error import MetricError

MEL_WINDOWS = (32, 64, 128, 256, 512, 1024, 2048)
MEL_BANDS = (5, 10, 20, 40, 80, 160, 320)
STFT_WINDOWS = (2048, 512)
CLAMP = 1e-5
SPEECH_RATE = 16_000
PESQ_MAX_S = 20.0
MIN_MOS_S = 0.25
_SILENCE = 1e-7  # peak below -140 dBFS


class DnsmosScores(NamedTuple):
    """Opinion scores of P.835, 1 (bad) to 5 (excellent)."""

    overall: float
    signal: float
    background: float


def mel_distance(reference_1N: Tensor, decoded_1N: Tensor, sample_rate: int) -> float:
    """Multi-scale log-mel distance: sum over 7 scales of the mean absolute difference of log10 mel magnitudes.

    Scale s: periodic Hann window of 32, 64, ... 2048 samples, hop a quarter of it, frames centred, ends
    mirrored; magnitudes (power 1) through librosa's Slaney filterbank of 5, 10, ... 320 bands from 0 Hz to
    half the rate, clamped at 1e-5, log10; absolute differences averaged over bands and frames. 1.0 is thus
    0.14 decades, or 2.9 dB, at each scale. Bands narrower than a bin are empty on both sides and count as 0.

    Source: `MelSpectrogramLoss` of descript-audio-codec with the settings of its conf/final/24khz.yml.
    """
    _check_pair(reference_1N, decoded_1N)
    _check_mirror(reference_1N, sample_rate, MEL_WINDOWS)
    total = 0.0
    for window, bands in zip(MEL_WINDOWS, MEL_BANDS, strict=True):
        filters_MF = _mel_filters(sample_rate, window, bands)
        reference, decoded = (
            (filters_MF @ _magnitude(samples, window)).clamp_min(CLAMP).log10()
            for samples in (reference_1N, decoded_1N)
        )
        total += float((reference - decoded).abs().mean())
    return total


def stft_distance(reference_1N: Tensor, decoded_1N: Tensor, sample_rate: int) -> float:
    """Multi-scale STFT distance: over windows of 2048 and 512 samples, the sum of a log and a linear term.

    With X the STFT magnitude (periodic Hann, hop a quarter of the window, centred, ends mirrored): mean over
    bins and frames of `|log10 max(X, 1e-5)^2 - log10 max(Y, 1e-5)^2|`, plus that of `|X - Y|`, summed over
    both windows.

    Source: `MultiScaleSTFTLoss` of descript-audio-codec at its defaults.
    """
    _check_pair(reference_1N, decoded_1N)
    _check_mirror(reference_1N, sample_rate, STFT_WINDOWS)
    total = 0.0
    for window in STFT_WINDOWS:
        reference_FT, decoded_FT = _magnitude(reference_1N, window), _magnitude(decoded_1N, window)
        logs = 2 * (reference_FT.clamp_min(CLAMP).log10() - decoded_FT.clamp_min(CLAMP).log10())
        total += float(logs.abs().mean() + (reference_FT - decoded_FT).abs().mean())
    return total


def si_sdr(reference_1N: Tensor, decoded_1N: Tensor, sample_rate: int) -> float:
    """Scale-invariant signal-to-distortion ratio in dB, of signals without their means, in float64.

    With r the reference and d the decoded sound: `10 log10(|a r|^2 / |d - a r|^2)`, `a = <d, r> / <r, r>`.

    Raises:
        MetricError: a side is constant, they are orthogonal, or d is a scaled r (the ratio is infinite).

    Source: Le Roux et al., "SDR - half-baked or well done?", 2019, equation 4.
    """
    _check_pair(reference_1N, decoded_1N)
    reference, decoded = (samples[0].double() for samples in (reference_1N, decoded_1N))
    reference, decoded = reference - reference.mean(), decoded - decoded.mean()
    for name, samples in (("the reference", reference), ("the decoded sound", decoded)):
        if float(samples.abs().max()) < _SILENCE:
            raise MetricError(f"{name} is constant")
    target = reference * (decoded @ reference / (reference @ reference))
    distortion = decoded - target
    signal, noise = float(target @ target), float(distortion @ distortion)
    if noise <= 1e-24 * signal:
        raise MetricError("infinite: the decoded sound is the reference")
    if signal <= 1e-24 * noise:
        raise MetricError("minus infinite: the decoded sound has nothing of the reference")
    return 10 * math.log10(signal / noise)


def pesq(reference_1N: Tensor, decoded_1N: Tensor, sample_rate: int) -> float:
    """Wideband PESQ (P.862.2, MOS-LQO 1.04 to 4.64) at 16 kHz, for speech; from 0.25 s on.

    A clip of more than 20 s is scored in equal parts of at most that, and the mean is taken over those with
    speech: the C code writes beyond its table of 50 utterances, which 20 s cannot fill.
    """
    _check_pair(reference_1N, decoded_1N)
    _check_both_audible(reference_1N, decoded_1N)
    try:
        from pesq import NoUtterancesError, PesqError
        from pesq import pesq as score
    except ImportError:
        raise MetricError("pesq is not installed: pip install 'audiollm[metrics]'") from None
    reference_N, decoded_N = (_speech_band(samples, sample_rate) for samples in (reference_1N, decoded_1N))
    parts = math.ceil(len(reference_N) / (PESQ_MAX_S * SPEECH_RATE))
    scores = []
    for reference_part, decoded_part in zip(
        np.array_split(reference_N, parts), np.array_split(decoded_N, parts), strict=True
    ):
        if not decoded_part.any():  # the package divides by the peak of both
            raise MetricError("the decoded sound is silent")
        try:
            scores.append(float(score(SPEECH_RATE, reference_part, decoded_part, "wb")))
        except NoUtterancesError:
            continue
        except (PesqError, ValueError, RuntimeError) as error:
            raise MetricError(f"PESQ: {type(error).__name__}: {_message(error)}") from None
    if not scores:
        raise MetricError("PESQ finds no speech in the reference")
    return _require_finite_metric(float(np.mean(scores)), "PESQ")


def stoi(reference_1N: Tensor, decoded_1N: Tensor, sample_rate: int) -> float:
    """Short-time objective intelligibility, about 0 to 1 (Taal et al., 2011), for speech; pystoi, at 10 kHz.

    Raises:
        MetricError: silence (pystoi: 0.0), or less than 30 frames of speech, 0.4 s (pystoi: 1e-5).
    """
    from pystoi import stoi as score

    _check_pair(reference_1N, decoded_1N)
    _check_both_audible(reference_1N, decoded_1N)
    reference_N, decoded_N = (samples[0].double().numpy() for samples in (reference_1N, decoded_1N))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        try:
            value = float(score(reference_N, decoded_N, sample_rate, extended=False))
        except (RuntimeWarning, ValueError, IndexError) as error:
            raise MetricError("STOI needs 0.4 s of speech after silent frames are removed") from error
    return _require_finite_metric(value, "STOI")


def dnsmos(samples_1N: Tensor, sample_rate: int) -> DnsmosScores:
    """DNSMOS P.835 scores of a sound without a reference, at 16 kHz: the network and the windows of speechmos.

    Raises:
        MetricError: silence, less than 0.25 s (speechmos repeats what it gets up to 9 s), or samples beyond
            [-1, 1].
    """
    _check_finite(samples_1N, "the sound")
    if samples_1N.shape[1] < MIN_MOS_S * sample_rate:
        raise MetricError(f"DNSMOS needs {MIN_MOS_S:g} s")
    peak = float(samples_1N.abs().max())
    if peak > 1.0:
        raise MetricError(f"DNSMOS takes samples in [-1, 1]; these reach {peak:.3g}")
    if peak < _SILENCE:
        raise MetricError("the sound is silent")
    from speechmos import dnsmos as package

    scores = package.run(_speech_band(samples_1N, sample_rate).clip(-1.0, 1.0), SPEECH_RATE)
    values = (float(scores[name]) for name in ("ovrl_mos", "sig_mos", "bak_mos"))
    return DnsmosScores(*(_require_finite_metric(value, "DNSMOS") for value in values))


def _magnitude(samples_1N: Tensor, window: int) -> Tensor:
    """`[F, T]`, fp32."""
    spectrum_1FT = torch.stft(
        samples_1N.float(),
        window,
        window // 4,
        window=torch.hann_window(window),
        center=True,
        pad_mode="reflect",
        return_complex=True,
    )
    return spectrum_1FT[0].abs()


@lru_cache(maxsize=32)
def _mel_filters(sample_rate: int, window: int, bands: int) -> Tensor:
    from librosa.filters import mel

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Empty filters detected")
        return torch.from_numpy(mel(sr=sample_rate, n_fft=window, n_mels=bands, dtype=np.float32))


def _speech_band(samples_1N: Tensor, sample_rate: int) -> NDArray[np.float32]:
    samples_N: NDArray[np.float32] = resample(samples_1N.float(), sample_rate, SPEECH_RATE)[0].numpy()
    return samples_N


def _check_pair(reference_1N: Tensor, decoded_1N: Tensor) -> None:
    if reference_1N.shape != decoded_1N.shape:
        raise ValueError(f"different shapes: {list(reference_1N.shape)}, {list(decoded_1N.shape)}")
    _check_finite(reference_1N, "the reference")
    _check_finite(decoded_1N, "the decoded sound")


def _check_finite(samples_1N: Tensor, name: str) -> None:
    if samples_1N.ndim != 2 or samples_1N.shape[0] != 1 or samples_1N.shape[1] == 0:
        raise ValueError(f"{name} must be mono, [1, samples >= 1], not {list(samples_1N.shape)}")
    if not bool(torch.isfinite(samples_1N).all()):
        raise MetricError(f"{name} holds NaN or infinity")


def _check_both_audible(reference_1N: Tensor, decoded_1N: Tensor) -> None:
    for name, samples in (("the reference", reference_1N), ("the decoded sound", decoded_1N)):
        if float(samples.abs().max()) < _SILENCE:
            raise MetricError(f"{name} is silent")


def _check_mirror(samples_1N: Tensor, sample_rate: int, windows: tuple[int, ...]) -> None:
    shortest = max(windows) // 2 + 1  # mirrored ends need more samples than half a window
    if samples_1N.shape[1] < shortest:
        raise MetricError(f"shorter than {1000 * shortest / sample_rate:.0f} ms, half the longest window")


def _require_finite_metric(value: float, name: str) -> float:
    if not math.isfinite(value):
        raise MetricError(f"{name} is {value}")
    return value


def _message(error: Any) -> str:
    text = error.args[0] if getattr(error, "args", None) else error
    return (text.decode() if isinstance(text, bytes) else str(text)).strip().rstrip(".")
