"""The chain of steps of a run, built from settings: its order, its missing parts, and the ledger keys of its calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib import import_module
from json import dumps
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel

from pipelines.annotate.execution.rules import RULES, Rule, Thresholds
from pipelines.annotate.recognizers.choice import RecognizerChoice, make_recognizer
from pipelines.annotate.step import BatchStep, Resources, Step, Value
from pipelines.execution.engine import Pool

BUILT_IN = ("probe", "voice_activity", "segments", "signal")
"""Steps that every run has."""


class _Kind(NamedTuple):
    module: str
    step: str
    config: str


KINDS: Mapping[str, _Kind] = {
    "probe": _Kind("probe", "Probe", "ProbeConfig"),
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


class Missing(NamedTuple):
    """A requirement of a run that is not met.

    Args:
        rules: those whose thresholds cannot be applied.
        whole: the step cannot run at all.
    """

    step: str
    reason: str
    rules: tuple[Rule, ...]
    whole: bool


@dataclass(frozen=True)
class Chain:
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

    def key(self, step: Step, digest: str, known: object, values: Mapping[str, Value]) -> str:
        """Return the ledger's key of a call: a hash of the step's settings, the content, `known`, and `values`."""
        return _hash([self.hashes[step.name], digest, known, values])


def config_class(name: str) -> type[BaseModel]:
    """The settings of a step, without loading anything heavy."""
    kind = KINDS[name]
    found: type[BaseModel] = getattr(import_module(f"pipelines.annotate.steps.{kind.module}"), kind.config)
    return found


def build(
    settings: Mapping[str, BaseModel],
    recognizers: Sequence[RecognizerChoice],
    sampled: Mapping[str, BaseModel],
) -> Chain:
    """Build a chain of these steps, with the recognizers before `consensus`."""
    hearing = [make_recognizer(each) for each in recognizers]
    names = tuple(step.name for step in hearing)
    steps: list[Step] = []
    for name in KINDS:
        if name == "consensus":
            steps += hearing
        if name in settings:
            steps.append(_make(name, settings[name], names))
    last = tuple(_make(name, own, names) for name, own in sampled.items())
    known = {**settings, **dict(zip(names, recognizers, strict=True)), **sampled}
    return Chain(
        tuple(step for step in steps if step.level == "recording"),
        tuple(step for step in steps if step.level == "segment"),
        names,
        known,
        {step.name: _settings_hash(step, known[step.name]) for step in (*steps, *last)},
        last,
    )


def missing(chain: Chain, thresholds: Thresholds) -> list[Missing]:
    """List the steps that lack something, and the thresholds whose value no step measures."""
    steps = chain.steps
    active = [rule for rule in RULES if getattr(thresholds, rule.threshold) is not None]
    found = []
    for name, step in steps.items():
        reason = step.missing()
        if reason is not None:
            found.append(Missing(name, reason, tuple(rule for rule in active if rule.step == name), True))
    for rule in active:
        if rule.step == "segment" or rule.of_text or any(rule in lacking.rules for lacking in found):
            continue
        reason = _unmeasured(rule, chain)
        if reason:
            found.append(Missing(rule.step, f"{rule.threshold}: {reason}", (rule,), False))
    return found


def pools(chain: Chain, workers: int, num_gpus: float, overrides: Mapping[str, Resources]) -> list[Pool]:
    """Make the pools: steps with equal resources share their workers.

    Args:
        workers: of each pool that asks for no GPU.
        num_gpus: those with one get as many workers as fit; without a GPU they work like the others.
    """
    groups: dict[Resources, list[Step]] = {}
    for name, step in chain.steps.items():
        share = overrides.get(name, step.resources)
        groups.setdefault(share if num_gpus and share.gpus else share._replace(gpus=0.0), []).append(step)
    made = []
    for share, steps in groups.items():
        sizes = {step.name: step.batch_size if isinstance(step, BatchStep) else 1 for step in steps}
        count = max(1, int(num_gpus / share.gpus)) if share.gpus else workers
        label = f"{share.cpus:g} CPU" + (f" {share.gpus:g} GPU" if share.gpus else "")
        made.append(Pool(label, tuple(sizes), count, share.cpus, share.gpus, sizes))
    return made


def paths_of(settings: BaseModel) -> list[Path]:
    """The files and folders that a step reads. A model that listens may be a folder or the import path of a factory."""
    found = [value for name, value in settings if isinstance(value, Path) and name != "folder"]
    model = getattr(settings, "model", None)
    if isinstance(model, str) and not hasattr(settings, "url") and ":" not in model:
        found.append(Path(model))
    return found


def _unmeasured(rule: Rule, chain: Chain) -> str | None:
    if rule.step not in chain.steps:
        return f"needs the step {rule.step}: add `{rule.step}: {{}}` to steps"
    if rule.step == "consensus" and len(chain.recognizers) < 2:
        return "needs at least two recognizers: add one to recognizers"
    if rule.option and getattr(chain.settings[rule.step], rule.option) in (None, False):
        return f"needs steps.{rule.step}.{rule.option}: give its model or switch it on"
    return None


def _make(name: str, settings: BaseModel, recognizers: tuple[str, ...]) -> Step:
    kind = KINDS[name]
    made = getattr(import_module(f"pipelines.annotate.steps.{kind.module}"), kind.step)
    step: Step = made(settings, recognizers) if name in _NEED_RECOGNIZERS else made(settings)
    return step


def _settings_hash(step: Step, settings: BaseModel) -> str:
    shown = settings.model_dump(
        mode="json", exclude={"folder"}
    )  # the output folder does not change the output
    read = [_content(path) for path in paths_of(settings)]
    return _hash([type(step).__name__, step.name, step.version, step.needs, shown, read])


def _content(path: Path) -> list[tuple[str, int, int]]:
    """Evidence of a change in a model: names, sizes and modification times of its files."""
    files = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
    return [(each.name, each.stat().st_size, each.stat().st_mtime_ns) for each in files]


def _hash(content: object) -> str:
    return sha256(dumps(content, sort_keys=True, ensure_ascii=False, default=str).encode()).hexdigest()
