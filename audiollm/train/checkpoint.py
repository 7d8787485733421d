"""Resumable training state in safetensors: weights, optimizers, averages and counters, whole or absent. No pickle.

A checkpoint folder holds `modules`, `optimizers` (keys `optimizer/parameter.entry`) and `ema` (where weights are
averaged), each as `NAME.safetensors` or, from N ranks, as `NAME-00001-of-0000N.safetensors`, and `state.json`.
Files hold whole tensors under the same names whatever the strategy and the number of ranks: a run goes on at any
other number. All ranks must see one file system.

It is written under a temporary name, brought to the disk (`fsync`) and renamed, so one that exists is complete; the
one before it stays as `NAME.old`. `state.json` has the size and the SHA-256 of every file, compared at every read.

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

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from audiollm.files import file_digest, sync_to_disk
from audiollm.runner import StageError
from audiollm.train.distributed import ALONE, Ranks

Readers = Mapping[str, Callable[[], Tensor]]
"""Name -> reads the whole tensor. On several ranks all must read the same ones in the same order."""


def save_checkpoint(
    folder: Path,
    parts: Mapping[str, Readers],
    state: Mapping[str, Any],
    ranks: Ranks = ALONE,
    keep_before: bool = True,
) -> None:
    """Write everything a run needs to go on, replacing an older checkpoint only when the new one is on the disk.

    Args:
        parts: what each file of the checkpoint holds; every rank writes an equal share of each.
        state: JSON values.
        keep_before: leave the checkpoint that is replaced in `NAME.old`.

    Raises:
        StageError: the disk is full, or cannot be written; what was saved before is as it was.
    """
    temporary, old = folder.with_name(folder.name + ".new"), _before(folder)
    if ranks.first:
        shutil.rmtree(temporary, ignore_errors=True)
        with _refusals(temporary):
            temporary.mkdir(parents=True)
    ranks.barrier()
    written, problem = {}, ""
    try:
        for name, readers in parts.items():
            if readers:
                path = temporary / _file_name(name, ranks)
                share = _own_share(readers, ranks)
                with _refusals(path):
                    save_file(share, path)
                    sync_to_disk(path)
                    written[path.name] = {"bytes": path.stat().st_size, "sha256": file_digest(path)}
    except StageError as error:
        problem = str(error)
    _raise_first(ranks.gather(problem), temporary, ranks)
    files = {name: entry for own in ranks.gather(written) for name, entry in own.items()}
    if ranks.first:
        try:
            with _refusals(temporary / "state.json"):
                (temporary / "state.json").write_text(json.dumps({**state, "files": files}))
                sync_to_disk(temporary / "state.json", temporary)
                shutil.rmtree(old, ignore_errors=True)
                if folder.exists():
                    os.replace(folder, old)
                os.replace(temporary, folder)
                sync_to_disk(folder.parent)
        except StageError as error:
            problem = str(error)
        if not keep_before:
            shutil.rmtree(old, ignore_errors=True)
    _raise_first(ranks.gather(problem), temporary, ranks)


def read_state(folder: Path, ranks: Ranks = ALONE, whole: bool = True) -> dict[str, Any] | None:
    """The `state` that was saved, or None where there is no checkpoint.

    Args:
        whole: compare the digests of all files; otherwise `state.json` alone is read.

    Raises:
        StageError: files are missing, cut short or changed since they were written.
    """
    if (
        ranks.first and not folder.exists() and _before(folder).exists()
    ):  # killed between two renames, or removed
        os.replace(_before(folder), folder)
    ranks.barrier()
    if not folder.exists():
        return None
    state = _read_state_file(folder)
    files = state.pop("files")
    own = sorted(files)[ranks.rank :: ranks.world] if whole else []
    damages = [
        f"{folder / name} is damaged: {wrong}"
        for name in own
        if (wrong := _damage(folder / name, files[name]))
    ]
    problems = [each for rank in ranks.gather(damages) for each in rank]
    if problems:
        raise StageError(problems[0], _remedy(folder))
    return state


@contextmanager
def open_part(folder: Path, name: str) -> Iterator[dict[str, Callable[[], Tensor]]]:
    """The tensors of one part, each read when it is asked for; none where the part was not saved."""
    with ExitStack() as stack:
        readers: dict[str, Callable[[], Tensor]] = {}
        for path in sorted([*folder.glob(f"{name}.safetensors"), *folder.glob(f"{name}-*-of-*.safetensors")]):
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except SafetensorError as error:  # one of before there were digests
                raise StageError(f"{path} is damaged: {error}", _remedy(folder)) from error
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
        value, before = figures[self.figure], read_state(self.folder, self.ranks, whole=False)
        sign = 1 if self.best_is == "lower" else -1
        if math.isfinite(value) and (before is None or sign * value < sign * before["value"]):
            state = {"step": step, "value": value, "figures": dict(figures)}
            save_checkpoint(self.folder, {"modules": modules}, state, self.ranks, keep_before=False)

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
    source = best if best.exists() else folder / "checkpoint"
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


def _before(folder: Path) -> Path:
    """Where the checkpoint before the last one is."""
    return folder.with_name(f"{folder.name}.old")


def _read_state_file(folder: Path) -> dict[str, Any]:
    path = folder / "state.json"
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(state, dict) or not isinstance(state.get("files"), dict):
            raise ValueError("not the state of a checkpoint")
    except FileNotFoundError:
        raise StageError(f"{path} is missing, and beside it is what was trained", _remedy(folder)) from None
    except ValueError as error:  # JSON and UTF-8 errors are of this kind
        raise StageError(f"{path} is damaged: {error}", _remedy(folder)) from error
    return state


def _damage(path: Path, entry: Any) -> str:
    """What is wrong with a file, or nothing. Checkpoints of before there were digests have its size alone."""
    size, digest = (entry["bytes"], entry["sha256"]) if isinstance(entry, dict) else (entry, None)
    if not path.exists():
        return f"missing, {size} bytes were written"
    if (found := path.stat().st_size) != size:
        return f"{found} bytes, {size} were written"
    if digest is not None and file_digest(path) != digest:
        return "its content is not what was written (SHA-256)"
    return ""


def _remedy(folder: Path) -> str:
    """How to go on without a damaged checkpoint."""
    before = _before(folder)
    if folder.name == "best":
        return f"restore it, or remove {folder}: the run then ends with the weights of its last step"
    try:
        step = _read_state_file(before)["step"] if before.exists() else None
    except (StageError, KeyError):
        step = None
    if step is None:
        return f"restore it, or remove {folder} to start from the beginning"
    return f"restore it, or remove {folder}: the same command then goes on from the checkpoint before, of step {step}"


@contextmanager
def _refusals(path: Path) -> Iterator[None]:
    """What the disk has against a write, in plain words."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise StageError(
            f"{path} cannot be written: {reason}",
            "make room or mend the disk; the checkpoint before is as it was, and the same command goes on from it",
        ) from error


def _raise_first(problems: list[str], temporary: Path, ranks: Ranks) -> None:
    """Raises: StageError: one of the ranks could not write; on all of them, and what was half written is removed."""
    if found := next(filter(None, problems), None):
        if ranks.first:
            shutil.rmtree(temporary, ignore_errors=True)
        message, _, remedy = found.partition("\n")
        raise StageError(message, remedy.strip())


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
