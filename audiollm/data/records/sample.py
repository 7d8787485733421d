"""Sample: the one record that every dataset holds, and JSONL files of them.

A sample is a chat: messages of text and audio parts. A bad record is named where it enters, never silently
dropped.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from audiollm.errors import BadSample
from audiollm.files.atomic import write_jsonl


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class TextPart(_Record):
    type: Literal["text"] = "text"
    text: str


class AudioPart(_Record):
    type: Literal["audio"] = "audio"
    path: str = Field(min_length=1)
    """An audio file, or the key of a clip in a shard."""
    start_s: float = Field(default=0.0, ge=0.0)
    end_s: float | None = None
    """Seconds from the file's beginning; None: to its end."""
    speaker: str | None = None

    @model_validator(mode="after")
    def _span_is_positive(self) -> AudioPart:
        if self.end_s is not None and self.end_s <= self.start_s:
            raise ValueError(f"the span ends at {self.end_s} s, not after its start at {self.start_s} s")
        return self


Part = Annotated[TextPart | AudioPart, Field(discriminator="type")]


class Message(_Record):
    role: Literal["system", "user", "assistant"]
    content: list[Part] = Field(min_length=1)


class Sample(_Record):
    id: str = Field(min_length=1)
    messages: list[Message] = Field(min_length=1)
    task: str = Field(min_length=1)
    metadata: dict[str, Any] = Field(default_factory=dict)

    def texts(self, role: str) -> list[str]:
        """The text parts of all messages of `role`, in order."""
        return [p.text for m in self.messages if m.role == role for p in m.content if isinstance(p, TextPart)]

    def audio(self, role: str) -> list[AudioPart]:
        """The audio parts of all messages of `role`, in order."""
        return [p for m in self.messages if m.role == role for p in m.content if isinstance(p, AudioPart)]

    def audio_parts(self) -> list[AudioPart]:
        """All audio parts in order of appearance, the order of a sample's codes."""
        return [p for m in self.messages for p in m.content if isinstance(p, AudioPart)]


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
        known = str(record.get("id", "")) if isinstance(record, dict) else ""
        raise BadSample(place, known, f"no sample: {_first_problem(error)}", "invalid record") from None
    except RecursionError:
        raise BadSample(place, "", "wrong JSON: nested too deep", "wrong JSON") from None


def write_samples(path: Path, samples: Iterable[Sample]) -> None:
    """Write one JSON object per line; the file is whole or absent."""
    write_jsonl(path, (sample.model_dump(mode="json") for sample in samples))


def _first_problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in problem["loc"])
    return f"{place}: {problem['msg']}" if place else str(problem["msg"])
