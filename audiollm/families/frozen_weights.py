"""Weights of a training that do not learn: stored in fewer bytes, and held once where a reference has the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from audiollm.data.records.source import LoadedSample
from audiollm.errors import ConfigError, StageError
from audiollm.families.policies import load_policy
from audiollm.families.policy import Policy
from audiollm.families.target_logits import LogitDifference, ReadLogits, compared_batch, read_logits
from audiollm.files.atomic import read_json, write_json
from audiollm.models.frozen.formats import check_format
from audiollm.models.frozen.shrink import shrink_frozen
from audiollm.processes import return_free_memory
from audiollm.recipe.runner import Context
from audiollm.train.settings import ModelTrainingConfig

RECORD = "frozen_weights.json"
SHARDING = ("fsdp2", "zero2", "zero3")


class FrozenWeights:
    """How a training stores the weights that do not learn: `frozen_weights` among its settings.

    With `fp32` nothing is changed, measured or written.

    Raises:
        StageError: the library of the format is not installed, or the strategy shards weights.
    """

    def __init__(self, config: ModelTrainingConfig, context: Context) -> None:
        self._format, self._seed, self._context = config.frozen_weights, config.seed, context
        self._path = context.folder / RECORD
        self._record: dict[str, Any] = {}
        self._batch: Any = None  # on the CPU
        if self._format == "fp32":
            return
        if context.ranks.world > 1 and config.strategy in SHARDING:
            raise StageError(
                f"frozen_weights: {self._format}, and strategy {config.strategy} shards float32 weights alone",
                "set strategy: ddp, or frozen_weights: fp32",
                2,
            )
        try:
            check_format(self._format)
        except ConfigError as error:
            raise StageError(error.message, error.remedy, 2) from error

    @property
    def are_small(self) -> bool:
        """Whether they are stored in fewer bytes."""
        return self._format != "fp32"

    def shrink(
        self,
        model: nn.Module,
        logits: ReadLogits,
        references: Sequence[nn.Module] = (),
        beside: Sequence[nn.Module] = (),
    ) -> None:
        """Store the frozen weights of models on the CPU in fewer bytes, and measure what that does to logits.

        A training that goes on after a kill has measured it before.

        Args:
            model: the one that is trained.
            logits: computes logits of the model.
            references, beside: as `shrink_frozen` has them.

        Raises:
            StageError: no weight of the model is frozen.
        """
        if self._format == "fp32":
            return
        record = read_json(self._path) if self._path.exists() else {}
        expected = [] if record else logits()
        try:
            sizes = shrink_frozen(model, self._format, references, beside)
        except ConfigError as error:
            raise StageError(error.message, error.remedy, 2) from error
        return_free_memory()
        if not record:
            difference = LogitDifference.between(expected, logits())
            record = {
                "format": self._format,
                "weights_mb": round(sizes.after / 2**20, 1),
                "weights_mb_in_fp32": round(sizes.before / 2**20, 1),
                "start": None if difference is None else asdict(difference),
            }
            megabytes = f"{sizes.after / 2**20:,.0f} MB of weights in place of {sizes.before / 2**20:,.0f}"
            comparison = "" if difference is None else f"; compared with float32, {difference}"
            self._context.say(f"frozen weights in {self._format}: {megabytes}{comparison}")
            if self._context.ranks.first:
                write_json(self._path, record)
        self._record = record

    def compare_saved(self, trained: ReadLogits, saved: ReadLogits) -> None:
        """Measure by how much the saved model, whose frozen weights are whole, differs from the one that was trained.

        Called on the first rank alone.
        """
        if self._format == "fp32":
            return
        difference = LogitDifference.between(trained(), saved())
        if difference is not None:
            self._record["saved"] = asdict(difference)
            write_json(self._path, self._record)
            self._context.say(
                f"the saved model has whole frozen weights; compared with the trained one, {difference}"
            )

    def shrink_policy(
        self,
        policy: Policy[Any, Any, Any],
        samples: Iterable[LoadedSample],
        beside: Sequence[nn.Module] = (),
        refreshes_reference: bool = False,
    ) -> None:
        """Store the frozen weights of a policy, and of its reference, in fewer bytes; see `shrink`.

        Args:
            samples: answers to the first of them are what logits are compared on.
            beside: models that are trained beside it.
            refreshes_reference: the reference's weights change, and stay in float32.
        """
        if self._format == "fp32":
            return
        self._batch = compared_batch(policy, samples)
        references: Sequence[nn.Module] = ()
        if not refreshes_reference:
            policy.share_frozen()
            references = list(policy.frozen.values())
        self.shrink(policy.root, lambda: read_logits(policy, self._batch), references, beside)

    def compare_saved_policy(self, policy: Policy[Any, Any, Any]) -> None:
        """Open the policy that was saved, and compare it with the one that was trained; see `compare_saved`."""
        if self._format == "fp32" or self._batch is None:
            return
        device = next(policy.root.parameters()).device
        saved = load_policy(self._context.folder)
        saved.root.requires_grad_(False)  # rows of a frozen encoder may be remembered
        self.compare_saved(
            lambda: read_logits(policy, self._batch.to(device)), lambda: read_logits(saved, self._batch)
        )

    @contextmanager
    def begun_again(self) -> Iterator[None]:
        """Within, torch draws the numbers that the training began with: for the model made anew to be saved."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed)
            yield

    def figures(self) -> dict[str, float]:
        """The figures of the frozen weights in the summary of the stage."""
        if not self._record:
            return {}
        figures = {"frozen_weights_mb": self._record["weights_mb"]}
        for moment in ("start", "saved"):
            if self._record.get(moment):
                figures[f"logit_error_{moment}"] = round(self._record[moment]["error"], 5)
                figures[f"same_tokens_{moment}"] = round(self._record[moment]["same_tokens"], 4)
        return figures


def share_frozen_weights(trained: nn.Module, reference: nn.Module | None) -> None:
    """Keep the weights that are not trained once in memory, where the reference has the same."""
    trained_weights = dict(trained.named_parameters())
    for name, parameter in [] if reference is None else list(reference.named_parameters()):
        weight = trained_weights.get(name)
        if weight is not None and not weight.requires_grad and torch.equal(parameter, weight):
            parameter.data = weight.data
