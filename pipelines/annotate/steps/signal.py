"""The steps `probe` (the form of a file) and `signal` (level, peak, loudness and clipping of a segment)."""

from __future__ import annotations

from typing import ClassVar

from pipelines.annotate.step import Recording, RecordingStep, Segment, SegmentStep
from pipelines.steps.step import StepConfig, Value

_CLIPPING_LEVEL = 0.999
_FLOOR_DBFS = -120.0


class SignalConfig(StepConfig):
    """Settings of `signal`: none."""


class Signal(SegmentStep[SignalConfig]):
    """Level, peak and loudness of a segment as it is heard in mono; clipping as it was recorded."""

    name = "signal"
    settings = SignalConfig
    measures_sounds = True
    version: ClassVar[int] = 2

    def process(self, item: Segment) -> Value:
        """`loudness_lufs` by ITU-R BS.1770; null where the segment is too short or too quiet for it. `channel`, from 1:
        the one that is heard, where the channels cancel each other and their mean would be silence; else null."""
        from audiollm.audio import Waveform
        from audiollm.audio.mixing import mix, mono_channel
        from audiollm.audio.samples import integrated_loudness_lufs, peak_dbfs, rms_dbfs

        recorded = item.waveform()
        channel = mono_channel(recorded.samples_CN)
        mono = Waveform(mix(recorded.samples_CN, channel), recorded.sample_rate)
        loudness = integrated_loudness_lufs(mono)
        return {
            "level_dbfs": round(max(rms_dbfs(mono.samples_CN), _FLOOR_DBFS), 2),
            "peak_dbfs": round(max(peak_dbfs(mono.samples_CN), _FLOOR_DBFS), 2),
            "loudness_lufs": round(loudness, 2) if loudness > _FLOOR_DBFS else None,
            "clipped_share": round(float((recorded.samples_CN.abs() >= _CLIPPING_LEVEL).double().mean()), 6),
            "channel": None if channel is None else channel + 1,
        }


class ProbeConfig(StepConfig):
    """Settings of `probe`: none."""


class Probe(RecordingStep[ProbeConfig]):
    """Form and length of a recording."""

    name = "probe"
    settings = ProbeConfig
    version: ClassVar[int] = 2

    def process(self, item: Recording) -> Value:
        """`duration_s` is null where neither the header nor the frames tell it; `header_s` is what the header promises.

        Raises:
            AudioError: no sound, or of no form that is known.
        """
        from audiollm.audio import probe

        info = probe(item.path)
        return {
            "duration_s": None if info.duration_s is None else round(info.duration_s, 6),
            "sample_rate": info.sample_rate,
            "num_channels": info.num_channels,
            "codec": info.codec,
            "header_s": None if info.header_s is None else round(info.header_s, 6),
            "damage": info.damage,
        }
