"""Whether an answer is the right one: as text, as an option, as a number with a unit, or as a formula."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Sequence

from audiollm.data.text.forms import recognition_form, spoken_form
from audiollm.evaluate.listening.audio_qa import read_choice
from audiollm.rl.rewards.settings import Match

_NUMBER = re.compile(r"\s*([-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:[eE][-+]?\d+)?)\s*([^\d\s].*)?")
_UNITS: dict[str, tuple[str, float]] = {
    **dict.fromkeys(("s", "sec", "second", "seconds"), ("s", 1.0)),
    **dict.fromkeys(("ms", "millisecond", "milliseconds"), ("s", 1e-3)),
    **dict.fromkeys(("min", "minute", "minutes"), ("s", 60.0)),
    **dict.fromkeys(("h", "hour", "hours"), ("s", 3600.0)),
    **dict.fromkeys(("hz", "hertz"), ("hz", 1.0)),
    **dict.fromkeys(("khz", "kilohertz"), ("hz", 1000.0)),
    **dict.fromkeys(("%", "percent"), ("%", 1.0)),
}
"""Units of the same kind, with their size. Any other unit is compared as it is written."""
_OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: lambda base, power: math.pow(base, power),
}
_CONSTANTS = {"pi": math.pi, "e": math.e}
_PROBES = (0.37, 1.61, 2.93)
"""Values that a formula's letters take in turn; equal formulas agree at all of them."""
MAX_FORMULA_CHARACTERS = 200


def is_right(
    answer: str, key: str, choices: Sequence[str], match: Match, tolerance: float, is_free: bool = True
) -> bool:
    """Compare the answer part of a reply with the key; see `AccuracySettings.match`.

    Args:
        is_free: the answer may be a free text that names an option; False: it is the option alone.
    """
    if match == "auto":
        match = "letter" if choices else "number" if read_number(key) else "text"
    if match == "exact":
        return answer.strip() == key.strip()
    if match == "letter":
        chosen = read_choice(answer, choices, is_free)
        return chosen is not None and choices[chosen] == key
    if match == "number":
        return _same_number(answer, key, tolerance)
    if match == "math":
        return _same_formula(answer, key, tolerance)
    return _text_form(answer) == _text_form(key) != ""


def read_number(text: str) -> tuple[float, str] | None:
    """A number in the base unit of its kind, and the unit; None where the text is anything else."""
    found = _NUMBER.fullmatch(text.strip().rstrip("."))
    if not found or not found[1] or not any(c.isdigit() for c in found[1]):
        return None
    unit = (found[2] or "").strip().lower()
    if len(unit.split()) > 1:
        return None
    base, size = _UNITS.get(unit, (unit, 1.0))
    return float(found[1].replace(",", "")) * size, base


def _text_form(text: str) -> str:
    return recognition_form(spoken_form(text))


def _same_number(answer: str, key: str, tolerance: float) -> bool:
    given, wanted = read_number(answer), read_number(key)
    if given is None or wanted is None:
        return False
    return given[1] == wanted[1] and math.isclose(given[0], wanted[0], rel_tol=tolerance)


def _same_formula(answer: str, key: str, tolerance: float) -> bool:
    for probe in _PROBES:
        given, wanted = _value(answer, probe), _value(key, probe)
        if (
            given is None
            or wanted is None
            or not math.isclose(given, wanted, rel_tol=tolerance, abs_tol=1e-12)
        ):
            return False
    return True


def _value(text: str, probe: float) -> float | None:
    """A formula's value where its letters are multiples of `probe`; None where it is none. Nothing is executed."""
    plain = _plain_formula(text)
    if not plain or len(plain) > MAX_FORMULA_CHARACTERS:
        return None
    try:
        found = _evaluated(ast.parse(plain, mode="eval").body, probe)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return None
    return found if math.isfinite(found) else None


def _plain_formula(text: str) -> str:
    """LaTeX's commonest forms and `2x` as Python writes them; `1e-6` is a number."""
    text = text.strip().strip("$").strip()
    text = re.sub(r"\\boxed\{(.*)\}", r"\1", text)
    text = re.sub(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}", r"((\1)/(\2))", text)
    text = re.sub(r"\\sqrt\{([^{}]*)\}", r"((\1)**0.5)", text)
    for old, new in (("\\pi", "pi"), ("\\cdot", "*"), ("\\times", "*"), ("^", "**"), ("{", "("), ("}", ")")):
        text = text.replace(old, new)
    text = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text)
    return re.sub(r"(?<![\w.])(\d+(?:\.\d+)?)(?![eE][-+]?\d)\s*(?=[A-Za-z(])", r"\1*", text)


def _evaluated(node: ast.expr, probe: float) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return float(node.value)
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.Name) and len(node.id) == 1:
        return probe * (2 + math.sin(ord(node.id)))  # no letter is the sum or the multiple of others
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _evaluated(node.operand, probe)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_evaluated(node.left, probe), _evaluated(node.right, probe))
    raise ValueError("not arithmetic")
