"""The plan takes `rules` by the names that the training loop goes by: counts what they freeze, refuses as it does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from audiollm.errors import ConfigError
from audiollm.families.dual_ffn.losses import TokenLosses
from audiollm.families.dual_ffn.planning import LOOP_PREFIX, count_parameters, plan_training
from audiollm.families.dual_ffn.shape import planned_shape
from audiollm.train.loop.optim import freeze
from audiollm.train.supervised_settings import TrainConfig
from tests.audiollm.supervised.train_samples import model_of, small_template


def test_the_plan_names_parameters_as_the_loop_does() -> None:
    model = model_of(small_template())
    losses = torch.nn.ModuleDict({"model": TokenLosses(model)})  # as `SFTTask.modules` hands it over
    loop = dict(losses.named_parameters())
    for name, parameter in model.named_parameters():
        assert loop[f"{LOOP_PREFIX}{name}"] is parameter


def config_of(folder: Path, pattern: str) -> TrainConfig:
    model = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "intermediate_size": 48}
    rules = [{"pattern": pattern, "frozen": True}]
    return TrainConfig.model_validate({"samples": str(folder), "shape": model, "rules": rules})


@pytest.mark.parametrize("pattern", ["model.model.layers.*", "model.model.model.layers.*.audio_mpl.*"])
def test_the_plan_refuses_a_rule_that_fits_nothing_in_the_words_of_the_loop(
    tmp_path: Path, pattern: str
) -> None:
    config = config_of(tmp_path, pattern)
    losses = torch.nn.ModuleDict({"model": TokenLosses(model_of(small_template()))})
    with pytest.raises(ValueError) as told:
        freeze(losses.named_parameters(), config.rules)
    with pytest.raises(ConfigError, match=re.escape(str(told.value))):
        plan_training(config, {})


def test_the_plan_counts_what_a_rule_freezes(tmp_path: Path) -> None:
    config = config_of(tmp_path, "model.model.model.layers.0.*")
    shape = planned_shape(config, {})
    assert shape is not None
    counts = count_parameters(config, shape)
    # q, k, v, o; two feed-forwards of three matrices; two norms of each kind
    assert counts.total - counts.trained == 4 * 32 * 32 + 2 * 3 * 32 * 48 + 4 * 32
