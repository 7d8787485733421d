"""TRL's policy losses and advantages without a trainer, on padded rollouts.

Losses are TRL's methods, called on a namespace in place of `self`. Advantages are lines of its methods: no function of
TRL holds them, so the lines are taken out of its source and run.
"""

from __future__ import annotations

import inspect
import textwrap
from collections import defaultdict
from dataclasses import dataclass
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from audiollm.rl.policy_gradient.corrections import ImportanceWeights
from audiollm.rl.policy_gradient.rollout_batch import RolloutLogprobs
from tests.audiollm.rl.objectives.trl_calls import OneProcess

LENGTHS = [6, 3, 5, 1, 6, 2, 4, 6]
ROW = 6
MAX_TOKENS = 10


class ReducingProcess(OneProcess):
    """One process with the collectives that policy losses use."""

    sync_gradients = True

    @staticmethod
    def reduce(value: Tensor, reduction: str = "sum") -> Tensor:
        return value

    @staticmethod
    def pad_across_processes(value: Tensor, dim: int = 0, pad_index: float = 0) -> Tensor:
        return value


@dataclass
class PaddedRollouts:
    """Eight answers of up to six tokens, padded."""

    policy: Tensor
    old: Tensor
    reference: Tensor
    entropy: Tensor
    advantage: Tensor
    """Per answer."""

    @property
    def mask(self) -> Tensor:
        return torch.arange(ROW)[None] < torch.tensor(LENGTHS)[:, None]

    def flat(
        self, correction: ImportanceWeights | None = None, with_reference: bool = True
    ) -> RolloutLogprobs:
        """The same rollouts for our objectives."""
        mask = self.mask
        rows = torch.arange(len(LENGTHS))[:, None].expand_as(mask)
        return RolloutLogprobs(
            self.policy[mask],
            rows[mask],
            len(LENGTHS),
            self.advantage[:, None].expand_as(mask)[mask],
            old_T=self.old[mask],
            reference_T=self.reference[mask] if with_reference else None,
            entropy_T=self.entropy[mask],
            correction=correction,
        )


def padded_rollouts(seed: int = 0, spread: float = 0.3) -> PaddedRollouts:
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    policy = -noise(len(LENGTHS), ROW).abs() - 0.1
    return PaddedRollouts(
        policy.clone().requires_grad_(),
        policy + spread * noise(len(LENGTHS), ROW),
        policy + spread * noise(len(LENGTHS), ROW),
        3 * torch.rand(len(LENGTHS), ROW, generator=generator).double(),  # TRL's threshold is a float32
        noise(len(LENGTHS)),
    )


def trl_grpo(
    batch: PaddedRollouts, loss_type: str, weights: Tensor | None = None, **options: Any
) -> tuple[Tensor, dict[str, list[float]]]:
    """The loss of `GRPOTrainer` and its metrics; options by the names of `GRPOConfig`.

    Args:
        weights: importance weights per token, or `[answers, 1]`.
    """
    from trl import GRPOTrainer

    arguments = {
        "delta": None,
        "use_bias_correction_kl": True,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "steps_per_generation": 1,
        "vespo_k_pos": 2.0,
        "vespo_lambda_pos": 3.0,
        "vespo_k_neg": 3.0,
        "vespo_lambda_neg": 2.0,
    }
    entropy_coef = options.pop("entropy_coef", 0.0)
    arguments |= {name: options.pop(name) for name in list(options) if name in arguments}
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (batch.policy, batch.entropy, None),
        aux_loss_enabled=False,
        off_policy_mask_threshold=None,
        loss_type=loss_type,
        args=SimpleNamespace(**arguments),
        use_vllm=weights is not None,
        vllm_importance_sampling_correction=weights is not None,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=MAX_TOKENS,
        accelerator=ReducingProcess,
        _entropy_bonus_enabled=bool(entropy_coef),
        use_adaptive_entropy=False,
        entropy_coef=entropy_coef,
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
        **{
            "importance_sampling_level": "token",
            "beta": 0.0,
            "epsilon_low": 0.2,
            "epsilon_high": 0.2,
            "top_entropy_quantile": 1.0,
            **options,
        },
    )
    trainer.get_high_entropy_mask = MethodType(GRPOTrainer.get_high_entropy_mask, trainer)
    trainer.get_gamma_weights = GRPOTrainer.get_gamma_weights
    inputs = {
        **_inputs(batch),
        "old_per_token_logps": batch.old,
        "ref_per_token_logps": batch.reference,
        "num_items_in_batch": batch.mask.sum(),
    }
    if weights is not None:
        inputs["importance_sampling_ratio"] = weights
    return GRPOTrainer._compute_loss(trainer, None, inputs), trainer._metrics["train"]


def trl_rloo(batch: PaddedRollouts, epsilon_low: float = 0.2, epsilon_high: float = 0.2) -> Tensor:
    """The loss of `RLOOTrainer`."""
    from trl import RLOOTrainer

    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (batch.policy, batch.entropy, None),
        aux_loss_enabled=False,
        epsilon_low=epsilon_low,
        epsilon_high=epsilon_high,
        model=SimpleNamespace(training=True),
        accelerator=ReducingProcess,
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
    )
    old = (batch.old * batch.mask).sum(1)
    return RLOOTrainer._compute_loss(trainer, None, {**_inputs(batch), "old_logps": old})


def _inputs(batch: PaddedRollouts) -> dict[str, Tensor]:
    ids = torch.zeros(len(LENGTHS), 4, dtype=torch.long)
    return {
        "prompt_ids": ids,
        "prompt_mask": torch.ones_like(ids),
        "completion_ids": torch.zeros(len(LENGTHS), ROW, dtype=torch.long),
        "completion_mask": batch.mask.long(),
        "advantages": batch.advantage,
    }


def trl_advantages(rewards: Tensor, weights: Tensor, group: int, scale: str, aggregation: str) -> Tensor:
    """GRPOTrainer's advantages of `[answers, functions]` rewards."""
    from trl.trainer import grpo_trainer

    trainer = SimpleNamespace(
        multi_objective_aggregation=aggregation,
        scale_rewards=scale,
        reward_weights=weights,
        reward_funcs=range(rewards.shape[1]),
    )
    names = {"self": trainer, "rewards_per_func": rewards, "num_generations": group, "device": "cpu"}
    return _run_lines(grpo_trainer.GRPOTrainer, grpo_trainer, names)


def trl_rloo_advantages(
    rewards: Tensor, weights: Tensor, group: int, rollouts: PaddedRollouts | None, **options: Any
) -> Tensor:
    """RLOOTrainer's advantages; with rollouts, after a KL of old to the reference in the rewards."""
    from trl.trainer import rloo_trainer

    trainer = SimpleNamespace(
        **{
            "reward_weights": weights,
            "reward_clip_range": None,
            "normalize_advantages": False,
            "beta": 0.0,
            **options,
        }
    )
    names = {
        "self": trainer,
        "rewards_per_func": rewards,
        "num_generations": group,
        "device": "cpu",
        "gather": lambda value: value,
    }
    if rollouts is not None:
        names |= {
            "old_per_token_logps": rollouts.old,
            "ref_per_token_logps": rollouts.reference,
            "completion_mask": rollouts.mask,
        }
    return _run_lines(rloo_trainer.RLOOTrainer, rloo_trainer, names)


def _run_lines(trainer_class: Any, module: Any, names: dict[str, Any]) -> Tensor:
    """Run the lines from the mask of unscorable answers to the advantages without NaN."""
    source = inspect.getsource(trainer_class._generate_and_score_completions)
    first, last = "        unscorable_mask = ", "advantages = torch.nan_to_num(advantages, nan=0.0)\n"
    lines = source[source.index(first) : source.index(last) + len(last)]
    scope = {**vars(module), **names}
    exec(compile(textwrap.dedent(lines), "trl", "exec"), scope)
    return scope["advantages"]
