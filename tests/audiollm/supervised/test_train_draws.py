"""The draws of `train` for each sample (encoding, hidden conditions, corruption), and how its loss is weighed."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from audiollm.data.chat.template import Template
from audiollm.data.packing import PackedBatch
from audiollm.data.records.opening import open_source
from audiollm.data.records.shards import ShardWriter
from audiollm.files.atomic import read_jsonl
from audiollm.files.set_aside import SetAside
from audiollm.supervised import run
from audiollm.supervised.corpus.batches import Batching, BatchMaker
from audiollm.supervised.corpus.survey import survey_sources
from audiollm.train.loop.task import step_generator
from tests.audiollm.supervised.train_samples import SAMPLE, SMALL, run_stage, small_template, write_shards

ENCODINGS = 3
FRAMES = 40
BOS = 32
STEPS = 24


@pytest.fixture(scope="module")
def template() -> Template:
    return small_template()


@pytest.mark.parametrize(("text_weight", "audio_weight"), [(0.5, 2.0), (3.0, 0.25)])
def test_the_loss_is_the_weighted_sum_of_text_and_audio(
    tmp_path: Path, text_weight: float, audio_weight: float
) -> None:
    shards = str(write_shards(tmp_path / "shards", 5))
    weights = {"text_weight": text_weight, "audio_weight": audio_weight}
    run_stage(tmp_path / "run", shards, shape=SMALL, steps=10, **weights)
    rows = [row for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "loss" in row]
    assert rows
    for row in rows:
        expected = text_weight * row["text_loss"] + audio_weight * row["audio_loss"]
        assert row["text_loss"] != pytest.approx(row["audio_loss"], rel=1e-3), "else an exchange is not seen"
        assert row["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("hidden", ["text", "speaker"])
def test_each_dropout_hides_its_own_condition(
    tmp_path: Path, template: Template, monkeypatch: pytest.MonkeyPatch, hidden: str
) -> None:
    """In every batch that the stage makes: the text (seven) and never the speaker (theo), or the other way round."""
    batches: list[PackedBatch] = []

    class Recorded(BatchMaker):
        def __call__(self, step: int) -> Any:
            made = super().__call__(step)
            batches.extend(made.packs)
            return made

    monkeypatch.setattr(run, "BatchMaker", Recorded)
    dropouts = {f"{condition}_dropout": 0.0 for condition in ("text", "speaker")} | {
        f"{hidden}_dropout": 0.999999
    }
    shards = str(write_shards(tmp_path / "shards", 9))
    vocabulary = tmp_path / "vocabulary"
    vocabulary.mkdir()
    template.tokenizer.save(str(vocabulary / "tokenizer.json"))
    run_stage(
        tmp_path / "run", shards, shape=SMALL, text_tokenizer=str(vocabulary), steps=10, workers=0, **dropouts
    )
    shown = [template.tokenizer.decode(batch.text_ids_X.tolist()) for batch in batches]
    assert shown
    for text in shown:
        assert ("seven" in text) == (hidden == "speaker") and ("theo" in text) == (hidden == "text"), text


def test_every_encoding_of_a_sample_is_drawn(tmp_path: Path, template: Template) -> None:
    """One sample a step, so that only the step can tell the draws apart."""
    maker = _maker(tmp_path, template, samples=1, batch_size=1)
    drawn = [_drawn(maker, step) for step in range(STEPS)]
    assert set(chain(*drawn)) == set(range(ENCODINGS))


def test_the_samples_of_a_step_have_random_numbers_of_their_own(tmp_path: Path, template: Template) -> None:
    maker = _maker(tmp_path, template, samples=STEPS, batch_size=STEPS)
    assert set(_drawn(maker, 0)) == set(range(ENCODINGS))
    texts, speakers = _shown(_maker(tmp_path, template, samples=STEPS, batch_size=STEPS, **HALF), template, 0)
    assert 0 < texts < STEPS and 0 < speakers < STEPS
    corrupted = _corrupted(_maker(tmp_path, template, samples=4, batch_size=4, corrupt_codes=0.9), 0)
    assert len(set(corrupted)) == 4


def test_the_steps_have_random_numbers_of_their_own(tmp_path: Path, template: Template) -> None:
    maker = _maker(tmp_path, template, samples=1, batch_size=1, **HALF)
    texts, speakers = zip(*(_shown(maker, template, step) for step in range(STEPS)), strict=True)
    assert 0 < sum(texts) < STEPS and 0 < sum(speakers) < STEPS
    assert list(texts) != list(speakers), "one condition is hidden without the other"
    corrupting = _maker(tmp_path, template, samples=1, batch_size=1, corrupt_codes=0.9)
    corrupted = [_corrupted(corrupting, step)[0] for step in range(4)]
    assert len(set(corrupted)) == 4


def test_the_seed_tells_the_draws(tmp_path: Path, template: Template) -> None:
    def draws(seed: int) -> list[list[int]]:
        maker = _maker(tmp_path, template, samples=1, batch_size=1, seed=seed)
        return [_drawn(maker, step) for step in range(STEPS)]

    assert draws(0) == draws(0) != draws(1)


def test_a_generator_differs_by_each_of_its_arguments() -> None:
    kinds = [(0, 0, "", 0), (1, 0, "", 0), (0, 1, "", 0), (0, 0, "draw", 0), (0, 0, "", 1)]
    first = [tuple(torch.rand(3, generator=step_generator(*each)).tolist()) for each in kinds]
    again = [tuple(torch.rand(3, generator=step_generator(*each)).tolist()) for each in kinds]
    assert first == again and len(set(first)) == len(kinds)


HALF: dict[str, Any] = {"text_dropout": 0.5, "speaker_dropout": 0.5}


def _maker(
    folder: Path, template: Template, samples: int, batch_size: int, seed: int = 0, **changes: Any
) -> BatchMaker:
    """Shards of samples whose every code is the number of the encoding."""
    shards = folder / str(samples)
    if not shards.exists():
        writer = ShardWriter(shards, samples_per_shard=64)
        for i in range(samples):
            sample = SAMPLE.model_copy(update={"id": f"s{i}"})
            writer.write(i, sample, [[torch.full((4, FRAMES), each).numpy()] for each in range(ENCODINGS)])
        writer.close({"codec": {"num_codebooks": 4, "codebook_size": BOS}})
    source = open_source(shards)
    found = survey_sources(
        [source], template, 128, "cut", SetAside(folder / "aside.jsonl", "train"), lambda: None
    )
    nothing_hidden = {"text_dropout": 0.0, "speaker_dropout": 0.0, "corrupt_codes": 0.0}
    sizes = {"batch_size": batch_size, "max_tokens": 128, "max_length": 128}
    batching = Batching(**{**nothing_hidden, **sizes, **changes})
    return BatchMaker([source], None, found, template, batching, seed)


def _drawn(maker: BatchMaker, step: int) -> list[int]:
    """The encoding of each sample of a step."""
    found = []
    for pack in maker(step).packs:
        targets_X = pack.audio_targets_XK[pack.audio_weights_XK[:, 0] > 0][:, 0]
        codes = targets_X[targets_X < BOS]
        found += codes.view(-1, FRAMES)[:, 0].tolist()
    return found


def _shown(maker: BatchMaker, template: Template, step: int) -> tuple[int, int]:
    """Count the samples of a step that show their text, and those that show their speaker."""
    text = "".join(template.tokenizer.decode(pack.text_ids_X.tolist()) for pack in maker(step).packs)
    return text.count("seven"), text.count("theo")


def _corrupted(maker: BatchMaker, step: int) -> list[tuple[int, ...]]:
    """The input codes of the first codebook of each sample of a step."""
    rows = FRAMES + 5
    found = []
    for pack in maker(step).packs:
        parts = [part[:, 0].tolist() for part in pack.codes_YK.split(rows)]
        found += [tuple(part) for part in parts if part[0] == BOS]  # and no idle rows
    return found
