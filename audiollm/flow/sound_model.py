"""A model of sounds as it is trained and saved: the transformer, encoders that are trained along, and what both need.

Shapes: L latents of all samples, D latent dimension, B samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from audiollm.errors import ConfigError
from audiollm.flow.conditions.own import PictureEncoder, WordEncoder, Words
from audiollm.flow.model.blocks import zero_of
from audiollm.flow.model.mmdit import MMDiT, MMDiTConfig
from audiollm.flow.model.packed import Modality, PackedConditions
from audiollm.flow.model.rows import SampleRows
from audiollm.flow.model.sampling import SamplerSettings
from audiollm.flow.model.thinksound import ThinkSound, ThinkSoundConfig
from audiollm.models.pretrained import load_whole, save_model

MODEL_TYPE = "audiollm_flow"
PresetName = Literal["native", "thinksound"]


@dataclass(frozen=True)
class ConditionFacts:
    """How one modality is made."""

    kind: Literal["features", "words", "pictures"]
    """`features` of a frozen encoder, `words` or `pictures` for an encoder that is trained along."""
    made_by: str = ""
    """Digest of the frozen encoder."""
    source: str = field(default="", compare=False)
    """Folder or import path of the frozen encoder; the digest says whether two are the same."""
    width: int = 0
    """Width of the features that the transformer takes."""
    rate: float = 0.0
    """Pictures per second."""
    side: int = 0
    """Side of the pictures in pixels."""


@dataclass(frozen=True)
class SoundModelConfig:
    """The shape of a saved model, and the data that it was trained on."""

    preset: PresetName
    transformer: Mapping[str, Any]
    """Fields of `MMDiTConfig` or `ThinkSoundConfig`."""
    autoencoder: str
    """Digest of the autoencoder whose normalized latents the model makes."""
    sample_rate: int
    channels: int
    hop_samples: int
    conditions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """`ConditionFacts` by modality."""
    words: tuple[str, ...] = ()
    """The vocabulary of word encoders."""
    dropout_each: float = 0.0
    dropout_together: float = 0.0
    """How often conditions were hidden in training: without, there is no guidance."""
    context_trained: bool = False
    """Whether the model was trained with audio context: without, it cannot edit."""
    longest_s: float = 0.0
    """Seconds of the longest sound in training."""

    def facts(self, modality: Modality) -> ConditionFacts | None:
        """How the modality is made; None: the model does not take it."""
        values = self.conditions.get(modality)
        return ConditionFacts(**values) if values is not None else None

    @property
    def latent_rate(self) -> float:
        return self.sample_rate / self.hop_samples


class SoundModel(nn.Module):
    """The transformer with the encoders that are trained along; a `VelocityModel` on conditions as they are stored."""

    def __init__(self, config: SoundModelConfig) -> None:
        super().__init__()
        self.config = config
        self.transformer: MMDiT | ThinkSound = (
            MMDiT(MMDiTConfig(**config.transformer))
            if config.preset == "native"
            else ThinkSound(ThinkSoundConfig(**config.transformer))
        )
        encoders: dict[str, nn.Module] = {}
        for name, values in config.conditions.items():
            facts = ConditionFacts(**values)
            if facts.kind == "words":
                encoders[name] = WordEncoder(len(config.words), facts.width)
            elif facts.kind == "pictures":
                encoders[name] = PictureEncoder(facts.side, facts.width)
        self.encoders = nn.ModuleDict(encoders)
        self.words = Words(config.words) if config.words else None

    @property
    def takes_context(self) -> bool:
        return self.transformer.takes_context

    @property
    def latent_dim(self) -> int:
        return self.transformer.config.latent_dim

    def forward(
        self,
        x_LD: Tensor,
        t_B: Tensor,
        conditions: PackedConditions,
        latents: SampleRows,
        context_LE: Tensor | None = None,
    ) -> Tensor:
        """The velocity `[L, D]`; see `MMDiT.forward`. Weights of absent modalities get gradients of zeros."""
        velocity_LD: Tensor = self.transformer(x_LD, t_B, self.encode(conditions), latents, context_LE)
        if torch.is_grad_enabled():
            velocity_LD = velocity_LD + zero_of(self._weights_outside_of_blocks())
        return velocity_LD

    def project(self, conditions: PackedConditions, latents: SampleRows) -> Any:
        """Encode and project the conditions once for all steps."""
        return self.transformer.project(self.encode(conditions), latents)

    def velocity(self, x_LD: Tensor, t_B: Tensor, projected: Any, context_LE: Tensor | None = None) -> Tensor:
        """The velocity with conditions that `project` made."""
        return self.transformer.velocity(x_LD, t_B, projected, context_LE)

    def encode(self, conditions: PackedConditions) -> PackedConditions:
        """Put stored words and pictures through the encoders that are trained along."""
        features = dict(conditions.features)
        for name, packed in conditions.features.items():
            if name in self.encoders:
                encoder = self.encoders[name]
                times_R = encoder.times_of(packed) if isinstance(encoder, WordEncoder) else packed.times_R
                features[name] = packed._replace(values_RC=encoder(packed), times_R=times_R)
            else:
                features[name] = packed._replace(
                    values_RC=packed.values_RC.to(self.transformer.t_embed.dtype)
                )
        return replace(conditions, features=features)

    def _weights_outside_of_blocks(self) -> Iterator[nn.Parameter]:
        """Blocks see to theirs: elsewhere they may not be whole (FSDP2)."""
        for name, weight in self.named_parameters():
            if not name.startswith(("transformer.joint_blocks.", "transformer.fused_blocks.")):
                yield weight

    def save_pretrained(self, folder: Path) -> None:
        """Write `config.json` and `model.safetensors`."""
        save_model(folder, self, MODEL_TYPE, self.config)

    @classmethod
    def from_pretrained(cls, folder: Path | str) -> SoundModel:
        """Load what `save_pretrained` wrote, or a `train_flow` stage's folder.

        Raises:
            ConfigError: nothing there, or another kind of model.
        """
        return load_whole(folder, MODEL_TYPE, SoundModelConfig, cls)


def check_guidance(config: SoundModelConfig, settings: SamplerSettings, where: str) -> None:
    """Refuse guidance by branches that a model was not trained on.

    Raises:
        ConfigError: it never saw its conditions hidden; or it is guided by modality, and they were never hidden one by
            one.
    """
    if not settings.is_guided:
        return
    if not (config.dropout_each or config.dropout_together):
        raise ConfigError(
            "guidance: this model was trained without dropout of conditions, and has no branch without them",
            where,
            "set guidance to 1, or train with dropout",
        )
    if settings.guidance_by and not config.dropout_each and len(config.conditions) > 1:
        raise ConfigError(
            "guidance_by: this model was trained with dropout 0, and has no branch with a part of its conditions",
            where,
            "set guidance in its place, or train with dropout",
        )


def check_autoencoder(config: SoundModelConfig, digest: str, where: str) -> None:
    """Refuse an autoencoder other than that of the training.

    Raises:
        ConfigError: its digest is another one.
    """
    if digest != config.autoencoder:
        raise ConfigError(
            f"this autoencoder ({digest[:12]}) is not the one whose latents the model was trained on "
            f"({config.autoencoder[:12]})",
            where,
            "give the autoencoder that `encode_latents` used",
        )


def condition_facts(**facts: Any) -> dict[str, Any]:
    """`ConditionFacts` as a config holds them."""
    return asdict(ConditionFacts(**facts))
