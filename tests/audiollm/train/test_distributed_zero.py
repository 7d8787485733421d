"""DeepSpeed ZeRO 2 and 3, and the project's own decoder under every strategy: two ranks are one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from audiollm.data.chat.delay import IGNORE
from audiollm.data.chat.template import Kind, Template, TokenStream
from audiollm.data.packing import PackedBatch, pack
from audiollm.data.records.opening import open_source
from audiollm.data.text.tokenizer import load_text_tokenizer
from audiollm.errors import StageError
from audiollm.families.dual_ffn.losses import TokenLosses
from audiollm.files.atomic import read_json, read_jsonl, write_json
from audiollm.files.set_aside import SetAside
from audiollm.models.decoder import DualFFNConfig
from audiollm.models.dual_ffn import DualFFN
from audiollm.recipe.ranks import ALONE, Ranks
from audiollm.supervised.corpus.batches import Batching, evaluation_packs
from audiollm.supervised.corpus.survey import load_survey
from audiollm.supervised.sft import SFTTask
from audiollm.train.loop.checkpoint import trained_weights
from audiollm.train.loop.loop import Update, step_generator
from tests.audiollm.supervised.train_samples import SMALL, run_stage, write_shards
from tests.audiollm.train.two_ranks import (
    SAMPLES,
    STEPS,
    Mixed,
    TwoBranches,
    assert_same,
    losses,
    on_two_ranks,
    run,
    run_killed,
)


def zero_work(folder: Path, ranks: Ranks) -> None:
    for stage in ("zero2", "zero3"):
        run(folder / stage, Mixed(torch.float32), ranks, strategy=stage, ema_decay=0.0)
        run_killed(folder / f"{stage}-moved", Mixed(torch.float32, 2), ranks, strategy=stage, ema_decay=0.0)
        run(
            folder / f"{stage}-bf16",
            Mixed(torch.float32),
            ranks,
            strategy=stage,
            ema_decay=0.0,
            precision="bf16",
        )
        wrong: dict[str, Any] = {"strategy": stage, "ema_decay": 0.0}
        with pytest.raises(ValidationError, match="cannot average weights"):
            run(folder / "refused", Mixed(torch.float32), ranks, **{**wrong, "ema_decay": 0.9})
        with pytest.raises(StageError, match="give steps"):
            run(folder / "refused", Mixed(torch.float32), ranks, **wrong, minutes=1.0, steps=None)


def zero_again(folder: Path, ranks: Ranks) -> None:
    for stage in ("zero2", "zero3"):
        run(folder / f"{stage}-moved", Mixed(torch.float32), ranks, strategy=stage, ema_decay=0.0)


@pytest.mark.slow
def test_zero_is_one_process_too_and_goes_on_elsewhere(tmp_path: Path) -> None:
    """Slow: DeepSpeed compiles an extension when it is first used."""
    run(tmp_path / "one", Mixed(torch.float32), ema_decay=0.0)
    on_two_ranks(zero_work, tmp_path)
    for stage in ("zero2", "zero3"):
        run_killed(tmp_path / f"{stage}-moved", Mixed(torch.float32, 4), ema_decay=0.0)
    on_two_ranks(zero_again, tmp_path)
    for name in ("zero2", "zero3", "zero2-moved", "zero3-moved"):
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "one"), abs=1e-5), name
        for part in ("modules", "optimizers"):
            assert_same(tmp_path / name, tmp_path / "one", part, 1e-5)
    for name in ("zero2-bf16", "zero3-bf16"):
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "one"), rel=0.1), name


class Reached(TwoBranches):
    """A branch without rows is left out, and has no gradient at all."""

    def forward(self, rows: Tensor, is_audio: Tensor) -> Tensor:
        hidden = self.embed(rows)
        for block in self.blocks:
            hidden = block(hidden)
        out = torch.zeros_like(rows[:, 0])
        for kind, branch in ((False, self.text), (True, self.audio)):
            if bool((is_audio == kind).any()):
                out[is_audio == kind] = branch(hidden[is_audio == kind])[:, 0].to(out.dtype)
        return out


class InTurns(Mixed):
    """The first pass of a step is text alone, and the second audio alone, on every rank."""

    def __init__(self) -> None:
        super().__init__(torch.float32)
        torch.manual_seed(0)
        self.model = self.wrapped = Reached()

    def batch(self, step: int, generator: torch.Generator, ranks: Ranks = ALONE) -> list[Tensor]:
        self.ranks = ranks
        rows = torch.randn(SAMPLES, 7, generator=step_generator(0, step, "rows"), dtype=torch.float64)
        is_audio = torch.arange(SAMPLES)[:, None] // (SAMPLES // 2)
        table = torch.cat([rows.to(self.dtype), is_audio], dim=1)[ranks.rank :: ranks.world]
        return list(table.split(len(table) // 2))


def in_turns(folder: Path, ranks: Ranks) -> None:
    for stage in ("zero2", "zero3"):
        run(folder / stage, InTurns(), ranks, strategy=stage, ema_decay=0.0)


def test_what_a_later_pass_reaches_first_has_the_gradient_of_its_own_step(tmp_path: Path) -> None:
    run(tmp_path / "one", InTurns(), ema_decay=0.0)
    on_two_ranks(in_turns, tmp_path)
    for name in ("zero2", "zero3"):
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "one"), abs=1e-5), name
        assert_same(tmp_path / name, tmp_path / "one", "modules", 1e-5)


# ------------------------------------------------------------------------------------------ the decoder


class Answering(TokenLosses):
    """The losses, or the logits at every row: through the root, where a strategy gathers what it needs."""

    def forward(self, batch: PackedBatch, logits: bool = False) -> dict[str, Tensor]:
        if not logits:
            return super().forward(batch)
        hidden_SC = self.model(batch)
        return {"text": self.model.text_logits(hidden_SC), "audio": self.model.audio_logits(hidden_SC)}


class Spoken(Mixed):
    """The project's own decoder on packs: the first rank's hold text alone, the second's audio alone."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.model = self.wrapped = Answering(DualFFN(SHAPE)).to(dtype)
        self.model._no_split_modules = ("DualFFNLayer",)  # type: ignore[assignment]

    def batch(self, step: int, generator: torch.Generator, ranks: Ranks = ALONE) -> list[PackedBatch]:
        self.ranks = ranks
        dice = step_generator(0, step, "streams")
        streams = [stream_of(Kind.AUDIO_OUT if n % 2 else Kind.TEXT, 9 + n, dice) for n in range(4)]
        return [pack([stream]) for stream in streams[ranks.rank :: ranks.world]]

    def updates(self, batch: list[PackedBatch], step: int, steps: int) -> Iterator[Update]:
        own = torch.tensor([[pack.counts[key] for key in ("text", "audio")] for pack in batch]).sum(dim=0)
        text, audio = self.ranks.sum(own).tolist()
        losses = (self.wrapped(pack) for pack in batch)
        yield Update((each["text"] / text + each["audio"] / audio for each in losses), {}, losses=len(batch))

    def evaluate(self, step: int) -> Mapping[str, float]:
        """Logits after one sample of each kind."""
        dice = step_generator(0, 0, "held out")
        made = self.wrapped(
            pack([stream_of(kind, 5, dice) for kind in (Kind.TEXT, Kind.AUDIO_OUT)]), logits=True
        )
        return {f"{kind}/{i}": v for kind, t in made.items() for i, v in enumerate(t.flatten().tolist())}


SHAPE = DualFFNConfig(
    vocab_size=23, num_codebooks=2, codebook_size=9, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=2,
    head_dim=8, intermediate_size=32,
)  # fmt: skip


def stream_of(kind: Kind, length: int, dice: torch.Generator) -> TokenStream:
    """Random tokens of one kind, every one a target."""
    ids, codes = torch.randint(23, (length,), generator=dice), torch.randint(9, (length, 2), generator=dice)
    is_text = kind == Kind.TEXT
    return TokenStream(
        text_ids_S=ids if is_text else torch.zeros_like(ids),
        codes_SK=torch.zeros_like(codes) if is_text else codes,
        kinds_S=torch.full((length,), int(kind)),
        text_targets_S=ids if is_text else torch.full_like(ids, IGNORE),
        audio_targets_SK=torch.full_like(codes, IGNORE) if is_text else codes,
    )


def decoder_work(folder: Path, ranks: Ranks) -> None:
    for name in ("ddp", "fsdp2"):
        run_and_note(folder / name, Spoken(torch.float64), ranks, strategy=name)
    for name in ("zero2", "zero3"):
        run_and_note(folder / name, Spoken(torch.float32), ranks, strategy=name)
    for name in ("fsdp2", "zero2", "zero3"):
        stage = folder / f"stage-{name}"
        run_stage(stage, str(folder / "shards"), ranks, strategy=name, ema_decay=0, shape=SMALL)


def run_and_note(folder: Path, task: Spoken, ranks: Ranks = ALONE, **changes: object) -> None:
    """Write the wrapped modules' outputs at the end to `logits.json`: the log rounds."""
    figures = run(folder, task, ranks, ema_decay=0.0, **changes)
    if ranks.first:
        write_json(folder / "logits.json", {key: value for key, value in figures.items() if "/" in key})


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("decoders")
    run_and_note(folder / "one", Spoken(torch.float64))
    write_shards(folder / "shards", 9)
    on_two_ranks(decoder_work, folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp2", "zero2", "zero3"])
def test_the_decoder_trains_on_text_alone_and_audio_alone(decoders: Path, name: str) -> None:
    """Slow: DeepSpeed compiles an extension when it is first used."""
    assert losses(decoders / name) == pytest.approx(losses(decoders / "one"), abs=1e-5)
    assert len(losses(decoders / name)) == STEPS
    if (
        "zero" not in name
    ):  # these are in float32, where Adam makes much of gradients that are next to nothing
        assert_same(decoders / name, decoders / "one", "modules", 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp2", "zero2", "zero3"])
def test_one_process_gives_the_logits_that_the_ranks_gave(decoders: Path, name: str) -> None:
    """Slow, as above. What the parts make together, read as a whole, loaded strictly; against one process's run too."""
    alone = Spoken(torch.float32 if "zero" in name else torch.float64)
    alone.model.load_state_dict(trained_weights(decoders / name, "model"))
    with torch.no_grad():
        found = alone.evaluate(0)
    atol = 1e-6 if "zero" in name else 1e-9
    assert len(found) == 2 * 5 * (23 + 2 * 9)
    assert found == pytest.approx(read_json(decoders / name / "logits.json"), rel=0, abs=atol)
    assert found == pytest.approx(read_json(decoders / "one" / "logits.json"), rel=0, abs=10 * atol)
    assert max(found.values()) - min(found.values()) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp2", "zero2", "zero3"])
def test_the_stage_in_parts_ends_with_one_model(decoders: Path, tmp_path: Path, name: str) -> None:
    """Slow, as above. Its folder, loaded in this process, has the held-out losses that the two ranks measured."""
    stage, source = decoders / f"stage-{name}", open_source(decoders / "shards")
    template = Template(load_text_tokenizer(stage / "model"), 4, 32)
    aside, found = SetAside(tmp_path / "set_aside.jsonl", "train"), load_survey(stage / "survey.safetensors")
    packs = evaluation_packs(
        [source], found, template, Batching(batch_size=12, max_tokens=8192, max_length=8192), aside
    )
    task = SFTTask(TokenLosses(DualFFN.from_pretrained(stage)), [], packs, {"text": 0.1, "audio": 1.0}, aside)
    logged = {f"evaluation/{key}": value for key, value in task.evaluate(0).items()}
    rows = [row for row in read_jsonl(stage / "metrics.jsonl") if "evaluation/audio_loss" in row]
    assert rows[-1] == {"step": 11, **{key: pytest.approx(value, rel=1e-5) for key, value in logged.items()}}
