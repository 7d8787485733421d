"""A frozen weight in fewer bytes than float32, and its values for a product.

| format | bytes of a number | stored as |
|---|---|---|
| `bf16` | 2 | rounded |
| `int8` | 1, and 4 of a row | whole numbers from -127 to 127, times a scale of their row; by PyTorch alone |
| `nf4` | 9/16 | 4 bits (NormalFloat, arXiv 2305.14314) in blocks of 64 with a scale each; by bitsandbytes |

Buffers are not persistent: what is stored is made anew from the folder that a training begins from, and no checkpoint
and no saved model holds it.

Shapes: O output features, I input features, B bytes or blocks.
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from audiollm.models.frozen.formats import NF4_BLOCK, check_format, without_downloads

LARGEST_INT8 = 127


class StoredWeight(nn.Module, ABC):
    """A weight `[O, I]`: `values * scale`, with a scale for each row where the format has one."""

    scale_O: Tensor | None
    """float32, and exact in bf16: products are scaled, not weights."""

    def __init__(self, weight_OI: Tensor) -> None:
        super().__init__()
        self.shape = tuple(weight_OI.shape)
        self.register_buffer("scale_O", None, persistent=False)

    @abstractmethod
    def values(self, dtype: torch.dtype) -> Tensor:
        """Return the values `[O, I]` before they are scaled, for a product in this type."""

    @property
    def nbytes(self) -> int:
        """Bytes of what is stored."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self.buffers())

    def weight(self) -> Tensor:
        """Return the weight in float32, `[O, I]`."""
        values_OI = self.values(torch.float32)
        return values_OI if self.scale_O is None else values_OI * self.scale_O[:, None]


class HalfWeight(StoredWeight):
    """`bf16`."""

    def __init__(self, weight_OI: Tensor) -> None:
        super().__init__(weight_OI)
        self.register_buffer("values_OI", weight_OI.detach().to(torch.bfloat16, copy=True), persistent=False)
        self.values_OI: Tensor

    def values(self, dtype: torch.dtype) -> Tensor:
        """See `StoredWeight.values`."""
        return self.values_OI.to(dtype)


class ByteWeight(StoredWeight):
    """`int8`, each row by its largest number."""

    def __init__(self, weight_OI: Tensor) -> None:
        super().__init__(weight_OI)
        weight_OI = weight_OI.detach().float()
        scale_O = (weight_OI.abs().amax(dim=1) / LARGEST_INT8).bfloat16().float()
        scale_O = torch.where(scale_O > 0, scale_O, 1.0)
        values_OI = (weight_OI / scale_O[:, None]).round_().clamp_(-LARGEST_INT8, LARGEST_INT8)
        self.register_buffer("values_OI", values_OI.to(torch.int8), persistent=False)
        self.scale_O = scale_O
        self.values_OI: Tensor

    def values(self, dtype: torch.dtype) -> Tensor:
        """See `StoredWeight.values`; whole numbers, which are exact in every type."""
        return self.values_OI.to(dtype)


class NibbleWeight(StoredWeight):
    """`nf4`.

    Raises:
        ConfigError: bitsandbytes is not installed.
    """

    def __init__(self, weight_OI: Tensor) -> None:
        super().__init__(weight_OI)
        packed_B, state = load_bitsandbytes().functional.quantize_4bit(
            weight_OI.detach().float().contiguous(),
            blocksize=NF4_BLOCK,
            compress_statistics=False,
            quant_type="nf4",
        )
        self.register_buffer("packed_B", packed_B, persistent=False)
        self.register_buffer("scale_B", state.absmax, persistent=False)
        self.packed_B: Tensor
        self.scale_B: Tensor

    def values(self, dtype: torch.dtype) -> Tensor:
        """See `StoredWeight.values`."""
        functional = load_bitsandbytes().functional
        state = functional.QuantState(
            self.scale_B,
            self.shape,
            blocksize=NF4_BLOCK,
            quant_type="nf4",
            dtype=torch.float32 if dtype == torch.float64 else dtype,
        )
        values_OI: Tensor = functional.dequantize_4bit(self.packed_B, state)
        return values_OI.to(dtype)


FORMATS: dict[str, type[HalfWeight | ByteWeight | NibbleWeight]] = {
    "bf16": HalfWeight,
    "int8": ByteWeight,
    "nf4": NibbleWeight,
}


@cache
def load_bitsandbytes() -> Any:
    """Import bitsandbytes, without the code that it would download.

    Raises:
        ConfigError: it is not installed.
    """
    check_format("nf4")
    with without_downloads():
        import bitsandbytes
    return bitsandbytes


def load_offline() -> None:
    """Import bitsandbytes where it is installed, without the code that it would download, before PEFT imports it."""
    if importlib.util.find_spec("bitsandbytes") is not None:
        load_bitsandbytes()
