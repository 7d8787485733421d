"""Hours that a cluster takes to annotate so many hours of sound, computed from what a run of one's own has measured.

    .venv/bin/python benchmarks/cluster_hours.py corpus/timings.json --hours 10000 --cores 16

`timings.json` is a file of `audiollm annotate` or `audiocot`: seconds and calls of every step. The time is

    start + max(H * (step_s + calls * worker_s) / (N * cores), H * calls * driver_s)

for H hours of sound on N machines: `step_s` and `calls` are the steps' CPU-seconds and calls per hour of sound,
`worker_s` what a call costs a worker beside its step, and `driver_s` what it costs the one process that directs. The
second bound does not fall with N. Reading the sound from the shared storage is not part of it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

DRIVER_MS, WORKER_MS, START_S = 0.91, 1.17, 60.0
"""CPU-milliseconds of a call beside its step, in the process that directs and in a worker with its raylet (both
measured: benchmarks/history/annotation.md), and seconds until workers have begun (assumed)."""
NODES = (1, 4, 16, 64)


@dataclass(frozen=True)
class ClusterCosts:
    """Costs of an hour of sound.

    Args:
        step_s: CPU-seconds of all steps.
        calls: calls of all steps.
        driver_s, worker_s: CPU-seconds of a call beside its step.
        start_s: seconds until all workers have begun.
    """

    step_s: float
    calls: float
    driver_s: float = DRIVER_MS / 1000
    worker_s: float = WORKER_MS / 1000
    start_s: float = START_S

    @property
    def bound_s(self) -> float:
        """Seconds per hour of sound below which no number of machines comes."""
        return self.calls * self.driver_s

    def seconds(self, hours: float, machines: int, cores: int) -> float:
        """Wall-clock seconds for so many hours of sound."""
        work_s = hours * (self.step_s + self.calls * self.worker_s) / (machines * cores)
        return self.start_s + max(work_s, hours * self.bound_s)

    def useful_cores(self) -> float:
        """Cores beyond which the process that directs is the bound."""
        return (self.step_s + self.calls * self.worker_s) / self.bound_s


def measured_costs(timings: Path, driver_s: float, worker_s: float) -> ClusterCosts:
    """Costs of the steps of a run, by its `timings.json`.

    Raises:
        SystemExit: it tells of no sound.
    """
    run = json.loads(timings.read_text())
    hours = run.get("audio_s", 0.0) / 3600
    if not hours:
        raise SystemExit(
            f"{timings}: no seconds of sound: give the timings.json of a run that has heard some"
        )
    steps = run["steps"].values()
    return ClusterCosts(
        sum(step["seconds"] for step in steps) / hours,
        sum(step["calls"] for step in steps) / hours,
        driver_s,
        worker_s,
    )


def hours_table(costs: ClusterCosts, hours: float, machines: Sequence[int], cores: int) -> list[str]:
    """Lines of a table in Markdown: time by the number of machines."""
    lines = [f"| machines of {cores} cores | {hours:g} hours of sound take |", "|---|---|"]
    for count in machines:
        seconds = costs.seconds(hours, count, cores)
        is_bound = count * cores >= costs.useful_cores()
        bound = ", bound by the process that directs" if is_bound else ""
        lines.append(f"| {count} | {format_hours(seconds / 3600)}{bound} |")
    return lines


def format_hours(hours: float) -> str:
    """Hours, or days from two on."""
    return f"{hours / 24:.1f} days" if hours >= 48 else f"{hours:.1f} h"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("timings", type=Path, help="timings.json of a run")
    parser.add_argument("--hours", type=float, default=10_000.0, help="hours of sound")
    parser.add_argument("--machines", type=int, nargs="+", default=NODES)
    parser.add_argument("--cores", type=int, default=16, help="cores of a machine, one worker each")
    parser.add_argument("--start-s", type=float, default=START_S, help="seconds until workers have begun")
    parser.add_argument("--driver-ms", type=float, default=DRIVER_MS, help="a call in the directing process")
    parser.add_argument(
        "--worker-ms", type=float, default=WORKER_MS, help="a call in a worker, beside its step"
    )
    arguments = parser.parse_args()
    costs = replace(
        measured_costs(arguments.timings, arguments.driver_ms / 1000, arguments.worker_ms / 1000),
        start_s=arguments.start_s,
    )
    print(f"{costs.step_s:.1f} CPU-seconds and {costs.calls:.0f} calls per hour of sound; more than "
          f"{costs.useful_cores():.0f} cores wait for the process that directs")  # fmt: skip
    print("\n".join(hours_table(costs, arguments.hours, arguments.machines, arguments.cores)))


if __name__ == "__main__":
    main()
