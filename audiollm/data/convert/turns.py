"""Turns as other projects write them, and the messages that they become.

Recordings stand where a text says `<audio>`, or where a list of parts has one without a file; without such marks they
come before the first user's text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from audiollm.data.records.sample import AudioPart, Message, Part, TextPart

AUDIO_MARK = "<audio>"
ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model"), "assistant"),
    "system": "system",
}
Turn = tuple[str, Any]
"""A role as the source calls it, and the content: a text, or OpenAI's list of parts."""
ReadAudio = Callable[[Any], AudioPart]
"""Makes an audio part of what a part of a message holds: a path, or stored sound."""


def turns_of_instruction(record: Mapping[str, Any]) -> list[Turn]:
    turns: list[Turn] = [("system", record["system"])] if record.get("system") else []
    for question, answer in record.get("history") or ():
        turns += [("user", question), ("assistant", answer)]
    asked = "\n".join(filter(None, [record["instruction"], record.get("input")]))
    return [*turns, ("user", asked), ("assistant", record["output"])]


def turns_of_conversation(record: Mapping[str, Any]) -> list[Turn]:
    turns: list[Turn] = [("system", record["system"])] if record.get("system") else []
    messages = record.get("conversations") or record.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ValueError("has no conversations (or messages)")
    for message in messages:
        role = message["from"] if "from" in message else message["role"]
        turns.append((str(role), message["value"] if "value" in message else message["content"]))
    return turns


def as_turn(message: Mapping[str, Any]) -> Turn:
    """Role and content of a message of `from` and `value`, or of `role` and `content`.

    Raises:
        KeyError: it has neither.
    """
    role = message["from"] if message.get("from") is not None else message["role"]
    return str(role), message["value"] if message.get("value") is not None else message["content"]


def messages_of(turns: Sequence[Turn], sounds: Sequence[AudioPart], read: ReadAudio) -> list[Message]:
    """The messages of the turns, with the recordings in their places; turns without content are left out.

    Args:
        sounds: recordings that are listed beside the turns.
        read: for recordings that the turns hold themselves.

    Raises:
        ValueError: a role or a part that is not known, or recordings that do not fit the marks.
    """
    marks = sum(num_marks(content) for _, content in turns)
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
        parts += parts_of(content, left if marks else [], read)
        if parts:
            messages.append(Message.model_validate({"role": ROLES[role], "content": parts}))
    if left:
        raise ValueError(f"{len(left)} audio files, and no user's turn to put them in")
    return messages


def parts_of(content: Any, left: list[AudioPart], read: ReadAudio) -> list[Part]:
    """The parts of a turn's content; recordings for its marks are taken from the front of `left`.

    Raises:
        ValueError: a part that is not known.
    """
    if isinstance(content, str):
        return _text_parts(content, left)
    parts: list[Part] = []
    for part in content:
        kind = part.get("type")
        if kind == "text":
            parts += _text_parts(part["text"], left) if left else [TextPart(text=part["text"])]
        elif kind in ("audio", "audio_url"):
            held = _held(part)
            parts.append(left.pop(0) if held is None and left else read(held))
        else:
            raise ValueError(f"a part of type {kind!r}: text and audio are known")
    return parts


def num_marks(content: Any) -> int:
    """The number of places, in a text or a list of parts, for recordings that are listed beside it."""
    if isinstance(content, str):
        return content.count(AUDIO_MARK)
    marks = 0
    for part in content or ():
        if part.get("type") == "text":
            marks += str(part.get("text")).count(AUDIO_MARK)
        elif part.get("type") in ("audio", "audio_url"):
            marks += _held(part) is None
    return marks


# Private


def _held(part: Mapping[str, Any]) -> Any:
    """The recording that a part holds: a path or stored sound; None for a place to put one."""
    named = part.get("audio") or part.get("path") or part.get("audio_url") or part.get("url")
    return named.get("url") if isinstance(named, Mapping) and "url" in named else named


def _text_parts(text: str, left: list[AudioPart]) -> list[Part]:
    """A text with the next recording in place of every mark."""
    parts: list[Part] = []
    for number, piece in enumerate(text.split(AUDIO_MARK) if left else [text]):
        if number:
            parts.append(left.pop(0))
        if piece:
            parts.append(TextPart(text=piece))
    return parts
