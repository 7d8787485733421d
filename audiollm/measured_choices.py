"""Which of several ways to compute the same is the fastest on this machine: measured once, and kept.

A way is measured when it is first asked for, in milliseconds. The answer is kept in a file of the user's cache, by kind
of processor and version of PyTorch, and with every checkpoint: a training that goes on after a kill computes the same
bits. The ways give the same numbers up to rounding.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

MIN_GAIN = 1.1
"""How many times as fast as the plain way another has to be."""
REPEATS = 6
CPU_FACTS = Path("/proc/cpuinfo")
_CPU_KEYS = ("model name", "cpu family", "model", "stepping", "flags")
_INSTRUCTION_LIMITS = ("MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")

Ways = Mapping[str, Callable[[], Any]]
"""Name -> computes it on operands of the size in question. The first is the plain way."""


class MeasuredChoices:
    """The fastest way by key: as a run began, as an earlier process measured, or as measured now.

    Args:
        path: the file that keeps them; None: in the user's cache.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._chosen: dict[str, str] = {}
        self._guard = threading.RLock()

    @property
    def path(self) -> Path:
        """The file that keeps what was measured on this kind of machine."""
        if self._path is None:
            root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
            self._path = Path(root) / "audiollm" / f"fastest-{machine_digest()}.json"
        return self._path

    def choose(self, key: str, ways: Callable[[], Ways]) -> str:
        """The name of the fastest way.

        Args:
            key: what is computed, of which size, with how many threads.
            ways: prepares them, where they have to be measured.
        """
        name = self._chosen.get(key)
        if name is None:
            with self._guard:
                name = self._chosen.get(key) or self._keep(key, ways)
        return name

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, JSON values."""
        return {"machine": machine_digest(), "chosen": dict(sorted(self._chosen.items()))}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on as a run began; what was measured on another kind of machine says nothing here."""
        if state.get("machine") == machine_digest():
            with self._guard:
                self._chosen.update(state["chosen"])

    def _keep(self, key: str, ways: Callable[[], Ways]) -> str:
        """Take what another process has measured, or measure, and keep it for all.

        The file is not locked while something is measured, since that may ask for a choice itself.
        """
        name: str | None = None
        with suppress(OSError), _kept_choices(self.path) as kept:
            name = kept.get(key)
        if name is None:
            name = fastest_of(ways())
            with (
                suppress(OSError),
                _kept_choices(self.path) as kept,
            ):  # no place to write: each process for itself
                name = kept.setdefault(key, name)
        self._chosen[key] = name
        return name


CHOICES = MeasuredChoices()
"""The choices of this process."""


def fastest_of(ways: Ways) -> str:
    """The name of the fastest way; the plain one unless another takes `MIN_GAIN` times less.

    The least time of several runs in turns counts: others may have met a busy neighbour.
    """
    seconds = dict.fromkeys(ways, math.inf)
    with torch.inference_mode(False), torch.no_grad():
        for compute in ways.values():
            compute()
        for _ in range(REPEATS):
            for name, compute in ways.items():
                started = time.perf_counter()
                compute()
                seconds[name] = min(seconds[name], time.perf_counter() - started)
    plain, fastest = next(iter(ways)), min(seconds, key=seconds.__getitem__)
    return fastest if seconds[fastest] * MIN_GAIN < seconds[plain] else plain


@cache
def machine_digest() -> str:
    """Names this kind of processor, the version of PyTorch, and what limits the instructions of its libraries."""
    cpu = CPU_FACTS.read_text().split("\n\n")[0] if CPU_FACTS.is_file() else ""
    facts = [line for line in cpu.splitlines() if line.split(":")[0].strip() in _CPU_KEYS]
    facts += [torch.__version__, *(f"{name}={os.environ.get(name)}" for name in _INSTRUCTION_LIMITS)]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


@contextmanager
def _kept_choices(path: Path) -> Iterator[dict[str, str]]:
    """What a file keeps, while no other process changes it; what the block adds is written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        kept: dict[str, str] = {}
        with suppress(ValueError, TypeError):  # cut by a full disk, or not ours: measured again
            kept.update(json.loads(file.read() or "{}"))
        before = dict(kept)
        yield kept
        if kept != before:
            file.seek(0)
            file.truncate()
            json.dump(kept, file, indent=0, sort_keys=True)
