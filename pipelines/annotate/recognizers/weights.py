"""The weights of the recognizers of a run, by name: for `recognizers.json` and the report."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from audiollm.files.atomic import folder_digest
from audiollm.files.json_files import read_json_file

Row = dict[str, Any]
_DIGEST_CHARACTERS = 12


def recognizer_rows(settings: Mapping[str, BaseModel]) -> list[Row]:
    """Describe each recognizer: `name`, `kind`, `weights`, and of a folder its `model_type` and SHA-256 `digest`.

    Args:
        settings: of the recognizers, by name.
    """
    return [_recognizer_row(name, config) for name, config in settings.items()]


def _recognizer_row(name: str, config: BaseModel) -> Row:
    values = config.model_dump()
    row: Row = {"name": name, "kind": values["kind"], "model_type": None, "digest": None}
    if values["kind"] == "pocketsphinx":
        return {**row, "weights": f"pocketsphinx {version('pocketsphinx')}, its English model"}
    if "url" in values:
        return {**row, "weights": f"{values['model']} at {values['url']}"}
    folder = Path(values["model"])
    if not folder.is_dir():
        return {**row, "weights": str(values["model"])}
    short_path = Path(*folder.resolve().parts[-2:])
    row |= {"weights": short_path.as_posix(), "digest": folder_digest(folder)[:_DIGEST_CHARACTERS]}
    if (folder / "config.json").is_file():
        row["model_type"] = read_json_file(folder / "config.json", dict).get("model_type")
    return row
