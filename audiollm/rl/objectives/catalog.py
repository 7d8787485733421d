"""Names of the objectives, their settings and what each needs; errors for names and settings that do not exist.

Loads no torch: `plan` and errors in a recipe answer at once. The functions themselves are in `registry`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from pydantic import ValidationError

from audiollm.errors import ConfigError, suggestion
from audiollm.recipe.plug_ins import import_of_class, is_import_path
from audiollm.rl.objectives import settings as s

GroupKind = Literal["pairs", "lists", "singles", "steps"]
WhatIsRead = Literal["log_probs", "scores", "step_scores"]
SettingsType = TypeVar("SettingsType", bound=s.ObjectiveSettings)

OWN_REMEDY = "give a `catalog.OwnObjective`: see docs/extending.md"
PAIRS: tuple[GroupKind, ...] = ("pairs",)
LISTS: tuple[GroupKind, ...] = ("lists",)
SINGLES: tuple[GroupKind, ...] = ("singles",)


@dataclass(frozen=True)
class ObjectiveEntry:
    """An objective's entry in the catalogue, known before anything is computed."""

    settings: type[s.ObjectiveSettings]
    groups: tuple[GroupKind, ...]
    """Kinds of groups that it takes."""
    reads: WhatIsRead = "log_probs"
    """`log_probs`: of a policy; `scores`: of a reward model; `step_scores`: of a process reward model."""
    needs_reference: bool = True
    """Whether it reads `reference_T`."""
    fields: tuple[str, ...] = ()
    """Further fields that it reads, of `AnswerLogprobs` or of its group."""
    figures: tuple[str, ...] = ()
    """Fields of `StepFigures` that it reads."""
    cross_entropy: str = ""
    """Name of the setting that weights its cross entropy; "" where it has none, "1" where the weight is fixed."""


@dataclass(frozen=True)
class OwnObjective:
    """An objective of a user's own, named `package.module:name` in a recipe."""

    entry: ObjectiveEntry
    function: Callable[..., Any]
    """`(inputs, groups, settings, figures) -> ItemLosses`, as those in `registry`."""


@dataclass(frozen=True)
class ObjectiveNeeds:
    """The inputs that one objective, under given settings, needs from the training."""

    groups: tuple[GroupKind, ...]
    reads: WhatIsRead
    reference: bool
    fields: frozenset[str]
    """Fields of `AnswerLogprobs` or of the group that must be filled."""
    figures: frozenset[str]
    """Fields of `StepFigures` that must be gathered over all packs and ranks of a step."""

    @property
    def value_head(self) -> bool:
        """Whether a value head is trained beside the policy."""
        return "value_A" in self.fields

    @property
    def prompts(self) -> bool:
        """Whether the log-probabilities of prompts are computed, too."""
        return "prompt_sum_A" in self.fields

    @property
    def mismatched_answers(self) -> bool:
        """Whether answers beside prompts of other samples are computed, for KTO's KL."""
        return "kl" in self.figures

    @property
    def altered_recordings(self) -> bool:
        """Whether chosen answers are computed once more with an altered recording."""
        return "altered_P" in self.fields


def _scores(
    settings: type[s.ObjectiveSettings], groups: tuple[GroupKind, ...], *fields: str
) -> ObjectiveEntry:
    return ObjectiveEntry(settings, groups, "scores", needs_reference=False, fields=fields)


CATALOG: dict[str, ObjectiveEntry] = {
    "dpo": ObjectiveEntry(s.DPOSettings, PAIRS),
    "hinge": ObjectiveEntry(s.DivergenceSettings, PAIRS),
    "ipo": ObjectiveEntry(s.IPOSettings, PAIRS),
    "exo_pair": ObjectiveEntry(s.EXOPairSettings, PAIRS),
    "nca_pair": ObjectiveEntry(s.PairedSettings, PAIRS),
    "robust": ObjectiveEntry(s.RobustDPOSettings, PAIRS),
    "bco_pair": ObjectiveEntry(s.PairedSettings, PAIRS),
    "sppo_hard": ObjectiveEntry(s.PairedSettings, PAIRS),
    "aot": ObjectiveEntry(s.AOTSettings, PAIRS, figures=("partners",)),
    "aot_unpaired": ObjectiveEntry(s.AOTSettings, PAIRS, figures=("partners",)),
    "apo_zero": ObjectiveEntry(s.PairedSettings, PAIRS),
    "apo_down": ObjectiveEntry(s.PairedSettings, PAIRS),
    "discopop": ObjectiveEntry(s.DiscoPOPSettings, PAIRS),
    "sigmoid_norm": ObjectiveEntry(s.DivergenceSettings, PAIRS),
    "dpop": ObjectiveEntry(s.DPOPSettings, PAIRS),
    "beta_dpo": ObjectiveEntry(s.BetaDPOSettings, PAIRS, figures=("margin_center",)),
    "slic_hf": ObjectiveEntry(s.SLiCSettings, PAIRS, needs_reference=False, cross_entropy="sft_weight"),
    "tdpo1": ObjectiveEntry(s.TDPOSettings, PAIRS, fields=("kl_T",)),
    "tdpo2": ObjectiveEntry(s.TDPO2Settings, PAIRS, fields=("kl_T",)),
    "cringe": ObjectiveEntry(s.CringeSettings, PAIRS, needs_reference=False, fields=("contrast_T",)),
    "r_dpo": ObjectiveEntry(s.RDPOSettings, PAIRS),
    "sampo": ObjectiveEntry(s.SamPOSettings, PAIRS, fields=("draw_T",)),
    "ld_dpo": ObjectiveEntry(s.LDDPOSettings, PAIRS),
    "simpo": ObjectiveEntry(s.SimPOSettings, PAIRS, needs_reference=False, cross_entropy="sft_weight"),
    "cpo": ObjectiveEntry(s.CPOSettings, PAIRS, needs_reference=False, cross_entropy="sft_weight"),
    "orpo": ObjectiveEntry(s.ORPOSettings, PAIRS, needs_reference=False, cross_entropy="1"),
    "opa_dpo": ObjectiveEntry(s.OPADPOSettings, PAIRS),
    "kto": ObjectiveEntry(s.KTOSettings, SINGLES, fields=("desirable_N",), figures=("kl",)),
    "apo_zero_unpaired": ObjectiveEntry(s.KTOSettings, SINGLES, fields=("desirable_N",)),
    "bco": ObjectiveEntry(s.ReferencedSettings, SINGLES, fields=("desirable_N",), figures=("running_mean",)),
    "npo": ObjectiveEntry(s.NPOSettings, SINGLES, fields=("desirable_N",), cross_entropy="retain_weight"),
    "dro": ObjectiveEntry(s.DROSettings, SINGLES, fields=("score_N", "value_A")),
    "lipo_lambda": ObjectiveEntry(s.LiPOSettings, LISTS),
    "pro": ObjectiveEntry(s.PROSettings, LISTS, needs_reference=False),
    "rrhf": ObjectiveEntry(s.RRHFSettings, LISTS, needs_reference=False, cross_entropy="sft_weight"),
    "dpo_plackett_luce": ObjectiveEntry(s.ReferencedSettings, LISTS),
    "d2o": ObjectiveEntry(s.D2OSettings, LISTS),
    "sppo_soft": ObjectiveEntry(s.SPPOSettings, LISTS),
    "sft": ObjectiveEntry(
        s.SFTSettings, ("pairs", "lists", "singles"), needs_reference=False, cross_entropy="1"
    ),
    "bradley_terry": _scores(s.BradleyTerrySettings, PAIRS),
    "plackett_luce": _scores(s.ObjectiveSettings, LISTS),
    "regression": _scores(s.ObjectiveSettings, SINGLES, "score_N"),
    "process": ObjectiveEntry(s.ObjectiveSettings, ("steps",), "step_scores", needs_reference=False),
}
"""Every objective by the name that recipes use."""

TRL_LOSS_TYPES: dict[str, str] = {
    "sigmoid": "dpo",
    **{
        name: name
        for name in (
            "hinge",
            "ipo",
            "exo_pair",
            "nca_pair",
            "robust",
            "bco_pair",
            "sppo_hard",
            "aot",
            "aot_unpaired",
            "apo_zero",
            "apo_down",
            "discopop",
            "sft",
            "sigmoid_norm",
        )
    },
}
"""The names of TRL 1.16's DPO `loss_type` -> ours."""


@dataclass(frozen=True)
class ObjectiveTerm:
    """One objective of a weighted mix."""

    name: str
    settings: s.ObjectiveSettings
    weight: float = 1.0

    @property
    def needs(self) -> ObjectiveNeeds:
        """The inputs that this term needs from the training."""
        return needs_of(self.name, self.settings)


def objective_entry(name: str, where: str = "", key: str = "objective") -> ObjectiveEntry:
    """Look up an objective.

    Args:
        where: file and line of `key`.
        key: the recipe's key that holds the name.

    Raises:
        ConfigError: no such objective, with the nearest that there is.
    """
    if is_import_path(name):
        return import_of_class(name, OwnObjective, OWN_REMEDY).entry
    if name not in CATALOG:
        raise ConfigError(f"{key}: no such objective: {name!r}", where, suggestion(name, CATALOG))
    return CATALOG[name]


def objective_term(
    name: str, values: Mapping[str, Any], weight: float = 1.0, where: str = "", key: str = "objective"
) -> ObjectiveTerm:
    """Check an objective's name and settings.

    Args:
        values: settings by name; the others keep their defaults.
        where: file and line of `key`.
        key: the recipe's key that holds the name.

    Raises:
        ConfigError: no such objective or setting, with the nearest that there is, or a value out of range.
    """
    model = objective_entry(name, where, key).settings
    return ObjectiveTerm(name, checked_settings(model, name, values, where, key), weight)


def checked_settings(
    model: type[SettingsType], name: str, values: Mapping[str, Any], where: str, key: str
) -> SettingsType:
    """Read settings by name.

    Args:
        name: what they are the settings of, for errors.
        where: file and line of `key`.
        key: the recipe's key that holds the name.

    Raises:
        ConfigError: no such setting, with the nearest that there is, or a value out of range.
    """
    try:
        return model(**values)
    except ValidationError as error:
        first = error.errors()[0]
        setting = ".".join(str(key_part) for key_part in first["loc"])
        if first["type"] == "extra_forbidden":
            remedy = suggestion(setting, model.model_fields)
            raise ConfigError(f"{key}: {name} has no setting {setting!r}", where, remedy) from None
        what = f"{name}.{setting}" if setting else name
        raise ConfigError(f"{key}: {what}: {first['msg']}", where) from None


def needs_of(name: str, settings: s.ObjectiveSettings) -> ObjectiveNeeds:
    """Return what the objective `name` needs under `settings`."""
    entry = objective_entry(name)
    fields, figures = set(entry.fields), set(entry.figures)
    if getattr(settings, "policy_weighting", False):
        fields.add("log_collision_T")
    if isinstance(settings, s.ORPOSettings) and settings.sft_on == "prompt_and_answer":
        fields |= {"prompt_sum_A", "prompt_length_A"}
    if isinstance(settings, s.OPADPOSettings) and (
        settings.conditional_weight or settings.altered_anchor_weight
    ):
        fields.add("altered_P")
    if isinstance(settings, s.BetaDPOSettings) and settings.level == "batch":
        figures.add("margin_mean")
    if _averages_tokens(entry, settings):
        figures.add("tokens_per_answer")
    return ObjectiveNeeds(
        entry.groups, entry.reads, entry.needs_reference, frozenset(fields), frozenset(figures)
    )


def _averages_tokens(entry: ObjectiveEntry, settings: s.ObjectiveSettings) -> bool:
    average = getattr(settings, "sft_average", getattr(settings, "average", "sequence"))
    weight = getattr(settings, entry.cross_entropy, 1.0) if entry.cross_entropy else 0.0
    return average == "token" and weight != 0
