"""Reconstruction losses: multi-scale log-mel and log STFT magnitude."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from tokenizer.native.framing import magnitudes
from tokenizer.native.layers import mel_filters
from tokenizer.quantizers.codebooks import at_least_float32

WINDOWS = (256, 512, 1024, 2048)
MELS = (20, 40, 80, 120)


class ReconstructionLoss(nn.Module):
    """Mean over four scales of L1 on log-mel, and the same on log STFT magnitude (natural logarithms)."""

    def __init__(self, sample_rate: int, clamp: float = 1e-3) -> None:
        super().__init__()
        self.clamp = clamp
        for window, mels in zip(WINDOWS, MELS, strict=True):
            self.register_buffer(
                f"filters_{window}", mel_filters(sample_rate, window, mels), persistent=False
            )
            self.register_buffer(f"window_{window}", torch.hann_window(window), persistent=False)

    def forward(
        self, given_BN: Tensor, target_BN: Tensor, windows: Sequence[int] = WINDOWS
    ) -> dict[str, Tensor]:
        """`{"mel": ..., "stft": ...}`: mean absolute differences of `[B, N]` waveforms over these scales."""
        mel, stft = given_BN.new_zeros(()), given_BN.new_zeros(())
        for window in windows:
            given_mel, given_stft = self._logs(given_BN, window)
            with torch.no_grad():
                target_mel, target_stft = self._logs(target_BN, window)
            mel = mel + (given_mel - target_mel).abs().mean() / len(windows)
            stft = stft + (given_stft - target_stft).abs().mean() / len(windows)
        return {"mel": mel, "stft": stft}

    def _logs(self, samples_BN: Tensor, window: int) -> tuple[Tensor, Tensor]:
        hop = window // 4
        margin = window // 2
        padded = functional.pad(at_least_float32(samples_BN), (margin, margin + -samples_BN.shape[1] % hop))
        with torch.autocast(samples_BN.device.type, enabled=False):
            magnitude_BTF = magnitudes(padded, getattr(self, f"window_{window}"), hop)
            mel_BTM = magnitude_BTF @ getattr(self, f"filters_{window}")
        return mel_BTM.clamp_min(self.clamp).log(), magnitude_BTF.clamp_min(self.clamp).log()
