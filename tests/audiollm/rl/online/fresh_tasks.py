"""Tasks of `train_policy` on tiny models in float64, a step of one, and rewards that score steps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from audiollm.data.records.manifest import ManifestSource
from audiollm.data.records.mixture import StepDraws
from audiollm.families.dual_ffn.policy import DualFFNPolicy
from audiollm.families.listener.policy import ListenerPolicy
from audiollm.families.rollout import RolloutSettings
from audiollm.files.atomic import read_json, write_json
from audiollm.files.set_aside import SetAside
from audiollm.recipe.ranks import ALONE, Ranks
from audiollm.rl.critic.model import Critic, CriticModel
from audiollm.rl.online.prompts import PromptMaker
from audiollm.rl.online.refill import maker_of
from audiollm.rl.online.rollout_files import RolloutFiles
from audiollm.rl.online.settings import KLChoice, PolicyTrainingConfig
from audiollm.rl.online.task import PolicyParts, PolicyTask
from audiollm.rl.policy_gradient.kl import kl_controller
from audiollm.rl.preference.ptx import SupervisedMaker
from audiollm.rl.rewards.batch import RewardBatch, ScoredStep
from audiollm.rl.rewards.registry import load_rewards
from audiollm.rl.rewards.scoring import RewardSuite
from audiollm.supervised.answers.batches import AnswerBatchMaker

PLUG_INS = "tests.audiollm.rl.online.fresh_tasks:"
STEP_CHARACTERS = 3


def thirds(batch: RewardBatch) -> list[list[ScoredStep] | float]:
    """Scores every three characters by their codes; an empty answer as a whole."""
    found: list[list[ScoredStep] | float] = []
    for answer in batch:
        text = answer.text
        parts = [text[first : first + STEP_CHARACTERS] for first in range(0, len(text), STEP_CHARACTERS)]
        ends = [min(len(text), STEP_CHARACTERS * (n + 1)) for n in range(len(parts))]
        steps = [
            ScoredStep(part, sum(map(ord, part)) % 5 / 4, end) for part, end in zip(parts, ends, strict=True)
        ]
        found.append(steps if answer.text else 0.0)
    return found


def even_letters(batch: RewardBatch) -> list[list[ScoredStep]]:
    """Every character is a step: 1 where its code is even."""
    return [
        [ScoredStep(letter, float(ord(letter) % 2 == 0), n + 1) for n, letter in enumerate(answer.text)]
        or [ScoredStep("", 0.0)]
        for answer in batch
    ]


def now_and_then(batch: RewardBatch) -> list[float | None]:
    """1 for about a fourth of the answers: the same for all answers of many groups."""
    return [float(sum(map(ord, answer.text)) % 4 == 0) for answer in batch]


def gaps(batch: RewardBatch) -> list[float | None]:
    """No value for about a third of the answers."""
    sums = [sum(map(ord, answer.text)) for answer in batch]
    return [float(total % 7) if total % 3 else None for total in sums]


def even_codes(batch: RewardBatch) -> list[float | None]:
    """The share of even codes."""
    return [
        None if each.codes_KT is None else float((each.codes_KT % 2 == 0).double().mean()) for each in batch
    ]


def same_for_all(batch: RewardBatch) -> list[float | None]:
    """Nothing can be learned from it."""
    return [1.0 for _ in batch]


def fails(batch: RewardBatch) -> list[float | None]:
    """Has no value for any answer."""
    raise RuntimeError("no judge is there")


def load_policy(folder: Path, model: str) -> Any:
    """A policy in float64, away from its reference."""
    policy: Any = (
        DualFFNPolicy.load(folder / model, dtype=torch.float64, rows_multiple=1)
        if model == "dual"
        else ListenerPolicy.load(folder / model, dtype=torch.float64)
    )
    with torch.no_grad():
        for n, parameter in enumerate(policy.root.parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(n))
            parameter.add_(0.02 * noise.to(parameter.dtype))
        if model == "llm":  # or hardly an answer ends by itself
            tiny = policy.root.model
            tiny.get_output_embeddings().weight[tiny.generation_config.eos_token_id] *= 12
    if model == "dual":
        policy.root.model.weights_changed()
    return policy


def make_task(
    folder: Path,
    model: str,
    settings: Mapping[str, Any],
    max_tokens: int = 100_000,
    ranks: Ranks = ALONE,
    place: str = "rollouts",
    strict: bool = True,
) -> tuple[PolicyTask, Any]:
    """A task with the settings of a recipe, and its policy; `strict`: an answer without a reward raises."""
    given: dict[str, Any] = {
        "samples": str(folder / "prompts.jsonl"), "start": folder / model, "steps": 10, "batch_size": 4,
        "group_size": 3, "max_answer_tokens": 9, "temperature": 0.9, "max_tokens": max_tokens, "seed": 4, **settings,
    }  # fmt: skip
    config = PolicyTrainingConfig(**given)
    policy = load_policy(folder, model)
    set_aside = SetAside(folder / f"set_aside-{ranks.rank}.jsonl", "test", strict=strict)
    prompts = PromptMaker(
        policy,
        [ManifestSource(str(folder / "prompts.jsonl"))],
        StepDraws(4, 4),
        set_aside,
        ranks,
    )
    terms = config.reward_terms
    sampling = RolloutSettings(4, 0, config.temperature, config.answer, config.max_answer_tokens, 9)
    rewards = RewardSuite(terms, load_rewards(terms))
    maker = maker_of(config, policy.rollout_engine(), policy, rewards, sampling, prompts, ranks)
    kl = config.kl or KLChoice()
    controller = kl_controller(kl.controller.name, kl.controller.values)
    files = RolloutFiles(folder / place, ranks, policy.pieces)
    critic = None if config.critic is None else load_critic(config)
    ptx = None
    if config.ptx is not None:
        sources = [ManifestSource(str(source.path)) for source in config.ptx.samples]
        ptx = SupervisedMaker(
            AnswerBatchMaker(policy, sources, StepDraws(4, 4, None, max_tokens), set_aside, ranks, "ptx"),
            config.ptx.weight,
        )
    parts = PolicyParts(
        policy, prompts, maker, files, controller, set_aside, ranks=ranks, critic=critic, ptx=ptx
    )
    return PolicyTask(config, parts), policy


def load_critic(config: PolicyTrainingConfig) -> Critic:
    """A critic in float64 whose values differ from token to token."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        root = CriticModel.begin(config, 100_000).root.double()
        torch.nn.init.normal_(root.score.bias)
    return root


def one_step(
    folder: Path,
    ranks: Ranks,
    model: str,
    settings: Mapping[str, Any],
    max_tokens: int,
    place: str,
    moved: float = 0.0,
) -> None:
    """Write loss, gradient (some of its numbers) and figures of a step; `moved`: as `gradient_of_step` has it."""
    task, _ = make_task(folder, model, settings, max_tokens, ranks, place)
    loss, gradient, update = gradient_of_step(task, ranks, moved=moved)
    figures = {
        key: float(value)
        for key, value in update.figures.items()
        if key != "tokens" and not key.startswith("seconds/")
    }
    if ranks.first:
        found = {"loss": loss, "gradient": gradient.tolist(), "figures": figures, "packs": update.losses}
        write_json(folder / f"{place}.json", found)


def gradient_of_step(
    task: PolicyTask, ranks: Ranks = ALONE, step: int = 1, moved: float = 0.0
) -> tuple[float, torch.Tensor, Any]:
    """The loss of a step over all ranks, every seventh number of its gradient, and its only update.

    Args:
        moved: size of the noise that is added to the weights once they have sampled: the answers are of other weights.
    """
    root = task.modules()["policy"]
    batch = task.batch(step, torch.Generator(), ranks)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in root.parameters() if moved else ():
            parameter.add_(moved * torch.randn(parameter.shape, generator=generator).to(parameter))
    (update,) = task.updates(batch, step, step + 1)
    total = torch.zeros((), dtype=torch.float64)
    for loss in update.loss:
        loss.backward()
        total += loss.detach()
    return float(ranks.sum(total)), ranks.sum(flat_gradient(root))[::7], update


def flat_gradient(root: torch.nn.Module) -> torch.Tensor:
    """The gradients of all parameters, one after the other."""
    return torch.cat(
        [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in root.parameters()]
    )


def compare(folder: Path, found: str, expected: str) -> dict[str, Any]:
    """Check that two steps that were written are equal, and not without a gradient."""
    one, other = read_json(folder / f"{found}.json"), read_json(folder / f"{expected}.json")
    assert one["loss"] == pytest.approx(other["loss"], rel=1e-9, abs=1e-12)
    assert one["gradient"] == pytest.approx(other["gradient"], rel=1e-8, abs=1e-11)
    assert one["figures"] == pytest.approx(other["figures"], rel=1e-8, abs=1e-11)
    assert max(map(abs, one["gradient"])) > 1e-4
    return {"one": one, "other": other}
