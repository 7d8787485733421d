"""The released ThinkSound transformer: its structure under its key names, with its pads and its null embeddings.

It is here so that its weights can be loaded, run and trained further. `MMDiT` is the model to train from scratch: the
README lists what differs and why. Facts: FunAudioLLM/ThinkSound, `models/mmdit.py`; a test compares the velocity with
the class of the package `thinksound`.

Shapes: B samples, L latents of all samples, D latent dimension, R rows, C width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from audiollm.errors import ConfigError
from audiollm.flow.model.blocks import (
    ConvProjection,
    FinalLayer,
    MultiStreamBlock,
    SingleStreamBlock,
    Stream,
    TimeEmbedding,
    initialize_blocks,
    joint_order,
    rotation,
    zero,
)
from audiollm.flow.model.packed import Modality, PackedConditions, PackedModality
from audiollm.flow.model.row_convolutions import RowMLP
from audiollm.flow.model.rows import SampleRows, Spread, rows_of
from audiollm.models.pretrained import StoredWeights, fill, load_whole, save_model
from audiollm.products import Linear

MODEL_TYPE = "thinksound_mmdit"
FRAMES_PER_SECOND, SYNC_PER_SECOND, SYNC_SEGMENT = 8, 25, 8
CAPTION_ROWS, COT_ROWS, CAPTION_DIM = 77, 77, 1024


@dataclass(frozen=True)
class ThinkSoundConfig:
    """The shape of the released transformer; the defaults are the released ones (1,277.1 M parameters)."""

    latent_dim: int = 64
    frames_dim: int = 1024
    sync_dim: int = 768
    text_dim: int = 2048
    hidden_size: int = 1024
    depth: int = 21
    """Blocks in total."""
    fused_depth: int = 14
    """Single-stream blocks among them."""
    num_heads: int = 16
    mlp_ratio: float = 4.0
    kernel_size: int = 3
    sync_kernel: int = 7
    latent_rate: float = 44_100 / 2048
    """Latents per second: from it follow the pads of a sample without frames."""
    fusion: Literal["none", "released"] = "none"
    """`released`: z + gate(z, frames) z, as its code computes it; its published weights have none."""


class Projected(NamedTuple):
    """Conditions of B samples as the blocks take them: computed once per sampling, whatever the number of steps."""

    frames_RC: Tensor
    frames: SampleRows
    text_RC: Tensor
    text: SampleRows
    summary_BC: Tensor
    sync_LC: Tensor
    """Synchronisation at every latent."""
    latents: SampleRows
    frame_positions_R: Tensor


class ThinkSound(nn.Module):
    """The released transformer. Its own time runs from 1 (noise) to 0; `forward` takes ours, from 0 (noise) to 1."""

    _no_split_modules = ("MultiStreamBlock", "SingleStreamBlock")

    def __init__(self, config: ThinkSoundConfig) -> None:
        super().__init__()
        self.config = config
        width, heads, ratio = config.hidden_size, config.num_heads, config.mlp_ratio
        joint = config.depth - config.fused_depth
        if config.fusion == "released":
            self.gated_mlp = nn.Sequential(
                nn.LayerNorm(2 * width),
                Linear(2 * width, 4 * width, bias=False),
                nn.SiLU(),
                Linear(4 * width, width, bias=False),
                nn.Sigmoid(),
            )
        self.audio_input_proj = ConvProjection(
            config.latent_dim, width, config.kernel_size, config.kernel_size
        )
        self.clip_input_proj = ConvProjection(config.frames_dim, width, 1, 3)
        self.sync_input_proj = ConvProjection(config.sync_dim, width, config.sync_kernel, 3)
        self.text_input_proj = ConvProjection(config.text_dim, width, 1, 1)
        self.clip_cond_proj = Linear(width, width)
        self.text_cond_proj = Linear(CAPTION_DIM, width)
        self.global_cond_mlp = RowMLP(width, 4 * width, 1)
        self.sync_pos_emb = nn.Parameter(torch.zeros(1, 1, SYNC_SEGMENT, config.sync_dim))
        self.final_layer = FinalLayer(width, config.latent_dim)
        self.t_embed = TimeEmbedding(width)
        # in its multi-stream blocks the kernel is 3, whatever `kernel_size` is
        self.joint_blocks = nn.ModuleList(
            MultiStreamBlock(width, heads, ratio, 3, number == joint - 1) for number in range(joint)
        )
        self.fused_blocks = nn.ModuleList(
            SingleStreamBlock(width, heads, ratio, config.kernel_size) for _ in range(config.fused_depth)
        )
        self.empty_string_feat = nn.Parameter(torch.zeros(CAPTION_ROWS, CAPTION_DIM), requires_grad=False)
        self.empty_t5_feat = nn.Parameter(torch.zeros(COT_ROWS, config.text_dim), requires_grad=False)
        self.empty_clip_feat = nn.Parameter(torch.zeros(1, config.frames_dim))
        self.empty_sync_feat = nn.Parameter(torch.zeros(1, config.sync_dim))
        initialize_blocks(self)
        if config.fusion == "released":
            zero(self.gated_mlp[3])

    @property
    def takes_context(self) -> bool:
        return False

    def forward(
        self,
        x_LD: Tensor,
        t_B: Tensor,
        conditions: PackedConditions,
        latents: SampleRows,
        context_LE: Tensor | None = None,
    ) -> Tensor:
        """The velocity from noise to data `[L, D]` at time t, 0 for noise and 1 for data.

        Raises:
            ValueError: a caption or CoT that is not 77 rows long, or audio context, which it does not take.
        """
        return self.velocity(x_LD, t_B, self.project(conditions, latents), context_LE)

    def velocity(
        self, x_LD: Tensor, t_B: Tensor, projected: Projected, context_LE: Tensor | None = None
    ) -> Tensor:
        """The velocity as `forward` gives it, from conditions that `project` made."""
        if context_LE is not None:
            raise ValueError("the released ThinkSound takes no audio context: train an MMDiT")
        return -self.released_velocity(x_LD, 1 - t_B, projected)

    def project(self, conditions: PackedConditions, latents: SampleRows) -> Projected:
        """Fill absent modalities with the null embeddings and project all of them.

        Raises:
            ValueError: see `forward`.
        """
        config = self.config
        seconds = [length / config.latent_rate for length in latents.lengths]
        frames = self._filled(conditions, "frames", [max(1, round(FRAMES_PER_SECOND * s)) for s in seconds])
        sync = self._filled(conditions, "sync", [sync_length(s) for s in seconds])
        caption = self._filled(conditions, "caption", [CAPTION_ROWS] * conditions.size)
        cot = self._filled(conditions, "cot", [COT_ROWS] * conditions.size)
        for name, packed in (("caption", caption), ("cot", cot)):
            if set(packed.rows.lengths) != {CAPTION_ROWS}:
                raise ValueError(f"{name}: the released model takes {CAPTION_ROWS} rows, pads included")
        frames_RC = self.clip_input_proj(frames.values_RC, frames.rows)
        pooled = conditions.pooled_caption
        summary_BC = self._pooled(caption, pooled)
        caption_RC = functional.pad(caption.values_RC, (0, config.text_dim - CAPTION_DIM))
        text_BRC = torch.cat(
            [rows_RC.unflatten(0, (conditions.size, -1)) for rows_RC in (caption_RC, cot.values_RC)], dim=1
        )
        text = rows_of([CAPTION_ROWS + COT_ROWS] * conditions.size, latents.device)
        ratio_B = latents.lengths_B / frames.rows.lengths_B.clamp_min(1)
        return Projected(
            frames_RC,
            frames.rows,
            self.text_input_proj(text_BRC.flatten(0, 1), text),
            text,
            self.clip_cond_proj(frames.rows.means(frames_RC)) + self.text_cond_proj(summary_BC),
            self._sync_on_latents(sync, latents),
            latents,
            frames.rows.place_R * ratio_B[frames.rows.sample_R],
        )

    def released_velocity(self, x_LD: Tensor, t_B: Tensor, projected: Projected) -> Tensor:
        """The network's own output: noise minus data, at its own time, 1 for noise."""
        latents, head_dim = projected.latents, self.config.hidden_size // self.config.num_heads
        z_LC = self.audio_input_proj(x_LD, latents)
        global_BC = self.t_embed(t_B) + self.global_cond_mlp(projected.summary_BC, latents)
        each_LC = functional.silu(global_BC.index_select(0, latents.sample_R) + projected.sync_LC)
        of_latents = Stream(
            latents, each_LC, Spread(latents, None, is_per_row=True), rotation(latents.place_R, head_dim)
        )
        driven_BC = functional.silu(global_BC)
        turned = rotation(projected.frame_positions_R, head_dim)
        of_frames = Stream(projected.frames, driven_BC, projected.frames.spread(), turned)
        of_text = Stream(projected.text, driven_BC, projected.text.spread())
        joint = joint_order([latents, projected.frames, projected.text])
        xs = [z_LC, projected.frames_RC, projected.text_RC]
        for block in self.joint_blocks:
            xs = block(xs, (of_latents, of_frames, of_text), joint)
        z_LC, frames_RC, _ = xs
        if self.config.fusion == "released":
            seen_LC = _spline_on_latents(frames_RC, projected.frames, latents)
            z_LC = z_LC + self.gated_mlp(torch.cat([z_LC, seen_LC], dim=1)) * z_LC
        alone = joint_order([latents]).layout
        for block in self.fused_blocks:
            z_LC = block(z_LC, of_latents, alone)
        velocity_LD: Tensor = self.final_layer(z_LC, of_latents)
        return velocity_LD

    def save_pretrained(self, folder: Path) -> None:
        """Write `config.json` and `model.safetensors`, whose keys are those of the released `MMmodule`."""
        save_model(folder, self, MODEL_TYPE, self.config)

    @classmethod
    def from_pretrained(cls, folder: Path | str) -> ThinkSound:
        """Load what `save_pretrained` wrote.

        Raises:
            ConfigError: nothing there, or another kind of model.
        """
        return load_whole(folder, MODEL_TYPE, ThinkSoundConfig, cls)

    @classmethod
    def from_released(cls, folder: Path, config: ThinkSoundConfig | None = None) -> ThinkSound:
        """Load released weights: `model.safetensors` with the keys of `MMmodule`, or of the whole training below them.

        Tables that the released code stores beside its weights (`t_embed.freqs`, `latent_rot`, `clip_rot`) are left
        out, and so are the keys of other parts.

        Raises:
            ConfigError: no safetensors there, or tensors that are missing or of another shape.
        """
        stored = StoredWeights(folder)
        prefix = next((name[: -len(_ANCHOR)] for name in stored.names if name.endswith(_ANCHOR)), None)
        if prefix is None:
            raise ConfigError(
                f"no {_ANCHOR} among the weights", str(folder), "give ThinkSound's weights as safetensors"
            )
        with torch.device("meta"):
            model = cls(config or ThinkSoundConfig())
        tables = ("t_embed.freqs", "latent_rot", "clip_rot")
        names = [name for name in stored.names if name.startswith(prefix)]
        names_by_key = {name.removeprefix(prefix): [name] for name in names}
        weights = {key: value for key, value in names_by_key.items() if key not in tables}
        fill(model, weights, stored, torch.float32, str(folder))
        model.t_embed = _with_weights(TimeEmbedding(model.config.hidden_size), model.t_embed.state_dict())
        return model.eval()

    # Private

    def _filled(self, conditions: PackedConditions, modality: Modality, lengths: list[int]) -> PackedModality:
        """The modality with the null embedding in every sample that lacks it; the batch itself is not changed."""
        features = conditions.features.get(modality)
        if features is not None and all(features.rows.lengths):
            return features
        null_1C = getattr(self, _NULLS[modality])
        device = null_1C.device
        given_lengths = conditions.lengths(modality)
        pieces = iter(
            features.values_RC.split([n for n in given_lengths if n]) if features is not None else ()
        )
        parts = []
        for length, target_length in zip(given_lengths, lengths, strict=True):
            null = null_1C if len(null_1C) == target_length else null_1C.expand(target_length, -1)
            parts.append(next(pieces) if length else null)
        rows = rows_of([len(sample_rows) for sample_rows in parts], device)
        return PackedModality(torch.cat(parts), torch.zeros(rows.total, device=device), rows)

    def _pooled(self, caption: PackedModality, pooled: tuple[Tensor, Tensor] | None) -> Tensor:
        """The summary of each caption: the encoder's where it is given, else the mean of the token states."""
        means_BC = caption.rows.means(caption.values_RC)
        if pooled is None:
            return means_BC
        summaries_NC, numbers_N = pooled
        return means_BC.index_copy(0, numbers_N, summaries_NC.to(means_BC.dtype))

    def _sync_on_latents(self, sync: PackedModality, latents: SampleRows) -> Tensor:
        """Synchronisation features projected and brought to the latents by the nearest neighbour."""
        if any(length % SYNC_SEGMENT for length in sync.rows.lengths):
            raise ValueError(
                f"sync: rows come in segments of {SYNC_SEGMENT}, not {sorted(set(sync.rows.lengths))}"
            )
        placed_RC = sync.values_RC + self.sync_pos_emb[0, 0][sync.rows.place_R % SYNC_SEGMENT]
        projected_RC = self.sync_input_proj(placed_RC, sync.rows)
        index, start = [], 0
        for rows, num_latents in zip(sync.rows.lengths, latents.lengths, strict=True):
            numbers = torch.arange(rows, dtype=torch.float32)[None, None]
            nearest = functional.interpolate(numbers, size=num_latents, mode="nearest-exact")[0, 0]
            index.append(nearest.long() + start)
            start += rows
        nearest_L = torch.cat(index).to(projected_RC.device)
        return projected_RC.index_select(0, nearest_L)


def sync_length(duration_s: float) -> int:
    """Synchformer's rows for a video: segments of 16 frames every 8 at 25 frames per second, 8 rows each."""
    frames = int(SYNC_PER_SECOND * duration_s + 1e-6)
    return max(1, (frames - 16) // 8 + 1) * SYNC_SEGMENT


_NULLS: Mapping[Modality, str] = {
    "frames": "empty_clip_feat",
    "sync": "empty_sync_feat",
    "caption": "empty_string_feat",
    "cot": "empty_t5_feat",
}
_ANCHOR = "empty_clip_feat"


def _with_weights(module: TimeEmbedding, weights: Mapping[str, Tensor]) -> TimeEmbedding:
    module.load_state_dict(weights, assign=True)
    return module


def _spline_on_latents(frames_RC: Tensor, frames: SampleRows, latents: SampleRows) -> Tensor:
    """Frames brought to the latents by a natural cubic spline, first row on first, last on last."""
    from scipy.interpolate import CubicSpline

    parts = []
    for piece_FC, num_latents in zip(frames_RC.split(frames.lengths), latents.lengths, strict=True):
        count = len(piece_FC)
        if count in (1, num_latents):
            parts.append(piece_FC.expand(num_latents, -1))
            continue
        spline = CubicSpline(np.linspace(0, 1, count), np.eye(count), bc_type="natural")
        weights_TF = torch.from_numpy(spline(np.linspace(0, 1, num_latents))).to(piece_FC)
        parts.append(weights_TF @ piece_FC)
    return torch.cat(parts)
