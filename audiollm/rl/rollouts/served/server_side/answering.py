"""Answers the calls of a training over a connection. Imports no audiollm."""

from __future__ import annotations

import ctypes
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

CALLS = ("open", "begin_weights", "load_bucket", "end_weights", "sample")
_PR_SET_PDEATHSIG = 1


def answer_calls(server: Any, descriptor: int) -> None:
    """Answer calls until the training ends.

    Args:
        server: has a method of each name in `CALLS`.
        descriptor: of the connection.
    """
    if sys.platform == "linux":  # no GPU stays taken when the training is killed
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    connection = Connection(descriptor)
    while True:
        try:
            call, arguments = connection.recv()
        except EOFError:
            return
        try:
            assert call in CALLS, call
            reply: tuple[str, Any] = "result", getattr(server, call)(**arguments)
        except Exception as error:
            reply = "error", f"{type(error).__name__}: {error}"
        connection.send(reply)
