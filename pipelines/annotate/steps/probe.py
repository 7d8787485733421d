"""The step `probe`: the format and length of a recording, as far as its header says."""

from __future__ import annotations

from typing import ClassVar, Literal

from pipelines.annotate.step import Recording
from pipelines.steps.step import Resources, StepConfig, Value


class ProbeConfig(StepConfig):
    """Settings of `probe`: none."""


class Probe:
    """Form and length of a recording."""

    name = "probe"
    level: ClassVar[Literal["recording"]] = "recording"
    needs: tuple[str, ...] = ()
    version: ClassVar[int] = 2
    resources = Resources()

    def __init__(self, config: ProbeConfig) -> None:
        del config

    def missing(self) -> str | None:
        return None

    def setup(self) -> None:
        """Nothing to load."""

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
