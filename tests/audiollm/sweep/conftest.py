"""A toy recipe in a folder of its own, and runs of sweeps in the process of the tests."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from audiollm.sweep import sweeping
from tests.audiollm.sweep.inline_run import InlineRun

RECIPE = """\
name: toy
stages:
  - name: data
    toy_stages:DATA: {size: 3}
  - name: fit
    toy_stages:FIT: {data: "${data.data}"}
  - name: score
    toy_stages:SCORE: {model: "${fit.model}"}
  - name: score_test
    toy_stages:SCORE: {model: "${fit.model}", split: test}
"""


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with `toy.yaml`."""
    shutil.copy(Path(__file__).with_name("toy_stages.py"), tmp_path)
    (tmp_path / "toy.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOY_LOG", str(tmp_path / "log.txt"))
    return tmp_path


@pytest.fixture
def stage_starts(toy: Path) -> Callable[[], Counter[str]]:
    """How often each stage, `RUN/STAGE`, was started."""

    def count() -> Counter[str]:
        path = toy / "log.txt"
        return Counter(path.read_text().split() if path.exists() else [])

    return count


@pytest.fixture
def inline_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeping, "RunProcess", InlineRun)
    monkeypatch.setattr("audiollm.sweep.workers.POLL_SECONDS", 0.0)
