"""Neither micro-batches nor ranks change the loss of a step or its gradient, whatever the objective."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from audiollm.data.records.manifest_source import ManifestSource
from audiollm.files.atomic import read_json, write_json
from audiollm.files.set_aside import SetAside
from audiollm.recipe.ranks import ALONE, Ranks
from audiollm.rl.objectives.catalog import ObjectiveTerm, objective_term
from audiollm.rl.policy.transformers_policy import TransformersPolicy
from audiollm.rl.preference.batches import StepMaker
from audiollm.rl.preference.records import Grouping, find_usable
from audiollm.rl.preference.task import PreferenceTask
from tests.audiollm.models.tiny_audio_llms import save_tiny
from tests.audiollm.rl.preference.records import write_lists
from tests.audiollm.train.two_ranks import on_two_ranks

OBJECTIVES: dict[str, tuple[str, dict[str, Any]]] = {
    "dpo": ("pairs", {}),
    "sampo": ("pairs", {}),
    "slic_hf": ("pairs", {"sft_average": "token"}),
    "aot": ("pairs", {}),
    "beta_dpo": ("pairs", {"level": "batch"}),
    "opa_dpo": ("pairs", {}),
    "lipo_lambda": ("lists", {}),
    "bco": ("singles", {}),
    "kto": ("singles", {}),
}
STEPS = 2


def make_task(folder: Path, name: str, max_tokens: int, ranks: Ranks) -> PreferenceTask:
    kind, settings = OBJECTIVES[name]
    term: ObjectiveTerm = objective_term(name, settings)
    policy = TransformersPolicy.load(folder / "llm", dtype=torch.float64)
    with torch.no_grad():  # away from the reference, where gradients of pairs differ
        for n, parameter in enumerate(policy.root.parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(n))
            parameter.add_(0.02 * noise.to(parameter.dtype))
    sources = [ManifestSource(str(folder / "records.jsonl"))]
    needs = term.needs
    grouping = Grouping(kind, needs.fields, "all")  # type: ignore[arg-type]
    set_aside = SetAside(folder / f"set_aside-{ranks.rank}.jsonl", "test", strict=True)
    steps: StepMaker[Any, Any, Any] = StepMaker(
        policy, sources, None, find_usable(sources, grouping, set_aside), grouping, 4, max_tokens, 3,
        "draw_T" in needs.fields, needs.mismatched_answers, needs.altered_recordings, ranks.rank, ranks.world,
    )  # fmt: skip
    return PreferenceTask(policy, steps, [term], set_aside, ranks)


def gradients(folder: Path, ranks: Ranks, name: str, max_tokens: int, result: str) -> None:
    """Write loss, gradient (some of its numbers) and figures of the last of some steps."""
    task = make_task(folder, name, max_tokens, ranks)
    root = task.modules()["policy"]
    for step in range(STEPS):
        root.zero_grad(set_to_none=True)
        batch = task.batch(step, torch.Generator())
        (update,) = task.updates(batch, step, STEPS)
        total = torch.zeros((), dtype=torch.float64)
        for loss in update.loss:
            loss.backward()
            total += loss.detach()
    flat = torch.cat(
        [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in root.parameters()]
    )
    found = {
        "loss": float(ranks.sum(total)),
        "gradient": ranks.sum(flat)[::7].tolist(),
        "figures": {key: float(value) for key, value in update.figures.items() if key != "tokens"},
        "batches": update.losses,
    }
    if ranks.first:
        write_json(folder / result, found)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("exact")
    save_tiny("qwen2_audio", made / "llm")
    write_lists(made)
    return made


@pytest.mark.parametrize("name", OBJECTIVES)
def test_micro_batches_change_nothing(folder: Path, name: str) -> None:
    gradients(folder, ALONE, name, 100_000, "whole.json")
    gradients(folder, ALONE, name, 64, "parts.json")
    whole, parts = read_json(folder / "whole.json"), read_json(folder / "parts.json")
    assert whole["batches"] == 1 and parts["batches"] == 4
    assert parts["loss"] == pytest.approx(whole["loss"], rel=1e-9)
    assert parts["gradient"] == pytest.approx(whole["gradient"], rel=1e-9, abs=1e-12)
    assert parts["figures"] == pytest.approx(whole["figures"], rel=1e-9)


def two_ranks(folder: Path, ranks: Ranks) -> None:
    for name in OBJECTIVES:
        gradients(folder, ranks, name, 100, f"two-{name}.json")


def test_two_ranks_are_one(folder: Path) -> None:
    on_two_ranks(partial(two_ranks), folder)
    for name in OBJECTIVES:
        gradients(folder, ALONE, name, 100_000, "one.json")
        one, two = read_json(folder / "one.json"), read_json(folder / f"two-{name}.json")
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-9), name
        assert two["gradient"] == pytest.approx(one["gradient"], rel=1e-9, abs=1e-12), name
        assert two["figures"] == pytest.approx(one["figures"], rel=1e-9), name
