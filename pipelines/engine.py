"""Runs a worker over many items in local processes; a ledger keeps what is done, so that a kill costs little.

An item's outcome depends on the item alone: not on the number of workers, nor on the order. An exception,
or a hard death while an item is processed, becomes that item's error and never stops the run.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

Item = TypeVar("Item")

_MAX_DEATHS = 2
"""An item is set aside when this many workers have died over it."""
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


class Worker(Protocol):
    """What processes items. Pickled to every process before `setup`, so heavy things are made there."""

    def setup(self) -> None:
        """Import and load what `process` needs; called once a process."""

    def process(self, item: Any) -> dict[str, Any]:
        """The result of one item as JSON values; an exception makes it an error."""


@dataclass(frozen=True)
class Outcome:
    """What became of an item: `value` of `Worker.process`, or `error`, never both."""

    value: dict[str, Any] | None = None
    error: str | None = None


class EngineError(Exception):
    """The workers cannot be set up, so that no item can be processed."""


def run_pool(
    items: Sequence[Item],
    worker: Worker,
    *,
    key: Callable[[Item], str],
    ledger: Path,
    workers: int | None = None,
    on_done: Callable[[int], None] | None = None,
) -> dict[str, Outcome]:
    """Process all items that the ledger lacks.

    Args:
        key: a unique name of the item, which it keeps from run to run.
        ledger: JSONL of outcomes, appended and flushed item by item; a torn last line is dropped.
        workers: processes, each with one thread; 0 and 1 work in this process, None is one a CPU.
        on_done: called with the number of items done (earlier runs included), at first and after each.

    Returns:
        The outcome of every item of `items` by its key, in the order of `items`.

    Raises:
        EngineError: `setup` fails.
        ValueError: two items have the same key.
    """
    by_key = {key(item): item for item in items}
    if len(by_key) != len(items):
        raise ValueError(f"{len(items) - len(by_key)} items have the key of another one")
    done = {name: outcome for name, outcome in _read_ledger(ledger).items() if name in by_key}
    pending = [(name, item) for name, item in by_key.items() if name not in done]
    workers = min(available_cpus() if workers is None else workers, len(pending))
    report = on_done or (lambda count: None)
    report(len(done))
    if pending:
        ledger.parent.mkdir(parents=True, exist_ok=True)
        outcomes = _run_processes(pending, worker, workers) if workers > 1 else _run_here(pending, worker)
        with ledger.open("a", encoding="utf-8") as file:
            for name, outcome in outcomes:
                _append(file, name, outcome)
                done[name] = outcome
                report(len(done))
    return {name: done[name] for name in by_key}


def available_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# ---------------------------------------------------------------------------------------------- ledger


def _read_ledger(path: Path) -> dict[str, Outcome]:
    """What is in the ledger; cuts off a torn last line, so that the next one begins on a line of its own."""
    if not path.exists():
        return {}
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        with path.open("r+b") as file:
            file.truncate(whole)
    outcomes: dict[str, Outcome] = {}
    for line in content[:whole].splitlines():
        with suppress(ValueError, KeyError, TypeError):
            row = json.loads(line)
            outcomes[row["key"]] = Outcome(row.get("value"), row.get("error"))
    return outcomes


def _append(file: IO[str], name: str, outcome: Outcome) -> None:
    row = (
        {"key": name, "value": outcome.value}
        if outcome.error is None
        else {"key": name, "error": outcome.error}
    )
    file.write(json.dumps(row, ensure_ascii=False) + "\n")
    file.flush()


# --------------------------------------------------------------------------------------------- running


def _run_here(pending: list[tuple[str, Item]], worker: Worker) -> Iterator[tuple[str, Outcome]]:
    try:
        worker.setup()
    except Exception as error:
        raise EngineError(f"the worker cannot be set up: {_describe(error)}") from error
    for name, item in pending:
        yield name, _process(worker, item)


def _process(worker: Worker, item: Any) -> Outcome:
    try:
        value = worker.process(item)
        json.dumps(value)
        return Outcome(value=value)
    except Exception as error:
        return Outcome(error=_describe(error))


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


@dataclass
class _Process:
    process: BaseProcess
    connection: Connection
    holds: tuple[str, Any] | None = None
    """The item at work, with its key."""
    ready: bool = False
    alive: bool = True
    exit_code: str = ""


def _run_processes(
    pending: list[tuple[str, Item]], worker: Worker, workers: int
) -> Iterator[tuple[str, Outcome]]:
    queue = deque(pending)
    deaths: Counter[str] = Counter()  # by item; those while a worker was set up under no name
    pool = [_start(worker) for _ in range(workers)]
    try:
        while queue or any(member.holds for member in pool):
            while len(pool) < min(workers, len(queue)):
                pool.append(_start(worker))
            ready = wait([member.connection for member in pool])
            for member in [member for member in pool if member.connection in ready]:
                name = member.holds[0] if member.holds else ""
                outcome = _receive(member)
                if not member.alive:
                    pool.remove(member)
                    deaths[name] += bool(member.holds) or not member.ready
                    how = f"died {deaths[name]} times ({member.exit_code})"
                    if member.holds and deaths[name] < _MAX_DEATHS:
                        queue.appendleft(member.holds)
                    elif member.holds:
                        outcome = Outcome(error=f"its worker process {how}")
                    elif deaths[name] >= _MAX_DEATHS:
                        raise EngineError(f"the worker processes cannot be set up: {how}")
                if outcome is not None:
                    yield name, outcome
            for member in pool:
                if queue and member.ready and member.holds is None:
                    member.holds = queue.popleft()
                    with suppress(OSError):
                        member.connection.send(member.holds[1])
    finally:
        for member in pool:
            member.process.kill()
        for member in pool:
            member.process.join()
            member.connection.close()


def _receive(member: _Process) -> Outcome | None:
    """The outcome of the item that `member` holds; None where it has only become ready, or has died."""
    try:
        kind, content = member.connection.recv()
    except (EOFError, OSError):
        member.process.join()
        member.connection.close()
        member.alive, member.exit_code = False, f"exit code {member.process.exitcode}"
        return None
    if kind == "setup failed":
        raise EngineError(f"the worker cannot be set up: {content}")
    member.ready = True
    if kind == "ready":
        return None
    assert isinstance(content, Outcome)
    member.holds = None
    return content


def _start(worker: Worker) -> _Process:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, os.getpid()), daemon=True)
    with _environment(_ONE_THREAD):
        process.start()
    theirs.close()
    with suppress(OSError):  # it died already: `_receive` will find out
        ours.send(worker)
    return _Process(process, ours)


def _serve(connection: Connection, parent: int) -> None:
    """The life of a worker process: says `ready`, then answers every item with `done`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_die_with, args=(parent,), daemon=True).start()
    with suppress(EOFError, OSError):
        try:
            worker: Worker = connection.recv()
            worker.setup()
        except Exception as error:
            connection.send(("setup failed", _describe(error)))
            return
        connection.send(("ready", None))
        while True:
            connection.send(("done", _process(worker, connection.recv())))


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Variables for a process that is started inside; libraries read them when they are first loaded."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _die_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
