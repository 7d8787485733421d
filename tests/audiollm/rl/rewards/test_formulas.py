"""Formulas as answers: what math-verify reads, from any thread, and what never comes to an end."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from audiollm.rl.rewards import matching
from audiollm.rl.rewards.matching import is_right


@pytest.mark.parametrize(
    ("answer", "key", "right"),
    [
        (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}", True),
        (r"The result is $\frac{\sqrt{2}}{2}$.", r"\frac{1}{\sqrt{2}}", True),
        (r"\sqrt{2}", r"\frac{1}{\sqrt{2}}", False),
        ("(1, 2)", "(1,2)", True),
        ("(2, 1)", "(1,2)", False),
        ("[1, 2]", "(1,2)", False),
        ("$x = 5$", "x=5", True),
        ("5", "x=5", True),
        ("x=-5", "x=5", False),
        ("12%", r"12\%", True),
        ("0.12", r"12\%", True),
        ("21 %", r"12\%", False),
        ("45°", r"45^\circ", True),
        ("45 degrees", r"45^\circ", True),
        ("54°", r"45^\circ", False),
        ("\u22125", "-5", True),
        ("True", "1", False),
        ("3.14", r"\pi", False),
        ("2**3", "8", True),
        ("1.0000001", "1", True),
        ("1.1", "1", False),
        ("not 5", "5", False),
    ],
)
def test_formulas_are_compared_by_value(answer: str, key: str, right: bool) -> None:
    assert is_right(answer, key, [], "math", 1e-6) is right


def test_threads_may_ask() -> None:
    pairs = [(f"{n}x + {n}", f"{n} + {n}x") for n in range(2, 10)]
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lambda pair: is_right(*pair, [], "math", 1e-6), pairs))


def test_a_formula_without_end_is_wrong_and_the_next_one_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "TIMEOUT_S", 1.0)
    matching.same_formula("2", "1 + 1", 1e-6)  # the program is there
    start_s = time.monotonic()
    assert not is_right("9**9**9**9**9", "1", [], "math", 1e-6)
    assert time.monotonic() - start_s < 20
    assert is_right("x + x", "2x", [], "math", 1e-6)


def test_a_formula_that_takes_too_long_is_wrong_and_the_next_one_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert matching.same_formula("x + 2 y", "2 y + x", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(matching, "TIMEOUT_S", 0.0)
        assert not matching.same_formula("x + 3 y", "3 y + x", 0.0)
    assert matching.same_formula("x + 4 y", "4 y + x", 0.0)
