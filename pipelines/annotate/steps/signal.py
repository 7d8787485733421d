"""The step `signal`: level, peak, loudness and clipping of a segment."""

from __future__ import annotations

from typing import ClassVar, Literal

from pipelines.annotate.step import Segment
from pipelines.steps.step import Resources, StepConfig, Value

_CLIPPING_LEVEL = 0.999
_FLOOR_DBFS = -120.0


class SignalConfig(StepConfig):
    """Settings of `signal`: none."""


class Signal:
    """Level, peak, loudness and clipping of a segment, as it was recorded."""

    name = "signal"
    level: ClassVar[Literal["segment"]] = "segment"
    needs: tuple[str, ...] = ()
    version: ClassVar[int] = 1
    resources = Resources()

    def __init__(self, config: SignalConfig) -> None:
        del config

    def missing(self) -> str | None:
        return None

    def setup(self) -> None:
        """Nothing to load."""

    def process(self, item: Segment) -> Value:
        """`loudness_lufs` by ITU-R BS.1770; null where the segment is too short or too quiet for it."""
        from audiollm.audio.samples import integrated_loudness_lufs, peak_dbfs, rms_dbfs

        waveform = item.waveform()
        samples_CN = waveform.samples_CN
        loudness = integrated_loudness_lufs(waveform if waveform.num_channels <= 5 else waveform.mono())
        return {
            "level_dbfs": round(max(rms_dbfs(samples_CN), _FLOOR_DBFS), 2),
            "peak_dbfs": round(max(peak_dbfs(samples_CN), _FLOOR_DBFS), 2),
            "loudness_lufs": round(loudness, 2) if loudness > _FLOOR_DBFS else None,
            "clipped_share": round(float((samples_CN.abs() >= _CLIPPING_LEVEL).double().mean()), 6),
        }
