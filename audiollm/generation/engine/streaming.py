"""Sound while codes are made: the engine's events, decoded to samples as soon as the codec can.

Shapes: N samples, K codebooks, T code frames.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from audiollm.codec import Codec, CodeStream, LocalCodec, StreamedCodec
from audiollm.generation.engine.request import Answer, Event, Finished, Frames, TextPiece

CHUNK_FRAMES = 4
"""Frames decoded at a time after the first sound: decoding one by one costs more."""
WINDOW_FRAMES, MAX_WINDOW_S = 8, 1.0
"""A window of a codec without a decoder of its own for streams: frames at first, and seconds once it has grown, while a
listener has sound to play."""
ATTENDED_FRAMES = 32
"""Frames before a window with which it is decoded where nothing tells how far the codec looks back."""


@dataclass(frozen=True)
class StreamPiece:
    """A piece of an answer: sound, text, or its end."""

    samples_1N: Tensor
    text: str = ""
    answer: Answer | None = None
    """The complete answer, given with the last piece."""
    first_audio_s: float | None = None
    """Seconds from the request to the first samples, given with the last piece; None without speech."""


def stream_audio(
    events: Iterable[Event], codec: Codec, chunk_frames: int = CHUNK_FRAMES
) -> Iterator[StreamPiece]:
    """Turn the events of one request (`Engine.stream`) into pieces with samples in place of codes.

    The sound in all is that of `codec.decode` for every stretch of speech, as closely as `code_stream(codec)` says.
    The first frames are decoded one by one, until there is sound; then `chunk_frames` at a time.
    """
    sound = EventSound(codec, chunk_frames)
    for event in events:
        yield from sound.push(event)


class EventSound:
    """The sound of one request, event by event: `stream_audio` for whoever is handed the events."""

    def __init__(self, codec: Codec, chunk_frames: int = CHUNK_FRAMES) -> None:
        self._voice, self._started = _Voice(codec, chunk_frames), time.perf_counter()
        self._first_audio: float | None = None

    def push(self, event: Event) -> list[StreamPiece]:
        """Return the pieces that an event completes."""
        voice, pieces = self._voice, []
        if isinstance(event, Frames):
            samples_1N = voice.push(event.stretch, event.codes_KT)
        else:
            samples_1N = voice.finish()
        if samples_1N.shape[1]:
            self._first_audio = self._first_audio or time.perf_counter()
            pieces.append(StreamPiece(samples_1N))
        if isinstance(event, TextPiece):
            pieces.append(StreamPiece(voice.nothing_10, text=event.text))
        elif isinstance(event, Finished):
            wait_s = None if self._first_audio is None else self._first_audio - self._started
            pieces.append(StreamPiece(voice.nothing_10, answer=event.answer, first_audio_s=wait_s))
        return pieces


def code_stream(codec: Codec, max_window: int = WINDOW_FRAMES) -> CodeStream:
    """Return the codec's own incremental decoder where it has one, else overlapping windows.

    Args:
        max_window: frames of a window at most.
    """
    if isinstance(codec, StreamedCodec):
        return codec.code_stream()
    if isinstance(codec, LocalCodec):
        return OverlappingWindows(codec, codec.decoder_reach, codec.decoder_reach, max_window=max_window)
    return OverlappingWindows(codec, max_window=max_window)


class OverlappingWindows:
    """Decodes window by window, each with frames before and behind it that are thrown away.

    As good as decoding the whole where a frame's sound depends on no more than `past` frames before it and `future`
    behind; convolutional decoders at 12 to 75 frames per second reach 3 to 10 (Higgs's, EnCodec's), and what attends to
    all of its past (Mimi's) comes close. Costs `past + future` frames more to decode a window. The first window is a
    frame, so that sound begins `future` frames after the codes; each of the next is `window` frames longer than the one
    before, up to `max_window` (None: `window`).
    """

    _codes_KT: Tensor | None
    _context: int
    """Kept frames whose sound has already been returned."""
    _next_window: int

    def __init__(
        self,
        codec: Codec,
        past: int = ATTENDED_FRAMES,
        future: int = 10,
        window: int = WINDOW_FRAMES,
        max_window: int | None = None,
    ) -> None:
        self._codec, self._past, self._future = codec, past, future
        self._window, self._max_window = window, max_window or window
        self._begin()

    @property
    def latency_s(self) -> float:
        """The longest time from a frame's codes to the end of its sound."""
        return (self._max_window + self._future) / self._codec.frame_rate

    def push(self, codes_KT: Tensor) -> Tensor:
        """Add codes `[K, t]`; return the samples `[1, n]` of the windows that they complete."""
        self._codes_KT = codes_KT if self._codes_KT is None else torch.cat([self._codes_KT, codes_KT], dim=1)
        parts = [torch.zeros(1, 0)]
        while self._codes_KT.shape[1] - self._context >= self._next_window + self._future:
            parts.append(self._decode(self._next_window))
            self._next_window = min(self._next_window + self._window, self._max_window)
        return torch.cat(parts, dim=1)

    def flush(self) -> Tensor:
        """Return the rest of the sound, and begin anew."""
        codes_KT = self._codes_KT
        remaining = 0 if codes_KT is None else codes_KT.shape[1] - self._context
        samples_1N = self._decode(remaining) if remaining else torch.zeros(1, 0)
        self._begin()
        return samples_1N

    def _begin(self) -> None:
        self._codes_KT, self._context, self._next_window = None, 0, 1

    def _decode(self, frames: int) -> Tensor:
        """Decode the next frames, which then become context."""
        assert self._codes_KT is not None
        end = self._context + frames
        samples_1N = self._codec.decode(self._codes_KT[:, : end + self._future]).cpu()
        hop = self._codec.sample_rate / self._codec.frame_rate
        dropped = max(0, end - self._past)
        sound_1N = samples_1N[:, round(self._context * hop) : round(end * hop)]
        self._codes_KT, self._context = self._codes_KT[:, dropped:], end - dropped
        return sound_1N


class _Voice:
    """Decoder of the frames of one stretch of speech after the other."""

    def __init__(self, codec: Codec, chunk_frames: int) -> None:
        max_window = max(WINDOW_FRAMES, round(MAX_WINDOW_S * codec.frame_rate))
        self._decoder, self._chunk_frames = code_stream(codec, max_window), chunk_frames
        self._stretch = 0
        self._waiting: list[Tensor] = []
        self._sounded = self._began = False
        self.nothing_10 = torch.zeros(1, 0)

    def push(self, stretch: int, codes_KT: Tensor) -> Tensor:
        ended_1N = self.finish() if stretch != self._stretch else self.nothing_10
        self._stretch, self._began = stretch, True
        self._waiting.append(codes_KT)
        min_frames = self._chunk_frames if self._sounded else 1
        if len(self._waiting) < min_frames:
            return ended_1N
        samples_1N = self._decode()
        self._sounded = self._sounded or samples_1N.shape[1] > 0
        return torch.cat([ended_1N, samples_1N], dim=1)

    def finish(self) -> Tensor:
        """Return the rest of the stretch's sound."""
        if not self._began:
            return self.nothing_10
        samples_1N = torch.cat([self._decode(), self._decoder.flush().cpu()], dim=1)
        self._began = False
        return samples_1N

    def _decode(self) -> Tensor:
        if not self._waiting:
            return self.nothing_10
        codes_KT = torch.cat(self._waiting, dim=1)
        self._waiting = []
        return self._decoder.push(codes_KT).cpu()
