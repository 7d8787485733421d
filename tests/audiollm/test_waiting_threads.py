"""How OpenMP's threads wait: set before torch is loaded, unless the caller did."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

NAMES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ["passive", "1000"]),
        ({"GOMP_SPINCOUNT": "7"}, ["passive", "7"]),
        ({"OMP_WAIT_POLICY": "passive"}, ["passive", "None"]),
        ({"OMP_WAIT_POLICY": "active"}, ["active", "None"]),
    ],
)
def test_threads_spin_briefly_unless_told_otherwise(given: dict[str, str], expected: list[str]) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in NAMES}
    script = f"import os, audiollm; print(*(os.environ.get(name) for name in {NAMES}))"
    output = subprocess.run(
        [sys.executable, "-c", script],
        env={**environment, **given},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert output.split() == expected
