"""Results of a run: the segments, the filtered ones, the fate of every file, and the counts that add up."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from audiollm.data.records.text_origin import TEXT_RECOGNIZERS
from audiollm.data.text.forms import comparison_form
from audiollm.files.atomic import write_json, write_jsonl
from pipelines.annotate.execution.corpus import Verdicts
from pipelines.annotate.execution.rules import RULES, Thresholds
from pipelines.annotate.execution.walk import NO_SPEECH
from pipelines.annotate.input.sources import Sources
from pipelines.review.applied import CorrectionIndex, unmatched_rows
from pipelines.review.corrections import PERSON, SegmentIdentity, identity_of
from pipelines.steps.results import (
    FileFates,
    PartTally,
    Place,
    Row,
    Spool,
    dropped_part_row,
    funnel_counts,
    merge_set_aside,
    open_lines,
    put_line,
)

Columns = Callable[[Row], Mapping[str, Any]]
"""Function from a segment's row to its columns in words."""
_CORRECTION_COUNTS = ("segments", "text", "speaker", "span", "accepted", "rejected")
_QUALITIES = ("sig", "bak", "ovr")
_FATES = FileFates("annotate", NO_SPEECH, ("no transcript",))


@dataclass
class _Tally(PartTally):
    """Counts over all segments and their texts."""

    refused: Counter[str] = field(default_factory=Counter)
    """Segments that were kept without their recognized text, by reason."""
    refused_s: Counter[str] = field(default_factory=Counter)
    recognized: int = 0
    """Segments that were kept with a recognized text."""
    recognized_s: float = 0.0
    compared: int = 0
    agreed: int = 0
    scores: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    corrected: Counter[str] = field(default_factory=Counter)
    """Segments that people corrected, by what they corrected."""
    matched: set[SegmentIdentity] = field(default_factory=set)

    def add(self, file: int, row: Row, drop: Mapping[str, Any] | None) -> None:
        super().add(file, row, drop)
        if "correction" in row:
            self.matched.add(identity_of(row))
            fields = row["correction"]["fields"]
            judged = {True: "accepted", False: "rejected", None: None}[fields.get("keep")]
            changes = (
                name
                for name in ("text", "speaker")
                if name in fields and fields[name] != row["correction"]["machine"][name]
            )
            self.corrected.update(
                filter(None, ("segments", judged, *changes, "span" * ("start_s" in fields)))
            )
        if drop is not None:
            return
        if row["text_refused"] is not None:
            self.refused[row["text_refused"]["kind"]] += 1
            self.refused_s[row["text_refused"]["kind"]] += row["duration_s"]
        elif row["text_source"] not in (None, "given", PERSON):
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
    digests: Mapping[str, str],
    corrections: CorrectionIndex,
) -> dict[str, Any]:
    """Write `segments.jsonl`, `filtered.jsonl`, `files.jsonl`, `set_aside.jsonl`, `funnel.json`; returns the last.

    Args:
        digests: of the recognizers' weights, by name; they stand in the rows whose text they wrote.
        corrections: of people; those that match no segment are set aside, and warned of.
    """
    tally = _Tally()
    with ExitStack() as stack:
        kept_file, filtered_file, aside_file = (
            stack.enter_context(open_lines(folder / f"{name}.jsonl"))
            for name in ("segments", "filtered", "aside")
        )
        for (file, _), row, drop in _settled(spool, verdicts, columns):
            tally.add(file, row, drop)
            row |= _add_text_recognizers(row, digests)
            if drop is None:
                put_line(kept_file, row)
            else:
                put_line(filtered_file, {**row, "dropped": drop})
                put_line(aside_file, dropped_part_row("annotate", row, drop))
        files = list(_FATES.rows(spool, sources.rejected, tally))
    write_jsonl(folder / "files.jsonl", (row for row, _ in files))
    unmatched = unmatched_rows(
        corrections.without_segment(tally.matched),
        {source.name: source.digest for source in sources.recordings},
    )
    if unmatched:
        sources.warnings.append(unmatched_warning(len(unmatched)))
    set_aside_rows = [*sources.rejected, *sources.orphans, *unmatched]
    set_aside_rows += [row for _, row in files if row is not None]
    merge_set_aside(folder, folder / "aside.jsonl", set_aside_rows)
    funnel = _funnel(sources, [row for row, _ in files], set_aside_rows, tally, thresholds)
    if len(corrections):
        counts = {name: tally.corrected[name] for name in _CORRECTION_COUNTS}
        funnel["corrections"] = {**counts, "unmatched": len(unmatched)}
    write_json(folder / "funnel.json", funnel)
    return funnel


def _settled(
    spool: Spool, verdicts: Verdicts, columns: Columns
) -> Iterator[tuple[Place, Row, Mapping[str, Any] | None]]:
    """Yield all segments with their ids, speakers and columns, and the reason of a drop."""
    for file, number, row in spool.parts():
        place = (file, number)
        drop = row.pop("dropped")
        if drop is None and place in verdicts.drops:
            drop = verdicts.drops[place].as_row()
        correction = row.get("correction")
        if correction is not None and correction["fields"].get("keep") and drop is not None:
            # a person stands above what the whole corpus shows, too
            correction["machine"]["dropped"], drop = correction["machine"]["dropped"] or drop, None
        speaker = verdicts.speakers.get(row["speaker"], row["speaker"])
        if correction is not None:
            machine = correction["machine"]
            machine["speaker"] = verdicts.speakers.get(machine["speaker"], machine["speaker"])
            speaker = correction["fields"].get("speaker", speaker)
        yield place, {"id": verdicts.ids[place], **row, "speaker": speaker, **columns(row)}, drop


def _add_text_recognizers(row: Row, digests: Mapping[str, str]) -> Row:
    """The column with the digests of those that wrote the text; a text that a person only accepted is theirs, too."""
    if row["text_source"] != PERSON:
        return _text_recognizers(row, digests)
    machine = row["correction"]["machine"]
    writers = _text_recognizers(machine, digests)
    machine |= writers
    return writers if row["text"] == machine["text"] else {}


def _text_recognizers(row: Row, digests: Mapping[str, str]) -> Row:
    """The digests of those that wrote a text: the recognizer it is taken from, or all that voted."""
    source = row["text_source"]
    if not row["text"] or source in (None, "given", PERSON):
        return {}
    writers = [digests[source]] if source in digests else sorted(set(digests.values()))
    return {TEXT_RECOGNIZERS: writers} if writers else {}


def _funnel(
    sources: Sources,
    files: Sequence[Row],
    set_aside: Sequence[Row],
    tally: _Tally,
    thresholds: Thresholds,
) -> dict[str, Any]:
    counts = funnel_counts(sources.num_audio, sources.not_audio, files, set_aside, tally, RULES, thresholds)
    return {
        **counts,
        **({"warnings": sources.warnings} if sources.warnings else {}),
        "recognized_texts": _recognized_texts(tally),
        "text_agreement": round(tally.agreed / tally.compared, 4) if tally.compared else None,
        "quality": {
            "n": len(tally.scores["ovr"]),
            **{name: round(fmean(tally.scores[name]), 3) for name in _QUALITIES if tally.scores[name]},
        },
    }


def corrections_sentence(counts: Mapping[str, int]) -> str:
    """The corrections of people, by what they corrected."""
    kinds = ", ".join(f"{counts[name]} {name}" for name in _CORRECTION_COUNTS[1:] if counts[name])
    return f"corrected by people: {counts['segments']} segments" + (f" ({kinds})" if kinds else "")


def unmatched_warning(count: int) -> str:
    """Say that corrections have lost their segments."""
    return (
        f"{count} {'correction matches' if count == 1 else 'corrections match'} no segment any more "
        "(set_aside.jsonl says which): corrections.jsonl keeps them, and nothing of them is used"
    )


def _recognized_texts(tally: _Tally) -> Row:
    """Count the kept segments with a recognized text, and the refused texts by reason."""
    return {
        "kept": tally.recognized,
        "kept_s": round(tally.recognized_s, 3),
        "refused": tally.refused.total(),
        "refused_s": round(sum(tally.refused_s.values()), 3),
        "reasons": dict(sorted(tally.refused.items())),
    }


def _agrees(row: Mapping[str, Any]) -> bool:
    forms = (
        comparison_form(text, row.get("language"))
        for text in (row["text"], next(iter(row["heard"].values())))
    )
    return next(forms) == next(forms)
