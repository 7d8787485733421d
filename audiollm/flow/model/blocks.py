"""Blocks of a multimodal diffusion transformer over packed rows; parameter names are those of the released ThinkSound.

A multi-stream block has weights of its own for latents, frames and text, and one attention over all rows of a sample.
A single-stream block has latents alone. Both are driven by conditions (AdaLN): shift, scale and gate.

Shapes: B samples, R rows of one stream, S rows of all streams, C width, H heads, D head dimension, U conditions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from audiollm.data.packing import SegmentLayout
from audiollm.flow.model.row_convolutions import RowConv, RowMLP
from audiollm.flow.model.rows import SampleRows, Spread, permute_rows
from audiollm.models.attention import attention_backend, sequence_attention
from audiollm.products import Linear

ROTARY_THETA = 10_000.0


@dataclass(frozen=True)
class Stream:
    """The rows of one stream as a block takes them, and what drives them."""

    rows: SampleRows
    condition_UC: Tensor
    """Conditions after SiLU."""
    spread: Spread
    rotation: tuple[Tensor, Tensor] | None = None
    """Cosine and sine `[R, 1, D / 2]` of the rows' times; None: the rows have no place in time."""


class JointOrder(NamedTuple):
    """The order of the rows of all streams in which each sample's rows stand together."""

    layout: SegmentLayout
    order_S: Tensor
    inverse_S: Tensor


class QKV(NamedTuple):
    """Queries, keys and values `[R, H, D]`."""

    query: Tensor
    key: Tensor
    value: Tensor


class BlockAttention(nn.Module):
    """Projections and norms of queries and keys; a head's channels of the three lie side by side in `qkv`."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = Linear(width, 3 * width)
        self.q_norm = nn.RMSNorm(width // num_heads)
        self.k_norm = nn.RMSNorm(width // num_heads)

    def attend_near_in_time(self) -> None:
        """Biases by which rows attend most to rows of their own time, whatever is in them, until they learn better.

        What queries and keys have in common is turned by their times: its product is the sum of the cosines of the
        difference. Without it every row begins at the same distance to all, and words at their times are not found.
        """
        with torch.no_grad():
            bias_HD3 = self.qkv.bias.view(self.num_heads, -1, 3)
            bias_HD3[..., 0] = 1.0
            bias_HD3[..., 1] = 1.0

    def forward(self, x_RC: Tensor, rotation: tuple[Tensor, Tensor] | None) -> QKV:
        query, key, value = self.qkv(x_RC).unflatten(-1, (self.num_heads, -1, 3)).unbind(-1)
        query, key = self.q_norm(query), self.k_norm(key)
        if rotation is not None:
            query, key = rotate_pairs(query, *rotation), rotate_pairs(key, *rotation)
        # under autocast the norms are in full precision
        return QKV(query.to(value.dtype), key.to(value.dtype), value)


class StreamBlock(nn.Module):
    """The weights of one stream in one block.

    Args:
        kernel_size: of the convolutions after attention and in the feed-forward; 1: linear layers.
        pre_only: the stream is attended to and not updated (the last multi-stream block's frames and text).
    """

    def __init__(
        self, width: int, num_heads: int, mlp_ratio: float, kernel_size: int, pre_only: bool = False
    ) -> None:
        super().__init__()
        self.pre_only, self.kernel_size = pre_only, kernel_size
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.attn = BlockAttention(width, num_heads)
        if not pre_only:
            self.linear1 = Linear(width, width) if kernel_size == 1 else RowConv(width, width, kernel_size)
            self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
            self.ffn = RowMLP(width, int(width * mlp_ratio), kernel_size)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), Linear(width, (2 if pre_only else 6) * width))

    def before(self, x_RC: Tensor, stream: Stream) -> tuple[QKV, Sequence[Tensor]]:
        """Queries, keys and values, and what `after` takes."""
        driven = self.adaLN_modulation[1](stream.condition_UC)
        shift, scale, *remaining_modulations = driven.chunk(2 if self.pre_only else 6, dim=-1)
        x_RC = stream.spread.apply(self.norm1(x_RC), shift, scale)
        return self.attn(x_RC, stream.rotation), remaining_modulations

    def after(self, x_RC: Tensor, attended_RC: Tensor, stream: Stream, driven: Sequence[Tensor]) -> Tensor:
        """The rows after attention's output and the feed-forward have been added."""
        if self.pre_only:
            return x_RC
        gate, shift, scale, fed_gate = driven
        joined_RC = (
            self.linear1(attended_RC) if self.kernel_size == 1 else self.linear1(attended_RC, stream.rows)
        )
        x_RC = stream.spread.gate(x_RC, joined_RC, gate)
        fed_RC = self.ffn(stream.spread.apply(self.norm2(x_RC), shift, scale), stream.rows)
        return stream.spread.gate(x_RC, fed_RC, fed_gate)


class SingleStreamBlock(StreamBlock):
    """A block of latents alone."""

    def forward(self, x_RC: Tensor, stream: Stream, layout: SegmentLayout) -> Tensor:
        qkv, driven = self.before(x_RC, stream)
        return self.after(x_RC, _attend(qkv, layout).flatten(1), stream, driven)


class MultiStreamBlock(nn.Module):
    """A block of three streams, `latent`, `clip` (frames) and `text`, that attend to all rows of their sample."""

    NAMES = ("latent_block", "clip_block", "text_block")

    def __init__(
        self, width: int, num_heads: int, mlp_ratio: float, kernel_size: int, pre_only: bool
    ) -> None:
        super().__init__()
        self.latent_block = StreamBlock(width, num_heads, mlp_ratio, kernel_size)
        self.clip_block = StreamBlock(width, num_heads, mlp_ratio, kernel_size, pre_only)
        self.text_block = StreamBlock(width, num_heads, mlp_ratio, 1, pre_only)

    def forward(self, xs: Sequence[Tensor], streams: Sequence[Stream], joint: JointOrder) -> list[Tensor]:
        """The rows of the three streams; a stream without any row costs nothing.

        Its weights have gradients of zeros: ranks that hold parts of the weights (FSDP2) reduce the same ones.
        """
        blocks: list[StreamBlock] = [getattr(self, name) for name in self.NAMES]
        there = [number for number, x_RC in enumerate(xs) if len(x_RC)]
        begun = [blocks[number].before(xs[number], streams[number]) for number in there]
        attended = _attend_jointly([qkv for qkv, _ in begun], joint)
        out = list(xs)
        for number, (_, driven), attended_RC in zip(there, begun, attended, strict=True):
            out[number] = blocks[number].after(xs[number], attended_RC, streams[number], driven)
        absent = [blocks[number] for number in range(len(xs)) if number not in there]
        if absent and torch.is_grad_enabled():
            out[0] = out[0] + zero_of(weight for block in absent for weight in block.parameters())
        return out


class FinalLayer(nn.Module):
    """From hidden rows to the velocity."""

    def __init__(self, width: int, latent_dim: int) -> None:
        super().__init__()
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), Linear(width, 2 * width))
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.conv = RowConv(width, latent_dim, 7)

    def forward(self, x_RC: Tensor, stream: Stream) -> Tensor:
        shift, scale = self.adaLN_modulation[1](stream.condition_UC).chunk(2, dim=-1)
        velocity_RD: Tensor = self.conv(stream.spread.apply(self.norm(x_RC), shift, scale), stream.rows)
        return velocity_RD


class TimeEmbedding(nn.Module):
    """Sinusoids of t, with frequencies from 10,000 down to 1 so that times in [0, 1] differ, and an MLP.

    With the usual longest period of 10,000 the sinusoids of t = 0 and t = 1 have a cosine similarity of 0.97.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        places = torch.arange(0, width, 2, dtype=torch.float32) / width
        # the order of operations is the released one's: at t near 1 a last bit of a frequency of 10,000 counts
        self.register_buffer("freqs", 10_000 * (1.0 / (10_000**places)), persistent=False)
        self.freqs: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return next(self.mlp.parameters()).dtype

    def forward(self, t_B: Tensor) -> Tensor:
        """`[B, C]`."""
        angles = t_B.float()[:, None] * self.freqs
        embedded = torch.cat([angles.cos(), angles.sin()], dim=-1).to(self.dtype)
        out_BC: Tensor = self.mlp(embedded)
        return out_BC


class ConvProjection(nn.ModuleList):
    """From features to the width: a layer, SiLU, and a feed-forward; convolutions where the kernels are above 1."""

    def __init__(self, channels: int, width: int, kernel_size: int, mlp_kernel_size: int) -> None:
        first = Linear(channels, width) if kernel_size == 1 else RowConv(channels, width, kernel_size)
        super().__init__([first, nn.SiLU(), RowMLP(width, 4 * width, mlp_kernel_size)])
        self._kernel_size = kernel_size

    def forward(self, x_RC: Tensor, rows: SampleRows) -> Tensor:
        first, activation, mlp = self
        x_RC = first(x_RC) if self._kernel_size == 1 else first(x_RC, rows)
        out_RC: Tensor = mlp(activation(x_RC), rows)
        return out_RC


def joint_order(streams: Sequence[SampleRows]) -> JointOrder:
    """The order that brings the rows of each sample together: those of the first stream first."""
    present = [rows for rows in streams if rows.total]
    device = present[0].device
    lengths = [
        sum(sample_lengths) for sample_lengths in zip(*(rows.lengths for rows in present), strict=True)
    ]
    order_S = torch.cat([rows.sample_R for rows in present]).argsort(stable=True)
    inverse_S = torch.empty_like(order_S)
    inverse_S[order_S] = torch.arange(len(order_S), device=device)
    return JointOrder(SegmentLayout.in_order(lengths, device), order_S, inverse_S)


def zero_of(weights: Iterable[nn.Parameter]) -> Tensor:
    """Zero, through which each of these weights gets a gradient of zeros; of none of them, a plain zero."""
    return sum((weight.flatten()[0] * 0 for weight in weights if weight.requires_grad), torch.zeros(()))


def rotation(positions_R: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine `[R, 1, D / 2]` for rotary embeddings of neighbouring channels (arXiv 2104.09864)."""
    frequencies = 1.0 / ROTARY_THETA ** (
        torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions_R.device) / head_dim
    )
    angles = positions_R.to(torch.float32)[:, None, None] * frequencies
    return angles.cos(), angles.sin()


def rotate_pairs(x_RHD: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate channels 2i and 2i + 1 by the angles, in float32 at least."""
    wide = torch.promote_types(x_RHD.dtype, torch.float32)
    even, odd = x_RHD.to(wide).unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([cosine * even - sine * odd, sine * even + cosine * odd], dim=-1)
    return turned.flatten(-2).to(x_RHD.dtype)


def initialize_blocks(module: nn.Module) -> None:
    """Xavier weights in linear layers, then zeros where a block must begin as the identity: call this last.

    The released model zeroes its gate first and fills it again afterwards, so that its gates begin at 0.07 to 0.93.
    """
    for submodule in module.modules():
        if isinstance(submodule, nn.Linear):
            nn.init.xavier_uniform_(submodule.weight)
            if submodule.bias is not None:
                nn.init.zeros_(submodule.bias)
    for submodule in module.modules():
        if isinstance(submodule, BlockAttention):
            submodule.attend_near_in_time()
        if isinstance(submodule, TimeEmbedding):
            for layer in submodule.mlp:
                if isinstance(layer, nn.Linear):
                    nn.init.normal_(layer.weight, std=0.02)
        if isinstance(submodule, StreamBlock | FinalLayer):
            zero(submodule.adaLN_modulation)
        if isinstance(submodule, FinalLayer):
            zero(submodule.conv)


def zero(module: nn.Module) -> None:
    """Set all parameters of a module to 0."""
    for parameter in module.parameters():
        nn.init.zeros_(parameter)


class RowsAround(NamedTuple):
    """The two rows of a modality around the time of each latent, in samples that have rows."""

    latent_N: Tensor
    """int64: these latents."""
    before_N: Tensor
    after_N: Tensor
    weight_N: Tensor
    """Weight of the later row, float32."""


def rows_around(
    condition_rows: SampleRows, times_R: Tensor, latents: SampleRows, times_L: Tensor
) -> RowsAround:
    """For each latent the rows around its time; beyond the first and the last row these hold.

    Args:
        times_R: seconds of the rows, rising in each sample.
    """
    latent_N = (condition_rows.lengths_B[latents.sample_R] > 0).nonzero()[:, 0]
    sample_N, wanted_N = latents.sample_R[latent_N], times_L[latent_N].double()
    ends_B = condition_rows.lengths_B.cumsum(0)
    first_N, last_N = (ends_B - condition_rows.lengths_B)[sample_N], ends_B[sample_N] - 1
    # one search for all: each sample's times are moved beyond those of the sample before it
    apart = torch.maximum(times_R.abs().max(), wanted_N.abs().max()) * 2 + 1
    found_N = torch.searchsorted(
        times_R.double() + condition_rows.sample_R * apart, wanted_N + sample_N * apart
    )
    after_N = torch.minimum(torch.maximum(found_N, first_N + 1), last_N)
    before_N = torch.maximum(after_N - 1, first_N)
    begin_N = times_R[before_N]
    span_N = (times_R[after_N] - begin_N).clamp_min(1e-9)
    weight_N = ((wanted_N - begin_N) / span_N).clamp(0, 1).float()
    return RowsAround(latent_N, before_N, after_N, weight_N)


# Private


def _attend(qkv: QKV, layout: SegmentLayout) -> Tensor:
    backend = attention_backend(qkv.query.device, qkv.query.dtype, qkv.query.shape[2]).name
    return sequence_attention(*qkv, layout, backend=backend, causal=False).to(qkv.value.dtype)


def _attend_jointly(streams: Sequence[QKV], joint: JointOrder) -> list[Tensor]:
    """Attention over the rows of all streams of each sample; the outputs `[R, C]` of each stream."""
    joined = [torch.cat(parts) for parts in zip(*streams, strict=True)]
    ordered = QKV(*(permute_rows(rows, joint.order_S, joint.inverse_S) for rows in joined))
    attended = permute_rows(_attend(ordered, joint.layout).flatten(1), joint.inverse_S, joint.order_S)
    return list(attended.split([len(qkv.query) for qkv in streams]))
