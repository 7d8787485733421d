"""Optimizer, learning-rate schedule, precision and weight averaging."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
from torch import Tensor, nn

Precision = Literal["auto", "fp32", "bf16"]


def cosine_schedule(step: int, steps: int, warmup_steps: int, final_share: float = 0.02) -> float:
    """Factor on the peak learning rate: linear warm-up, then cosine to `final_share` at the last step."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    done = (step - warmup_steps) / max(1, steps - warmup_steps)
    return final_share + (1 - final_share) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def build_optimizer(
    modules: Iterable[nn.Module], weight_decay: float, betas: tuple[float, float]
) -> torch.optim.AdamW:
    """AdamW with decay on matrices only (not on biases, norms and other vectors)."""
    parameters = [p for module in modules for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=1.0, betas=betas, fused=True)


def default_device() -> torch.device:
    """The GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[None]:
    """bf16 autocast where asked for; `auto` takes it on a GPU and on CPUs with bf16 matrix units (AMX)."""
    use = precision == "bf16" or (precision == "auto" and _fast_bf16(device))
    return torch.autocast(device.type, dtype=torch.bfloat16) if use else nullcontext()


def _fast_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported()
    return bool(torch.cpu._is_amx_tile_supported())


@torch.no_grad()
def update_ema(ema: dict[str, Tensor], modules: dict[str, nn.Module], decay: float) -> None:
    """`ema <- decay * ema + (1 - decay) * weights`, over the parameters of all modules."""
    names = list(ema)
    current = {f"{name}.{key}": p for name, module in modules.items() for key, p in module.named_parameters()}
    torch._foreach_lerp_([ema[n] for n in names], [current[n].detach() for n in names], 1 - decay)
