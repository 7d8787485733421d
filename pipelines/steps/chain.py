"""Chains of steps: the ledger keys of their calls, what they lack, and the pools that do them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import sha256
from json import JSONEncoder
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel

from audiollm.evaluate.judges.yamnet import AUTO
from pipelines.execution.engine import Pool
from pipelines.steps.rules import Rule
from pipelines.steps.step import BatchStep, Resources, Step, Value

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


def settings_hash(step: Step, settings: BaseModel) -> str:
    """Hash all that a step's values depend on beside its item: its version, settings, and the files that it reads."""
    # the output folder does not change the output
    described = settings.model_dump(mode="json", exclude={"folder"})
    read = [_fingerprint_files(path) for path in paths_of(settings).values()]
    return hash_json([type(step).__name__, step.name, step.version, step.needs, described, read])


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
