"""Edits in everyday words, without a model that writes: a verb, a sound, a span in numbers or by the CoT's events."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from audiollm.data.records.thoughts import ThoughtRecord
from pipelines.studio.limits import StudioRefusal

EditKind = Literal["extend", "inpaint", "add", "remove", "extract"]
_COUNTS = {
    "a": 1.0, "an": 1.0, "one": 1.0, "two": 2.0, "three": 3.0, "four": 4.0, "five": 5.0, "six": 6.0, "seven": 7.0,
    "eight": 8.0, "nine": 9.0, "ten": 10.0, "twelve": 12.0, "fifteen": 15.0, "twenty": 20.0, "thirty": 30.0,
    "half a": 0.5,
}  # fmt: skip
_NUMBER = rf"(\d+(?:[.,]\d+)?|half an?|{'|'.join(name for name in _COUNTS if name != 'half a')})"
_SECONDS = r"\s*(?:s|sec|secs|seconds?)?"
_UNIT = r"\s*(?:s|sec|secs|seconds?)\b"
_BETWEEN = re.compile(
    rf"\b(?:from|between)\s+{_NUMBER}{_SECONDS}\s+(?:to|until|till|and|-|–)\s+{_NUMBER}{_SECONDS}\b"
)
_DASH = re.compile(rf"\b(?:from\s+|at\s+)?(\d+(?:[.,]\d+)?)\s*(?:-|–|to)\s*(\d+(?:[.,]\d+)?){_UNIT}")
_AT = re.compile(rf"\b(?:at|from|after)\s+(?:second\s+)?(\d+(?:[.,]\d+)?){_SECONDS}\b")
_UNTIL = re.compile(rf"\b(?:until|till|before|up to)\s+(\d+(?:[.,]\d+)?){_SECONDS}\b")
_FOR = re.compile(rf"\b(?:for|by)\s+(?:another\s+)?{_NUMBER}\s*(?:more\s+)?{_UNIT}")
_MORE = re.compile(rf"\b{_NUMBER}\s*(?:more\s+)?{_UNIT}\s+(?:more|longer)")
_FIRST = re.compile(rf"\b(?:in |during )?the (first|last)\s+{_NUMBER}?{_UNIT}")
_EDGE = re.compile(r"\bat the (beginning|start|end)\b")
_VERBS: tuple[tuple[EditKind, re.Pattern[str]], ...] = (
    ("extract", re.compile(r"\b(?:extract|isolate|keep only|only keep|solo|i want only|just keep)\b")),
    ("inpaint", re.compile(r"\b(?:fill in|fill|replace|regenerate|redo|inpaint|repair|mend|swap|exchange)\b")),
    ("remove", re.compile(
        r"\b(?:remove|delete|erase|take out|take away|get rid of|cut out|mute|silence|drop|without|take\b(?=.*\bout\b)"
        r"|no more)\b")),
    ("extend", re.compile(
        r"\b(?:extend|continue|go on|goes on|carry on|lengthen|prolong|keep going|longer"
        r"|let it\b(?=.*\b(?:on|for)\b)|let the\b(?=.*\bon\b)|make it last)\b")),
    ("add", re.compile(r"\b(?:add|put in|put|insert|overlay|include|mix in|let there be|i want|give me|with|let)\b")),
)  # fmt: skip
_FILLERS = re.compile(
    r"\b(?:please|can you|could you|would you|the sound of|sound of|sounds of|out|away|of it|in it|it|again|there"
    r"|on|to the track|from the track|to it|from it|and|then|now|me|so that|make|longer|more|last|go|everything)\b"
)
_POINTED = re.compile(r"\b(?:this|that|these|it|here)\b")


@dataclass(frozen=True)
class EditPlan:
    """An instruction as an operation."""

    kind: EditKind
    caption: str
    """The sound, as words; empty: what is pointed at, or fits around."""
    start_s: float | None
    end_s: float | None
    """None: the whole track."""


def read_instruction(
    text: str, record: ThoughtRecord, duration_s: float, span: tuple[float, float] | None
) -> EditPlan:
    """Turn words into an operation.

    Args:
        record: the chain of thought, whose events tell where a sound is that has no times in the words.
        span: the selected seconds, which are taken where the words name none.

    Raises:
        StudioRefusal: they fit no operation, or name times that the track does not have.
    """
    words = " ".join(text.lower().replace(",", ".").split()).strip(" .!?") if text else ""
    kind = next((kind for kind, verb in _VERBS if verb.search(words)), None)
    if kind is None:
        raise StudioRefusal(
            "The words fit no operation: say what to add, remove, extract, fill or extend, as in "
            "“add a bell at 2 s”, “take the dog out”, “fill 3 to 4 s with rain”, “let it rain on for three seconds”."
        )
    start_s, end_s, rest = _times(words, kind, duration_s)
    caption = _sound(rest, kind)
    if kind == "extend":
        end_s = _extended_to(start_s, end_s, duration_s)
        return EditPlan(kind, caption or _going_on(record, duration_s), duration_s, end_s)
    if start_s is None:
        start_s, end_s = _placed(rest, kind, caption, record, span)
    if start_s is not None and end_s is not None:
        end_s = min(end_s, duration_s) if end_s - duration_s < 0.05 or kind != "inpaint" else end_s
        if not 0 <= start_s < end_s <= duration_s + 0.05:
            raise StudioRefusal(
                f"The words name {start_s:g} to {end_s:g} s, and the track has {duration_s:.1f} s: "
                "name times inside of it, or extend it first."
            )
    if kind == "inpaint" and start_s is None:
        raise StudioRefusal(
            "Say which seconds to fill, as in “fill 2 to 3 s with rain”, or select them on the waveform."
        )
    if not caption and kind in ("add", "extract") and not _POINTED.search(words):
        raise StudioRefusal(
            f"Say which sound to {kind}, as in “{kind} a bell”, or click its object in the picture."
        )
    return EditPlan(kind, caption, start_s, end_s)


# Private


def _number(text: str) -> float:
    return _COUNTS.get(text.replace("half an", "half a"), 0.0) or float(text.replace(",", "."))


def _times(words: str, kind: EditKind, duration_s: float) -> tuple[float | None, float | None, str]:
    """Beginning, end, and the words without them; for `extend` the end alone, or a length as (None, length)."""
    for pattern in (_BETWEEN, _DASH):
        if match := pattern.search(words):
            return _number(match[1]), _number(match[2]), words.replace(match[0], " ")
    length = None
    for pattern in (_FOR, _MORE):
        if match := pattern.search(words):
            length, words = _number(match[1]), words.replace(match[0], " ")
            break
    if match := _FIRST.search(words):
        seconds = _number(match[2]) if match[2] else 1.0
        words = words.replace(match[0], " ")
        return (
            (0.0, seconds, words)
            if match[1] == "first"
            else (max(0.0, duration_s - seconds), duration_s, words)
        )
    if match := _AT.search(words):
        start_s = _number(match[1])
        end_s = start_s + (length or 1.0)
        if kind != "extend" and start_s < duration_s:
            end_s = min(end_s, duration_s)
        return start_s, end_s, words.replace(match[0], " ")
    if match := _UNTIL.search(words):
        return 0.0, _number(match[1]), words.replace(match[0], " ")
    if kind == "extend":
        return None, length, words
    if match := _EDGE.search(words):
        seconds, words = min(length or 1.0, duration_s), words.replace(match[0], " ")
        return (
            (max(0.0, duration_s - seconds), duration_s, words)
            if match[1] == "end"
            else (0.0, seconds, words)
        )
    return (0.0, min(length, duration_s), words) if length else (None, None, words)


def _extended_to(start_s: float | None, end_s: float | None, duration_s: float) -> float:
    """
    Raises:
        StudioRefusal: there is no length, or an end inside of the track.
    """
    if end_s is None:
        raise StudioRefusal("Say by how much, as in “extend it by three seconds”.")
    end_s = end_s if start_s is not None else duration_s + end_s
    if end_s <= duration_s:
        raise StudioRefusal(
            f"The track already lasts {duration_s:.1f} s: name a later end, or say “by three seconds”."
        )
    return end_s


def _sound(words: str, kind: EditKind) -> str:
    for _, verb in _VERBS:
        match = verb.search(words)
        if match and (verb is dict(_VERBS)[kind]):
            words = words[: match.start()] + " " + words[match.end() :]
            break
    if kind == "inpaint":
        after = re.split(r"\b(?:with|by|through|into)\b", words, maxsplit=1)
        words = after[1] if len(after) == 2 else words
    words = _FILLERS.sub(" ", words)
    words = _POINTED.sub(" ", words) if kind != "extend" else words
    kept = " ".join(words.split()).strip(" .,;:-–")
    kept = re.sub(r"^(?:the|some|any|all)\s+", "", kept) if kind in ("remove", "extract", "extend") else kept
    return kept[:160]


def _going_on(record: ThoughtRecord, duration_s: float) -> str:
    """The sounds that a continuation has: the background, and what sounds at the end."""
    last = [event.sound for event in record.events if event.end_s >= duration_s - 0.2]
    return " and ".join(dict.fromkeys([*record.background, *last]))


def _stems(text: str) -> set[str]:
    return {re.sub(r"(?:ing|ed|es|s)$", "", word) for word in re.findall(r"[a-z]+", text.lower()) if len(word) > 2} - {
        "the", "and", "sound", "with",
    }  # fmt: skip


def _placed(
    words: str, kind: EditKind, caption: str, record: ThoughtRecord, span: tuple[float, float] | None
) -> tuple[float | None, float | None]:
    """The selected span; else, for what is there already, that of the events which the words name."""
    if span is not None:
        return span
    if kind not in ("remove", "inpaint"):
        return None, None
    wanted = _stems(re.split(r"\b(?:with|by)\b", words)[0] if kind == "inpaint" else caption)
    same = [event for event in record.events if wanted & _stems(f"{event.sound} {event.source or ''}")]
    return (same[0].start_s, max(event.end_s for event in same)) if same else (None, None)
