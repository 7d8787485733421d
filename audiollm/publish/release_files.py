"""The files of a release: an allow-list of safetensors and texts, without links, states of training and paths of this
machine."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from audiollm.errors import ConfigError
from audiollm.files.json_files import read_json_file
from audiollm.files.tensors import open_tensors
from audiollm.hub_models.names import hub_id, snapshot_name
from audiollm.hub_models.needed_files import CODEC_FOLDER, INDEX

README = "README.md"
MAX_TEXT_BYTES = 64 * 2**20
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
_DESCRIPTIONS = {
    *("config.json", "generation_config.json", "preprocessor_config.json"),
    *("processor_config.json", "tokenizer_config.json", "trained.json", "video_preprocessor_config.json"),
}
"""JSON files of settings: paths of this machine are taken out of them."""
_TEXTS = {
    *("added_tokens.json", "chat_template.jinja", "chat_template.json", "merges.txt", "normalizer.json"),
    *(
        "model.safetensors.index.json",
        "pictures.json",
        "speakers.json",
        "special_tokens_map.json",
        "tokenizer.json",
    ),
    *("vocab.json", "vocab.txt"),
}
_LICENCES = re.compile(r"(LICEN[CS]E|NOTICE)(\.md|\.txt)?", re.IGNORECASE)
_BLOCK_BYTES = 2**20


@dataclass(frozen=True)
class ReleaseFile:
    """A file of a repository: its name there, and its content, in a file of this machine or in memory."""

    name: str
    source: Path | bytes

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.source) if isinstance(self.source, bytes) else self.source.stat().st_size

    @cached_property
    def digests(self) -> tuple[str, str]:
        """The SHA-1 of git's blob, and the SHA-256 of the content, by which hubs know files."""
        git_digest = hashlib.sha1(f"blob {self.size}\0".encode(), usedforsecurity=False)
        digest = hashlib.sha256()
        for block in self._blocks():
            git_digest.update(block)
            digest.update(block)
        return git_digest.hexdigest(), digest.hexdigest()

    def _blocks(self) -> Iterable[bytes]:
        if isinstance(self.source, bytes):
            yield self.source
            return
        with self.source.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                yield block


@dataclass(frozen=True)
class FileSelection:
    """The files of a folder that may go up, and the names of the others with the reason."""

    files: tuple[ReleaseFile, ...]
    refused: tuple[tuple[str, str], ...]


def select_model_files(folder: Path, prefix: str = "") -> FileSelection:
    """Select what may go up of the folder of a model or codec.

    Args:
        prefix: of the names in the repository, with its slash.

    Raises:
        ConfigError: weights or config.json are missing or a link, or a text is none.
        DamagedFile: weights are not whole.
    """
    files: list[ReleaseFile] = []
    refused: list[tuple[str, str]] = []
    for path in sorted(folder.iterdir()):
        reason = _refusal(path)
        if path.name == CODEC_FOLDER and not path.is_symlink():  # which goes up by itself
            continue
        if reason:
            refused.append((prefix + path.name, reason))
        elif path.name != README:  # the card takes its place
            files.append(ReleaseFile(prefix + path.name, _content(path)))
    names = {file.name.removeprefix(prefix) for file in files}
    has_weights = any(_WEIGHTS.fullmatch(name) for name in names)
    if not has_weights or "config.json" not in names:
        missing = "config.json" if has_weights else "model.safetensors"
        text = dict(refused).get(prefix + missing, "missing")
        raise ConfigError(
            f"{missing}: {text}; a model is config.json and weights in safetensors",
            str(folder),
            "give the folder of a saved model; a model of others stays where it was published",
        )
    _check_shards(folder, names)
    return FileSelection(tuple(files), tuple(refused))


def licence_file(folder: Path) -> Path | None:
    """The text of the licence in a folder, if there is one."""
    names = sorted(path for path in folder.iterdir() if re.match(r"LICEN[CS]E", path.name, re.IGNORECASE))
    return next((path for path in names if not _refusal(path)), None)


def without_machine_paths(value: Any, keep: Callable[[str], bool] = lambda key: False) -> Any:
    """A JSON value with absolute paths shortened to the hub's name of a model, or to their last part.

    Args:
        keep: keys whose values stay as they are: texts of people.
    """
    if isinstance(value, dict):
        return {
            without_machine_paths(key): content if keep(key) else without_machine_paths(content, keep)
            for key, content in value.items()
        }
    if isinstance(value, list):
        return [without_machine_paths(item, keep) for item in value]
    if isinstance(value, str) and _is_machine_path(value):
        return (snapshot_name(value) or Path(value).name).partition("@")[0]
    return value


def json_bytes(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _check_shards(folder: Path, names: set[str]) -> None:
    """See that all shards of an index are there.

    Raises:
        ConfigError: one is not.
    """
    if INDEX not in names:
        return
    shards = read_json_file(folder / INDEX, dict).get("weight_map", {}).values()
    missing = sorted(set(shards) - names)
    if missing:
        raise ConfigError(
            f"{missing[0]} is missing, which {INDEX} names", str(folder), "save or copy the model again"
        )


def _is_machine_path(text: str) -> bool:
    is_absolute = text.startswith(("/", "~/")) and text.count("/") > 1
    return is_absolute and len(text) < 4096 and "\n" not in text and not text.startswith("//")


def _is_of_hub(codec: Any) -> bool:
    """Whether a codec is a snapshot of the hub's cache, or the hub's name of one."""
    if not isinstance(codec, str):
        return False
    return snapshot_name(codec) is not None or (hub_id(codec) is not None and not Path(codec).exists())


def _refusal(path: Path) -> str:
    """The reason why a file of a model's folder does not go up; empty: it does."""
    name = path.name
    if path.is_symlink():
        return "a link"
    if path.is_dir():
        return "a folder"
    if (
        name == README
        or _WEIGHTS.fullmatch(name)
        or name in _DESCRIPTIONS | _TEXTS
        or _LICENCES.fullmatch(name)
    ):
        return "" if path.is_file() else "no plain file"
    if name.endswith(".safetensors"):
        return "tensors that are not the model's weights"
    return "not on the list of files that go up"


def _content(path: Path) -> Path | bytes:
    """What goes up of a file: itself, or its text without paths of this machine."""
    if _WEIGHTS.fullmatch(path.name):
        with open_tensors(path, remedy="train or save the model again"):
            return path
    if path.stat().st_size > MAX_TEXT_BYTES:
        raise ConfigError(
            f"{path.stat().st_size:,} bytes are no text", str(path), "remove it, and push again"
        )
    if path.name in _DESCRIPTIONS:
        return json_bytes(_portable_settings(path.name, read_json_file(path, dict)))
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise ConfigError("no text in UTF-8", str(path), "remove it, and push again")
    return path


def _portable_settings(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Settings without places of this machine: the codec is beside the model, or named as on the hub."""
    settings.pop("_name_or_path", None)
    if name == "config.json" and not _is_of_hub(settings.get("audio_tokenizer_id")):
        settings.pop("audio_tokenizer_id", None)
    codec = settings.get("audio_tokenizer") if name == "processor_config.json" else None
    if isinstance(codec, dict) and not _is_of_hub(codec.get("audio_tokenizer_name_or_path")):
        del settings["audio_tokenizer"]
    portable: dict[str, Any] = without_machine_paths(settings)
    return portable
