"""The recipes of a sweep's runs: which stages all trials share, and where the stages of each run are.

A stage is shared where its fingerprint is the same at both ends of every range and for every choice. It runs once, in
the folder of the run (`runs/NAME/STAGE`), where `audiollm run` has it, too. All other stages that a figure depends on
run in each trial, `runs/NAME/SWEEP/trial_0007/STAGE`. A run that a trial precedes (the final one) shares that trial's
stages as well, as far as they are the same.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from audiollm.errors import ConfigError
from audiollm.recipe.stages import HERE, Recipe, SharedStages, load_recipe, overridden_document
from audiollm.sweep.figures import Figure, require_stage
from audiollm.sweep.spaces import FORMS, Parameters, Space, split_overrides


class Donor(NamedTuple):
    """A stage of a run, which other runs may share."""

    folder: Path
    fingerprint: str


Donors = Mapping[str, Donor]
"""By the names of stages."""


def fingerprints(recipe: Recipe) -> dict[str, str]:
    """The fingerprint of each stage."""
    prints: dict[str, str] = {}
    for stage in recipe.stages:
        prints[stage.name] = stage.fingerprint(prints)
    return prints


def upstream_closure(recipe: Recipe, names: Collection[str]) -> list[str]:
    """These stages and all that they depend on, in the recipe's order."""
    needed = set(names)
    for stage in reversed(recipe.stages):
        if stage.name in needed:
            needed.update(stage.upstream)
    return [stage.name for stage in recipe.stages if stage.name in needed]


def of_stages(recipe: Recipe, names: Collection[str]) -> Recipe:
    """The recipe with these stages alone."""
    return replace(recipe, stages=tuple(stage for stage in recipe.stages if stage.name in names))


def load_shared(
    path: Path, overrides: Sequence[str], folder: Path, donors: Donors, root: Path
) -> tuple[Recipe, dict[str, str]]:
    """Load a recipe for a run that has those stages of the donors that are the same in it.

    Args:
        folder: of the run.
        donors: stages of finished runs; those with another fingerprint in this run are not shared.
        root: that of `SharedStages`.

    Returns:
        The recipe, and the fingerprint of each of its stages.
    """
    while True:
        shared = SharedStages({name: donor.folder for name, donor in donors.items()}, root)
        recipe = load_recipe(path, overrides, folder.name, folder.parent, shared=shared)
        prints = fingerprints(recipe)
        same = {name: donor for name, donor in donors.items() if prints.get(name) == donor.fingerprint}
        if len(same) == len(donors):
            return recipe, prints
        donors = same  # what depends on the others is none of them: the second time all are the same


@dataclass(frozen=True)
class SweepRecipes:
    """A recipe, its spaces, and what follows from them for each run."""

    path: Path
    fixed: tuple[str, ...]
    """Overrides of every run."""
    spaces: tuple[Space, ...]
    base: Recipe
    """The recipe with the first value of each space."""
    folder: Path
    """The sweep's own."""
    needed: tuple[str, ...]
    """Stages that the figures depend on."""
    shared: Mapping[str, Donor]
    """Those of them that no trial changes."""
    prints: Mapping[str, str]
    """Fingerprints of the needed stages in `base`."""

    @property
    def root(self) -> Path:
        return self.base.folder / "../.."

    @property
    def trial_stages(self) -> list[str]:
        """Stages that each trial runs."""
        return [name for name in self.needed if name not in self.shared]

    @property
    def idle_stages(self) -> list[str]:
        """Stages that no figure depends on."""
        return [stage.name for stage in self.base.stages if stage.name not in self.needed]

    def overrides(self, parameters: Parameters, extra: Sequence[str] = ()) -> list[str]:
        """The overrides of a run with these parameters."""
        return [*self.fixed, *(space.override(parameters[space.key]) for space in self.spaces), *extra]

    def load(self, name: str, overrides: Sequence[str], donors: Donors) -> tuple[Recipe, dict[str, str]]:
        """The recipe of a run in the sweep's folder, with the fingerprints of its stages."""
        return load_shared(self.path, overrides, self.folder / name, donors, self.root)

    def donors_of(self, name: str, parameters: Parameters) -> dict[str, Donor]:
        """The stages of a trial with those that it shares."""
        recipe, prints = self.load(name, self.overrides(parameters), self.shared)
        return {
            stage.name: Donor(stage.folder, prints[stage.name])
            for stage in recipe.stages
            if stage.name in self.needed
        }

    def seeded_stages(self) -> list[str]:
        """Stages of the trials that draw from a seed of their own."""
        stages = {stage.name: stage for stage in self.base.stages}
        return [name for name in self.trial_stages if "seed" in type(stages[name].config).model_fields]

    def changed_stages(self) -> list[str]:
        """Stages whose settings, inputs or source are others now than when the sweep began."""
        now = fingerprints(load_recipe(self.path, self._base_overrides(), self.base.folder.name, self._runs))
        return [name for name in self.needed if now.get(name) != self.prints[name]]

    @property
    def _runs(self) -> Path:
        return self.base.folder.parent

    def _base_overrides(self) -> list[str]:
        return self.overrides({space.key: space.probes()[0] for space in self.spaces})


def plan_recipes(
    path: Path,
    overrides: Sequence[str],
    figures: Sequence[Figure],
    name: str | None,
    runs: Path,
    sweep_name: str,
) -> SweepRecipes:
    """Ask a recipe whether it takes the spaces, and find out which stages they change.

    Args:
        overrides: spaces and fixed `key=value`.
        figures: that the sweep reads.
        name: of the run that has the shared stages; None: the recipe's.

    Raises:
        ConfigError: a malformed space, a key that the recipe does not have, a value that its settings refuse, a figure
            of a stage that it does not have, or a space that changes none of them.
    """
    spaces, fixed = split_overrides(overrides)
    if not spaces:
        raise ConfigError("no space to search", "command line", f"example: train.steps=int(100,400); {FORMS}")
    first = {space.key: space.probes()[0] for space in spaces}

    def load(parameters: Parameters, name: str | None) -> Recipe:
        values = [space.override(parameters[space.key]) for space in spaces]
        return load_recipe(path, [*fixed, *values], name, runs)

    base = load(first, name)
    for figure in figures:
        require_stage(figure, base)
    needed = upstream_closure(base, {figure.stage for figure in figures})
    if sweep_name in {stage.name for stage in base.stages} or Path(sweep_name).name != sweep_name:
        raise ConfigError(f"{sweep_name!r} is a stage, or no folder's name", "--sweep-name", "give another")
    prints = fingerprints(base)
    same = set(needed)
    for space in spaces:
        changed: set[str] = set()
        for value in space.probes()[1:]:
            try:
                probe_prints = fingerprints(load({**first, space.key: value}, base.name))
            except ConfigError as error:
                problem = f"{space.override(value)}, of {space.text}, is refused: {error.message}"
                raise ConfigError(problem, "command line", error.remedy) from None
            changed |= {stage for stage in needed if probe_prints.get(stage) != prints[stage]}
        if not changed:
            problem = f"{space.key}: changes no stage that the figures depend on"
            raise ConfigError(problem, "command line", f"these are {', '.join(needed)}")
        same -= changed
    for figure in figures:
        if figure.stage in same:
            problem = f"{figure}: no space changes the stage {figure.stage}"
            raise ConfigError(problem, "command line", f"they change {', '.join(set(needed) - same)}")
    donors = {
        stage.name: Donor(stage.folder, prints[stage.name]) for stage in base.stages if stage.name in same
    }
    return SweepRecipes(
        path,
        tuple(fixed),
        tuple(spaces),
        base,
        base.folder / sweep_name,
        tuple(needed),
        donors,
        {stage: prints[stage] for stage in needed},
    )


def recipe_text(path: Path, overrides: Sequence[str]) -> str:
    """A recipe with its overrides as one YAML file, which stands for itself in any folder."""
    document, _ = overridden_document(path, overrides)
    here = document.data.pop(HERE)
    return yaml.safe_dump(
        _with_here(document.data, str(here)), sort_keys=False, allow_unicode=True, width=110
    )


def _with_here(value: Any, here: str) -> Any:
    """The value with the recipe's folder in the place of references to it."""
    if isinstance(value, dict):
        return {key: _with_here(inner, here) for key, inner in value.items()}
    if isinstance(value, list):
        return [_with_here(inner, here) for inner in value]
    return value.replace(f"${{{HERE}}}", here) if isinstance(value, str) else value
