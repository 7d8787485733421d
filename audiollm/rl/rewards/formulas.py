"""Whether two formulas are the same, by math-verify in a process of its own.

Its time limits are signals, which only the main thread can set, and rewards are called in threads; a power of powers
never lets go of its thread. So a process answers, and one that takes too long is ended.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import threading
from functools import lru_cache

from audiollm.data.text.forms import recognition_form
from audiollm.json_process import JsonProcess, ProcessFailed

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
        except ProcessFailed:  # it is ended, and started again for the next formula
            _process.cache_clear()
            return False


@lru_cache(maxsize=1)
def _process(pid: int) -> JsonProcess:
    """Start the process of this process, which has `pid`: a fork does not share that of its parent."""
    process = JsonProcess(shlex.join([sys.executable, "-m", _PROGRAM]), START_TIMEOUT_S, "match: math")
    for _ in process.ask([("1", "1", 0.0)]):
        pass
    return process
