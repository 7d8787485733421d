"""Resumable training state in safetensors: weights, optimizers, averages and counters, whole or absent. No pickle.

A checkpoint folder holds `modules`, `optimizers` (keys `optimizer/parameter.entry`) and `ema` (where weights are
averaged), each as `NAME.safetensors` or, from N ranks, as `NAME-00001-of-0000N.safetensors`, and `state.json`.
Files hold whole tensors under the same names whatever the strategy and the number of ranks: a run goes on at any
other number. All ranks must see one file system.

It is written under a temporary name and renamed, so one that exists is complete.

What a module remembers from step to step must be a parameter or a persistent buffer (EMA codebooks, counters,
flags such as "initialised"): attributes of another kind, and buffers with `persistent=False`, are not saved.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from audiollm.runner import StageError
from audiollm.train.distributed import ALONE, Ranks

Readers = Mapping[str, Callable[[], Tensor]]
"""Name -> reads the whole tensor. On several ranks all must read the same ones in the same order."""


def save_checkpoint(
    folder: Path, parts: Mapping[str, Readers], state: Mapping[str, Any], ranks: Ranks = ALONE
) -> None:
    """Write everything a run needs to go on, replacing an older checkpoint only when the new one is whole.

    Args:
        parts: what each file of the checkpoint holds; every rank writes an equal share of each.
        state: JSON values.
    """
    temporary, old = folder.with_name(folder.name + ".new"), folder.with_name(folder.name + ".old")
    if ranks.first:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    ranks.barrier()
    for name, readers in parts.items():
        if readers:
            save_file(_own_share(readers, ranks), temporary / _file_name(name, ranks))
    ranks.barrier()
    if ranks.first:
        sizes = {path.name: path.stat().st_size for path in sorted(temporary.iterdir())}
        (temporary / "state.json").write_text(json.dumps({**state, "files": sizes}))
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            os.replace(folder, old)
        os.replace(temporary, folder)
        shutil.rmtree(old, ignore_errors=True)
    ranks.barrier()


def read_state(folder: Path, ranks: Ranks = ALONE) -> dict[str, Any] | None:
    """The `state` that was saved, or None where there is no checkpoint.

    Raises:
        StageError: files are missing or cut short (a disk that was full, a copy that was not finished).
    """
    old = folder.with_name(folder.name + ".old")
    if ranks.first and not folder.exists() and old.exists():  # killed between the two renames
        os.replace(old, folder)
    ranks.barrier()
    if not (folder / "state.json").exists():
        return None
    state: dict[str, Any] = json.loads((folder / "state.json").read_text())
    for name, size in state.pop("files").items():
        path = folder / name
        if not path.exists() or path.stat().st_size != size:
            found = f"{path.stat().st_size} bytes" if path.exists() else "missing"
            raise StageError(
                f"{path} is damaged: {found}, {size} bytes were written",
                f"restore it, or remove {folder} to start from the beginning",
            )
    return state


@contextmanager
def open_part(folder: Path, name: str) -> Iterator[dict[str, Callable[[], Tensor]]]:
    """The tensors of one part, each read when it is asked for; none where the part was not saved."""
    with ExitStack() as stack:
        readers: dict[str, Callable[[], Tensor]] = {}
        for path in sorted([*folder.glob(f"{name}.safetensors"), *folder.glob(f"{name}-*-of-*.safetensors")]):
            file = stack.enter_context(safe_open(path, framework="pt"))
            readers |= {key: partial(file.get_tensor, key) for key in file.keys()}  # noqa: SIM118
        yield readers


@dataclass(frozen=True)
class Best:
    """The weights of the best evaluation of a run, and its figures. All ranks call each of these."""

    folder: Path
    figure: str
    """Which one tells."""
    best_is: Literal["lower", "higher"]
    ranks: Ranks = ALONE

    def check(self, figures: Mapping[str, float]) -> None:
        """Raises: StageError: the figure is not among those of an evaluation."""
        if self.figure not in figures:
            raise StageError(
                f"best is {self.figure!r}; an evaluation gives {sorted(figures) or 'nothing'}",
                "name one of these" if figures else "hold samples out, or leave it out",
                2,
            )

    def keep(self, figures: Mapping[str, float], step: int, modules: Readers) -> None:
        """Save the weights just evaluated, if none before were as good."""
        self.check(figures)
        value, before = figures[self.figure], read_state(self.folder, self.ranks)
        sign = 1 if self.best_is == "lower" else -1
        if math.isfinite(value) and (before is None or sign * value < sign * before["value"]):
            state = {"step": step, "value": value, "figures": dict(figures)}
            save_checkpoint(self.folder, {"modules": modules}, state, self.ranks)

    def figures(self) -> dict[str, float] | None:
        """Those of the weights that are kept, if any are."""
        state = read_state(self.folder, self.ranks)
        return None if state is None else dict(state["figures"])


def trained_weights(folder: Path, module: str) -> dict[str, Tensor]:
    """The weights of one module that a run ended with, by the names of its `state_dict`.

    No process group is needed, whatever the strategy was: the tensors in checkpoints are whole.

    Args:
        folder: the stage's folder. The best checkpoint counts if there is one, else the last, averaged weights
            in place of the others where there are any.
        module: its name in the task's `modules`.

    Raises:
        StageError: no checkpoint, a damaged one, or none of that module.
    """
    best = folder / "best"
    source = best if (best / "state.json").exists() else folder / "checkpoint"
    if read_state(source) is None:
        raise StageError(f"{folder} has no checkpoint", "give the folder of a training stage")
    prefix = f"{module}."
    weights: dict[str, Tensor] = {}
    for part in ("modules", "ema"):
        with open_part(source, part) as readers:
            weights |= {k.removeprefix(prefix): read() for k, read in readers.items() if k.startswith(prefix)}
    if not weights:
        raise StageError(f"{source} has no module {module!r}", "give the name of one that was trained")
    return weights


def _own_share(readers: Readers, ranks: Ranks) -> dict[str, Tensor]:
    """All take part in reading each tensor; every rank keeps every N-th."""
    kept = {}
    for index, (name, read) in enumerate(readers.items()):
        tensor = read()
        if index % ranks.world == ranks.rank:
            kept[name] = tensor.detach().cpu().clone().contiguous()
    return kept


def _file_name(name: str, ranks: Ranks) -> str:
    if ranks.world == 1:
        return f"{name}.safetensors"
    return f"{name}-{ranks.rank + 1:05d}-of-{ranks.world:05d}.safetensors"
