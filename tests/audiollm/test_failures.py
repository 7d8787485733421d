"""A run whose step fails on every item for one reason ends with an error; all other failures cost their items alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from audiollm.audio import save
from audiollm.commands.cli import build_app
from audiollm.evaluate.judges.judging import failures_of
from audiollm.evaluate.report.metric_error import MetricError
from audiollm.failures import (
    MAX_EQUAL_FAILURES,
    MAX_SIMILAR_FAILURES,
    FailedOnEveryItem,
    FailureWatch,
    note_failure,
    note_success,
    noted_outcome,
    watched_failures,
)

HALF = "RuntimeError: Input type (float) and bias type (c10::Half) should be the same"


def _fails(count: int, reason: Callable[[int], str], item_fault: bool = False) -> FailureWatch:
    watch = FailureWatch("annotate")
    for number in range(count):
        watch.fail("whisper", reason(number), item_fault)
    return watch


def test_a_step_that_fails_alike_on_a_few_dozen_items_is_stuck() -> None:
    assert _fails(MAX_EQUAL_FAILURES - 1, lambda n: HALF).stuck_step is None
    stuck = _fails(MAX_EQUAL_FAILURES, lambda n: HALF)
    with pytest.raises(
        FailedOnEveryItem, match=r"annotate: whisper failed on all of the first 24 items .*Half"
    ):
        stuck.stop_if_stuck()
    stuck.succeed("whisper")
    assert stuck.stuck_step is None


def test_failures_that_differ_in_numbers_alone_need_more_evidence() -> None:
    def out_of_memory(number: int) -> str:
        return f"OutOfMemoryError: tried to allocate {number}.5 MiB at 0x7f{number}a"

    assert _fails(MAX_SIMILAR_FAILURES - 1, out_of_memory).stuck_step is None
    assert _fails(MAX_SIMILAR_FAILURES, out_of_memory).stuck_step == "whisper"
    assert _fails(500, lambda n: f"KeyError: {'abc'[n % 3]}").stuck_step is None


def test_damaged_files_stop_no_run() -> None:
    damaged = _fails(500, lambda n: "cannot be read: empty", item_fault=True)
    assert damaged.stuck_step is None
    with pytest.raises(FailedOnEveryItem, match="all of the 500 items"):
        damaged.verify()
    damaged.fail("whisper", "cannot be read: no audio in it", item_fault=True)
    damaged.verify()
    _fails(2, lambda n: "cannot be read: empty", item_fault=True).verify()


@pytest.mark.parametrize(
    ("reasons", "others", "raises"),
    [
        ([HALF], 0, True),  # the only item of the run
        ([HALF], 1, True),
        ([HALF], 2, False),  # one item of two that came so far
        ([HALF] * 2, 9, False),
        ([HALF] * 3, 9, True),
        ([HALF, "ValueError: too short", HALF], 3, False),
    ],
)
def test_small_runs_are_judged_at_their_end(reasons: Iterable[str], others: int, raises: bool) -> None:
    """A step that few of the items reach needs three failures."""
    try:
        with watched_failures("annotate"):
            for _ in range(others):
                note_success("probe")
            for reason in reasons:
                note_failure("whisper", reason)
    except FailedOnEveryItem:
        assert raises
    else:
        assert not raises


def test_an_exception_of_an_item_passes_on_and_is_counted() -> None:
    with (
        pytest.raises(FailedOnEveryItem, match="first 24 items for the same reason: ValueError: no"),
        watched_failures(),
    ):
        for _ in range(100):
            with pytest.raises(ValueError, match="no"), noted_outcome("judge"):
                raise ValueError("no")


def test_silent_clips_stop_no_training() -> None:
    """A policy that begins with silence goes on, as long as one clip is heard."""
    with watched_failures("train_policy"):
        for _ in range(100):
            with pytest.raises(MetricError, match="silent"), failures_of("classifier"):
                raise MetricError("the clip is silent")
        with failures_of("classifier"):
            pass


# ------------------------------------------------------------------------------------------ the commands


class Broken:
    """A recognizer that writes into a file whom it has heard, and fails on all, on some, or on each in its way."""

    name, fingerprint = "broken", "1"
    calls: list[int]
    reason: Callable[[int], str | None]

    def recognize(self, samples_CN: Tensor, sample_rate: int) -> str:
        self.calls.append(len(self.calls))
        problem = self.reason(self.calls[-1])
        if problem:
            raise RuntimeError(problem)
        return "yes"


def _recognizer(reason: Callable[[int], str | None]) -> Broken:
    Broken.calls = []
    Broken.reason = staticmethod(reason)  # type: ignore[method-assign, assignment]
    return Broken()


def everywhere() -> Broken:
    return _recognizer(lambda call: "bias type (c10::Half)")


def in_its_own_way() -> Broken:
    return _recognizer(lambda call: f"{call:b}".translate(str.maketrans("01", "ab")))


def but_for_one() -> Broken:
    return _recognizer(lambda call: None if call == 1 else "bias type (c10::Half)")


def _listing(folder: Path, count: int) -> Path:
    rows = []
    for number in range(count):
        path = folder / f"{number:02d}.wav"
        save(path, torch.sin(torch.arange(16000.0) / (4 + number))[None] * 0.2, 16000)
        rows.append(f"{number:02d}|yes")
    (folder / "list.lst").write_text("\n".join(rows))
    return folder / "list.lst"


@pytest.mark.parametrize(
    ("factory", "count", "calls", "fails"),
    [
        ("everywhere", 40, MAX_EQUAL_FAILURES, True),
        ("everywhere", 3, 3, True),
        ("in_its_own_way", 30, 30, False),
        ("but_for_one", 30, 30, False),
    ],
)
def test_evaluate_ends_with_an_error_where_its_recognizer_fails_on_every_clip(
    tmp_path: Path, factory: str, count: int, calls: int, fails: bool
) -> None:
    listing = _listing(tmp_path, count)
    command = ["evaluate", "tts", "--list", str(listing), "--audio", str(tmp_path)]
    command += ["-o", str(tmp_path / "out"), "--recognizer", f"{__name__}:{factory}"]
    for _ in range(2):  # the failures are not stored: the next run asks again, and ends alike
        answer = CliRunner().invoke(build_app("evaluate"), command)
        assert isinstance(answer.exception, FailedOnEveryItem) == fails, answer.output
        assert len(Broken.calls) == calls - (factory == "but_for_one" and _ == 1)
        if fails:
            assert "evaluate tts: broken failed on all" in str(answer.exception)
            assert "(c10::Half)" in str(answer.exception)
