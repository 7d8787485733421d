"""The chain of steps of a run, built from settings: its order, its missing parts, and the ledger keys of its calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from pydantic import BaseModel

from audiollm.recipe.plug_ins import Catalog, plug_in_facts
from pipelines.annotate.execution.rules import RULES, AnnotationRule, Thresholds
from pipelines.annotate.pretrained_parts import named_classes
from pipelines.annotate.recognizers.choice import RecognizerChoice, make_recognizer
from pipelines.annotate.step import RecordingStep, SegmentStep
from pipelines.steps.chain import Missing, StepCatalog, StepKeys, lacking_steps, settings_hash
from pipelines.steps.step import Step

AnnotationStep: TypeAlias = "RecordingStep[Any] | SegmentStep[Any]"
_STEPS = "pipelines.annotate.steps"
STEPS = StepCatalog(
    "annotate",
    # cheap or decisive ones first; recognizers run before `consensus`
    {
        "probe": f"{_STEPS}.signal:Probe",
        "separate": f"{_STEPS}.separate:Separate",
        "voice_activity": f"{_STEPS}.voice_activity:VoiceActivityStep",
        "speakers": f"{_STEPS}.speakers:Speakers",
        "segments": f"{_STEPS}.segments:Segments",
        "signal": f"{_STEPS}.signal:Signal",
        "quality": f"{_STEPS}.quality:Quality",
        "events": f"{_STEPS}.events:Events",
        "fingerprint": f"{_STEPS}.fingerprint:Fingerprint",
        "consensus": f"{_STEPS}.consensus:Consensus",
        "repetition": f"{_STEPS}.repetition:Repetition",
        "language": f"{_STEPS}.language:Language",
        "prosody": f"{_STEPS}.prosody:Prosody",
        "attributes": f"{_STEPS}.attributes:Attributes",
        "alignment": f"{_STEPS}.alignment:Alignment",
        "description": f"{_STEPS}.description:Description",
    },
    required=("probe", "voice_activity", "segments", "signal"),
    base=(RecordingStep, SegmentStep),
)
_NEED_RECOGNIZERS = ("consensus", "language")
"""Steps that are built with the names of the recognizers."""


@dataclass(frozen=True)
class Chain(StepKeys):
    """Steps in order, by level, with their settings and the hash of these.

    Args:
        sampled: steps that a sample of the kept segments goes through at the end, and no rule waits for.
    """

    recording: tuple[RecordingStep[Any], ...]
    segment: tuple[SegmentStep[Any], ...]
    recognizers: tuple[str, ...]
    settings: Mapping[str, BaseModel]
    hashes: Mapping[str, str]
    sampled: tuple[AnnotationStep, ...] = ()

    @property
    def kinds(self) -> dict[str, str]:
        """Recognizer -> its kind."""
        return {name: str(self.settings[name].kind) for name in self.recognizers}  # type: ignore[attr-defined]

    @property
    def steps(self) -> dict[str, Step]:
        return {step.name: step for step in (*self.recording, *self.segment, *self.sampled)}


def step_catalog() -> Catalog:
    """Steps of `annotate`, in their order; recognizers come before `consensus`."""
    return STEPS.catalog("`RecordingStep` or `SegmentStep`")


def build(
    settings: Mapping[str, BaseModel],
    recognizers: Sequence[RecognizerChoice],
    sampled: Mapping[str, BaseModel],
) -> Chain:
    """Build a chain of these steps, with the recognizers before `consensus`."""
    hearing = [make_recognizer(choice) for choice in recognizers]
    names = tuple(step.name for step in hearing)
    chain_settings: dict[str, BaseModel] = dict(zip(names, recognizers, strict=True))
    hashes = {step.name: settings_hash(step, chain_settings[step.name]) for step in hearing}

    def make(name: str, step_settings: BaseModel) -> AnnotationStep:
        step_class: Any = STEPS.step_class(name)
        step: AnnotationStep = (
            step_class(step_settings, names) if name in _NEED_RECOGNIZERS else step_class(step_settings)
        )
        chain_settings[step.name] = step_settings
        hashes[step.name] = settings_hash(
            step, step_settings, plug_in_facts([name, *named_classes(step_settings)])
        )
        return step

    steps: list[AnnotationStep] = []
    for name in STEPS.ordered([*settings, "consensus"]):
        if name == "consensus":
            steps += hearing
        if name in settings:
            steps.append(make(name, settings[name]))
    return Chain(
        tuple(step for step in steps if isinstance(step, RecordingStep)),
        tuple(step for step in steps if isinstance(step, SegmentStep)),
        names,
        chain_settings,
        hashes,
        tuple(make(name, step_settings) for name, step_settings in sampled.items()),
    )


def missing(chain: Chain, thresholds: Thresholds) -> list[Missing]:
    """List the steps that lack something, and the thresholds whose value no step measures."""
    active = [rule for rule in RULES if getattr(thresholds, rule.threshold) is not None]
    missing_steps = lacking_steps(chain.steps, active)
    for rule in active:
        if rule.step == "segment" or rule.of_text or any(rule in lacking.rules for lacking in missing_steps):
            continue
        reason = _explain_unmeasured_step(rule, chain)
        if reason:
            missing_steps.append(Missing(rule.step, f"{rule.threshold}: {reason}", (rule,), False))
    return missing_steps


def _explain_unmeasured_step(rule: AnnotationRule, chain: Chain) -> str | None:
    if rule.step not in chain.steps:
        return f"needs the step {rule.step}: add `{rule.step}: {{}}` to steps"
    if rule.step == "consensus" and len(chain.recognizers) < 2:
        return "needs at least two recognizers: add one to recognizers"
    if rule.option and getattr(chain.settings[rule.step], rule.option) in (None, False):
        return f"needs steps.{rule.step}.{rule.option}: give its model or switch it on"
    return None
