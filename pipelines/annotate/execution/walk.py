"""Walks: the way of a recording, and of its segments, from step to step; and the run of all walks."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import TaskID

from audiollm.errors import StageError
from audiollm.files.atomic import read_jsonl
from audiollm.recipe.runner import Context
from pipelines.annotate.execution.chain import Chain
from pipelines.annotate.execution.config import AnnotationConfig
from pipelines.annotate.execution.corpus import Verdicts, kept_rows
from pipelines.annotate.execution.corrected import (
    add_correction,
    corrected_segment,
    corrected_source,
    is_of_sound,
    overruled_drop,
)
from pipelines.annotate.execution.rules import RULES, Thresholds, first_broken
from pipelines.annotate.execution.shards import (
    Shard,
    ShardConfig,
    finish_shards,
    make_shard,
    parse_shard_record,
    plan_shards,
)
from pipelines.annotate.execution.trust import STEP, Judged, judge_text
from pipelines.annotate.input.sources import RecordingSource
from pipelines.annotate.step import SegmentSpan, WorkItem
from pipelines.execution.engine import Call, Walk
from pipelines.execution.ledger import Ledger
from pipelines.review.applied import NO_CORRECTIONS, CorrectionIndex
from pipelines.review.corrections import NO_FIELDS
from pipelines.steps.chain import needed_values
from pipelines.steps.driving import StepRun, call_each
from pipelines.steps.results import Row, Spool, StepCosts, kind_and_reason
from pipelines.steps.rules import Drop
from pipelines.steps.step import Step, Value

NO_SPEECH = "no speech found"


@dataclass(frozen=True)
class Walks:
    """Maker of the walks of a run, which write their results into a spool."""

    chain: Chain
    thresholds: Thresholds
    spool: Spool
    corrections: CorrectionIndex = NO_CORRECTIONS

    def recording(self, file: int, source: RecordingSource) -> Walk:
        """Walk a recording through its steps; returns the walks of its segments."""
        values: dict[str, Value] = {}
        path = source.path
        for step in self.chain.recording:
            needed = needed_values(step, values)
            key = (
                None
                if step.name == "separate"
                else self.chain.key(step, source.digest, source.metadata, needed)
            )
            size = values.get("probe", {}).get("duration_s") or 0.0
            outcome = yield Call(step.name, key, WorkItem(path, source.metadata, None, needed), size)
            if outcome.value is None:
                self.spool.put_file(file, _failed(source, values, step.name, outcome.error or ""))
                return []
            values[step.name] = outcome.value
            if step.name == "separate":  # all later steps read the separated file
                path = outcome.value["path"]
                source = replace(source, digest=self.chain.key(step, source.digest, (), {}))
        segments = values["segments"]["segments"]
        self.spool.put_file(file, _file_row(source, values))
        return [
            self._segment(file, number, source, path, segment, values)
            for number, segment in enumerate(segments)
        ]

    def sampled(self, file: int, number: int, source: RecordingSource) -> Walk:
        """Walk a kept segment through the steps of the sample; their values are added to its row."""
        row = self.spool.read_part(file, number)
        span = SegmentSpan(row["start_s"], row["end_s"], row["kind"], None)
        for step in self.chain.sampled:
            needed = needed_values(step, row["measured"])
            key = self.chain.key(step, source.digest, (source.metadata, span), needed)
            item = WorkItem(row["path"], source.metadata, span, needed)
            outcome = yield Call(step.name, key, item, size=span.end_s - span.start_s)
            if outcome.value is not None:
                row["measured"][step.name] = outcome.value
        self.spool.put_part(file, number, row)
        return []

    def repeated(self, source: RecordingSource, same: str) -> Row:
        """Write the row of a file whose content came before."""
        return {**_recording_columns(source), "duration_s": None, "repeats": same}

    def _segment(
        self,
        file: int,
        number: int,
        source: RecordingSource,
        path: str,
        segment: Mapping[str, Any],
        recording: Mapping[str, Value],
    ) -> Walk:
        """Walk a segment through its steps until it breaks a rule; returns no further walks."""
        correction = self.corrections.of_segment(
            source.digest, source.name, segment["start_s"], segment["end_s"]
        )
        fields = correction.fields if correction else NO_FIELDS
        as_cut, segment = segment, corrected_segment(segment, fields, recording["voice_activity"])
        with_text = corrected_source(source, fields)
        span = SegmentSpan(segment["start_s"], segment["end_s"], segment["kind"], segment["speaker"])
        values: dict[str, Value] = {}
        errors: dict[str, str] = {}
        judged: Judged | None = None
        drop = self._check("segment", _about(segment), span.kind) or self._check(
            "probe", recording["probe"], span.kind
        )
        for step in self.chain.segment:
            if drop and not fields.keep:
                break
            if span.kind == "sound" and not step.measures_sounds:
                continue
            if step.reads_text and _lacks_text(fields.text, judged):
                continue
            metadata = (source if is_of_sound(step.name, self.chain.recognizers) else with_text).metadata
            needed = needed_values(step, {**recording, **_with_text(values, fields.text, judged)})
            key = self.chain.key(step, source.digest, (metadata, span), needed)
            item = WorkItem(path, metadata, span, needed)
            outcome = yield Call(step.name, key, item, size=span.end_s - span.start_s)
            if outcome.value is None:
                errors[step.name] = outcome.error or ""
                drop = drop or self._broken_by(step, outcome.error or "", errors)
            else:
                values[step.name] = outcome.value
                drop = drop or self._check(step.name, outcome.value, span.kind)
                if step.name == "consensus" and source.metadata.text is None:
                    judged = self._judged(source, segment, values)
        drop = drop or _without_recognizers(with_text, span, self.chain.recognizers)
        transcripts = {name: values[name]["text"] for name in self.chain.recognizers if name in values}
        row = _segment_row(source, path, segment, recording["probe"], values, errors, transcripts, judged)
        if correction is not None:
            row, drop = add_correction(row, correction, as_cut, drop), overruled_drop(drop, fields)
        self.spool.put_part(file, number, {**row, "dropped": drop.as_row() if drop else None})
        return []

    def _judged(
        self, source: RecordingSource, segment: Mapping[str, Any], values: Mapping[str, Value]
    ) -> Judged:
        about = _about(segment)
        return judge_text(
            values,
            self.chain.kinds,
            source.metadata.language,
            about["speech_share"],
            self.thresholds,
            about["duration_s"],
        )

    def _check(self, step: str, value: Value, kind: str) -> Drop | None:
        return first_broken(RULES, self.thresholds, step, value, kind)

    def _broken_by(self, step: Step, error: str, errors: Mapping[str, str]) -> Drop | None:
        """An error costs the segment where a threshold waits for the value, or where nothing else can take its
        place; else it costs the value alone."""
        waits = any(
            rule.step == step.name and getattr(self.thresholds, rule.threshold) is not None for rule in RULES
        )
        speechless = step.name in self.chain.recognizers and set(self.chain.recognizers) <= set(errors)
        if waits or speechless or step.name in ("signal", "consensus"):
            return Drop(step.name, "", *kind_and_reason(error))
        return None


def _with_text(
    values: Mapping[str, Value], corrected_text: str | None, judged: Judged | None
) -> dict[str, Value]:
    """The values as later steps read them: with the text of a person, else the one that is kept, as the consensus;
    without one that is refused."""
    if "consensus" not in values or (judged is None and corrected_text is None):
        return dict(values)
    if corrected_text is None and judged is not None and judged.refused:
        return {name: value for name, value in values.items() if name != "consensus"}
    text = judged.text if corrected_text is None and judged is not None else corrected_text
    return {**values, "consensus": {**values["consensus"], "text": text}}


def _lacks_text(corrected_text: str | None, judged: Judged | None) -> bool:
    """Whether a segment's text is refused, or a person says that there are no words."""
    if corrected_text is not None:
        return not corrected_text
    return judged is not None and judged.refused is not None


def _about(segment: Mapping[str, Any]) -> Value:
    """Values of the segment itself that rules may use."""
    duration_s = segment["end_s"] - segment["start_s"]
    return {
        "duration_s": round(duration_s, 6),
        "overlap_share": round(segment["overlap_s"] / duration_s, 4) if duration_s else 0.0,
        "speech_share": round(segment["speech_s"] / duration_s, 4) if duration_s else 0.0,
    }


def _without_recognizers(
    source: RecordingSource, span: SegmentSpan, recognizers: Sequence[str]
) -> Drop | None:
    if span.kind == "sound" or source.metadata.text is not None or recognizers:
        return None
    return Drop("recognizers", "", "no text given and no recognizer asked for", "")


def _segment_row(
    source: RecordingSource,
    path: str,
    segment: Mapping[str, Any],
    probe: Value,
    values: Mapping[str, Value],
    errors: Mapping[str, str],
    transcripts: Mapping[str, str],
    judged: Judged | None,
) -> Row:
    metadata, signal = source.metadata, values.get("signal", {})
    trust_figures = {STEP: judged.figures} if judged else {}
    row: Row = {
        "path": path,
        "file": source.name,
        "digest": source.digest,
        "start_s": segment["start_s"],
        "end_s": segment["end_s"],
        "duration_s": round(segment["end_s"] - segment["start_s"], 6),
        "kind": segment["kind"],
        # a voice that diarization found is one within its file
        "speaker": metadata.speaker
        or (f"{source.name}#{segment['speaker']}" if segment["speaker"] else source.folder),
        "split": source.split,
        "text": metadata.text if metadata.text is not None else judged.text if judged else "",
        "text_source": "given" if metadata.text is not None else judged.source if judged else None,
        "text_refused": judged.refused.as_row() if judged and judged.refused else None,
        "language": values.get("language", {}).get("language")
        or metadata.language
        or (judged.language if judged else None),
        "heard": dict(transcripts),
        "speech_s": segment["speech_s"],
        **{name: value for name, value in _about(segment).items() if name != "duration_s"},
        "level_dbfs": signal.get("level_dbfs"),
        "peak_dbfs": signal.get("peak_dbfs"),
        "clipped_share": signal.get("clipped_share"),
        "sample_rate": probe["sample_rate"],
        "num_channels": probe["num_channels"],
        "measured": {"probe": dict(probe), **values, **trust_figures},
    }
    if errors:
        row["errors"] = dict(errors)
    notes = [segment.get("note"), _channel_note(signal)]
    if any(notes):
        row["note"] = "; ".join(filter(None, notes))
    return row


def _channel_note(signal: Value) -> str | None:
    """Say that one channel is heard in place of the mean of all."""
    if signal.get("channel") is None:
        return None
    return f"its channels cancel each other: channel {signal['channel']} alone is heard"


def _file_row(source: RecordingSource, values: Mapping[str, Value]) -> Row:
    speakers = values.get("speakers", {}).get("speakers", {})
    return {
        **_recording_columns(source),
        "duration_s": values["voice_activity"]["duration_s"],
        "speech_s": round(sum(end - start for start, end in values["voice_activity"]["spans"]), 3),
        "length": values["voice_activity"].get("length"),
        "form": {name: values["probe"][name] for name in ("codec", "sample_rate", "num_channels")},
        "voices": {
            name: {"seconds": v["seconds"], "embedding": v["embedding"]} for name, v in speakers.items()
        },
    }


def _failed(source: RecordingSource, values: Mapping[str, Value], step: str, error: str) -> Row:
    kind, reason = kind_and_reason(error)
    duration_s = values.get("probe", {}).get("duration_s")
    return {
        **_recording_columns(source),
        "duration_s": duration_s,
        "failed": {"step": step, "kind": kind, "reason": reason},
    }


def _recording_columns(source: RecordingSource) -> Row:
    return {"name": source.name, "path": source.path, "digest": source.digest}


@dataclass(frozen=True)
class Run:
    """Objects that all parts of a run share."""

    config: AnnotationConfig
    context: Context
    chain: Chain
    thresholds: Thresholds
    sources: Sequence[RecordingSource]
    ledger: Ledger
    spool: Spool
    corrections: CorrectionIndex = NO_CORRECTIONS
    costs: StepCosts = field(default_factory=StepCosts)

    @property
    def _steps(self) -> StepRun:
        return StepRun(self.config, self.context, self.chain.steps, self.ledger, "segments", self.costs)

    def annotate(self) -> None:
        """Take all recordings and their segments through all steps, into the spool; a repeated file is only named,
        so that no recording is in the training set and in the test set.

        Raises:
            EngineError: a step cannot be set up.
        """
        walks = Walks(self.chain, self.thresholds, self.spool, self.corrections)
        first: dict[object, str] = {}

        def begin() -> Iterator[Walk]:
            for number, source in enumerate(self.sources):
                same = first.setdefault((source.digest, source.metadata), source.name)
                if same != source.name:
                    self.spool.put_file(number, walks.repeated(source, same))
                else:
                    yield walks.recording(number, source)

        self._steps.walk("annotating", len(self.sources), begin())

    def sample(self, verdicts: Verdicts) -> None:
        """Measure the quality of a seeded sample of the kept segments, where no step measures it for all."""
        if not self.chain.sampled:
            return
        places = [place for place, row in kept_rows(self.spool, verdicts) if row["kind"] == "speech"]
        count = min(self.config.quality_sample, len(places))
        sampled_places = sorted(random.Random(self.config.seed).sample(places, count))
        walks = Walks(self.chain, self.thresholds, self.spool)
        ways = (walks.sampled(file, number, self.sources[file]) for file, number in sampled_places)
        self._steps.walk("measuring a sample", count, ways)


def write_shards(config: AnnotationConfig, context: Context, ledger: Ledger) -> None:
    """Write the kept segments as shards, each made by one of the workers.

    Raises:
        StageError: a shard that cannot be written.
    """
    folder, settings = context.folder / "shards", ShardConfig()
    planned = plan_shards(read_jsonl(context.folder / "segments.jsonl"), settings)
    make = partial(_make_shard_row, folder=folder, config=settings)
    with context.progress("writing shards", len(planned)) as bar:
        outcomes = call_each(
            "shard", make, planned, config.num_workers, ledger, lambda: bar.advance(TaskID(0))
        )
    records = []
    for shard, outcome in zip(planned, outcomes, strict=True):
        if outcome.value is None:
            raise StageError(f"annotate: {folder / shard.name}: {outcome.error}", "is the disk full?")
        records.append(parse_shard_record(outcome.value))
    finish_shards(folder, settings, records)


def _make_shard_row(shard: Shard, folder: Path, config: ShardConfig) -> dict[str, Any]:
    return make_shard(shard, folder, config)._asdict()
