"""Whole copies of a model in training: the same weights on every rank, under every strategy, adapters merged."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from audiollm.families.adapters import MergedWeights
from audiollm.families.dual_ffn.rollouts import DualFFNRollouts
from audiollm.families.logprobs.token_figures import TokenRequest
from audiollm.families.rollout import RolloutSettings
from audiollm.files.atomic import read_json, write_json
from audiollm.recipe.ranks import Ranks
from audiollm.train.loop.whole import WholeCopy, fill_whole
from audiollm.train.parallel.strategy import choose_strategy
from audiollm.train.settings import StrategyName, Trained
from tests.audiollm.families.dual_ffn.packed_samples import load, samples, save_model
from tests.audiollm.train.two_ranks import on_two_ranks

CPU, STEPS = torch.device("cpu"), 3
SETTINGS = RolloutSettings(seed=1, step=0, max_text_tokens=6)


def digest(weights: Mapping[str, Tensor]) -> str:
    found = hashlib.sha256()
    for name in sorted(weights):
        found.update(name.encode() + weights[name].detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def gathered(tensor: Tensor, strategy: str) -> Tensor:
    """A whole tensor by the means of torch or DeepSpeed alone."""
    if hasattr(tensor, "full_tensor"):
        found: Tensor = tensor.full_tensor()
        return found
    if strategy.startswith("zero") and isinstance(tensor, nn.Parameter):
        from deepspeed import zero
        from deepspeed.utils import safe_get_full_fp32_param

        if tensor.requires_grad:
            return safe_get_full_fp32_param(tensor).clone()
        with zero.GatheredParameters([tensor], enabled=hasattr(tensor, "ds_id")):
            return tensor.detach().clone()
    return tensor.detach().clone()


def train_and_copy(folder: Path, ranks: Ranks, strategy: StrategyName, trained: Trained) -> None:
    """Train a few steps; after each, write the digests of the copy and of the weights that others gathered."""
    policy = load(folder, trained, torch.float32)
    expected = load(folder, trained, torch.float32)
    copy = policy.root.model.empty_copy(CPU)
    before = torch.get_rng_state()
    whole = WholeCopy(policy.root.model, copy)
    rollouts = DualFFNRollouts(copy, policy.template)
    chosen = choose_strategy(strategy, ranks, CPU, None, 1e9)

    def build() -> dict[str, torch.optim.Optimizer]:
        return {"main": torch.optim.AdamW([p for p in policy.root.parameters() if p.requires_grad], 0.01)}

    root = chosen.prepare({"model": policy.root}, {"main": ["model"]}, build)["model"]
    root.train()
    whole.read_by(chosen.read)
    rows = []
    for step in range(STEPS):
        chosen.optimizers["main"].zero_grad(set_to_none=True)
        batch = policy.batch(policy.encode(samples("codes")[(step + ranks.rank) % 3]))
        answers = policy.answer_logprobs(root, batch, TokenRequest(reference=False))
        with chosen.accumulate("main", last=True):
            chosen.backward(-answers.policy_T.mean(), "main", last=True)
        chosen.step("main", 1e9)
        whole.fill()
        state = {n: gathered(t, strategy) for n, t in policy.root.state_dict(keep_vars=True).items()}
        expected.root.load_state_dict(state)
        adapted = expected.root.adapted
        true = expected.root.model.state_dict() if adapted is None else MergedWeights(adapted)
        (group,) = rollouts.sample(samples("codes")[:1], [[0, 1]], SETTINGS)
        (other,) = DualFFNRollouts(expected.root.model, policy.template).sample(
            samples("codes")[:1], [[0, 1]], SETTINGS
        )
        same = [torch.equal(a.tokens.ids_N, b.tokens.ids_N) for a, b in zip(group, other, strict=True)]
        rows.append([digest(copy.state_dict()), digest(true), all(same)])
    assert torch.equal(before, torch.get_rng_state())
    write_json(folder / f"{strategy}-{trained}-{ranks.rank}.json", rows)


@pytest.mark.parametrize(
    ("trained", "strategy"),
    [
        ("all", "ddp"),
        pytest.param("adapter", "ddp", marks=pytest.mark.slow),
        pytest.param("all", "fsdp2", marks=pytest.mark.slow),
        ("adapter", "fsdp2"),
        ("adapter", "zero2"),
        ("all", "zero3"),
        pytest.param("all", "zero2", marks=pytest.mark.slow),
        pytest.param("adapter", "zero3", marks=pytest.mark.slow),
    ],
)
def test_copies_are_the_model_after_each_update(
    tmp_path: Path, strategy: StrategyName, trained: Trained
) -> None:
    save_model(tmp_path, "codes")
    on_two_ranks(partial(train_and_copy, strategy=strategy, trained=trained), tmp_path)
    first, second = (read_json(tmp_path / f"{strategy}-{trained}-{rank}.json") for rank in (0, 1))
    assert first == second and len({row[0] for row in first}) == STEPS
    assert all(copied == true and same for copied, true, same in first)


def test_alone_and_one_tensor_at_a_time(tmp_path: Path) -> None:
    policy = load(save_model(tmp_path, "codes"), "adapter", torch.float32)
    copy = policy.root.model.empty_copy(CPU)
    alive: list[Any] = []
    most = 0

    def read(tensor: Tensor) -> Tensor:
        nonlocal most
        gathered_here = tensor.detach().clone()
        alive.append(weakref.ref(gathered_here))
        most = max(most, sum(each() is not None for each in alive))
        return gathered_here

    fill_whole(policy.root.model, read, copy)
    assert most == 2  # both factors of an adapter; else one
    assert digest(copy.state_dict()) == digest(MergedWeights(policy.root.adapted))
    fill_whole(policy.root.model, read, None)
    whole = WholeCopy(policy.root.model, copy)
    whole.fill()
    assert digest(copy.state_dict()) == digest(MergedWeights(policy.root.adapted))
    with pytest.raises(ValueError, match="other tensors"):
        fill_whole(policy.root.model, read, nn.Linear(2, 2))
