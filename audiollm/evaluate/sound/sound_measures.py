"""Measures of generated sounds as pure functions: Fréchet distance, divergence of classes, inception score, onsets.

A definition that others use is named in the docstring. A measure that cannot be computed raises `MetricError`
with the reason; none is ever -1 or NaN.

Shapes: N sounds or samples, M other sounds or mel bands, D embedding dimension, K classes, O offsets, T frames.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from audiollm.audio import Waveform
from audiollm.evaluate.judges.taggers import probabilities
from audiollm.evaluate.report.metric_error import MetricError
from audiollm.evaluate.sound.sound_judges import Vector

Values = NDArray[np.float64]

_SMALLEST = 1e-10
_FEWEST_FLUXES = 20
OFFSETS_S = np.linspace(-2.0, 2.0, 21)
"""Classes of a judge of synchrony (Synchformer): seconds by which the sound is late."""


def frechet_distance(first_ND: Values, second_MD: Values) -> float:
    """Distance of two Gaussians fitted to embeddings (FID, arXiv 1706.08500; FAD, 1812.08466).

    ‖μ₁ − μ₂‖² + tr(Σ₁ + Σ₂ − 2 (Σ₁ Σ₂)^½), with unbiased covariances.

    Raises:
        MetricError: too few sounds for a covariance of D dimensions, or values that are not finite.
    """
    for values in (first_ND, second_MD):
        if not np.isfinite(values).all():
            raise MetricError("embeddings that are not finite")
        if len(values) <= values.shape[1]:
            raise MetricError(
                f"{len(values)} sounds; a covariance of {values.shape[1]} dimensions needs {values.shape[1] + 1}"
            )
    mean_gap = first_ND.mean(axis=0) - second_MD.mean(axis=0)
    first_DD, second_DD = (np.cov(values, rowvar=False, ddof=1) for values in (first_ND, second_MD))
    return gaussian_distance(mean_gap, np.atleast_2d(first_DD), np.atleast_2d(second_DD))


def gaussian_distance(mean_gap_D: Values, first_DD: Values, second_DD: Values) -> float:
    """The Fréchet distance of two Gaussians from the gap of their means and their covariances.

    The trace of (Σ₁ Σ₂)^½ is the sum of the roots of the eigenvalues of Σ₁^½ Σ₂ Σ₁^½, which is symmetric.
    """
    scales, axes = np.linalg.eigh(first_DD)
    root_DD = (axes * np.sqrt(np.maximum(scales, 0))) @ axes.T
    crossed = np.linalg.eigvalsh(root_DD @ second_DD @ root_DD)
    shared = 2 * np.sqrt(np.maximum(crossed, 0)).sum()
    distance = mean_gap_D @ mean_gap_D + np.trace(first_DD) + np.trace(second_DD) - shared
    return max(0.0, float(distance))


SAME_SOUND_DB = 2.0
"""Two sounds within this `band_distance` are taken for the same."""
MAX_LOUDER_DB = 10.0


def band_distance(first_N: Values, second_N: Values, sample_rate: int) -> float:
    """Mean difference in dB of the energies of two sounds in 24 mel bands and fifths of a second.

    So coarse that two takes of the same rain are near to each other. Energies below -70 dBFS count as -70.

    Raises:
        MetricError: sounds of different lengths, or shorter than a fifth of a second.
    """
    import librosa

    window = 2 ** round(np.log2(0.064 * sample_rate))
    hop = window // 4
    frames = round(0.2 * sample_rate / hop)
    if len(first_N) != len(second_N):
        raise MetricError(f"{len(first_N)} and {len(second_N)} samples cannot be compared")
    if len(first_N) < window + (frames - 1) * hop:
        raise MetricError("shorter than a fifth of a second")
    levels = []
    for samples_N in (first_N, second_N):
        power_MT = librosa.feature.melspectrogram(
            y=samples_N, sr=sample_rate, n_fft=window, hop_length=hop, n_mels=24, center=False
        )
        num_frames = power_MT.shape[1] // frames * frames
        mean_MT = power_MT[:, :num_frames].reshape(24, -1, frames).mean(axis=2) / window
        levels.append(10 * np.log10(np.maximum(mean_MT, 1e-7)))
    return float(np.abs(levels[0] - levels[1]).mean())


def is_far_from(made_N: Values, real_N: Values, nothing_N: Values, sample_rate: int) -> bool:
    """Whether a sound has little to do with the real one: a closed set of classes names a blast of noise, too.

    It is further away than twice what `nothing_N` is, which a sound of the same kind at another pitch is not (it lacks
    as much, and adds as much), or louder by more than 10 dB.

    Args:
        nothing_N: what the real sound would be heard in: silence, or the track without it.

    Raises:
        MetricError: see `band_distance`.
    """
    nothing = band_distance(nothing_N, real_N, sample_rate)
    levels = [10 * np.log10(np.mean(np.square(sound_N)) + 1e-10) for sound_N in (made_N, real_N)]
    is_further = band_distance(made_N, real_N, sample_rate) > 2 * nothing + SAME_SOUND_DB
    return bool(is_further or levels[0] - levels[1] > MAX_LOUDER_DB)


def class_divergence(reference_NK: Values, generated_NK: Values, kind: str) -> Values:
    """KL(reference ‖ generated) of the classes of each pair, `[N]`, from logits.

    Shares below 1e-10 count as 1e-10. audioldm-eval adds 1e-6 to those of the generated sound: its values are the same
    to 1e-4 where no share is small, and lower where a generated sound excludes what is in the real one.

    Args:
        kind: `softmax`, Σ p log(p / q) over shares that add up to 1 (av-benchmark, audioldm-eval); `sigmoid`, the same
            sum over classes judged one by one (audioldm-eval), whose shares do not add up to 1.

    Raises:
        MetricError: other numbers of sounds or classes, or scores that are not finite.
        ValueError: another kind.
    """
    if reference_NK.shape != generated_NK.shape:
        raise MetricError(f"classes of {reference_NK.shape} and {generated_NK.shape} cannot be paired")
    if kind not in ("softmax", "sigmoid"):
        raise ValueError(f"kind must be softmax or sigmoid, not {kind!r}")
    p_NK, q_NK = (probabilities(logits_NK, kind == "softmax") for logits_NK in (reference_NK, generated_NK))
    terms = p_NK * (np.log(np.maximum(p_NK, _SMALLEST)) - np.log(np.maximum(q_NK, _SMALLEST)))
    return _require_finite_values(terms.sum(axis=1))


def inception_score(logits_NK: Values) -> float:
    """exp of the mean KL(p(class | sound) ‖ p(class)) (arXiv 1606.03498), in one split.

    Raises:
        MetricError: fewer than two sounds, or scores that are not finite.
    """
    if len(logits_NK) < 2:
        raise MetricError("fewer than two sounds")
    p_NK = probabilities(logits_NK, exclusive=True)
    logs = np.log(np.maximum(p_NK, _SMALLEST)) - np.log(np.maximum(p_NK.mean(axis=0), _SMALLEST))
    return float(_require_finite_values(np.exp((p_NK * logs).sum(axis=1).mean())))


def cosines(first_ND: Values, second_ND: Values) -> Values:
    """Cosine of each pair of embeddings, `[N]`: of a sound and its text, the CLAP score.

    Raises:
        MetricError: an embedding of length 0, or one that is not finite.
    """
    lengths = np.linalg.norm(first_ND, axis=1) * np.linalg.norm(second_ND, axis=1)
    if not (_require_finite_values(lengths) > 0).all():
        raise MetricError("an embedding of length 0")
    return np.asarray((first_ND * second_ND).sum(axis=1) / lengths)


def desync(first_NO: Values, last_NO: Values) -> Values:
    """Mean size of the two most probable offsets of each sound in seconds, `[N]` (av-benchmark's DeSync).

    Args:
        first_NO, last_NO: scores of the 21 offsets for the first and the last 4.8 s.

    Raises:
        MetricError: another number of offsets, or scores that are no numbers.
    """
    for scores in (first_NO, last_NO):
        if scores.shape[1] != len(OFFSETS_S):
            raise MetricError(f"scores of {scores.shape[1]} offsets, not {len(OFFSETS_S)}")
        if np.isnan(scores).any():
            raise MetricError("scores that are no numbers")
    sizes = [np.abs(OFFSETS_S[scores.argmax(axis=1)]) for scores in (first_NO, last_NO)]
    return np.asarray(np.mean(sizes, axis=0))


def nearest_distances(sounds_ND: Values, known_MD: Values) -> Values:
    """Distance of each sound to the nearest known one, `[N]`, by embeddings of length 1.

    Generated sounds that are nearer to the training data than real held-out ones are copies.

    Raises:
        MetricError: nothing is known, or embeddings that are not finite.
    """
    if not len(known_MD):
        raise MetricError("no training sounds to compare with")
    directions_ND, known_directions_MD = (
        v / np.maximum(np.linalg.norm(v, axis=1, keepdims=True), _SMALLEST) for v in (sounds_ND, known_MD)
    )
    return _require_finite_values(
        np.sqrt(np.maximum(0.0, 2 - 2 * (directions_ND @ known_directions_MD.T).max(axis=1)))
    )


def match_onsets(heard_s: Values, wanted_s: Values, tolerance_s: float) -> Values:
    """Error of each wanted onset: the signed distance to its own heard one, in order; NaN where there is none.

    Each heard onset answers one wanted onset at most: pairs are formed from the nearest on.

    Args:
        tolerance_s: pairs that are further apart are none.
    """
    errors = np.full(len(wanted_s), np.nan)
    gaps = np.abs(heard_s[None] - wanted_s[:, None])
    while gaps.size and np.nanmin(gaps, initial=np.inf) <= tolerance_s:
        wanted_index, heard_index = np.unravel_index(int(np.nanargmin(gaps)), gaps.shape)
        errors[wanted_index] = heard_s[heard_index] - wanted_s[wanted_index]
        gaps[wanted_index, :], gaps[:, heard_index] = np.inf, np.inf
    return errors


def border_excess(samples_N: NDArray[np.float32], sample_rate: int, span_s: tuple[float, float]) -> float:
    """Largest spectral flux at the borders of a span over its 95th percentile outside of the span.

    Flux is the distance of neighbouring magnitude spectra, of 31 ms and a quarter of that apart. A border at an end of
    the track does not count.

    Raises:
        MetricError: the span has no border inside the track, or outside of it there is too little, or silence.
    """
    size = max(256, sample_rate // 32)
    hop = size // 4
    first, last = (round(second * sample_rate) for second in span_s)
    if len(samples_N) < size + hop:
        raise MetricError("the track is shorter than two spectra")
    frames = np.lib.stride_tricks.sliding_window_view(samples_N.astype(np.float64), size)[::hop] * np.hanning(
        size
    )
    flux = np.linalg.norm(np.diff(np.abs(np.fft.rfft(frames, axis=1)), axis=0), axis=1)
    centres = (np.arange(len(flux)) + 2.5) * hop
    borders = [border for border in (first, last) if size <= border <= len(samples_N) - size]
    if not borders:
        raise MetricError("the span has no border inside the track")
    near = np.any([np.abs(centres - border) < 2.5 * hop for border in borders], axis=0)
    outside = ((centres < first) | (centres > last)) & ~near
    if outside.sum() < _FEWEST_FLUXES:
        raise MetricError("too little of the track is outside of the span")
    usual = float(np.percentile(flux[outside], 95))
    if usual <= 0:
        raise MetricError("the track is silent outside of the span")
    return float(flux[near].max() / usual)


# Private


def _require_finite_values(values: Any) -> Values:
    if not np.isfinite(values).all():
        raise MetricError("embeddings or scores that are not finite")
    return np.asarray(values, np.float64)


ONSET_TOLERANCE_S = 0.2
"""An onset this near to the truth is in time."""
_ONSET_RATE, _ONSET_HOP = 16000, 160
_ONSET_RANGE_DB = 40.0
"""Sound that is further below the loudest moment does not begin."""
_RISE_HOPS, _APART_HOPS = 3, 15
_SILENT_PEAK = 1e-4


def energy_onsets(sound: Waveform) -> Vector:
    """Seconds at which the energy rises: peaks of the level's rise, by librosa's detector; none in silence."""
    import librosa
    from librosa.onset import onset_detect

    samples_N = sound.mono().resample(_ONSET_RATE).samples_CN[0].numpy()
    if np.abs(samples_N).max(initial=0.0) < _SILENT_PEAK:
        return np.zeros(0)
    power_T = librosa.feature.rms(y=samples_N, frame_length=2 * _ONSET_HOP, hop_length=_ONSET_HOP)[0] ** 2
    level_T = librosa.power_to_db(power_T, ref=np.max, top_db=_ONSET_RANGE_DB)
    rise_T = np.maximum(0.0, level_T - np.pad(level_T, (_RISE_HOPS, 0), mode="edge")[:-_RISE_HOPS])
    onset_frames = onset_detect(
        onset_envelope=rise_T, sr=_ONSET_RATE, hop_length=_ONSET_HOP, delta=0.2, wait=_APART_HOPS
    )
    return np.asarray(onset_frames * _ONSET_HOP / _ONSET_RATE, np.float64)
