"""Held-out prompts are spoken at evaluations where no rank holds the whole model: by a copy on the first rank."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from audiollm.audio import load
from audiollm.codec import codec_digest
from audiollm.files.atomic import read_jsonl
from audiollm.recipe.ranks import Ranks
from tests.audiollm.supervised.train_samples import SMALL, run_stage, write_shards
from tests.audiollm.train.two_ranks import on_two_ranks
from tokenizer.native.model import AudioTokenizer, TokenizerConfig


def train_stage(folder: Path, ranks: Ranks, strategy: str, trained: str) -> None:
    settings: dict[str, Any] = {"shape": SMALL}
    if trained == "adapter":
        settings = {"start": str(folder / "start"), "lora": {"rank": 2}}
    run_stage(
        folder / "run", [str(folder / "shards")], ranks, codec=str(folder / "codec"), steps=10, evaluations=2,
        batch_size=4, strategy=strategy, trained=trained, eval_audio_samples=1, ema_decay=0, **settings,
    )  # fmt: skip


@pytest.mark.parametrize(("strategy", "trained"), [("fsdp2", "adapter"), ("zero3", "all")])
def test_prompts_are_spoken_under_every_strategy(tmp_path: Path, strategy: str, trained: str) -> None:
    layers: Any = {"encoder_layers": (1, 1), "decoder_layers": (1, 1)}
    shape = TokenizerConfig(
        num_codebooks=4, codebook_size=32, latent_dim=8, mel_hidden_size=16, hidden_size=16, **layers
    )
    codec = AudioTokenizer(shape)
    codec.save_pretrained(tmp_path / "codec")
    write_shards(tmp_path / "shards", 9, digest=codec_digest(codec))
    if trained == "adapter":
        run_stage(tmp_path / "start", [str(tmp_path / "shards")], shape=SMALL)
    on_two_ranks(partial(train_stage, strategy=strategy, trained=trained), tmp_path)
    listening = tmp_path / "run" / "listening"
    (prompt,) = read_jsonl(listening / "prompts.jsonl")
    spoken = sorted(listening.glob("step-*/*.wav"))
    assert len(spoken) == 2 and {path.stem for path in spoken} == {prompt["name"]}
    assert all(load(path).samples_CN.shape[1] > 0 for path in spoken)
