"""A policy of transformers on two ranks: DDP and FSDP2 train as one rank does, with a batch without recordings."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from audiollm.audio import Waveform
from audiollm.families.listener.policy import ListenerPolicy
from audiollm.families.logprobs.answers import Pairs
from audiollm.families.logprobs.token_figures import TokenRequest
from audiollm.families.policy import PromptedAnswers
from audiollm.files.atomic import read_json, write_json
from audiollm.recipe.ranks import ALONE, Ranks
from audiollm.rl.objectives.catalog import objective_term
from audiollm.rl.objectives.figures import StepFigures
from audiollm.rl.objectives.registry import mixed_losses
from audiollm.train.parallel.strategy import choose_strategy
from audiollm.train.settings import LoRASettings, StrategyName
from tests.audiollm.models.tiny_audio_llms import save_tiny
from tests.audiollm.train.two_ranks import let_zero3_take_float64, on_two_ranks

STEPS = 3


def prompts() -> list[PromptedAnswers]:
    """The second rank has no recording at all."""
    noise = 0.1 * torch.randn(2, 1, 16_000, generator=torch.Generator().manual_seed(0))
    heard = [
        PromptedAnswers(f"h{n}", [("user", [Waveform(noise[n], 16_000)])], ["yes", "no"]) for n in (0, 1)
    ]
    read = [PromptedAnswers(f"r{n}", [("user", [word])], ["one", "two"]) for n, word in enumerate(("a", "b"))]
    return [heard[0], read[0], heard[1], read[1]]


def train_steps(folder: Path, ranks: Ranks, strategy: StrategyName, trained: str) -> None:
    """Some steps of DPO; the losses of all ranks of each step are written."""
    if strategy == "zero3" and ranks.world > 1:
        let_zero3_take_float64()
    torch.manual_seed(0)
    policy = ListenerPolicy.load(
        folder / "llm", "adapter" if trained == "adapter" else "all", LoRASettings(rank=2), torch.float64
    )
    chosen = choose_strategy(strategy, ranks, torch.device("cpu"), None, 1e9)
    modules: dict[str, nn.Module] = {"model": policy.root}

    def build() -> dict[str, torch.optim.Optimizer]:
        return {"main": torch.optim.AdamW([p for p in policy.root.parameters() if p.requires_grad], 0.01)}

    root = chosen.prepare(modules, {"main": ["model"]}, build)["model"]
    root.train()
    term = objective_term("dpo", {"beta": 0.5}, 1.0)
    losses = []
    for _ in range(STEPS):
        chosen.optimizers["main"].zero_grad(set_to_none=True)
        encoded = [answer for one in prompts()[ranks.rank :: ranks.world] for answer in policy.encode(one)]
        answers = policy.answer_logprobs(root, policy.batch(encoded), TokenRequest())
        pairs = Pairs(torch.arange(0, len(encoded), 2), torch.arange(1, len(encoded), 2))
        loss: Tensor = mixed_losses([term], answers, pairs, StepFigures()).loss_I.sum() / len(prompts())
        with chosen.accumulate("main", last=True):
            chosen.backward(loss, "main", last=True)
        chosen.step("main", 1e9)
        losses.append(float(ranks.sum(loss.detach())))
    if ranks.rank == 0:
        write_json(folder / f"{strategy}-{trained}-{ranks.world}.json", losses)


@pytest.mark.parametrize(
    ("strategy", "trained", "tolerance"),
    [
        ("ddp", "adapter", 1e-9),
        ("fsdp2", "all", 1e-9),
        ("fsdp2", "adapter", 1e-9),
        ("zero3", "adapter", 1e-6),  # DeepSpeed updates in float32
    ],
)
def test_two_ranks_train_as_one(
    tmp_path: Path, strategy: StrategyName, trained: str, tolerance: float
) -> None:
    save_tiny("qwen2_audio", tmp_path / "llm")
    train_steps(tmp_path, ALONE, strategy, trained)
    on_two_ranks(partial(train_steps, strategy=strategy, trained=trained), tmp_path)
    one, two = (read_json(tmp_path / f"{strategy}-{trained}-{world}.json") for world in (1, 2))
    assert one == pytest.approx(two, rel=tolerance) and one[-1] < one[0]
