"""The stage `train_reward`: it ranks answers to recordings, exactly, and its folder scores as it did in training."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from transformers import Qwen2AudioForConditionalGeneration

from audiollm.data.records.manifest import ManifestSource
from audiollm.errors import ConfigError, StageError
from audiollm.recipe.runner import run_recipe
from audiollm.recipe.stages import load_recipe
from audiollm.rl.reward_models.model import RewardModel, load_reward_model
from audiollm.rl.reward_models.task import reliability_of
from audiollm.train.loop.checkpoint import trained_weights
from audiollm.train.settings import LoRASettings
from tests.audiollm.families.dual_ffn.packed_samples import save_model
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
        "start": str(place / "model"),
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
    pairs = [json.loads(line) for line in (folder / "pairs.jsonl").open()]
    assert len(pairs) == 8 and sum(pair["right"] for pair in pairs) == round(8 * figures["accuracy"])
    source = ManifestSource(str(place / "data" / "records.jsonl"))
    model = RewardModel.load(folder)
    right = [model.score(source[n]) for n in range(32, 40)]
    margins = [own[n % 2 == 0] - own[n % 2 == 1] for n, own in enumerate(right)]
    assert sum(margin > 0 for margin in margins) / 8 == pytest.approx(figures["accuracy"])


def test_a_run_that_is_killed_before_its_model_is_saved_keeps_its_reliability(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RewardModel, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            run(place, "killed", steps=10)
    figures, folder = run(place, "killed", steps=10)
    told = json.loads((folder / "reliability.json").read_text())
    assert told["error"] == pytest.approx(figures["calibration_error"])


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
    lora = LoRASettings(rank=2, alpha=4)
    _, folder = run(place, "lora", trained="adapter", lora={"rank": 2, "alpha": 4}, steps=10)
    check_folder(place, folder, RewardModel.begin(place / "model", "adapter", lora))
    assert (folder / "adapter").is_dir()


def check_folder(place: Path, folder: Path, trained: RewardModel) -> None:
    """The folder scores as the weights that the loop left, and holds no adapter."""
    trained.root.load_state_dict(trained_weights(folder, "reward"))
    model = load_reward_model(folder)
    assert not any("lora" in name for name, _ in model.root.named_parameters())
    records = place / "data" / "records.jsonl"
    found = scores_of(model, records)
    assert found == pytest.approx(scores_of(trained, records), abs=1e-6) and len(set(found)) > 1


@pytest.mark.parametrize("trained", ["all", ["*multi_modal_projector*"]])
def test_a_folder_scores_as_what_was_trained(place: Path, trained: Any) -> None:
    _, folder = run(place, f"whole{len(trained)}", trained=trained, steps=10)
    check_folder(place, folder, RewardModel.begin(place / "model", trained))
    names = [name for name in trained_weights(folder, "reward") if name.startswith("score.")]
    assert names == ["score.weight"]
    assert Qwen2AudioForConditionalGeneration.from_pretrained(str(folder / "model")) is not None


def test_a_dual_ffn_learns_to_rank_what_it_hears(place: Path) -> None:
    model = save_model(place / "dual", "features")
    figures, folder = run(place, "dual", start=str(model), learning_rate=3e-3, steps=100)
    assert figures["accuracy"] >= 0.9 and figures["margin"] > 0.5
    check_folder(place, folder, RewardModel.begin(model))
    assert (folder / "model" / "speakers.json").exists()


def test_bad_records_are_set_aside(place: Path) -> None:
    rows = [json.loads(line) for line in (place / "data" / "records.jsonl").open()][:12]
    rows[0]["answers"] = rows[0]["answers"][:1]
    rows[1]["answers"][1] = rows[1]["answers"][0]
    rows[2]["messages"][0]["content"][0]["path"] = "absent.wav"
    rows[3]["answers"][0]["content"] = [{"type": "audio", "path": "4.wav"}]
    path = place / "data" / "broken.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    figures, folder = run(place, "broken", samples=str(path), steps=10)
    kinds = {row["id"]: row["kind"] for row in map(json.loads, (folder / "set_aside.jsonl").open())}
    assert figures["set_aside"] == 4 and kinds["tone0"] == "one answer" and kinds["tone1"] == "equal answers"
    assert kinds["tone2"] == "undecodable audio" and kinds["tone3"] == "spoken answer"
    with pytest.raises(StageError, match="one answer"):
        run(place, "strict", samples=str(path), steps=10, strict=True)
    with pytest.raises(StageError, match="no record"):
        run(place, "unlabelled", objective="process", steps=10)


@pytest.mark.parametrize("objective", ["plackett_luce", "regression"])
def test_lists_and_ratings_are_learned_from(place: Path, objective: str) -> None:
    samples = str(place / "lists" / "records.jsonl")
    figures, folder = run(place, objective, objective=objective, samples=samples, steps=10)
    assert figures["records"] == 8 and (folder / "model" / "score_head.safetensors").exists()


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
