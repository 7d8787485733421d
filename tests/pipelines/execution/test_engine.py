"""The engine gives the same outcomes whatever the workers, and survives exceptions, deaths and kills."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from audiollm.failures import FailedOnEveryItem
from pipelines.execution.engine import (
    MAX_LOST_MACHINES,
    Call,
    EngineError,
    Outcome,
    Pool,
    RunHalted,
    Walk,
    WorkerBackend,
    WorkerReply,
    run_walks,
)
from pipelines.execution.ledger import Ledger, LedgerError
from pipelines.execution.local_pool import InProcess, LocalProcesses

SQUARES = Pool("squares", ("square",), 2)
HALVES = Pool("halves", ("halve",), 2, batch_sizes={"halve": 4})


class Sums:
    """Squares and halves numbers; fails on 3; notes every call in a file. `deadly` items end the process."""

    def __init__(self, notes: Path, deadly: tuple[int, ...] = (), deaths_left: Path | None = None) -> None:
        self.notes, self.deadly, self.deaths_left = notes, deadly, deaths_left

    def process(self, step: str, items: Sequence[int]) -> list[Outcome]:
        with self.notes.open("a") as file:
            file.write(f"{step} {' '.join(map(str, items))}\n")
        for item in items:
            if item in self.deadly and (self.deaths_left is None or self.deaths_left.exists()):
                if self.deaths_left is not None:
                    self.deaths_left.unlink()
                os._exit(7)
        return [self._one(step, item) for item in items]

    def _one(self, step: str, item: int) -> Outcome:
        if item == 3:
            return Outcome(error="ValueError: three is bad")
        threads = os.environ.get("OMP_NUM_THREADS")
        return Outcome({"number": item * item if step == "square" else item / 2, "threads": threads})


class BadSetup:
    def __init__(self, dies: bool = False) -> None:
        self.dies = dies

    def process(self, step: str, items: Sequence[int]) -> list[Outcome]:
        if self.dies:
            os._exit(3)
        raise ImportError("no such model")


def _walk(number: int, found: dict[int, Any]) -> Walk:
    """Squares a number, and halves it in a walk of its own."""
    outcome = yield Call("square", f"square {number}", number)
    found[number] = outcome.value["number"] if outcome.value else outcome.error
    return [_half(number, found)] if outcome.value else []


def _half(number: int, found: dict[int, Any]) -> Walk:
    outcome = yield Call("halve", f"halve {number}", number, size=float(number))
    found[number] = (found[number], outcome.value["number"] if outcome.value else outcome.error)
    return []


def _run(folder: Path, numbers: Sequence[int], backend: WorkerBackend, **more: Any) -> dict[int, Any]:
    found: dict[int, Any] = {}
    with Ledger(folder / "ledger.sqlite") as ledger:
        walks = (_walk(number, found) for number in numbers)
        run_walks(walks, [SQUARES, HALVES], backend, ledger, **more)
    return found


@pytest.mark.parametrize("kind", ["here", "processes"])
def test_outcomes_do_not_depend_on_the_workers(tmp_path: Path, kind: str) -> None:
    worker = Sums(tmp_path / "notes")
    backend = InProcess(worker) if kind == "here" else LocalProcesses(worker)
    found = _run(tmp_path, range(30), backend)
    assert found == {n: "ValueError: three is bad" if n == 3 else (n * n, n / 2) for n in range(30)}


@pytest.mark.parametrize("kind", ["own", "failing", "annotation"])
def test_processes_share_what_can_be_set_up_before_they_are_forked(kind: str) -> None:
    """In a process of its own: that which all are forked from is started once, with the first worker."""
    command = [sys.executable, "-c", f"import forked_worker; forked_worker.main({kind!r})"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    first, second, other = found["answers"]
    processes = {each["process"] for each in found["answers"]} | {found["driver"]}
    assert len(processes) == 4
    assert first["set_up_in"] == second["set_up_in"] and other["set_up_in"] is None
    assert (first["set_up_in"] is None) == (kind == "failing") and first["set_up_in"] not in processes


def test_processes_of_a_program_that_runs_as_a_module_say_nothing() -> None:
    command = [sys.executable, "-m", "tests.pipelines.execution.forked_program"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert len(json.loads(done.stdout)["answers"]) == 3 and not done.stderr


def test_every_process_has_one_thread(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        run_walks([_walk(5, {})], [SQUARES, HALVES], LocalProcesses(Sums(tmp_path / "notes")), ledger)
        known = ledger.get("square 5")
    assert known is not None and known.value == {"number": 25, "threads": "1"}


def test_what_the_ledger_has_is_not_done_again(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    heard: list[bool] = []
    first = _run(tmp_path, range(6), InProcess(Sums(notes)))
    again = _run(
        tmp_path, range(8), InProcess(Sums(notes)), on_answer=lambda c, o, known: heard.append(known)
    )
    assert {n: again[n] for n in range(6)} == first
    squared = [line for line in notes.read_text().splitlines() if line.startswith("square")]
    assert Counter(squared) == Counter(f"square {n}" for n in range(8))  # errors, too, are known
    assert (sum(heard), len(heard)) == (11, 15)
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        assert ledger.forget_errors() == 1
    _run(tmp_path, range(8), InProcess(Sums(notes)))
    assert notes.read_text().count("square 3\n") == 2


class Busy(Sums):
    """Cannot answer 4 now."""

    def _one(self, step: str, item: int) -> Outcome:
        return Outcome(error="busy", halts=True) if item == 4 else super()._one(step, item)


def test_a_call_that_cannot_be_answered_now_halts_the_run_and_is_not_recorded(tmp_path: Path) -> None:
    with pytest.raises(RunHalted, match="busy"):
        _run(tmp_path, range(8), InProcess(Busy(tmp_path / "notes")))
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        assert ledger.get("square 4") is None and ledger.get("square 0") is not None
    assert _run(tmp_path, range(8), InProcess(Sums(tmp_path / "notes")))[4] == (16, 2.0)


class LastFirst(InProcess):
    """Two workers, of which the one that was sent to last replies first, one reply at a time."""

    def wait(self) -> list[WorkerReply]:
        return [self._answers.pop()]


def test_a_run_that_halts_records_what_other_workers_are_at(tmp_path: Path) -> None:
    """Their answers may be paid for."""
    notes = tmp_path / "notes"
    with pytest.raises(RunHalted, match="busy"):
        _run(tmp_path, [5, 4, 6], LastFirst(Busy(notes)))
    assert notes.read_text() == "square 5\nsquare 4\n"  # nothing is begun after the halt
    assert _run(tmp_path, [5, 4, 6], InProcess(Sums(notes)))[5] == (25, 2.5)
    assert notes.read_text().count("square 5\n") == 1


def test_batches_are_of_one_step_and_similar_size(tmp_path: Path) -> None:
    """All squares wait for one worker while halves pile up: these go together, four at most, by size."""
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        found: dict[int, Any] = dict.fromkeys(range(12))
        pools = [Pool("halves", ("halve",), 1, batch_sizes={"halve": 4})]
        walks = (_half(n, found) for n in (7, 1, 9, 3, 8, 2, 11, 4, 10, 5, 0, 6))
        run_walks(walks, pools, InProcess(Sums(tmp_path / "notes")), ledger)
    batches = [[int(n) for n in line.split()[1:]] for line in (tmp_path / "notes").read_text().splitlines()]
    assert sorted(n for batch in batches for n in batch) == list(range(12))
    assert all(batch == sorted(batch) and len(batch) <= 4 for batch in batches)
    assert max(len(batch) for batch in batches) == 4
    assert {n: found[n][1] for n in found if n != 3} == {n: n / 2 for n in range(12) if n != 3}


def test_a_worker_that_dies_takes_only_its_item_with_it(tmp_path: Path) -> None:
    found = _run(tmp_path, range(24), LocalProcesses(Sums(tmp_path / "notes", deadly=(10, 20))))
    for deadly in (10, 20):
        assert "died 2 times (exit code 7)" in found[deadly]
    assert {n: found[n] for n in found if n not in (3, 10, 20)} == {
        n: (n * n, n / 2) for n in range(24) if n not in (3, 10, 20)
    }
    assert (tmp_path / "notes").read_text().count("square 10\n") == 2


def test_in_a_batch_only_the_deadly_item_is_lost(tmp_path: Path) -> None:
    found: dict[int, Any] = dict.fromkeys(range(12))
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        worker = LocalProcesses(Sums(tmp_path / "notes", deadly=(6,)))
        pools = [Pool("halves", ("halve",), 1, batch_sizes={"halve": 4})]
        run_walks((_half(n, found) for n in range(12)), pools, worker, ledger)
    assert "died 2 times" in found[6][1]
    assert all(found[n][1] == n / 2 for n in range(12) if n not in (3, 6))


def test_a_death_by_chance_costs_nothing(tmp_path: Path) -> None:
    once = tmp_path / "once"
    once.touch()
    found = _run(tmp_path, range(6), LocalProcesses(Sums(tmp_path / "notes", deadly=(5,), deaths_left=once)))
    assert found[5] == (25, 2.5)


@pytest.mark.parametrize("dies", [False, True])
def test_workers_that_cannot_be_set_up_end_the_run(tmp_path: Path, dies: bool) -> None:
    with pytest.raises(EngineError, match="square cannot be set up"):
        _run(tmp_path, range(20), LocalProcesses(BadSetup(dies)))
    assert not multiprocessing.active_children()


HALF = "RuntimeError: Input type (float) and bias type (c10::Half) should be the same"


class Failing(Sums):
    """Squares nothing but `right`, for one reason, or for as many as there are letters in `reasons`."""

    def __init__(self, notes: Path, right: tuple[int, ...] = (), reasons: str = "") -> None:
        super().__init__(notes)
        self.right, self.reasons = right, reasons

    def _one(self, step: str, item: int) -> Outcome:
        if item in self.right:
            return super()._one(step, item)
        return Outcome(error=HALF + self.reasons[item % len(self.reasons)] if self.reasons else HALF)


@pytest.mark.parametrize("kind", ["here", "processes"])
@pytest.mark.parametrize("count", [200, 3])
def test_a_step_that_fails_on_every_item_alike_ends_the_run_and_is_tried_again(
    tmp_path: Path, kind: str, count: int
) -> None:
    notes, numbers = tmp_path / "notes", range(10, 10 + count)
    backend = InProcess(Failing(notes)) if kind == "here" else LocalProcesses(Failing(notes))
    with pytest.raises(FailedOnEveryItem, match=r"the step square failed on all .* reason: RuntimeError"):
        _run(tmp_path, numbers, backend)
    assert len(notes.read_text().splitlines()) <= 36
    again = _run(tmp_path, numbers, InProcess(Sums(notes)))
    assert again == {n: (n * n, n / 2) for n in numbers}


@pytest.mark.parametrize(
    "worker", [{"reasons": "ab"}, {"right": (10,)}, {"right": (30,)}], ids=["reasons", "first", "later"]
)
def test_a_step_that_fails_on_some_or_for_several_reasons_costs_the_items_alone(
    tmp_path: Path, worker: dict[str, Any]
) -> None:
    notes, numbers = tmp_path / "notes", range(10, 60)
    found = _run(tmp_path, numbers, InProcess(Failing(notes, **worker)))
    right = worker.get("right", ())
    assert {n for n in numbers if str(found[n]).startswith(HALF)} == set(numbers) - set(right)
    _run(tmp_path, numbers, InProcess(Sums(notes)))  # they are known
    assert Counter(notes.read_text().split("\n"))["square 12"] == 1


def test_damaged_files_do_not_stop_a_run(tmp_path: Path) -> None:
    class Unreadable(Sums):
        def _one(self, step: str, item: int) -> Outcome:
            return Outcome(error="cannot be read: empty") if item < 50 else super()._one(step, item)

    found = _run(tmp_path, range(60), InProcess(Unreadable(tmp_path / "notes")))
    assert found[49] == "cannot be read: empty" and found[59] == (59 * 59, 29.5)


def test_an_earlier_run_counts(tmp_path: Path) -> None:
    """The last items of a run that goes on fail: the step has answered others before."""
    notes = tmp_path / "notes"
    _run(tmp_path, range(10, 20), InProcess(Sums(notes)))
    assert _run(tmp_path, range(10, 60), InProcess(Failing(notes)))[59] == HALF


class Surroundings:
    """Answers with the environment variables that it is asked for."""

    def process(self, step: str, items: Sequence[str]) -> list[Outcome]:
        time.sleep(0.05)  # so that all workers are started
        return [Outcome(os.environ.get(item)) for item in items]


def _surroundings(folder: Path, variable: str, pool: Pool, num_gpus: int = 0) -> list[Any]:
    seen: list[Any] = []

    def walk() -> Walk:
        outcome = yield Call(pool.steps[0], None, variable)
        seen.append(outcome.value)
        return []

    with Ledger(folder / "ledger.sqlite") as ledger:
        walks = (walk() for _ in range(20))
        run_walks(walks, [pool], LocalProcesses(Surroundings(), num_gpus), ledger)
    return seen


def test_workers_have_the_environment_of_their_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers see the environment of the present run, not that of the first run that started workers."""
    for value in ("before", "after"):
        monkeypatch.setenv("OF_THE_RUN", value)
        assert set(_surroundings(tmp_path, "OF_THE_RUN", Pool("any", ("look",), 2))) == {value}


@pytest.mark.parametrize(("visible", "seen"), [("", {"0", "1"}), ("GPU-7,3,5", {"GPU-7", "3"})])
def test_workers_share_the_gpus_that_the_run_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str, seen: set[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    pool = Pool("heavy", ("look",), 4, gpus=0.5)
    assert set(_surroundings(tmp_path, "CUDA_VISIBLE_DEVICES", pool, num_gpus=2)) == seen


def test_few_walks_are_under_way_at_any_time(tmp_path: Path) -> None:
    """The backlog of one pool holds up the pools before it."""
    begun: list[int] = []
    finished: list[int] = []
    most = 0

    def walks() -> Any:
        nonlocal most
        for number in range(500):
            begun.append(number)
            most = max(most, len(begun) - len(finished))
            yield _noted(number)

    def _noted(number: int) -> Walk:
        yield Call("square", f"square {number}", number)
        yield Call("halve", f"halve {number}", number)
        finished.append(number)
        return []

    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        run_walks(walks(), [SQUARES, HALVES], InProcess(Sums(tmp_path / "notes")), ledger)
    assert len(finished) == 500
    assert most <= 30


def test_two_runs_in_one_folder_are_refused(tmp_path: Path) -> None:
    with (
        Ledger(tmp_path / "ledger.sqlite"),
        pytest.raises(LedgerError, match="another run works in this folder"),
    ):
        Ledger(tmp_path / "ledger.sqlite")


KILLED = """
import os, signal, sys
from pathlib import Path
from pipelines.execution.ledger import Ledger, Outcome

ledger = Ledger(Path(sys.argv[1]))
ledger.put("square 3", "square", Outcome(error="three is bad"))
ledger.forget_errors()
for number in range(4, 304):
    ledger.put(f"square {number}", "square", Outcome({"number": number**2}, seconds=0.5))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kill_undoes_no_outcome(tmp_path: Path) -> None:
    """Neither those in the database nor the newest ones beside it, whose last line may be cut."""
    path, recent = tmp_path / "ledger.sqlite", tmp_path / "ledger.sqlite-recent"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], env=environment)
    assert done.returncode == -signal.SIGKILL
    lines = recent.read_bytes().splitlines()
    assert len(lines) == 300 - 256
    with recent.open("ab") as file:
        file.write(lines[0][:20])
    for _ in range(2):
        with Ledger(path) as ledger:
            outcomes = [ledger.get(f"square {number}") for number in range(3, 304)]
        assert outcomes == [None, *(Outcome({"number": n**2}, seconds=0.5) for n in range(4, 304))]
        assert not recent.exists()


def test_a_damaged_ledger_is_named(tmp_path: Path) -> None:
    (tmp_path / "ledger.sqlite").write_bytes(
        b"no database at all, and longer than a header of a hundred bytes" * 9
    )
    with pytest.raises(LedgerError, match="the ledger is damaged: delete it"):
        Ledger(tmp_path / "ledger.sqlite")


SCRIPT = """
import sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_engine import SQUARES, HALVES, Sums, _walk
from pipelines.execution.engine import run_walks
from pipelines.execution.ledger import Ledger
from pipelines.execution.local_pool import LocalProcesses

class Slow(Sums):
    def process(self, step, items):
        time.sleep(0.02)
        return super().process(step, items)

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    found = {{}}
    with Ledger(folder / "ledger.sqlite") as ledger:
        backend = LocalProcesses(Slow(folder / "notes"))
        run_walks((_walk(n, found) for n in range(60)), [SQUARES, HALVES], backend, ledger)
    print(len(found), sum(v[0] + v[1] for n, v in found.items() if n != 3))
"""


def test_killed_at_any_moment_it_goes_on_and_leaves_no_worker_behind(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT).format(tests=str(Path(__file__).parent)))
    command = [sys.executable, str(script), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    children: set[int] = set()
    for wait_s in (1.2, 1.6, 2.0):
        process = subprocess.Popen(command, env=environment)
        time.sleep(wait_s)
        children |= {child.pid for child in psutil.Process(process.pid).children(recursive=True)}
        process.send_signal(signal.SIGKILL)
        process.wait()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["60", str(sum(n * n + n / 2 for n in range(60) if n != 3))]
    squared = Counter(
        line for line in (tmp_path / "notes").read_text().splitlines() if line.startswith("square")
    )
    # what was in flight at a kill is done again, and nothing else is
    assert len(squared) == 60 and sum(squared.values()) <= 60 + 3 * SQUARES.workers
    deadline = time.monotonic() + 5
    while any(psutil.pid_exists(pid) for pid in children) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(psutil.pid_exists(pid) for pid in children)


class Cluster(InProcess):
    """Workers that are not ready at once. `never` do not begin, `refused` die before they do; of those that began, the
    next worker that is sent `deadly_item` is lost with its machine, `losses` times."""

    def __init__(
        self, worker: Sums, never: tuple[int, ...] = (), refused: tuple[int, ...] = (), losses: int = 0
    ) -> None:
        super().__init__(worker)
        self.never, self.refused, self.losses = never, refused, losses
        self.lost: list[int] = []

    def start(self, pool: Pool) -> int:
        number = super().start(pool)
        if number in self.refused:
            self._answers.append(WorkerReply(number, None, "no such package"))
        elif number not in self.never:
            self._answers.append(WorkerReply(number, []))
        return number

    def is_ready(self, worker: int) -> bool:
        return False

    def send(self, worker: int, step: str, items: Sequence[Any]) -> None:
        assert worker not in (*self.never, *self.refused, *self.lost)
        if 5 in items and self.losses:
            self.losses -= 1
            self.lost.append(worker)
            self._answers.append(WorkerReply(worker, None, "its node has died", True))
        else:
            super().send(worker, step, items)


EXPECTED = {n: "ValueError: three is bad" if n == 3 else (n * n, n / 2) for n in range(12)}


def test_no_call_waits_for_a_worker_without_a_machine(tmp_path: Path) -> None:
    """What a machine's death leaves: fewer machines than workers."""
    backend = Cluster(Sums(tmp_path / "notes"), never=(1, 3))
    assert _run(tmp_path, range(12), backend) == EXPECTED


@pytest.mark.parametrize("losses", [1, MAX_LOST_MACHINES - 1])
def test_a_lost_machine_costs_no_call(tmp_path: Path, losses: int) -> None:
    backend = Cluster(Sums(tmp_path / "notes"), losses=losses)
    assert _run(tmp_path, range(12), backend) == EXPECTED
    assert len(backend.lost) == losses
    calls = Counter((tmp_path / "notes").read_text().split("\n"))
    assert calls["square 5"] == 1  # the walk is answered once


def test_a_call_that_every_machine_dies_of_is_set_aside(tmp_path: Path) -> None:
    backend = Cluster(Sums(tmp_path / "notes"), losses=100)
    found = _run(tmp_path, range(12), backend)
    assert found == {**EXPECTED, 5: "4 machines were lost over it (its node has died)"}
    assert len(backend.lost) == MAX_LOST_MACHINES


def test_a_machine_on_which_no_worker_begins_is_done_without(tmp_path: Path) -> None:
    backend = Cluster(Sums(tmp_path / "notes"), refused=(1,))
    assert _run(tmp_path, range(12), backend) == EXPECTED
    with pytest.raises(EngineError, match="no worker of the pool squares can begin: no such package"):
        _run(tmp_path / "second", range(12), Cluster(Sums(tmp_path / "notes"), refused=tuple(range(9))))
