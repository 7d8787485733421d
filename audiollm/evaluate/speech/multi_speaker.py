"""Suite `multi-speaker`: are the words of a dialogue heard, does each speaker stay the same, do they differ?

Higgs Audio V2 reports "the geometric mean between intra-speaker similarity and inter-speaker dis-similarity"; its
script is not public. Here, with s(i, j) the cosine of a speaker model's embeddings of turns i and j of one dialogue:

    within  = mean of s(i, j) over all pairs of turns of the same speaker
    between = mean of 1 - s(i, j) over all pairs of turns of different speakers
    score   = sqrt(max(within, 0) * between)

each for a dialogue, and its mean over the dialogues that have both.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import Any

from torch import Tensor

from audiollm.evaluate.judges.judging import (
    FileEmbeddings,
    JudgedClip,
    SpeechClip,
    cosine,
    digest,
    value_of,
)
from audiollm.evaluate.report.metric_error import MetricError
from audiollm.evaluate.report.statistics import metric_table, share
from audiollm.evaluate.report.store import Row
from audiollm.evaluate.report.suite import (
    Example,
    ScoreTable,
    Sound,
    SuiteResult,
    metric_cells,
    reasons_of,
    share_tiles,
)
from audiollm.evaluate.speech.dialogues import Dialogue
from audiollm.evaluate.speech.scoring import Bench, error_summary, rate_of, transcript_errors, word_errors
from audiollm.evaluate.speech.tts import error_rows, judge_names, judged_by
from audiollm.failures import failed_calls
from audiollm.pages.formats import with_interval

VERSION = 1
SCORES = {
    "within": "within-speaker similarity ↑",
    "between": "between-speaker dissimilarity ↑",
    "score": "geometric mean of both ↑",
    "reference_similarity": "similarity to the own reference ↑",
}


def evaluate_dialogues(
    dialogues: Sequence[Dialogue], bench: Bench, about: str = "", problems: Mapping[str, str] | None = None
) -> SuiteResult:
    """Judge every turn of every dialogue.

    Args:
        problems: by the dialogues' ids, why a model did not speak them.
    """
    rows: list[Row] = []
    for dialogue in dialogues:
        rows.append(_dialogue_row(dialogue, bench, (problems or {}).get(dialogue.id, "")))
        bench.advance(dialogue.id)
    words = error_summary(rows, bench.form)
    scores = {name: metric_table([row[name] for row in rows]) for name in SCORES}
    nearest = share([right for row in rows for right in row["nearest_reference"]])
    result = {
        "suite": "multi-speaker",
        "judges": judge_names(bench),
        "language": bench.form.language,
        "dialogues": len(rows),
        "turns": sum(len(dialogue.turns) for dialogue in dialogues),
        "words": words,
        **scores,
        "nearest_reference": nearest,
    }
    cells = [[SCORES[name], *metric_cells(scores[name])] for name in SCORES]
    note = f"Turns nearer to their own speaker's reference than to another's: {with_interval(nearest, 'accuracy')}. "
    note += reasons_of(scores.values())
    return SuiteResult(
        "Dialogues",
        [line for line in (about, judged_by(bench)) if line],
        result,
        [
            error_rows({"dialogues": words}),
            ScoreTable(
                "voices (cosine), a value a dialogue", ["", "mean", "median", "n", "n/a"], cells, note
            ),
        ],
        [
            _dialogue_example(row, dialogue)
            for row, dialogue in sorted(zip(rows, dialogues, strict=True), key=_dialogue_badness)
        ],
        [
            (row["id"], row[key])
            for row in rows
            for key in ("errors", "within", "between")
            if _is_failure(row[key])
        ],
        rows,
        tiles=[
            *share_tiles(f"{words['unit']} errors", words, "rate"),
            *share_tiles("turns nearest to their own voice", nearest),
        ],
    )


def voice_scores(embeddings: Sequence[Tensor | None], speakers: Sequence[str]) -> dict[str, float | str]:
    """`within`, `between` and `score` of one dialogue, or the reason why there is none.

    Args:
        embeddings: `[D]` of each turn; None where there is none: its pairs are left out.
    """
    embedded = [(e_D, name) for e_D, name in zip(embeddings, speakers, strict=True) if e_D is not None]
    same = [cosine(a, b) for (a, name), (b, other_name) in combinations(embedded, 2) if name == other_name]
    differing = [
        1 - cosine(a, b) for (a, name), (b, other_name) in combinations(embedded, 2) if name != other_name
    ]
    within: float | str = sum(same) / len(same) if same else "no speaker with two turns"
    between: float | str = sum(differing) / len(differing) if differing else "only one speaker"
    if isinstance(within, str) or isinstance(between, str):
        return {"within": within, "between": between, "score": "within or between has no value"}
    return {"within": within, "between": between, "score": math.sqrt(max(within, 0.0) * max(between, 0.0))}


# ------------------------------------------------------------------------------------------------ private


def _dialogue_row(dialogue: Dialogue, bench: Bench, problem: str) -> Row:
    about = {"id": dialogue.id, "text": dialogue.text}
    try:
        if problem:
            raise MetricError(problem)
        depends_on = ["multi-speaker", VERSION, bench.fingerprint, *_dialogue_inputs(dialogue, bench)]
        earlier_row = bench.store.get(*depends_on)
        if earlier_row is not None:
            bench.judges.note_earlier_answers()
            return {**earlier_row, **about}
        failed_before = failed_calls()
        turns = _judged_turns(dialogue, bench)
        words = _score_words(dialogue, turns, bench)
    except MetricError as error:
        empty = {**dict.fromkeys(SCORES, error.reason), "nearest_reference": [], "turns": []}
        return {**about, "heard": None, "errors": error.reason, "missing": True, **empty}
    row = {**about, **words, **_score_voices(dialogue, turns, bench)}
    if failed_calls() == failed_before:  # else the next run asks again
        bench.store.add(row, *depends_on)
    return row


def _dialogue_inputs(dialogue: Dialogue, bench: Bench) -> list[Any]:
    """The inputs of a row: contents of files, spans, speakers and texts."""
    audio_digest = digest(dialogue.audio) if dialogue.audio else None
    turns = [
        [t.speaker, t.text, t.start_s, t.end_s, digest(t.audio) if t.audio else None] for t in dialogue.turns
    ]
    references = {name: digest(voice.audio) for name, voice in sorted(dialogue.references.items())}
    return [bench.form.name, bench.form.language, audio_digest, turns, references]


def _judged_turns(dialogue: Dialogue, bench: Bench) -> list[JudgedClip] | None:
    """Each turn as judged; None where only the whole dialogue can be heard: the times of the turns are not known.

    Raises:
        MetricError: there is no sound, or a turn cannot be heard.
    """
    clips = _turn_clips(dialogue)
    if clips is None:
        return None
    turns = []
    for clip in clips:
        turns.append(bench.judges.judge(clip))
        if turns[-1].problem:
            raise MetricError(turns[-1].problem)
    return turns


def _turn_clips(dialogue: Dialogue) -> list[SpeechClip] | None:
    id, turns = dialogue.id, dialogue.turns
    if all(turn.audio is not None for turn in turns):
        return [SpeechClip(id, t.text, t.audio, start_s=t.start_s or 0.0, end_s=t.end_s) for t in turns]
    if dialogue.audio is None:
        raise MetricError("no sound")
    if any(turn.start_s is None or turn.end_s is None for turn in turns):
        return None
    return [SpeechClip(id, t.text, dialogue.audio, start_s=t.start_s or 0.0, end_s=t.end_s) for t in turns]


def _score_words(dialogue: Dialogue, turns: Sequence[JudgedClip] | None, bench: Bench) -> dict[str, Any]:
    """The dialogue's errors: those of its turns, heard one by one and joined, or of the whole."""
    if turns is None:
        judged_dialogue = bench.judges.judge(
            SpeechClip(dialogue.id, dialogue.text, dialogue.audio), embedded=False
        )
        return {**word_errors(judged_dialogue, dialogue.text, bench.form), "turns": []}
    turn_rows = [
        word_errors(judged, turn.text, bench.form) for judged, turn in zip(turns, dialogue.turns, strict=True)
    ]
    missing = [turn_row["errors"] for turn_row in turn_rows if turn_row["heard"] is None]
    joined = " ".join(str(turn_row["heard"]) for turn_row in turn_rows)
    errors: dict[str, int] | str
    if missing:
        errors = missing[0]
    else:
        errors = _sum_turn_errors([turn_row["errors"] for turn_row in turn_rows]) or transcript_errors(
            dialogue.text, joined, bench.form
        )
    row = {"heard": joined if not missing else None, "errors": errors, "turns": turn_rows}
    return {**row, "missing": True} if any(turn_row.get("missing") for turn_row in turn_rows) else row


def _sum_turn_errors(errors: Sequence[dict[str, int] | str]) -> dict[str, int] | None:
    """The errors of all turns together; None where a turn's text has no words of its own."""
    total: Counter[str] = Counter()
    for turn_errors in errors:
        if isinstance(turn_errors, str):
            return None
        total.update(turn_errors)
    return dict(total)


def _score_voices(dialogue: Dialogue, turns: Sequence[JudgedClip] | None, bench: Bench) -> dict[str, Any]:
    nothing: dict[str, Any] = {"nearest_reference": []}
    if bench.judges.voices is None:
        return {**dict.fromkeys(SCORES, "no judge given"), **nothing}
    if turns is None:
        return {**dict.fromkeys(SCORES, "no times of the turns"), **nothing}
    embeddings, problems = _collect_embeddings([partial(value_of, turn.embedding) for turn in turns])
    speakers = [turn.speaker for turn in dialogue.turns]
    scores = voice_scores(embeddings, speakers)
    if problems and any(isinstance(scores[name], str) for name in ("within", "between")):
        scores = {name: value if isinstance(value, float) else problems[0] for name, value in scores.items()}
    files = FileEmbeddings(bench.judges.voices)
    references_D, problems_of_references = _collect_embeddings(
        [partial(files.of, voice.audio) for voice in dialogue.references.values()]
    )
    reference_by_speaker = {
        name: e_D for name, e_D in zip(dialogue.references, references_D, strict=True) if e_D is not None
    }
    likeness: list[float] = []
    nearest: list[bool] = []
    for e_D, name in zip(embeddings, speakers, strict=True):
        if e_D is None or name not in reference_by_speaker:
            continue
        similarity_to_own = cosine(e_D, reference_by_speaker[name])
        likeness.append(similarity_to_own)
        if len(reference_by_speaker) > 1:
            nearest.append(
                all(
                    similarity_to_own > cosine(e_D, r_D)
                    for other_name, r_D in reference_by_speaker.items()
                    if other_name != name
                )
            )
    reason = problems_of_references[0] if problems_of_references else "no reference"
    similarity: float | str = sum(likeness) / len(likeness) if likeness else reason
    return {**scores, "reference_similarity": similarity, "nearest_reference": nearest}


def _collect_embeddings(sources: Sequence[Callable[[], Tensor]]) -> tuple[list[Tensor | None], list[str]]:
    """The embedding `[D]` of each source, or None; and the reasons for the missing ones."""
    embeddings: list[Tensor | None] = []
    problems: list[str] = []
    for source in sources:
        try:
            embeddings.append(source())
        except MetricError as error:
            embeddings.append(None)
            problems.append(error.reason)
    return embeddings, problems


def _dialogue_badness(pair: tuple[Row, Dialogue]) -> tuple[float, float]:
    score = pair[0]["score"]
    return -rate_of(pair[0]), score if isinstance(score, float) else 0.0


def _dialogue_example(row: Row, dialogue: Dialogue) -> Example:
    lines = [(f"{turn.speaker}:", turn.text) for turn in dialogue.turns]
    lines.append(("heard", row["heard"] or "(nothing)"))
    for name in ("within", "between", "score"):
        value = row[name]
        lines.append((name, f"{value:.3f}" if isinstance(value, float) else str(value)))
    sounds = [Sound("the dialogue", dialogue.audio)] if dialogue.audio else []
    sounds += [
        Sound(f"{t.speaker}: {t.text[:30]}", t.audio, t.start_s or 0.0, t.end_s)
        for t in dialogue.turns
        if t.audio
    ]
    return Example(dialogue.id, lines, sounds)


def _is_failure(reason: object) -> bool:
    return isinstance(reason, str) and reason != "no judge given"
