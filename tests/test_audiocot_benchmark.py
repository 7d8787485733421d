"""The benchmark audiocot: a measured command is over when the processes that it left behind are."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import audiocot as bench


def test_processes_from_before_a_command_are_not_waited_for() -> None:
    """A decoder of compressed recordings lives as long as the process that reads them."""
    decoder = subprocess.Popen(["sleep", "60"])
    try:
        own = {child.pid for child in psutil.Process().children()}
        left_behind = subprocess.Popen(["sleep", "0.2"])
        began = time.monotonic()
        bench.wait_for_adopted(own)
        assert time.monotonic() - began < 50 and not psutil.pid_exists(left_behind.pid)
        assert decoder.poll() is None
    finally:
        decoder.kill()
        decoder.wait()
