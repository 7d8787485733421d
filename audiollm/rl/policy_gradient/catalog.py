"""Names of advantages, policy objectives and KL controllers, with their settings and what each reads.

Loads no torch. The functions are in `advantages` and `registry`, the controllers in `controllers`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from audiollm.errors import ConfigError, suggestion
from audiollm.recipe.plug_ins import Catalog, documented, import_of_class, is_import_path
from audiollm.rl.objectives.catalog import checked_settings
from audiollm.rl.policy_gradient import settings as s

Entry = TypeVar("Entry")


@dataclass(frozen=True)
class AdvantageEntry:
    """An advantage's entry in the catalogue."""

    settings: type[s.AdvantageSettings]
    reads: tuple[str, ...]
    """Fields of `RolloutRewards` that must be filled, beside the answers of the tokens."""


@dataclass(frozen=True)
class OwnAdvantage:
    """An advantage of a user's own, named `package.module:name` in a recipe."""

    entry: AdvantageEntry
    function: Callable[..., Any]
    """`(rewards, settings) -> RawAdvantages`, as those in `advantages`."""


@dataclass(frozen=True)
class OwnPolicyObjective:
    """A policy objective of a user's own, named `package.module:name` in a recipe."""

    settings: type[s.PolicyObjectiveSettings]
    function: Callable[..., Any]
    """`(tokens, settings) -> SurrogateLosses`, as those in `surrogates`."""


@dataclass(frozen=True)
class OwnKLController:
    """A controller of the KL's weight of a user's own, named `package.module:name` in a recipe."""

    settings: type[s.FixedKLSettings]
    controller: Callable[[Any], Any]
    """The class, a `KLController`, which is made of the settings."""


OWN_ADVANTAGE_REMEDY = "give a `catalog.OwnAdvantage`: see docs/extending.md"
OWN_OBJECTIVE_REMEDY = "give a `catalog.OwnPolicyObjective`: see docs/extending.md"
OWN_CONTROLLER_REMEDY = "give a `catalog.OwnKLController`: see docs/extending.md"
ADVANTAGES: dict[str, AdvantageEntry] = {
    "grpo": AdvantageEntry(s.GRPOAdvantageSettings, ("reward_A", "group_A")),
    "dr_grpo": AdvantageEntry(s.DrGRPOAdvantageSettings, ("reward_A", "group_A")),
    "grpo_process": AdvantageEntry(s.ProcessAdvantageSettings, ("step_reward_S", "step_end_S", "group_A")),
    "gdpo": AdvantageEntry(s.GDPOSettings, ("reward_AF", "weight_F", "group_A")),
    "rloo": AdvantageEntry(s.RLOOAdvantageSettings, ("reward_A", "group_A")),
    "remax": AdvantageEntry(s.AdvantageSettings, ("reward_A", "group_A", "greedy_reward_G")),
    "reinforce_plus_plus": AdvantageEntry(s.ReinforceSettings, ("reward_T",)),
    "reinforce_plus_plus_baseline": AdvantageEntry(s.WhitenedSettings, ("reward_A", "group_A")),
    "gae": AdvantageEntry(s.GAESettings, ("reward_T", "value_T")),
}
"""Every advantage by the name that recipes use."""

POLICY_OBJECTIVES: dict[str, type[s.PolicyObjectiveSettings]] = {
    "clip": s.ClipSettings,
    "grpo": s.GRPOLossSettings,
    "bnpo": s.ClipSettings,
    "dapo": s.DAPOSettings,
    "dr_grpo": s.DrGRPOLossSettings,
    "gspo": s.GSPOSettings,
    "gspo_token": s.GSPOTokenSettings,
    "luspo": s.LUSPOSettings,
    "rloo": s.RLOOLossSettings,
    "cispo": s.CISPOSettings,
    "sapo": s.SAPOSettings,
    "vespo": s.VESPOSettings,
}
"""Settings of every policy objective by the name that recipes use."""

KL_CONTROLLERS: dict[str, type[s.FixedKLSettings]] = {
    "fixed": s.FixedKLSettings,
    "proportional": s.ProportionalKLSettings,
    "exponential": s.ProportionalKLSettings,
    "horizon": s.HorizonKLSettings,
}
"""Settings of every KL controller by the name that recipes use."""


def policy_objective_catalog() -> Catalog:
    """Policy objectives of policy gradients."""
    return Catalog(
        documented(POLICY_OBJECTIVES), "Your own: `package.module:name` of an `OwnPolicyObjective`."
    )


def kl_controller_catalog() -> Catalog:
    """Controllers of the KL's weight."""
    return Catalog(documented(KL_CONTROLLERS), "Your own: `package.module:name` of an `OwnKLController`.")


@dataclass(frozen=True)
class AdvantageTerm:
    """An advantage with its settings."""

    name: str
    settings: s.AdvantageSettings

    @property
    def reads(self) -> tuple[str, ...]:
        """Fields of `RolloutRewards` that it needs."""
        return _advantage_entry(self.name).reads


@dataclass(frozen=True)
class PolicyTerm:
    """A policy objective with its settings."""

    name: str
    settings: s.PolicyObjectiveSettings


def advantage_term(
    name: str, values: Mapping[str, Any], where: str = "", key: str = "advantage"
) -> AdvantageTerm:
    """Check an advantage's name and settings.

    Args:
        values: settings by name; the others keep their defaults.
        where: file and line of `key`.
        key: the recipe's key that holds the name.

    Raises:
        ConfigError: no such advantage or setting, with the nearest that there is, or a value out of range.
    """
    entry = _advantage_entry(name, where, key)
    return AdvantageTerm(name, checked_settings(entry.settings, name, values, where, key))


def policy_term(name: str, values: Mapping[str, Any], where: str = "", key: str = "objective") -> PolicyTerm:
    """Check a policy objective's name and settings; arguments and errors are those of `advantage_term`."""
    if is_import_path(name):
        model = import_of_class(name, OwnPolicyObjective, OWN_OBJECTIVE_REMEDY).settings
    else:
        model = _entry(POLICY_OBJECTIVES, name, where, key)
    return PolicyTerm(name, checked_settings(model, name, values, where, key))


def kl_controller_settings(
    name: str, values: Mapping[str, Any], where: str = "", key: str = "kl_controller"
) -> s.FixedKLSettings:
    """Check a KL controller's name and settings; arguments and errors are those of `advantage_term`."""
    if is_import_path(name):
        model = import_of_class(name, OwnKLController, OWN_CONTROLLER_REMEDY).settings
    else:
        model = _entry(KL_CONTROLLERS, name, where, key)
    return checked_settings(model, name, values, where, key)


def _advantage_entry(name: str, where: str = "", key: str = "advantage") -> AdvantageEntry:
    if is_import_path(name):
        return import_of_class(name, OwnAdvantage, OWN_ADVANTAGE_REMEDY).entry
    return _entry(ADVANTAGES, name, where, key)


def _entry(entries: Mapping[str, Entry], name: str, where: str, key: str) -> Entry:
    if name not in entries:
        raise ConfigError(f"{key}: no such {key}: {name!r}", where, suggestion(name, entries))
    return entries[name]
