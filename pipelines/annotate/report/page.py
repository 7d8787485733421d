"""`report.html` of an annotation: its input, what was kept, and why the rest was dropped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup

from audiollm.pages.blocks import (
    Content,
    bold,
    counted_reasons,
    element,
    heading,
    isolated,
    join,
    note,
    paragraph,
    small,
)
from audiollm.pages.clips import Gallery
from audiollm.pages.formats import duration, without_home
from audiollm.pages.page import Section
from pipelines.annotate.recognizers.choice import STRONGER
from pipelines.annotate.report.agreement import agreement_section
from pipelines.annotate.report.browser import browser_section
from pipelines.annotate.report.corrected import corrections_section
from pipelines.annotate.report.survey import survey_annotation
from pipelines.annotate.report.tables import tables_section
from pipelines.steps.page.folder import Folder, Row, clean_text, finite_number, named
from pipelines.steps.page.funnel import (
    cost_section,
    count_of,
    files_section,
    funnel_section,
    ranked,
    read_counts,
    read_files,
)
from pipelines.steps.page.numbers import Comparison, NumberTally, numbers_section, read_rules
from pipelines.steps.page.parts import read_timings, write_step_page

MAX_SOUND_BYTES = 6_000_000


def write_annotation_report(folder: Path) -> Path:
    """Write `report.html` from the files that an annotation left in `folder`; the page needs nothing beside itself.

    Only these are read, and the recordings that the rows name, for a choice of segments to listen to. Rows are read
    one by one: memory does not grow with their number. What is missing or broken leaves a gap that says so.

    Returns:
        the page's path.
    """
    source, gallery = Folder(folder), Gallery(most_bytes=MAX_SOUND_BYTES)
    rules = read_rules(source.objects("rules.json"))
    survey, files = survey_annotation(source, rules), read_files(source)
    counts, is_given = read_counts(source, files, survey, rules, "segments.jsonl")
    timings = read_timings(source)
    builders: dict[str, Callable[[], Section]] = {
        "funnel": lambda: funnel_section(source, files, counts, is_given, "segments", _texts(source, counts)),
        "numbers": lambda: numbers_section(survey.numbers, "segment", _never_drawn(source, survey.numbers)),
        "tables": lambda: tables_section(survey, source.json("bins.json")),
        "agreement": lambda: agreement_section(survey, counts.get("text_agreement")),
        "browser": lambda: browser_section(survey, rules, gallery),
        "cost": lambda: cost_section(source, timings),
        "files": lambda: files_section(files),
    }
    corrections = counts.get("corrections")
    if isinstance(corrections, Mapping):
        builders["corrections"] = lambda: corrections_section(source, dict(corrections))
    figures = (counts, timings, "segments")
    return write_step_page(folder, "annotation", builders, figures, _warnings(source.json("funnel.json")))


def _never_drawn(folder: Folder, tally: NumberTally) -> list[Comparison]:
    """Rules whose value no row has, apart from those that say themselves that they were not applied."""
    reported = {row.get("threshold") for row in folder.objects("not_applied.json")}
    return [rule for rule in tally.never_measured() if rule.name not in reported and not rule.of_text]


def _texts(folder: Folder, counts: Row) -> Markup:
    """The recognizers and other models with their weights, and recognized text that was refused."""
    rows = folder.objects("recognizers.json")
    recognizers = [_recognizer(row) for row in rows]
    has_pocketsphinx = any(row.get("kind") == "pocketsphinx" for row in rows)
    listed = [heading("Recognizers and their weights"), element("ul", recognizers, class_="reasons")]
    models = [_recognizer(row) for row in folder.objects("models.json")]
    listed_models = [heading("Models and files of steps"), element("ul", models, class_="reasons")]
    return join(
        listed if recognizers else None,
        listed_models if models else None,
        _refused_texts(counts.get("recognized_texts"), has_pocketsphinx),
    )


def _recognizer(row: Row) -> Markup:
    names = ("name", "kind", "weights", "model_type", "digest")
    name, kind, weights, model_type, digest = (
        named(without_home(str(row.get(key) or "")), 120) for key in names
    )
    about = ", ".join(filter(None, (kind, model_type))) + (f", SHA-256 {digest}…" if digest else "")
    return element("li", bold(isolated(name)), " ", isolated(weights), " ", small(about))


def _warnings(funnel: Any) -> list[Row]:
    """The warnings of the run, which its end repeats."""
    listed = funnel.get("warnings") if isinstance(funnel, Mapping) else None
    texts = [text for text in listed if isinstance(text, str)] if isinstance(listed, list) else []
    return [{"stage": "annotate", "text": clean_text(without_home(text), 600)} for text in texts]


def _refused_texts(counts: Any, has_pocketsphinx: bool) -> Content:
    """Amounts of recognized text that were trusted and refused, with the reasons; None where none was refused."""
    texts: Row = dict(counts) if isinstance(counts, Mapping) else {}
    refused, kept = count_of(texts, "refused"), count_of(texts, "kept")
    if not refused:
        return None
    refused_s, kept_s = (finite_number(texts.get(key)) or 0.0 for key in ("refused_s", "kept_s"))
    amounts = f"Refused in {refused:,} kept segments, {duration(refused_s)}; trusted in {kept:,}, {duration(kept_s)}."
    return [
        heading("Recognized text that was refused", "the segment stays without text"),
        paragraph(amounts),
        counted_reasons(ranked(texts.get("reasons"))),
        note(STRONGER) if has_pocketsphinx else None,
    ]
