"""What evaluations leave to be read: the held-out pairs that are ordered worst, and the policy's own answers."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console

from audiollm.audio import load as load_audio
from audiollm.data.records.manifest import ManifestSource
from audiollm.data.records.mixture import StepDraws
from audiollm.data.records.sample import AudioPart, Message, TextPart
from audiollm.data.records.step_records import find_usable
from audiollm.evaluate.subjects.chat import FolderChat
from audiollm.families.dual_ffn.policy import DualFFNPolicy
from audiollm.families.listener.policy import ListenerPolicy
from audiollm.families.policy import GreedyRequest
from audiollm.files.atomic import read_json, read_jsonl, write_json
from audiollm.files.set_aside import SetAside
from audiollm.generation.engine.request import Limits
from audiollm.generation.speaking.generator import Generator
from audiollm.recipe.ranks import ALONE, Ranks
from audiollm.recipe.runner import run_recipe
from audiollm.recipe.stages import load_recipe
from audiollm.rl.objectives.catalog import objective_term
from audiollm.rl.preference.batches import StepMaker
from audiollm.rl.preference.held_out import EvalAnswers
from audiollm.rl.preference.records import Grouping
from audiollm.rl.preference.task import PreferenceParts, PreferenceTask
from tests.audiollm.families.dual_ffn.packed_samples import heard, prompted, save_model
from tests.audiollm.models.tiny_audio_llms import save_tiny
from tests.audiollm.rl.preference.records import write_lists, write_records
from tests.audiollm.train.two_ranks import on_two_ranks


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("read")
    (made / "data").mkdir()
    write_records(made / "data")
    save_tiny("qwen2_audio", made / "model")
    return made


def run(place: Path, name: str, ranks: Ranks = ALONE, **settings: Any) -> Path:
    stage = {
        "samples": str(place / "data" / "records.jsonl"), "start": str(place / "model"), "objective": "dpo",
        "learning_rate": 1e-2, "steps": 10, "evaluations": 2, "batch_size": 8, "report_to": [], **settings,
    }  # fmt: skip
    recipe = place / f"{name}_{ranks.rank}.yaml"  # a file of its own: ranks write at the same time
    recipe.write_text(yaml.safe_dump({"name": name, "stages": [{"train_preference": stage}]}))
    loaded = load_recipe(recipe, runs=place / "runs")
    run_recipe(loaded, Console(quiet=True), ranks=ranks)
    return loaded.folder / "train_preference"


def test_answers_change_nothing_and_are_those_of_the_model(place: Path) -> None:
    with_answers, without = run(place, "with", eval_answers=3), run(place, "without", eval_answers=0)
    assert not (without / "answers.jsonl").exists()
    for file in ("model/model.safetensors", "checkpoint/optimizers.safetensors", "pairs.jsonl"):
        assert (with_answers / file).read_bytes() == (without / file).read_bytes(), file
    metrics = read_jsonl(with_answers / "metrics.jsonl")
    lengths = [row.pop("evaluation/answer_length") for row in metrics if "evaluation/answer_length" in row]
    assert metrics == read_jsonl(without / "metrics.jsonl")
    rows = read_jsonl(with_answers / "answers.jsonl")
    assert [row["step"] for row in rows] == [0] * 3 + [5] * 3 + [10] * 3
    means = [sum(row["tokens"] for row in rows[first : first + 3]) / 3 for first in (3, 6)]
    assert lengths == pytest.approx(means, rel=1e-5)
    figures = read_json(with_answers / "stage.json")["figures"]
    assert figures["answer_length"] == pytest.approx(lengths[-1], rel=1e-5)
    for shown, model in ((rows[:3], place / "model"), (rows[6:], with_answers / "model")):
        chat = FolderChat.load(model, max_tokens=20)
        for row in shown:
            (message,) = row["messages"]
            parts = [
                part["text"] if part["type"] == "text" else load_audio(part["path"])
                for part in message["content"]
            ]
            assert row["answer"] == chat.ask(parts) and row["seconds"] is None
            assert row["stopped"] == (row["tokens"] < 20) and row["tokens"] <= 20


def test_pairs_are_kept_with_their_rewards_the_worst_first(place: Path) -> None:
    folder = run(place, "pairs", eval_answers=0)
    rows = read_jsonl(folder / "pairs.jsonl")
    assert len(rows) == 8 and {row["step"] for row in rows} == {10}
    margins = [row["margin"] for row in rows]
    assert margins == sorted(margins)
    figures = read_json(folder / "stage.json")["figures"]
    assert sum(margins) / 8 == pytest.approx(figures["margin"], rel=1e-4)
    assert sum(row["right"] for row in rows) / 8 == pytest.approx(figures["accuracy"])
    for row in rows:
        number = int(row["id"].removeprefix("tone"))
        chosen, rejected = row["answers"]
        assert [part["text"] for part in chosen["content"]] == ["high" if number % 2 else "low"]
        assert (chosen["role"], rejected["role"]) == ("chosen", "rejected")
        assert chosen["reward"] - rejected["reward"] == pytest.approx(row["margin"], abs=1e-4)
        assert chosen["tokens"] == len(chosen["content"][0]["text"]) + 1  # bytes, and the end of the turn
        audio = row["messages"][0]["content"][0]
        assert Path(audio["path"]).is_file() and (audio["start_s"], audio["end_s"]) == (0.0, None)


@pytest.mark.parametrize(
    ("objective", "roles"),
    [
        ("lipo_lambda", {"chosen", "between", "rejected"}),
        ("kto", {"desirable", "undesirable"}),
        ({"name": "sft"}, None),
    ],
)
def test_lists_and_single_answers(tmp_path: Path, objective: Any, roles: set[str] | None) -> None:
    path = write_lists(tmp_path, held_out=5)
    (tmp_path / "data").mkdir()
    save_tiny("qwen2_audio", tmp_path / "model")
    folder = run(tmp_path, "any", samples=str(path), objective=objective, batch_size=3, eval_answers=0)
    if roles is None:
        assert not (folder / "pairs.jsonl").exists()  # cross entropy gives no rewards
        return
    rows = read_jsonl(folder / "pairs.jsonl")
    assert {answer["role"] for row in rows for answer in row["answers"]} == roles
    margins = [row["margin"] for row in rows]
    assert margins == sorted(margins) and [row["right"] for row in rows] == [m > 0 for m in margins]


def evaluated(folder: Path, ranks: Ranks, result: str) -> None:
    """Evaluate a tiny policy and keep what it leaves."""
    policy = ListenerPolicy.load(folder / "model", dtype=torch.float64)
    sources = [ManifestSource(str(folder / "data" / "records.jsonl"))]
    term, grouping = objective_term("dpo", {}), Grouping("pairs", frozenset())
    set_aside = SetAside(folder / f"set_aside-{ranks.rank}.jsonl", "test", strict=True)
    usable = find_usable(sources, grouping.groups, set_aside)
    steps: StepMaker[Any, Any, Any] = StepMaker(
        policy, sources, usable, grouping, StepDraws(4, max_tokens=1000), ranks=ranks
    )
    target = folder / result
    answers = EvalAnswers(policy, steps, 3, target, ranks)
    answers.begin()
    task = PreferenceTask(PreferenceParts(policy, steps, [term], set_aside, ranks, target, answers))
    figures = task.evaluate(5)
    task.evaluate(5)  # an attempt that went on from before this evaluation makes it again
    if ranks.first:
        write_json(target / "figures.json", figures)


def test_two_ranks_leave_what_one_leaves(place: Path) -> None:
    shutil.rmtree(place / "two", ignore_errors=True)
    on_two_ranks(partial(evaluated, result="two"), place)
    evaluated(place, ALONE, "one")
    for file in ("answers.jsonl", "pairs.jsonl"):
        one, two = (read_jsonl(place / ranks / file) for ranks in ("one", "two"))
        assert len(one) == {"answers.jsonl": 6, "pairs.jsonl": 8}[file]
        assert [row["id"] for row in one] == [row["id"] for row in two]
        assert one == two
    figures = read_json(place / "one" / "figures.json")
    assert read_json(place / "two" / "figures.json") == pytest.approx(figures, rel=1e-9)


@pytest.mark.parametrize("trained", ["all", "adapter"])
def test_answers_of_a_dual_ffn_change_nothing(place: Path, trained: str) -> None:
    model = place / "dual"
    if not model.exists():
        save_model(model, "features")
    settings: dict[str, Any] = {"start": str(model), "trained": trained}
    if trained == "adapter":
        settings["lora"] = {"rank": 2, "alpha": 4}
    with_answers = run(place, f"dual-{trained}", eval_answers=3, **settings)
    without = run(place, f"dual-{trained}-silent", eval_answers=0, **settings)
    for file in ("model/model.safetensors", "checkpoint/optimizers.safetensors", "pairs.jsonl"):
        assert (with_answers / file).read_bytes() == (without / file).read_bytes(), file
    rows = read_jsonl(with_answers / "answers.jsonl")
    assert [row["step"] for row in rows] == [0] * 3 + [5] * 3 + [10] * 3
    assert_answers_of(with_answers / "model", rows[6:])


def assert_answers_of(model: Path, rows: list[dict[str, Any]]) -> None:
    """These rows are the greedy answers of a saved DualFFN."""
    generator = Generator.from_pretrained(model)
    for row in rows:
        audio, question = row["messages"][0]["content"]
        message = Message(
            role="user", content=[AudioPart(path=audio["path"]), TextPart(text=question["text"])]
        )
        request = generator.chat_request([message], audio["path"], max_tokens=16)
        assert row["answer"] == generator.answer_all([request])[0].text.strip()


def trained_on_ranks(folder: Path, ranks: Ranks, strategy: str, trained: str, name: str) -> None:
    settings: dict[str, Any] = {"lora": {"rank": 2, "alpha": 4}} if trained == "adapter" else {}
    model = str(folder / "dual")
    run(folder, name, ranks, eval_answers=3, strategy=strategy, trained=trained, start=model, **settings)


@pytest.mark.parametrize(
    ("strategy", "trained"), [("fsdp2", "adapter"), pytest.param("zero3", "all", marks=pytest.mark.slow)]
)
def test_answers_are_given_where_no_rank_has_the_model(place: Path, strategy: str, trained: str) -> None:
    """By a copy of the weights: the last ones are those of the model that is saved, adapter merged."""
    if not (place / "dual").exists():
        save_model(place / "dual", "features")
    name = f"{strategy}-{trained}"
    on_two_ranks(partial(trained_on_ranks, strategy=strategy, trained=trained, name=name), place)
    folder = place / "runs" / name / "train_preference"
    rows = read_jsonl(folder / "answers.jsonl")
    assert [row["step"] for row in rows] == [0] * 3 + [5] * 3 + [10] * 3
    assert_answers_of(folder / "model", rows[6:])


@pytest.mark.parametrize("trained", ["all", "adapter"])
def test_a_dual_ffn_answers_in_words_and_speech(tmp_path: Path, trained: Any) -> None:
    policy = DualFFNPolicy.load(save_model(tmp_path, "codes"), trained, dtype=torch.float32)
    policy.root.eval()
    asked = prompted("one", [heard("codes", 0.4, 1)], [])
    prompts = [
        GreedyRequest(asked, kind, Limits(max_frames=6, max_text_tokens=9))
        for kind in ("text", "audio", "any")
    ]
    before = torch.get_rng_state()
    found = policy.greedy_answers(prompts)
    assert found == policy.greedy_answers(prompts) and torch.equal(before, torch.get_rng_state())
    written, spoken, _ = found
    assert written.frames == 0 and 0 < written.tokens <= 10
    assert spoken.text == "" and 0 < spoken.frames <= 6
    assert spoken.tokens == 3 * spoken.frames + spoken.stopped
    (update,) = [p for p in policy.root.parameters() if p.requires_grad][:1]
    assert not update.is_inference()
