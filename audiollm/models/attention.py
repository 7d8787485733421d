"""One attention function over packed sequences, and one over a cache.

Shapes: S packed positions, H heads, D head dimension, B sequences, L longest sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class SegmentLayout:
    """Where each of B packed sequences lies, and how to lay them side by side and back."""

    cumulative_lengths: Tensor
    """int32 `[B + 1]`, from 0 to S."""
    longest: int
    to_padded_BL: Tensor
    """Packed row of each padded place (any row where there is none)."""
    to_packed_S: Tensor
    """Flat padded place of each packed row."""

    @classmethod
    def of(cls, lengths: Sequence[int], order_S: Tensor) -> SegmentLayout:
        """Of sequences of these lengths, where row r of the pack is position `order_S[r]` of their concatenation."""
        counts_B = torch.tensor(list(lengths))
        ends = counts_B.cumsum(0)
        longest = int(counts_B.max())
        places_L = torch.arange(longest)
        starts_B = ends - counts_B
        inside_BL = places_L[None] < counts_B[:, None]
        to_padded = torch.where(inside_BL, starts_B[:, None] + places_L[None], 0)
        cumulative = torch.cat([torch.zeros(1, dtype=torch.int32), ends.int()])
        places_S = inside_BL.flatten().nonzero()[:, 0]
        return cls(cumulative, longest, order_S.argsort()[to_padded], places_S[order_S])

    def to(self, device: torch.device) -> SegmentLayout:
        return SegmentLayout(
            self.cumulative_lengths.to(device),
            self.longest,
            self.to_padded_BL.to(device),
            self.to_packed_S.to(device),
        )


def packed_attention(q_SHD: Tensor, k_SHD: Tensor, v_SHD: Tensor, layout: SegmentLayout) -> Tensor:
    """Causal attention inside each sequence, `[S, H, D]`; k and v may have fewer heads (grouped queries).

    Sequences are laid side by side with padding at their ends: under a causal mask no real position sees
    it, so SDPA needs no mask and takes its fast path.
    """
    batch, longest = layout.to_padded_BL.shape
    index = layout.to_padded_BL.flatten()

    def lay(x_SHD: Tensor) -> Tensor:
        # on CPU the backward of SDPA is several times slower in bf16 than in fp32
        x_SHD = x_SHD.float() if x_SHD.device.type == "cpu" and x_SHD.dtype == torch.bfloat16 else x_SHD
        return x_SHD.index_select(0, index).unflatten(0, (batch, longest)).transpose(1, 2)

    q, k, v = lay(q_SHD), lay(k_SHD), lay(v_SHD)
    with torch.autocast(q.device.type, enabled=False):
        out_BHLD = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )
    return out_BHLD.transpose(1, 2).flatten(0, 1).index_select(0, layout.to_packed_S)


def cached_attention(q_BHQD: Tensor, k_BHLD: Tensor, v_BHLD: Tensor, visible_BQL: Tensor) -> Tensor:
    """Attention of new positions over a cache, `[B, H, Q, D]`; `visible` is true where a query may look."""
    grouped = q_BHQD.shape[1] != k_BHLD.shape[1]
    return functional.scaled_dot_product_attention(
        q_BHQD, k_BHLD, v_BHLD, attn_mask=visible_BQL[:, None], enable_gqa=grouped
    )


def rotary_angles(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine `[..., D]` for rotary embeddings in the half-split layout of Llama (arXiv 2104.09864)."""
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim)
    angles = positions.float()[..., None] * frequencies
    doubled = torch.cat([angles, angles], dim=-1)
    return doubled.cos(), doubled.sin()


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate `[..., D]` by the angles, broadcast over heads by the caller."""
    first, second = x.chunk(2, dim=-1)
    return (x * cosine + torch.cat([-second, first], dim=-1) * sine).to(x.dtype)
