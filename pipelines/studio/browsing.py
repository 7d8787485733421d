"""Runs and data as the studio shows them: reports, curves, samples, clips with the reasons of drops, reviews.

Files are named by random tokens that the server gives out: no address holds a path.
"""

from __future__ import annotations

import html
import json
import re
import secrets
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from audiollm.evaluate.report.formats import duration
from audiollm.files.atomic import line_numbers, read_whole_lines, write_jsonl
from pipelines.report.figures import curve_chart, series_of
from pipelines.studio.clip_rows import (
    drop_of,
    has_words,
    hypotheses_of,
    measures_of,
    sorted_rows,
    text_of,
    text_refusal_of,
)
from pipelines.studio.limits import StudioRefusal
from pipelines.studio.run_state import StageStatus, stage_statuses

ClipState = Literal["kept", "dropped", "to review"]
STATES: tuple[ClipState, ...] = ("kept", "dropped", "to review")
CLIPS_PER_PAGE = 20
_FILES: Mapping[ClipState, tuple[str, ...]] = {
    "kept": ("segments.jsonl", "clips.jsonl"),
    "dropped": ("filtered.jsonl",),
    "to review": ("review.jsonl",),
}
_REPORT_KINDS = {
    ".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".png": "image/png", ".jpg": "image/jpeg",
    ".svg": "image/svg+xml", ".wav": "audio/wav", ".flac": "audio/flac", ".mp3": "audio/mpeg", ".ogg": "audio/ogg",
    ".mp4": "video/mp4",
}  # fmt: skip
FILM_KINDS = {
    ".mp4": "video/mp4",
    ".m4v": "video/mp4",
    ".mov": "video/mp4",
    ".webm": "video/webm",
    ".mkv": "video/webm",
}
"""Endings of films that browsers play, as they are told to."""
_STEP = re.compile(r"step-(\d+)")
_SOUND_KINDS = (".wav", ".flac", ".mp3", ".ogg")
_MOST_TOKENS = 20_000
_MOST_CURVES = 8
_EXAMPLES = ("examples", "samples", "audio")
"""Folders of a stage's sounds."""
_MOST_SAMPLES, _MOST_ANSWERS = 12, 8
_MOST_STEPS = 8
"""Evaluations of a stage whose sounds are listed."""
_SHOWN_CURVES = ("loss", "evaluation/loss", "reward", "accuracy", "kl", "gradient_norm", "learning_rate")
_PLAYED_S = 60.0
_one_judge = threading.Lock()
"""Two people who judge at the same time would each write the file without the other's verdict."""


class ShownClip(NamedTuple):
    """Part of a file that may be heard; a video may be seen, too."""

    path: Path
    start_s: float
    end_s: float | None
    video: Path | None = None


class ShownFiles:
    """Files that the page may show, by tokens."""

    def __init__(self) -> None:
        self._clips: dict[str, ShownClip] = {}
        self._reports: dict[str, Path] = {}
        self._tokens: dict[ShownClip | Path, str] = {}
        self._guard = threading.Lock()

    def clip(self, clip: ShownClip) -> str:
        """The token of a clip."""
        return self._named(clip, self._clips)

    def report(self, folder: Path) -> str:
        """The token of a folder with a report."""
        return self._named(folder, self._reports)

    def found_clip(self, token: str) -> ShownClip:
        """
        Raises:
            StudioRefusal: there is no such token.
        """
        found = self._clips.get(token)
        if found is None:
            raise StudioRefusal("This clip is no longer shown: choose it anew.", 404)
        return found

    def report_file(self, token: str, name: str) -> tuple[Path, str]:
        """A file of a report and its kind.

        Raises:
            StudioRefusal: it is none of the report's: outside of its folder, hidden, or of another kind.
        """
        missing = StudioRefusal("There is no such file in the report.", 404)
        folder = self._reports.get(token)
        path = Path(name)
        if folder is None or path.is_absolute() or any(part.startswith(".") for part in path.parts):
            raise missing
        found = (folder / path).resolve()
        kind = _REPORT_KINDS.get(found.suffix.lower())
        if kind is None or not found.is_relative_to(folder.resolve()) or not found.is_file():
            raise missing
        return found, kind

    def _named(self, value: Any, known: dict[str, Any]) -> str:
        with self._guard:
            token = self._tokens.get(value)
            if token is None:
                token = self._tokens[value] = secrets.token_urlsafe(18)
                known[token] = value
            while len(known) > _MOST_TOKENS:
                self._tokens.pop(known.pop(next(iter(known))), None)
            return token


def report_policy(base_url: str) -> str:
    """Content-Security-Policy of a report: its scripts run in an origin of their own, and reach its files alone."""
    own = base_url.rstrip("/")
    return (
        f"sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline' {own}/studio/reports/; "
        f"style-src 'unsafe-inline' {own}/studio/reports/; img-src data: {own}/studio/reports/; "
        f"media-src data: {own}/studio/reports/; font-src data:; connect-src 'none'; form-action 'none'; "
        "base-uri 'none'; frame-ancestors 'self'"
    )


# runs


def run_names(runs: Path) -> list[str]:
    """The runs below a folder, the newest first."""
    if not runs.is_dir():
        return []
    found = [path for path in runs.iterdir() if path.is_dir() and not path.name.startswith(".")]
    return [path.name for path in sorted(found, key=lambda path: -path.stat().st_mtime)]


def run_folder(runs: Path, name: str | None) -> Path | None:
    """The folder of a run that is listed; None: there is none of that name."""
    return runs / name if name is not None and name in run_names(runs) else None


def report_html(shown: ShownFiles, folder: Path | None) -> str:
    """The report of a run or of data, in a frame that its scripts cannot leave."""
    if folder is None:
        return ""
    if not (folder / "report.html").is_file():
        return (
            '<p class="st-quiet">There is no report yet: the stage <code>report</code> writes it at the end of a '
            "recipe.</p>"
        )
    name = html.escape(folder.name)
    return (
        f'<iframe class="st-report" sandbox="allow-scripts" title="Report of {name}" '
        f'src="/studio/reports/{shown.report(folder)}/report.html"></iframe>'
    )


def curves_html(folder: Path | None) -> str:
    """Curves of every stage of a run that trains, from `metrics.jsonl` as it is now."""
    if folder is None:
        return ""
    parts = []
    for metrics in sorted(folder.glob("*/metrics.jsonl"), key=lambda path: path.stat().st_mtime):
        rows = [row for row in read_whole_lines(metrics).rows if isinstance(row, dict)]
        charts = list(_charts(rows))
        if charts:
            last = max((row["step"] for row in rows if isinstance(row.get("step"), int)), default=0)
            parts.append(
                f"<h3><strong>{html.escape(metrics.parent.name)}: step {last:,}</strong></h3>"
                f'<div class="st-curves">{"".join(charts)}</div>'
            )
    return "".join(parts) or '<p class="st-quiet">No stage of this run has curves yet.</p>'


def run_mark(folder: Path | None) -> str:
    """A text that changes where a stage has gone on, or there is a new sound, answer or report: drawing them all takes
    half a second."""
    if folder is None:
        return ""
    names = ("*/metrics.jsonl", "*/performance.jsonl", "*/alarms.jsonl", "*/answers.jsonl", "*/listening/*")
    written = [path for name in names for path in folder.glob(name)]
    written += folder.glob("report.html")
    written += [path for kind in _EXAMPLES for path in folder.glob(f"*/{kind}")]
    facts = [(path, path.stat()) for path in sorted(written)]
    states = [(status.name, status.state) for status in stage_statuses(folder)]
    return repr([states, *((str(path), fact.st_size, fact.st_mtime) for path, fact in facts)])


def state_html(folder: Path | None) -> str:
    """The state of a run in a sentence, and its stages in a table: time, steps, time that is left, alarms."""
    if folder is None:
        return ""
    statuses = stage_statuses(folder)
    if not statuses:
        return '<p class="st-quiet">No stage of this run has begun.</p>'
    rows = "".join(_stage_row(status) for status in statuses)
    heads = "".join(
        f'<th scope="col">{head}</th>' for head in ("stage", "state", "time", "steps", "time left")
    )
    return (
        f'<p class="st-run-state">{html.escape(_run_sentence(statuses))}</p>'
        f'<table class="st-stages"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>'
    )


def samples_html(shown: ShownFiles, folder: Path | None) -> str:
    """Answers and sounds of a run's stages as grids of prompts and steps, the newest step first; other examples."""
    if folder is None:
        return ""
    parts = [_answers_html(shown, path, folder) for path in sorted(folder.glob("*/answers.jsonl"))]
    for listening in sorted(folder.glob("*/listening")):
        texts = _prompt_texts(listening / "prompts.jsonl")
        cells: dict[str, dict[int, str]] = {}
        for step, place in _evaluations(listening)[:_MOST_STEPS]:
            for path in sorted(place.iterdir()):
                if _is_sound(path, folder):
                    name = texts.get(path.stem) or path.stem
                    player = _audio(shown, ShownClip(path, 0.0, None), f"{name}, step {step:,}", "none")
                    cells.setdefault(name, {})[step] = player
        rows = [(html.escape(name), players) for name, players in cells.items()]
        parts.append(_grid(f"{listening.parent.name}: sounds by prompt and step", rows))
    examples = [
        path for kind in _EXAMPLES for path in folder.glob(f"*/{kind}/**/*") if _is_sound(path, folder)
    ]
    newest = sorted(examples, key=lambda path: -path.stat().st_mtime)[:_MOST_SAMPLES]
    if newest:
        parts.append(_sound_list(shown, [(path, str(path.relative_to(folder))) for path in newest]))
    return "".join(parts)


# data


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
    """Rows of one of the states; none where the folder has no such file."""
    for name in _FILES[state]:
        if (folder / name).is_file():
            return [row for row in read_whole_lines(folder / name).rows if isinstance(row, dict)]
    return []


def drop_reasons(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, int]]:
    """Kinds of drops with their counts, the commonest first."""
    return Counter(drop_of(row)[0] for row in rows if drop_of(row)[0]).most_common()


def clips_html(shown: ShownFiles, folder: Path | None, wanted: ClipFilter) -> tuple[str, str]:
    """The clips that fit, as a list to see and hear, and a sentence that counts them."""
    if folder is None:
        return (
            "",
            "Start the studio with --data FOLDER, the output of `audiollm annotate` or `audiollm audiocot`.",
        )
    rows = [row for row in listed_clips(folder, wanted.state) if _fits(row, wanted)]
    rows = sorted_rows(rows, wanted.sort, wanted.is_descending)
    pages = max(1, -(-len(rows) // CLIPS_PER_PAGE))
    page = min(max(1, wanted.page), pages)
    part = rows[(page - 1) * CLIPS_PER_PAGE : page * CLIPS_PER_PAGE]
    if wanted.state == "to review":
        part = _with_pictures(folder, part)
    listed = "".join(f"<li>{clip_html(shown, row)}</li>" for row in part)
    counted = f"{len(rows):,} {'clip' if len(rows) == 1 else 'clips'}; page {page} of {pages}."
    return f'<ul class="st-clips">{listed}</ul>', counted


def clip_html(shown: ShownFiles, row: Mapping[str, Any]) -> str:
    """One clip: its picture or film and player, its texts and speaker, why it or its text was refused, its measures."""
    name = html.escape(str(row.get("id", "")))
    clip = _clip_of(row)
    player = _audio(shown, clip, str(row.get("id", ""))) if clip is not None else ""
    picture = ""
    if clip is not None and clip.video is not None:
        place = f"/studio/api/clips/{shown.clip(clip)}"
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
        f"{picture}<div><strong>{name}</strong> {labels} {judged}<p>{html.escape(text_of(row))}</p>"
        f"{_hypotheses_html(row)}{refusals}{player}{_measures_html(row)}</div>"
    )


def review_next(folder: Path | None, after: str = "") -> dict[str, Any] | None:
    """The first clip without a verdict behind one that was skipped; None: all have one."""
    rows = listed_clips(folder, "to review") if folder is not None else []
    ids = [row.get("id") for row in rows]
    begin = ids.index(after) + 1 if after in ids else 0
    left = [row for row in [*rows[begin:], *rows[:begin]] if not row.get("verdict")]
    return _with_pictures(folder, left[:1])[0] if folder is not None and left else None


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


def _charts(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    keys = [key for key in dict.fromkeys(key for row in rows for key in row) if key != "step"]
    plain = [key for key in keys if not key.startswith("evaluation/") and "/" not in key]
    ordered = sorted(
        plain, key=lambda key: _SHOWN_CURVES.index(key) if key in _SHOWN_CURVES else len(_SHOWN_CURVES)
    )
    for key in ordered[:_MOST_CURVES]:
        series = [series_of(rows, key, "training"), series_of(rows, f"evaluation/{key}", "held out", True)]
        drawn = curve_chart(series, key, f"{key} over the training steps")
        if drawn is not None:
            yield f'<figure class="st-curve"><figcaption>{html.escape(key)}</figcaption>{drawn}</figure>'


def _evaluations(listening: Path) -> list[tuple[int, Path]]:
    """Steps at which a stage `train` spoke its prompts, and their folders, the newest first."""
    found = [
        (int(match[1]), path)
        for path in listening.glob("step-*")
        if (match := _STEP.fullmatch(path.name)) and path.is_dir()
    ]
    return sorted(found, reverse=True)


def _prompt_texts(path: Path) -> dict[str, str]:
    """The texts of prompts by the names of their files."""
    rows = read_whole_lines(path).rows if path.is_file() else []
    return {str(row.get("name")): str(row.get("text", "")) for row in rows}


def _run_sentence(statuses: Sequence[StageStatus]) -> str:
    alarms = sum(len(status.alarms) for status in statuses)
    warned = f" {alarms} {'alarm' if alarms == 1 else 'alarms'}." if alarms else ""
    last = next((status for status in statuses if status.state != "done"), statuses[-1])
    if last.state == "running":
        left = f", about {duration(last.remaining_s)} left" if last.remaining_s is not None else ""
        return f"Running: {last.name}{left}.{warned}"
    if last.state == "failed":
        return f"Failed in {last.name}: {last.error}{warned}"
    if last.state == "interrupted":
        return f"Interrupted in {last.name}: the same command goes on from there.{warned}"
    return f"All {len(statuses)} stages that have begun are done.{warned}"


def _stage_row(status: StageStatus) -> str:
    steps = "" if status.step is None else f"{status.step:,}"
    if steps and status.steps is not None:
        steps += f" of {status.steps:,}"
    left = "" if status.remaining_s is None else duration(status.remaining_s)
    notes = "".join(
        f'<p class="st-dropped">alarm at step {alarm.step:,}, {html.escape(alarm.kind)}: {html.escape(alarm.text)}</p>'
        for alarm in status.alarms
    )
    if status.error:
        notes += f'<p class="st-dropped">{html.escape(status.error)}</p>'
    cells = (
        f'<span class="st-state-{status.state}">{status.state}</span>',
        duration(status.seconds),
        steps,
        left,
    )
    return (
        f'<tr><th scope="row">{html.escape(status.name)}{notes}</th>'
        f"{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
    )


def _grid(title: str, rows: Iterable[tuple[str, Mapping[int, str]]]) -> str:
    """A table of a row for each prompt and a column for each step, the newest first.

    Args:
        rows: HTML of a prompt, and HTML of its cells by step.
    """
    rows = list(rows)
    if not rows:
        return ""
    steps = sorted({step for _, cells in rows for step in cells}, reverse=True)[:_MOST_STEPS]
    heads = "".join(f'<th scope="col">step {step:,}</th>' for step in steps)
    lines = []
    for prompt, cells in rows:
        line = "".join(f"<td>{cells.get(step, '')}</td>" for step in steps)
        lines.append(f'<tr><th scope="row">{prompt}</th>{line}</tr>')
    return (
        f'<h3><strong>{html.escape(title)}</strong></h3><div class="st-grid"><table><thead><tr>'
        f'<th scope="col">prompt</th>{heads}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
    )


def _is_sound(path: Path, folder: Path) -> bool:
    """Whether a path is a sound file inside of a folder, wherever links on its way lead."""
    is_file = path.suffix in _SOUND_KINDS and path.is_file() and not path.is_symlink()
    return is_file and path.resolve().is_relative_to(folder.resolve())


def _sound_list(shown: ShownFiles, sounds: Sequence[tuple[Path, str]]) -> str:
    """Sounds to hear, each under its name."""
    rows = []
    for path, name in sounds:
        player = _audio(shown, ShownClip(path, 0.0, None), name, "none")
        rows.append(f"<li><span>{html.escape(name)}</span>{player}</li>")
    return f'<ul class="st-clips">{"".join(rows)}</ul>'


def _answers_html(shown: ShownFiles, path: Path, folder: Path) -> str:
    """A model's own answers to held-out prompts by step, with the sounds of the prompts, where these lie in the run."""
    prompts: dict[str, str] = {}
    answers: dict[str, dict[int, str]] = {}
    for row in read_whole_lines(path).rows:
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            continue
        texts, players = [], []
        for message in row.get("messages", ()):
            for part in message.get("content", ()):
                texts += [html.escape(str(part["text"]))] if "text" in part else []
                if "path" in part and _is_sound(sound := path.parent / str(part["path"]), folder):
                    players.append(_audio(shown, ShownClip(sound, 0.0, None), str(row.get("id", "")), "none"))
        key = json.dumps([row.get("id"), row.get("messages")])
        prompts[key] = f"{' '.join(texts)}{''.join(players)}"
        answers.setdefault(key, {})[row["step"]] = html.escape(str(row.get("answer", "")))
    chosen = list(answers)[:_MOST_ANSWERS]
    return _grid(
        f"{path.parent.name}: answers by prompt and step", [(prompts[key], answers[key]) for key in chosen]
    )


def _with_pictures(folder: Path, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the review with the videos of their clips: who judges what is heard must see it, too."""
    videos = {row.get("id"): row.get("video") for row in listed_clips(folder, "kept")}
    return [{**row, "video": videos.get(row.get("id"))} for row in rows]


def _fits(row: Mapping[str, Any], wanted: ClipFilter) -> bool:
    return (not wanted.reason or drop_of(row)[0] == wanted.reason) and has_words(row, wanted.words)


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


def _audio(shown: ShownFiles, clip: ShownClip, name: str, preload: str = "metadata") -> str:
    """A player of a clip.

    Args:
        name: a text that is not escaped yet.
    """
    return (
        f'<audio controls preload="{preload}" aria-label="{html.escape(name)}" '
        f'src="/studio/api/clips/{shown.clip(clip)}/sound.wav"></audio>'
    )
