"""What the benchmarks of published speech models share: random weights in published files, and the published classes.

Two families of one size (`BENCH_SIZE`, unless a script gives another): a backbone of width 256 and 6 layers over rows,
a decoder of width 128 and 3 layers over the 16 codebooks of 2,048 of a frame. transformers has the class of CSM. That
of Qwen3-TTS is in the package `qwen-tts-hf` and runs under another version of transformers: `in_its_environment` starts
this program anew for it, with those packages in front (`make -C benchmarks oracles` fetches them); both sides then run
in that one process.

Shapes: B samples of a batch, S rows of the longest, K codebooks, F frames, T frames of a clip, C hidden size.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from audiollm.families.family import PolicySettings
from audiollm.families.registry import open_model_folder
from audiollm.families.talkers.policy import TalkerPolicy
from audiollm.families.talkers.rows import NONE, SpeechRows
from audiollm.families.talkers.talker import Talker
from audiollm.supervised.guards.trials import spoken_prompt

FAMILIES = ("csm", "qwen3_tts")


@dataclass(frozen=True)
class ModelSize:
    """Size of a model of either family."""

    books: int
    codes: int
    width: int
    layers: int
    depth_width: int
    depth_layers: int
    spread: float = 0.02
    """Standard deviation of random weights, as of both published classes."""


BENCH_SIZE = ModelSize(16, 2048, 256, 6, 128, 3)
MARKS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tts_pad>",
    "<tts_bos>",
    "<tts_eos>",
    "assistant",
    "user",
)
"""Tokens beside the bytes: marks, and words that both published tokenizers have as one."""
TEXT_ENTRIES = 256 + len(MARKS)
CHARACTERS_PER_FRAME = 0.3
"""Of texts: read speech has 4 tokens a second, of which each is a character here, and 12.5 frames."""
ORACLE = Path(os.environ.get("AUDIOLLM_QWEN_TTS", Path(__file__).parents[1] / ".oracles" / "qwen-tts-hf"))


def in_its_environment(script: str, family: str, arguments: Sequence[str]) -> None:
    """Run a benchmark for one family in a process, with the packages that its published class needs.

    Raises:
        SystemExit: it failed, or the packages are missing.
    """
    environment = dict(os.environ)
    if family == "qwen3_tts":
        if not ORACLE.is_dir():
            raise SystemExit(f"no {ORACLE}: `make -C benchmarks oracles` fetches the published package")
        environment["PYTHONPATH"] = os.pathsep.join([str(ORACLE), environment.get("PYTHONPATH", "")]).rstrip(
            os.pathsep
        )
    command = [sys.executable, "-W", "ignore", script, "--family", family, *arguments]
    if status := subprocess.run(command, env=environment).returncode:
        raise SystemExit(status)


def write_model(family: str, folder: Path, size: ModelSize = BENCH_SIZE, seed: int = 0) -> Path:
    """Write a model of random weights in its published files, without a codec.

    The end, and what is no code, never has the largest logit: greedy speech goes on to its limit.
    """
    folder.mkdir(parents=True)
    _write_tokenizer(folder)
    torch.manual_seed(seed)
    model = _new_csm(folder, size) if family == "csm" else _new_qwen3_tts(folder, size)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def load_policy(folder: Path) -> TalkerPolicy:
    """Our policy that trains all weights."""
    policy = open_model_folder(folder).policy(PolicySettings())
    assert isinstance(policy, TalkerPolicy)
    return policy


def import_class(family: str) -> tuple[Any, Any]:
    """The published class and that of its config."""
    if family == "csm":
        from transformers import CsmConfig, CsmForConditionalGeneration

        return CsmForConditionalGeneration, CsmConfig
    sys.modules.setdefault("sox", types.ModuleType("sox"))  # of a tokenizer that is not used here
    from qwen_tts.core.models.configuration_qwen3_tts import Qwen3TTSConfig  # type: ignore[import-not-found]
    from qwen_tts.core.models.modeling_qwen3_tts import (  # type: ignore[import-not-found]
        Qwen3TTSForConditionalGeneration,
    )

    return Qwen3TTSForConditionalGeneration, Qwen3TTSConfig


def published_class(family: str, folder: Path, model: Talker | None = None) -> Any:
    """The published class, with the tensors of ours, or with those of the folder where there are none."""
    model_class, config_class = import_class(family)
    peer = model_class(config_class(**json.loads((folder / "config.json").read_text())))
    if model is None:
        unfilled = peer.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    else:
        unfilled = peer.load_state_dict(model.state_dict(keep_vars=True), strict=False, assign=True)
    besides = ("codec_model.", "speaker_encoder.")
    if unfilled.unexpected_keys or not all(name.startswith(besides) for name in unfilled.missing_keys):
        raise SystemExit(f"{family}: the weights are not those of the published class: {unfilled}")
    return peer


def random_samples(policy: TalkerPolicy, frames: Sequence[int], seed: int = 0) -> list[SpeechRows]:
    """A text and random codes for each number of frames, as the policy lays them out."""
    generator = torch.Generator().manual_seed(seed)
    letters = "abcdefghijklmnopqrstuvwxyz "
    samples = []
    for count in frames:
        length = max(2, round(CHARACTERS_PER_FRAME * count))
        drawn = torch.randint(len(letters), (length,), generator=generator).tolist()
        shape = policy.num_codebooks, count
        codes_KT = torch.randint(1, policy.codebook_size, shape, generator=generator)
        samples += policy.encode(spoken_prompt("".join(letters[place] for place in drawn), codes_KT))
    return samples


def padded_rows(samples: Sequence[SpeechRows]) -> dict[str, Tensor]:
    """What a padding collator gives: words, codes and a mask `[B, S]`, and the codes `[B, S, K]` that rows predict."""
    rows = max(sample.num_rows for sample in samples) + 1  # a row for the end, behind the last frame
    books = 1 + samples[0].rest_LJ.shape[1]
    text_BS = torch.full((len(samples), rows), NONE)
    codes_BSK = torch.full((len(samples), rows, books), NONE)
    labels_BSK, mask_BS = torch.full_like(codes_BSK, -100), torch.zeros_like(text_BS)
    for number, sample in enumerate(samples):
        filled = slice(0, sample.num_rows)
        text_BS[number, filled], mask_BS[number, : sample.num_rows + 1] = sample.text_L, 1
        codes_BSK[number, filled] = torch.cat([sample.first_L[:, None], sample.rest_LJ], dim=1)
        predicted = torch.cat([sample.target_F[:, None], sample.target_FJ], dim=1)
        labels_BSK[number, sample.source_F + 1] = predicted.masked_fill(predicted == NONE, -100)
    return {"text": text_BS, "codes": codes_BSK, "mask": mask_BS, "labels": labels_BSK}


def embed_csm(peer: Any, rows: dict[str, Tensor]) -> Tensor:
    """Rows `[B, S, C]` by the tables of transformers' class."""
    text_BS, codes_BSK = rows["text"], rows["codes"]
    is_frame_BS = codes_BSK[..., 0] != NONE
    embedded_BSC = peer.embed_text_tokens(text_BS.clamp_min(0))
    frames_FC = peer.backbone_model.embed_tokens(codes_BSK[is_frame_BS][None])[0]
    return embedded_BSC.masked_scatter(is_frame_BS[..., None], frames_FC)


def embed_qwen3_tts(peer: Any, rows: dict[str, Tensor], projects_text: bool = True) -> Tensor:
    """Rows `[B, S, C]` by the tables of the published class: words and codes are added.

    Args:
        projects_text: words go through the class's projection; without it, the sizes must be the same.
    """
    talker, text_BS, codes_BSK = peer.talker, rows["text"], rows["codes"]
    words_BSC = talker.get_text_embeddings()(text_BS.clamp_min(0))
    if projects_text:
        words_BSC = talker.text_projection(words_BSC)
    first_BS = codes_BSK[..., 0]
    marks_BSC = talker.get_input_embeddings()(first_BS.clamp_min(0))
    embedded_BSC = words_BSC * (text_BS != NONE)[..., None] + marks_BSC * (first_BS != NONE)[..., None]
    is_frame_BS = codes_BSK[..., 1] != NONE
    codes_FK, rest_FC = codes_BSK[is_frame_BS], torch.zeros(())
    for place, table in enumerate(talker.code_predictor.get_input_embeddings(), 1):
        rest_FC = rest_FC + table(codes_FK[:, place])
    return embedded_BSC + torch.zeros_like(embedded_BSC).masked_scatter(is_frame_BS[..., None], rest_FC)


def _write_tokenizer(folder: Path) -> None:
    """A tokenizer whose tokens are bytes, with marks behind them."""
    alphabet = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": MARKS[0], "eos_token": MARKS[1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


def _sizes(width: int, layers: int) -> dict[str, Any]:
    heads = width // 32
    return {
        "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads, "head_dim": 32,
        "num_key_value_heads": max(1, heads // 2), "intermediate_size": 3 * width, "hidden_act": "silu",
    }  # fmt: skip


def _new_csm(folder: Path, size: ModelSize) -> Talker:
    from transformers import CsmConfig, MimiConfig

    from audiollm.families.csm.kind import CsmKind

    rope = {
        "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 32.0, "high_freq_factor": 0.0078125,
        "low_freq_factor": 0.001953125, "original_max_position_embeddings": 1024,
    }  # fmt: skip
    shared = {"num_codebooks": size.books, "vocab_size": size.codes + 3, "rope_parameters": rope}
    codec = MimiConfig(
        hidden_size=32, num_filters=4, codebook_size=size.codes, codebook_dim=16, num_quantizers=size.books,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=16, intermediate_size=32,
        vector_quantization_hidden_dimension=16, upsample_groups=32,
    )  # fmt: skip
    config = CsmConfig(
        **_sizes(size.width, size.layers), **shared, text_vocab_size=TEXT_ENTRIES, codebook_pad_token_id=size.codes + 2,
        codebook_eos_token_id=0, audio_token_id=TEXT_ENTRIES - 1, audio_eos_token_id=TEXT_ENTRIES - 2, bos_token_id=256,
        pad_token_id=TEXT_ENTRIES - 1, max_position_embeddings=4096, codec_config=codec.to_dict(),
        depth_decoder_config={
            **_sizes(size.depth_width, size.depth_layers), **shared, "backbone_hidden_size": size.width,
            "max_position_embeddings": size.books + 1,
        },
    )  # fmt: skip
    config.architectures = ["CsmForConditionalGeneration"]
    config.save_pretrained(folder)
    model = CsmKind(folder).new_talker()
    _draw_weights(model, size.spread)
    with torch.no_grad():
        for logits in (model.lm_head.weight.T, *model.depth_decoder.codebooks_head.weight):
            logits[:, [0, *range(size.codes, size.codes + 3)]] = 0.0
    return model


def _new_qwen3_tts(folder: Path, size: ModelSize) -> Talker:
    from audiollm.families.qwen3_tts.kind import Qwen3TTSKind

    shared = {
        "rms_norm_eps": 1e-6, "rope_theta": 1_000_000, "attention_bias": False, "num_code_groups": size.books,
        "max_position_embeddings": 4096,
    }  # fmt: skip
    rotary = {"interleaved": True, "mrope_section": [6, 5, 5], "rope_type": "default", "type": "default"}
    marks = ("eos_token", "think", "nothink", "think_bos", "think_eos", "pad", "bos")
    talker = {
        **_sizes(size.width, size.layers), **shared, "vocab_size": size.codes + 1024, "rope_scaling": rotary,
        "text_hidden_size": size.width, "text_vocab_size": TEXT_ENTRIES,
        **{f"codec_{name}_id": size.codes + 100 + place for place, name in enumerate(marks)},
        "codec_language_id": {"english": size.codes + 2}, "spk_id": {}, "spk_is_dialect": {},
        "code_predictor_config": {
            **_sizes(size.depth_width, size.depth_layers), **shared, "vocab_size": size.codes, "rope_scaling": None,
            "model_type": "qwen3_tts_talker_code_predictor",
        },
        "model_type": "qwen3_tts_talker",
    }  # fmt: skip
    config = {
        "model_type": "qwen3_tts", "talker_config": talker, "tts_model_type": "voice_design", "tts_model_size": "0b6",
        "tokenizer_type": "qwen3_tts_tokenizer_12hz", "im_start_token_id": 258, "im_end_token_id": 259,
        "tts_pad_token_id": 260, "tts_bos_token_id": 261, "tts_eos_token_id": 262,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    model = Qwen3TTSKind(folder).new_talker()
    _draw_weights(model, size.spread)
    with torch.no_grad():
        model.talker.codec_head.weight[talker["codec_eos_token_id"]] = 0.0
    return model


@torch.no_grad()
def _draw_weights(model: Talker, spread: float) -> None:
    """As both published classes draw them; tables wider, so that what has been said matters."""
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=10 * spread if "embed" in name else spread)
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
