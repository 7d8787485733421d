"""Process rewards, dynamic sampling, online DPO and RFT, and top-entropy tokens: closed forms, packs and ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from audiollm.errors import ConfigError
from audiollm.families.logprobs.answers import AnswerLogprobs, Pairs
from audiollm.families.logprobs.token_figures import TokenRequest
from audiollm.files.atomic import read_jsonl
from audiollm.recipe.ranks import ALONE, Ranks
from audiollm.rl.objectives.catalog import CATALOG, objective_term
from audiollm.rl.objectives.figures import StepFigures
from audiollm.rl.objectives.registry import mixed_losses
from audiollm.rl.online.objectives import SELECTIONS, fresh_objective
from audiollm.rl.online.rollout_step import RolloutStep
from audiollm.rl.online.settings import PolicyTrainingConfig
from tests.audiollm.families.dual_ffn.packed_samples import save_model
from tests.audiollm.models.tiny_audio_llms import save_tiny
from tests.audiollm.rl.online.fresh_tasks import (
    PLUG_INS,
    compare,
    flat_gradient,
    gradient_of_step,
    make_task,
    one_step,
)
from tests.audiollm.rl.online.prompt_records import OWN, write_prompts
from tests.audiollm.train.two_ranks import on_two_ranks

REWARDS = {f"{OWN}brevity": 0.1, f"{OWN}evenness": 1.0}
STEPS = {f"{PLUG_INS}thirds": 2.0, f"{OWN}brevity": 0.1}
KL = {"controller": {"name": "fixed", "coefficient": 0.3}}
CASES: dict[str, dict[str, Any]] = {
    "process": {"rewards": STEPS, "advantage": "grpo_process", "objective": "dapo"},
    "process-batch": {
        "rewards": STEPS,
        "advantage": {"name": "grpo_process", "scale": "batch", "outcome": False},
        "kl": KL,
    },
    "reinforce-steps": {
        "rewards": STEPS,
        "advantage": {"name": "reinforce_plus_plus", "steps": True, "gamma": 0.9},
        "kl": {**KL, "place": "reward"},
    },
    "online_dpo": {"rewards": REWARDS, "objective": {"name": "online_dpo", "beta": 0.2}},
    "online_ipo": {"rewards": REWARDS, "objective": {"name": "online_dpo", "loss": "ipo"}},
    "online_tdpo": {"rewards": REWARDS, "objective": {"name": "online_dpo", "loss": "tdpo2"}},
    "online_aot": {"rewards": REWARDS, "objective": {"name": "online_dpo", "loss": "aot"}},
    "online_rft": {"rewards": REWARDS, "objective": {"name": "online_rft", "least": 1.0, "per_group": 2}},
    "online_bco": {"rewards": REWARDS, "objective": {"name": "online_rft", "loss": "bco", "least": 2.0}},
    "top-entropy": {"rewards": REWARDS, "objective": "dapo", "top_entropy": 0.3, "entropy_weight": 0.02},
    "overlong": {"rewards": REWARDS, "overlong": {"buffer": 4, "weight": 2.0}, "truncated": "leave_out"},
    "refill": {"rewards": {f"{PLUG_INS}now_and_then": 1.0}, "refill": {"most": 2}, "objective": "dapo"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("fresh")
    save_tiny("qwen2_audio", made / "llm")
    save_model(made / "dual", "features")
    write_prompts(made, 14)
    return made


@pytest.mark.parametrize("model", ["llm", "dual"])
@pytest.mark.parametrize("case", CASES)
def test_packs_change_nothing(folder: Path, model: str, case: str) -> None:
    one_step(folder, ALONE, model, CASES[case], 100_000, "whole")
    one_step(folder, ALONE, model, CASES[case], 64, "parts")
    both = compare(folder, "parts", "whole")
    assert both["other"]["packs"] == 1 < both["one"]["packs"]
    assert both["one"]["figures"]["skipped"] == 0 < both["one"]["figures"]["entropy"]


def other_losses() -> list[tuple[str, str]]:
    """The objectives on pairs or single answers that can be trained on fresh answers, beside those of `CASES`."""
    found = []
    for selection, (kind, _) in SELECTIONS.items():
        for name, entry in CATALOG.items():
            with suppress(ConfigError):
                fresh_objective(selection, {"loss": name})
                assert kind in entry.groups
                found.append((selection, name))
    return [each for each in found if each[1] not in ("dpo", "ipo", "tdpo2", "aot", "sft", "bco")]


@pytest.mark.parametrize(("selection", "loss"), other_losses())
def test_any_objective_on_fresh_answers(folder: Path, selection: str, loss: str) -> None:
    settings = {"rewards": REWARDS, "objective": {"name": selection, "loss": loss}}
    one_step(folder, ALONE, "llm", settings, 100_000, "whole")
    one_step(folder, ALONE, "llm", settings, 64, "parts")
    compare(folder, "parts", "whole")


def two_ranks(folder: Path, ranks: Ranks) -> None:
    for case, settings in CASES.items():
        one_step(folder, ranks, "llm", settings, 100, f"two-{case}")


@pytest.mark.slow
def test_two_ranks_are_one(folder: Path) -> None:
    on_two_ranks(two_ranks, folder)
    for case, settings in CASES.items():
        one_step(folder, ALONE, "llm", settings, 100_000, f"one-{case}")
        compare(folder, f"two-{case}", f"one-{case}")


# -------------------------------------------------------------------------------------------------- closed forms


@dataclass
class PlainAnswer:
    """An answer, computed alone."""

    group: int
    text: str
    reward: float
    truncated: bool
    policy_N: Tensor
    """With gradient."""
    reference: list[float]
    entropy_N: Tensor
    """With gradient."""
    steps: list[tuple[float, int, bool]]
    """Rewards of steps, the numbers of the tokens that end them, and whether they are outcomes."""

    @property
    def entropy(self) -> list[float]:
        return self.entropy_N.tolist()

    @property
    def log_policy(self) -> float:
        return math.fsum(self.policy_N.tolist())


def plain_answers(made: RolloutStep, policy: Any, task: Any) -> list[PlainAnswer]:
    found = []
    rewards, place = made.reward_A.tolist(), 0
    for number, group in enumerate(made.groups):
        for rollout in group.rollouts:
            (encoded,) = policy.encode_sampled(group.prompt.prompted, [rollout.tokens])
            request = TokenRequest(reference=True, temperature=0.9, entropy=True)
            own = policy.answer_logprobs(policy.root, policy.batch([encoded]), request)
            steps = (
                [(each.reward, each.action, each.is_outcome) for each in made.steps[place]]
                if made.steps
                else []
            )
            found.append(
                PlainAnswer(
                    number,
                    rollout.text,
                    rewards[place],
                    rollout.truncated,
                    own.policy_T,
                    own.reference_T.tolist(),
                    own.entropy_T,
                    steps,
                )
            )
            place += 1
    return found


def check(
    folder: Path, model: str, case: str, expected: Callable[[list[PlainAnswer]], tuple[float, Tensor]]
) -> Any:
    """Compare loss and gradient of a step with those of `expected`: a number, and a scalar with its gradient."""
    task, policy = make_task(folder, model, CASES[case], 64 if model == "llm" else 300)
    made = task.batch(1, torch.Generator()).rollout_step
    value, scalar = expected(plain_answers(made, policy, task))
    scalar.backward()
    wanted = flat_gradient(policy.root)[::7].clone()
    policy.root.zero_grad()
    loss, gradient, update = gradient_of_step(task)
    assert loss == pytest.approx(value, rel=1e-9, abs=1e-12)
    torch.testing.assert_close(gradient, wanted, rtol=1e-7, atol=1e-11)
    return update, made


def mean_of(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def deviation_of(values: list[float]) -> float:
    mean = mean_of(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))


@pytest.mark.parametrize("model", ["llm", "dual"])
def test_process_rewards_by_hand(folder: Path, model: str) -> None:
    def expected(answers: list[PlainAnswer]) -> tuple[float, Tensor]:
        value, scalar, tokens = 0.0, torch.zeros((), dtype=torch.float64), 0
        for group in {each.group for each in answers}:
            own = [each for each in answers if each.group == group]
            moments = {}
            for kind in (False, True):
                rewards = [
                    reward for each in own for reward, _, is_outcome in each.steps if is_outcome is kind
                ]
                moments[kind] = mean_of(rewards), deviation_of(rewards) + 1e-4
            for each in own:
                tokens += len(each.policy_N)
                for token in range(len(each.policy_N)):
                    later = [
                        (reward - moments[kind][0]) / moments[kind][1]
                        for reward, end, kind in each.steps
                        if end >= token
                    ]
                    value -= math.fsum(later)
                    scalar = scalar - math.fsum(later) * each.policy_N[token]
        return value / tokens, scalar / tokens

    _, made = check(folder, model, "process", expected)
    assert any(len(own) > 2 for own in made.steps)
    rows = read_jsonl(folder / "rollouts" / "000001.jsonl")
    for row, steps in zip(rows, made.steps, strict=True):
        assert [each["reward"] for each in row["steps"]] == [each.reward for each in steps]
        if row["answer"]:
            assert "".join(each["text"] for each in row["steps"]) == row["answer"]
        assert row["steps"][-1]["action"] == row["tokens"] - 1  # the outcome ends with the answer
        assert row["steps"][-1]["reward"] == pytest.approx(-0.1 * row["tokens"])


@pytest.mark.parametrize("model", ["llm", "dual"])
def test_online_dpo_by_hand_and_as_offline(folder: Path, model: str) -> None:
    offline: list[float] = []

    def expected(answers: list[PlainAnswer]) -> tuple[float, Tensor]:
        value, scalar, pairs = 0.0, torch.zeros((), dtype=torch.float64), []
        for group in {each.group for each in answers}:
            own = [n for n, each in enumerate(answers) if each.group == group]
            best = max(own, key=lambda n: (answers[n].reward, -n))
            worst = min(own, key=lambda n: (answers[n].reward, n))
            if answers[best].reward > answers[worst].reward:
                pairs.append((best, worst))
        for best, worst in pairs:
            ratios = [answers[n].log_policy - math.fsum(answers[n].reference) for n in (best, worst)]
            logit = 0.2 * (ratios[0] - ratios[1])
            value += math.log1p(math.exp(-logit))
            slope = -0.2 / (1 + math.exp(logit))
            scalar = scalar + slope * (answers[best].policy_N.sum() - answers[worst].policy_N.sum())
        logprobs = AnswerLogprobs(
            torch.cat([each.policy_N.detach() for each in answers]),
            torch.tensor([n for n, each in enumerate(answers) for _ in each.policy_N]),
            len(answers),
            torch.tensor([v for each in answers for v in each.reference], dtype=torch.float64),
        )
        indices = torch.tensor(pairs).T
        term = objective_term("dpo", {"beta": 0.2})
        losses = mixed_losses([term], logprobs, Pairs(indices[0], indices[1]), StepFigures())
        offline.append(float(losses.loss_I.mean()))
        return value / len(pairs), scalar / len(pairs)

    update, _ = check(folder, model, "online_dpo", expected)
    assert float(update.figures["items"]) > 1
    assert offline[0] == pytest.approx(
        gradient_of_step(make_task(folder, model, CASES["online_dpo"])[0])[0], rel=1e-12
    )
    assert {"reward_chosen", "reward_rejected", "margin"} <= update.figures.keys()
    rows = read_jsonl(folder / "rollouts" / "000001.jsonl")
    assert sum(bool(row["old"]) for row in rows) == 2 * update.figures["items"] < len(rows) == 12
    assert not any(row["advantages"] for row in rows)


@pytest.mark.parametrize("model", ["llm", "dual"])
def test_online_rft_by_hand(folder: Path, model: str) -> None:
    def expected(answers: list[PlainAnswer]) -> tuple[float, Tensor]:
        accepted: list[PlainAnswer] = []
        for group in {each.group for each in answers}:
            own = sorted((each for each in answers if each.group == group), key=lambda each: -each.reward)
            accepted += [each for each in own[:2] if each.reward >= 1.0]
        tokens = sum(len(each.policy_N) for each in accepted)
        total = torch.stack([each.policy_N.sum() for each in accepted]).sum()
        return -math.fsum(each.log_policy for each in accepted) / tokens, -total / tokens

    check(folder, model, "online_rft", expected)


def test_top_entropy_by_hand(folder: Path) -> None:
    """The tokens of the highest entropies have advantages and the entropy bonus; all tokens are in the mean."""

    def expected(answers: list[PlainAnswer]) -> tuple[float, Tensor]:
        entropies = sorted(value for each in answers for value in each.entropy)
        place = 0.7 * (len(entropies) - 1)
        low, high = entropies[math.floor(place)], entropies[math.ceil(place)]
        threshold = low + (place - math.floor(place)) * (high - low) - 1e-9
        acting = sum(entropy >= threshold for entropy in entropies)
        assert acting == pytest.approx(0.3 * len(entropies), abs=1)
        value, scalar = 0.0, torch.zeros((), dtype=torch.float64)
        for group in {each.group for each in answers}:
            own = [each for each in answers if each.group == group]
            rewards = [each.reward for each in own]
            for each in own:
                advantage = (each.reward - mean_of(rewards)) / (deviation_of(rewards) + 1e-4)
                for token, entropy in enumerate(each.entropy):
                    if entropy >= threshold:
                        value -= advantage / len(entropies) + 0.02 * entropy / acting
                        scalar = scalar - advantage / len(entropies) * each.policy_N[token]
                        scalar = scalar - 0.02 / acting * each.entropy_N[token]
        return value, scalar

    update, _ = check(folder, "llm", "top-entropy", expected)
    assert 0 < float(update.figures["entropy"]) < 10


def test_coarse_codes_alone_have_advantages(folder: Path) -> None:
    """Codes whose log-probability reaches the head of the first codebook act; all codes are in the mean."""
    spoken = {"rewards": {f"{PLUG_INS}even_codes": 1.0}, "answer": "audio", "max_frames": 9, "codebooks": 1}
    task, policy = make_task(folder, "dual", spoken, 300)
    made = task.batch(1, torch.Generator()).rollout_step
    config = policy.root.model.config
    answers = plain_answers(made, policy, task)
    scalar, acting = torch.zeros((), dtype=torch.float64), 0
    for group in {each.group for each in answers}:
        own = [each for each in answers if each.group == group]
        rewards = [each.reward for each in own]
        for each in own:
            advantage = (each.reward - mean_of(rewards)) / (deviation_of(rewards) + 1e-4)
            for logprob in each.policy_N:
                (by_row,) = torch.autograd.grad(
                    logprob, policy.root.model.audio_lm_head.weight, retain_graph=True
                )
                rows = by_row.abs().sum(1).nonzero().flatten()
                if rows.max() < config.codebook_size:
                    acting += 1
                    scalar = scalar - advantage / len(each.policy_N) / len(answers) * logprob
    assert 0 < acting < sum(len(each.policy_N) for each in answers) / (config.num_codebooks - 1)
    scalar.backward()
    wanted = flat_gradient(policy.root)[::7].clone()
    policy.root.zero_grad()
    _, gradient, _ = gradient_of_step(task)
    assert wanted.abs().max() > 1e-4
    torch.testing.assert_close(gradient, wanted, rtol=1e-7, atol=1e-11)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"answer": "text"}, "answer is text"),
        ({"objective": "gspo"}, "whole answers"),
        ({"objective": "rloo"}, "whole answers"),
        ({"objective": "online_dpo"}, "does not read codebooks"),
    ],
)
def test_where_advantages_of_coarse_codes_would_reach_others(
    folder: Path, changed: dict[str, Any], told: str
) -> None:
    spoken = {"rewards": {f"{PLUG_INS}even_codes": 1.0}, "answer": "audio", "codebooks": 1}
    with pytest.raises(ValueError, match=told):
        PolicyTrainingConfig(
            samples=str(folder / "prompts.jsonl"), start=folder / "dual", **{**spoken, **changed}
        )


def test_top_entropy_tokens_are_those_of_before_the_updates(folder: Path) -> None:
    """The second update has the tokens of the first, whatever their entropies have become."""
    task, policy = make_task(folder, "llm", {**CASES["top-entropy"], "updates": 2})
    batch = task.batch(1, torch.Generator())
    before = plain_answers(batch.rollout_step, policy, task)
    updates = task.updates(batch, 1, 2)
    for _ in next(updates).loss:
        pass
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in policy.root.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator).to(parameter))
    loss = math.fsum(float(part.detach()) for part in next(updates).loss)
    now = plain_answers(batch.rollout_step, policy, task)

    entropies = sorted(value for each in before for value in each.entropy)
    place = 0.7 * (len(entropies) - 1)
    low, high = entropies[math.floor(place)], entropies[math.ceil(place)]
    threshold = low + (place - math.floor(place)) * (high - low)
    acting = sum(entropy >= threshold for entropy in entropies)
    value, moved = 0.0, 0
    for each, then in zip(now, before, strict=True):
        rewards = [other.reward for other in before if other.group == each.group]
        advantage = (each.reward - mean_of(rewards)) / (deviation_of(rewards) + 1e-4)
        for token, entropy in enumerate(then.entropy):
            moved += (entropy >= threshold) != (each.entropy[token] >= threshold)
            if entropy >= threshold:
                ratio = math.exp(float((each.policy_N[token] - then.policy_N[token]).detach()))
                gain = min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage)
                value -= gain / len(entropies) + 0.02 * each.entropy[token] / acting
    assert moved, "the weights moved too little for the test to tell"
    assert loss == pytest.approx(value, rel=1e-9)


def test_steps_in_returns_by_hand(folder: Path) -> None:
    """REINFORCE++ with the rewards of steps at the tokens that end them, and the KL at every token."""

    def expected(answers: list[PlainAnswer]) -> tuple[float, Tensor]:
        returns: list[list[float]] = []
        for each in answers:
            d = [p - r for p, r in zip(each.policy_N.tolist(), each.reference, strict=True)]
            rewards = [-0.3 * (math.exp(-value) - 1 + value) for value in d]
            for reward, end, _ in each.steps:
                rewards[end] += reward
            total, own = 0.0, []
            for reward in reversed(rewards):
                total = reward + 0.9 * total
                own.insert(0, total)
            returns.append(own)
        every = [value for own in returns for value in own]
        mean, deviation = mean_of(every), deviation_of(every) + 1e-8
        value, scalar = 0.0, torch.zeros((), dtype=torch.float64)
        for each, own in zip(answers, returns, strict=True):
            advantages = torch.tensor([(one - mean) / deviation for one in own], dtype=torch.float64)
            value -= mean_of(advantages.tolist()) / len(answers)
            scalar = scalar - (advantages * each.policy_N).mean() / len(answers)
        return value, scalar

    check(folder, "llm", "reinforce-steps", expected)


def test_the_overlong_penalty_is_a_reward_of_its_own(folder: Path) -> None:
    task, _ = make_task(folder, "llm", CASES["overlong"])
    _, _, update = gradient_of_step(task)
    rows = read_jsonl(folder / "rollouts" / "000001.jsonl")
    for row in rows:
        penalty = -min(1.0, max(0.0, (row["tokens"] - (9 - 4)) / 4))
        assert row["rewards"]["overlong"] == pytest.approx(penalty)
        others = math.fsum(REWARDS[name] * row["rewards"][name] for name in REWARDS)
        assert row["reward"] == pytest.approx(others + 2 * penalty)
    assert update.figures["reward/overlong"] == pytest.approx(
        mean_of([row["rewards"]["overlong"] for row in rows])
    )
    assert any(row["rewards"]["overlong"] for row in rows)
