"""Sample: the one record that every dataset holds, and JSONL files of them.

A sample is a chat: messages of text, audio and video parts, and for preferences answers to choose among, each with a
score, a rank, a verdict or scores of its steps. A bad record is named where it enters, never silently dropped.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Sequence, Sized
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from audiollm.data.tables.splits import holds_out, split_of
from audiollm.errors import BadSample, first_problem
from audiollm.files.atomic import write_jsonl

PHRASE_WORDS = "phrase_words"
"""Key of the metadata of samples with phrases: most words of a phrase, which texts are split by in generation."""
PRONUNCIATION = "pronunciation"
"""Key of the metadata of samples whose phrases are read as phonemes: whose rules they are by."""
PHRASES = "phrases"
"""Fact of a stage's plan: the phrases of all samples."""
_KINDS = {
    "empty_answer": "empty answer",
    "wrong_steps": "wrong scores of steps",
    "answered_twice": "two answers in one",
    "finite_number": "no finite score",
    "unknown_split": "unknown split",
}
"""Types of pydantic's errors, and the kinds of bad samples that they are counted by."""
_CONVERSIONS = {
    "solution": "grpo",
    "chosen": "preferences",
    "completion": "preferences",
    "audio_id": "mmau",
    "conversations": "sharegpt",
    "instruction": "alpaca",
    "audio_filepath": "nemo",
}
"""Keys that rows of other projects have and samples lack, and the kinds that `convert` reads them as."""
_REMEDIES = {"finite_number": "; leave it out where there is no score"}


def _is_none(value: object) -> bool:
    return value is None


def _is_one(value: object) -> bool:
    return value == 1


def _is_empty(value: Sized) -> bool:
    return not value


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class TextPart(_Record):
    type: Literal["text"] = "text"
    text: str


class _Recorded(_Record):
    """A span of a file."""

    path: str = Field(min_length=1)
    """A file, or the key of a clip in a shard."""
    start_s: float = Field(default=0.0, ge=0.0)
    end_s: float | None = None
    """Seconds from the file's beginning; None: to its end."""

    @model_validator(mode="after")
    def _span_is_positive(self) -> Self:
        if self.end_s is not None and self.end_s <= self.start_s:
            raise ValueError(f"the span ends at {self.end_s} s, not after its start at {self.start_s} s")
        return self


class AudioPart(_Recorded):
    type: Literal["audio"] = "audio"
    speaker: str | None = None
    codes: str | None = Field(default=None, min_length=1, exclude_if=_is_none)
    """File with the codes of this part, where they are known already (`part_codes.py`); relative as `path` is."""


class Region(_Record):
    """A box around an object in the picture as it is shown, rotated as the file says."""

    at_s: float = Field(default=0.0, ge=0.0)
    """Seconds from the file's beginning; the box moves in a line to the next one, and stays before the first."""
    x: float = Field(ge=0.0)
    y: float = Field(ge=0.0)
    """The upper left corner, in pixels."""
    width: float = Field(gt=0.0)
    height: float = Field(gt=0.0)


class VideoPart(_Recorded):
    """The pictures of a file; its sound is an audio part of the same path."""

    type: Literal["video"] = "video"
    region: list[Region] = Field(default_factory=list, exclude_if=_is_empty)
    """One object followed through the clip, in order of time; none: the whole picture."""

    @model_validator(mode="after")
    def _times_rise(self) -> VideoPart:
        times = [box.at_s for box in self.region]
        if any(later <= earlier for earlier, later in itertools.pairwise(times)):
            raise ValueError("the times of the region must rise")
        return self


ContentPart = Annotated[TextPart | AudioPart | VideoPart, Field(discriminator="type")]


class RecordedPhrase(_Record):
    """A few words of a recording, which are said one phrase after the other."""

    text: str
    """The words; empty where they are hidden."""
    end_s: float = Field(gt=0.0)
    """End of the phrase in seconds from the start of the recording's span; the next phrase begins there."""
    phonemes: str | None = Field(default=None, exclude_if=_is_none)
    """What stands for the words: their phonemes (`audiollm.data.text.pronunciation`); None: the words do."""

    @property
    def reading(self) -> str:
        """What the model reads of the phrase."""
        return self.text if self.phonemes is None else self.phonemes


class Message(_Record):
    role: Literal["system", "user", "assistant"]
    content: list[ContentPart] = Field(min_length=1)
    chunk_frames: int | None = Field(default=None, ge=1, exclude_if=_is_none)
    """Set on the assistant's side of a stream: the recording of the user's message before is heard in chunks of so many
    code frames, and each text part of this message begins the action after one: an empty text is silence. Audio parts
    belong to the action before them."""
    weight: Literal[0, 1] = Field(default=1, exclude_if=_is_one)
    """0: trainings read the assistant's message and do not learn it, as `weight` in OpenAI's chats."""
    phrases: list[RecordedPhrase] = Field(default_factory=list, exclude_if=_is_empty)
    """Phrases of the assistant's one recording, all of it: each is laid out as its words and then its codes, so that
    speech never has to find its place in a long text. The words are given in generation, too; none: no phrases."""

    @model_validator(mode="after")
    def _is_of_the_assistant(self) -> Self:
        if not self.weight and self.role != "assistant":
            raise ValueError(
                f"weight is set on a message of the {self.role}: the assistant's alone are learned"
            )
        self._check_phrases()
        if self.chunk_frames is None:
            return self
        if self.role != "assistant":
            raise ValueError(
                f"chunk_frames is set on a message of the {self.role}: actions are the assistant's"
            )
        if not isinstance(self.content[0], TextPart):
            raise ValueError("an action begins with a text part, which may be empty")
        return self

    def _check_phrases(self) -> None:
        """
        Raises:
            ValueError: phrases of anything but one recording of the assistant's, or ends that do not rise.
        """
        if not self.phrases:
            return
        if self.role != "assistant" or self.chunk_frames is not None:
            raise ValueError("phrases are of a recording that the assistant says, and of no stream")
        if len(self.content) != 1 or not isinstance(self.content[0], AudioPart):
            raise ValueError("a message with phrases holds one recording and nothing else")
        ends_s = [phrase.end_s for phrase in self.phrases]
        if any(later <= earlier for earlier, later in itertools.pairwise(ends_s)):
            raise ValueError("the ends of the phrases must rise")

    def actions(self) -> list[list[ContentPart]]:
        """The parts of each action of a stream."""
        actions: list[list[ContentPart]] = []
        for content_part in self.content:
            if isinstance(content_part, TextPart) or not actions:
                actions.append([])
            actions[-1].append(content_part)
        return actions


Score = Annotated[float, Field(allow_inf_nan=False)]
Verdict = Literal["desirable", "undesirable"]


class RatedAnswer(_Record):
    """One of the answers to choose among, and how it was judged; what nobody judged is left out of the JSON."""

    content: list[ContentPart] = Field(min_length=1)
    score: Score | None = Field(default=None, exclude_if=_is_none)
    """A rating, a reward or a win rate; higher is better."""
    rank: int | None = Field(default=None, ge=1, exclude_if=_is_none)
    """Place among the answers: 1 is the best; equally good answers share a rank."""
    verdict: Verdict | None = Field(default=None, exclude_if=_is_none)
    """A judgement of this answer alone, such as thumbs up or down."""
    steps: list[Score | None] | None = Field(default=None, exclude_if=_is_none)
    """A score for each part of the content, where it is the end of a step; None where the step goes on."""
    origin: str | None = Field(default=None, exclude_if=_is_none)
    """Name of the model or the person that gave the answer."""
    metadata: dict[str, Any] = Field(default_factory=dict, exclude_if=_is_empty)

    @model_validator(mode="after")
    def _says_something(self) -> RatedAnswer:
        if not any(
            not isinstance(content_part, TextPart) or content_part.text.strip()
            for content_part in self.content
        ):
            raise PydanticCustomError("empty_answer", "the answer is empty: leave it out, or give its text")
        if self.steps is None:
            return self
        if len(self.steps) != len(self.content):
            raise PydanticCustomError(
                "wrong_steps",
                "{scores} scores of steps for {parts} parts: give one for each part, null where the step goes on",
                {"scores": len(self.steps), "parts": len(self.content)},
            )
        if self.steps[-1] is None:
            raise PydanticCustomError("wrong_steps", "the last step has no score: give the last part one")
        return self

    def audio_parts(self) -> list[AudioPart]:
        """The audio parts of the content, in order."""
        return [content_part for content_part in self.content if isinstance(content_part, AudioPart)]

    def says(self) -> tuple[str | tuple[str, float, float | None], ...]:
        """The texts without the spaces around them, and file and span of each recording: equal for equal answers."""
        pieces: list[str | tuple[str, float, float | None]] = []
        for content_part in self.content:
            if not isinstance(content_part, TextPart):
                pieces.append((content_part.path, content_part.start_s, content_part.end_s))
            elif pieces and isinstance(pieces[-1], str):
                pieces[-1] += content_part.text
            else:
                pieces.append(content_part.text)
        return tuple(piece.strip() if isinstance(piece, str) else piece for piece in pieces if piece != "")


class Sample(_Record):
    id: str = Field(min_length=1)
    messages: list[Message] = Field(min_length=1)
    task: str = Field(min_length=1)
    metadata: dict[str, Any] = Field(default_factory=dict)
    answers: list[RatedAnswer] = Field(default_factory=list, exclude_if=_is_empty)
    """Answers to the messages, to choose among; none where the messages hold the answer."""
    arrays: dict[str, str] = Field(default_factory=dict, exclude_if=_is_empty)
    """Name -> file of a float array (`arrays.py`): relative as paths are, or the member beside the JSON of a shard."""

    @model_validator(mode="after")
    def _is_unanswered(self) -> Sample:
        if self.answers and self.messages[-1].role == "assistant":
            raise PydanticCustomError(
                "answered_twice",
                "the last message is the assistant's, and there are answers: move it to the answers",
            )
        return self

    @model_validator(mode="after")
    def _has_a_known_split(self) -> Sample:
        if self.metadata.get("split"):
            try:
                split_of(str(self.metadata["split"]))
            except ValueError as error:
                raise PydanticCustomError("unknown_split", "{reason}", {"reason": str(error)}) from None
        return self

    @property
    def language(self) -> str | None:
        """Language of the reply, by `language` of its metadata; None: not known."""
        language = self.metadata.get("language")
        return str(language) if language else None

    @property
    def is_held_out(self) -> bool:
        """Whether trainings leave the sample out, by the `split` of its metadata."""
        return holds_out(str(self.metadata.get("split", "")))

    def texts(self, role: str) -> list[str]:
        """The text parts of all messages of `role`, in order."""
        return [p.text for m in self.messages if m.role == role for p in m.content if isinstance(p, TextPart)]

    def audio(self, role: str) -> list[AudioPart]:
        """The audio parts of all messages of `role`, in order."""
        return [p for m in self.messages if m.role == role for p in m.content if isinstance(p, AudioPart)]

    def audio_parts(self) -> list[AudioPart]:
        """All audio parts in order of appearance, those of the messages before those of the answers.

        This is the order of a sample's codes.
        """
        message_parts = [p for m in self.messages for p in m.content if isinstance(p, AudioPart)]
        return message_parts + [p for answer in self.answers for p in answer.audio_parts()]

    def video_parts(self) -> list[VideoPart]:
        """All video parts in order of appearance, those of the messages before those of the answers."""
        contents = [*(m.content for m in self.messages), *(a.content for a in self.answers)]
        return [
            content_part
            for content in contents
            for content_part in content
            if isinstance(content_part, VideoPart)
        ]

    def answered(self, index: int) -> Sample:
        """The conversation with answer `index` as its last message, as an ordinary sample.

        Raises:
            IndexError: there is no such answer.
        """
        last = Message(role="assistant", content=self.answers[index].content)
        return self.model_copy(update={"messages": [*self.messages, last], "answers": []})

    def with_parts(self, change: Callable[[ContentPart], ContentPart]) -> Sample:
        """The sample with every part, of messages and answers in order of appearance, replaced by `change(part)`."""
        messages = [
            m.model_copy(update={"content": [change(content_part) for content_part in m.content]})
            for m in self.messages
        ]
        answers = [
            a.model_copy(update={"content": [change(content_part) for content_part in a.content]})
            for a in self.answers
        ]
        return self.model_copy(update={"messages": messages, "answers": answers})


def refuse_video(messages: Sequence[Message]) -> None:
    """Say that there is a video part, for code that reads text and audio alone.

    Raises:
        ValueError: there is one.
    """
    if any(isinstance(content_part, VideoPart) for message in messages for content_part in message.content):
        raise ValueError("there is a video part, and only text and recordings are read here: leave it out")


def check_without_video(sample: Sample, place: str) -> None:
    """Set a sample with a video part aside where text and recordings alone are read.

    Raises:
        BadSample: there is one.
    """
    try:
        refuse_video(sample.messages)
    except ValueError as error:
        raise BadSample(place, sample.id, str(error), "video part") from None


def check_without_phrases(sample: Sample, place: str) -> None:
    """Set a sample with phrases aside where an answer is one recording: an answer to choose, or sampled by a policy.

    Raises:
        BadSample: its last message has phrases.
    """
    if sample.messages[-1].phrases:
        reason = "its speech is laid out in phrases, and answers are none: compose it without phrase_words"
        raise BadSample(place, sample.id, reason, "phrases")


def find_equal(answers: Sequence[RatedAnswer]) -> tuple[int, int] | None:
    """Indices of the first two answers that say the same; None where all differ."""
    first_index: dict[object, int] = {}
    for index, answer in enumerate(answers):
        first = first_index.setdefault(answer.says(), index)
        if first != index:
            return first, index
    return None


def parse_sample(content: bytes, place: str) -> Sample:
    """The sample that a line of a manifest, or a `.json` of a shard, holds.

    Raises:
        BadSample: text that is not UTF-8, wrong JSON, or JSON that is no sample; `place` is named in it.
    """
    try:
        return Sample.model_validate_json(content)
    except ValidationError:  # what exactly is wrong is found out the slow way
        pass
    record: Any = None
    try:
        record = json.loads(content.decode("utf-8"))
        return Sample.model_validate(record)
    except UnicodeDecodeError as error:
        raise BadSample(place, "", f"is not UTF-8 ({error}): write it in UTF-8", "text encoding") from None
    except json.JSONDecodeError as error:
        raise BadSample(place, "", f"wrong JSON: {error}", "wrong JSON") from None
    except ValidationError as error:
        sample_id = str(record.get("id", "")) if isinstance(record, dict) else ""
        kind = _KINDS.get(error.errors()[0]["type"], "invalid record")
        problem = f"no sample: {problem_with_remedy(error)}{_conversion_remedy(record)}"
        raise BadSample(place, sample_id, problem, kind) from None
    except RecursionError:
        raise BadSample(place, "", "wrong JSON: nested too deep", "wrong JSON") from None


def _conversion_remedy(record: object) -> str:
    """The command that makes samples of rows of another project; empty where none is recognized."""
    keys = record.keys() if isinstance(record, dict) else ()
    kind = next((kind for key, kind in _CONVERSIONS.items() if key in keys), None)
    return f"; `audiollm convert {kind} FILE -o samples.jsonl` makes samples of such rows" if kind else ""


def write_samples(path: Path, samples: Iterable[Sample]) -> None:
    """Write one JSON object per line; the file is whole or absent."""
    write_jsonl(path, (sample.model_dump(mode="json") for sample in samples))


def problem_with_remedy(error: ValidationError) -> str:
    """The first of a record's problems: its place in the record, what is wrong, and a remedy where there is one."""
    return f"{first_problem(error)}{_REMEDIES.get(error.errors()[0]['type'], '')}"
