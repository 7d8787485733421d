"""The speaker encoder of Qwen3-TTS Base: ECAPA-TDNN (arXiv 2005.07143) under its published names.

Source: `Qwen3TTSSpeakerEncoder` of the package `qwen-tts` 0.1.1, the oracle of the tests.

Shapes: B recordings, C channels, T mel frames, N samples, M mel bands.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from librosa.filters import mel as mel_filters
from torch import Tensor, nn
from torch.nn import functional

from audiollm.models.pretrained import StoredWeights, report_model_errors

SAMPLE_RATE, WINDOW, HOP, HIGHEST_HZ = 24_000, 1024, 256, 12_000
LEAST = 1e-5
"""Floor of a mel band before its logarithm."""
PREFIX = "speaker_encoder."


class SpeakerEncoder(nn.Module):
    """A recording of a voice as a vector of the talker's size."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        """Make the encoder of `speaker_encoder_config`."""
        super().__init__()
        channels, kernels, dilations = data["enc_channels"], data["enc_kernel_sizes"], data["enc_dilations"]
        self.num_bands = int(data["mel_dim"])
        blocks: list[nn.Module] = [_TimeDelay(self.num_bands, channels[0], kernels[0], dilations[0])]
        blocks += [
            _Res2Block(
                channels[n - 1], channels[n], data["enc_res2net_scale"], data["enc_se_channels"], kernels[n],
                dilations[n],
            )
            for n in range(1, len(channels) - 1)
        ]  # fmt: skip
        self.blocks = nn.ModuleList(blocks)
        self.mfa = _TimeDelay(channels[-1], channels[-1], kernels[-1], dilations[-1])
        self.asp = _StatisticsPooling(channels[-1], data["enc_attention_channels"])
        self.fc = _reflected(2 * channels[-1], data["enc_dim"])

    def forward(self, mel_BTM: Tensor) -> Tensor:
        """The vectors `[B, C]` of log mel spectra."""
        x_BCT, outputs = mel_BTM.transpose(1, 2), []
        for block in self.blocks:
            x_BCT = block(x_BCT)
            outputs.append(x_BCT)
        pooled_BC1 = self.asp(self.mfa(torch.cat(outputs[1:], dim=1)))
        vector_BC: Tensor = self.fc(pooled_BC1)[..., 0]
        return vector_BC

    @torch.no_grad()
    def encode(self, samples_1N: Tensor) -> Tensor:
        """The vector `[C]` of a mono recording at `SAMPLE_RATE`.

        Raises:
            ValueError: it is shorter than a window.
        """
        if samples_1N.shape[1] < WINDOW:
            raise ValueError(
                f"a recording of {samples_1N.shape[1]} samples is too short for the speaker encoder"
            )
        vector_1C: Tensor = self(log_mel(samples_1N.to(self.fc.weight), self.num_bands))
        return vector_1C[0]


def load_speaker_encoder(folder: Path, config: Mapping[str, Any]) -> SpeakerEncoder:
    """Load the encoder among a model's weights, in float32.

    Raises:
        ConfigError: the weights do not fit config.json.
    """
    weights = StoredWeights(folder)
    names = [name for name in weights.names if name.startswith(PREFIX)]
    with report_model_errors(folder):
        encoder = SpeakerEncoder(config)
        encoder.load_state_dict({name.removeprefix(PREFIX): weights.read(name).float() for name in names})
    return encoder.eval().requires_grad_(False)


def log_mel(samples_1N: Tensor, num_bands: int) -> Tensor:
    """The log mel spectrum `[1, T, M]` of a mono recording, as the encoder was trained on it."""
    padding = (WINDOW - HOP) // 2
    padded = functional.pad(samples_1N[None], (padding, padding), mode="reflect")[0]
    spectrum = torch.stft(
        padded, WINDOW, HOP, WINDOW, torch.hann_window(WINDOW, device=padded.device), center=False, return_complex=True
    )  # fmt: skip
    magnitude = torch.view_as_real(spectrum).square().sum(-1).add(1e-9).sqrt()
    bands_MF = _mel_bands(num_bands).to(magnitude)
    return (bands_MF @ magnitude).clamp_min(LEAST).log().transpose(1, 2)


@cache
def _mel_bands(count: int) -> Tensor:
    filters = mel_filters(sr=SAMPLE_RATE, n_fft=WINDOW, n_mels=count, fmin=0, fmax=HIGHEST_HZ)
    return torch.from_numpy(filters).float()


def _reflected(inputs: int, outputs: int, kernel: int = 1, dilation: int = 1) -> nn.Conv1d:
    return nn.Conv1d(inputs, outputs, kernel, dilation=dilation, padding="same", padding_mode="reflect")


class _TimeDelay(nn.Module):
    def __init__(self, inputs: int, outputs: int, kernel: int, dilation: int) -> None:
        super().__init__()
        self.conv = _reflected(inputs, outputs, kernel, dilation)

    def forward(self, x_BCT: Tensor) -> Tensor:
        return functional.relu(self.conv(x_BCT))


class _Res2Net(nn.Module):
    """Groups of channels, each of which also sees the group before it."""

    def __init__(self, channels: int, scale: int, kernel: int, dilation: int) -> None:
        super().__init__()
        self.scale, width = scale, channels // scale
        self.blocks = nn.ModuleList(_TimeDelay(width, width, kernel, dilation) for _ in range(scale - 1))

    def forward(self, x_BCT: Tensor) -> Tensor:
        first, *groups = x_BCT.chunk(self.scale, dim=1)
        outputs = [first]
        for number, (group, block) in enumerate(zip(groups, self.blocks, strict=True)):
            outputs.append(block(group if number == 0 else group + outputs[-1]))
        return torch.cat(outputs, dim=1)


class _SqueezeExcitation(nn.Module):
    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = _reflected(channels, inner), _reflected(inner, channels)

    def forward(self, x_BCT: Tensor) -> Tensor:
        mean_BC1 = x_BCT.mean(dim=2, keepdim=True)
        return x_BCT * torch.sigmoid(self.conv2(functional.relu(self.conv1(mean_BC1))))


class _Res2Block(nn.Module):
    def __init__(
        self, inputs: int, outputs: int, scale: int, squeezed: int, kernel: int, dilation: int
    ) -> None:
        super().__init__()
        self.tdnn1, self.tdnn2 = _TimeDelay(inputs, outputs, 1, 1), _TimeDelay(outputs, outputs, 1, 1)
        self.res2net_block = _Res2Net(outputs, scale, kernel, dilation)
        self.se_block = _SqueezeExcitation(outputs, squeezed)

    def forward(self, x_BCT: Tensor) -> Tensor:
        inner_BCT = self.tdnn2(self.res2net_block(self.tdnn1(x_BCT)))
        return x_BCT + self.se_block(inner_BCT)


class _StatisticsPooling(nn.Module):
    """Mean and spread over time, weighted by attention for each channel."""

    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        self.tdnn = _TimeDelay(3 * channels, inner, 1, 1)
        self.conv = _reflected(inner, channels)

    def forward(self, x_BCT: Tensor) -> Tensor:
        uniform = torch.full_like(x_BCT, 1 / x_BCT.shape[2])
        context = [x_BCT, *(part.expand_as(x_BCT) for part in _weighted_statistics(x_BCT, uniform))]
        attention_BCT = self.conv(torch.tanh(self.tdnn(torch.cat(context, dim=1)))).softmax(dim=2)
        return torch.cat(_weighted_statistics(x_BCT, attention_BCT), dim=1)


def _weighted_statistics(x_BCT: Tensor, weight_BCT: Tensor) -> list[Tensor]:
    mean_BC1 = (weight_BCT * x_BCT).sum(2, keepdim=True)
    variance_BC1 = (weight_BCT * (x_BCT - mean_BC1).square()).sum(2, keepdim=True)
    return [mean_BC1, variance_BC1.clamp_min(1e-12).sqrt()]
