"""Folders of models by path or by the hub's name: the one place that resolves them, and who may download."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from audiollm.hub_models.downloads import HubError, cached_snapshot, download_config, download_model
from audiollm.hub_models.names import HubId, hub_id, snapshot_name
from audiollm.hub_models.needed_files import Contents, absent_files

OPTION = "--download"
_TWO_WAYS = "give a folder; or, for a model of the hub, add --download (in a recipe: download: true)"
_CTRANSLATE2_PREFIX = "faster_whisper="


class HubAccess(NamedTuple):
    """The requests to the hub that are allowed."""

    download: bool = False
    config_alone: bool = False
    """A snapshot of config.json alone is enough, and nothing else is fetched: for plans."""
    may_lack: bool = False
    """A name that cannot be resolved is returned as a path, which a plan lists as absent."""


_CACHE_ALONE = HubAccess()
_ACCESS: ContextVar[HubAccess] = ContextVar("hub_access", default=_CACHE_ALONE)
_downloaded: dict[tuple[HubId, Contents], Path] = {}
"""Models that this process has asked the hub for: settings are read more than once."""


def allow_downloads(allowed: bool) -> None:
    """Let the settings and options that are read from now on download models; otherwise the cache is used alone."""
    _ACCESS.set(_ACCESS.get()._replace(download=allowed))


@contextmanager
def hub_access(
    download: bool | None = None, *, config_alone: bool | None = None, may_lack: bool | None = None
) -> Iterator[None]:
    """Read settings inside with other rights, as `HubAccess` has them; None: as outside."""
    before = _ACCESS.get()
    rights = {"download": download, "config_alone": config_alone, "may_lack": may_lack}
    token = _ACCESS.set(before._replace(**{key: value for key, value in rights.items() if value is not None}))
    try:
        yield
    finally:
        _ACCESS.reset(token)


def is_planned(folder: Path) -> bool:
    """Whether a plan is being made and the folder is a snapshot, of which config.json may be all that there is."""
    return _ACCESS.get().config_alone and snapshot_name(folder) is not None


def hub_folder(place: Path | str, contents: Contents = "model") -> Path:
    """The folder of a model, given by its path or by the hub's name (`ORGANIZATION/MODEL[@REVISION]`).

    What exists, or is spelled like a path, is returned as it is. A name is looked up in the hub's cache, without any
    request; what is not there is fetched where downloads are allowed (see `HubAccess`).

    Args:
        place: a path whose spelling is lost (a `Path` of `./a/b` is `a/b`) is taken for a name where it does not exist.
        contents: what the folder is read for.

    Raises:
        HubError: neither a folder nor in the cache, or the download failed; with the remedy.
    """
    path, name = Path(place), hub_id(str(place))
    if name is None or path.exists():
        return path
    access = _ACCESS.get()
    snapshot = cached_snapshot(name, contents)
    lacking = [] if snapshot is None else absent_files(snapshot, contents)
    if access.config_alone and (snapshot is not None or access.download):
        return snapshot or download_config(name)
    if access.download:
        if (name, contents) not in _downloaded or not _downloaded[name, contents].is_dir():
            _downloaded[name, contents] = download_model(name, contents, snapshot)
        return _downloaded[name, contents]
    if snapshot is not None and not lacking:
        return snapshot
    if access.may_lack:
        return path
    if snapshot is not None:
        raise HubError(f"{name}: the hub's cache has no {lacking[0]} of it", "", _TWO_WAYS)
    nearby = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    close = get_close_matches(path.name, nearby, n=1)
    similar = f"did you mean {str(path.parent / close[0])!r}? Else " if close else ""
    raise HubError(
        f"no such file or folder: {place} (nor a model of that name in the hub's cache)",
        "",
        similar + _TWO_WAYS,
    )


def hub_source(text: str, contents: Contents = "model") -> str:
    """`hub_folder` for text that may name something else: an import path, a file, `KIND=FOLDER`, `auto`.

    Raises:
        HubError: as `hub_folder`.
    """
    prefix, equals, place = text.rpartition("=")
    if hub_id(place) is None or Path(text).exists():
        return text
    if f"{prefix}{equals}" == _CTRANSLATE2_PREFIX:
        contents = "ctranslate2"
    return f"{prefix}{equals}{hub_folder(place, contents)}"
