"""A small Higgs Audio v3 TTS with random weights, in the published layout; its codec is another's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from audiollm.families.higgs_v3_tts.kind import MODEL_TYPE, PROMPT_MARKS, HiggsV3Kind
from audiollm.families.higgs_v3_tts.model import MARKED_CODES
from audiollm.families.talkers.new_talker import TalkerShape, layer_fields, write_byte_tokenizer
from audiollm.families.talkers.talker import draw_talker_weights
from audiollm.files.atomic import write_json

END_OF_TEXT = "<|endoftext|>"


def write_higgs_v3(folder: Path, shape: TalkerShape) -> int:
    """See `NewTalkerFamily.write_new`; a shape's depth decoder and speakers have no place in this model."""
    marks = (END_OF_TEXT, *PROMPT_MARKS)
    ids = write_byte_tokenizer(folder, marks, {"eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT})
    write_json(folder / "config.json", _higgs_v3_config(shape, max(ids.values()) + 1))
    torch.manual_seed(shape.seed)
    model = HiggsV3Kind(folder).new_talker()
    draw_talker_weights(model)
    save_file(dict(model.state_dict()), folder / "model.safetensors", metadata={"format": "pt"})
    return sum(parameter.numel() for parameter in model.parameters())


def _higgs_v3_config(shape: TalkerShape, words: int) -> dict[str, Any]:
    text = {
        "model_type": "qwen3", **layer_fields(shape.width, shape.layers), "rms_norm_eps": 1e-6, "vocab_size": words,
        "tie_word_embeddings": True, "rope_theta": None, "max_position_embeddings": 4096,
    }  # fmt: skip
    codes = {
        "model_type": "higgs_audio_encoder", "encoder_type": "discrete", "num_codebooks": shape.num_codebooks,
        "vocab_size": shape.codebook_size + MARKED_CODES, "out_dim": shape.width, "tie_word_embeddings": True,
        "use_delay_pattern": True,
    }  # fmt: skip
    return {
        "model_type": MODEL_TYPE, "architectures": ["HiggsMultimodalQwen3ForConditionalGeneration"],
        "text_config": text, "audio_encoder_config": codes, "audio_token_id": -100, "sample_rate": 24_000,
    }  # fmt: skip
