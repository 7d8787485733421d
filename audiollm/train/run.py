"""What the stage `train` does: vocabulary, model, loop, saved checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from audiollm.data.sample import TextPart
from audiollm.data.shards import CodedSample, read_index, read_shards
from audiollm.data.template import Template
from audiollm.data.text_tokenizer import FILE_NAME, SPEAKERS_FILE, train_text_tokenizer
from audiollm.files import write_json
from audiollm.models.dual_ffn import DualFFN, DualFFNConfig
from audiollm.recipe import chosen
from audiollm.runner import Context, StageError
from audiollm.train.loop import LoopConfig, train
from audiollm.train.optim import default_device
from audiollm.train.sft import SFTConfig, SFTTask
from audiollm.train.stage import SIZES, TrainConfig


def train_model(config: TrainConfig, context: Context) -> dict[str, Any]:
    """Train on the shards' train split and save to `model`."""
    index = read_index(config.shards)
    samples = list(read_shards(config.shards))
    by_split = {s: [c for c in samples if c.sample.metadata.get("split") == s] for s in ("train", "test")}
    if not by_split["train"]:
        raise StageError(f"{config.shards} has no sample of the train split", "see `compose`", 2)
    tokenizer = train_text_tokenizer(_texts(by_split["train"]), SIZES[config.size].vocab_size)
    codec = index["codec"]
    template = Template(tokenizer, codec["num_codebooks"], codec["codebook_size"])
    torch.manual_seed(config.seed)
    model = DualFFN(_model_config(config, template))
    vectors_KVD = load_file(config.shards / "codebooks.safetensors")["vectors_KVD"]
    start_from_codebooks(model, vectors_KVD)
    device = default_device()
    task = SFTTask(model.to(device), template, by_split["train"], by_split["test"], _task_config(config))
    steps = config.steps_for(len(by_split["train"]) / chosen(config.batch_size))
    loop = LoopConfig(
        seed=config.seed,
        steps=steps,
        minutes=config.minutes,
        cpu_minutes=config.cpu_minutes,
        learning_rate=chosen(config.learning_rate),
        warmup_steps=50 if config.size == "tiny" else 1000,
        weight_decay=0.05,
        ema_decay=0.99,
        precision=config.precision,
        evaluate_every=max(25, (steps or 1000) // 12),
        checkpoint_seconds=config.checkpoint_seconds,
    )
    figures = train(task, loop, context.folder, context, device)
    figures |= {key: round(value, 6) for key, value in task.evaluate(figures["steps"]).items()}
    folder = context.folder / "model"
    model.cpu().save_pretrained(folder)
    tokenizer.save(str(folder / FILE_NAME))
    write_json(
        folder / SPEAKERS_FILE, sorted({str(c.sample.metadata.get("speaker")) for c in by_split["train"]})
    )
    return {**figures, "vocabulary": tokenizer.get_vocab_size(), "sequences": len(by_split["train"])}


@torch.no_grad()
def start_from_codebooks(model: DualFFN, vectors_KVD: Tensor) -> None:
    """Begin the audio embeddings and heads as random projections of the codec's code vectors.

    Codes that sound alike then begin alike, which shortens training; BOS and EOS keep their own random rows.
    """
    config = model.config
    books, size, dim = vectors_KVD.shape
    scale_K = vectors_KVD.flatten(1).std(dim=1).clamp_min(1e-6)
    embed = model.model.embed_audio_tokens.embed_audio_tokens.weight
    for table in (embed, model.audio_lm_head.weight):
        rows_KVC = table.unflatten(0, (books, config.codebook_size))
        for level in range(books):
            projection = torch.randn(dim, config.hidden_size) * 0.02 / dim**0.5
            rows_KVC[level, :size] += vectors_KVD[level] / scale_K[level] @ projection


def _texts(samples: Sequence[CodedSample]) -> list[str]:
    return [
        part.text
        for coded in samples
        for message in coded.sample.messages
        for part in [*message.content, TextPart(text=message.role)]
        if isinstance(part, TextPart)
    ]


def _model_config(config: TrainConfig, template: Template) -> DualFFNConfig:
    model = config.model
    heads = chosen(model.num_heads)
    return DualFFNConfig(
        vocab_size=template.tokenizer.get_vocab_size(),
        num_codebooks=template.num_codebooks,
        codebook_size=template.codebook_size + 2,
        hidden_size=chosen(model.hidden_size),
        num_layers=chosen(model.num_layers),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=chosen(model.hidden_size) // heads,
        intermediate_size=chosen(model.intermediate_size),
        dropout=model.dropout,
    )


def _task_config(config: TrainConfig) -> SFTConfig:
    return SFTConfig(
        batch_size=chosen(config.batch_size),
        text_dropout=config.text_dropout,
        speaker_dropout=config.speaker_dropout,
        corrupt_codes=config.corrupt_codes,
        text_weight=config.text_weight,
        audio_weight=config.audio_weight,
    )
