"""The engine gives the same outcomes whatever the workers, and survives exceptions, deaths and kills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipelines.engine import EngineError, Outcome, run_pool


class Squares:
    """Squares numbers; fails on 3; notes every call in a file. `deadly` items end the process."""

    def __init__(self, notes: Path, deadly: tuple[int, ...] = (), deaths_left: Path | None = None) -> None:
        self.notes, self.deadly, self.deaths_left = notes, deadly, deaths_left
        self.is_set_up = False

    def setup(self) -> None:
        self.is_set_up = True

    def process(self, item: int) -> dict[str, Any]:
        assert self.is_set_up
        with self.notes.open("a") as file:
            file.write(f"{item}\n")
        if item in self.deadly and (self.deaths_left is None or self.deaths_left.exists()):
            if self.deaths_left is not None:
                self.deaths_left.unlink()
            os._exit(7)
        if item == 3:
            raise ValueError("three is bad")
        if item == 4:
            return {"not JSON": {1}}
        return {"square": item * item, "threads": os.environ.get("OMP_NUM_THREADS")}


class BadSetup:
    def __init__(self, dies: bool = False) -> None:
        self.dies = dies

    def setup(self) -> None:
        if self.dies:
            os._exit(3)
        raise ImportError("no such model")

    def process(self, item: int) -> dict[str, Any]:
        return {}


def _run(folder: Path, worker: Any, items: list[int], workers: int, **more: Any) -> dict[str, Outcome]:
    return run_pool(items, worker, key=str, ledger=folder / "ledger.jsonl", workers=workers, **more)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_outcomes_do_not_depend_on_the_workers(tmp_path: Path, workers: int) -> None:
    done: list[int] = []
    outcomes = _run(tmp_path, Squares(tmp_path / "notes"), [9, 3, 4, 1, 0], workers, on_done=done.append)
    assert list(outcomes) == ["9", "3", "4", "1", "0"]
    assert {k: o.value["square"] for k, o in outcomes.items() if o.value} == {"9": 81, "1": 1, "0": 0}
    assert outcomes["3"].error == "ValueError: three is bad"
    assert "not JSON serializable" in str(outcomes["4"].error)
    assert done == [0, 1, 2, 3, 4, 5]
    if workers == 2:
        assert {o.value["threads"] for o in outcomes.values() if o.value} == {"1"}
        assert os.environ.get("OMP_NUM_THREADS") != "1" or "OMP_NUM_THREADS" in os.environ


def test_what_the_ledger_has_is_not_done_again(tmp_path: Path) -> None:
    notes, ledger = tmp_path / "notes", tmp_path / "ledger.jsonl"
    first = _run(tmp_path, Squares(notes), [1, 2, 3], 0)
    lines = ledger.read_bytes().splitlines(keepends=True)
    ledger.write_bytes(b"".join(lines[:2]) + lines[2][:7])  # killed in the middle of writing the third
    notes.unlink()
    second = _run(tmp_path, Squares(notes), [1, 2, 3, 5], 0)
    assert notes.read_text().split() == ["3", "5"]
    assert {key: second[key] for key in first} == first
    assert [json.loads(line)["key"] for line in ledger.read_text().splitlines()] == ["1", "2", "3", "5"]


def test_a_worker_that_dies_takes_only_its_item_with_it(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    outcomes = _run(tmp_path, Squares(notes, deadly=(5,)), list(range(5, 13)), 2)
    assert outcomes["5"].error == "its worker process died 2 times (exit code 7)"
    assert [outcomes[str(i)].value["square"] for i in range(6, 13)] == [i * i for i in range(6, 13)]  # type: ignore[index]
    assert sorted(map(int, notes.read_text().split())) == [5, *range(5, 13)]


def test_a_death_by_chance_costs_nothing(tmp_path: Path) -> None:
    once = tmp_path / "once"
    once.touch()
    outcomes = _run(tmp_path, Squares(tmp_path / "notes", deadly=(6,), deaths_left=once), [5, 6], 2)
    assert {key: outcome.error for key, outcome in outcomes.items()} == {"5": None, "6": None}


@pytest.mark.parametrize("worker", [BadSetup(), BadSetup(dies=True)])
def test_workers_that_cannot_be_set_up_end_the_run(tmp_path: Path, worker: BadSetup) -> None:
    with pytest.raises(EngineError, match=r"cannot be set up: (ImportError: no such model|died 2 times)"):
        _run(tmp_path, worker, [1, 2, 3], 2)


def test_doubled_keys_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="1 items"):
        _run(tmp_path, Squares(tmp_path / "notes"), [1, 1], 0)


_SCRIPT = """
    import os, sys, time
    from pathlib import Path
    from pipelines.engine import run_pool

    class Slow:
        def setup(self): pass
        def process(self, item):
            with open(sys.argv[1] + "/notes", "a") as file:
                file.write(f"{item} {os.getpid()}\\n")
            time.sleep(0.05)
            return {"square": item * item}

    if __name__ == "__main__":
        outcomes = run_pool(range(60), Slow(), key=str, ledger=Path(sys.argv[1]) / "ledger.jsonl", workers=2)
        print(sum(outcome.value["square"] for outcome in outcomes.values()))
"""


def test_killed_at_any_moment_it_goes_on_and_leaves_no_worker_behind(tmp_path: Path) -> None:
    script, notes, ledger = tmp_path / "script.py", tmp_path / "notes", tmp_path / "ledger.jsonl"
    script.write_text(textwrap.dedent(_SCRIPT))
    command = [sys.executable, str(script), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    first = subprocess.Popen(command, env=environment)
    deadline = time.monotonic() + 30
    while not (ledger.exists() and ledger.read_bytes().count(b"\n") >= 4):
        assert time.monotonic() < deadline and first.poll() is None
        time.sleep(0.02)
    first.send_signal(signal.SIGKILL)
    first.wait()
    kept = ledger.read_bytes().count(b"\n")
    workers = {int(line.split()[1]) for line in notes.read_text().splitlines()}
    while any(psutil.pid_exists(pid) for pid in workers):
        assert time.monotonic() < deadline, "a worker outlived its parent"
        time.sleep(0.1)
    notes.unlink()
    second = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert second.stdout.strip() == str(sum(i * i for i in range(60)))
    assert 4 <= kept < 60
    assert len(notes.read_text().splitlines()) == 60 - kept
