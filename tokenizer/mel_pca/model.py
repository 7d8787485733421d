"""Principal components of log-mel frames as latents, and their sound by reconstruction of phases.

The closed-form optimum of a linear variational autoencoder is probabilistic principal component analysis (Tipping and
Bishop 1999, equations 3.7 and 3.8; Lucas et al., arXiv 1911.02469): nothing is trained step by step. What is lost is
the phase, which `phases.py` makes up, and what the components leave out.

Shapes: C channels, N samples, T latent frames, P mel frames per latent frame, M mel bands, X = C * P * M numbers of a
latent frame, D latent dimension, F frequency bins, W window samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from audiollm.autoencoder import check_latent, check_waveform
from tokenizer.continuous.model import LatentModel, Posterior
from tokenizer.mel_pca.phases import BLOCK_LATENTS, PhaseStream
from tokenizer.native.layers import mel_filters
from tokenizer.native.operations import magnitudes

MODEL_TYPE = "audiollm_mel_pca"
FLOOR = 1e-3
"""Smallest magnitude of a mel band; a sine of full scale has about 5 at 16 kHz."""
WHITENING = 0.5
"""Power of a component's deviation by which `normalize` divides it. At 1 the components that hold little but the
texture of noise would count as much in a flow-matching loss as those that tell one sound from another."""
PARTS_PER_FIT = 10
"""A fit wants this many latent frames for each latent dimension."""


@dataclass(frozen=True)
class MelPCAConfig:
    """The shape of a `MelPCA`."""

    sample_rate: int = 16_000
    channels: int = 1
    """1 or 2."""
    mel_hop_samples: int = 256
    stride: int = 4
    """Mel frames per latent frame; the Fourier transforms are as long as a latent frame."""
    num_mels: int = 128
    latent_dim: int = 48

    def __post_init__(self) -> None:
        if self.channels not in (1, 2):
            raise ValueError(f"channels must be 1 or 2, not {self.channels}")
        if self.latent_dim > self.numbers:
            raise ValueError(f"latent_dim must be at most {self.numbers}, not {self.latent_dim}")

    @property
    def hop_samples(self) -> int:
        """Samples of a latent frame, and of a window."""
        return self.mel_hop_samples * self.stride

    @property
    def numbers(self) -> int:
        """Log-mel values of a latent frame."""
        return self.channels * self.stride * self.num_mels


class MelPCA(LatentModel):
    """Waveform to components of its log-mel frames and back: an `audiollm.autoencoder.Autoencoder`."""

    model_type = MODEL_TYPE
    config_class = MelPCAConfig
    config: MelPCAConfig

    mean_X: Tensor
    components_XD: Tensor
    deviation_D: Tensor
    """Standard deviation of each component."""
    noise: Tensor
    """Standard deviation of each number that the components leave out."""
    window_W: Tensor
    filters_FM: Tensor
    inverse_MF: Tensor

    def __init__(self, config: MelPCAConfig) -> None:
        super().__init__(config)
        window, mels = config.hop_samples, config.num_mels
        self.register_buffer("mean_X", torch.zeros(config.numbers))
        self.register_buffer("components_XD", torch.eye(config.numbers, config.latent_dim))
        self.register_buffer("deviation_D", torch.ones(config.latent_dim))
        self.register_buffer("noise", torch.ones(()))
        filters_FM = mel_filters(config.sample_rate, window, mels)
        self.register_buffer("filters_FM", filters_FM, persistent=False)
        self.register_buffer("inverse_MF", torch.linalg.pinv(filters_FM.double()).float(), persistent=False)
        self.register_buffer("window_W", torch.hann_window(window), persistent=False)

    @torch.no_grad()
    def fit(self, clips_CN: Iterable[Tensor]) -> float:
        """Set mean, components and deviations to those of these waveforms; returns the share of variance that is kept.

        Raises:
            ValueError: too little audio for so many components, or audio that `encode_distribution` refuses.
        """
        numbers, num_components = self.config.numbers, self.latent_dim
        frames, sum_X = 0, torch.zeros(numbers, dtype=torch.float64)
        products_XX = torch.zeros(numbers, numbers, dtype=torch.float64)
        for samples_CN in clips_CN:
            check_waveform(samples_CN, self.channels)
            for part_TX in self._log_mel_parts([samples_CN]):
                part_TX = part_TX.double()
                frames += len(part_TX)
                sum_X += part_TX.sum(dim=0)
                products_XX += part_TX.T @ part_TX
        if frames < PARTS_PER_FIT * num_components:
            raise ValueError(f"{frames} latent frames of audio are too few for {num_components} components")
        mean_X = sum_X / frames
        variance_X, vectors_XX = torch.linalg.eigh(products_XX / frames - torch.outer(mean_X, mean_X))
        variance_X, vectors_XX = variance_X.flip(0).clamp_min(0), vectors_XX.flip(1)
        components_XD, left_out_X = vectors_XX[:, :num_components], variance_X[num_components:]
        largest_1D = components_XD.abs().argmax(dim=0, keepdim=True)
        components_XD = components_XD * components_XD.gather(0, largest_1D).sign()
        self.mean_X.copy_(mean_X)
        self.components_XD.copy_(components_XD)
        self.deviation_D.copy_(variance_X[:num_components].sqrt().clamp_min(FLOOR))
        self.noise.copy_((left_out_X.mean() if len(left_out_X) else torch.zeros(())).sqrt().clamp_min(FLOOR))
        return float(variance_X[:num_components].sum() / variance_X.sum().clamp_min(1e-12))

    @torch.no_grad()
    def encode_stream(self, pieces_CN: Iterable[Tensor]) -> Iterator[Posterior]:
        """Latents of a waveform that comes in pieces `[C, n]`, at constant memory; the same latents as `encode`.

        Raises:
            ValueError: a piece of another number of channels or not finite.
        """
        for part_TX in self._log_mel_parts(pieces_CN):
            padded_TX = functional.pad(part_TX, (0, 0, 0, BLOCK_LATENTS - len(part_TX)))
            mean_DT = ((padded_TX - self.mean_X) @ self.components_XD).T[:, : len(part_TX)].contiguous()
            yield Posterior(mean_DT, (2 * self.noise.log()).expand_as(mean_DT))

    @torch.no_grad()
    def decode_stream(self, pieces_DT: Iterable[Tensor]) -> Iterator[Tensor]:
        """Waveform pieces of latents that come in pieces `[D, t]`, at constant memory; the same samples as `decode`.

        Raises:
            ValueError: a piece of another latent dimension or not finite.
        """
        config = self.config
        stream = PhaseStream(self.window_W, config.mel_hop_samples, config.channels, config.stride)
        waiting_DT = self.mean_X.new_zeros(self.latent_dim, 0)
        for piece_DT in pieces_DT:
            check_latent(piece_DT, self.latent_dim)
            waiting_DT = torch.cat([waiting_DT, piece_DT.to(waiting_DT)], dim=1)
            while waiting_DT.shape[1] >= BLOCK_LATENTS:
                yield stream.push(self._magnitudes(waiting_DT[:, :BLOCK_LATENTS]))
                waiting_DT = waiting_DT[:, BLOCK_LATENTS:]
        if num_remaining := waiting_DT.shape[1]:
            padded_DT = functional.pad(waiting_DT, (0, BLOCK_LATENTS - num_remaining))
            yield stream.push(self._magnitudes(padded_DT)[:, : num_remaining * config.stride])
        yield stream.flush()

    def normalize(self, latent_DT: Tensor) -> Tensor:
        """Latents `[..., D, T]` divided by a power of each component's deviation: mean 0, variance 1 on average."""
        return latent_DT / self._scale_D[:, None]

    def denormalize(self, latent_DT: Tensor) -> Tensor:
        """The inverse of `normalize`."""
        return latent_DT * self._scale_D[:, None]

    @property
    def _scale_D(self) -> Tensor:
        power_D = self.deviation_D.pow(WHITENING)
        return power_D * (self.deviation_D / power_D).square().mean().sqrt()

    def _log_mel_parts(self, pieces_CN: Iterable[Tensor]) -> Iterator[Tensor]:
        """Log-mel values `[t, X]`, `BLOCK_LATENTS` latent frames at a time, the last part shorter."""
        config = self.config
        window, hop = config.hop_samples, config.mel_hop_samples
        before, after = (window - hop) // 2, window - hop - (window - hop) // 2
        block = BLOCK_LATENTS * config.hop_samples
        waiting_CN = self.window_W.new_zeros(config.channels, before)
        for piece_CN in pieces_CN:
            check_waveform(piece_CN, config.channels)
            waiting_CN = torch.cat([waiting_CN, piece_CN.to(waiting_CN)], dim=1)
            while waiting_CN.shape[1] >= before + block + after:
                yield self._log_mel(waiting_CN[:, : before + block + after])
                waiting_CN = waiting_CN[:, block:]
        while waiting_CN.shape[1] > before:
            num_remaining = -(-(waiting_CN.shape[1] - before) // config.hop_samples)
            missing = max(0, before + block + after - waiting_CN.shape[1])
            padded_CN = functional.pad(waiting_CN, (0, missing))
            yield self._log_mel(padded_CN[:, : before + block + after])[:num_remaining]
            waiting_CN = waiting_CN[:, block:]

    def _log_mel(self, samples_CN: Tensor) -> Tensor:
        """`[C, (t P - 1) hop + W]` to `[t, X]`."""
        config = self.config
        mel_CTM = magnitudes(samples_CN, self.window_W, config.mel_hop_samples) @ self.filters_FM
        logs_CTM = mel_CTM.clamp_min(FLOOR).log()
        return logs_CTM.unflatten(1, (-1, config.stride)).transpose(0, 1).flatten(1)

    def _magnitudes(self, latent_DT: Tensor) -> Tensor:
        """Latents `[D, T]` to magnitudes of the spectrum `[C, T * P, F]`."""
        config = self.config
        logs_TX = latent_DT.T @ self.components_XD.T + self.mean_X
        shape = (config.channels, config.stride, config.num_mels)
        mel_CTM = logs_TX.unflatten(1, shape).transpose(0, 1).flatten(1, 2).clamp_max(6.0).exp()
        return (mel_CTM @ self.inverse_MF).clamp_min(1e-5)
