"""Neither micro-batches nor ranks change the loss of a reward model or its gradient, whatever its objective."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import logsigmoid

from audiollm.data.records.manifest import ManifestSource
from audiollm.data.records.mixture import StepDraws
from audiollm.data.records.step_records import find_usable
from audiollm.families.logprobs.answers import Pairs
from audiollm.files.atomic import read_json, write_json
from audiollm.files.set_aside import SetAside
from audiollm.recipe.ranks import ALONE, Ranks
from audiollm.rl.objectives.catalog import objective_term
from audiollm.rl.preference.batches import StepMaker
from audiollm.rl.preference.records import Grouping
from audiollm.rl.reward_models.model import RewardModel
from audiollm.rl.reward_models.task import RewardTask
from tests.audiollm.models.tiny_audio_llms import save_tiny
from tests.audiollm.rl.preference.records import write_lists
from tests.audiollm.rl.reward_models.step_records import write_steps
from tests.audiollm.train.two_ranks import on_two_ranks

OBJECTIVES: dict[str, dict[str, Any]] = {
    "bradley_terry": {"centering": 0.01},
    "plackett_luce": {},
    "regression": {},
    "process": {},
}
MARGIN_SCALE = 0.3


def make_task(folder: Path, name: str, max_tokens: int, ranks: Ranks) -> RewardTask:
    term = objective_term(name, OBJECTIVES[name])
    torch.manual_seed(1)
    scored: Any = "steps" if name == "process" else "answers"
    model = RewardModel.begin(folder / "llm", scored=scored, bias=True)
    model.root.double()
    source = ManifestSource(str(folder / ("steps.jsonl" if name == "process" else "records.jsonl")))
    grouping = Grouping(term.needs.groups[0], term.needs.fields, "all")
    aside = SetAside(folder / f"set_aside-{ranks.rank}.jsonl", "test", strict=True)
    usable = find_usable([source], grouping.groups, aside)
    steps: StepMaker[Any, Any, Any] = StepMaker(
        model.policy, [source], usable, grouping, StepDraws(5, 3, None, max_tokens), ranks=ranks
    )
    return RewardTask(model, steps, [term], aside, ranks, MARGIN_SCALE)


def first_step(folder: Path, ranks: Ranks, name: str, max_tokens: int, result: str) -> None:
    """Write loss, gradient (some of its numbers) and figures of a step, and the figures of an evaluation."""
    task = make_task(folder, name, max_tokens, ranks)
    (update,) = task.updates(task.batch(0, torch.Generator()), 0, 2)
    total = torch.zeros((), dtype=torch.float64)
    for loss in update.loss:
        loss.backward()
        total += loss.detach()
    parameters = task.modules()["reward"].parameters()
    flat = torch.cat(
        [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in parameters]
    )
    gradient = ranks.sum(flat)
    found = {
        "loss": float(ranks.sum(total)),
        "gradient": [*gradient[::7].tolist(), *gradient[-20:].tolist()],
        "figures": {key: float(value) for key, value in update.figures.items() if key != "tokens"},
        "held_out": dict(task.evaluate(0)),
        "batches": update.losses,
    }
    if ranks.first:
        write_json(folder / result, found)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("exact")
    save_tiny("qwen2_audio", made / "llm")
    write_lists(made)
    write_steps(made, 12)
    return made


def check(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-9)
    assert found["gradient"] == pytest.approx(expected["gradient"], rel=1e-9, abs=1e-12)
    assert found["figures"] == pytest.approx(expected["figures"], rel=1e-9)
    assert found["held_out"] == pytest.approx(expected["held_out"], rel=1e-9)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_micro_batches_change_nothing(folder: Path, name: str) -> None:
    first_step(folder, ALONE, name, 100_000, "whole.json")
    first_step(folder, ALONE, name, 64, "parts.json")
    whole, parts = read_json(folder / "whole.json"), read_json(folder / "parts.json")
    assert whole["batches"] == 1 and parts["batches"] == 5
    check(parts, whole)


def two_ranks(folder: Path, ranks: Ranks) -> None:
    for name in OBJECTIVES:
        first_step(folder, ranks, name, 100, f"two-{name}.json")


def test_two_ranks_are_one(folder: Path) -> None:
    on_two_ranks(two_ranks, folder)
    for name in OBJECTIVES:
        first_step(folder, ALONE, name, 100_000, "one.json")
        check(read_json(folder / f"two-{name}.json"), read_json(folder / "one.json"))


def test_a_margin_asks_for_more(folder: Path) -> None:
    """The loss of each pair is Bradley-Terry's, with the scaled difference of the answers' judged scores."""
    task = make_task(folder, "bradley_terry", 100_000, ALONE)
    (micro,) = task.batch(0, torch.Generator()).micro
    pairs = micro.groups
    assert isinstance(pairs, Pairs) and pairs.margin_P is not None and bool((pairs.margin_P > 0).all())
    with torch.no_grad():
        score_A = task.modules()["reward"](micro.batch)
        chosen_P, rejected_P = score_A[pairs.chosen_P], score_A[pairs.rejected_P]
        loss_P = -logsigmoid(chosen_P - rejected_P - MARGIN_SCALE * pairs.margin_P)
        expected = (loss_P + 0.01 * (chosen_P + rejected_P).square()).mean()
        (update,) = task.updates(task.batch(0, torch.Generator()), 0, 2)
        assert float(sum(update.loss)) == pytest.approx(float(expected), rel=1e-6)
