"""Matrix products through oneDNN where no gradient is needed.

Shapes: I input features, O output features.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
"""The operator is private to torch; where it is not there, everything goes the plain way."""


class Linear(nn.Module):
    """`nn.Linear` (same parameters) that runs through oneDNN where no gradient is needed.

    torch sends float32 products to MKL, which is about half as fast as oneDNN on AMD processors.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        plain = nn.Linear(in_features, out_features)
        self.weight, self.bias = plain.weight, plain.bias

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """`functional.linear`, through oneDNN where that is possible."""
    if uses_onednn(x):
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight_OI, bias_O, "none", [], "")
        return product
    return functional.linear(x, weight_OI, bias_O)


def uses_onednn(x: Tensor) -> bool:
    """Whether the private oneDNN operators may run: float32 on a CPU, and nothing to differentiate."""
    return (
        x.device.type == "cpu"
        and x.dtype == torch.float32
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and HAS_ONEDNN
    )
