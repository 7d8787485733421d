"""TRL's trainers as peers of `dpo.py` and `grpo.py`: between two steps of theirs the other side takes its turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from task_steps import Step
from torch import Tensor
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer
from trl.kernels.chunked_logprob import ChunkedLogProbFunction
from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

datasets.disable_progress_bars()

QUIET: dict[str, Any] = {
    "save_strategy": "no",
    "logging_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}
"""Neither log nor checkpoint."""


class Between(transformers.TrainerCallback):
    """Calls the trainer's `between` after each optimizer step."""

    def __init__(self, peer: DPOPeer | GRPOPeer) -> None:
        self._peer = peer

    def on_step_end(self, *_: Any, **kwargs: Any) -> None:
        self._peer.between()


class DPOPeer(DPOTrainer):
    """TRL's trainer, which keeps the figures of its optimizer steps and calls `between` after each of them.

    Args:
        model, reference: folders of language models.
        rows: pairs in text.
        config: further entries of `DPOConfig`.
    """

    def __init__(self, model: Path, reference: Path, rows: Sequence[dict[str, str]], **config: Any) -> None:
        self.steps_taken: list[Step] = []
        self.between: Callable[[], None] = lambda: None
        self._losses: list[float] = []
        super().__init__(
            str(model),
            transformers.AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float32),
            DPOConfig(**config, **QUIET),
            train_dataset=datasets.Dataset.from_list(list(rows)),
            processing_class=transformers.AutoTokenizer.from_pretrained(model),
        )
        self.add_callback(Between(self))
        self.remove_callback(transformers.PrinterCallback)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = super().training_step(*args, **kwargs)
        self._losses.append(float(loss))
        return loss

    def _clip_grad_norm(self, model: Any) -> Any:
        norm = super()._clip_grad_norm(model)
        self.steps_taken.append(Step(sum(self._losses), float(norm)))
        self._losses.clear()
        return norm


class GRPOPeer(GRPOTrainer):
    """TRL's trainer, which calls `between` after each optimizer step.

    Args:
        model: folder of a language model.
        rewards: functions, as TRL calls them.
        rows: prompts in text.
        config: further entries of `GRPOConfig`.
    """

    def __init__(
        self,
        model: Path,
        rewards: Sequence[Callable[..., Any]],
        rows: Sequence[dict[str, str]],
        tokenizer: Any,
        **config: Any,
    ) -> None:
        self.between: Callable[[], None] = lambda: None
        fixed: dict[str, Any] = {
            "use_bias_correction_kl": False,
            "loss_type": "grpo",
            "gradient_checkpointing": False,
        }
        super().__init__(
            str(model),
            list(rewards),
            GRPOConfig(**config, **fixed, **QUIET),
            datasets.Dataset.from_list(list(rows)),
            processing_class=tokenizer,
        )
        self.add_callback(Between(self))
        self.remove_callback(transformers.PrinterCallback)
        self.generated: list[int] = []

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        completions = super()._generate_and_score_completions(inputs)
        self.generated.append(int(completions["completion_mask"].sum()))
        return completions


def chunked_logprobs(hidden_XC: Tensor, weight_VC: Tensor, target_X: Tensor) -> Tensor:
    """Log-probabilities of the targets as DPOTrainer computes them, in tiles of the vocabulary."""
    outputs = ("log_probs", "entropy", "mean_logits", "is_top1")  # those of DPOTrainer's policy
    log_probs: Tensor = ChunkedLogProbFunction.apply(
        hidden_XC, weight_VC, None, target_X, 1.0, _CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0, outputs
    )[0]
    return log_probs
