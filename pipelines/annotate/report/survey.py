"""One pass over the rows of an annotation: all figures of the page and the rows that it shows, at constant memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from pipelines.steps.page.folder import Folder, Row, file_name, finite_number, value_at
from pipelines.steps.page.numbers import Comparison, NumberTally
from pipelines.steps.page.survey import PartSurvey, RowSample

COMPARED_ROWS = 1_000
"""Rows whose recognizers' texts are compared word by word (up to 30 ms per text with numbers in it)."""
WORDED = (
    "pitch", "pitch_variation", "rate", "energy", "noise", "reverberation", "age", "gender", "emotion"
)  # fmt: skip
"""Columns that hold measures as words."""
_COMPARED = ("id", "path", "start_s", "language", "text", "text_source", "heard")


@dataclass
class AnnotationSurvey(PartSurvey):
    """Totals over all rows of an annotation."""

    compared: RowSample = field(default_factory=lambda: RowSample(COMPARED_ROWS))
    """Rows with the texts of recognizers, kept or dropped."""

    def add(self, row: Row, is_kept: bool) -> None:
        super().add(row, is_kept)
        if isinstance(row.get("heard"), Mapping) and row["heard"]:
            self.compared.offer({name: row.get(name) for name in _COMPARED})

    def columns(self, row: Row) -> Row:
        columns = {name: row.get(name) for name in ("language", "speaker", "kind", "text_source", "split")}
        rate, channels = finite_number(row.get("sample_rate")), finite_number(row.get("num_channels"))
        if rate is not None:
            columns["sample rate"] = f"{rate:,.0f} Hz"
        if channels is not None:
            columns["channels"] = f"{channels:g}"
        columns["format"] = (
            value_at(row, "measured.probe.codec") or PurePath(file_name(row)).suffix.lower() or "no extension"
        )
        columns |= {name: row[name] for name in WORDED if isinstance(row.get(name), str)}
        return {name: value for name, value in columns.items() if value is not None}


def survey_annotation(folder: Folder, rules: Sequence[Comparison]) -> AnnotationSurvey:
    """Read `segments.jsonl` and `filtered.jsonl`, each once."""
    result = AnnotationSurvey(NumberTally(rules))
    for name, is_kept in (("segments.jsonl", True), ("filtered.jsonl", False)):
        for row in folder.rows(name):
            result.add(row, is_kept)
    return result
