"""How much of a recording's spectrum is harmonic, band by band: what the harmonic source's share is trained on.

Shapes: B batch, F mel frames, M voiced frames, L lags, K frequency bins, P bands, W window samples.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn

BAND_EDGES_HZ = (60.0, 700.0, 1400.0, 2200.0, 3200.0, 4500.0, 7000.0, 12000.0)
LAG_OFFSETS = (-0.03, -0.015, 0.0, 0.015, 0.03)
"""Lags that are tried, relative to the pitch's period: a label is not exact."""
NOISE_AUTOCORRELATION = 0.2
"""The highest autocorrelation over the lags tried that noise has, on average."""


class HarmonicShare(nn.Module):
    """The share of a frame's amplitude that is harmonic, in bands.

    The autocorrelation of a band at the pitch's period, over that of a pulse train whose pitch moves alike (the
    movement within a window smears high harmonics in both), is the share of its power. With an amplitude p of the
    pulse train and 1 - p of noise, the power is p^2 / (p^2 + (1 - p)^2).
    """

    def __init__(self, sample_rate: int, window_W: Tensor) -> None:
        super().__init__()
        n_fft = len(window_W)
        self.sample_rate = sample_rate
        hz_K = torch.arange(n_fft // 2 + 1) * (sample_rate / n_fft)
        edges = [*(edge for edge in BAND_EDGES_HZ if edge < sample_rate / 2), sample_rate / 2 + 1]
        bands = list(pairwise(edges))
        bands_KP = torch.stack([(hz_K >= low) & (hz_K < high) for low, high in bands], dim=1)
        self.centres_hz = [(low + high) / 2 for low, high in bands]
        of_window = torch.fft.irfft(torch.fft.rfft(window_W.double(), 2 * n_fft).abs().square())[:n_fft]
        self.register_buffer("hz_K", hz_K, persistent=False)
        self.register_buffer("bands_KP", bands_KP.float(), persistent=False)
        self.register_buffer("offsets_L", torch.tensor(LAG_OFFSETS), persistent=False)
        self.register_buffer("window_autocorrelation", (of_window / of_window[0]).float(), persistent=False)
        self.hz_K: Tensor
        self.bands_KP: Tensor
        self.offsets_L: Tensor
        self.window_autocorrelation: Tensor

    @torch.no_grad()
    def forward(self, real_MK: Tensor, source_MK: Tensor, hz_M: Tensor) -> Tensor:
        """`[M, P]` in [0, 1], of voiced frames.

        Args:
            real_MK: power spectra of the recording.
            source_MK: power spectra of the pulse train at its pitch.
            hz_M: the pitch.
        """
        real_MP, source_MP = self._autocorrelation(torch.stack([real_MK, source_MK]), hz_M)
        above_MP = (source_MP - NOISE_AUTOCORRELATION).clamp_min(0.1)
        power_MP = ((real_MP - NOISE_AUTOCORRELATION) / above_MP).clamp(0, 1)
        harmonic_MP, rest_MP = power_MP.sqrt(), (1 - power_MP).sqrt()
        return harmonic_MP / (harmonic_MP + rest_MP)

    def _autocorrelation(self, power_XMK: Tensor, hz_M: Tensor) -> Tensor:
        """The highest of the lags tried, `[X, M, P]`."""
        seconds_ML = (1 + self.offsets_L) / hz_M[:, None]
        cosine_MLK = torch.cos(2 * math.pi * seconds_ML[..., None] * self.hz_K)
        in_band_XMKP = power_XMK[..., None] * self.bands_KP
        values_XMLP = cosine_MLK @ in_band_XMKP
        lag_ML = (
            (seconds_ML * self.sample_rate).round().long().clamp_max(len(self.window_autocorrelation) - 1)
        )
        total_XM1P = in_band_XMKP.sum(dim=2)[:, :, None].clamp_min(1e-10)
        return (values_XMLP / (total_XM1P * self.window_autocorrelation[lag_ML][..., None])).amax(dim=2)
