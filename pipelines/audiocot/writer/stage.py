"""The stage `evaluate_thoughts`: what a model writes about clips, regions and instructions, beside the truth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from audiollm.recipe.runner import Context
from audiollm.recipe.stages import Stage, StagePlan
from pipelines.audiocot.writer.settings import EvaluateThoughtsConfig

if TYPE_CHECKING:
    from audiollm.evaluate.report.suite import Example, SuiteResult
    from pipelines.audiocot.writer.answering import ThoughtQuestion
    from pipelines.audiocot.writer.scores import AnswerScore

TITLES = {"clip": "the CoT of a clip", "region": "the CoT of an object", "instruction": "an instruction"}


def run_evaluate_thoughts(config: EvaluateThoughtsConfig, context: Context) -> dict[str, Any]:
    """Write results.json, rows.jsonl and report.html.

    Raises:
        StageError: there are no questions.
        ConfigError: the model cannot be used.
    """
    from audiollm.evaluate.report.suite import conclude
    from pipelines.audiocot.writer.answering import ThoughtWriter, read_thought_questions
    from pipelines.audiocot.writer.scores import score_answer

    questions = read_thought_questions(config)
    writer = ThoughtWriter(config)
    with context.progress("answering", len(questions)) as bar:
        answers = writer.answers(questions, lambda count: bar.advance(bar.task_ids[0], count))
    scores = [
        score_answer(question.question, question.truth, answer, question.duration_s)
        for question, answer in zip(questions, answers, strict=True)
    ]
    rows = [_thought_answer_row(*triple) for triple in zip(questions, answers, scores, strict=True)]
    outcome = outcome_of(questions, answers, scores, rows, config, list(writer.problems.items()))
    conclude(outcome, context.folder, config.examples, context.console)
    return dict(outcome.result)


def outcome_of(
    questions: Sequence[ThoughtQuestion],
    answers: Sequence[str],
    scores: Sequence[AnswerScore],
    rows: Sequence[Mapping[str, Any]],
    config: EvaluateThoughtsConfig,
    missing: Sequence[tuple[str, str]] = (),
) -> SuiteResult:
    """The tables of all kinds of questions, and the answers of the page, the worst first.

    Args:
        missing: questions that the model could not take, and why.
    """
    from audiollm.evaluate.report.suite import ScoreTable, SuiteResult, share_tiles
    from audiollm.pages.formats import with_interval
    from pipelines.audiocot.writer.scores import score_tables

    tables = score_tables(scores)
    exchanged = [f"{' and '.join(config.exchange)} of another clip"] if config.exchange else []
    control = "; ".join([*exchanged, *(["pictures in random order"] if config.shuffle_frames else [])])
    about = [f"{len(questions)} questions of {config.samples.name}, answered greedily"]
    about += [f"control: {control}"] if control else []
    page_tables = [
        ScoreTable(
            f"{len([score for score in scores if score.question == kind])} questions: {TITLES[kind]}",
            ["measure", "share", "n"],
            [[name, with_interval(figure, "accuracy"), str(figure["n"])] for name, figure in table.items()],
            "times are right within 0.25 s; the order is of pairs of events that are both named right",
        )
        for kind, table in tables.items()
    ]
    worst = sorted(range(len(scores)), key=lambda place: _quality(scores[place]))
    examples = [_example(questions[n], answers[n], scores[n]) for n in worst[: config.examples]]
    result = {"questions": len(questions), "control": control, "tables": tables}
    tiles = [
        figure
        for kind, table in tables.items()
        for name, score in list(table.items())[:1]
        for figure in share_tiles(f"{name}, {TITLES[kind]}", score)
    ]
    return SuiteResult(
        "Written chains of thought", about, result, page_tables, examples, missing, rows, tiles=tiles
    )


def plan_evaluate_thoughts(config: EvaluateThoughtsConfig, plans: Mapping[str, StagePlan]) -> StagePlan:
    """Plan by the number of questions, which is known once they are made."""
    max_questions = config.max_questions * len(config.questions)
    return StagePlan(
        memory_mb=1500,
        disk_mb=20,
        core_seconds=10 + 0.5 * max_questions,
        note=f"up to {max_questions} questions",
    )


# Private


def _quality(score: AnswerScore) -> float:
    """A number by which the page's examples are ordered: 1 where nothing is wrong."""
    if score.problem is not None:
        return -1.0
    verdicts = [
        score.named == score.wanted == score.answered,
        *score.orders,
        *score.times,
        *(v for v in (score.background, score.sounds, score.operation, score.span) if v is not None),
    ]
    return sum(verdicts) / len(verdicts)


def _thought_answer_row(question: ThoughtQuestion, answer: str, score: AnswerScore) -> dict[str, Any]:
    from audiollm.data.records.thoughts import prose_of

    return {
        "id": question.id,
        "question": question.question,
        "clip": question.loaded.sample.metadata.get("clip"),
        "asked": question.loaded.sample.texts("user")[-1],
        "sound": _sound_of(question),
        "truth": question.truth,
        "answer": answer,
        "prose": None if score.record is None else prose_of(score.record),
        "problem": score.problem,
        **{
            name: getattr(score, name)
            for name in ("named", "answered", "wanted", "background", "sounds", "operation", "span")
        },
        "orders": list(score.orders),
        "times": list(score.times),
    }


def _example(question: ThoughtQuestion, answer: str, score: AnswerScore) -> Example:
    import json

    from audiollm.evaluate.report.suite import Example, Sound

    lines = [
        ("asked", question.loaded.sample.texts("user")[-1]),
        ("true", json.dumps(question.truth, ensure_ascii=False)),
        ("written", answer or "nothing"),
        *([("problem", score.problem)] if score.problem else []),
    ]
    path = _sound_of(question)
    clip = question.loaded.audio[0] if question.loaded.audio else None
    sounds = [Sound("sound", Path(path), clip.start_s, clip.end_s)] if clip is not None and path else []
    return Example(f"{question.id}: {TITLES[question.question]}", lines, sounds)


def _sound_of(question: ThoughtQuestion) -> str | None:
    """The file of the sound that was heard."""
    content = question.loaded.audio[0].content if question.loaded.audio else None
    return content if isinstance(content, str) else None


STAGE = Stage(
    kind="evaluate_thoughts",
    config=EvaluateThoughtsConfig,
    run=run_evaluate_thoughts,
    artifacts={
        "results": "results.json",
        "rows": "rows.jsonl",
        "report": "report.html",
    },
    help="score the chains of thought that a model writes about clips, regions and instructions",
    plan=plan_evaluate_thoughts,
)
