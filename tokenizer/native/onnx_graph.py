"""A codec's two halves as graphs for ONNX: one step each, with the carried context as inputs and outputs.

ONNX has no complex numbers that its runtimes share, so Fourier transforms are products with matrices of cosines here,
and spectra are pairs of real and imaginary parts. Everything else is the layers themselves.

Shapes: N samples, T frames, t frames of a piece, K codebooks, D latent dimension, C channels, M mel bands, W window
samples, F frequency bins, R mel frames.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from audiollm import products
from tokenizer.native.autoencoder import FUTURE_FRAMES, PAST_FRAMES, PITCH_AHEAD_FRAMES
from tokenizer.native.layers import HARMONIC_BIAS, HARMONIC_SLOPE, Carry, CausalConv, ConvNeXtBlock
from tokenizer.native.model import AudioTokenizer
from tokenizer.native.operations import frame, overlap_add
from tokenizer.native.pitch import PITCH_FUTURE_FRAMES, PITCH_PAST_FRAMES, PitchTrack, decode_pitch
from tokenizer.native.source import Excitation, SourceState

OPSET = 18


class GraphState(NamedTuple):
    """A carried tensor at the beginning of a clip; a dimension of a graph that is not fixed has a name."""

    name: str
    start: Tensor
    dynamic: dict[int, str]


class EncoderGraph(nn.Module):
    """A window of samples `[1, context + step + context]` and the states to codes `[1, K, T]` and the states."""

    def __init__(self, tokenizer: AudioTokenizer) -> None:
        super().__init__()
        self.tokenizer, self.encoder = tokenizer, tokenizer.encoder
        self.convolutions = [
            block.depthwise for block in _blocks(self.encoder.mel_blocks, self.encoder.blocks)
        ]
        mel = self.encoder.mel
        self.register_buffer("transform_WF2", _forward_transform(mel.n_fft) * mel.window_W[:, None])
        self.transform_WF2: Tensor

    def states(self) -> list[GraphState]:
        """The context of each causal layer."""
        return _context_states(self.convolutions)

    def forward(self, window_1N: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        carry: Carry = dict(zip(self.convolutions, states, strict=True))
        mels_BRM = self._mel(window_1N)
        x_BTC = self.encoder.input(mels_BRM)
        for block in self.encoder.mel_blocks:
            x_BTC = block(x_BTC, carry)
        x_BTC = self.encoder.downsample(x_BTC)
        for block in self.encoder.blocks:
            x_BTC = block(x_BTC, carry)
        latent_BTD = self.encoder.output(x_BTC)
        if self.encoder.linear is not None:
            latent_BTD = latent_BTD + self.encoder.linear(self.encoder.frames_of_latents(mels_BRM))
        (codes_BKT,) = self.tokenizer.quantizer.encode([latent_BTD])
        return codes_BKT, *(carry[layer] for layer in self.convolutions)

    def _mel(self, window_1N: Tensor) -> Tensor:
        mel = self.encoder.mel
        both_BT2F = frame(window_1N, mel.n_fft, mel.hop_samples) @ self.transform_WF2
        real_BTF, imaginary_BTF = both_BT2F.chunk(2, dim=2)
        magnitude_BTF = (real_BTF.square() + imaginary_BTF.square() + 1e-10).sqrt()
        log_mel_BTM = torch.log((magnitude_BTF @ mel.filters_FM).clamp_min(1e-4))
        if mel.salience is None:
            return log_mel_BTM
        return torch.cat([log_mel_BTM, mel.salience(magnitude_BTF)], dim=2)


class DecoderGraph(nn.Module):
    """Codes `[1, K, t]` and the states to samples `[1, n]`, the rest of the sound `[1, delay]`, and the states.

    A code of -1 stands for a frame beyond the end. The first `delay` samples of a clip lie before its beginning.
    """

    def __init__(self, tokenizer: AudioTokenizer) -> None:
        super().__init__()
        self.tokenizer, self.decoder = tokenizer, tokenizer.decoder
        self.convolutions = [
            block.depthwise for block in _blocks(self.decoder.blocks, self.decoder.mel_blocks)
        ]
        head, source = self.decoder.head, self.decoder.source
        self.register_buffer("inverse_2FW", _inverse_transform(head.n_fft) * head.window_W)
        rotated_WF2 = _forward_transform(source.n_fft, source.dispersion_K)
        self.register_buffer("source_WF2", rotated_WF2 * source.window_W[:, None])
        self.inverse_2FW: Tensor
        self.source_WF2: Tensor
        self._overlap = head.n_fft - head.hop_samples

    def states(self) -> list[GraphState]:
        """Latents, the head's overlap, the source, and the context of each causal layer."""
        width, head, source = self.decoder.input.in_channels, self.decoder.head, self.decoder.source
        states = [
            GraphState("latents", torch.zeros(1, PAST_FRAMES, width), {1: "kept_latents"}),
            GraphState("overlap", torch.zeros(1 + head.channels, head.n_fft - head.hop_samples), {}),
        ]
        if self.decoder.pitch is not None:
            before = (source.n_fft - source.hop_samples) // 2 - source.hop_samples // 2
            states += [
                GraphState(
                    "pitch_latents", torch.zeros(1, PITCH_PAST_FRAMES, width), {1: "kept_pitch_latents"}
                ),
                GraphState("turns", torch.zeros(1, dtype=torch.float64), {}),
                GraphState("hz", torch.zeros(1, dtype=torch.float64), {}),
                GraphState("pulses", torch.zeros(1, before), {1: "kept_samples"}),
                GraphState("spectra", torch.zeros(1, 0, 2 * (source.n_fft // 2 + 1)), {1: "kept_spectra"}),
                GraphState("voicing", torch.zeros(1, 0), {1: "kept_voicing"}),
            ]
        return states + _context_states(self.convolutions)

    def forward(self, codes_1KT: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        names = [state.name for state in self.states()]
        values = dict(zip(names, states, strict=True))
        carry: Carry = dict(zip(self.convolutions, states[-len(self.convolutions) :], strict=True))
        latent_BTD = self.tokenizer.quantizer.decode(codes_1KT.clamp_min(0))
        latent_BTD = latent_BTD * (codes_1KT[:, :1].transpose(1, 2) >= 0)
        padded_BTD = torch.cat([values["latents"], latent_BTD], dim=1)
        values["latents"] = padded_BTD[:, -(PAST_FRAMES + FUTURE_FRAMES) :]
        x_BTC = self.decoder.input(padded_BTD)
        for block in self.decoder.blocks:
            x_BTC = block(x_BTC, carry)
        x_BTC = self.decoder.upsample(x_BTC)
        for block in self.decoder.mel_blocks:
            x_BTC = block(x_BTC, carry)
        features_BRC = self.decoder.norm(x_BTC)
        excitation = None
        if self.decoder.pitch is not None:
            excitation = self._excitation(latent_BTD, values)
        linear_BRCF = self.decoder.linear_magnitudes(padded_BTD)
        both_XN = self._overlapped(self._spectrum(features_BRC, excitation, linear_BRCF))
        overlap = self._overlap
        both_XN = torch.cat([both_XN[:, :overlap] + values["overlap"], both_XN[:, overlap:]], dim=1)
        values["overlap"] = both_XN[:, -overlap:]
        rest_1N = _normalized(both_XN[:, -overlap:][:, : self.decoder.head.delay_samples])
        values |= {
            name: carry[layer] for name, layer in zip(names[-len(carry) :], self.convolutions, strict=True)
        }
        return _normalized(both_XN[:, :-overlap]), rest_1N, *(values[name] for name in names)

    def _excitation(self, latent_BTD: Tensor, values: dict[str, Tensor]) -> Excitation:
        """The source's next spectra as real and imaginary parts, `[1, R, 2 F]`; its states are replaced."""
        source, pitch = self.decoder.source, self.decoder.pitch
        assert pitch is not None
        context_BTD = torch.cat([values["pitch_latents"], latent_BTD], dim=1)
        values["pitch_latents"] = context_BTD[:, -(PITCH_PAST_FRAMES + PITCH_FUTURE_FRAMES) :]
        logits = pitch.exact_logits(pitch.windows(context_BTD), pitch.exact_layers())
        track: PitchTrack = decode_pitch(logits)
        first_hz_B = torch.where(values["hz"] > 0, values["hz"], track.hz_BF[:, 0])
        empty = Excitation(values["spectra"][:, :0], values["voicing"][:, :0])
        state = SourceState(values["turns"], first_hz_B, values["pulses"], empty)
        pulses_BN, values["turns"] = source.pulses(track.hz_BF, state)
        pulses_BN = torch.cat([values["pulses"], pulses_BN], dim=1)
        made_BF2 = frame(pulses_BN, source.n_fft, source.hop_samples) @ self.source_WF2
        spectra = torch.cat([values["spectra"], made_BF2], dim=1)
        voicing = torch.cat([values["voicing"], track.voicing_BF], dim=1)
        values["pulses"] = pulses_BN[:, -self._overlap :]
        values["hz"] = track.hz_BF[:, -1]
        # by so many frames the source is ahead, of the spectra fewer: a window needs the pitch behind it
        voiced = self.decoder.shape.stride * PITCH_AHEAD_FRAMES
        ready = voiced - source.n_fft // (2 * source.hop_samples)
        values["spectra"], values["voicing"] = spectra[:, -ready:], voicing[:, -voiced:]
        return Excitation(spectra[:, :-ready], voicing[:, :-voiced])

    def _spectrum(
        self, features_BRC: Tensor, excitation: Excitation | None, linear_BRCF: Tensor | None
    ) -> Tensor:
        """Real and imaginary parts `[C, R, 2 F]`."""
        head = self.decoder.head
        parts_BRCX = head.project(features_BRC).unflatten(2, (head.channels, head.n_fft + 2))
        log_magnitude, phase = parts_BRCX.chunk(2, dim=3)
        if linear_BRCF is not None:
            log_magnitude = log_magnitude + linear_BRCF
        magnitude = torch.exp(log_magnitude.clamp_max(6.0))
        voice: Tensor | float = 0.0
        source = torch.zeros(())
        if excitation is not None:
            share = (
                HARMONIC_SLOPE * head.share_logits(features_BRC) + HARMONIC_BIAS
            ).sigmoid() @ head.bands_PF
            voice = share * excitation.voicing_BF[:, :, None, None]
            weight = torch.cat([magnitude * voice] * 2, dim=3)
            source = excitation.spectrum_BFK[:, :, None] * weight
        noise = magnitude * (1 - voice)
        spectrum = source + torch.cat([noise * phase.cos(), noise * phase.sin()], dim=3)
        return spectrum.transpose(1, 2).flatten(0, 1)

    def _overlapped(self, spectrum_CR2: Tensor) -> Tensor:
        """Added frames of the channels, and of the squared window: `[C + 1, n]`."""
        head = self.decoder.head
        frames_CRW = spectrum_CR2 @ self.inverse_2FW
        weights_1RW = 0 * frames_CRW[:1] + head.window_W.square()  # a trace would fix the length of zeros
        return overlap_add(torch.cat([frames_CRW, weights_1RW]), head.hop_samples)


def _normalized(both_XN: Tensor) -> Tensor:
    return (both_XN[:-1] / both_XN[-1:].clamp_min(1e-3)).clamp(-1, 1)


def _blocks(*lists: nn.ModuleList) -> Iterator[ConvNeXtBlock]:
    for blocks in lists:
        for block in blocks:
            assert isinstance(block, ConvNeXtBlock)
            yield block


def _context_states(convolutions: Sequence[CausalConv]) -> list[GraphState]:
    return [
        GraphState(f"context_{number}", torch.zeros(1, layer.context, layer.conv.in_channels), {})
        for number, layer in enumerate(convolutions)
    ]


def _forward_transform(n_fft: int, factor_F: Tensor | None = None) -> Tensor:
    """Samples to real and imaginary parts of the lowest n / 2 + 1 bins, `[W, 2 F]`, times a complex factor."""
    angle_WF = 2 * math.pi / n_fft * _modular_product(n_fft, n_fft // 2 + 1)
    unit_WF = torch.polar(torch.ones_like(angle_WF), -angle_WF)
    if factor_F is not None:
        unit_WF = unit_WF * factor_F
    return torch.cat([unit_WF.real, unit_WF.imag], dim=1).float()


def _inverse_transform(n_fft: int) -> Tensor:
    """The inverse for real samples, `[2 F, W]`: inner bins count twice."""
    angle_FW = 2 * math.pi / n_fft * _modular_product(n_fft // 2 + 1, n_fft)
    weight_F1 = torch.full((n_fft // 2 + 1, 1), 2.0 / n_fft, dtype=torch.float64)
    weight_F1[[0, -1]] = 1.0 / n_fft
    return torch.cat([weight_F1 * angle_FW.cos(), -weight_F1 * angle_FW.sin()]).float()


def _modular_product(rows: int, columns: int) -> Tensor:
    """Products of indices modulo the length: cosines of large angles lose digits."""
    longest = max(rows, columns)
    return (torch.arange(rows)[:, None] * torch.arange(columns) % longest).double()


def write_graphs(tokenizer: AudioTokenizer, folder: Path) -> dict[str, list[GraphState]]:
    """Write `encoder.onnx` and `decoder.onnx`; the states of both."""
    encoder, decoder = EncoderGraph(tokenizer).eval(), DecoderGraph(tokenizer).eval()
    shape, step = tokenizer.encoder.shape, tokenizer.config.step_frames * tokenizer.hop_samples
    window_1N = torch.zeros(1, step + 2 * shape.context_samples)
    codes_1KT = torch.zeros(1, tokenizer.num_codebooks, 5, dtype=torch.long)
    _write(encoder, window_1N, ["window"], ["codes"], {}, folder / "encoder.onnx")
    _write(decoder, codes_1KT, ["codes"], ["samples", "rest"], {2: "frames"}, folder / "decoder.onnx")
    return {"encoder": encoder.states(), "decoder": decoder.states()}


def _write(
    graph: EncoderGraph | DecoderGraph,
    example: Tensor,
    inputs: list[str],
    outputs: list[str],
    dynamic: dict[int, str],
    path: Path,
) -> None:
    states = graph.states()
    names = [state.name for state in states]
    axes = {inputs[0]: dynamic} if dynamic else {}
    for state in states:
        if state.dynamic:
            axes |= {
                state.name: state.dynamic,
                f"next_{state.name}": {axis: f"next_{name}" for axis, name in state.dynamic.items()},
            }
    if dynamic:
        axes |= {outputs[0]: {1: "samples"}}
    with _traceable():
        torch.onnx.export(
            graph,
            (example, *(state.start for state in states)),
            str(path),
            input_names=[*inputs, *names],
            output_names=[*outputs, *(f"next_{name}" for name in names)],
            dynamic_axes=axes,
            opset_version=OPSET,
            dynamo=False,
        )


@contextmanager
def _traceable() -> Iterator[None]:
    """Products by the operator that ONNX has: with gradients on, and by PyTorch's own library."""
    before = os.environ.get(products.ENVIRONMENT)
    os.environ[products.ENVIRONMENT] = "plain"
    try:
        with torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # sizes that a trace takes for fixed are those of weights
            yield
    finally:
        del os.environ[products.ENVIRONMENT]
        if before is not None:
            os.environ[products.ENVIRONMENT] = before
