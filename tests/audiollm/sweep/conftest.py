"""A toy recipe in a folder of its own, and runs of sweeps in the process of the tests."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from audiollm.errors import ConfigError, StageError
from audiollm.sweep import sweeping
from audiollm.sweep.trial_process import RunOrder, run_order
from audiollm.sweep.workers import RunEnd

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


class InlineRun:
    """A run in the process of the tests, in place of `RunProcess`: its stages take milliseconds, a process a second."""

    def __init__(self, order: RunOrder, *_: Any) -> None:
        self._end = RunEnd()
        try:
            run_order(order, Console(quiet=True))
        except (ConfigError, StageError) as error:
            self._end = RunEnd(str(error))

    def poll(self) -> RunEnd:
        return self._end

    wait = poll

    def kill(self) -> None:
        pass


@pytest.fixture
def inline_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeping, "RunProcess", InlineRun)
    monkeypatch.setattr("audiollm.sweep.workers.POLL_SECONDS", 0.0)
