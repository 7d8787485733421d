"""Importance weights: figures, masks, and a toy problem that is sampled from the wrong distribution on purpose."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from audiollm.rl.policy_gradient.catalog import policy_term
from audiollm.rl.policy_gradient.corrections import importance_weights
from audiollm.rl.policy_gradient.losses import StepCounts, policy_loss
from audiollm.rl.policy_gradient.rollout_batch import RolloutLogprobs
from audiollm.rl.policy_gradient.settings import CorrectionSettings
from tests.audiollm.rl.policy_gradient.policy_cases import (
    LENGTHS,
    Rollouts,
    rollouts,
    whole_loss,
)

ANSWERS, BATCHES = 2_000, 150
REWARDS = torch.tensor([[1.0, -0.5, 0.2], [0.0, 0.7, -1.0], [0.4, 0.1, 2.0]], dtype=torch.float64)


class TwoTokens:
    """A policy over answers of two tokens, the second of which depends on the first."""

    def __init__(self, seed: int, near: TwoTokens | None = None, distance: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        first = torch.randn(3, generator=generator, dtype=torch.float64)
        second = torch.randn(3, 3, generator=generator, dtype=torch.float64)
        if near is not None:
            first, second = near.first.detach() + distance * first, near.second.detach() + distance * second
        self.first, self.second = first.requires_grad_(), second.requires_grad_()

    def logprobs(self, drawn_AN: Tensor) -> Tensor:
        """All first tokens, then all second ones."""
        one, two = drawn_AN.unbind(1)
        return torch.cat([self.first.log_softmax(0)[one], self.second.log_softmax(1)[one, two]])

    def draw(self, generator: torch.Generator) -> Tensor:
        one = torch.multinomial(self.first.softmax(0), ANSWERS, replacement=True, generator=generator)
        two = torch.multinomial(self.second.softmax(1)[one], 1, generator=generator).flatten()
        return torch.stack([one, two], 1)

    def expected_reward(self) -> Tensor:
        return (self.first.softmax(0)[:, None] * self.second.softmax(1) * REWARDS).sum()

    def gradient(self, value: Tensor) -> Tensor:
        gradients = torch.autograd.grad(value, (self.first, self.second))
        return torch.cat([each.flatten() for each in gradients])


def batch_gradient(
    policy: TwoTokens, behaviour: TwoTokens, drawn: Tensor, settings: CorrectionSettings | None
) -> Tensor:
    current = policy.logprobs(drawn)
    answer_T = torch.arange(len(drawn)).repeat(2)
    correction = None
    if settings is not None:
        sampled = behaviour.logprobs(drawn).detach()
        correction = importance_weights(sampled, current.detach(), answer_T, len(drawn), settings)
    reward_A = REWARDS[drawn[:, 0], drawn[:, 1]] - REWARDS.mean()
    tokens = RolloutLogprobs(current, answer_T, len(drawn), reward_A[answer_T], correction=correction)
    counts = StepCounts.of(tokens.mask_T, answer_T, len(drawn))
    term = policy_term("clip", {"average": "answer_sum"})
    return -policy.gradient(policy_loss(term, tokens, counts).loss)


def errors_of(kinds: Sequence[CorrectionSettings | None]) -> list[tuple[Tensor, Tensor]]:
    """For each correction: mean gradient minus the right one, and its standard error."""
    policy = TwoTokens(0)
    behaviour = TwoTokens(3, policy, 0.6)
    exact = policy.gradient(policy.expected_reward())
    generator = torch.Generator().manual_seed(5)
    batches = [behaviour.draw(generator) for _ in range(BATCHES)]
    found = []
    for settings in kinds:
        rows = torch.stack([batch_gradient(policy, behaviour, drawn, settings) for drawn in batches])
        found.append((rows.mean(0) - exact, rows.std(0) / math.sqrt(BATCHES)))
    return found


def test_untruncated_weights_make_the_mean_gradient_right(capsys: pytest.CaptureFixture[str]) -> None:
    exact_weights = CorrectionSettings(cap=None)
    caps = [4.0, 2.0, 1.2]
    truncated = [CorrectionSettings(mode="truncate", cap=cap) for cap in caps]
    by_token = CorrectionSettings(level="token", cap=None)
    (error, spread), (without, its_spread), *rest = errors_of([exact_weights, None, *truncated, by_token])
    assert bool((error.abs() < 4 * spread).all())
    assert float((without.abs() / its_spread).max()) > 15
    biases = [float(each.norm()) for each, _ in rest[:3]]
    with capsys.disabled():
        print(
            f"\nbias of the mean gradient: exact {float(error.norm()):.4f}, none {float(without.norm()):.4f}"
        )
        for cap, bias, (_, deviation) in zip(caps, biases, rest, strict=False):
            noise = float(deviation.norm()) * math.sqrt(BATCHES)
            print(f"truncated at {cap}: bias {bias:.4f}, noise of a batch {noise:.4f}")
    assert biases[0] < biases[1] < biases[2] < float(without.norm())
    assert float((rest[1][0].abs() / rest[1][1]).max()) > 4
    token_error, token_spread = rest[3]
    assert float((token_error.abs() / token_spread).max()) > 4  # tokens alone leave out what follows them


def plain_weights(level: str) -> list[list[float]]:
    data = rollouts(2)
    rows = [
        [math.exp(o - b) for o, b in zip(data.old[own].tolist(), data.behaviour[own].tolist(), strict=True)]
        for own in (data.answer == number for number in range(len(LENGTHS)))
    ]
    return rows if level == "token" else [[math.prod(row)] * len(row) for row in rows]


BOUNDS = [(None, None), (None, 1.2), (0.8, 1.2), (0.8, None)]


@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("bounds", BOUNDS)
def test_weights_masks_and_figures(level: str, mode: str, bounds: tuple[float | None, float | None]) -> None:
    floor, cap = bounds
    settings = CorrectionSettings(level=level, mode=mode, floor=floor, cap=cap)
    data, low, high = rollouts(2), floor or 0.0, cap or math.inf
    found = importance_weights(data.behaviour, data.old, data.answer, len(LENGTHS), settings)
    beyond = weights = 0
    for number, row in enumerate(plain_weights(level)):
        own = data.answer == number
        inside = [low <= weight <= high for weight in row]
        expected = (
            [min(max(weight, low), high) for weight in row]
            if mode == "truncate"
            else [weight if kept else 0.0 for weight, kept in zip(row, inside, strict=True)]
        )
        assert found.weight_T[own].tolist() == pytest.approx(expected, rel=1e-12)
        assert found.kept_T[own].tolist() == (inside if mode == "mask" else [True] * len(row))
        counted = row[:1] if level == "sequence" else row
        weights += len(counted)
        beyond += sum(not low <= weight <= high for weight in counted)
    figures = found.figures.values()
    tokens = [weight for row in plain_weights("token") for weight in row]
    assert figures["mismatch_beyond"] == pytest.approx(beyond / weights)
    assert figures["mismatch_kl"] == pytest.approx(
        sum(x - 1 - math.log(x) for x in tokens) / len(tokens), rel=1e-12
    )
    assert figures["mismatch_largest"] == pytest.approx(max(max(x, 1 / x) for x in tokens), rel=1e-12)


def test_figures_of_packs_add_up() -> None:
    data, settings = rollouts(2), CorrectionSettings(cap=1.2)
    whole = importance_weights(data.behaviour, data.old, data.answer, 6, settings, data.kept).figures
    parts = []
    for answers in ([0, 4], [5, 1, 2], [], [3]):
        part = data.part(answers)
        parts.append(
            importance_weights(
                part.behaviour, part.old, part.answer, len(answers), settings, part.kept
            ).figures
        )
    total = parts[0] + parts[1] + parts[2] + parts[3]
    torch.testing.assert_close(total.sums, whole.sums)
    assert float(total.largest_log_ratio) == float(whole.largest_log_ratio)
    assert total.values()["mismatch_kl"] > 0


def test_without_a_mismatch_nothing_changes() -> None:
    data = rollouts()
    data.behaviour = data.old
    term = policy_term("grpo", {})
    for level in ("token", "sequence"):
        corrected = whole_loss(term, data.tokens(CorrectionSettings(level=level)))
        assert float(corrected.loss) == float(whole_loss(term, data.tokens()).loss)
    weights = importance_weights(data.behaviour, data.old, data.answer, 6, CorrectionSettings())
    assert list(weights.figures.values().values()) == [0.0, 1.0, 0.0]


def test_masked_tokens_and_answers_leave_the_denominator() -> None:
    """The loss is that of a step which never had them."""
    data = rollouts(5)
    settings = CorrectionSettings(level="sequence", cap=1.5)
    tokens = data.tokens(settings)
    kept = sorted(set(data.answer[tokens.mask_T].tolist()))
    assert 1 < len(kept) < 5
    for name in ("grpo", "dapo", "dr_grpo", "gspo"):
        term, part = policy_term(name, {}), data.part(kept)
        without = whole_loss(term, part.tokens(settings, len(kept)))
        assert float(whole_loss(term, tokens).loss) == pytest.approx(float(without.loss), rel=1e-12)


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "sapo", "luspo"])
def test_masked_tokens_of_an_answer_leave_its_length(name: str) -> None:
    """The loss is that of answers which never had these tokens."""
    for seed in range(4):
        data = rollouts(seed)
        tokens = data.tokens(CorrectionSettings(level="token", cap=1.2))
        assert 1 < int(tokens.mask_T.sum()) < int(data.kept.sum())
        shorter = Rollouts(**{field: value[tokens.mask_T] for field, value in vars(data).items()})
        exact = shorter.tokens(CorrectionSettings(level="token", cap=None))
        losses = [float(whole_loss(policy_term(name, {}), each).loss) for each in (tokens, exact)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_a_masked_token_of_infinite_weight_gives_no_nan() -> None:
    data = rollouts()
    data.policy = data.policy.float().requires_grad_()
    data.old = data.old.float()
    data.behaviour = data.old.clone()
    data.behaviour[3] -= 10_000
    for name in ("grpo", "gspo", "vespo", "cispo"):
        for level in ("token", "sequence"):
            loss = whole_loss(policy_term(name, {}), data.tokens(CorrectionSettings(level=level))).loss
            (gradient,) = torch.autograd.grad(loss, data.policy)
            assert bool(loss.isfinite()) and bool(gradient.isfinite().all())
            assert float(gradient[3]) == 0


def test_a_floor_above_the_cap_is_refused() -> None:
    with pytest.raises(ValueError, match="floor must be below cap"):
        CorrectionSettings(cap=1.0, floor=2.0)
