"""Whether an answer is the right one: as text, as an option, as a number with a unit, or as a formula."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import lru_cache

from audiollm.data.text.forms import recognition_form, spoken_form
from audiollm.data.text.languages import language_code
from audiollm.data.text.option_forms import in_digits, loosest_form
from audiollm.evaluate.listening.choices import read_choice
from audiollm.evaluate.listening.reply_wording import answer_text, inner_answer
from audiollm.json_process import JsonProcess, ProcessFailed
from audiollm.rl.rewards.settings import Match

_NUMBER = re.compile(r"([-+]?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?)\s*([^\d\s].*)?")
_ABOUT = re.compile(
    r"(?:about|approximately|around|roughly|nearly|circa|ca\.|~|≈)\s*(?=[-+.\d])", re.IGNORECASE
)
_UNITS: dict[str, tuple[str, float]] = {
    **dict.fromkeys(("s", "sec", "second", "seconds"), ("s", 1.0)),
    **dict.fromkeys(("ms", "millisecond", "milliseconds"), ("s", 1e-3)),
    **dict.fromkeys(("min", "minute", "minutes"), ("s", 60.0)),
    **dict.fromkeys(("h", "hour", "hours"), ("s", 3600.0)),
    **dict.fromkeys(("hz", "hertz"), ("hz", 1.0)),
    **dict.fromkeys(("khz", "kilohertz"), ("hz", 1000.0)),
    **dict.fromkeys(("%", "\\%", "percent"), ("%", 1.0)),
}
"""Units of the same kind, with their size. Any other unit is compared as it is written."""
_LEAD = re.compile(
    r"^.*?\b(?:is|are|was|were|answer|hear|it's|that's)\b(?:\s*(?:is|:|=))?\s*|^answer\s*[:=]\s*", re.I | re.S
)
"""Opening phrases of a statement (`the sound is`, `I hear`)."""
MAX_LEADS = 3
"""Words such as `is` that may stand before a statement, beside the first."""
_DENIED = re.compile(r"\b(?:not|no|never|nor|cannot)\b|n't\b|^,.*[,;]", re.IGNORECASE)
"""A denial; or a second clause of a sentence that has stated something."""
_FORMULA_MARKS = re.compile(r"\$|\\[()\[\]]")


def is_right(
    answer: str,
    key: str,
    choices: Sequence[str],
    match: Match,
    tolerance: float,
    is_free: bool = True,
    language: str | None = None,
) -> bool:
    """Compare the answer part of a reply with the key; see `AccuracySettings.match`.

    Args:
        is_free: the answer may be a free text that names the key (`the sound is a dog`); False: it is the key alone.
        language: of answer and key: its number words are numbers, beside those of English (`zwei` for `2`).
    """
    if _is_right(answer, key, choices, match, tolerance, is_free):
        return True
    if match in ("exact", "math") or language_code(language) in (None, "en"):
        return False
    spoken_choices = [spoken_form(choice, language) for choice in choices]
    spoken_answer, spoken_key = (spoken_form(text, language) for text in (answer, key))
    return _is_right(spoken_answer, spoken_key, spoken_choices, match, tolerance, is_free)


def _is_right(
    answer: str, key: str, choices: Sequence[str], match: Match, tolerance: float, is_free: bool
) -> bool:
    if match == "auto":
        match = "letter" if choices else "number" if read_number(key) else "text"
    if match == "exact":
        return answer.strip() == key.strip()
    if match == "letter":
        choice = read_choice(answer, choices, is_free)
        return choice is not None and choices[choice] == key
    same = {"number": _same_number, "math": _same_formula, "text": _same_text}[match]
    plain = _FORMULA_MARKS.sub("", inner_answer(answer)) if match == "math" else answer_text(answer)
    texts = dict.fromkeys([answer, *_statements(plain, is_free)])
    return any(text.strip() == key.strip() != "" or same(text, key, tolerance) for text in texts)


def read_number(text: str) -> tuple[float, str] | None:
    """A number in the base unit of its kind, and the unit; None where the text is anything else."""
    plain = in_digits(text).replace("\u2212", "-").strip().rstrip(".")
    match = _NUMBER.fullmatch(_ABOUT.sub("", plain, count=1) if _ABOUT.match(plain) else plain)
    if not match:
        return None
    unit = (match[2] or "").strip().lower()
    if len(unit.split()) > 1:
        return None
    base, size = _UNITS.get(unit, (unit, 1.0))
    return float(match[1].replace(",", "")) * size, base


def _statements(text: str, is_free: bool) -> Iterator[str]:
    """The text and, where it is free, what its first and last sentence state: what follows on `is`, `answer:`."""
    yield text
    sentences = [sentence.strip() for sentence in re.split(r"(?<=[.!?])\s+|\n+", text) if sentence.strip()]
    if not is_free or not sentences:
        return
    if word := re.match(r"(?:yes|no)(?=[,.;:!])", sentences[0], re.IGNORECASE):
        yield word[0]
    for sentence in dict.fromkeys((sentences[0], sentences[-1])):
        statement = sentence.rstrip(".! ")
        yield statement
        for begin in ("", *[","] * MAX_LEADS):
            lead = _LEAD.match(statement)
            if lead is None or _DENIED.search(begin + lead[0]):
                break
            statement = statement[lead.end() :]
            yield statement


def _same_text(answer: str, key: str, tolerance: float) -> bool:
    form = loosest_form((answer, key))
    return form(answer) == form(key) != ""


def _same_number(answer: str, key: str, tolerance: float) -> bool:
    value, target = read_number(answer), read_number(key)
    if value is None or target is None:
        return _same_text(answer, key, tolerance)
    is_counted = (
        not target[1] and value[1].isalpha() and value[1] not in {base for base, _ in _UNITS.values()}
    )
    return (value[1] == target[1] or is_counted) and math.isclose(value[0], target[0], rel_tol=tolerance)


def _same_formula(answer: str, key: str, tolerance: float) -> bool:
    plain = _FORMULA_MARKS.sub("", inner_answer(key))
    if read_number(answer) and read_number(plain) and _same_number(answer, plain, tolerance):
        return True
    return same_formula(answer, plain, tolerance)


MAX_FORMULA_CHARACTERS = 200
TIMEOUT_S = 5.0
START_TIMEOUT_S = 60.0
_PROGRAM = "audiollm.rl.rewards.formula_process"
_LOCK = threading.Lock()
_WORDS = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
_NAMES = {
    "sin",
    "cos",
    "tan",
    "log",
    "exp",
    "sqrt",
    "pi",
    "degrees",
    "degree",
    "percent",
    "inf",
    "max",
    "min",
    "mod",
}


def same_formula(answer: str, key: str, tolerance: float) -> bool:
    """Whether an answer is the key by value: `\\frac{\\sqrt{2}}{2}` and `1/\\sqrt{2}`, `5` and `x=5`, `(1,2)`, `12\\%`.

    Words are compared as texts, and so is what is longer than `MAX_FORMULA_CHARACTERS`.

    Args:
        tolerance: largest relative error of a number.
    """
    if not answer.strip() or not key.strip():
        return False
    if _is_text(answer) or _is_text(key):
        return recognition_form(answer) == recognition_form(key) != ""
    return _compared(answer, key, tolerance)


def _is_text(text: str) -> bool:
    words = {word.lower() for word in _WORDS.findall(re.sub(r"\\[A-Za-z]+", " ", text))}
    return len(text) > MAX_FORMULA_CHARACTERS or bool(words - _NAMES)


@lru_cache(maxsize=10_000)
def _compared(answer: str, key: str, tolerance: float) -> bool:
    with _LOCK:
        process = _process(os.getpid())
        try:
            return bool(json.loads(next(process.ask([(answer, key, tolerance)], TIMEOUT_S))))
        except ProcessFailed:  # it is ended, and starts itself again for the next formula
            return False


@lru_cache(maxsize=1)
def _process(pid: int) -> JsonProcess:
    """Start the process of this process, which has `pid`: a fork does not share that of its parent."""
    process = JsonProcess(shlex.join([sys.executable, "-m", _PROGRAM]), START_TIMEOUT_S, "match: math")
    for _ in process.ask([("1", "1", 0.0)]):
        pass
    return process
