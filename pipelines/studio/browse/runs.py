"""Runs as the studio shows them: their state (which stage is at work, how far it is, what went wrong),
report and curves, answers and sounds by prompt and step."""

from __future__ import annotations

import html
import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from audiollm.files.atomic import DamagedFile, read_json, read_whole_lines
from audiollm.pages.charts import curve_chart, series_of
from audiollm.pages.formats import duration
from pipelines.studio.browse.files import ShownClip, ShownFiles, audio_html

StageProgress = Literal["running", "done", "failed", "interrupted"]
SILENT_S = 30.0
"""Seconds after which a stage that has not written its record counts as interrupted: it writes it every five."""


class StageAlarm(NamedTuple):
    """A warning of a training for a person."""

    step: int
    kind: str
    text: str


@dataclass(frozen=True)
class StageStatus:
    """A stage of a run."""

    name: str
    state: StageProgress
    seconds: float
    """Wall time of all its attempts."""
    error: str = ""
    step: int | None = None
    """Steps that are done; None: it counts none."""
    steps: int | None = None
    """Steps of the whole stage; None: not known before its end."""
    remaining_s: float | None = None
    """Seconds to its end at the present rate; None: not known."""
    alarms: tuple[StageAlarm, ...] = ()


def stage_statuses(folder: Path, now_s: float | None = None) -> list[StageStatus]:
    """The stages of a run that have begun, in the order in which they did.

    Args:
        now_s: seconds since the epoch; None: now.
    """
    now_s = time.time() if now_s is None else now_s
    records = []
    for path in folder.glob("*/stage.json"):
        try:
            record, written_s = read_json(path), path.stat().st_mtime
            records.append(
                (written_s - float(record["seconds"]), _status(path.parent, record, now_s - written_s))
            )
        except (OSError, DamagedFile, KeyError, TypeError, ValueError):
            continue  # a stage that is being cleared, or one that another version of the program has written
    return [status for _, status in sorted(records, key=lambda record: record[0])]


# Private


def _status(folder: Path, record: Mapping[str, Any], silent_s: float) -> StageStatus:
    state = str(record["state"])
    if state not in ("running", "done", "failed"):
        raise ValueError(state)
    progress: Any = "interrupted" if state == "running" and silent_s > SILENT_S else state
    settings = record.get("settings") or {}
    last = _last_row(folder / "performance.jsonl")
    step = last.get("step")
    done = step + 1 if isinstance(step, int) else None
    steps = settings.get("steps")
    steps = steps if isinstance(steps, int) and not isinstance(steps, bool) else None
    seconds = float(record["seconds"])
    remaining_s = None
    if progress == "running":
        remaining_s = _remaining_s(settings, record, done, steps, last.get("seconds_per_step"))
    alarms = _alarms(folder / "alarms.jsonl")
    return StageStatus(
        folder.name, progress, seconds, str(record.get("error") or ""), done, steps, remaining_s, alarms
    )


def _remaining_s(
    settings: Mapping[str, Any],
    record: Mapping[str, Any],
    done: int | None,
    steps: int | None,
    seconds_per_step: Any,
) -> float | None:
    """By the steps that are left; else by the stage's budget of minutes, or of minutes of a processor."""
    if steps is not None and done is not None and isinstance(seconds_per_step, (int, float)):
        return max(0.0, (steps - done) * float(seconds_per_step))
    seconds, cpu_seconds = float(record["seconds"]), float(record.get("cpu_seconds") or 0.0)
    if isinstance(minutes := settings.get("minutes"), (int, float)):
        return max(0.0, 60.0 * minutes - seconds)
    if isinstance(cpu_minutes := settings.get("cpu_minutes"), (int, float)) and cpu_seconds > 0:
        return max(0.0, (60.0 * cpu_minutes - cpu_seconds) * seconds / cpu_seconds)
    return None


def _last_row(path: Path) -> Mapping[str, Any]:
    rows = [row for row in _read_state_rows(path) if isinstance(row.get("step"), int)]
    return rows[-1] if rows else {}


def _alarms(path: Path) -> tuple[StageAlarm, ...]:
    return tuple(
        StageAlarm(row["step"], str(row.get("kind", "")), str(row.get("text", "")))
        for row in _read_state_rows(path)
        if isinstance(row.get("step"), int)
    )


def _read_state_rows(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    return [row for row in read_whole_lines(path).rows if isinstance(row, dict)]


_STEP = re.compile(r"step-(\d+)")
_SOUND_KINDS = (".wav", ".flac", ".mp3", ".ogg")
_MOST_CURVES = 8
_EXAMPLES = ("examples", "samples", "audio")
"""Folders of a stage's sounds."""
_MOST_SAMPLES, _MOST_ANSWERS = 12, 8
_MOST_STEPS = 8
"""Evaluations of a stage whose sounds are listed."""
_SHOWN_CURVES = ("loss", "evaluation/loss", "reward", "accuracy", "kl", "gradient_norm", "learning_rate")


def run_names(runs: Path) -> list[str]:
    """The runs below a folder, the newest first."""
    if not runs.is_dir():
        return []
    folders = [path for path in runs.iterdir() if path.is_dir() and not path.name.startswith(".")]
    return [path.name for path in sorted(folders, key=lambda path: -path.stat().st_mtime)]


def run_folder(runs: Path, name: str | None) -> Path | None:
    """The folder of a run that is listed; None: there is none of that name."""
    return runs / name if name is not None and name in run_names(runs) else None


def report_html(shown_files: ShownFiles, folder: Path | None) -> str:
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
        f'src="/studio/reports/{shown_files.report(folder)}/report.html"></iframe>'
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
    paths = [path for name in names for path in folder.glob(name)]
    paths += folder.glob("report.html")
    paths += [path for kind in _EXAMPLES for path in folder.glob(f"*/{kind}")]
    facts = [(path, path.stat()) for path in sorted(paths)]
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


def samples_html(shown_files: ShownFiles, folder: Path | None) -> str:
    """Answers and sounds of a run's stages as grids of prompts and steps, the newest step first; other examples."""
    if folder is None:
        return ""
    parts = [_answers_html(shown_files, path, folder) for path in sorted(folder.glob("*/answers.jsonl"))]
    for listening in sorted(folder.glob("*/listening")):
        texts = _prompt_texts(listening / "prompts.jsonl")
        cells: dict[str, dict[int, str]] = {}
        for step, place in _evaluations(listening)[:_MOST_STEPS]:
            for path in sorted(place.iterdir()):
                if _is_sound_inside(path, folder):
                    name = texts.get(path.stem) or path.stem
                    player = audio_html(
                        shown_files, ShownClip(path, 0.0, None), f"{name}, step {step:,}", "none"
                    )
                    cells.setdefault(name, {})[step] = player
        rows = [(html.escape(name), players) for name, players in cells.items()]
        parts.append(_render_grid(f"{listening.parent.name}: sounds by prompt and step", rows))
    examples = [
        path for kind in _EXAMPLES for path in folder.glob(f"*/{kind}/**/*") if _is_sound_inside(path, folder)
    ]
    newest = sorted(examples, key=lambda path: -path.stat().st_mtime)[:_MOST_SAMPLES]
    if newest:
        parts.append(_sound_list(shown_files, [(path, str(path.relative_to(folder))) for path in newest]))
    return "".join(parts)


# Private


def _charts(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    keys = [key for key in dict.fromkeys(key for row in rows for key in row) if key != "step"]
    plain = [key for key in keys if not key.startswith("evaluation/") and "/" not in key]
    ordered = sorted(
        plain, key=lambda key: _SHOWN_CURVES.index(key) if key in _SHOWN_CURVES else len(_SHOWN_CURVES)
    )
    for key in ordered[:_MOST_CURVES]:
        series = [series_of(rows, key, "training"), series_of(rows, f"evaluation/{key}", "held out", True)]
        chart = curve_chart(series, key, f"{key} over the training steps")
        if chart is not None:
            yield f'<figure class="st-curve"><figcaption>{html.escape(key)}</figcaption>{chart}</figure>'


def _evaluations(listening: Path) -> list[tuple[int, Path]]:
    """Steps at which a stage `train` spoke its prompts, and their folders, the newest first."""
    evaluations = [
        (int(match[1]), path)
        for path in listening.glob("step-*")
        if (match := _STEP.fullmatch(path.name)) and path.is_dir()
    ]
    return sorted(evaluations, reverse=True)


def _prompt_texts(path: Path) -> dict[str, str]:
    """The texts of prompts by the names of their files."""
    rows = read_whole_lines(path).rows if path.is_file() else []
    return {str(row.get("name")): str(row.get("text", "")) for row in rows}


def _run_sentence(statuses: Sequence[StageStatus]) -> str:
    alarms = sum(len(status.alarms) for status in statuses)
    warned = f" {alarms} {'alarm' if alarms == 1 else 'alarms'}." if alarms else ""
    last = next((status for status in statuses if status.state != "done"), statuses[-1])
    if last.state == "running":
        remaining = f", about {duration(last.remaining_s)} left" if last.remaining_s is not None else ""
        return f"Running: {last.name}{remaining}.{warned}"
    if last.state == "failed":
        return f"Failed in {last.name}: {last.error}{warned}"
    if last.state == "interrupted":
        return f"Interrupted in {last.name}: the same command goes on from there.{warned}"
    return f"All {len(statuses)} stages that have begun are done.{warned}"


def _stage_row(status: StageStatus) -> str:
    steps = "" if status.step is None else f"{status.step:,}"
    if steps and status.steps is not None:
        steps += f" of {status.steps:,}"
    remaining = "" if status.remaining_s is None else duration(status.remaining_s)
    notes = "".join(
        f'<p class="st-dropped">alarm at step {alarm.step + 1:,}, {html.escape(alarm.kind)}: '
        f"{html.escape(alarm.text)}</p>"
        for alarm in status.alarms
    )
    if status.error:
        notes += f'<p class="st-dropped">{html.escape(status.error)}</p>'
    cells = (
        f'<span class="st-state-{status.state}">{status.state}</span>',
        duration(status.seconds),
        steps,
        remaining,
    )
    return (
        f'<tr><th scope="row">{html.escape(status.name)}{notes}</th>'
        f"{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
    )


def _render_grid(title: str, rows: Iterable[tuple[str, Mapping[int, str]]]) -> str:
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


def _is_sound_inside(path: Path, folder: Path) -> bool:
    """Whether a path is a sound file inside of a folder, wherever links on its way lead."""
    is_file = path.suffix in _SOUND_KINDS and path.is_file() and not path.is_symlink()
    return is_file and path.resolve().is_relative_to(folder.resolve())


def _sound_list(shown_files: ShownFiles, sounds: Sequence[tuple[Path, str]]) -> str:
    """Sounds to hear, each under its name."""
    rows = []
    for path, name in sounds:
        player = audio_html(shown_files, ShownClip(path, 0.0, None), name, "none")
        rows.append(f"<li><span>{html.escape(name)}</span>{player}</li>")
    return f'<ul class="st-clips">{"".join(rows)}</ul>'


def _answers_html(shown_files: ShownFiles, path: Path, folder: Path) -> str:
    """A model's own answers to held-out prompts by step, with the sounds of the prompts, where these lie in the run."""
    prompts: dict[str, str] = {}
    answers: dict[str, dict[int, str]] = {}
    for row in read_whole_lines(path).rows:
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            continue
        texts, players = [], []
        for message in row.get("messages", ()):
            for content_part in message.get("content", ()):
                texts += [html.escape(str(content_part["text"]))] if "text" in content_part else []
                if "path" in content_part and _is_sound_inside(
                    sound := path.parent / str(content_part["path"]), folder
                ):
                    players.append(
                        audio_html(shown_files, ShownClip(sound, 0.0, None), str(row.get("id", "")), "none")
                    )
        key = json.dumps([row.get("id"), row.get("messages")])
        prompts[key] = f"{' '.join(texts)}{''.join(players)}"
        answers.setdefault(key, {})[row["step"]] = html.escape(str(row.get("answer", "")))
    newest = list(answers)[:_MOST_ANSWERS]
    return _render_grid(
        f"{path.parent.name}: answers by prompt and step", [(prompts[key], answers[key]) for key in newest]
    )
