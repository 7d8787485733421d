"""A process with a Python of its own that answers calls over a connection."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Mapping
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from audiollm.errors import ConfigError, StageError
from audiollm.processes import interrupts_held_back

MAX_LOG_BYTES = 4_000
MAX_LOG_LINES = 12
"""Last lines of what the process printed that an error quotes."""
DEATH_REMEDY = "free memory, or lower rollouts.memory or rollouts.max_length; the same command goes on"


class ServerProcess:
    """A script that gets a connection as a file descriptor, and answers `(call, arguments)` with `(kind, value)`.

    Args:
        name: for errors.
        python: that runs the script.
        environment: variables beside those of this process.

    Raises:
        ConfigError: the Python cannot be started.
    """

    def __init__(self, name: str, python: str, script: Path, environment: Mapping[str, str]) -> None:
        self._name = name
        self._connection, child_connection = Pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  open as long as the process
        descriptor = child_connection.fileno()
        try:
            with interrupts_held_back(by_multiprocessing=False):
                self._process = subprocess.Popen(
                    [python, str(script), str(descriptor)],
                    pass_fds=[descriptor],
                    stdin=subprocess.DEVNULL,
                    stdout=self._log,
                    stderr=self._log,
                    env={**os.environ, **environment},
                )
        except OSError as error:
            raise ConfigError(f"{name}: cannot be started: {error}", python, "give another python") from None
        finally:
            child_connection.close()

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._process.pid

    def ask(self, call: str, **arguments: Any) -> Any:
        """Return the result of a call.

        Raises:
            StageError: the call failed, or the process ended.
        """
        with contextlib.suppress(OSError):  # it ended: `recv` finds out
            self._connection.send((call, arguments))
        try:
            kind, value = self._connection.recv()
        except (EOFError, OSError):
            code = self._process.wait()
            raise StageError(
                f"{self._name}: its process ended (exit code {code}) in the call {call}{self._last_lines()}",
                DEATH_REMEDY,
            ) from None
        if kind == "error":
            raise StageError(f"{self._name}: {call}: {value}{self._last_lines()}")
        return value

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._connection.close()
        self._log.close()

    def _last_lines(self) -> str:
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - MAX_LOG_BYTES))
        lines = self._log.read().decode(errors="replace").splitlines()[-MAX_LOG_LINES:]
        return "".join(f"\n  | {line}" for line in lines)
