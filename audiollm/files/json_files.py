"""JSON files of a model's folder, which anybody may have written: read, checked, and told of where they are wrong."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from audiollm.errors import ConfigError
from audiollm.files.atomic import DamagedFile, read_json

Kind = TypeVar("Kind", dict[str, Any], list[Any])
REMEDY = "download or write it again"
OFFLINE: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
"""Arguments for every transformers loader: no download, and no code from the folder is run. Where
`trust_remote_code` is left out, transformers asks the person at the terminal."""
_CALLED = {dict: "mapping of settings", list: "list"}


def read_json_file(path: Path, kind: type[Kind]) -> Kind:
    """Read a JSON file that holds a `dict` or a `list`.

    Raises:
        ConfigError: it cannot be read, is not JSON, or holds something else.
    """
    try:
        value = read_json(path)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", str(path), "check the path") from None
    except DamagedFile as error:
        raise ConfigError(error.reason, str(path), REMEDY) from None
    if not isinstance(value, kind):
        raise ConfigError(f"no {_CALLED[kind]}", str(path), REMEDY)
    return value


def config_folder(folder: Path, kind: str, remedy: str) -> Path:
    """The folder with a model's config.json: `folder` itself or, for a stage's folder, its `model`.

    Raises:
        ConfigError: neither has one; see `no_config`.
    """
    for candidate in (folder, folder / "model"):
        if (candidate / "config.json").exists():
            return candidate
    raise no_config(folder, kind, remedy)


def no_config(folder: Path, kind: str, remedy: str) -> ConfigError:
    """The error of a folder without a config.json: says whether it exists, and names the stages in that of a run.

    Args:
        kind: description of the model that is expected there, without an article.
        remedy: what to give.
    """
    where = str(folder)
    if not folder.exists():
        names = [path.name for path in folder.parent.iterdir()] if folder.parent.is_dir() else []
        close = get_close_matches(folder.name, names, n=1)
        similar = f" (did you mean {close[0]!r}?)" if close else ""
        return ConfigError(f"no {kind} here: no such folder", where, f"check the path{similar}; {remedy}")
    if not folder.is_dir():
        return ConfigError(f"no {kind} here: it is a file, and not a folder", where, remedy)
    if stages := sorted(path.parents[1].name for path in folder.glob("*/model/config.json")):
        text = f"no {kind} here: it is the folder of a whole run"
        return ConfigError(text, where, f"give that of a stage: {', '.join(stages)}")
    if (folder / "stage.json").exists():
        return ConfigError(f"no {kind} here: the stage makes none, or has not finished", where, remedy)
    return ConfigError(f"no {kind} here: config.json is missing", where, remedy)
