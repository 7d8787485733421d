"""A stack of decoder layers over rows that come embedded: the backbone of a talker, and its depth decoder.

The layers are those of `models.decoder`, with one kind of rows, under the names that Llama and Qwen3 are published by.

Shapes: S rows, F frames, R rows of a cache, H heads, G key and value heads, D head dimension, C hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from audiollm.data.packing import SegmentLayout
from audiollm.errors import ConfigError
from audiollm.models.attention import RopeScaling, attention_backend, rotary_angles
from audiollm.models.cache import Cache, FillCache, attend_cached
from audiollm.models.decoder import Attend, AttendPacked, DualFFNConfig, DualFFNLayer, Rows
from audiollm.models.kernels import RMSNorm, matmul_dtype

ROPE_FIELDS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def stack_shape(data: Mapping[str, Any], where: str, qk_norm: bool = False) -> DualFFNConfig:
    """Read the shape of a stack from fields as transformers names them.

    Args:
        data: of a config.json, whole: with `rope_parameters`, or with `rope_theta` and `rope_scaling`.
        where: the file, for errors.
        qk_norm: queries and keys are normalised, head by head, as in Qwen3.

    Raises:
        ConfigError: a field is missing, or says what these layers are not.
    """
    for name, expected in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
        if data.get(name, expected) not in (expected, None):
            raise ConfigError(
                f"{name}: {data[name]!r}, and these layers have {expected!r}", where, "give another model"
            )
    theta, scaling = _read_rotary(data, where)
    try:
        heads = int(data["num_attention_heads"])
        return DualFFNConfig(
            vocab_size=1,
            hidden_size=int(data["hidden_size"]),
            num_layers=int(data["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(data.get("num_key_value_heads") or heads),
            head_dim=int(data.get("head_dim") or data["hidden_size"] // heads),
            intermediate_size=int(data["intermediate_size"]),
            rope_theta=theta,
            rope_scaling=scaling,
            norm_eps=float(data["rms_norm_eps"]),
            audio_ffn_layers=(),
            qk_norm=qk_norm,
        )
    except KeyError as error:
        raise ConfigError(f"{error.args[0]}: not given", where, "download config.json again") from None


def _read_rotary(data: Mapping[str, Any], where: str) -> tuple[float, RopeScaling | None]:
    rope = {**(data.get("rope_scaling") or {}), **(data.get("rope_parameters") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = rope.get("rope_theta") or data.get("rope_theta")
    if theta is None:
        raise ConfigError(
            "rope_theta: not given, and no value can be assumed: models of one kind differ in it",
            where,
            "download config.json again, or write the value that its authors trained with",
        )
    if kind == "llama3":
        return float(theta), RopeScaling(**{name: rope[name] for name in ROPE_FIELDS})
    if kind not in ("default", "mrope"):  # with one kind of position all sections of mrope are the same
        raise ConfigError(f"rope_type: {kind!r}, read are default and llama3", where, "give another model")
    return float(theta), None


@dataclass(frozen=True)
class AttendFrames:
    """Causal attention within groups of rows of one length, which stand one after the other."""

    length: int

    def __call__(self, layer: int, q_SHD: Tensor, k_SGD: Tensor, v_SGD: Tensor) -> Tensor:
        if q_SHD.device.type == "cpu" and q_SHD.dtype == torch.bfloat16:
            q_SHD, k_SGD, v_SGD = q_SHD.float(), k_SGD.float(), v_SGD.float()
        q, k, v = (rows.unflatten(0, (-1, self.length)).transpose(1, 2) for rows in (q_SHD, k_SGD, v_SGD))
        with torch.autocast(q_SHD.device.type, enabled=False):
            out = functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
            )
        return out.transpose(1, 2).flatten(0, 1)


class DecoderStack(nn.Module):
    """Layers and the last norm."""

    def __init__(self, shape: DualFFNConfig) -> None:
        super().__init__()
        self.shape = shape
        self.activation_checkpointing = False
        self.layers = nn.ModuleList(DualFFNLayer(shape, index) for index in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)

    def forward(self, x_SC: Tensor, position_S: Tensor, attend: Attend) -> Tensor:
        """Compute the hidden states `[S, C]` after the last norm.

        Args:
            position_S: the place of each row in its sequence.
            attend: attention over the rows, or over a cache.
        """
        cosine, sine = rotary_angles(
            position_S, self.shape.head_dim, self.shape.rope_theta, self.shape.rope_scaling
        )
        rows = Rows(len(x_SC), cosine[:, None], sine[:, None], attend)
        again = self.activation_checkpointing and self.training and torch.is_grad_enabled()
        for layer in self.layers:
            x_SC = checkpoint(layer, x_SC, rows, use_reentrant=False) if again else layer(x_SC, rows)
        normed: Tensor = self.norm(x_SC)
        return normed

    def attend_packed(self, x_SC: Tensor, layout: SegmentLayout) -> AttendPacked:
        """Attention inside each sequence of a pack."""
        backend = attention_backend(x_SC.device, matmul_dtype(x_SC), self.shape.head_dim)
        return AttendPacked(layout, self.shape, backend.name)

    def over_frames(self, x_FLC: Tensor) -> Tensor:
        """Compute the hidden states `[F, L, C]` of sequences of one length, each from position 0."""
        frames, length, _ = x_FLC.shape
        position_S = torch.arange(length, device=x_FLC.device).repeat(frames)
        hidden_SC: Tensor = self(x_FLC.flatten(0, 1), position_S, AttendFrames(length))
        return hidden_SC.unflatten(0, (frames, length))

    def new_cache(self, rows: int, length: int) -> Cache:
        """Return an empty cache of this stack's shape, device and dtype."""
        weight = self.norm.weight
        return Cache.empty(self.shape, rows, length, weight.device, weight.dtype)

    def prefill(self, x_SC: Tensor, cache: Cache, rows: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """Fill rows of a cache with sequences, end to end in `x_SC`; return the hidden states `[R, C]` of their ends.

        Args:
            rows: the cache row of each sequence; what it held is forgotten.
        """
        layout = SegmentLayout.in_order(lengths, x_SC.device)
        row_S = torch.repeat_interleave(torch.tensor(rows), torch.tensor(lengths)).to(x_SC.device)
        position_S = torch.cat([torch.arange(length) for length in lengths]).to(x_SC.device)
        for row, length in zip(rows, lengths, strict=True):
            cache.lengths[row], cache.pinned[row] = length, None
        attend = FillCache(cache, self.attend_packed(x_SC, layout), layout.row_of_S, row_S, position_S)
        hidden_SC: Tensor = self(x_SC, position_S, attend)
        return hidden_SC[layout.cumulative_lengths[1:].long() - 1]

    def extend(self, x_RC: Tensor, cache: Cache) -> Tensor:
        """Extend each of the first R rows of a cache by a position; return the hidden states `[R, C]`."""
        attend = attend_cached(cache, len(x_RC), None)
        hidden_RC: Tensor = self(x_RC, attend.position_X, attend)
        return hidden_RC
