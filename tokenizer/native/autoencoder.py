"""The two halves that every tokenizer of this family shares: waveform to latent, and latent to waveform.

Everything after an input layer is causal, so both halves can run in pieces with carried context. The input layers
look at neighbours on both sides; whoever calls in pieces supplies those (`tokenizer/native/streaming.py`).

Shapes: B batch, C audio channels, N samples, T latent frames, R mel frames, M mel features, F frequency bins, D latent
dimension.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from tokenizer.native.layers import (
    Carry,
    ConvNeXtBlock,
    Downsample,
    InverseSTFTHead,
    LogMel,
    TimeConv,
    Upsample,
)
from tokenizer.native.operations import ExactLinear, frame
from tokenizer.native.phase_band import BandInput, BandOutput, LappedTransform, PhaseBand
from tokenizer.native.pitch import (
    LOWEST_HZ,
    PITCH_FUTURE_FRAMES,
    PITCH_PAST_FRAMES,
    PitchLogits,
    PitchPredictor,
    PitchTarget,
    PitchTrack,
    decode_pitch,
    pitch_loss,
)
from tokenizer.native.source import Excitation, HarmonicShare, HarmonicSource

MEL_CONTEXT = 3
"""Mel frames on each side that the encoder's input layer sees."""
PAST_FRAMES, FUTURE_FRAMES = 4, 2
"""Latent frames before and after its own that the decoder's input layer sees."""
PITCH_AHEAD_FRAMES = FUTURE_FRAMES - PITCH_FUTURE_FRAMES
"""Latent frames by which the pitch is known before the spectrum."""
FRAMES_PER_SHARE = 3
"""Mel frames of which the first teaches the harmonic share, where it is voiced: the windows of neighbours overlap."""


@dataclass(frozen=True)
class AutoencoderShape:
    """Rates and widths of an encoder and a decoder."""

    sample_rate: int
    channels: int
    mel_hop_samples: int
    stride: int
    n_fft: int
    num_mels: int
    mel_hidden_size: int
    """Width at the mel rate."""
    hidden_size: int
    """Width at the frame rate."""
    encoder_layers: tuple[int, int]
    """Blocks at the mel rate, blocks at the frame rate."""
    decoder_layers: tuple[int, int]
    """Blocks at the frame rate, blocks at the mel rate."""
    highest_pitch_hz: float = 0.0
    """Pitch salience joins the encoder's input, and the decoder mixes a harmonic source of at most this pitch in; 0:
    neither."""
    linear_path: bool = False
    """Latents are a linear map of log-mel and salience plus what the blocks add, and log-magnitudes one of latents."""
    phase_band: PhaseBand | None = None
    """The latents carry the waveform of this band, phase included; None: magnitudes alone."""

    @property
    def hop_samples(self) -> int:
        return self.mel_hop_samples * self.stride

    @property
    def context_samples(self) -> int:
        """Context that the encoder sees beyond a frame on each side, apart from the state it carries."""
        return (self.n_fft - self.mel_hop_samples) // 2 + MEL_CONTEXT * self.mel_hop_samples


class Encoder(nn.Module):
    """Waveform `[B, C, N]` to latents `[B, N / hop, D]`: log-mel, ConvNeXt, stride, ConvNeXt."""

    def __init__(self, shape: AutoencoderShape, latent_dim: int) -> None:
        super().__init__()
        self.shape = shape
        before, after = shape.encoder_layers
        self.mel = LogMel(
            shape.sample_rate, shape.n_fft, shape.mel_hop_samples, shape.num_mels, shape.highest_pitch_hz
        )
        features = shape.channels * self.mel.num_features
        self.input = TimeConv(features, shape.mel_hidden_size, 2 * MEL_CONTEXT + 1)
        self.mel_blocks = nn.ModuleList(ConvNeXtBlock(shape.mel_hidden_size) for _ in range(before))
        self.downsample = Downsample(shape.mel_hidden_size, shape.hidden_size, shape.stride)
        self.blocks = nn.ModuleList(ConvNeXtBlock(shape.hidden_size) for _ in range(after))
        last = nn.Linear(shape.hidden_size, latent_dim)
        self.output = nn.Sequential(nn.LayerNorm(shape.hidden_size), last)
        self.linear: ExactLinear | None = None
        if shape.linear_path:
            self.linear = ExactLinear(shape.stride * features, latent_dim)
        self.band: BandInput | None = None
        if shape.phase_band is not None:
            if shape.hop_samples // 2 >= shape.context_samples:
                raise ValueError(
                    f"a phase band wants a stride of at most {2 * MEL_CONTEXT}, not {shape.stride}"
                )
            transform = LappedTransform(shape.sample_rate, shape.hop_samples, shape.phase_band.cutoff_hz)
            self.band = BandInput(transform, shape.phase_band, shape.hidden_size, latent_dim)
            with torch.no_grad():  # at first, these hold the band's coefficients alone
                last.weight[: shape.phase_band.numbers] = 0
                last.bias[: shape.phase_band.numbers] = 0

    def forward(self, samples_BCN: Tensor) -> Tensor:
        """The whole at once; N must be a multiple of the hop. Silence is assumed on both sides."""
        context = self.shape.context_samples
        return self.steps([functional.pad(samples_BCN, (context, context))], None)[0]

    def steps(self, windows_BCN: Sequence[Tensor], carry: Carry | None) -> list[Tensor]:
        """Windows that follow one another, each with `context_samples` more on each side, to their latents.

        `[B, C, context + T * hop + context]` each to `[B, T, D]`. All windows go through a layer before the
        next layer's weights are fetched: the same arithmetic as one after another, with fewer cache misses.
        """
        mels_BRM = [self.mels(window) for window in windows_BCN]
        x_BTC = _run_blocks(self.mel_blocks, [self.input(mel) for mel in mels_BRM], carry)
        x_BTC = [self.downsample(x) for x in x_BTC]
        if self.band is None:
            latents_BTD = [self.output(x) for x in _run_blocks(self.blocks, x_BTC, carry)]
        else:
            surplus = self.shape.context_samples - self.shape.hop_samples // 2
            bands_BTX = [self.band.coefficients(window[..., surplus:-surplus]) for window in windows_BCN]
            x_BTC = [x + self.band.hidden(band) for x, band in zip(x_BTC, bands_BTX, strict=True)]
            x_BTC = _run_blocks(self.blocks, x_BTC, carry)
            latents_BTD = [
                self.output(x) + self.band.output(band) for x, band in zip(x_BTC, bands_BTX, strict=True)
            ]
        if self.linear is None:
            return latents_BTD
        linear_BTD = [self.linear(self.frames_of_latents(mels)) for mels in mels_BRM]
        return [latent + linear for latent, linear in zip(latents_BTD, linear_BTD, strict=True)]

    def mels(self, samples_BCN: Tensor) -> Tensor:
        """Mel frames of a window, as the input layer takes them: `MEL_CONTEXT` more on each side, `[B, R, C * M]`."""
        mel_RTM = self.mel.valid(samples_BCN.flatten(0, 1))
        return mel_RTM.unflatten(0, (-1, self.shape.channels)).transpose(1, 2).flatten(2)

    def frames_of_latents(self, mels_BRM: Tensor) -> Tensor:
        """The mel frames that each latent frame covers, side by side, of those of `mels`: `[B, T, stride * C * M]`."""
        return mels_BRM[:, MEL_CONTEXT:-MEL_CONTEXT].unflatten(1, (-1, self.shape.stride)).flatten(2)


class Decoder(nn.Module):
    """Latents `[B, T, D]` to waveform `[B, C, T * hop]`: ConvNeXt, transposed stride, ConvNeXt, inverse STFT.

    With a harmonic source, pitch and voicing are read from the latents themselves. The source runs
    `PITCH_AHEAD_FRAMES` latent frames ahead of the rest, which looks further into the future than the pitch does.
    """

    def __init__(self, shape: AutoencoderShape, latent_dim: int) -> None:
        super().__init__()
        self.shape = shape
        before, after = shape.decoder_layers
        self.input = TimeConv(latent_dim, shape.hidden_size, PAST_FRAMES + 1 + FUTURE_FRAMES)
        self.blocks = nn.ModuleList(ConvNeXtBlock(shape.hidden_size) for _ in range(before))
        self.upsample = Upsample(shape.hidden_size, shape.mel_hidden_size, shape.stride)
        self.mel_blocks = nn.ModuleList(ConvNeXtBlock(shape.mel_hidden_size) for _ in range(after))
        self.norm = nn.LayerNorm(shape.mel_hidden_size)
        self.source = HarmonicSource(shape.sample_rate, shape.n_fft, shape.mel_hop_samples)
        self.real_share = HarmonicShare(shape.sample_rate, self.source.window_W)
        highest_hz, self.pitch = shape.highest_pitch_hz, None
        if highest_hz:
            self.pitch = PitchPredictor(latent_dim, shape.stride, highest_hz)
        bands = self.real_share.centres_hz if highest_hz else ()
        self.head = InverseSTFTHead(
            shape.mel_hidden_size,
            shape.n_fft,
            shape.mel_hop_samples,
            shape.channels,
            shape.sample_rate,
            bands,
        )
        self.linear: ExactLinear | None = None
        if shape.linear_path:
            self.linear = ExactLinear(latent_dim, shape.stride * shape.channels * (shape.n_fft // 2 + 1))
        self.band: BandOutput | None = None
        if shape.phase_band is not None:
            self.band = BandOutput(
                LappedTransform(shape.sample_rate, shape.hop_samples, shape.phase_band.cutoff_hz),
                self.source.window_W,
                shape.stride,
                shape.channels,
                latent_dim,
                shape.mel_hidden_size,
                shape.phase_band.numbers,
            )

    def forward(self, latent_BTD: Tensor) -> Tensor:
        """The whole at once."""
        carry: Carry = {}
        padded_BTD = functional.pad(latent_BTD, (0, 0, PAST_FRAMES, FUTURE_FRAMES))
        return torch.cat([self.step(padded_BTD, carry), self.head.finish(carry)], dim=2)

    def with_pitch(self, latent_BTD: Tensor, target: PitchTarget, real_BCN: Tensor) -> tuple[Tensor, Tensor]:
        """The whole at once with a source of the recordings' pitch, and the loss of pitch, voicing and harmonic share.

        Args:
            target: pitch of each mel frame.
            real_BCN: the recordings.
        """
        assert self.pitch is not None
        padded_BTD = functional.pad(latent_BTD, (0, 0, PAST_FRAMES, FUTURE_FRAMES))
        logits = self.pitch(self._pitch_context(padded_BTD, first=True))
        frames = latent_BTD.shape[1] * self.shape.stride
        with torch.no_grad():
            read = decode_pitch(logits)
            given_BF = functional.pad(target.hz_BF, (0, read.hz_BF.shape[1] - frames))
            voiced_BF = given_BF > 0
            track = PitchTrack(torch.where(voiced_BF, given_BF.double(), read.hz_BF), voiced_BF.to(given_BF))
            excitation, _ = self.source.step(track, None, frames)
        features_BTC = self._features(padded_BTD, None)
        samples: Tensor = self.head(
            features_BTC, excitation, self._band(padded_BTD, features_BTC), self.linear_magnitudes(padded_BTD)
        )
        loss = pitch_loss(PitchLogits(logits.pitch_BFS[:, :frames], logits.voicing_BF[:, :frames]), target)
        return samples, loss + self._share_loss(features_BTC, excitation, target, real_BCN)

    def _share_loss(
        self, features_BTC: Tensor, excitation: Excitation, target: PitchTarget, real_BCN: Tensor
    ) -> Tensor:
        shape, chosen_BF = self.shape, torch.zeros_like(target.hz_BF, dtype=torch.bool)
        chosen_BF[:, ::FRAMES_PER_SHARE] = target.hz_BF[:, ::FRAMES_PER_SHARE] > 0
        chosen_BF[0, 0] = True  # FFTs want one frame at least; without voice it has no weight
        margin = (shape.n_fft - shape.mel_hop_samples) // 2
        source_MK = excitation.spectrum_BFK[chosen_BF].abs().square()
        hz_M = target.hz_BF[chosen_BF].clamp_min(LOWEST_HZ)
        logits_MCP = self.head.share_logits(features_BTC)[chosen_BF]
        entropy_BF = torch.zeros_like(target.hz_BF).to(logits_MCP)
        for channel, real_BN in enumerate(functional.pad(real_BCN, (margin, margin)).unbind(dim=1)):
            framed_MW = frame(real_BN, shape.n_fft, shape.mel_hop_samples)[chosen_BF]
            real_MK = torch.fft.rfft(framed_MW * self.source.window_W).abs().square()
            share_MP = self.real_share(real_MK, source_MK, hz_M)
            logits_MP = logits_MCP[:, channel]
            entropy_M = functional.binary_cross_entropy_with_logits(
                logits_MP, share_MP.to(logits_MP), reduction="none"
            ).mean(dim=1)
            entropy_BF = entropy_BF + torch.zeros_like(entropy_BF).masked_scatter(chosen_BF, entropy_M)
        return target.voiced_mean(entropy_BF * (FRAMES_PER_SHARE / shape.channels))

    def step(self, latent_BTD: Tensor, carry: Carry) -> Tensor:
        """A piece with `PAST_FRAMES` more before and `FUTURE_FRAMES` more behind; the head's delay applies."""
        excitation = self._excitation(latent_BTD, carry) if self.pitch is not None else None
        features_BTC = self._features(latent_BTD, carry)
        return self.head.step(
            features_BTC,
            carry,
            excitation,
            self._band(latent_BTD, features_BTC),
            self.linear_magnitudes(latent_BTD),
        )

    def linear_magnitudes(self, padded_BTD: Tensor) -> Tensor | None:
        """The log-magnitudes `[B, R, C, F]` that are a linear map of each latent frame."""
        if self.linear is None:
            return None
        magnitudes_BTY = self.linear(padded_BTD[:, PAST_FRAMES : padded_BTD.shape[1] - FUTURE_FRAMES])
        return magnitudes_BTY.unflatten(2, (self.shape.stride, self.shape.channels, -1)).flatten(1, 2)

    def _band(self, padded_BTD: Tensor, features_BTC: Tensor) -> Tensor | None:
        """The complex spectrum of the phase band, of latents with the decoder's context on both sides."""
        if self.band is None:
            return None
        around_BTD = padded_BTD[:, PAST_FRAMES - 1 : padded_BTD.shape[1] - FUTURE_FRAMES + 1]
        spectrum: Tensor = self.band(around_BTD, features_BTC)
        return spectrum

    def _features(self, latent_BTD: Tensor, carry: Carry | None) -> Tensor:
        (x_BTC,) = _run_blocks(self.blocks, [self.input(latent_BTD)], carry)
        (x_BTC,) = _run_blocks(self.mel_blocks, [self.upsample(x_BTC)], carry)
        normed: Tensor = self.norm(x_BTC)
        return normed

    def _excitation(self, latent_BTD: Tensor, carry: Carry) -> Excitation:
        assert self.pitch is not None
        state = carry.get(self.source)
        frames = (latent_BTD.shape[1] - PAST_FRAMES - FUTURE_FRAMES) * self.shape.stride
        track = self.pitch.track(self._pitch_context(latent_BTD, first=state is None))
        excitation, carry[self.source] = self.source.step(track, state, frames)
        return excitation

    def _pitch_context(self, padded_BTD: Tensor, first: bool) -> Tensor:
        """The latents that the pitch of a piece is read from: the first piece's starts at its first frame, that of
        the others one later, where the piece before it ended."""
        start = PAST_FRAMES - PITCH_PAST_FRAMES + (0 if first else PITCH_AHEAD_FRAMES)
        return padded_BTD[:, start:]


def _run_blocks(blocks: Iterable[nn.Module], pieces_BTC: list[Tensor], carry: Carry | None) -> list[Tensor]:
    for block in blocks:
        pieces_BTC = [block(x_BTC, carry) for x_BTC in pieces_BTC]
    return pieces_BTC
