"""What a step's sums are divided by, and which answers are in them: sums in plain Python, in float64."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.audiollm.families.dual_ffn.packed_samples import save_model
from tests.audiollm.models.tiny_audio_llms import save_tiny
from tests.audiollm.rl.online.fresh_tasks import PLUG_INS, gradient_of_step, make_task
from tests.audiollm.rl.online.prompt_records import OWN, write_prompts

GAE: dict[str, Any] = {
    "objective": "clip",
    "advantage": {"name": "gae", "gamma": 1.0, "lam": 0.9, "whiten": False},
    "critic": {},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("averages")
    save_tiny("qwen2_audio", made / "llm")
    save_model(made / "dual", "features")
    write_prompts(made)
    return made


@pytest.mark.parametrize(
    ("controller", "factor"),
    [
        ({"name": "proportional", "gain": 0.5}, lambda error, answers: 1 + 0.5 * error),
        ({"name": "horizon", "horizon": 40.0}, lambda error, answers: 1 + error * answers / 40),
    ],
    ids=["proportional", "horizon"],
)
def test_the_controller_follows_the_kl_of_an_answer(
    folder: Path, controller: dict[str, Any], factor: Any
) -> None:
    """The target is near the KL per answer: a KL per token would be cut to the least error."""
    kl = {"controller": {**controller, "coefficient": 0.3, "target": 1.0, "max_error": 3.0}}
    task, _ = make_task(folder, "llm", {"rewards": {f"{OWN}evenness": 1.0}, "kl": kl}, 64)
    batch = task.batch(1, torch.Generator())
    with torch.no_grad():
        passes = task._first_passes(batch.packs)
    total, tokens = 0.0, 0
    for answers in passes:
        apart_T = answers.policy_T - answers.required("reference_T")
        total += math.fsum(math.exp(-ratio) - 1 + ratio for ratio in apart_T.tolist())
        tokens += len(apart_T)
    answers_of_step = len(batch.rollout_step.rollouts)
    per_answer, per_token = total / answers_of_step, total / tokens
    assert answers_of_step == 12 and abs(per_answer - per_token) > 0.1 and per_answer < 4
    for update in task.updates(batch, 1, 2):
        for _ in update.loss:
            pass
        assert float(update.figures["kl"]) == pytest.approx(per_answer, rel=1e-9)
    coefficient = float(task.modules()["controller"].get_buffer("coefficient"))
    assert coefficient == pytest.approx(0.3 * factor(per_answer - 1.0, answers_of_step), rel=1e-9)


@pytest.mark.parametrize(
    ("rewards", "truncated"),
    [({f"{OWN}evenness": 1.0}, "leave_out"), ({f"{PLUG_INS}gaps": 1.0}, "keep")],
    ids=["truncated", "without a reward"],
)
def test_answers_that_are_left_out_do_not_train_the_critic(
    folder: Path, rewards: dict[str, float], truncated: str
) -> None:
    """The gradient of the critic's bias is the mean error of the tokens that count."""
    task, _ = make_task(folder, "llm", {**GAE, "rewards": rewards, "truncated": truncated}, 64, strict=False)
    batch = task.batch(1, torch.Generator())
    with torch.no_grad():
        passes = task._first_passes(batch.packs)
    scored, _ = task._make_advantages(batch.packs, passes)
    errors, left_out = [], 0
    for pack in scored:
        assert pack.values is not None
        is_out_A = pack.pack.reward_A.isnan()
        if truncated == "leave_out":
            is_out_A |= pack.pack.truncated_A
        left_out += int(is_out_A.sum())
        errors += (pack.values.old_T - pack.values.return_T)[~is_out_A[pack.answer_T]].tolist()
    assert 0 < left_out < len(batch.rollout_step.rollouts)
    _, _, update = gradient_of_step(task)
    critic: Any = task.modules()["policy"].critic
    assert float(critic.score.bias.grad) == pytest.approx(math.fsum(errors) / len(errors), rel=1e-6)
    squares = math.fsum(error**2 for error in errors) / len(errors)
    assert float(update.figures["value_error"]) == pytest.approx(squares, rel=1e-6)


@pytest.mark.parametrize(
    ("model", "settings", "longest"),
    [
        ("llm", {"rewards": {f"{OWN}evenness": 1.0}, "max_frames": 31}, 9),
        ("dual", {"rewards": {f"{PLUG_INS}even_codes": 1.0}, "answer": "audio", "max_frames": 7}, 7),
    ],
    ids=["text", "audio"],
)
def test_a_fixed_average_divides_by_the_longest_answer(
    folder: Path, model: str, settings: dict[str, Any], longest: int
) -> None:
    """Dr. GRPO: the sum over tokens of advantages without a scale, over answers and `max_answer_tokens` or frames."""
    task, _ = make_task(folder, model, {**settings, "objective": "dr_grpo"}, 300)
    batch = task.batch(1, torch.Generator())
    with torch.no_grad():
        passes = task._first_passes(batch.packs)
    scored, _ = task._make_advantages(batch.packs, passes)
    total = -math.fsum(value for pack in scored for value in pack.advantage_T.tolist())
    loss, _, _ = gradient_of_step(task)
    assert abs(total) > 1e-3
    assert loss == pytest.approx(total / len(batch.rollout_step.rollouts) / longest, rel=1e-9)
