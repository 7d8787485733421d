"""Chains of steps: the ledger keys of their calls, what they lack, and the pools that do them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from json import JSONEncoder
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel

from audiollm.errors import ConfigError, suggestion
from audiollm.evaluate.judges.yamnet import AUTO
from audiollm.recipe.plug_ins import Catalog, documented, import_named, is_import_path
from audiollm.recipe.stages import located
from pipelines.execution.engine import Pool
from pipelines.steps.rules import Rule
from pipelines.steps.step import BaseStep, BatchStep, Resources, Step, Value

_PLAIN = JSONEncoder(sort_keys=True, ensure_ascii=False, default=str)


class Missing(NamedTuple):
    """A requirement of a run that is not met.

    Args:
        rules: those whose thresholds cannot be applied.
        whole: the step cannot run at all.
    """

    step: str
    reason: str
    rules: tuple[Rule, ...]
    blocks_step: bool


class StepKeys:
    """Base of chains: the keys of their calls. `hashes` has that of each step's settings, by name."""

    hashes: Mapping[str, str]

    def key(self, step: Step, digest: str, facts: object, values: Mapping[str, Value]) -> str:
        """Return the ledger's key of a call: a hash of the step's settings, the content, `facts`, and `values`."""
        return hash_json([self.hashes[step.name], digest, facts, values])


class StepCatalog:
    """The steps of a pipeline: built-in ones by name, a user's own by `module:name`.

    Args:
        stage: the pipeline, for errors.
        built_in: name -> `package.module:class`, in the order in which they run; a user's own run after them.
        required: steps that every run has.
        base: the class that steps of a user's own derive from.
    """

    def __init__(
        self,
        stage: str,
        built_in: Mapping[str, str],
        required: Sequence[str],
        base: tuple[type[BaseStep[Any]], ...],
    ) -> None:
        self.stage, self.built_in, self.required, self.base = stage, built_in, required, base

    def step_class(self, name: str) -> type[BaseStep[Any]]:
        """The class of a step, without loading anything heavy.

        Raises:
            ConfigError: a step of a user's own that cannot be imported or is none.
        """
        bases = " or ".join(base.__name__ for base in self.base)
        remedy = f"give package.module:Name of a class that derives from {bases}; docs/extending.md has one"
        step_class = import_named(self.built_in.get(name, name), remedy)
        if not (isinstance(step_class, type) and issubclass(step_class, self.base)):
            raise ConfigError(f"is no class that derives from {bases}", name, remedy)
        if inspect.isabstract(step_class) or not hasattr(step_class, "name"):
            lacks = "method `process`" if inspect.isabstract(step_class) else "`name` for its values"
            raise ConfigError(f"has no {lacks}", name, remedy)
        if name not in self.built_in and step_class.name in self.built_in:
            raise ConfigError(
                f"its name {step_class.name!r} is that of a step of {self.stage}", name, "rename it"
            )
        return step_class

    def check(self, steps: object) -> None:
        """Pass the settings of steps by name.

        Raises:
            ValueError: an unknown step, one that cannot be used, or one that cannot be left out.
        """
        for name, settings in steps.items() if isinstance(steps, Mapping) else ():
            if name not in self.built_in and not is_import_path(name):
                raise ValueError(f"no step {name!r}: {suggestion(name, self.built_in)}")
            if settings is None and name in self.required:
                raise ValueError(f"the step {name} is always there")
            try:
                self.step_class(name)
            except ConfigError as error:
                raise ValueError(" ".join(str(error).split())) from error

    def value_names(self, names: Iterable[str]) -> list[str]:
        """The names under which these steps' values stand.

        Raises:
            ValueError: two steps have the same.
        """
        value_names = [self.step_class(name).name for name in names]
        for name in value_names:
            if value_names.count(name) > 1:
                raise ValueError(f"steps: two have the name {name!r}: rename one of them")
        return value_names

    def typed_settings(self, step_values: Mapping[str, Mapping[str, Any]]) -> dict[str, BaseModel]:
        """The settings of these steps, validated."""
        typed: dict[str, BaseModel] = {}
        for name, settings in step_values.items():
            with located("steps", name):
                typed[name] = self.step_class(name).settings.model_validate(settings)
        return typed

    def ordered(self, names: Iterable[str]) -> list[str]:
        """These steps in the order in which they run."""
        names = list(names)
        return [
            *(name for name in self.built_in if name in names),
            *(n for n in names if n not in self.built_in),
        ]

    def catalog(self, bases: str) -> Catalog:
        """The built-in steps for `audiollm list`."""
        classes = {name: self.step_class(name) for name in self.built_in}
        return Catalog(
            documented(classes), f"Your own: `package.module:Name` of a {bases}, after the built-in ones."
        )


def settings_hash(step: Step, settings: BaseModel, source: Sequence[str] = ()) -> str:
    """Hash all that a step's values depend on beside its item: its version, settings, and the files that it reads.

    Args:
        source: the digest of the module of a user's own step.
    """
    # the output folder does not change the output
    described = settings.model_dump(mode="json", exclude={"folder"})
    read = [_fingerprint_files(path) for path in paths_of(settings).values()]
    return hash_json([type(step).__name__, step.name, step.version, step.needs, described, read, *source])


def lacking_steps(steps: Mapping[str, Step], active: Iterable[Rule]) -> list[Missing]:
    """List the steps that lack something, each with those of the active rules that wait for it."""
    rules = list(active)
    missing_steps = []
    for name, step in steps.items():
        reason = step.missing()
        if reason is not None:
            missing_steps.append(
                Missing(name, reason, tuple(rule for rule in rules if rule.step == name), True)
            )
    return missing_steps


def needed_values(step: Step, values: Mapping[str, Value]) -> dict[str, Value]:
    """Return the values that a step reads, of those that there are."""
    return {name: values[name] for name in step.needs if name in values}


def step_pools(
    steps: Mapping[str, Step], workers: int, num_gpus: float, overrides: Mapping[str, Resources]
) -> list[Pool]:
    """Make the pools: steps with equal resources share their workers.

    Args:
        workers: of each pool that asks for no GPU.
        num_gpus: those with one get as many workers as fit; without a GPU they work like the others.
    """
    groups: dict[Resources, list[Step]] = {}
    for name, step in steps.items():
        share = overrides.get(name, step.resources)
        groups.setdefault(share if num_gpus and share.gpus else share._replace(gpus=0.0), []).append(step)
    pools = []
    for share, members in groups.items():
        sizes = {step.name: step.batch_size if isinstance(step, BatchStep) else 1 for step in members}
        count = max(1, int(num_gpus / share.gpus)) if share.gpus else workers
        label = f"{share.cpus:g} CPU" + (f" {share.gpus:g} GPU" if share.gpus else "")
        pools.append(Pool(label, tuple(sizes), count, share.cpus, share.gpus, sizes))
    return pools


def paths_of(settings: BaseModel) -> dict[str, Path]:
    """The files and folders that a step reads, by the settings that name them.

    A model that listens may be a folder or the import path of a factory, a tagger an `auto` that stands for no file.
    """
    paths = {name: value for name, value in settings if isinstance(value, Path) and name != "folder"}
    model = getattr(settings, "model", None)
    if isinstance(model, str) and model != AUTO and not hasattr(settings, "url") and ":" not in model:
        paths["model"] = Path(model)
    return paths


def hash_json(content: object) -> str:
    """SHA-256 of plain data."""
    return sha256(_PLAIN.encode(content).encode()).hexdigest()


def _fingerprint_files(path: Path) -> list[tuple[str, int, int]]:
    """Evidence of a change in a model: names, sizes and modification times of its files."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
