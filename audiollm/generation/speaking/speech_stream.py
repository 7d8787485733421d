"""Speech piece by piece while it is made: of a text, or of a dialogue.

Shapes: N samples.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from audiollm.audio import Waveform
from audiollm.codec import Codec
from audiollm.generation.engine.request import Answer, Event, Request
from audiollm.generation.engine.streaming import EventSound
from audiollm.generation.speaking.long_text import Chunk, fade, fade_samples
from audiollm.generation.speaking.manner import Manner
from audiollm.generation.speaking.plans import Ask, Plan
from audiollm.generation.speaking.protocol import SpeakingModel
from audiollm.generation.speaking.speak import Reading, SpokenChunk, chunks_of, notes_of


class ChunkSequence(Protocol):
    """Chunks that are said one after the other; `Reading` is one."""

    num_chunks: int

    def requests(self) -> Iterator[tuple[Chunk, Request]]:
        """Yield each chunk with its request; `add` its result before the next."""

    def add(self, spoken_chunk: SpokenChunk) -> SpokenChunk:
        """Take the result of the chunk that was yielded last."""


class SpeechStream:
    """Speech to be iterated over once, piece by piece; the attributes are complete at the end.

    Between the chunks are the same pauses as in the whole speech; the silence that a chunk has at its own ends stays,
    since what comes after it is not known yet.

    Args:
        text: all that is said, as the model reads it.
    """

    def __init__(
        self, generator: SpeakingModel, chunks: ChunkSequence, text: str, notes: tuple[str, ...]
    ) -> None:
        self._generator, self._chunks = generator, chunks
        self.text, self.notes = text, notes
        self.sample_rate = generator.codec.sample_rate
        self.stopped = True
        """Whether the model ended all chunks by itself, so far."""
        self.duration_s = self.seconds = 0.0
        self.first_audio_s: float | None = None
        """Seconds from the request for the first piece to its samples; None until then."""

    def __iter__(self) -> Iterator[Waveform]:
        begun = time.perf_counter()
        num_spoken = 0
        for chunk, request in self._chunks.requests():
            sound = _ChunkSound(self._generator.codec, chunk)
            for event in self._generator.engine([request]).stream(request):
                if (samples_1N := sound.push(event)).shape[1]:
                    yield self._count(samples_1N, begun)
            yield self._count(sound.finish(), begun)
            num_spoken += 1
            self._add(chunk, sound)
        self._finish(num_spoken, begun)

    def plan(self, on_piece: Callable[[Waveform], None]) -> Plan[None]:
        """Plan the speech in place of an iteration: `on_piece` is called with its pieces while asks are answered."""
        begun = time.perf_counter()
        num_spoken = 0
        for chunk, request in self._chunks.requests():
            sound = _ChunkSound(self._generator.codec, chunk)

            def push(event: Event, sound: _ChunkSound = sound) -> None:
                if (samples_1N := sound.push(event)).shape[1]:
                    on_piece(self._count(samples_1N, begun))

            yield Ask([request], push)
            on_piece(self._count(sound.finish(), begun))
            num_spoken += 1
            self._add(chunk, sound)
        self._finish(num_spoken, begun)

    def _count(self, samples_1N: Tensor, begun: float) -> Waveform:
        self.seconds = time.perf_counter() - begun
        if self.first_audio_s is None:
            self.first_audio_s = self.seconds
        self.duration_s += samples_1N.shape[1] / self.sample_rate
        return Waveform(samples_1N, self.sample_rate)

    def _add(self, chunk: Chunk, sound: _ChunkSound) -> None:
        answer = sound.answer
        assert answer is not None
        self.stopped = self.stopped and answer.stopped
        self._chunks.add(SpokenChunk.of(chunk, answer))

    def _finish(self, num_spoken: int, begun: float) -> None:
        self.stopped = self.stopped and num_spoken == self._chunks.num_chunks
        self.seconds = time.perf_counter() - begun


def text_stream(generator: SpeakingModel, text: str, manner: Manner) -> SpeechStream:
    """Say a text as `speak` does, but piece by piece.

    Raises:
        ConfigError: as `speak`, at once and not with the first piece.
    """
    chunks = chunks_of(generator, text, manner)
    notes = notes_of(generator, chunks, manner)
    return SpeechStream(
        generator, Reading(generator, chunks, manner), " ".join(chunk.text for chunk in chunks), notes
    )


class _ChunkSound:
    """The sound of a chunk while it is made, with fades and the pause after it; the last moment is held back."""

    def __init__(self, codec: Codec, chunk: Chunk) -> None:
        self._sound, self._rate, self._pause_s = EventSound(codec), codec.sample_rate, chunk.pause_s
        self._held_1N, self._at_start = torch.zeros(1, 0), True
        self.answer: Answer | None = None
        """The complete answer, once it is."""

    def push(self, event: Event) -> Tensor:
        """Return the samples `[1, N]` that are ready, none at times."""
        for piece in self._sound.push(event):
            self.answer = piece.answer or self.answer
            self._held_1N = torch.cat([self._held_1N, piece.samples_1N], dim=1)
        rate = self._rate
        ready = self._held_1N.shape[1] - fade_samples(rate)
        if ready <= (fade_samples(rate) if self._at_start else 0):
            return self._held_1N[:, :0]
        samples_1N = fade(self._held_1N[:, :ready], rate, at_start=self._at_start, at_end=False)
        self._held_1N, self._at_start = self._held_1N[:, ready:], False
        return samples_1N

    def finish(self) -> Tensor:
        """Return the last moment, faded, and the pause after it."""
        silence_1N = torch.zeros(1, round(self._pause_s * self._rate))
        return torch.cat([fade(self._held_1N, self._rate, at_start=self._at_start), silence_1N], dim=1)
