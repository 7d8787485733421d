"""The actions of sampled streams beside those of their references: what all rewards are functions of.

Shapes: B streams, T chunks of the longest stream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class ChunkAction:
    """An action after a chunk: silence where it has neither text nor speech."""

    text: str = ""
    duration_s: float = 0.0
    """Duration of its speech."""

    @property
    def speaks(self) -> bool:
        return bool(self.text) or self.duration_s > 0


@dataclass(frozen=True)
class InterpretedStream:
    """A sampled stream with its reference: one action of each after every chunk."""

    actions: Sequence[ChunkAction]
    reference: Sequence[ChunkAction]
    source_ends: Sequence[int] = ()
    """For each segment of the reference, the chunk in which the source that it needs is over; counted from 0."""
    source_durations_s: Sequence[float] = ()
    """Duration of the source's speech that each reference action translates; empty where it is not known."""

    def __post_init__(self) -> None:
        if len(self.actions) != len(self.reference):
            raise ValueError(
                f"{len(self.actions)} actions for {len(self.reference)} chunks: each chunk needs one of both"
            )
        if self.source_durations_s and len(self.source_durations_s) != len(self.reference):
            raise ValueError("source_durations_s needs a value for each chunk")


@dataclass(frozen=True)
class RewardTable:
    """Values of a reward with the entries where it is defined: `[B, T]` of actions, `[B]` of sequences."""

    values: Tensor
    """float64; 0 where it is not defined."""
    defined: Tensor
    """bool."""
    problems: Mapping[int, str] = field(default_factory=dict)
    """Why a value is missing that should be there, by number of the stream: the first reason of each."""

    def __post_init__(self) -> None:
        if self.values.shape != self.defined.shape:
            raise ValueError(f"values {list(self.values.shape)} and mask {list(self.defined.shape)} differ")


@dataclass(frozen=True)
class StreamBatch:
    """Sampled streams, padded to the longest."""

    streams: Sequence[InterpretedStream]

    @property
    def num_chunks(self) -> int:
        """T."""
        return max((len(stream.actions) for stream in self.streams), default=0)

    def exists_BT(self) -> Tensor:
        """bool: the chunks that each stream has."""
        return self._flags(lambda action, reference: True)

    def last_BT(self) -> Tensor:
        """bool: the last chunk of each stream."""
        exists_BT = self.exists_BT()
        later_BT = torch.cat([exists_BT[:, 1:], torch.zeros_like(exists_BT[:, :1])], dim=1)
        return exists_BT & ~later_BT

    def speaks_BT(self) -> Tensor:
        """bool: the chunks after which the model speaks."""
        return self._flags(lambda action, reference: action.speaks)

    def reference_speaks_BT(self) -> Tensor:
        """bool: the chunks after which the reference speaks."""
        return self._flags(lambda action, reference: reference.speaks)

    def table(self, rows: Sequence[Sequence[float | str | None]]) -> RewardTable:
        """Return values per stream and chunk as a table; None is not defined, a text tells why a value is missing."""
        problems: dict[int, str] = {}
        values_BT = torch.zeros(len(rows), self.num_chunks, dtype=torch.float64)
        defined_BT = torch.zeros(len(rows), self.num_chunks, dtype=torch.bool)
        for stream, row in enumerate(rows):
            for chunk, value in enumerate(row):
                if isinstance(value, str):
                    problems.setdefault(stream, value)
                elif value is not None:
                    values_BT[stream, chunk], defined_BT[stream, chunk] = value, True
        return RewardTable(values_BT, defined_BT, problems)

    def _flags(self, flag: Callable[[ChunkAction, ChunkAction], bool]) -> Tensor:
        flags_BT = torch.zeros(len(self.streams), self.num_chunks, dtype=torch.bool)
        for place, stream in enumerate(self.streams):
            stream_flags = [flag(*pair) for pair in zip(stream.actions, stream.reference, strict=True)]
            flags_BT[place, : len(stream_flags)] = torch.tensor(stream_flags, dtype=torch.bool)
        return flags_BT
