"""One attention function over packed sequences, and one over a cache; rotary positions.

Shapes: S packed rows, H query heads, G key and value heads (H is a multiple of G), D head dimension,
B sequences (rows x G of a cache), L cached positions, Q heads that share keys, W window.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from audiollm.data.packing import SegmentLayout

BackendName = Literal["flash_attn", "varlen", "sdpa"]
HALF_PRECISION = (torch.float16, torch.bfloat16)


class AttentionBackend(NamedTuple):
    """The implementation of attention over packed sequences, and the reason for its choice."""

    name: BackendName
    reason: str


def attention_backend(
    device: torch.device, dtype: torch.dtype, head_dim: int, wanted: BackendName | Literal["auto"] = "auto"
) -> AttentionBackend:
    """Choose the implementation of attention over packed sequences.

    `flash_attn` is the package, `varlen` is `torch.nn.attention.varlen`; both are CUDA kernels for half precision.
    `sdpa` is PyTorch's scaled dot product attention, sequence by sequence; float32 and float64 always take it.

    Raises:
        ValueError: the wanted one cannot run here, or there is none of that name.
    """
    if wanted not in ("auto", "flash_attn", "varlen", "sdpa"):
        raise ValueError(f"attention: no backend {wanted!r}; there are auto, flash_attn, varlen and sdpa")
    if wanted == "sdpa":
        return AttentionBackend("sdpa", "asked for")
    obstacle = _obstacle(device, dtype, head_dim)
    installed = _flash_attn_installed()
    if wanted == "auto":
        if obstacle:
            return AttentionBackend("sdpa", obstacle)
        if installed:
            return AttentionBackend("flash_attn", "flash-attn is installed")
        return AttentionBackend("varlen", "flash-attn is not installed: pip install 'audiollm[flash]'")
    if not obstacle and wanted == "flash_attn" and not installed:
        obstacle = "flash-attn is not installed: pip install 'audiollm[flash]'"
    if obstacle:
        raise ValueError(f"attention: {wanted!r} cannot run here ({obstacle}); take auto or sdpa")
    return AttentionBackend(wanted, "asked for")


def packed_attention(
    q_SHD: Tensor,
    k_SGD: Tensor,
    v_SGD: Tensor,
    layout: SegmentLayout,
    window: int | None = None,
    backend: BackendName = "sdpa",
) -> Tensor:
    """Causal attention inside each sequence; rows in and out in the order of the pack.

    Args:
        window: a position sees itself and the `window - 1` before it; None for all before it.

    Returns:
        `[S, H, D]`, in the dtype of the queries (float32 for bfloat16 queries on CPU).
    """
    q_SHD, k_SGD, v_SGD = (rows.index_select(0, layout.row_of_S) for rows in (q_SHD, k_SGD, v_SGD))
    attended_SHD = _BACKENDS[backend](q_SHD, k_SGD, v_SGD, layout, window)
    return attended_SHD.index_select(0, layout.order_S)


def attends_by_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether `cached_attention` uses two matrix products (on a CPU in full precision) and not SDPA."""
    return device.type == "cpu" and dtype not in HALF_PRECISION


def cached_attention(q_BQD: Tensor, keys_BDL: Tensor, values_BLD: Tensor, bias_B1L: Tensor | None) -> Tensor:
    """Attention of new positions over what a cache keeps, `[B, Q, D]`, for each row and each head of its keys.

    Args:
        q_BQD: of the Q heads that share keys. They are so many queries: nothing is repeated for them.
        bias_B1L: added to the scores; None for nothing.
    """
    if not attends_by_products(q_BQD.device, q_BQD.dtype):
        keys_BLD = keys_BDL.transpose(1, 2)
        # with a dimension of one head, which the fused kernels ask for
        q, keys, values = (each[:, None] for each in (q_BQD, keys_BLD, values_BLD))
        bias = None if bias_B1L is None else bias_B1L[:, None]
        return functional.scaled_dot_product_attention(q, keys, values, attn_mask=bias)[:, 0]
    scale = q_BQD.shape[2] ** -0.5
    if bias_B1L is None:
        scores_BQL = torch.bmm(q_BQD, keys_BDL).mul_(scale)
    else:
        scores_BQL = torch.baddbmm(bias_B1L, q_BQD, keys_BDL, alpha=scale)
    return torch.bmm(scores_BQL.softmax(-1), values_BLD)


@dataclass(frozen=True)
class RopeScaling:
    """Longer contexts from the same rotary table, as in Llama 3.1 and 3.2 (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


def rotary_angles(
    positions: Tensor, head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[Tensor, Tensor]:
    """Cosine and sine `[..., D]` for rotary embeddings in the half-split layout of Llama (arXiv 2104.09864)."""
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim)
    if scaling is not None:
        frequencies = _scale_frequencies(frequencies, scaling)
    angles = positions.float()[..., None] * frequencies
    doubled = torch.cat([angles, angles], dim=-1)
    return doubled.cos(), doubled.sin()


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate `[..., D]` by the angles, broadcast over heads by the caller."""
    first, second = x.chunk(2, dim=-1)
    return (x * cosine + torch.cat([-second, first], dim=-1) * sine).to(x.dtype)


def _obstacle(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """Why the half-precision CUDA kernels cannot run; empty where they can."""
    if device.type != "cuda":
        return f"no CUDA device but {device.type}"
    if dtype not in HALF_PRECISION:
        return f"{str(dtype).removeprefix('torch.')} is not half precision"
    if head_dim > 256 or head_dim % 8:
        return f"a head dimension of {head_dim} is not a multiple of 8 up to 256"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the device is older than Ampere (compute capability 8.0)"
    return ""


def _sdpa(q_SHD: Tensor, k_SGD: Tensor, v_SGD: Tensor, layout: SegmentLayout, window: int | None) -> Tensor:
    """Sequence by sequence. Padding them side by side was 1.5 to 7 times slower on CPU (long-tailed lengths)."""
    if q_SHD.device.type == "cpu" and q_SHD.dtype == torch.bfloat16:
        # on CPU the backward of SDPA is several times slower in bf16 than in fp32
        q_SHD, k_SGD, v_SGD = q_SHD.float(), k_SGD.float(), v_SGD.float()
    with torch.autocast(q_SHD.device.type, enabled=False):
        return _each_segment(q_SHD, k_SGD, v_SGD, layout.lengths, window)


@torch.compiler.disable
def _each_segment(
    q_SHD: Tensor, k_SGD: Tensor, v_SGD: Tensor, lengths: tuple[int, ...], window: int | None
) -> Tensor:
    """Compiled, this would be a new graph for every set of lengths."""
    parts = zip(q_SHD.split(lengths), k_SGD.split(lengths), v_SGD.split(lengths), strict=True)
    return torch.cat([_one_segment(*part, window) for part in parts])


def _one_segment(q_SHD: Tensor, k_SGD: Tensor, v_SGD: Tensor, window: int | None) -> Tensor:
    """Attend within a single sequence of S positions."""
    grouped = q_SHD.shape[1] != k_SGD.shape[1]
    if window is None or len(q_SHD) <= window:
        q, k, v = (rows.transpose(0, 1)[None] for rows in (q_SHD, k_SGD, v_SGD))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return out[0].transpose(0, 1)
    # blocks of W queries look at their own block and the one before it: no more than S x 2W scores
    missing, length = -len(q_SHD) % window, len(q_SHD)
    q_NHWD = functional.pad(q_SHD, (0, 0, 0, 0, 0, missing)).unflatten(0, (-1, window)).transpose(1, 2)
    k_NG2D, v_NG2D = (
        functional.pad(rows, (0, 0, 0, 0, window, missing)).unfold(0, 2 * window, window).transpose(2, 3)
        for rows in (k_SGD, v_SGD)
    )
    query_W, key_2 = torch.arange(window), torch.arange(2 * window)
    band_W2 = (key_2 > query_W[:, None]) & (key_2 <= query_W[:, None] + window)
    visible_N1W2 = band_W2.repeat(len(q_NHWD), 1, 1, 1)
    visible_N1W2[0, :, :, :window] = False  # nothing lies before the first block
    out_NHWD = functional.scaled_dot_product_attention(
        q_NHWD, k_NG2D, v_NG2D, attn_mask=visible_N1W2.to(q_SHD.device), enable_gqa=grouped
    )
    return out_NHWD.transpose(1, 2).flatten(0, 1)[:length]


def _varlen(q_SHD: Tensor, k_SGD: Tensor, v_SGD: Tensor, layout: SegmentLayout, window: int | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    ends, longest = layout.cumulative_lengths, layout.longest
    span = (-1 if window is None else window - 1, 0)
    grouped: dict[str, Any] = {"enable_gqa": True} if _takes_gqa(varlen_attn) else {}
    out_SHD = varlen_attn(q_SHD, k_SGD, v_SGD, ends, ends, longest, longest, window_size=span, **grouped)
    assert isinstance(out_SHD, Tensor)
    return out_SHD


def _flash_attn(
    q_SHD: Tensor, k_SGD: Tensor, v_SGD: Tensor, layout: SegmentLayout, window: int | None
) -> Tensor:
    from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]

    ends, longest = layout.cumulative_lengths, layout.longest
    span = (-1 if window is None else window - 1, 0)
    out_SHD: Tensor = flash_attn_varlen_func(
        q_SHD, k_SGD, v_SGD, ends, ends, longest, longest, causal=True, window_size=span
    )
    return out_SHD


_BACKENDS: dict[BackendName, Callable[[Tensor, Tensor, Tensor, SegmentLayout, int | None], Tensor]] = {
    "flash_attn": _flash_attn,
    "varlen": _varlen,
    "sdpa": _sdpa,
}


@cache
def _flash_attn_installed() -> bool:
    return importlib.util.find_spec("flash_attn") is not None


@cache
def _takes_gqa(function: Callable[..., object]) -> bool:
    """torch 2.11 groups queries without being asked to."""
    return "enable_gqa" in inspect.signature(function).parameters


def _scale_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Slow rotations are divided by the factor, fast ones kept, those between are blended."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * torch.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor
