"""JSON files of a model's folder, which anybody may have written: read, checked, and told of where they are wrong."""

from __future__ import annotations

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
