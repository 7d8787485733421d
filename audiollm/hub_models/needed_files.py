"""The files of a model that are fetched from the hub: weights in safetensors, JSON, and those of tokenizers."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Literal

from audiollm.files.json_files import read_json_file

Contents = Literal["model", "recognizer", "ctranslate2", "tokenizer"]
"""What a folder is read for: a model; a recognizer, of transformers or of CTranslate2; one of CTranslate2; a
vocabulary."""
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
CODEC_FOLDER = "audio_tokenizer"
"""The folder of the codec within that of a published model."""
CTRANSLATE2_WEIGHTS = "model.bin"
_CTRANSLATE2 = {CTRANSLATE2_WEIGHTS, "config.json", "preprocessor_config.json", "tokenizer.json"}
_VOCABULARIES = {"vocabulary.json", "vocabulary.txt"}
_TOKENIZER = {"merges.txt", "vocab.txt"}
_TOKENIZER_SUFFIXES = (".jinja", ".model", ".spm", ".tiktoken")
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")


def needed_files(names: Collection[str], contents: Contents) -> list[str]:
    """The files that are read of a repository with these; empty where its weights are in no form that is read.

    Args:
        names: paths in the repository. Of its folders only that of a model's codec is read.
    """
    codec = _codec_files(names) if contents == "model" else []
    names = sorted(name for name in names if "/" not in name)
    weights = _weights(names)
    is_ctranslate2 = CTRANSLATE2_WEIGHTS in names and not _VOCABULARIES.isdisjoint(names)
    if is_ctranslate2 and (contents == "ctranslate2" or (contents == "recognizer" and not weights)):
        return [name for name in names if name in _CTRANSLATE2 | _VOCABULARIES]
    if contents == "ctranslate2" or (contents != "tokenizer" and not weights):
        return []
    beside = [name for name in names if _is_description(name)]
    if contents == "tokenizer":
        return [name for name in beside if not name.endswith(".index.json")] if beside else []
    indices = {INDEX} if WEIGHTS not in weights else set()
    descriptions = [name for name in beside if not name.endswith(".index.json") or name in indices]
    return [*weights, *descriptions, *codec]


def absent_files(folder: Path, contents: Contents) -> list[str]:
    """The files without which a snapshot cannot be opened; empty: it is whole, as far as its own files tell."""
    names = {path.name for path in folder.iterdir() if path.is_file()}
    if contents == "tokenizer":
        return sorted({"tokenizer.json"} - names)
    lacking = {"config.json"} - names
    is_ctranslate2 = CTRANSLATE2_WEIGHTS in names and not _weights(sorted(names))
    if contents == "ctranslate2" or (contents == "recognizer" and is_ctranslate2):
        return sorted(lacking | ({CTRANSLATE2_WEIGHTS, "tokenizer.json"} - names))
    if WEIGHTS in names:
        return sorted(lacking)
    if INDEX in names:
        shards = read_json_file(folder / INDEX, dict).get("weight_map", {}).values()
        return sorted(lacking | (set(shards) - names))
    weights = _weights(sorted(names))
    if not weights:
        lacking |= {WEIGHTS}
    elif any(_SHARD.fullmatch(name) for name in weights):
        lacking |= {INDEX}
    return sorted(lacking)


def _codec_files(names: Collection[str]) -> list[str]:
    """The files of the codec that a published model has with it."""
    prefix = f"{CODEC_FOLDER}/"
    inner = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
    return [prefix + name for name in needed_files([name for name in inner if "/" not in name], "recognizer")]


def _weights(names: Collection[str]) -> list[str]:
    """The safetensors that are opened: one file, its shards, or (of other libraries) all there are."""
    if WEIGHTS in names:
        return [WEIGHTS]
    shards = [name for name in names if _SHARD.fullmatch(name)]
    return shards or [name for name in names if name.endswith(".safetensors")]


def _is_description(name: str) -> bool:
    return name.endswith((".json", *_TOKENIZER_SUFFIXES)) or name in _TOKENIZER
