"""The semantic half: the frozen HuBERT teacher, and convolutions into and out of its feature space.

Shapes: B batch, N samples, T teacher frames, F codec frames, D features of the teacher.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tokenizer.native.operations import ExactLinear

TEACHER_PADDING_SAMPLES = 160


def build_teacher(config: Any) -> nn.Module:
    """transformers' HuBERT of this configuration, frozen, its linear layers replaced by ours."""
    from transformers import HubertModel

    teacher: nn.Module = HubertModel(config)
    for parent in list(teacher.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear):
                setattr(parent, name, ExactLinear(child.in_features, child.out_features))
    return teacher.requires_grad_(False).eval()


@torch.no_grad()
def teacher_features(
    teacher: Any, samples_BN: Tensor, sample_rate: int, teacher_sample_rate: int, keep_every: int
) -> Tensor:
    """The mean of all the teacher's hidden states, `[B, F, D]`, the input of its first layer included.

    Summed while they are made: transformers keeps all thirteen and stacks a copy.
    """
    from torchaudio.functional import resample

    samples_BN = resample(samples_BN, sample_rate, teacher_sample_rate)
    samples_BN = functional.pad(samples_BN, (TEACHER_PADDING_SAMPLES, TEACHER_PADDING_SAMPLES))
    layers = teacher.encoder.layers
    states = [torch.empty(0)]

    def first(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        states[0] = inputs[0].clone()

    def then(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor | tuple[Tensor, ...]) -> None:
        states[0] += output if isinstance(output, Tensor) else output[0]

    hooks = [layers[0].register_forward_pre_hook(first)]
    hooks += [layer.register_forward_hook(then) for layer in layers]
    try:
        teacher(samples_BN)
    finally:
        for hook in hooks:
            hook.remove()
    return states[0][:, ::keep_every] / (len(layers) + 1)


def teacher_frames(config: Any, num_samples: int) -> int:
    """Frames the teacher makes of so many padded samples; 0 where they are too few."""
    for kernel, stride in zip(config.conv_kernel, config.conv_stride, strict=True):
        num_samples = max((num_samples - kernel) // stride + 1, 0)
    return num_samples


class SemanticUnit(nn.Module):
    """Two convolutions, each after an ELU, beside a skip."""

    def __init__(self, channels: int, kernel_size: int, dilation: int) -> None:
        super().__init__()
        padding = (kernel_size - 1) // 2 * dilation
        self.conv1 = nn.Conv1d(
            channels, channels, kernel_size, padding=padding, dilation=dilation, bias=False
        )
        self.conv2 = nn.Conv1d(channels, channels, 1, bias=False)

    def forward(self, x_BDF: Tensor) -> Tensor:
        y_BDF: Tensor = self.conv2(functional.elu(self.conv1(functional.elu(x_BDF))))
        return x_BDF + y_BDF


class SemanticEncoderBlock(nn.Module):
    """Residual units, then a convolution."""

    def __init__(self, config: Any, channels: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.res_units = nn.ModuleList(
            SemanticUnit(channels, config.unit_kernel_size, dilation) for dilation in config.block_dilations
        )
        kernel = 3 if stride == 1 else 2 * stride
        self.conv = nn.Conv1d(channels, channels_out, kernel, stride=stride, padding=(kernel - 1) // 2)

    def forward(self, x_BDF: Tensor) -> Tensor:
        for unit in self.res_units:
            x_BDF = unit(x_BDF)
        y_BDF: Tensor = self.conv(x_BDF)
        return y_BDF


class SemanticDecoderBlock(nn.Module):
    """A convolution (transposed where it changes the rate), then residual units."""

    def __init__(self, config: Any, channels: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.conv = (
            nn.Conv1d(channels, channels_out, 3, padding=1)
            if stride == 1
            else nn.ConvTranspose1d(
                channels, channels_out, 2 * stride, stride, (stride + 1) // 2, stride % 2, bias=False
            )
        )
        self.res_units = nn.ModuleList(
            SemanticUnit(channels_out, config.unit_kernel_size, dilation)
            for dilation in config.block_dilations
        )

    def forward(self, x_BDF: Tensor) -> Tensor:
        x_BDF = self.conv(x_BDF)
        for unit in self.res_units:
            x_BDF = unit(x_BDF)
        return x_BDF


class SemanticEncoder(nn.Module):
    """The teacher's features to the semantic part of the latent."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        size, kernel = config.semantic_hidden_size, config.kernel_size
        widths = [size, *(int(size * ratio) for ratio in config.channel_ratios)]
        self.conv = nn.Conv1d(size, size, kernel, padding=kernel // 2, bias=False)
        self.conv_blocks = nn.ModuleList(
            SemanticEncoderBlock(config, before, after, stride)
            for before, after, stride in zip(widths, widths[1:], config.strides, strict=False)
        )

    def forward(self, x_BDF: Tensor) -> Tensor:
        x_BDF = self.conv(x_BDF)
        for block in self.conv_blocks:
            x_BDF = block(x_BDF)
        return x_BDF


class SemanticDecoder(nn.Module):
    """The quantized latent to what the teacher would have said; used in training only."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        size, kernel = config.semantic_hidden_size, config.kernel_size
        widths = [*(int(size * ratio) for ratio in config.channel_ratios), size]
        self.conv1 = nn.Conv1d(size, widths[0], kernel, padding=kernel // 2, bias=False)
        self.conv_blocks = nn.ModuleList(
            SemanticDecoderBlock(config, before, after, stride)
            for before, after, stride in zip(widths, widths[1:], config.strides, strict=False)
        )
        self.conv2 = nn.Conv1d(size, size, kernel, padding=kernel // 2, bias=False)

    def forward(self, x_BDF: Tensor) -> Tensor:
        x_BDF = self.conv1(x_BDF)
        for block in self.conv_blocks:
            x_BDF = block(x_BDF)
        y_BDF: Tensor = self.conv2(x_BDF)
        return y_BDF
