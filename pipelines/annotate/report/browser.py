"""Segments to listen to: a spread of those that were kept, and of each reason to drop some, with all that is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

from audiollm.data.text.languages import language_of
from audiollm.evaluate.report.clips import Gallery, PageClip
from audiollm.evaluate.report.formats import without_home
from pipelines.annotate.report.agreement import Marked, marked
from pipelines.annotate.report.survey import WORDED, AnnotationSurvey
from pipelines.report.material import pick_evenly
from pipelines.steps.page.folder import (
    Row,
    clean_text,
    file_name,
    finite_number,
    measured,
    named,
    seconds_of,
    value_at,
)
from pipelines.steps.page.numbers import TITLES, Comparison, format_value, title_of, unit_of
from pipelines.steps.page.survey import Reason

MAX_CARDS = 96
KEPT_SHOWN = 32
SHOWN_PER_REASON = 5
_BESIDE = ("signal", "probe")
_MAX_FACTS = 40


def browser_section(survey: AnnotationSurvey, rules: Sequence[Comparison], gallery: Gallery) -> Row:
    """Cards, the kept ones first, then reason by reason; the sound is shared out among them evenly."""
    reasons = sorted(
        survey.reasons.values(), key=lambda reason: (-reason.dropped.segments, reason.step, reason.rule)
    )
    chosen_rows = survey.candidates.rows()
    chosen_rows = [
        chosen_rows[index]
        for index in pick_evenly(chosen_rows, KEPT_SHOWN, ("kind", "language", "speaker", "file"))
    ]
    groups: list[list[Row]] = [chosen_rows, *(_of_reason(reason) for reason in reasons)]
    dropped = _in_turns([[(place, row) for row in group] for place, group in enumerate(groups) if place])
    turns = _in_turns([[(0, row) for row in chosen_rows], dropped[: MAX_CARDS - len(chosen_rows)]])
    titles = {(rule.step, rule.name): rule for rule in rules}
    cards: list[list[Row]] = [[] for _ in groups]
    for group, row in turns:
        nearest = group > 0 and len(groups[group]) > 1 and row is groups[group][0] and _has_distance(row)
        cards[group].append(_make_segment_card(row, gallery, group, titles, nearest))
    if not turns:
        return {"absent": "There are no segments."}
    return {
        "cards": [card for group in cards for card in group],
        "reasons": [
            {
                "number": place,
                "title": reason.title,
                "shown": len(cards[place]),
                "total": reason.dropped.segments,
            }
            for place, reason in enumerate(reasons, 1)
        ],
        "kept": {"shown": len(cards[0]), "total": survey.kept_sum.segments},
        "dropped": {"shown": sum(map(len, cards[1:])), "total": survey.dropped_sum.segments},
    }


def _in_turns(groups: Sequence[Sequence[tuple[int, Row]]]) -> list[tuple[int, Row]]:
    """The rows in turn by group: the first of each, then the second of each, ..."""
    return [entry for turn in zip_longest(*groups) for entry in turn if entry is not None]


def _of_reason(reason: Reason) -> list[Row]:
    """The row nearest to the threshold, then a spread over files."""
    first = reason.nearest.rows()
    other_rows = [row for row in reason.spread.rows() if not any(row is first_row for first_row in first)]
    indices = pick_evenly(other_rows, SHOWN_PER_REASON - len(first), ("file", "language", "kind"), first)
    return first + [other_rows[index] for index in indices]


def _has_distance(row: Row) -> bool:
    return (
        finite_number(value_at(row, "dropped.value")) is not None
        and finite_number(value_at(row, "dropped.threshold")) is not None
    )


def _make_segment_card(
    row: Row, gallery: Gallery, group: int, titles: Mapping[tuple[str, str], Comparison], nearest: bool
) -> Row:
    text, name = clean_text(row.get("text")), file_name(row)
    language = row["language"] if isinstance(row.get("language"), str) else ""
    start_s, end_s = finite_number(row.get("start_s")), finite_number(row.get("end_s"))
    return {
        "group": group,
        "name": name,
        "text": text,
        "kind": named(row.get("kind") or "", 20),
        "source": named(row.get("text_source") or "", 60),
        "speaker": named(row.get("speaker") or "", 60),
        "language": named(language, 20),
        "where": f"{start_s:.2f} to {end_s:.2f} s" if start_s is not None and end_s is not None else "",
        "clip": _make_segment_clip(row, gallery),
        "heard": _list_transcripts(row, text, language or language_of(text)),
        "facts": _list_segment_facts(row),
        "words": [(key, named(row[key], 60)) for key in ("scene", *WORDED) if isinstance(row.get(key), str)],
        "events": _events(row),
        "errors": _errors(row),
        "note": clean_text(row.get("note"), 200),
        "description": clean_text(value_at(row, "measured.description.text")),
        "dropped": _why(row, titles) if group else None,
        "nearest": nearest,
        "search": f"{text} {name} {named(row.get('speaker') or '', 60)}".lower(),
    }


def _make_segment_clip(row: Row, gallery: Gallery) -> PageClip:
    """The sound of a row, read from a plain file only: reading a device or a pipe might never end."""
    path, start_s, end_s = row.get("path"), finite_number(row.get("start_s")), finite_number(row.get("end_s"))
    if not isinstance(path, str) or not path:
        return PageClip(problem="the row has no path")
    try:
        if not Path(path).is_file():
            return PageClip(problem=f"{file_name(row)}: no such file")
        if start_s is not None and end_s is not None and end_s <= start_s:
            return PageClip(problem=f"{file_name(row)}: an empty span")
        return gallery.clip(Path(path), max(0.0, start_s or 0.0), end_s)
    except Exception as error:  # whatever a decoder does with a damaged file, the other segments are shown
        return PageClip(problem=named(without_home(f"{file_name(row)}: {type(error).__name__}: {error}")))


def _list_transcripts(row: Row, text: str, language: str) -> list[Row]:
    """The recognizers' texts, with differences marked; empty for a single one whose text is the row's."""
    transcripts = row.get("heard")
    texts = (
        {named(name, 60): clean_text(transcript) for name, transcript in list(transcripts.items())[:8]}
        if isinstance(transcripts, Mapping)
        else {}
    )
    if list(texts.values()) == [text]:
        return []
    return [
        {"name": name, "parts": _mark_transcript(text, transcript, language)}
        for name, transcript in texts.items()
    ]


def _mark_transcript(text: str, transcript: str, language: str) -> list[Marked]:
    if text and transcript:
        return marked(text, transcript, language)
    return [Marked(transcript, "same")] if transcript else []


def _list_segment_facts(row: Row) -> list[tuple[str, str]]:
    """The usual measures first, then whatever else is a number."""
    facts = {}
    for path, title in TITLES.items():
        value = finite_number(measured(row, path))
        if value is not None:
            facts[title] = format_value(value, unit_of(path))
    facts.setdefault("duration", format_value(round(seconds_of(row), 2), "s"))
    steps = row.get("measured")
    for step, value in steps.items() if isinstance(steps, Mapping) else ():
        for key, inner in value.items() if isinstance(value, Mapping) else ():
            path = f"{step}.{key}"
            if path not in TITLES and finite_number(inner) is not None and step not in _BESIDE:
                facts.setdefault(title_of(path), format_value(inner, unit_of(path)))
    return list(facts.items())[:_MAX_FACTS]


def _events(row: Row) -> list[str]:
    """Sound events with their times, else tags."""
    events = value_at(row, "measured.events.events") or value_at(row, "measured.events.tags")
    lines = []
    for event in events[:12] if isinstance(events, list) else ():
        if isinstance(event, Mapping) and event.get("label") is not None:
            start_s, end_s = finite_number(event.get("start_s")), finite_number(event.get("end_s"))
            times = f" {start_s:.1f}–{end_s:.1f} s" if start_s is not None and end_s is not None else ""
            lines.append(f"{named(event['label'], 60)}{times}")
    return lines


def _errors(row: Row) -> list[tuple[str, str]]:
    """Steps without a value, and why."""
    errors = row.get("errors")
    pairs = list(errors.items())[:8] if isinstance(errors, Mapping) else []
    return [(named(step, 60), clean_text(without_home(str(error)), 300)) for step, error in pairs]


def _why(row: Row, titles: Mapping[tuple[str, str], Comparison]) -> Row:
    step, name = named(value_at(row, "dropped.step") or ""), named(value_at(row, "dropped.rule") or "")
    rule = titles.get((step, name))
    unit = rule.unit if rule else ""
    value, limit = value_at(row, "dropped.value"), value_at(row, "dropped.threshold")
    title = named(value_at(row, "dropped.kind") or "") or (rule.title if rule else "") or name or "dropped"
    return {
        "title": title,
        "value": "" if value is None else format_value(value, unit),
        "limit": "" if limit is None else (rule.demand if rule else format_value(limit, unit)),
        "reason": clean_text(without_home(str(value_at(row, "dropped.reason") or "")), 300),
        "step": step,
    }
