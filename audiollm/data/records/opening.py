"""Opening of a source by its address: a manifest, a folder of shards, or a single tar."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from audiollm.data.records.storage import file_size, list_sizes
from audiollm.errors import ConfigError

if TYPE_CHECKING:
    pass
from audiollm.data.records.manifest import ManifestSource
from audiollm.data.records.shards import Shards
from audiollm.data.records.source import Source


def open_source(address: str | Path, max_codes_mb: float | None = None) -> Source:
    """A JSONL manifest, a folder of shards or a single tar, at a local path or any fsspec URL.

    Args:
        max_codes_mb: see `Shards`; None: its default.

    Raises:
        ConfigError: it is none of these, or cannot be reached.
    """
    limits = {} if max_codes_mb is None else {"max_codes_mb": max_codes_mb}
    address = str(address).rstrip("/") if str(address) != "/" else "/"
    remedy = "give a .jsonl of samples, or a folder of shards (.tar)"
    try:
        files = list_sizes(address)
        if files is None:
            file_size(address)  # raises where there is nothing
            if address.endswith(".tar"):
                return Shards(address, **limits)
            if address.endswith(".jsonl"):
                return ManifestSource(address)
            raise ConfigError("neither a manifest nor shards", address, remedy)
        if "index.json" in files or any(name.endswith(".tar") for name in files):
            return Shards(address, **limits)
    except OSError as error:
        reason = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read ({error})"
        raise ConfigError(reason, address, remedy) from error
    manifests = sorted(name for name in files if name.endswith(".jsonl"))
    hint = f"give {manifests[0]} in it" if manifests else remedy
    raise ConfigError("a folder without shards", address, hint)
