"""Clips of an autoencoder: training audio in stereo or mono, loaded and cut to batches, and examples for the report.

Shapes: B crops, C channels (left, right; or one), N samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from audiollm.audio import AudioError, load, probe, save, set_channels
from audiollm.autoencoder import Autoencoder
from audiollm.files.atomic import write_json
from tokenizer.clips import DITHER, Clip, CropPiece, Crops, RandomClips
from tokenizer.native.pitch import SOUND_HZ

PART_S = 20.0
"""Longer clips are taken in parts of this length, so that hours need no more memory than seconds."""
GAIN_DB = 6.0


class StereoStore(RandomClips):
    """Parts of clips, stereo or mono, at one rate and their own level; about `cache_mb` stay in memory."""

    highest_pitch_hz = SOUND_HZ

    def __init__(
        self, clips: Sequence[Clip], sample_rate: int, cache_mb: float = 1024, channels: int = 2
    ) -> None:
        self.channels = channels
        parts, unread = [], {}
        for clip in clips:
            try:
                parts += _split_clip(clip)
            except AudioError as error:
                unread[str(error.path)] = error.reason
        super().__init__(parts, [_duration_s(clip_part) for clip_part in parts], sample_rate)
        self._unread = unread
        part_mb = channels * 4 * sample_rate * self.duration_s / max(1, len(self)) / 2**20
        self._load = lru_cache(max(1, int(cache_mb / max(part_mb, 1e-3))))(self._read)

    @property
    def duration_s(self) -> float:
        """The sum over all parts; `PART_S` for one whose end is not known."""
        return float(self._ends_s[-1]) if self.clips else 0.0

    def __getitem__(self, index: int) -> Tensor:
        """Samples `[C, N]`, float32.

        Raises:
            AudioError: the file cannot be read any more.
        """
        return self._load(index)

    def _read(self, index: int) -> Tensor:
        clip = self.clips[index]
        waveform = load(clip.path, clip.start_s, clip.end_s, sample_rate=self.sample_rate)
        return set_channels(waveform.samples_CN, self.channels)


def stereo_crops(store: StereoStore, batch: int, length: int, generator: torch.Generator) -> Crops:
    """Crops `[B, C, N]`: parts one after another until full, each at a random gain, dithered."""
    crops_BCN = torch.randn(batch, store.channels, length, generator=generator) * DITHER
    pieces = []
    for row, crop_CN in enumerate(crops_BCN):
        filled = 0
        while filled < length:
            clip, piece_CN = store.draw(generator)
            start = int(torch.randint(max(1, piece_CN.shape[1] - length + 1), (1,), generator=generator))
            piece_CN = _with_gain(piece_CN[:, start : start + length - filled], generator)
            crop_CN[:, filled : filled + piece_CN.shape[1]] += piece_CN
            pieces.append(CropPiece(row, filled, piece_CN.shape[1], clip, start, 1.0))
            filled += piece_CN.shape[1]
    return Crops(crops_BCN, pieces)


def _with_gain(samples_CN: Tensor, generator: torch.Generator) -> Tensor:
    """One gain of +- `GAIN_DB` for all channels, less where it would clip."""
    gain_db = (float(torch.rand((), generator=generator)) * 2 - 1) * GAIN_DB
    peak = float(samples_CN.abs().max())
    return samples_CN * min(10 ** (gain_db / 20), 1 / max(peak, 1e-6))


def _split_clip(clip: Clip) -> list[Clip]:
    """The clip in parts of equal length, `PART_S` at most; one that does not say how long it is, as one part."""
    end_s = clip.end_s if clip.end_s is not None else probe(clip.path).duration_s
    if end_s is None:
        return [clip]
    count = max(1, -int(-(end_s - clip.start_s) // PART_S))
    each_s = (end_s - clip.start_s) / count
    return [Clip(clip.path, clip.start_s + i * each_s, clip.start_s + (i + 1) * each_s) for i in range(count)]


def _duration_s(clip: Clip) -> float:
    return PART_S if clip.end_s is None else clip.end_s - clip.start_s


def write_examples(model: Autoencoder, clips: StereoStore, folder: Path, count: int = 4) -> None:
    """Write `examples.json`: clips before and after, for the report."""
    rows = []
    for number, (_, samples_CN) in enumerate(clips.picked(count)):
        decoded_CN = model.decode(model.encode_distribution(samples_CN).mean, samples_CN.shape[1])
        row = {}
        for name, audio_CN in (("original", samples_CN), ("decoded", decoded_CN)):
            row[name] = f"examples/{number}_{name}.wav"
            save(folder / row[name], audio_CN, model.sample_rate)
        rows.append(row)
    write_json(folder / "examples.json", rows)
