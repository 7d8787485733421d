"""The 25 Hz tokenizer: waveform to codes and back."""

from __future__ import annotations

from typing import Any

__all__ = ["AudioTokenizer", "TokenizerConfig"]


def __getattr__(name: str) -> Any:
    """Loaded at first use, so that reading a stage's settings does not wait for torch."""
    if name in __all__:
        from tokenizer import model

        return getattr(model, name)
    raise AttributeError(f"module 'tokenizer' has no attribute {name!r}")
