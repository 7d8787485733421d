"""Progress of long work in a log."""

from __future__ import annotations

import io
import re
import threading
import time

import pytest
from rich.console import Console

from audiollm import progress
from audiollm.progress import ProgressLog, progress_bar


@pytest.fixture(autouse=True)
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.2)


def _log() -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, width=80), file


def test_a_log_has_lines_with_what_is_done_figures_rate_and_time_left() -> None:
    console, file = _log()
    with ProgressLog(console, "train") as log:
        time.sleep(0.3)
        with log.bar("training", 3000, unit="step", completed=1000, figures=lambda: "loss 2.5") as bar:
            bar.update(bar.task_ids[0], completed=1001)
            time.sleep(0.5)
    lines = file.getvalue().splitlines()
    assert lines[0] == "  train: 0 s so far"
    assert re.fullmatch(
        r"  training: 1,001 of 3,000 steps, loss 2.5, ([\d.]+ s per step|[\d.]+ steps per second), .* left",
        lines[1],
    )
    assert len(lines) <= 4


def test_the_rate_is_that_of_this_attempt() -> None:
    console, _ = _log()
    with ProgressLog(console, "x") as log, log.bar("training", 2000, unit="step", completed=1000) as bar:
        line = log._lines[0]
        line._started -= 100.0
        bar.update(bar.task_ids[0], completed=1050)
        assert line.text() == "training: 1,050 of 2,000 steps, 2 s per step, 32 min left"
        bar.update(bar.task_ids[0], completed=1500)
        assert line.text() == "training: 1,500 of 2,000 steps, 5 steps per second, 100 s left"


def test_a_count_without_an_end_has_no_time_left() -> None:
    console, file = _log()
    with progress_bar(console, "fetching", None) as bar:
        bar.advance(bar.task_ids[0], 30)
        time.sleep(0.3)
    assert re.match(r"  fetching: 30, \d+ per second\n", file.getvalue())


def test_a_terminal_has_the_bar_and_no_lines() -> None:
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=True)
    with progress_bar(console, "training", 10, unit="step") as bar:
        bar.advance(bar.task_ids[0])
        time.sleep(0.5)
    assert "━" in file.getvalue() and "steps" not in file.getvalue()


def test_a_quiet_rank_says_nothing() -> None:
    file = io.StringIO()
    with progress_bar(Console(file=file, quiet=True), "training", 10) as bar:
        bar.advance(bar.task_ids[0])
        time.sleep(0.5)
    assert not file.getvalue()


def test_no_thread_outlives_the_log() -> None:
    """One that did would free what a bar's line holds, a model, while the interpreter shuts down, which aborts it."""
    console, file = _log()
    before = threading.active_count()
    with ProgressLog(console, "train") as log, log.bar("training", 3000, figures=lambda: "loss 2.5"):
        while "loss 2.5" not in file.getvalue():
            time.sleep(0.01)
    assert threading.active_count() == before
