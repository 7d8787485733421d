"""A step on packed answers is the same however it is packed, accumulated and spread over ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from audiollm.data.chat.delay import IGNORE
from audiollm.data.chat.template import TokenStream
from audiollm.data.packing import plan_step
from audiollm.families.dual_ffn.policy import DualFFNPolicy
from audiollm.families.logprobs.answers import AnswerGroups, Lists, Pairs, Singles
from audiollm.families.logprobs.token_figures import TokenRequest
from audiollm.families.prompts import PromptedContents
from audiollm.files.atomic import read_json, write_json
from audiollm.recipe.ranks import ALONE, Ranks
from audiollm.rl.objectives.catalog import objective_term
from audiollm.rl.objectives.figures import StepFigures
from audiollm.rl.objectives.registry import mixed_losses
from audiollm.train.parallel.strategy import choose_strategy
from audiollm.train.settings import StrategyName
from tests.audiollm.families.dual_ffn.packed_samples import heard, load, prompted, save_model, speech, text
from tests.audiollm.train.two_ranks import let_zero3_take_float64, on_two_ranks

ITEMS = 8
OBJECTIVES = {"pairs": ("tdpo2", 2), "lists": ("dpo_plackett_luce", 3), "singles": ("npo", 1)}
STEPS = 3


def prompts(answers: int) -> list[PromptedContents]:
    """Prompts with two recordings, one and none, whose answers are in text and speech."""
    made = []
    for number in range(ITEMS):
        audio = [heard("features", 0.2 + 0.1 * number, 10 * number + clip) for clip in range(number % 3)]
        words = [
            text("a dog"),
            speech(3 + number, number),
            text("a cat or a dog"),
            speech(9, 50 + number, "low"),
        ]
        chosen = [words[(number + place) % 4] for place in range(answers)]
        made.append(prompted(f"s{number}", audio, chosen))
    return made


def groups_of(kind: str, numbers: list[int], answers: int) -> AnswerGroups:
    """The groups of these prompts, whose answers come one after the other."""
    place_P = torch.arange(len(numbers)) * answers
    number_P = torch.tensor(numbers, dtype=torch.long)
    if kind == "pairs":
        return Pairs(place_P, place_P + 1)
    if kind == "singles":
        return Singles(place_P, number_P % 2 == 0)
    score_L = torch.cat(
        [torch.tensor([2.0, 0.0, 1.0]).roll(number) for number in numbers] or [torch.zeros(0)]
    )
    list_L = torch.arange(len(numbers)).repeat_interleave(answers)
    return Lists(torch.arange(len(list_L)), list_L, len(numbers), score_L.double())


def pack_loss(
    policy: DualFFNPolicy, root: nn.Module, kind: str, numbers: list[int], streams: list[list[TokenStream]]
) -> Tensor:
    """The part of a step's loss that the prompts of one pack have."""
    name, answers = OBJECTIVES[kind]
    encoded = [stream for number in numbers for stream in streams[number]]
    found = policy.answer_logprobs(root, policy.batch(encoded), TokenRequest(kl=kind == "pairs"))
    if not numbers:
        return found.policy_T.sum()
    term = objective_term(name, {}, 1.0)
    figures = StepFigures(tokens_per_answer=_tokens_per_answer(streams) if kind == "singles" else None)
    losses = mixed_losses([term], found, groups_of(kind, numbers, answers), figures)
    return losses.loss_I.sum() / ITEMS


def _tokens_per_answer(streams: list[list[TokenStream]]) -> float:
    """Mean number of tokens of the desirable answers of the step."""
    lengths = [
        int((stream.text_targets_S != IGNORE).sum() + (stream.audio_targets_SK != IGNORE).sum())
        for group in streams[::2]
        for stream in group
    ]
    return sum(lengths) / len(lengths)


def planned(streams: list[list[TokenStream]], capacity: int, ranks: int = 1) -> list[list[list[int]]]:
    """The prompts of each pack of each rank."""
    lengths = [len(stream) for group in streams for stream in group]
    size = len(streams[0])
    groups = [list(range(start, start + size)) for start in range(0, len(lengths), size)]
    hands = plan_step(lengths, capacity, ranks, groups=groups)
    return [[[index // size for index in each[::size]] for each in hand] for hand in hands]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(Path(tmp_path_factory.mktemp("model")), "features")


@pytest.mark.parametrize("kind", OBJECTIVES)
@pytest.mark.parametrize("trained", ["all", "adapter"])
def test_loss_and_gradient_do_not_depend_on_packing_and_accumulation(
    folder: Path, kind: str, trained: str
) -> None:
    policy = load(folder, trained)  # type: ignore[arg-type]
    streams = [policy.encode(one) for one in prompts(OBJECTIVES[kind][1])]
    capacity = 2 * max(sum(map(len, group)) for group in streams)
    arrangements = {
        "all in one": [list(range(ITEMS))],
        "one by one": [[number] for number in range(ITEMS)],
        "backwards": [list(range(ITEMS))[::-1]],
        "accumulation of 4": [list(range(start, ITEMS, 4)) for start in range(4)],
        "planned": planned(streams, capacity)[0],
        "planned for 16 ranks, some idle": [each for hand in planned(streams, capacity, 16) for each in hand],
    }
    assert len(arrangements["planned"]) > 1 and [] in arrangements["planned for 16 ranks, some idle"]
    results = {}
    for name, packs in arrangements.items():
        policy.root.zero_grad()
        total = 0.0
        for numbers in packs:
            loss = pack_loss(policy, policy.root, kind, numbers, streams)
            loss.backward()
            total += float(loss.detach())
        gradients = [p.grad.clone() for p in policy.root.parameters() if p.grad is not None]
        results[name] = (total, gradients)
    expected, expected_gradients = results.pop("all in one")
    assert sum(bool(each.any()) for each in expected_gradients) > 0.9 * len(expected_gradients)
    for name, (total, gradients) in results.items():
        assert total == pytest.approx(expected, abs=1e-9), name
        for ours, theirs in zip(gradients, expected_gradients, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9, msg=name)


def train_steps(folder: Path, ranks: Ranks, strategy: StrategyName, trained: str, kind: str) -> None:
    """Some steps over packs; the losses of all ranks, and the gradients of the first step, are written."""
    if strategy == "zero3" and ranks.world > 1:
        let_zero3_take_float64()
    policy = load(folder, trained)  # type: ignore[arg-type]
    streams = [policy.encode(one) for one in prompts(OBJECTIVES[kind][1])]
    packs = planned(streams, 500, ranks.world)[ranks.rank]
    chosen = choose_strategy(strategy, ranks, torch.device("cpu"), None, 1e9)
    modules: dict[str, nn.Module] = {"model": policy.root}

    def build() -> dict[str, torch.optim.Optimizer]:
        return {"main": torch.optim.AdamW([p for p in policy.root.parameters() if p.requires_grad], 0.01)}

    root = chosen.prepare(modules, {"main": ["model"]}, build)["model"]
    root.train()
    name = f"{strategy}-{trained}-{kind}-{ranks.world}"
    losses = []
    for step in range(STEPS):
        chosen.optimizers["main"].zero_grad(set_to_none=True)
        total = torch.zeros((), dtype=torch.float64)
        for place, numbers in enumerate(packs):
            last = place + 1 == len(packs)
            with chosen.accumulate("main", last):
                loss = pack_loss(policy, root, kind, numbers, streams)
                chosen.backward(loss, "main", last)
            total += loss.detach()
        if step == 0 and strategy == "ddp" and ranks.rank == 0:
            found = {n: p.grad for n, p in policy.root.named_parameters() if p.grad is not None}
            save_file(found, folder / f"{name}.safetensors")
        chosen.step("main", 1e9)
        losses.append(float(ranks.sum(total)))
    if ranks.rank == 0:
        write_json(folder / f"{name}.json", losses)


@pytest.mark.parametrize(
    ("strategy", "trained", "kind", "tolerance"),
    [
        ("ddp", "all", "pairs", 1e-9),
        ("ddp", "adapter", "lists", 1e-9),
        pytest.param("ddp", "all", "singles", 1e-9, marks=pytest.mark.slow),
        pytest.param("fsdp2", "all", "pairs", 1e-9, marks=pytest.mark.slow),
        ("fsdp2", "adapter", "lists", 1e-9),
        # DeepSpeed updates in float32
        pytest.param("zero2", "adapter", "pairs", 1e-6, marks=pytest.mark.slow),
        ("zero3", "all", "singles", 1e-6),
        pytest.param("zero3", "adapter", "pairs", 1e-6, marks=pytest.mark.slow),
    ],
)
def test_two_ranks_train_as_one(
    folder: Path, strategy: StrategyName, trained: str, kind: str, tolerance: float
) -> None:
    work = partial(train_steps, strategy=strategy, trained=trained, kind=kind)
    work(folder, ALONE)
    on_two_ranks(work, folder)
    names = [f"{strategy}-{trained}-{kind}-{world}" for world in (1, 2)]
    one, two = (read_json(folder / f"{name}.json") for name in names)
    assert one == pytest.approx(two, rel=tolerance) and one[-1] < one[0]
    if strategy == "ddp":
        first, second = (load_file(folder / f"{name}.safetensors") for name in names)
        assert first.keys() == second.keys()
        for key, value in first.items():
            torch.testing.assert_close(second[key], value, rtol=0, atol=1e-9, msg=key)
