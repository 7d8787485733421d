"""Shared fixtures. Tests run side by side on small machines, so each takes one thread, and so do their processes: sums
of two threads round otherwise than those of one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The optional folder of real recordings: `AUDIOLLM_SHARED_DATA`, or `shared/data` beside the repository."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("AUDIOLLM_SHARED_DATA", beside))
    if not folder.is_dir():
        pytest.skip(f"real recordings are not here: {folder}")
    return folder
