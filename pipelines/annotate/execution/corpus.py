"""Findings that need the whole corpus: outliers among a file's segments, duplicates, speakers of several files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from statistics import quantiles

from pipelines.annotate.measurements.duplicates import DuplicateConfig, find_duplicates
from pipelines.steps.results import Place, Row, Spool
from pipelines.steps.rules import Drop

_MIN_SEGMENTS_FOR_OUTLIERS = 4
_COMPARED = ("duration_s", "text", "speaker", "file")
"""Columns of a row that the search for duplicates reads."""


@dataclass
class Verdicts:
    """Findings about the segments of a corpus: their ids, drops and speakers."""

    ids: dict[Place, str] = field(default_factory=dict)
    drops: dict[Place, Drop] = field(default_factory=dict)
    speakers: dict[str, str] = field(default_factory=dict)
    """The voice of a file as `file#name` -> the voice in all files."""


def judge_segments(
    spool: Spool,
    segment_ids: Mapping[Place, str],
    outlier_iqr: float | None,
    duplicates: DuplicateConfig | None,
    link_threshold: float | None,
) -> Verdicts:
    """Find outliers, duplicates and speakers across files: all that needs more than one segment.

    Args:
        outlier_iqr: see `presets.Preset`; null: no outliers.
        duplicates: what counts as one; null: they stay.
        link_threshold: cosine from which two voices of different files are one; null: voices stay apart.
    """
    verdicts = Verdicts(ids=dict(segment_ids))
    if link_threshold is not None:
        verdicts.speakers = _linked(spool, link_threshold)
    if outlier_iqr is not None:
        verdicts.drops |= _outliers(spool, outlier_iqr)
    if duplicates is not None:
        verdicts.drops |= _repeated(spool, verdicts, duplicates)
    return verdicts


def kept_rows(spool: Spool, verdicts: Verdicts) -> Iterator[tuple[Place, Row]]:
    """Yield the segments that no rule has dropped so far."""
    for file, number, row in spool.parts():
        if row["dropped"] is None and (file, number) not in verdicts.drops:
            yield (file, number), row


def _linked(spool: Spool, threshold: float) -> dict[str, str]:
    from pipelines.annotate.voice.linking import FileSpeaker, link

    voices = [
        FileSpeaker(file["name"], name, voice["embedding"], voice["seconds"])
        for file in spool.files()
        for name, voice in (file.get("voices") or {}).items()
    ]
    return {f"{file}#{name}": speaker for (file, name), speaker in link(voices, threshold).items()}


def _outliers(spool: Spool, width: float) -> dict[Place, Drop]:
    """Segments whose seconds a character lie so many interquartile ranges beside the quartiles of their file
    (Tukey's fences, as Emilia-Pipe has them)."""
    rates: dict[int, list[tuple[Place, float]]] = defaultdict(list)
    for file, number, row in spool.parts():
        if row["dropped"] is None and row["kind"] == "speech" and row["text"]:
            rates[file].append(((file, number), row["duration_s"] / len(row["text"])))
    drops = {}
    for file_rates in rates.values():
        if len(file_rates) < _MIN_SEGMENTS_FOR_OUTLIERS:
            continue
        low, _, high = quantiles((rate for _, rate in file_rates), n=4, method="inclusive")
        floor, ceiling = low - width * (high - low), high + width * (high - low)
        for place, rate in file_rates:
            if not floor <= rate <= ceiling:
                reason = f"{rate:.3g} s a character, the others of the file from {floor:.3g} to {ceiling:.3g}"
                limit = ceiling if rate > ceiling else floor
                drops[place] = Drop(
                    "corpus", "outlier_iqr", "unlike the rest", reason, round(rate, 4), round(limit, 4)
                )
    return drops


def _repeated(spool: Spool, verdicts: Verdicts, config: DuplicateConfig) -> dict[Place, Drop]:
    rows, places = [], {}
    for place, row in kept_rows(spool, verdicts):
        name = verdicts.ids[place]
        places[name] = place
        measured = {key: row["measured"][key] for key in ("fingerprint", "quality") if key in row["measured"]}
        speaker = verdicts.speakers.get(row["speaker"], row["speaker"])
        rows.append({"id": name, "measured": measured, **{k: row[k] for k in _COMPARED}, "speaker": speaker})
    return {
        places[name]: Drop("corpus", "duplicates", "duplicate", f"the same as {original_id}", original_id)
        for name, original_id in find_duplicates(rows, config).items()
    }
