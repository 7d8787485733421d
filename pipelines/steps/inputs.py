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
class Found:
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
    found: list[Found] = field(default_factory=list)
    others: int = 0
    """Files that the pipeline does not take."""
    rejected: list[Row] = field(default_factory=list)
    """Members and addresses that could not be unpacked or fetched."""
    root: Path | None = None
    """Folder that names are relative to; None: there is no single one."""
    given: dict[str, Any] = field(default_factory=dict)
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
    found = Inputs(form, max_unpacked_gb=max_unpacked_gb)
    several = len(inputs) > 1
    if not several and not is_address(inputs[0]) and not is_tar(inputs[0]):
        only = Path(inputs[0])
        found.root = only if only.is_dir() else only.parent if only.is_file() else None
    seen: dict[str, str] = {}
    names: set[str] = set()
    for index, text in enumerate(inputs):
        prefix = f"{index}-{_short(text)}/" if several else ""
        for name, path, folder in _files_of(text, fetched, found, on_fetched):
            told = found.given.pop(name, None)
            if path not in seen:
                seen[path] = _distinct(prefix + name, names)
                names.add(seen[path])
                _sort_in(found, Found(seen[path], path, (prefix + folder).rstrip("/")))
            if told is not None:
                found.given.setdefault(seen[path], told)
    return found


def digests(
    found: Sequence[Found], ledger: Ledger, on_done: Callable[[int], None], stage: str
) -> tuple[dict[str, str], list[Row]]:
    """SHA-256 of every file's content by its path, and those that cannot be read. A file of the same size and time as
    before is not read again."""
    result: dict[str, str] = {}
    unread: list[Row] = []
    with ThreadPoolExecutor(_DIGEST_THREADS) as threads:
        for start in range(0, len(found), _DIGEST_FILES):
            part = found[start : start + _DIGEST_FILES]
            keys = [_file_key(item.path) for item in part]
            known = [None if key is None else ledger.get(key) for key in keys]
            fresh = threads.map(
                _digest, [item.path for item, old in zip(part, known, strict=True) if old is None]
            )
            for item, key, old in zip(part, keys, known, strict=True):
                outcome = next(fresh) if old is None else old
                if outcome.value is None:
                    reason = outcome.error or ""
                    unread.append(set_aside_row(stage, item.path, UNREADABLE, reason))
                    continue
                if key is not None and old is None:
                    ledger.put(key, "digest", outcome)
                result[item.path] = outcome.value["digest"]
            on_done(start + len(part))
    return result, unread


def _file_key(path: str) -> str | None:
    """Key of a file in its present state; None where it is gone."""
    try:
        stat = Path(path).stat()
    except OSError:
        return None
    return sha256(f"digest\0{path}\0{stat.st_size}\0{stat.st_mtime_ns}".encode()).hexdigest()


def _digest(path: str) -> Outcome:
    try:
        return Outcome({"digest": file_digest(Path(path))})
    except OSError as error:
        return Outcome(error=error.strerror or str(error))


def absolute(path: Path) -> str:
    """Absolute and without `..`, but with links as they are, so that no two files become one."""
    return os.path.normpath(path.absolute())


def _files_of(
    text: str, fetched: Path, found: Inputs, on_fetched: Callable[[str], None]
) -> Iterator[tuple[str, str, str]]:
    """Name, absolute path, and folder below the input of every file of an input."""
    if is_address(text):
        yield from _download(text, fetched, found, on_fetched)
    elif is_tar(text) and Path(text).is_file():
        yield from _unpack(Path(text), fetched, found, on_fetched)
    elif Path(text).is_dir():
        audio, others = ([p for p in paths if not _is_output(p, text, fetched)] for paths in find_audio(text))
        # a link among the others leads out of the folder, or nowhere
        more = [path for path in others if not path.is_symlink() and found.form.accepts(path)]
        found.others += len(others) - len(more)
        for file in sorted([*audio, *more]):
            name = file.relative_to(text).as_posix()
            yield name, absolute(file), _first_folder(name)
    elif text.lower().endswith(MANIFESTS) and Path(text).is_file():
        yield from _listed(Path(text), found)
    elif Path(text).is_file():
        yield Path(text).name, absolute(Path(text)), ""
    else:
        matched = sorted(path for path in glob.glob(text, recursive=True) if Path(path).is_file())
        if not matched:
            raise InputError(f"{text}: no such file or folder, and no file that it matches")
        root = _fixed_part(text)
        for path in matched:
            if is_tar(path):
                yield from _unpack(Path(path), fetched, found, on_fetched)
            else:
                name = Path(path).relative_to(root).as_posix()
                yield name, absolute(Path(path)), _first_folder(name)


def _is_output(path: Path, folder: str, fetched: Path) -> bool:
    """Whether a file of a folder is what the pipeline writes, whose output lies within that folder."""
    output = absolute(fetched.parent)
    return output.startswith(absolute(Path(folder)) + os.sep) and absolute(path).startswith(output + os.sep)


def _distinct(name: str, names: Collection[str]) -> str:
    """A name that none has yet: a tar may hold two members of one name, and a glob find two tars of one."""
    counted = (f"{name} ({number})" for number in itertools.count(2))
    return next(each for each in itertools.chain([name], counted) if each not in names)


def _sort_in(found: Inputs, item: Found) -> None:
    if not is_unicode(item.name) or not is_unicode(item.path):
        place = os.fsencode(item.path).decode("utf-8", "backslashreplace")
        found.rejected.append(set_aside_row(found.form.stage, place, UNREADABLE, NAME_IS_NOT_UTF8))
    elif found.form.accepts(item.path):
        found.found.append(item)
    else:
        found.others += 1


def _listed(manifest: Path, found: Inputs) -> Iterator[tuple[str, str, str]]:
    """Yield the files of a list; paths are relative to its folder."""
    listed = found.form.read_list(manifest)
    found.notes += listed.notes
    for written, told in listed.rows:
        given = Path(written).expanduser()
        path = absolute(as_spelled(manifest.parent / given))
        if not Path(path).is_file():
            where = f"{manifest.name}: no such file"
            found.rejected.append(set_aside_row(found.form.stage, path, UNREADABLE, where))
            continue
        if told is not None:
            found.given[written] = told
        leads_elsewhere = given.is_absolute() or ".." in given.parts
        yield written, path, Path(path).parent.name if leads_elsewhere else _first_folder(given.as_posix())


def _unpack(
    tar: Path, fetched: Path, found: Inputs, on_fetched: Callable[[str], None]
) -> Iterator[tuple[str, str, str]]:
    """The members of a tar, copied one by one under names of our own; what is copied already is not copied again."""
    stat = tar.stat()
    tag = sha256(f"{absolute(tar)}\0{stat.st_size}\0{stat.st_mtime_ns}".encode()).hexdigest()[:16]
    folder = fetched / f"{_short(str(tar))}-{tag}"
    try:
        with tarfile.open(tar) as archive:
            for number, member in enumerate(archive):
                if not member.isfile():
                    continue
                if found.unpacked_bytes + max(0, member.size) > found.max_unpacked_gb * 1e9:
                    _reject_rest(tar, member, found)
                    return
                found.unpacked_bytes += max(0, member.size)
                target = folder / f"{number:08d}{_safe_suffix(member.name)}"
                if not target.exists() and not _copy_member(archive, member, target, found, tar):
                    continue
                on_fetched(member.name)
                inside = PurePosixPath(member.name).as_posix().lstrip("/")
                yield f"{tar.name}/{inside}", absolute(target), _first_folder(inside) or tar.name
    except (tarfile.TarError, OSError, EOFError) as error:
        reason = f"the archive is damaged: {error}"
        found.rejected.append(set_aside_row(found.form.stage, absolute(tar), UNREADABLE, reason))


def _reject_rest(tar: Path, member: tarfile.TarInfo, found: Inputs) -> None:
    limit = f"more than max_unpacked_gb={found.max_unpacked_gb:g} when unpacked"
    reason = f"{limit}, from {member.name} ({member.size / 1e9:.3g} GB) on: raise it where that is right"
    found.rejected.append(set_aside_row(found.form.stage, absolute(tar), "archive too large", reason))


def _copy_member(
    archive: tarfile.TarFile, member: tarfile.TarInfo, target: Path, found: Inputs, tar: Path
) -> bool:
    source = archive.extractfile(member) if 0 <= member.size < _MAX_MEMBER_BYTES else None
    if source is None:
        reason = f"a size of {member.size} bytes"
        found.rejected.append(set_aside_row(found.form.stage, f"{tar}/{member.name}", UNREADABLE, reason))
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(target) as temporary, temporary.open("wb") as file:
        shutil.copyfileobj(source, file)
    return True


def _download(
    address: str, fetched: Path, found: Inputs, on_fetched: Callable[[str], None]
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
        whole = str(system.unstrip_protocol(name))
        target = fetched / f"{sha256(whole.encode()).hexdigest()[:24]}{_safe_suffix(name)}"
        try:
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                with atomic_path(target) as temporary:
                    system.get_file(name, str(temporary))
        except Exception as error:
            reason = f"cannot be fetched: {type(error).__name__}: {error}"
            found.rejected.append(set_aside_row(found.form.stage, whole, UNREADABLE, reason))
            continue
        on_fetched(whole)
        yield whole, absolute(target), _first_folder(name.removeprefix(_remote_base(root, name)))


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
    parts = [part for part in PurePosixPath(inside).parts if part != ".."]
    return parts[0] if len(parts) > 1 else ""


def is_tar(text: str) -> bool:
    """Return whether an input is an archive, by its name."""
    return text.lower().endswith(TARS)


def _fixed_part(pattern: str) -> Path:
    """The folders of a glob before its first wildcard."""
    fixed: list[str] = []
    for part in Path(pattern).parts[:-1]:
        if glob.has_magic(part):
            break
        fixed.append(part)
    return Path(*fixed) if fixed else Path()


def _safe_suffix(name: str) -> str:
    suffix = PurePosixPath(name).suffix.lower()
    return suffix if suffix[1:].isascii() and suffix[1:].isalnum() and len(suffix) <= 8 else ""


def _short(text: str) -> str:
    """Shorten a name to characters that are safe in a path."""
    name = text.rstrip("/").rsplit("/", 1)[-1]
    return "".join(letter if letter.isascii() and letter.isalnum() else "_" for letter in name)[:40]
