"""Steps of thoughts and refilled groups in the stage `train_policy`, and steps that have nothing to train on."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from audiollm.data.records.sample import Message, Sample, TextPart
from audiollm.errors import StageError
from audiollm.families.rollout import Rollout
from audiollm.files.atomic import read_jsonl
from audiollm.generation.engine.request import SampledTokens
from audiollm.models.dual_ffn import DualFFN
from audiollm.recipe.ranks import Ranks
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import Recipe
from audiollm.rl.online import task as online_task
from audiollm.rl.online.progress import SkippedSteps
from audiollm.rl.online.run import train_policy
from audiollm.rl.online.settings import PolicyTrainingConfig
from audiollm.rl.online.steps import StepRewarder, placed_steps
from audiollm.rl.reward_models.model import RewardModel
from audiollm.rl.rewards.batch import RewardBatch, SampledAnswer
from audiollm.rl.rewards.catalog import reward_terms
from audiollm.rl.rewards.registry import load_rewards
from audiollm.rl.rewards.scoring import RewardSuite
from tests.audiollm.families.dual_ffn.packed_samples import save_model
from tests.audiollm.rl.online.fresh_tasks import PLUG_INS, gradient_of_step, load_policy, make_task
from tests.audiollm.rl.online.prompt_records import OWN, write_prompts
from tests.audiollm.rl.online.stage_runs import check_killed_run, error_of, run
from tests.audiollm.train.two_ranks import on_two_ranks

STEPS = {f"{PLUG_INS}thirds": 1.0}
REFILL = {"rewards": {f"{PLUG_INS}now_and_then": 1.0}, "refill": {"most": 3}, "batch_size": 4, "seed": 4}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("llm", "dual"):  # as `stage_runs` and as `fresh_tasks` name it
        save_model(tmp_path / name, "features")
    write_prompts(tmp_path, 16)
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ------------------------------------------------------------------------------------------------------- refills


def test_groups_that_teach_nothing_are_replaced(folder: Path) -> None:
    task, _ = make_task(folder, "dual", REFILL)
    plain, _ = make_task(folder, "dual", {**REFILL, "refill": None})
    for step in range(3):
        made = task.batch(step, torch.Generator()).rollout_step
        first = plain.batch(step, torch.Generator()).rollout_step
        names = [group.prompt.place for group in made.sampled.groups]
        assert len(set(names)) == len(names), "a prompt is asked once a step"
        assert {group.prompt.place for group in first.groups} <= set(names)
        assert made.replaced is not None
        for part, differs in ((made, True), (made.replaced, False)):
            rewards = part.reward_A.reshape(len(part.groups), 3).tolist()
            assert all((len(set(own)) > 1) is differs for own in rewards)
        assert made.figures["groups_kept"] == len(made.groups) <= 4
        assert made.figures["groups_sampled"] == len(names)
        full = made.figures["groups_kept"] == 4
        assert full or made.figures["refill_rounds"] == 3
        again = task.batch(step, torch.Generator()).rollout_step
        assert [[r.text for r in g.rollouts] for g in again.groups] == [
            [r.text for r in g.rollouts] for g in made.groups
        ]


def answers_of_steps(folder: Path, ranks: Ranks) -> None:
    """Write the file of each step, without updates."""
    task, _ = make_task(folder, "dual", REFILL, 100_000, ranks, f"of-{ranks.world}")
    for step in range(3):
        next(iter(task.updates(task.batch(step, torch.Generator(), ranks), step, 3)))


def test_two_ranks_refill_with_the_same_prompts(folder: Path) -> None:
    on_two_ranks(answers_of_steps, folder)
    answers_of_steps(folder, Ranks())
    replaced = 0
    for step in range(3):
        one, two = (
            {
                (row["id"], row["number"]): (
                    row["answer"],
                    row["reward"],
                    row["advantages"],
                    row.get("replaced"),
                )
                for row in read_jsonl(folder / f"of-{world}" / f"{step:06d}.jsonl")
            }
            for world in (1, 2)
        )
        assert one.keys() == two.keys()
        for key, row in one.items():
            assert row == two[key]
            assert not (row[3] and row[2]), "what was replaced is not trained on"
            replaced += bool(row[3])
    assert replaced


def test_a_kill_changes_nothing_of_refills_and_skips(folder: Path) -> None:
    settings = {
        **REFILL,
        "steps": 10,
        "max_skipped_steps": 11,
        "objective": {"name": "online_dpo", "loss": "beta_dpo"},
    }
    del settings["seed"]  # a recipe has its own
    whole = check_killed_run(folder, settings, kills=(2, 5))
    rows = [row for row in read_jsonl(whole / "metrics.jsonl") if "groups_kept" in row]
    assert len(rows) == 10 and any(row["refill_rounds"] for row in rows)


# --------------------------------------------------------------------------------------------------------- skips


def test_steps_without_anything_to_train_on_are_skipped(folder: Path) -> None:
    out = run(folder, rewards={f"{PLUG_INS}same_for_all": 1.0}, max_skipped_steps=13, weight_decay=0.1)
    rows = [row for row in read_jsonl(out / "metrics.jsonl") if "skipped" in row]
    assert [row["skipped"] for row in rows] == [1.0] * 12
    assert all(
        "loss" not in row and row["groups_without_variance"] == 1 and row["reward"] == 1 for row in rows
    )
    assert {"skipped", "no variance"} <= {row["kind"] for row in read_jsonl(out / "alarms.jsonl")}
    before, after = (DualFFN.from_pretrained(path).state_dict() for path in (folder / "llm", out / "model"))
    assert all(torch.equal(before[name], after[name]) for name in before), "not even by weight decay"


def test_a_step_of_equal_rewards_has_no_losses(folder: Path) -> None:
    task, _ = make_task(folder, "dual", {"rewards": {f"{PLUG_INS}same_for_all": 1.0}})
    (update,) = task.updates(task.batch(0, torch.Generator()), 0, 1)
    assert update.losses == 0 and update.figures["skipped"] == 1
    assert int(task.modules()["skips"].get_buffer("in_a_row")) == 1


def test_too_many_skipped_steps_end_the_run(folder: Path) -> None:
    told = error_of(folder, rewards={f"{PLUG_INS}same_for_all": 1.0}, max_skipped_steps=3)
    assert "3 steps in a row had nothing to train on" in told
    assert len(list((folder / "bad" / "train_policy" / "rollouts").glob("*.jsonl"))) == 3


@pytest.mark.parametrize(
    "settings",
    [
        {"truncated": "leave_out", "max_answer_tokens": 1},
        {"objective": "online_dpo", "rewards": {f"{PLUG_INS}same_for_all": 1.0}},
        {"objective": {"name": "online_rft", "least": 2.0}, "rewards": {f"{PLUG_INS}same_for_all": 1.0}},
        {"refill": {"most": 1}, "rewards": {f"{PLUG_INS}same_for_all": 1.0}},
        {"rewards": {f"{PLUG_INS}fails": 1.0}},
    ],
    ids=["truncated", "pairs", "singles", "refill", "no reward"],
)
def test_each_cause_of_a_skip(folder: Path, settings: dict[str, Any]) -> None:
    out = run(folder, max_skipped_steps=13, batch_size=2, group_size=2, **settings)
    rows = [row for row in read_jsonl(out / "metrics.jsonl") if "skipped" in row]
    whole = [row["skipped"] for row in rows if row.get("truncated", 1.0) == 1 or "truncated" not in settings]
    assert len(rows) == 12 and len(whole) > 5 and set(whole) == {1.0}


def test_equal_rewards_are_trained_on_where_a_kl_is(folder: Path) -> None:
    out = run(folder, rewards={f"{PLUG_INS}same_for_all": 1.0}, kl={})
    rows = [row for row in read_jsonl(out / "metrics.jsonl") if "skipped" in row]
    assert [row["skipped"] for row in rows] == [0.0] * 12 and all("loss" in row for row in rows)


OBJECTIVES: dict[str, dict[str, Any]] = {
    "grpo": {"strategy": "ddp", "trained": "all"},
    "online_dpo": {
        "strategy": "fsdp2",
        "objective": "online_dpo",
        "trained": "adapter",
        "lora": {"rank": 2, "alpha": 4},
    },
}


def train_where_some_are_skipped(folder: Path, ranks: Ranks) -> None:
    for name, settings in OBJECTIVES.items():
        config = PolicyTrainingConfig(
            samples=str(folder / "prompts.jsonl"), start=folder / "llm", rewards={f"{PLUG_INS}now_and_then": 1.0},  # type: ignore[arg-type]
            steps=12, batch_size=1, group_size=2, max_answer_tokens=6, learning_rate=1e-3, precision="fp32",
            report_to=(), seed=4, evaluations=1, eval_prompts=2, max_skipped_steps=12,
            **settings | ({"strategy": "ddp"} if ranks.world == 1 else {}),
        )  # fmt: skip
        place = folder / f"{name}-{ranks.world}"
        place.mkdir(exist_ok=True)
        recipe = Recipe("test", Path("test.yaml"), "tiny", 4, place, (), {})
        train_policy(config, Context(place, recipe, Console(quiet=True), {}, ranks))


@pytest.mark.slow
def test_ranks_skip_together(folder: Path) -> None:
    on_two_ranks(train_where_some_are_skipped, folder)
    train_where_some_are_skipped(folder, Ranks())
    for objective in OBJECTIVES:
        check_curves(folder, objective)


def check_curves(folder: Path, objective: str) -> None:
    keys = ("skipped", "reward", "entropy", "gradient_norm")
    one, two = (
        [
            {key: row[key] for key in keys if key in row}
            for row in read_jsonl(folder / f"{objective}-{world}" / "metrics.jsonl")
            if "skipped" in row
        ]
        for world in (1, 2)
    )
    assert {row["skipped"] for row in one} == {0.0, 1.0}
    assert all(("gradient_norm" in row) is (row["skipped"] == 0) for row in one)
    for row, wanted in zip(two, one, strict=True):
        assert row == pytest.approx(wanted, rel=1e-3, abs=1e-5)


# ------------------------------------------------------------------------------------------------------ refusals


def test_settings_that_do_not_go_together_are_refused(folder: Path) -> None:
    assert "reads rewards of steps: add `steps`" in error_of(
        folder, advantage="grpo_process", rewards={"accuracy": 1.0}
    )
    assert "set kl.place: loss" in error_of(
        folder, advantage="grpo_process", rewards={"steps": 1.0}, kl={"place": "reward"}
    )
    assert "not read by advantage: gdpo: set kl.place: loss" in error_of(
        folder, advantage="gdpo", kl={"place": "reward"}
    )
    assert "online_dpo does not read kl" in error_of(folder, objective="online_dpo", kl={})
    assert "online_dpo does not read advantage" in error_of(folder, objective="online_dpo", advantage="rloo")
    assert "online_dpo makes pairs, and kto takes singles" in error_of(
        folder, objective={"name": "online_dpo", "loss": "kto"}
    )
    assert "did you mean 'beta'" in error_of(folder, objective={"name": "online_dpo", "betta": 1})
    assert "kto as set reads kl, which nothing computes here" in error_of(
        folder, objective={"name": "online_rft", "loss": "kto"}
    )
    assert "set updates: 1" in error_of(folder, objective={"name": "online_dpo", "loss": "aot"}, updates=2)
    assert "group_size is 1" in error_of(folder, objective="online_dpo", group_size=1)
    assert "leave refill out" in error_of(folder, refill={}, advantage="reinforce_plus_plus")
    assert "leave one out" in error_of(folder, overlong={}, rewards={"overlong": {"max_tokens": 20}})
    assert "an answer has at most 12: lower it" in error_of(folder, overlong={"buffer": 13})
    assert not (folder / "bad").exists()


def test_the_time_of_all_updates_of_a_step_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task, _ = make_task(folder, "dual", {"rewards": {f"{OWN}evenness": 1.0}, "updates": 3})
    batch = task.batch(1, torch.Generator())
    clock = count()
    monkeypatch.setattr(online_task, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    seconds = []
    for update in task.updates(batch, 1, 2):
        assert len(list(update.loss)) == update.losses
        seconds.append(update.figures["seconds/update"])
    assert 0 < seconds[0] < seconds[1] < seconds[2], "the last one's figures are those of the step"


# ------------------------------------------------------------------------------------------------------ learning


def lengths_of(out: Path) -> list[float]:
    return [row["answer_length"] for row in read_jsonl(out / "metrics.jsonl") if "answer_length" in row]


def test_online_rft_takes_single_answers(folder: Path) -> None:
    settings = {"objective": {"name": "online_rft", "least": -100.0}, "group_size": 1}
    task, _ = make_task(folder, "dual", {"rewards": {f"{OWN}brevity": 1.0}, **settings})
    assert gradient_of_step(task)[2].figures["items"] == 4


def test_equal_rewards_are_an_alarm_only_where_nothing_is_learned_from_them(folder: Path) -> None:
    def is_told(**settings: Any) -> bool:
        task, _ = make_task(folder, "dual", {"rewards": STEPS, **settings})
        return "no variance" in task.alarms({"groups_without_variance": 1.0}, 3)

    assert is_told() and is_told(advantage="rloo") and is_told(objective="online_dpo")
    assert not is_told(advantage="remax", group_size=1), "greedy answers are the baseline"
    assert not is_told(objective="online_rft"), "right answers are learned, however many there are"
    assert not is_told(advantage="grpo_process"), "steps differ where their means are equal"
    assert not is_told(advantage="gdpo"), "functions differ where their sums are equal"


@pytest.mark.parametrize(
    ("objective", "rate"),
    [
        ({"name": "online_dpo", "beta": 0.1}, 3e-3),
        ({"name": "online_rft", "least": -20.0, "per_group": 1}, 3e-3),
    ],
    ids=["online_dpo", "online_rft"],
)
def test_objectives_on_fresh_answers_learn(folder: Path, objective: dict[str, Any], rate: float) -> None:
    out = run(folder, objective=objective, steps=40, max_answer_tokens=12, group_size=4, learning_rate=rate)
    lengths = lengths_of(out)
    assert sum(lengths[-5:]) < 0.8 * sum(lengths[:5])


def test_process_rewards_teach(folder: Path) -> None:
    out = run(
        folder, rewards={f"{PLUG_INS}even_letters": 1.0}, advantage={"name": "grpo_process", "outcome": False},
        steps=40, max_answer_tokens=12, group_size=4,
    )  # fmt: skip
    rewards = [row["reward"] for row in read_jsonl(out / "metrics.jsonl") if "reward" in row]
    assert sum(rewards[-5:]) > 1.2 * sum(rewards[:5])


def test_steps_are_scored_by_a_process_reward_model(folder: Path) -> None:
    torch.manual_seed(0)
    RewardModel.begin(folder / "llm", scored="steps").save(folder / "judge")
    rewards = {"step_model": {"folder": str(folder / "judge"), "weight": 3.0}, f"{OWN}brevity": 0.1}
    out = run(folder, rewards=rewards, advantage="grpo_process", batch_size=2)
    rows = read_jsonl(out / "rollouts" / "000000.jsonl")
    told = [row for row in rows if row["reward"] is not None]
    assert len(told) > 3
    for row in told:
        *_, last, outcome = row["steps"]
        assert last["action"] == outcome["action"] == row["tokens"] - 1
        assert last["text"] == row["answer"].strip() and not last["is_outcome"]
        assert outcome["is_outcome"] and outcome["reward"] == pytest.approx(-0.1 * row["tokens"])
        if len(row["steps"]) == 2:  # without a thought the answer is the only step
            assert last["reward"] == pytest.approx(3 * row["rewards"]["step_model"])
            assert last["reward"] + outcome["reward"] == pytest.approx(row["reward"])
    assert any(row["advantages"] and any(row["advantages"]) for row in told)


def test_skipped_steps_are_counted_in_a_row() -> None:
    skips = SkippedSteps(2)
    for is_skipped in (True, False, True, False):
        skips.count(is_skipped, 4)
    resumed = SkippedSteps(2)
    skips.count(True, 4)
    resumed.load_state_dict(skips.state_dict())
    with pytest.raises(StageError, match="2 steps in a row had nothing to train on"):
        resumed.count(True, 4)


def test_steps_without_any_answer_are_told_from_those_without_a_difference() -> None:
    skips = SkippedSteps(2)
    skips.count(True, 0)
    with pytest.raises(StageError, match="no prompt of this process was answered") as caught:
        skips.count(True, 0)
    assert "set_aside.jsonl" in str(caught.value)


def test_overlong_speech_is_counted_in_frames(folder: Path) -> None:
    out = run(folder, answer="audio", max_frames=8, overlong={"buffer": 6, "weight": 0.5}, steps=10)
    rows = [row for path in sorted((out / "rollouts").glob("*.jsonl")) for row in read_jsonl(path)]
    penalties = {row["rewards"]["overlong"] for row in rows}
    assert -1.0 in penalties and all(-1 <= value <= 0 for value in penalties)
    for row in rows:
        frames = -row["rewards"][f"{OWN}brevity"]  # an answer in speech alone has no words
        assert row["rewards"]["overlong"] == pytest.approx(-min(1.0, max(0.0, (frames - 2) / 6)))
        assert row["reward"] == pytest.approx(-frames + 0.5 * row["rewards"]["overlong"])
    assert "reward/overlong" in read_jsonl(out / "metrics.jsonl")[0]


@pytest.mark.parametrize("outcome", [True, False])
def test_steps_of_a_thought_end_at_their_tokens(folder: Path, outcome: bool) -> None:
    policy = load_policy(folder, "dual")
    tokenizer = policy.template.tokenizer
    text = "<think>1. A dog barks.\n2. Rain, é!\n3. So both.</think> <answer>dog</answer>"
    ids = torch.tensor([*tokenizer.encode(text, add_special_tokens=False).ids, 0])
    tokens = SampledTokens("text", ids, torch.ones_like(ids, dtype=torch.bool), (), (), None)
    rollout = Rollout("q", 0, tokens, False, text, 0)
    messages = [
        Message(role=role, content=[TextPart(text=said)])
        for role, said in (("user", "?"), ("assistant", "dog"))
    ]
    sample = Sample(id="q", messages=messages, task="t", metadata={"facts": ["dog", "rain"]})
    rewards = {
        "steps": {"weight": 0.5, "keys": ["facts"], "split": "numbered"},
        "accuracy": 2.0,
        "format": 1.0,
    }
    terms = reward_terms(rewards)
    scores = RewardSuite(terms, load_rewards(terms)).score(
        RewardBatch([SampledAnswer(sample, text, len(ids))])
    )
    rewarder = StepRewarder(policy, {term.name: term.weight for term in terms}, outcome)
    (steps,) = rewarder([rollout], scores)
    assert [step.reward for step in steps] == [0.5, 0.5, 0.0, *([3.0] if outcome else [])]
    for step in steps[:3]:
        assert tokenizer.decode(ids[: step.action + 1].tolist()).endswith(step.text)
    assert steps[-1].action == (len(ids) - 1 if outcome else steps[2].action)
    assert [step.is_outcome for step in steps] == [False, False, False, *([True] if outcome else [])]
    answer_T = torch.tensor([1, 0] * len(ids))  # two answers, interleaved
    reward_S, end_S, is_outcome_S = placed_steps([steps, steps], answer_T, 2)
    assert end_S.tolist() == [2 * s.action + 1 for s in steps] + [2 * s.action for s in steps]
    assert reward_S.tolist() == [step.reward for step in steps] * 2
    assert is_outcome_S.tolist() == [step.is_outcome for step in steps] * 2
