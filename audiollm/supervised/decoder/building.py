"""The decoder of a training: built or started, and what of it is trained."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from audiollm.data.chat.template import Template
from audiollm.devices import default_device
from audiollm.errors import StageError
from audiollm.families.dual_ffn.adapting import adapt
from audiollm.families.dual_ffn.start import (
    read_codebooks,
    start_embeddings_from_latents,
    start_from_codebooks,
    start_heads_from_embeddings,
    start_model,
)
from audiollm.models.attention import attention_backend
from audiollm.models.dual_ffn import DualFFN
from audiollm.models.hub import is_language_model
from audiollm.recipe.stages import required
from audiollm.supervised.decoder.encoder import add_encoder, freeze_encoder
from audiollm.supervised.decoder.shape import shape_from_settings, with_window
from audiollm.supervised.settings import TrainConfig
from audiollm.train.loop.optim import compute_dtype


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
        adapted = adapt(model, config.trained, config.lora)
    except ValueError as error:
        raise StageError(str(error), "see `trained` and `lora`", 2) from error
    freeze_encoder(model, config)
    if is_coded:
        _check_new_parts(model, config)
    return adapted


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
