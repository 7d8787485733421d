"""Suite `tts`, for lists of the Seed-TTS-eval form: are the words right, and is the voice that of the prompt?

Word errors as `run_wer.py` and `average_wer.py` of BytedanceSpeech/seed-tts-eval compute them (form `seed-tts`, mean
over utterances), and over the whole corpus; similarity as there: cosine of a speaker model's embeddings of the clip
and of the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from audiollm.data.tables.text_lines import read_lines
from audiollm.errors import ConfigError
from audiollm.evaluate.judges.judging import FileEmbeddings, SpeechClip, cosine, digest, value_of
from audiollm.evaluate.report.metric_error import MetricError
from audiollm.evaluate.report.statistics import metric_table
from audiollm.evaluate.report.store import Row
from audiollm.evaluate.report.suite import (
    Example,
    ScoreTable,
    Sound,
    SuiteResult,
    metric_cells,
    not_available,
    reasons_of,
    share_tiles,
)
from audiollm.evaluate.speech.clips import SpeechRequest
from audiollm.evaluate.speech.scoring import Bench, error_summary, rate_of, word_errors
from audiollm.failures import failed_calls
from audiollm.pages.formats import percent, with_interval

VERSION = 1
"""Version of the rows: raise it when a definition changes."""


@dataclass(frozen=True)
class SpeechItem:
    """A line of the list."""

    id: str
    text: str
    prompt: Path | None = None
    prompt_text: str | None = None
    target: Path | None = None
    """A real recording of the text in the prompt's voice, where there is one."""

    def request(self) -> SpeechRequest:
        return SpeechRequest(self.id, self.text, self.prompt, self.prompt_text)


def read_list(path: Path) -> list[SpeechItem]:
    """Lines of `name|prompt text|prompt wav|text[|target wav]`, `name|text|prompt wav` or `name|text`.

    Paths are relative to the list.

    Raises:
        ConfigError: it cannot be read, a line with another number of fields, or a name that is used twice.
    """
    items: dict[str, SpeechItem] = {}
    for place, line in enumerate(read_lines(path).lines, start=1):
        if not line.strip():
            continue
        item = _parse_speech_item(line.strip().split("|"), path.parent, f"{path}:{place}")
        if item.id in items:
            raise ConfigError(
                f"{item.id}: this name was used before", f"{path}:{place}", "give each line its own"
            )
        items[item.id] = item
    if not items:
        raise ConfigError("the list is empty", str(path), "each line is name|prompt text|prompt wav|text")
    return list(items.values())


def evaluate_list(
    items: Sequence[SpeechItem], clips: Mapping[str, SpeechClip], bench: Bench, about: str = ""
) -> SuiteResult:
    """Judge every clip, and every real recording of the list.

    Args:
        clips: the clips to judge, by the items' ids.
        about: a line on the page that names the model or the folder.
    """
    prompts = FileEmbeddings(bench.judges.voices)
    rows: list[Row] = []
    targets: list[Row] = []
    for item in items:
        rows.append(_tts_row(item, clips[item.id], prompts, bench))
        bench.advance(item.id)
        if item.target is not None:
            targets.append(_tts_row(item, item.request().clip(item.target), prompts, bench))
            bench.advance(f"{item.id} · real")
    sets = {"generated": rows, **({"real": targets} if targets else {})}
    result: dict[str, Any] = {
        "suite": "tts",
        "judges": judge_names(bench),
        "language": bench.form.language,
        **{name: _summarize_clip_rows(set_rows, bench) for name, set_rows in sets.items()},
    }
    return SuiteResult(
        "Text to speech",
        [line for line in (about, judged_by(bench)) if line],
        result,
        [error_rows({name: result[name]["words"] for name in sets}), *_similarity_table(result, sets)],
        [_clip_example(row, item) for row, item in sorted(zip(rows, items, strict=True), key=_clip_badness)],
        [
            (row["id"], reason)
            for row in rows
            for reason in (row["errors"], row["similarity"])
            if _is_failure(reason)
        ],
        [{**row, "set": name} for name, set_rows in sets.items() for row in set_rows],
        tiles=[
            figure
            for name in sets
            for figure in share_tiles(
                f"{result[name]['words']['unit']} errors, {name}", result[name]["words"], "rate"
            )
        ],
    )


def judge_names(bench: Bench) -> dict[str, str | None]:
    """The judges' names, for results.json."""
    return {
        "recognizer": bench.judges.recognizer.name if bench.judges.recognizer else None,
        "voices": bench.judges.voices.name if bench.judges.voices else None,
    }


def judged_by(bench: Bench) -> str:
    """The judges and the text form in one line, for the page."""
    names = judge_names(bench)
    return (
        f"words: {names['recognizer'] or 'no judge'} (form {bench.form.name}, {bench.form.language}, by "
        f"{bench.form.unit}s) · likeness: {names['voices'] or 'no judge'}"
    )


def error_rows(tables: Mapping[str, Mapping[str, Any]]) -> ScoreTable:
    """Word errors of several sets of clips."""
    unit = next(iter(tables.values()))["unit"]
    rows = []
    for name, table in tables.items():
        edits = "/".join(str(table[kind]) for kind in ("substitutions", "insertions", "deletions"))
        with_missing = table["rate_with_missing"]
        rates = [percent(table["utterance_mean"]), with_interval(table, "rate", 2)]
        rates.append("" if with_missing is None else percent(with_missing))
        counts = [str(table["units"]), percent(table["above_half"], 0), str(table["n"]), not_available(table)]
        rows.append([name, *rates, edits, *counts])
    note = (
        "Mean of the utterances' own rates, which Seed-TTS-eval publishes, and all errors over all "
        f"{unit}s, with the interval of utterances drawn anew (bootstrap). Edits: substitutions/insertions/deletions."
    )
    last = [f"{unit}s", ">½ wrong", "n", "n/a"]
    headings = ["", "mean ↓", "corpus ↓ (95 %)", "missing as deleted", "edits", *last]
    return ScoreTable(f"{unit} errors", headings, rows, " ".join([note, reasons_of(tables.values())]).strip())


def _parse_speech_item(fields: list[str], folder: Path, where: str) -> SpeechItem:
    if len(fields) in (4, 5):
        name, prompt_text, prompt, text = fields[:4]
        target = folder / fields[4] if len(fields) == 5 and fields[4] else None
        return SpeechItem(_strip_wav(name), text, folder / prompt, prompt_text or None, target)
    if len(fields) == 3:
        name, text, prompt = fields
        return SpeechItem(_strip_wav(name), text, folder / prompt)
    if len(fields) == 2:
        return SpeechItem(_strip_wav(fields[0]), fields[1])
    raise ConfigError(
        f"{len(fields)} fields",
        where,
        "a line is name|prompt text|prompt wav|text, with |target wav if there is one",
    )


def _strip_wav(field: str) -> str:
    return field.removesuffix(".wav")


def _tts_row(item: SpeechItem, clip: SpeechClip, prompts: FileEmbeddings, bench: Bench) -> Row:
    about = {"id": item.id, "text": item.text, "path": str(clip.path) if clip.path else None}
    nothing = {**about, "heard": None, "missing": True}
    if clip.path is None:
        return {**nothing, "errors": clip.problem, "similarity": clip.problem}
    try:
        prompt = digest(item.prompt) if item.prompt else None
        content = [bench.form.name, bench.form.language, item.text, digest(clip.path), prompt]
    except MetricError as error:
        return {**nothing, "errors": error.reason, "similarity": error.reason}
    depends_on = ["tts", VERSION, bench.fingerprint, *content]
    earlier_row = bench.store.get(*depends_on)
    if earlier_row is not None:
        bench.judges.note_earlier_answers()
        return {**earlier_row, **about}
    failed_before = failed_calls()
    judged = bench.judges.judge(clip, embedded=item.prompt is not None)
    if judged.problem:
        return {**nothing, "errors": judged.problem, "similarity": judged.problem}
    row = {**about, "duration_s": judged.duration_s, **word_errors(judged, item.text, bench.form)}
    try:
        if item.prompt is None:
            raise MetricError("no prompt")
        row["similarity"] = cosine(prompts.of(item.prompt), value_of(judged.embedding))
    except MetricError as error:
        row["similarity"] = error.reason
    if failed_calls() == failed_before:  # else the next run asks again
        bench.store.add(row, *depends_on)
    return row


def _summarize_clip_rows(rows: Sequence[Row], bench: Bench) -> dict[str, Any]:
    return {
        "clips": len(rows),
        "words": error_summary(rows, bench.form),
        "similarity": metric_table([row["similarity"] for row in rows]),
    }


def _similarity_table(result: Mapping[str, Any], names: Mapping[str, Any]) -> list[ScoreTable]:
    rows = [[name, *metric_cells(result[name]["similarity"])] for name in names]
    return [
        ScoreTable("speaker similarity to the prompt ↑ (cosine)", ["", "mean", "median", "n", "n/a"], rows)
    ]


def _clip_badness(pair: tuple[Row, SpeechItem]) -> tuple[float, float]:
    similarity = pair[0]["similarity"]
    return -rate_of(pair[0]), similarity if isinstance(similarity, float) else 0.0


def _clip_example(row: Row, item: SpeechItem) -> Example:
    errors, similarity = row["errors"], row["similarity"]
    wrong = errors if isinstance(errors, str) else f"{rate_of(row):.0%} wrong"
    like = f"{similarity:.3f}" if isinstance(similarity, float) else similarity
    sounds = [Sound("generated", Path(row["path"]))] if row["path"] else []
    sounds += [Sound("prompt", item.prompt)] if item.prompt else []
    sounds += [Sound("real", item.target)] if item.target else []
    lines = [
        ("asked", item.text),
        ("heard", row["heard"] or "(nothing)"),
        ("words", wrong),
        ("similarity", like),
    ]
    return Example(item.id, lines, sounds)


def _is_failure(reason: object) -> bool:
    return isinstance(reason, str) and reason not in ("no judge given", "no prompt")
