"""Placement of models that are not trained."""

from __future__ import annotations

import pytest
import torch

from audiollm.recipe.ranks import ALONE
from audiollm.train.parallel.wrapping import place_frozen
from tests.audiollm.train.two_ranks import TwoBranches


def test_on_the_cpu_a_layer_is_copied_for_its_own_pass_alone() -> None:
    torch.manual_seed(0)
    model, plain = TwoBranches().requires_grad_(False), TwoBranches()
    plain.load_state_dict(model.state_dict())
    place_frozen(model, "cpu", ALONE, torch.device("cpu"))
    kept = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    seen: list[set[str]] = []

    def look(_module: object, _inputs: object) -> None:
        seen.append({n for n, parameter in model.named_parameters() if parameter.data_ptr() != kept[n]})

    for block in model.blocks:
        block.layer.register_forward_pre_hook(look)  # type: ignore[union-attr]
    rows, is_audio = torch.randn(4, 6), torch.tensor([True, False, True, False])
    assert torch.equal(model(rows, is_audio), plain(rows, is_audio))
    rest = {name for name in kept if not name.startswith("blocks")}
    first, second = ({name for name in kept if name.startswith(f"blocks.{n}.")} for n in (0, 1))
    assert seen == [rest | first, rest | second]
    assert {n: parameter.data_ptr() for n, parameter in model.named_parameters()} == kept


def test_a_trained_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"not frozen: embed\.weight"):
        place_frozen(TwoBranches(), "whole", ALONE, torch.device("cpu"))
