"""Layers whose weights do not learn, in the place of those that a model was built with.

No gradient of a weight is computed, and no input is kept for one: the backward pass reads the stored weight again.

Shapes: R rows, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from audiollm.devices import is_bf16_fast
from audiollm.models.frozen.stored import HalfWeight, StoredWeight
from audiollm.models.kernels import matmul_dtype
from audiollm.products import input_gradient, multiply


class FrozenLinear(nn.Module):
    """`nn.Linear` of a stored weight; its bias, if any, stays a frozen parameter in float32."""

    def __init__(self, stored: StoredWeight, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.stored, self.bias = stored, linear.bias

    @property
    def weight(self) -> Tensor:
        """The weight `[O, I]`: of `bf16` as it is stored, else made in float32 with every call."""
        return self.stored.values_OI if isinstance(self.stored, HalfWeight) else self.stored.weight()

    def forward(self, x: Tensor) -> Tensor:
        """See `nn.Linear`."""
        return frozen_product(x, self.stored, self.bias)


class FrozenHead(FrozenLinear):
    """A `Head`: hidden states to logits, or whatever the caller makes of them and of the weight."""

    def forward(self, x: Tensor, use: Callable[[Tensor, Tensor], Any] | None = None) -> Any:
        """See `Head.forward`."""
        return frozen_product(x, self.stored, None) if use is None else use(x, self.weight)


class FrozenEmbedding(nn.Module):
    """`nn.Embedding` in bf16, whose rows come out in float32."""

    def __init__(self, stored: HalfWeight, embedding: nn.Embedding) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim
        self.padding_idx = embedding.padding_idx
        self.stored = stored

    @property
    def weight(self) -> Tensor:
        """The table in bf16."""
        return self.stored.values_OI

    def forward(self, ids: Tensor) -> Tensor:
        """See `nn.Embedding`."""
        return functional.embedding(ids, self.stored.values_OI).float()


def frozen_product(x: Tensor, stored: StoredWeight, bias_O: Tensor | None) -> Tensor:
    """`x @ weight.T + bias` over the last dimension of x, in the type that a plain product of x would have.

    Inside, products are in bf16 where that is faster on this machine.
    """
    out_dtype = matmul_dtype(x)
    x_RI = x.reshape(-1, x.shape[-1])
    if torch.is_grad_enabled() and x.requires_grad:
        out_RO: Tensor = _FrozenProduct.apply(x_RI, stored, out_dtype)
    else:
        out_RO = _multiply(x_RI, stored, out_dtype)
    out = out_RO.view(*x.shape[:-1], out_RO.shape[1])
    return out if bias_O is None else out + bias_O.to(out.dtype)


class _FrozenProduct(torch.autograd.Function):
    """Keeps neither its input nor the values of the weight."""

    @staticmethod
    def forward(ctx: Any, x_RI: Tensor, stored: StoredWeight, out_dtype: torch.dtype) -> Tensor:
        ctx.stored, ctx.in_dtype = stored, x_RI.dtype
        return _multiply(x_RI, stored, out_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RO: Tensor) -> tuple[Tensor, None, None]:
        stored: StoredWeight = ctx.stored
        dtype = _product_dtype(grad_RO.dtype, grad_RO.device)
        with torch.autocast(grad_RO.device.type, enabled=False):
            if stored.scale_O is not None:
                grad_RO = grad_RO * stored.scale_O.to(grad_RO.dtype)
            grad_RI = input_gradient(grad_RO.to(dtype), stored.values(dtype))
        return grad_RI.to(ctx.in_dtype), None, None


def _multiply(x_RI: Tensor, stored: StoredWeight, out_dtype: torch.dtype) -> Tensor:
    dtype = _product_dtype(out_dtype, x_RI.device)
    with torch.autocast(x_RI.device.type, enabled=False):
        out_RO = multiply(x_RI.to(dtype), stored.values(dtype)).to(out_dtype)
        return out_RO if stored.scale_O is None else out_RO * stored.scale_O.to(out_dtype)


def _product_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The type of a product: bf16 in place of float32 where it is faster."""
    return torch.bfloat16 if dtype == torch.float32 and is_bf16_fast(device) else dtype
