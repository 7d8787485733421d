"""The stage `train_reward`: it ranks answers to recordings, exactly, and its folder scores as it did in training."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console

from audiollm.audio import save
from audiollm.data.records.manifest_source import ManifestSource
from audiollm.errors import ConfigError
from audiollm.files.set_aside import SetAside
from audiollm.recipe.ranks import ALONE
from audiollm.recipe.runner import run_recipe
from audiollm.recipe.stages import load_recipe
from audiollm.rl.objectives.catalog import objective_term
from audiollm.rl.preference.batches import StepMaker
from audiollm.rl.preference.records import Grouping, find_usable
from audiollm.rl.reward.calibration import reliability_of
from audiollm.rl.reward.model import RewardModel
from audiollm.rl.reward.task import RewardTask
from tests.audiollm.models.tiny_audio_llms import save_tiny
from tests.audiollm.rl.preference.records import write_lists, write_records


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("reward")
    (made / "data").mkdir()
    (made / "lists").mkdir()
    write_records(made / "data", 40)
    write_lists(made / "lists")
    save_tiny("qwen2_audio", made / "model")
    return made


def run(place: Path, name: str, **settings: Any) -> tuple[dict[str, Any], Path]:
    stage = {
        "samples": str(place / "data" / "records.jsonl"),
        "model": str(place / "model"),
        "learning_rate": 1e-2,
        "steps": 40,
        "batch_size": 8,
        **settings,
    }
    recipe = place / f"{name}.yaml"
    recipe.write_text(yaml.safe_dump({"name": name, "stages": [{"train_reward": stage}]}))
    loaded = load_recipe(recipe, runs=place / "runs")
    run_recipe(loaded, Console(quiet=True))
    folder = loaded.folder / "train_reward"
    return json.loads((folder / "stage.json").read_text())["figures"], folder


def scores_of(model: RewardModel, samples: Path, count: int = 6) -> list[float]:
    source = ManifestSource(str(samples))
    return [score for n in range(count) for score in model.score(source[n])]


def test_held_out_pairs_are_ranked_and_its_folder_scores_as_in_training(place: Path) -> None:
    figures, folder = run(place, "whole")
    assert figures["accuracy"] >= 0.9 and 0 <= figures["calibration_error"] < 0.5
    reliability = json.loads((folder / "reliability.json").read_text())
    assert sum(each["count"] for each in reliability["bins"]) == 8
    source = ManifestSource(str(place / "data" / "records.jsonl"))
    model = RewardModel.load(folder)
    right = [model.score(source[n]) for n in range(32, 40)]
    margins = [own[n % 2 == 0] - own[n % 2 == 1] for n, own in enumerate(right)]
    assert sum(margin > 0 for margin in margins) / 8 == pytest.approx(figures["accuracy"])


def test_shuffled_labels_teach_nothing(place: Path) -> None:
    rows = [json.loads(line) for line in (place / "data" / "records.jsonl").open()]
    coins = random.Random(3)
    for row in rows[:32]:
        if coins.random() < 0.5:
            for answer in row["answers"]:
                answer["score"] = 1.0 - answer["score"]
    (place / "data" / "shuffled.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    figures, _ = run(place, "shuffled", samples=str(place / "data" / "shuffled.jsonl"))
    assert 0.2 <= figures["accuracy"] <= 0.8


def test_an_adapter_is_saved_merged(place: Path) -> None:
    _, folder = run(place, "lora", trained="adapter", lora={"rank": 2, "alpha": 4}, steps=10)
    torch.manual_seed(0)
    trained = RewardModel.begin(place / "model", "adapter", None)
    assert (folder / "adapter").is_dir()
    model = RewardModel.load(folder)
    assert not any("lora" in name for name, _ in model.root.named_parameters())
    assert any("lora" in name for name, _ in trained.root.named_parameters())
    assert len(set(scores_of(model, place / "data" / "records.jsonl"))) > 1


@pytest.mark.parametrize("objective", ["plackett_luce", "regression"])
def test_lists_and_ratings_are_learned_from(place: Path, objective: str) -> None:
    samples = str(place / "lists" / "records.jsonl")
    figures, folder = run(place, objective, objective=objective, samples=samples, steps=10)
    assert figures["records"] == 8 and (folder / "model" / "score_head.safetensors").exists()


def gradient(place: Path, name: str, max_tokens: int) -> tuple[float, torch.Tensor]:
    """Loss and gradient of the first step."""
    term = objective_term(name, {})
    torch.manual_seed(1)
    model = RewardModel.begin(place / "model")
    model.root.double()
    sources = [ManifestSource(str(place / "lists" / "records.jsonl"))]
    grouping = Grouping(term.needs.groups[0], term.needs.fields, "all")
    aside = SetAside(place / "aside.jsonl", "test", strict=True)
    usable = find_usable(sources, grouping, aside)
    steps: StepMaker[Any, Any, Any] = StepMaker(
        model.policy, sources, None, usable, grouping, 6, max_tokens, 0
    )
    task = RewardTask(model, steps, [term], aside, ALONE)
    (update,) = task.updates(task.batch(0, torch.Generator()), 0, 10)
    total = 0.0
    for loss in update.loss:
        loss.backward()
        total += float(loss.detach())
    grads = [p.grad for p in model.root.parameters() if p.grad is not None]
    return total, torch.cat([grad.flatten() for grad in grads])


@pytest.mark.parametrize("name", ["bradley_terry", "plackett_luce", "regression"])
def test_micro_batches_change_nothing(place: Path, name: str) -> None:
    whole, parts = gradient(place, name, 100_000), gradient(place, name, 64)
    assert parts[0] == pytest.approx(whole[0], rel=1e-9)
    torch.testing.assert_close(parts[1], whole[1], rtol=1e-9, atol=1e-12)


def test_a_score_depends_on_its_own_recording(place: Path, tmp_path: Path) -> None:
    """In float64, with all answers in one batch: one recording is exchanged, and the other samples' scores stay."""
    torch.manual_seed(0)
    model = RewardModel.begin(place / "model")
    model.root.double().eval()
    source = ManifestSource(str(place / "lists" / "records.jsonl"))
    loaded = [source[n] for n in range(4)]
    noise = 0.1 * torch.randn(1, 9000, generator=torch.Generator().manual_seed(5))
    save(tmp_path / "other.wav", noise, 16_000)
    exchanged = replace(loaded[1].audio[0], content=str(tmp_path / "other.wav"))
    other = [*loaded[:1], replace(loaded[1], audio=(exchanged, *loaded[1].audio[1:])), *loaded[2:]]
    found = []
    for samples in (loaded, other):
        encoded = [
            [*model.policy.encode(model.policy.take(each, list(range(len(each.sample.answers)))))]
            for each in samples
        ]
        batch = model.policy.batch([answer for each in encoded for answer in each])
        found.append(model.root(batch).detach().split([len(each) for each in encoded]))
    for number, (before, after) in enumerate(zip(*found, strict=True)):
        if number == 1:
            assert (before - after).abs().min() > 1e-9
        else:
            torch.testing.assert_close(before, after, rtol=0, atol=1e-12)


def test_objectives_of_policies_and_other_folders_are_refused(place: Path) -> None:
    with pytest.raises(ConfigError, match="train_preference"):
        run(place, "refused", objective="dpo")
    with pytest.raises(ConfigError, match="no reward model here"):
        RewardModel.load(place / "model")


def test_calibration_of_known_margins() -> None:
    """Three pairs at sigmoid(1) with two right, and one sure pair that is right."""
    found = reliability_of([1.0, 1.0, -1.0, 50.0])
    sure = 1 / (1 + math.exp(-1.0))
    assert [(each.count, each.accuracy) for each in found.bins] == [(3, pytest.approx(2 / 3)), (1, 1.0)]
    assert found.error == pytest.approx(0.75 * (sure - 2 / 3), abs=1e-9)
    assert reliability_of([]).error == 0
