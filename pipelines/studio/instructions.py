"""Edits in everyday words, without a model that writes: a verb, a sound, a span in numbers or by the CoT's events."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from audiollm.data.records.thoughts import ThoughtRecord
from pipelines.studio.limits import StudioRefusal

EditKind = Literal["extend", "inpaint", "add", "remove", "extract"]
_COUNTS: dict[str, float] = {
    "zero": 0, "one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9,
    "ten": 10, "eleven": 11, "twelve": 12, "fifteen": 15, "twenty": 20, "thirty": 30, "half a": 0.5, "half an": 0.5,
}  # fmt: skip
_COUNT = "|".join(_COUNTS)
_DIGITS = r"(\d+(?:\.\d+)?)"
_SECONDS = r"\s*(?:s|secs?|seconds?)\b"
_MINUTES = r"\s*(?:(?:mins?|minutes?)\b|m(?=\s*\d))"
_UNIT = r"(?:seconds?|secs?|minutes?|mins?)\b"
_TO = r"\s*(?:-|–|\b(?:to|until|till|and)\b)\s*"
# ways to write times, which become one, "90 s"
_HALVES = re.compile(rf"\b(\d+|{_COUNT})\s+and\s+a\s+half(?=\s+{_UNIT})")
_COUNTED = re.compile(rf"\b({_COUNT})(?=\s+(?:more\s+)?{_UNIT}|{_TO}(?:\d|{_COUNT}))")
_SINGLE = re.compile(
    rf"(\b(?:for|by|until|till|after|before)\s+(?=an?\b|another\b)|\b(?:first|last)\s+)(?:(?:an?|another)\s+)?(?={_UNIT})"
    rf"|\b(?:an?|another)\s+(?={_UNIT}\s+(?:more|longer)\b)"
)
_MORE_FIRST = re.compile(rf"\b(\d+(?:\.\d+)?)\s+more\s+({_UNIT})")
_CLOCK = re.compile(rf"\b(?:(\d+):)?(\d+):([0-5]\d(?:\.\d+)?)\b(?:{_MINUTES})?")
_BOTH_MINUTES = re.compile(rf"\b{_DIGITS}(?={_TO}{_DIGITS}{_MINUTES})")
_IN_MINUTES = re.compile(rf"\b{_DIGITS}{_MINUTES}(?:\s*(?:and\s+)?{_DIGITS}{_SECONDS})?")

_BETWEEN = re.compile(rf"\b(?:from|between)\s+{_DIGITS}(?:{_SECONDS})?{_TO}{_DIGITS}(?:{_SECONDS}|\b)")
_DASH = re.compile(rf"\b(?:at\s+)?{_DIGITS}(?:{_SECONDS})?\s*(?:-|–|to|until|till)\s*{_DIGITS}{_SECONDS}")
_AT = re.compile(
    rf"\b(?:starting |beginning )?(at|from|after)\s+{_DIGITS}(?:{_SECONDS}|\b)(?:\s+on(?:wards?)?\b)?"
    r"(?:\s+(?:to|until|till) the end\b)?"
)
_UNTIL = re.compile(
    rf"\b(?:until|till|before|up to|to(?=\s+\d[\d.]*(?:{_SECONDS}|$)))\s+{_DIGITS}(?:{_SECONDS}|\b)"
)
_FOR = re.compile(rf"\b(?:for|by)\s+(?:another\s+)?{_DIGITS}{_SECONDS}(?:\s+more\b)?")
_MORE = re.compile(rf"\b(?:another\s+)?{_DIGITS}{_SECONDS}\s+(?:more|longer|of)\b")
_LENGTH = re.compile(rf"\b(?:another\s+)?{_DIGITS}{_SECONDS}")
_FIRST = re.compile(rf"\b(?:in |during )?the (first|last)\s+{_DIGITS}{_SECONDS}")
_EDGE = re.compile(r"\bat the (beginning|start|end)\b")

_WISH = r"i (?:want|need|would like)|i'd like"
_GO_ON = r"(?:go|goes|run|runs|carry) on|continues?|keep (?:on|going)"
_NOT_WANTED = r"(?:do not|don't|dont) (?:want|need)(?! (?:you|it to|to (?!hear\b)))(?: to hear)?"
_VERBS: tuple[tuple[EditKind, str], ...] = (
    ("extract", r"extract|isolate|solo|(?:only|just) keep|(?:keep|play|let me hear|i want|i want to hear) (?:only|just)"
                r"|i only want"),
    ("inpaint", r"fill in|fill|replace|regenerate|redo|inpaint|repair|mend|swap|exchange|make\b(?=.*\banew\b)"
                r"|put\b(?=.*\bin(?:to)? the (?:gap|hole)\b)"),
    ("remove", r"remove|delete|erase|take\b(?=.*\b(?:out|away|off)\b)|leave\b(?=.*\bout\b)|cut\b(?=.*\b(?:out|away)\b)"
               rf"|get rid of|mute|silence|drop(?! in\b)|without|no(?! longer\b|,)|{_NOT_WANTED}"
               rf"|(?:{_WISH})\b(?=.*\b(?:removed|deleted|gone)\b)"),
    ("extend", rf"extend|lengthen|prolong|stretch|longer|{_GO_ON}"
               rf"|(?:{_WISH}|let|make)\b(?! (?:me|you|to hear)\b)(?=.*\b(?:{_GO_ON}|last)\b)"
               r"|let\b(?! me\b)(?=.*\bon\s*(?:for\b|until\b|till\b|to \d|$))|let it\b(?=.*\b(?:for|until|till)\b)"
               rf"|(?:add|append|put) (?:another )?{_DIGITS}{_SECONDS}(?=\s*(?:more\b|at the end|to (?:it|the)\b|$))"
               rf"|(?:{_WISH}|give me) (?:another )?{_DIGITS}{_SECONDS} (?:more|longer)"
               rf"|{_DIGITS}{_SECONDS} (?:more|longer)"),
    ("add", rf"(?:{_WISH})(?! (?:you|it|only|no)\b)(?: to hear)?|add|put in|put|insert|overlay|lay|include|mix in|mix"
            r"|play|drop in|let me hear|let there be|let|give me"),
)  # fmt: skip
"""Verbs that ask for each operation; the first one in a sentence decides."""
_ANY_VERB = "|".join(verb for _, verb in _VERBS)
_STATEMENTS: tuple[tuple[EditKind, str], ...] = (
    ("inpaint", r"gap|hole|missing"),
    ("add", rf"(?:also|there should be|^with)(?!\W+(?:please )?(?:{_ANY_VERB})\b)"),
)
"""Words that ask for an operation without a verb."""
_ASKED = tuple((kind, re.compile(rf"\b(?:{words})\b")) for kind, words in (*_VERBS, *_STATEMENTS))
_NEGATION = re.compile(r"\b(?:don'?t|do not|doesn't|never|not|mustn't|shouldn't|won't|can't|cannot)\b")
_FRAME = re.compile(r"^(?:i|it|this|that|you|can|could|would|will|something|there|please)\b")
_FILLERS = re.compile(
    r"\b(?:please|the sound of|sounds? of|(?:of|in|over|to|from) it|(?:to|from) the track|again|then|now)\b"
)
_FILLERS_OF: dict[EditKind, re.Pattern[str]] = {
    "extend": re.compile(
        rf"\b(?:{_GO_ON}|let|make|add|append|put|{_WISH}|give me|last|longer|more|another|to|on|at the end"
        r"|should|must)\b"
    ),
    "inpaint": re.compile(
        r"\b(?:(?:in )?the (?:gap|hole|part|sound)|(?:(?:what|something) )?is missing|anew|should be|there is an?"
        r"|fill it in)\b"
    ),
    "remove": re.compile(r"\b(?:out|away|off|to be|removed|deleted|gone)\b"),
}
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
        StudioRefusal: they fit no operation, deny one, or name times that the track does not have.
    """
    words = _in_seconds(text)
    kind = _asked_kind(words)
    start_s, end_s, rest = _times(words, kind, duration_s)
    caption = _sound(rest, kind)
    if kind == "extend":
        end_s = _extended_to(start_s, end_s, duration_s)
        return EditPlan(kind, caption or _going_on(record, duration_s), duration_s, end_s)
    if start_s is None:
        start_s, end_s = _placed(rest, kind, caption, record, span)
    if start_s is not None and end_s is not None:
        named_end_s = end_s
        end_s = min(end_s, duration_s) if end_s - duration_s < 0.05 or kind != "inpaint" else end_s
        if not 0 <= start_s < end_s <= duration_s + 0.05:
            raise StudioRefusal(
                f"The words name {start_s:g} to {named_end_s:g} s, and the track has {duration_s:.1f} s: "
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


def names_times(text: str) -> bool:
    """Whether words say where in a track something is to be."""
    words = _in_seconds(text)
    return any(pattern.search(words) for pattern in (_BETWEEN, _DASH, _AT, _UNTIL, _FIRST, _EDGE))


# Private


def _in_seconds(text: str) -> str:
    """The words in lower case, with times as seconds in digits: "90 s" for 1:30."""
    words = " ".join(text.lower().replace("’", "'").split()).strip(" .!?")
    words = re.sub(r"(?<=\d),(?=\d)", ".", words)
    words = re.sub(r"\bsecond (?=\d)", "", words)
    words = _HALVES.sub(lambda match: f"{_count(match[1]) + 0.5:g}", words)
    words = _COUNTED.sub(lambda match: f"{_count(match[1]):g}", words)
    words = _SINGLE.sub(lambda match: f"{match[1] or ''}1 ", words)
    words = _MORE_FIRST.sub(r"\1 \2 more", words)
    words = _CLOCK.sub(
        lambda match: _seconds(3600 * float(match[1] or 0) + 60 * float(match[2]) + float(match[3])), words
    )
    words = _BOTH_MINUTES.sub(lambda match: _seconds(60 * float(match[1])), words)
    return _IN_MINUTES.sub(lambda match: _seconds(60 * float(match[1]) + float(match[2] or 0)), words)


def _count(text: str) -> float:
    return float(_COUNTS.get(text, text))


def _seconds(value: float) -> str:
    return f"{value:.10g} s"


def _asked_kind(words: str) -> EditKind:
    """
    Raises:
        StudioRefusal: nothing is asked for, or that something is not to be done.
    """
    for pattern in (_BETWEEN, _DASH, _AT, _FIRST):  # "from 2 s on" and "the last 2 s" are no verbs
        words = pattern.sub(" ", words)
    found = [(match, kind) for kind, pattern in _ASKED for match in pattern.finditer(words)]
    if not found:
        raise StudioRefusal(
            "The words fit no operation: say what to add, remove, extract, fill or extend, as in "
            "“add a bell at 2 s”, “take the dog out”, “fill 3 to 4 s with rain”, “let it rain on for three seconds”."
        )
    match, kind = min(found, key=lambda each: (each[0].start(), -each[0].end()))
    if denied := _NEGATION.search(words[: match.start()] + " " + words[match.end() :]):
        raise StudioRefusal(
            f"“{denied[0]}” says what is not to be done: write only what to do, as in “add a bell at 2 s”, "
            "“take the dog out” or “keep only the rain”."
        )
    return kind


def _times(words: str, kind: EditKind, duration_s: float) -> tuple[float | None, float | None, str]:
    """Beginning, end, and the words without them; for `extend` the end alone, or a length as (None, length)."""
    for pattern in (_BETWEEN, _DASH):
        if match := pattern.search(words):
            return float(match[1]), float(match[2]), words.replace(match[0], " ")
    length = None
    for pattern in (_FOR, _MORE):
        if match := pattern.search(words):
            length, words = float(match[1]), words.replace(match[0], " ")
            break
    if match := _FIRST.search(words):
        seconds = float(match[2])
        words = words.replace(match[0], " ")
        return (
            (0.0, seconds, words)
            if match[1] == "first"
            else (max(0.0, duration_s - seconds), duration_s, words)
        )
    if match := _AT.search(words):
        start_s = float(match[2])
        end_s = start_s + (length or 1.0)
        to_the_end = match[1] == "from" or (match[1] == "after" and kind != "add")
        if to_the_end and length is None:
            end_s = max(end_s, duration_s)
        if kind != "extend" and start_s < duration_s:
            end_s = min(end_s, duration_s)
        return start_s, end_s, words.replace(match[0], " ")
    if match := _UNTIL.search(words):
        return 0.0, float(match[1]), words.replace(match[0], " ")
    if kind == "extend":
        if length is None and (match := _LENGTH.search(words)):
            length, words = float(match[1]), words.replace(match[0], " ")
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
    """The sound that is named: behind what asks for the operation, or before it."""
    asking = (match for each, pattern in _ASKED if each == kind for match in pattern.finditer(words))
    match = min(asking, key=lambda each: (each.start(), -each.end()), default=None)
    if match is None:
        return _named_sound(words, kind)
    before, after = words[: match.start()], words[match.end() :]
    return _named_sound(after, kind) or ("" if _FRAME.match(before) else _named_sound(before, kind))


def _named_sound(words: str, kind: EditKind) -> str:
    if kind == "inpaint":
        words = re.split(r"\b(?:with|by|through|into)\b", words, maxsplit=1)[-1]
    words = _FILLERS.sub(" ", words)
    if kind in _FILLERS_OF:
        words = _FILLERS_OF[kind].sub(" ", words)
    words = _POINTED.sub(" ", words)
    kept = re.sub(r"\s+(?=,)", "", " ".join(words.split())).strip(" .,;:-–?")
    kept = re.sub(r"^(?:(?:and|in|of)\b[ ,]*)+|(?:[ ,]*\b(?:and|in|over))+$", "", kept)
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
