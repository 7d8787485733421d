"""Rules of a pipeline: thresholds by name, compared with the values that steps measure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel

from pipelines.steps.step import Value

Operation = Literal[">=", "<=", "in", "is"]


@dataclass(frozen=True)
class Rule:
    """One threshold against one measured value.

    Args:
        threshold: its name among the pipeline's thresholds.
        step: whose value it reads; `segment` for what the part itself tells.
        value: where the number is below that step's value, by dots.
        title: what is wrong with a part that breaks it; it is counted by this.
        option: the setting of the step without which there is no such value.
    """

    threshold: str
    step: str
    value: str
    operation: Operation
    title: str
    unit: str = ""
    option: str = ""

    def reason(self, value: Any, limit: Any) -> str:
        """Say what was measured, and what the limit is."""
        text = f"{value:.4g}" if isinstance(value, (int, float)) else str(value)
        if self.operation == "is":
            return text
        bound = ", ".join(limit) if isinstance(limit, list) else f"{limit}{self.unit}"
        return f"{text}{self.unit}, the limit is {bound}"

    def as_row(self, limit: Any) -> dict[str, Any]:
        """Return the rule with its threshold as a row of `rules.json`."""
        return {
            "rule": self.threshold,
            "step": self.step,
            "value": self.value if self.step == "segment" else f"{self.step}.{self.value}",
            "op": self.operation,
            "threshold": limit,
            "title": self.title,
            "unit": self.unit.strip(),
        }


@dataclass(frozen=True)
class Drop:
    """Why a part is left out."""

    step: str
    rule: str
    kind: str
    reason: str
    value: Any = None
    threshold: Any = None

    def as_row(self) -> dict[str, Any]:
        """Return the drop as a dictionary of the rows."""
        return {
            "step": self.step,
            "rule": self.rule,
            "kind": self.kind,
            "value": self.value,
            "threshold": self.threshold,
            "reason": self.reason,
        }


def find_broken(rules: Iterable[Rule], thresholds: BaseModel, step: str, value: Value) -> Drop | None:
    """The first rule about a step's value that it breaks. A missing value breaks none."""
    for rule in rules:
        limit = getattr(thresholds, rule.threshold)
        if rule.step != step or limit is None:
            continue
        measured = lookup(value, rule.value)
        if measured is not None and not keeps(measured, rule.operation, limit):
            return Drop(step, rule.threshold, rule.title, rule.reason(measured, limit), measured, limit)
    return None


def lookup(value: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path; None where there is nothing."""
    current: Any = value
    for name in path.split("."):
        current = current.get(name) if isinstance(current, Mapping) else None
    return current


def keeps(value: Any, operation: Operation, limit: Any) -> bool:
    """Whether a value meets its limit."""
    if operation == ">=":
        return bool(value >= limit)
    if operation == "<=":
        return bool(value <= limit + 1e-6)
    if operation == "in":
        return value in limit
    return not limit  # a phrase was found
