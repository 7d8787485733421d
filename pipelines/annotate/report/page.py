"""`report.html` of an annotation: its input, what was kept, and why the rest was dropped."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from audiollm.evaluate.report.clips import Gallery
from audiollm.evaluate.report.formats import duration, percent_or_dash, without_home
from audiollm.evaluate.report.page import render_template
from audiollm.evaluate.report.spectrograms import DYNAMIC_RANGE_DB
from audiollm.files.atomic import write_text
from pipelines.annotate.recognizers.choice import STRONGER
from pipelines.annotate.report.agreement import agreement_section
from pipelines.annotate.report.browser import browser_section
from pipelines.annotate.report.survey import survey_annotation
from pipelines.annotate.report.tables import tables_section
from pipelines.report import page as run_page
from pipelines.steps import page as steps_page
from pipelines.steps.page.folder import Folder, Row, clean_text, finite_number, named
from pipelines.steps.page.funnel import (
    cost_section,
    count_of,
    files_section,
    funnel_section,
    headline_figures,
    ranked,
    read_counts,
    read_files,
)
from pipelines.steps.page.numbers import NumberTally, format_value, read_rules

FOLDERS = (Path(__file__).parent, Path(steps_page.__file__).parent, Path(run_page.__file__).parent)
"""Folders of the page's templates."""
MAX_SOUND_BYTES = 6_000_000
TITLES = {
    "funnel": "Funnel",
    "numbers": "Measures",
    "tables": "Contents",
    "agreement": "Recognizers",
    "browser": "Segments",
    "cost": "Cost",
    "files": "Files",
}
"""Titles of the sections, in their order."""


def write_annotation_report(folder: Path) -> Path:
    """Write `report.html` from the files that an annotation left in `folder`; the page needs nothing beside itself.

    Only these are read, and the recordings that the rows name, for a choice of segments to listen to. Rows are read
    one by one: memory does not grow with their number. What is missing or broken leaves a gap that says so.

    Returns:
        the page's path.
    """
    files = Folder(folder)
    html = render_annotation_page(folder.resolve().name, files)
    page = folder / "report.html"
    write_text(page, html.encode("utf-8", "backslashreplace").decode())
    return page


def render_annotation_page(name: str, folder: Folder) -> str:
    """The page as text. Whatever comes from the folder is escaped."""
    gallery = Gallery(most_bytes=MAX_SOUND_BYTES)
    sections, tiles = _sections(folder, gallery)
    return render_template(
        "annotation.html",
        folders=FOLDERS,
        filters={"percent": percent_or_dash, "duration": duration},
        page_kind="audiollm annotation",
        name=named(name) or "annotation",
        tiles=tiles,
        warnings=_warnings(folder.json("funnel.json")),
        titles=TITLES,
        num_silent=gallery.num_silent,
        dynamic_range=f"{DYNAMIC_RANGE_DB:g}",
        configuration=[
            (named(key, 120), format_value(_setting(value)))
            for key, value in run_page.flat_settings(folder.yaml("config.yaml"))
        ],
        **sections,
    )


def _sections(folder: Folder, gallery: Gallery) -> tuple[dict[str, Row], list[Row]]:
    """All sections by name, and the big figures at the top."""
    rules = read_rules(folder.objects("rules.json"))
    survey, files = survey_annotation(folder, rules), read_files(folder)
    counts, is_given = read_counts(folder, files, survey, rules, "segments.jsonl")
    timings = folder.json("timings.json")
    timings = timings if isinstance(timings, dict) else {}
    builders: dict[str, Callable[[], Row]] = {
        "funnel": lambda: (
            funnel_section(folder, files, counts, is_given, "segments")
            | {
                "texts": _count_recognized_texts(counts.get("recognized_texts")),
                "recognizers": _list_recognizers(folder.objects("recognizers.json")),
            }
        ),
        "numbers": lambda: _make_segment_numbers(survey.numbers, folder.objects("not_applied.json")),
        "tables": lambda: tables_section(survey, folder.json("bins.json")),
        "agreement": lambda: agreement_section(survey, counts.get("text_agreement")),
        "browser": lambda: browser_section(survey, rules, gallery),
        "cost": lambda: cost_section(timings),
        "files": lambda: files_section(files),
    }
    sections = {name: _built(builder) for name, builder in builders.items()}
    top = _built(lambda: {"tiles": headline_figures(counts, timings, "segments")})
    return sections, top.get("tiles", [])


def _built(builder: Callable[[], Row]) -> Row:
    """A section, or the reason why it failed: a page with a gap is worth more than none."""
    try:
        return {"absent": ""} | builder()
    except Exception as error:
        return {"absent": without_home(f"This section could not be made: {type(error).__name__}: {error}")}


def _make_segment_numbers(tally: NumberTally, not_applied: Sequence[Row]) -> Row:
    groups = {"ruled": tally.ruled(), "known": tally.titled(), "others": tally.untitled()}
    if not any(groups.values()):
        return {"absent": "No segment has a measured number."}
    section: Row = {name: [numbers.chart() for numbers in group] for name, group in groups.items()}
    reported_thresholds = {row.get("threshold") for row in not_applied}
    never = [
        rule for rule in tally.never_measured() if rule.name not in reported_thresholds and not rule.of_text
    ]
    return section | {
        "never": [{"title": rule.title or rule.name, "value": named(rule.value)} for rule in never]
    }


def _list_recognizers(rows: Sequence[Row]) -> list[Row]:
    """The recognizers with their weights, as texts."""
    names = ("name", "kind", "weights", "model_type", "digest")
    return [{key: named(without_home(str(row.get(key) or "")), 120) for key in names} for row in rows]


def _warnings(funnel: Any) -> list[Row]:
    """The warnings of the run, which its end repeats."""
    listed = funnel.get("warnings") if isinstance(funnel, Mapping) else None
    texts = [text for text in listed if isinstance(text, str)] if isinstance(listed, list) else []
    return [{"stage": "annotate", "text": clean_text(without_home(text), 600)} for text in texts]


def _count_recognized_texts(counts: Any) -> Row:
    """Amounts of recognized text that were trusted and refused, with the reasons; empty where none was refused."""
    texts: Row = dict(counts) if isinstance(counts, Mapping) else {}
    if not count_of(texts, "refused"):
        return {}
    return {
        "kept": count_of(texts, "kept"),
        "kept_s": finite_number(texts.get("kept_s")) or 0.0,
        "refused": count_of(texts, "refused"),
        "refused_s": finite_number(texts.get("refused_s")) or 0.0,
        "reasons": ranked(texts.get("reasons")),
        "stronger": STRONGER,
    }


def _setting(value: Any) -> Any:
    return without_home(value) if isinstance(value, str) else value
