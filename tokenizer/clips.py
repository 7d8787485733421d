"""Training audio for the tokenizer: the clips that samples name, loaded, levelled and cut to batches.

Shapes: B crops, N samples.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from audiollm.audio import AudioError, find_audio, load, normalize_rms, pitch, probe, resample, to_mono
from audiollm.audio.discovery import links_note
from audiollm.data.records.manifest import read_samples
from audiollm.errors import BadSample, StageError
from audiollm.files.atomic import is_unicode
from audiollm.files.set_aside import NAME_IS_NOT_UTF8, UNREADABLE
from tokenizer.native.pitch import VOICE_HZ, PitchTarget

MAX_CLIP_S = 60.0
"""Approximate length of the longest clip of a folder, in seconds: longer files are taken in parts."""
MAX_DRAWS = 50
"""Consecutive unreadable clips after which training gives up."""
LEVEL_DBFS = -23.0
"""RMS level that speech is brought to before it is coded (EBU R 128's target, taken as RMS)."""
PITCH_STEP_S = pitch.FRAME_S
DITHER = 1e-4
"""Noise added everywhere, -80 dBFS: digital silence is not a sound the model should learn."""


@dataclass(frozen=True)
class Clip:
    """A span of a file."""

    path: Path
    start_s: float
    end_s: float | None


class Clips(NamedTuple):
    """Clips to train on, clips to hold out, and files that cannot be read."""

    train: list[Clip]
    test: list[Clip]
    bad: list[BadSample]


def find_clips(audio: Path) -> Clips:
    """The clips of a file of samples, by their split, or of a folder of recordings. Samples without one are trained on.

    Of a folder about every 20th file is held out, whole, chosen by its name; long files are taken in parts.
    """
    if audio.is_dir():
        return _clips_of_folder(audio)
    samples, bad = read_samples(audio)
    spans: dict[str, dict[Clip, None]] = {"train": {}, "test": {}}
    for sample in samples:
        for audio_part in sample.audio_parts():
            clip = Clip(Path(audio_part.path), audio_part.start_s, audio_part.end_s)
            spans["test" if sample.is_held_out else "train"][clip] = None
    return Clips(list(spans["train"]), list(spans["test"]), bad)


def find_training_clips(audio: Path) -> Clips:
    """The clips of `find_clips`, checked for a training stage.

    Raises:
        StageError: no clips to train on, or none to hold out.
    """
    clips = find_clips(audio)
    if not clips.train or not clips.test:
        raise StageError(
            f"{audio} has no clips to train on or none to hold out{links_note(audio)}",
            "give a folder of two recordings or more, or the samples of `compose`",
            2,
        )
    return clips


def _clips_of_folder(folder: Path) -> Clips:
    files, _ = find_audio(folder)
    clips: dict[Path, list[Clip]] = {}
    bad = []
    for path in files:
        if not is_unicode(str(path)):
            bad.append(BadSample(str(path), "", NAME_IS_NOT_UTF8, UNREADABLE))
            continue
        try:
            duration_s = probe(path).duration_s
        except AudioError as error:
            bad.append(BadSample(str(path), "", error.reason, UNREADABLE))
            continue
        clips[path] = _split_recording(path, duration_s)
    by_chance = sorted(
        clips, key=lambda path: hashlib.sha256(str(path.relative_to(folder)).encode()).digest()
    )
    held_out = set(by_chance[: max(1, len(by_chance) // 20)] if len(by_chance) > 1 else [])
    return Clips(
        [clip for path in clips if path not in held_out for clip in clips[path]],
        [clip for path in clips if path in held_out for clip in clips[path]],
        bad,
    )


def _split_recording(path: Path, duration_s: float | None) -> list[Clip]:
    if duration_s is None:
        return [Clip(path, 0.0, None)]
    starts = [MAX_CLIP_S * number for number in range(max(1, round(duration_s / MAX_CLIP_S)))]
    return [Clip(path, start, end) for start, end in zip(starts, [*starts[1:], duration_s], strict=True)]


class RandomClips(ABC):
    """Clips that are drawn by duration: every second of audio is as likely as every other.

    `highest_pitch_hz` is the highest pitch that is tracked in them.

    Args:
        clips: what is drawn from.
        durations_s: the length of each clip, or an estimate where the file does not say.
        sample_rate: the rate at which samples are given.
    """

    highest_pitch_hz = VOICE_HZ

    def __init__(self, clips: Sequence[Clip], durations_s: Sequence[float], sample_rate: int) -> None:
        self._pitch_hz: dict[int, Tensor] = {}
        self.clips, self.sample_rate = list(clips), sample_rate
        self._ends_s = torch.tensor(durations_s, dtype=torch.float64).cumsum(0)
        self._unread: dict[str, str] = {}

    @abstractmethod
    def __getitem__(self, index: int) -> Tensor:
        """Samples of a clip `[N]` or `[C, N]`, float32.

        Raises:
            AudioError: the file cannot be read any more.
        """

    def pitch_hz(self, index: int) -> Tensor:
        """Pitch of a clip `[F]` in steps of `PITCH_STEP_S` from its start, 0 where there is no voice; tracked once."""
        if index not in self._pitch_hz:
            samples = self[index]
            mono_N = samples if samples.ndim == 1 else to_mono(samples)[0]
            self._pitch_hz[index] = _track(mono_N, self.sample_rate, self.highest_pitch_hz)
        return self._pitch_hz[index]

    def __len__(self) -> int:
        return len(self.clips)

    @property
    def bad(self) -> list[BadSample]:
        """The clips that could not be read so far."""
        return [BadSample(path, "", reason, UNREADABLE) for path, reason in self._unread.items()]

    def draw(self, generator: torch.Generator) -> tuple[int, Tensor]:
        """A random clip's index and samples. A clip that cannot be read is named in `bad`, and another is drawn.

        Raises:
            AudioError: nearly none can be read.
        """
        for _ in range(MAX_DRAWS):
            try:
                return self._draw_once(generator)
            except AudioError as error:
                self._unread[str(error.path)] = failure = error.reason
        raise AudioError(
            str(self.clips[0].path), f"and {MAX_DRAWS - 1} draws more cannot be read ({failure})"
        )

    def picked(self, max_clips: int) -> Iterator[tuple[Clip, Tensor]]:
        """At most `max_clips` clips and their samples, evenly picked; what cannot be read is left out."""
        count = min(max_clips, len(self))
        for number in range(count):
            index = round(number * (len(self) - 1) / max(1, count - 1))
            try:
                yield self.clips[index], self[index]
            except AudioError as error:
                self._unread[str(error.path)] = error.reason

    def _draw_once(self, generator: torch.Generator) -> tuple[int, Tensor]:
        share = torch.rand(1, generator=generator, dtype=torch.float64)
        index = int(torch.searchsorted(self._ends_s, share * self._ends_s[-1], right=True))
        index = min(index, len(self) - 1)
        return index, self[index]


class ClipStore(RandomClips):
    """Levelled mono clips at one sample rate; as many as fit in `cache_mb` stay in memory."""

    def __init__(self, clips: Sequence[Clip], sample_rate: int, cache_mb: float = 1024) -> None:
        durations_s = [clip.end_s - clip.start_s for clip in clips if clip.end_s is not None]
        usual = sum(durations_s) / len(durations_s) if durations_s else 1.0
        lengths_s = [usual if clip.end_s is None else clip.end_s - clip.start_s for clip in clips]
        super().__init__(clips, lengths_s, sample_rate)
        self._cache: OrderedDict[int, Tensor] = OrderedDict()
        self._room = int(cache_mb * 2**20 / 4)

    @property
    def duration_s(self) -> float:
        """The sum over the clips whose ends are known."""
        return sum(clip.end_s - clip.start_s for clip in self.clips if clip.end_s is not None)

    def __getitem__(self, index: int) -> Tensor:
        """Samples `[N]`, float32.

        Raises:
            AudioError: the file cannot be read any more.
        """
        if index in self._cache:
            self._cache.move_to_end(index)
            return self._cache[index]
        samples_N = load_levelled(self.clips[index], self.sample_rate)
        self._cache[index] = samples_N
        self._room -= len(samples_N)
        while self._room < 0 and len(self._cache) > 1:
            self._room += len(self._cache.popitem(last=False)[1])
        return samples_N


def load_levelled(clip: Clip, sample_rate: int) -> Tensor:
    """Mono samples `[N]` of a clip, brought to `LEVEL_DBFS`."""
    waveform = load(clip.path, clip.start_s, clip.end_s, sample_rate=sample_rate, mono=True)
    return normalize_rms(waveform.samples_CN, LEVEL_DBFS)[0]


class CropPiece(NamedTuple):
    """A part of a clip in a crop."""

    row: int
    first: int
    """Sample of the crop at which it begins."""
    length: int
    clip: int
    """Index in the store."""
    start: float
    """Sample of the clip at which it begins."""
    speed: float
    """Samples of the clip per sample of the crop; the factor of its pitch, too."""


class Crops(NamedTuple):
    """Augmented crops `[B, N]` or `[B, C, N]`, and the parts of clips that they are made of."""

    samples: Tensor
    pieces: list[CropPiece]


def random_crops(store: ClipStore, batch: int, length: int, generator: torch.Generator) -> Crops:
    """Augmented crops `[B, N]`: clips one after another until full, at random gain and speed, dithered."""
    crops_BN = torch.randn(batch, length, generator=generator) * DITHER
    pieces = []
    for row in range(batch):
        filled = 0
        while filled < length:
            clip, clip_N = store.draw(generator)
            begin, piece_N = _crop_randomly(clip_N, 2 * length, generator)
            varied_N = augment_waveform(piece_N, store.sample_rate, generator)
            speed = len(piece_N) / len(varied_N)
            later, piece_N = _crop_randomly(varied_N, length, generator)
            piece_N = piece_N[: length - filled]
            crops_BN[row, filled : filled + len(piece_N)] += piece_N
            pieces.append(CropPiece(row, filled, len(piece_N), clip, begin + later * speed, speed))
            filled += len(piece_N) + _draw_below(store.sample_rate // 10, generator)
    return Crops(crops_BN, pieces)


def pitch_of_crops(store: RandomClips, crops: Crops, hop_samples: int) -> Tensor:
    """The pitch in Hz at the middle of each hop of the crops, `[B, N / hop]`; 0 where there is no voice."""
    batch, length = crops.samples.shape[0], crops.samples.shape[-1]
    hz_BF = torch.zeros(batch, length // hop_samples)
    middle_F = torch.arange(hz_BF.shape[1]) * hop_samples + hop_samples / 2
    step = PITCH_STEP_S * store.sample_rate
    for piece in crops.pieces:
        inside_F = (middle_F >= piece.first) & (middle_F < piece.first + piece.length)
        position_F = (piece.start + (middle_F[inside_F] - piece.first) * piece.speed) / step
        hz_BF[piece.row, inside_F] = _interpolated(store.pitch_hz(piece.clip), position_F) * piece.speed
    return hz_BF


def pitch_target(store: RandomClips, crops: Crops, hop_samples: int, rows: slice) -> PitchTarget:
    """The pitch of some rows of a global batch's crops."""
    hz_BF = pitch_of_crops(store, crops, hop_samples)
    return PitchTarget(hz_BF[rows], float((hz_BF > 0).float().mean()))


def _interpolated(hz_F: Tensor, position_F: Tensor) -> Tensor:
    """Linear between two voiced frames; beside an unvoiced one, the nearer of the two."""
    last = len(hz_F) - 1
    before = position_F.floor().long().clamp(0, last)
    low_F, high_F = hz_F[before], hz_F[(before + 1).clamp_max(last)]
    share_F = (position_F - before).clamp(0, 1)
    nearest_F = torch.where(share_F < 0.5, low_F, high_F)
    both_F = (low_F > 0) & (high_F > 0)
    return torch.where(both_F, low_F + share_F * (high_F - low_F), nearest_F)


def _track(samples_N: Tensor, sample_rate: int, highest_hz: float) -> Tensor:
    """Pitch in steps of `PITCH_STEP_S` from the first sample on, 0 where there is no voice."""
    at_16k_N = resample(samples_N[None], sample_rate, pitch.SAMPLE_RATE)[0]
    margin = round(pitch.CENTRE_S * pitch.SAMPLE_RATE)  # the first frame is then centred on the first sample
    track = pitch.track_pitch(functional.pad(at_16k_N, (margin, 2 * margin)).numpy(), highest_hz)
    return torch.from_numpy(np.where(track.voiced_F, track.pitch_hz_F, 0.0)).float()


def augment_waveform(
    samples_N: Tensor, sample_rate: int, generator: torch.Generator, gain_db: float = 6.0, speed: float = 0.1
) -> Tensor:
    """Random gain of +- `gain_db` and random resampling of +- `speed` (pitch and tempo together)."""
    gain_dice, speed_dice = (torch.rand(2, generator=generator) * 2 - 1).tolist()
    factor = 1 + round(speed_dice * 10) / 10 * speed
    faster_N = resample(samples_N[None], sample_rate, round(sample_rate / factor))[0]
    return (faster_N * 10 ** (gain_dice * gain_db / 20)).clamp(-1, 1)


def _crop_randomly(samples_N: Tensor, length: int, generator: torch.Generator) -> tuple[int, Tensor]:
    """A random part of that length and its start, or all where there is no more (a long clip is not resampled)."""
    if len(samples_N) <= length:
        return 0, samples_N
    start = _draw_below(len(samples_N) - length, generator)
    return start, samples_N[start : start + length]


def _draw_below(limit: int, generator: torch.Generator) -> int:
    return int(torch.randint(max(1, limit), (1,), generator=generator))
