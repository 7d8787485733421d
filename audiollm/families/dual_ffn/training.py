"""The training of a DualFFN on packs: built or started, what of it is trained, and written.

`DualFFNTraining` is what the stage `train` asks; the functions below it do the work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from audiollm.data.chat.template import Template
from audiollm.data.hearing.features import FeatureShape
from audiollm.devices import default_device
from audiollm.errors import ConfigError, StageError
from audiollm.families.adapters import save_adapter
from audiollm.families.dual_ffn.adapting import adapt, merge_adapter
from audiollm.families.dual_ffn.losses import TokenLosses
from audiollm.families.dual_ffn.planning import count_parameters, plan_training
from audiollm.families.dual_ffn.saving import codec_of, first_folder
from audiollm.families.dual_ffn.shape import (
    encoder_of,
    encoder_of_start,
    planned_shape,
    shape_from_settings,
    with_window,
)
from audiollm.families.dual_ffn.start import (
    read_codebooks,
    start_codec,
    start_embeddings_from_latents,
    start_from_codebooks,
    start_generation,
    start_heads_from_embeddings,
    start_model,
    start_vocabulary,
)
from audiollm.families.packed_training import PackedTraining
from audiollm.models.attention import attention_backend
from audiollm.models.audio_encoder import frozen_features, load_tower
from audiollm.models.dual_ffn import DualFFN
from audiollm.models.frozen.shrink import load_trained
from audiollm.models.hub import is_language_model, save_pretrained
from audiollm.models.model_card import ModelCard
from audiollm.models.pretrained import model_folder
from audiollm.recipe.stages import StagePlan, required
from audiollm.train.loop.optim import compute_dtype
from audiollm.train.supervised_settings import TrainConfig


class DualFFNTraining:
    """A `PackedTraining` of a DualFFN."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config

    @property
    def codec(self) -> dict[str, Any]:
        """See `PackedTraining.codec`."""
        return start_codec(self._config.start)

    @property
    def encoder(self) -> FeatureShape | None:
        """See `PackedTraining.encoder`."""
        encoder = encoder_of(self._config)
        if encoder is None:
            return None
        folder = frozen_encoder_folder(self._config)
        return encoder.features if folder is None else frozen_features(encoder, folder)

    def start_vocabulary(self) -> Tokenizer:
        """See `PackedTraining.start_vocabulary`."""
        return start_vocabulary(required(self._config.start))

    def check(self) -> None:
        """See `PackedTraining.check`."""
        check_attention(self._config)

    def build(self, template: Template, is_coded: bool) -> TokenLosses:
        """See `PackedTraining.build`."""
        model = build_decoder(self._config, template)
        check_attention(self._config, model.config.head_dim)
        choose_trained(model, self._config, is_coded)
        return TokenLosses(model)

    def save(
        self,
        weights: Mapping[str, Tensor],
        template: Template,
        folder: Path,
        card: ModelCard,
        codec_folders: Sequence[str | None],
    ) -> TokenLosses:
        """See `PackedTraining.save`; an adapter is merged into the model, too."""
        config = self._config
        model = build_decoder(config, template)
        adapted = adapt(model, config.trained, config.lora, not config.freezes_encoder)
        named = {key.removeprefix("model."): value for key, value in weights.items()}
        load_trained(model, named, config.frozen_weights != "fp32")
        if config.trained == "adapter":
            save_adapter(adapted, folder / "adapter")  # type: ignore[arg-type]
            model = merge_adapter(adapted)  # type: ignore[arg-type, assignment]
        of_start = [] if config.start is None else codec_of(config.start)
        save_pretrained(
            model,
            folder / "model",
            template.tokenizer,
            card,
            generation=start_generation(config.start),
            codec=first_folder([*codec_folders, *of_start]),
        )
        return TokenLosses(model.eval().requires_grad_(False))

    def plan(self, plans: Mapping[str, StagePlan]) -> StagePlan:
        """See `PackedTraining.plan`."""
        return plan_training(self._config, plans)


def frozen_encoder_folder(config: TrainConfig) -> Path | None:
    """The folder of the encoder that a training leaves as it is; None: it is trained, or begins at random.

    Raises:
        ConfigError, StageError: what it starts from is no model, or `trained` or `lora` fits nothing in it.
    """
    settings = config.shape.audio_encoder
    if encoder_of_start(config) is not None:
        folder: Path | None = model_folder(required(config.start))
    else:
        folder = None if settings is None else settings.path
    if folder is None or (settings is not None and not settings.trained):
        return folder
    shape = planned_shape(config, {})
    try:
        return None if shape is None or count_parameters(config, shape).trains_encoder else folder
    except ValueError as error:
        raise StageError(str(error), "see `trained`, `lora` and `rules`", 2) from error


def build_decoder(config: TrainConfig, template: Template) -> DualFFN:
    """The decoder that a training begins with, on the CPU: from `start`, or random by the shape in the settings.

    Where a source lies beside its codec's code vectors, new code embeddings begin from these.

    Raises:
        ConfigError, StageError: `start` is no model, or does not go with the settings or the template.
    """
    if config.start is not None:
        model = start_model(config.start, template, config.shape.audio_ffn_layers)
        model.config = with_window(model.config, config)
    else:
        vocabulary = template.tokenizer.get_vocab_size()
        shape = shape_from_settings(config, vocabulary, template.num_codebooks, template.codebook_size + 2)
        model = DualFFN(shape)
    if config.start is None or is_language_model(config.start):
        for source in config.samples:
            vectors = Path(source.path) / "codebooks.safetensors"
            if vectors.exists():
                vectors_KVD = read_codebooks(vectors, template)
                start_from_codebooks(model, vectors_KVD)
                if config.shape.code_embeddings == "latents":
                    start_embeddings_from_latents(model, vectors_KVD)
                break
        if config.shape.code_heads == "embeddings":
            start_heads_from_embeddings(model)
    add_encoder(model, config)
    model.attention = config.shape.attention
    return model


def choose_trained(model: DualFFN, config: TrainConfig, is_coded: bool) -> nn.Module:
    """Freeze, in place, what is not trained; with `trained: adapter` the returned module holds the adapter.

    Args:
        is_coded: whether a source has codes.

    Raises:
        StageError: a pattern of `trained` or `lora` fits nothing, or nothing trains a part that begins at random.
    """
    try:
        adapted = adapt(model, config.trained, config.lora, not config.freezes_encoder)
    except ValueError as error:
        raise StageError(str(error), "see `trained` and `lora`", 2) from error
    check_projector(model, config)
    if is_coded:
        _check_new_parts(model, config)
    return adapted


def check_attention(config: TrainConfig, head_dim: int | None = None) -> None:
    """Check that the attention that is asked for can run here.

    Args:
        head_dim: the model's; None: by the settings, before any model is read.

    Raises:
        StageError: it cannot.
    """
    attention, device = config.shape.attention, default_device()
    dtype = compute_dtype(config.precision, device) or torch.float32
    if head_dim is None:  # that of `start` is not known yet
        head_dim = (
            64 if config.start else required(config.shape.hidden_size) // required(config.shape.num_heads)
        )
    try:
        attention_backend(device, dtype, head_dim, attention)
    except ValueError as error:
        raise StageError(f"shape.{error}", exit_code=2) from error


def add_encoder(model: DualFFN, config: TrainConfig) -> None:
    """Give the model its encoder, where it is to have one and does not have it yet.

    Raises:
        StageError: no weights of that shape in the folder of the encoder.
    """
    encoder, settings = encoder_of(config), config.shape.audio_encoder
    if encoder is None or model.config.audio_encoder is not None:
        return
    model.add_audio_encoder(encoder)
    if settings is not None and settings.path is not None:
        try:
            load_tower(model.audio_tower, settings.path)
        except ConfigError as error:
            raise StageError(str(error), "see shape.audio_encoder.path", 2) from error


def check_projector(model: DualFFN, config: TrainConfig) -> None:
    """Check the choice of what is trained, of a model that hears.

    Raises:
        StageError: a projector that begins at random is not trained.
    """
    if model.config.audio_encoder is None:
        return
    is_trained = any(parameter.requires_grad for parameter in model.audio_encoder_proj.parameters())
    if not is_trained and encoder_of_start(config) is None:
        raise StageError(
            "the projector of the new audio encoder begins at random, and nothing trains it",
            "add 'audio_encoder_proj.*' to `trained`, or audio_encoder_proj to lora.trained_beside",
            2,
        )


def _check_new_parts(model: DualFFN, config: TrainConfig) -> None:
    """
    Raises:
        StageError: the codes of a language model are new, and nothing trains what reads or says them.
    """
    if config.start is None or not is_language_model(config.start):
        return
    parts: dict[str, nn.Module] = {}
    if config.audio_in == "codes" or config.audio_weight > 0:
        parts["embed_audio_tokens"] = model.model.embed_audio_tokens
    if config.audio_weight > 0:
        parts["audio_lm_head"] = model.audio_lm_head
    untrained = [
        name for name, module in parts.items() if not any(p.requires_grad for p in module.parameters())
    ]
    if untrained:
        patterns = ", ".join(f"'*{name}.*'" for name in untrained)
        raise StageError(
            f"{' and '.join(untrained)} of a language model are new, and nothing trains them",
            f"add {', '.join(untrained)} to lora.trained_beside, or {patterns} to `trained`; where nothing "
            "is spoken, set audio_weight: 0",
            2,
        )


_: type[PackedTraining] = DualFFNTraining
