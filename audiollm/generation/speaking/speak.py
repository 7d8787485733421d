"""Say a text: its prompt, its chunks one after the other, and their sound as one, or in pieces while it is made.

Shapes: K codebooks, T code frames, N samples.
"""

from __future__ import annotations

import math
import time
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from audiollm.audio import Waveform
from audiollm.data.chat.tasks import FieldValue, fill_task, load_tasks
from audiollm.data.hearing.features import PartAudio, size_of
from audiollm.data.records.sample import AudioPart, Message, TextPart
from audiollm.data.text.forms import prompt_form
from audiollm.errors import ConfigError, suggestion
from audiollm.generation.engine.request import Answer, Limits, Request
from audiollm.generation.speaking.long_text import (
    Chunk,
    join_pieces,
    split_text,
    spoken_seconds,
)
from audiollm.generation.speaking.manner import Manner
from audiollm.generation.speaking.phrases import phrases_of
from audiollm.generation.speaking.plans import Ask, OnSeconds, Plan, run_plan
from audiollm.generation.speaking.protocol import SpeakingModel

CHUNK_S, SHORTEST_CHUNK_S = 12.0, 1.0
"""Bounds of a chunk's estimated duration; the upper one is less where the model was trained on shorter clips."""
POSITIONS_PER_SECOND, PHRASED_POSITIONS_PER_SECOND = 40.0, 80.0
"""Upper estimates of the code frames and text tokens per second of speech; in phrases, whose words stand twice."""
SLACK, SLACK_S = 3.0, 3.0
"""A chunk is cut at `SLACK` times its estimated duration plus `SLACK_S`."""
MAX_PARALLEL_CHUNKS = 16
"""Most chunks in the engine at a time: each reserves memory for its longest possible answer."""

_SPEECH_PART = AudioPart(path="(to be said)")


@dataclass(frozen=True, eq=False)
class SpokenChunk:
    """A spoken chunk: its text and codes."""

    text: str
    codes_KT: Tensor
    stopped: bool
    first_frame_s: float | None

    @classmethod
    def of(cls, chunk: Chunk, answer: Answer) -> SpokenChunk:
        return cls(chunk.text, answer.codes_KT, answer.stopped, answer.first_frame_s)


@dataclass(frozen=True, eq=False)
class Speech:
    """The recording of a spoken text."""

    samples_1N: Tensor
    sample_rate: int
    stopped: bool
    """Whether the model ended the speech by itself; False where a limit did."""
    text: str
    """The text as the model read it."""
    seconds: float
    """Time that making the speech took."""
    first_audio_s: float | None
    """Seconds from the call to the first code frame."""
    notes: tuple[str, ...] = ()
    """Warnings for the listener: a reference that was cut, letters that the model never saw."""

    @property
    def waveform(self) -> Waveform:
        return Waveform(self.samples_1N, self.sample_rate)

    @property
    def duration_s(self) -> float:
        return self.samples_1N.shape[1] / self.sample_rate

    @property
    def real_time_factor(self) -> float:
        """Seconds of work per second of sound."""
        return self.seconds / self.duration_s


def speak(
    generator: SpeakingModel, text: str, manner: Manner, on_seconds: OnSeconds = lambda seconds: None
) -> Speech:
    """Say a whole text as one recording.

    Raises:
        ConfigError: no text, one without a word, with control tokens or characters, an unknown speaker, a speaker and a
            voice, a length that cannot be.
    """
    return run_plan(generator, speak_plan(generator, text, manner), on_seconds)


def speak_plan(generator: SpeakingModel, text: str, manner: Manner) -> Plan[Speech]:
    """Plan the speech of `speak`, which checks the text when it begins.

    Raises:
        ConfigError: as `speak`.
    """
    begun = time.perf_counter()
    chunks = chunks_of(generator, text, manner)
    spoken_chunks = yield from say_plan(generator, chunks, manner, ())
    pieces = [generator.codec.decode(chunk.codes_KT).cpu() for chunk in spoken_chunks]
    rate = generator.codec.sample_rate
    samples_1N = (
        pieces[0]
        if len(chunks) == 1
        else join_pieces(pieces, [chunk.pause_s for chunk in chunks[: len(spoken_chunks)]], rate)
    )
    notes = notes_of(generator, chunks, manner)
    if len(spoken_chunks) < len(chunks):
        missing = len(chunks) - len(spoken_chunks)
        notes += (f"{missing} of {len(chunks)} parts of the text are left out: max_duration_s was reached",)
    return Speech(
        samples_1N=samples_1N,
        sample_rate=rate,
        stopped=len(spoken_chunks) == len(chunks) and all(chunk.stopped for chunk in spoken_chunks),
        text=" ".join(chunk.text for chunk in chunks),
        seconds=time.perf_counter() - begun,
        first_audio_s=spoken_chunks[0].first_frame_s,
        notes=notes,
    )


def chunks_of(generator: SpeakingModel, text: str, manner: Manner) -> list[Chunk]:
    """Check a text and the speaker, and split the text into chunks, each in the form that the model reads.

    Raises:
        ConfigError: as `speak`.
    """
    check_speaker(generator, manner.speaker)
    if not text.strip():
        raise ConfigError("there is no text", "text", "give the words to say")
    unprintable = next((a for a in text if unicodedata.category(a) in ("Cc", "Cs") and not a.isspace()), None)
    if unprintable is not None:
        problem = (
            f"a character that cannot be said, U+{ord(unprintable):04X} at place {text.index(unprintable)}"
        )
        raise ConfigError(problem, "text", "remove it; texts are in UTF-8")
    paragraphs = [
        prompt_form(paragraph, manner.language) for paragraph in text.replace("\r\n", "\n").split("\n\n")
    ]
    chunks = split_text("\n\n".join(paragraphs), chunk_seconds(generator, manner))
    full_text = " ".join(chunk.text for chunk in chunks)
    if not any(letter.isalnum() for letter in full_text):
        raise ConfigError(f"the text has no word: {full_text:.40}", "text", "give words to say")
    for name, words in (("text", full_text), ("scene", manner.scene or "")):
        try:
            generator.check_messages([Message(role="user", content=[TextPart(text=words)])], 0)
        except ValueError as error:
            remedy = "leave it out: it is a mark of the model's own, and is never said"
            raise ConfigError(str(error).partition(";")[0], name, remedy) from None
    return chunks


def check_speaker(generator: SpeakingModel, speaker: str | None) -> None:
    """Raises: ConfigError: a speaker that the model does not know, where the names of its speakers are known."""
    if speaker is not None and generator.speakers and speaker not in generator.speakers:
        remedy = suggestion(speaker, generator.speakers)
        raise ConfigError(f"{speaker}: not a speaker of this model", "speaker", remedy)


def chunk_seconds(generator: SpeakingModel, manner: Manner) -> float:
    """Longest estimated duration of a chunk, from the longest sample that the model was trained on."""
    if manner.chunk_s is not None or generator.longest_positions is None:
        return manner.chunk_s or CHUNK_S
    messages, audio = prompt_of(generator, "a", manner, ())
    room = generator.longest_positions - generator.messages_length(
        messages, [size_of(audio_input) for audio_input in audio]
    )
    per_second = POSITIONS_PER_SECOND if generator.phrase_layout is None else PHRASED_POSITIONS_PER_SECOND
    return min(CHUNK_S, max(SHORTEST_CHUNK_S, room / per_second))


def say_plan(
    generator: SpeakingModel, chunks: Sequence[Chunk], manner: Manner, earlier: Sequence[SpokenChunk]
) -> Plan[list[SpokenChunk]]:
    """Plan chunks one after the other, each prompted with those before it; in parallel where no chunk is remembered.

    Args:
        earlier: chunks that the same voice said before.
    """
    spoken_chunks: list[SpokenChunk] = []
    if manner.remembered_chunks == 0 and manner.max_duration_s is None:
        for first in range(0, len(chunks), MAX_PARALLEL_CHUNKS):
            some = chunks[first : first + MAX_PARALLEL_CHUNKS]
            answers = yield Ask([chunk_request(generator, chunk.text, manner, ()) for chunk in some])
            spoken_chunks += map(SpokenChunk.of, some, answers)
        return spoken_chunks
    reading = Reading(generator, chunks, manner, earlier)
    for chunk, request in reading.requests():
        (answer,) = yield Ask([request])
        spoken_chunks.append(reading.add(SpokenChunk.of(chunk, answer)))
    return spoken_chunks


class Reading:
    """A sequence of chunks whose requests each show the speech before them."""

    def __init__(
        self,
        generator: SpeakingModel,
        chunks: Sequence[Chunk],
        manner: Manner,
        earlier: Sequence[SpokenChunk] = (),
    ) -> None:
        self._generator, self._chunks, self._manner = generator, chunks, manner
        self._history = list(earlier)
        self.num_chunks = len(chunks)
        self.seconds = 0.0
        """Duration of the speech so far."""

    def requests(self) -> Iterator[tuple[Chunk, Request]]:
        """Yield each chunk with its request; `add` its result before the next. Ends early at the time limit."""
        limit_s, remembered = self._manner.max_duration_s, self._manner.remembered_chunks
        for number, chunk in enumerate(self._chunks):
            left_s = math.inf if limit_s is None else limit_s - self.seconds
            if number and left_s < SHORTEST_CHUNK_S:
                return
            history = self._history[-remembered:] if remembered else ()
            alone = len(self._chunks) == 1
            yield chunk, chunk_request(self._generator, chunk.text, self._manner, history, left_s, alone)

    def add(self, spoken_chunk: SpokenChunk) -> SpokenChunk:
        self.seconds += spoken_chunk.codes_KT.shape[1] / self._generator.codec.frame_rate
        self._history.append(spoken_chunk)
        return spoken_chunk


def chunk_request(
    generator: SpeakingModel,
    text: str,
    manner: Manner,
    earlier: Sequence[SpokenChunk],
    left_s: float = math.inf,
    alone: bool = True,
) -> Request:
    """Build the engine request of one chunk; it shows as much of `earlier` as the trained length has room for.

    Args:
        left_s: remaining part of the caller's limit; inf: no limit.
        alone: the chunk is the whole text, and may take all of `left_s`.
    """
    expected_s = SLACK * spoken_seconds(text) + SLACK_S
    limit_s = left_s if alone and math.isfinite(left_s) else min(expected_s, left_s)
    frames = max(1, round(limit_s * generator.codec.frame_rate))
    messages, audio = prompt_of(generator, text, manner, earlier)
    if generator.longest_positions is not None:
        room = generator.longest_positions - round(spoken_seconds(text) * generator.codec.frame_rate)
        while (
            earlier
            and generator.messages_length(messages, [size_of(audio_input) for audio_input in audio]) > room
        ):
            earlier = earlier[1:]
            messages, audio = prompt_of(generator, text, manner, earlier)
    by_name = manner.speaker is not None
    sampling = manner.sampling if by_name else replace(manner.sampling, speaker_guidance=1.0)
    phrases = phrases_of(text, generator.phrase_layout, generator.codec.frame_rate)
    return Request(
        messages, manner.seed, audio, sampling, Limits(max_frames=frames), "audio", phrases=phrases,
        language=manner.language,
    )  # fmt: skip


def prompt_of(
    generator: SpeakingModel, text: str, manner: Manner, earlier: Sequence[SpokenChunk]
) -> tuple[list[Message], list[PartAudio]]:
    """Build the messages before the assistant's turn, in the words of `tasks.yaml`, and their audio in order.

    `clone_by_turn` with a reference whose words are known, `clone` with one whose words are not, else `tts`. What the
    voice said before stands as turns between the reference and the text.
    """
    fields: dict[str, FieldValue | None] = {"text": text, "audio": _SPEECH_PART, "scene": manner.scene}
    audio: list[PartAudio] = []
    name, voice = "tts", manner.voice
    if voice is None:
        fields["speaker"] = manner.speaker
    else:
        name = "clone_by_turn" if voice.text else "clone"
        fields |= {"reference": voice.audio_part, "reference_text": voice.text}
        audio.append(
            voice.codes_KT if voice.text else generator.encode_input_audio(voice.waveform, voice.codes_KT)
        )
    filled_fields = {key: value for key, value in fields.items() if value}
    messages = list(fill_task(load_tasks()[name], text, filled_fields).messages[:-1])
    for spoken_chunk in earlier:
        turn = [
            Message(role="user", content=[TextPart(text=spoken_chunk.text)]),
            Message(role="assistant", content=[_SPEECH_PART]),
        ]
        messages[-1:-1] = turn
        audio.append(spoken_chunk.codes_KT)
    return messages, audio


def notes_of(generator: SpeakingModel, chunks: Sequence[Chunk], manner: Manner) -> tuple[str, ...]:
    """Warnings that are known before anything is said."""
    notes = manner.voice.notes if manner.voice else ()
    if manner.speaker is not None and not generator.speakers:
        notes += (f"the model has no list of its speakers: whether it knows {manner.speaker} is not known",)
    unseen = generator.unseen_letters("".join(chunk.text for chunk in chunks))
    if unseen:
        listing = " ".join(unseen[:8]) + (" ..." if len(unseen) > 8 else "")
        notes += (
            f"the model's vocabulary never saw {listing}: it spells them in bytes and will hardly know their sound",
        )
    unknown = generator.unseen_words(" ".join(chunk.text for chunk in chunks))
    if unknown:
        listing = ", ".join(unknown[:8]) + (", ..." if len(unknown) > 8 else "")
        text = f"the model was trained on few words, and these are not among them: {listing}"
        notes += (f"{text}; do not expect to hear them",)
    return notes
