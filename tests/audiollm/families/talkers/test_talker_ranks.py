"""Talkers in float64: a step is the same packed, in pieces, and on two ranks, with any strategy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from audiollm.data.records.mixture import StepDraws
from audiollm.data.records.opening import open_source
from audiollm.families.policies import load_policy
from audiollm.files.atomic import read_json, write_json
from audiollm.files.set_aside import SetAside
from audiollm.recipe.ranks import ALONE, Ranks
from audiollm.recipe.stages import required
from audiollm.supervised.answers.batches import AnswerBatchMaker
from audiollm.supervised.answers.task import AnswerTask
from audiollm.train.parallel.strategy import choose_strategy
from audiollm.train.settings import LoRASettings, StrategyName
from tests.audiollm.families.higgs_v3_tts.tiny_higgs_v3 import BOOKS as HIGGS_BOOKS
from tests.audiollm.families.higgs_v3_tts.tiny_higgs_v3 import write_tiny_higgs_v3
from tests.audiollm.families.talkers.talker_runs import random_codes, write_clips
from tests.audiollm.families.talkers.tiny_csm import BOOKS, write_tiny_csm
from tests.audiollm.families.talkers.tiny_qwen3_tts import write_tiny_qwen3_tts
from tests.audiollm.train.two_ranks import let_zero3_take_float64, on_two_ranks

CODES = 16
STEPS = 3
WHOLE_STEP, ALONE_EACH = 100_000, 45
"""Rows of a batch: all samples of a step, or about one."""
FAMILIES: dict[str, tuple[Callable[..., Path], int, tuple[str, ...]]] = {
    "csm": (write_tiny_csm, BOOKS, ("backbone", "depth_decoder")),
    "qwen3_tts": (write_tiny_qwen3_tts, BOOKS, ("talker", "code_predictor")),
    "higgs_v3_tts": (write_tiny_higgs_v3, HIGGS_BOOKS, ("backbone",)),
}
"""By family: what writes its tiny model, codebooks, and the parts that are adapted."""


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp(request.param)
    write_model, books, _ = FAMILIES[request.param]
    write_model(place / "model")
    clips = {f"{frames} clip": [random_codes(books, CODES, frames, frames)] for frames in (2, 5, 9, 14)}
    write_clips(place / "clips", clips, books, CODES)
    (place / "family").write_text(request.param)
    return place


def new_task(folder: Path, ranks: Ranks, trained: str, max_tokens: int) -> AnswerTask:
    """Supervised training on all clips in each step."""
    _, _, parts = FAMILIES[(folder / "family").read_text()]
    torch.manual_seed(0)
    lora = LoRASettings(rank=2, target_modules=parts) if trained == "adapter" else None
    policy = load_policy(folder / "model", "adapter" if lora else "all", lora)
    policy.root.double()
    set_aside = SetAside(folder / f"set_aside-{ranks.rank}.jsonl", "train", strict=True)
    draws = StepDraws(batch_size=4, max_tokens=max_tokens)
    maker = AnswerBatchMaker(policy, [open_source(folder / "clips")], draws, set_aside, ranks, "samples")
    return AnswerTask(policy, maker, "token", ranks)


def gradients(folder: Path, max_tokens: int) -> tuple[float, int, dict[str, Tensor]]:
    """The loss of a step, its batches, and the gradients of all weights."""
    task = new_task(folder, ALONE, "all", max_tokens)
    (update,) = task.updates(task.batch(0, torch.Generator()), 0, 1)
    total = 0.0
    for loss in update.loss:
        loss.backward()
        total += float(loss.detach())
    root = task.modules()["policy"]
    return total, update.losses, {name: required(weight.grad) for name, weight in root.named_parameters()}


def train_steps(folder: Path, ranks: Ranks, strategy: StrategyName, trained: str) -> None:
    """Some steps; the loss of each over all ranks is written."""
    if strategy == "zero3" and ranks.world > 1:
        let_zero3_take_float64()
    task = new_task(folder, ranks, trained, WHOLE_STEP)
    modules: dict[str, nn.Module] = dict(task.modules())

    def build() -> dict[str, torch.optim.Optimizer]:
        weights = [weight for weight in modules["policy"].parameters() if weight.requires_grad]
        return {"main": torch.optim.AdamW(weights, 0.01)}

    chosen = choose_strategy(strategy, ranks, torch.device("cpu"), None, 1e9)
    prepared = chosen.prepare(modules, {"main": ["policy"]}, build)
    task.adopt(prepared)
    prepared["policy"].train()
    losses = []
    for step in range(STEPS):
        chosen.optimizers["main"].zero_grad(set_to_none=True)
        (update,) = task.updates(task.batch(step, torch.Generator()), step, STEPS)
        parts = list(update.loss)
        assert len(parts) == 1, "one batch a rank"
        with chosen.accumulate("main", last=True):
            chosen.backward(parts[0], "main", last=True)
        chosen.step("main", 1e9)
        losses.append(float(ranks.sum(parts[0].detach())))
    if ranks.rank == 0:
        write_json(folder / f"{strategy}-{trained}-{ranks.world}.json", losses)


def test_a_step_is_the_same_packed_and_in_pieces(folder: Path) -> None:
    """Loss and gradients: each part is divided by the targets of the whole step, however it is cut."""
    packed, one, packed_gradients = gradients(folder, WHOLE_STEP)
    pieces, several, piece_gradients = gradients(folder, ALONE_EACH)
    assert one == 1 and several > 1
    assert packed == pytest.approx(pieces, rel=1e-9)
    assert any(float(gradient.abs().max()) > 0 for gradient in packed_gradients.values())
    for name, gradient in packed_gradients.items():
        torch.testing.assert_close(gradient, piece_gradients[name], rtol=1e-9, atol=1e-12, msg=name)


def case(strategy: str, trained: str, tolerance: float, slow: bool = True) -> Any:
    return pytest.param(strategy, trained, tolerance, marks=pytest.mark.slow if slow else ())


@pytest.mark.parametrize(
    ("strategy", "trained", "tolerance"),
    [
        case("ddp", "all", 1e-9, slow=False),
        case("ddp", "adapter", 1e-9),
        case("fsdp2", "all", 1e-9),
        case("fsdp2", "adapter", 1e-9),
        case("zero2", "all", 1e-5),  # DeepSpeed updates in float32
        case("zero2", "adapter", 1e-5),
        case("zero3", "all", 1e-5),
        case("zero3", "adapter", 1e-5),
    ],
)
def test_two_ranks_train_as_one(folder: Path, strategy: StrategyName, trained: str, tolerance: float) -> None:
    train_steps(folder, ALONE, strategy, trained)
    on_two_ranks(partial(train_steps, strategy=strategy, trained=trained), folder)
    one, two = (read_json(folder / f"{strategy}-{trained}-{world}.json") for world in (1, 2))
    assert one == pytest.approx(two, rel=tolerance) and one[-1] < one[0]
