"""A frozen weight in fewer bytes than float32, and its values for a product.

| format | bytes of a number | stored as |
|---|---|---|
| `bf16` | 2 | rounded |
| `int8` | 1, and 4 of a row | whole numbers from -127 to 127, times a scale of their row; by PyTorch alone |
| `int4` | 9/16 | whole numbers from -8 to 7, two in a byte, times a scale of 32 of a row; for generation |
| `nf4` | 9/16 | 4 bits (NormalFloat, arXiv 2305.14314) in blocks of 64 with a scale each; by bitsandbytes |

Buffers are not persistent: what is stored is made anew from the folder that a training begins from, and no checkpoint
and no saved model holds it.

Shapes: O output features, I input features, B bytes or blocks.
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor, nn

from audiollm.errors import ConfigError
from audiollm.models.frozen.formats import INT4_GROUP, NF4_BLOCK, check_format, without_downloads

LARGEST_INT8 = 127


class StoredWeight(nn.Module, ABC):
    """A weight `[O, I]`: `values * scale`, with a scale for each row where the format has one."""

    scale_O: Tensor | None
    """float32, and exact in bf16: products are scaled, not weights."""

    def __init__(self, weight_OI: Tensor) -> None:
        super().__init__()
        self.shape = tuple(weight_OI.shape)
        self.register_buffer("scale_O", None, persistent=False)

    @classmethod
    def restore(cls, shape: tuple[int, ...], buffers: Mapping[str, Tensor]) -> Self:
        """Return a weight of what was stored of it.

        Raises:
            ValueError: buffers that are not of such a weight.
        """
        example = cls(torch.zeros(shape))
        expected = {name: (buffer.shape, buffer.dtype) for name, buffer in example.named_buffers()}
        given = {name: (buffer.shape, buffer.dtype) for name, buffer in buffers.items()}
        if expected != given:
            raise ValueError(f"{cls.__name__} has {expected}, not {given}")
        for name, buffer in buffers.items():
            setattr(example, name, buffer)
        return example

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


class GroupWeight(StoredWeight):
    """`int4`: each group of a row by its largest number.

    Raises:
        ConfigError: rows that do not fall into groups.
    """

    def __init__(self, weight_OI: Tensor) -> None:
        super().__init__(weight_OI)
        inputs = self.shape[1]
        if inputs % INT4_GROUP:
            raise ConfigError(
                f"int4 wants rows of a multiple of {INT4_GROUP} numbers, not {inputs}", "", "take int8"
            )
        groups = weight_OI.detach().float().unflatten(1, (-1, INT4_GROUP))
        largest, _ = groups.abs().max(dim=2, keepdim=True)
        extreme = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True))
        # the largest number becomes -8: of the two ends the one that reaches further
        scale = torch.where(largest > 0, -extreme / 8, 1.0).bfloat16()
        whole_OI = (groups / scale.float()).round_().clamp_(-8, 7).flatten(1).to(torch.int16) + 8
        packed_OB = (whole_OI[:, ::2] * 16 + whole_OI[:, 1::2]).to(torch.uint8)
        self.register_buffer("packed_OB", packed_OB, persistent=False)
        self.register_buffer("scale_OG", scale[..., 0], persistent=False)
        self.packed_OB: Tensor
        self.scale_OG: Tensor

    def whole(self) -> Tensor:
        """Return the whole numbers plus 8, int32 `[O, I]`."""
        packed = self.packed_OB.to(torch.int32)
        return torch.stack([packed // 16, packed % 16], dim=2).flatten(1)

    def values(self, dtype: torch.dtype) -> Tensor:
        """See `StoredWeight.values`."""
        groups = (self.whole() - 8).float().unflatten(1, (-1, INT4_GROUP))
        return (groups * self.scale_OG.float()[..., None]).flatten(1).to(dtype)


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


FORMATS: dict[str, type[HalfWeight | ByteWeight | GroupWeight | NibbleWeight]] = {
    "bf16": HalfWeight,
    "int8": ByteWeight,
    "int4": GroupWeight,
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
