"""Quantities of a whole step: KTO's KL, running means, optimal transport, beta-DPO's choice of pairs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from audiollm.rl.objectives.figures import (
    RunningMean,
    StepFigures,
    mismatched_kl,
    transport_partners,
)


def test_mismatched_kl_is_a_mean_that_is_never_negative_and_has_no_gradient() -> None:
    policy = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    reference = torch.tensor([-2.0, -2.5, -3.0])
    kl = mismatched_kl(policy, reference)
    assert float(kl) == pytest.approx(0.5)
    assert not kl.requires_grad
    assert float(mismatched_kl(reference, policy)) == 0


def test_the_running_mean_is_that_of_all_values_whatever_the_steps() -> None:
    values = torch.from_numpy(np.random.default_rng(0).normal(3, 2, 50))
    mean = RunningMean.start()
    for part in values.split([7, 1, 20, 22]):
        mean = mean.updated(part)
    assert float(mean.value) == pytest.approx(float(values.mean()), rel=1e-12)
    assert float(mean.count) == 50
    assert float(mean.updated(values[:0]).value) == float(mean.value)
    assert float(RunningMean.start().updated(values[:0]).value) == 0
    assert not mean.updated(values.requires_grad_()).value.requires_grad


def test_the_moving_mean_starts_at_the_first_step() -> None:
    mean = RunningMean.start().updated(torch.tensor([1.0, 3.0]), momentum=0.9)
    assert float(mean.value) == 2
    mean = mean.updated(torch.tensor([12.0]), momentum=0.9)
    assert float(mean.value) == pytest.approx(3)


def test_partners_have_the_same_rank() -> None:
    first, second = torch.tensor([5.0, -1.0, 2.0]), torch.tensor([0.1, 0.3, 0.2])
    partners = transport_partners(first, second)
    torch.testing.assert_close(partners.of_first_P, torch.tensor([0.3, 0.1, 0.2]))
    torch.testing.assert_close(partners.of_second_P, torch.tensor([-1.0, 5.0, 2.0]))


def test_a_missing_figure_is_named() -> None:
    with pytest.raises(ValueError, match="needs the step's kl"):
        StepFigures().required("kl")
