"""One channel of many: the mean of the channels, or the loudest one where the channels cancel each other. Two of many:
by the rule for surround sound.

Of a recording with one inverted channel the mean is silence, though each channel is loud. Whoever mixes to mono, or
measures what a listener to mono hears, does it here, so that a level is that of the sound which is used.

Shapes: C channels, N samples, B blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_SAMPLES = 8192
"""Samples of the blocks in which cancellation is measured: it may hold for a part of a recording."""
MIN_POWER_RATIO = 0.5
"""Power of the mean, relative to that of the mean of uncorrelated channels, below which a block is cancelled. Two
equally loud channels reach it at a correlation of -0.5. Of 12 real recordings of 2 to 8 channels the lowest is 1.1."""
MIN_CANCELLED_SHARE = 0.2
"""Share of the power in cancelled blocks from which one channel is taken. The largest in those recordings is 0.02."""

SURROUND = {
    3: "L R C",
    4: "L R Ls Rs",
    5: "L R C Ls Rs",
    6: "L R C LFE Ls Rs",
    7: "L R C LFE Cs Ls Rs",
    8: "L R C LFE Ls Rs Ls Rs",
}
"""Channels of surround sound by their number, in the order of WAV and FLAC."""
_STEREO_GAINS = {"L": (1.0, 0.0), "R": (0.0, 1.0), "C": (0.5**0.5, 0.5**0.5), "LFE": (0.0, 0.0),
                 "Ls": (0.5**0.5, 0.0), "Rs": (0.0, 0.5**0.5), "Cs": (0.5, 0.5)}  # fmt: skip
"""Gains to left and right: ITU-R BS.775, which leaves the channel of low effects out."""


class Mixdown:
    """Measures whether channels cancel each other, in one pass over pieces of any size, and then mixes to mono."""

    def __init__(self) -> None:
        self._rest_CN: Tensor | None = None
        self._total = self._cancelled = 0.0
        self._power_C: Tensor | None = None

    def push(self, samples_CN: Tensor) -> None:
        """Measure further samples; what is fewer than a block waits for the next ones, or for `channel`."""
        samples_CN = samples_CN.detach()
        if self._rest_CN is not None:
            samples_CN = torch.cat([self._rest_CN, samples_CN], dim=1)
        num_complete = samples_CN.shape[1] // BLOCK_SAMPLES * BLOCK_SAMPLES
        self._rest_CN = samples_CN[:, num_complete:]
        self._measure(samples_CN[:, :num_complete], BLOCK_SAMPLES)

    def channel(self) -> int | None:
        """The loudest channel where the channels cancel each other; None: the mean is heard."""
        if self._rest_CN is not None and self._rest_CN.shape[1]:
            self._measure(self._rest_CN, self._rest_CN.shape[1])
        self._rest_CN = None
        if self._power_C is None or self._cancelled < MIN_CANCELLED_SHARE * self._total or not self._total:
            return None
        return int(self._power_C.argmax())

    def _measure(self, samples_CN: Tensor, block: int) -> None:
        if samples_CN.shape[1] == 0:
            return
        blocks_CBN = samples_CN.reshape(len(samples_CN), -1, block)
        power_CB = blocks_CBN.square().sum(dim=2).double()
        mean_power_B = blocks_CBN.mean(dim=0).square().sum(dim=1).double()
        is_cancelled_B = len(samples_CN) ** 2 * mean_power_B < MIN_POWER_RATIO * power_CB.sum(dim=0)
        self._total += float(power_CB.sum())
        self._cancelled += float(power_CB[:, is_cancelled_B].sum())
        power_C = power_CB.sum(dim=1)
        self._power_C = power_C if self._power_C is None else self._power_C + power_C


def mono_channel(samples_CN: Tensor) -> int | None:
    """The channel that stands for all of them in mono, as they cancel each other; None: their mean does."""
    if samples_CN.shape[0] < 2:
        return None
    mixdown = Mixdown()
    mixdown.push(samples_CN)
    return mixdown.channel()


def mix(samples_CN: Tensor, channel: int | None) -> Tensor:
    """The channel, or the mean of all where it is None, `[1, N]`."""
    if samples_CN.shape[0] == 1:
        return samples_CN
    return samples_CN.mean(dim=0, keepdim=True) if channel is None else samples_CN[channel : channel + 1]


def to_mono(samples_CN: Tensor) -> Tensor:
    """The mean of the channels, or the loudest channel where they cancel each other, `[1, N]`."""
    return mix(samples_CN, mono_channel(samples_CN))


def to_stereo(samples_CN: Tensor) -> Tensor:
    """Surround sound of 3 to 8 channels as stereo, `[2, N]`, with gains that sum to 1 at most: it never clips."""
    gains_C2 = torch.tensor([_STEREO_GAINS[name] for name in SURROUND[samples_CN.shape[0]].split()])
    gains_2C = gains_C2.T.to(samples_CN) / gains_C2.sum(dim=0).max().item()
    return gains_2C @ samples_CN
