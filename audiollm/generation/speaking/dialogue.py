"""Speech of several people: a script as turns, and each turn in its speaker's voice.

Turn by turn, a speaker is prompted with the own reference and with what the own voice said before; in one go, all
turns are one prompt with all references, for models that were trained on conversations (the task `dialogue`).

Shapes: N samples.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from audiollm.data.chat.scene import dialogue_text, voices
from audiollm.data.chat.tasks import FieldValue, fill_task, load_tasks
from audiollm.data.hearing.features import PartAudio
from audiollm.data.records.sample import AudioPart
from audiollm.data.text.words import settle_characters
from audiollm.errors import ConfigError, suggestion
from audiollm.generation.engine.request import Limits, Request
from audiollm.generation.speaking.long_text import Chunk, join_pieces, spoken_seconds
from audiollm.generation.speaking.manner import Manner
from audiollm.generation.speaking.plans import Ask, OnSeconds, Plan, run_plan
from audiollm.generation.speaking.protocol import SpeakingModel
from audiollm.generation.speaking.speak import (
    SHORTEST_CHUNK_S,
    SLACK,
    SLACK_S,
    Reading,
    Speech,
    SpokenChunk,
    chunks_of,
    notes_of,
    say_plan,
)
from audiollm.generation.speaking.speech_stream import SpeechStream
from audiollm.generation.speaking.voice import Voice

TURN_PAUSE_S = 0.3

_TAG = re.compile(r"\[(SPEAKER\d+)\]", re.IGNORECASE)
_NAMED = re.compile(r"^\s*([^\W\d_][\w .'-]{0,39}?)\s*[:：](?!//)\s*(.*)$")


@dataclass(frozen=True)
class Turn:
    """One uninterrupted turn of one speaker."""

    speaker: str
    text: str


def parse_script(script: str) -> list[Turn]:
    """The turns of a script: `[SPEAKER0] Hello.` anywhere, or `Ann: Hello.` at the beginning of lines.

    A line without a speaker goes on with the turn before it; successive turns of one speaker stay apart.

    Raises:
        ConfigError: no speaker at the beginning, or a turn without words.
    """
    script = settle_characters(script)
    tagged = bool(_TAG.search(script))
    turns: list[tuple[str, list[str], int]] = []
    for number, line in enumerate(script.split("\n"), start=1):
        for speaker, words in _split_script_line(line, tagged):
            if speaker is not None:
                turns.append((speaker.upper() if tagged else speaker, [words], number))
            elif words and not turns:
                remedy = "begin each turn with [SPEAKER0], [SPEAKER1] ... or with a name and a colon"
                raise ConfigError(f"line {number} has no speaker: {words:.40}", "dialogue", remedy)
            elif words:
                turns[-1][1].append(words)
    if not turns:
        raise ConfigError("the script has no turn", "dialogue", "write one turn per line: [SPEAKER0] Hello.")
    for speaker, parts, number in turns:
        if not any(parts):
            raise ConfigError(
                f"line {number}: the turn of {speaker} is empty", "dialogue", "give it words, or leave it out"
            )
    return [Turn(speaker, " ".join(piece for piece in parts if piece)) for speaker, parts, _ in turns]


def match_references(speakers: Sequence[str], references: Mapping[str, Voice]) -> dict[str, Voice]:
    """Map each speaker who has a reference to its voice; a bare number n means `SPEAKERn`, else the n-th speaker.

    Raises:
        ConfigError: a reference for nobody in the script.
    """
    matches: dict[str, Voice] = {}
    for key, voice in references.items():
        tag = f"SPEAKER{key}"
        if key in speakers:
            matches[key] = voice
        elif tag in speakers:
            matches[tag] = voice
        elif (
            key.isdigit() and int(key) < len(speakers) and not any(_TAG.fullmatch(f"[{s}]") for s in speakers)
        ):
            matches[speakers[int(key)]] = voice
        else:
            raise ConfigError(f"{key}: no such speaker in the script", "reference", suggestion(key, speakers))
    return matches


def converse(
    generator: SpeakingModel,
    turns: Sequence[Turn],
    references: Mapping[str, Voice],
    manner: Manner,
    on_seconds: OnSeconds = lambda seconds: None,
) -> Speech:
    """Say a dialogue turn by turn. A speaker without a reference is the model's of that name; else the model chooses
    the voice of the first turn (which is noted), and the speaker's later turns keep it.

    Raises:
        ConfigError: no turns, a turn without words, or what `speak` raises.
    """
    return run_plan(generator, converse_plan(generator, turns, references, manner), on_seconds)


def converse_plan(
    generator: SpeakingModel, turns: Sequence[Turn], references: Mapping[str, Voice], manner: Manner
) -> Plan[Speech]:
    """Plan the dialogue of `converse`.

    Raises:
        ConfigError: as `converse`.
    """
    begun = time.perf_counter()
    cast = _Cast.of(generator, turns, references, manner)
    spoken_chunks: dict[str, list[SpokenChunk]] = {name: [] for name in cast.manners}
    pieces: list[Tensor] = []
    pauses_s: list[float] = []
    first, stopped, seconds = None, True, 0.0
    for turn, here in zip(turns, cast.chunks, strict=True):
        left_s = None if manner.max_duration_s is None else manner.max_duration_s - seconds
        if left_s is not None and left_s < SHORTEST_CHUNK_S and pieces:
            break
        turn_manner = replace(cast.manners[turn.speaker], max_duration_s=left_s)
        said_chunks = yield from say_plan(generator, here, turn_manner, spoken_chunks[turn.speaker])
        for spoken_chunk, chunk in zip(said_chunks, here, strict=False):
            spoken_chunks[turn.speaker].append(spoken_chunk)
            pieces.append(generator.codec.decode(spoken_chunk.codes_KT).cpu())
            pauses_s.append(TURN_PAUSE_S if chunk is here[-1] else chunk.pause_s)
            first, stopped = first or spoken_chunk.first_frame_s, stopped and spoken_chunk.stopped
            seconds += spoken_chunk.codes_KT.shape[1] / generator.codec.frame_rate
    num_chunks = sum(map(len, cast.chunks))
    return Speech(
        samples_1N=join_pieces(pieces, [*pauses_s[:-1], 0.0], generator.codec.sample_rate),
        sample_rate=generator.codec.sample_rate,
        stopped=stopped and len(pieces) == num_chunks,
        text=_join_dialogue(turns, cast.chunks),
        seconds=time.perf_counter() - begun,
        first_audio_s=first,
        notes=cast.notes(generator, num_chunks - len(pieces)),
    )


def dialogue_stream(
    generator: SpeakingModel, turns: Sequence[Turn], references: Mapping[str, Voice], manner: Manner
) -> SpeechStream:
    """Say a dialogue as `converse` does, but piece by piece.

    Raises:
        ConfigError: as `converse`, at once and not with the first piece.
    """
    cast = _Cast.of(generator, turns, references, manner)
    chunks = _DialogueReading(generator, turns, cast, manner)
    return SpeechStream(generator, chunks, _join_dialogue(turns, cast.chunks), cast.notes(generator))


def converse_together(
    generator: SpeakingModel,
    turns: Sequence[Turn],
    references: Mapping[str, Voice],
    manner: Manner,
    on_seconds: OnSeconds = lambda seconds: None,
) -> Speech:
    """Say all turns in one go (task `dialogue`). Where any speaker lacks a reference, no reference is used: the model
    chooses all voices, and this is noted.

    Raises:
        ConfigError: no turns, a turn without words, or what `speak` raises.
    """
    return run_plan(generator, together_plan(generator, turns, references, manner), on_seconds)


def together_plan(
    generator: SpeakingModel, turns: Sequence[Turn], references: Mapping[str, Voice], manner: Manner
) -> Plan[Speech]:
    """Plan the dialogue of `converse_together`.

    Raises:
        ConfigError: as `converse_together`.
    """
    begun = time.perf_counter()
    speakers = list(dict.fromkeys(turn.speaker for turn in turns))
    matched_voices = match_references(speakers, references)
    manners = {name: replace(manner, speaker=None, voice=matched_voices.get(name)) for name in speakers}
    chunks = [_chunks(generator, turn, manners[turn.speaker], place) for place, turn in enumerate(turns)]
    text = _join_dialogue(turns, chunks)
    fields: dict[str, FieldValue] = {"text": text, "audio": AudioPart(path="(to be said)")}
    audio: list[PartAudio] = []
    all_known = len(matched_voices) == len(speakers)
    if all_known:
        fields["references"] = voices({name: matched_voices[name].audio_part for name in speakers})
        audio = [
            generator.encode_input_audio(matched_voices[name].waveform, matched_voices[name].codes_KT)
            for name in speakers
        ]
    else:
        fields["voices"] = voices({name: name for name in speakers})
    if manner.scene:
        fields["scene"] = manner.scene
    messages = fill_task(load_tasks()["dialogue"], text, fields).messages[:-1]
    limit_s = manner.max_duration_s or SLACK * spoken_seconds(text) + SLACK_S
    limits = Limits(max_frames=max(1, round(limit_s * generator.codec.frame_rate)))
    sampling = replace(manner.sampling, speaker_guidance=1.0)
    request = Request(messages, manner.seed, audio, sampling, limits, "audio")
    (answer,) = yield Ask([request])
    notes = _notes(
        generator, matched_voices if all_known else {}, manners, [c for here in chunks for c in here]
    )
    if matched_voices and not all_known:
        unused = ", ".join(matched_voices)
        notes += (f"in one go everybody needs a reference: that of {unused} is not used",)
    return Speech(
        samples_1N=generator.codec.decode(answer.codes_KT).cpu(),
        sample_rate=generator.codec.sample_rate,
        stopped=answer.stopped,
        text=text,
        seconds=time.perf_counter() - begun,
        first_audio_s=answer.first_frame_s,
        notes=notes,
    )


# Private


@dataclass(frozen=True)
class _Cast:
    """Who speaks how in a dialogue, and what."""

    voices: Mapping[str, Voice]
    """The references of the speakers that have one, by their names."""
    manners: Mapping[str, Manner]
    chunks: Sequence[Sequence[Chunk]]
    """The chunks of each turn."""

    @classmethod
    def of(
        cls, generator: SpeakingModel, turns: Sequence[Turn], references: Mapping[str, Voice], manner: Manner
    ) -> _Cast:
        speakers = list(dict.fromkeys(turn.speaker for turn in turns))
        matched = match_references(speakers, references)
        manners = {
            name: _manner_of_speaker(generator, manner, name, matched.get(name), place)
            for place, name in enumerate(speakers)
        }
        chunks = [_chunks(generator, turn, manners[turn.speaker], place) for place, turn in enumerate(turns)]
        return cls(matched, manners, chunks)

    def notes(self, generator: SpeakingModel, left_out: int = 0) -> tuple[str, ...]:
        every = [chunk for here in self.chunks for chunk in here]
        return _notes(generator, self.voices, self.manners, every, left_out)


class _DialogueReading:
    """The chunks of all turns, each prompted with what its speaker said before."""

    def __init__(self, generator: SpeakingModel, turns: Sequence[Turn], cast: _Cast, manner: Manner) -> None:
        self._generator, self._turns, self._cast, self._limit_s = (
            generator,
            turns,
            cast,
            manner.max_duration_s,
        )
        self._spoken: dict[str, list[SpokenChunk]] = {name: [] for name in cast.manners}
        self._speaking: tuple[str, Reading] | None = None
        self.num_chunks = sum(map(len, cast.chunks))
        self._seconds = 0.0

    def requests(self) -> Iterator[tuple[Chunk, Request]]:
        """See `ChunkSequence`."""
        for place, (turn, here) in enumerate(zip(self._turns, self._cast.chunks, strict=True)):
            left_s = None if self._limit_s is None else self._limit_s - self._seconds
            if left_s is not None and left_s < SHORTEST_CHUNK_S and place:
                return
            manner = replace(self._cast.manners[turn.speaker], max_duration_s=left_s)
            reading = Reading(self._generator, here, manner, self._spoken[turn.speaker])
            self._speaking = (turn.speaker, reading)
            is_last_turn = place + 1 == len(self._turns)
            for chunk, request in reading.requests():
                ends_turn = chunk is here[-1] and not is_last_turn
                yield (replace(chunk, pause_s=TURN_PAUSE_S) if ends_turn else chunk), request

    def add(self, spoken_chunk: SpokenChunk) -> SpokenChunk:
        """See `ChunkSequence`."""
        assert self._speaking is not None
        speaker, reading = self._speaking
        self._seconds += spoken_chunk.codes_KT.shape[1] / self._generator.codec.frame_rate
        self._spoken[speaker].append(spoken_chunk)
        return reading.add(spoken_chunk)


def _split_script_line(line: str, tagged: bool) -> list[tuple[str | None, str]]:
    """Split a line into (speaker, words); the speaker is None where the turn before goes on."""
    if not tagged:
        match = _NAMED.match(line)
        return [(match[1], match[2].strip())] if match else [(None, line.strip())]
    parts = _TAG.split(line)
    return [
        (None, parts[0].strip()),
        *((tag, words.strip()) for tag, words in zip(parts[1::2], parts[2::2], strict=True)),
    ]


def _manner_of_speaker(
    generator: SpeakingModel, manner: Manner, name: str, voice: Voice | None, place: int
) -> Manner:
    speaker = name if voice is None and name in generator.speakers else None
    # with one seed, two voices of the model's own choice would be the same
    return replace(manner, speaker=speaker, voice=voice, seed=manner.seed + (place if voice is None else 0))


def _chunks(generator: SpeakingModel, turn: Turn, manner: Manner, place: int) -> list[Chunk]:
    if not turn.text.strip():
        raise ConfigError(
            f"turn {place + 1}, of {turn.speaker}, is empty", "dialogue", "give it words, or leave it out"
        )
    try:
        return chunks_of(generator, turn.text, manner)
    except ConfigError as error:
        if error.where != "text":
            raise
        problem = f"turn {place + 1}, of {turn.speaker}: {error.message}"
        raise ConfigError(problem, "dialogue", error.remedy) from None


def _join_dialogue(turns: Sequence[Turn], chunks: Sequence[Sequence[Chunk]]) -> str:
    """The dialogue's text as the model reads it."""
    turn_chunks = zip(turns, chunks, strict=True)
    return dialogue_text(
        [(turn.speaker, " ".join(chunk.text for chunk in here)) for turn, here in turn_chunks]
    )


def _notes(
    generator: SpeakingModel,
    matched_voices: Mapping[str, Voice],
    manners: Mapping[str, Manner],
    chunks: Sequence[Chunk],
    left_out: int = 0,
) -> tuple[str, ...]:
    notes = [note for voice in matched_voices.values() for note in voice.notes]
    unmatched_speakers = [
        name for name, manner in manners.items() if name not in matched_voices and manner.speaker is None
    ]
    if unmatched_speakers:
        notes.append(f"no reference for {', '.join(unmatched_speakers)}: the model chooses the voice")
    notes += notes_of(generator, chunks, Manner())
    if left_out:
        notes.append(f"{left_out} of {len(chunks)} parts are left out: max_duration_s was reached")
    return tuple(notes)
