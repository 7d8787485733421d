"""A small Qwen3-TTS with random weights, in its published layout, with a row for each voice; its codec is another's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from audiollm.families.qwen3_tts.kind import CODEC_12HZ, MARK_FIELDS
from audiollm.families.qwen3_tts.model import Qwen3TTSTalker
from audiollm.families.talkers.new_talker import TalkerShape, layer_fields, write_byte_tokenizer
from audiollm.families.talkers.talker import draw_talker_weights
from audiollm.files.atomic import write_json

MARKS = ("<|im_start|>", "<|im_end|>", "<tts_pad>", "<tts_bos>", "<tts_eos>", "assistant", "user")
SUPPRESSED = 1024
"""Entries of the first table beyond the codes; all of them but the end are never drawn, as published."""


def write_qwen3_tts(folder: Path, shape: TalkerShape) -> int:
    """See `NewTalkerFamily.write_new`."""
    ids = write_byte_tokenizer(folder, MARKS, {"eos_token": MARKS[1]})
    config = _qwen3_tts_config(shape, ids)
    write_json(folder / "config.json", config)
    torch.manual_seed(shape.seed)
    model = Qwen3TTSTalker(config["talker_config"], str(folder / "config.json"))
    draw_talker_weights(model)
    save_file(dict(model.state_dict()), folder / "model.safetensors", metadata={"format": "pt"})
    return sum(parameter.numel() for parameter in model.parameters())


def _qwen3_tts_config(shape: TalkerShape, ids: dict[str, int]) -> dict[str, Any]:
    codes = shape.codebook_size
    common = {"num_code_groups": shape.num_codebooks, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000}
    marks = {name: codes + 100 + place for place, name in enumerate(MARK_FIELDS)}
    voices = {name.lower(): codes + 200 + place for place, name in enumerate(shape.speakers)}
    predictor = {
        **common, **layer_fields(shape.depth_width, shape.depth_layers), "vocab_size": codes,
        "model_type": "qwen3_tts_talker_code_predictor",
    }  # fmt: skip
    talker = {
        **common, **layer_fields(shape.width, shape.layers), **marks, "vocab_size": codes + SUPPRESSED,
        "text_hidden_size": shape.width, "text_vocab_size": max(ids.values()) + 1, "spk_id": voices,
        "spk_is_dialect": dict.fromkeys(voices, False), "codec_language_id": {}, "code_predictor_config": predictor,
        "model_type": "qwen3_tts_talker",
    }  # fmt: skip
    return {
        "model_type": "qwen3_tts", "talker_config": talker, "tts_model_type": "custom_voice", "tts_model_size": "tiny",
        "tokenizer_type": CODEC_12HZ, "im_start_token_id": ids[MARKS[0]], "im_end_token_id": ids[MARKS[1]],
        "tts_pad_token_id": ids[MARKS[2]], "tts_bos_token_id": ids[MARKS[3]], "tts_eos_token_id": ids[MARKS[4]],
    }  # fmt: skip
