"""Resumable training state in safetensors: weights, optimizers, averages and counters, whole or absent. No pickle.

A checkpoint folder holds `modules`, `optimizers` (keys `optimizer/parameter.entry`) and `ema` (where weights are
averaged), each as `NAME.safetensors` or, from N ranks, as `NAME-00001-of-0000N.safetensors`, and `state.json`.
All ranks must see one file system.

Each rank writes the tensors, or the pieces of tensors, that it holds: saving sends no tensor between ranks. A tensor
that every rank holds whole (one process, DDP, buffers) is written by one of them. `layout.py` describes how pieces are
stored. Whoever reads a checkpoint gets whole tensors under the same names, whatever the strategy and the number of
ranks: a run can be resumed with any other. Checkpoints of earlier versions hold whole tensors alone.

A checkpoint is written under a temporary name, flushed to the disk (fsync) and renamed, so one that exists is complete.
The previous one stays as `NAME.before`, which a run takes if `NAME` does not exist. `state.json` has the size and the
SHA-256 of every file and of itself, which are compared whenever the checkpoint is read; checkpoints of earlier versions
have sizes alone.

Module state that must survive from step to step has to be a parameter or a persistent buffer (EMA codebooks, counters,
flags such as "initialised"): attributes of another kind, and buffers with `persistent=False`, are not saved.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import save_file
from torch import Tensor

from audiollm.errors import StageError
from audiollm.files.atomic import file_digest, sync
from audiollm.files.disk_errors import disk_error
from audiollm.files.tensors import open_tensors
from audiollm.recipe.ranks import ALONE, Ranks
from audiollm.train.loop.layout import IncompleteTensor, layout_metadata, tensor_readers
from audiollm.train.parallel.pieces import Held, Piece

Readers = Mapping[str, Callable[[], Held]]
"""Name -> reads what this rank holds of the tensor. All ranks must give the same names in the same order."""
STATE = "state.json"
OWN_DIGEST = "state_sha256"
"""Key in `state.json` of the SHA-256 of all else in it."""


def save_checkpoint(
    folder: Path,
    parts: Mapping[str, Readers],
    state: Mapping[str, Any],
    ranks: Ranks = ALONE,
    keep_before: bool = True,
) -> None:
    """Write everything a run needs to go on; the checkpoints before it stay until this one is on the disk.

    Args:
        parts: part name -> its tensors; each rank writes its pieces, and every N-th of the whole tensors.
        state: JSON values.
        keep_before: the checkpoint before this one stays for good as `NAME.before`.

    Raises:
        StageError: a rank could not write its share. All ranks raise it.
    """
    temporary, (_, before, oldest) = folder.with_name(folder.name + ".new"), _generations(folder)
    if ranks.first:
        _close_gaps(folder)
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(oldest, ignore_errors=True)
    with _all_or_none(temporary, ranks) as attempt:
        if ranks.first:
            attempt(partial(temporary.mkdir, parents=True))
    file_digests: dict[str, tuple[int, str]] = {}
    with _all_or_none(temporary, ranks) as attempt:
        for name, readers in parts.items():
            if readers:
                tensors, pieces = _read_rank_share(readers, ranks)
                path = temporary / _name_part_file(name, ranks)
                attempt(partial(_write_share, tensors, pieces, path, file_digests))
    everything = {name: facts for rows in ranks.gather(file_digests) for name, facts in rows.items()}
    with _all_or_none(temporary, ranks) as attempt:
        if ranks.first:
            attempt(partial(_write_state, temporary, state, everything))
    if ranks.first:
        if folder.exists():
            if before.exists():
                os.replace(before, oldest)
            os.replace(folder, before)
        os.replace(temporary, folder)
        sync(folder.parent)
        for path in (oldest,) if keep_before else (oldest, before):
            shutil.rmtree(path, ignore_errors=True)
    ranks.barrier()


def read_state(folder: Path, ranks: Ranks = ALONE, check_files: bool = True) -> dict[str, Any] | None:
    """The `state` that was saved, or None where there is no checkpoint.

    Where a kill, or a person, left none under this name, the one before it takes its place.

    Args:
        check_files: compare the content of every file with its digest; needed before any of them is read.

    Raises:
        StageError: a file is missing or is not what was written. All ranks raise it.
    """
    if ranks.first:
        _close_gaps(folder)
    if not ranks.of_first(folder.exists()):
        return None
    try:
        record, own_damage = _read_checkpoint_record(folder), ""
    except _Damage as damage:
        record, own_damage = {}, str(damage)
    if check_files and not own_damage:
        own_damage = _first_damaged(folder, record, ranks)
    damages = [damage for damage in ranks.gather(own_damage) if damage]
    if damages:
        raise StageError(
            damages[0], ranks.of_first(_suggest_checkpoint_remedy(folder) if ranks.first else "")
        )
    return {key: value for key, value in record.items() if key not in ("files", "sha256", OWN_DIGEST)}


@contextmanager
def open_part(folder: Path, name: str) -> Iterator[dict[str, Callable[[], Tensor]]]:
    """Name -> reads the whole tensor, for each tensor of one part; empty if the part was not saved.

    Raises:
        StageError: the pieces of a tensor, over all files, do not make it up.
    """
    with ExitStack() as stack:
        paths = sorted([*folder.glob(f"{name}.safetensors"), *folder.glob(f"{name}-*-of-*.safetensors")])
        files = {path: stack.enter_context(open_tensors(path)) for path in paths}
        try:
            readers = tensor_readers(files)
        except IncompleteTensor as error:
            raise StageError(str(error), _suggest_checkpoint_remedy(folder)) from None
        yield readers


def load_part(
    folder: Path, part_name: str, tensors: Mapping[str, Tensor], write: Callable[[Tensor, Tensor], None]
) -> None:
    """Load each saved tensor of one part into the tensor of the same name; one whole tensor at a time is in memory.

    Args:
        write: copies its second argument, the saved tensor, into its first. All ranks call it in the same order.

    Raises:
        StageError: the names or the shapes are those of another model, or the pieces of a tensor do not make it up.
    """
    remedy = f"go on with the settings and inputs it was begun with, or remove {folder} to start from the beginning"
    with open_part(folder, part_name) as readers:
        if wrong := sorted(set(readers) ^ set(tensors)):
            some = ", ".join(wrong[:5])
            raise StageError(f"{folder} belongs to another model: {some} is in one of them alone", remedy)
        for name, tensor in tensors.items():
            value = readers[name]()
            try:
                write(tensor, value)
            except RuntimeError as error:
                if value.shape == tensor.shape:
                    raise
                sizes = f"{name} is {list(value.shape)} there, {list(tensor.shape)} in this one"
                raise StageError(f"{folder} belongs to another model: {sizes}", remedy) from error


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
        value = figures[self.figure]
        before = read_state(self.folder, self.ranks, check_files=False)
        sign = 1 if self.best_is == "lower" else -1
        if math.isfinite(value) and (before is None or sign * value < sign * before["value"]):
            state = {"step": step, "value": value, "figures": dict(figures)}
            save_checkpoint(self.folder, {"modules": modules}, state, self.ranks, keep_before=False)

    def settle(self) -> None:
        """Prepare for a resumed run: check what is kept, and remove what a kill left beside it."""
        self.state()
        if self.ranks.first:
            for path in _generations(self.folder)[1:]:
                shutil.rmtree(path, ignore_errors=True)

    def state(self) -> dict[str, Any] | None:
        """`step`, `value` and `figures` of the weights that are kept, if any are.

        Raises:
            StageError: they are damaged.
        """
        return read_state(self.folder, self.ranks)


def trained_weights(folder: Path, module: str) -> dict[str, Tensor]:
    """The weights of one module that a run ended with, by the names of its `state_dict`.

    No process group is needed, whatever the strategy was: pieces of tensors are joined.

    Args:
        folder: the stage's folder. The best checkpoint counts if there is one, else the last, averaged weights
            in place of the others where there are any.
        module: its name in the task's `modules`.

    Raises:
        StageError: no checkpoint, a damaged one, or none of that module.
    """
    sources = [folder / name for name in ("best", "checkpoint")]
    source = next((path for path in sources if read_state(path) is not None), None)
    if source is None:
        raise StageError(f"{folder} has no checkpoint", "give the folder of a training stage")
    prefix = f"{module}."
    weights: dict[str, Tensor] = {}
    for part_name in ("modules", "ema"):
        with open_part(source, part_name) as readers:
            weights |= {k.removeprefix(prefix): read() for k, read in readers.items() if k.startswith(prefix)}
    if not weights:
        raise StageError(f"{source} has no module {module!r}", "give the name of one that was trained")
    return weights


class _Damage(Exception):
    """A damaged file of a checkpoint; the message names it and says what is wrong."""


def _generations(folder: Path) -> tuple[Path, Path, Path]:
    """A checkpoint, the one before it, and the one before that, which is there only while a new one is put in place."""
    return folder, folder.with_name(folder.name + ".before"), folder.with_name(folder.name + ".old")


def _close_gaps(folder: Path) -> None:
    """After a kill between two renames: the checkpoints that are there move up, in their order."""
    names = _generations(folder)
    for checkpoint, name in zip([path for path in names if path.exists()], names, strict=False):
        if checkpoint != name:
            os.replace(checkpoint, name)


@contextmanager
def _all_or_none(temporary: Path, ranks: Ranks) -> Iterator[Callable[[Callable[[], Any]], None]]:
    """Make the attempts of the block succeed on every rank, or raise the first error of a disk on all of them.

    After a failed attempt the block goes on, so that ranks still meet where tensors are gathered.
    """
    failures: list[str] = []

    def attempt(action: Callable[[], Any]) -> None:
        if failures:
            return
        try:
            action()
        except Exception as error:
            message = disk_error(error, temporary.parent)
            if message is None:
                raise
            failures.append("\n  ".join(message))

    yield attempt
    failed = [text for rows in ranks.gather(failures) for text in rows]
    if failed:
        if ranks.first:
            shutil.rmtree(temporary, ignore_errors=True)
        message, _, remedy = failed[0].partition("\n  ")
        stays = "the one before it stays; " if temporary.with_suffix("").exists() else ""
        raise StageError(f"the checkpoint could not be saved: {message}", stays + remedy)


def _write_share(
    tensors: dict[str, Tensor],
    pieces: Mapping[str, Piece],
    path: Path,
    file_digests: dict[str, tuple[int, str]],
) -> None:
    """Save a file, wait until it is on the disk, and note its size and digest in `file_digests`."""
    save_file(tensors, path, layout_metadata(pieces))
    sync(path)
    file_digests[path.name] = path.stat().st_size, file_digest(path)


def _write_state(folder: Path, state: Mapping[str, Any], files: Mapping[str, tuple[int, str]]) -> None:
    sizes = {name: files[name][0] for name in sorted(files)}
    digests = {name: files[name][1] for name in sizes}
    record = json.loads(json.dumps({**state, "files": sizes, "sha256": digests}))  # as it will be read
    (folder / STATE).write_text(json.dumps({**record, OWN_DIGEST: _hash_record(record)}), encoding="utf-8")
    sync(folder / STATE)
    sync(folder)


def _hash_record(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _read_checkpoint_record(folder: Path) -> dict[str, Any]:
    """Raises: _Damage: `state.json` is not what was written."""
    path = folder / STATE
    try:
        record = json.loads(path.read_bytes().decode("utf-8"))
    except FileNotFoundError:
        raise _Damage(f"{path} is missing: the checkpoint beside it is not whole") from None
    except (OSError, ValueError, RecursionError) as error:
        reason = f"not JSON ({error})" if path.stat().st_size else "it is empty"
        raise _Damage(f"{path} is damaged: {reason}") from None
    if not isinstance(record, dict) or not isinstance(record.get("files"), dict):
        raise _Damage(f"{path} is damaged: it names no files")
    before_digests = "sha256" not in record and OWN_DIGEST not in record
    content = {key: value for key, value in record.items() if key != OWN_DIGEST}
    if not before_digests and record.get(OWN_DIGEST) != _hash_record(content):
        raise _Damage(f"{path} is damaged: its SHA-256 is not the one that was written")
    return record


def _first_damaged(folder: Path, record: Mapping[str, Any], ranks: Ranks = ALONE) -> str:
    """Describe the first damaged file of this rank's share; empty where all are whole."""
    digests = record.get("sha256", {})
    for name in list(record["files"])[ranks.rank :: ranks.world]:
        path, size = folder / name, record["files"][name]
        stored_size = path.stat().st_size if path.is_file() else None
        if stored_size != size:
            what = "missing" if stored_size is None else f"{stored_size} bytes"
            return f"{path} is damaged: {what}, {size} bytes were written"
        try:
            if name in digests and file_digest(path) != digests[name]:
                return f"{path} is damaged: its SHA-256 is not the one that was written"
        except OSError as error:
            return f"{path} is damaged: it cannot be read ({error.strerror})"
    return ""


def _suggest_checkpoint_remedy(folder: Path) -> str:
    """How a run goes on whose checkpoint is damaged: from the one before it, where that is whole."""
    before, remove = _generations(folder)[1], f"rm -r {shlex.quote(str(folder))}"
    if folder.name == "best":
        return f"restore it, or remove it ({remove}): the best of the evaluations to come is kept then"
    if not before.exists():
        return f"restore it, or remove {folder} to start from the beginning ({remove})"
    try:
        record = _read_checkpoint_record(before)
        damage = _first_damaged(before, record)
    except _Damage as error:
        damage = str(error)
    if damage:
        both = f"{remove} {shlex.quote(str(before))}"
        return f"{damage}\n  restore one of them, or remove {folder} and {before} to start from the beginning ({both})"
    where = f"step {record['step']}" if "step" in record else before
    return (
        f"restore it, or remove {folder} to go on from the checkpoint before it, which is whole ({where}): "
        f"{remove}\n  and then the same command again"
    )


def _read_rank_share(readers: Readers, ranks: Ranks) -> tuple[dict[str, Tensor], dict[str, Piece]]:
    """Return the tensors that this rank writes, on the CPU, and which of them are pieces.

    Of those there already only what shares its memory with another one is copied, which no file may hold.

    It writes all of its pieces, also the empty ones (so that each file names every tensor that is in pieces), and every
    N-th of the tensors that all ranks hold.
    """
    tensors: dict[str, Tensor] = {}
    pieces: dict[str, Piece] = {}
    storages: set[int] = set()
    for index, (name, read) in enumerate(readers.items()):
        held = read()
        if isinstance(held, Piece):
            pieces[name] = held
            tensors[name] = _to_cpu(held.values, storages)
        elif index % ranks.world == ranks.rank:
            tensors[name] = _to_cpu(held, storages)
    return tensors, pieces


def _to_cpu(tensor: Tensor, storages: set[int]) -> Tensor:
    """The tensor on the CPU; copied where its memory is one of the storages, to which it is added."""
    values = tensor.detach().cpu().contiguous()
    if values.untyped_storage().data_ptr() in storages:
        values = values.clone()
    storages.add(values.untyped_storage().data_ptr())
    return values


def _name_part_file(name: str, ranks: Ranks) -> str:
    if ranks.world == 1:
        return f"{name}.safetensors"
    return f"{name}-{ranks.rank + 1:05d}-of-{ranks.world:05d}.safetensors"
