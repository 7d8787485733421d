"""Parameter groups, schedules and precision, against what is worked out by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from audiollm.train.loop.optim import (
    autocast,
    build_optimizer,
    compute_dtype,
    freeze,
    learning_rate_factor,
    parameter_groups,
    update_ema,
)
from audiollm.train.settings import ParameterRule

CPU = torch.device("cpu")


def model() -> nn.ModuleDict:
    return nn.ModuleDict({"text": nn.Linear(3, 2), "audio": nn.Linear(3, 2), "norm": nn.LayerNorm(3)})


def names_of(parts: nn.Module, groups: list[dict]) -> list[tuple[float, float, set[str]]]:
    by_id = {id(p): name for name, p in parts.named_parameters()}
    return [(g["rate_factor"], g["weight_decay"], {by_id[id(p)] for p in g["params"]}) for g in groups]


def test_matrices_decay_and_vectors_do_not() -> None:
    parts = model()
    vectors = {"text.bias", "audio.bias", "norm.weight", "norm.bias"}
    assert names_of(parts, parameter_groups(parts.named_parameters(), 0.1)) == [
        (1.0, 0.1, {"text.weight", "audio.weight"}),
        (1.0, 0.0, vectors),
    ]


def test_rules_set_rates_and_decays_and_freeze_and_the_first_that_fits_counts() -> None:
    parts = model()
    rules = (
        ParameterRule("audio.bias", rate_factor=2.0, weight_decay=0.3),
        ParameterRule("audio.*", rate_factor=0.5),
        ParameterRule("text.*", frozen=True),
    )
    freeze(parts.named_parameters(), rules)
    assert [name for name, p in parts.named_parameters() if not p.requires_grad] == [
        "text.weight",
        "text.bias",
    ]
    groups = parameter_groups(parts.named_parameters(), 0.1, rules)
    assert sorted(names_of(parts, groups), key=lambda group: group[:2]) == [
        (0.5, 0.1, {"audio.weight"}),
        (1.0, 0.0, {"norm.weight", "norm.bias"}),
        (2.0, 0.3, {"audio.bias"}),
    ]
    with pytest.raises(ValueError, match=r"named like 'adio.\*'; the names are like text.weight"):
        freeze(parts.named_parameters(), [ParameterRule("adio.*", frozen=True)])


def test_the_optimizer_takes_one_adamw_step_of_the_paper() -> None:
    """Decoupled decay (arXiv 1711.05101): w - rate * (decay * w + m / (sqrt(v) + eps)), moments corrected for bias."""
    weight = nn.Parameter(torch.tensor([[2.0]]))
    optimizer = build_optimizer([("w", weight)], weight_decay=0.1, betas=(0.9, 0.98))
    weight.grad = torch.tensor([[3.0]])
    optimizer.param_groups[0]["lr"] = 0.01
    optimizer.step()
    assert weight.item() == pytest.approx(2.0 - 0.01 * (0.1 * 2.0 + 1.0), rel=1e-6)


def test_muon_takes_its_matrices_and_adamw_the_rest() -> None:
    """Each parameter moves as under torch's own optimizer alone, also after its state was saved and loaded."""
    parts, alone = model(), model()
    alone.load_state_dict(parts.state_dict())
    rules = (ParameterRule("text.weight", optimizer="muon"), ParameterRule("audio.*", frozen=True))
    freeze(parts.named_parameters(), rules)
    optimizer = build_optimizer(parts.named_parameters(), 0.1, (0.9, 0.98), rules)
    others = [
        torch.optim.Muon([alone["text"].weight], weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(
            [alone["text"].bias, *alone["norm"].parameters()], betas=(0.9, 0.98), weight_decay=0.0
        ),
    ]
    for step in range(4):
        if step == 2:
            state, before = optimizer.state_dict(), optimizer
            optimizer = build_optimizer(parts.named_parameters(), 0.1, (0.9, 0.98), rules)
            optimizer.load_state_dict(state)
            assert len(optimizer.state) == len(before.state) == 4
        for each in (optimizer, *others):
            for group in each.param_groups:
                group["lr"] = 0.01
        for one, other in zip(parts.parameters(), alone.parameters(), strict=True):
            one.grad = torch.randn(one.shape, generator=torch.Generator().manual_seed(step))
            other.grad = one.grad.clone()
        for each in (optimizer, *others):
            each.step()
    for (name, one), other in zip(parts.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one, other, msg=name)
    with pytest.raises(ValueError, match=r"'norm.\*' gives Muon norm.weight, which is a vector"):
        freeze(parts.named_parameters(), [ParameterRule("norm.*", optimizer="muon")])


def test_muon_moves_a_convolution_as_the_linear_layer_that_it_is() -> None:
    """A convolution and a linear layer over what it sees take the same steps, also when the state was loaded."""
    convolution = nn.Conv2d(3, 5, 3)
    linear = nn.Linear(27, 5)
    linear.load_state_dict({"weight": convolution.weight.flatten(1), "bias": convolution.bias})
    rules = (ParameterRule("*weight", optimizer="muon"),)
    freeze(convolution.named_parameters(), rules)
    optimizers = [
        build_optimizer(each.named_parameters(), 0.1, (0.9, 0.98), rules) for each in (convolution, linear)
    ]
    for step in range(4):
        if step == 2:
            state = optimizers[0].state_dict()
            optimizers[0] = build_optimizer(convolution.named_parameters(), 0.1, (0.9, 0.98), rules)
            optimizers[0].load_state_dict(state)
        picture_FCHW = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(step))
        seen = convolution(picture_FCHW).flatten(2)
        torch.testing.assert_close(linear(functional.unfold(picture_FCHW, 3).mT).mT, seen)
        for made in (seen, linear(functional.unfold(picture_FCHW, 3).mT)):
            made.square().sum().backward()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = 0.01
            optimizer.step()
            optimizer.zero_grad()
    assert convolution.weight.shape == (5, 3, 3, 3)
    torch.testing.assert_close(convolution.weight.flatten(1), linear.weight)


def test_schedules_by_hand() -> None:
    steps = (0, 9, 10, 35, 60, 90, 100, 110)
    factors = {
        name: [learning_rate_factor(name, step, 110, 10, final_share=0.0) for step in steps]
        for name in ("cosine", "wsd", "constant")
    }
    assert factors["cosine"] == pytest.approx([0.1, 1, 1, 0.853553, 0.5, 0.095492, 0.024472, 0], abs=1e-6)
    assert factors["wsd"] == pytest.approx([0.1, 1, 1, 1, 1, 1, 0.5, 0])
    assert factors["constant"] == pytest.approx([0.1, 1, 1, 1, 1, 1, 1, 1])
    assert learning_rate_factor("wsd", 110, 110, 10, 0.1) == pytest.approx(0.1)


@given(st.sampled_from(["cosine", "wsd", "constant"]), st.integers(1, 50), st.integers(1, 200))
def test_a_rate_climbs_to_its_peak_and_never_climbs_again(name: str, warmup: int, more: int) -> None:
    factors = [learning_rate_factor(name, step, warmup + more, warmup) for step in range(warmup + more + 1)]  # type: ignore[arg-type]
    assert all(0 < factor <= 1 for factor in factors)
    assert factors[:warmup] == sorted(factors[:warmup]) and factors[warmup - 1] == 1.0
    assert factors[warmup:] == sorted(factors[warmup:], reverse=True)


@pytest.mark.parametrize(
    ("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", None)]
)
def test_precision_is_that_of_products_alone(name: str, dtype: torch.dtype | None) -> None:
    assert compute_dtype(name, CPU) == dtype  # type: ignore[arg-type]
    layer, rows = nn.Linear(4, 4), torch.randn(2, 4)
    with autocast(name, CPU):  # type: ignore[arg-type]
        assert layer(rows).dtype == (dtype or torch.float32)
    assert layer.weight.dtype == torch.float32


def test_averages_move_by_one_minus_the_decay() -> None:
    averages, weights = (
        [torch.tensor([1.0, 2.0]), torch.tensor(4.0)],
        [torch.tensor([3.0, 2.0]), torch.tensor(0.0)],
    )
    update_ema(averages, weights, 0.75)
    assert averages[0].tolist() == [1.5, 2.0] and float(averages[1]) == 3.0
    update_ema([], [], 0.5)
