"""Stems of the audio encoder: convolutions from mel frames to positions, over windows end to end.

`conv1d` is Whisper's: 50 positions a second, for published weights and for much data. `conv2d` sees patches of time and
pitch, so that a sound is known wherever it lies in either, and learns from far fewer recordings: three residual blocks,
12.5 positions a second (the 8 frames a position and the convolutions over both are those of Qwen3-Omni's encoder,
arXiv 2509.17765, section 2.2; the blocks are our own).

Behind each window lie columns of zeros, and what convolutions write there is set to 0 again: a window's positions are
the same alone, beside others and in any order.

Shapes: W windows, X mel frames of all windows, Z columns of all windows and gaps, M mel bins, P positions of all
windows, N channels, C width.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from audiollm.data.hearing.features import PackedFeatures
from audiollm.products import Linear

StemName = Literal["conv1d", "conv2d"]
FRAMES_PER_POSITION: dict[StemName, int] = {"conv1d": 2, "conv2d": 8}
"""Mel frames per position; also the zero columns behind each window, so that windows begin where positions do."""
DEFAULT_STRIDE: dict[StemName, int] = {"conv1d": 2, "conv2d": 1}
"""Positions that become one row of the model, where nothing else is said."""
LAST_GAIN = 4.0
"""Initial gain of the weights of `conv2d`'s last layer. Its inputs are not negative, so positions have much in common;
their differences must not be small beside the sinusoids that are added."""
BLOCKS = ((7, (4, 4)), (3, (2, 2)), (3, (1, 2)))
"""Blocks of `conv2d`: kernel of the first convolution, and its stride over frames and mel bins."""


class Convolution(NamedTuple):
    """The size of one convolution of a stem."""

    inputs: int
    outputs: int
    kernel: int
    stride: tuple[int, int]
    """Stride over frames and over mel bins."""
    places: int
    """Values of a channel that it gives for a position."""


class FrameNorm(nn.Module):
    """Mean 0 and variance 1 over channels and mel bins of a column, by itself; a gain and a bias a channel.

    Statistics over time or a batch would make a window depend on its length or on what is packed beside it.
    Images lie with channels last, so that this is one fused norm over what is side by side in memory.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x_1NZM: Tensor) -> Tensor:
        x_1ZMN = x_1NZM.permute(0, 2, 3, 1)
        shape = x_1ZMN.shape[2:]
        weight_MN, bias_MN = (
            parameter.to(x_1NZM.dtype).expand(shape) for parameter in (self.weight, self.bias)
        )
        with torch.autocast(x_1NZM.device.type, enabled=False):  # which would make it float32, and slower
            normed_1ZMN = functional.layer_norm(x_1ZMN, shape, weight_MN, bias_MN)
        return normed_1ZMN.permute(0, 3, 1, 2)


class StemBlock(nn.Module):
    """Convolution, norm, ReLU, twice; the first makes it smaller, and goes around the second."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: tuple[int, int]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2)
        self.norm1 = FrameNorm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.norm2 = FrameNorm(outputs)

    def forward(self, x_1NZM: Tensor, real_Z1: Tensor) -> Tensor:
        """`real_Z1` of the columns that come out: 1 in windows, 0 in gaps."""
        x_1NZM = self.norm1(self.conv1(x_1NZM)).relu()
        x_1NZM = x_1NZM * real_Z1.to(x_1NZM.dtype)
        return (self.norm2(self.conv2(x_1NZM)).relu() + x_1NZM) * real_Z1.to(x_1NZM.dtype)


class Stem2d(nn.Module):
    """Three blocks over mel bins and time, and a linear layer to the width of the encoder."""

    def __init__(self, num_mel_bins: int, channels: int, width: int) -> None:
        super().__init__()
        sizes = convolutions("conv2d", num_mel_bins, channels, width)
        firsts = sizes[0:-1:2]
        self.blocks = nn.ModuleList(
            StemBlock(convolution.inputs, convolution.outputs, convolution.kernel, convolution.stride)
            for convolution in firsts
        )
        self.linear = Linear(sizes[-1].inputs, width)
        nn.init.normal_(self.linear.weight, std=LAST_GAIN * self.linear.in_features**-0.5)
        nn.init.zeros_(self.linear.bias)

    def forward(self, features: PackedFeatures) -> Tensor:
        """`[P, C]`; windows are whole positions long."""
        per = FRAMES_PER_POSITION["conv2d"]
        device = features.mel_MX.device
        source_Z, is_real_Z = place_columns(features.frames, features.frames, per)
        real_Z1 = is_real_Z.to(device)[:, None]
        mel_ZM = features.mel_MX.T.to(self.linear.weight.dtype).index_select(0, source_Z.to(device)) * real_Z1
        x_1NZM = mel_ZM[None, None].to(memory_format=torch.channels_last)
        for block, (_, (stride, _)) in zip(self.blocks, BLOCKS, strict=True):
            real_Z1 = real_Z1[::stride]
            x_1NZM = block(x_1NZM, real_Z1)
        positions = [frames // per for frames in features.frames]
        at_P = places(positions, [num_positions + 1 for num_positions in positions], device)
        x_PMN = x_1NZM[0].permute(1, 2, 0).index_select(0, at_P)
        x_PC: Tensor = self.linear(x_PMN.flatten(1))
        return x_PC


def stem_1d(conv1: nn.Conv1d, conv2: nn.Conv1d, features: PackedFeatures, frames: Sequence[int]) -> Tensor:
    """Whisper's two convolutions, `[P, C]`.

    Args:
        frames: what each window is to be filled up to.
    """
    per = FRAMES_PER_POSITION["conv1d"]
    source_Z, is_real_Z = place_columns(features.frames, frames, per)
    device = features.mel_MX.device
    real_1Z = is_real_Z.to(device)[None]
    mel_MZ = features.mel_MX.to(conv1.weight.dtype).index_select(1, source_Z.to(device)) * real_1Z
    hidden_CZ = functional.gelu(conv1(mel_MZ[None])[0]) * real_1Z
    x_QC = functional.gelu(conv2(hidden_CZ[None])[0]).T
    positions = [num_frames // per for num_frames in frames]
    return x_QC.index_select(0, places(positions, [num_positions + 1 for num_positions in positions], device))


def convolutions(stem: StemName, num_mel_bins: int, channels: int, width: int) -> list[Convolution]:
    """The convolutions of a stem in their order; of `conv2d` with the linear layer after them."""
    if stem == "conv1d":
        return [Convolution(num_mel_bins, width, 3, (1, 1), 2), Convolution(width, width, 3, (2, 1), 1)]
    layers, bins, frames, inputs = [], num_mel_bins, FRAMES_PER_POSITION[stem], 1
    for kernel, stride in BLOCKS:
        frames, bins = frames // stride[0], -(-bins // stride[1])
        layers.append(Convolution(inputs, channels, kernel, stride, bins * frames))
        layers.append(Convolution(channels, channels, 3, (1, 1), bins * frames))
        inputs, channels = channels, 2 * channels
    return [*layers, Convolution(inputs * bins, width, 1, (1, 1), 1)]


def stem_multiplications(stem: StemName, num_mel_bins: int, channels: int, width: int) -> int:
    """Return the multiplications of a weight by a value per position."""
    area = 1 if stem == "conv1d" else 2
    sizes = convolutions(stem, num_mel_bins, channels, width)
    return sum(
        convolution.places * convolution.inputs * convolution.outputs * convolution.kernel**area
        for convolution in sizes
    )


def stem_values(stem: StemName, num_mel_bins: int, channels: int, width: int) -> int:
    """Return the number of output values of the convolutions per position."""
    return sum(
        convolution.places * convolution.outputs
        for convolution in convolutions(stem, num_mel_bins, channels, width)
    )


def place_columns(frames: Sequence[int], padded_frames: Sequence[int], gap: int) -> tuple[Tensor, Tensor]:
    """Return the mel column of each of Z columns, and a mask of gaps; a padded window repeats its last column."""
    source, is_real = [], []
    for start, length, full in zip(accumulate((0, *frames)), frames, padded_frames, strict=False):
        source.append(start + torch.arange(full + gap).clamp_max(length - 1))
        is_real.append(torch.arange(full + gap) < full)
    return torch.cat(source), torch.cat(is_real)


def places(counts: Sequence[int], rooms: Sequence[int], device: torch.device) -> Tensor:
    """Return the first `count` indices within each of several segments that lie end to end."""
    starts = accumulate((0, *rooms))
    indices = [start + torch.arange(count) for start, count in zip(starts, counts, strict=False)]
    return torch.cat(indices).to(device)
