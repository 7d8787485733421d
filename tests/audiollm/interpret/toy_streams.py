"""Streams of codes in which words are heard as constant codes: a word after its chunk is right, all else is silent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from torch import Tensor

from audiollm.data.chat.template import Template
from audiollm.data.records.part_codes import save_part_codes
from audiollm.data.records.sample import AudioPart, Message, Sample, TextPart, write_samples
from audiollm.data.text.tokenizer import train_text_tokenizer
from audiollm.models.decoder import DualFFNConfig
from audiollm.models.dual_ffn import DualFFN
from audiollm.models.hub import save_pretrained
from audiollm.recipe.runner import run_recipe
from audiollm.recipe.stages import load_recipe

BOOKS, SIZE, CHUNK, WINDOW = 2, 8, 3, 16
WORDS = ("a", "b")


def toy_template() -> Template:
    return Template(train_text_tokenizer(["a b", "system user assistant"] * 3, 270), BOOKS, SIZE)


def save_toy_model(folder: Path, window: int | None = WINDOW) -> Path:
    """A random model that ends its actions often."""
    template = toy_template()
    torch.manual_seed(0)
    config = DualFFNConfig(
        vocab_size=template.tokenizer.get_vocab_size(), num_codebooks=BOOKS, codebook_size=SIZE + 2, hidden_size=32,
        num_layers=2, num_heads=2, num_kv_heads=2, head_dim=16, intermediate_size=64, sliding_window=window,
    )  # fmt: skip
    save_pretrained(DualFFN(config), folder / "model", template.tokenizer)
    return folder


def toy_stream(number: int) -> tuple[Tensor, list[str], list[int]]:
    """Codes `[K, T]`, the reference's actions, and the chunks that hold a word."""
    draw = torch.Generator().manual_seed(number)
    chunks = 6 + int(torch.randint(4, (1,), generator=draw))
    heard = torch.randint(3, (chunks,), generator=draw)
    heard[number % chunks] = 1 + number % 2  # at least one word
    codes_KT = (2 * heard).repeat_interleave(CHUNK)[None].repeat(BOOKS, 1)
    texts = ["" if word == 0 else WORDS[int(word) - 1] for word in heard]
    return codes_KT[:, : -1 - number % 2], texts, [place for place, text in enumerate(texts) if text]


def write_streams(folder: Path, count: int, held_out: int = 2, name: str = "streams.jsonl") -> Path:
    """Write streams, the last ones held out."""
    samples = []
    for number in range(count):
        codes_KT, texts, ends = toy_stream(number)
        save_part_codes(folder / f"{number}.safetensors", codes_KT)
        heard = AudioPart(path=f"{number}.wav", codes=f"{number}.safetensors")
        messages = [
            Message(role="system", content=[TextPart(text="a b")]),
            Message(role="user", content=[heard]),
            Message(role="assistant", content=[TextPart(text=text) for text in texts], chunk_frames=CHUNK),
        ]
        metadata: dict[str, Any] = {"source_ends": ends}
        if number >= count - held_out:
            metadata["split"] = "test"
        samples.append(Sample(id=f"s{number}", messages=messages, task="interpret", metadata=metadata))
    write_samples(folder / name, samples)
    return folder / name


def run_interpreter(folder: Path, name: str = "r", **settings: Any) -> Path:
    """Run the stage `train_interpreter`; its folder."""
    stage = {
        "samples": "streams.jsonl", "start": ".", "steps": 10, "batch_size": 8, "max_answer_tokens": 2,
        "learning_rate": 3e-3, "precision": "fp32", "report_to": [], "evaluations": 1, "checkpoint_seconds": 0,
        **settings,
    }  # fmt: skip
    recipe = {"name": "any", "size": "tiny", "seed": 1, "stages": [{"train_interpreter": stage}]}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    run_recipe(load_recipe(folder / "recipe.yaml", name=name, runs=folder), Console(quiet=True))
    return folder / name / "train_interpreter"
