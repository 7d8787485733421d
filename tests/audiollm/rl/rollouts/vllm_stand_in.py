"""Lets processes of vLLM's side import the stand-in for vLLM."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

STAND_IN = Path(__file__).parent / "stand_in"


def use_stand_in(patch: pytest.MonkeyPatch) -> None:
    before = os.environ.get("PYTHONPATH")
    patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(STAND_IN), before])))
    patch.setenv("OMP_NUM_THREADS", "1")
