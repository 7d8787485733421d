"""Steps of a pipeline: objects that measure one file, or one part of it.

A step is built from its `Config`, travels to a worker process (pickled before `setup`), loads what it needs there, and
then turns files or their parts into JSON values. It knows nothing of processes, ledgers or filters.

Shapes: C channels, N samples.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from audiollm.audio import Waveform

Value = dict[str, Any]
"""Result of a step: JSON values by name; floats are rounded to their meaningful digits."""
_MAX_CACHED_S, _MAX_CACHED_RATE = 300.0, 96_000
"""A recording that is no longer is decoded once for all steps; with more samples a second, all channels together, it
must be as much shorter."""


class StepConfig(BaseModel):
    """Base of the settings of every step."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class Resources(NamedTuple):
    """Resources of one worker of a step; steps with equal resources share a pool of workers."""

    cpus: float = 1.0
    gpus: float = 0.0


class Step(Protocol):
    """One kind of measurement.

    `name`: under which its value is found by other steps, by thresholds and in the rows.
    `needs`: the names of the steps whose values it reads; those that are not part of a run are simply absent.
    `version`: counted up when the same settings give other values, so that old results are not taken for new ones.
    """

    @property
    def name(self) -> str: ...

    @property
    def level(self) -> str:
        """Items that it measures: files, or parts of them, each pipeline by names of its own."""

    @property
    def needs(self) -> tuple[str, ...]: ...

    @property
    def version(self) -> int: ...

    @property
    def resources(self) -> Resources: ...

    def missing(self) -> str | None:
        """Name a missing package or path and its remedy, without loading anything; None: nothing is missing."""

    def setup(self) -> None:
        """Import and load; called once in every worker process."""

    def process(self, item: Any) -> Value:
        """The value of one file or part, as the pipeline gives it; an exception costs this item alone."""


Settings = TypeVar("Settings", bound=StepConfig)


class BaseStep(ABC, Generic[Settings]):
    """A step that reads no other step's value, loads nothing and lacks nothing; steps override what differs.

    A setting `gpus` is the share that one worker takes.
    """

    name: str
    settings: ClassVar[type[StepConfig]] = StepConfig
    """The class of its settings."""
    needs: tuple[str, ...] = ()
    version: ClassVar[int] = 1

    def __init__(self, config: Settings) -> None:
        self.config = config
        self.resources = Resources(gpus=getattr(config, "gpus", 0.0))

    def missing(self) -> str | None:
        """See `Step.missing`."""
        return None

    def setup(self) -> None:
        """Nothing to load."""

    @abstractmethod
    def process(self, item: Any) -> Value:
        """See `Step.process`."""


@runtime_checkable
class BatchStep(Step, Protocol):
    """A step that is faster with several items at a time; they come sorted by duration."""

    @property
    def batch_size(self) -> int: ...

    def process_batch(self, items: Sequence[Any]) -> list[Value]:
        """The values of the items, each what `process` gives for it alone."""


@runtime_checkable
class SharedStep(Step, Protocol):
    """A step whose set-up is memory alone, without threads, open files or a GPU: processes may share it."""

    @property
    def shared(self) -> bool:
        """Whether its present settings allow sharing."""


@dataclass
class Listener:
    """Reads the sound of one file for the steps that work on it one after the other, and decodes it once."""

    path: str
    _is_short: bool | None = field(default=None, repr=False)
    _file_waveform: Waveform | None = field(default=None, repr=False)
    _span: tuple[float, float] | None = field(default=None, repr=False)
    _span_waveform: Waveform | None = field(default=None, repr=False)
    _mono: dict[int, NDArray[np.float32]] = field(default_factory=dict, repr=False)

    def waveform(self, start_s: float, end_s: float) -> Waveform:
        """The span as it was recorded, `[C, N]`."""
        if self._span != (start_s, end_s) or self._span_waveform is None:
            self._span_waveform, self._span, self._mono = self._read(start_s, end_s), (start_s, end_s), {}
        return self._span_waveform

    def samples(self, start_s: float, end_s: float, sample_rate: int) -> NDArray[np.float32]:
        """The span as mono at `sample_rate`, `[N]`. Not to be changed: other steps read the same array."""
        waveform = self.waveform(start_s, end_s)
        if sample_rate not in self._mono:
            samples_N = waveform.mono().resample(sample_rate).samples_CN[0].numpy()
            samples_N.setflags(write=False)
            self._mono[sample_rate] = samples_N
        return self._mono[sample_rate]

    def blocks(self, sample_rate: int) -> Iterator[NDArray[np.float32]]:
        """The whole file as mono pieces `[N]` at `sample_rate`, hours of it at constant memory."""
        from audiollm.audio.streams import stream_mono

        if (file_waveform := self._decode_short_file()) is not None:
            yield self.samples(0.0, file_waveform.duration_s, sample_rate)
            return
        for piece_1N in stream_mono(self.path, sample_rate):
            yield piece_1N[0].numpy()

    def _decode_short_file(self) -> Waveform | None:
        """Return the decoded file; None if it is long."""
        from audiollm.audio import load, probe

        if self._is_short is None:
            info = probe(self.path)
            samples_a_s = max(info.sample_rate * info.num_channels, _MAX_CACHED_RATE)
            seconds = math.inf if info.duration_s is None else info.duration_s
            self._is_short = seconds * samples_a_s <= _MAX_CACHED_S * _MAX_CACHED_RATE
        if self._is_short and self._file_waveform is None:
            self._file_waveform = load(self.path)
        return self._file_waveform

    def _read(self, start_s: float, end_s: float) -> Waveform:
        from audiollm.audio import Waveform, load

        if (file_waveform := self._decode_short_file()) is None:
            return load(self.path, start_s, end_s)
        rate = file_waveform.sample_rate
        start, end = round(start_s * rate), round(end_s * rate)
        return Waveform(file_waveform.samples_CN[:, start : max(end, start + 1)], rate)
