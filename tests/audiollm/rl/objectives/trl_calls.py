"""TRL's losses without a trainer: its methods called on a namespace in place of `self`, on padded log-probabilities.

Batches are TRL's: all chosen answers, then all rejected ones, each a row of prompt and answer.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from audiollm.families.logprobs.answers import AnswerLogprobs

ROW = 9
"""Tokens of a padded row."""
SPANS = [(3, 8), (3, 6), (2, 9), (4, 7), (3, 5), (3, 9), (2, 4), (4, 9)]
"""First and last + 1 token of each answer: four chosen (5, 3, 7, 3 tokens), four rejected (2, 6, 2, 5)."""
PAIRS = 4


class OneProcess:
    """The members of an accelerator that the losses use."""

    device = torch.device("cpu")
    num_processes = 1
    process_index = 0
    gather = staticmethod(lambda value: value)
    gather_for_metrics = staticmethod(lambda value: value)


@dataclass
class PaddedBatch:
    """Log-probabilities of every row's tokens but the first, those outside of the answers included."""

    policy: Tensor
    reference: Tensor
    log_collision: Tensor
    completion_mask: Tensor

    @property
    def answer_mask(self) -> Tensor:
        return self.completion_mask[:, 1:].bool()

    def answers(self) -> AnswerLogprobs:
        """The same batch for our objectives."""
        rows = torch.arange(len(self.policy))[:, None].expand_as(self.policy)
        mask = self.answer_mask
        return AnswerLogprobs(
            self.policy[mask],
            rows[mask],
            len(self.policy),
            self.reference[mask],
            log_collision_T=self.log_collision[mask],
        )


def padded_batch(dtype: torch.dtype = torch.float64, spread: float = 0.5, seed: int = 0) -> PaddedBatch:
    generator = torch.Generator().manual_seed(seed)

    def noise() -> Tensor:
        return torch.randn(2 * PAIRS, ROW - 1, generator=generator, dtype=torch.float64)

    mask = torch.zeros(2 * PAIRS, ROW, dtype=torch.long)
    for row, (first, end) in enumerate(SPANS):
        mask[row, first:end] = 1
    policy = -noise().abs() - 0.1
    reference = policy + spread * noise()
    collision = -noise().abs() - 0.5
    return PaddedBatch(policy.to(dtype).requires_grad_(), reference.to(dtype), collision.to(dtype), mask)


class ReplayedModel:
    """Returns the given log-probabilities, 0 outside of answers, as TRL's fused head does."""

    training = True

    def __init__(self, logprobs: Tensor, batch: PaddedBatch) -> None:
        self.logprobs, self.batch = logprobs, batch

    def __call__(self, **_: Any) -> Any:
        from trl.trainer.utils import FusedCausalLMOutput

        zeros = torch.zeros_like(self.logprobs)
        return FusedCausalLMOutput(
            log_probs=self.logprobs * self.batch.answer_mask,
            entropy=zeros,
            log_sum_sq_probs=self.batch.log_collision,
            mean_logits=zeros,
            is_top1=zeros.bool(),
        )


def _metrics() -> dict[str, Any]:
    return {"train": defaultdict(list), "eval": defaultdict(list)}


@contextlib.contextmanager
def _without_models(*modules: Any) -> Iterator[None]:
    """Inside, the trainers' modules take our stand-ins for models."""
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            patch.setattr(module, "disable_gradient_checkpointing", lambda *_: contextlib.nullcontext())
            patch.setattr(module, "is_peft_model", lambda _: False)
        yield


def _inputs(batch: PaddedBatch) -> dict[str, Tensor]:
    ids = torch.ones_like(batch.completion_mask)
    return {"input_ids": ids, "attention_mask": ids, "completion_mask": batch.completion_mask}


def trl_dpo(
    batch: PaddedBatch, loss_types: Sequence[str], weights: Sequence[float], **options: Any
) -> Tensor:
    """The mean loss of `DPOTrainer`; options by the names of `DPOConfig`."""
    from trl import DPOTrainer
    from trl.trainer import dpo_trainer

    trainer = SimpleNamespace(
        model=ReplayedModel(batch.policy, batch),
        ref_model=ReplayedModel(batch.reference, batch),
        aux_loss_enabled=False,
        precompute_ref_logps=False,
        accelerator=OneProcess,
        args=SimpleNamespace(
            gradient_checkpointing_kwargs=None, discopop_tau=options.get("discopop_tau", 0.05)
        ),
        ld_alpha=options.get("ld_alpha"),
        f_divergence_type=options.get("f_divergence_type", "reverse_kl"),
        f_alpha_divergence_coef=options.get("f_alpha_divergence_coef", 0.5),
        loss_types=list(loss_types),
        loss_weights=list(weights),
        beta=options.get("beta", 0.1),
        label_smoothing=options.get("label_smoothing", 0.0),
        use_weighting=options.get("use_weighting", False),
        _metrics=_metrics(),
        _total_train_tokens=0,
        _tp_size=1,
    )
    with _without_models(dpo_trainer):
        return DPOTrainer._compute_loss(trainer, trainer.model, _inputs(batch), False)


def trl_kto(batch: PaddedBatch, desirable: Tensor, kl: tuple[Tensor, Tensor], **options: Any) -> Tensor:
    """The mean loss of `KTOTrainer`; `kl` are the summed log-probabilities of mismatched answers, of both models."""
    from trl import KTOTrainer
    from trl.trainer import kto_trainer

    trainer = SimpleNamespace(
        model=ReplayedModel(batch.policy, batch),
        ref_model=ReplayedModel(batch.reference, batch),
        aux_loss_enabled=False,
        precompute_ref_logps=False,
        calculate_KL=options.get("loss_type", "kto") == "kto",
        accelerator=OneProcess,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        loss_type=options.get("loss_type", "kto"),
        beta=options.get("beta", 0.1),
        desirable_weight=options.get("desirable_weight", 1.0),
        undesirable_weight=options.get("undesirable_weight", 1.0),
        _metrics=_metrics(),
        _total_train_tokens=0,
        _tp_size=1,
    )
    trainer._compute_kl_logps = lambda model, _: kl[0] if model is trainer.model else kl[1]
    with _without_models(kto_trainer):
        return KTOTrainer._compute_loss(trainer, trainer.model, {**_inputs(batch), "label": desirable}, False)


def trl_reward(scores: Tensor, margin: Tensor | None, centering: float | None) -> Tensor:
    """The mean loss of `RewardTrainer` on scores of all chosen, then all rejected answers."""
    from trl import RewardTrainer

    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(center_rewards_coefficient=centering),
        accelerator=OneProcess,
        _metrics=_metrics(),
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {"attention_mask": torch.ones(len(scores), 3)} | ({} if margin is None else {"margin": margin})
    return RewardTrainer.compute_loss(trainer, lambda **_: SimpleNamespace(logits=scores[:, None]), inputs)


def trl_without_reference(
    trainer_class: Any, logits: Tensor, ids: Tensor, mask: Tensor, **options: Any
) -> Tensor:
    """The whole loss of `CPOTrainer` or `ORPOTrainer` from logits, cross entropy included.

    Args:
        ids: tokens `[rows, ROW]`, all chosen rows, then all rejected ones.
        mask: 1 on the tokens of answers.
    """
    pairs = len(ids) // 2
    labels = ids.masked_fill(mask == 0, -100)
    batch = {
        f"{side}_{name}": value
        for side, rows in (("chosen", slice(None, pairs)), ("rejected", slice(pairs, None)))
        for name, value in (
            ("input_ids", ids[rows]),
            ("attention_mask", torch.ones_like(ids[rows])),
            ("labels", labels[rows]),
        )
    }
    trainer = SimpleNamespace(
        accelerator=OneProcess,
        aux_loss_enabled=False,
        is_encoder_decoder=False,
        pad_token_id=0,
        padding_value=0,
        **{
            "beta": 0.1,
            "alpha": 0.0,
            "label_smoothing": 0.0,
            "loss_type": "sigmoid",
            "cpo_alpha": 1.0,
            "simpo_gamma": 0.5,
            **options,
        },
    )
    trainer.concatenated_inputs = trainer_class.concatenated_inputs
    trainer.get_batch_logps = trainer_class.get_batch_logps
    for name in ("concatenated_forward", "cpo_loss", "odds_ratio_loss"):
        if hasattr(trainer_class, name):
            setattr(trainer, name, MethodType(getattr(trainer_class, name), trainer))

    def model(*_: Any, **__: Any) -> Any:
        return SimpleNamespace(logits=logits)

    loss, _ = trainer_class.get_batch_loss_metrics(trainer, model, batch)
    return loss
