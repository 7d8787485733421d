"""`report.html` of an AudioCoT run: the funnel, lengths, sounds, disagreements, clips to see and hear."""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from audiollm.evaluate.judges.audioset import branch_of, broader_classes
from audiollm.evaluate.report.clips import Gallery, PageClip
from audiollm.evaluate.report.formats import duration, percent_or_dash, without_home
from audiollm.evaluate.report.page import render_template
from audiollm.evaluate.report.spectrograms import DYNAMIC_RANGE_DB
from audiollm.files.atomic import write_text
from pipelines.audiocot.answers.evidence import name_words
from pipelines.audiocot.answers.measured import is_named
from pipelines.audiocot.answers.naming import whole_name
from pipelines.report import page as run_page
from pipelines.report.material import pick_evenly
from pipelines.steps import page as steps_page
from pipelines.steps.page.folder import Folder, Row, clean_text, file_name, finite_number, named, value_at
from pipelines.steps.page.funnel import (
    cost_section,
    files_section,
    funnel_section,
    headline_figures,
    read_counts,
    read_files,
)
from pipelines.steps.page.numbers import NumberTally, format_value, read_rules
from pipelines.steps.page.survey import PartSurvey, Reason

FOLDERS = (Path(__file__).parent, Path(steps_page.__file__).parent, Path(run_page.__file__).parent)
"""Folders of the page's templates."""
MAX_SOUND_BYTES = 8_000_000
KEPT_SHOWN, SHOWN_PER_REASON, MADE_SHOWN = 24, 3, 12
SOUNDS_SHOWN = 20
_STRIP_PICTURES, _STRIP_SIDE = 6, 96
TITLES = {
    "funnel": "Funnel",
    "sounds": "Sounds",
    "answers": "Answers",
    "numbers": "Measures",
    "clips": "Clips",
    "made": "Pairs and edits",
    "review": "Review",
    "cost": "Cost",
    "files": "Files",
}
"""Titles of the sections, in their order."""


@dataclass
class CotSurvey(PartSurvey):
    """Totals over all clips of a run."""

    sounds: Counter[str] = field(default_factory=Counter)
    """Kept clips by the sounds of their records."""
    event_counts: Counter[int] = field(default_factory=Counter)
    """Kept clips by the number of their events."""
    asks: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Answers by step and the requests that they took."""
    unnamed: Counter[str] = field(default_factory=Counter)
    """Sounds that the tagger was sure of, and the record does not name."""
    unheard: Counter[str] = field(default_factory=Counter)
    """Sounds that the record names, and the tagger did not hear."""
    with_pictures: int = 0
    little_evidence: int = 0
    """Kept clips whose loudest sound the tagger could not name."""

    def add(self, row: Row, is_kept: bool) -> None:
        super().add({key: value for key, value in row.items() if key != "measured"} | _numbers(row), is_kept)
        answers = [(step, value_at(row, f"measured.{step}")) for step in ("watch", "listen", "think")]
        regions = value_at(row, "measured.describe.regions")
        answers += [("describe", region) for region in (regions if isinstance(regions, list) else ())]
        for step, answer in answers:
            asks = answer.get("asks") if isinstance(answer, Mapping) else None
            if isinstance(asks, int) and asks:
                self.asks[step, asks] += 1
        if not is_kept:
            return
        self.with_pictures += row.get("video") is not None
        self.little_evidence += row.get("little_evidence") is True
        self._add_record(row)

    def _add_record(self, row: Row) -> None:
        record = row.get("record")
        if not isinstance(record, Mapping):
            return
        events = [event for event in record.get("events") or () if isinstance(event, Mapping)]
        names = [named(event.get("sound"), 80) for event in events]
        names += [named(name, 80) for name in record.get("background") or ()]
        self.event_counts[len(events)] += 1
        self.sounds.update(set(names))
        tagged_events = value_at(row, "measured.tags.events")
        if isinstance(tagged_events, list):
            labels = {
                named(tagged_event.get("label"), 80)
                for tagged_event in tagged_events
                if isinstance(tagged_event, Mapping)
            }
            sounds = {name for name in names if is_named(name)}
            self.unnamed.update(label for label in labels if not any(_agree(label, name) for name in sounds))
            self.unheard.update(name for name in sounds if not any(_agree(label, name) for label in labels))


def write_audiocot_report(folder: Path) -> Path:
    """Write `report.html` from the files that a run left in `folder`; the page needs nothing beside itself.

    Rows are read one by one: memory does not grow with their number. What is missing or broken leaves a gap that says
    so.

    Returns:
        the page's path.
    """
    files = Folder(folder)
    gallery = Gallery(most_bytes=MAX_SOUND_BYTES)
    sections, tiles = _sections(files, gallery)
    html = render_template(
        "audiocot.html",
        folders=FOLDERS,
        filters={"percent": percent_or_dash, "duration": duration},
        page_kind="audiollm audiocot",
        name=named(folder.resolve().name) or "audiocot",
        tiles=tiles,
        warnings=(),
        titles=TITLES,
        num_silent=gallery.num_silent,
        dynamic_range=f"{DYNAMIC_RANGE_DB:g}",
        configuration=[
            (named(key, 120), format_value(without_home(value) if isinstance(value, str) else value))
            for key, value in run_page.flat_settings(files.yaml("config.yaml"))
        ],
        **sections,
    )
    page = folder / "report.html"
    write_text(page, html.encode("utf-8", "backslashreplace").decode())
    return page


def survey_clips(folder: Folder) -> CotSurvey:
    """Read `clips.jsonl` and `filtered.jsonl`, each once."""
    survey = CotSurvey(NumberTally(read_rules(folder.objects("rules.json"))))
    for name, is_kept in (("clips.jsonl", True), ("filtered.jsonl", False)):
        for row in folder.rows(name):
            survey.add(row, is_kept)
    return survey


# Private


def _sections(folder: Folder, gallery: Gallery) -> tuple[dict[str, Row], list[Row]]:
    rules = read_rules(folder.objects("rules.json"))
    survey, files = survey_clips(folder), read_files(folder)
    counts, is_given = read_counts(folder, files, survey, rules, "clips.jsonl")
    timings = folder.json("timings.json")
    timings = timings if isinstance(timings, dict) else {}
    builders: dict[str, Callable[[], Row]] = {
        "funnel": lambda: funnel_section(folder, files, counts, is_given, "clips"),
        "sounds": lambda: _sounds_section(survey),
        "answers": lambda: _answers_section(survey),
        "numbers": lambda: _make_clip_numbers(survey.numbers),
        "clips": lambda: _clips_section(survey, gallery),
        "made": lambda: _made_section(folder, counts, gallery),
        "review": lambda: _review_section(folder),
        "cost": lambda: cost_section(timings),
        "files": lambda: files_section(files),
    }
    sections = {name: _built(builder) for name, builder in builders.items()}
    top = _built(lambda: {"tiles": headline_figures(counts, timings, "clips")})
    return sections, top.get("tiles", [])


def _built(builder: Callable[[], Row]) -> Row:
    """A section, or the reason why it failed: a page with a gap is worth more than none."""
    try:
        return {"absent": ""} | builder()
    except Exception as error:
        return {"absent": without_home(f"This section could not be made: {type(error).__name__}: {error}")}


def _numbers(row: Row) -> Row:
    """The numbers of a row that are drawn: the steps' own, without the record and the curves."""
    measured = row.get("measured")
    steps = measured if isinstance(measured, Mapping) else {}
    charted = {name: steps[name] for name in ("levels", "agreement") if name in steps}
    kinds = value_at(row, "measured.tags.kinds")
    return {"measured": charted | ({"tags": {"kinds": kinds}} if isinstance(kinds, Mapping) else {})}


def _make_clip_numbers(tally: NumberTally) -> Row:
    groups = {"ruled": tally.ruled(), "known": tally.titled(), "others": tally.untitled()}
    if not any(groups.values()):
        return {"absent": "No clip has a measured number."}
    return {name: [numbers.chart() for numbers in group] for name, group in groups.items()} | {"never": []}


def _sounds_section(survey: CotSurvey) -> Row:
    if not survey.kept_sum.segments:
        return {"absent": "No clip was kept."}
    max_count = max(survey.sounds.values(), default=1)
    return {
        "rows": [
            {"name": name, "count": count, "percent": 100 * count / max_count}
            for name, count in survey.sounds.most_common(SOUNDS_SHOWN)
        ],
        "more": max(0, len(survey.sounds) - SOUNDS_SHOWN),
        "events": _bars(sorted(survey.event_counts.items())),
        "with_pictures": survey.with_pictures,
        "little_evidence": survey.little_evidence,
        "kept": survey.kept_sum.segments,
    }


def _answers_section(survey: CotSurvey) -> Row:
    return {
        "asks": [
            {"step": step, "asks": asks, "count": count}
            for (step, asks), count in sorted(survey.asks.items())
        ],
        "unnamed": survey.unnamed.most_common(SOUNDS_SHOWN),
        "unheard": survey.unheard.most_common(SOUNDS_SHOWN),
    }


def _bars(pairs: Iterable[tuple[int, int]]) -> list[Row]:
    listed = list(pairs)
    max_count = max((count for _, count in listed), default=1)
    return [{"name": f"{name}", "count": count, "percent": 100 * count / max_count} for name, count in listed]


def _clips_section(survey: CotSurvey, gallery: Gallery) -> Row:
    chosen_rows = survey.candidates.rows()
    chosen_rows = [chosen_rows[index] for index in pick_evenly(chosen_rows, KEPT_SHOWN, ("split", "file"))]
    cards = [_make_clip_card(row, gallery, None) for row in chosen_rows]
    for reason in sorted(survey.reasons.values(), key=lambda drop_reason: -drop_reason.dropped.segments):
        cards += [_make_clip_card(row, gallery, reason) for row in _of_reason(reason)]
    if not cards:
        return {"absent": "There are no clips."}
    return {"cards": cards, "kept": survey.kept_sum.segments, "dropped": survey.dropped_sum.segments}


def _of_reason(reason: Reason) -> list[Row]:
    nearest = reason.nearest.rows()
    other_rows = [
        row for row in reason.spread.rows() if not any(row is nearest_row for nearest_row in nearest)
    ]
    return [*nearest, *other_rows][:SHOWN_PER_REASON]


def _make_clip_card(row: Row, gallery: Gallery, reason: Reason | None) -> Row:
    record = row.get("record") if isinstance(row.get("record"), Mapping) else {}
    start_s, end_s = finite_number(row.get("start_s")) or 0.0, finite_number(row.get("end_s"))
    drop = row.get("dropped") if isinstance(row.get("dropped"), Mapping) else {}
    return {
        "name": file_name(row),
        "where": f"{start_s:.2f} to {end_s:.2f} s" if end_s is not None else "",
        "caption": clean_text(row.get("caption") or row.get("text")),
        "thought": clean_text(row.get("thought"), 1200),
        "events": [
            _make_event_row(event)
            for event in (record or {}).get("events") or ()
            if isinstance(event, Mapping)
        ],
        "background": [named(sound, 80) for sound in (record or {}).get("background") or ()],
        "avoid": [named(sound, 80) for sound in (record or {}).get("avoid") or ()],
        "clip": _make_file_clip(str(row.get("path") or ""), start_s, end_s, gallery),
        "strip": _make_picture_strip(row.get("video"), start_s, end_s),
        "dropped": reason.title if reason is not None else "",
        "little_evidence": row.get("little_evidence") is True,
        "why": clean_text(without_home(str((drop or {}).get("reason") or "")), 300),
    }


def _make_event_row(event: Mapping[str, Any]) -> Row:
    start_s, end_s = finite_number(event.get("start_s")), finite_number(event.get("end_s"))
    about = [named(event.get(key), 80) for key in ("manner", "source", "place") if event.get(key)]
    times = f"{start_s:.2f}–{end_s:.2f}" if start_s is not None and end_s is not None else ""
    return {"sound": named(event.get("sound"), 80), "times": times, "about": ", ".join(about)}


def _make_file_clip(path: str, start_s: float, end_s: float | None, gallery: Gallery) -> PageClip:
    """A sound, read from a plain file only: reading a device or a pipe might never end."""
    try:
        if not path or not Path(path).is_file():
            return PageClip(problem=f"{Path(path).name}: no such file")
        return gallery.clip(Path(path), max(0.0, start_s), end_s)
    except Exception as error:  # whatever a decoder does with a damaged file, the other clips are shown
        return PageClip(problem=named(without_home(f"{Path(path).name}: {type(error).__name__}: {error}")))


def _make_picture_strip(video: Any, start_s: float, end_s: float | None) -> str:
    """Pictures of a clip side by side as a data URL; empty where there are none or they cannot be read."""
    if not isinstance(video, str) or end_s is None or not Path(video).is_file():
        return ""
    import numpy as np
    from PIL import Image

    from audiollm.video.frames import VideoError, frame_times, read_frames

    try:
        times = frame_times(start_s, end_s, _STRIP_PICTURES / max(end_s - start_s, 1e-3))
        pictures = list(read_frames(video, times, _STRIP_SIDE))
    except (VideoError, ValueError):
        return ""
    buffer = io.BytesIO()
    Image.fromarray(np.concatenate(pictures, axis=1)).save(buffer, format="JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _made_section(folder: Folder, counts: Row, gallery: Gallery) -> Row:
    counts_by_operation = counts.get("made")
    rows = [row for name in ("cot.jsonl", "edits.jsonl") for row in folder.rows(name) if _is_made(row)]
    unique = {str(row.get("id")): row for row in rows}
    indices = pick_evenly(list(unique.values()), MADE_SHOWN, ("operation",))
    return {
        "counts": sorted(counts_by_operation.items()) if isinstance(counts_by_operation, Mapping) else [],
        "not_made": sorted(counts["not_made"].items()) if isinstance(counts.get("not_made"), Mapping) else [],
        "cards": [_made_card(folder.path, list(unique.values())[index], gallery) for index in indices],
    }


def _is_made(row: Row) -> bool:
    return isinstance(value_at(row, "metadata.operation"), str)


def _made_card(folder: Path, row: Row, gallery: Gallery) -> Row:
    paths = {
        message.get("role"): content_part.get("path")
        for message in row.get("messages") or ()
        for content_part in message.get("content") or ()
        if content_part.get("type") == "audio"
    }
    sounds = [("input", paths.get("user")), ("output", paths.get("assistant"))]
    span = value_at(row, "metadata.span")
    span_s: Sequence[float] = span if isinstance(span, list) and len(span) == 2 else (0.0, 0.0)
    return {
        "id": named(row.get("id"), 120),
        "operation": named(value_at(row, "metadata.operation"), 20),
        "instruction": clean_text(value_at(row, "metadata.instruction")),
        "thought": clean_text(value_at(row, "metadata.thought"), 1200),
        "span": f"{span_s[0]:.2f} to {span_s[1]:.2f} s",
        "sounds": [
            (name, _make_file_clip(str(folder / str(path)), 0.0, None, gallery)) for name, path in sounds
        ],
    }


def _review_section(folder: Folder) -> Row:
    rows = list(folder.rows("review.jsonl"))
    if not rows:
        return {"absent": "No clip is listed for review."}
    verdicts = Counter(named(row.get("verdict") or "open", 20) for row in rows)
    judged = verdicts["accepted"] + verdicts["rejected"]
    return {
        "listed": len(rows),
        "verdicts": sorted(verdicts.items()),
        "agreement": verdicts["accepted"] / judged if judged else None,
        "notes": [
            (named(row.get("id"), 120), clean_text(row.get("note"), 300))
            for row in rows
            if row.get("verdict") == "rejected"
        ],
    }


def _agree(label: str, name: str) -> bool:
    """Whether a tagger's class and a name in a record may be one sound: they share a word, or a branch."""
    relatives = broader_classes(label) | branch_of(label)
    return bool(name_words(label) & name_words(name)) or name in map(whole_name, relatives)
