"""The acoustic half: the encoder and decoder of the Descript Audio Codec, and a faster way through them on a CPU.

`forward` is the plain definition, which training differentiates; `spans` computes the same a span at a time: on a CPU
the 24 kHz layers of the encoder are bound by memory, not by arithmetic. One activation of ten seconds is 60 MB, and
every elementwise pass over it leaves the caches. So a stack of layers is run on a few thousand steps at a time, each
layer asking the one below for the span that it needs.
 Names of parameters are those of `transformers.DacModel`. Structure: Kumar et al. 2023,
"High-Fidelity Audio Compression with Improved RVQGAN", without the final tanh and with an output padding that
keeps odd strides exact, as the published tokenizer has it.

Shapes: B batch, C channels, N samples, T steps of the level at hand, I input features, O output features.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from tokenizer.native.operations import multiply_exactly, uses_onednn

Source = Callable[[int, int], Tensor]
"""`(start, stop)` to the signal there, `[1, C, stop - start]`, zeros outside of it."""

SPAN_STEPS = 4096
"""Steps computed at a time: 1 MB of 64 channels, the size of a core's second-level cache."""

_SQUARED_SINE = [
    torch.tensor(value)
    for value in np.polynomial.Chebyshev.interpolate(
        lambda u: (math.pi * np.sinc(np.sqrt(u))) ** 2, 5, domain=[0, 0.25]
    )
    .convert(kind=np.polynomial.Polynomial)
    .coef.tolist()
]
"""sin²(πr)/r² as a polynomial of degree 5 in r², |r| <= 1/2; its error is 2e-8, less than float32's."""


def conv(layer: nn.Conv1d, x_BCT: Tensor, pad: bool = True) -> Tensor:
    """`layer(x_BCT)`, or without its padding; where possible with the channels of one step side by side in memory.

    oneDNN then neither reorders what comes in nor what goes out: 10 to 40 % less time.
    """
    padding = int(layer.padding[0]) if pad else 0
    if not uses_onednn(x_BCT):
        return functional.conv1d(
            x_BCT, layer.weight, layer.bias, layer.stride, padding, layer.dilation, layer.groups
        )
    x_BC1T = x_BCT.unsqueeze(2).contiguous(memory_format=torch.channels_last)
    stride, dilation = [1, layer.stride[0]], [1, layer.dilation[0]]
    weight = layer.weight.unsqueeze(2)
    y_BC1T = torch.mkldnn_convolution(
        x_BC1T, weight, layer.bias, [0, padding], stride, dilation, layer.groups
    )
    return y_BC1T.squeeze(2)


def squared_sine(alpha: Tensor, x: Tensor) -> Tensor:
    """sin²(alpha * x), a quarter faster than by `torch.sin` and as exact: it has the period π and is even.

    With r = alpha * x / π less the nearest integer and u = r², it is u times a polynomial in u.
    """
    u = (alpha / math.pi) * x
    u.sub_(u.round()).square_()
    *coefficients, last = _SQUARED_SINE
    p = last.expand_as(u)
    y = torch.empty_like(u)
    for coefficient in reversed(coefficients):
        p = torch.addcmul(coefficient, p, u, out=y)
    return p.mul_(u)


def source_of(x_1CT: Tensor) -> Source:
    """The spans of a tensor."""
    length = x_1CT.shape[2]

    def span(start: int, stop: int) -> Tensor:
        inside = x_1CT[:, :, max(start, 0) : min(stop, length)]
        pad_left, pad_right = max(-start, 0), max(stop - length, 0)
        return functional.pad(inside, (pad_left, pad_right)) if pad_left or pad_right else inside

    return span


def silence_outside(x_1CT: Tensor, start: int, stop: int, length: int) -> Tensor:
    """Zero, in place, what `[start, stop)` holds outside of `[0, length)`: the layers' own padding."""
    if start < 0:
        x_1CT[:, :, :-start] = 0
    if stop > length:
        x_1CT[:, :, length - stop :] = 0
    return x_1CT


def compute(source: Source, length: int, steps: int) -> Tensor:
    """The whole signal `[1, C, length]`, `steps` at a time."""
    if length <= steps:
        return source(0, length)
    first = source(0, steps)
    signal = first.new_empty(1, length, first.shape[1]).transpose(1, 2)
    signal[:, :, :steps] = first
    for start in range(steps, length, steps):
        stop = min(start + steps, length)
        signal[:, :, start:stop] = source(start, stop)
    return signal


LARGE_WEIGHTS = 1 << 22
"""A convolution with a stride and more weights than this is run as one matrix product: a convolution would
first copy all of them into oneDNN's own order, which takes longer than to use them."""


class Snake(nn.Module):
    """x + sin²(αx)/α, α per channel (Ziyin et al. 2020)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1, channels, 1))

    def forward(self, x_BCT: Tensor) -> Tensor:
        if uses_onednn(x_BCT):
            return torch.addcmul(x_BCT, squared_sine(self.alpha, x_BCT), (self.alpha + 1e-9).reciprocal())
        return x_BCT + (self.alpha + 1e-9).reciprocal() * torch.sin(self.alpha * x_BCT).square()


class ResidualUnit(nn.Module):
    """A dilated convolution and a pointwise one, each after a snake, beside a skip."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.reach = 3 * dilation
        self.snake1 = Snake(channels)
        self.conv1 = nn.Conv1d(channels, channels, 7, dilation=dilation, padding=self.reach)
        self.snake2 = Snake(channels)
        self.conv2 = nn.Conv1d(channels, channels, 1)

    def forward(self, x_BCT: Tensor) -> Tensor:
        y_BCT = conv(self.conv2, self.snake2(conv(self.conv1, self.snake1(x_BCT))))
        return x_BCT + y_BCT if torch.is_grad_enabled() else y_BCT.add_(x_BCT)

    def spans(self, source: Source, length: int) -> Source:
        """The unit's output, from its input. A snake of 0 is 0, so silence outside is the zero padding."""
        reach = self.reach

        def span(start: int, stop: int) -> Tensor:
            x = source(start - reach, stop + reach)
            y = conv(self.conv1, self.snake1(x), pad=False)
            y = conv(self.conv2, self.snake2(y)).add_(x[:, :, reach:-reach])
            return silence_outside(y, start, stop, length)

        return span


class EncoderBlock(nn.Module):
    """Three residual units, then a convolution that divides the rate by `stride` and doubles the channels."""

    def __init__(self, channels: int, stride: int) -> None:
        super().__init__()
        self.res_unit1 = ResidualUnit(channels, 1)
        self.res_unit2 = ResidualUnit(channels, 3)
        self.res_unit3 = ResidualUnit(channels, 9)
        self.snake1 = Snake(channels)
        self.conv1 = nn.Conv1d(
            channels, 2 * channels, 2 * stride, stride=stride, padding=math.ceil(stride / 2)
        )

    def forward(self, x_BCT: Tensor) -> Tensor:
        x_BCT = self.res_unit3(self.res_unit2(self.res_unit1(x_BCT)))
        padding = int(self.conv1.padding[0])
        return strided_conv(self.conv1, functional.pad(self.snake1(x_BCT), (padding, padding)))

    def infer(self, x_1CT: Tensor) -> Tensor:
        """`forward` of one clip, a span at a time where it is longer than one."""
        length = x_1CT.shape[2]
        if length <= SPAN_STEPS:
            return self.forward(x_1CT)
        return self.compute(source_of(x_1CT), length)

    def compute(self, source: Source, length: int) -> Tensor:
        """The whole output, from an input of `length` steps."""
        steps = SPAN_STEPS // self.conv1.stride[0]
        return compute(self.spans(source, length), self.steps_for(length), steps)

    def steps_for(self, length: int) -> int:
        """Output steps of `length` input steps; below 1 where the input is too short."""
        stride, padding = self.conv1.stride[0], int(self.conv1.padding[0])
        return (length + 2 * padding - 2 * stride) // stride + 1

    def spans(self, source: Source, length: int) -> Source:
        """The block's output, from its input; asked for what is inside only."""
        stride, padding = self.conv1.stride[0], int(self.conv1.padding[0])
        for unit in (self.res_unit1, self.res_unit2, self.res_unit3):
            source = unit.spans(source, length)

        def span(start: int, stop: int) -> Tensor:
            first = start * stride - padding
            x = self.snake1(source(first, first + (stop - start + 1) * stride))
            return strided_conv(self.conv1, x)

        return span


class DecoderBlock(nn.Module):
    """A transposed convolution that multiplies the rate by `stride` and halves the channels, then three units."""

    def __init__(self, channels: int, stride: int) -> None:
        super().__init__()
        self.snake1 = Snake(channels)
        self.conv_t1 = nn.ConvTranspose1d(
            channels,
            channels // 2,
            2 * stride,
            stride=stride,
            padding=math.ceil(stride / 2),
            output_padding=stride % 2,
        )
        self.res_unit1 = ResidualUnit(channels // 2, 1)
        self.res_unit2 = ResidualUnit(channels // 2, 3)
        self.res_unit3 = ResidualUnit(channels // 2, 9)

    def forward(self, x_BCT: Tensor) -> Tensor:
        y_BCT = transposed_conv(self.conv_t1, self.snake1(x_BCT))
        y_BCT = self.res_unit3(self.res_unit2(self.res_unit1(y_BCT)))
        return y_BCT

    def spans(self, source: Source, length: int) -> Source:
        """The block's output of `length * stride` steps, from its input of `length`."""
        stride, padding = self.conv_t1.stride[0], int(self.conv_t1.padding[0])
        total = length * stride

        def upsampled(start: int, stop: int) -> Tensor:
            begin, end = max(start, 0), min(stop, total)
            first = max((begin + padding) // stride - 1, 0)
            last = min((end - 1 + padding) // stride + 1, length)
            y = transposed_conv(self.conv_t1, self.snake1(source(first, last)))
            offset = first * stride
            y = y[:, :, begin - offset : end - offset]
            return functional.pad(y, (begin - start, stop - end)) if (begin, end) != (start, stop) else y

        source_up: Source = upsampled
        for unit in (self.res_unit1, self.res_unit2, self.res_unit3):
            source_up = unit.spans(source_up, total)
        return source_up

    def infer(self, x_1CT: Tensor) -> Tensor:
        """`forward` of one clip, a span at a time where it is longer than one."""
        length = x_1CT.shape[2] * self.conv_t1.stride[0]
        if length <= SPAN_STEPS:
            return self.forward(x_1CT)
        return compute(self.spans(source_of(x_1CT), x_1CT.shape[2]), length, SPAN_STEPS)


class AcousticEncoder(nn.Module):
    """Waveform to `[B, hidden_size, frames]`; `ratios` from the sample rate down."""

    def __init__(self, channels: int, hidden_size: int, ratios: list[int]) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(1, channels, 7, padding=3)
        self.block = nn.ModuleList(
            EncoderBlock(channels << level, stride) for level, stride in enumerate(ratios)
        )
        self.snake1 = Snake(channels << len(ratios))
        self.conv2 = nn.Conv1d(channels << len(ratios), hidden_size, 3, padding=1)

    def forward(self, samples_B1N: Tensor) -> Tensor:
        x_BCT = self.conv1(samples_B1N)
        for block in self.block:
            x_BCT = block(x_BCT)
        y_BCT: Tensor = self.conv2(self.snake1(x_BCT))
        return y_BCT

    def frames_for(self, length: int) -> int:
        """Frames that `forward` makes of `length` samples; below 1 where they are too few."""
        for block in self.block:
            assert isinstance(block, EncoderBlock)
            length = block.steps_for(length)
        return length

    def infer(self, samples_11N: Tensor) -> Tensor:
        """`forward` of one clip, a span at a time; the first convolution is never whole in memory."""
        length = samples_11N.shape[2]
        blocks = [block for block in self.block if isinstance(block, EncoderBlock)]
        x_1CT = blocks[0].compute(conv_spans(self.conv1, source_of(samples_11N), length), length)
        for block in blocks[1:]:
            x_1CT = block.infer(x_1CT)
        return conv(self.conv2, self.snake1(x_1CT))


class AcousticDecoder(nn.Module):
    """`[B, hidden_size, frames]` to a waveform; `ratios` from the frame rate up."""

    def __init__(self, channels: int, hidden_size: int, ratios: list[int]) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(hidden_size, channels, 7, padding=3)
        self.block = nn.ModuleList(
            DecoderBlock(channels >> level, stride) for level, stride in enumerate(ratios)
        )
        self.snake1 = Snake(channels >> len(ratios))
        self.conv2 = nn.Conv1d(channels >> len(ratios), 1, 7, padding=3)

    def forward(self, x_BCT: Tensor) -> Tensor:
        x_BCT = self.conv1(x_BCT)
        for block in self.block:
            x_BCT = block(x_BCT)
        y_B1N: Tensor = self.conv2(self.snake1(x_BCT))
        return y_B1N

    def infer(self, x_1CT: Tensor) -> Tensor:
        """`forward` of one clip, a span at a time."""
        x_1CT = conv(self.conv1, x_1CT)
        *blocks, last = (block for block in self.block if isinstance(block, DecoderBlock))
        for block in blocks:
            x_1CT = block.infer(x_1CT)
        length = x_1CT.shape[2] * last.conv_t1.stride[0]
        activated = mapped(self.snake1, last.spans(source_of(x_1CT), x_1CT.shape[2]))
        return compute(conv_spans(self.conv2, activated, length), length, SPAN_STEPS)


def mapped(activation: Snake, source: Source) -> Source:
    """The spans of an elementwise function that keeps silence."""
    return lambda start, stop: activation(source(start, stop))


def conv_spans(layer: nn.Conv1d, source: Source, length: int) -> Source:
    """The output of a convolution of stride 1 that keeps the length."""
    reach = int(layer.padding[0])

    def span(start: int, stop: int) -> Tensor:
        y = conv(layer, source(start - reach, stop + reach), pad=False)
        return silence_outside(y, start, stop, length)

    return span


def strided_conv(layer: nn.Conv1d, x_BCT: Tensor) -> Tensor:
    """A convolution of what is padded already, by the faster of two ways (`LARGE_WEIGHTS`)."""
    if layer.weight.numel() < LARGE_WEIGHTS or not uses_onednn(x_BCT):
        return conv(layer, x_BCT, pad=False)
    windows_BTCK = x_BCT.unfold(2, layer.kernel_size[0], layer.stride[0]).transpose(1, 2)
    return multiply_exactly(windows_BTCK.flatten(2), layer.weight.flatten(1), layer.bias).transpose(1, 2)


def transposed_conv(layer: nn.ConvTranspose1d, x_BCT: Tensor) -> Tensor:
    """A transposed convolution of kernel 2 * stride, by the faster of two ways (`LARGE_WEIGHTS`)."""
    if not uses_onednn(x_BCT):
        y_BCT: Tensor = layer(x_BCT)
        return y_BCT
    (batch, _, steps), stride, padding = x_BCT.shape, layer.stride[0], int(layer.padding[0])
    if layer.weight.numel() < LARGE_WEIGHTS:
        x_BC1T = x_BCT.unsqueeze(2).contiguous(memory_format=torch.channels_last)
        more = (0, layer.output_padding[0])
        weight = layer.weight.unsqueeze(2)
        y_BC1T = functional.conv_transpose2d(x_BC1T, weight, layer.bias, (1, stride), (0, padding), more)
        return y_BC1T.squeeze(2)
    pieces = multiply_exactly(x_BCT.transpose(1, 2), layer.weight.flatten(1).t(), None)
    pieces_BTKC = pieces.view(batch, steps, layer.out_channels, 2 * stride).transpose(2, 3)
    whole_BTSC = pieces.new_zeros(batch, steps + 1, stride, layer.out_channels)
    whole_BTSC[:, :-1] = pieces_BTKC[:, :, :stride]
    whole_BTSC[:, 1:] += pieces_BTKC[:, :, stride:]
    inside_BTC = whole_BTSC.flatten(1, 2)[:, padding : padding + steps * stride]
    assert layer.bias is not None
    return (inside_BTC + layer.bias).transpose(1, 2)
