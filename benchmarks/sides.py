"""Sides of a comparison, each trained in its own process, two at a time: for learn_tokenizer.py and learn_vae.py."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console


def parse_side_options(description: str | None, out: Path, minutes: float, sides: Sequence[str]) -> Any:
    """The options of a comparison; ends the program where the recordings are not there.

    Args:
        out: default folder of the runs.
        minutes: default budget of a side.
        sides: those that `--side` trains alone.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    data_help = "folder of real recordings (see learning_data.py)"
    parser.add_argument("--data", type=Path, required=True, help=data_help)
    parser.add_argument("--out", type=Path, default=out)
    parser.add_argument("--minutes", type=float, default=minutes, help="of each side")
    parser.add_argument("--side", choices=list(sides), help="this one alone")
    options = parser.parse_args()
    if not options.data.is_dir():
        raise SystemExit(
            f"no data in {options.data}: give the folder of real recordings with --data (DATA= in make)"
        )
    return options


def train_sides(
    script: str, sides: Sequence[str], options: Any, out: Path, wall_minutes: float, console: Console
) -> None:
    """Train two sides at a time, a process and a thread each: no time is lost to threads that wait for each other.

    Args:
        script: the program, which trains one side with `--side`.
        wall_minutes: about how long a pair takes.
    """
    for pair in (sides[:2], sides[2:]):
        running = {}
        for side in pair:
            (out / side).mkdir(parents=True, exist_ok=True)
            command = [sys.executable, "-W", "ignore", script, "--data", str(options.data), "--side", side]
            command += ["--out", str(options.out), "--minutes", str(options.minutes)]
            with (out / side / "log.txt").open("w") as log:
                environment = {**os.environ, "OMP_NUM_THREADS": "1"}
                running[side] = subprocess.Popen(
                    command, stdout=log, stderr=subprocess.STDOUT, env=environment
                )
        with console.status(f"training {' and '.join(pair)}: about {wall_minutes:g} minutes; logs in {out}"):
            failed = [side for side, process in running.items() if process.wait()]
        if failed:
            raise SystemExit(f"{', '.join(failed)} failed: see {out / failed[0] / 'log.txt'}")
