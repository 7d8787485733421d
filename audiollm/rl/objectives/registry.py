"""Objectives by name, and weighted mixes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from audiollm.families.logprobs.answers import (
    AnswerGroups,
    AnswerLogprobs,
    AnswerScores,
    ItemLosses,
    LabelledSteps,
    Lists,
    ObjectiveInputs,
    Pairs,
    Singles,
    StepScores,
)
from audiollm.recipe.plug_ins import Catalog, documented, import_of_class, is_import_path
from audiollm.rl.objectives.catalog import OWN_REMEDY, GroupKind, ObjectiveTerm, OwnObjective, WhatIsRead
from audiollm.rl.objectives.figures import StepFigures
from audiollm.rl.objectives.lists import d2o, dpo_plackett_luce, lipo_lambda, pro, rrhf, sppo_soft
from audiollm.rl.objectives.pair_variants import cringe, ld_dpo, opa_dpo, r_dpo, sampo, tdpo1, tdpo2
from audiollm.rl.objectives.pairs import (
    aot,
    aot_unpaired,
    apo_down,
    apo_zero,
    bco_pair,
    beta_dpo,
    discopop,
    dpo,
    dpop,
    exo_pair,
    hinge,
    ipo,
    nca_pair,
    robust,
    sigmoid_norm,
    slic_hf,
    sppo_hard,
)
from audiollm.rl.objectives.reference_free import cpo, orpo, simpo
from audiollm.rl.objectives.reward_models import bradley_terry, plackett_luce, process, regression
from audiollm.rl.objectives.singles import apo_zero_unpaired, bco, dro, kto, npo, sft

ObjectiveFunction = Callable[..., ItemLosses]

OBJECTIVES: dict[str, ObjectiveFunction] = {
    function.__name__: function
    for function in (
        *(dpo, hinge, ipo, exo_pair, nca_pair, robust, bco_pair, sppo_hard, aot, aot_unpaired),
        *(apo_zero, apo_down, discopop, sigmoid_norm, dpop, beta_dpo, slic_hf),
        *(tdpo1, tdpo2, cringe),
        *(r_dpo, sampo, ld_dpo),
        *(simpo, cpo, orpo),
        opa_dpo,
        *(kto, apo_zero_unpaired, bco, npo, dro),
        *(lipo_lambda, pro, rrhf, dpo_plackett_luce, d2o, sppo_soft),
        sft,
        *(bradley_terry, plackett_luce, regression, process),
    )
}
"""Every objective: `(inputs, groups, settings, figures) -> ItemLosses`; the keys are those of `catalog.CATALOG`."""


def objective_catalog() -> Catalog:
    """Preference objectives, and losses of reward models."""
    return Catalog(documented(OBJECTIVES), "Your own: `package.module:name` of an `OwnObjective`.")


GROUP_KINDS: dict[type, GroupKind] = {
    Pairs: "pairs",
    Lists: "lists",
    Singles: "singles",
    LabelledSteps: "steps",
}
INPUT_KINDS: dict[type, WhatIsRead] = {
    AnswerLogprobs: "log_probs",
    AnswerScores: "scores",
    StepScores: "step_scores",
}


def objective_function(name: str) -> ObjectiveFunction:
    """The function of an objective: by name, or a user's own.

    Raises:
        ConfigError: a user's own cannot be imported.
    """
    if is_import_path(name):
        return import_of_class(name, OwnObjective, OWN_REMEDY).function
    return OBJECTIVES[name]


def mixed_losses(
    terms: Sequence[ObjectiveTerm], inputs: ObjectiveInputs, groups: AnswerGroups, figures: StepFigures
) -> ItemLosses:
    """Evaluate a weighted sum of objectives on the same groups, each item times the group's `weight_I`.

    Args:
        terms: at least one, from `catalog.objective_term`.
        figures: what the terms' `needs.figures` name, of the whole step.

    Returns:
        Losses per item. The figures of the first term keep their names; those of the others are
        `<name>/<figure>`, and with several terms `<name>/loss` is each one's own loss.

    Raises:
        ValueError: a term does not take such groups or inputs, or a field or a figure that it needs is None.
    """
    total: Tensor | None = None
    metrics: dict[str, Tensor] = {}
    for index, term in enumerate(terms):
        _check_kinds(term, inputs, groups)
        losses = objective_function(term.name)(inputs, groups, term.settings, figures).weighted(
            groups.weight_I
        )
        total = term.weight * losses.loss_I if total is None else total + term.weight * losses.loss_I
        prefix = f"{term.name}/" if index else ""
        metrics |= {f"{prefix}{name}": value for name, value in losses.metrics.items()}
        if len(terms) > 1:
            metrics[f"{term.name}/loss"] = losses.loss_I.detach()
    if total is None:
        raise ValueError("mixed_losses needs at least one term")
    return ItemLosses(total, metrics)


def _check_kinds(term: ObjectiveTerm, inputs: ObjectiveInputs, groups: AnswerGroups) -> None:
    needs, kind, read = term.needs, GROUP_KINDS[type(groups)], INPUT_KINDS[type(inputs)]
    if kind not in needs.groups:
        raise ValueError(f"{term.name} takes {' or '.join(needs.groups)}, not {kind}")
    if read != needs.reads:
        raise ValueError(f"{term.name} reads {needs.reads}, not {read}")
