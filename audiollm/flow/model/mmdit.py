"""The multimodal diffusion transformer that is trained here: packed, with any mix of modalities per sample.

Multi-stream blocks (latents, frames and text with weights of their own, one attention), a gated fusion of frames into
the latents, single-stream blocks on the latents. AdaLN is driven by the time, the caption's and the frames' summaries,
and, latent by latent, by synchronisation features. An absent modality has no rows; where a summary is missing a learned
null stands in its place.

Shapes: B samples, L latents of all samples, D latent dimension, E input channels, R rows, C width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from audiollm.flow.model.blocks import (
    ConvProjection,
    FinalLayer,
    MultiStreamBlock,
    RowsAround,
    SingleStreamBlock,
    Stream,
    TimeEmbedding,
    initialize_blocks,
    joint_order,
    rotation,
    rows_around,
    zero,
)
from audiollm.flow.model.packed import PackedConditions, PackedModality
from audiollm.flow.model.row_convolutions import RowMLP
from audiollm.flow.model.rows import SampleRows, Spread, permute_rows, rows_of
from audiollm.models.pretrained import load_whole, save_model
from audiollm.products import Linear

MODEL_TYPE = "audiollm_mmdit"
MASK_CHANNELS = 2
"""Channels of the mask beside the context: whether a latent is kept, whether it is shown; both 0: it is hidden."""
ROTARY_PER_SECOND = 44_100 / 2048
"""Rotary positions per second: one per latent of the released model, whatever the rate of ours."""


@dataclass(frozen=True)
class MMDiTConfig:
    """The shape of the model. A modality of width 0 is one that the model does not take."""

    latent_dim: int = 64
    latent_rate: float = 44_100 / 2048
    """Latents per second."""
    hidden_size: int = 1024
    num_heads: int = 16
    multi_stream_blocks: int = 7
    single_stream_blocks: int = 14
    mlp_ratio: float = 4.0
    kernel_size: int = 3
    """Rows that the convolutions over latents and frames see; 1: linear layers."""
    frames_dim: int = 1024
    sync_dim: int = 768
    caption_dim: int = 1024
    caption_pooled_dim: int = 0
    """Width of the caption encoder's own summary; 0: the mean of the caption's rows is taken."""
    cot_dim: int = 2048
    audio_context: bool = True
    """The input has channels for existing sound: what is kept, what is shown."""
    gated_fusion: bool = True
    """Frames are added to the latents between the two kinds of blocks: z + gate * frames."""
    estimate_variance: float = 0.05
    """Variance of the latents around the last layer's estimate, where they have 1 in all (`velocity_of_estimate`)."""

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads or (self.hidden_size // self.num_heads) % 2:
            raise ValueError(
                f"hidden_size {self.hidden_size} with {self.num_heads} heads: the width of a head must be even"
            )
        if self.kernel_size % 2 == 0 or self.multi_stream_blocks < 1 or self.single_stream_blocks < 1:
            raise ValueError("kernel_size must be odd, and there must be at least one block of each kind")

    @property
    def input_channels(self) -> int:
        return self.latent_dim * 2 + MASK_CHANNELS if self.audio_context else self.latent_dim

    def takes(self) -> tuple[str, ...]:
        """The modalities that the model takes."""
        return tuple(name for name in ("frames", "sync", "caption", "cot") if getattr(self, f"{name}_dim"))


class ProjectedConditions(NamedTuple):
    """Conditions of B samples as the blocks take them: computed once per sampling, whatever the number of steps."""

    latents: SampleRows
    frames_RC: Tensor
    frames: SampleRows
    text_RC: Tensor
    text: SampleRows
    text_rotation: tuple[Tensor, Tensor]
    summary_BC: Tensor
    sync_NC: Tensor
    """Synchronisation at the latents of the samples that have it."""
    condition_of_L: Tensor | None
    """int64: the condition of each latent: one of B by sample, then of N by latent; None: all are by sample."""
    frame_rotation: tuple[Tensor, Tensor]
    latent_rotation: tuple[Tensor, Tensor]
    fusion: RowsAround | None


class MMDiT(nn.Module):
    """Velocity from noise to latents of sound, at time t from 0 (noise) to 1 (data).

    The last layer estimates the data (`velocity_of_estimate`).
    """

    _no_split_modules = ("MultiStreamBlock", "SingleStreamBlock")

    def __init__(self, config: MMDiTConfig) -> None:
        super().__init__()
        self.config = config
        width, heads, ratio, kernel = (
            config.hidden_size,
            config.num_heads,
            config.mlp_ratio,
            config.kernel_size,
        )
        self.audio_input_proj = ConvProjection(config.input_channels, width, kernel, kernel)
        if config.frames_dim:
            self.clip_input_proj = ConvProjection(config.frames_dim, width, 1, kernel)
            self.clip_cond_proj = Linear(width, width)
            self.null_frames = nn.Parameter(torch.zeros(width))
        if config.sync_dim:
            self.sync_input_proj = ConvProjection(config.sync_dim, width, kernel, kernel)
            self.null_sync = nn.Parameter(torch.zeros(width))
        if config.caption_dim:
            self.caption_input_proj = ConvProjection(config.caption_dim, width, 1, 1)
            self.text_cond_proj = Linear(config.caption_pooled_dim or width, width)
            self.null_caption = nn.Parameter(torch.zeros(width))
        if config.cot_dim:
            self.text_input_proj = ConvProjection(config.cot_dim, width, 1, 1)
        self.global_cond_mlp = RowMLP(width, 4 * width, 1)
        self.t_embed = TimeEmbedding(width)
        last = config.multi_stream_blocks - 1
        self.joint_blocks = nn.ModuleList(
            MultiStreamBlock(width, heads, ratio, kernel, number == last) for number in range(last + 1)
        )
        if config.gated_fusion and config.frames_dim:
            self.gated_mlp = nn.Sequential(
                nn.LayerNorm(2 * width),
                Linear(2 * width, width, bias=False),
                nn.SiLU(),
                Linear(width, width, bias=False),
                nn.Sigmoid(),
            )
        self.fused_blocks = nn.ModuleList(
            SingleStreamBlock(width, heads, ratio, kernel) for _ in range(config.single_stream_blocks)
        )
        self.final_layer = FinalLayer(width, config.latent_dim)
        initialize_blocks(self)
        if config.gated_fusion and config.frames_dim:
            zero(self.gated_mlp[3])  # the gate begins at 1/2: after all other initialisation

    @property
    def takes_context(self) -> bool:
        return self.config.audio_context

    def forward(
        self,
        x_LD: Tensor,
        t_B: Tensor,
        conditions: PackedConditions,
        latents: SampleRows,
        context_LE: Tensor | None = None,
    ) -> Tensor:
        """The velocity from noise to data, `[L, D]`.

        Args:
            x_LD: latents on the way from noise to data, sample after sample.
            t_B: time of each sample, 0 for noise and 1 for data.
            context_LE: latents of existing sound and the mask (`AudioContext.channels`); None: all is hidden.

        Raises:
            ValueError: a modality or a context that the model does not take, or features of another width.
        """
        return self.velocity(x_LD, t_B, self.project(conditions, latents), context_LE)

    def project(self, conditions: PackedConditions, latents: SampleRows) -> ProjectedConditions:
        """Project the conditions: what does not depend on the time or the noise.

        Raises:
            ValueError: see `forward`.
        """
        self._check(conditions)
        times_L = (latents.place_R + 0.5) / self.config.latent_rate
        frames_RC, frames, frame_times_R = self._project_frames(conditions, latents)
        text_RC, text, text_times_R, caption_BC = self._project_text(conditions, latents)
        summary_BC = caption_BC + self._frames_summary(frames_RC, frames, latents)
        sync_NC, condition_of_L = self._project_sync(conditions, latents, times_L)
        head_dim = self.config.hidden_size // self.config.num_heads
        return ProjectedConditions(
            latents,
            frames_RC,
            frames,
            text_RC,
            text,
            rotation(text_times_R * ROTARY_PER_SECOND, head_dim),
            summary_BC,
            sync_NC,
            condition_of_L,
            rotation(frame_times_R * ROTARY_PER_SECOND, head_dim),
            rotation(times_L * ROTARY_PER_SECOND, head_dim),
            self._fusion(frames, frame_times_R, latents, times_L),
        )

    def velocity(
        self, x_LD: Tensor, t_B: Tensor, projected: ProjectedConditions, context_LE: Tensor | None = None
    ) -> Tensor:
        """The velocity as `forward` gives it, from conditions that `project` made.

        Raises:
            ValueError: a context, and the model does not take any.
        """
        latents = projected.latents
        z_LC = self.audio_input_proj(self._input(x_LD, context_LE), latents)
        global_BC = self.t_embed(t_B) + self.global_cond_mlp(projected.summary_BC, latents)
        driven_BC = functional.silu(global_BC)
        of_latents = Stream(
            latents, *self._latent_conditions(global_BC, projected), projected.latent_rotation
        )
        of_frames = Stream(projected.frames, driven_BC, projected.frames.spread(), projected.frame_rotation)
        of_text = Stream(projected.text, driven_BC, projected.text.spread(), projected.text_rotation)
        joint = joint_order([latents, projected.frames, projected.text])
        xs: Sequence[Tensor] = [z_LC, projected.frames_RC, projected.text_RC]
        for block in self.joint_blocks:
            xs = block(xs, (of_latents, of_frames, of_text), joint)
        z_LC = self._fused(xs[0], xs[1], projected.fusion)
        alone = joint_order([latents]).layout
        for block in self.fused_blocks:
            z_LC = block(z_LC, of_latents, alone)
        estimate_LD: Tensor = self.final_layer(z_LC, of_latents)
        t_L1 = t_B[latents.sample_R][:, None]
        return velocity_of_estimate(x_LD, estimate_LD, t_L1, self.config.estimate_variance)

    def save_pretrained(self, folder: Path) -> None:
        """Write `config.json` and `model.safetensors`."""
        save_model(folder, self, MODEL_TYPE, self.config)

    @classmethod
    def from_pretrained(cls, folder: Path | str) -> MMDiT:
        """Load what `save_pretrained` wrote.

        Raises:
            ConfigError: nothing there, or another kind of model.
        """
        return load_whole(folder, MODEL_TYPE, MMDiTConfig, cls)

    # Private

    def _check(self, conditions: PackedConditions) -> None:
        widths = {name: getattr(self.config, f"{name}_dim") for name in ("frames", "sync", "caption", "cot")}
        for name, packed in conditions.features.items():
            width = packed.values_RC.shape[1]
            if not widths[name]:
                raise ValueError(f"the model takes no {name}: it takes {', '.join(self.config.takes())}")
            if width != widths[name]:
                raise ValueError(f"{name}: features of width {width}, and the model takes {widths[name]}")
        if conditions.pooled_caption is None:
            return
        if conditions.pooled_caption[0].shape[1] != (self.config.caption_pooled_dim or -1):
            raise ValueError(
                f"caption: a summary of width {conditions.pooled_caption[0].shape[1]}, "
                f"and the model takes {self.config.caption_pooled_dim or 'none'}"
            )

    def _input(self, x_LD: Tensor, context_LE: Tensor | None) -> Tensor:
        if not self.config.audio_context:
            if context_LE is not None:
                raise ValueError("the model takes no audio context: train it with audio_context")
            return x_LD
        if context_LE is None:
            context_LE = x_LD.new_zeros(len(x_LD), self.config.latent_dim + MASK_CHANNELS)
        return torch.cat([x_LD, context_LE.to(x_LD.dtype)], dim=1)

    def _project_frames(
        self, conditions: PackedConditions, latents: SampleRows
    ) -> tuple[Tensor, SampleRows, Tensor]:
        packed = conditions.features.get("frames")
        if packed is None:
            return _no_rows(self, conditions.size, latents)
        return self.clip_input_proj(packed.values_RC, packed.rows), packed.rows, packed.times_R

    def _frames_summary(self, frames_RC: Tensor, frames: SampleRows, latents: SampleRows) -> Tensor:
        if not self.config.frames_dim:
            return _no_summary(self, len(frames.lengths), latents)
        has_B1 = (frames.lengths_B > 0)[:, None]
        if not frames.total:
            return self.null_frames.expand(len(frames.lengths), -1)
        return torch.where(has_B1, self.clip_cond_proj(frames.means(frames_RC)), self.null_frames)

    def _project_text(
        self, conditions: PackedConditions, latents: SampleRows
    ) -> tuple[Tensor, SampleRows, Tensor, Tensor]:
        """Rows of caption and CoT, sample after sample, their layout and times, and the caption's summary `[B, C]`."""
        caption, cot = conditions.features.get("caption"), conditions.features.get("cot")
        caption_RC = self.caption_input_proj(caption.values_RC, caption.rows) if caption else None
        summary_BC = self._caption_summary(conditions, caption_RC, caption, latents)
        if cot is None and caption is None:
            return *_no_rows(self, conditions.size, latents), summary_BC
        cot_RC = self.text_input_proj(cot.values_RC, cot.rows) if cot else None
        if caption is None or cot is None:
            alone, rows_RC = (cot, cot_RC) if caption is None else (caption, caption_RC)
            assert alone is not None and rows_RC is not None
            return rows_RC, alone.rows, alone.times_R, summary_BC
        assert caption_RC is not None and cot_RC is not None
        joint = joint_order([caption.rows, cot.rows])
        text_RC = permute_rows(torch.cat([caption_RC, cot_RC]), joint.order_S, joint.inverse_S)
        times_R = torch.cat([caption.times_R, cot.times_R])[joint.order_S]
        return text_RC, rows_of(joint.layout.lengths, latents.device), times_R, summary_BC

    def _caption_summary(
        self,
        conditions: PackedConditions,
        caption_RC: Tensor | None,
        caption: PackedModality | None,
        latents: SampleRows,
    ) -> Tensor:
        if not self.config.caption_dim:
            return _no_summary(self, conditions.size, latents)
        null_BC = self.null_caption.expand(conditions.size, -1)
        if caption is None or caption_RC is None:
            return null_BC
        if not self.config.caption_pooled_dim:
            has_B1 = (caption.rows.lengths_B > 0)[:, None]
            return torch.where(has_B1, self.text_cond_proj(caption.rows.means(caption_RC)), null_BC)
        if conditions.pooled_caption is None:
            return null_BC
        pooled_NC, numbers_N = conditions.pooled_caption
        return null_BC.index_copy(0, numbers_N, self.text_cond_proj(pooled_NC))

    def _project_sync(
        self, conditions: PackedConditions, latents: SampleRows, times_L: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Synchronisation at each latent, of samples that have it; and which condition drives each latent."""
        packed = conditions.features.get("sync")
        if packed is None:
            return torch.zeros(0, self.config.hidden_size, device=latents.device), None
        projected_RC = self.sync_input_proj(packed.values_RC, packed.rows)
        has_B = packed.rows.lengths_B > 0
        latent_N, before_N, after_N, weight_N = rows_around(packed.rows, packed.times_R, latents, times_L)
        sync_NC = _blend(projected_RC, before_N, after_N, weight_N)
        condition_of_L = latents.sample_R.clone()
        condition_of_L[latent_N] = len(has_B) + torch.arange(len(latent_N), device=latents.device)
        return sync_NC, condition_of_L

    def _latent_conditions(self, global_BC: Tensor, projected: ProjectedConditions) -> tuple[Tensor, Spread]:
        """Conditions of the latents after SiLU, and how they lie over them."""
        latents = projected.latents
        by_sample_BC = global_BC + self.null_sync if self.config.sync_dim else global_BC
        if projected.condition_of_L is None:
            return functional.silu(by_sample_BC), latents.spread()
        with_sync_L = projected.condition_of_L >= len(global_BC)
        sample_N = latents.sample_R[with_sync_L]
        each_NC = global_BC.index_select(0, sample_N) + projected.sync_NC
        if len(each_NC) == latents.total:
            return functional.silu(each_NC), Spread(latents, None, is_per_row=True)
        both_UC = torch.cat([by_sample_BC, each_NC])
        return functional.silu(both_UC), Spread(latents, projected.condition_of_L)

    def _fusion(
        self, frames: SampleRows, frame_times_R: Tensor, latents: SampleRows, times_L: Tensor
    ) -> RowsAround | None:
        if not (self.config.gated_fusion and frames.total):
            return None
        return rows_around(frames, frame_times_R, latents, times_L)

    def _fused(self, z_LC: Tensor, frames_RC: Tensor, fusion: RowsAround | None) -> Tensor:
        """z + gate * frames, at the latents of samples that have frames."""
        if fusion is None:
            return z_LC
        seen_NC = _blend(frames_RC, fusion.before_N, fusion.after_N, fusion.weight_N)
        everywhere = len(fusion.latent_N) == len(z_LC)
        z_NC = z_LC if everywhere else z_LC.index_select(0, fusion.latent_N)
        added_NC = self.gated_mlp(torch.cat([z_NC, seen_NC], dim=1)) * seen_NC
        if everywhere:
            return z_LC + added_NC
        return z_LC.index_add(0, fusion.latent_N, added_NC.to(z_LC.dtype))


def velocity_of_estimate(x_LD: Tensor, estimate_LD: Tensor, t_L1: Tensor, variance: float) -> Tensor:
    """The velocity E[data - noise | x_t] of data that are normal around an estimate with this variance.

    v = ((t r - (1 - t)) x_t + (1 - t) estimate) / (t^2 r + (1 - t)^2), with the variance r > 0. So the model has to
    give the data alone, of which the conditions tell most, and the noise reaches the velocity by x_t: a model that
    gives data - noise must carry all channels of the noise through its width, and learns that first (compare arXiv
    2511.13720, and 2206.00364 for r = 1).

    Args:
        t_L1: times from 0 (noise) to 1 (data).
    """
    from_data_L1, noise_L1 = t_L1 * variance, 1 - t_L1
    total_L1 = t_L1 * from_data_L1 + noise_L1.square()
    return ((from_data_L1 - noise_L1) * x_LD + noise_L1 * estimate_LD) / total_L1


def _no_rows(model: MMDiT, size: int, latents: SampleRows) -> tuple[Tensor, SampleRows, Tensor]:
    device, dtype = latents.device, model.t_embed.dtype
    empty_RC = torch.zeros(0, model.config.hidden_size, device=device, dtype=dtype)
    return empty_RC, rows_of([0] * size, device), torch.zeros(0, device=device)


def _no_summary(model: MMDiT, size: int, latents: SampleRows) -> Tensor:
    return torch.zeros(size, model.config.hidden_size, device=latents.device, dtype=model.t_embed.dtype)


def _blend(rows_RC: Tensor, before_N: Tensor, after_N: Tensor, weight_N: Tensor) -> Tensor:
    weight_N1 = weight_N.to(rows_RC.dtype)[:, None]
    return torch.lerp(rows_RC.index_select(0, before_N), rows_RC.index_select(0, after_N), weight_N1)
