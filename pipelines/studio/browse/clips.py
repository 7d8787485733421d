"""Clips of the output of `annotate` and `audiocot`: what was kept, dropped with its reason, or is to be reviewed."""

from __future__ import annotations

import html
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from audiollm.files.atomic import line_numbers, read_whole_lines, write_jsonl
from pipelines.review.applied import SEGMENTS, corrected_rows
from pipelines.review.corrections import CORRECTIONS
from pipelines.review.row_facts import (
    clip_text,
    drop_of,
    has_words,
    hypotheses_of,
    measures_of,
    sorted_rows,
    text_refusal_of,
)
from pipelines.studio.browse.files import FILM_KINDS, ShownClip, ShownFiles, audio_html
from pipelines.studio.limits import StudioRefusal

ClipState = Literal["kept", "dropped", "to review"]
STATES: tuple[ClipState, ...] = ("kept", "dropped", "to review")
CLIPS_PER_PAGE = 20
_FILES: Mapping[ClipState, tuple[str, ...]] = {
    "kept": ("segments.jsonl", "clips.jsonl"),
    "dropped": ("filtered.jsonl",),
    "to review": ("review.jsonl",),
}
_PLAYED_S = 60.0
_one_judge = threading.Lock()
"""Two people who judge at the same time would each write the file without the other's verdict."""


@dataclass(frozen=True)
class ClipFilter:
    """The choice of clips of a folder."""

    state: ClipState = "kept"
    reason: str = ""
    words: str = ""
    page: int = 1
    sort: str = ""
    """A column of `sort_columns`; empty: the order of the file."""
    is_descending: bool = False


def listed_clips(folder: Path, state: ClipState) -> list[dict[str, Any]]:
    """Rows of one of the states, as people corrected them; none where the folder has no such file."""
    if state != "to review" and (folder / CORRECTIONS).is_file():
        return [row for row in corrected_rows(folder) if bool(row.get("dropped")) == (state == "dropped")]
    for name in _FILES[state]:
        if (folder / name).is_file():
            return [row for row in read_whole_lines(folder / name).rows if isinstance(row, dict)]
    return []


def review_prefix(place: int) -> str:
    """The addresses of the page that corrects an annotation, by its place among the data folders."""
    return f"/studio/review/{place}"


def is_annotation(folder: Path) -> bool:
    """Whether a folder is an output of `annotate`, whose segments can be corrected."""
    return (folder / SEGMENTS).is_file()


def review_link_html(folders: Sequence[Path], folder: Path | None) -> str:
    """A link to the page that corrects the segments of an annotation; empty for other folders."""
    if folder is None or not is_annotation(folder):
        return ""
    return (
        f'<p><a href="{review_prefix(folders.index(folder))}/" target="_blank">'
        "Correct these segments</a> text, speaker, span, keep or drop, by keyboard</p>"
    )


def drop_reasons(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, int]]:
    """Kinds of drops with their counts, the commonest first."""
    return Counter(drop_of(row)[0] for row in rows if drop_of(row)[0]).most_common()


def clips_html(shown_files: ShownFiles, folder: Path | None, clip_filter: ClipFilter) -> tuple[str, str]:
    """The clips that fit, as a list to see and hear, and a sentence that counts them."""
    if folder is None:
        return (
            "",
            "Start the studio with --data FOLDER, the output of `audiollm annotate` or `audiollm audiocot`.",
        )
    rows = [row for row in listed_clips(folder, clip_filter.state) if _passes_filter(row, clip_filter)]
    rows = sorted_rows(rows, clip_filter.sort, clip_filter.is_descending)
    pages = max(1, -(-len(rows) // CLIPS_PER_PAGE))
    page = min(max(1, clip_filter.page), pages)
    page_rows = rows[(page - 1) * CLIPS_PER_PAGE : page * CLIPS_PER_PAGE]
    if clip_filter.state == "to review":
        page_rows = _with_pictures(folder, page_rows)
    listed = "".join(f"<li>{clip_html(shown_files, row)}</li>" for row in page_rows)
    counted = f"{len(rows):,} {'clip' if len(rows) == 1 else 'clips'}; page {page} of {pages}."
    return f'<ul class="st-clips">{listed}</ul>', counted


def clip_html(shown_files: ShownFiles, row: Mapping[str, Any]) -> str:
    """One clip: its picture or film and player, its texts and speaker, why it or its text was refused, its measures."""
    name = html.escape(str(row.get("id", "")))
    clip = _clip_of(row)
    player = audio_html(shown_files, clip, str(row.get("id", ""))) if clip is not None else ""
    picture = ""
    if clip is not None and clip.video is not None:
        place = f"/studio/api/clips/{shown_files.clip(clip)}"
        picture = f'<img loading="lazy" alt="Picture of {name}" src="{place}/picture">'
        if clip.video.suffix.lower() in FILM_KINDS:
            span = f"{clip.start_s:g}" if clip.end_s is None else f"{clip.start_s:g},{clip.end_s:g}"
            picture = (
                f'<video controls preload="none" aria-label="Film of {name}" poster="{place}/picture" '
                f'src="{place}/film#t={span}"></video>'
            )
    labels = "".join(
        f'<span class="st-label">{html.escape(str(row[key]))}</span>'
        for key in ("speaker", "language", "split", "kind")
        if row.get(key)
    )
    verdict = row.get("verdict")
    judged = f'<span class="st-verdict">{html.escape(str(verdict))}</span>' if verdict else ""
    refusals = "".join(
        f'<p class="st-dropped">{html.escape(prefix + kind)}: {html.escape(reason)}</p>'
        for prefix, (kind, reason) in (("", drop_of(row)), ("text refused, ", text_refusal_of(row)))
        if kind
    )
    return (
        f"{picture}<div><strong>{name}</strong> {labels} {judged}<p>{html.escape(clip_text(row))}</p>"
        f"{_hypotheses_html(row)}{refusals}{player}{_measures_html(row)}</div>"
    )


def review_next(folder: Path | None, after: str = "") -> dict[str, Any] | None:
    """The first clip without a verdict behind one that was skipped; None: all have one."""
    rows = listed_clips(folder, "to review") if folder is not None else []
    ids = [row.get("id") for row in rows]
    begin = ids.index(after) + 1 if after in ids else 0
    unjudged = [row for row in [*rows[begin:], *rows[:begin]] if not row.get("verdict")]
    return _with_pictures(folder, unjudged[:1])[0] if folder is not None and unjudged else None


def give_verdict(folder: Path, id: str, verdict: str, note: str) -> None:
    """Write a person's verdict into `review.jsonl`, whole or not at all.

    Raises:
        StudioRefusal: another verdict than accepted or rejected, a clip that is not listed, or a file with broken
            lines, which would be lost.
    """
    from pipelines.audiocot.output import REVIEW, VERDICTS

    note = " ".join(note.split())[:500]
    with _one_judge:
        rows = listed_clips(folder, "to review")
        if verdict not in VERDICTS or not any(row.get("id") == id for row in rows):
            raise StudioRefusal("This clip is not listed for review.", 404)
        if broken := read_whole_lines(folder / REVIEW).broken:
            raise StudioRefusal(
                f"{folder / REVIEW}: {line_numbers(broken)}: not JSON. Correct it first.", 409
            )
        judged = [{**row, "verdict": verdict, "note": note} if row.get("id") == id else row for row in rows]
        write_jsonl(folder / REVIEW, judged)


# Private


def _passes_filter(row: Mapping[str, Any], clip_filter: ClipFilter) -> bool:
    return (not clip_filter.reason or drop_of(row)[0] == clip_filter.reason) and has_words(
        row, clip_filter.words
    )


def _hypotheses_html(row: Mapping[str, Any]) -> str:
    """The words of each recognizer, below each other: differences are seen."""
    lines = "".join(
        f"<dt>{html.escape(name)}</dt><dd>{html.escape(text) or '(nothing)'}</dd>"
        for name, text in hypotheses_of(row).items()
    )
    return f'<dl class="st-hypotheses">{lines}</dl>' if lines else ""


def _measures_html(row: Mapping[str, Any]) -> str:
    numbers = "".join(
        f"<span>{html.escape(name)} <b>{value:.4g}</b></span>" for name, value in measures_of(row).items()
    )
    return f'<p class="st-measures">{numbers}</p>' if numbers else ""


def _clip_of(row: Mapping[str, Any]) -> ShownClip | None:
    try:
        start_s, end_s = float(row["start_s"]), float(row["end_s"])
        video = row.get("video")
        return ShownClip(
            Path(str(row["path"])), start_s, min(end_s, start_s + _PLAYED_S), Path(video) if video else None
        )
    except (KeyError, TypeError, ValueError):
        return None


def _with_pictures(folder: Path, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the review with the videos of their clips: who judges what is heard must see it, too."""
    videos = {row.get("id"): row.get("video") for row in listed_clips(folder, "kept")}
    return [{**row, "video": videos.get(row.get("id"))} for row in rows]
