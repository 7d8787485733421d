"""The chain of steps of a run, built from settings: its order, its missing parts, and the ledger keys of its calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import NamedTuple

from pydantic import BaseModel

from audiollm.recipe.plug_ins import Catalog, documented
from pipelines.annotate.execution.rules import RULES, AnnotationRule, Thresholds
from pipelines.annotate.recognizers.choice import RecognizerChoice, make_recognizer
from pipelines.steps.chain import Missing, StepKeys, lacking_steps, settings_hash
from pipelines.steps.step import Step

BUILT_IN = ("probe", "voice_activity", "segments", "signal")
"""Steps that every run has."""


class _Kind(NamedTuple):
    module: str
    step: str
    config: str


KINDS: Mapping[str, _Kind] = {
    "probe": _Kind("signal", "Probe", "ProbeConfig"),
    "separate": _Kind("separate", "Separate", "SeparateConfig"),
    "voice_activity": _Kind("voice_activity", "VoiceActivityStep", "VoiceActivityConfig"),
    "speakers": _Kind("speakers", "Speakers", "SpeakersConfig"),
    "segments": _Kind("segments", "Segments", "SegmentsConfig"),
    "signal": _Kind("signal", "Signal", "SignalConfig"),
    "quality": _Kind("quality", "Quality", "QualityConfig"),
    "events": _Kind("events", "Events", "EventsConfig"),
    "fingerprint": _Kind("fingerprint", "Fingerprint", "FingerprintConfig"),
    "consensus": _Kind("consensus", "Consensus", "ConsensusConfig"),
    "repetition": _Kind("repetition", "Repetition", "RepetitionConfig"),
    "language": _Kind("language", "Language", "LanguageConfig"),
    "prosody": _Kind("prosody", "Prosody", "ProsodyConfig"),
    "attributes": _Kind("attributes", "Attributes", "AttributesConfig"),
    "alignment": _Kind("alignment", "Alignment", "AlignmentConfig"),
    "description": _Kind("description", "Description", "DescriptionConfig"),
}
"""Steps in the order in which they run: cheap or decisive ones first. Recognizers run before `consensus`."""
_NEED_RECOGNIZERS = ("consensus", "language")
"""Steps that are built with the names of the recognizers."""
TEXT_STEPS = frozenset({"repetition", "language", "alignment"})
"""Steps that are skipped on segments without a trusted text."""
SOUND_STEPS = frozenset({"signal", "events", "fingerprint", "description"})
"""Steps that run on segments without speech."""


@dataclass(frozen=True)
class Chain(StepKeys):
    """Steps in order, by level, with their settings and the hash of these.

    Args:
        sampled: steps that a sample of the kept segments goes through at the end, and no rule waits for.
    """

    recording: tuple[Step, ...]
    segment: tuple[Step, ...]
    recognizers: tuple[str, ...]
    settings: Mapping[str, BaseModel]
    hashes: Mapping[str, str]
    sampled: tuple[Step, ...] = ()

    @property
    def kinds(self) -> dict[str, str]:
        """Recognizer -> its kind."""
        return {name: str(self.settings[name].kind) for name in self.recognizers}  # type: ignore[attr-defined]

    @property
    def steps(self) -> dict[str, Step]:
        return {step.name: step for step in (*self.recording, *self.segment, *self.sampled)}


def step_catalog() -> Catalog:
    """Steps of `annotate`, in their order; recognizers come before `consensus`."""
    classes = {
        name: getattr(import_module(f"pipelines.annotate.steps.{kind.module}"), kind.step)
        for name, kind in KINDS.items()
    }
    own = "Recognizers of your own: a command or an endpoint; pipelines/annotate/README.md."
    return Catalog(documented(classes), own)


def config_class(name: str) -> type[BaseModel]:
    """The settings of a step, without loading anything heavy."""
    kind = KINDS[name]
    config_type: type[BaseModel] = getattr(
        import_module(f"pipelines.annotate.steps.{kind.module}"), kind.config
    )
    return config_type


def build(
    settings: Mapping[str, BaseModel],
    recognizers: Sequence[RecognizerChoice],
    sampled: Mapping[str, BaseModel],
) -> Chain:
    """Build a chain of these steps, with the recognizers before `consensus`."""
    hearing = [make_recognizer(choice) for choice in recognizers]
    names = tuple(step.name for step in hearing)
    steps: list[Step] = []
    for name in KINDS:
        if name == "consensus":
            steps += hearing
        if name in settings:
            steps.append(_make_annotation_step(name, settings[name], names))
    last = tuple(_make_annotation_step(name, step_config, names) for name, step_config in sampled.items())
    step_settings = {**settings, **dict(zip(names, recognizers, strict=True)), **sampled}
    return Chain(
        tuple(step for step in steps if step.level == "recording"),
        tuple(step for step in steps if step.level == "segment"),
        names,
        step_settings,
        {step.name: settings_hash(step, step_settings[step.name]) for step in (*steps, *last)},
        last,
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


def _make_annotation_step(name: str, settings: BaseModel, recognizers: tuple[str, ...]) -> Step:
    kind = KINDS[name]
    step_class = getattr(import_module(f"pipelines.annotate.steps.{kind.module}"), kind.step)
    step: Step = step_class(settings, recognizers) if name in _NEED_RECOGNIZERS else step_class(settings)
    return step
