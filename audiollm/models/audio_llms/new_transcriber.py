"""The stage `new_transcriber`: a small Higgs Audio v3 STT with random weights in its published files.

Its vocabulary has the words of the samples; it is trained, asked and written back as the published model is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from audiollm.models.audio_llms.new_thinker import texts_of_samples, train_vocabulary
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import InputPath, Stage, StageConfig, StagePlan

_MARKS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|audio_bos|>", "<|audio_eos|>", "<|AUDIO|>", "<|AUDIO_OUT|>",
)  # fmt: skip
_THOUGHTS = ("<think>", "</think>")
_HEAD_DIM = 32
_PROJECTOR_WIDTH = 2048


class NewTranscriberConfig(StageConfig):
    """Settings of the stage `new_transcriber`. By default the model has some 5 M parameters."""

    samples: InputPath
    """Samples (.jsonl) whose texts the vocabulary is learned from."""
    vocabulary: int = Field(1000, ge=280, le=100_000)
    """Tokens of the vocabulary at most."""
    width: int = Field(192, ge=_HEAD_DIM, multiple_of=_HEAD_DIM)
    """Hidden size of the decoder."""
    layers: int = Field(4, ge=1)
    """Layers of the decoder."""
    encoder_width: int = Field(192, ge=_HEAD_DIM, multiple_of=_HEAD_DIM)
    """Hidden size of the encoder."""
    encoder_layers: int = Field(4, ge=1)
    """Layers of the encoder."""
    seed: int = 0
    """Seed of the random weights."""


def run_new_transcriber(config: NewTranscriberConfig, context: Context) -> dict[str, Any]:
    """Write `model`: weights, config and tokenizer in the published layout.

    Raises:
        StageError: no sample has a text.
    """
    texts = texts_of_samples(config.samples, "new_transcriber")
    figures = write_transcriber(context.folder / "model", config, texts)
    context.say(f"{figures['parameters']:,} parameters, {figures['vocabulary']} tokens")
    return figures


def write_transcriber(
    folder: Path, config: NewTranscriberConfig, texts: Iterable[str], max_shard_size: int | str = "5GB"
) -> dict[str, Any]:
    """Write a model with random weights; returns its numbers of parameters and tokens."""
    import torch
    import transformers
    from transformers.models.whisper.modeling_whisper import sinusoids

    from audiollm.files.atomic import write_json
    from audiollm.models.audio_llms.higgs_v3_stt.config import HiggsAudio3Config
    from audiollm.models.audio_llms.higgs_v3_stt.model import HiggsAudio3Model
    from audiollm.models.audio_llms.higgs_v3_stt.processor import DEFAULT_PROMPT
    from audiollm.models.pretrained import save_shards

    words = train_vocabulary([*texts, DEFAULT_PROMPT, "user\nassistant\n"], config.vocabulary, _MARKS)
    words.add_tokens(list(_THOUGHTS))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token=_MARKS[0],
        eos_token=_MARKS[0],
        extra_special_tokens=list(_MARKS[1:]),
    )
    tokenizer.save_pretrained(str(folder))
    ids = {mark: int(tokenizer.convert_tokens_to_ids(mark)) for mark in _MARKS}
    data = _published_config(config, ids, len(tokenizer))
    write_json(folder / "config.json", data)
    write_json(
        folder / "generation_config.json", {"eos_token_id": ids[_MARKS[0]], "pad_token_id": ids[_MARKS[0]]}
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = HiggsAudio3Model(HiggsAudio3Config.from_dict(data))
        _let_sound_through(model)
    positions = model.audio_tower.embed_positions.weight
    positions.data = sinusoids(*positions.shape)
    save_shards(folder, model.state_dict(), max_shard_size)
    return {"parameters": sum(p.numel() for p in model.parameters()), "vocabulary": len(tokenizer)}


def planned_transcriber_size(config: NewTranscriberConfig) -> int:
    """Parameters within a tenth, without building the model: its matrices, with a full vocabulary."""
    width, encoder = config.width, config.encoder_width
    decoder = config.layers * 13 * width**2 + 2 * config.vocabulary * width
    tower = config.encoder_layers * 12 * encoder**2 + 3 * encoder * (128 + encoder) + 1500 * encoder
    return decoder + tower + _PROJECTOR_WIDTH * (width + encoder)


def _plan_new_transcriber(config: NewTranscriberConfig, plans: Mapping[str, StagePlan]) -> StagePlan:
    parameters = planned_transcriber_size(config)
    return StagePlan(
        parameters=parameters,
        memory_mb=900,
        disk_mb=4 * parameters / 1e6,
        core_seconds=15,
        note="random weights of Higgs Audio v3 STT",
    )


STAGE = Stage(
    kind="new_transcriber",
    config=NewTranscriberConfig,
    run=run_new_transcriber,
    artifacts={"checkpoint": "model"},
    help="begin a small model that transcribes, with random weights in the layout of Higgs Audio v3 STT",
    plan=_plan_new_transcriber,
)


# Private


def _let_sound_through(model: Any) -> None:
    """Draw the layers on the way of the sound in He's scale. In that of transformers (0.02) the rows of two recordings
    differ by a hundredth of what their positions add, and a small model learns nothing from them."""
    from torch import nn

    tower, projector = model.audio_tower, model.audio_encoder_proj
    for layer in (tower.conv1, tower.conv2, projector.temporal, projector.linear1):
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")


def _published_config(
    config: NewTranscriberConfig, ids: Mapping[str, int], vocabulary: int
) -> dict[str, Any]:
    """config.json with the settings of the published one, and sizes of its own."""
    heads = config.width // _HEAD_DIM
    text = {
        "model_type": "qwen3", "vocab_size": vocabulary, "hidden_size": config.width,
        "intermediate_size": 3 * config.width, "num_hidden_layers": config.layers, "num_attention_heads": heads,
        "num_key_value_heads": heads, "head_dim": _HEAD_DIM, "max_position_embeddings": 32768, "rope_theta": 1000000,
        "rope_scaling": None, "tie_word_embeddings": True,
    }  # fmt: skip
    encoder = {
        "model_type": "higgs_audio_encoder", "num_mel_bins": 128, "encoder_layers": config.encoder_layers,
        "encoder_attention_heads": config.encoder_width // _HEAD_DIM, "encoder_ffn_dim": 4 * config.encoder_width,
        "d_model": config.encoder_width, "max_source_positions": 1500,
    }  # fmt: skip
    return {
        "architectures": ["HiggsAudio3Model"], "model_type": "higgs_audio_3", "audio_adapter_type": "stack",
        "projector_type": "mlp", "projector_temporal_downsample": 2, "chunk_size_seconds": 4.0,
        "duplicate_audio_triplet": False, "audio_in_token_idx": ids["<|AUDIO|>"],
        "audio_out_token_idx": ids["<|AUDIO_OUT|>"], "audio_bos_token_id": ids["<|audio_bos|>"],
        "audio_eos_token_id": ids["<|audio_eos|>"], "pad_token_id": ids["<|endoftext|>"],
        "tie_word_embeddings": True, "text_config": text, "audio_encoder_config": encoder,
    }  # fmt: skip
