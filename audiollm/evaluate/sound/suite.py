"""The suite on generated sounds: every measure that the given judges allow, and n/a with its reason for the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from audiollm.audio import AudioError, Waveform, load
from audiollm.evaluate.report.metric_error import MetricError
from audiollm.evaluate.report.remedies import with_remedy
from audiollm.evaluate.report.statistics import metric_table, share
from audiollm.evaluate.report.suite import (
    Example,
    ScoreTable,
    Sound,
    SuiteResult,
    metric_cells,
    reasons_of,
    share_tiles,
)
from audiollm.evaluate.sound.edited_sounds import EditsOutcome
from audiollm.evaluate.sound.generated_sounds import GeneratedSound, TargetEvent
from audiollm.evaluate.sound.sound_judges import (
    ClassSpace,
    SoundClasses,
    SoundSpace,
    SynchronyJudge,
    TextSoundSpace,
    Vector,
)
from audiollm.evaluate.sound.sound_measures import (
    ONSET_TOLERANCE_S,
    class_divergence,
    cosines,
    desync,
    energy_onsets,
    frechet_distance,
    inception_score,
    is_far_from,
    match_onsets,
    nearest_distances,
)
from audiollm.pages.formats import format_number, with_interval
from audiollm.pages.page import Tile

FAR_FROM_REAL = "far from the real sound"
_MATCH_WITHIN_S = 1.0
_CONTEXT_S = 0.02

PairMeasure = float | str
"""A value, or the reason why there is none."""
Finding = Vector | str | None
"""The numbers of a judge on one sound, or the reason why there are none; None: nobody judges."""


@dataclass
class SuiteJudges:
    """The judges of the suite; None: that is not judged."""

    classes: SoundClasses | None = None
    space: SoundSpace | None = None
    texts: TextSoundSpace | None = None
    synchrony: SynchronyJudge | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    """Judge -> the name that the page shows."""

    def with_classes(self, classes: SoundClasses, name: str) -> SuiteJudges:
        """The judges with another one of classes, whose logits are the space of sounds where there is none."""
        space = self.space or ClassSpace(classes)
        names = {**self.names, "classes": name, **({} if self.space else {"space": "logits of the classes"})}
        return replace(self, classes=classes, space=space, names=names)


@dataclass
class _SoundFindings:
    """The findings of the judges on one sound and on its reference."""

    values: dict[str, PairMeasure] = field(default_factory=dict)
    logits: Finding = None
    reference_logits: Finding = None
    place: Finding = None
    reference_place: Finding = None
    recognized: list[tuple[str, str]] = field(default_factory=list)
    """Label asked for and label heard of each event."""
    far_flags: list[bool] = field(default_factory=list)
    """Whether a sound with the right events is far from the real one, so that its label is a guess."""


def evaluate_sounds(
    sounds: Sequence[GeneratedSound],
    judges: SuiteJudges,
    training: Sequence[Path] = (),
    advance: Callable[[str], None] = lambda what: None,
) -> SuiteResult:
    """Measure all sounds.

    Args:
        training: sounds that the model was trained on, for the distance to the nearest of them.
    """
    findings = []
    for sound in sounds:
        findings.append(_judge_sound(sound, judges))
        advance(sound.id)
    training_places = _embed_training_sounds(training, judges, advance)
    set_measures = _measure_set(findings, training_places)
    names = sorted({name for finding in findings for name in finding.values})
    tables = {
        name: metric_table([finding.values.get(name, "not asked for") for finding in findings])
        for name in names
    }
    pairs = [pair for finding in findings for pair in finding.recognized]
    recognized = share([label == recognized_label for label, recognized_label in pairs])
    result = {
        "sounds": len(sounds),
        "whole": {name: value for name, (value, _) in set_measures.items()},
        "whole_reasons": {name: reason for name, (_, reason) in set_measures.items() if reason},
        "measures": tables,
        "recognized": recognized,
        "judges": dict(judges.names),
    }
    return _compose_outcome(sounds, findings, result, tables)


def with_edits(outcome: SuiteResult, edits: EditsOutcome) -> SuiteResult:
    """The outcome with the measures of edits beside those of whole sounds; examples of the two take turns."""
    examples = [
        example
        for pair in zip_longest(outcome.examples, edits.examples)
        for example in pair
        if example is not None
    ]
    return replace(
        outcome,
        about=[*outcome.about, f"{len(edits.rows)} edits"],
        result={**outcome.result, "edits": edits.result},
        tables=[*outcome.tables, edits.table],
        examples=examples,
        rows=[*outcome.rows, *edits.rows],
    )


# Private: one sound


def _judge_sound(sound: GeneratedSound, judges: SuiteJudges) -> _SoundFindings:
    findings = _SoundFindings()
    try:
        generated = load(sound.path)
        real = load(sound.reference) if sound.reference is not None else None
    except AudioError as error:
        findings.values["readable"] = error.reason
        return findings
    if judges.classes is not None:
        findings.logits, findings.reference_logits = _judge_both(judges.classes.logits, generated, real)
        for kind in ("softmax", "sigmoid"):
            findings.values[f"KL {kind}"] = _divergence(findings.reference_logits, findings.logits, kind)
        judged = [event for event in sound.events or () if event.label in judges.classes.labels]
        findings.recognized = _recognize_events(judged, generated, judges.classes)
        findings.far_flags = [_is_far(event, generated, real) for event in judged]
    if judges.space is not None:
        findings.place, findings.reference_place = _judge_both(judges.space.embed, generated, real)
    if judges.texts is not None:
        for name, text in (("CLAP caption", sound.caption), ("CLAP CoT", sound.thought)):
            findings.values[name] = _text_cosine(judges.texts, generated, text)
    if judges.synchrony is not None:
        findings.values["DeSync"] = _desync(judges.synchrony, sound, generated)
    findings.values.update(_onset_errors(sound, generated))
    return findings


def _judge_both(
    judge: Callable[[Waveform], Vector], generated: Waveform, real: Waveform | None
) -> tuple[Finding, Finding]:
    """The findings of a judge on both."""
    if real is None:
        return _finding_or_reason(judge, generated), "no real sound"
    real_finding = _finding_or_reason(judge, real)
    if isinstance(real_finding, str):
        real_finding = f"the real sound: {real_finding}"
    return _finding_or_reason(judge, generated), real_finding


def _finding_or_reason(judge: Callable[[Waveform], Vector], sound: Waveform) -> Vector | str:
    try:
        return judge(sound)
    except ValueError as error:
        return str(error)


def _divergence(real: Finding, generated: Finding, kind: str) -> PairMeasure:
    if isinstance(generated, str):
        return generated
    if isinstance(real, str):
        return real
    assert generated is not None and real is not None
    try:
        return float(class_divergence(real[None], generated[None], kind)[0])
    except MetricError as error:
        return error.reason


def _recognize_events(
    events: Sequence[TargetEvent], generated: Waveform, classes: SoundClasses
) -> list[tuple[str, str]]:
    """Each event, which is a class of the judge, cut out at its place, and what is heard there."""
    pairs = []
    for event in events:
        try:
            label = classes.labels[int(classes.logits(_cut_at_event(event, generated)).argmax())]
        except ValueError:
            label = "(silence)"
        pairs.append((event.label, label))
    return pairs


def _cut_at_event(event: TargetEvent, sound: Waveform) -> Waveform:
    start = round(max(0.0, event.start_s - _CONTEXT_S) * sound.sample_rate)
    cut_CN = sound.samples_CN[:, start : round(event.end_s * sound.sample_rate)]
    return Waveform(cut_CN.contiguous(), sound.sample_rate)


def _is_far(event: TargetEvent, generated: Waveform, real: Waveform | None) -> bool:
    if real is None:
        return False
    generated_N, real_N = (
        _cut_at_event(event, sound.resample(generated.sample_rate)).mono().samples_CN[0].double().numpy()
        for sound in (generated, real)
    )
    size = min(len(generated_N), len(real_N))
    try:
        return is_far_from(generated_N[:size], real_N[:size], np.zeros(size), generated.sample_rate)
    except MetricError:
        return False


def _text_cosine(space: TextSoundSpace, generated: Waveform, text: str | None) -> PairMeasure:
    if not text:
        return "no text"
    try:
        return float(cosines(space.embed(generated)[None], space.embed_text(text)[None])[0])
    except ValueError as error:
        return str(error)


def _desync(judge: SynchronyJudge, sound: GeneratedSound, generated: Waveform) -> PairMeasure:
    if sound.video is None:
        return "no video"
    if sound.video_start_s:
        return "the sound begins within its video"
    try:
        first, last = judge.offsets(sound.video, generated)
        return float(desync(first[None], last[None])[0])
    except (AudioError, ValueError) as error:
        return str(error)


def _onset_errors(sound: GeneratedSound, generated: Waveform) -> dict[str, PairMeasure]:
    name, shared = "onset error, s", f"onsets within {ONSET_TOLERANCE_S:g} s"
    precise = "heard onsets that were asked for"
    if sound.events is None:
        return {}
    if sound.has_backdrop:
        return dict.fromkeys((name, shared, precise), "a backdrop")
    wanted_s = np.array([event.start_s for event in sound.events])
    heard_s = energy_onsets(generated)
    errors = np.abs(match_onsets(heard_s, wanted_s, _MATCH_WITHIN_S))
    matched_errors = errors[~np.isnan(errors)]
    return {
        name: float(matched_errors.mean())
        if len(matched_errors)
        else f"no onset within {_MATCH_WITHIN_S:g} s",
        shared: float((errors <= ONSET_TOLERANCE_S).mean()) if len(errors) else "no events",
        # noise has onsets everywhere: some lie near those that were asked for, and most do not
        precise: float((errors <= ONSET_TOLERANCE_S).sum() / len(heard_s)) if len(heard_s) else "no onset",
    }


# Private: all sounds


def _embed_training_sounds(
    training: Sequence[Path], judges: SuiteJudges, advance: Callable[[str], None]
) -> list[Vector]:
    places = []
    for path in training if judges.space is not None else ():
        try:
            places.append(judges.space.embed(load(path)))  # type: ignore[union-attr]
        except (AudioError, ValueError):
            continue
        finally:
            advance(path.name)
    return places


def _measure_set(
    findings: Sequence[_SoundFindings], training_places: Sequence[Vector]
) -> dict[str, tuple[float | None, str]]:
    """Measure -> its value or None, and the reason why there is none."""
    generated_places = _available_vectors([finding.place for finding in findings])
    real_places = _available_vectors([finding.reference_place for finding in findings])
    logits = _available_vectors([finding.logits for finding in findings])

    def frechet() -> float:
        return frechet_distance(
            _stack_or_raise(generated_places, "no space of sounds"),
            _stack_or_raise(real_places, "no real sounds"),
        )

    def near(places: Sequence[Vector]) -> float:
        _stack_or_raise(generated_places, "no space of sounds")
        known_MD = _stack_or_raise(training_places, "no training sounds")
        return float(np.median(nearest_distances(_stack_or_raise(places, "no real sounds"), known_MD)))

    measures: dict[str, Callable[[], float]] = {
        "Fréchet distance": frechet,
        "inception score": lambda: inception_score(_stack_or_raise(logits, "no judge of classes")),
        "distance to the nearest training sound": lambda: near(generated_places),
        "the same of the real sounds": lambda: near(real_places),
    }
    values: dict[str, tuple[float | None, str]] = {}
    for name, measure in measures.items():
        try:
            values[name] = (measure(), "")
        except MetricError as error:
            values[name] = (None, error.reason)
    return values


def _available_vectors(findings: Sequence[Finding]) -> list[Vector]:
    return [finding for finding in findings if finding is not None and not isinstance(finding, str)]


def _stack_or_raise(values: Sequence[Vector], missing: str) -> Vector:
    if not values:
        raise MetricError(missing)
    return np.stack(values)


def _compose_outcome(
    sounds: Sequence[GeneratedSound],
    findings: Sequence[_SoundFindings],
    result: dict[str, Any],
    tables: Mapping[str, Mapping[str, Any]],
) -> SuiteResult:
    reasons = result["whole_reasons"]
    whole_rows = [
        [name, format_number(value), with_remedy(reasons.get(name, ""))]
        for name, value in result["whole"].items()
    ]
    if result["recognized"]["n"]:
        whole_rows.append(
            ["events recognized at their places", with_interval(result["recognized"], "accuracy"), ""]
        )
    page_tables = [
        ScoreTable("All sounds together", ["measure", "value", "n/a because"], whole_rows),
        ScoreTable(
            "Sound by sound",
            ["measure", "mean", "median", "n", "n/a"],
            [[name, *metric_cells(table)] for name, table in tables.items()],
            reasons_of(tables.values()),
        ),
    ]
    about = [f"{len(sounds)} generated sounds"]
    about += [f"{role}: {name}" for role, name in result["judges"].items()]
    rows = [
        {
            "id": sound.id,
            "path": str(sound.path),
            **finding.values,
            "recognized": finding.recognized,
            "far": finding.far_flags,
        }
        for sound, finding in zip(sounds, findings, strict=True)
    ]
    missing = [
        (sound.id, f"{name}: {value}")
        for sound, finding in zip(sounds, findings, strict=True)
        for name, value in finding.values.items()
        if isinstance(value, str)
    ]
    order = sorted(range(len(sounds)), key=lambda n: _sound_badness(findings[n]), reverse=True)
    examples = [_sound_example(sounds[n], findings[n]) for n in order]
    tiles = share_tiles("asked sounds recognized", result["recognized"])
    for name in ("Fréchet distance", "inception score"):
        if result["whole"].get(name) is not None:
            tiles.append(Tile(format_number(result["whole"][name], 2), name, f"{len(sounds):,} sounds"))
    return SuiteResult("Generated sounds", about, result, page_tables, examples, missing, rows, tiles=tiles)


def _sound_badness(findings: _SoundFindings) -> tuple[float, float]:
    pairs = zip(findings.recognized, findings.far_flags, strict=True)
    wrong = sum(expected != label or is_far for (expected, label), is_far in pairs)
    divergence = findings.values.get("KL softmax", 0.0)
    return float(wrong), divergence if isinstance(divergence, float) else 0.0


def _sound_example(sound: GeneratedSound, findings: _SoundFindings) -> Example:
    lines = [(name, text) for name, text in (("caption", sound.caption), ("CoT", sound.thought)) if text]
    if findings.recognized:
        pairs = zip(findings.recognized, findings.far_flags, strict=True)
        texts = [
            f"{expected}: {label}{f' ({FAR_FROM_REAL})' if is_far else ''}"
            for (expected, label), is_far in pairs
        ]
        lines.append(("heard", ", ".join(texts)))
    lines += [(name, format_number(v)) for name, v in findings.values.items() if isinstance(v, float)]
    sounds = [Sound("generated", sound.path)]
    if sound.reference is not None:
        sounds.append(Sound("real", sound.reference))
    return Example(sound.id, lines, sounds)
