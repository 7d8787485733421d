"""A worker that is set up before its processes are forked, so that they share what it has loaded.

The fork server of `local_pool` imports `fork_setup`, which does so; its environment names the file of a pickled worker.
"""

from __future__ import annotations

import os
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Protocol, runtime_checkable

from pipelines.execution.engine import Worker

WORKER_FILE = "AUDIOLLM_WORKER_FILE"
"""Environment variable with the path of a pickled worker, for the process that others are forked from."""

_ready: tuple[bytes, Worker] | None = None
"""The worker that is set up, with its pickled bytes."""


@runtime_checkable
class SharedSetup(Protocol):
    """Optional interface of a worker: a setup that its processes share."""

    def set_up_shared(self) -> None:
        """Load what forked processes may share: no threads, no open files, nothing on a GPU."""


def worker_of(content: bytes) -> Worker:
    """Return the worker of pickled bytes: the one that is set up if it has the same bytes, else a new one."""
    if _ready is not None and _ready[0] == content:
        return _ready[1]
    worker: Worker = ForkingPickler.loads(content)
    return worker


def set_up_worker() -> None:
    """Load the pickled worker that `WORKER_FILE` names and set it up; a failure leaves this to its processes."""
    global _ready
    path = os.environ.get(WORKER_FILE)
    if path is None:
        return
    try:
        content = Path(path).read_bytes()
        worker = ForkingPickler.loads(content)
        if isinstance(worker, SharedSetup):
            worker.set_up_shared()
    except Exception:  # the process that needs the worker tries again, and reports the error
        return
    _ready = content, worker
