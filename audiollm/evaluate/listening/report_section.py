"""The section on answers: word errors, right answers and cases with sound, for every stage `evaluate_listening`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup

from audiollm.evaluate.report.statistics import confusion, share, shares_by
from audiollm.pages.blocks import (
    StagePart,
    bold,
    card,
    cards,
    clip,
    confusion_table,
    details,
    heading,
    join,
    lines,
    mark,
    note,
    notice,
    score_cell,
    stage_parts,
    table,
)  # fmt: skip
from audiollm.pages.clips import Gallery, PageClip
from audiollm.pages.formats import percent_or_dash
from audiollm.pages.page import Section, Tile
from audiollm.pages.run_record import Row, StageRecord, pick_evenly
from audiollm.pages.sections import ReportContext
from audiollm.pages.stage_parts import allot

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
MAX_TILED_STAGES = 6
"""Stages that have a tile each; of more, the best one has."""
_ASR, _CHOICE = "asr", "audio-qa"


def answers_section(context: ReportContext) -> Section | None:
    """Every stage `evaluate_listening` in the order of the recipe."""
    stages = context.stages("evaluate_listening")
    if not stages:
        return None
    counts = allot(CASES_SHOWN, [stage for stage in stages if not stage.absent])
    # the last first: where the page has its fill of sound, that of the earlier ones is left out
    parts = [_listening_part(stage, context.gallery, counts.get(stage.name, 0)) for stage in reversed(stages)]
    return Section("answers", "Answers", stage_parts(parts[::-1]), tiles=_answer_tiles(stages))


def _listening_part(stage: StageRecord, gallery: Gallery, count: int) -> StagePart:
    if stage.absent:
        return StagePart(stage.name, stage.absent, stage.absent, notice(stage.absent))
    asr_figures, choice_figures = (stage.json(f"{suite}/results.json") for suite in (_ASR, _CHOICE))
    rows_by_suite = {suite: stage.rows(f"{suite}/rows.jsonl") for suite in (_ASR, _CHOICE)}
    recordings = _load_questions(
        stage, {str(row.get("id")) for rows in rows_by_suite.values() for row in rows}
    )
    transcripts = [_transcript(row, recordings) for row in rows_by_suite[_ASR]]
    choices = [_choice(row, recordings) for row in rows_by_suite[_CHOICE] if not row.get("left_out")]
    words = sorted(asr_figures["words"].items()) if isinstance(asr_figures, dict) else []
    scores = choice_figures if isinstance(choice_figures, dict) else None
    brief = [
        f"word error rate {percent_or_dash(table.get('rate'))} ({language})" for language, table in words
    ]
    if scores is not None:
        brief.append(
            f"{percent_or_dash(scores['accuracy'])} right, chance {percent_or_dash(scores['chance'])}"
        )
    content = join(
        words and _word_errors(words),
        scores and _choices(scores, choices),
        _cases([*transcripts, *choices], count, gallery),
    )
    return StagePart(stage.name, "", " · ".join(brief), content)


def _word_errors(words: Sequence[tuple[str, Row]]) -> Markup:
    rows, missing = [], []
    for language, errors in words:
        low, high = errors.get("low"), errors.get("high")
        interval = "–" if low is None else f"{percent_or_dash(low)} to {percent_or_dash(high)}"
        total = f"{errors['units']:,} {errors['unit']}s"
        rows.append(
            (language, bold(percent_or_dash(errors.get("rate"))), interval, f"{errors['n']:,}", total)
        )
        if errors.get("missing"):
            rate = percent_or_dash(errors.get("rate_with_missing"))
            text = f"{errors['missing']:,} recordings have no answer; with these counted as wrong {rate}."
            missing.append(note(f"{language}: {text}"))
    headings = ("language", "errors", "95 %", "recordings", "in all")
    return join(heading("What is said, written down"), table(headings, rows), missing)


def _choices(scores: Row, choices: Sequence[Row]) -> Markup:
    """Right answers by question, and what was answered in place of what."""
    questions = group_by_question(choices)
    shown = questions[:QUESTIONS_SHOWN]
    total = ("all questions", score_cell(scores), percent_or_dash(scores["chance"]))
    rows = [] if len(shown) == 1 else [total]
    rows += [(row["question"], score_cell(row["score"]), percent_or_dash(row["chance"])) for row in shown]
    about = [
        "The options of a question are its own, or the answers that the samples give to it. Intervals: 95 %, Wilson.",
        f"{percent_or_dash(scores['no_usable_answer'])} of the answers name no option, or several.",
    ]
    if scores["left_out"]:
        about.append(f"{scores['left_out']:,} are left out: the recording cannot be heard.")
    if len(questions) > len(shown):
        about.append(f"{len(questions) - len(shown):,} more questions are in audio-qa/rows.jsonl.")
    is_unlisted = scores["n"] > 0 and not choices
    return join(
        heading("Answers to choose from"),
        table(("question", "right", "chance"), rows, "scores"),
        note(" ".join(about)),
        [_answers_given(row, is_open=place == 0) for place, row in enumerate(shown)],
        notice("Its cases are not listed: audio-qa/rows.jsonl has none.") if is_unlisted else None,
    )


def _answers_given(row: Row, is_open: bool) -> Markup | None:
    """A confusion matrix; or shares of right answers, where answers are many or name no option."""
    cases = row["cases"]
    if not cases:
        return None
    references = [case["asked"] for case in cases]
    named = [str(case["named"]) if case["named"] is not None else "" for case in cases]
    labels = sorted({*references, *filter(None, named)})
    if len(labels) <= MATRIX_ANSWERS and any(named):
        counts = confusion(references, named, labels)
        matrix = confusion_table({**counts, "heard": [*labels, "(none or several)"]}, "answered")
        return details(f"What was answered in place of what: {row['question']}", matrix, is_open=is_open)
    shares = shares_by(references, [case["right"] for case in cases])
    answers = [(answer, score_cell(values)) for answer, values in shares.items()]
    more = len(answers) - ANSWERS_SHOWN
    return details(
        f"By answer: {row['question']}",
        table(("answer asked for", "right"), answers[:ANSWERS_SHOWN], "scores"),
        note(f"And {more:,} more.") if more > 0 else None,
        is_open=is_open,
    )


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


def _cases(rows: Sequence[Row], count: int, gallery: Gallery) -> Markup | None:
    """Wrong ones first, evenly over questions and asked-for answers; of the right ones, where there are, a quarter."""
    wrong, right = [row for row in rows if not row["right"]], [row for row in rows if row["right"]]
    keys = ("question", "asked")
    num_wrong = min(len(wrong), count - min(len(right), count // 4))
    selected_rows = [wrong[index] for index in pick_evenly(wrong, num_wrong, keys)]
    selected_rows += [right[index] for index in pick_evenly(right, count - num_wrong, keys, selected_rows)]
    if not selected_rows:
        return None
    about = f"{len(wrong):,} of {len(rows):,} are wrong" + ("; wrong ones first" if wrong else "")
    listed = cards(_case_card(row, gallery) for row in selected_rows)
    return join(heading("Some of the answers", about), listed)


def _case_card(row: Row, gallery: Gallery) -> Markup:
    answered = f"answered “{row['answered']}”" if row["answered"] else "answered nothing"
    return card(
        row["question"],
        clip(_embed_recording(row["recording"], gallery), f"{row['asked']}, {row['id']}"),
        lines(
            f"asked for “{row['asked']}”", [mark(row["right"]), " ", answered], row["problem"], file=row["id"]
        ),
        badge="" if row["right"] else "✗ wrong",
    )


def _embed_recording(audio_part: AudioPart | None, gallery: Gallery) -> PageClip:
    if audio_part is None:
        return PageClip(problem="its sample is no longer there")
    return gallery.clip(Path(audio_part.path), audio_part.start_s, audio_part.end_s)


def _load_questions(stage: StageRecord, ids: Iterable[str]) -> QuestionsById:
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


def group_by_question(rows: Sequence[Row]) -> list[Row]:
    """Cases, score and chance of each question, the most frequent first.

    Of questions that are nearly all different, as those that list their own options, it is that of each domain (`task`)
    and of each difficulty.
    """
    different = len({row["question"] for row in rows})
    if different == 1 or different * MIN_SAME <= len(rows) or not all(row["task"] for row in rows):
        return _group_by(rows, "question")
    levels = [{**row, "cases": []} for row in _group_by(rows, "difficulty")]
    return [*_group_by(rows, "task"), *(row for row in levels if row["question"] not in ("", "(unknown)"))]


def _group_by(rows: Sequence[Row], key: str) -> list[Row]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[key], []).append(row)
    return [
        {
            "question": name,
            "cases": group,
            "score": share([row["right"] for row in group]),
            "chance": sum(1 / row["options"] for row in group if row["options"]) / len(group),
        }
        for name, group in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    ]


# ------------------------------------------------------------------------------------------------- tiles


def _answer_tiles(stages: Sequence[StageRecord]) -> list[Tile]:
    """Right answers beside chance, and word errors by language; of many stages, the right answers of the best."""
    if len(stages) <= MAX_TILED_STAGES:
        return [
            tile
            for stage in stages
            for tile in _stage_tiles(stage.figures or {}, f"{stage.name}: " if len(stages) > 1 else "")
        ]
    scored = [
        (stage.name, figures)
        for stage in stages
        if (figures := stage.figures or {}).get("accuracy") is not None
    ]
    if not scored:
        return []
    name, figures = max(scored, key=lambda pair: pair[1]["accuracy"])
    tile = _stage_tiles(figures, "")[0]
    return [Tile(tile.value, f"right answers, the best of {len(scored)}", f"{name}: {tile.note}")]


def _stage_tiles(figures: Row, before: str) -> list[Tile]:
    tiles = []
    if figures.get("accuracy") is not None:
        interval = f"{percent_or_dash(figures.get('low'))} to {percent_or_dash(figures.get('high'))}"
        chance = percent_or_dash(figures.get("chance"))
        about = f"{figures.get('questions') or 0:,} questions: {interval}; chance {chance}"
        tiles.append(Tile(percent_or_dash(figures["accuracy"]), f"{before}right answers", about))
    rates = {name: rate for name, rate in (figures.get("error_rate") or {}).items() if rate is not None}
    for language, rate in rates.items():
        about = f"{language}: {figures.get('recordings') or 0:,} recordings" if len(rates) == 1 else language
        tiles.append(Tile(percent_or_dash(rate), f"{before}word error rate", about))
    return tiles
