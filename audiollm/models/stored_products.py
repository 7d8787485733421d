"""Products of few rows with weights in fewer bytes, for steps of generation on a CPU.

A step of one row reads every weight once, so that it takes as long as its bytes take to be read: PyTorch's kernels for
int8 and int4 read them as they are stored, with rows in bf16. Many rows (a prompt) pay for weights made whole.

Shapes: R rows, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from audiollm.models.frozen.formats import INT4_GROUP
from audiollm.models.frozen.layers import FrozenLinear
from audiollm.models.frozen.stored import ByteWeight, GroupWeight

MAX_KERNEL_ROWS = 16
"""Rows up to which the kernels take less time than making the weight whole."""
TILE_OUTPUTS = 16
"""The kernel of int4 takes outputs by so many."""


@dataclass(frozen=True)
class StoredPart:
    """One layer, and what the kernel of its weight's format takes; None: the layer computes its product itself."""

    linear: nn.Linear | FrozenLinear
    kernel_weight: Tensor | None
    kernel_scale: Tensor | None

    @classmethod
    def of(cls, linear: nn.Linear | FrozenLinear) -> StoredPart:
        stored = linear.stored if isinstance(linear, FrozenLinear) else None
        if isinstance(stored, ByteWeight):
            assert stored.scale_O is not None
            return cls(linear, stored.values_OI, stored.scale_O.bfloat16())
        if isinstance(stored, GroupWeight) and stored.shape[0] % TILE_OUTPUTS == 0:
            packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(stored.whole(), 1)
            scale_GO = stored.scale_OG.T.contiguous()
            return cls(linear, packed, torch.stack([scale_GO, torch.zeros_like(scale_GO)], dim=2))
        return cls(linear, None, None)

    def __call__(self, x_RI: Tensor) -> Tensor:
        if self.kernel_weight is None or self.kernel_scale is None or len(x_RI) > MAX_KERNEL_ROWS:
            whole_RO: Tensor = self.linear(x_RI)
            return whole_RO
        half_RI = x_RI.bfloat16()
        if self.kernel_weight.dtype == torch.int8:
            out_RO = torch._weight_int8pack_mm(half_RI, self.kernel_weight, self.kernel_scale)
        else:
            out_RO = torch.ops.aten._weight_int4pack_mm_for_cpu(
                half_RI, self.kernel_weight, INT4_GROUP, self.kernel_scale
            )
        out_RO = out_RO.to(x_RI.dtype)
        return out_RO if self.linear.bias is None else out_RO + self.linear.bias


@dataclass(frozen=True)
class StoredProduct:
    """Layers of the same input, whose outputs follow each other; as `packed_decoder.Product` has it."""

    parts: Sequence[StoredPart]

    @classmethod
    def of(cls, *linears: nn.Linear | FrozenLinear) -> StoredProduct:
        return cls([StoredPart.of(linear) for linear in linears])

    def __call__(self, x: Tensor, activation: str = "none") -> Tensor:
        """The product, or `swish` of it."""
        outputs = [part(x) for part in self.parts]
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
        return functional.silu(out, inplace=True) if activation == "swish" else out

    def combined(self, x: Tensor, operand: Tensor, how: str) -> Tensor:
        """`add` to another tensor, or `mul`tiply with it."""
        out = self(x)
        return out.add_(operand) if how == "add" else out.mul_(operand)
