"""Models of streams behind names: their sessions translate while they hear."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from audiollm.interpret.live.live_model import LiveModel

T = TypeVar("T")


@dataclass
class ServedInterpreter:
    """A model that was trained on streams. Its sessions share the weights, and take turns chunk by chunk."""

    name: str
    live: LiveModel
    created: int
    """Unix time at which it was loaded."""
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "interpreter"))

    async def run(self, work: Callable[[], T]) -> T:
        """Do what calls the model, after what was asked before."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
