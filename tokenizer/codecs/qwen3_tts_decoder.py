"""The decoder of Qwen3-TTS's codec under its published names: causal throughout, so that pieces are as the whole.

Source: `core/tokenizer_12hz` of the package `qwen-tts` 0.1.1, the oracle of the tests.

Shapes: B sequences, C channels, T frames or samples, K codebooks, V codes, D size of their vectors, H heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from audiollm.models.attention import rotary_angles, rotate
from audiollm.models.kernels import RMSNorm

DEFAULTS: Mapping[str, Any] = {
    "codebook_size": 2048, "codebook_dim": 512, "hidden_size": 1024, "latent_dim": 1024, "rope_theta": 10_000,
    "num_attention_heads": 16, "head_dim": 64, "sliding_window": 72, "intermediate_size": 3072, "rms_norm_eps": 1e-5,
    "num_hidden_layers": 8, "num_quantizers": 16, "upsample_rates": (8, 5, 4, 3), "upsampling_ratios": (2, 2),
    "decoder_dim": 1536,
}  # fmt: skip
"""Fields of `decoder_config` with the values that the published class has where a folder gives none."""

Memory = dict[nn.Module, Any]
"""What each layer keeps of a stream, between its pieces."""


class StreamedConv(nn.Module):
    """A convolution that sees what came before."""

    def __init__(self, inputs: int, outputs: int, kernel: int, dilation: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv1d(inputs, outputs, kernel, dilation=dilation, groups=groups)
        self.seen = (kernel - 1) * dilation

    def forward(self, x_BCT: Tensor, memory: Memory | None = None) -> Tensor:
        """The output, as long as the input."""
        if not self.seen:
            return self.conv(x_BCT)
        before = None if memory is None else memory.get(self)
        if before is None:
            before = x_BCT.new_zeros(*x_BCT.shape[:2], self.seen)
        whole = torch.cat([before, x_BCT], dim=2)
        if memory is not None:
            memory[self] = whole[:, :, -self.seen :]
        return self.conv(whole)


class CausalUpsampling(nn.Module):
    """A transposed convolution whose outputs depend on the present input and the one before it."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose1d(inputs, outputs, kernel, stride=stride)
        self.stride, self.overlap = stride, kernel - stride

    def forward(self, x_BCT: Tensor, memory: Memory | None = None) -> Tensor:
        """The output, `stride` times as long as the input."""
        before = None if memory is None or not self.overlap else memory.get(self)
        if memory is not None and self.overlap:
            memory[self] = x_BCT[:, :, -1:]
        whole = x_BCT if before is None else torch.cat([before, x_BCT], dim=2)
        out = self.conv(whole)[:, :, : whole.shape[2] * self.stride]
        return out if before is None else out[:, :, self.stride :]


class SnakeBeta(nn.Module):
    """`x + sin(x a)^2 / b` with a and b as exponentials (arXiv 2006.08195)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha, self.beta = (nn.Parameter(torch.zeros(channels)) for _ in range(2))

    def forward(self, x_BCT: Tensor, memory: Memory | None = None) -> Tensor:
        """The activation of each channel."""
        alpha_C1, beta_C1 = self.alpha.exp()[:, None], self.beta.exp()[:, None]
        return x_BCT + (x_BCT * alpha_C1).sin().square() / (beta_C1 + 1e-9)


class StreamedConvNeXt(nn.Module):
    """A depthwise convolution and two layers over channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.dwconv = StreamedConv(channels, channels, 7, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.pwconv1, self.pwconv2 = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)
        self.gamma = nn.Parameter(1e-6 * torch.ones(channels))

    def forward(self, x_BCT: Tensor, memory: Memory | None = None) -> Tensor:
        """The input and what the block adds to it."""
        normed_BTC = self.norm(self.dwconv(x_BCT, memory).transpose(1, 2))
        added_BTC = self.gamma * self.pwconv2(functional.gelu(self.pwconv1(normed_BTC)))
        return x_BCT + added_BTC.transpose(1, 2)


class SnakeUnit(nn.Module):
    """Two activations and convolutions around a sum."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.act1, self.conv1 = SnakeBeta(channels), StreamedConv(channels, channels, 7, dilation)
        self.act2, self.conv2 = SnakeBeta(channels), StreamedConv(channels, channels, 1)

    def forward(self, x_BCT: Tensor, memory: Memory | None = None) -> Tensor:
        """The input and what the unit adds to it."""
        return x_BCT + self.conv2(self.act2(self.conv1(self.act1(x_BCT), memory)))


class UpsamplingBlock(nn.Module):
    """An upsampling and three residual units."""

    def __init__(self, inputs: int, outputs: int, rate: int) -> None:
        super().__init__()
        units = [SnakeUnit(outputs, dilation) for dilation in (1, 3, 9)]
        self.block = nn.ModuleList(
            [SnakeBeta(inputs), CausalUpsampling(inputs, outputs, 2 * rate, rate), *units]
        )

    def forward(self, x_BCT: Tensor, memory: Memory | None = None) -> Tensor:
        """The output, `rate` times as long as the input."""
        for part in self.block:
            x_BCT = part(x_BCT, memory)
        return x_BCT


class _Scale(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x


class _Attention(nn.Module):
    def __init__(self, data: Mapping[str, Any]) -> None:
        super().__init__()
        size, self.head_dim = data["hidden_size"], data["head_dim"]
        wide = data["num_attention_heads"] * self.head_dim
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(size, wide, bias=False) for _ in range(3))
        self.o_proj = nn.Linear(wide, size, bias=False)

    def forward(self, x_BTC: Tensor, first: int, window: int, theta: float, memory: Memory | None) -> Tensor:
        q, k, v = (
            project(x_BTC).unflatten(2, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        position_T = torch.arange(first, first + x_BTC.shape[1], device=x_BTC.device)
        angles = rotary_angles(position_T, self.head_dim, theta)
        q, k = rotate(q, *angles), rotate(k, *angles)
        before = None if memory is None else memory.get(self)
        if before is not None:
            k, v = torch.cat([before[0], k], dim=2), torch.cat([before[1], v], dim=2)
        if memory is not None:
            memory[self] = k[:, :, 1 - window :], v[:, :, 1 - window :]
        keys, queries = k.shape[2], q.shape[2]
        behind = torch.arange(keys - queries, keys, device=q.device)[:, None] - torch.arange(
            keys, device=q.device
        )
        seen = (behind >= 0) & (behind < window)
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class _FeedForward(nn.Module):
    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(size, inner, bias=False), nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Module):
    def __init__(self, data: Mapping[str, Any]) -> None:
        super().__init__()
        size, eps = data["hidden_size"], data["rms_norm_eps"]
        self.self_attn, self.mlp = _Attention(data), _FeedForward(size, data["intermediate_size"])
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.self_attn_layer_scale, self.mlp_layer_scale = _Scale(size), _Scale(size)


class _Transformer(nn.Module):
    """Layers with a sliding window, between two projections."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        super().__init__()
        self.window, self.theta = int(data["sliding_window"]), float(data["rope_theta"])
        self.layers = nn.ModuleList(_Layer(data) for _ in range(data["num_hidden_layers"]))
        self.norm = RMSNorm(data["hidden_size"], data["rms_norm_eps"])
        self.input_proj = nn.Linear(data["latent_dim"], data["hidden_size"])
        self.output_proj = nn.Linear(data["hidden_size"], data["latent_dim"])

    def forward(self, x_BTC: Tensor, memory: Memory | None) -> Tensor:
        x_BTC = self.input_proj(x_BTC)
        first = 0 if memory is None else memory.get(self, 0)
        if memory is not None:
            memory[self] = first + x_BTC.shape[1]
        for layer in self.layers:
            assert isinstance(layer, _Layer)
            attended = layer.self_attn(layer.input_layernorm(x_BTC), first, self.window, self.theta, memory)
            x_BTC = x_BTC + layer.self_attn_layer_scale(attended)
            x_BTC = x_BTC + layer.mlp_layer_scale(layer.mlp(layer.post_attention_layernorm(x_BTC)))
        return self.output_proj(self.norm(x_BTC))


class _Codebook(nn.Module):
    def __init__(self, codes: int, size: int) -> None:
        super().__init__()
        self.cluster_usage = nn.Parameter(torch.ones(codes))
        self.embedding_sum = nn.Parameter(torch.zeros(codes, size))

    @property
    def vectors_VD(self) -> Tensor:
        return self.embedding_sum / self.cluster_usage.clamp_min(1e-5)[:, None]


class _QuantizerLayer(nn.Module):
    def __init__(self, codes: int, size: int) -> None:
        super().__init__()
        self._codebook = _Codebook(codes, size)


class _ResidualQuantizer(nn.Module):
    def __init__(self, books: int, codes: int, size: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_QuantizerLayer(codes, size) for _ in range(books))


class _ProjectedQuantizer(nn.Module):
    """Codebooks whose vectors are summed, and projected; the projection of the encoder's side is kept unused."""

    def __init__(self, books: int, codes: int, size: int, outer: int) -> None:
        super().__init__()
        self.vq = _ResidualQuantizer(books, codes, size)
        self.input_proj = nn.Conv1d(outer, size, 1, bias=False)
        self.output_proj = nn.Conv1d(size, outer, 1, bias=False)

    @property
    def codebooks(self) -> list[_Codebook]:
        return [layer._codebook for layer in self.vq.layers if isinstance(layer, _QuantizerLayer)]

    def forward(self, codes_BKT: Tensor) -> Tensor:
        vectors = [
            functional.embedding(codes_BKT[:, book], codebook.vectors_VD)
            for book, codebook in enumerate(self.codebooks)
        ]
        return self.output_proj(torch.stack(vectors).sum(dim=0).transpose(1, 2))


class _Quantizer(nn.Module):
    def __init__(self, data: Mapping[str, Any]) -> None:
        super().__init__()
        codes, outer = data["codebook_size"], data["codebook_dim"]
        self.rvq_first = _ProjectedQuantizer(1, codes, outer // 2, outer)
        self.rvq_rest = _ProjectedQuantizer(data["num_quantizers"] - 1, codes, outer // 2, outer)

    def forward(self, codes_BKT: Tensor) -> Tensor:
        return self.rvq_first(codes_BKT[:, :1]) + self.rvq_rest(codes_BKT[:, 1:])


class Qwen3TTSDecoder(nn.Module):
    """Codes to samples."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Make the decoder of `decoder_config`."""
        super().__init__()
        data = {**DEFAULTS, **{key: value for key, value in config.items() if key in DEFAULTS}}
        if not config.get("head_dim"):
            data["head_dim"] = data["hidden_size"] // data["num_attention_heads"]
        latent, wide, rates = data["latent_dim"], data["decoder_dim"], list(data["upsample_rates"])
        self.pre_transformer = _Transformer(data)
        self.quantizer = _Quantizer(data)
        self.pre_conv = StreamedConv(data["codebook_dim"], latent, 3)
        self.upsample = nn.ModuleList(
            nn.ModuleList([CausalUpsampling(latent, latent, factor, factor), StreamedConvNeXt(latent)])
            for factor in data["upsampling_ratios"]
        )
        blocks = [UpsamplingBlock(wide // 2**n, wide // 2 ** (n + 1), rate) for n, rate in enumerate(rates)]
        last = wide // 2 ** len(rates)
        self.decoder = nn.ModuleList(
            [StreamedConv(latent, wide, 7), *blocks, SnakeBeta(last), StreamedConv(last, 1, 7)]
        )

    def forward(self, codes_BKT: Tensor, memory: Memory | None = None) -> Tensor:
        """The samples `[B, 1, N]` of frames.

        Args:
            memory: of a stream, of which the frames are the next; None: they are the whole.
        """
        hidden_BCT = self.pre_conv(self.quantizer(codes_BKT), memory)
        hidden_BCT = self.pre_transformer(hidden_BCT.transpose(1, 2), memory).transpose(1, 2)
        for parts in self.upsample:
            assert isinstance(parts, nn.ModuleList)
            for part in parts:
                hidden_BCT = part(hidden_BCT, memory)
        for part in self.decoder:
            hidden_BCT = part(hidden_BCT, memory)
        return hidden_BCT.clamp(-1, 1)
