"""Hours of a cluster: worked by hand from a run's timings; the process that directs is a bound."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.documented import ROOT

SCRIPT = ROOT / "benchmarks" / "cluster_hours.py"
TIMINGS = {
    "steps": {
        "signal": {"seconds": 18.0, "calls": 300, "audio_s": 1800.0},
        "quality": {"seconds": 342.0, "calls": 300, "audio_s": 1800.0},
    },
    "audio_s": 1800.0,
}


def run(timings: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), str(timings), "--driver-ms", "2", "--worker-ms", "5", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_hours_fall_with_the_machines_down_to_the_bound(tmp_path: Path) -> None:
    """Per hour of sound: 720 CPU-seconds, 1,200 calls; with 5 ms a call 726, and 2.4 s of the process that directs."""
    (path := tmp_path / "timings.json").write_text(json.dumps(TIMINGS))
    done = run(path, "--hours", "1000", "--cores", "10", "--machines", "1", "10", "100", "--start-s", "0")
    assert done.returncode == 0, done.stderr
    assert "720.0 CPU-seconds and 1200 calls per hour of sound; more than 302 cores wait" in done.stdout
    assert "| 1 | 20.2 h |" in done.stdout  # 1000 * 726 / 10 s
    assert "| 10 | 2.0 h |" in done.stdout
    assert "| 100 | 0.7 h, bound by the process that directs |" in done.stdout  # 1000 * 2.4 s


def test_a_run_that_heard_nothing_is_refused(tmp_path: Path) -> None:
    (path := tmp_path / "timings.json").write_text(json.dumps({"steps": {}, "audio_s": 0.0}))
    assert "no seconds of sound" in run(path).stderr
