"""YAMNet's TFLite file: the digests of the published ones, and where `auto` looks for it. Nothing is downloaded."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ValidationInfo

from audiollm.errors import ConfigError
from audiollm.files.atomic import file_digest
from audiollm.hub_models.folders import hub_folder

AUTO: Literal["auto"] = "auto"
"""The value of a setting or option that stands for YAMNet's file, wherever it is on this machine."""
PUBLISHED: Mapping[str, str] = {
    "10c95ea3eb9a7bb4cb8bddf6feb023250381008177ac162ce169694d05c317de": "google/yamnet, classification-tflite, 1",
    "4d8b4a53282dc83ef04e3e7dbc4fbc98082e34e44ed798e16c3a0cdd4c584faf": "MediaPipe, yamnet, float32, 1",
}
"""SHA-256 of each published file, and its name there. Both have 4,126,810 bytes and the Apache-2.0 licence."""


def default_path() -> Path:
    """The place for a copy of the file that no installed package ships: `$XDG_DATA_HOME/audiollm/yamnet.tflite`."""
    data_home = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    return data_home / "audiollm" / "yamnet.tflite"


def find_yamnet() -> Path | None:
    """The published file that an installed package ships, else the copy at `default_path()`; None: neither is there.

    Raises:
        ConfigError: the copy is not a published file.
    """
    for path in _packaged_files(tuple(sys.path)):
        if file_digest(path) in PUBLISHED:
            return path
    path = default_path()
    if not path.is_file():
        return None
    if (digest := file_digest(path)) not in PUBLISHED:
        raise ConfigError(
            f"not a published YAMNet: its SHA-256 is {digest}",
            str(path),
            "docs/models.md has the digests; a tagger that is given by its path may be any file",
        )
    return path


def absence() -> str:
    """The sentence for a person on whose machine `auto` has nothing to take, with the remedy."""
    return (
        f"auto: no installed package ships YAMNet, and {default_path()} does not exist: "
        "put Google's file there (docs/models.md says where it is published), or give a tagger by its path"
    )


def checked_tagger(tagger: str | Path) -> Path:
    """The path of a tagger that is there; `auto` is YAMNet's file.

    Raises:
        ConfigError: it is not there.
    """
    path = find_yamnet() if str(tagger) == AUTO else Path(tagger).expanduser()
    if path is None:
        raise ConfigError(absence())
    if not path.exists():
        raise ConfigError("no such file or folder", str(path), "give auto, a .tflite, an .onnx or a folder")
    return path


def _resolve_tagger(tagger: Any) -> Any:
    """The path that `auto` stands for, or `auto` where it stands for none; the folder that a name of the hub does."""
    if tagger != AUTO:
        return hub_folder(tagger) if isinstance(tagger, str | Path) else tagger
    try:
        return find_yamnet() or AUTO
    except ConfigError as error:
        raise ValueError(str(error)) from error


def _resolve_tagger_source(tagger: Any, info: ValidationInfo) -> Any:
    """As `_resolve_tagger`; where there is no file a run ends here, and a plan notes the one that it will want."""
    resolved = _resolve_tagger(tagger)
    if resolved != AUTO:
        return resolved
    if "absent" not in (info.context or {}):
        raise ValueError(absence())
    return default_path()


TaggerPath = Annotated[Literal["auto"] | Path, BeforeValidator(_resolve_tagger)]
"""A setting that takes a tagger of sounds by its path, or `auto`."""
AUTO_SOURCE = BeforeValidator(_resolve_tagger_source)
"""The part of a setting's type that lets an `InputSource` be `auto`, too."""


@cache
def _packaged_files(search_path: tuple[str, ...]) -> tuple[Path, ...]:
    """Files of the packages on a search path that are named after YAMNet, in the order of the packages' names.

    Reading all listings takes 0.15 s, and settings are validated many times.
    """
    matches: list[tuple[str, Path]] = []
    for package in distributions(path=list(search_path)):
        if "yamnet" in (package.read_text("RECORD") or "").lower():
            files = [file for file in package.files or () if "yamnet" in file.name.lower()]
            places = [Path(str(package.locate_file(file))) for file in files if file.suffix == ".tflite"]
            matches += [(package.name, place) for place in places if place.is_file()]
    return tuple(place for _, place in sorted(matches))
