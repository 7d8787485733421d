"""The step `quality`: scores of quality models, and estimates of noise, bandwidth and reverberation."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from pipelines.annotate.step import Segment
from pipelines.steps.step import Resources, StepConfig, Value

if TYPE_CHECKING:
    from pipelines.annotate.measurements.quality import Dnsmos, Sigmos, Utmos


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


class Quality:
    """Predicted quality of a segment of speech."""

    name = "quality"
    level: ClassVar[Literal["segment"]] = "segment"
    needs: tuple[str, ...] = ()
    version: ClassVar[int] = 2
    resources = Resources()

    def __init__(self, config: QualityConfig) -> None:
        self._config = config
        self._dnsmos: Dnsmos | None = None
        self._utmos: Utmos | None = None
        self._sigmos: Sigmos | None = None

    def missing(self) -> str | None:
        for option, path in (("utmos", self._config.utmos), ("sigmos", self._config.sigmos)):
            if path is not None and not path.is_file():
                return f"quality.{option}: no file {path}: give its .onnx, or leave the option out"
        if self._config.dnsmos and importlib.util.find_spec("speechmos") is None:
            return (
                "quality.dnsmos: the package speechmos is missing: pip install speechmos, or set it to false"
            )
        models = self._config.dnsmos or self._config.utmos or self._config.sigmos
        if models and importlib.util.find_spec("onnxruntime") is None:
            return "quality: the package onnxruntime is missing: pip install onnxruntime"
        return None

    def setup(self) -> None:
        """Load the models that are asked for."""
        from pipelines.annotate.measurements.quality import Dnsmos, Sigmos, Utmos

        self._dnsmos = Dnsmos() if self._config.dnsmos else None
        self._utmos = Utmos(self._config.utmos) if self._config.utmos else None
        self._sigmos = Sigmos(self._config.sigmos) if self._config.sigmos else None

    def process(self, item: Segment) -> Value:
        """Compute the requested scores, by name; null where the segment is too short or too quiet."""
        bandwidth = _bandwidth(item) if self._config.bandwidth else {}
        return self._estimates(item) | bandwidth | self._scores(item)

    def _estimates(self, item: Segment) -> Value:
        from pipelines.annotate.measurements import acoustics

        value: Value = {}
        if not (self._config.snr or self._config.reverberation):
            return value
        energies_FB = acoustics.band_energies(item.samples(acoustics.SAMPLE_RATE))
        if self._config.snr:
            snr_db = acoustics.signal_to_noise_db(energies_FB) if energies_FB is not None else None
            value["snr_db"] = round(snr_db, 1) if snr_db is not None else None
        if self._config.reverberation:
            room = acoustics.reverberation(energies_FB) if energies_FB is not None else None
            value["rt60_s"] = round(room.rt60_s, 2) if room else None
            value["c50_db"] = round(room.c50_db, 1) if room else None
        return value

    def _scores(self, item: Segment) -> Value:
        from pipelines.annotate.measurements.quality import SAMPLE_RATE, SIGMOS_RATE, WINDOW_S

        value: Value = {}
        if self._dnsmos is not None:
            # a shorter clip is repeated until it fills a window: others would hear the same again
            windows = self._config.windows if item.duration_s >= WINDOW_S else 1
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
