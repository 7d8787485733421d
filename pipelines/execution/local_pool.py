"""Workers as processes of this machine, or, for a single one, in this process.

A worker can be set up before its processes are forked, so that they share what it has loaded: the fork server imports
`fork_setup`, which does so; its environment names the file of a pickled worker.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from audiollm.errors import error_line
from audiollm.processes import ONE_THREAD, end_with_parent, interrupts_held_back
from audiollm.recipe.plug_ins import working_directory
from pipelines.execution.engine import EngineError, Pool, Worker, WorkerReply

WORKER_FILE = "AUDIOLLM_WORKER_FILE"
"""Environment variable with the path of a pickled worker, for the process that others are forked from."""

_ready: tuple[bytes, Worker] | None = None
"""The worker that is set up, with its pickled bytes."""


@runtime_checkable
class SharedSetup(Protocol):
    """Optional interface of a worker: a setup that its processes share."""

    def set_up_shared(self) -> None:
        """Load what forked processes may share: no threads, no open files, nothing on a GPU."""


def _load_worker(content: bytes) -> Worker:
    """A step of a user's own may be in a module of the working directory."""
    with working_directory():
        worker: Worker = ForkingPickler.loads(content)
    return worker


def worker_of(content: bytes) -> Worker:
    """Return the worker of pickled bytes: the one that is set up if it has the same bytes, else a new one."""
    if _ready is not None and _ready[0] == content:
        return _ready[1]
    return _load_worker(content)


def set_up_worker() -> None:
    """Load the pickled worker that `WORKER_FILE` names and set it up; a failure leaves this to its processes."""
    global _ready
    path = os.environ.get(WORKER_FILE)
    if path is None:
        return
    try:
        content = Path(path).read_bytes()
        worker = _load_worker(content)
        if isinstance(worker, SharedSetup):
            worker.set_up_shared()
    except Exception:  # the process that needs the worker tries again, and reports the error
        return
    _ready = content, worker


GPUS = "CUDA_VISIBLE_DEVICES"
"""Environment variable with the GPUs that a process sees, separated by commas."""


class InProcess:
    """Workers in this process, which answer every call at once; nothing protects the run from a crash of a step."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._answers: list[WorkerReply] = []
        self._numbers = count()

    def start(self, pool: Pool) -> int:
        return next(self._numbers)

    def is_ready(self, worker: int) -> bool:
        return True

    def send(self, worker: int, step: str, items: Sequence[Any]) -> None:
        try:
            self._answers.append(WorkerReply(worker, self._worker.process(step, items)))
        except Exception as error:
            raise EngineError(_cannot(step, error)) from error

    def wait(self) -> list[WorkerReply]:
        answers, self._answers = self._answers, []
        return answers

    def close(self) -> None:
        self._answers = []


class LocalProcesses:
    """One process a worker, each with one thread; they end with this one, however it ends.

    They are forked from a process that has imported what they need, has set up what may be shared, and has done
    nothing else: that is paid for once, and nothing of this process (threads, locks, a GPU) is inherited. The process
    lasts as long as this one and knows the first worker; those of a later run set themselves up.

    Args:
        worker: pickled to every process; may be a `SharedSetup`.
        num_gpus: those that pools share out; a worker sees the one it has a part of.
        modules: that workers import sooner or later.
    """

    def __init__(self, worker: Worker, num_gpus: int = 0, modules: Sequence[str] = ()) -> None:
        self._worker, self._num_gpus = bytes(ForkingPickler.dumps(worker)), num_gpus
        self._context = multiprocessing.get_context("forkserver")
        # under `python -m` the processes run the main module by its name, and Python warns where it is imported already
        main_spec = getattr(sys.modules["__main__"], "__spec__", None)
        imported = [name for name in modules if main_spec is None or name != main_spec.name]
        self._context.set_forkserver_preload(
            ["audiollm.fork_server", __name__, *imported, "pipelines.execution.fork_setup"]
        )
        self._numbers = count()
        self._gpu_share = 0.0
        self._processes: dict[int, tuple[BaseProcess, Connection]] = {}

    def start(self, pool: Pool) -> int:
        number = next(self._numbers)
        ours, theirs = self._context.Pipe()
        environment = {**os.environ, **ONE_THREAD, **self._gpu_of(pool)}
        process = self._context.Process(target=_serve_calls, args=(theirs, environment), daemon=True)
        with tempfile.NamedTemporaryFile() as file:
            file.write(self._worker)
            file.flush()
            with _environment({**ONE_THREAD, WORKER_FILE: file.name}), interrupts_held_back():
                process.start()
        theirs.close()
        self._processes[number] = (process, ours)
        with suppress(OSError):  # it died already: `wait` will find out
            ours.send_bytes(self._worker)
        return number

    def is_ready(self, worker: int) -> bool:
        return True

    def send(self, worker: int, step: str, items: Sequence[Any]) -> None:
        with suppress(OSError):  # it died: `wait` will find out
            self._processes[worker][1].send((step, items))

    def wait(self) -> list[WorkerReply]:
        by_connection = {connection: number for number, (_, connection) in self._processes.items()}
        return [self._receive(by_connection[ready]) for ready in wait(list(by_connection))]  # type: ignore[index]

    def close(self) -> None:
        for process, _ in self._processes.values():
            process.kill()
        for process, connection in self._processes.values():
            process.join()
            connection.close()
        self._processes = {}

    def _receive(self, number: int) -> WorkerReply:
        process, connection = self._processes[number]
        try:
            content = connection.recv()
        except (EOFError, OSError):
            process.join()
            connection.close()
            del self._processes[number]
            return WorkerReply(number, None, f"exit code {process.exitcode}")
        if isinstance(content, str):
            raise EngineError(content)
        return WorkerReply(number, content)

    def _gpu_of(self, pool: Pool) -> dict[str, str]:
        """The workers of GPU steps fill one GPU after the other with their shares."""
        if not pool.gpus or not self._num_gpus:
            return {}
        names = [name for name in os.environ.get(GPUS, "").split(",") if name]
        names = names or [str(number) for number in range(self._num_gpus)]
        device = int(self._gpu_share + 1e-6) % min(self._num_gpus, len(names))
        self._gpu_share += pool.gpus
        return {GPUS: names[device]}


def _serve_calls(connection: Connection, environment: dict[str, str]) -> None:
    """Run a worker process: answer calls until the connection ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.clear()  # of the process that it was forked from, which may have been there before this run
    os.environ.update(environment)
    end_with_parent()
    step = ""
    with suppress(EOFError, OSError):
        try:
            worker = worker_of(connection.recv_bytes())
            while True:
                step, items = connection.recv()
                connection.send(worker.process(step, items))
        except (EOFError, OSError):
            raise
        except Exception as error:
            connection.send(_cannot(step, error))


def _cannot(step: str, error: Exception) -> str:
    return f"the step {step} cannot be set up: {error_line(error)}" if step else error_line(error)


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Variables for what is started inside; libraries read them when they are first loaded."""
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
