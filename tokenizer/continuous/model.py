"""The continuous variant: a variational autoencoder for flow matching, by default of 44.1 kHz stereo at 21.5 Hz.

Encoder, decoder and the windows in which they run are the discrete tokenizer's. The encoder hears four signals:
left, right, mid and side. Of these it sees magnitudes, and those of left and right do not tell a sound in phase from
one in antiphase; with their sum and difference they do. Which channel leads by a fraction of a period they do
not tell. Of a phase band it sees the waveform.

A mono autoencoder has one channel and one view of it.

Shapes: B batch, C channels (left, right; or one), V views (left, right, mid, side; or one), N samples, T frames, D
latent dimension.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from audiollm.autoencoder import check_latent, check_waveform, module_digest
from audiollm.models.pretrained import load_whole, save_model
from tokenizer.native.autoencoder import AutoencoderShape, Decoder, Encoder
from tokenizer.native.phase_band import PhaseBand
from tokenizer.native.pitch import SOUND_HZ, PitchTarget
from tokenizer.native.streaming import LatentStream, WaveformStream
from tokenizer.quantizers.codebooks import at_least_float32
from tokenizer.rates import VAE_HOP_SAMPLES, VAE_SAMPLE_RATE

MODEL_TYPE = "audiollm_vae"
DEVIATION_FLOOR = 1e-4
PHASE_BAND_SHARE = 0.5
"""Share of the latent's numbers that hold the phase band's waveform when training begins."""
PHASE_BAND_DEVIATION = -3.0
"""Bias of their deviations before the softplus: the draws are near the waveform from the first step on."""
PIECE_S = 10
"""Seconds of a long waveform that are encoded or decoded together."""


@dataclass(frozen=True)
class VAEConfig:
    """The shape of a VAE. The defaults of rate, hop and latent are those of Stable Audio Open and ThinkSound."""

    sample_rate: int = VAE_SAMPLE_RATE
    channels: int = 2
    """1 or 2."""
    mel_hop_samples: int = VAE_HOP_SAMPLES // 4
    stride: int = 4
    n_fft: int = VAE_HOP_SAMPLES
    num_mels: int = 128
    latent_dim: int = 64
    mel_hidden_size: int = 256
    hidden_size: int = 384
    encoder_layers: tuple[int, int] = (3, 4)
    """Blocks at the mel rate, blocks at the latent rate."""
    decoder_layers: tuple[int, int] = (4, 3)
    """Blocks at the latent rate, blocks at the mel rate."""
    harmonic_source: bool = False
    """The latents carry a pitch, and the decoder makes its harmonics; False in folders made before it was there."""
    phase_band_hz: float = 0.0
    """The latents carry the waveform below it, phase included; 0, as in folders made before it was there: none."""
    step_frames: int = 8
    """Frames that are computed at a time, always. Part of what the latents are: see `streaming.py`."""

    def __post_init__(self) -> None:
        if self.channels not in (1, 2):
            raise ValueError(f"channels must be 1 or 2, not {self.channels}")

    @property
    def hop_samples(self) -> int:
        return self.mel_hop_samples * self.stride

    @property
    def views(self) -> int:
        """Signals that the encoder hears: left, right, mid and side; or the only channel."""
        return 4 if self.channels == 2 else 1

    def shape(self, channels: int) -> AutoencoderShape:
        """The shape of the encoder (`views` channels) or the decoder (`channels`)."""
        return AutoencoderShape(
            sample_rate=self.sample_rate,
            channels=channels,
            mel_hop_samples=self.mel_hop_samples,
            stride=self.stride,
            n_fft=self.n_fft,
            num_mels=self.num_mels,
            mel_hidden_size=self.mel_hidden_size,
            hidden_size=self.hidden_size,
            encoder_layers=self.encoder_layers,
            decoder_layers=self.decoder_layers,
            highest_pitch_hz=SOUND_HZ if self.harmonic_source else 0.0,
            phase_band=self.phase_band,
        )

    @property
    def phase_band(self) -> PhaseBand | None:
        """The band whose waveform the latents carry."""
        if not self.phase_band_hz:
            return None
        return PhaseBand(self.phase_band_hz, self.channels, round(self.latent_dim * PHASE_BAND_SHARE))


class Posterior(NamedTuple):
    """The distribution of a sound's latent: independent normal distributions, one per number."""

    mean: Tensor
    log_variance: Tensor
    """Log variance, shaped like the mean: `[D, T]` from `AudioVAE.encode_distribution`, `[B, T, D]` in training."""

    def sample(self, generator: torch.Generator) -> Tensor:
        """A draw, made on the generator's device."""
        return self.at(torch.randn(self.mean.shape, generator=generator, device=generator.device))

    def at(self, noise: Tensor) -> Tensor:
        """The draw that standard normal numbers of the same shape make."""
        return self.mean + torch.exp(0.5 * self.log_variance) * noise.to(self.mean)

    def divergence(self) -> Tensor:
        """KL divergence from the standard normal in nats, number by number (Kingma and Welling 2013, appendix B)."""
        return 0.5 * (self.mean.square() + self.log_variance.exp() - 1 - self.log_variance)


class VAEOutput(NamedTuple):
    """The result of a training forward pass."""

    samples_BCN: Tensor
    posterior: Posterior
    pitch: Tensor | None = None
    """The loss of pitch, voicing and harmonic share, of a model with a harmonic source."""


ModelT = TypeVar("ModelT", bound="LatentModel")


class LatentModel(nn.Module):
    """Base of an `audiollm.autoencoder.Autoencoder`: whole sounds and latents go through the streams of a subclass."""

    model_type: ClassVar[str]
    config_class: ClassVar[type[Any]]

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    @property
    def sample_rate(self) -> int:
        return int(self.config.sample_rate)

    @property
    def channels(self) -> int:
        return int(self.config.channels)

    @property
    def hop_samples(self) -> int:
        return int(self.config.hop_samples)

    @property
    def latent_dim(self) -> int:
        return int(self.config.latent_dim)

    @property
    def digest(self) -> str:
        """Digest of weights, statistics and settings; computed anew, for they may have been trained in between."""
        return module_digest(self, repr(self.config))

    def encode(self, samples_CN: Tensor) -> Tensor:
        """Waveform `[C, N]` at `sample_rate` to the latents' means `[D, ceil(N / hop)]`; N may be hours long.

        Raises:
            ValueError: another number of channels, empty, or not finite.
        """
        return self.encode_distribution(samples_CN).mean

    def encode_distribution(self, samples_CN: Tensor) -> Posterior:
        """As `encode`, with the variances: what a flow-matching model may draw its targets from.

        Raises:
            ValueError: another number of channels, empty, or not finite.
        """
        check_waveform(samples_CN, self.channels, at_least=1)
        parts = list(self.encode_stream([samples_CN]))
        return Posterior(
            torch.cat([posterior.mean for posterior in parts], dim=1),
            torch.cat([posterior.log_variance for posterior in parts], dim=1),
        )

    def encode_stream(self, pieces_CN: Iterable[Tensor]) -> Iterator[Posterior]:
        """Latents of a waveform that comes in pieces `[C, n]`, at constant memory; the same latents as `encode`.

        Raises:
            ValueError: a piece of another number of channels or not finite.
        """
        raise NotImplementedError

    def decode(self, latent_DT: Tensor, num_samples: int | None = None) -> Tensor:
        """Latents `[D, T]` to a waveform `[C, T * hop]`, cut to `num_samples` where given; its peaks may be above 1.

        Raises:
            ValueError: no frame, another latent dimension, or not finite.
        """
        if latent_DT.ndim == 2 and latent_DT.shape[1] == 0:
            raise ValueError("decode takes latents of at least one frame, not 0")
        samples_CN = torch.cat(list(self.decode_stream([latent_DT])), dim=1)
        return samples_CN if num_samples is None else samples_CN[:, :num_samples]

    def decode_stream(self, pieces_DT: Iterable[Tensor]) -> Iterator[Tensor]:
        """Waveform pieces of latents that come in pieces `[D, t]`, at constant memory; the same samples as `decode`.

        Raises:
            ValueError: a piece of another latent dimension or not finite.
        """
        raise NotImplementedError

    def save_pretrained(self, folder: Path) -> None:
        """Write `config.json` and `model.safetensors`."""
        save_model(folder, self, self.model_type, self.config)

    @classmethod
    def from_pretrained(cls: type[ModelT], folder: Path | str) -> ModelT:
        """Load what `save_pretrained` wrote, or the folder of the stage that made it.

        Raises:
            ConfigError: nothing there, or another kind of model.
        """
        return load_whole(folder, cls.model_type, cls.config_class, cls)


class AudioVAE(LatentModel):
    """Waveform to continuous latents and back: an `audiollm.autoencoder.Autoencoder`."""

    model_type = MODEL_TYPE
    config_class = VAEConfig
    config: VAEConfig

    latent_mean_D: Tensor
    latent_std_D: Tensor

    def __init__(self, config: VAEConfig) -> None:
        super().__init__(config)
        self.encoder = Encoder(config.shape(config.views), 2 * config.latent_dim)
        self.decoder = Decoder(config.shape(config.channels), config.latent_dim)
        if config.phase_band is not None:
            first, last_layer = config.latent_dim, self.encoder.output[-1]
            assert isinstance(last_layer, nn.Linear)
            with torch.no_grad():
                last_layer.bias[first : first + config.phase_band.numbers] = PHASE_BAND_DEVIATION
        self.register_buffer("latent_mean_D", torch.zeros(config.latent_dim))
        self.register_buffer("latent_std_D", torch.ones(config.latent_dim))

    @property
    def latent_rate(self) -> float:
        """Latent frames per second."""
        return self.sample_rate / self.hop_samples

    def forward(self, samples_BCN: Tensor, noise_BTD: Tensor, pitch: PitchTarget | None = None) -> VAEOutput:
        """Reconstruct from the draw of the latent that the noise makes (training).

        Args:
            samples_BCN: N must be a multiple of the hop.
            pitch: the pitch at the mel rate, which the source follows; for a model with a harmonic source.
        """
        posterior = _posterior(self.encoder(stereo_views(samples_BCN)))
        latent_BTD = posterior.at(noise_BTD)
        if pitch is None:
            return VAEOutput(self.decoder(latent_BTD), posterior)
        made_BCN, pitch_loss = self.decoder.with_pitch(latent_BTD, pitch, samples_BCN)
        return VAEOutput(made_BCN, posterior, pitch_loss)

    def encode_stream(self, pieces_CN: Iterable[Tensor]) -> Iterator[Posterior]:
        """Latents of a waveform that comes in pieces `[C, n]`, at constant memory; the same latents as `encode`.

        Raises:
            ValueError: a piece of another number of channels or not finite.
        """
        stream = LatentStream(self.encoder, self.config.step_frames)
        for piece_CN in pieces_CN:
            check_waveform(piece_CN, self.channels)
            for part_CN in piece_CN.split(PIECE_S * self.sample_rate, dim=1):
                yield from map(_window_posterior, stream.push(stereo_views(part_CN)))
        windows, frames = stream.flush()
        for window_BTD in windows:
            mean_DT, log_variance_DT = _window_posterior(
                window_BTD
            )  # whole: vector code differs at ragged ends
            yield Posterior(mean_DT[:, :frames], log_variance_DT[:, :frames])
            frames -= window_BTD.shape[1]

    def decode_stream(self, pieces_DT: Iterable[Tensor]) -> Iterator[Tensor]:
        """Waveform pieces of latents that come in pieces `[D, t]`, at constant memory; the same samples as `decode`.

        Raises:
            ValueError: a piece of another latent dimension or not finite.
        """
        stream = WaveformStream(self.decoder)
        for steps_DT in self._in_steps(pieces_DT):
            steps_BTD = steps_DT.T[None].to(self.latent_mean_D).contiguous()
            yield stream.push(steps_BTD)
        yield stream.flush()

    def normalize(self, latent_DT: Tensor) -> Tensor:
        """Latents `[..., D, T]` as a flow-matching model is trained on them: mean 0, variance 1 in every channel."""
        return (latent_DT - self.latent_mean_D[:, None]) / self.latent_std_D[:, None]

    def denormalize(self, latent_DT: Tensor) -> Tensor:
        """The inverse of `normalize`."""
        return latent_DT * self.latent_std_D[:, None] + self.latent_mean_D[:, None]

    @torch.no_grad()
    def measure_latents(self, clips_CN: Iterable[Tensor]) -> None:
        """Set what `normalize` uses: mean and deviation of the latents of these waveforms `[C, N]`.

        Of draws, not of means: a channel that tells nothing has means that hardly move, and would be blown up.

        Raises:
            ValueError: no clip, or one that `encode` refuses.
        """
        frames = 0
        sum_D = torch.zeros(self.latent_dim, dtype=torch.float64, device=self.latent_mean_D.device)
        square_D = sum_D.clone()
        for samples_CN in clips_CN:
            mean_DT, log_variance_DT = self.encode_distribution(samples_CN)
            frames += mean_DT.shape[1]
            sum_D += mean_DT.double().sum(dim=1)
            square_D += (mean_DT.double().square() + log_variance_DT.double().exp()).sum(dim=1)
        if not frames:
            raise ValueError("no clip to measure the latents on")
        mean_D = sum_D / frames
        self.latent_mean_D.copy_(mean_D)
        self.latent_std_D.copy_((square_D / frames - mean_D.square()).clamp_min(DEVIATION_FLOOR**2).sqrt())

    def _in_steps(self, pieces_DT: Iterable[Tensor]) -> Iterator[Tensor]:
        """The same frames in pieces of `step_frames`, the last one shorter: see `streaming.py`."""
        size, waiting = self.config.step_frames, torch.zeros(self.latent_dim, 0)
        for piece_DT in pieces_DT:
            check_latent(piece_DT, self.latent_dim)
            *complete_steps, remainder = torch.cat([waiting.to(piece_DT), piece_DT], dim=1).split(size, dim=1)
            if remainder.shape[1] == size:
                complete_steps, remainder = [*complete_steps, remainder], remainder[:, size:]
            yield from complete_steps
            waiting = remainder
        if waiting.shape[1]:
            yield waiting


def stereo_views(samples_CN: Tensor) -> Tensor:
    """`[..., 2, N]` to `[..., 4, N]`: left, right, and half their sum and difference (mid and side); mono as it is."""
    if samples_CN.shape[-2] == 1:
        return samples_CN
    left_N, right_N = samples_CN.unbind(dim=-2)
    return torch.stack([left_N, right_N, (left_N + right_N) / 2, (left_N - right_N) / 2], dim=-2)


def _posterior(encoded_BTD: Tensor) -> Posterior:
    """The halves are mean and deviation, the latter as Stable Audio Open has it: softplus and a floor."""
    mean, deviation = at_least_float32(encoded_BTD).chunk(2, dim=-1)
    return Posterior(mean, 2 * torch.log(functional.softplus(deviation) + DEVIATION_FLOOR))


def _window_posterior(encoded_1TD: Tensor) -> Posterior:
    """`[1, T, 2 D]` to a posterior `[D, T]`."""
    return Posterior(*(tensor[0].T for tensor in _posterior(encoded_1TD)))
