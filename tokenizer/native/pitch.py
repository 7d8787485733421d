"""Pitch in the tokenizer: salience at the encoder's input, pitch that the decoder reads from latents, and its loss.

Shapes: B batch, T latent frames, R mel frames per latent frame, F = T * R mel frames, K frequency bins, L lags,
S pitch classes, D latent dimension, W window samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from tokenizer.native.operations import ExactLinear
from tokenizer.quantizers.codebooks import at_least_float32

LOWEST_HZ, VOICE_HZ, SOUND_HZ = 60.0, 500.0, 1500.0
"""The lowest pitch, and the highest one of a voice and of other sounds (a cock's crow, a siren)."""
LAGS_PER_OCTAVE = 21
SALIENCE_BAND_HZ = 4000.0
MAGNITUDE_POWER = 0.67
"""Exponent of the magnitudes in the autocorrelation: the plain one has 2, which favours the strongest harmonic."""

CENTS_PER_CLASS, FIRST_CLASS_HZ = 40.0, 55.0
CLASSES_ABOVE = 4
"""Pitch classes above the highest pitch."""
CLASS_BLUR = 0.8
"""Standard deviation of a target over the pitch classes, in classes."""
CLASSES_AROUND_BEST = 3
"""Classes on each side of the most likely one; their weighted mean is the pitch."""
VOICED_ABOVE = 1 / 3
"""Probability of voice from which a frame is voiced: a voice that breaks off disturbs more than one that holds on."""
VOICING_SLOPE = 4.0
"""Factor of the logits of voicing when sound is decoded: a frame that is half voiced would be heard as a whisper."""
PITCH_PAST_FRAMES, PITCH_FUTURE_FRAMES = 3, 1
"""Latent frames before and after its own from which a pitch is read."""


class PitchTrack(NamedTuple):
    """Pitch in Hz (float64) and voicing in [0, 1], each `[B, F]`."""

    hz_BF: Tensor
    voicing_BF: Tensor


class PitchTarget(NamedTuple):
    """Pitch of recordings in Hz `[B, F]`, 0 where there is no voice, and the voiced share of the global batch's frames.

    Losses are means over the voiced frames of all ranks; the share makes a rank's sum a part of such a mean.
    """

    hz_BF: Tensor
    voiced_share: float

    def to(self, device: torch.device) -> PitchTarget:
        """The target on another device."""
        return self._replace(hz_BF=self.hz_BF.to(device))

    def voiced_mean(self, values_BF: Tensor) -> Tensor:
        """The mean over voiced frames; several ranks' means, weighted by their rows, add up to that of all."""
        return (values_BF * (self.hz_BF > 0)).mean() / max(self.voiced_share, 1e-6)


class PitchLogits(NamedTuple):
    """Logits of the pitch classes `[B, F, S]` and of voicing `[B, F]`."""

    pitch_BFS: Tensor
    voicing_BF: Tensor


class PitchSalience(nn.Module):
    """STFT magnitudes `[B, F, K]` to a generalised autocorrelation at log-spaced lags, `[B, F, L]`.

    The values do not depend on the level, and the autocorrelation of the window itself is divided out.

    Source: Tolonen and Karjalainen, "A computationally efficient multipitch analysis model" (2000).
    """

    def __init__(self, sample_rate: int, window_W: Tensor, highest_hz: float) -> None:
        super().__init__()
        octaves = math.log2(highest_hz / LOWEST_HZ)
        n_fft, self.num_lags = len(window_W), round(octaves * LAGS_PER_OCTAVE)
        self.bins = min(n_fft // 2, round(SALIENCE_BAND_HZ * n_fft / sample_rate)) + 1
        ratio_L = torch.linspace(0, 1, self.num_lags, dtype=torch.float64)
        lag_L = sample_rate / (LOWEST_HZ * (highest_hz / LOWEST_HZ) ** ratio_L)
        of_window = torch.fft.irfft(torch.fft.rfft(window_W.double(), 2 * n_fft).abs().square())
        window_L = of_window[lag_L.round().long().clamp_max(n_fft - 1)] / of_window[0]
        angle_KL = 2 * torch.pi / n_fft * torch.arange(self.bins, dtype=torch.float64)[:, None] * lag_L
        cosines_KL = angle_KL.cos() / window_L.clamp_min(0.1)
        self.register_buffer("cosines_KL", cosines_KL.float(), persistent=False)
        self.cosines_KL: Tensor

    def forward(self, magnitude_BFK: Tensor) -> Tensor:
        compressed_BFK = magnitude_BFK[..., : self.bins].pow(MAGNITUDE_POWER)
        salience: Tensor = compressed_BFK @ self.cosines_KL
        return salience / compressed_BFK.sum(dim=2, keepdim=True).clamp_min(1e-6)


class PitchPredictor(nn.Module):
    """Reads pitch and voicing of R mel frames from each latent and its neighbours.

    When sound is decoded (`track`), products are float64 and of one shape for each frame: the source adds pitch up to a
    phase over minutes, which is to be the same however many frames are decoded at a time, and in other runtimes.
    """

    def __init__(
        self, latent_dim: int, frames_per_latent: int, highest_hz: float, hidden_size: int = 256
    ) -> None:
        super().__init__()
        self.frames_per_latent = frames_per_latent
        window = PITCH_PAST_FRAMES + 1 + PITCH_FUTURE_FRAMES
        self.net = nn.Sequential(
            ExactLinear(window * latent_dim, hidden_size),
            nn.GELU(),
            ExactLinear(hidden_size, hidden_size),
            nn.GELU(),
            ExactLinear(hidden_size, frames_per_latent * (num_pitch_classes(highest_hz) + 1)),
        )

    def forward(self, latent_BTD: Tensor) -> PitchLogits:
        """Latents with `PITCH_PAST_FRAMES` before and `PITCH_FUTURE_FRAMES` behind those that are read."""
        return self._split(self.net(self.windows(latent_BTD)))

    def track(self, latent_BTD: Tensor) -> PitchTrack:
        """The pitch that `forward` gives logits of, the same for a latent whatever stands beside its window."""
        windows_BTX, layers = self.windows(latent_BTD), self.exact_layers()
        frames = [
            self.exact_logits(windows_BTX[:, t : t + 1].clone(), layers) for t in range(windows_BTX.shape[1])
        ]
        pitch, voicing = (torch.cat(parts, dim=1) for parts in zip(*frames, strict=True))
        return decode_pitch(PitchLogits(pitch, voicing))

    def exact_layers(self) -> list[tuple[Tensor, Tensor]]:
        """Weights and biases in float64."""
        layers = [layer for layer in self.net if isinstance(layer, nn.Linear)]
        return [(layer.weight.double(), layer.bias.double()) for layer in layers]

    def exact_logits(self, windows_BTX: Tensor, layers: Sequence[tuple[Tensor, Tensor]]) -> PitchLogits:
        """Logits of the pitch and voicing of each window, by products in float64; what lies between them is float32."""
        *hidden_layers, last = layers
        for weight, bias in hidden_layers:
            windows_BTX = functional.gelu(functional.linear(windows_BTX.double(), weight, bias).float())
        return self._split(functional.linear(windows_BTX.double(), *last))

    def windows(self, latent_BTD: Tensor) -> Tensor:
        """Each latent that is read with its neighbours, `[B, T, X]`."""
        count = PITCH_PAST_FRAMES + 1 + PITCH_FUTURE_FRAMES
        return torch.cat([latent_BTD[:, i : i - count + 1 or None] for i in range(count)], dim=2)

    def _split(self, out_BTX: Tensor) -> PitchLogits:
        out_BFX = at_least_float32(out_BTX).unflatten(2, (self.frames_per_latent, -1)).flatten(1, 2)
        return PitchLogits(out_BFX[..., :-1], out_BFX[..., -1])


def num_pitch_classes(highest_hz: float) -> int:
    """Classes from `FIRST_CLASS_HZ` on that reach beyond the highest pitch."""
    return math.ceil(1200 / CENTS_PER_CLASS * math.log2(highest_hz / FIRST_CLASS_HZ)) + CLASSES_ABOVE


def decode_pitch(logits: PitchLogits) -> PitchTrack:
    """The weighted mean of the classes around the most likely one (CREPE, arXiv 1802.06182, equation 2).

    The pitch is float64: vector code may differ in the last bit with the number of frames, and phases add pitch up.
    """
    best_BF1 = logits.pitch_BFS.argmax(dim=2, keepdim=True)
    around = torch.arange(-CLASSES_AROUND_BEST, CLASSES_AROUND_BEST + 1, device=best_BF1.device)
    classes_BFX = (best_BF1 + around).clamp(0, logits.pitch_BFS.shape[2] - 1)
    weight_BFX = logits.pitch_BFS.gather(2, classes_BFX).double().softmax(dim=2)
    cents_BF = (weight_BFX * classes_BFX).sum(dim=2) * CENTS_PER_CLASS
    voicing_BF = torch.sigmoid(
        VOICING_SLOPE * (logits.voicing_BF - math.log(VOICED_ABOVE / (1 - VOICED_ABOVE)))
    )
    return PitchTrack(FIRST_CLASS_HZ * 2 ** (cents_BF / 1200), voicing_BF.float())


def pitch_loss(logits: PitchLogits, target: PitchTarget) -> Tensor:
    """Cross entropy of the pitch class over voiced frames, plus that of voicing over all frames."""
    hz_BF = target.hz_BF
    class_BF = 1200 / CENTS_PER_CLASS * torch.log2(hz_BF.clamp_min(FIRST_CLASS_HZ) / FIRST_CLASS_HZ)
    distance_BFS = torch.arange(logits.pitch_BFS.shape[2], device=hz_BF.device) - class_BF[..., None]
    target_BFS = torch.softmax(-0.5 * (distance_BFS / CLASS_BLUR).square(), dim=2)
    entropy_BF = -(target_BFS * logits.pitch_BFS.log_softmax(dim=2)).sum(dim=2)
    voicing = functional.binary_cross_entropy_with_logits(
        logits.voicing_BF, (hz_BF > 0).to(logits.voicing_BF)
    )
    return target.voiced_mean(entropy_BF) + voicing
