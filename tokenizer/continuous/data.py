"""Training audio for the continuous variant: stereo clips as they are, loaded and cut to batches.

Shapes: B crops, C channels (left, right), N samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from audiollm.audio import AudioError, load, probe, set_channels
from audiollm.errors import BadSample
from audiollm.files.set_aside import UNREADABLE
from tokenizer.clips import DITHER, DRAWS, Clip

PART_S = 20.0
"""Longer clips are taken in parts of this length, so that hours need no more memory than seconds."""
GAIN_DB = 6.0


class StereoStore:
    """Stereo parts of clips at one sample rate, at their own level; about `cache_mb` of them stay in memory."""

    def __init__(self, clips: Sequence[Clip], sample_rate: int, cache_mb: float = 1024) -> None:
        self.sample_rate = sample_rate
        self._unread: dict[str, str] = {}
        self.parts = [part for clip in clips for part in self._parts_of(clip)]
        self._ends_s = torch.tensor([_duration_s(part) for part in self.parts], dtype=torch.float64).cumsum(0)
        part_mb = 2 * 4 * sample_rate * self.duration_s / max(1, len(self)) / 2**20
        self._load = lru_cache(max(1, int(cache_mb / max(part_mb, 1e-3))))(self._read)

    def __len__(self) -> int:
        return len(self.parts)

    @property
    def bad(self) -> list[BadSample]:
        """What could not be read, at first or when it was drawn."""
        return [BadSample(path, "", reason, UNREADABLE) for path, reason in self._unread.items()]

    @property
    def duration_s(self) -> float:
        return float(self._ends_s[-1]) if self.parts else 0.0

    def __getitem__(self, index: int) -> Tensor:
        """Samples `[2, N]`, float32.

        Raises:
            AudioError: the file cannot be read any more.
        """
        return self._load(index)

    def picked(self, most: int) -> Iterator[Tensor]:
        """At most `most` parts, evenly picked; what cannot be read is left out."""
        count = min(most, len(self))
        for number in range(count):
            try:
                yield self[round(number * (len(self) - 1) / max(1, count - 1))]
            except AudioError as error:
                self._unread[str(error.path)] = error.reason

    def draw(self, generator: torch.Generator) -> Tensor:
        """A random part, drawn by duration: every second of audio is as likely as every other.

        A part that cannot be read is named in `bad`, and another is drawn.

        Raises:
            AudioError: nearly none can be read.
        """
        for _ in range(DRAWS):
            try:
                return self._draw_once(generator)
            except AudioError as error:
                self._unread[str(error.path)] = failure = error.reason
        raise AudioError(str(self.parts[0].path), f"and {DRAWS - 1} draws more cannot be read ({failure})")

    def _draw_once(self, generator: torch.Generator) -> Tensor:
        place_s = torch.rand((), generator=generator, dtype=torch.float64) * self.duration_s
        index = int(torch.searchsorted(self._ends_s, place_s, right=True))
        return self[min(index, len(self) - 1)]

    def _parts_of(self, clip: Clip) -> list[Clip]:
        try:
            return _parts(clip)
        except AudioError as error:
            self._unread[str(error.path)] = error.reason
            return []

    def _read(self, index: int) -> Tensor:
        part = self.parts[index]
        waveform = load(part.path, part.start_s, part.end_s, sample_rate=self.sample_rate)
        # beyond stereo the first two channels are the front pair, in every usual order
        return set_channels(waveform.samples_CN[:2], 2)


def stereo_crops(store: StereoStore, batch: int, length: int, generator: torch.Generator) -> Tensor:
    """Crops `[B, 2, N]`: parts one after another until full, each at a random gain, dithered."""
    crops_BCN = torch.randn(batch, 2, length, generator=generator) * DITHER
    for crop_CN in crops_BCN:
        filled = 0
        while filled < length:
            piece_CN = store.draw(generator)
            start = int(torch.randint(max(1, piece_CN.shape[1] - length + 1), (1,), generator=generator))
            piece_CN = _with_gain(piece_CN[:, start : start + length - filled], generator)
            crop_CN[:, filled : filled + piece_CN.shape[1]] += piece_CN
            filled += piece_CN.shape[1]
    return crops_BCN


def _with_gain(samples_CN: Tensor, generator: torch.Generator) -> Tensor:
    """One gain of +- `GAIN_DB` for both channels, less where it would clip."""
    gain_db = (float(torch.rand((), generator=generator)) * 2 - 1) * GAIN_DB
    peak = float(samples_CN.abs().max())
    return samples_CN * min(10 ** (gain_db / 20), 1 / max(peak, 1e-6))


def _parts(clip: Clip) -> list[Clip]:
    """The clip in parts of equal length, `PART_S` at most; one that does not say how long it is, as one part."""
    end_s = clip.end_s if clip.end_s is not None else probe(clip.path).duration_s
    if end_s is None:
        return [clip]
    count = max(1, -int(-(end_s - clip.start_s) // PART_S))
    each_s = (end_s - clip.start_s) / count
    return [Clip(clip.path, clip.start_s + i * each_s, clip.start_s + (i + 1) * each_s) for i in range(count)]


def _duration_s(part: Clip) -> float:
    return PART_S if part.end_s is None else part.end_s - part.start_s
