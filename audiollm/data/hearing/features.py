"""Sound as a Whisper-class encoder takes it: log-mel windows, and how many rows of the model each of them fills.

The mel spectrogram is that of transformers' `WhisperFeatureExtractor` (100 frames a second). The encoder's stem makes a
position of `frames_per_position` of them (Whisper's of 2: 50 positions a second), and `stride` positions make a row: 25
rows a second with a stride of 2.

Shapes: N samples at 16 kHz, M mel bins, F mel frames of a window, X mel frames of several windows end to end.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from audiollm.audio.samples import SILENCE_DBFS, peak_dbfs
from audiollm.data.records.sample import AudioPart, Sample
from audiollm.data.records.source import AudioClip, LoadedSample, silent_part, teaches_words
from audiollm.data.records.storage import is_url
from audiollm.devices import to_device
from audiollm.errors import BadSample

if TYPE_CHECKING:
    from transformers import WhisperFeatureExtractor

SAMPLE_RATE = 16_000
FRAMES_PER_SECOND = 100
SAMPLES_PER_FRAME = SAMPLE_RATE // FRAMES_PER_SECOND
NO_MEL_MF = torch.empty(0, 0)
"""The mel frames of a window that was encoded before."""
MISSING_CODES = "missing codes"
"""The kind by which parts without the codes that a model reads are counted."""
NOT_IN_CHUNKS = (
    "a stream is heard in chunks, and its recording is given as a whole: run encode_features on the streams"
)
MISSING_ROWS = "missing rows"
"""The kind by which recordings are counted whose rows a model would read: `encode_features` made none, or they are of
a frozen encoder, and it is trained."""
NOT_FROZEN = (
    "there are rows of a frozen encoder and no sound, and here the encoder is trained: leave it as it is "
    "(audio_encoder: {trained: false}, or lora: {excluded: [audio_tower]})"
)
TAIL_FRAMES = 3
"""Mel frames behind a clip that is filled up with silence: two of them still overlap it, the third is silence."""


@dataclass(frozen=True)
class EncodedRows:
    """Rows that a frozen encoder made once, and that lie beside a sample as arrays (`encode_features`)."""

    width: int
    """Values of a row, C."""
    digest: Callable[[], str]
    """Computes the digest of the encoder's weights and windows, which made the rows; called where there are some."""


@dataclass(frozen=True)
class FeatureShape:
    """Shape of the features that an audio encoder takes."""

    num_mel_bins: int = 80
    max_positions: int = 1500
    """Positions of a window, at most; longer clips are cut into windows. Whisper's 30 s are 1500."""
    stride: int = 2
    """Positions of a row."""
    padded: bool = False
    """Windows are filled up with silence to their full length, as published Whisper weights expect it."""
    frames_per_position: int = 2
    """Mel frames that the encoder's stem makes one position of."""
    encoded: EncodedRows | None = field(default=None, compare=False)
    """The arrays that are read in place of a recording, where the sample has them. None: every recording is heard anew,
    by an encoder that is trained or not known."""

    def __post_init__(self) -> None:
        smallest = min(self.num_mel_bins, self.stride, self.frames_per_position)
        if smallest < 1 or self.max_positions < self.stride:
            raise ValueError(f"mel bins, stride, frames and positions must be 1 or more, not {self}")
        if self.max_positions % self.stride:
            raise ValueError(f"a window of {self.max_positions} positions is no multiple of {self.stride}")

    @property
    def window_rows(self) -> int:
        return self.max_positions // self.stride

    @property
    def frames_per_row(self) -> int:
        return self.frames_per_position * self.stride

    @property
    def samples_per_row(self) -> int:
        return SAMPLES_PER_FRAME * self.frames_per_row

    @property
    def rows_per_second(self) -> float:
        return FRAMES_PER_SECOND / self.frames_per_row

    def rows(self, num_samples: int) -> int:
        """Return the number of rows for a number of 16 kHz samples: `ceil(seconds * 25)` at stride 2, at least one."""
        return max(1, -(-num_samples // self.samples_per_row))


class FeatureWindow(NamedTuple):
    """The mel frames of one window of a clip, and the rows that it fills."""

    mel_MF: Tensor
    rows: int
    encoded_RC: Tensor | None = None
    """Rows of the frozen encoder for this window, at least `rows` of them; there are no mel frames then."""

    @property
    def content(self) -> Tensor:
        """The tensor that is given to the model; windows that share it are encoded once."""
        return self.mel_MF if self.encoded_RC is None else self.encoded_RC


@dataclass(frozen=True)
class ClipFeatures:
    """A heard recording for the model's audio encoder: stands in for the codes of an audio part."""

    windows: tuple[FeatureWindow, ...]
    peak_dbfs: float = 0.0
    """The peak level of the recording; `-inf` of digital silence."""

    @property
    def rows(self) -> int:
        return sum(window.rows for window in self.windows)

    @property
    def is_encoded(self) -> bool:
        """Whether rows of a frozen encoder stand for the recording."""
        return any(window.encoded_RC is not None for window in self.windows)

    def chunks(self, chunk_rows: int) -> list[ClipFeatures]:
        """Cut encoded rows into chunks; the last one may be shorter.

        Raises:
            ValueError: the recording is not encoded.
        """
        encoded = [window.encoded_RC for window in self.windows if window.encoded_RC is not None]
        if not self.is_encoded or len(encoded) < len(self.windows):
            raise ValueError(NOT_IN_CHUNKS)
        return [encoded_features(rows_RC) for rows_RC in torch.cat(encoded)[: self.rows].split(chunk_rows)]


@dataclass(frozen=True)
class FeatureRows:
    """The size of `ClipFeatures`, where the size of codes is their number of frames."""

    rows: int


PartAudio = Tensor | ClipFeatures
"""An audio part as the model takes it: codes `[K, T]`, or features."""
PartSize = int | FeatureRows


@dataclass(frozen=True)
class PackedFeatures:
    """The windows of a pack, end to end: those of mel frames, and behind them those that were encoded before."""

    mel_MX: Tensor
    frames: tuple[int, ...]
    """Mel frames of each window. Kept on the host, as `rows`, so that a loop over windows needs no device sync."""
    rows: tuple[int, ...]
    row_of: Tensor | None = None
    """int64, where windows are shared or of both kinds: for every row of the pack, the row of the encoded windows that
    stands there. None: the windows' own rows, each once."""
    encoded_RC: Tensor | None = None
    """Rows that were encoded before."""

    @property
    def num_encoded(self) -> int:
        """Rows that the encoder and `encoded_RC` give, each once."""
        return sum(self.rows) + (0 if self.encoded_RC is None else len(self.encoded_RC))

    @property
    def num_rows(self) -> int:
        """Rows that the windows fill in the pack."""
        return self.num_encoded if self.row_of is None else len(self.row_of)

    @classmethod
    def of(cls, windows: Sequence[FeatureWindow], share: bool = False) -> PackedFeatures | None:
        """Join windows; None of none.

        Args:
            share: a window whose mel frames are the same tensor as an earlier one's is kept once (`row_of`).
        """
        if not windows:
            return None
        unique_windows, row_of = _order_windows(windows, share)
        mels_MF = [window.mel_MF for window in unique_windows if window.encoded_RC is None]
        encoded = [
            window.encoded_RC[: window.rows] for window in unique_windows if window.encoded_RC is not None
        ]
        return cls(
            torch.cat(mels_MF, dim=1) if mels_MF else NO_MEL_MF,
            tuple(mel_MF.shape[1] for mel_MF in mels_MF),
            tuple(window.rows for window in unique_windows if window.encoded_RC is None),
            row_of,
            torch.cat(encoded) if encoded else None,
        )

    def spread(self, encoded: Tensor) -> Tensor:
        """Return the encoded rows of the windows as they stand in the pack."""
        return encoded if self.row_of is None else encoded.index_select(0, self.row_of)

    def to(self, device: torch.device) -> PackedFeatures:
        row_of, encoded_RC = (
            None if tensor is None else to_device(tensor, device) for tensor in (self.row_of, self.encoded_RC)
        )
        return PackedFeatures(to_device(self.mel_MX, device), self.frames, self.rows, row_of, encoded_RC)


def size_of(audio_input: PartAudio) -> PartSize:
    return FeatureRows(audio_input.rows) if isinstance(audio_input, ClipFeatures) else audio_input.shape[1]


def mel_features(samples_1N: Tensor, shape: FeatureShape, rows: int | None = None) -> ClipFeatures:
    """The windows of a mono recording at 16 kHz.

    Args:
        rows: cut it, or fill it up with silence, to so many; None: as many as it takes.

    Raises:
        ValueError: not mono.
    """
    if samples_1N.ndim != 2 or len(samples_1N) != 1:
        raise ValueError(f"features are made of mono [1, samples], not of {list(samples_1N.shape)}")
    rows = rows or shape.rows(samples_1N.shape[1])
    per_row = shape.samples_per_row
    missing = max(0, rows * per_row - samples_1N.shape[1])
    samples_N = functional.pad(samples_1N[0, : rows * per_row], (0, missing))
    edges = [*range(0, rows, shape.window_rows), rows]
    return ClipFeatures(
        tuple(
            FeatureWindow(_log_mel(samples_N[start * per_row : end * per_row], shape), end - start)
            for start, end in pairwise(edges)
        )
    )


def encoded_features(rows_RC: Tensor) -> ClipFeatures:
    """Rows that a frozen encoder made, in place of a recording."""
    return ClipFeatures((FeatureWindow(NO_MEL_MF, len(rows_RC), rows_RC),))


def chunk_window(samples_1N: Tensor, shape: FeatureShape) -> FeatureWindow:
    """The window of all that was heard of a stream, up to the end of a chunk; of a long one, of its last part.

    Rows of the window behind the chunk's beginning are those of the chunk: an encoder that sees its whole window hears
    nothing that comes after it.
    """
    rows = shape.rows(samples_1N.shape[1])
    first = max(0, rows - shape.window_rows)
    (window,) = mel_features(samples_1N[:, first * shape.samples_per_row :], shape, rows - first).windows
    return window


def chunk_features(
    clip: AudioClip, shape: FeatureShape, chunk_rows: int
) -> tuple[ClipFeatures, tuple[int, ...]]:
    """The windows of a recording that is heard in chunks, one for each chunk, and the rows that are new in each.

    Raises:
        BadSample: there is no sound, or none that can be decoded.
    """
    samples_1N = clip.load(SAMPLE_RATE, mono=True).samples_CN
    rows = shape.rows(samples_1N.shape[1])
    ends = [*range(chunk_rows, rows, chunk_rows), rows]
    windows = tuple(chunk_window(samples_1N[:, : end * shape.samples_per_row], shape) for end in ends)
    new_rows = tuple(end - start for start, end in pairwise([0, *ends]))
    return ClipFeatures(windows, peak_dbfs(samples_1N)), new_rows


def last_rows(encoded_RC: Tensor, windows: Sequence[FeatureWindow], new_rows: Sequence[int]) -> Tensor:
    """Of the rows of windows end to end, the last ones of each: those of its chunk."""
    parts = encoded_RC.split([window.rows for window in windows])
    return torch.cat([part_RC[-count:] for part_RC, count in zip(parts, new_rows, strict=True)])


def silence(rows: int, shape: FeatureShape) -> tuple[FeatureWindow, ...]:
    """Windows of silence, for rows that nobody listens to; nothing is encoded for them where rows can be given."""
    if shape.encoded is not None:
        return (FeatureWindow(NO_MEL_MF, rows, torch.zeros(rows, shape.encoded.width)),)
    return mel_features(torch.zeros(1, rows * shape.samples_per_row), shape).windows


def num_clip_rows(clip: AudioClip, shape: FeatureShape) -> int:
    """Rows of the features of a clip: from its header where that tells, so that a survey decodes little.

    Raises:
        BadSample: it has to be decoded for this and cannot be.
    """
    seconds = _declared_s(clip)
    samples = (
        clip.load(SAMPLE_RATE, mono=True).num_samples if seconds is None else round(seconds * SAMPLE_RATE)
    )
    return shape.rows(samples)


def clip_features(clip: AudioClip, shape: FeatureShape) -> ClipFeatures:
    """The features of a clip, always of `num_clip_rows` rows: what a header misses of a sound, or adds, is left out.

    Raises:
        BadSample: there is no sound, or none that can be decoded.
    """
    samples_1N = clip.load(SAMPLE_RATE, mono=True).samples_CN
    seconds = _declared_s(clip)
    features = mel_features(
        samples_1N, shape, None if seconds is None else shape.rows(round(seconds * SAMPLE_RATE))
    )
    return replace(features, peak_dbfs=peak_dbfs(samples_1N))


class HeardClips:
    """Features of clips that come again and again, made once and kept as far as there is room for them.

    What is kept stays: when all clips are gone through in turn, dropping the oldest would drop those that come next.
    """

    def __init__(self, shape: FeatureShape, room_bytes: int) -> None:
        self._shape, self._room = shape, room_bytes
        self._cache: dict[Hashable, ClipFeatures] = {}

    def __call__(self, key: Hashable, clip: AudioClip) -> ClipFeatures:
        """`clip_features` of what goes by this key.

        Raises:
            BadSample: there is no sound, or none that can be decoded.
        """
        if key in self._cache:
            return self._cache[key]
        features = clip_features(clip, self._shape)
        size = sum(window.mel_MF.nbytes for window in features.windows)
        if size <= self._room:
            self._cache[key] = features
            self._room -= size
        return features


def part_audio(
    loaded: LoadedSample,
    codes: Sequence[Tensor],
    shape: FeatureShape | None,
    hear: Callable[[int, AudioClip], ClipFeatures] | None = None,
    view: int = 0,
) -> list[PartAudio]:
    """Choose the input of each audio part: its codes, or features where it is heard.

    Where a frozen encoder heard it before (`encode_features`), the rows that it made stand for the recording.

    Args:
        codes: an encoding of the sample; empty where it has none.
        shape: feature shape of the model's encoder; None: all parts are given as codes.
        hear: function from a part's number and clip to its features; None: `clip_features`.
        view: which of the augmented views is read, counted from 1, where there are rows; 0: the recording as it is.

    Raises:
        BadSample: a part that needs codes has none, one that needs its sound cannot be read, or it is silent beside
            words.
    """
    inputs: list[PartAudio] = []
    for number, (clip, is_heard) in enumerate(zip(loaded.audio, heard_parts(loaded.sample), strict=True)):
        if is_heard and shape is not None:
            encoded = read_encoded(loaded, number, shape, view)
            if encoded is not None:
                inputs.append(encoded)
                continue
            refuse_missing_sound(loaded, number)
            features = clip_features(clip, shape) if hear is None else hear(number, clip)
            if features.peak_dbfs < SILENCE_DBFS and teaches_words(loaded.sample):
                raise silent_part(loaded.sample, clip.place, features.peak_dbfs)
            inputs.append(features)
        elif number < len(codes):
            inputs.append(codes[number])
        else:
            raise no_codes(clip)
    return inputs


def encoded_name(part: int, view: int) -> str:
    """The name of the array with the rows of an audio part, as it is (view 0) or as an augmentation varied it."""
    return f"heard_{part}_{view}"


def refuse_missing_sound(loaded: LoadedSample, part: int) -> None:
    """Raises: BadSample: an audio part has rows of a frozen encoder and no sound, so no other encoder can hear it."""
    clip = loaded.audio[part]
    if clip.content is None and encoded_name(part, 0) in loaded.arrays:
        raise BadSample(clip.place, loaded.sample.id, NOT_FROZEN, MISSING_ROWS)


def read_encoded(loaded: LoadedSample, part: int, shape: FeatureShape, view: int = 0) -> ClipFeatures | None:
    """The rows that a frozen encoder made of an audio part; None where the sample has none, or they are not asked for.

    Raises:
        BadSample: they cannot be read, another encoder made them, or they are of another width.
    """
    name = encoded_name(part, view)
    if shape.encoded is None or name not in loaded.arrays:
        return None
    encoded_RC = loaded.array(name, shape.encoded.digest())
    if encoded_RC.ndim != 2 or encoded_RC.shape[1] != shape.encoded.width:
        reason = (
            f"{name}: rows {list(encoded_RC.shape)}, and {shape.encoded.width} values in a row are needed"
        )
        raise BadSample(loaded.sample.id, loaded.sample.id, reason, "damaged array")
    return encoded_features(encoded_RC)


def heard_parts(sample: Sample) -> list[bool]:
    """Return for each audio part whether it is heard, and not said by the assistant."""
    is_heard = [
        message.role != "assistant"
        for message in sample.messages
        for content_part in message.content
        if isinstance(content_part, AudioPart)
    ]
    return is_heard + [False for answer in sample.answers for _ in answer.audio_parts()]


def stream_chunks(sample: Sample) -> dict[int, int]:
    """For each audio part that is heard as a stream, its number and the frames, or rows, of a chunk."""
    chunks: dict[int, int] = {}
    number = 0
    for message, following in zip(sample.messages, [*sample.messages[1:], None], strict=True):
        number += sum(isinstance(content_part, AudioPart) for content_part in message.content)
        if following is not None and following.chunk_frames is not None and message.role == "user":
            chunks[number - 1] = following.chunk_frames
    return chunks


def no_codes(clip: AudioClip) -> BadSample:
    """The error of a part that has to have codes."""
    return BadSample(clip.place, clip.sample_id, "has audio and no codes: `tokenize` it first", MISSING_CODES)


# Private


def _order_windows(
    windows: Sequence[FeatureWindow], share: bool
) -> tuple[Sequence[FeatureWindow], Tensor | None]:
    """The windows to encode and behind them those that were, and the row of both for each row of the pack.

    Returns:
        None in place of rows where they are in order, each once.
    """
    keys: list[Hashable] = [
        (id(window.content), window.rows) if share else number for number, window in enumerate(windows)
    ]
    unique_windows: dict[Hashable, FeatureWindow] = {}
    for key, window in zip(keys, windows, strict=True):
        unique_windows.setdefault(key, window)
    ordered = sorted(unique_windows, key=lambda key: unique_windows[key].encoded_RC is not None)
    if ordered == keys:
        return windows, None
    starts, start = {}, 0
    for key in ordered:
        starts[key] = start
        start += unique_windows[key].rows
    rows = [torch.arange(window.rows) + starts[key] for key, window in zip(keys, windows, strict=True)]
    return [unique_windows[key] for key in ordered], torch.cat(rows)


def _log_mel(samples_N: Tensor, shape: FeatureShape) -> Tensor:
    """`[M, F]`; of a window that is to be filled up, with the beginning of the silence and not all of it."""
    window = shape.max_positions * shape.frames_per_position * SAMPLES_PER_FRAME
    length = window if shape.padded else len(samples_N)
    with torch.autocast(
        "cpu", enabled=False
    ):  # on where a strategy casts weights and an evaluation reads records
        extracted = _extractor(shape.num_mel_bins)(
            samples_N.numpy(),
            sampling_rate=SAMPLE_RATE,
            padding="max_length",
            max_length=length,
            return_tensors="np",
        )
    mel_MF = np.asarray(extracted["input_features"][0], np.float32)
    frames = len(samples_N) // SAMPLES_PER_FRAME + TAIL_FRAMES if shape.padded else mel_MF.shape[1]
    return torch.from_numpy(np.ascontiguousarray(mel_MF[:, :frames]))


@cache
def _extractor(num_mel_bins: int) -> WhisperFeatureExtractor:
    from transformers import WhisperFeatureExtractor  # takes a second, and most models need none

    return WhisperFeatureExtractor(feature_size=num_mel_bins)


def _declared_s(clip: AudioClip) -> float | None:
    """The length of the clip by its file's header, or by its span where the file is far away; None: unknown."""
    if isinstance(clip.content, str) and is_url(clip.content):
        return None if clip.end_s is None else clip.end_s - clip.start_s
    total_s = _file_s(clip.content)
    if total_s is None:
        return None
    end_s = total_s if clip.end_s is None else min(clip.end_s, total_s)
    return end_s - clip.start_s if end_s > clip.start_s else None


def _file_s(content: bytes | str | None) -> float | None:
    """Seconds of a local file, or of the content of one, by its header; None where it does not tell for sure."""
    from audiollm.audio import AudioError, probe
    from audiollm.audio.decoding import read_info

    if content is None:
        return None
    try:
        info = read_info(content, "<bytes>") if isinstance(content, bytes) else probe(content)
    except (AudioError, OSError):  # reading it will say what is wrong
        return None
    return None if info.num_samples is None else info.num_samples / info.sample_rate
