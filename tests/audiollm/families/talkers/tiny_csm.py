"""A CSM of random weights in transformers' own files, small enough for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import CsmConfig, CsmForConditionalGeneration, MimiConfig

from audiollm.families.talkers.new_talker import write_byte_tokenizer

BOOKS, CODES = 4, 19
"""Codebooks, and codes of the model's (the codec has 3 fewer, as published)."""
ROPE = {
    "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 32.0, "high_freq_factor": 0.0078125,
    "low_freq_factor": 0.001953125, "original_max_position_embeddings": 4,
}  # fmt: skip
MARKS = ("<|begin_of_text|>", "<|end_of_text|>", "<|AUDIO|>", "<|audio_eos|>")


def tiny_config(**changes: Any) -> CsmConfig:
    """The config of a small model."""
    sizes: dict[str, Any] = {
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_codebooks": BOOKS, "vocab_size": CODES,
        "rope_parameters": ROPE,
    }  # fmt: skip
    codec = MimiConfig(
        hidden_size=32, num_filters=4, num_residual_layers=1, upsampling_ratios=[8, 6, 5, 4], codebook_size=CODES - 3,
        codebook_dim=16, num_quantizers=BOOKS, num_semantic_quantizers=1, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, intermediate_size=32, vector_quantization_hidden_dimension=16,
        upsample_groups=32,
    )  # fmt: skip
    fields: dict[str, Any] = {
        **sizes, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "text_vocab_size": 260,
        "codebook_pad_token_id": CODES - 1, "codebook_eos_token_id": 0, "audio_token_id": 258,
        "audio_eos_token_id": 259,
        "bos_token_id": 256, "pad_token_id": 258,
        "depth_decoder_config": {
            **sizes, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "backbone_hidden_size": 48,
            "max_position_embeddings": 33,
        },
        "codec_config": codec.to_dict(), **changes,
    }  # fmt: skip
    return CsmConfig(**fields)


def write_tiny_csm(
    folder: Path, seed: int = 0, spread: float = 0.2, dtype: torch.dtype = torch.float32
) -> Path:
    """Write a model with a tokenizer that reads bytes."""
    torch.manual_seed(seed)
    config = tiny_config()
    model = CsmForConditionalGeneration(config)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and not name.startswith("codec_model"):
            torch.nn.init.normal_(parameter, std=spread)
    _draw_codebooks(model.codec_model)
    model.to(dtype).save_pretrained(folder)
    write_byte_tokenizer(folder, MARKS, {"bos_token": MARKS[0], "eos_token": MARKS[1]})
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"feature_extractor_type": "EncodecFeatureExtractor", "sampling_rate": 24_000})
    )
    return folder


@torch.no_grad()
def _draw_codebooks(codec: Any) -> None:
    for name, buffer in codec.named_buffers():
        if name.endswith("embed_sum"):
            buffer.normal_()
