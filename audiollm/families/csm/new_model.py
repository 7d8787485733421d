"""A small CSM with random weights, in transformers' layout; its codec is another's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from audiollm.families.csm.kind import CsmKind
from audiollm.families.csm.model import TIED, CsmTalker
from audiollm.families.talkers.new_talker import TalkerShape, layer_fields, write_byte_tokenizer
from audiollm.families.talkers.talker import draw_talker_weights
from audiollm.files.atomic import write_json

MARKS = ("<|begin_of_text|>", "<|end_of_text|>", "<|AUDIO|>", "<|audio_eos|>")
MARKED_CODES = 3
"""Entries of a table beyond the codec's codes, as published."""


def write_csm(folder: Path, shape: TalkerShape) -> int:
    """See `NewTalkerFamily.write_new`."""
    ids = write_byte_tokenizer(folder, MARKS, {"bos_token": MARKS[0], "eos_token": MARKS[1]})
    write_json(folder / "config.json", _csm_config(shape, ids))
    torch.manual_seed(shape.seed)
    model = CsmTalker(CsmKind(folder).config, str(folder / "config.json"))
    model.tie_tables()
    draw_talker_weights(model)
    weights = {name: value for name, value in model.state_dict().items() if name not in TIED}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return sum(parameter.numel() for parameter in model.parameters())


def _csm_config(shape: TalkerShape, ids: dict[str, int]) -> dict[str, Any]:
    entries = shape.codebook_size + MARKED_CODES
    decoder = {
        "num_codebooks": shape.num_codebooks, "vocab_size": entries, "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
    }  # fmt: skip
    return {
        "model_type": "csm", "architectures": ["CsmForConditionalGeneration"], **decoder,
        **layer_fields(shape.width, shape.layers), "text_vocab_size": max(ids.values()) + 1,
        "codebook_pad_token_id": entries - 1, "codebook_eos_token_id": 0, "audio_token_id": ids[MARKS[2]],
        "audio_eos_token_id": ids[MARKS[3]], "bos_token_id": ids[MARKS[0]], "pad_token_id": ids[MARKS[2]],
        "tie_codebooks_embeddings": True, "codec_config": {"model_type": "mimi", "codebook_size": shape.codebook_size},
        "depth_decoder_config": {
            **decoder, **layer_fields(shape.depth_width, shape.depth_layers), "backbone_hidden_size": shape.width,
            "model_type": "csm_depth_decoder_model",
        },
    }  # fmt: skip
