"""Phases for magnitudes that come in blocks: iterative reconstruction with look-ahead.

As RTISI-LA (Zhu, Beauregard and Wyse 2007): the phases of a block's frames are found by alternating between the
waveform and its spectrum (Griffin and Lim 1984, with the momentum of Perraudin et al. 2013), together with frames
that follow it and beside the waveform of those before it, which is settled. Each block is worked on when the frames
that it looks ahead to are there, so that pieces of any length give the same samples.

Shapes: C channels, T mel frames, F frequency bins, W window samples, N samples.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from tokenizer.native.operations import frame, overlap_add

BLOCK_LATENTS = 4
"""Latent frames whose phases are found and settled together."""
AHEAD_LATENTS = 2
"""Latent frames after a block that are reconstructed with it, and again with their own block."""
ITERATIONS = 32
MOMENTUM = 0.99


class PhaseStream:
    """Magnitudes `[C, t, F]` in, waveform `[C, n]` out; frame t is centred on its own hop.

    Args:
        window_W: its length is a multiple of the hop.
        stride: mel frames per latent frame.
    """

    def __init__(self, window_W: Tensor, hop_samples: int, channels: int, stride: int) -> None:
        self._window_W, self._hop = window_W, hop_samples
        self._block, self._ahead = BLOCK_LATENTS * stride, AHEAD_LATENTS * stride
        bins = len(window_W) // 2 + 1
        self._waiting_CTF = window_W.new_zeros(channels, 0, bins)
        self._settled_CN = window_W.new_zeros(channels, len(window_W) - hop_samples)
        """Settled frames, windowed twice, where later frames overlap with them; and the sum of their windows."""
        self._weight_N = torch.zeros_like(self._settled_CN[0])
        self._trim = (len(window_W) - hop_samples) // 2
        self._dice = torch.Generator().manual_seed(0)
        self._phases_CTF = self._waiting_CTF

    def push(self, magnitudes_CTF: Tensor) -> Tensor:
        """The samples that these frames settle; none may be."""
        self._waiting_CTF = torch.cat([self._waiting_CTF, magnitudes_CTF], dim=1)
        pieces = [self._settled_CN[:, :0]]
        while self._waiting_CTF.shape[1] >= self._block + self._ahead:
            pieces.append(self._settle(self._block, self._block + self._ahead))
        return torch.cat(pieces, dim=1)

    def flush(self) -> Tensor:
        """The rest: what waited, and half a window."""
        pieces = [self._settled_CN[:, :0]]
        while num_waiting := self._waiting_CTF.shape[1]:
            pieces.append(
                self._settle(min(num_waiting, self._block), min(num_waiting, self._block + self._ahead))
            )
        tail_CN = self._settled_CN / self._weight_N.clamp_min(1e-3)
        pieces.append(tail_CN[:, : len(self._window_W) - self._hop - (len(self._window_W) - self._hop) // 2])
        return torch.cat(pieces, dim=1)

    def _settle(self, block: int, frames: int) -> Tensor:
        """Find the phases of the next `frames`, and settle the first `block` of them."""
        magnitude_CTF = self._waiting_CTF[:, :frames]
        num_known = self._phases_CTF.shape[1]
        drawn_CTF = torch.rand(
            (magnitude_CTF.shape[0], frames - num_known, magnitude_CTF.shape[2]), generator=self._dice
        )
        angle_CTF = torch.cat([self._phases_CTF, drawn_CTF.to(magnitude_CTF) * (2 * math.pi)], dim=1)
        spectrum_CTF, before_CTF = torch.polar(magnitude_CTF, angle_CTF), None
        weight_N = self._weights(frames).clamp_min(1e-3)
        for _ in range(ITERATIONS):
            found_CTF = self._spectrum(self._overlapped(spectrum_CTF) / weight_N)
            ahead_CTF = found_CTF
            if before_CTF is not None:
                ahead_CTF = found_CTF - MOMENTUM / (1 + MOMENTUM) * before_CTF
            before_CTF = found_CTF
            spectrum_CTF = torch.polar(magnitude_CTF, ahead_CTF.angle())
        self._phases_CTF = spectrum_CTF[:, block:].angle()
        self._waiting_CTF = self._waiting_CTF[:, block:]
        return self._keep(spectrum_CTF[:, :block])

    def _keep(self, spectrum_CTF: Tensor) -> Tensor:
        """Settle these frames; returns the samples that no later frame overlaps with."""
        frames, done = spectrum_CTF.shape[1], spectrum_CTF.shape[1] * self._hop
        settled_CN = self._overlapped(spectrum_CTF)
        weight_N = self._weights(frames)
        samples_CN = settled_CN[:, :done] / weight_N[:done].clamp_min(1e-3)
        self._settled_CN, self._weight_N = settled_CN[:, done:], weight_N[done:]
        trim = min(self._trim, done)
        self._trim -= trim
        return samples_CN[:, trim:]

    def _overlapped(self, spectrum_CTF: Tensor) -> Tensor:
        """The frames' windowed waveforms on top of the settled ones: `[C, T * hop + W - hop]`."""
        frames_CTW = torch.fft.irfft(spectrum_CTF, n=len(self._window_W)) * self._window_W
        made_CN = overlap_add(frames_CTW, self._hop)
        return made_CN + functional.pad(self._settled_CN, (0, made_CN.shape[1] - self._settled_CN.shape[1]))

    def _weights(self, frames: int) -> Tensor:
        squares_1TW = self._window_W.square().expand(1, frames, -1)
        sum_N = overlap_add(squares_1TW, self._hop)[0]
        return sum_N + functional.pad(self._weight_N, (0, len(sum_N) - len(self._weight_N)))

    def _spectrum(self, samples_CN: Tensor) -> Tensor:
        framed_CTW = frame(samples_CN, len(self._window_W), self._hop)
        return torch.fft.rfft(framed_CTW * self._window_W)
