"""The step `quality`: scores of quality models, and estimates of noise, bandwidth and reverberation.

Models learned from listeners how good a recording sounds, on scales of 1 (bad) to 5 (excellent): DNSMOS P.835 comes
with speechmos; UTMOS (naturalness) and SIGMOS (P.804) are given as ONNX files.

Shapes: F frames, K frequency bins, N samples.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from audiollm.onnx_models import package_file, single_thread_session
from pipelines.annotate.step import Segment, SegmentStep
from pipelines.steps.step import StepConfig, Value


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

    def missing(self) -> str | None:
        for option, path in (("utmos", self.config.utmos), ("sigmos", self.config.sigmos)):
            if path is not None and not path.is_file():
                return f"quality.{option}: no file {path}: give its .onnx, or leave the option out"
        if self.config.dnsmos and importlib.util.find_spec("speechmos") is None:
            return (
                "quality.dnsmos: the package speechmos is missing: pip install speechmos, or set it to false"
            )
        models = self.config.dnsmos or self.config.utmos or self.config.sigmos
        if models and importlib.util.find_spec("onnxruntime") is None:
            return "quality: the package onnxruntime is missing: pip install onnxruntime"
        return None

    def setup(self) -> None:
        """Load the models that are asked for."""
        self._dnsmos = Dnsmos() if self.config.dnsmos else None
        self._utmos = Utmos(self.config.utmos) if self.config.utmos else None
        self._sigmos = Sigmos(self.config.sigmos) if self.config.sigmos else None

    def process(self, item: Segment) -> Value:
        """Compute the requested scores, by name; null where the segment is too short or too quiet."""
        bandwidth = _bandwidth(item) if self.config.bandwidth else {}
        return self._estimates(item) | bandwidth | self._scores(item)

    def _estimates(self, item: Segment) -> Value:
        from pipelines.annotate.measurements import acoustics

        value: Value = {}
        if not (self.config.snr or self.config.reverberation):
            return value
        energies_FB = acoustics.band_energies(item.samples(acoustics.SAMPLE_RATE))
        if self.config.snr:
            snr_db = acoustics.signal_to_noise_db(energies_FB) if energies_FB is not None else None
            value["snr_db"] = round(snr_db, 1) if snr_db is not None else None
        if self.config.reverberation:
            room = acoustics.reverberation(energies_FB) if energies_FB is not None else None
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
        return value


def _bandwidth(item: Segment) -> Value:
    from pipelines.annotate.measurements.acoustics import bandwidth_hz

    waveform = item.waveform().mono()
    return {"bandwidth_hz": bandwidth_hz(waveform.samples_CN[0].numpy(), waveform.sample_rate)}


SAMPLE_RATE = 16000
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
