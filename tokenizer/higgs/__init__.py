"""The `higgs` preset of the tokenizer: the published structure, with weights that transformers loads and writes."""

from __future__ import annotations

from typing import Any

__all__ = ["HiggsTokenizer", "published_config"]


def __getattr__(name: str) -> Any:
    """Loaded at first use, so that reading a stage's settings does not wait for torch."""
    if name == "HiggsTokenizer":
        from tokenizer.higgs.model import HiggsTokenizer

        return HiggsTokenizer
    if name == "published_config":
        from tokenizer.higgs.config import published_config

        return published_config
    raise AttributeError(f"module 'tokenizer.higgs' has no attribute {name!r}")
