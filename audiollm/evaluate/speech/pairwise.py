"""Suite `judge`: an audio LLM decides which of two systems speaks a text better, in both orders.

The layout is EmergentTTS-Eval's: `emergent_tts_eval_data.jsonl` (`category`, `text_to_synthesize`, `evolution_depth`,
`language`), and clip number i, from 0, of a system is `i.wav` in its folder. A pair's score is the mean of both orders,
a win 1, a tie 1/2, a loss 0; EmergentTTS-Eval asks once, in a drawn order. A pair of which one order has no verdict
has no score.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from audiollm.evaluate.judges.judging import SpeechClip, digest, load_clip
from audiollm.evaluate.judges.ticketed_answers import VerdictError
from audiollm.evaluate.report.lists import read_records
from audiollm.evaluate.report.metric_error import MetricError
from audiollm.evaluate.report.statistics import mean_of_shares
from audiollm.evaluate.report.store import Row, RowStore
from audiollm.evaluate.report.suite import Example, ScoreTable, Sound, SuiteResult, share_tiles
from audiollm.evaluate.speech.clips import Advance, SpeechRequest
from audiollm.evaluate.speech.verdicts import PairJudge, Verdict, pair_question
from audiollm.pages.formats import percent, with_interval

VERSION = 1


class _Line(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    text_to_synthesize: str = Field(min_length=1)
    category: str | None = None
    evolution_depth: int | None = None
    language: str | None = None


@dataclass(frozen=True)
class PairItem:
    """A text that both systems speak."""

    id: str
    text: str
    category: str | None = None
    depth: int | None = None

    def request(self) -> SpeechRequest:
        return SpeechRequest(self.id, self.text)


@dataclass(frozen=True)
class PairBench:
    """The judge of pairs, and the finished rows."""

    judge: PairJudge
    fingerprint: str = ""
    store: RowStore = field(default_factory=lambda: RowStore(None))
    advance: Advance = lambda what: None


def read_pairs(path: Path, categories: Sequence[str] = ()) -> list[PairItem]:
    """The texts of a list, of all or some categories. An item's id is its number in the whole list.

    Raises:
        ConfigError: what is wrong with the list, and where; a category that it has not.
    """
    from audiollm.errors import ConfigError, suggestion

    lines = read_records(path, _Line)
    known_categories = {line.category for line in lines if line.category}
    for category in categories:
        if category not in known_categories:
            raise ConfigError(
                f"{category}: no such category", "--categories", suggestion(category, known_categories)
            )
    return [
        PairItem(str(place), line.text_to_synthesize, line.category, line.evolution_depth)
        for place, line in enumerate(lines)
        if not categories or line.category in categories
    ]


def evaluate_pairs(
    items: Sequence[PairItem],
    ours: Mapping[str, SpeechClip],
    theirs: Mapping[str, SpeechClip],
    bench: PairBench,
    about: str = "",
) -> SuiteResult:
    """Have every pair compared in both orders; the win rate is that of `ours`."""
    rows: list[Row] = []
    for item in items:
        rows.append(_pair_row(item, ours[item.id], theirs[item.id], bench))
        bench.advance(item.id)
    result = {
        "suite": "judge",
        "judge": bench.judge.name,
        **summarize_pairs(rows),
        "by_category": _group_pairs(rows, "category"),
        "by_depth": _group_pairs(rows, "depth"),
    }
    return SuiteResult(
        "Pairwise judgment",
        [line for line in (about, f"judge: {bench.judge.name}, both orders") if line],
        result,
        _tables(result),
        [
            _pair_example(row, item, ours[item.id], theirs[item.id])
            for row, item in sorted(zip(rows, items, strict=True), key=_pair_badness)
        ],
        [(row["id"], row["score"]) for row in rows if isinstance(row["score"], str)],
        tiles=share_tiles("win rate", result, "win_rate"),
    )


def summarize_pairs(rows: Sequence[Row]) -> dict[str, Any]:
    """The figures of pairs.

    Returns:
        `win_rate` with `low`, `high` and `n`; the shares of pairs `won`, `even` and `lost` (score above, at and below
        1/2); `consistent`, the share whose two orders agree; `first_wins`, how often the first recording won of the
        verdicts that are no tie (1/2 where place does not matter); `not_available` and `reasons`.
    """
    judged = [row for row in rows if not isinstance(row["score"], str)]
    reasons = Counter(row["score"] for row in rows if isinstance(row["score"], str))
    n = len(judged)
    decided = [first for row in judged for first in row["first_won"] if first is not None]
    table = mean_of_shares([row["score"] for row in judged])
    return {
        "win_rate": table.pop("mean"),
        **table,
        "won": sum(row["score"] > 0.5 for row in judged) / n if n else None,
        "even": sum(row["score"] == 0.5 for row in judged) / n if n else None,
        "lost": sum(row["score"] < 0.5 for row in judged) / n if n else None,
        "consistent": sum(row["consistent"] for row in judged) / n if n else None,
        "first_wins": sum(decided) / len(decided) if decided else None,
        "not_available": len(rows) - n,
        "reasons": dict(reasons.most_common()),
    }


def _pair_row(item: PairItem, ours: SpeechClip, theirs: SpeechClip, bench: PairBench) -> Row:
    about = {"id": item.id, "text": item.text, "category": item.category, "depth": item.depth}
    question = pair_question(item.text, item.category)
    try:
        if ours.path is None or theirs.path is None:
            whose, clip = ("ours", ours) if ours.path is None else ("theirs", theirs)
            raise MetricError(f"{whose}: {clip.problem}")
        depends_on = ["judge", VERSION, bench.fingerprint, question, digest(ours.path), digest(theirs.path)]
        earlier_row = bench.store.get(*depends_on)
        if earlier_row is not None:
            return {**earlier_row, **about}
        a, b = load_clip(ours.path), load_clip(theirs.path)
        there = bench.judge.compare(question, a, b)
        back = bench.judge.compare(question, b, a)
    except (MetricError, VerdictError) as error:
        return {**about, "score": str(error)}  # not kept: the next run asks again
    row = {**about, **_score_both_orders(there, back)}
    bench.store.add(row, *depends_on)
    return row


def _score_both_orders(there: Verdict, back: Verdict) -> dict[str, Any]:
    """Both verdicts as one score of ours; `back` is the verdict in the opposite order."""
    points = [{"a": 1.0, "b": 0.0, "tie": 0.5}[there.winner], {"b": 1.0, "a": 0.0, "tie": 0.5}[back.winner]]
    return {
        "score": sum(points) / 2,
        "orders": points,
        "consistent": points[0] == points[1],
        "first_won": [None if v.winner == "tie" else v.winner == "a" for v in (there, back)],
        "reasons": [there.reason, back.reason],
    }


def _group_pairs(rows: Sequence[Row], key: str) -> dict[str, Any]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row[key] is not None:
            groups.setdefault(str(row[key]), []).append(row)
    return {name: summarize_pairs(groups[name]) for name in sorted(groups)}


def _tables(result: Mapping[str, Any]) -> list[ScoreTable]:
    headings = ["", "win rate ↑ (95 %)", "won", "even", "lost", "orders agree", "first wins", "n", "n/a"]
    groups = {"all": result, **result["by_category"]}
    groups |= {f"depth {depth}": table for depth, table in result["by_depth"].items()}
    rows = []
    for name, table in groups.items():
        shares = [percent(table[key], 0) for key in ("won", "even", "lost", "consistent", "first_wins")]
        rows.append(
            [name, with_interval(table, "win_rate"), *shares, str(table["n"]), str(table["not_available"])]
        )
    note = (
        "A win is 1, a tie 1/2, the mean of both orders a pair's score. Where the first recording wins more than half "
        "of the time the judge favours a place; the two orders take that out of the rate."
    )
    return [ScoreTable("ours against the other", headings, rows, note)]


def _pair_badness(pair: tuple[Row, PairItem]) -> float:
    score = pair[0]["score"]
    return score if isinstance(score, float) else 2.0


def _pair_example(row: Row, item: PairItem, ours: SpeechClip, theirs: SpeechClip) -> Example:
    score = row["score"]
    lines = [("text", item.text), ("score", score if isinstance(score, str) else f"{score:.2f}")]
    lines += [
        (f"judge, order {place}", reason) for place, reason in enumerate(row.get("reasons", ()), start=1)
    ]
    sounds = [Sound("ours", ours.path)] if ours.path else []
    sounds += [Sound("the other", theirs.path)] if theirs.path else []
    return Example(f"{item.id} · {item.category or 'text'}", lines, sounds)
