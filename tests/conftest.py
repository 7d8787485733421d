"""Shared fixtures. Tests run side by side on small machines, so each takes one thread, and so do their processes: sums
of two threads round otherwise than those of one.

Files are not flushed to the disk: a kill of a process loses nothing that it has written, only the end of power does.
Without flushes a run that saves at every step takes a fifth less time. Examples of hypothesis have no deadline: on a
busy machine any of them can take long.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"
os.fsync = lambda fd: None
with torch.device(
    "meta"
):  # at its first use torch lists its constructors, and transformers replaces linspace at times
    torch.empty(0)


LONG_FILES = (
    "test_end_to_end.py",
    "test_gpu_benchmark.py",
    "test_annotate_kills.py",
    "test_packed_steps.py",
    "test_damaged_files.py",
    "test_stage.py",
    "test_kill_stage.py",
    "test_loader.py",
)
"""Files that take the longest: they come first, or one process would work on the last of them while others are idle."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONG_FILES)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The optional folder of real recordings: `AUDIOLLM_SHARED_DATA`, or `shared/data` beside the repository."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("AUDIOLLM_SHARED_DATA", beside))
    if not folder.is_dir():
        pytest.skip(f"real recordings are not here: {folder}")
    return folder


@pytest.fixture(autouse=True)
def fresh_user_modules() -> Iterator[None]:
    """Modules that a test writes as a reader's own are imported anew by the next one."""
    yield
    for name in ("my_parts", "more_parts", "my_rewards"):
        sys.modules.pop(name, None)
