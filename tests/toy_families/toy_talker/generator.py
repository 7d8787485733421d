"""What `generate` asks of the model: an engine, a codec, and how texts are read.

Shapes: K codebooks, T frames.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from audiollm.data.hearing.features import PartSize
from audiollm.data.records.sample import Message, TextPart
from audiollm.errors import ConfigError
from audiollm.families.prompts import PromptedContents
from audiollm.generation.engine.request import Answer, Event, Finished, Frames, Request
from audiollm.generation.speaking.speech_generator import SpeechGenerator
from toy_talker.answers import text_rows
from toy_talker.model import Talker
from toy_talker.speaking import SpeechState, next_frames

RATE, FRAME_SAMPLES = 8000, 320


class ToneCodec:
    """The codec that the model carries: each code of a frame is a tone."""

    frame_rate, sample_rate = RATE / FRAME_SAMPLES, RATE

    def __init__(self, num_codebooks: int, codebook_size: int) -> None:
        self.num_codebooks, self.codebook_size = num_codebooks, codebook_size
        self.codebook_vectors_KVD = torch.arange(codebook_size).float().expand(num_codebooks, -1)[..., None]

    def encode(self, samples_CN: Tensor) -> Tensor:
        raise ConfigError("this codec only decodes", "codec", "give the model a text, and no recording")

    def decode(self, codes_KT: Tensor) -> Tensor:
        hertz_KN = (200 + 100 * codes_KT.float()).repeat_interleave(FRAME_SAMPLES, dim=1)
        phase_KN = 2 * math.pi * (hertz_KN / RATE).cumsum(dim=1)
        return phase_KN.sin().mean(dim=0, keepdim=True) / 2


class TalkerGenerator(SpeechGenerator):
    """The model, loaded to speak."""

    encoder = None

    def __init__(self, model: Talker) -> None:
        super().__init__(ToneCodec(model.config.num_codebooks, model.config.codebook_size))
        self._model = model

    def engine(self, requests: Sequence[Request]) -> TalkerEngine:
        return TalkerEngine(self._model)

    def check_messages(self, messages: Sequence[Message], num_recordings: int) -> None:
        if num_recordings:
            raise ValueError("this model reads text and does not hear")

    def messages_length(self, messages: Sequence[Message], sizes: Sequence[PartSize]) -> int:
        return 1 + sum(self.num_tokens(part.text) for part in _texts(messages))

    def num_tokens(self, text: str) -> int:
        return len(text.encode())


class TalkerEngine:
    """Answers requests one after the other, frame by frame."""

    def __init__(self, model: Talker) -> None:
        self._model = model

    def run(
        self, requests: Sequence[Request], on_step: Callable[[Sequence[Event]], None] = lambda events: None
    ) -> list[Answer]:
        answers = []
        for request in requests:
            for event in self.stream(request):
                on_step([event])
                if isinstance(event, Finished):
                    answers.append(event.answer)
        return answers

    def stream(self, request: Request) -> Iterator[Event]:
        begun, first_frame_s = time.perf_counter(), None
        text = text_rows(
            PromptedContents("request", request.messages[-1:], [], [])
        )  # what is said: the last turn
        state = SpeechState(torch.Generator().manual_seed(request.seed))
        while len(state.frames) < request.limits.max_frames and not state.has_ended:
            next_frames(self._model, text, [state], request.sampling)
            if not state.has_ended:
                first_frame_s = first_frame_s or time.perf_counter() - begun
                yield Frames(0, state.frames[-1][:, None])
        (codes_KT,) = state.tokens(self._model.config.num_codebooks, is_greedy=True).codes
        reason = "end" if state.has_ended else "length"
        yield Finished(0, Answer((codes_KT,), codes_KT, reason, first_frame_s, time.perf_counter() - begun))


def _texts(messages: Sequence[Message]) -> list[TextPart]:
    return [part for message in messages for part in message.content if isinstance(part, TextPart)]
