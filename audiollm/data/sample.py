"""Sample: the one record that every dataset holds, and JSONL files of them.

A sample is a chat: messages of text and audio parts. A bad record is named where it enters, never silently
dropped.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from audiollm.files import write_jsonl


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


@dataclass(frozen=True)
class BadRow:
    """A line of a JSONL file that holds no usable record."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}  {self.reason}"


def read_samples(path: Path) -> tuple[list[Sample], list[BadRow]]:
    """The samples of a JSONL file in their order, and the lines that hold none (a doubled id among them).

    Raises:
        OSError: the file cannot be read at all.
    """
    samples: list[Sample] = []
    bad: list[BadRow] = []
    seen: dict[str, int] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                sample = Sample.model_validate(json.loads(line.decode("utf-8")))
                if sample.id in seen:
                    raise ValueError(f"id {sample.id!r} was used on line {seen[sample.id]}")
            except ValidationError as error:
                bad.append(BadRow(str(path), number, _first_problem(error)))
            except ValueError as error:
                bad.append(BadRow(str(path), number, str(error)))
            else:
                seen[sample.id] = number
                samples.append(sample)
    return samples, bad


def write_samples(path: Path, samples: Iterable[Sample]) -> None:
    """One JSON object a line; the file is whole or absent."""
    write_jsonl(path, (sample.model_dump(mode="json") for sample in samples))


def _first_problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in problem["loc"])
    return f"{place}: {problem['msg']}" if place else str(problem["msg"])
