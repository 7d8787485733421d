"""Neither micro-batches nor ranks change the loss of a step or its gradient, whatever the objective."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from audiollm.data.records.manifest import ManifestSource, read_samples
from audiollm.data.records.mixture import StepDraws
from audiollm.data.records.sample import Message, write_samples
from audiollm.data.records.step_records import find_usable
from audiollm.families.listener.policy import ListenerPolicy
from audiollm.families.logprobs.token_figures import TokenRequest
from audiollm.files.atomic import read_json, write_json
from audiollm.files.set_aside import SetAside
from audiollm.recipe.ranks import ALONE, Ranks
from audiollm.rl.critic.model import Critic
from audiollm.rl.objectives.catalog import ObjectiveTerm, objective_term
from audiollm.rl.preference.batches import BatchNeeds, StepMaker
from audiollm.rl.preference.ptx import SupervisedMaker
from audiollm.rl.preference.records import Grouping
from audiollm.rl.preference.task import PreferenceParts, PreferenceTask
from audiollm.supervised.answers.batches import AnswerBatchMaker
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
    "dpo+ptx": ("pairs", {}),
    "orpo": ("pairs", {"sft_on": "prompt_and_answer"}),
    "lipo_lambda": ("lists", {}),
    "bco": ("singles", {}),
    "kto": ("singles", {}),
    "dro": ("singles", {}),
}
STEPS = 2


def make_task(folder: Path, name: str, max_tokens: int, ranks: Ranks) -> PreferenceTask:
    kind, settings = OBJECTIVES[name]
    term: ObjectiveTerm = objective_term(name.removesuffix("+ptx"), settings)
    policy = ListenerPolicy.load(folder / "llm", dtype=torch.float64)
    with torch.no_grad():  # away from the reference, where gradients of pairs differ
        for n, parameter in enumerate(policy.root.parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(n))
            parameter.add_(0.02 * noise.to(parameter.dtype))
    sources = [ManifestSource(str(folder / "records.jsonl"))]
    needs = term.needs
    grouping = Grouping(kind, needs.fields, "all")  # type: ignore[arg-type]
    set_aside = SetAside(folder / f"set_aside-{ranks.rank}.jsonl", "test", strict=True)
    steps: StepMaker[Any, Any, Any] = StepMaker(
        policy, sources, find_usable(sources, grouping.groups, set_aside), grouping, StepDraws(4, 3, None, max_tokens),
        BatchNeeds("draw_T" in needs.fields, needs.mismatched_answers, needs.altered_recordings, needs.prompts), ranks,
    )  # fmt: skip
    critic = None
    if needs.value_head:
        torch.manual_seed(0)
        root: Any = ListenerPolicy.load(folder / "llm", dtype=torch.float64).root
        critic = Critic(root, root.hidden_size, bias=True).double()
    ptx = None
    if name.endswith("+ptx"):
        supervised = [ManifestSource(str(folder / "answered.jsonl"))]
        ptx = SupervisedMaker(
            AnswerBatchMaker(policy, supervised, StepDraws(3, 3, None, max_tokens), set_aside, ranks, "ptx"),
            0.7,
        )
    return PreferenceTask(PreferenceParts(policy, steps, [term], set_aside, ranks, critic=critic, ptx=ptx))


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
    records, _ = read_samples(made / "records.jsonl")
    said = [Message(role="assistant", content=record.answers[0].content) for record in records]
    write_samples(
        made / "answered.jsonl",
        [
            record.model_copy(update={"messages": [*record.messages, answer], "answers": []})
            for record, answer in zip(records, said, strict=True)
        ],
    )
    return made


@pytest.mark.parametrize("name", OBJECTIVES)
def test_micro_batches_change_nothing(folder: Path, name: str) -> None:
    gradients(folder, ALONE, name, 100_000, "whole.json")
    gradients(folder, ALONE, name, 64, "parts.json")
    whole, parts = read_json(folder / "whole.json"), read_json(folder / "parts.json")
    packs = 2 if name.endswith("+ptx") else 1
    assert whole["batches"] == packs and parts["batches"] >= 4
    assert ("ptx_loss" in whole["figures"]) == (packs == 2)
    assert parts["loss"] == pytest.approx(whole["loss"], rel=1e-9)
    assert parts["gradient"] == pytest.approx(whole["gradient"], rel=1e-9, abs=1e-12)
    assert parts["figures"] == pytest.approx(whole["figures"], rel=1e-9)


def two_ranks(folder: Path, ranks: Ranks) -> None:
    for name in OBJECTIVES:
        gradients(folder, ranks, name, 100, f"two-{name}.json")


@pytest.mark.slow
def test_two_ranks_are_one(folder: Path) -> None:
    on_two_ranks(partial(two_ranks), folder)
    for name in OBJECTIVES:
        gradients(folder, ALONE, name, 100_000, "one.json")
        one, two = read_json(folder / "one.json"), read_json(folder / f"two-{name}.json")
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-9), name
        assert two["gradient"] == pytest.approx(one["gradient"], rel=1e-9, abs=1e-12), name
        assert two["figures"] == pytest.approx(one["figures"], rel=1e-9), name


def test_a_held_out_record_that_is_alone_in_its_batch_is_altered_by_another_ones_recordings(
    folder: Path, tmp_path: Path
) -> None:
    write_lists(tmp_path, held_out=5)
    (tmp_path / "llm").symlink_to(folder / "llm")
    task = make_task(tmp_path, "opa_dpo", 100_000, ALONE)
    *_, last = task._steps.held_out()
    (micro,) = last.micro
    answers = task._plain(micro.batch)
    chosen_P, altered_P = micro.groups.chosen_P, micro.groups.altered_P  # type: ignore[union-attr]
    assert len({origin.record for origin in micro.origins}) == 1
    assert (answers.sums_A[chosen_P] - answers.sums_A[altered_P]).abs().min() > 1e-9


def test_a_record_is_altered_by_a_recording_that_is_not_its_own(folder: Path, tmp_path: Path) -> None:
    """Several questions may ask about one recording, one after the other."""
    write_lists(tmp_path)
    (tmp_path / "llm").symlink_to(folder / "llm")
    records, _ = read_samples(tmp_path / "records.jsonl")
    single = [record for record in records if len(record.audio_parts()) == 1]
    heard = single[0].audio_parts()
    same = [record.messages[0].model_copy(update={"content": [record.messages[0].content[0], *heard]})
            for record in single[:3]]  # fmt: skip
    asked = [record.model_copy(update={"messages": [m]}) for record, m in zip(single[:3], same, strict=True)]
    write_samples(tmp_path / "records.jsonl", [*asked, single[3]])
    task = make_task(tmp_path, "opa_dpo", 100_000, ALONE)
    step = task._steps(0)
    assert not step.bad
    (micro,) = step.micro
    answers = task._plain(micro.batch)
    chosen_P, altered_P = micro.groups.chosen_P, micro.groups.altered_P  # type: ignore[union-attr]
    assert (answers.sums_A[chosen_P] - answers.sums_A[altered_P]).abs().min() > 1e-9
    write_samples(tmp_path / "records.jsonl", asked)
    step = make_task(tmp_path, "opa_dpo", 100_000, ALONE)._steps(0)
    assert {each.reason for each in step.bad} == {"no record beside it has another recording"}


def test_cross_entropy_over_prompts_is_a_mean_over_all_their_tokens(folder: Path) -> None:
    gradients(folder, ALONE, "orpo", 64, "parts.json")
    task = make_task(folder, "orpo", 100_000, ALONE)
    (micro,) = task.batch(STEPS - 1, torch.Generator()).micro
    policy = ListenerPolicy.load(folder / "llm", dtype=torch.float64)
    root, request = task.modules()["policy"], TokenRequest(reference=False, prompts=True)
    answers = policy.answer_logprobs(root, micro.batch, request)
    chosen_P = micro.groups.chosen_P  # type: ignore[union-attr]
    total = (answers.sums_A + answers.required("prompt_sum_A")).detach()[chosen_P].sum()
    tokens = (answers.lengths_A + answers.required("prompt_length_A"))[chosen_P].sum()
    assert read_json(folder / "parts.json")["figures"]["sft"] == pytest.approx(
        float(-total / tokens), rel=1e-9
    )


def draws_of_step(task: PreferenceTask, step: int) -> dict[tuple[tuple[int, int], int], list[float]]:
    """SamPO's random numbers of a step, by record and number of the answer among the record's used ones."""
    draws: dict[tuple[tuple[int, int], int], list[float]] = {}
    for micro in task.batch(step, torch.Generator()).micro:
        assert micro.draw_T is not None
        by_answer = iter(micro.draw_T.split(micro.length_A.tolist()))
        for record in dict.fromkeys(origin.record for origin in micro.origins):
            used = {n for origin in micro.origins if origin.record == record for n in origin.answers}
            draws |= {(record, n): next(by_answer).tolist() for n in range(len(used))}
        assert not list(by_answer)
    return draws


def test_sampo_draws_anew_for_every_step_and_answer(folder: Path) -> None:
    """Two epochs of eight records; packing and a second pass over a step change no draw."""
    task = make_task(folder, "sampo", 100_000, ALONE)
    steps = [draws_of_step(task, step) for step in range(4)]
    first_epoch, second_epoch = {**steps[0], **steps[1]}, {**steps[2], **steps[3]}
    assert first_epoch.keys() == second_epoch.keys()
    for key, draws in first_epoch.items():
        assert len(draws) == len(second_epoch[key]) and set(draws).isdisjoint(second_epoch[key])
    numbers = [number for draws in first_epoch.values() for number in draws]
    assert len(set(numbers)) == len(numbers), "answers share random numbers"
    packed = make_task(folder, "sampo", 64, ALONE)
    assert [draws_of_step(packed, step) for step in range(4)] == steps


def test_the_kl_of_kto_is_that_of_answers_behind_the_next_records_prompt(folder: Path) -> None:
    """`max(0, mean log ratio)` of the mismatched answers, each computed alone, and KTO's loss at it."""
    task = make_task(folder, "kto", 64, ALONE)
    steps, step = task._steps, 2
    places = steps.places(step)
    policy = ListenerPolicy.load(folder / "llm", dtype=torch.float64)
    root = task.modules()["policy"]

    def log_ratios(prompt: Any, record: Any, answers: list[int]) -> list[float]:
        encoded = policy.encode(policy.take_beside(prompt, record, answers))
        with torch.no_grad():
            logprobs = [
                policy.answer_logprobs(root, policy.batch([answer]), TokenRequest()) for answer in encoded
            ]
        return [float(answer.ratios_A) for answer in logprobs]

    beside: list[float] = []
    rewards: list[tuple[float, bool]] = []
    for place, following in zip(places, [*places[1:], places[0]], strict=True):
        (record, groups), (prompt, _) = steps.read(place), steps.read(following)
        answers = [group.answer for group in groups]  # type: ignore[union-attr]
        beside += log_ratios(prompt, record, answers)
        desirable = [group.desirable for group in groups]  # type: ignore[union-attr]
        rewards += zip(log_ratios(record, record, answers), desirable, strict=True)
    point, matched = sum(beside) / len(beside), sum(ratio for ratio, _ in rewards) / len(rewards)
    assert point > 0 and abs(point - matched) > 1e-3
    losses = [
        1 / (1 + math.exp(0.1 * (ratio - point) * (1 if desirable else -1))) for ratio, desirable in rewards
    ]
    (update,) = task.updates(task.batch(step, torch.Generator()), step, 3)
    total = sum(float(loss.detach()) for loss in update.loss)
    assert total == pytest.approx(sum(losses) / len(losses), rel=1e-9)
