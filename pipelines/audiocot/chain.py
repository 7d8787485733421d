"""The chain of steps of a run, built from settings: its order, its missing parts, and the ledger keys of its calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

from pydantic import BaseModel

from pipelines.audiocot.answers.choice import AnswererConfig, AnswerPlace
from pipelines.audiocot.rules import BALANCE, RULES, ClipThresholds
from pipelines.steps.chain import Missing, StepKeys, lacking_steps, settings_hash
from pipelines.steps.rules import Rule
from pipelines.steps.step import Step

BUILT_IN = ("probe", "clips", "levels", "motion", "watch", "listen", "think")
"""Steps that every run has."""


class _Kind(NamedTuple):
    module: str
    step: str
    config: str


STEPS: Mapping[str, _Kind] = {
    "probe": _Kind("built_in", "SourceProbe", "SourceProbeConfig"),
    "clips": _Kind("built_in", "CutClips", "ClipsConfig"),
    "levels": _Kind("built_in", "Levels", "LevelsConfig"),
    "tags": _Kind("tags", "Tags", "TagsConfig"),
    "agreement": _Kind("agreement", "Agreement", "AgreementConfig"),
    "motion": _Kind("built_in", "Motion", "MotionConfig"),
    "watch": _Kind("answered", "Watch", "WatchConfig"),
    "listen": _Kind("answered", "Listen", "ListenConfig"),
    "think": _Kind("answered", "Think", "ThinkConfig"),
    "objects": _Kind("objects", "Objects", "ObjectsConfig"),
    "describe": _Kind("answered", "DescribeObjects", "DescribeObjectsConfig"),
}
"""Steps in the order in which they run: cheap or decisive ones first."""


@dataclass(frozen=True)
class CotChain(StepKeys):
    """Steps in order, by level, with their settings and the hash of these."""

    file: tuple[Step, ...]
    clip: tuple[Step, ...]
    settings: Mapping[str, BaseModel]
    hashes: Mapping[str, str]

    @property
    def steps(self) -> dict[str, Step]:
        return {step.name: step for step in (*self.file, *self.clip)}


def step_config(name: str) -> type[BaseModel]:
    """The settings of a step, without loading anything heavy."""
    kind = STEPS[name]
    config_type: type[BaseModel] = getattr(
        import_module(f"pipelines.audiocot.steps.{kind.module}"), kind.config
    )
    return config_type


def build_chain(settings: Mapping[str, BaseModel], answers: AnswerPlace) -> CotChain:
    """Build a chain of these steps.

    Args:
        answers: where answers of models are kept, and what may be spent on them.
    """
    steps: list[Step] = []
    for name, kind in STEPS.items():
        if name in settings:
            step_class: Any = getattr(import_module(f"pipelines.audiocot.steps.{kind.module}"), kind.step)
            step_settings = settings[name]
            steps.append(
                step_class(step_settings, answers)
                if isinstance(step_settings, AnswererConfig)
                else step_class(step_settings)
            )
    return CotChain(
        tuple(step for step in steps if step.level == "file"),
        tuple(step for step in steps if step.level == "clip"),
        settings,
        {step.name: settings_hash(step, settings[step.name]) for step in steps},
    )


def missing_parts(chain: CotChain, thresholds: ClipThresholds) -> list[Missing]:
    """List the steps that lack something, and the thresholds whose value no step measures."""
    active = [rule for rule in RULES if getattr(thresholds, rule.threshold) is not None]
    missing_steps = lacking_steps(chain.steps, active)
    if thresholds.max_balance is not None and (
        "tags" not in chain.steps or any(lacking.step == "tags" for lacking in missing_steps)
    ):
        remedy = ", which lacks its model" if "tags" in chain.steps else ": add `tags: {}` to steps"
        needs = f"needs the step tags{remedy}, or set max_balance to null"
        missing_steps.append(Missing(BALANCE.step, f"{BALANCE.threshold}: {needs}", (BALANCE,), False))
    for rule in active:
        if rule.step == "segment" or any(rule in lacking.rules for lacking in missing_steps):
            continue
        if reason := _explain_unmeasured_clip_step(rule, chain):
            missing_steps.append(Missing(rule.step, f"{rule.threshold}: {reason}", (rule,), False))
    return missing_steps


def _explain_unmeasured_clip_step(rule: Rule, chain: CotChain) -> str | None:
    if rule.step not in chain.steps:
        return f"needs the step {rule.step}: add `{rule.step}: {{}}` to steps"
    if rule.option and getattr(chain.settings[rule.step], rule.option) is None:
        return f"needs steps.{rule.step}.{rule.option}: give its model"
    return None
