"""Walks: the way of a file, and of its clips, from step to step."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipelines.audiocot.chain import CotChain
from pipelines.audiocot.clip import ClipItem, ClipSpan
from pipelines.audiocot.rules import RULES, ClipThresholds
from pipelines.audiocot.sources import FileSource
from pipelines.execution.engine import Call, Walk
from pipelines.steps.chain import needed_values
from pipelines.steps.results import Row, Spool, kind_and_reason
from pipelines.steps.rules import Drop, find_broken
from pipelines.steps.step import Step, Value

REFUSED = "answers refused"
"""Kind of a drop: no answer of a model passed the check."""
_BY_SOUND_ALONE = frozenset({"clips", "levels", "tags"})
"""Steps that read the sound, and nothing that is told about it."""
_OF_PICTURES = frozenset({"motion", "watch", "objects", "describe"})
"""Steps that clips without pictures skip."""
_NEEDED = frozenset({"levels", "listen", "think"})
"""Steps without whose value there is no record."""


@dataclass(frozen=True)
class CotWalks:
    """Maker of the walks of a run, which write their results into a spool."""

    chain: CotChain
    thresholds: ClipThresholds
    spool: Spool
    held_out: float = 0.0
    """Share of the files without a split that are held out."""

    def begin(self, sources: Sequence[FileSource]) -> Iterator[Walk]:
        """Yield the walk of every file; a file whose content came before is only named."""
        first: dict[object, str] = {}
        for number, source in enumerate(sources):
            same = first.setdefault((source.digest, source.facts.video_digest), source.name)
            if same != source.name:
                self.spool.put_file(number, {**_file_columns(source), "duration_s": None, "repeats": same})
            else:
                yield self._file(number, source)

    def _file(self, file: int, source: FileSource) -> Walk:
        """Walk a file through its steps; returns the walks of its clips."""
        values: dict[str, Value] = {}
        for step in self.chain.file:
            needed = needed_values(step, values)
            key = self.chain.key(step, source.digest, _select_key_facts(step, source), needed)
            size = values.get("probe", {}).get("duration_s") or 0.0
            outcome = yield Call(step.name, key, ClipItem(source.path, source.facts, None, needed), size)
            if outcome.value is None:
                kind, reason = kind_and_reason(outcome.error or "")
                failed = {"step": step.name, "kind": kind, "reason": reason}
                duration_s = values.get("probe", {}).get("duration_s")
                self.spool.put_file(
                    file, {**_file_columns(source), "duration_s": duration_s, "failed": failed}
                )
                return []
            values[step.name] = outcome.value
        probe = values["probe"]
        form = {name: probe[name] for name in ("codec", "sample_rate", "num_channels")}
        facts = {"duration_s": probe["duration_s"], "length": probe["length"], "form": form}
        self.spool.put_file(file, {**_file_columns(source), **facts})
        spans = [ClipSpan(*cut) for cut in values["clips"]["clips"]]
        return [self._clip(file, number, source, span, probe) for number, span in enumerate(spans)]

    def _clip(self, file: int, number: int, source: FileSource, span: ClipSpan, probe: Value) -> Walk:
        """Walk a clip through its steps until it breaks a rule; returns no further walks."""
        duration_s = round(span.end_s - span.start_s, 6)
        values: dict[str, Value] = {"probe": probe}
        errors: dict[str, str] = {}
        drop = find_broken(RULES, self.thresholds, "segment", {"duration_s": duration_s})
        for step in self.chain.clip:
            if drop:
                break
            if not probe["has_pictures"] and step.name in _OF_PICTURES:
                continue
            needed = needed_values(step, values)
            key = self.chain.key(step, source.digest, (_select_key_facts(step, source), span), needed)
            item = ClipItem(source.path, source.facts, span, needed)
            outcome = yield Call(step.name, key, item, size=duration_s)
            if outcome.value is None:
                errors[step.name] = outcome.error or ""
                drop = self._broken_by(step, outcome.error or "")
            else:
                values[step.name] = outcome.value
                drop = find_broken(RULES, self.thresholds, step.name, outcome.value)
        row: Row = {
            "path": source.path,
            "file": source.name,
            "digest": source.digest,
            "video": source.facts.pictures_of(source.path, probe),
            "start_s": span.start_s,
            "end_s": span.end_s,
            "duration_s": duration_s,
            "split": source.facts.split or self._drawn_split(source),
            "text": source.facts.text or "",
            "truth": source.facts.truth,
            "sample_rate": probe["sample_rate"],
            "num_channels": probe["num_channels"],
            "measured": values,
        }
        if errors:
            row["errors"] = errors
        self.spool.put_part(file, number, {**row, "dropped": drop.as_row() if drop else None})
        return []

    def _drawn_split(self, source: FileSource) -> str | None:
        if not self.held_out:
            return None
        place = (
            int.from_bytes(hashlib.sha256(f"split {source.digest}".encode()).digest()[:4], "little") / 2**32
        )
        return "test" if place < self.held_out else "train"

    def _broken_by(self, step: Step, error: str) -> Drop | None:
        """An error costs the clip where a threshold or the record waits for the value; else the value alone.

        Refused answers cost the clip at each step: a record that was written without one would not tell so.
        """
        kind, reason = kind_and_reason(error)
        if reason.startswith("RefusedAnswer: "):
            return Drop(step.name, "", REFUSED, reason.removeprefix("RefusedAnswer: "))
        waits = any(
            rule.step == step.name and getattr(self.thresholds, rule.threshold) is not None for rule in RULES
        )
        return Drop(step.name, "", kind, reason) if waits or step.name in _NEEDED else None


def _select_key_facts(step: Step, source: FileSource) -> object:
    """What is told about a file, for steps that read it."""
    return () if step.name in _BY_SOUND_ALONE else source.facts


def _file_columns(source: FileSource) -> Row:
    return {"name": source.name, "path": source.path, "digest": source.digest}
