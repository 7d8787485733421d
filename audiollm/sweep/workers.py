"""The processes in which a sweep's runs are: each run has one of its own, which ends with the sweep."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from audiollm.files.atomic import DamagedFile, read_record
from audiollm.processes import ONE_THREAD, available_cpus
from audiollm.sweep.trial_process import RunOrder

DEVICES = "CUDA_VISIBLE_DEVICES"
POLL_SECONDS = 0.1
"""Time between two looks at the runs."""
MAX_STARTS = 3
"""Starts of a run whose process a signal ends (a full memory, for example) before it counts as failed."""


@dataclass(frozen=True)
class RunEnd:
    """The end of a run's process."""

    error: str = ""
    """Empty: the run has finished."""
    is_killed: bool = False
    """Whether a signal ended it, and it may be started again."""


class RunProcess:
    """The process of a run.

    Args:
        order: what it does.
        slot: the worker's number, by which it has its GPU.
        workers: that share this machine.
        log: receives what it prints; None: the sweep's own output.
        lock: descriptor of the sweep's lock, which the process holds as well: another sweep waits for its end.
    """

    def __init__(self, order: RunOrder, slot: int, workers: int, log: Path | None, lock: int) -> None:
        self._arguments = (order, slot, workers, log, lock)
        self._order, self._log = order, log
        Path(order.outcome).unlink(missing_ok=True)
        output: IO[Any] | None = None
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            output = log.open("ab")
        command = [sys.executable, "-m", "audiollm.sweep.trial_process", order.text(), str(os.getpid())]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=worker_environment(os.environ, slot, workers),
                pass_fds=(lock,),
                start_new_session=True,  # Ctrl-C is for the sweep, which ends its workers
            )
        finally:
            if output is not None:
                output.close()

    def poll(self) -> RunEnd | None:
        """How the process ended; None: it runs."""
        code = self._process.poll()
        if code is None:
            return None
        try:
            outcome = read_record(Path(self._order.outcome))
        except (FileNotFoundError, DamagedFile):
            return self._end_without_outcome(code)
        return RunEnd(str(outcome["error"]))

    def wait(self) -> RunEnd:
        """Wait for the end of the process."""
        self._process.wait()
        end = self.poll()
        assert end is not None
        return end

    def restarted(self) -> RunProcess:
        """A new process for the same run, which goes on with what this one left."""
        return RunProcess(*self._arguments)

    def kill(self) -> None:
        """End the process and those that it started, now."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _end_without_outcome(self, code: int) -> RunEnd:
        if code < 0:
            return RunEnd(f"its process was ended by {signal.Signals(-code).name}", is_killed=True)
        lines = self._log.read_text(errors="replace").split("\n") if self._log is not None else []
        last = next((line for line in reversed(lines) if line.strip()), f"exit code {code}")
        return RunEnd(last.strip()[:500])


@dataclass
class ActiveRun:
    """A run that has a worker."""

    process: RunProcess
    conclude: Callable[[RunEnd], None]
    """Writes down how the run ended."""
    is_cut: Callable[[], bool] = lambda: False
    """Whether the run is to end now; that it was cut is then written down."""
    starts: int = 1


def work(start: Callable[[int], ActiveRun | None], workers: int, advance: Callable[[], None]) -> None:
    """Keep workers busy until nothing starts any more; whatever ends this ends the runs, too.

    Args:
        start: starts the next run on the worker of a number; None: there is none.
        advance: called at the end of each run.
    """
    active: dict[int, ActiveRun] = {}
    try:
        while True:
            for slot in range(workers):
                if slot not in active and (run := start(slot)) is not None:
                    active[slot] = run
            if not active:
                return
            time.sleep(POLL_SECONDS)
            for slot, run in list(active.items()):
                if _is_over(run):
                    del active[slot]
                    advance()
    finally:
        for run in active.values():
            run.process.kill()


def _is_over(run: ActiveRun) -> bool:
    """Whether a run has ended, and its end is written down."""
    end = run.process.poll()
    if end is None:
        if run.is_cut():
            run.process.kill()
            return True
        return False
    if end.is_killed and run.starts < MAX_STARTS:
        run.process, run.starts = run.process.restarted(), run.starts + 1
        return False
    run.conclude(end)
    return True


def worker_environment(environment: Mapping[str, str], slot: int, workers: int) -> dict[str, str]:
    """The environment of a worker among several: its share of the CPUs, and one of the GPUs in turn.

    Threads that the environment sets stay as they are. GPUs are shared out where `CUDA_VISIBLE_DEVICES` names them.
    """
    environment = dict(environment)
    if workers > 1:
        threads = str(max(1, available_cpus() // workers))
        environment = {**dict.fromkeys(ONE_THREAD, threads), **environment}
        devices = [device for device in environment.get(DEVICES, "").split(",") if device]
        if len(devices) > 1:
            environment[DEVICES] = devices[slot % len(devices)]
    return environment
