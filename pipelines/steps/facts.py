"""Facts that the report reads beside the rows: the rules, those not applied, and the cost of every step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from audiollm.files.atomic import write_json
from pipelines.execution.engine import Call, Outcome
from pipelines.steps.chain import Missing
from pipelines.steps.rules import Rule


@dataclass
class StepCosts:
    """Seconds of CPU by step: this run's and, for what the ledger knew, those of the run that did it."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    calls: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    audio_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    num_cached: int = 0

    def add(self, call: Call, outcome: Outcome, is_cached: bool) -> None:
        self.seconds[call.step] += outcome.seconds
        self.calls[call.step] += 1
        self.audio_s[call.step] += call.size
        self.num_cached += is_cached


def write_rules(
    folder: Path, rules: Sequence[Rule], requested: BaseModel, applied: BaseModel, lacking: Sequence[Missing]
) -> None:
    """Write `rules.json` and `not_applied.json`.

    Args:
        requested, applied: thresholds by name; some of those asked for may not be applied.
    """
    limits, requested_limits = applied.model_dump(), requested.model_dump()
    rows = [rule.as_row(limits[rule.threshold]) for rule in rules if limits[rule.threshold] is not None]
    write_json(folder / "rules.json", rows)
    skipped = [
        {
            "threshold": rule.threshold,
            "value": requested_limits[rule.threshold],
            "scorer": missing.step,
            "reason": missing.reason,
        }
        for missing in lacking
        for rule in missing.rules
    ]
    write_json(folder / "not_applied.json", skipped)


def write_timings(folder: Path, costs: StepCosts, heard_by: str, run: dict[str, Any]) -> None:
    """Write `timings.json`.

    Args:
        heard_by: the step that hears all of the audio.
        run: wall-clock seconds, workers, engine.
    """
    steps = {
        name: {
            "seconds": round(costs.seconds[name], 3),
            "calls": count,
            "audio_s": round(costs.audio_s[name], 3),
        }
        for name, count in costs.calls.items()
    }
    heard_s = round(costs.audio_s.get(heard_by, 0.0), 3)
    write_json(
        folder / "timings.json", {"steps": steps, "audio_s": heard_s, "known": costs.num_cached, **run}
    )
