"""The `higgs` preset of the tokenizer: the published structure, with weights that transformers loads and writes."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "HiggsTokenizer": "tokenizer.higgs.model",
    "new_higgs": "tokenizer.higgs.model",
    "published_config": "tokenizer.higgs.loading",
}
__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    """Loaded at first use, so that reading a stage's settings does not wait for torch."""
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'tokenizer.higgs' has no attribute {name!r}")
