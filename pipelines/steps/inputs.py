"""Inputs of a pipeline: folders, files, globs, lists, tars and addresses; all become local files with digests."""

from __future__ import annotations

import glob
import itertools
import math
import os
import re
import shutil
import tarfile
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from audiollm.audio.discovery import find_audio
from audiollm.files.atomic import atomic_path, file_digest, is_unicode
from audiollm.files.set_aside import NAME_IS_NOT_UTF8, UNREADABLE, Row, set_aside_row
from audiollm.files.spelled_paths import as_spelled
from pipelines.execution.ledger import Ledger, Outcome

MANIFESTS = (".jsonl", ".ndjson", ".csv", ".tsv")
TARS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
_DIGEST_THREADS, _DIGEST_FILES = 4, 1000
_MAX_MEMBER_BYTES = 1 << 36
"""Largest plausible size of an archive's member; a header with a larger one is damaged."""


class InputError(ValueError):
    """An input that is missing or cannot be read at all."""


class FileList(NamedTuple):
    """The files that a list names."""

    rows: Sequence[tuple[str, Any]]
    """Paths as they are written, each with the facts that the list gives about it (None: nothing)."""
    notes: Sequence[str] = ()
    """Facts about the list itself, for the person: the columns read, a guessed encoding."""


@dataclass(frozen=True)
class InputForm:
    """The files that a pipeline takes.

    Args:
        stage: its name, for rows of `set_aside.jsonl`.
        accepts: whether a file is one of them, by its name and first bytes; never raises.
        read_list: reads a list, whose paths are relative to its folder.
    """

    stage: str
    accepts: Callable[[str | Path], bool]
    read_list: Callable[[Path], FileList]


@dataclass(frozen=True)
class InputFile:
    """A file that the pipeline takes. `name` says where it comes from, with forward slashes; `path` is absolute."""

    name: str
    path: str
    folder: str = ""
    """The first folder below the input, or in the archive, that the file is in, else the archive's name; of a path in a
    list that leads elsewhere, the folder of the file. With several inputs it begins with the number and the name of the
    input."""


@dataclass
class Inputs:
    """Files that the inputs hold."""

    form: InputForm
    files: list[InputFile] = field(default_factory=list)
    num_other_files: int = 0
    """Files that the pipeline does not take."""
    rejected: list[Row] = field(default_factory=list)
    """Members and addresses that could not be unpacked or fetched."""
    root: Path | None = None
    """Folder that names are relative to; None: there is no single one."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Facts that lists tell about their files, by name."""
    notes: list[str] = field(default_factory=list)
    """Facts about the lists themselves."""
    max_unpacked_gb: float = math.inf
    """Limit, in GB, to the unpacked size of all archives together."""
    unpacked_bytes: int = 0


def is_address(text: str) -> bool:
    """Whether it is a URL of fsspec (`s3://`, `https://`, `hf://` ...)."""
    return "://" in text


def collect(
    inputs: Sequence[str],
    fetched: Path,
    on_fetched: Callable[[str], None],
    form: InputForm,
    max_unpacked_gb: float = math.inf,
) -> Inputs:
    """Collect all files that a pipeline takes, each once, in the order of the inputs.

    Args:
        inputs: folders, files, globs, lists, tars, addresses; the files of a
            tar or an address are copied below `fetched`.
        on_fetched: called with the name of each that was copied.
        max_unpacked_gb: archives are unpacked up to so much in all; members beyond it are rejected. A small
            compressed archive can hold any amount.

    Raises:
        InputError: one of them is not there, or cannot be read.
        ValueError: a list that is malformed.
    """
    collected = Inputs(form, max_unpacked_gb=max_unpacked_gb)
    several = len(inputs) > 1
    if not several and not is_address(inputs[0]) and not is_tar(inputs[0]):
        only = Path(inputs[0])
        collected.root = only if only.is_dir() else only.parent if only.is_file() else None
    names_by_path: dict[str, str] = {}
    names: set[str] = set()
    for index, text in enumerate(inputs):
        prefix = f"{index}-{_shorten_for_path(text)}/" if several else ""
        for name, path, folder in _files_of(text, fetched, collected, on_fetched):
            facts = collected.facts.pop(name, None)
            if path not in names_by_path:
                names_by_path[path] = _find_free_name(prefix + name, names)
                names.add(names_by_path[path])
                _sort_in(collected, InputFile(names_by_path[path], path, (prefix + folder).rstrip("/")))
            if facts is not None:
                collected.facts.setdefault(names_by_path[path], facts)
    return collected


def digests(
    files: Sequence[InputFile], ledger: Ledger, on_done: Callable[[int], None], stage: str
) -> tuple[dict[str, str], list[Row]]:
    """SHA-256 of every file's content by its path, and those that cannot be read. A file of the same size and time as
    before is not read again."""
    result: dict[str, str] = {}
    unread: list[Row] = []
    with ThreadPoolExecutor(_DIGEST_THREADS) as threads:
        for start in range(0, len(files), _DIGEST_FILES):
            batch = files[start : start + _DIGEST_FILES]
            keys = [_file_key(item.path) for item in batch]
            cached = [None if key is None else ledger.get(key) for key in keys]
            fresh = threads.map(
                _hash_file_content,
                [item.path for item, old in zip(batch, cached, strict=True) if old is None],
            )
            for item, key, old in zip(batch, keys, cached, strict=True):
                outcome = next(fresh) if old is None else old
                if outcome.value is None:
                    reason = outcome.error or ""
                    unread.append(set_aside_row(stage, item.path, UNREADABLE, reason))
                    continue
                if key is not None and old is None:
                    ledger.put(key, "digest", outcome)
                result[item.path] = outcome.value["digest"]
            on_done(start + len(batch))
    return result, unread


def _file_key(path: str) -> str | None:
    """Key of a file in its present state; None where it is gone."""
    try:
        stat = Path(path).stat()
    except OSError:
        return None
    return sha256(f"digest\0{path}\0{stat.st_size}\0{stat.st_mtime_ns}".encode()).hexdigest()


def _hash_file_content(path: str) -> Outcome:
    try:
        return Outcome({"digest": file_digest(Path(path))})
    except OSError as error:
        return Outcome(error=error.strerror or str(error))


def absolute(path: Path) -> str:
    """Absolute and without `..`, but with links as they are, so that no two files become one."""
    return os.path.normpath(path.absolute())


def _files_of(
    text: str, fetched: Path, collected: Inputs, on_fetched: Callable[[str], None]
) -> Iterator[tuple[str, str, str]]:
    """Name, absolute path, and folder below the input of every file of an input."""
    if is_address(text):
        yield from _download(text, fetched, collected, on_fetched)
    elif is_tar(text) and Path(text).is_file():
        yield from _unpack_tar(Path(text), fetched, collected, on_fetched)
    elif Path(text).is_dir():
        audio, other_paths = (
            [p for p in paths if not _is_output(p, text, fetched)] for paths in find_audio(text)
        )
        # a link among the others leads out of the folder, or nowhere
        more = [path for path in other_paths if not path.is_symlink() and collected.form.accepts(path)]
        collected.num_other_files += len(other_paths) - len(more)
        for file in sorted([*audio, *more]):
            name = file.relative_to(text).as_posix()
            yield name, absolute(file), _first_folder(name)
    elif text.lower().endswith(MANIFESTS) and Path(text).is_file():
        yield from _read_listed_files(Path(text), collected)
    elif Path(text).is_file():
        yield Path(text).name, absolute(Path(text)), ""
    else:
        matched = sorted(path for path in glob.glob(text, recursive=True) if Path(path).is_file())
        if not matched:
            raise InputError(f"{text}: no such file or folder, and no file that it matches")
        root = _fixed_part(text)
        for path in matched:
            if is_tar(path):
                yield from _unpack_tar(Path(path), fetched, collected, on_fetched)
            else:
                name = Path(path).relative_to(root).as_posix()
                yield name, absolute(Path(path)), _first_folder(name)


def _is_output(path: Path, folder: str, fetched: Path) -> bool:
    """Whether a file of a folder is what the pipeline writes, whose output lies within that folder."""
    output = absolute(fetched.parent)
    return output.startswith(absolute(Path(folder)) + os.sep) and absolute(path).startswith(output + os.sep)


def _find_free_name(name: str, names: Collection[str]) -> str:
    """A name that none has yet: a tar may hold two members of one name, and a glob find two tars of one."""
    counted = (f"{name} ({number})" for number in itertools.count(2))
    return next(candidate for candidate in itertools.chain([name], counted) if candidate not in names)


def _sort_in(collected: Inputs, item: InputFile) -> None:
    if not is_unicode(item.name) or not is_unicode(item.path):
        place = os.fsencode(item.path).decode("utf-8", "backslashreplace")
        collected.rejected.append(set_aside_row(collected.form.stage, place, UNREADABLE, NAME_IS_NOT_UTF8))
    elif collected.form.accepts(item.path):
        collected.files.append(item)
    else:
        collected.num_other_files += 1


def _read_listed_files(manifest: Path, collected: Inputs) -> Iterator[tuple[str, str, str]]:
    """Yield the files of a list; paths are relative to its folder."""
    listed = collected.form.read_list(manifest)
    collected.notes += listed.notes
    for entry, facts in listed.rows:
        listed_path = Path(entry).expanduser()
        path = absolute(as_spelled(manifest.parent / listed_path))
        if not Path(path).is_file():
            where = f"{manifest.name}: no such file"
            collected.rejected.append(set_aside_row(collected.form.stage, path, UNREADABLE, where))
            continue
        if facts is not None:
            collected.facts[entry] = facts
        leads_elsewhere = listed_path.is_absolute() or ".." in listed_path.parts
        yield (
            entry,
            path,
            Path(path).parent.name if leads_elsewhere else _first_folder(listed_path.as_posix()),
        )


def _unpack_tar(
    tar: Path, fetched: Path, collected: Inputs, on_fetched: Callable[[str], None]
) -> Iterator[tuple[str, str, str]]:
    """The members of a tar, copied one by one under names of our own; what is copied already is not copied again."""
    stat = tar.stat()
    tag = sha256(f"{absolute(tar)}\0{stat.st_size}\0{stat.st_mtime_ns}".encode()).hexdigest()[:16]
    folder = fetched / f"{_shorten_for_path(str(tar))}-{tag}"
    try:
        with tarfile.open(tar) as archive:
            for number, member in enumerate(archive):
                if not member.isfile():
                    continue
                if collected.unpacked_bytes + max(0, member.size) > collected.max_unpacked_gb * 1e9:
                    _reject_rest(tar, member, collected)
                    return
                collected.unpacked_bytes += max(0, member.size)
                target = folder / f"{number:08d}{_safe_suffix(member.name)}"
                if not target.exists() and not _copy_member(archive, member, target, collected, tar):
                    continue
                on_fetched(member.name)
                inside = PurePosixPath(member.name).as_posix().lstrip("/")
                yield f"{tar.name}/{inside}", absolute(target), _first_folder(inside) or tar.name
    except (tarfile.TarError, OSError, EOFError) as error:
        reason = f"the archive is damaged: {error}"
        collected.rejected.append(set_aside_row(collected.form.stage, absolute(tar), UNREADABLE, reason))


def _reject_rest(tar: Path, member: tarfile.TarInfo, collected: Inputs) -> None:
    limit = f"more than max_unpacked_gb={collected.max_unpacked_gb:g} when unpacked"
    reason = f"{limit}, from {member.name} ({member.size / 1e9:.3g} GB) on: raise it where that is right"
    collected.rejected.append(set_aside_row(collected.form.stage, absolute(tar), "archive too large", reason))


def _copy_member(
    archive: tarfile.TarFile, member: tarfile.TarInfo, target: Path, collected: Inputs, tar: Path
) -> bool:
    source = archive.extractfile(member) if 0 <= member.size < _MAX_MEMBER_BYTES else None
    if source is None:
        reason = f"a size of {member.size} bytes"
        collected.rejected.append(
            set_aside_row(collected.form.stage, f"{tar}/{member.name}", UNREADABLE, reason)
        )
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(target) as temporary, temporary.open("wb") as file:
        shutil.copyfileobj(source, file)
    return True


def _download(
    address: str, fetched: Path, collected: Inputs, on_fetched: Callable[[str], None]
) -> Iterator[tuple[str, str, str]]:
    """The files of an address: itself, what it matches, or what is below it."""
    import fsspec

    try:
        system, root = fsspec.core.url_to_fs(address)
        names: list[str] = _remote_names(system, root)
    except Exception as error:  # each file system of fsspec raises errors of its own
        raise InputError(f"{address}: {type(error).__name__}: {error}") from None
    if not names:
        raise InputError(f"{address}: no such file or folder")
    for name in names:
        full_address = str(system.unstrip_protocol(name))
        target = fetched / f"{sha256(full_address.encode()).hexdigest()[:24]}{_safe_suffix(name)}"
        try:
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                with atomic_path(target) as temporary:
                    system.get_file(name, str(temporary))
        except Exception as error:
            reason = f"cannot be fetched: {type(error).__name__}: {error}"
            collected.rejected.append(set_aside_row(collected.form.stage, full_address, UNREADABLE, reason))
            continue
        on_fetched(full_address)
        yield full_address, absolute(target), _first_folder(name.removeprefix(_remote_base(root, name)))


def _remote_names(system: Any, root: str) -> list[str]:
    if any(mark in root for mark in "*?["):
        return sorted(name for name in system.glob(root) if system.isfile(name))
    if system.isdir(root):
        return sorted(system.find(root))
    return [root] if system.exists(root) else []


def _remote_base(root: str, name: str) -> str:
    """The part of a remote name that is the address: a folder, or the folders before the first wildcard or the file."""
    fixed = re.split(r"[*?\[]", root, maxsplit=1)[0].rstrip("/")
    return f"{fixed}/" if name.startswith(f"{fixed}/") else fixed[: fixed.rfind("/") + 1]


def _first_folder(inside: str) -> str:
    """The first folder of a path; empty where there is none."""
    parts = [component for component in PurePosixPath(inside).parts if component != ".."]
    return parts[0] if len(parts) > 1 else ""


def is_tar(text: str) -> bool:
    """Return whether an input is an archive, by its name."""
    return text.lower().endswith(TARS)


def _fixed_part(pattern: str) -> Path:
    """The folders of a glob before its first wildcard."""
    fixed: list[str] = []
    for component in Path(pattern).parts[:-1]:
        if glob.has_magic(component):
            break
        fixed.append(component)
    return Path(*fixed) if fixed else Path()


def _safe_suffix(name: str) -> str:
    suffix = PurePosixPath(name).suffix.lower()
    return suffix if suffix[1:].isascii() and suffix[1:].isalnum() and len(suffix) <= 8 else ""


def _shorten_for_path(text: str) -> str:
    """Shorten a name to characters that are safe in a path."""
    name = text.rstrip("/").rsplit("/", 1)[-1]
    return "".join(letter if letter.isascii() and letter.isalnum() else "_" for letter in name)[:40]
