"""The program that compares formulas by math-verify: `[answer, key, tolerance]` by lines in, `true` or `false` out."""

from __future__ import annotations

import json
import logging
import math
import re
import sys
from typing import Any

from audiollm.processes import end_with_parent

LIMIT_S = 3
"""Longest time to read a formula, and to compare two, in whole seconds."""


def same_value(answer: str, key: str, tolerance: float) -> bool:
    """Whether two formulas have the same value: numbers within the relative tolerance, all else exactly."""
    from math_verify import parse, verify

    value, target = (parse(_latex(text), parsing_timeout=LIMIT_S) for text in (answer, key))
    numbers = [_read_formula_number(parsed[0]) if parsed else None for parsed in (value, target)]
    if numbers[0] is not None and numbers[1] is not None:
        return math.isclose(numbers[0], numbers[1], rel_tol=tolerance, abs_tol=1e-12)
    return bool(value and target and verify(target, value, timeout_seconds=LIMIT_S))


def _latex(text: str) -> str:
    """A formula as math-verify reads it; `2e-3` and `2**3` in LaTeX."""
    text = re.sub(r"(?<![A-Za-z])(\d+(?:\.\d*)?)[eE]([-+]?\d+)", r"\1\\cdot 10^{\2}", text)
    return f"${text.replace('**', '^').replace(chr(0x2212), '-')}$"


def _read_formula_number(value: Any) -> float | None:
    if not getattr(value, "is_number", False) or not value.is_real:
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def answer_lines() -> None:
    """Answer until the input ends."""
    end_with_parent()
    logging.disable(logging.WARNING)
    for line in sys.stdin:
        if line.strip():
            answer, key, tolerance = json.loads(line)
            try:
                is_same = same_value(answer, key, tolerance)
            except Exception:  # whatever a formula does to the parser, it is not the key
                is_same = False
            print(json.dumps(is_same), flush=True)


if __name__ == "__main__":
    answer_lines()
