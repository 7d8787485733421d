"""Fused kernels where they can be had: Liger's Triton kernels on CUDA, PyTorch's own operations elsewhere.

The package `liger-kernel` is imported when a CUDA tensor first asks for it, never before.
"""

from __future__ import annotations

import importlib.util
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional


class RMSNorm(nn.Module):
    """`x / rms(x) * weight` over the last dimension (arXiv 1910.07467)."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if not use_liger(x):
            # torch computes bf16 beside a float32 weight in float32 as well, and warns of it
            wide = x.to(torch.promote_types(x.dtype, self.weight.dtype))
            return functional.rms_norm(wide, self.weight.shape, self.weight, self.eps).to(x.dtype)
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction  # type: ignore[import-not-found]

        # not in place: its backward would write over gradients that the residual path still needs
        normed: Tensor = LigerRMSNormFunction.apply(x, self.weight, self.eps, 0.0, "llama", False)
        return normed


def silu_multiply(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`, the middle of SwiGLU (arXiv 2002.05202)."""
    if not use_liger(gate):
        return functional.silu(gate) * up
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction  # type: ignore[import-not-found]

    product: Tensor = LigerSiLUMulFunction.apply(gate, up)
    return product


def matmul_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of matrix products with these values: autocast's, where it is on."""
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return x.dtype


def use_liger(x: Tensor) -> bool:
    """Return whether Liger's kernels apply: on CUDA, not float64, and the package is installed."""
    return x.is_cuda and x.dtype != torch.float64 and _installed()


@cache
def _installed() -> bool:
    return importlib.util.find_spec("liger_kernel") is not None
