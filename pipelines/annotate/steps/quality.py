"""The step `quality`: scores of quality models, and estimates of noise, bandwidth and reverberation.

Models learned from listeners how good a recording sounds, on scales of 1 (bad) to 5 (excellent): DNSMOS P.835 comes
with speechmos; UTMOS (naturalness) and SIGMOS (P.804) are given as ONNX files, any other as a class, `module:Class`.

Noise, bandwidth and reverberation are estimated without a clean reference and without a model; `benchmarks/quality.py`
measures the error of each estimate.

Shapes: B bands, F frames, K frequency bins, N samples, W frames of one window.
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator

from audiollm.errors import ConfigError
from audiollm.onnx_models import package_file, single_thread_session
from audiollm.recipe.plug_ins import import_named, is_import_path, plug_in_facts
from pipelines.annotate.step import Segment, SegmentStep
from pipelines.steps.step import StepConfig, Value

SAMPLE_RATE = 16000

_FRAME, _HOP = 512, 128
_HOP_S = _HOP / SAMPLE_RATE
_NUM_BANDS, _FIRST_BIN = 12, 2  # from 62 Hz: hum and offsets are no part of it
_FLOOR = 1e-13  # power of a band without sound, far below the rounding of 16 bits
_MIN_S = 1.0

_SMOOTHING, _QUIET = 8, 0.1
# a tenth of white noise, smoothed so, lies below this share of its mean: the wider the band, the steadier
_QUIET_SHARE_B = np.array([0.676, 0.7, 0.717, 0.736, 0.765, 0.797, 0.804, 0.824, 0.839, 0.859, 0.868, 0.878])
_ACTIVE_DB = 30.0  # frames this far below the loud ones are not speech
_ABOVE_NOISE = 0.1  # nor are frames with less than a tenth more power than the noise
_SNR_RANGE_DB = (-20.0, 80.0)

_DECAY_WINDOWS, _DECAY_QUANTILES = (8, 16), (50, 75, 90)
# Fitted by `benchmarks/quality.py --fit` on speech in simulated rooms. Weights of the logarithms of the two median
# decay times, and of all six; at the end the constant
_RT60_WEIGHTS = (0.6364, 0.7165, 0.361)
_C50_WEIGHTS = (0.06327, -2.254, -8.174, 3.837, -2.69, -9.306, -11.43)
_MIN_DECAYS, _MIN_SNR_DB = 8, 6.0
_RT60_RANGE_S, _C50_RANGE_DB = (0.05, 5.0), (-15.0, 40.0)

_BAND_HZ = 250
_BELOW_PEAK_DB, _SPREAD_DB = 60.0, 8.0


class Reverberation(NamedTuple):
    """`rt60_s`: time in which the room's sound falls by 60 dB; `c50_db`: its first 50 ms against all that is later."""

    rt60_s: float
    c50_db: float


def band_energies(samples_N: NDArray[np.float32]) -> NDArray[np.float64] | None:
    """Power in 12 bands of equal width on the mel scale, 62 Hz to 8 kHz, every 8 ms, [F, B].

    Args:
        samples_N: mono at 16 kHz.

    Returns:
        None where the sound is shorter than a second (too little pause to tell noise by) or digitally silent.
    """
    if len(samples_N) < _MIN_S * SAMPLE_RATE or not np.any(samples_N):
        return None
    window_N = np.hanning(_FRAME + 1)[:-1]
    window_N /= np.sqrt((window_N**2).sum())
    frames_FN = np.lib.stride_tricks.sliding_window_view(samples_N, _FRAME)[::_HOP]
    power_FK = np.abs(np.fft.rfft(frames_FN * window_N)) ** 2
    mel_K = 1127.0 * np.log1p(np.fft.rfftfreq(_FRAME, 1 / SAMPLE_RATE) / 700.0)
    edges = np.searchsorted(mel_K, np.linspace(mel_K[_FIRST_BIN], mel_K[-1], _NUM_BANDS + 1)[:-1])
    energies_FB: NDArray[np.float64] = np.add.reduceat(power_FK, edges, axis=1) + _FLOOR
    return energies_FB


def signal_to_noise_db(energies_FB: NDArray[np.float64]) -> float:
    """Estimate the power of active sound, without the noise, over that of the noise, in dB within -20..80.

    The noise of each band is what is left in its quietest tenth (64 ms at a time), as between words, corrected by what
    a tenth of steady noise is to its mean. Bands have their quiet moments apart, so short pauses are enough; unlike
    WADA-SNR it needs no law of how speech is distributed.

    What comes and goes as fast as speech (babble, music) counts as speech: such noise is underestimated. In a clip of a
    second or two without any pause the quietest speech counts as noise: a clean one can read 20 dB.

    Source: minimum statistics (Martin, 2001), with a quantile in place of the minimum.
    """
    noise = _noise_B(energies_FB).sum()
    above_F = energies_FB.sum(axis=1) - noise
    active_F = above_F >= max(np.percentile(above_F, 95) * 10 ** (-_ACTIVE_DB / 10), _ABOVE_NOISE * noise)
    signal = above_F[active_F].mean() if active_F.any() else 0.0
    ratio = max(signal, noise * 10 ** (_SNR_RANGE_DB[0] / 10)) / noise
    return float(np.clip(10 * np.log10(ratio), *_SNR_RANGE_DB))


def reverberation(energies_FB: NDArray[np.float64]) -> Reverberation | None:
    """Estimate reverberation time and clarity from the decay of each band's sound after it stops.

    Sounds end no faster than the room lets them: the steepest falls tell the room's. Two regressions lead from them to
    `rt60_s` and `c50_db`. The clarity is the more certain one: in a dry recording the late sound that the reverberation
    time is about is not heard at all.

    Returns:
        None where too little falls far enough above the noise: below 6 dB, a steady tone, a very short clip.

    Source: Prego et al., "A blind algorithm for reverberation-time estimation using subband decomposition" (2012), for
    the idea of subband decays.
    """
    decays = log_decay_times(energies_FB)
    if decays is None or signal_to_noise_db(energies_FB) < _MIN_SNR_DB:
        return None
    medians = decays[:: len(_DECAY_QUANTILES)]
    rt60_log = medians @ np.array(_RT60_WEIGHTS[:-1]) + _RT60_WEIGHTS[-1]
    c50_db = decays @ np.array(_C50_WEIGHTS[:-1]) + _C50_WEIGHTS[-1]
    return Reverberation(
        float(np.exp(np.clip(rt60_log, *np.log(_RT60_RANGE_S)))),
        float(np.clip(c50_db, *_C50_RANGE_DB)),
    )


def log_decay_times(energies_FB: NDArray[np.float64]) -> NDArray[np.float64] | None:
    """Logarithms of the seconds that 60 dB take at the steepness that 50, 75 and 90 % of all falls do not exceed.

    Returns:
        Three for falls of 64 ms, three for falls of 128 ms; None where there are fewer than 8 of either.
    """
    level_FB = 10 * np.log10(energies_FB)
    noise_B = np.minimum(_noise_B(energies_FB), np.percentile(energies_FB, 95, axis=0) / 100)
    lowest_B = 10 * np.log10(noise_B) + 6
    loud_B = np.percentile(level_FB, 95, axis=0) - 25
    features: list[float] = []
    for length in _DECAY_WINDOWS:
        if len(level_FB) <= length:
            return None
        levels_FBW = np.lib.stride_tricks.sliding_window_view(level_FB, length, axis=0)
        times_W = np.arange(length) - (length - 1) / 2
        slopes_FB = levels_FBW @ times_W / (times_W**2).sum()
        falls_FB = -slopes_FB * (length - 1)
        # mean square about the fitted line, without building the lines
        spread_FB = levels_FBW.var(axis=-1) - slopes_FB**2 * (times_W**2).mean()
        straight_FB = np.sqrt(np.maximum(spread_FB, 0)) < np.maximum(1.0, 0.15 * falls_FB)
        heard_FB = (levels_FBW[..., -1] > lowest_B) & (levels_FBW[..., 0] > loud_B)
        rates = -slopes_FB[(falls_FB > 3) & straight_FB & heard_FB] / _HOP_S
        if len(rates) < _MIN_DECAYS:
            return None
        features += np.log(60 / np.percentile(rates, _DECAY_QUANTILES)).tolist()
    return np.array(features)


def bandwidth_hz(samples_N: NDArray[np.float32], sample_rate: int) -> float | None:
    """Estimate the highest frequency with sound, in steps of 250 Hz; at most 4,000 for a former 8 kHz recording.

    A band counts when its mean level is within 60 dB of the strongest band's (per Hz), and when it comes and goes (its
    loud tenth is 8 dB above its quiet one), which dither and the noise of a converter do not. Where even the strongest
    band is as steady as that (rain, an engine), its level alone counts.

    A cheap resampler (linear interpolation) leaves mirror images of the sound above its old limit: they count.

    Args:
        samples_N: mono, at the rate at which it was recorded.

    Returns:
        None where the sound is too short or digitally silent.
    """
    length = 1 << round(np.log2(0.04 * sample_rate))
    if len(samples_N) < 8 * length or not np.any(samples_N):
        return None
    frames_FN = np.lib.stride_tricks.sliding_window_view(samples_N, length)[:: length // 2]
    frames_FN = (frames_FN - frames_FN.mean(axis=1, keepdims=True)) * np.hanning(length + 1)[:-1]
    power_FK = np.abs(np.fft.rfft(frames_FN)) ** 2
    bands_K = (np.fft.rfftfreq(length, 1 / sample_rate) / _BAND_HZ).astype(int)
    num_bands = max(1, sample_rate // 2 // _BAND_HZ)
    edges = np.searchsorted(bands_K, np.arange(num_bands))
    num_bins = np.searchsorted(bands_K, num_bands)
    widths_B = np.diff(np.append(edges, num_bins))
    energies_FB = np.add.reduceat(power_FK[:, :num_bins], edges, axis=1) / widths_B + 1e-20
    frames_F = energies_FB.sum(axis=1)
    active_F = frames_F > np.percentile(frames_F, 95) * 10 ** (-_ACTIVE_DB / 10)
    level_B = 10 * np.log10(energies_FB[active_F].mean(axis=0))
    quiet_B, loud_B = 10 * np.log10(np.percentile(energies_FB, (10, 95), axis=0))
    loud_enough_B = level_B > level_B.max() - _BELOW_PEAK_DB
    lively_B = loud_B - quiet_B > _SPREAD_DB
    counted_B = loud_enough_B & lively_B if lively_B[level_B.argmax()] else loud_enough_B
    return float(min((np.flatnonzero(counted_B)[-1] + 1) * _BAND_HZ, sample_rate / 2))


# Private


def _noise_B(energies_FB: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean power of the steady part of each band."""
    sums_FB = np.cumsum(energies_FB, axis=0)
    smooth_FB = (sums_FB[_SMOOTHING:] - sums_FB[:-_SMOOTHING]) / _SMOOTHING
    quiet_B: NDArray[np.float64] = np.quantile(smooth_FB, _QUIET, axis=0) / _QUIET_SHARE_B
    return np.maximum(quiet_B, _FLOOR)


class QualityConfig(StepConfig):
    """Settings of `quality`: the measurements, and their model files."""

    dnsmos: bool = True
    """Score by DNSMOS P.835: speech, background, overall. The dearest of what is on by default."""
    windows: int = Field(3, ge=1)
    """Windows of 9 s a segment that DNSMOS hears, 0.2 s of one core each."""
    snr: bool = True
    """Estimate the speech's level over the noise's."""
    bandwidth: bool = True
    """Find the frequency up to which there is sound."""
    reverberation: bool = True
    """Estimate reverberation time and clarity."""
    utmos: Path | None = None
    """UTMOS22 (strong) as .onnx: waveform at 16 kHz in, one score out."""
    sigmos: Path | None = None
    """SIGMOS as .onnx, `model-sigmos_*.onnx` of microsoft/SIG-Challenge (ICASSP2024/sigmos)."""
    scorer: str | None = None
    """`package.module:Class` of a `QualityScorer` (UTMOSv2, SQUIM, ...): its score is `quality.score`."""

    @field_validator("scorer")
    @classmethod
    def _scorer_is_an_import_path(cls, value: str | None) -> str | None:
        if value is not None and not is_import_path(value):
            raise ValueError(f"{value!r}: give package.module:Class; docs/extending.md has an example")
        try:
            plug_in_facts([value] if value else [])
        except ConfigError as error:
            raise ValueError(" ".join(str(error).split())) from error
        return value


class QualityScorer(Protocol):
    """A quality model as a class that is made without arguments, once in every worker."""

    sample_rate: int

    def score(self, samples_N: NDArray[np.float32]) -> float:
        """The score of mono speech at `sample_rate`, not empty; not finite: there is none."""


class Quality(SegmentStep[QualityConfig]):
    """Predicted quality of a segment of speech."""

    name = "quality"
    settings = QualityConfig
    version: ClassVar[int] = 2

    def __init__(self, config: QualityConfig) -> None:
        super().__init__(config)
        self._dnsmos: Dnsmos | None = None
        self._utmos: Utmos | None = None
        self._sigmos: Sigmos | None = None
        self._scorer: QualityScorer | None = None

    def missing(self) -> str | None:
        for option, path in (("utmos", self.config.utmos), ("sigmos", self.config.sigmos)):
            if path is not None and not path.is_file():
                return f"quality.{option}: no file {path}: give its .onnx, or leave the option out"
        if self.config.scorer is not None:
            try:
                load_scorer_class(self.config.scorer)
            except ConfigError as error:
                return f"quality.scorer: {' '.join(str(error).split())}"
        if self.config.dnsmos and importlib.util.find_spec("speechmos") is None:
            return (
                "quality.dnsmos: the package speechmos is missing: pip install speechmos, or set it to false"
            )
        models = self.config.dnsmos or self.config.utmos or self.config.sigmos
        if models and importlib.util.find_spec("onnxruntime") is None:
            return "quality: the package onnxruntime is missing: pip install onnxruntime"
        return None

    def setup(self) -> None:
        """Load the models that are asked for.

        Raises:
            ConfigError: a scorer that cannot be made.
        """
        self._dnsmos = Dnsmos() if self.config.dnsmos else None
        self._utmos = Utmos(self.config.utmos) if self.config.utmos else None
        self._sigmos = Sigmos(self.config.sigmos) if self.config.sigmos else None
        self._scorer = make_scorer(self.config.scorer) if self.config.scorer else None

    def process(self, item: Segment) -> Value:
        """Compute the requested scores, by name; null where the segment is too short or too quiet."""
        bandwidth = _bandwidth(item) if self.config.bandwidth else {}
        return self._estimates(item) | bandwidth | self._scores(item)

    def _estimates(self, item: Segment) -> Value:

        value: Value = {}
        if not (self.config.snr or self.config.reverberation):
            return value
        energies_FB = band_energies(item.samples(SAMPLE_RATE))
        if self.config.snr:
            snr_db = signal_to_noise_db(energies_FB) if energies_FB is not None else None
            value["snr_db"] = round(snr_db, 1) if snr_db is not None else None
        if self.config.reverberation:
            room = reverberation(energies_FB) if energies_FB is not None else None
            value["rt60_s"] = round(room.rt60_s, 2) if room else None
            value["c50_db"] = round(room.c50_db, 1) if room else None
        return value

    def _scores(self, item: Segment) -> Value:
        value: Value = {}
        if self._dnsmos is not None:
            # a shorter clip is repeated until it fills a window: others would hear the same again
            windows = self.config.windows if item.duration_s >= WINDOW_S else 1
            scores = self._dnsmos.score(item.samples(SAMPLE_RATE), windows)
            value["dnsmos"] = {name: round(getattr(scores, name), 3) for name in ("sig", "bak", "ovr")}
        if self._utmos is not None:
            value["utmos"] = round(self._utmos.score(item.samples(SAMPLE_RATE)), 3)
        if self._sigmos is not None:
            sigmos_scores = self._sigmos.score(item.samples(SIGMOS_RATE))
            value["sigmos"] = {name: round(score, 3) for name, score in sigmos_scores.items()}
        if self._scorer is not None:
            score = float(self._scorer.score(item.samples(self._scorer.sample_rate).copy()))
            value["score"] = round(score, 3) if math.isfinite(score) else None
        return value


def load_scorer_class(path: str) -> type[QualityScorer]:
    """The class at `package.module:Class`.

    Raises:
        ConfigError: it cannot be imported (the reason names a package that is not installed), or is no scorer.
    """
    scorer_class = import_named(path, "install what it imports; docs/extending.md has an example of a scorer")
    if not isinstance(scorer_class, type) or not callable(getattr(scorer_class, "score", None)):
        raise ConfigError(
            "is no class with a method `score`", path, "docs/extending.md has an example of a scorer"
        )
    return scorer_class


def make_scorer(path: str) -> QualityScorer:
    """
    Raises:
        ConfigError: it cannot be made, or does not say its sample rate.
    """
    try:
        scorer = load_scorer_class(path)()
    except ConfigError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"quality.scorer cannot be made: {reason}", path, "mend it, or leave it out"
        ) from error
    if not isinstance(getattr(scorer, "sample_rate", None), int):
        raise ConfigError(
            "quality.scorer has no `sample_rate`", path, "set it to the rate that the model hears, in Hz"
        )
    return scorer


def _bandwidth(item: Segment) -> Value:
    waveform = item.waveform().mono()
    return {"bandwidth_hz": bandwidth_hz(waveform.samples_CN[0].numpy(), waveform.sample_rate)}


"""Sample rate of DNSMOS and UTMOS."""
WINDOW_S = 9.01
_WINDOW = int(WINDOW_S * SAMPLE_RATE)
# speechmos/dnsmos.py, `get_polyfit_val`: from the network's outputs to opinion scores
_SIG = (-0.08397278, 1.22083953, 0.0052439)
_BAK = (-0.13166888, 1.60915514, -0.39604546)
_OVR = (-0.06766283, 1.11546468, 0.04602535)

SIGMOS_RATE = 48000
SIGMOS_SCORES = ("coloration", "discontinuity", "loudness", "noise", "reverberation", "sig", "ovrl")
"""In the order of the model's outputs."""
_SIGMOS_WINDOW, _SIGMOS_HOP = 960, 480
_COMPRESSION = 0.3


@dataclass(frozen=True)
class OpinionScores:
    """Opinion scores of P.835, 1 (bad) to 5 (excellent)."""

    sig: float
    bak: float
    ovr: float


class Dnsmos:
    """The `sig_bak_ovr` model in one single-thread session (speechmos opens two, and runs P.808 as well)."""

    def __init__(self) -> None:
        self._session = single_thread_session(package_file("speechmos", "dnsmos_models/sig_bak_ovr.onnx"))

    def score(self, samples_N: NDArray[np.float32], max_windows: int | None = None) -> OpinionScores:
        """Mean scores over windows of 9.01 s, a second apart; a shorter clip is doubled until it fills one.

        Args:
            samples_N: mono at 16 kHz, not empty; clipped to [-1, 1], beyond which the model knows nothing.
            max_windows: at most so many windows, spread evenly (each costs 0.2 s); None: all, as speechmos.

        Source: Reddy et al., DNSMOS P.835, and speechmos/dnsmos.py.
        """
        if len(samples_N) == 0:
            raise ValueError("an empty clip has no quality")
        samples_N = np.clip(samples_N, -1.0, 1.0)
        while len(samples_N) < _WINDOW:
            samples_N = np.append(samples_N, samples_N)
        num_windows = int(len(samples_N) // SAMPLE_RATE - WINDOW_S) + 1
        starts = [
            s for s in range(0, num_windows * SAMPLE_RATE, SAMPLE_RATE) if s + _WINDOW <= len(samples_N)
        ] or [0]
        if max_windows is not None and len(starts) > max_windows:
            indices = np.linspace(0, len(starts) - 1, max_windows).round().astype(int)
            starts = [starts[index] for index in indices]
        raw = np.array([self._run(samples_N[start : start + _WINDOW]) for start in starts])
        scores = [np.polyval(fit, raw[:, i]).mean() for i, fit in enumerate((_SIG, _BAK, _OVR))]
        return OpinionScores(*(float(score) for score in scores))

    def _run(self, window_N: NDArray[np.float32]) -> NDArray[np.float32]:
        outputs: NDArray[np.float32] = self._session.run(
            None, {"input_1": window_N[None].astype(np.float32)}
        )[0][0]
        return outputs


class Utmos:
    """UTMOS22 (strong learner): how natural speech sounds, from an ONNX file.

    The file takes `[1, N]` samples at 16 kHz, as they are, and gives one number, already a score.

    Raises:
        ValueError: the file wants or gives something else.

    Source: Saeki et al., "UTMOS: UTokyo-SaruLab System for VoiceMOS Challenge 2022"; the interface is that of the
    public exports of tarepan/SpeechMOS's `utmos22_strong`.
    """

    def __init__(self, path: Path) -> None:
        self._session = single_thread_session(path)
        inputs = self._session.get_inputs()
        if len(inputs) != 1 or len(inputs[0].shape) != 2 or inputs[0].type != "tensor(float)":
            raise ValueError(_other_interface(path, "UTMOS", "one input [batch, samples] of float32", inputs))
        self._path, self._input = path, inputs[0].name

    def score(self, samples_N: NDArray[np.float32]) -> float:
        """The score of mono speech at 16 kHz, not empty."""
        output = self._session.run(None, {self._input: samples_N[None].astype(np.float32)})[0]
        if output.size != 1:
            raise ValueError(
                f"{self._path}: expected one number per clip, as of UTMOS, got {list(output.shape)}"
            )
        return float(output.item())


class Sigmos:
    """SIGMOS: the seven scores of ITU-T P.804 for speech at 48 kHz, from the ONNX file of the SIG challenge.

    The file takes `[1, 3, F, 481]`: magnitude, real and imaginary part of the compressed spectrum; it gives `[1, 7]`.

    Raises:
        ValueError: the file wants or gives something else.

    Source: Ristea et al., "ICASSP 2024 Speech Signal Improvement Challenge"; microsoft/SIG-Challenge,
    ICASSP2024/sigmos/sigmos.py.
    """

    def __init__(self, path: Path) -> None:
        self._session = single_thread_session(path)
        inputs = self._session.get_inputs()
        shape = inputs[0].shape if len(inputs) == 1 else []
        if len(shape) != 4 or (shape[1] not in (3, None) and not isinstance(shape[1], str)):
            raise ValueError(_other_interface(path, "SIGMOS", "one input [1, 3, frames, 481]", inputs))
        self._path, self._input = path, inputs[0].name

    def score(self, samples_N: NDArray[np.float32]) -> dict[str, float]:
        """The scores of mono speech at 48 kHz, not empty, by the names of `SIGMOS_SCORES`."""
        features = sigmos_features(samples_N)
        output = self._session.run(None, {self._input: features})[0]
        if output.size != len(SIGMOS_SCORES):
            raise ValueError(f"{self._path}: expected the seven scores of SIGMOS, got {list(output.shape)}")
        return {name: float(value) for name, value in zip(SIGMOS_SCORES, output.reshape(-1), strict=True)}


def sigmos_features(samples_N: NDArray[np.float32]) -> NDArray[np.float32]:
    """Magnitude, real and imaginary part of the spectrum, magnitudes to the power of 0.3, [1, 3, F, 481].

    Frames of 20 ms, 10 ms apart, under the root of a Hann window; the first begins 10 ms before the sound.
    """
    last = len(samples_N) % _SIGMOS_HOP or _SIGMOS_HOP
    padded_N = np.pad(samples_N, (_SIGMOS_WINDOW - _SIGMOS_HOP, _SIGMOS_WINDOW - last))
    window_N = np.sqrt(np.hanning(_SIGMOS_WINDOW + 1)[:-1]).astype(np.float32)
    frames_FN = np.lib.stride_tricks.sliding_window_view(padded_N, _SIGMOS_WINDOW)[::_SIGMOS_HOP] * window_N
    spectrum_FK = np.fft.rfft(frames_FN)
    magnitude_FK = np.sqrt(np.maximum(np.abs(spectrum_FK) ** 2, 1e-12))
    compressed_FK = spectrum_FK * magnitude_FK ** (_COMPRESSION - 1)
    features = np.stack([magnitude_FK**_COMPRESSION, compressed_FK.real, compressed_FK.imag])
    return features[None].astype(np.float32)


def _other_interface(path: Path, name: str, expected: str, inputs: list[Any]) -> str:
    actual = ", ".join(f"{value.name} {value.shape} {value.type}" for value in inputs)
    return f"{path}: not {name}: {expected} expected, the file has {actual}"
