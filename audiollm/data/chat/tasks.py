"""Tasks as data: templates of chats in YAML, filled with the fields of a sample. `tasks.yaml` says how they read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from hashlib import sha256
from pathlib import Path
from string import Formatter
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from audiollm.data.records.sample import AudioPart, ContentPart, Message, Sample, TextPart
from audiollm.errors import ConfigError, suggestion
from audiollm.recipe.config import Document, load_document, show_path

BUILT_IN = Path(__file__).with_name("tasks.yaml")

Role = Literal["system", "user", "assistant"]
FieldValue = str | AudioPart | Sequence[ContentPart]
"""A text, a recording, or a mixture of both that takes the field's place."""


class TaskTemplate(BaseModel):
    """A task template: an entry of `tasks.yaml`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    about: str = Field(min_length=1)
    over: Literal["segment", "conversation"] = "segment"
    audio: tuple[str, ...]
    phrasings: tuple[tuple[dict[Role, str], ...], ...] = Field(min_length=1)

    @field_validator("phrasings")
    @classmethod
    def _chats_are_whole(
        cls, phrasings: tuple[tuple[dict[Role, str], ...], ...]
    ) -> tuple[tuple[dict[Role, str], ...], ...]:
        for number, chat in enumerate(phrasings):
            if not chat or "assistant" not in chat[-1]:
                raise ValueError(f"phrasing {number} must end with an assistant's message")
            for message in chat:
                if len(message) != 1:
                    raise ValueError(f"phrasing {number}: a message is one `role: text`")
                for role, text in message.items():
                    try:
                        _split_phrasing(text)
                    except ValueError as error:
                        raise ValueError(f"phrasing {number}, {role}: {error}") from None
        return phrasings

    @model_validator(mode="after")
    def _audio_is_used(self) -> TaskTemplate:
        used = set().union(*self.fields)
        for field in self.audio:
            if field not in used:
                raise ValueError(f"audio: no phrasing uses {{{field}}}; {suggestion(field, used)}")
        return self

    @cached_property
    def fields(self) -> tuple[frozenset[str], ...]:
        """The fields that each phrasing uses."""
        return tuple(
            frozenset(
                name
                for message in chat
                for text in message.values()
                for _, name in _split_phrasing(text)
                if name
            )
            for chat in self.phrasings
        )

    @property
    def required(self) -> frozenset[str]:
        """The fields without which no phrasing can be filled."""
        return frozenset.intersection(*self.fields)

    def lacks(self, available_fields: set[str]) -> frozenset[str]:
        """Return the fields missing for the nearest phrasing; empty where a phrasing can be filled."""
        return min(
            (needed - available_fields for needed in self.fields), key=lambda lack: (len(lack), sorted(lack))
        )


def load_tasks(path: Path | None = None) -> dict[str, TaskTemplate]:
    """The built-in tasks and those of a YAML file of the user's, which come first where names are the same.

    Raises:
        ConfigError: no such file, not YAML, or a task that is not one; it names file, line, task and key.
    """
    tasks = dict(_built_in_tasks())
    if path is not None:
        if not path.is_file():
            raise ConfigError("no such file of tasks", str(path), f"{BUILT_IN} shows how they read")
        tasks |= _read_task_file(path)
    return tasks


def fill_task(
    task: TaskTemplate,
    id: str,
    fields: Mapping[str, FieldValue],
    seed: int = 0,
    metadata: Mapping[str, Any] | None = None,
) -> Sample:
    """The sample: one phrasing of the task, filled.

    Of the phrasings whose fields are all given, those that use the most of them are drawn from, by a hash of
    seed, task and id. Fields that are not used are left alone.

    Raises:
        ValueError: fields that are missing, empty, or a text where a recording must be and the reverse.
    """
    available_fields = {name for name, value in fields.items() if value is not None}
    lacking = task.lacks(available_fields)
    if lacking:
        raise ValueError(f"sample {id}: task {task.name} needs {', '.join(sorted(lacking))}")
    possible = [number for number, needed in enumerate(task.fields) if needed <= available_fields]
    max_fields = max(len(task.fields[number]) for number in possible)
    candidates = [number for number in possible if len(task.fields[number]) == max_fields]
    chat = task.phrasings[candidates[_hash_to_index(f"{seed}:{task.name}:{id}") % len(candidates)]]
    messages = []
    for message in chat:
        for role, text in message.items():
            messages.append(Message(role=role, content=_fill_phrasing(task, id, text, fields)))
    return Sample(id=id, messages=messages, task=task.name, metadata=dict(metadata or {}))


def _fill_phrasing(
    task: TaskTemplate, id: str, template: str, fields: Mapping[str, FieldValue]
) -> list[ContentPart]:
    """A message's parts; neighbouring texts become one, empty ones are left out."""
    parts: list[ContentPart] = []
    for literal, name in _split_phrasing(template):
        added: list[ContentPart] = [TextPart(text=literal)]
        if name is not None:
            value = fields[name]
            wrong = str if name in task.audio else AudioPart
            if isinstance(value, wrong) or not value:
                must = "a recording" if name in task.audio else "a text"
                raise ValueError(f"sample {id}: task {task.name}: {name} must be {must}, not {value!r:.60}")
            if isinstance(value, str):
                added.append(TextPart(text=value))
            else:
                added += [value] if isinstance(value, AudioPart) else value
        for content_part in added:
            last = parts[-1] if parts else None
            if isinstance(content_part, TextPart) and isinstance(last, TextPart):
                parts[-1] = TextPart(text=last.text + content_part.text)
            elif not isinstance(content_part, TextPart) or content_part.text:
                parts.append(content_part)
    return parts


def _split_phrasing(template: str) -> list[tuple[str, str | None]]:
    """(text, name of the field after it) of a template.

    Raises:
        ValueError: a brace alone, or more in the braces than the name of a field.
    """
    pieces: list[tuple[str, str | None]] = []
    for literal, name, form, conversion in Formatter().parse(template):
        if name is not None and (not name.isidentifier() or form or conversion):
            raise ValueError(f"{{{name}}} is not the name of a field; write {{{{ and }}}} for braces")
        pieces.append((literal, name))
    if not any(literal or name for literal, name in pieces):
        raise ValueError("the text is empty")
    return pieces


@cache
def _built_in_tasks() -> Mapping[str, TaskTemplate]:
    """Read once: prompts of every text that is spoken ask for them."""
    return _read_task_file(BUILT_IN)


def _read_task_file(path: Path) -> dict[str, TaskTemplate]:
    document = load_document(path)
    return {str(name): _parse_task(str(name), value, document) for name, value in document.data.items()}


def _parse_task(name: str, value: Any, document: Document) -> TaskTemplate:
    if not isinstance(value, dict) or "name" in value:
        task_keys = [key for key in TaskTemplate.model_fields if key != "name"]
        raise ConfigError(f"{name}: a task has the keys {', '.join(task_keys)}", document.where((name,)))
    try:
        return TaskTemplate.model_validate({"name": name, **value})
    except ValidationError as error:
        # a misspelt key is both unknown and missing: the former says which it is
        problems = sorted(error.errors(include_url=False), key=lambda p: p["type"] != "extra_forbidden")
        problem = problems[0]
        path = (name, *(key for key in problem["loc"] if key != "[key]"))
        remedy = (
            suggestion(str(path[-1]), TaskTemplate.model_fields)
            if problem["type"] == "extra_forbidden"
            else ""
        )
        message = str(problem["msg"]).removeprefix("Value error, ")
        raise ConfigError(f"{show_path(path)}: {message}", document.where(path), remedy) from None


def _hash_to_index(text: str) -> int:
    return int(sha256(text.encode()).hexdigest()[:16], 16)
