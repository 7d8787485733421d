"""Pretrained parts of steps by path, `KIND=PATH` in settings and options as of a recognizer; and what a run used."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from pydantic import BaseModel, BeforeValidator

from audiollm.data.records.text_origin import DIGEST_CHARACTERS
from audiollm.files.atomic import file_digest, folder_digest
from audiollm.files.json_files import read_json_file
from audiollm.hub_models.folders import hub_folder
from audiollm.hub_models.names import hub_id, snapshot_name
from audiollm.recipe.plug_ins import is_import_path, source_digest
from pipelines.steps.chain import paths_of

FOLDER = ""
"""In place of a suffix: the part is a folder."""
_HUB_KIND = "transformers"
_KIND = re.compile(r"([a-z][a-z_0-9]*)=(.*)", re.DOTALL)
Row = dict[str, Any]


def part_path(**suffixes: str) -> BeforeValidator:
    """The part of a setting's type that turns `KIND=PATH` into a path; a path alone stays, and so does `auto`.

    Args:
        suffixes: kind -> suffix of its file, or `FOLDER`. No two kinds share one: the path alone tells its kind. A
            folder of the kind transformers may be a model's name on the hub.
    """
    forms = [f"{kind}={'FILE' + suffix if suffix else 'FOLDER'}" for kind, suffix in suffixes.items()]

    def read(value: Any) -> Any:
        if not isinstance(value, str | Path) or value == "auto":
            return value
        kind, place = split_kind(str(value))
        suffix = Path(place).suffix.lower()
        if not kind:
            kinds = {suffix: name for name, suffix in suffixes.items()}
            kind = kinds.get(suffix, kinds.get(FOLDER, ""))
        if kind not in suffixes or suffixes[kind] not in (FOLDER, suffix):
            raise ValueError(f"{value}: give {' or '.join(forms)}")
        if kind == _HUB_KIND and hub_id(place) is not None:
            return hub_folder(place)
        return Path(place).expanduser()

    return BeforeValidator(read)


def split_kind(text: str) -> tuple[str, str]:
    """The kind and the path in `KIND=PATH`; of a path alone the kind is empty."""
    match = _KIND.fullmatch(text)
    return (match[1], match[2]) if match else ("", text)


def is_installed(module: str) -> bool:
    """Whether a module, of a namespace package as well, can be imported; nothing but its parents is."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def named_classes(settings: BaseModel) -> list[str]:
    """The settings that name a class of a user's own, `package.module:Class`: its source belongs to fingerprints."""
    return [value for _, value in settings if isinstance(value, str) and is_import_path(value)]


def part_rows(settings: Mapping[str, BaseModel]) -> list[Row]:
    """Describe the files, folders and classes that steps are given: `name` (`STEP.SETTING`), `kind`, `weights`,
    `model_type` of a folder that tells it, and the SHA-256 `digest`.

    Args:
        settings: of the steps, by name.
    """
    rows: list[Row] = []
    for step, config in settings.items():
        for setting, path in paths_of(config).items():
            if path.exists():
                rows.append({"name": f"{step}.{setting}", **_describe_path(path)})
        for setting, value in config:
            if value in named_classes(config):
                digest = source_digest(value)[:DIGEST_CHARACTERS]
                row = {"kind": "class", "weights": value, "model_type": None, "digest": digest}
                rows.append({"name": f"{step}.{setting}", **row})
    return rows


# ------------------------------------------------------------------------------------------------ private


def _describe_path(path: Path) -> Row:
    weights = snapshot_name(path) or Path(*path.resolve().parts[-2:]).as_posix()
    if path.is_file():
        digest = file_digest(path)[:DIGEST_CHARACTERS]
        return {"kind": path.suffix.lstrip("."), "weights": weights, "model_type": None, "digest": digest}
    has_config = (path / "config.json").is_file()
    model_type = read_json_file(path / "config.json", dict).get("model_type") if has_config else None
    kind = "pyannote" if (path / "config.yaml").is_file() and not has_config else "folder"
    return {
        "kind": kind,
        "weights": weights,
        "model_type": model_type,
        "digest": _digest_with_subfolders(path),
    }


def _digest_with_subfolders(folder: Path) -> str:
    """Of a folder without others in it, that of `recognizers.json`."""
    subfolders = sorted(path for path in folder.rglob("*") if path.is_dir() and not path.name.startswith("."))
    digests = [folder_digest(path) for path in (folder, *subfolders)]
    digest = digests[0] if len(digests) == 1 else sha256(" ".join(digests).encode()).hexdigest()
    return digest[:DIGEST_CHARACTERS]
