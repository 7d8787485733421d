"""Lets processes of vLLM's side import the stand-in for vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest

STAND_IN = Path(__file__).parent / "stand_in"


def use_stand_in(patch: pytest.MonkeyPatch) -> None:
    patch.setenv("PYTHONPATH", str(STAND_IN))
    patch.setenv("OMP_NUM_THREADS", "1")
