"""Segments to listen to: a spread of those that were kept, and of each reason to drop some, with all that is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest

from markupsafe import Markup

from audiollm.data.text.languages import language_of
from audiollm.pages.blocks import (
    Content,
    bold,
    chips,
    clip,
    definitions,
    details,
    element,
    isolated,
    join,
    note,
    notice,
    paragraph,
    small,
)  # fmt: skip
from audiollm.pages.clips import Gallery, PageClip
from audiollm.pages.formats import without_home
from audiollm.pages.page import Section
from audiollm.pages.run_record import pick_evenly
from pipelines.annotate.report.agreement import Marked, marked
from pipelines.annotate.report.survey import WORDED, AnnotationSurvey
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
from pipelines.steps.page.parts import file_clip
from pipelines.steps.page.survey import Reason

MAX_CARDS = 96
KEPT_SHOWN = 32
SHOWN_PER_REASON = 5
_BESIDE = ("signal", "probe")
_MAX_FACTS = 40
Rules = Mapping[tuple[str, str], Comparison]
"""Rules by step and name."""


def browser_section(survey: AnnotationSurvey, rules: Sequence[Comparison], gallery: Gallery) -> Section:
    """Cards, the kept ones first, then reason by reason; the sound is shared out among them evenly."""
    content = _browser(survey, {(rule.step, rule.name): rule for rule in rules}, gallery)
    return Section("browser", "Segments", content, "Segments to listen to")


def _browser(survey: AnnotationSurvey, rules: Rules, gallery: Gallery) -> Markup:
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
    if not turns:
        return notice("There are no segments.")
    cards: list[list[Markup]] = [[] for _ in groups]
    for group, row in turns:
        nearest = group > 0 and len(groups[group]) > 1 and row is groups[group][0] and _has_distance(row)
        state = _dropped_state(row, rules, nearest) if group else element("p", "✓ kept", class_="state")
        cards[group].append(_segment_card(row, gallery, group, state))
    options = [
        ("0", "kept", len(cards[0]), survey.kept_sum.segments),
        ("dropped", "dropped", sum(map(len, cards[1:])), survey.dropped_sum.segments),
        *(
            (str(place), f"– {reason.title}", len(cards[place]), reason.dropped.segments)
            for place, reason in enumerate(reasons, 1)
        ),
    ]
    (_, _, num_kept, of_kept), (_, _, num_dropped, of_dropped) = options[:2]
    return join(
        paragraph(
            f"{num_kept} of {of_kept:,} kept and {num_dropped} of {of_dropped:,} dropped segments: a spread over "
            "files, speakers and languages, and of every reason the one nearest to its threshold and some more. ",
            gallery.about_spectrograms(),
        ),
        _filter(options),
        element("div", cards, class_="segments"),
    )


def _filter(options: Sequence[tuple[str, str, int, int]]) -> Markup:
    """A choice of segments by their fate and by a text."""
    label = "text, file or speaker"
    listed = [
        element("option", f"{name} ({shown} of {total:,})", value=value)
        for value, name, shown, total in options
    ]
    choice = element("option", "all segments", value="all")
    return element(
        "div",
        element("select", choice, listed, aria_label="which segments"),
        element("input", type="search", placeholder=label, aria_label=label),
        element("output", class_="small"),
        class_="filter",
        hidden=True,
    )


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


def _segment_card(row: Row, gallery: Gallery, group: int, state: Markup) -> Markup:
    text, name, speaker = clean_text(row.get("text")), file_name(row), named(row.get("speaker") or "", 60)
    language = row["language"] if isinstance(row.get("language"), str) else ""
    kind, source = named(row.get("kind") or "", 20), named(row.get("text_source") or "", 60)
    about = (speaker, named(language, 20), kind if text else "", source)
    words = [(key, named(row[key], 60)) for key in ("scene", *WORDED) if isinstance(row.get(key), str)]
    tags = [*_events(row), *(element("li", word, title=column) for column, word in words)]
    remarks = (clean_text(value_at(row, "measured.description.text")), clean_text(row.get("note"), 200))
    description, remark = (note(text) if text else None for text in remarks)
    measures = _list_segment_facts(row)
    start_s, end_s = finite_number(row.get("start_s")), finite_number(row.get("end_s"))
    where = f"{start_s:.2f} to {end_s:.2f} s" if start_s is not None and end_s is not None else ""
    return element(
        "article",
        state,
        element(
            "h4", isolated(text) if text else small("a sound without words" if kind == "sound" else "no text")
        ),
        element("p", [element("span", isolated(part)) for part in about if part], class_="about"),
        clip(_segment_clip(row, gallery), text or name),
        _transcripts(row, text, language or language_of(text)),
        description,
        chips(tags),
        [element("p", f"{step}: {problem}", class_="absent small") for step, problem in _errors(row)],
        remark,
        details(f"{len(measures)} measures", definitions(measures)) if measures else None,
        element("p", isolated(name), f" {where}", class_="file small"),
        class_="card gone" if group else "card",
        data_group=group,
        data_search=f"{text} {name} {speaker}".lower(),
    )


def _segment_clip(row: Row, gallery: Gallery) -> PageClip:
    start_s, end_s = finite_number(row.get("start_s")), finite_number(row.get("end_s"))
    if start_s is not None and end_s is not None and end_s <= start_s:
        return PageClip(problem=f"{file_name(row)}: an empty span")
    path = row.get("path")
    return file_clip(path if isinstance(path, str) else "", file_name(row), start_s or 0.0, end_s, gallery)


def _transcripts(row: Row, text: str, language: str) -> Markup | None:
    """The recognizers' texts, with differences marked; None for a single one whose text is the row's."""
    transcripts = row.get("heard")
    if not isinstance(transcripts, Mapping):
        return None
    texts = {named(name, 60): clean_text(heard) for name, heard in list(transcripts.items())[:8]}
    if list(texts.values()) == [text]:
        return None
    listed = [
        [
            element("dt", name),
            element("dd", isolated(_mark_transcript(text, transcript, language) or small("nothing"))),
        ]
        for name, transcript in texts.items()
    ]
    return element("dl", listed, class_="hypotheses") if listed else None


def _mark_transcript(text: str, transcript: str, language: str) -> list[Content]:
    parts = [Marked(transcript, "same")] if transcript else []
    if text and transcript:
        parts = marked(text, transcript, language)
    tags = {"differs": "mark", "missing": "del"}
    return [element(tags[part.kind], part.text) if part.kind in tags else part.text for part in parts]


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


def _dropped_state(row: Row, rules: Rules, nearest: bool) -> Markup:
    """The rule that dropped a segment, with the value and the limit."""
    step, name = named(value_at(row, "dropped.step") or ""), named(value_at(row, "dropped.rule") or "")
    rule = rules.get((step, name))
    unit = rule.unit if rule else ""
    value, limit = value_at(row, "dropped.value"), value_at(row, "dropped.threshold")
    title = named(value_at(row, "dropped.kind") or "") or (rule.title if rule else "") or name or "dropped"
    shown_value = "" if value is None else format_value(value, unit)
    shown_limit = "" if limit is None else (rule.demand if rule else format_value(limit, unit))
    reason = clean_text(without_home(str(value_at(row, "dropped.reason") or "")), 300)
    why: Content = reason or shown_value
    if shown_value and shown_limit:
        why = [bold(shown_value), ", asked for ", bold(shown_limit)]
    beside = [" ", small("nearest to the threshold")] if nearest else None
    return join(
        element("p", f"✗ {title}", beside, class_="state"), element("p", why, " ", small(step), class_="why")
    )
