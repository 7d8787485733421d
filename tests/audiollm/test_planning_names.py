"""The plan counts what `rules` freeze by the names that the training loop goes by."""

from __future__ import annotations

import torch
from train_samples import model_of, small_template

from audiollm.train.losses import TokenLosses
from audiollm.train.planning import LOOP_PREFIX


def test_the_plan_names_parameters_as_the_loop_does() -> None:
    model = model_of(small_template())
    losses = torch.nn.ModuleDict({"model": TokenLosses(model)})  # as `SFTTask.modules` hands it over
    loop = dict(losses.named_parameters())
    for name, parameter in model.named_parameters():
        assert loop[f"{LOOP_PREFIX}{name}"] is parameter
