"""Chats of others, with audio in them or not: Alpaca's instructions and ShareGPT's (or OpenAI's) conversations.

Audio files are listed in `audios` (or `audio`) and stand where a text says `<audio>`; without such a mark they come
before the first user's text. `kto_tag` goes to the metadata.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from audiollm.data.convert.request import ConversionRequest, SourceRows, bad_row
from audiollm.data.records.sample import AudioPart, Message, Part, Sample, TextPart
from audiollm.errors import BadSample, ConfigError

AUDIO_MARK = "<audio>"
ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model"), "assistant"),
    "system": "system",
}
Turn = tuple[str, Any]
"""A role as the source calls it, and the content: a text, or OpenAI's list of parts."""


def alpaca(request: ConversionRequest) -> SourceRows:
    """`instruction`, `input`, `output`, and if given `system`, `history`, `audios`, `kto_tag`."""
    return _convert(request, _alpaca_turns)


def sharegpt(request: ConversionRequest) -> SourceRows:
    """`conversations` of `from` and `value`, or `messages` of `role` and `content`; `system`, `audios`, `kto_tag`."""
    return _convert(request, _sharegpt_turns)


# Private


def _convert(request: ConversionRequest, turns: Callable[[Mapping[str, Any]], list[Turn]]) -> SourceRows:
    records = _records(request.source)

    def results() -> Iterator[Sample | BadSample]:
        for number, record in records:
            place = f"{request.source}{number}"
            if isinstance(record, BadSample):
                yield record
                continue
            id = str(record.get("id") or f"{request.source.stem}-{number.lstrip(':[').rstrip(']')}")
            try:
                yield _sample(request, id, record, turns(record))
            except ValidationError as error:
                yield bad_row(place, id, str(error.errors(include_url=False)[0]["msg"]))
            except KeyError as error:
                yield bad_row(place, id, f"has no {error}")
            except (TypeError, AttributeError) as error:
                yield bad_row(place, id, f"has another form than such chats have ({error})")
            except ValueError as error:
                yield bad_row(place, id, str(error))

    return SourceRows(len(records), results())


def _records(path: Path) -> list[tuple[str, dict[str, Any] | BadSample]]:
    """The objects of a JSON list, or of JSON lines, with their place in the file."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"cannot be read ({error.strerror})", str(path), "give a .json or .jsonl"
        ) from error
    if not content.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
        lines = enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1)
        return [(f":{number}", _record(path, number, line)) for number, line in lines if line.strip()]
    try:
        rows = json.loads(content.decode("utf-8-sig"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(
            f"wrong JSON: {error}", str(path), "mend it, or give one object a line (.jsonl)"
        ) from None
    return [
        (f"[{n}]", row if isinstance(row, dict) else bad_row(f"{path}[{n}]", "", "no object"))
        for n, row in enumerate(rows)
    ]


def _record(path: Path, number: int, line: bytes) -> dict[str, Any] | BadSample:
    place = f"{path}:{number}"
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return BadSample(place, "", f"is not UTF-8 ({error})", "text encoding")
    except (json.JSONDecodeError, RecursionError) as error:
        return BadSample(place, "", f"wrong JSON: {error}", "wrong JSON")
    return record if isinstance(record, dict) else bad_row(place, "", "no object")


def _alpaca_turns(record: Mapping[str, Any]) -> list[Turn]:
    turns: list[Turn] = [("system", record["system"])] if record.get("system") else []
    for question, answer in record.get("history") or ():
        turns += [("user", question), ("assistant", answer)]
    asked = "\n".join(filter(None, [record["instruction"], record.get("input")]))
    return [*turns, ("user", asked), ("assistant", record["output"])]


def _sharegpt_turns(record: Mapping[str, Any]) -> list[Turn]:
    turns: list[Turn] = [("system", record["system"])] if record.get("system") else []
    messages = record.get("conversations") or record.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ValueError("has no conversations (or messages)")
    for message in messages:
        role = message["from"] if "from" in message else message["role"]
        turns.append((str(role), message["value"] if "value" in message else message["content"]))
    return turns


def _sample(request: ConversionRequest, id: str, record: Mapping[str, Any], turns: Sequence[Turn]) -> Sample:
    listed = record.get("audios") or record.get("audio") or []
    sounds = [request.audio_part(str(name)) for name in ([listed] if isinstance(listed, str) else listed)]
    marks = sum(content.count(AUDIO_MARK) for _, content in turns if isinstance(content, str))
    if marks not in (0, len(sounds)):
        raise ValueError(f"{len(sounds)} audio files for {marks} marks {AUDIO_MARK}")
    left = list(sounds)
    messages = []
    for role, content in turns:
        if role not in ROLES:
            raise ValueError(f"role {role!r}: {', '.join(ROLES)} are known")
        parts: list[Part] = []
        if left and not marks and ROLES[role] == "user":
            parts, left = [*left], []
        parts += _text_parts(content, left) if isinstance(content, str) else _listed_parts(request, content)
        if parts:
            messages.append(Message.model_validate({"role": ROLES[role], "content": parts}))
    if not any(message.role == "assistant" for message in messages):
        raise ValueError("no assistant's turn: nothing to learn from it")
    has_audio = any(isinstance(part, AudioPart) for message in messages for part in message.content)
    task = request.task.name if request.task else ("audio_qa" if has_audio else "text")
    return Sample(id=id, messages=messages, task=task, metadata=_metadata(record))


def _text_parts(text: str, left: list[AudioPart]) -> list[Part]:
    """A text with the next audio file in place of every mark."""
    parts: list[Part] = []
    for number, piece in enumerate(text.split(AUDIO_MARK) if left else [text]):
        if number:
            parts.append(left.pop(0))
        if piece:
            parts.append(TextPart(text=piece))
    return parts


def _listed_parts(request: ConversionRequest, content: Sequence[Mapping[str, Any]]) -> list[Part]:
    parts: list[Part] = []
    for part in content:
        kind = part.get("type")
        if kind == "text":
            parts.append(TextPart(text=part["text"]))
        elif kind in ("audio", "audio_url"):
            named = part.get("audio") or part.get("path") or part.get("audio_url") or part.get("url")
            path = named.get("url") if isinstance(named, Mapping) else named
            if not isinstance(path, str) or path.startswith("data:"):
                raise ValueError("audio that is no file: save it to one first")
            parts.append(request.audio_part(path))
        else:
            raise ValueError(f"a part of type {kind!r}: text and audio are known")
    return parts


def _metadata(record: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: record[key] for key in ("kto_tag", "split") if record.get(key) is not None}
    if not isinstance(kept.get("kto_tag", True), bool):
        raise ValueError(f"kto_tag must be true or false, not {kept['kto_tag']!r}")
    return kept
