"""The measure of a policy's start against its answers, and the verdicts that a task reads from its own files."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from audiollm.recipe.ranks import ALONE
from audiollm.rl.online.rollout_files import GreedyAnswerFiles
from audiollm.rl.online.task import PolicyTask
from tests.audiollm.models.tiny_audio_llms import save_tiny
from tests.audiollm.rl.online.fresh_tasks import gradient_of_step, make_task
from tests.audiollm.rl.online.prompt_records import OWN, write_prompts

HELD_OUT = 4
GROUP = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("start")
    save_tiny("qwen2_audio", made / "llm")
    write_prompts(made, 12, held_out=HELD_OUT)
    return made


def task_with_files(folder: Path, out: Path, **settings: Any) -> PolicyTask:
    """A task that writes its evaluations to a folder."""
    given = {"rewards": {f"{OWN}evenness": 1.0, "accuracy": 1.0}, "group_size": GROUP, **settings}
    task, _ = make_task(folder, "llm", given)
    out.mkdir(exist_ok=True)
    task.evaluations._files = GreedyAnswerFiles(out, ALONE)
    return task


def test_the_start_is_measured_once_by_greedy_and_by_sampled_answers(folder: Path, tmp_path: Path) -> None:
    task = task_with_files(folder, tmp_path / "run")
    messages: list[str] = []
    task.evaluations.begin(messages.append)
    measure = task.evaluations.start
    assert measure is not None and measure.is_held_out and measure.prompts == HELD_OUT
    prompts, _ = task._parts.prompts.held_out_prompts(HELD_OUT)
    maker = task._parts.maker
    sampled, greedy = maker.sampled(prompts, 0), maker.greedy(prompts, 0)
    assert (len(sampled.rollouts), len(greedy.rollouts)) == (GROUP * HELD_OUT, HELD_OUT)
    rewards = [float(made.reward_A.mean()) for made in (greedy, sampled)]
    assert rewards[0] != rewards[1]
    assert [measure.greedy["reward"], measure.sampled["reward"]] == pytest.approx(rewards)
    flat = [len({*sampled.reward_A[n : n + GROUP].tolist()}) == 1 for n in range(0, GROUP * HELD_OUT, GROUP)]
    assert measure.groups_without_variance == pytest.approx(fmean(flat))
    assert measure.sampled.keys() == measure.greedy.keys() == {"reward", "accuracy", f"{OWN}evenness"}
    assert measure.sampled["accuracy"] == 0.0
    assert len(messages) == 2 and "accuracy 0.000 greedy / 0.000 sampled" in messages[0]
    assert messages[1].startswith("the policy is not fit to begin: 0.0% of its sampled answers to ")
    assert f"{HELD_OUT} held-out prompts are right" in messages[1]
    task_with_files(folder, tmp_path / "run").evaluations.begin(messages.append)
    assert len(messages) == 2, "a run that goes on has measured its start"


def test_an_evaluation_is_judged_by_its_own_rows(folder: Path, tmp_path: Path) -> None:
    task = task_with_files(folder, tmp_path / "run")
    task.evaluations.begin()
    assert task.evaluations.changes(0) == []
    root = task.modules()["policy"]
    with torch.no_grad():
        for parameter in root.parameters():
            parameter.mul_(1.5)
    task.evaluate(3)
    (change,) = task.evaluations.changes(3)
    assert change.step == 3 and task.evaluations.changes(2) == []
    assert task.evaluations.changes(9) == [change]


def test_the_entropy_of_a_step_is_kept_for_its_bounds(folder: Path, tmp_path: Path) -> None:
    task = task_with_files(folder, tmp_path / "run")
    _, _, update = gradient_of_step(task)
    buffers = dict(task.modules()["entropy"].named_buffers())
    assert (
        float(buffers["first"]) == float(buffers["last"]) == pytest.approx(float(update.figures["entropy"]))
    )
