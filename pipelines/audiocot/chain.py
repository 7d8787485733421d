"""The chain of steps of a run, built from settings: its order, its missing parts, and the ledger keys of its calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from audiollm.recipe.plug_ins import Catalog, plug_in_facts
from pipelines.audiocot.answers.choice import AnswererConfig, AnswerPlace
from pipelines.audiocot.clip import ClipStep, FileStep
from pipelines.audiocot.rules import BALANCE, RULES, ClipThresholds
from pipelines.steps.chain import Missing, StepCatalog, StepKeys, lacking_steps, settings_hash
from pipelines.steps.rules import Rule
from pipelines.steps.step import Step

_STEPS = "pipelines.audiocot.steps"
STEPS = StepCatalog(
    "audiocot",
    # cheap or decisive ones first
    {
        "probe": f"{_STEPS}.built_in:SourceProbe",
        "clips": f"{_STEPS}.built_in:CutClips",
        "levels": f"{_STEPS}.built_in:Levels",
        "tags": f"{_STEPS}.tags:Tags",
        "agreement": f"{_STEPS}.agreement:Agreement",
        "motion": f"{_STEPS}.built_in:Motion",
        "watch": f"{_STEPS}.answered:Watch",
        "listen": f"{_STEPS}.answered:Listen",
        "think": f"{_STEPS}.answered:Think",
        "objects": f"{_STEPS}.objects:Objects",
        "describe": f"{_STEPS}.answered:DescribeObjects",
    },
    required=("probe", "clips", "levels", "motion", "watch", "listen", "think"),
    base=(FileStep, ClipStep),
)


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


def cot_step_catalog() -> Catalog:
    """Steps of `audiocot`, in their order."""
    return STEPS.catalog("`FileStep` or `ClipStep`")


def build_chain(settings: Mapping[str, BaseModel], answers: AnswerPlace) -> CotChain:
    """Build a chain of these steps.

    Args:
        answers: where answers of models are kept, and what may be spent on them.
    """
    steps: list[Step] = []
    chain_settings, hashes = {}, {}
    for name in STEPS.ordered(settings):
        step_class: Any = STEPS.step_class(name)
        step_settings = settings[name]
        is_answered = isinstance(step_settings, AnswererConfig)
        step: Step = step_class(step_settings, answers) if is_answered else step_class(step_settings)
        steps.append(step)
        chain_settings[step.name] = step_settings
        hashes[step.name] = settings_hash(step, step_settings, plug_in_facts([name]))
    return CotChain(
        tuple(step for step in steps if step.level == "file"),
        tuple(step for step in steps if step.level == "clip"),
        chain_settings,
        hashes,
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
