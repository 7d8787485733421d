"""Small shards, a vocabulary and settings for the tests of the stage `train`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from audiollm.data.chat.template import Template
from audiollm.data.records.sample import PHRASE_WORDS, AudioPart, Message, RecordedPhrase, Sample, TextPart
from audiollm.data.records.shards import ShardWriter
from audiollm.data.text.tokenizer import train_text_tokenizer
from audiollm.models.decoder import DualFFNConfig
from audiollm.models.dual_ffn import DualFFN
from audiollm.recipe.ranks import ALONE, Ranks
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import Recipe
from audiollm.supervised.run import train_model
from audiollm.train.supervised_settings import TrainConfig

SAMPLE = Sample(
    id="a",
    messages=[
        Message(role="system", content=[TextPart(text="Generate audio.\n\nSpeaker: theo")]),
        Message(role="user", content=[TextPart(text="seven")]),
        Message(role="assistant", content=[AudioPart(path="a.wav")]),
    ],
    task="tts",
    metadata={"split": "train"},
)
WEIGHTS = {"text": 0.1, "audio": 1.0}
SMALL = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "intermediate_size": 64}


def small_template() -> Template:
    return Template(train_text_tokenizer(["system user assistant Speaker: theo seven"] * 3, 300), 4, 32)


def model_of(template: Template) -> DualFFN:
    config = DualFFNConfig(
        template.tokenizer.get_vocab_size(), num_codebooks=4, codebook_size=34, hidden_size=32, num_layers=1,
        num_heads=2, num_kv_heads=2, head_dim=16, intermediate_size=64,
    )  # fmt: skip
    return DualFFN(config)


def settings_of(values: dict[str, Any]) -> TrainConfig:
    return TrainConfig.model_validate(values, context={"artifacts": {"shards"}, "inputs": []})


def with_phrases(sample: Sample) -> Sample:
    """The sample said in two phrases of one word."""
    phrases = [RecordedPhrase(text="seven", end_s=1.0), RecordedPhrase(text="theo", end_s=2.5)]
    messages = [*sample.messages[:-1], sample.messages[-1].model_copy(update={"phrases": phrases})]
    metadata = {**sample.metadata, PHRASE_WORDS: 1}
    return sample.model_copy(update={"messages": messages, "metadata": metadata})


def write_shards(
    folder: Path,
    samples: int,
    frames: int = 3,
    change: Callable[[Sample], Sample] = lambda s: s,
    **codec: str,
) -> Path:
    """Sample i is i of every code; the last one is held out."""
    writer = ShardWriter(folder, samples_per_shard=5)
    for i in range(samples):
        split = {"split": "test" if i == samples - 1 else "train", "speaker": f"voice{i % 2}"}
        sample = SAMPLE.model_copy(update={"id": f"s{i}", "metadata": split})
        writer.write(i, change(sample), [[torch.full((4, frames + i), i).numpy()]])
    writer.close({"codec": {"num_codebooks": 4, "codebook_size": 32, **codec}})
    return folder


def run_stage(folder: Path, samples: Any, ranks: Ranks = ALONE, **values: Any) -> dict[str, Any]:
    config = settings_of({"samples": samples, "steps": 12, "batch_size": 3, "precision": "fp32", **values})
    folder.mkdir(parents=True, exist_ok=True)
    recipe = Recipe("test", Path("test.yaml"), "tiny", 0, folder, (), {})
    return train_model(config, Context(folder, recipe, Console(quiet=True), {}, ranks))
