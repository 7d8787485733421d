"""Training on two ranks over gloo ends with the weights of one: in float64, and by every strategy."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from audiollm.audio import load
from audiollm.files.atomic import read_jsonl, write_json
from audiollm.flow import training
from audiollm.flow.corpus import open_corpus, survey_sounds
from audiollm.flow.sound_model import SoundModel
from audiollm.flow.stages import ENCODE_LATENTS
from audiollm.flow.task import FlowBatch, FlowTask, FlowTaskConfig
from audiollm.flow.training import train_flow
from audiollm.recipe.ranks import ALONE, Ranks
from audiollm.train.loop.loop import LoopConfig, train
from tests.audiollm.flow.toy import AUTOENCODER, context_of, encode_config, train_config, write_scenes
from tests.audiollm.train.two_ranks import all_tensors, on_two_ranks

STEPS = 6


class DoubleFlowTask(FlowTask):
    """The task in float64: its batches too."""

    def batch(self, step: int, generator: torch.Generator, ranks: Ranks = ALONE) -> FlowBatch:
        batch = super().batch(step, generator, ranks)
        context = None if batch.context_LE is None else batch.context_LE.double()
        return batch._replace(
            x_LD=batch.x_LD.double(), target_LD=batch.target_LD.double(), context_LE=context
        )

    def evaluate(self, step: int) -> dict[str, float]:
        return {}


def run(folder: Path, ranks: Ranks = ALONE) -> None:
    torch.manual_seed(0)
    config = train_config(folder / "shards")
    sources, facts = open_corpus([folder / "shards"])
    usable = survey_sounds(sources, facts)
    model = training.build_sound_model(config, facts, usable).double()
    with torch.no_grad():
        for parameter in model.parameters():  # a zero gate would hide what is behind it
            parameter.add_(torch.randn(parameter.shape, dtype=torch.float64) * 0.02)
    task = DoubleFlowTask(
        model, sources, facts, usable, FlowTaskConfig(seed=5, batch_size=5, max_eval_samples=1), None, ranks
    )
    loop = LoopConfig(
        steps=STEPS, learning_rate=1e-3, precision="fp32", log_every=1, checkpoint_seconds=0,
        report_to=(),
    )  # fmt: skip
    context = context_of(folder / f"of-{ranks.world}")
    train(
        task,
        loop,
        context.folder,
        context.__class__(context.folder, context.recipe, context.console, {}, ranks),
        torch.device("cpu"),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("ranks")
    ENCODE_LATENTS.run(encode_config(write_scenes(made), edits_per_sample=1), context_of(made))
    run(made)
    on_two_ranks(run, made)
    return made


def test_two_ranks_end_with_the_weights_of_one(folder: Path) -> None:
    one, two = (all_tensors(folder / f"of-{world}" / "checkpoint", "modules") for world in (1, 2))
    assert one.keys() == two.keys() and one
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("figure", ["loss", "gradient_norm"])
def test_two_ranks_log_the_figures_of_one(folder: Path, figure: str) -> None:
    found = [
        [row[figure] for row in read_jsonl(folder / f"of-{world}" / "metrics.jsonl") if figure in row]
        for world in (1, 2)
    ]
    assert len(found[0]) == STEPS and found[0] == pytest.approx(found[1], rel=1e-9)


def run_stage(folder: Path, ranks: Ranks = ALONE) -> None:
    """`train_flow` with the strategy that the folder is named after: samples of a step lack different modalities."""
    strategy = folder.name
    config = train_config(
        folder.parent / "shards",
        strategy="auto" if ranks.world == 1 else strategy,
        ema_decay=0.9,
        dropout_video=0.5,
        dropout_words=0.5,
        autoencoder=AUTOENCODER,
        max_eval_samples=3,
        eval_sounds=1,
    )
    context = replace(context_of(folder / f"of-{ranks.world}"), ranks=ranks)
    figures = train_flow(config, context)
    if ranks.first:
        write_json(context.folder / "figures.json", figures)


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_every_strategy_ends_with_the_model_and_the_figures_of_one_process(
    folder: Path, strategy: str
) -> None:
    own = folder / strategy
    run_stage(own)
    on_two_ranks(run_stage, own)
    one, two = (SoundModel.from_pretrained(own / f"of-{world}").state_dict() for world in (1, 2))
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-3, atol=2e-5, msg=name)
    figures = [json.loads((own / f"of-{world}" / "figures.json").read_text()) for world in (1, 2)]
    for name in ("loss", "loss_unconditional"):
        assert figures[1][name] == pytest.approx(figures[0][name], rel=1e-4)
    heard = [load(own / f"of-{world}/listening/step-000010/0-scene-3.wav").samples_CN for world in (1, 2)]
    torch.testing.assert_close(heard[1], heard[0], rtol=0, atol=2e-3)
