"""The stage `train_preference` on a tiny Qwen2-Audio, from records with recordings to a folder of transformers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console
from transformers import Qwen2AudioForConditionalGeneration

from audiollm.data.records.manifest import ManifestSource, read_samples
from audiollm.data.records.sample import Message, TextPart, write_samples
from audiollm.errors import ConfigError, StageError
from audiollm.files.atomic import read_json
from audiollm.recipe.runner import run_recipe
from audiollm.recipe.stages import Recipe, load_recipe
from audiollm.rl.critic.model import CriticModel
from audiollm.rl.objectives.catalog import CATALOG
from audiollm.rl.preference.settings import PreferenceConfig
from tests.audiollm.families.dual_ffn.packed_samples import save_model
from tests.audiollm.models.tiny_audio_llms import save_tiny
from tests.audiollm.rl.preference.records import write_records


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("preference")
    (made / "data").mkdir()
    write_records(made / "data")
    save_tiny("qwen2_audio", made / "model")
    return made


def load(place: Path, name: str, **settings: Any) -> Recipe:
    stage = {
        "samples": str(place / "data" / "records.jsonl"),
        "start": str(place / "model"),
        "objective": "dpo",
        "learning_rate": 1e-2,
        "steps": 10,
        "batch_size": 8,
        "evaluations": 2,
        "eval_answers": 0,  # `test_eval_answers` has them
        **settings,
    }
    recipe = place / f"{name}.yaml"
    recipe.write_text(yaml.safe_dump({"name": name, "stages": [{"train_preference": stage}]}))
    return load_recipe(recipe, runs=place / "runs")


def run(place: Path, name: str, **settings: Any) -> dict[str, Any]:
    loaded = load(place, name, **settings)
    run_recipe(loaded, Console(quiet=True))
    folder = loaded.folder / "train_preference"
    figures: dict[str, Any] = json.loads((folder / "stage.json").read_text())["figures"]
    return figures


def test_dpo_orders_held_out_pairs(place: Path) -> None:
    figures = run(place, "orders", steps=30)
    assert figures["accuracy"] >= 0.9 and figures["margin"] > 1
    assert figures["records"] == 16 and figures["held_out_records"] == 8 and figures["set_aside"] == 0
    rows = [json.loads(line) for line in (place / "runs/orders/train_preference/metrics.jsonl").open()]
    assert {"loss", "margin", "accuracy", "reward_chosen", "length_chosen"} <= rows[-2].keys()


SETTINGS: dict[str, Any] = {
    "beta_dpo": {"level": "batch"},
    "sft": {"average": "token"},
    "dpo": {"policy_weighting": True},
    "orpo": {"sft_on": "prompt_and_answer"},
}
NOT_HERE = {name for name, entry in CATALOG.items() if entry.reads != "log_probs"}


QUICK = {
    "dpo",
    "tdpo2",
    "cringe",
    "sampo",
    "opa_dpo",
    "dro",
    "aot",
    "beta_dpo",
    "kto",
    "bco",
    "lipo_lambda",
    "orpo",
    "sft",
}
"""One of each kind of need; the others are slow for their number alone."""
NAMES = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
    for name in sorted(CATALOG.keys() - NOT_HERE)
]


@pytest.mark.parametrize("name", NAMES)
def test_every_objective_trains(place: Path, name: str) -> None:
    figures = run(
        place, f"every-{name}", objective={"name": name, **SETTINGS.get(name, {})}, trained="adapter"
    )
    assert math.isfinite(figures["loss"]) and figures["held_out_records"] == 8
    assert (
        Qwen2AudioForConditionalGeneration.from_pretrained(
            str(place / f"runs/every-{name}/train_preference/model")
        )
        is not None
    )


@pytest.mark.slow
def test_dro_trains_a_value_of_every_prompt(place: Path) -> None:
    dro = {"name": "dro", "tau": 0.3}
    start = run(place, "dro-start", objective=dro, steps=10, learning_rate=1e-9)
    figures = run(place, "dro", objective=dro, steps=60, critic={"learning_rate": 3e-3}, learning_rate=3e-3)
    assert figures["loss"] < 0.3 * start["loss"]
    folder = place / "runs/dro/train_preference"
    assert read_json(folder / "critic/model/reward.json") == {"scored": "tokens"}
    settings = {"samples": str(place / "data/records.jsonl"), "start": place / "model", "objective": "dro"}
    critic = CriticModel.begin(PreferenceConfig(**settings, critic=folder / "critic"), 1000)  # type: ignore[arg-type]
    source, values = ManifestSource(str(place / "data/records.jsonl")), []
    for number in range(16, 24):  # those held out
        loaded = source[number]
        for answer in critic.policy.encode(critic.policy.take(loaded, [0, 1], "")):
            with torch.no_grad():
                values.append(float(critic.root(critic.policy.batch([answer]))[0]))  # at the first token
    assert values[0] == pytest.approx(values[1], rel=1e-5)  # a value of the prompt, whatever the answer
    assert figures["value"] == pytest.approx(sum(values) / len(values), rel=1e-4)
    with pytest.raises(StageError, match="critic: is a DualFFN"):
        save_model(place / "dual", "features")
        run(place, "dro-other", objective=dro, critic=str(place / "dual"))


def test_other_samples_are_learned_beside_the_pairs(place: Path) -> None:
    records, _ = read_samples(place / "data/records.jsonl")
    text = Message(role="assistant", content=[TextPart(text="a hum")])
    told = [each.model_copy(update={"messages": [*each.messages, text], "answers": []}) for each in records]
    write_samples(place / "data/told.jsonl", [*told, records[0]])  # the last one has no answer
    ptx = {"samples": str(place / "data/told.jsonl"), "weight": 2.0, "batch_size": 4}
    figures = run(place, "ptx", ptx=ptx, steps=30)
    rows = [json.loads(line) for line in (place / "runs/ptx/train_preference/metrics.jsonl").open()]
    learned = [row["ptx_loss"] for row in rows if "ptx_loss" in row]
    assert learned[-1] < 1.2  # of a random model: log of some 280 words
    assert figures["accuracy"] >= 0.75 and figures["set_aside"] == 1


def test_a_mix_reports_each_term(place: Path) -> None:
    mix = [{"name": "dpo", "weight": 0.8}, {"name": "bco_pair", "weight": 0.2}, "sft"]
    figures = run(place, "mix", objective=mix)
    parts = 0.8 * figures["dpo/loss"] + 0.2 * figures["bco_pair/loss"] + figures["sft/loss"]
    assert figures["loss"] == pytest.approx(parts, rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"objective": "dpoo"}, "did you mean 'dpo'"),
        ({"objective": {"name": "dpo", "betta": 0.1}}, "did you mean 'beta'"),
        ({"objective": ["dpo", "kto"]}, "do not go together"),
        ({"objective": "bradley_terry"}, "train_reward"),
        ({"critic": {}}, "critic is set, but dpo reads no values"),
        ({"objective": "dro", "critic": {"lora": {"rank": 2}}}, "critic.lora is set"),
        (
            {"objective": [{"name": "orpo", "sft_on": "prompt_and_answer"}, {"name": "cpo"}]},
            "different tokens",
        ),
        ({"objective": "simpo", "reference": "."}, "reference is set"),
        ({"pairs": "some"}, "pairs"),
        ({"objective": "kto", "batch_size": 1}, "kto reads other records of the step"),
        ({"objective": ["dpo", "opa_dpo"], "batch_size": 1}, "opa_dpo reads other records of the step"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_any_work(
    place: Path, settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        load(place, "refused", **settings)


def test_an_objective_that_the_data_cannot_serve_is_named_before_any_work(place: Path) -> None:
    lines = (place / "data" / "records.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    for row in rows:
        for rank, answer in enumerate(row["answers"], start=1):
            answer["rank"] = rank
            del answer["score"]
    (place / "data" / "ranked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    says = (
        "objective: dro can use no record of the train split: 24 of 24 .* 'no scores', the first: scores are"
    )
    with pytest.raises(StageError, match=says):
        run(place, "ranked", objective="dro", samples=str(place / "data" / "ranked.jsonl"))
    assert not (place / "runs/ranked/train_preference/checkpoint").exists()


def test_bad_records_are_set_aside_and_the_rest_is_trained_on(place: Path) -> None:
    lines = (place / "data" / "records.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines[:12]]
    rows[0]["answers"] = rows[0]["answers"][:1]
    rows[1]["answers"][1] = rows[1]["answers"][0]
    rows[2]["answers"][0]["content"][0]["text"] = " "
    rows[3]["messages"][0]["content"][0]["path"] = "absent.wav"
    rows[4]["answers"][0]["content"] = [{"type": "audio", "path": "4.wav"}]
    broken = [json.dumps(row) for row in rows]
    broken[5] = broken[5].replace('"score": 0.0', '"score": NaN').replace('"score": 1.0', '"score": NaN')
    (place / "data" / "broken.jsonl").write_text("\n".join(broken) + "\n")
    figures = run(place, "broken", samples=str(place / "data" / "broken.jsonl"))
    found = [json.loads(line) for line in (place / "runs/broken/train_preference/set_aside.jsonl").open()]
    kinds = {row["id"] or row["place"]: row["kind"] for row in found}
    assert len(kinds) == 6 == figures["set_aside"]
    assert kinds["tone0"] == "one answer" and kinds["tone1"] == "equal answers"
    assert kinds["tone2"] == "empty answer" and kinds["tone3"] == "undecodable audio"
    assert kinds["tone4"] == "spoken answer"
    with pytest.raises(StageError, match="one answer"):
        run(place, "strict", samples=str(place / "data" / "broken.jsonl"), strict=True)
