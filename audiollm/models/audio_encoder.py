"""Continuous audio in: a Whisper-class encoder over mel windows, and a projector to rows of the decoder.

With the stem `conv1d`, parameter names are those of transformers' `WhisperEncoder` (and of Boson's `audio_tower`), with
which a test compares the output. Windows lie end to end, of any lengths, so nothing is computed for the sake of a batch
and a window's rows do not depend on what is beside it.

Shapes: W windows, X mel frames of all windows, M mel bins, P positions of all windows (50 or 12.5 a second, by the
stem), C width, H heads, D head dimension, R rows, E hidden size of the decoder.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from audiollm.data.hearing.features import FRAMES_PER_SECOND, EncodedRows, FeatureShape, PackedFeatures
from audiollm.data.packing import SegmentLayout
from audiollm.errors import ConfigError
from audiollm.files.json_files import no_config, read_json_file
from audiollm.files.tensors import open_tensors
from audiollm.models.attention import attention_backend, sequence_attention
from audiollm.models.audio_stem import FRAMES_PER_POSITION, Stem2d, StemName, places, stem_1d
from audiollm.products import Linear

_TOWER_KEYS = ("model.encoder.", "encoder.", "model.audio_tower.", "audio_tower.", "thinker.audio_tower.", "")
"""Key prefixes of the encoder in checkpoints of Whisper, Qwen2-Audio and Boson, or of the encoder alone."""
_ROW_FIELDS = (
    "encoder_attention_heads",
    "num_mel_bins",
    "max_source_positions",
    "padded",
    "stride",
    "reduction",
    "stem",
)
"""Fields of `AudioEncoderConfig` on which rows depend, beside the weights."""


@dataclass(frozen=True)
class AudioEncoderConfig:
    """The shape of the encoder, with the names of a Hugging Face `WhisperConfig`, and of the projector."""

    d_model: int = 384
    encoder_layers: int = 4
    encoder_attention_heads: int = 6
    encoder_ffn_dim: int = 1536
    num_mel_bins: int = 80
    max_source_positions: int = 1500
    """Positions of a window: 50 a second (`conv2d`: 12.5); longer clips are cut into windows."""
    padded: bool = False
    """Windows are filled up with silence to their full length, as published weights expect it."""
    stride: int = 2
    """Encoder positions merged into one decoder row: 2 of stem `conv1d` give 25 rows/s, 1 of `conv2d` 12.5 rows/s."""
    reduction: Literal["concat", "mean"] = "concat"
    """Merging of positions: concatenation after the last norm, or the mean before it (Qwen2-Audio, Boson)."""
    projector_size: int | None = None
    """Width of a hidden layer of the projector; None: it is one linear layer."""
    dropout: float = 0.0
    stem: StemName = "conv1d"
    """Stem from mel frames to positions: Whisper's `conv1d`, or `conv2d`, which learns from few recordings."""
    stem_channels: int = 32
    """Channels of the first block of `conv2d`; the next two blocks have twice and four times as many."""

    def __post_init__(self) -> None:
        if self.d_model % (2 * self.encoder_attention_heads):
            raise ValueError(
                f"audio encoder: d_model {self.d_model} must be a multiple of 2 x {self.encoder_attention_heads} heads"
            )
        if self.reduction not in ("concat", "mean"):
            raise ValueError(f"audio encoder: no reduction {self.reduction!r}; there are concat and mean")
        if self.stem not in FRAMES_PER_POSITION:
            raise ValueError(
                f"audio encoder: no stem {self.stem!r}; there are {', '.join(FRAMES_PER_POSITION)}"
            )
        if self.padded and self.stem != "conv1d":
            raise ValueError(
                "audio encoder: padded windows are for published weights, which have the stem conv1d"
            )
        _ = self.features

    @property
    def features(self) -> FeatureShape:
        """Shape of the features that the encoder takes."""
        return FeatureShape(
            self.num_mel_bins, self.max_source_positions, self.stride, self.padded, self.frames_per_position
        )

    @property
    def row_width(self) -> int:
        """Values of a row before the projector."""
        return self.d_model * (self.stride if self.reduction == "concat" else 1)

    @property
    def frames_per_position(self) -> int:
        return FRAMES_PER_POSITION[self.stem]

    @property
    def window_s(self) -> float:
        return self.max_source_positions * self.frames_per_position / FRAMES_PER_SECOND


class EncoderAttention(nn.Module):
    """Whisper's: every position of a window sees the whole window; keys have no bias."""

    def __init__(self, config: AudioEncoderConfig) -> None:
        super().__init__()
        self.head_dim = config.d_model // config.encoder_attention_heads
        self.k_proj = Linear(config.d_model, config.d_model, bias=False)
        self.v_proj = Linear(config.d_model, config.d_model)
        self.q_proj = Linear(config.d_model, config.d_model)
        self.out_proj = Linear(config.d_model, config.d_model)

    def forward(self, x_PC: Tensor, positions: tuple[int, ...]) -> Tensor:
        q, k, v = (
            project(x_PC).unflatten(-1, (-1, self.head_dim))
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        out_PC: Tensor = self.out_proj(window_attention(q, k, v, positions).flatten(1))
        return out_PC


class EncoderLayer(nn.Module):
    """Norm and attention, norm and feed-forward."""

    def __init__(self, config: AudioEncoderConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.self_attn = EncoderAttention(config)
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model)
        self.fc1 = Linear(config.d_model, config.encoder_ffn_dim)
        self.fc2 = Linear(config.encoder_ffn_dim, config.d_model)
        self.final_layer_norm = nn.LayerNorm(config.d_model)

    def forward(self, x_PC: Tensor, positions: tuple[int, ...]) -> Tensor:
        """Hidden states after this layer; `positions` of each window."""
        attended_PC = self.self_attn(self.self_attn_layer_norm(x_PC), positions)
        x_PC = x_PC + self._dropped(attended_PC)
        fed_PC = self.fc2(functional.gelu(self.fc1(self.final_layer_norm(x_PC))))
        return x_PC + self._dropped(fed_PC)

    def _dropped(self, x_PC: Tensor) -> Tensor:
        return functional.dropout(x_PC, self.dropout, self.training) if self.dropout else x_PC


class Positions(nn.Module):
    """A sinusoid a position, Whisper's: no training changes it."""

    def __init__(self, config: AudioEncoderConfig) -> None:
        super().__init__()
        self.register_buffer("weight", sinusoids(config.max_source_positions, config.d_model))
        self.weight: Tensor

    def forward(self, place_P: Tensor) -> Tensor:
        return self.weight.index_select(0, place_P)


class AudioTower(nn.Module):
    """A stem, sinusoidal positions, layers, a norm: with `conv1d` transformers' `WhisperEncoder`, without a batch.

    Where none of its parameters is trained it stays in evaluation mode and has no graph.
    """

    _no_split_modules = ("EncoderLayer",)

    def __init__(self, config: AudioEncoderConfig) -> None:
        super().__init__()
        self.config = config
        if config.stem == "conv2d":
            self.stem = Stem2d(config.num_mel_bins, config.stem_channels, config.d_model)
        else:
            self.conv1 = nn.Conv1d(config.num_mel_bins, config.d_model, kernel_size=3, padding=1)
            self.conv2 = nn.Conv1d(config.d_model, config.d_model, kernel_size=3, stride=2, padding=1)
        self.embed_positions = Positions(config)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.encoder_layers))
        self.layer_norm = nn.LayerNorm(config.d_model)
        self.activation_checkpointing = False
        self.layers.apply(_initialize)

    def train(self, mode: bool = True) -> AudioTower:
        """Set the training mode; a frozen encoder stays in evaluation mode, without dropout."""
        super().train(mode and self.is_trained)
        return self

    @property
    def is_trained(self) -> bool:
        return any(parameter.requires_grad for parameter in self.parameters())

    def freeze(self) -> None:
        self.requires_grad_(False)
        self.eval()

    def forward(self, features: PackedFeatures) -> Tensor:
        """Encode windows into the projector's input for every row, `[R, C]`, or `[R, stride * C]` with `concat`.

        Rows that were encoded before stand behind those of the windows, as they are.

        Raises:
            ValueError: the windows were made for another encoder, or rows were encoded before by what is now trained.
        """
        encoded_RC = features.encoded_RC
        if encoded_RC is not None and self.is_trained:
            raise ValueError("rows that were encoded before are given to an encoder that is trained")
        encoded_RC = None if encoded_RC is None else encoded_RC.to(self.layer_norm.weight.dtype)
        if encoded_RC is not None and not features.frames:
            return encoded_RC
        self._check(features)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.is_trained):
            heard_RC = self._encode(features)
        return heard_RC if encoded_RC is None else torch.cat([heard_RC, encoded_RC.to(heard_RC.dtype)])

    def gradient_checkpointing_enable(self) -> None:
        """Compute the layers' activations again in the backward pass (Hugging Face's name for it)."""
        self.activation_checkpointing = True

    def _check(self, features: PackedFeatures) -> None:
        config, (bins, _) = self.config, features.mel_MX.shape
        unit, longest = (
            config.frames_per_position * limit for limit in (config.stride, config.max_source_positions)
        )
        fits = all(
            0 < frames <= longest and (config.padded or frames % unit == 0) for frames in features.frames
        )
        if bins != config.num_mel_bins or not fits:
            raise ValueError(
                f"windows of {sorted(set(features.frames))} frames of {bins} mel bins, for an encoder of "
                f"{config.num_mel_bins} bins and multiples of {unit} frames up to {longest}: "
                "make them with mel_features(samples, config.features)"
            )

    def _encode(self, features: PackedFeatures) -> Tensor:
        config = self.config
        per = config.frames_per_position
        window = (per * config.max_source_positions,) * len(features.frames)
        frames = window if config.padded else features.frames
        positions = tuple(num_frames // per for num_frames in frames)
        x_PC = self._positioned(features, frames, positions)
        x_PC = functional.dropout(x_PC, config.dropout, self.training) if config.dropout else x_PC
        again = self.activation_checkpointing and self.training and torch.is_grad_enabled()
        for layer in self.layers:
            x_PC = (
                checkpoint(layer, x_PC, positions, use_reentrant=False) if again else layer(x_PC, positions)
            )
        reduced = self._reduced(x_PC)
        if sum(features.rows) == len(reduced):
            return reduced
        return reduced.index_select(
            0,
            places(
                features.rows, [num_positions // config.stride for num_positions in positions], x_PC.device
            ),
        )

    def _positioned(
        self, features: PackedFeatures, frames: tuple[int, ...], positions: tuple[int, ...]
    ) -> Tensor:
        """Apply the stem to the mel frames and add the sinusoids: `[P, C]`."""
        x_PC = (
            self.stem(features)
            if self.config.stem == "conv2d"
            else stem_1d(self.conv1, self.conv2, features, frames)
        )
        place_P = torch.cat([torch.arange(num_positions) for num_positions in positions]).to(x_PC.device)
        # autocast's convolutions are in half precision; the sum over layers is not
        dtype = self.layer_norm.weight.dtype
        return x_PC.to(dtype) + self.embed_positions(place_P).to(dtype)

    def _reduced(self, x_PC: Tensor) -> Tensor:
        """The last norm, and `stride` positions of a window made one."""
        stride = self.config.stride
        if self.config.reduction == "mean":
            meant_RC: Tensor = self.layer_norm(x_PC.unflatten(0, (-1, stride)).mean(dim=1))
            return meant_RC
        normed_PC: Tensor = self.layer_norm(x_PC)
        return normed_PC.unflatten(0, (-1, stride)).flatten(1)


class Projector(nn.Module):
    """Projection of encoder outputs to decoder rows, by one linear layer or two."""

    def __init__(self, config: AudioEncoderConfig, hidden_size: int) -> None:
        super().__init__()
        width = config.row_width
        self.has_hidden = config.projector_size is not None
        if config.projector_size is not None:
            self.hidden = Linear(width, config.projector_size)
            width = config.projector_size
        self.linear = Linear(width, hidden_size)
        self.apply(_initialize)

    def forward(self, x_R: Tensor) -> Tensor:
        """`[R, E]`."""
        if self.has_hidden:
            x_R = functional.gelu(self.hidden(x_R))
        out_RE: Tensor = self.linear(x_R)
        return out_RE


def encoder_config(folder: Path, **overrides: Any) -> AudioEncoderConfig:
    """The shape in the `config.json` of a Whisper, a Qwen2-Audio or an encoder alone.

    Args:
        overrides: fields that such a config does not have (`stride`, `reduction`, ...), or that are to differ.

    Raises:
        ConfigError: no such folder, or another kind of model.
    """
    if not (folder / "config.json").exists():
        raise no_config(folder, "audio encoder", "give a Whisper's folder")
    data: Mapping[str, Any] = read_json_file(folder / "config.json", dict)
    for inner in ("thinker_config", "audio_config", "audio_encoder_config", "audio_encoder"):
        data = data[inner] if isinstance(data.get(inner), dict) else data
    names = (
        "d_model",
        "encoder_layers",
        "encoder_attention_heads",
        "encoder_ffn_dim",
        "num_mel_bins",
        "max_source_positions",
    )
    missing = [name for name in names if not isinstance(data.get(name), int)]
    if missing:
        where = str(folder / "config.json")
        raise ConfigError(
            f"no Whisper-class encoder: {', '.join(missing)} missing", where, "give a Whisper's folder"
        )
    if data.get("activation_function", "gelu") != "gelu" or data.get("scale_embedding"):
        raise ConfigError(
            "activation_function must be gelu, and scale_embedding false", str(folder / "config.json")
        )
    return AudioEncoderConfig(**{name: data[name] for name in names} | {"padded": True} | overrides)


def load_tower(tower: AudioTower, folder: Path) -> None:
    """Weights of the encoder in a checkpoint; positions beyond the tower's window are left out.

    Raises:
        ConfigError: no safetensors there, or not all that the tower has in its shape.
    """
    weights = read_tower(folder)
    expected = tower.state_dict()
    positions = weights.get("embed_positions.weight")
    if positions is not None:
        weights["embed_positions.weight"] = positions[: tower.config.max_source_positions]
    wrong = [
        name for name, value in expected.items() if name not in weights or weights[name].shape != value.shape
    ]
    if wrong:
        some = ", ".join(wrong[:3])
        raise ConfigError(
            f"{len(wrong)} weights of the encoder are missing or of another shape: {some}", str(folder)
        )
    tower.load_state_dict({name: weights[name] for name in expected})


def frozen_features(config: AudioEncoderConfig, folder: Path) -> FeatureShape:
    """The features of an encoder that stays as it lies in a folder: rows that it made before are read (`encoded`)."""
    return replace(
        config.features, encoded=EncodedRows(config.row_width, partial(encoder_digest, folder, config))
    )


@cache
def encoder_digest(folder: Path, config: AudioEncoderConfig) -> str:
    """SHA-256 of what rows depend on: the encoder's weights in float32, its windows, and how positions become rows.

    The projector is no part of it.

    Raises:
        ConfigError: no weights of such an encoder in the folder.
    """
    facts = [getattr(config, name) for name in _ROW_FIELDS]
    digest = hashlib.sha256(json.dumps(facts).encode())
    for name, weight in sorted(read_tower(folder).items()):
        if name != "embed_positions.weight":  # sinusoids, as many as a window has positions
            digest.update(f"{name} {list(weight.shape)}".encode())
            digest.update(weight.float().contiguous().numpy().tobytes())
    return digest.hexdigest()


def read_tower(folder: Path) -> dict[str, Tensor]:
    """Read the encoder's weights from a checkpoint of one or several files, keyed by their names in the tower.

    Raises:
        ConfigError: no safetensors there, or no such encoder in them.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(
            "no *.safetensors here",
            str(folder),
            "save the encoder as safetensors; pickled weights are never loaded",
        )
    places: dict[str, Path] = {}
    for file in files:
        with open_tensors(file) as opened:
            places |= dict.fromkeys(opened.keys(), file)
    prefix = next(
        (
            key
            for key in _TOWER_KEYS
            if any(name.startswith((f"{key}conv1.weight", f"{key}stem.")) for name in places)
        ),
        None,
    )
    if prefix is None:
        raise ConfigError(
            "no weights of a Whisper-class encoder here", str(folder), "give a Whisper's folder"
        )
    weights = {}
    for name, file in places.items():
        if name.startswith(prefix):
            with open_tensors(file) as opened:
                weights[name.removeprefix(prefix)] = opened.get_tensor(name)
    return weights


def window_attention(q_PHD: Tensor, k_PHD: Tensor, v_PHD: Tensor, positions: tuple[int, ...]) -> Tensor:
    """Attention inside each window, `[P, H, D]`, every position over its whole window."""
    layout = SegmentLayout.in_order(positions, q_PHD.device)
    backend = attention_backend(q_PHD.device, q_PHD.dtype, q_PHD.shape[2]).name
    return sequence_attention(q_PHD, k_PHD, v_PHD, layout, backend=backend, causal=False)


def sinusoids(length: int, channels: int, longest: float = 10_000.0) -> Tensor:
    """Whisper's positions `[length, channels]`: sines, then cosines, of wavelengths from 2 pi to `longest` x 2 pi."""
    half = channels // 2
    rates = torch.exp(-math.log(longest) / max(half - 1, 1) * torch.arange(half))
    angles = torch.arange(length)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)


# Private


def _initialize(module: nn.Module) -> None:
    """Values keep their size; with 0.02, as wide models have it, a narrow one learns to hear several times slower."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=module.in_features**-0.5)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
