"""The 25 Hz tokenizer: waveform to codes and back."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "AudioTokenizer": "tokenizer.native.model",
    "TokenizerConfig": "tokenizer.native.model",
    "StreamingEncoder": "tokenizer.native.streaming",
    "StreamingDecoder": "tokenizer.native.streaming",
    "HiggsTokenizer": "tokenizer.higgs",
    "AudioVAE": "tokenizer.continuous.model",
}
__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    """Loaded at first use, so that reading a stage's settings does not wait for torch."""
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'tokenizer' has no attribute {name!r}")
