"""One attention function over packed sequences, and one over a cache; rotary positions.

A window may have a kept prefix. Row i of a sequence sees the rows i - W + 1 ... i and, however far behind, the first P
rows of its sequence. To a row beyond P + W - 1 the prefix stands as far away as to row P + W - 1, so that no two rows
are ever further apart than P + W - 1 positions: an endless stream meets the distances of training alone. A rotary
embedding depends on differences of positions, so this is a second query, rotated back by min(i, P + W - 1) - i,
against the keys of the prefix. The idea is StreamingLLM's (arXiv 2309.17453), which assigns positions by places in the
cache.

Shapes: S packed rows, H query heads, G key and value heads (H is a multiple of G), D head dimension,
B sequences (rows x G of a cache), L cached positions, Q heads that share keys, W window, P rows of a
kept prefix, N blocks.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Sequence
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
    device: torch.device, dtype: torch.dtype, head_dim: int, requested: BackendName | Literal["auto"] = "auto"
) -> AttentionBackend:
    """Choose the implementation of attention over packed sequences.

    `flash_attn` is the package, `varlen` is `torch.nn.attention.varlen`; both are CUDA kernels for half precision.
    `sdpa` is PyTorch's scaled dot product attention, sequence by sequence; float32 and float64 always take it.

    Raises:
        ValueError: the wanted one cannot run here, or there is none of that name.
    """
    if requested not in ("auto", "flash_attn", "varlen", "sdpa"):
        raise ValueError(f"attention: no backend {requested!r}; there are auto, flash_attn, varlen and sdpa")
    if requested == "sdpa":
        return AttentionBackend("sdpa", "asked for")
    obstacle = _half_precision_obstacle(device, dtype, head_dim)
    installed = _flash_attn_installed()
    if requested == "auto":
        if obstacle:
            return AttentionBackend("sdpa", obstacle)
        if installed:
            return AttentionBackend("flash_attn", "flash-attn is installed")
        return AttentionBackend("varlen", "flash-attn is not installed: pip install 'audiollm[flash]'")
    if not obstacle and requested == "flash_attn" and not installed:
        obstacle = "flash-attn is not installed: pip install 'audiollm[flash]'"
    if obstacle:
        raise ValueError(f"attention: {requested!r} cannot run here ({obstacle}); take auto or sdpa")
    return AttentionBackend(requested, "asked for")


def packed_attention(
    q_SHD: Tensor,
    k_SGD: Tensor,
    v_SGD: Tensor,
    layout: SegmentLayout,
    window: int | None = None,
    backend: BackendName = "sdpa",
    causal: bool = True,
) -> Tensor:
    """Attention inside each sequence; rows in and out in the order of the pack.

    Args:
        window: a position sees itself and the `window - 1` before it; None for all before it.
        causal: a position sees none after it; False: it sees its whole sequence, and there is no window.

    Returns:
        `[S, H, D]`, in the dtype of the queries (float32 for bfloat16 queries on CPU).
    """
    q_SHD, k_SGD, v_SGD = (rows.index_select(0, layout.row_of_S) for rows in (q_SHD, k_SGD, v_SGD))
    attended_SHD = sequence_attention(q_SHD, k_SGD, v_SGD, layout, window, backend, causal)
    return attended_SHD.index_select(0, layout.order_S)


def sequence_attention(
    q_SHD: Tensor,
    k_SGD: Tensor,
    v_SGD: Tensor,
    layout: SegmentLayout,
    window: int | None = None,
    backend: BackendName = "sdpa",
    causal: bool = True,
) -> Tensor:
    """As `packed_attention`, on rows that already stand sequence after sequence.

    Raises:
        ValueError: a window without `causal`.
    """
    if window is not None and not causal:
        raise ValueError("attention: a window looks back alone; it needs causal=True")
    return _BACKENDS[backend](q_SHD, k_SGD, v_SGD, layout, window, causal)


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
        q, keys, values = (tensor[:, None] for tensor in (q_BQD, keys_BLD, values_BLD))
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
    angles = positions.float()[..., None] * rotary_frequencies(head_dim, theta, scaling, positions.device)
    doubled = torch.cat([angles, angles], dim=-1)
    return doubled.cos(), doubled.sin()


def rotary_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None, device: torch.device
) -> Tensor:
    """Return the angle per position of each pair of dimensions, float32 `[D / 2]`."""
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, device=device).float() / head_dim)
    return frequencies if scaling is None else _scale_frequencies(frequencies, scaling)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate `[..., D]` by the angles, broadcast over heads by the caller."""
    first, second = x.chunk(2, dim=-1)
    return (x * cosine + torch.cat([-second, first], dim=-1) * sine).to(x.dtype)


def exact_rotary_angles(
    positions: Tensor, head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[Tensor, Tensor]:
    """Return cosine and sine `[..., D]` in float32, of angles in float64.

    `rotary_angles` has a rounding error of 1e-4 at position 2,000, which grows with the position. A stream has 90,000
    rows an hour.
    """
    frequencies = rotary_frequencies(head_dim, theta, scaling, positions.device).double()
    angles = positions.double()[..., None] * frequencies
    doubled = torch.cat([angles, angles], dim=-1)
    return doubled.cos().float(), doubled.sin().float()


@dataclass(frozen=True)
class PrefixTurns:
    """Rotations of the queries of a pack against the prefixes of their sequences, in reading order."""

    cosine_SD: Tensor
    sine_SD: Tensor

    @classmethod
    def of(
        cls, layout: SegmentLayout, window: int, head_dim: int, theta: float, scaling: RopeScaling | None
    ) -> PrefixTurns:
        """Compute the rotations for all layers with this window."""
        turns_S = prefix_turns(layout.lengths, layout.pinned_rows, window).to(layout.row_of_S.device)
        return cls(*exact_rotary_angles(turns_S, head_dim, theta, scaling))

    def attend(
        self, q_SHD: Tensor, k_SGD: Tensor, v_SGD: Tensor, layout: SegmentLayout, window: int
    ) -> Tensor:
        """Attend as `packed_attention` does, with kept prefixes: rows in and out in the order of the pack."""
        q_SHD, k_SGD, v_SGD = (rows.index_select(0, layout.row_of_S) for rows in (q_SHD, k_SGD, v_SGD))
        if q_SHD.device.type == "cpu" and q_SHD.dtype == torch.bfloat16:
            q_SHD, k_SGD, v_SGD = q_SHD.float(), k_SGD.float(), v_SGD.float()
        attended_SHD = kept_prefix_attention(
            q_SHD, k_SGD, v_SGD, layout.lengths, layout.pinned_rows, window, self.cosine_SD, self.sine_SD
        )
        return attended_SHD.index_select(0, layout.order_S)


def prefix_turns(lengths: Sequence[int], pinned_rows: Sequence[int], window: int) -> Tensor:
    """Return int64 `[S]`: how far each row's query is turned for the prefix, 0 or less, sequence after sequence."""
    turns = []
    for length, prefix in zip(lengths, pinned_rows, strict=True):
        positions_S = torch.arange(length)
        turns.append(positions_S.clamp(max=prefix + window - 1) - positions_S if prefix else positions_S * 0)
    return torch.cat(turns)


def kept_prefix_attention(
    q_SHD: Tensor,
    k_SGD: Tensor,
    v_SGD: Tensor,
    lengths: Sequence[int],
    pinned_rows: Sequence[int],
    window: int,
    cosine_SD: Tensor,
    sine_SD: Tensor,
) -> Tensor:
    """Attend inside each sequence, rows in reading order.

    Args:
        pinned_rows: rows of each sequence's prefix.
        cosine_SD, sine_SD: of `prefix_turns`.
    """
    turned_SHD = rotate(q_SHD, cosine_SD[:, None], sine_SD[:, None])
    splits = (rows.split(list(lengths)) for rows in (q_SHD, turned_SHD, k_SGD, v_SGD))
    with torch.autocast(q_SHD.device.type, enabled=False):
        parts = zip(zip(*splits, strict=True), pinned_rows, strict=True)
        return torch.cat([_one_kept(q, turned, k, v, prefix, window) for (q, turned, k, v), prefix in parts])


def _half_precision_obstacle(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
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


def _sdpa(
    q_SHD: Tensor, k_SGD: Tensor, v_SGD: Tensor, layout: SegmentLayout, window: int | None, causal: bool
) -> Tensor:
    """Sequence by sequence. Padding them side by side was 1.5 to 7 times slower on CPU (long-tailed lengths)."""
    if q_SHD.device.type == "cpu" and q_SHD.dtype == torch.bfloat16:
        # on CPU the backward of SDPA is several times slower in bf16 than in fp32
        q_SHD, k_SGD, v_SGD = q_SHD.float(), k_SGD.float(), v_SGD.float()
    with torch.autocast(q_SHD.device.type, enabled=False):
        return _attend_segments(q_SHD, k_SGD, v_SGD, layout.lengths, window, causal)


def leave_attention_uncompiled() -> None:
    """Call before `torch.compile`: attention within sequences would be a new graph for every set of lengths.

    No decorator says so, since the compiler takes longer to import than all else that a command needs to start.
    """
    global _attend_segments
    _attend_segments = torch.compiler.disable(_attend_segments)


def _attend_segments(
    q_SHD: Tensor, k_SGD: Tensor, v_SGD: Tensor, lengths: tuple[int, ...], window: int | None, causal: bool
) -> Tensor:
    if not causal and len(set(lengths)) == 1:
        return _equal_segments(q_SHD, k_SGD, v_SGD, lengths[0])
    parts = zip(q_SHD.split(lengths), k_SGD.split(lengths), v_SGD.split(lengths), strict=True)
    return torch.cat([_one_segment(*segment, window, causal) for segment in parts])


def _equal_segments(q_SHD: Tensor, k_SGD: Tensor, v_SGD: Tensor, length: int) -> Tensor:
    """Sequences of one length as a batch."""
    q, k, v = (rows.unflatten(0, (-1, length)).transpose(1, 2) for rows in (q_SHD, k_SGD, v_SGD))
    out = functional.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2).flatten(0, 1)


def _one_segment(q_SHD: Tensor, k_SGD: Tensor, v_SGD: Tensor, window: int | None, causal: bool) -> Tensor:
    """Attend within a single sequence of S positions."""
    grouped = q_SHD.shape[1] != k_SGD.shape[1]
    if window is None or len(q_SHD) <= window:
        q, k, v = (rows.transpose(0, 1)[None] for rows in (q_SHD, k_SGD, v_SGD))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
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


def _with_whole_heads(rows_SHD: Tensor) -> Tensor:
    """Rows whose heads lie in one piece, as the CUDA kernels want them."""
    return rows_SHD if rows_SHD.stride(-1) == 1 else rows_SHD.contiguous()


def _varlen(
    q_SHD: Tensor, k_SGD: Tensor, v_SGD: Tensor, layout: SegmentLayout, window: int | None, causal: bool
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    q_SHD, k_SGD, v_SGD = (_with_whole_heads(rows) for rows in (q_SHD, k_SGD, v_SGD))
    ends, longest = layout.cumulative_lengths, layout.longest
    span = _visible_span(window, causal)
    grouped: dict[str, Any] = {"enable_gqa": True} if _takes_gqa(varlen_attn) else {}
    out_SHD = varlen_attn(q_SHD, k_SGD, v_SGD, ends, ends, longest, longest, window_size=span, **grouped)
    assert isinstance(out_SHD, Tensor)
    return out_SHD


def _flash_attn(
    q_SHD: Tensor, k_SGD: Tensor, v_SGD: Tensor, layout: SegmentLayout, window: int | None, causal: bool
) -> Tensor:
    from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]

    q_SHD, k_SGD, v_SGD = (_with_whole_heads(rows) for rows in (q_SHD, k_SGD, v_SGD))
    ends, longest = layout.cumulative_lengths, layout.longest
    span = _visible_span(window, causal)
    out_SHD: Tensor = flash_attn_varlen_func(
        q_SHD, k_SGD, v_SGD, ends, ends, longest, longest, causal=causal, window_size=span
    )
    return out_SHD


def _visible_span(window: int | None, causal: bool) -> tuple[int, int]:
    """Positions that are seen before and after one's own, as the kernels take them; -1: all."""
    return (-1 if window is None else window - 1, 0 if causal else -1)


_BACKENDS: dict[BackendName, Callable[[Tensor, Tensor, Tensor, SegmentLayout, int | None, bool], Tensor]] = {
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
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    return blend * frequencies + (1 - blend) * frequencies / scaling.factor


def _one_kept(
    q_SHD: Tensor, turned_SHD: Tensor, k_SGD: Tensor, v_SGD: Tensor, prefix: int, window: int
) -> Tensor:
    near = min(len(q_SHD), prefix + window)
    grouped = q_SHD.shape[1] != k_SGD.shape[1]
    q, k, v = (rows[:near].transpose(0, 1)[None] for rows in (q_SHD, k_SGD, v_SGD))
    near_SHD = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)[0]
    near_SHD = near_SHD.transpose(0, 1)
    if near == len(q_SHD):
        return near_SHD
    return torch.cat([near_SHD, _far_rows(q_SHD, turned_SHD, k_SGD, v_SGD, prefix, window)])


def _far_rows(
    q_SHD: Tensor, turned_SHD: Tensor, k_SGD: Tensor, v_SGD: Tensor, prefix: int, window: int
) -> Tensor:
    """Attend from the rows whose window no longer touches the prefix: blocks of W queries over 2 W keys and the prefix.

    Queries are laid beside their turned copies, and keys beside zeros, so that one product gives both kinds of scores.
    """
    first, dim = prefix + window, q_SHD.shape[2]
    rows = len(q_SHD) - first
    missing = -rows % window
    both_SH2 = torch.cat([q_SHD[first:], turned_SHD[first:]], dim=2)
    q_NHW2 = functional.pad(both_SH2, (0, 0, 0, 0, 0, missing)).unflatten(0, (-1, window)).transpose(1, 2)
    blocks = len(q_NHW2)

    def blocked(rows_SGD: Tensor) -> Tensor:
        behind_SGD = functional.pad(rows_SGD[prefix:], (0, 0, 0, 0, 0, missing))
        return behind_SGD.unfold(0, 2 * window, window)[:blocks].transpose(2, 3)

    zeros = (0, dim)
    window_NG22 = functional.pad(blocked(k_SGD), zeros)
    prefix_GP2 = functional.pad(k_SGD[:prefix].transpose(0, 1), zeros[::-1])
    keys_NGL2 = torch.cat([prefix_GP2.expand(blocks, -1, -1, -1), window_NG22], dim=2)
    values_NGLD = torch.cat(
        [v_SGD[:prefix].transpose(0, 1).expand(blocks, -1, -1, -1), blocked(v_SGD)], dim=2
    )
    query_W, key_2 = torch.arange(window)[:, None], torch.arange(2 * window)
    band_W2 = (key_2 > query_W) & (key_2 <= query_W + window)
    visible_WL = torch.cat([band_W2.new_ones(window, prefix), band_W2], dim=1).to(q_SHD.device)
    out_NHWD = functional.scaled_dot_product_attention(
        q_NHW2,
        keys_NGL2,
        functional.pad(values_NGLD, zeros),
        attn_mask=visible_WL,
        enable_gqa=q_SHD.shape[1] != k_SGD.shape[1],
        scale=dim**-0.5,
    )
    return out_NHWD[..., :dim].transpose(1, 2).flatten(0, 1)[:rows]
