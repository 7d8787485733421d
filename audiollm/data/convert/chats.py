"""Chats of others, with audio in them or not: Alpaca's instructions and ShareGPT's (or OpenAI's) conversations.

Audio files are listed in `audios` (or `audio`) and stand where a text says `<audio>`; without such a mark they come
before the first user's text. `kto_tag` goes to the metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import ValidationError

from audiollm.data.convert.request import (
    ConversionRequest,
    SourceRows,
    bad_row,
    bad_rows_sample,
    known_split,
    row_id,
)
from audiollm.data.records.sample import AudioPart, ContentPart, Message, Sample, TextPart
from audiollm.data.tables.columns import is_missing
from audiollm.data.tables.rows import read_json_rows
from audiollm.data.tables.table import BadRow
from audiollm.errors import BadSample, first_problem


def alpaca(request: ConversionRequest) -> SourceRows:
    """`instruction`, `input`, `output`, and if given `system`, `history`, `audios`, `kto_tag`."""
    return _convert(request, turns_of_instruction)


def sharegpt(request: ConversionRequest) -> SourceRows:
    """`conversations` of `from` and `value`, or `messages` of `role` and `content`; `system`, `audios`, `kto_tag`."""
    return _convert(request, turns_of_conversation)


# Private


def _convert(
    request: ConversionRequest, turns: Callable[[Mapping[str, Any]], list[SourceTurn]]
) -> SourceRows:
    rows = read_json_rows(request.source)

    def results() -> Iterator[Sample | BadSample]:
        for place, record in rows.rows:
            if isinstance(record, BadRow):
                yield bad_rows_sample(place, record)
                continue
            label = row_id(request.source, place)
            id = str(record["id"] if not is_missing(record.get("id"), is_name=True) else label)
            try:
                yield _convert_chat(request, id, record, turns(record))
            except ValidationError as error:
                yield bad_row(place, id, first_problem(error))
            except KeyError as error:
                yield bad_row(place, id, f"has no {error}")
            except (TypeError, AttributeError) as error:
                yield bad_row(place, id, f"has another form than such chats have ({error})")
            except ValueError as error:
                yield bad_row(place, id, str(error))

    return SourceRows(len(rows.rows), results(), rows.notes)


def _convert_chat(
    request: ConversionRequest, id: str, record: Mapping[str, Any], turns: Sequence[SourceTurn]
) -> Sample:
    listed = record.get("audios") or record.get("audio") or []
    sounds = [request.audio_part(str(name)) for name in ([listed] if isinstance(listed, str) else listed)]
    messages = messages_of(turns, sounds, lambda value: _make_file_part(request, value))
    answers = [message for message in messages if message.role == "assistant"]
    if not any(message.weight for message in answers):
        reason = "every assistant's turn has weight 0" if answers else "no assistant's turn"
        raise ValueError(f"{reason}: nothing to learn from it")
    has_audio = any(
        isinstance(content_part, AudioPart) for message in messages for content_part in message.content
    )
    task = request.task.name if request.task else ("audio_qa" if has_audio else "text")
    return Sample(id=id, messages=messages, task=task, metadata=_collect_chat_metadata(request, record))


def _make_file_part(request: ConversionRequest, value: Any) -> AudioPart:
    if not isinstance(value, str) or value.startswith("data:"):
        raise ValueError("audio that is no file: save it to one first")
    return request.audio_part(value)


def _collect_chat_metadata(request: ConversionRequest, record: Mapping[str, Any]) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    if record.get("kto_tag") is not None:
        if not isinstance(record["kto_tag"], bool):
            raise ValueError(f"kto_tag must be true or false, not {record['kto_tag']!r}")
        metadata["kto_tag"] = record["kto_tag"]
    if not is_missing(record.get("split"), is_name=True):
        metadata["split"] = known_split(str(request.source), str(record["split"]))
    return metadata


AUDIO_MARK = "<audio>"
ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model"), "assistant"),
    "system": "system",
}
"""Roles as sources call them, in small letters."""
THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message that hold the thought before its answer."""
WEIGHT_KEYS = ("weight", "loss", "train")
"""Keys of a message that say whether it is learned: 1 or true, 0 or false (OpenAI, ms-swift, axolotl)."""
ReadAudio = Callable[[Any], AudioPart]
"""Makes an audio part of what a part of a message holds: a path, or stored sound."""


class SourceTurn(NamedTuple):
    """A message of a source."""

    role: str
    """Role by the name that the source has for it."""
    content: Any
    """A text, or OpenAI's list of parts."""
    weight: int = 1
    """0: the answer is read and not learned."""


def role_of(name: str) -> str:
    """`user`, `assistant` or `system`, for a role as a source calls it.

    Raises:
        ValueError: the role is not known.
    """
    if name.strip().lower() not in ROLES:
        raise ValueError(f"role {name!r}: {', '.join(ROLES)} are known")
    return ROLES[name.strip().lower()]


def turns_of_instruction(record: Mapping[str, Any]) -> list[SourceTurn]:
    """The turns of Alpaca's `instruction`, `input` and `output`.

    Raises:
        ValueError: a text is expected and something else is there.
    """
    texts = {key: record.get(key) for key in ("instruction", "input", "output", "system")}
    for key, text in texts.items():
        if key in record and not (isinstance(text, str) or (text is None and key in ("input", "system"))):
            raise ValueError(f"{key}: a text is expected, not {text!r:.60}")
    turns = [SourceTurn("system", texts["system"])] if texts["system"] else []
    for question, answer in record.get("history") or ():
        turns += [SourceTurn("user", question), SourceTurn("assistant", answer)]
    prompt = "\n".join(filter(None, [record["instruction"], texts["input"]]))
    return [*turns, SourceTurn("user", prompt), SourceTurn("assistant", record["output"])]


def turns_of_conversation(record: Mapping[str, Any]) -> list[SourceTurn]:
    turns = [SourceTurn("system", record["system"])] if record.get("system") else []
    messages = record.get("conversations") or record.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ValueError("has no conversations (or messages)")
    return [*turns, *map(as_turn, messages)]


def as_turn(message: Mapping[str, Any]) -> SourceTurn:
    """Role and content of a message of `from` and `value`, or of `role` and `content`, with its thought before it.

    Raises:
        KeyError: it has neither.
        ValueError: it calls tools, or its weight is neither 0 nor 1.
    """
    role = message["from"] if message.get("from") is not None else message["role"]
    content = message["value"] if message.get("value") is not None else message.get("content")
    if content is None and not {"value", "content"} & set(message):
        raise KeyError("content")
    if message.get("tool_calls") or message.get("function_call"):
        raise ValueError("a turn calls tools, and such chats are not read")
    return SourceTurn(str(role), _with_thought(message, content), _weight(message))


def messages_of(turns: Sequence[SourceTurn], sounds: Sequence[AudioPart], read: ReadAudio) -> list[Message]:
    """The messages of the turns, with the recordings in their places; a system's turn without content is left out.

    Args:
        sounds: recordings that are listed beside the turns.
        read: for recordings that the turns hold themselves.

    Raises:
        ValueError: a role or a part that is not known, an empty turn, or recordings that do not fit the marks.
    """
    marks = sum(num_marks(turn.content) for turn in turns)
    if marks not in (0, len(sounds)):
        raise ValueError(f"{len(sounds)} audio files for {marks} marks {AUDIO_MARK}")
    remaining = list(sounds)
    messages = []
    for number, turn in enumerate(turns, start=1):
        role = role_of(turn.role)
        parts: list[ContentPart] = []
        if remaining and not marks and role == "user":
            parts, remaining = [*remaining], []
        parts += parts_of(turn.content or "", remaining if marks else [], read)
        if any(not isinstance(content_part, TextPart) or content_part.text.strip() for content_part in parts):
            weight = turn.weight if role == "assistant" else 1
            messages.append(Message.model_validate({"role": role, "content": parts, "weight": weight}))
        elif role != "system":
            raise ValueError(
                f"turn {number}, of the {role}, is {'null' if turn.content is None else 'empty'}"
            )
    if remaining:
        raise ValueError(f"{len(remaining)} audio files, and no user's turn to put them in")
    return messages


def parts_of(content: Any, recordings: list[AudioPart], read: ReadAudio) -> list[ContentPart]:
    """The parts of a turn's content; recordings for its marks are taken from the front of `recordings`.

    Raises:
        ValueError: a part that is not known.
    """
    if isinstance(content, str):
        return _text_parts(content, recordings)
    parts: list[ContentPart] = []
    for content_part in content:
        kind = content_part.get("type")
        if kind == "text":
            parts += (
                _text_parts(content_part["text"], recordings)
                if recordings
                else [TextPart(text=content_part["text"])]
            )
        elif kind in ("audio", "audio_url"):
            held = _find_part_recording(content_part)
            parts.append(recordings.pop(0) if held is None and recordings else read(held))
        else:
            raise ValueError(f"a part of type {kind!r}: text and audio are known")
    return parts


def num_marks(content: Any) -> int:
    """The number of places, in a text or a list of parts, for recordings that are listed beside it."""
    if isinstance(content, str):
        return content.count(AUDIO_MARK)
    marks = 0
    for content_part in content or ():
        if content_part.get("type") == "text":
            marks += str(content_part.get("text")).count(AUDIO_MARK)
        elif content_part.get("type") in ("audio", "audio_url"):
            marks += _find_part_recording(content_part) is None
    return marks


# Private


def _with_thought(message: Mapping[str, Any], content: Any) -> Any:
    thoughts = (message.get(key) for key in THOUGHT_KEYS)
    thought = next((text for text in thoughts if isinstance(text, str) and text.strip()), None)
    if thought is None or not content or (isinstance(content, str) and "<think>" in content):
        return content
    opening = f"<think>{thought.strip()}</think>\n"
    return opening + content if isinstance(content, str) else [{"type": "text", "text": opening}, *content]


def _weight(message: Mapping[str, Any]) -> int:
    for key in WEIGHT_KEYS:
        value = message.get(key)
        if value is None:
            continue
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise ValueError(f"{key} of a message must be 0 or 1, not {value!r:.60}")
        return int(value)
    return 1


def _find_part_recording(content_part: Mapping[str, Any]) -> Any:
    """The recording that a part holds: a path or stored sound; None for a place to put one."""
    named = (
        content_part.get("audio")
        or content_part.get("path")
        or content_part.get("audio_url")
        or content_part.get("url")
    )
    return named.get("url") if isinstance(named, Mapping) and "url" in named else named


def _text_parts(text: str, recordings: list[AudioPart]) -> list[ContentPart]:
    """A text with the next recording in place of every mark."""
    parts: list[ContentPart] = []
    for number, piece in enumerate(text.split(AUDIO_MARK) if recordings else [text]):
        if number:
            parts.append(recordings.pop(0))
        if piece:
            parts.append(TextPart(text=piece))
    return parts
