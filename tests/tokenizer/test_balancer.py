"""The gradient balancer against EnCodec's formula, worked out apart in numpy and by hand."""

from __future__ import annotations

import math
import socket
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import Tensor, distributed, multiprocessing

from tokenizer.training.balancer import GradientBalancer, steps_measured

WEIGHTS = {"mel": 2.0, "adversarial": 4.0, "features": 0.5}


def linear_losses(gradients: Mapping[str, Tensor], output: Tensor) -> dict[str, Tensor]:
    """Losses whose gradients at the output are exactly the given ones."""
    return {name: (output * gradient).sum() for name, gradient in gradients.items()}


def balanced(balancer: GradientBalancer, gradients: Mapping[str, Tensor]) -> Tensor:
    output = torch.randn_like(next(iter(gradients.values())), requires_grad=True)
    balancer.balance(linear_losses(gradients, output), output).backward()
    assert output.grad is not None
    return output.grad


def test_several_steps_against_the_formula() -> None:
    """R * w_i / sum(w) * g_i / <|g_i|>: <> the bias-corrected moving average of the mean norm of an item."""
    generator = torch.Generator().manual_seed(0)
    balancer = GradientBalancer(WEIGHTS, total_norm=3.0, decay=0.9)
    norms: dict[str, list[float]] = {name: [] for name in WEIGHTS}
    for step in range(12):
        gradients = {
            name: 10.0 ** (i - 1) * torch.randn(3, 2, 40, generator=generator)
            for i, name in enumerate(WEIGHTS)
            if name == "mel" or (step >= 4 and step not in (7, 8))  # joins after a warm-up, pauses once
        }
        found = balanced(balancer, gradients)
        expected = np.zeros((3, 2, 40))
        for name, gradient in gradients.items():
            array = gradient.double().numpy()
            norms[name].append(float(np.sqrt((array**2).sum(axis=(1, 2))).mean()))
            decays = 0.9 ** np.arange(len(norms[name]))[::-1]
            average = (decays * norms[name]).sum() / decays.sum()
            share = WEIGHTS[name] / sum(WEIGHTS[present] for present in gradients)
            expected += 3.0 * share * array / average
        np.testing.assert_allclose(found.numpy(), expected, atol=1e-6, rtol=1e-5)


def test_between_measurements_the_averages_stay_and_the_gradient_is_the_same_mix() -> None:
    generator = torch.Generator().manual_seed(1)
    balancer, other = (GradientBalancer(WEIGHTS, total_norm=3.0, decay=0.9) for _ in range(2))
    first = {name: 10.0**i * torch.randn(3, 40, generator=generator) for i, name in enumerate(WEIGHTS)}
    balanced(balancer, first)
    averages = balancer.average_norms()
    later = {name: 10.0**i * torch.randn(3, 40, generator=generator) for i, name in enumerate(WEIGHTS)}
    output = torch.zeros(3, 40, requires_grad=True)
    balancer.balance(linear_losses(later, output), output, measured=0).backward()
    expected = sum(
        3.0 * weight / sum(WEIGHTS.values()) * later[name] / averages[name]
        for name, weight in WEIGHTS.items()
    )
    torch.testing.assert_close(output.grad, expected)
    assert balancer.average_norms() == averages
    # a measurement for four steps weighs as much as four
    for measured, repeats in ((4, 1), (1, 4)):
        for _ in range(repeats):
            given = torch.zeros(3, 40, requires_grad=True)
            which = balancer if measured == 4 else other
            which.balance(linear_losses(first, given), given, measured)
    assert float(balancer.average_norms()["mel"]) == pytest.approx(
        float(other.average_norms()["mel"]), rel=1e-5
    )


def test_a_loss_never_measured_adds_nothing_between_measurements() -> None:
    balancer = GradientBalancer({"a": 1.0, "b": 1.0})
    output = torch.zeros(2, 5, requires_grad=True)
    gradients = {"a": torch.ones(2, 5), "b": torch.full((2, 5), 3.0)}
    balancer.balance(linear_losses({"a": gradients["a"]}, output), output)
    balancer.balance(linear_losses(gradients, output), output, measured=0).backward()
    torch.testing.assert_close(output.grad, torch.full((2, 5), 0.5 / 5**0.5))


def test_norms_are_measured_often_at_first_and_after_a_loss_has_joined() -> None:
    assert [steps_measured(step, 0) for step in (0, 49, 50, 51, 52, 53, 56)] == [1, 1, 0, 0, 4, 0, 4]
    assert [steps_measured(step, 100) for step in (100, 101, 149, 150, 152)] == [1, 1, 1, 0, 4]


def test_shares_do_not_depend_on_the_scale_of_a_loss() -> None:
    """Two opposite losses of equal weight cancel, one a million times the other."""
    direction = torch.randn(2, 1, 30)
    balancer = GradientBalancer({"a": 1.0, "b": 1.0})
    torch.testing.assert_close(
        balanced(balancer, {"a": 1e3 * direction, "b": -1e-3 * direction}),
        torch.zeros(2, 1, 30),
        atol=1e-6,
        rtol=0,
    )


def test_surrogate_reaches_the_model_through_one_backward() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 5)
    output = model(torch.randn(3, 4))
    gradient = torch.randn(3, 5)
    (expected,) = torch.autograd.grad(
        output, model.weight, gradient / gradient.norm(dim=1).mean(), retain_graph=True
    )
    balancer = GradientBalancer({"a": 7.0})
    extra = model.bias.square().sum()
    (balancer.balance({"a": (output * gradient).sum()}, output) + extra).backward()
    torch.testing.assert_close(model.weight.grad, expected)


def test_a_zero_gradient_is_harmless_then_and_later() -> None:
    balancer = GradientBalancer(WEIGHTS)
    zero, some = torch.zeros(2, 1, 9), torch.randn(2, 1, 9)
    for _ in range(50):
        found = balanced(balancer, {"mel": some, "adversarial": zero})
        assert torch.isfinite(found).all()
    after = balanced(balancer, {"mel": zero, "adversarial": some})
    unit = some / some.flatten(1).norm(dim=1).mean()
    torch.testing.assert_close(after, 4 / 6 * unit)


def test_half_precision_outputs_are_balanced_in_fp32() -> None:
    """bfloat16 keeps two or three digits, so the mix agrees to 1 %."""
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 16)
    balancer = GradientBalancer({"a": 1.0, "b": 1.0})
    direction = torch.randn(4, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(torch.randn(4, 16))
        assert output.dtype == torch.bfloat16
        losses = linear_losses({"a": 1e-8 * direction, "b": 1e8 * direction}, output)
        surrogate = balancer.balance(losses, output)
    (found,) = torch.autograd.grad(surrogate, output)
    unit = direction / direction.norm(dim=1).mean()
    torch.testing.assert_close(found.float(), unit, atol=0.01, rtol=0.02)
    assert surrogate.dtype == torch.float32


def test_resumed_balancer_goes_on_the_same() -> None:
    one, other = GradientBalancer(WEIGHTS), GradientBalancer(WEIGHTS)
    for scale in (1.0, 5.0):
        balanced(one, {"mel": scale * torch.randn(2, 9)})
    other.load_state_dict(one.state_dict())
    gradients = {"mel": torch.randn(2, 9), "features": torch.randn(2, 9)}
    assert torch.equal(balanced(one, gradients), balanced(other, gradients))
    assert float(one.average_norms()["adversarial"]) == 0


def test_errors_name_the_loss() -> None:
    balancer = GradientBalancer(WEIGHTS)
    output = torch.ones(2, 3, requires_grad=True)
    with pytest.raises(FloatingPointError, match="'adversarial'"):
        balancer.balance({"mel": output.sum(), "adversarial": (output * math.nan).sum()}, output)
    assert not balancer.norm_sum_L.any()  # nothing of the broken step is kept
    with pytest.raises(ValueError, match="'mel' does not depend"):
        balancer.balance({"mel": torch.ones((), requires_grad=True)}, output)
    with pytest.raises(ValueError, match="typo"):
        balancer.balance({"typo": output.sum()}, output)
    with pytest.raises(ValueError, match="above 0"):
        GradientBalancer({"mel": 0.0})


def _rank(rank: int, port: int, results: multiprocessing.SimpleQueue) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    balancer = GradientBalancer(WEIGHTS)
    balanced(balancer, {"mel": torch.full((1, 4), 1.0 + rank)})
    results.put((rank, float(balancer.average_norms()["mel"])))
    distributed.destroy_process_group()


@pytest.mark.slow
def test_ranks_share_their_norms() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results = multiprocessing.get_context("spawn").SimpleQueue()
    multiprocessing.spawn(_rank, (port, results), nprocs=2)
    assert {results.get(), results.get()} == {(0, 3.0), (1, 3.0)}  # mean of |1 1 1 1| = 2 and 4
