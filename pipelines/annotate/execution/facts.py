"""Facts that the report reads beside the rows: the rules, those not applied, and the cost of every step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from audiollm.files.atomic import write_json
from pipelines.annotate.execution.chain import Missing
from pipelines.annotate.execution.rules import RULES, Thresholds
from pipelines.execution.engine import Call, Outcome


@dataclass
class StepCosts:
    """Seconds of CPU by step: this run's and, for what the ledger knew, those of the run that did it."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    calls: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    audio_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    known: int = 0

    def add(self, call: Call, outcome: Outcome, known: bool) -> None:
        self.seconds[call.step] += outcome.seconds
        self.calls[call.step] += 1
        self.audio_s[call.step] += call.size
        self.known += known


def write_facts(
    folder: Path,
    asked: Thresholds,
    applied: Thresholds,
    lacking: Sequence[Missing],
    costs: StepCosts,
    run: dict[str, Any],
) -> None:
    """Write `rules.json`, `not_applied.json` and `timings.json`.

    Args:
        run: wall-clock seconds, workers, engine.
    """
    limits = applied.model_dump()
    rules = [
        {
            "rule": rule.threshold,
            "step": rule.step,
            "value": rule.value if rule.step == "segment" else f"{rule.step}.{rule.value}",
            "op": rule.operation,
            "threshold": limits[rule.threshold],
            "title": rule.title,
            "unit": rule.unit.strip(),
            "sounds": rule.sounds,
            "of_text": rule.of_text,
        }
        for rule in RULES
        if limits[rule.threshold] is not None
    ]
    write_json(folder / "rules.json", rules)
    wanted = asked.model_dump()
    skipped = [
        {
            "threshold": rule.threshold,
            "value": wanted[rule.threshold],
            "scorer": each.step,
            "reason": each.reason,
        }
        for each in lacking
        for rule in each.rules
    ]
    write_json(folder / "not_applied.json", skipped)
    steps = {
        name: {
            "seconds": round(costs.seconds[name], 3),
            "calls": count,
            "audio_s": round(costs.audio_s[name], 3),
        }
        for name, count in costs.calls.items()
    }
    seen_s = round(costs.audio_s.get("voice_activity", 0.0), 3)
    write_json(folder / "timings.json", {"steps": steps, "audio_s": seen_s, "known": costs.known, **run})
