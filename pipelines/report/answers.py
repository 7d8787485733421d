"""The section on answers: word errors, right answers and cases with sound, for every stage `evaluate_listening`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from audiollm.evaluate.report.clips import Gallery, PageClip, shares
from audiollm.evaluate.report.formats import percent_or_dash
from pipelines.report.material import Material, Row, Trace, pick_evenly
from pipelines.report.scores import heat

if TYPE_CHECKING:
    from audiollm.data.records.sample import AudioPart

    QuestionsById = Mapping[str, tuple[str, AudioPart]]
    """Question and recording by the id of the sample."""

CASES_SHOWN = 12
"""Answers shown, over all stages together."""
QUESTIONS_SHOWN = 30
MIN_SAME = 3
"""Answers to the same question, on average, from which on the table has a row for each question."""
MATRIX_ANSWERS = 12
"""Most answers of a question for which a confusion matrix is shown."""
ANSWERS_SHOWN = 40
_ASR, _CHOICE = "asr", "audio-qa"


def answers_section(material: Material, gallery: Gallery) -> Row:
    """Every stage `evaluate_listening` in the order of the recipe; `absent` where it has none."""
    stages = material.stages("evaluate_listening")
    done = [stage.name for stage in stages if not stage.absent]
    counts = dict(zip(done, shares(CASES_SHOWN, len(done)), strict=True))
    # the last first: where the page has its fill of sound, that of the earlier ones is left out
    sections = [
        _build_listening_stage(stage, gallery, counts.get(stage.name, 0)) for stage in reversed(stages)
    ]
    return {
        "absent": "" if stages else "This recipe has no stage evaluate_listening.",
        "stages": sections[::-1],
    }


def _build_listening_stage(stage: Trace, gallery: Gallery, count: int) -> Row:
    if stage.absent:
        return {"name": stage.name, "absent": stage.absent, "brief": stage.absent}
    asr_figures, choice_figures = (stage.json(f"{suite}/results.json") for suite in (_ASR, _CHOICE))
    rows_by_suite = {suite: stage.rows(f"{suite}/rows.jsonl") for suite in (_ASR, _CHOICE)}
    recordings = _load_questions(
        stage, {str(row.get("id")) for rows in rows_by_suite.values() for row in rows}
    )
    transcripts = [_transcript(row, recordings) for row in rows_by_suite[_ASR]]
    choices = [_choice(row, recordings) for row in rows_by_suite[_CHOICE] if not row.get("left_out")]
    words = (
        [_build_word_errors_row(*item) for item in sorted(asr_figures["words"].items())]
        if isinstance(asr_figures, dict)
        else []
    )
    score = choice_figures if isinstance(choice_figures, dict) else None
    by_question = _by_question(choices)
    return {
        "name": stage.name,
        "absent": "",
        "brief": _brief(words, score),
        "words": words,
        "score": score,
        "questions": by_question[:QUESTIONS_SHOWN],
        "more_questions": max(0, len(by_question) - QUESTIONS_SHOWN),
        "unlisted": score is not None and score["n"] > 0 and not choices,
        "cases": _cases([*transcripts, *choices], count, gallery),
        "wrong": sum(not row["right"] for row in (*transcripts, *choices)),
        "total": len(transcripts) + len(choices),
    }


def _brief(words: Sequence[Row], score: Row | None) -> str:
    parts = [f"word error rate {percent_or_dash(row['rate'])} ({row['language']})" for row in words]
    if score is not None:
        parts.append(f"{percent_or_dash(score['accuracy'])} right, chance {percent_or_dash(score['chance'])}")
    return " · ".join(parts)


def _build_word_errors_row(language: str, table: Row) -> Row:
    keys = ("rate", "low", "high", "n", "units", "unit", "rate_with_missing", "missing")
    return {"language": language, **{key: table.get(key) for key in keys}}


# ------------------------------------------------------------------------------------------------- cases


def _transcript(row: Row, recordings: QuestionsById) -> Row:
    """A case from the rows of `asr`: right if no word is wrong."""
    errors = row.get("errors")
    counts = errors if isinstance(errors, dict) else {}
    return {
        **_common(row, recordings),
        "asked": str(row.get("text")),
        "answered": row.get("heard"),
        "right": bool(counts)
        and not any(counts[kind] for kind in ("substitutions", "insertions", "deletions")),
        "problem": errors if isinstance(errors, str) else "",
    }


def _choice(row: Row, recordings: QuestionsById) -> Row:
    """A case from the rows of `audio-qa`, with the option that the reply names, if it names one."""
    return {
        **_common(row, recordings),
        "asked": str(row.get("answer")),
        "answered": row.get("reply"),
        "named": row.get("named"),
        "options": row.get("choices") or 0,
        "task": str(row.get("task") or ""),
        "difficulty": str(row.get("difficulty") or ""),
        "right": row.get("right") is True,
        "problem": row.get("problem") or "",
    }


def _common(row: Row, recordings: QuestionsById) -> Row:
    id = str(row.get("id"))
    question, audio_part = recordings.get(id, ("", None))
    return {"id": id, "question": row.get("question") or question, "recording": audio_part}


def _cases(rows: Sequence[Row], count: int, gallery: Gallery) -> list[Row]:
    """Wrong ones first, evenly over questions and asked-for answers; of the right ones, where there are, a quarter."""
    wrong, right = [row for row in rows if not row["right"]], [row for row in rows if row["right"]]
    keys = ("question", "asked")
    num_wrong = min(len(wrong), count - min(len(right), count // 4))
    selected_rows = [wrong[index] for index in pick_evenly(wrong, num_wrong, keys)]
    selected_rows += [right[index] for index in pick_evenly(right, count - num_wrong, keys, selected_rows)]
    return [{**row, "clip": _embed_recording(row["recording"], gallery)} for row in selected_rows]


def _embed_recording(audio_part: AudioPart | None, gallery: Gallery) -> PageClip:
    if audio_part is None:
        return PageClip(problem="its sample is no longer there")
    return gallery.clip(Path(audio_part.path), audio_part.start_s, audio_part.end_s)


def _load_questions(stage: Trace, ids: Iterable[str]) -> QuestionsById:
    """Recordings and questions of the samples that the stage read, as far as they still exist."""
    from audiollm.data.records.manifest import Manifest
    from audiollm.data.records.storage import audio_address
    from audiollm.errors import BadSample, ConfigError

    path = Path(str(stage.result.settings.get("samples"))) if stage.result is not None else Path()
    remaining_ids = set(ids)
    recordings: dict[str, tuple[str, AudioPart]] = {}
    try:
        manifest = Manifest(path)
    except ConfigError:
        return {}
    for index in range(len(manifest)):
        if not remaining_ids:
            break
        try:
            sample = manifest[index]
        except BadSample:
            continue
        input_audio = sample.audio("user")
        if sample.id in remaining_ids and input_audio:
            remaining_ids.discard(sample.id)
            address = audio_address(str(path.parent), input_audio[0].path)
            recordings[sample.id] = (
                " ".join(sample.texts("user")),
                input_audio[0].model_copy(update={"path": address}),
            )
    return recordings


# ------------------------------------------------------------------------------------------------ tables


def _by_question(rows: Sequence[Row]) -> list[Row]:
    """Score, chance and given answers of each question, the most frequent first.

    Of questions that are nearly all different, as those that list their own options, it is that of each domain (`task`)
    and of each difficulty.
    """
    different = len({row["question"] for row in rows})
    if different == 1 or different * MIN_SAME <= len(rows) or not all(row["task"] for row in rows):
        return _group_scores_by(rows, "question")
    levels = [{**row, "matrix": None, "answers": []} for row in _group_scores_by(rows, "difficulty")]
    return [
        *_group_scores_by(rows, "task"),
        *(row for row in levels if row["question"] not in ("", "(unknown)")),
    ]


def _group_scores_by(rows: Sequence[Row], key: str) -> list[Row]:
    """Score, chance and given answers of the rows that share the value of a key, by that value."""
    from audiollm.evaluate.report.statistics import share

    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[key], []).append(row)
    return [
        {
            "question": name,
            "cell": _format_share_cell(share([row["right"] for row in group])),
            "chance": sum(1 / row["options"] for row in group if row["options"]) / len(group),
            **_by_answer(group),
        }
        for name, group in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    ]


def _by_answer(rows: Sequence[Row]) -> Row:
    """A confusion matrix; or shares of right answers, where answers are many or name no option."""
    from audiollm.evaluate.report.statistics import confusion, shares_by

    references = [row["asked"] for row in rows]
    named = [str(row["named"]) if row["named"] is not None else "" for row in rows]
    labels = sorted({*references, *filter(None, named)})
    if len(labels) <= MATRIX_ANSWERS and any(named):
        counts = confusion(references, named, labels)
        matrix = heat({**counts, "heard": [*labels, "(none or several)"]})
        return {"matrix": matrix, "answers": [], "more_answers": 0}
    table = shares_by(references, [row["right"] for row in rows])
    cells = [(answer, _format_share_cell(values)) for answer, values in table.items()]
    return {
        "matrix": None,
        "answers": cells[:ANSWERS_SHOWN],
        "more_answers": max(0, len(cells) - ANSWERS_SHOWN),
    }


def _format_share_cell(table: Row) -> Row:
    """A share with its interval, as the page's tables expect it."""
    return {"value": table["accuracy"], **{key: table[key] for key in ("low", "high", "n")}}
