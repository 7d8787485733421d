"""FSQ against the formulas of arXiv 2309.15505, written out in numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tokenizer.quantizers.finite_scalar import (
    FiniteScalarQuantizer,
    bound,
    grid_steps,
    grid_values,
    round_to_grid,
)


@pytest.mark.parametrize("steps", [(4, 4, 4, 4, 4), (8, 5, 5, 5), (8, 6, 5), (7, 3)])
def test_bound_round_and_scale_are_the_papers(steps: tuple[int, ...]) -> None:
    z = np.random.default_rng(0).normal(0, 3, size=(500, len(steps)))
    count = np.array(steps)
    half = (count - 1) * (1 - 1e-3) / 2
    offset = np.where(count % 2 == 1, 0.0, 0.5)
    bounded = np.tanh(z + np.tan(offset / half)) * half - offset
    values = np.round(bounded) / (count // 2)
    index = ((values * (count // 2) + count // 2) * np.cumprod([1, *steps[:-1]])).sum(axis=1)
    np.testing.assert_allclose(bound(torch.tensor(z), steps).numpy(), bounded, atol=1e-12)
    ours, codes = round_to_grid(torch.tensor(z), steps)
    np.testing.assert_allclose(ours.numpy(), values, atol=1e-12)
    assert codes.tolist() == index.astype(int).tolist()
    assert [len(np.unique(values[:, i])) for i in range(len(steps))] == list(steps)


def test_all_1024_codes_round_trip() -> None:
    steps = grid_steps(1024)
    codes = torch.arange(1024)
    values = grid_values(codes, steps).double()
    assert len(values.unique(dim=0)) == 1024
    half = torch.tensor([(count - 1) * (1 - 1e-3) / 2 for count in steps], dtype=torch.float64)
    whole = (values * 2).clamp(-1.99, 0.99)  # inside the outermost cells, where the inverse of tanh is finite
    z = torch.atanh((whole + 0.5) / half) - math.tan(0.5 / float(half[0]))
    again, found = round_to_grid(z, steps)
    assert torch.equal(found, codes)
    torch.testing.assert_close(again, values)


def test_gradient_is_that_of_the_bound() -> None:
    steps = grid_steps(1000)
    z = torch.randn(20, len(steps), dtype=torch.float64, requires_grad=True)
    round_to_grid(z, steps)[0].sum().backward()
    smooth = z.detach().clone().requires_grad_()
    (bound(smooth, steps) / torch.tensor([count // 2 for count in steps])).sum().backward()
    torch.testing.assert_close(z.grad, smooth.grad)


@pytest.mark.parametrize(
    ("size", "steps"), [(1024, (4,) * 5), (1000, (8, 5, 5, 5)), (240, (8, 6, 5)), (32, (8, 4)), (9, (3, 3))]
)
def test_grid_of_a_codebook_size(size: int, steps: tuple[int, ...]) -> None:
    assert sorted(grid_steps(size), reverse=True) == list(steps)


@pytest.mark.parametrize(("size", "named"), [(1021, "1020|1024"), (22, "21 or 24"), (1, "3"), (0, "3")])
def test_a_size_without_a_grid_names_the_nearest(size: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        grid_steps(size)


def test_a_latent_smaller_than_the_grid_is_refused() -> None:
    with pytest.raises(ValueError, match="5 or more"):
        FiniteScalarQuantizer(2, 1024, 4)


def test_the_start_uses_the_grid_and_explains_the_variance() -> None:
    """Gaussian latents of 8 axes: 80 bits a frame leave little, before any training."""
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(8, 8, generator=generator)
    latent = torch.randn(20_000, 8, generator=generator) @ mixing + 5
    quantizer = FiniteScalarQuantizer(8, 1024, 8)
    quantizer.initialize(latent, generator)
    out = quantizer.eval()(latent[None])
    left = (out.latent_BTD[0] - latent).square().mean() / latent.var()
    assert float(left.detach()) < 5e-3
    assert float(quantizer.alive_K()[0]) > 0.95


@pytest.mark.parametrize("levels", [1, 3])
def test_every_projection_and_the_latent_get_a_gradient(levels: int) -> None:
    torch.manual_seed(0)
    quantizer = FiniteScalarQuantizer(3, 64, 5).train()
    latent = torch.randn(1, 40, 5, requires_grad=True)
    out = quantizer(latent, levels)
    (out.latent_BTD.square().mean() + out.commitment).backward()
    assert latent.grad is not None and float(latent.grad.abs().max()) > 0
    for name, parameter in quantizer.named_parameters():
        assert parameter.grad is not None, name
        assert (float(parameter.grad.abs().max()) > 0) == (int(name.split(".")[1]) < levels), name


def test_training_by_the_commitment_lowers_the_error() -> None:
    torch.manual_seed(0)
    quantizer = FiniteScalarQuantizer(2, 64, 5).train()
    latent = torch.randn(1, 256, 5)
    optimizer = torch.optim.Adam(quantizer.parameters(), 1e-2)
    first = float((quantizer(latent).latent_BTD.detach() - latent).square().mean())
    for _ in range(150):
        optimizer.zero_grad()
        quantizer(latent).commitment.backward()
        optimizer.step()
    assert float((quantizer(latent).latent_BTD.detach() - latent).square().mean()) < 0.3 * first
    assert quantizer.revive(latent, torch.Generator()) == 0
