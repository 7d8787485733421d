"""`report.html` of an AudioCoT run: the funnel, lengths, sounds, disagreements, clips to see and hear."""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from markupsafe import Markup

from audiollm.evaluate.judges.audioset import branch_of, broader_classes
from audiollm.pages.blocks import (
    Content,
    bold,
    chips,
    clip,
    counted_reasons,
    element,
    facts,
    heading,
    isolated,
    join,
    label_bars,
    note,
    notice,
    paragraph,
    small,
    table,
)  # fmt: skip
from audiollm.pages.clips import Gallery
from audiollm.pages.formats import percent_or_dash, without_home
from audiollm.pages.page import Section
from audiollm.pages.run_record import pick_evenly
from pipelines.audiocot.answers.evidence import name_words
from pipelines.audiocot.answers.measured import is_named
from pipelines.audiocot.answers.naming import whole_name
from pipelines.steps.page.folder import Folder, Row, clean_text, file_name, finite_number, named, value_at
from pipelines.steps.page.funnel import cost_section, files_section, funnel_section, read_counts, read_files
from pipelines.steps.page.numbers import NumberTally, numbers_section, read_rules
from pipelines.steps.page.parts import file_clip, read_timings, write_step_page
from pipelines.steps.page.survey import PartSurvey, Reason

MAX_SOUND_BYTES = 8_000_000
KEPT_SHOWN, SHOWN_PER_REASON, MADE_SHOWN = 24, 3, 12
SOUNDS_SHOWN = 20
_STRIP_PICTURES, _STRIP_SIDE = 6, 96


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
    source, gallery = Folder(folder), Gallery(most_bytes=MAX_SOUND_BYTES)
    rules = read_rules(source.objects("rules.json"))
    survey, files = survey_clips(source), read_files(source)
    counts, is_given = read_counts(source, files, survey, rules, "clips.jsonl")
    timings = read_timings(source)
    builders: dict[str, Callable[[], Section]] = {
        "funnel": lambda: funnel_section(source, files, counts, is_given, "clips"),
        "sounds": lambda: Section("sounds", "Sounds", _sound_counts(survey), "Which sounds there are"),
        "answers": lambda: Section(
            "answers", "Answers", _disagreements(survey), "Where answers and measurements disagree"
        ),
        "numbers": lambda: numbers_section(survey.numbers, "clip"),
        "clips": lambda: Section("clips", "Clips", _clip_cards(survey, gallery), "Clips to see and hear"),
        "made": lambda: Section("made", "Pairs and edits", _pairs_and_edits(source, counts, gallery)),
        "review": lambda: Section("review", "Review", _review(source), "Review by a person"),
        "cost": lambda: cost_section(source, timings),
        "files": lambda: files_section(files),
    }
    return write_step_page(folder, "audiocot", builders, (counts, timings, "clips"))


def survey_clips(folder: Folder) -> CotSurvey:
    """Read `clips.jsonl` and `filtered.jsonl`, each once."""
    survey = CotSurvey(NumberTally(read_rules(folder.objects("rules.json"))))
    for name, is_kept in (("clips.jsonl", True), ("filtered.jsonl", False)):
        for row in folder.rows(name):
            survey.add(row, is_kept)
    return survey


# Private


def _numbers(row: Row) -> Row:
    """The numbers of a row that are drawn: the steps' own, without the record and the curves."""
    measured = row.get("measured")
    steps = measured if isinstance(measured, Mapping) else {}
    charted = {name: steps[name] for name in ("levels", "agreement") if name in steps}
    kinds = value_at(row, "measured.tags.kinds")
    return {"measured": charted | ({"tags": {"kinds": kinds}} if isinstance(kinds, Mapping) else {})}


def _sound_counts(survey: CotSurvey) -> Markup:
    kept = survey.kept_sum.segments
    if not kept:
        return notice("No clip was kept.")
    counts = {"clips": kept, "with pictures": survey.with_pictures, "little evidence": survey.little_evidence}
    sounds = [(isolated(name), count) for name, count in survey.sounds.most_common(SOUNDS_SHOWN)]
    events = [
        ([isolated(number), " event" if number == 1 else " events"], count)
        for number, count in sorted(survey.event_counts.items())
    ]
    more = len(survey.sounds) - SOUNDS_SHOWN
    little = (
        "Little evidence: the tagger has no name for the loudest sound. These clips are in ",
        element("code", "thinking.jsonl"),
        " only with ",
        element("code", "little_evidence=keep"),
        ".",
    )
    return join(
        facts((title, f"{count:,}") for title, count in counts.items()),
        paragraph(little) if survey.little_evidence else None,
        element(
            "div",
            element(
                "div",
                heading("Sounds", "by clips"),
                _count_bars(sounds),
                note(f"And {more:,} more.") if more > 0 else None,
                class_="card",
            ),
            element("div", heading("Events in a clip"), _count_bars(events), class_="card"),
            class_="pair",
        ),
    )


def _count_bars(pairs: Sequence[tuple[Content, int]]) -> Markup:
    """Bars of counts, the largest of which is full."""
    max_count = max((count for _, count in pairs), default=1)
    return label_bars((name, count, 100 * count / max_count, False) for name, count in pairs)


def _disagreements(survey: CotSurvey) -> Markup:
    asks = [(step, asks, f"{count:,}") for (step, asks), count in sorted(survey.asks.items())]
    requests: Content = paragraph("No model was asked: all records are written from measurements.")
    if asks:
        requests = [
            heading("Requests until an answer could be used"),
            table(("step", "requests", "answers"), asks, ""),
        ]
    titles = {
        "Heard by the tagger, not in the record": survey.unnamed,
        "In the record, not heard by the tagger": survey.unheard,
    }
    beside = []
    for title, counter in titles.items():
        pairs = [(isolated(name), count) for name, count in counter.most_common(SOUNDS_SHOWN)]
        beside.append(element("div", heading(title), counted_reasons(pairs) if pairs else paragraph("None.")))
    return join(requests, element("div", beside, class_="pair"))


def _clip_cards(survey: CotSurvey, gallery: Gallery) -> Markup:
    chosen_rows = survey.candidates.rows()
    chosen_rows = [chosen_rows[index] for index in pick_evenly(chosen_rows, KEPT_SHOWN, ("split", "file"))]
    cards = [_clip_card(row, gallery, None) for row in chosen_rows]
    for reason in sorted(survey.reasons.values(), key=lambda drop_reason: -drop_reason.dropped.segments):
        cards += [_clip_card(row, gallery, reason) for row in _of_reason(reason)]
    if not cards:
        return notice("There are no clips.")
    kept, dropped = survey.kept_sum.segments, survey.dropped_sum.segments
    about = f"A spread of the {kept:,} kept clips, then some of the {dropped:,} dropped ones by reason. "
    return join(
        paragraph(about, gallery.about_spectrograms(silent="sounds are left out")),
        element("div", cards, class_="segments"),
    )


def _of_reason(reason: Reason) -> list[Row]:
    nearest = reason.nearest.rows()
    other_rows = [
        row for row in reason.spread.rows() if not any(row is nearest_row for nearest_row in nearest)
    ]
    return [*nearest, *other_rows][:SHOWN_PER_REASON]


def _clip_card(row: Row, gallery: Gallery, reason: Reason | None) -> Markup:
    record: Mapping[str, Any] = row["record"] if isinstance(row.get("record"), Mapping) else {}
    start_s, end_s = finite_number(row.get("start_s")) or 0.0, finite_number(row.get("end_s"))
    name, caption = file_name(row), clean_text(row.get("caption") or row.get("text"))
    thought, why = clean_text(row.get("thought"), 1200), value_at(row, "dropped.reason")
    why = clean_text(without_home(str(why or "")), 300)
    state = "✓ kept" + (", little evidence" if row.get("little_evidence") is True else "")
    strip = _make_picture_strip(row.get("video"), start_s, end_s)
    path = str(row.get("path") or "")
    sounds = [
        f"{word}: {named(sound, 80)}"
        for word, key in (("behind", "background"), ("not", "avoid"))
        for sound in record.get(key) or ()
    ]
    where = f" {start_s:.2f} to {end_s:.2f} s" if end_s is not None else ""
    return element(
        "article",
        element("p", state if reason is None else f"✗ {reason.title}", class_="state"),
        element("p", why, class_="why") if why else None,
        element("h4", isolated(caption)) if caption else None,
        element("img", class_="strip", src=strip, alt=f"pictures of {name}") if strip else None,
        clip(file_clip(path, Path(path).name, start_s, end_s, gallery), caption or name),
        element("p", isolated(thought), class_="said") if thought else None,
        _events_table(record.get("events") or ()),
        chips(sounds),
        element("p", isolated(name), where, class_="file small"),
        class_="card" if reason is None else "card gone",
    )


def _events_table(events: Iterable[Any]) -> Markup | None:
    """The sounds of a record with their times."""
    rows = []
    for event in events:
        if isinstance(event, Mapping):
            start_s, end_s = finite_number(event.get("start_s")), finite_number(event.get("end_s"))
            about = [named(event.get(key), 80) for key in ("manner", "source", "place") if event.get(key)]
            times = f"{start_s:.2f}–{end_s:.2f}" if start_s is not None and end_s is not None else ""
            rows.append((isolated(named(event.get("sound"), 80)), times, isolated(", ".join(about))))
    return table(("sound", "seconds", "how, what, where"), rows, "events") if rows else None


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


def _pairs_and_edits(folder: Folder, counts: Row, gallery: Gallery) -> Markup:
    by_operation, not_made = (
        sorted(of.items()) if isinstance(of, Mapping) else ()
        for of in (counts.get("made"), counts.get("not_made"))
    )
    rows = [row for name in ("cot.jsonl", "edits.jsonl") for row in folder.rows(name) if _is_made(row)]
    unique = list({str(row.get("id")): row for row in rows}.values())
    cards = [
        _made_card(folder.path, unique[index], gallery)
        for index in pick_evenly(unique, MADE_SHOWN, ("operation",))
    ]
    return join(
        facts(by_operation),
        [notice(bold(f"{count:,}"), f" {reason}") for reason, count in not_made],
        None if cards else paragraph("None."),
        element("div", cards, class_="segments"),
    )


def _is_made(row: Row) -> bool:
    return isinstance(value_at(row, "metadata.operation"), str)


def _made_card(folder: Path, row: Row, gallery: Gallery) -> Markup:
    paths = {
        message.get("role"): content_part.get("path")
        for message in row.get("messages") or ()
        for content_part in message.get("content") or ()
        if content_part.get("type") == "audio"
    }
    span = value_at(row, "metadata.span")
    span_s: Sequence[float] = span if isinstance(span, list) and len(span) == 2 else (0.0, 0.0)
    id, operation = named(row.get("id"), 120), named(value_at(row, "metadata.operation"), 20)
    sounds = []
    for name, role in (("input", "user"), ("output", "assistant")):
        path = folder / str(paths.get(role))
        sounds += [note(name), clip(file_clip(str(path), path.name, 0.0, None, gallery), f"{name} of {id}")]
    return element(
        "article",
        element("p", f"{operation} ", small(f"{span_s[0]:.2f} to {span_s[1]:.2f} s"), class_="state"),
        element("h4", isolated(clean_text(value_at(row, "metadata.instruction")))),
        element("p", isolated(clean_text(value_at(row, "metadata.thought"), 1200)), class_="said"),
        sounds,
        element("p", isolated(id), class_="file small"),
        class_="card",
    )


def _review(folder: Folder) -> Markup:
    rows = list(folder.rows("review.jsonl"))
    if not rows:
        return notice("No clip is listed for review.")
    verdicts = Counter(named(row.get("verdict") or "open", 20) for row in rows)
    judged = verdicts["accepted"] + verdicts["rejected"]
    accepted = bold(percent_or_dash(verdicts["accepted"] / judged)) if judged else None
    how = [f"{len(rows):,} clips are listed in review.jsonl: set ", element("code", "verdict"), " to "]
    how += [element("code", "accepted"), " or ", element("code", "rejected"), ", and run again."]
    return join(
        paragraph(how),
        facts(sorted(verdicts.items())),
        paragraph("Accepted: ", accepted, " of those that were judged.") if accepted else None,
        [
            notice(bold(named(row.get("id"), 120)), f" {clean_text(row.get('note'), 300)}")
            for row in rows
            if row.get("verdict") == "rejected"
        ],
    )


def _agree(label: str, name: str) -> bool:
    """Whether a tagger's class and a name in a record may be one sound: they share a word, or a branch."""
    relatives = broader_classes(label) | branch_of(label)
    return bool(name_words(label) & name_words(name)) or name in map(whole_name, relatives)
