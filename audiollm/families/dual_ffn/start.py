"""The start of a training: another model, a DualFFN or a plain language model; or the codec's code vectors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from audiollm.codec import CODEBOOK_SIZE, NUM_CODEBOOKS
from audiollm.data.chat.template import Template
from audiollm.data.text.tokenizer import (
    FILE_NAME,
    add_special_tokens,
    header_style_of,
    missing_tokens,
    read_text_tokenizer,
)
from audiollm.errors import ConfigError
from audiollm.files.atomic import DamagedFile
from audiollm.files.tensors import load_tensors
from audiollm.generation.engine.defaults import read_trained
from audiollm.models.dual_ffn import DualFFN
from audiollm.models.generation_config import read_generation
from audiollm.models.hub import grow_vocabulary, is_language_model, read_config
from audiollm.models.layouts import config_of
from audiollm.models.pretrained import model_folder

STYLE_OF_OTHERS = "chatml"
"""The turn marks that a vocabulary gets which has those of no known style."""
COPIED_STD = 0.05
"""Standard deviation of embeddings and heads that begin alike: in a sketch of one layer that is to repeat random
codes, 0.02 took three times the steps."""
FRAME_STD = 0.16
"""Standard deviation of what a frame of codes begins as, the embeddings of its codes added up, with `latents`."""


def start_vocabulary(folder: Path) -> Tokenizer:
    """The vocabulary of a model's folder, with the special tokens appended that it lacks; all other ids stay.

    Raises:
        ConfigError: none there, or one that cannot be read.
    """
    tokenizer = read_text_tokenizer(model_folder(folder))
    try:
        style = header_style_of(tokenizer)
    except ConfigError:
        style = STYLE_OF_OTHERS
    if missing_tokens(tokenizer, style):
        add_special_tokens(tokenizer, style)
    return tokenizer


def start_codec(folder: Path | None) -> dict[str, Any]:
    """The codebooks of the model in a folder, and their codec's digest where it is known; else those of Higgs.

    Raises:
        ConfigError: the folder's settings are damaged.
    """
    if folder is None or is_language_model(model_folder(folder)):
        return {"num_codebooks": NUM_CODEBOOKS, "codebook_size": CODEBOOK_SIZE}
    folder = model_folder(folder)
    config = config_of(read_config(folder), str(folder / "config.json"))
    codec: dict[str, Any] = {"num_codebooks": config.num_codebooks, "codebook_size": config.codebook_size - 2}
    digest = read_trained(folder).codec_digest
    return codec if digest is None else {**codec, "digest": digest}


def start_template(folder: Path) -> Template:
    """The chat template of the model in a folder: its vocabulary, with the special tokens, and its codec's codebooks.

    Raises:
        ConfigError: no vocabulary there, or settings that cannot be read.
    """
    tokenizer, codec = start_vocabulary(folder), start_codec(folder)
    return Template(tokenizer, codec["num_codebooks"], codec["codebook_size"], header_style_of(tokenizer))


def start_model(folder: Path, template: Template, audio_ffn_layers: Sequence[int] | None = None) -> DualFFN:
    """The model in a folder, with a row for every word of the template's vocabulary.

    Args:
        folder: a DualFFN's (ours, transformers' or Boson's Higgs Audio V2), or a plain Llama's or Qwen's.
        audio_ffn_layers: of a language model, the layers that get an audio feed-forward; None: all.

    Raises:
        ConfigError: no such model, codes of another shape, or a vocabulary in which its words have other ids.
    """
    folder = model_folder(folder)
    shape = (template.num_codebooks, template.codebook_size + 2)
    if is_language_model(folder):
        model = DualFFN.from_language_model(folder, *shape, audio_ffn_layers)
    else:
        start_generation(folder)  # what is wrong with it is told now, and not when the training is over
        model = DualFFN.from_pretrained(folder)
        model_shape = (model.config.num_codebooks, model.config.codebook_size)
        if model_shape != shape:
            raise ConfigError(
                f"the model has {model_shape[0]} codebooks of {model_shape[1] - 2} codes, "
                f"the shards {shape[0]} of {shape[1] - 2}",
                str(folder),
                "they are those of another codec: tokenize with the codec that the model was trained on",
            )
        model_layers = model.config.audio_ffn_layers
        if audio_ffn_layers is not None and tuple(sorted(audio_ffn_layers)) != model_layers:
            raise ConfigError(
                f"shape.audio_ffn_layers is set, but the model to start from has its own: {model_layers or 'all'}",
                str(folder),
                "leave it out: it is for language models without an audio part",
            )
    grow_vocabulary(model, template.tokenizer, _known_words(folder, template.tokenizer))
    return model


def start_generation(folder: Path | None) -> dict[str, Any]:
    """How codes are best drawn from the model that a training begins from, which holds for what comes of it, too.

    A language model's settings are those of words, and say nothing.

    Raises:
        ConfigError: its generation_config.json is damaged.
    """
    return {} if folder is None or is_language_model(folder) else read_generation(model_folder(folder))


@torch.no_grad()
def start_heads_from_embeddings(model: DualFFN) -> None:
    """Begin the head of every code as its embedding, both larger than at random.

    Attention can then repeat a code that it finds without learning, code by code, how each is said.
    """
    embed = model.model.embed_audio_tokens.embed_audio_tokens.weight
    embed *= COPIED_STD / embed.std()
    model.audio_lm_head.weight.copy_(embed)


def read_codebooks(path: Path, template: Template) -> Tensor:
    """The code vectors that `tokenize` wrote beside the shards, `[K, V, D]`.

    Raises:
        DamagedFile: the file holds something else, or the vectors of other codebooks than the shards' index says.
    """
    remedy = "restore it and index.json beside it, or run `tokenize` again"
    vectors_KVD = load_tensors(path, remedy).get("vectors_KVD")
    if vectors_KVD is None or vectors_KVD.ndim != 3 or not vectors_KVD.isfinite().all():
        raise DamagedFile(path, "it holds no code vectors", remedy)
    vectors_shape, index_shape = (
        tuple(vectors_KVD.shape[:2]),
        (template.num_codebooks, template.codebook_size),
    )
    if vectors_shape != index_shape:
        vectors_text = f"{vectors_shape[0]} codebooks of {vectors_shape[1]} codes"
        reason = f"it has {vectors_text}, and index.json says {index_shape[0]} of {index_shape[1]}"
        raise DamagedFile(path, reason, remedy)
    return vectors_KVD


@torch.no_grad()
def start_from_codebooks(model: DualFFN, vectors_KVD: Tensor) -> None:
    """Begin the audio embeddings and heads as random projections of the codec's code vectors.

    Codes that sound alike then begin alike, which shortens training; BOS and EOS keep their own random rows.
    """
    config = model.config
    books, size, dim = vectors_KVD.shape
    scale_K = vectors_KVD.flatten(1).std(dim=1).clamp_min(1e-6)
    embed = model.model.embed_audio_tokens.embed_audio_tokens.weight
    for table in (embed, model.audio_lm_head.weight):
        rows_KVC = table.unflatten(0, (books, config.codebook_size))
        for level in range(books):
            projection = torch.randn(dim, config.hidden_size) * 0.02 / dim**0.5
            rows_KVC[level, :size] += vectors_KVD[level] / scale_K[level] @ projection


@torch.no_grad()
def start_embeddings_from_latents(model: DualFFN, vectors_KVD: Tensor) -> None:
    """Begin the audio embeddings so that those of a frame add up to a random projection of the codec's latent.

    The latent is the sum of the frame's code vectors (a residual quantizer's). BOS and EOS keep their own random rows.
    """
    config = model.config
    books, size, dim = vectors_KVD.shape
    projection_DC = torch.randn(dim, config.hidden_size) * FRAME_STD / dim**0.5
    weight = model.model.embed_audio_tokens.embed_audio_tokens.weight
    rows_KVC = weight.unflatten(0, (books, config.codebook_size))
    latent_std = vectors_KVD.flatten(1).var(dim=1).sum().sqrt().clamp_min(1e-6)
    rows_KVC[:, :size] = vectors_KVD / latent_std @ projection_DC


def _known_words(folder: Path, tokenizer: Tokenizer) -> int | None:
    """Return the number of ids of the model's own vocabulary; None where its folder has no vocabulary."""
    if not (folder / FILE_NAME).exists():
        return None
    words, template_ids = read_text_tokenizer(folder).get_vocab(), tokenizer.get_vocab()
    moved = next((word for word, place in words.items() if template_ids.get(word) != place), None)
    if moved is not None:
        raise ConfigError(
            f"text_tokenizer: {moved!r} has another id than in the vocabulary of the model to start from",
            str(folder),
            "leave text_tokenizer out: the model's own is taken",
        )
    return max(words.values()) + 1
