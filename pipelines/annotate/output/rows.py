"""Results of a run: the segments, the filtered ones, the fate of every file, and the counts that add up."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from statistics import fmean
from typing import IO, Any

from audiollm.data.text.forms import recognition_form, spoken_form
from audiollm.files.atomic import atomic_path, write_json, write_jsonl
from audiollm.files.set_aside import set_aside_row
from pipelines.annotate.execution.corpus import Place, Verdicts
from pipelines.annotate.execution.rules import RULES, Thresholds
from pipelines.annotate.execution.spool import Row, Spool
from pipelines.annotate.execution.walk import NO_SPEECH
from pipelines.annotate.input.sources import Sources

Columns = Callable[[Row], Mapping[str, Any]]
"""Function from a segment's row to its columns in words."""
_QUALITIES = ("sig", "bak", "ovr")


@dataclass
class _Tally:
    """Counts over all segments, in one pass."""

    found: int = 0
    kept: int = 0
    seconds_found: float = 0.0
    seconds: float = 0.0
    reasons: Counter[str] = field(default_factory=Counter)
    dropped_s: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    dropped: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """Number of dropped segments by (step, rule, kind)."""
    kept_of: Counter[int] = field(default_factory=Counter)
    kept_s_of: Counter[int] = field(default_factory=Counter)
    found_of: Counter[int] = field(default_factory=Counter)
    reasons_of: dict[int, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    errors: Counter[str] = field(default_factory=Counter)
    """Number of failed measurements of kept segments, by step."""
    refused: Counter[str] = field(default_factory=Counter)
    """Segments that were kept without their recognized text, by reason."""
    refused_s: Counter[str] = field(default_factory=Counter)
    recognized: int = 0
    """Segments that were kept with a recognized text."""
    recognized_s: float = 0.0
    compared: int = 0
    agreed: int = 0
    scores: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, file: int, row: Row, drop: Mapping[str, Any] | None) -> None:
        self.found += 1
        self.found_of[file] += 1
        self.seconds_found += row["duration_s"]
        if drop is not None:
            key = (drop["step"], drop["rule"], drop["kind"])
            self.dropped[key] += 1
            self.dropped_s[key] += row["duration_s"]
            self.reasons[drop["kind"]] += 1
            self.reasons_of[file][drop["kind"]] += 1
            return
        self.kept += 1
        self.kept_of[file] += 1
        self.seconds += row["duration_s"]
        self.kept_s_of[file] += row["duration_s"]
        self.errors.update(row.get("errors", {}))
        if row["text_refused"] is not None:
            self.refused[row["text_refused"]["kind"]] += 1
            self.refused_s[row["text_refused"]["kind"]] += row["duration_s"]
        elif row["text_source"] not in (None, "given"):
            self.recognized += 1
            self.recognized_s += row["duration_s"]
        if row["text_source"] == "given" and row["heard"]:
            self.compared += 1
            self.agreed += _agrees(row)
        for name in _QUALITIES:
            value = ((row["measured"].get("quality") or {}).get("dnsmos") or {}).get(name)
            if value is not None:
                self.scores[name].append(value)


def write_output(
    folder: Path,
    spool: Spool,
    sources: Sources,
    verdicts: Verdicts,
    columns: Columns,
    thresholds: Thresholds,
) -> dict[str, Any]:
    """Write `segments.jsonl`, `filtered.jsonl`, `files.jsonl`, `set_aside.jsonl`, `funnel.json`; returns the last."""
    tally = _Tally()
    with ExitStack() as stack:
        kept, filtered, aside = (
            stack.enter_context(_lines(folder / f"{name}.jsonl"))
            for name in ("segments", "filtered", "aside")
        )
        for (file, _), row, drop in _settled(spool, verdicts, columns):
            tally.add(file, row, drop)
            if drop is None:
                _put(kept, row)
            else:
                _put(filtered, {**row, "dropped": drop})
                _put(aside, _aside(row, drop))
        files = list(_files(spool, sources, tally))
    write_jsonl(folder / "files.jsonl", (row for row, _ in files))
    own = [*sources.rejected, *sources.orphans, *(row for _, row in files if row is not None)]
    _merge_aside(folder, own)
    funnel = _funnel(sources, [row for row, _ in files], own, tally, thresholds)
    write_json(folder / "funnel.json", funnel)
    return funnel


def segment_ids(places: Sequence[Place], names: Mapping[int, str]) -> dict[Place, str]:
    """Unique names of letters, digits, `_` and `-` for all segments of the files with these names.

    A file with several segments numbers them; where two files would get the same name, each carries a hash of its
    own.
    """
    counts = Counter(file for file, _ in places)
    stems = {file: _safe_name(names[file]) for file in counts}
    taken = Counter(stem.casefold() for stem in stems.values())
    ids = {}
    for file, number in places:
        stem = stems[file]
        if taken[stem.casefold()] > 1 or len(stem) > 100:
            stem = f"{stem[:100]}-{sha256(names[file].encode()).hexdigest()[:10]}"
        ids[file, number] = f"{stem}--{number:05d}" if counts[file] > 1 else stem
    return ids


def _safe_name(file: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "-", re.sub(r"\.[^./]*$", "", file)).strip("-") or "recording"


def _settled(
    spool: Spool, verdicts: Verdicts, columns: Columns
) -> Iterator[tuple[Place, Row, Mapping[str, Any] | None]]:
    """Yield all segments with their ids, speakers and columns, and the reason of a drop."""
    for file, number, row in spool.segments():
        place = (file, number)
        drop = row.pop("dropped")
        if drop is None and place in verdicts.drops:
            drop = verdicts.drops[place].as_row()
        speaker = verdicts.speakers.get(row["speaker"], row["speaker"])
        yield place, {"id": verdicts.ids[place], **row, "speaker": speaker, **columns(row)}, drop


def _files(spool: Spool, sources: Sources, tally: _Tally) -> Iterator[tuple[Row, Row | None]]:
    """Yield the summary row of every file, and its row of `set_aside.jsonl` where it is set aside as a whole."""
    for number, file in enumerate(spool.files()):
        row: Row = {
            **{name: file[name] for name in ("name", "path", "digest")},
            "segments": tally.found_of[number],
            "kept": tally.kept_of[number],
            "duration_s": file["duration_s"],
            "kept_s": round(tally.kept_s_of[number], 3),
        }
        whole: Row | None = None
        if failed := file.get("failed"):
            status, reason = "failed", failed["reason"]
            whole = set_aside_row("annotate", file["path"], failed["kind"], reason, step=failed["step"])
        elif repeats := file.get("repeats"):
            status, reason = "filtered", f"the same as {repeats}"
            whole = set_aside_row("annotate", file["path"], "duplicate", reason)
        elif not row["segments"]:
            status, reason = "filtered", NO_SPEECH
            whole = set_aside_row("annotate", file["path"], NO_SPEECH)
        elif not row["kept"]:
            reasons = tally.reasons_of[number]
            only_errors = set(reasons) <= {"failed", "cannot be read"}
            status = "failed" if only_errors else "filtered"
            reason = ", ".join(f"{count} {kind}" for kind, count in reasons.most_common())
        else:
            status, reason = "kept", ""
        yield {**row, "status": status, "reason": reason, "form": file.get("form")}, whole
    for rejected in sources.rejected:
        yield (
            {
                "name": Path(rejected["place"]).name,
                "path": rejected["place"],
                "digest": None,
                "segments": 0,
                "kept": 0,
                "duration_s": None,
                "kept_s": 0.0,
                "status": "filtered" if rejected["kind"] == "no transcript" else "failed",
                "reason": rejected["reason"],
                "form": None,
            },
            None,
        )


def _aside(row: Row, drop: Mapping[str, Any]) -> Row:
    where = f"from {row['start_s']:.2f} to {row['end_s']:.2f} s"
    reason = f"{drop['reason']}; {where}" if drop["reason"] else where
    figures = {"start_s": row["start_s"], "end_s": row["end_s"]}
    known = {
        name: drop[name] for name in ("step", "rule", "value", "threshold") if drop[name] not in (None, "")
    }
    return set_aside_row("annotate", row["path"], drop["kind"], reason, row["id"], **figures, **known)


def _merge_aside(folder: Path, own: Sequence[Row]) -> None:
    """`set_aside.jsonl` by place: rows of segments, which are in that order already, and those of files."""
    aside = folder / "aside.jsonl"
    rows = [*own, *(json.loads(line) for line in aside.read_text(encoding="utf-8").splitlines())]
    rows.sort(key=lambda row: (row["place"], row.get("start_s", 0.0)))
    write_jsonl(folder / "set_aside.jsonl", rows)
    aside.unlink()


def _funnel(
    sources: Sources,
    files: Sequence[Row],
    set_aside: Sequence[Row],
    tally: _Tally,
    thresholds: Thresholds,
) -> dict[str, Any]:
    status = Counter(row["status"] for row in files)
    reasons = tally.reasons + Counter(row["kind"] for row in set_aside)
    return {
        "files_seen": sources.num_audio + sources.not_audio,
        "not_audio": sources.not_audio,
        "audio_files": sources.num_audio,
        "files_kept": status["kept"],
        "files_filtered": status["filtered"],
        "files_failed": status["failed"],
        "segments_found": tally.found,
        "segments": tally.kept,
        "seconds_seen": round(sum(row["duration_s"] or 0.0 for row in files), 3),
        "seconds_found": round(tally.seconds_found, 3),
        "seconds": round(tally.seconds, 3),
        "reasons": dict(sorted(reasons.items())),
        "stages": _stages(tally, thresholds),
        "errors": dict(sorted(tally.errors.items())),
        "recognized_texts": _recognized_texts(tally),
        "text_agreement": round(tally.agreed / tally.compared, 4) if tally.compared else None,
        "quality": {
            "n": len(tally.scores["ovr"]),
            **{name: round(fmean(tally.scores[name]), 3) for name in _QUALITIES if tally.scores[name]},
        },
    }


def _recognized_texts(tally: _Tally) -> Row:
    """Count the kept segments with a recognized text, and the refused texts by reason."""
    return {
        "kept": tally.recognized,
        "kept_s": round(tally.recognized_s, 3),
        "refused": tally.refused.total(),
        "refused_s": round(sum(tally.refused_s.values()), 3),
        "reasons": dict(sorted(tally.refused.items())),
    }


def _stages(tally: _Tally, thresholds: Thresholds) -> list[Row]:
    """Count the segments and seconds before and after each rule that dropped any, in the order in which the rules are
    applied."""
    order = {rule.threshold: index for index, rule in enumerate(RULES)}
    known = sorted(tally.dropped, key=lambda key: (order.get(key[1], len(order)), key))
    left, left_s, rows = tally.found, tally.seconds_found, []
    for step, rule, kind in known:
        count, seconds = tally.dropped[step, rule, kind], tally.dropped_s[step, rule, kind]
        rows.append(
            {
                "step": step,
                "rule": rule,
                "title": kind,
                "threshold": getattr(thresholds, rule, None) if rule else None,
                "segments_in": left,
                "segments_out": left - count,
                "seconds_in": round(left_s, 3),
                "seconds_out": round(left_s - seconds, 3),
            }
        )
        left, left_s = left - count, left_s - seconds
    return rows


def _agrees(row: Mapping[str, Any]) -> bool:
    return recognition_form(spoken_form(row["text"])) == recognition_form(next(iter(row["heard"].values())))


@contextmanager
def _lines(path: Path) -> Iterator[IO[str]]:
    """Open a file that appears under its name only when it is complete."""
    with atomic_path(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        yield file


def _put(file: IO[str], row: Mapping[str, Any]) -> None:
    file.write(json.dumps(row, ensure_ascii=False) + "\n")
