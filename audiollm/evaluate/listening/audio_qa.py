"""Suite `audio-qa`: multiple choice about recordings, in MMAU's layout (arXiv 2410.19168).

Two scores stand side by side: that of the option which the answer names (by its text or its letter, where exactly one
is named), and MMAU's own string match, which its leaderboard shows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from audiollm.data.chat.question_prompts import LETTERS, MAX_WORDS, PLAIN, question_prompt
from audiollm.data.tables.question_rows import read_question_rows
from audiollm.evaluate.listening.answer_parts import THINK, AnswerParts, read_answer
from audiollm.evaluate.listening.choices import read_choice
from audiollm.evaluate.listening.replies import Inquiry, Reply
from audiollm.evaluate.report.lists import need_unique, read_records
from audiollm.evaluate.report.statistics import mean_of_normal, metric_table, share
from audiollm.evaluate.report.store import Row
from audiollm.evaluate.report.suite import Example, ScoreTable, Sound, SuiteResult, share_tiles
from audiollm.pages.formats import percent, with_interval

GROUPS = ("task", "difficulty", "category", "sub_category")
REPLY_KEYS = ("model_output", "model_prediction", "reply")
"""Keys of a reply, in the order of preference: MMAU's script reads the first, its instructions name the second."""

_TRAINED = ("not trained on", "trained on")
UNREAD_KEY = "the right answer is not read as itself"


class Question(BaseModel):
    """A record of the list; the audio's path is relative to the list or to another folder."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    id: str = Field(min_length=1)
    audio_id: str = Field(min_length=1)
    start_s: float = Field(default=0.0, ge=0)
    end_s: float | None = None
    """End of the span that is asked about, in seconds from the file's beginning; None: the file's end."""
    question: str
    choices: tuple[str, ...] = Field(min_length=2, max_length=len(LETTERS))
    answer: str
    task: str = "(unknown)"
    difficulty: str = "(unknown)"
    category: str = "(unknown)"
    sub_category: str = Field(default="(unknown)", alias="sub-category")

    @model_validator(mode="after")
    def _answer_is_a_choice(self) -> Question:
        if self.answer not in self.choices:
            raise ValueError(f"the answer {self.answer!r} is none of the choices")
        return self

    @model_validator(mode="after")
    def _span_is_positive(self) -> Question:
        if self.end_s is not None and self.end_s <= self.start_s:
            raise ValueError(f"the span ends at {self.end_s} s, not after its start at {self.start_s} s")
        return self

    @field_validator("category", "sub_category", mode="before")
    @classmethod
    def _one_name(cls, value: Any) -> Any:
        """Join a category that is a list, as a few of the published list are."""
        if isinstance(value, list) and all(isinstance(name, str) for name in value):
            return ", ".join(dict.fromkeys(value)) or "(unknown)"
        return value

    def prompt(self, prompt: str = PLAIN, max_words: int = MAX_WORDS) -> str:
        """The question with its options, as a model is asked: see `question_prompt`."""
        return question_prompt(self.question, self.choices, prompt, max_words)

    def inquiry(self, folder: Path, prompt: str = PLAIN, max_words: int = MAX_WORDS) -> Inquiry:
        text = self.prompt(prompt, max_words)
        return Inquiry(self.id, folder / self.audio_id, text, self.start_s, self.end_s)


def read_questions(path: Path) -> list[Question]:
    """
    Raises:
        ConfigError: what is wrong with the list, and where.
    """
    questions = read_records(path, Question, read_question_rows(path))
    need_unique([question.id for question in questions], path)
    return questions


def evaluate_audio_qa(
    questions: Sequence[Question],
    replies: Mapping[str, Reply],
    folder: Path,
    about: str = "",
    trained: frozenset[str] = frozenset(),
) -> SuiteResult:
    """Score replies.

    A reply that names no option, or several, is wrong, and so is a question that the model failed on; a recording
    that is not there leaves the question out, and so does a right answer that is not read as itself (`unread_key`).

    Args:
        trained: ids of the questions that the model was trained on, which are scored apart, too.
    """
    rows = [
        _question_row(question, _reply_without_key(question) or replies[question.id])
        for question in questions
    ]
    scored_rows = [row for row in rows if not row["left_out"]]
    result = {
        "suite": "audio-qa",
        "questions": len(rows),
        "left_out": len(rows) - len(scored_rows),
        **_score_replies(scored_rows),
        **{f"by_{group}": _group_accuracies(scored_rows, group) for group in GROUPS},
    }
    if trained:
        parted = [{**row, "training": _TRAINED[row["id"] in trained]} for row in scored_rows]
        result["by_training"] = _group_accuracies(parted, "training")
    return SuiteResult(
        "Questions about sound",
        [line for line in (about, trained_note(trained, questions)) if line],
        result,
        _tables(result),
        [
            _question_example(row, q, folder)
            for row, q in sorted(zip(rows, questions, strict=True), key=_reply_badness)
        ],
        [(row["id"], row["problem"]) for row in rows if row["problem"]],
        rows,
        tiles=share_tiles("right answers", result),
    )


def trained_note(trained: frozenset[str], questions: Sequence[Question]) -> str:
    """The sentence for reports; empty where no question was trained on."""
    if not trained:
        return ""
    return (
        f"{len(trained)} of {len(questions)} questions are among those that the model was trained on: it may know "
        "their answers by heart, and what it learned shows on the others alone"
    )


def unread_key(question: Question) -> str:
    """Why the right answer, given as a reply, would not be right; empty where it would."""
    place = read_choice(question.answer, question.choices)
    if place is not None and question.choices[place] == question.answer:
        return ""
    return f"{UNREAD_KEY}: {question.answer!r} names {'no option' if place is None else repr(question.choices[place])}"


def mmau_match(reply: str, answer: str, choices: Sequence[str]) -> bool:
    """MMAU's string match: the reply holds all words of the answer, and no word that only another option has.

    Of a reply with tags the answer alone is looked at (`read_answer`).
    """
    words, answer_words = _distinct_words(read_answer(reply).answer), _distinct_words(answer)
    other_words = {
        word
        for choice in choices
        if _distinct_words(choice) != answer_words
        for word in _distinct_words(choice) - answer_words
    }
    return bool(words) and answer_words <= words and not words & other_words


# ------------------------------------------------------------------------------------------------ private


def _distinct_words(text: str) -> set[str]:
    return set(re.findall(r"\b\w+\b", text.lower()))


def _reply_without_key(question: Question) -> Reply | None:
    reason = unread_key(question)
    return Reply(problem=reason) if reason else None


def _question_row(question: Question, reply: Reply) -> Row:
    choice = None if reply.problem else read_choice(reply.text, question.choices)
    return {
        "id": question.id,
        **{group: getattr(question, group) for group in GROUPS},
        "choices": len(question.choices),
        "question": question.question,
        "answer": question.answer,
        "reply": reply.text,
        "problem": reply.problem,
        "left_out": reply.problem.startswith(("cannot be heard", UNREAD_KEY)),
        "chosen": choice,
        "named": None if choice is None else question.choices[choice],
        "right": choice is not None and question.choices[choice] == question.answer,
        "matched": not reply.problem and mmau_match(reply.text, question.answer, question.choices),
        **_reply_form(read_answer(reply.text)),
    }


def _reply_form(parts: AnswerParts) -> Row:
    """Form of a reply with tags; nothing of a plain one."""
    if not parts.is_tagged:
        return {}
    is_thought_short = parts.thought_words <= MAX_WORDS and (parts.has_thought or THINK[0] not in parts.tags)
    return {
        "well_formed": parts.thinks_well or parts.answers_well,
        "thought_words": parts.thought_words,
        "short_thought": is_thought_short,
    }


def _score_replies(rows: Sequence[Row]) -> dict[str, Any]:
    n = len(rows)
    return {
        **share([row["right"] for row in rows]),
        "mmau_string_match": share([row["matched"] for row in rows]),
        "chance": sum(1 / row["choices"] for row in rows) / n if n else None,
        "no_usable_answer": sum(row["chosen"] is None for row in rows) / n if n else None,
        **_form_scores(rows),
    }


def _form_scores(rows: Sequence[Row]) -> dict[str, Any]:
    """Figures on the form of replies, where at least one has tags; a reply without tags is not well formed.

    A thought that is empty, or never ends, is not short.
    """
    words = [row["thought_words"] for row in rows if "thought_words" in row]
    if not words:
        return {}
    return {
        "well_formed": share([bool(row.get("well_formed")) for row in rows]),
        "short_thoughts": share([row["short_thought"] for row in rows if "short_thought" in row]),
        "thought_words": {**metric_table(words), **mean_of_normal(words)},
    }


def _group_accuracies(rows: Sequence[Row], group: str) -> dict[str, Any]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[group], []).append(row)
    return {name: _score_replies(groups[name]) for name in sorted(groups)}


def _tables(result: Mapping[str, Any]) -> list[ScoreTable]:
    headings = ["", "accuracy ↑ (95 %)", "MMAU's string match ↑", "chance", "no usable answer", "n"]
    tables = [ScoreTable("all questions", headings, [_accuracy_cells("all", result)], _left_out_note(result))]
    for group in ("training", *GROUPS):
        tables_by_value = result.get(f"by_{group}", {})
        if set(tables_by_value) - {"(unknown)"}:
            rows = [_accuracy_cells(name, table) for name, table in tables_by_value.items()]
            tables.append(ScoreTable(f"by {group.replace('_', '-')}", headings, rows))
    return tables + _form_tables(result)


def _form_tables(result: Mapping[str, Any]) -> list[ScoreTable]:
    """Tables on the form of replies, by domain (MMAU's task) and difficulty; none where all replies are plain."""
    if "well_formed" not in result:
        return []
    table_by_name = {"all": result, **result["by_task"], **result["by_difficulty"]}
    rows = [_form_cells(name, table) for name, table in table_by_name.items() if "well_formed" in table]
    headings = ["", "well formed ↑ (95 %)", f"thought ≤ {MAX_WORDS} words ↑ (95 %)", "words, mean (95 %)"]
    return [ScoreTable("form of the replies", [*headings, "median", "n"], rows)]


def _form_cells(name: str, table: Mapping[str, Any]) -> list[str]:
    shares = [with_interval(table[key], "accuracy") for key in ("well_formed", "short_thoughts")]
    words = table["thought_words"]
    interval = "" if words["low"] is None else f" ({words['low']:.1f} to {words['high']:.1f})"
    return [name, *shares, f"{words['mean']:.1f}{interval}", f"{words['median']:.0f}", str(words["n"])]


def _left_out_note(result: Mapping[str, Any]) -> str:
    if not result["left_out"]:
        return ""
    return f"{result['left_out']} left out: no recording that can be heard, or a right answer not read as itself."


def _accuracy_cells(name: str, table: Mapping[str, Any]) -> list[str]:
    matched = with_interval(table["mmau_string_match"], "accuracy")
    shares = [percent(table[key], 1) for key in ("chance", "no_usable_answer")]
    return [name, with_interval(table, "accuracy"), matched, *shares, str(table["n"])]


def _reply_badness(pair: tuple[Row, Question]) -> tuple[bool, bool]:
    return pair[0]["right"], pair[0]["chosen"] is None


def _question_example(row: Row, question: Question, folder: Path) -> Example:
    reply = row["problem"] or row["reply"] or "(nothing)"
    lines = [("question", question.question), ("options", " · ".join(question.choices))]
    lines += [("right", question.answer), ("reply", reply)]
    recording = Sound("recording", folder / question.audio_id, question.start_s, question.end_s)
    return Example(f"{question.id} · {question.task}", lines, [recording])
