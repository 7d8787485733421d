"""The stage `new_talker`: a small talker of a published class with random weights, for a codec of one's own.

It has layout, prompts and objective of the published model, reads texts byte by byte, and learns from nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from pydantic import Field, model_validator

from audiollm.errors import ConfigError, StageError
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import InputPath, Stage, StageConfig, StagePlan

HEAD_DIM = 32
"""Size of a head; hidden sizes are multiples of it."""
WITHOUT_DEPTH = ("higgs_multimodal_qwen3",)
"""Models without a decoder over the codebooks of a frame."""


class NewTalkerConfig(StageConfig):
    """Settings of the stage `new_talker`."""

    model_type: Literal["csm", "qwen3_tts", "higgs_multimodal_qwen3"]
    """Whose layout: that of CSM, of Qwen3-TTS, or of Higgs Audio v3 TTS."""
    samples: InputPath
    """Shards of spoken samples: their codec's codebooks, and the names of their speakers."""
    width: int = Field(192, ge=32, multiple_of=HEAD_DIM)
    """Hidden size of the decoder over rows."""
    layers: int = Field(6, ge=1)
    """Its layers."""
    depth_width: int = Field(128, ge=32, multiple_of=HEAD_DIM)
    """Hidden size of the decoder over the codebooks of a frame; Higgs Audio v3 TTS has none."""
    depth_layers: int = Field(3, ge=1)
    """Its layers."""
    seed: int = 0
    """Seed of the random weights."""

    @model_validator(mode="after")
    def _check_depth(self) -> NewTalkerConfig:
        if self.model_type in WITHOUT_DEPTH:
            for name in ("depth_width", "depth_layers"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"{name}: {self.model_type} has no decoder over a frame; leave it out")
        return self


@dataclass(frozen=True)
class TalkerShape:
    """The sizes of a new talker."""

    num_codebooks: int
    codebook_size: int
    width: int
    layers: int
    depth_width: int
    depth_layers: int
    speakers: Sequence[str] = ()
    """Names of voices, for models that give each a row."""
    seed: int = 0


@runtime_checkable
class NewTalkerFamily(Protocol):
    """A family that writes small models with random weights."""

    def write_new(self, folder: Path, shape: TalkerShape) -> int:
        """Write config.json, tokenizer and weights in the published layout; return the number of parameters."""


def write_byte_tokenizer(folder: Path, marks: Sequence[str], config: Mapping[str, str]) -> dict[str, int]:
    """Write a tokenizer whose tokens are bytes, with marks behind them; return the ids of the marks.

    Args:
        config: of `tokenizer_config.json`, beside the tokenizer's class.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    return {mark: int(tokenizer.token_to_id(mark) or 0) for mark in marks}


def layer_fields(width: int, layers: int) -> dict[str, Any]:
    """The fields of a decoder of this size as transformers names them."""
    return {
        "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": width // HEAD_DIM,
        "num_key_value_heads": width // HEAD_DIM, "head_dim": HEAD_DIM, "intermediate_size": 3 * width,
        "hidden_act": "silu", "attention_bias": False,
    }  # fmt: skip


def run_new_talker(config: NewTalkerConfig, context: Context) -> dict[str, Any]:
    """Write `model`.

    Raises:
        StageError: the samples have no codes.
    """
    from audiollm.data.records.opening import open_source
    from audiollm.families.registry import family_of
    from audiollm.families.talkers.turns import speakers_of

    source = open_source(str(config.samples))
    codec = getattr(source, "facts", {}).get("codec") or {}
    if not codec.get("num_codebooks"):
        raise StageError(f"new_talker: {config.samples} has no codes", "give the shards of `tokenize`", 2)
    speakers = speakers_of([source[number].sample for number in range(len(source))])
    shape = TalkerShape(
        int(codec["num_codebooks"]), int(codec["codebook_size"]), config.width, config.layers, config.depth_width,
        config.depth_layers, speakers, config.seed,
    )  # fmt: skip
    family = family_of(config.model_type, Path("new_talker.model_type"))
    if not isinstance(family, NewTalkerFamily):
        raise ConfigError(
            f"model_type: {config.model_type} has no small form",
            "",
            "take csm, qwen3_tts or higgs_multimodal_qwen3",
        )
    parameters = family.write_new(context.folder / "model", shape)
    context.say(f"{parameters:,} parameters, {len(speakers)} voices")
    return {"parameters": parameters, "voices": len(speakers)}


def _plan_talker(config: NewTalkerConfig, plans: Mapping[str, StagePlan]) -> StagePlan:
    layer = 4 + 9  # squares of the width: attention, and a feed-forward of three times the width
    parameters = layer * config.layers * config.width**2
    if config.model_type not in WITHOUT_DEPTH:
        parameters += layer * config.depth_layers * config.depth_width**2
    parameters += 2 * 8 * 1024 * config.width  # tables and heads of the default codec
    return StagePlan(parameters=parameters, disk_mb=4 * parameters / 1e6, seconds=2.0)


STAGE = Stage(
    kind="new_talker",
    config=NewTalkerConfig,
    run=run_new_talker,
    artifacts={"checkpoint": "model"},
    help="a small talker with random weights in the layout of a published one (CSM, Qwen3-TTS, Higgs v3)",
    plan=_plan_talker,
)
