"""The formats of frozen weights by name, their sizes, and whether they can be had here. Loads no torch."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import math
import sys
from collections.abc import Iterator
from typing import Literal

from audiollm.errors import ConfigError

SmallFormat = Literal["bf16", "int8", "int4", "nf4"]
"""How weights that do not learn are stored where it is not float32; `int4` in generation alone."""
GenerationFormat = Literal["fp32", "bf16", "int8", "int4", "nf4"]
"""How the weights of a model that speaks are held in memory."""
NF4_BLOCK = 64
"""Numbers that share a scale in `nf4`."""
INT4_GROUP = 32
"""Numbers of a row that share a scale in `int4`."""
BYTES_PER_NUMBER = {
    "fp32": 4.0, "bf16": 2.0, "int8": 1.0, "nf4": 0.5 + 4 / NF4_BLOCK, "int4": 0.5 + 2 / INT4_GROUP,
}  # fmt: skip
"""Of a large matrix: without the scales of `int8`, 4 bytes of a row."""


def stored_bytes(shape: tuple[int, int], format: SmallFormat) -> int:
    """Bytes of a weight of this shape `(O, I)`."""
    outputs, inputs = shape
    if format == "nf4":
        return math.ceil(outputs * inputs / 2) + 4 * math.ceil(outputs * inputs / NF4_BLOCK)
    if format == "int4":
        return math.ceil(outputs * inputs / 2) + 2 * math.ceil(outputs * inputs / INT4_GROUP)
    return int(outputs * inputs * BYTES_PER_NUMBER[format]) + (4 * outputs if format == "int8" else 0)


def check_format(format: GenerationFormat) -> None:
    """Check that a format can be had here.

    Raises:
        ConfigError: its library is not installed.
    """
    if format == "nf4" and importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(
            "nf4 needs bitsandbytes, which is not installed",
            "",
            "pip install 'audiollm[nf4]', or take int8 or bf16",
        )


@contextlib.contextmanager
def without_downloads() -> Iterator[None]:
    """Keep bitsandbytes from fetching compiled code by the package `kernels`, whose absence it logs as an error."""
    logger, hidden = logging.getLogger("bitsandbytes.backends.cpu.ops"), sys.modules.get("kernels")
    level = logger.level
    logger.setLevel(logging.ERROR)
    sys.modules["kernels"] = None  # type: ignore[assignment]  # an import raises ImportError
    try:
        yield
    finally:
        logger.setLevel(level)
        del sys.modules["kernels"]
        if hidden is not None:
            sys.modules["kernels"] = hidden
