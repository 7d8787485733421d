"""Encoding and decoding piece by piece, and why every way of calling gives the same codes.

Sums of floating-point numbers depend on their order, and a matrix product's order depends on its shape. So the
encoder always does the same arithmetic: windows of `step_frames` frames, one clip at a time, at the same places of
the clip, in fresh memory, with the causal layers' context carried from window to window and exact zeros beyond the
end. A clip alone, padded in a batch, in chunks or streamed makes the same calls with the same numbers, so the codes
are identical by construction (on one machine, at one number of threads).

Latency: the encoder waits for `step_frames` frames and 45 ms more (365 ms at 8 frames); the decoder is two frames
and 15 ms behind (95 ms).

Shapes: N samples, T frames, K codebooks, D latent dimension.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from tokenizer.native.autoencoder import FUTURE_FRAMES, PAST_FRAMES, Decoder, Encoder
from tokenizer.native.layers import Carry

PUSHED_SAMPLES = 2**18
"""Samples that are taken in at a time, about ten seconds."""


class LatentStream:
    """Waveform `[C, n]` in pieces of any size to latents `[1, step_frames, D]`, in windows of one shape."""

    def __init__(self, encoder: Encoder, step_frames: int) -> None:
        self._encoder = encoder
        self._hop, self._context = encoder.shape.hop_samples, encoder.shape.context_samples
        self._step_frames = step_frames
        self.latency_s = (step_frames * self._hop + self._context) / encoder.shape.sample_rate
        """The longest time from a sample to the latent of its frame."""
        self._begin()

    def needed_s(self, frames: int) -> float:
        """The seconds of sound after which so many frames have latents: whole windows, and what they look ahead."""
        windows = -(-frames // self._step_frames)
        samples = windows * self._step_frames * self._hop + self._context
        return samples / self._encoder.shape.sample_rate

    def push(self, samples_CN: Tensor) -> list[Tensor]:
        """The windows that these samples complete.

        Raises:
            ValueError: samples that are not finite.
        """
        channels = self._encoder.shape.channels
        if samples_CN.ndim != 2 or len(samples_CN) != channels:
            raise ValueError(f"encoding takes pieces [{channels}, samples], not {list(samples_CN.shape)}")
        if not bool(torch.isfinite(samples_CN).all()):
            raise ValueError("samples that are not finite cannot be encoded: mend or drop them before")
        self._samples += samples_CN.shape[1]
        # in parts, so that memory does not grow with what is pushed at once
        return [
            window
            for block_CN in samples_CN.split(PUSHED_SAMPLES, dim=1)
            for window in self._advance(block_CN)
        ]

    def flush(self) -> tuple[list[Tensor], int]:
        """The last windows, with zeros beyond the end, and how many of their frames hold samples; then begin anew."""
        missing = -(-self._samples // self._hop) - self._frames
        steps = -(-missing // self._step_frames)
        end = (self._frames + steps * self._step_frames) * self._hop + self._context
        windows = self._advance(self._buffer_CN.new_zeros(len(self._buffer_CN), end - self._samples))
        self._begin()
        return windows, missing

    def _begin(self) -> None:
        weight = self._encoder.input.weight
        self._buffer_CN = torch.zeros(self._encoder.shape.channels, self._context, device=weight.device)
        self._carry: Carry = {}
        self._samples = self._frames = 0

    @torch.no_grad()
    def _advance(self, samples_CN: Tensor) -> list[Tensor]:
        self._buffer_CN = torch.cat([self._buffer_CN, samples_CN.to(self._buffer_CN)], dim=1)
        step = self._step_frames * self._hop
        windows, start = [], 0
        while self._buffer_CN.shape[1] - start >= step + 2 * self._context:
            # a copy in fresh, aligned memory: vector instructions must not depend on where the piece began
            windows.append(self._buffer_CN[:, start : start + step + 2 * self._context].clone()[None])
            start += step
        self._buffer_CN = self._buffer_CN[:, start:].clone()
        self._frames += len(windows) * self._step_frames
        return self._encoder.steps(windows, self._carry)


class WaveformStream:
    """Latents `[1, t, D]` in pieces of any size to waveform `[C, n]`."""

    _buffer_BTD: Tensor

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        shape = decoder.shape
        delay = FUTURE_FRAMES * shape.hop_samples + decoder.head.delay_samples
        self.latency_s = delay / shape.sample_rate
        """The time from a frame's codes to the end of its sound."""
        self._begin()

    @torch.no_grad()
    def push(self, latent_BTD: Tensor) -> Tensor:
        """The samples that these latents complete."""
        self._buffer_BTD = torch.cat([self._buffer_BTD, latent_BTD], dim=1)
        if self._buffer_BTD.shape[1] <= PAST_FRAMES + FUTURE_FRAMES:
            return latent_BTD.new_zeros(self._decoder.shape.channels, 0)
        samples_BCN = self._decoder.step(self._buffer_BTD, self._carry)
        self._buffer_BTD = self._buffer_BTD[:, -(PAST_FRAMES + FUTURE_FRAMES) :]
        return samples_BCN[0]

    @torch.no_grad()
    def flush(self) -> Tensor:
        """The rest; then begin anew."""
        parts = [self.push(self._buffer_BTD.new_zeros(1, FUTURE_FRAMES, self._buffer_BTD.shape[2]))]
        if self._carry:
            parts.append(self._decoder.head.finish(self._carry)[0])
        self._begin()
        return torch.cat(parts, dim=1)

    def _begin(self) -> None:
        weight = self._decoder.input.weight
        self._buffer_BTD = torch.zeros(1, PAST_FRAMES, weight.shape[1], device=weight.device)
        self._carry: Carry = {}


class StreamedTokenizer(Protocol):
    """The interface of a tokenizer that the streams use."""

    config: Any
    quantizer: Any
    encoder: Encoder
    decoder: Decoder

    @property
    def num_codebooks(self) -> int: ...


class StreamingEncoder:
    """Codes while the sound comes in: `push` any number of samples, `flush` at the end."""

    def __init__(self, tokenizer: StreamedTokenizer, num_codebooks: int | None = None) -> None:
        self._quantizer, self._num_codebooks = tokenizer.quantizer, num_codebooks
        self._latents = LatentStream(tokenizer.encoder, tokenizer.config.step_frames)
        device = tokenizer.encoder.input.weight.device
        books = num_codebooks or tokenizer.num_codebooks
        self._empty_KT = torch.zeros(books, 0, dtype=torch.long, device=device)

    @property
    def latency_s(self) -> float:
        """The longest time from a sample to the code of its frame."""
        return self._latents.latency_s

    def needed_s(self, frames: int) -> float:
        """The seconds of sound after which so many frames have their codes."""
        return self._latents.needed_s(frames)

    def push(self, samples_CN: Tensor) -> Tensor:
        """Samples `[1, n]` to the codes `[K, t]` that they complete, t = 0 where there are none yet."""
        return self._codes(self._latents.push(samples_CN))

    def flush(self) -> Tensor:
        """The codes of the rest, ceil(samples / hop) in all; the encoder is then ready for another clip."""
        windows, frames = self._latents.flush()
        return self._codes(windows)[:, :frames]

    def _codes(self, windows: list[Tensor]) -> Tensor:
        codes = self._quantizer.encode(windows, self._num_codebooks)
        return torch.cat([codes_BKT[0] for codes_BKT in codes], dim=1) if codes else self._empty_KT


class StreamingDecoder:
    """Sound while the codes come in: `push` any number of frames, `flush` at the end."""

    def __init__(self, tokenizer: StreamedTokenizer) -> None:
        self._quantizer = tokenizer.quantizer
        self._waveform = WaveformStream(tokenizer.decoder)

    @property
    def latency_s(self) -> float:
        """The time from a frame's codes to the end of its sound."""
        return self._waveform.latency_s

    @torch.no_grad()
    def push(self, codes_KT: Tensor) -> Tensor:
        """Codes `[K', t]` to the samples `[1, n]` that they complete."""
        return self._waveform.push(self._quantizer.decode(codes_KT[None])).clamp(-1, 1)

    def flush(self) -> Tensor:
        """The rest of the sound; the decoder is then ready for another clip."""
        return self._waveform.flush().clamp(-1, 1)
