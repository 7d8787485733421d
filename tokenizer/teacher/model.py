"""Semantic teachers: frozen encoders whose features the codes are trained to carry.

`load_teacher(path)` takes any Hugging Face audio encoder, or our own (trained by `tokenizer/teacher/training.py`
on nothing but the recordings at hand). Either way a teacher maps 24 kHz waveforms to 25 features a second,
standardised per dimension, frame t centred on its own 40 ms.

Shapes: B batch, N samples at 24 kHz, X samples at the encoder's rate, T frames at 25 Hz, C channels, M mel bands,
S hidden states (the embedding and each layer), R selections of states (each, then their mean), U units a frame,
V number of units, P unit features.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoFeatureExtractor, AutoModel

from audiollm.audio import resample
from audiollm.errors import ConfigError
from audiollm.files.json_files import OFFLINE, read_json_file
from audiollm.files.transformers_folders import open_model
from audiollm.models.pretrained import load_model, model_folder, report_model_errors, save_model
from audiollm.products import Linear
from tokenizer.native.layers import LogMel
from tokenizer.quantizers.residual import nearest_codes
from tokenizer.rates import FRAME_RATE, HOP_SAMPLES, SAMPLE_RATE

USUAL_RATE = 16_000


class Timing(NamedTuple):
    """The position of a model's frames on its input, so that `merge` of them are centred on a 25 Hz frame."""

    left_samples: int
    right_samples: int
    """Zeros put before and after the input."""
    skip: int
    """Frames of the output to leave out at the start."""
    merge: int
    """The model's frames in one frame at 25 Hz."""
    most_frames: int | None = None
    """The longest input in 25 Hz frames, where the model has a limit."""


class HuggingFaceEncoder(nn.Module):
    """HuBERT, WavLM, wav2vec 2.0 and their like (waveform in), wav2vec2-bert, and Whisper's encoder.

    The input is resampled to the rate of the model's feature extractor (16 kHz where the folder has none) and
    padded so that the model's frames, averaged in groups, are centred on the 25 Hz frames, exactly N / 960 of them.
    """

    def __init__(self, folder: Path) -> None:
        """
        Raises:
            ConfigError: not an audio encoder, a frame rate that 25 Hz does not divide, or no safetensors.
        """
        super().__init__()
        self._extractor = _load_extractor(folder)
        self.rate = int(getattr(self._extractor, "sampling_rate", USUAL_RATE))
        self.timing = _timing(_load_config(folder), self._extractor, self.rate, folder)
        self.model = _load_encoder(folder)
        self.hidden_size = int(self.model.config.hidden_size)
        self.num_states = int(self.model.config.num_hidden_layers) + 1

    def hidden_states(self, samples_BN: Tensor) -> Tensor:
        """`[S, B, T, C]`, T = N / 960: the embedding, then each layer's output."""
        hop = SAMPLE_RATE // FRAME_RATE
        max_samples = (self.timing.most_frames or samples_BN.shape[1]) * hop
        return torch.cat([self._piece(block_BN) for block_BN in samples_BN.split(max_samples, dim=1)], dim=2)

    def _piece(self, samples_BN: Tensor) -> Tensor:
        frames, merge, skip = (
            samples_BN.shape[1] * FRAME_RATE // SAMPLE_RATE,
            self.timing.merge,
            self.timing.skip,
        )
        inputs = self._inputs(resample(samples_BN, SAMPLE_RATE, self.rate))
        states_SBXC = torch.stack(self.model(**inputs, output_hidden_states=True).hidden_states)
        centred = states_SBXC[:, :, skip : skip + frames * merge]
        if centred.shape[2] != frames * merge:
            raise ValueError(
                f"{type(self.model).__name__} gave {states_SBXC.shape[2]} frames for {frames / FRAME_RATE} s, "
                f"fewer than {frames * merge + skip}: its settings change the frame rate"
            )
        return centred.unflatten(2, (frames, merge)).mean(dim=3)

    def _inputs(self, samples_BX: Tensor) -> dict[str, Tensor]:
        margins = (self.timing.left_samples, self.timing.right_samples)
        if not _takes_features(self._extractor):
            if getattr(self._extractor, "do_normalize", False):
                mean = samples_BX.mean(dim=1, keepdim=True)
                variance = samples_BX.var(dim=1, keepdim=True, unbiased=False)
                samples_BX = (samples_BX - mean) / (variance + 1e-7).sqrt()
            return {"input_values": functional.pad(samples_BX, margins)}
        waveforms = list(functional.pad(samples_BX, margins).cpu().numpy())
        features = self._extractor(waveforms, sampling_rate=self.rate, return_tensors="pt")
        return {"input_features": features["input_features"].to(samples_BX)}


def _takes_features(extractor: Any) -> bool:
    return extractor is not None and extractor.model_input_names[0] == "input_features"


def _load_extractor(folder: Path) -> Any:
    """The folder's feature extractor; None where it has none, as some folders of waveform models."""
    if not any((folder / name).exists() for name in ("preprocessor_config.json", "processor_config.json")):
        return None
    try:
        return AutoFeatureExtractor.from_pretrained(folder, **OFFLINE)
    except (OSError, ValueError) as error:  # damaged, or with code of its own
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"no feature extractor loads: {reason:.200}", str(folder), "give another folder"
        ) from None


def _load_config(folder: Path) -> Any:
    try:
        return AutoConfig.from_pretrained(folder, **OFFLINE)
    except ValueError as error:
        raise _not_an_encoder(folder, str(error).splitlines()[0]) from None


def _load_encoder(folder: Path) -> Any:
    if not list(folder.glob("*.safetensors")):
        raise ConfigError(
            "no weights here: a .safetensors file is missing",
            str(folder),
            "save the model with transformers' save_pretrained; pickled weights are not loaded",
        )
    model = open_model(AutoModel, folder)
    return model.get_encoder() if model.config.is_encoder_decoder else model


def _timing(config: Any, extractor: Any, rate: int, folder: Path) -> Timing:
    """See `Timing`; each family has its own padding and centring."""
    hop = rate // FRAME_RATE
    if config.model_type == "whisper" and _takes_features(extractor):
        # centred STFT, then two convolutions that keep the centre: frame j is centred on sample j * stride
        stride = extractor.hop_length * 2
        limit = int(config.max_source_positions)
        merge = _count_frames_per_group(hop, stride, folder)
        return Timing(stride - (stride // 2), 0, 1, merge, (limit - 1) // merge)
    if config.model_type == "wav2vec2-bert" and _takes_features(extractor):
        # windows of 25 ms every 10 ms, none beyond the ends, `stride` of them stacked to a frame
        window, step = rate * 25 // 1000, rate * 10 // 1000
        spare = window - step
        return Timing(
            spare // 2, spare - spare // 2, 0, _count_frames_per_group(hop, step * extractor.stride, folder)
        )
    if hasattr(config, "conv_kernel") and hasattr(config, "conv_stride") and not _takes_features(extractor):
        field, stride = 1, 1
        for kernel, step in zip(config.conv_kernel, config.conv_stride, strict=True):
            field += (kernel - 1) * stride
            stride *= step
        spare = field - stride
        return Timing(spare // 2, spare - spare // 2, 0, _count_frames_per_group(hop, stride, folder))
    raise _not_an_encoder(folder, f"model_type {config.model_type!r}")


def _count_frames_per_group(hop_samples: int, stride_samples: int, folder: Path) -> int:
    if hop_samples % stride_samples:
        raise ConfigError(
            f"a frame every {stride_samples} samples cannot be grouped to {FRAME_RATE} Hz ({hop_samples} samples)",
            str(folder),
            "give an encoder of 25, 50 or 100 frames a second",
        )
    return hop_samples // stride_samples


def _not_an_encoder(folder: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"not an audio encoder that can teach: {reason}",
        str(folder),
        "give HuBERT, WavLM, wav2vec 2.0, wav2vec2-bert, Whisper, or `own`",
    )


MODEL_TYPE = "audiollm_mel_unit_teacher"

Layer = int | Literal["mean"]


@dataclass(frozen=True)
class MelUnitConfig:
    """The shape of our own teacher."""

    num_mels: int = 80
    mel_hop_samples: int = 240
    mel_window_samples: int = 960
    hidden_size: int = 256
    layers: int = 4
    heads: int = 4
    expansion: int = 3
    kernel_size: int = 9
    num_units: int = 300
    units_per_frame: int = 2
    num_cepstra: int = 13


class SemanticTeacher(nn.Module):
    """An encoder that is never trained again: no gradients, always in eval mode, in float32.

    Before `features` it needs the statistics of the training audio (`fit_statistics`); ours are saved with it.
    """

    def __init__(self, encoder: MelUnitEncoder | HuggingFaceEncoder, layer: Layer = "mean") -> None:
        """
        Args:
            layer: `mean` over all hidden states, or the index of one: 0 is the embedding, -1 the last layer.

        Raises:
            ConfigError: no such layer.
        """
        super().__init__()
        states = encoder.num_states
        if layer != "mean" and not -states <= layer < states:
            raise ConfigError(
                f"layer: {layer}, but the teacher's hidden states are 0..{states - 1}",
                "the tokenizer's teacher",
                "give one of them, or mean",
            )
        self.encoder, self.layer = encoder, layer
        self.feature_dim, self.frame_rate = encoder.hidden_size, FRAME_RATE
        # standard deviations of 0 say that nothing has been measured yet
        self.register_buffer("mean_RC", torch.zeros(states + 1, self.feature_dim))
        self.register_buffer("std_RC", torch.zeros(states + 1, self.feature_dim))
        self.mean_RC: Tensor
        self.std_RC: Tensor
        self.requires_grad_(False)
        self.train(False)

    def train(self, mode: bool = True) -> SemanticTeacher:
        """Stays in eval mode whatever is asked."""
        super().train(False)
        return self

    @property
    def is_fitted(self) -> bool:
        return bool((self.std_RC > 0).all())

    @torch.no_grad()
    def features(self, samples_BN: Tensor) -> Tensor:
        """Features `[B, N / 960, C]` of 24 kHz waveforms, N a multiple of 960; float32, finite on silence too.

        Over the training audio each dimension has mean 0 and standard deviation 1, so frames of (near) zero
        norm are rare but possible: a cosine loss on them needs an epsilon.

        Raises:
            ValueError: another shape, or `fit_statistics` was never called.
        """
        if not self.is_fitted:
            raise ValueError("the teacher's features are not standardised yet: call fit_statistics first")
        row = self.encoder.num_states if self.layer == "mean" else self.layer % self.encoder.num_states
        states_SBTC = self._hidden_states(samples_BN)
        chosen_BTC = states_SBTC.mean(dim=0) if self.layer == "mean" else states_SBTC[row]
        return (chosen_BTC - self.mean_RC[row]) / self.std_RC[row]

    @torch.no_grad()
    def fit_statistics(self, batches: Iterable[Tensor]) -> None:
        """Measure mean and standard deviation over batches `[B, N]` of training audio, of every selection of states.

        Raises:
            ValueError: no batch.
        """
        count = 0
        sums_RC = torch.zeros_like(self.mean_RC, dtype=torch.float64)
        squares_RC = sums_RC.clone()
        for samples_BN in batches:
            states_SBTC = self._hidden_states(samples_BN)
            selections = (
                torch.cat([states_SBTC, states_SBTC.mean(dim=0, keepdim=True)]).double().flatten(1, 2)
            )
            count += selections.shape[1]
            sums_RC += selections.sum(dim=1)
            squares_RC += selections.square().sum(dim=1)
        if not count:
            raise ValueError("fit_statistics needs at least one batch of training audio")
        mean_RC = sums_RC / count
        std_RC = (squares_RC / count - mean_RC.square()).clamp_min(0).sqrt()
        # a dimension that hardly moves would be blown up to noise: the floor is a hundredth of the usual
        floor_R1 = (0.01 * std_RC.square().mean(dim=1, keepdim=True).sqrt()).clamp_min(1e-8)
        self.mean_RC.copy_(mean_RC)
        self.std_RC.copy_(torch.maximum(std_RC, floor_R1))

    def _hidden_states(self, samples_BN: Tensor) -> Tensor:
        if samples_BN.ndim != 2 or samples_BN.shape[1] == 0 or samples_BN.shape[1] % HOP_SAMPLES:
            raise ValueError(
                f"the teacher takes [batch, a multiple of {HOP_SAMPLES} samples], not {list(samples_BN.shape)}"
            )
        with torch.autocast(samples_BN.device.type, enabled=False):
            return self.encoder.hidden_states(samples_BN.float())


def load_teacher(path: Path | str, layer: Layer = "mean") -> SemanticTeacher:
    """A teacher by its folder: ours, or any Hugging Face audio encoder (which still needs `fit_statistics`).

    Raises:
        ConfigError: nothing there, not an audio encoder, weights that are not safetensors, or no such layer.
    """
    folder = model_folder(Path(path))
    if read_json_file(folder / "config.json", dict).get("model_type") != MODEL_TYPE:
        return SemanticTeacher(HuggingFaceEncoder(folder), layer)
    config, weights = load_model(folder, MODEL_TYPE, MelUnitConfig)
    teacher = SemanticTeacher(MelUnitEncoder(config), layer)
    with report_model_errors(folder):
        teacher.load_state_dict(weights)
    return teacher


def save_teacher(teacher: SemanticTeacher, folder: Path) -> None:
    """Write a teacher of our own, its statistics included.

    Raises:
        ValueError: a Hugging Face encoder, which stays where it is.
    """
    if not isinstance(teacher.encoder, MelUnitEncoder):
        raise ValueError(
            "only our own teacher is saved: a Hugging Face encoder is loaded from its own folder"
        )
    save_model(folder, teacher, MODEL_TYPE, teacher.encoder.config)


class MelUnitEncoder(nn.Module):
    """A small bidirectional encoder, trained by masked prediction of k-means units of the mel spectrum.

    HuBERT's recipe, first iteration (arXiv 2106.07447): units are clusters of cepstra and their slopes, two a
    frame; frames are hidden in spans, and their units predicted from what is around them. Position comes from the
    convolutions alone, so any length will do.
    """

    def __init__(self, config: MelUnitConfig) -> None:
        super().__init__()
        self.config = config
        self.hidden_size, self.num_states = config.hidden_size, config.layers + 1
        size, mels = config.hidden_size, config.num_mels
        stride = HOP_SAMPLES // config.mel_hop_samples
        self.mel = LogMel(SAMPLE_RATE, config.mel_window_samples, config.mel_hop_samples, mels)
        self.embed = Linear(stride * mels, size)
        self.embed_norm = nn.LayerNorm(size)
        self.hidden_C = nn.Parameter(torch.randn(size) * 0.1)
        self.blocks = nn.ModuleList(TeacherBlock(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(size)
        self.predict = Linear(size, config.units_per_frame * config.num_units)
        self.register_buffer("cepstra_MQ", cosine_transform(mels, config.num_cepstra), persistent=False)
        self.register_buffer("band_mean_M", torch.zeros(mels))
        self.register_buffer("band_std_M", torch.ones(mels))
        self.register_buffer("units_VP", torch.zeros(config.num_units, 2 * config.num_cepstra))
        self.register_buffer("unit_mean_P", torch.zeros(2 * config.num_cepstra))
        self.register_buffer("unit_std_P", torch.ones(2 * config.num_cepstra))
        self.cepstra_MQ: Tensor
        self.band_mean_M: Tensor
        self.band_std_M: Tensor
        self.units_VP: Tensor
        self.unit_mean_P: Tensor
        self.unit_std_P: Tensor

    def hidden_states(self, samples_BN: Tensor) -> Tensor:
        """`[S, B, T, C]`, T = N / 960: the embedding, then each layer's output."""
        return torch.stack(self._encode(self.mel(samples_BN)))

    def unit_logits(self, mel_BLM: Tensor, mask_BT: Tensor) -> Tensor:
        """Logits of each frame's units `[B, T, U, V]`; the encoder does not see frames where `mask_BT` is true.

        Args:
            mel_BLM: what `mel` gives, L mel frames, L = T * 960 / mel hop.
        """
        logits: Tensor = self.predict(self.norm(self._encode(mel_BLM, mask_BT)[-1]))
        return logits.unflatten(2, (self.config.units_per_frame, -1))

    def unit_features(self, mel_BLM: Tensor) -> Tensor:
        """The features that are clustered to units, `[B, T, U, P]`: cepstra of a part of a frame, and their slope.

        The crop's mean level is taken out: a unit must not stand for loudness.
        """
        level_free = mel_BLM.float() - mel_BLM.float().mean(dim=(1, 2), keepdim=True)
        mels_per_unit = HOP_SAMPLES // self.config.mel_hop_samples // self.config.units_per_frame
        cepstra = (level_free @ self.cepstra_MQ).unflatten(1, (-1, mels_per_unit)).mean(dim=2)
        padded = torch.cat([cepstra[:, :1], cepstra, cepstra[:, -1:]], dim=1)
        slope = (padded[:, 2:] - padded[:, :-2]) / 2
        return torch.cat([cepstra, slope], dim=2).unflatten(1, (-1, self.config.units_per_frame))

    @torch.no_grad()
    def units(self, mel_BLM: Tensor) -> Tensor:
        """The units `[B, T, U]` of a mel spectrogram, int64."""
        features_BTUP = (self.unit_features(mel_BLM) - self.unit_mean_P) / self.unit_std_P
        return nearest_codes(features_BTUP.flatten(0, 2), self.units_VP).view(features_BTUP.shape[:3])

    def _encode(self, mel_BLM: Tensor, mask_BT: Tensor | None = None) -> list[Tensor]:
        stride = HOP_SAMPLES // self.config.mel_hop_samples
        standard = ((mel_BLM - self.band_mean_M) / self.band_std_M).unflatten(1, (-1, stride))
        x_BTC = self.embed_norm(self.embed(standard.flatten(2)))
        if mask_BT is not None:
            x_BTC = torch.where(mask_BT[:, :, None], self.hidden_C.to(x_BTC.dtype), x_BTC)
        states = [x_BTC]
        for block in self.blocks:
            states.append(block(states[-1]))
        return states


class TeacherBlock(nn.Module):
    """Depthwise convolution over time, attention over the whole input, two pointwise layers; residual."""

    def __init__(self, config: MelUnitConfig) -> None:
        super().__init__()
        size, kernel = config.hidden_size, config.kernel_size
        self.heads = config.heads
        self.near = nn.Conv1d(size, size, kernel, padding=kernel // 2, groups=size)
        self.attention_norm = nn.LayerNorm(size)
        self.query_key_value = Linear(size, 3 * size)
        self.attention_out = Linear(size, size)
        self.expand_norm = nn.LayerNorm(size)
        self.expand = Linear(size, config.expansion * size)
        self.reduce = Linear(config.expansion * size, size)

    def forward(self, x_BTC: Tensor) -> Tensor:
        x_BTC = x_BTC + self.near(x_BTC.transpose(1, 2)).transpose(1, 2)
        parts = self.query_key_value(self.attention_norm(x_BTC)).unflatten(2, (3, self.heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value)
        x_BTC = x_BTC + self.attention_out(attended.transpose(1, 2).flatten(2))
        widened = functional.gelu(self.expand(self.expand_norm(x_BTC)))
        deeper: Tensor = x_BTC + self.reduce(widened)
        return deeper


def cosine_transform(num_bands: int, num_cepstra: int) -> Tensor:
    """The orthonormal DCT-II as a matrix `[M, Q]`: log-mel bands to cepstra."""
    angle_M1 = math.pi * (torch.arange(num_bands, dtype=torch.float64) + 0.5)[:, None] / num_bands
    matrix_MQ = torch.cos(angle_M1 * torch.arange(num_cepstra)) * math.sqrt(2 / num_bands)
    matrix_MQ[:, 0] /= math.sqrt(2)
    return matrix_MQ.float()
