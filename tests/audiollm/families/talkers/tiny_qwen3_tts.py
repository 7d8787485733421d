"""A small Qwen3-TTS of random weights in its published files; and the published class, where it is at hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from audiollm.families.qwen3_tts.kind import Qwen3TTSKind
from audiollm.families.qwen3_tts.model import Qwen3TTSTalker
from audiollm.families.qwen3_tts.speaker_encoder import SpeakerEncoder
from audiollm.families.talkers.new_talker import write_byte_tokenizer
from audiollm.families.talkers.talker import draw_talker_weights
from audiollm.families.talkers.turns import SpeechPrompt

BOOKS, CODES, SIZE = 4, 16, 48
VOICES = {"ann": 37, "bob": 38}
ORACLE = Path(os.environ.get("AUDIOLLM_QWEN_TTS", Path(__file__).parents[4] / ".oracles" / "qwen-tts-hf"))
"""The packages `qwen-tts-hf` and the transformers that it runs under, where `make -C benchmarks oracles` puts them."""
SCRIPT = str(Path(__file__).parents[3] / "oracles" / "published_qwen3_tts.py")
MARKS = ("<|im_start|>", "<|im_end|>", "<tts_pad>", "<tts_bos>", "<tts_eos>", "assistant", "user")


def tiny_config(small_predictor: bool = True, kind: str = "base") -> dict[str, Any]:
    """config.json of a small model."""
    rotary = {"interleaved": True, "mrope_section": [2, 1, 1], "rope_type": "default", "type": "default"}
    sizes = {
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "rope_theta": 1_000_000, "attention_bias": False, "num_code_groups": BOOKS,
    }  # fmt: skip
    predictor = {
        **sizes, "vocab_size": CODES, "hidden_size": 32 if small_predictor else SIZE, "intermediate_size": 40,
        "rope_scaling": None, "model_type": "qwen3_tts_talker_code_predictor",
    }  # fmt: skip
    talker = {
        **sizes, "vocab_size": CODES + 1024, "hidden_size": SIZE, "intermediate_size": 64, "rope_scaling": rotary,
        "text_hidden_size": 40, "text_vocab_size": 270, "codec_eos_token_id": 30, "codec_think_id": 31,
        "codec_nothink_id": 32, "codec_think_bos_id": 33, "codec_think_eos_id": 34, "codec_pad_id": 35,
        "codec_bos_id": 36, "spk_id": {} if kind == "base" else VOICES,
        "spk_is_dialect": {} if kind == "base" else {"ann": False, "bob": "sichuan_dialect"},
        "codec_language_id": {"english": 40, "chinese": 41, "sichuan_dialect": 42}, "code_predictor_config": predictor,
        "model_type": "qwen3_tts_talker",
    }  # fmt: skip
    speaker = {
        "mel_dim": 128, "enc_dim": SIZE, "enc_channels": [16, 16, 16, 16, 48], "enc_kernel_sizes": [5, 3, 3, 3, 1],
        "enc_dilations": [1, 2, 3, 4, 1], "enc_attention_channels": 8, "enc_res2net_scale": 4, "enc_se_channels": 8,
        "sample_rate": 24_000,
    }  # fmt: skip
    return {
        "model_type": "qwen3_tts", "talker_config": talker, "speaker_encoder_config": speaker, "tts_model_type": kind,
        "tts_model_size": "1b7", "tokenizer_type": "qwen3_tts_tokenizer_12hz", "im_start_token_id": 256,
        "im_end_token_id": 257, "tts_pad_token_id": 258, "tts_bos_token_id": 259, "tts_eos_token_id": 260,
    }  # fmt: skip


def write_tiny_qwen3_tts(
    folder: Path, small_predictor: bool = True, kind: str = "base", spread: float = 0.2, seed: int = 0
) -> Path:
    """Write a model with a tokenizer that reads bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config(small_predictor, kind)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.9, "top_k": 50}))
    torch.manual_seed(seed)
    model = Qwen3TTSTalker(config["talker_config"], "config.json")
    draw_talker_weights(model, spread)
    weights = dict(model.state_dict())
    if kind == "base":
        encoder = SpeakerEncoder(config["speaker_encoder_config"])
        weights |= {f"speaker_encoder.{name}": value for name, value in encoder.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_byte_tokenizer(folder, MARKS, {"eos_token": MARKS[1]})
    return folder


def ask_published(
    folder: Path,
    prompts: Sequence[SpeechPrompt],
    frames: int,
    place: Path,
    samples_N: Tensor | None = None,
    penalty: float = 1.05,
) -> list[dict[str, Tensor]]:
    """What the published class gives its talker for prompts, and the codes that it says, greedily.

    Of samples it gives the speaker encoder's vector, and nothing else. It runs in a process and an environment of its
    own; the test is skipped where that is not at hand.
    """
    if not ORACLE.is_dir():
        pytest.skip(f"no {ORACLE}: `make -C benchmarks oracles` fetches the published package")
    kind, jobs, tensors = Qwen3TTSKind(folder), list[dict[str, Any]](), {"none": torch.zeros(1)}
    marked = kind.text.marked_ids
    for number, prompt in enumerate(prompts):
        reference = prompt.before[0] if prompt.before else None
        jobs.append(
            {
                "text": marked(f"<|im_start|>assistant\n{prompt.text}<|im_end|>\n<|im_start|>assistant\n"),
                "instruct": marked(f"<|im_start|>user\n{prompt.instruction}<|im_end|>\n")
                if prompt.instruction
                else None,
                "reference": None
                if reference is None
                else marked(f"<|im_start|>assistant\n{reference.text}<|im_end|>\n"),
                "language": prompt.language, "speaker": prompt.speaker, "form": prompt.form, "frames": frames,
                "penalty": penalty,
            }
        )  # fmt: skip
        if prompt.vector_C is not None:
            tensors[f"{number}.vector"] = prompt.vector_C.clone()
        if reference is not None:
            tensors[f"{number}.codes"] = reference.codes_KT.T.contiguous()
    if samples_N is not None:
        tensors["samples"] = samples_N
    (place / "jobs.json").write_text(json.dumps(jobs))
    save_file(tensors, place / "given.safetensors")
    files = [folder, place / "jobs.json", place / "given.safetensors", place / "out.safetensors"]
    subprocess.run(
        [sys.executable, "-W", "ignore", SCRIPT, *map(str, files)], check=True, capture_output=True,
        env={**os.environ, "PYTHONPATH": str(ORACLE)},
    )  # fmt: skip
    results = load_file(files[3])
    if samples_N is not None:
        return [{"vector": results["vector"]}]
    return [
        {name.partition(".")[2]: value for name, value in results.items() if name.startswith(f"{number}.")}
        for number in range(len(jobs))
    ]
