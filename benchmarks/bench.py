"""Run benchmarks one after another; print a table of their figures beside the bars, with what each benchmark took.

    make -C benchmarks bench [ONLY="packing loader"] [FULL=1]
    python benchmarks/bench.py packing loader

A benchmark that fails does not end the others: it is named at the end, and the exit status is 1. All JSON lines go to
`runs/bench/TIME.jsonl`, each with its target, after a line with commit and machine. Bars are in `bars.yaml`. A
benchmark that takes more than 4 minutes at the default sizes is marked. Only CPU-seconds count where other processes
run on the same cores.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TextIO

import yaml
from measure import bench_parser, parse_options

BARS = Path(__file__).with_name("bars.yaml")
MAX_MINUTES = 4.0
"""Limit of a benchmark at its default sizes."""
HEADINGS = ("target", "minutes", "CPU-s", "bench", "case", "ours", "peer", "ratio", "unit", "bar", "")


@dataclass(frozen=True)
class Bar:
    """What a figure has to reach.

    Args:
        case: its case, in which `*` stands for any text.
        figure: the entry of the line that is judged, or `A / B` for the quotient of two.
        full: judged at the full sizes alone.
        text: the bar in the words of RESULTS.md; empty: its number.
    """

    case: str
    figure: str = "ratio"
    at_least: float | None = None
    at_most: float | None = None
    full: bool = False
    text: str = ""

    def figure_of(self, line: Mapping[str, Any]) -> float | None:
        """The judged figure; None: the line has none, because it was not reached or could not be measured."""
        values = [line.get(key) for key in self.figure.split(" / ")]
        numbers = [value for value in values if isinstance(value, int | float)]
        if len(numbers) < len(values) or 0 in numbers[1:]:
            return None
        return numbers[0] / numbers[1] if numbers[1:] else numbers[0]

    def judge(self, line: Mapping[str, Any], is_full: bool) -> str:
        """Say `met`, `missed`, or that the sizes are too small to judge."""
        if self.full and not is_full:
            return "FULL=1 judges it"
        figure = self.figure_of(line)
        if figure is None:
            return "missed"
        is_met = (self.at_least is None or figure >= self.at_least) and (
            self.at_most is None or figure <= self.at_most
        )
        return "met" if is_met else "missed"

    def __str__(self) -> str:
        bounds = (("≥", self.at_least), ("≤", self.at_most))
        return f"{self.figure} " + " and ".join(
            f"{sign} {value:g}" for sign, value in bounds if value is not None
        )


@dataclass
class TargetRun:
    """A target that has run: its figures, and what it took.

    Args:
        lines: JSON lines that it printed.
        status: exit status of make.
        cpu_seconds: of all its processes.
    """

    target: str
    lines: list[dict[str, Any]] = field(default_factory=list)
    status: int = 0
    minutes: float = 0.0
    cpu_seconds: float = 0.0


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("targets", nargs="+", help="targets of benchmarks/Makefile, in this order")
    parser.add_argument("--only", default="", help="run these of the targets; empty: all of them")
    parser.add_argument("--runs", type=Path, default=Path("runs/bench"), help="folder of the JSON lines")
    options = parse_options(parser)
    targets = select_targets(options.targets, options.only.split())
    options.runs.mkdir(parents=True, exist_ok=True)
    path = options.runs / f"{time.strftime('%Y-%m-%dT%H-%M-%S')}.jsonl"
    with path.open("w", encoding="utf-8") as file:
        write_line(file, {"commit": read_commit(), "machine": read_machine(), "full": options.full})
        runs = [run_target(target, file) for target in targets]
    print(f"\n{table(runs, read_bars(), options.full)}\n\nlines: {path}", flush=True)
    if failed := [f"{run.target} (status {run.status})" for run in runs if run.status]:
        sys.exit(f"failed: {', '.join(failed)}")


def select_targets(targets: Sequence[str], only: Sequence[str]) -> list[str]:
    """The targets that `only` names, in their order; all of them where it is empty.

    Raises:
        SystemExit: it names another one.
    """
    if unknown := [name for name in only if name not in targets]:
        sys.exit(f"ONLY: {', '.join(unknown)}: no such benchmark; choose from {' '.join(targets)}")
    return [target for target in targets if not only or target in only]


def run_target(target: str, file: TextIO) -> TargetRun:
    """Run a target with make, print its output as it comes, and write its JSON lines to the file."""
    print(f"==> {target}", flush=True)
    run, began, used = TargetRun(target), time.monotonic(), children_cpu_seconds()
    command = ["make", "-s", "-C", str(Path(__file__).parent), target]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace") as process:
        assert process.stdout is not None
        for text in process.stdout:
            print(text, end="", flush=True)
            if (line := parse_line(text)) is not None:
                run.lines.append(line)
                write_line(file, {"target": target, **line})
    run.status = process.returncode
    run.minutes, run.cpu_seconds = (time.monotonic() - began) / 60, children_cpu_seconds() - used
    cost = {"minutes": round(run.minutes, 2), "cpu_seconds": round(run.cpu_seconds, 1)}
    write_line(file, {"target": target, "status": run.status, **cost})
    return run


def children_cpu_seconds() -> float:
    """CPU-seconds of the child processes that have ended, with theirs."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def parse_line(text: str) -> dict[str, Any] | None:
    """The JSON object that a line of output is, or None."""
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None


def write_line(file: TextIO, line: Mapping[str, Any]) -> None:
    """Write a JSON line at once: what follows may end this process."""
    file.write(json.dumps(line) + "\n")
    file.flush()


def read_commit() -> str:
    """The short name of the commit, with `+` where files differ from it; empty outside of a clone."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+", "--exclude", "*"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def read_machine() -> str:
    """The name of the CPU; empty where the system does not tell."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def read_bars(path: Path = BARS) -> dict[str, list[Bar]]:
    """Read the bars by bench.

    Raises:
        TypeError: a bar has an entry that there is not.
    """
    by_bench: Mapping[str, Mapping[str, Any]] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return {bench: [Bar(case, **bar) for case, bar in bars.items()] for bench, bars in by_bench.items()}


def table(runs: Sequence[TargetRun], bars: Mapping[str, Sequence[Bar]], is_full: bool) -> str:
    """The table in Markdown, its columns aligned: a row per figure of ours, or per line that a bar judges."""
    rows: list[Sequence[str]] = [HEADINGS]
    for run in runs:
        cells = [cells for line in run.lines if (cells := figure_cells(line, bars, is_full)) is not None]
        if run.status or not cells:
            verdict = f"failed, status {run.status}" if run.status else "no figure"
            cells.insert(0, ["", "", "", "", "", "", "", verdict])
        is_late = run.minutes > MAX_MINUTES and not is_full
        minutes = f"{run.minutes:.1f}" + f" (over {MAX_MINUTES:g})" * is_late
        cost = [run.target, minutes, f"{run.cpu_seconds:.0f}"]
        rows += [[*(cost if number == 0 else ["", "", ""]), *row] for number, row in enumerate(cells)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        f"| {' | '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))} |"
        for row in rows
    ]
    lines.insert(1, f"|{'|'.join('-' * (width + 2) for width in widths)}|")
    return "\n".join(lines)


def figure_cells(
    line: Mapping[str, Any], bars: Mapping[str, Sequence[Bar]], is_full: bool
) -> list[str] | None:
    """The cells of a line from `bench` on; None: it has neither a figure of ours nor a bar."""
    bench, case = str(line.get("bench", "")), str(line.get("case", ""))
    bar = next((bar for bar in bars.get(bench, ()) if fnmatchcase(case, bar.case)), None)
    if not bench or ("ours" not in line and bar is None):
        return None
    keys = bar.figure.split(" / ") if bar is not None and " / " in bar.figure else ["ours", "peer"]
    ours_key = "ours" if "ours" in line else keys[0]
    peer_key = "peer" if "peer" in line else next(key for key in reversed(keys) if key != ours_key)
    figures = [format_figure(line.get(key)) for key in (ours_key, peer_key, "ratio")]
    judged = ["", ""] if bar is None else [str(bar), bar.judge(line, is_full)]
    return [bench, case, *figures, str(line.get("unit") or "").replace("|", "/"), *judged]


def format_figure(value: Any) -> str:
    """A number with four digits; text as it is; nothing for None."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return "" if value is None else str(value)


if __name__ == "__main__":
    main()
