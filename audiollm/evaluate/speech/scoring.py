"""How suites of speech score what their judges answered: word errors of a clip, and their summary over clips."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from audiollm.evaluate.judges.judging import JudgedClip, LoopRefused, SpeechJudges
from audiollm.evaluate.report.metric_error import MetricError
from audiollm.evaluate.report.store import Row, RowStore
from audiollm.evaluate.report.text_errors import Errors, TextForm, count_errors, error_table
from audiollm.evaluate.speech.clips import Advance


@dataclass(frozen=True)
class Bench:
    """The form of texts, the judges, and the finished rows of a suite."""

    form: TextForm
    judges: SpeechJudges
    fingerprint: str = ""
    """Identifier of the judges: rows depend on it, on clips and on texts."""
    store: RowStore = field(default_factory=lambda: RowStore(None))
    advance: Advance = lambda what: None


def word_errors(judged: JudgedClip, text: str, form: TextForm) -> dict[str, Any]:
    """The transcript `heard`, and its `errors` against a text as counts or as the reason why there are none.

    A loop of the recognizer is no transcript: the row counts as missing, and keeps the loop under `loop`.
    """
    if judged.problem:
        return {"heard": None, "errors": judged.problem}
    if isinstance(judged.words, LoopRefused):
        return {"heard": None, "errors": judged.words.reason, "missing": True, "loop": judged.words.text}
    if isinstance(judged.words, MetricError):
        return {"heard": None, "errors": judged.words.reason}
    return {"heard": judged.words, "errors": transcript_errors(text, judged.words, form)}


def transcript_errors(text: str, transcript: str, form: TextForm) -> dict[str, int]:
    """The errors of a transcript as counts; without words in the text, all words of the transcript."""
    return count_errors(form.apply(text), form.apply(transcript)).plain()


def error_summary(rows: Sequence[Row], form: TextForm) -> dict[str, Any]:
    """`error_table` of the rows that have errors, with the reasons why the others have none.

    `rate_with_missing` counts every text of a row without a clip, or with a loop for a transcript, as deleted: a model
    that fails on hard texts does not gain by it. It is None where none is missing.
    """
    text_errors = [Errors(**row["errors"]) for row in rows if isinstance(row["errors"], dict)]
    reasons: dict[str, int] = {}
    for row in rows:
        if isinstance(row["errors"], str):
            reasons[row["errors"]] = reasons.get(row["errors"], 0) + 1
    lost = [len(form.apply(row["text"]).split()) for row in rows if row.get("missing")]
    table = error_table(text_errors)
    units = table["units"] + sum(lost)
    wrong = sum(errors.total for errors in text_errors) + sum(lost)
    return {
        **table,
        "unit": form.unit,
        "form": form.name,
        "rate_with_missing": wrong / units if lost and units else None,
        "missing": len(lost),
        "not_available": len(rows) - len(text_errors),
        "reasons": reasons,
    }


def rate_of(row: Mapping[str, Any]) -> float:
    """The error rate of a row, for sorting; infinite where the row has none."""
    return Errors(**row["errors"]).rate if isinstance(row["errors"], dict) else float("inf")
