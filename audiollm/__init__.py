"""audiollm: the open training stack for audio LLMs."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

# Threads of a parallel region that wait for the others sleep, after spinning for some 20 microseconds: waking a thread
# takes longer than the next region of a small model is away; those that spin on take the core of the one that they wait
# for wherever anything else is at work (benchmarks/busy_neighbour.py). Read when torch is loaded; processes inherit it.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ["OMP_WAIT_POLICY"] = "passive"
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

__version__ = "0.1.0"

_PUBLIC = {
    "DualFFN": "audiollm.models.dual_ffn",
    "Generator": "audiollm.generation.speaking.generator",
    "load_recipe": "audiollm.recipe.stages",
    "run_recipe": "audiollm.recipe.runner",
}
__all__ = ["DualFFN", "Generator", "__version__", "load_recipe", "run_recipe"]


def __getattr__(name: str) -> Any:
    """Loaded at first use, so that `audiollm --help` does not wait for torch."""
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'audiollm' has no attribute {name!r}")
