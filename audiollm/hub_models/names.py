"""Names of models on the Hugging Face hub: `ORGANIZATION/MODEL`, and `@REVISION` behind it where one is asked for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

_WORD = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
_HUB_ID = re.compile(rf"({_WORD}/{_WORD})(?:@([A-Za-z0-9][A-Za-z0-9_./-]*))?")
_FILE_SUFFIXES = {
    *(".bin", ".csv", ".flac", ".json", ".jsonl", ".mp3", ".onnx", ".pt", ".pth", ".safetensors"),
    *(".tar", ".tflite", ".tsv", ".txt", ".wav", ".yaml", ".yml"),
}
_SNAPSHOT = re.compile(r"models--([^/]+?)--([^/]+)/snapshots/([0-9a-f]{40})/?$")
SNAPSHOT_PATTERN = r'[^"]*/models--[^"/]+/snapshots/[0-9a-f]{40}'
"""Pattern of a snapshot's folder within JSON."""
_SHORT_COMMIT = 8


class HubId(NamedTuple):
    """A model on the hub."""

    repository: str
    """`ORGANIZATION/MODEL`."""
    revision: str | None
    """Branch, tag or commit; None: `main`."""

    def __str__(self) -> str:
        return self.repository if self.revision is None else f"{self.repository}@{self.revision}"


def hub_id(text: str) -> HubId | None:
    """The model of the hub that a word names; None: the word is spelled like a path."""
    match = _HUB_ID.fullmatch(text)
    if match is None or Path(match[1]).suffix.lower() in _FILE_SUFFIXES:
        return None
    if "--" in match[1] or ".." in text:  # which the hub takes in no name
        return None
    return HubId(match[1], match[2])


def snapshot_name(folder: Path | str) -> str | None:
    """`ORGANIZATION/MODEL@COMMIT` of a snapshot's folder in the hub's cache; None: the folder is none."""
    match = _SNAPSHOT.search(str(folder))
    return f"{match[1]}/{match[2]}@{match[3]}" if match else None


def folder_label(folder: Path) -> str:
    """The name of a model's folder for people: its last part, or `MODEL@COMMIT` (in short) of a snapshot."""
    name = snapshot_name(folder)
    if name is None:
        return folder.name
    repository, _, commit = name.partition("@")
    return f"{repository.partition('/')[2]}@{commit[:_SHORT_COMMIT]}"
