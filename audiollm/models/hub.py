"""Models from folders and back: Hugging Face's layout of Higgs Audio V2, Boson's, plain language models.

Shapes: V words, C hidden size, K codebooks.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer
from torch import nn

from audiollm.files.atomic import write_json
from audiollm.files.json_files import read_json_file
from audiollm.models.decoder import DualFFNConfig
from audiollm.models.generation_config import FILE_NAME as GENERATION_FILE
from audiollm.models.layouts import (
    BOSON,
    HIGGS,
    LANGUAGE_MODELS,
    config_of,
    language_model_config,
    own_key,
    transformers_config,
)
from audiollm.models.model_card import ModelCard, write_card
from audiollm.models.pretrained import StoredWeights, fill, model_folder, save_shards
from audiollm.models.processor_files import save_processor, save_tokenizer

if TYPE_CHECKING:
    from audiollm.models.dual_ffn import DualFFN

TEXT_EMBEDDING, TEXT_HEAD = "model.embed_tokens.weight", "text_lm_head.weight"
AUDIO_EMBEDDING, AUDIO_HEAD = "model.embed_audio_tokens.embed_audio_tokens.weight", "audio_lm_head.weight"


def load_pretrained(
    model_class: type[DualFFN], folder: Path | str, dtype: torch.dtype | None = torch.float32
) -> DualFFN:
    """A DualFFN from a folder, or from the `model` of a stage's folder.

    It may be ours, transformers' `HiggsAudioV2ForConditionalGeneration`, or Boson's release; of safetensors, whole or
    in shards, which are read tensor by tensor: there is never more in memory than the model and one tensor.

    Args:
        dtype: of the weights; None: as they are stored.

    Raises:
        ConfigError: nothing there, another kind of model, pickles alone, or weights that do not fit.
    """
    folder = model_folder(Path(folder))
    data = read_config(folder)
    config = config_of(data, str(folder / "config.json"))
    weights = StoredWeights(folder)
    names = weights.names
    if data["model_type"] == BOSON and config.audio_encoder is None:
        names = [name for name in names if not name.startswith(("audio_tower.", "audio_encoder_proj."))]
    sources = _tensor_sources(names)
    if TEXT_HEAD not in sources:
        _copy_embedding(sources, folder, tell=True)
    model = _without_weights(model_class, config)
    fill(model, sources, weights, dtype, str(folder))
    return model.eval()


def save_pretrained(
    model: DualFFN,
    folder: Path | str,
    tokenizer: Tokenizer | None = None,
    card: ModelCard | None = None,
    max_shard_size: int | str = "5GB",
    generation: Mapping[str, Any] | None = None,
    codec: Path | None = None,
) -> None:
    """Write a folder that `load_pretrained` and transformers read; config.json is written last.

    The layout is that of `HiggsAudioV2ForConditionalGeneration` wherever that class can hold the model. Else (chosen
    layers, biases, normalised heads, a sliding window, an audio encoder) it has the same names under the model type
    `audiollm_dual_ffn`.

    Args:
        tokenizer: written beside it; gives the ids of the special tokens in config.json.
        card: what is known of the model, for its README.md.
        max_shard_size: of a file of weights, in bytes or as "5GB".
        generation: how codes are best drawn from it, for generation_config.json; `generation_config.read_generation`
            tells that of another folder. None: nothing is said.
        codec: the folder of its codec, which config.json and the processor's files then name.
    """
    folder = Path(folder)
    state = model.state_dict()
    description = transformers_config(model.config, tokenizer)
    description["dtype"] = str(state[TEXT_HEAD].dtype).removeprefix("torch.")
    save_shards(folder, state, max_shard_size)
    if tokenizer is not None:
        save_tokenizer(folder, tokenizer)
        if description["model_type"] == HIGGS and description["audio_delay_token_id"] != -1:
            description |= save_processor(folder, tokenizer, model.config.codebook_size - 2, codec)
    ids = {name: description[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(folder / GENERATION_FILE, {**ids, **(generation or {})})
    parameters = sum(parameter.numel() for parameter in model.parameters())
    write_card(folder, card or ModelCard(), model.config, parameters, description["model_type"])
    write_json(folder / "config.json", description)


def from_language_model(
    model_class: type[DualFFN],
    folder: Path | str,
    num_codebooks: int = 8,
    codebook_size: int = 1026,
    audio_ffn_layers: Iterable[int] | None = None,
    dtype: torch.dtype | None = torch.float32,
) -> DualFFN:
    """A DualFFN built on a plain Llama, Qwen2 or Qwen3, whose text logits it gives.

    The norms and the feed-forward of audio begin as those of text; the audio embeddings at random, such that a sum
    over codebooks is as large as a word's embedding; the audio head at random. A text head that is tied to the
    embedding becomes a copy of it.

    Args:
        codebook_size: codes of one codebook, BOS and EOS included.
        audio_ffn_layers: layers with an audio feed-forward; None: all.

    Raises:
        ConfigError: another kind of model, a variant that a DualFFN does not have, or weights that do not fit.
    """
    folder = model_folder(Path(folder))
    where = str(folder / "config.json")
    data = read_config(folder)
    config = language_model_config(data, where, num_codebooks, codebook_size, audio_ffn_layers)
    model = _without_weights(model_class, config)
    weights = StoredWeights(folder)
    sources = _tensor_sources(weights.names)
    head, tied = sources.pop("lm_head.weight", []), bool(data.get("tie_word_embeddings"))
    if head and not tied:
        sources[TEXT_HEAD] = head
    else:
        _copy_embedding(sources, folder, tell=not tied)
    for name in model.state_dict():
        of_text = name.replace(".audio_", ".")
        if name.startswith("model.layers.") and of_text != name and of_text in sources:
            sources[name] = sources[of_text]
    fill(model, sources, weights, dtype, str(folder), optional=(AUDIO_EMBEDDING, AUDIO_HEAD))
    _begin_audio(model)
    return model.eval()


def is_language_model(folder: Path | str) -> bool:
    """Return whether a folder holds a plain language model, for `from_language_model`.

    Raises:
        ConfigError: no model is there.
    """
    return read_config(model_folder(Path(folder))).get("model_type") in LANGUAGE_MODELS


@torch.no_grad()
def grow_vocabulary(model: DualFFN, tokenizer: Tokenizer, num_known: int | None = None) -> int:
    """Give every word of the vocabulary a row in the text embedding and in the text head; ids of the others stay.

    New rows are the mean of the known ones: a word that was never seen is then neither likely nor loud.

    Args:
        num_known: how many words the model was trained with; rows from there on are new even where the model has them
            already (embeddings are often padded to a round number). None: as many as it has rows.

    Returns:
        How many rows the model grew by.
    """
    rows = model.config.vocab_size
    needed = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    num_known = rows if num_known is None else min(num_known, rows)
    grown = max(needed - rows, 0)
    for module in (model.model.embed_tokens, model.text_lm_head):
        old_VC = module.weight
        mean_C = old_VC[:num_known].mean(dim=0, dtype=torch.float32).to(old_VC.dtype)
        weight_VC = torch.cat([old_VC, old_VC.new_empty(grown, old_VC.shape[1])])
        weight_VC[num_known:needed] = mean_C
        module.weight = nn.Parameter(weight_VC, requires_grad=old_VC.requires_grad)
    model.model.embed_tokens.num_embeddings = model.text_lm_head.out_features = rows + grown
    model.config = replace(model.config, vocab_size=rows + grown)
    return grown


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a model's folder.

    Raises:
        ConfigError: not JSON, or not a mapping.
    """
    return read_json_file(folder / "config.json", dict)


def _tensor_sources(names: Iterable[str]) -> dict[str, list[str]]:
    """The tensors of the files, one below the other, that each of the model's is made of.

    Boson's partly frozen tables come in two parts. transformers' files hold heads twice, under their old names too.
    """
    sources: dict[str, list[str]] = {}
    for name in sorted(names):
        key = own_key(name)
        if key is not None:
            sources.setdefault(key, []).append(name)
    for key, parts in sources.items():
        if key in parts:
            sources[key] = [key]
    return sources


def _copy_embedding(sources: dict[str, list[str]], folder: Path, tell: bool) -> None:
    """The text head is to begin as a copy of the text embedding."""
    if TEXT_EMBEDDING not in sources:  # which is then told to be missing
        return
    sources[TEXT_HEAD] = sources[TEXT_EMBEDDING]
    if tell:
        warnings.warn(
            f"{folder}: its files have no text head; it begins as a copy of the text embedding", stacklevel=3
        )


def _without_weights(model_class: type[DualFFN], config: DualFFNConfig) -> DualFFN:
    with torch.device("meta"):
        return model_class(config)


def _begin_audio(model: DualFFN) -> None:
    embedding, head = model.model.embed_audio_tokens.embed_audio_tokens, model.audio_lm_head
    text_VC = model.model.embed_tokens.weight.detach()
    loudness = float(text_VC[: min(len(text_VC), 4096)].float().std()) / model.config.num_codebooks**0.5
    for module, scale in ((embedding, loudness), (head, 0.02)):
        fresh = torch.empty(module.weight.shape, dtype=text_VC.dtype)
        module.weight = nn.Parameter(nn.init.normal_(fresh, std=scale))
