"""A harmonic source: from pitch to the spectrum of a pulse train whose phase runs on from frame to frame.

Its share of each band is trained on how much of the recording's spectrum is harmonic there.

Shapes: B batch, F mel frames, M voiced frames, L lags, P bands, H hop samples, W window samples, K frequency bins,
N samples.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tokenizer.native.operations import frame
from tokenizer.native.pitch import PitchTrack

DISPERSION_S = 0.01
"""Delay of the band's edge against 0 Hz, growing evenly: a pulse becomes a short chirp, less of a click (as the pulse
dispersion filter of MELP, MIL-STD-3005, makes it)."""


class Excitation(NamedTuple):
    """Spectra of the source `[B, F, K]`, complex, about 1 at the harmonics, and voicing `[B, F]`."""

    spectrum_BFK: Tensor
    voicing_BF: Tensor


class SourceState(NamedTuple):
    """The source's state after a piece: it is ahead of the spectra that were asked for."""

    turns_B: Tensor
    """Phase in turns, float64."""
    hz_B: Tensor
    samples_BN: Tensor
    ready: Excitation


class HarmonicSource(nn.Module):
    """Pitch `[B, F]` to short-time spectra of a pulse train that has every harmonic up to the band's edge.

    The phase is the integral of the pitch, which is interpolated between the frames' centres; a frame's window
    therefore needs the pitch of `FUTURE_PITCH_FRAMES` frames behind it. Everything but the spectrum is float64.
    Source: neural source-filter models (arXiv 1810.11946), with the closed form of the sum of all harmonics.
    """

    def __init__(self, sample_rate: int, n_fft: int, hop_samples: int) -> None:
        super().__init__()
        self.sample_rate, self.n_fft, self.hop_samples = sample_rate, n_fft, hop_samples
        self.register_buffer("window_W", torch.hann_window(n_fft), persistent=False)
        share_K = torch.linspace(0, 1, n_fft // 2 + 1)
        delay_turns_K = DISPERSION_S * sample_rate / 2 * share_K.square() / 2
        unit_K = torch.polar(torch.ones_like(share_K), -2 * math.pi * delay_turns_K)
        self.register_buffer("dispersion_K", unit_K, persistent=False)
        self.window_W: Tensor
        self.dispersion_K: Tensor

    @torch.no_grad()
    def step(
        self, track: PitchTrack, state: SourceState | None, frames: int
    ) -> tuple[Excitation, SourceState]:
        """The next `frames` spectra.

        Args:
            track: pitch and voicing that continue those of the state.

        Raises:
            ValueError: the pitch of too few frames ahead was given.
        """
        state = self._begin(track) if state is None else state
        samples_BN, turns_B = self.pulses(track.hz_BF, state)
        samples_BN = torch.cat([state.samples_BN, samples_BN], dim=1)
        done = (samples_BN.shape[1] - self.n_fft) // self.hop_samples + 1
        framed_BFW = frame(samples_BN, self.n_fft, self.hop_samples)
        spectrum_BFK = torch.fft.rfft(framed_BFW * self.window_W) * self.dispersion_K
        spectrum_BFK = torch.cat([state.ready.spectrum_BFK, spectrum_BFK], dim=1)
        voicing_BF = torch.cat([state.ready.voicing_BF, track.voicing_BF], dim=1)
        if spectrum_BFK.shape[1] < frames:
            raise ValueError(
                f"{frames} spectra need more pitch ahead: there is enough for {spectrum_BFK.shape[1]}"
            )
        ready = Excitation(spectrum_BFK[:, frames:], voicing_BF[:, frames:])
        rest_BN = samples_BN[:, done * self.hop_samples :]
        state = SourceState(turns_B, track.hz_BF[:, -1], rest_BN, ready)
        return Excitation(spectrum_BFK[:, :frames], voicing_BF[:, :frames]), state

    def _begin(self, track: PitchTrack) -> SourceState:
        """Silence before the middle of the first frame."""
        batch, before = len(track.hz_BF), (self.n_fft - self.hop_samples) // 2 - self.hop_samples // 2
        zeros = self.window_W.new_zeros
        spectrum_BFK = zeros(batch, 0, self.n_fft // 2 + 1, dtype=torch.complex64)
        ready = Excitation(spectrum_BFK, track.voicing_BF[:, :0])
        return SourceState(zeros(batch, dtype=torch.float64), track.hz_BF[:, 0], zeros(batch, before), ready)

    def pulses(self, hz_BF: Tensor, state: SourceState) -> tuple[Tensor, Tensor]:
        """Samples `[B, F * H]` from the middle of the frame before to that of the last, and the phase there."""
        before_BF = torch.cat([state.hz_B[:, None], hz_BF[:, :-1]], dim=1)
        ends_BF = (before_BF + hz_BF) * (self.hop_samples / (2 * self.sample_rate))
        ends_BF = torch.cat([state.turns_B[:, None], ends_BF], dim=1).cumsum(dim=1)
        step_H = torch.arange(1, self.hop_samples + 1, device=hz_BF.device, dtype=torch.float64)
        step_H = step_H / self.sample_rate
        share_H = step_H / (2 * step_H[-1])
        change_BF = hz_BF - before_BF
        turns_BFH = ends_BF[:, :-1, None] + step_H * (before_BF[..., None] + share_H * change_BF[..., None])
        pitch_BFH = before_BF[..., None] + 2 * share_H * change_BF[..., None]
        below_edge_BFH = self.sample_rate / (2 * pitch_BFH)
        amplitude = 2 / float(self.window_W.sum())
        samples_BFH = amplitude * _sum_of_cosines(turns_BFH, below_edge_BFH)
        return samples_BFH.flatten(1).float(), ends_BF[:, -1] % 1.0


def _sum_of_cosines(turns: Tensor, number: Tensor) -> Tensor:
    """cos(x) + cos(2 x) + ... for a phase x given in turns, by Dirichlet's kernel.

    Of a number of cosines between n and n + 1 the first n - 1 are whole, and the next one has the fraction as its
    amplitude: none begins or ends at once while the number moves.
    """
    count = torch.floor(number)
    last = torch.cos(2 * math.pi * (count * turns - torch.round(count * turns)))
    return _dirichlet(turns, count) - (1 - (number - count)) * last


def _dirichlet(turns: Tensor, count: Tensor) -> Tensor:
    half = math.pi * (turns - turns.round())
    sine = half.sin()
    at_pulse = sine.abs() < 1e-7
    ratio = ((2 * count + 1) * half).sin() / torch.where(at_pulse, 1.0, sine)
    return torch.where(at_pulse, 2 * count + 1, ratio) / 2 - 0.5


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
