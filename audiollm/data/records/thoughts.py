"""Chains of thought about a sound, as records: what is heard when, what makes it, and what must not be heard.

The prose that a flow model reads is made from the record (`prose_of`), never written beside it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from audiollm.errors import first_problem

MAX_EVENTS = 32
NO_OTHERS = "other sounds"
"""The entry of `avoid` that says that the record is complete."""
_MAX_CHARACTERS = 160
_MAX_ANSWER_CHARACTERS = 40_000
_LATE_S = 0.05
"""An event may end this much after the clip: times are rounded."""
_ORDER = ("First", "Then", "Finally")
_FENCE = re.compile(r"```(?:json)?\s*\n(.*)\n\s*```", re.DOTALL)


class ThoughtError(ValueError):
    """An answer that is no record; the message quotes what is wrong, for a person or for the model that wrote it."""


def _check_phrase(text: str) -> str:
    text = " ".join(text.split())
    if not text:
        raise ValueError("a phrase must not be empty")
    if len(text) > _MAX_CHARACTERS:
        raise ValueError(f"a phrase has at most {_MAX_CHARACTERS} characters, not {len(text)}")
    if not text.isprintable():
        raise ValueError("a phrase must be printable text")
    return text


Record = TypeVar("Record", bound=BaseModel)

Phrase = Annotated[str, AfterValidator(_check_phrase)]
"""A few words on one line."""


class _ThoughtModel(BaseModel):
    # strict: "1.0" is no time, and true is no number
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


class ThoughtEvent(_ThoughtModel):
    """One sound with a beginning and an end."""

    sound: Phrase
    """The sound that is heard: "dog bark"."""
    start_s: float = Field(ge=0, allow_inf_nan=False)
    end_s: float = Field(gt=0, allow_inf_nan=False)
    source: Phrase | None = None
    """The thing that makes the sound: "a brown dog"."""
    place: Phrase | None = None
    """Where it is: "on the left"."""
    manner: Phrase | None = None
    """How it sounds: "loud"."""

    @model_validator(mode="after")
    def _ends_after_it_starts(self) -> ThoughtEvent:
        if self.end_s <= self.start_s:
            raise ValueError(
                f"{self.sound!r} ends at {self.end_s:g} s, not after its start {self.start_s:g} s"
            )
        return self


class Consequence(_ThoughtModel):
    """An event that follows from another; both are counted from 0."""

    event: int = Field(ge=0)
    after: int = Field(ge=0)
    why: Phrase
    """The reason, as words that follow "because"."""


class ThoughtRecord(_ThoughtModel):
    """A chain of thought (CoT) about the sound of a clip."""

    events: list[ThoughtEvent] = Field(default_factory=list, max_length=MAX_EVENTS)
    """In order of time."""
    background: list[Phrase] = Field(default_factory=list, max_length=8)
    """Sounds that last for the whole clip."""
    follows: list[Consequence] = Field(default_factory=list, max_length=MAX_EVENTS)
    avoid: list[Phrase] = Field(default_factory=list, max_length=16)
    """Sounds that must not be heard; `other sounds`: none but those above."""

    @model_validator(mode="after")
    def _is_consistent(self) -> ThoughtRecord:
        starts = [event.start_s for event in self.events]
        if starts != sorted(starts):
            raise ValueError("events must be in the order of their start_s")
        for link in self.follows:
            if max(link.event, link.after) >= len(self.events):
                raise ValueError(f"follows names event {max(link.event, link.after)} of {len(self.events)}")
            if link.after >= link.event:
                raise ValueError(f"event {link.event} cannot follow from event {link.after}: it is not later")
        sounds = {sound.casefold() for sound in self.sounds()}
        for sound in self.avoid:
            if sound.casefold() in sounds:
                raise ValueError(f"{sound!r} is both heard and to be avoided")
        return self

    def sounds(self) -> list[str]:
        """The sounds of events and background, each once, in order."""
        return list(dict.fromkeys([*(event.sound for event in self.events), *self.background]))

    def between(self, start_s: float, end_s: float) -> ThoughtRecord:
        """The part of the record that sounds in a span; times stay those of the clip."""
        event_numbers = [n for n, e in enumerate(self.events) if e.start_s < end_s and e.end_s > start_s]
        places = {number: place for place, number in enumerate(event_numbers)}
        links = [
            Consequence(event=places[link.event], after=places[link.after], why=link.why)
            for link in self.follows
            if link.event in places and link.after in places
        ]
        events = [self.events[number] for number in event_numbers]
        return ThoughtRecord(events=events, background=self.background, follows=links, avoid=self.avoid)

    def cut(self, start_s: float, end_s: float) -> ThoughtRecord:
        """The record of a span as of a clip of its own: cut to the span, whose beginning is second 0."""
        span_record = self.between(start_s, end_s)
        events = [
            event.model_copy(
                update={
                    "start_s": max(0.0, event.start_s - start_s),
                    "end_s": min(event.end_s, end_s) - start_s,
                }
            )
            for event in span_record.events
        ]
        return span_record.model_copy(update={"events": events})


def check_record_times(record: ThoughtRecord, duration_s: float) -> None:
    """Refuse times outside of a clip.

    Raises:
        ThoughtError: an event begins or ends after it.
    """
    check_spans([(event.sound, event.start_s, event.end_s) for event in record.events], duration_s)


def check_spans(spans: Iterable[tuple[str, float, float]], duration_s: float) -> None:
    """Refuse spans (name, beginning, end in seconds) outside of a clip.

    Raises:
        ThoughtError: something begins or ends after it.
    """
    for name, start_s, end_s in spans:
        if start_s >= duration_s or end_s > duration_s + _LATE_S:
            raise ThoughtError(
                f"{name!r} lasts from {start_s:g} to {end_s:g} s, and the clip has {duration_s:.2f} s"
            )


def parse_thought(text: str, duration_s: float) -> ThoughtRecord:
    """Read the record in a model's answer: one JSON object and nothing beside it, or one in a code fence.

    Raises:
        ThoughtError: it is none, breaks the schema, or names times outside of the clip.
    """
    record = parse_answer(text, ThoughtRecord)
    check_record_times(record, duration_s)
    return record


def parse_answer(text: str, schema: type[Record]) -> Record:
    """Read a model's answer by a schema: one JSON object and nothing beside it, or one in a code fence.

    Raises:
        ThoughtError: it is none, or breaks the schema; the message names the place and what is wrong.
    """
    if len(text) > _MAX_ANSWER_CHARACTERS:
        raise ThoughtError(
            f"the answer has {len(text)} characters; at most {_MAX_ANSWER_CHARACTERS} are read"
        )
    text = text.strip()
    if fenced := _FENCE.fullmatch(text):
        text = fenced[1]
    try:
        content = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ThoughtError(f"the answer is not one JSON object: {error}") from None
    if not isinstance(content, dict):
        raise ThoughtError("the answer is not a JSON object")
    try:
        # JSON has no whole numbers of its own: 1 is a time as 1.0 is
        return schema.model_validate_json(json.dumps(content))
    except ValidationError as error:
        raise ThoughtError(first_problem(error)) from None


def prose_of(record: ThoughtRecord) -> str:
    """Say which sounds there are, when, in what order, where and how, and which there are not."""
    words = []
    reasons = {link.event: link for link in record.follows}
    for number, event in enumerate(record.events):
        is_last_of_many = 3 < len(record.events) == number + 1
        order = _ORDER[0 if number == 0 else 2 if is_last_of_many else 1]
        sound = _with_manner(event.sound, event.manner)
        sentence = f"{order}, at {event.start_s:.1f} seconds, {sound}"
        sentence += f" of {event.source}" if event.source else ""
        sentence += f" {event.place}" if event.place else ""
        if number in reasons:
            sentence += f", because {reasons[number].why}"
        words.append(f"{sentence}.")
    behind = " and ".join(filter(None, [", ".join(record.background[:-1]), *record.background[-1:]]))
    words.append(f"In the background: {behind.lower() or 'nothing'}.")
    if record.avoid:
        missing = ", ".join(f"no {sound}" for sound in record.avoid)
        words.append(f"{missing[0].upper()}{missing[1:]}.")
    return " ".join(words)


def caption_of_record(record: ThoughtRecord) -> str:
    """Name the sounds alone, without times: "rain, dog bark and bell"."""
    names = sorted(record.sounds())
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def record_json(record: BaseModel) -> dict[str, Any]:
    """The record as JSON values, without what is not said."""
    return record.model_dump(mode="json", exclude_none=True)


def _with_manner(sound: str, manner: str | None) -> str:
    """The words of a sound with its manner, behind an article: "loud bell", "a loud dog"."""
    if manner is None:
        return sound
    article, _, noun = sound.partition(" ")
    if article.lower() not in ("a", "an") or not noun:
        return f"{manner} {sound}"
    return f"{'an' if manner[0].lower() in 'aeiou' else 'a'} {manner} {noun}"


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")
