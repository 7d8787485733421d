"""Names, settings and needs of advantages and policy objectives."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from audiollm.errors import ConfigError
from audiollm.rl.policy_gradient.advantages import raw_advantages
from audiollm.rl.policy_gradient.catalog import (
    ADVANTAGES,
    POLICY_OBJECTIVES,
    advantage_term,
    kl_controller_settings,
    policy_term,
)
from audiollm.rl.policy_gradient.losses import Regularizers, policy_loss
from audiollm.rl.policy_gradient.rollout_batch import RolloutLogprobs, RolloutRewards
from audiollm.rl.policy_gradient.settings import KLSettings
from tests.audiollm.rl.policy_gradient.policy_cases import counts_of, rollouts

ROOT = Path(__file__).parents[4]


def test_misspelt_names_give_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"recipe.yaml:9  loss: no such loss: 'gsp'\n  did you mean 'gspo'"):
        policy_term("gsp", {}, "recipe.yaml:9", "loss")
    with pytest.raises(ConfigError, match="advantage: no such advantage: 'rlo'\n  did you mean 'rloo'"):
        advantage_term("rlo", {})
    with pytest.raises(ConfigError, match="gae has no setting 'lamb'\n  did you mean 'lam'"):
        advantage_term("gae", {"lamb": 0.9})


@pytest.mark.parametrize(
    ("name", "values", "complaint"),
    [
        ("clip", {"dual_clip": 1.0}, "clip.dual_clip: Input should be greater than 1"),
        ("clip", {"max_ratio": 1.1}, "objective: clip: .*max_ratio must be above 1 \\+ epsilon_high"),
        ("gspo", {"level": "word"}, "gspo.level: Input should be 'token'"),
        ("sapo", {"temperature_positive": 0}, "sapo.temperature_positive: Input should be greater than 0"),
    ],
)
def test_a_setting_out_of_range_is_named(name: str, values: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        policy_term(name, values)


def test_controllers_are_checked_without_being_made() -> None:
    assert kl_controller_settings("horizon", {"horizon": 100.0}).coefficient == 0.2
    with pytest.raises(ConfigError, match="proportional has no setting 'horizon'"):
        kl_controller_settings("proportional", {"horizon": 1.0})


def test_the_catalogue_loads_no_torch() -> None:
    code = "import sys, audiollm.rl.policy_gradient.catalog; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def full_rewards() -> RolloutRewards:
    return RolloutRewards(
        torch.tensor([0, 1, 1, 0]),
        2,
        torch.tensor([0, 0]),
        1,
        torch.tensor([1.0, 0.0]),
        torch.tensor([[1.0], [0.0]]),
        torch.tensor([1.0]),
        torch.tensor([0.5]),
        torch.tensor([0.0, 0.1, 1.0, 0.0]),
        torch.zeros(4),
        torch.tensor([1.0, 0.0]),
        torch.tensor([3, 2]),
    )


@pytest.mark.parametrize("name", ADVANTAGES)
def test_each_advantage_works_with_what_it_says_it_reads_and_no_more(name: str) -> None:
    term, full = advantage_term(name, {}), full_rewards()
    every = {field for entry in ADVANTAGES.values() for field in entry.reads}
    least = replace(full, **dict.fromkeys(every - set(term.reads)))
    raw = raw_advantages(term, least)
    torch.testing.assert_close(raw.advantage_T, raw_advantages(term, full).advantage_T)
    for field in term.reads:
        with pytest.raises((ValueError, TypeError), match=field):
            raw_advantages(term, replace(least, **{field: None}))


@pytest.mark.parametrize("name", POLICY_OBJECTIVES)
def test_each_objective_needs_log_probabilities_and_advantages_alone(name: str) -> None:
    data = rollouts()
    tokens = RolloutLogprobs(data.policy, data.answer, 6, data.advantage)
    assert policy_loss(policy_term(name, {}), tokens, counts_of(tokens)).loss.isfinite()


def test_what_the_regularizers_read_is_named() -> None:
    data, term = rollouts(), policy_term("dapo", {})
    tokens = RolloutLogprobs(data.policy, data.answer, 6, data.advantage)
    with pytest.raises(ValueError, match="this objective reads reference_T"):
        policy_loss(term, tokens, counts_of(tokens), Regularizers(KLSettings(), 0.1))
    with pytest.raises(ValueError, match="this objective reads entropy_T"):
        policy_loss(term, tokens, counts_of(tokens), Regularizers(entropy_weight=0.1))
    with pytest.raises(ValueError, match="divides by max_tokens, which was not given"):
        policy_loss(policy_term("dr_grpo", {}), tokens, replace(counts_of(tokens), max_tokens=None))


def test_shapes_that_do_not_fit_are_named() -> None:
    data = rollouts()
    with pytest.raises(ValueError, match=r"advantage_T has shape \[2\], expected \[18\]"):
        RolloutLogprobs(data.policy, data.answer, 6, data.advantage[:2])
    with pytest.raises(ValueError, match=r"reward_A has shape \[5\], expected \[6\]"):
        RolloutRewards(data.answer, 6, reward_A=torch.zeros(5))
    with pytest.raises(ValueError, match=r"reward_AF has shape \[6, 1\], expected \[6, 2\]"):
        RolloutRewards(data.answer, 6, reward_AF=torch.zeros(6, 1), weight_F=torch.ones(2))
