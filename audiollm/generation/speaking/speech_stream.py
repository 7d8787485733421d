"""A text's speech in pieces, while it is made.

Shapes: N samples.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import Tensor

from audiollm.audio import Waveform
from audiollm.generation.engine.request import Answer, Request
from audiollm.generation.engine.streaming import stream_audio
from audiollm.generation.speaking.long_text import Chunk, fade, fade_samples
from audiollm.generation.speaking.manner import Manner
from audiollm.generation.speaking.protocol import SpeakingModel
from audiollm.generation.speaking.speak import Reading, SpokenChunk, chunks_of, notes_of


class SpeechStream:
    """Speech to be iterated over once, piece by piece; the attributes are complete at the end.

    Between the chunks of a long text are the same pauses as in `speak`; the silence that a chunk has at its own ends
    stays, since what comes after it is not known yet.

    Raises:
        ConfigError: as `speak`, at once and not with the first piece.
    """

    def __init__(self, generator: SpeakingModel, text: str, manner: Manner) -> None:
        self._generator, self._manner = generator, manner
        self._chunks = chunks_of(generator, text, manner)
        self.text = " ".join(chunk.text for chunk in self._chunks)
        self.notes = notes_of(generator, self._chunks, manner)
        self.sample_rate = generator.codec.sample_rate
        self.stopped = True
        """Whether the model ended all chunks by itself, so far."""
        self.duration_s = self.seconds = 0.0
        self.first_audio_s: float | None = None
        """Seconds from the request for the first piece to its samples; None until then."""

    def __iter__(self) -> Iterator[Waveform]:
        begun = time.perf_counter()
        reading = Reading(self._generator, self._chunks, self._manner)
        num_spoken = 0
        for chunk, request in reading.requests():
            for samples_1N in self._sound(chunk, request, reading):
                if self.first_audio_s is None:
                    self.first_audio_s = time.perf_counter() - begun
                self.duration_s += samples_1N.shape[1] / self.sample_rate
                self.seconds = time.perf_counter() - begun
                yield Waveform(samples_1N, self.sample_rate)
            num_spoken += 1
        self.stopped = self.stopped and num_spoken == len(self._chunks)
        self.seconds = time.perf_counter() - begun

    def _sound(self, chunk: Chunk, request: Request, reading: Reading) -> Iterator[Tensor]:
        """Yield a chunk's sound, with fades and the pause after it; the last moment is held back for the fade."""
        generator, rate = self._generator, self.sample_rate
        engine = generator.engine([request])
        held_1N, at_start = torch.zeros(1, 0), True
        answer: Answer | None = None
        for piece in stream_audio(engine.stream(request), generator.codec):
            answer = piece.answer or answer
            held_1N = torch.cat([held_1N, piece.samples_1N], dim=1)
            ready = held_1N.shape[1] - fade_samples(rate)
            if ready > (fade_samples(rate) if at_start else 0):
                yield fade(held_1N[:, :ready], rate, at_start=at_start, at_end=False)
                held_1N, at_start = held_1N[:, ready:], False
        assert answer is not None
        silence_1N = torch.zeros(1, round(chunk.pause_s * rate))
        yield torch.cat([fade(held_1N, rate, at_start=at_start), silence_1N], dim=1)
        self.stopped = self.stopped and answer.stopped
        reading.add(SpokenChunk.of(chunk, answer))
