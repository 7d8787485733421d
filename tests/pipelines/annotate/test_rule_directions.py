"""Every rule drops what lies on the wrong side of its threshold, and keeps what lies on it or on the other side."""

from __future__ import annotations

from typing import Any

import pytest

from pipelines.annotate.execution.rules import RULES, AnnotationRule, Thresholds, first_broken

MEASURED = [rule for rule in RULES if rule.operation in (">=", "<=")]


def nested(path: str, value: float) -> dict[str, Any]:
    """A step's value with this number at a dotted path."""
    found: Any = value
    for name in reversed(path.split(".")):
        found = {name: found}
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("rule", MEASURED, ids=lambda rule: rule.threshold)
def test_a_minimum_drops_less_and_a_maximum_more(rule: AnnotationRule) -> None:
    limit = 1
    thresholds = Thresholds.model_validate({rule.threshold: limit})

    def dropped(value: float) -> bool:
        drop = first_broken((rule,), thresholds, rule.step, nested(rule.value, value), "speech")
        assert drop is None or (drop.rule, drop.value, drop.threshold) == (rule.threshold, value, limit)
        return drop is not None

    is_minimum = rule.threshold.startswith("min_")
    assert is_minimum != rule.threshold.startswith("max_"), "the name says which"
    assert not dropped(limit) and dropped(limit - 1) == is_minimum and dropped(limit + 1) != is_minimum
