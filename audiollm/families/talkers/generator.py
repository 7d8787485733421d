"""A talker that is loaded to speak: its engine, and how texts are read.

Shapes: K codebooks, T frames.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from audiollm.audio import Waveform
from audiollm.codec import Codec
from audiollm.data.hearing.features import PartSize
from audiollm.data.records.sample import AudioPart, Message, TextPart
from audiollm.errors import ConfigError
from audiollm.families.talkers.decoding import MAX_SLOTS, TalkerDecoder
from audiollm.families.talkers.drawing import Speaking
from audiollm.families.talkers.kind import TalkerKind
from audiollm.families.talkers.packed_steps import TalkerSteps
from audiollm.families.talkers.talker import Talker
from audiollm.families.talkers.turns import SpeechPrompt, read_speech_prompt
from audiollm.generation.engine.defaults import read_defaults
from audiollm.generation.engine.request import Answer, Event, Finished, Frames, Request
from audiollm.generation.speaking.manner import Recording
from audiollm.generation.speaking.speech_generator import SpeechGenerator
from audiollm.generation.speaking.voice import Voice

MARKS_A_MESSAGE = 8
"""Rows of a prompt beside its words and frames, at most, for each message."""


class TalkerGenerator(SpeechGenerator):
    """The model and its codec."""

    encoder = None

    def __init__(self, model: Talker, kind: TalkerKind, codec: Codec) -> None:
        super().__init__(codec, kind.speakers, defaults=read_defaults(kind.folder))
        self._model, self._kind, self._vectors = model, kind, dict[bytes, Tensor]()
        self._steps: TalkerSteps | None = None
        shapes = (model.num_codebooks, model.codebook_size), (codec.num_codebooks, codec.codebook_size)
        if shapes[0][0] != shapes[1][0] or shapes[0][1] < shapes[1][1]:
            (books, codes), (codec_books, codec_codes) = shapes
            problem = (
                f"the codec has {codec_books} codebooks of {codec_codes} codes, the model {books} of {codes}"
            )
            raise ConfigError(problem, "codec", "leave it out: the model's folder has its own")

    def voice(
        self, reference: Recording | Voice, text: str | None = None, language: str | None = None
    ) -> Voice:
        """See `SpeechGenerator.voice`; where the model reads vectors, the recording's is kept beside its codes."""
        voice = super().voice(reference, text, language)
        if self._kind.reads_vectors:
            self._vectors[_codes_key(voice.codes_KT)] = self._kind.vector_of(voice.waveform)
        return voice

    def prompt_of_request(self, request: Request) -> SpeechPrompt:
        """The prompt of a request.

        Raises:
            ValueError: the model takes no such prompt.
        """
        prompt = read_speech_prompt(request.messages, request.audio, request.language)
        prompt = replace(prompt, before=prompt.before[: self._kind.max_turns])
        reference_KT = prompt.reference_KT
        if reference_KT is None and prompt.before:
            reference_KT = prompt.before[0].codes_KT
        vector_C = None
        if reference_KT is not None and self._kind.reads_vectors:
            key = _codes_key(reference_KT)
            if key not in self._vectors:  # speech of the model's own, which it goes on
                sound = Waveform(self.codec.decode(reference_KT).cpu(), self.codec.sample_rate)
                self._vectors[key] = self._kind.vector_of(sound)
            vector_C = self._vectors[key]
        return self._kind.complete(prompt, vector_C, None, "")

    def engine(self, requests: Sequence[Request]) -> TalkerEngine:
        """See `SpeechGenerator.engine`. All engines share the copy of the weights, if the model has one."""
        if self._steps is None or not self._steps.is_current():
            self._steps = TalkerSteps(self._model)
        return TalkerEngine(self._model, self._kind, self.prompt_of_request, self._steps)

    def check_messages(self, messages: Sequence[Message], num_recordings: int) -> None:
        """See `SpeechGenerator.check_messages`."""
        for text in _texts_to_say(messages):
            self._kind.check_text(text)
        if num_recordings and any(
            isinstance(part, AudioPart) for part in messages[-1].content if messages[-1].role == "user"
        ):
            raise ValueError("this model speaks, and hears no questions")

    def messages_length(self, messages: Sequence[Message], sizes: Sequence[PartSize]) -> int:
        """See `SpeechGenerator.messages_length`."""
        frames = sum(size if isinstance(size, int) else size.rows for size in sizes)
        return (
            frames
            + sum(self.num_tokens(text) for text in _texts_to_say(messages))
            + MARKS_A_MESSAGE * len(messages)
        )

    def num_tokens(self, text: str) -> int:
        """See `SpeechGenerator.num_tokens`."""
        return len(self._kind.text.marked_ids(text))


class TalkerEngine:
    """A `GenerationEngine`: answers side by side.

    Args:
        prompt_of: reads the prompt of a request.
        steps: the model's, with its present weights.
    """

    def __init__(
        self,
        model: Talker,
        kind: TalkerKind,
        prompt_of: Callable[[Request], SpeechPrompt],
        steps: TalkerSteps,
    ) -> None:
        self._model, self._kind, self._prompt_of, self._steps = model, kind, prompt_of, steps

    def run(
        self, requests: Sequence[Request], on_step: Callable[[Sequence[Event]], None] = lambda events: None
    ) -> list[Answer]:
        """See `GenerationEngine.run`."""
        answers: dict[int, Answer] = {}
        for events in self._run_steps(requests):
            on_step(events)
            answers |= {event.request: event.answer for event in events if isinstance(event, Finished)}
        return [answers[number] for number in range(len(requests))]

    def stream(self, request: Request) -> Iterator[Event]:
        """See `GenerationEngine.stream`."""
        for events in self._run_steps([request]):
            yield from events

    def _run_steps(self, requests: Sequence[Request]) -> Iterator[list[Event]]:
        begun, first_s, sent = time.perf_counter(), dict[int, float](), Counter[int]()
        waiting = [self._speaking(number, request) for number, request in enumerate(requests)][::-1]
        slots = min(MAX_SLOTS, max(1, len(waiting)))
        decoder = TalkerDecoder(self._model, self._kind, slots, self._steps)
        while waiting or decoder.speaking:
            decoder.begin([waiting.pop() for _ in range(min(decoder.free_slots, len(waiting)))])
            events: list[Event] = []
            for answer in decoder.step():
                now = time.perf_counter() - begun
                for codes_K in answer.codes[sent[answer.number] :]:
                    first_s.setdefault(answer.number, now)
                    events.append(Frames(answer.number, codes_K[:, None]))
                sent[answer.number] = len(answer.codes)
                if answer.is_over:
                    events.append(self._finish_answer(answer, first_s.get(answer.number), now))
            yield events

    def _speaking(self, number: int, request: Request) -> Speaking:
        if request.answer != "audio" or request.phrases:
            raise ConfigError(
                "this model answers in speech alone, text by text", "answer", "ask it to say a text"
            )
        if request.sampling.text_guidance != 1 or request.sampling.speaker_guidance != 1:
            raise ConfigError(
                "guidance: this model was never trained with its conditions hidden",
                "text_guidance",
                "leave it out",
            )
        try:
            rows = self._kind.prompt_rows(self._prompt_of(request))
        except ValueError as error:
            raise ConfigError(str(error), "prompt", "ask for the speech in another way") from None
        return Speaking(
            rows, self._kind.sampling(request.sampling), request.limits.max_frames, request.seed, number
        )

    def _finish_answer(self, answer: Speaking, first_s: float | None, seconds: float) -> Finished:
        codes_KT = answer.codes_KT(self._model.num_codebooks)
        reason = "end" if answer.has_ended else "length"
        return Finished(answer.number, Answer((codes_KT,), codes_KT, reason, first_s, seconds))  # type: ignore[arg-type]


def _codes_key(codes_KT: Tensor) -> bytes:
    return bytes(codes_KT.cpu().numpy().tobytes())


def _texts_to_say(messages: Sequence[Message]) -> list[str]:
    return [part.text for message in messages for part in message.content if isinstance(part, TextPart)]
