"""Objectives on pairs or single answers of fresh rollouts: `online_dpo` and `online_rft`. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from audiollm.errors import ConfigError, suggestion
from audiollm.rl.objectives.catalog import ObjectiveTerm, objective_entry, objective_term

COMPUTED_FIELDS = frozenset({"kl_T", "log_collision_T", "desirable_N"})
COMPUTED_FIGURES = frozenset(
    {"tokens_per_answer", "partners", "running_mean", "margin_center", "margin_mean"}
)
FROM_OLD = frozenset({"partners", "running_mean", "margin_center", "margin_mean"})
"""Figures of log-probabilities from before the updates: they hold for one update."""
REMEMBERED = frozenset({"running_mean", "margin_center"})


class PairSelection(BaseModel):
    """Settings of `online_dpo`: the best and the worst answer of each group are a pair (arXiv 2402.04792)."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
    loss: str = "dpo"
    """An objective on pairs, whose own settings stand beside it."""


class SingleSelection(BaseModel):
    """Settings of `online_rft`: the best answers of each group are trained on (arXiv 2308.01825)."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
    loss: str = "sft"
    """An objective on single answers, whose own settings stand beside it."""
    least: float = 1.0
    """Smallest reward of an answer that is accepted."""
    per_group: int = Field(1, ge=1)
    """Most accepted answers of a group; a `loss` that also learns from undesirable answers takes all of the group."""


SELECTIONS: dict[str, tuple[Literal["pairs", "singles"], type[PairSelection] | type[SingleSelection]]] = {
    "online_dpo": ("pairs", PairSelection),
    "online_rft": ("singles", SingleSelection),
}
"""Names of these objectives in recipes, with what they choose of a group."""


@dataclass(frozen=True)
class FreshObjective:
    """An objective on fresh answers, with the answers that it takes."""

    name: str
    kind: Literal["pairs", "singles"]
    term: ObjectiveTerm
    min_reward: float = 0.0
    per_group: int = 1

    @property
    def judges_all(self) -> bool:
        """Whether all answers are trained on, as desirable or undesirable ones."""
        return "desirable_N" in self.term.needs.fields

    @property
    def remembers(self) -> bool:
        """Whether a running mean goes from step to step."""
        return bool(self.term.needs.figures & REMEMBERED)

    @property
    def holds_for_one_update(self) -> bool:
        """Whether figures of the step are those from before its first update."""
        return bool(self.term.needs.figures & FROM_OLD)


def fresh_objective(name: str, values: Mapping[str, Any]) -> FreshObjective:
    """Check an objective on fresh answers.

    Args:
        name: a key of `SELECTIONS`.
        values: settings of the selection and of its `loss`.

    Raises:
        ConfigError: no such loss or setting, a value out of range, or a loss that takes other groups or reads what is
            not computed here.
    """
    kind, model = SELECTIONS[name]
    selection_values = {key: value for key, value in values.items() if key in model.model_fields}
    try:
        selection = model(**selection_values)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"objective: {name}.{first['loc'][0]}: {first['msg']}") from None
    entry = objective_entry(selection.loss, key="objective: loss")
    if kind not in entry.groups or entry.reads != "log_probs":
        raise ConfigError(
            f"objective: {name} makes {kind}, and {selection.loss} takes {' or '.join(entry.groups)}"
        )
    loss_values = {key: value for key, value in values.items() if key not in selection_values}
    unknown = [key for key in loss_values if key not in entry.settings.model_fields]
    if unknown:
        remedy = suggestion(unknown[0], [*model.model_fields, *entry.settings.model_fields])
        raise ConfigError(
            f"objective: {name} with {selection.loss} has no setting {unknown[0]!r}", "", remedy
        )
    term = objective_term(selection.loss, loss_values)
    lacking = (term.needs.fields - COMPUTED_FIELDS) | (term.needs.figures - COMPUTED_FIGURES)
    if lacking:
        raise ConfigError(
            f"objective: {selection.loss} as set reads {', '.join(sorted(lacking))}, which nothing computes here"
        )
    if isinstance(selection, SingleSelection):
        return FreshObjective(name, kind, term, selection.least, selection.per_group)
    return FreshObjective(name, kind, term)
