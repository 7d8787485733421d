"""The picture of quality over latency: every system is named, where points lie on one another, too."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from audiollm.evaluate.interpret.pictures import QualityPoint, quality_over_latency


def ticks(page: str) -> list[float]:
    return [float(text) for text in re.findall(r'text-anchor="middle"[^>]*>(-?[\d.]+)<', page)]


def test_points_on_one_another_are_named_beside_the_picture() -> None:
    names = ["start", "a < b", "two stages"]
    page = quality_over_latency([QualityPoint(name, 1.5, 60.0) for name in names], "AL, s", "chrF")
    for number, name in enumerate(("start", "a &lt; b", "two stages"), start=1):
        assert f">{number}  {name}<" in page
    assert page.count("<circle") == 2 * len(names) and "polyline" not in page


def test_a_curve_joins_its_points_in_order_of_latency() -> None:
    places = [(2.7, 63.0), (-3.6, 50.0), (0.9, 66.0)]
    points = [QualityPoint(f"{x}", x, y, is_on_curve=True) for x, y in places]
    page = quality_over_latency([*points, QualityPoint("ours", 1.7, 67.0)], "AL, s", "chrF")
    found = re.search(r'<polyline points="([^"]+)"', page)
    assert found
    joined = [float(each.split(",")[0]) for each in found[1].split()]
    assert len(joined) == 3 and joined == sorted(joined)


@pytest.mark.parametrize(
    "low,high", [(-3.58, 3.8), (0.0, 0.07), (1_000.0, 9_300.0), (5.0, 5.0), (-332.3333333333333, 1.0)]
)
def test_ticks_are_round_and_within(low: float, high: float) -> None:
    page = quality_over_latency([QualityPoint("a", low, 1.0), QualityPoint("b", high, 2.0)], "AL, s", "chrF")
    found = ticks(page)
    steps = {round(after - before, 9) for before, after in pairwise(found)}
    margin = 0.1 * (high - low) or 0.5
    assert 4 <= len(found) <= 10 and len(steps) == 1
    assert low - margin <= found[0] and found[-1] <= high + margin
    assert f"{steps.pop():.0e}"[0] in "125"
