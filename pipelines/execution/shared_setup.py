"""A worker that is set up before its processes are forked, so that they share what it has loaded.

Imported by the process that `local_pool` forks workers from, with the file of a pickled worker in its environment.
"""

from __future__ import annotations

import os
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Protocol, runtime_checkable

from pipelines.execution.engine import Worker

WORKER_FILE = "AUDIOLLM_WORKER_FILE"
"""Names the file of a pickled worker for the process that others are forked from."""


@runtime_checkable
class SharedSetup(Protocol):
    """Optional interface of a worker: a setup that its processes share."""

    def set_up_shared(self) -> None:
        """Load what forked processes may share: no threads, no open files, nothing on a GPU."""


def worker_of(content: bytes) -> Worker:
    """The worker of these pickled bytes: the one that is set up, if it is of the same, else a new one."""
    if _READY is not None and _READY[0] == content:
        return _READY[1]
    worker: Worker = ForkingPickler.loads(content)
    return worker


def _set_up() -> tuple[bytes, Worker] | None:
    path = os.environ.get(WORKER_FILE)
    if path is None:
        return None
    try:
        content = Path(path).read_bytes()
        worker = ForkingPickler.loads(content)
        if isinstance(worker, SharedSetup):
            worker.set_up_shared()
    except Exception:  # the process that needs it will try again, and say what is wrong
        return None
    return content, worker


_READY = _set_up()
