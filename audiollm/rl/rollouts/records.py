"""Reads the files of rollouts that `train_policy` leaves, for people: groups with their best and worst answers.

Loads no torch but for speech.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from audiollm.evaluate.listening.answer_parts import read_answer
from audiollm.files.atomic import read_whole_lines

if TYPE_CHECKING:
    from torch import Tensor

FOLDER = "rollouts"
"""Name of the folder of rollouts in that of a stage."""
_FILE = re.compile(r"(\d{6,})\.jsonl")


@dataclass(frozen=True)
class DrawnToken:
    """A drawn token of an answer, or a stretch of speech."""

    text: str
    """Text of the token; empty for speech, and for a token that holds a part of a character."""
    actions: int
    """1 for a token; the codes of a stretch of speech."""
    figures: Mapping[str, float]
    """Means over the actions of `advantages`, `behaviour`, `old`, `reference`, ..., as far as the row has them."""
    is_speech: bool


@dataclass(frozen=True)
class AnswerRecord:
    """A row of a file of rollouts, or of greedy answers."""

    row: Mapping[str, Any]
    folder: Path
    """Folder of the row's file."""

    @property
    def number(self) -> int:
        """Number of the answer in its group."""
        return int(self.row.get("number") or 0)

    @property
    def text(self) -> str:
        """The answer's words, with its tags."""
        return str(self.row.get("answer") or "")

    @property
    def reward(self) -> float | None:
        """The weighted sum of its rewards; None where one is missing."""
        return finite(self.row.get("reward"))

    @property
    def rewards(self) -> dict[str, float | None]:
        """The rewards by function, before their weights."""
        values = self.row.get("rewards")
        return {str(k): finite(v) for k, v in values.items()} if isinstance(values, Mapping) else {}

    @property
    def is_truncated(self) -> bool:
        return self.row.get("truncated") is True

    @property
    def is_replaced(self) -> bool:
        """Whether another prompt took the place of its group, which is not trained on."""
        return self.row.get("replaced") is True

    @property
    def steps(self) -> list[tuple[str, float | None, float | None]]:
        """Text, reward and advantage of each step and of the outcome, where the advantage reads steps."""
        steps = self.row.get("steps")
        advantages = self.numbers("advantages")
        rows = []
        for step in steps if isinstance(steps, list) else []:
            action = step.get("action")
            has_advantage = isinstance(action, int) and 0 <= action < len(advantages)
            unnamed = "(the whole answer)" if step.get("is_outcome", True) else "(no words)"
            rows.append(
                (
                    str(step.get("text") or unnamed),
                    finite(step.get("reward")),
                    advantages[action] if has_advantage else None,
                )
            )
        return rows

    @property
    def advantage(self) -> tuple[float, float] | None:
        """The smallest and the largest advantage of its tokens; None where it has none."""
        advantages = self.numbers("advantages")
        return (min(advantages), max(advantages)) if advantages else None

    def numbers(self, name: str) -> list[float]:
        """A figure of each action."""
        values = self.row.get(name)
        return [float(v) for v in values] if isinstance(values, list) and all(map(is_number, values)) else []

    @property
    def tokens(self) -> list[DrawnToken]:
        """The answer token by token; none in a file without the texts of tokens."""
        pieces = self.row.get("pieces")
        if not isinstance(pieces, list):
            return []
        names = ("advantages", "behaviour", "old", "reference", "values", "returns")
        columns = {name: figure_values for name in names if (figure_values := self.numbers(name))}
        tokens, place = [], 0
        for piece in pieces:
            count = piece if isinstance(piece, int) else 1
            parts = {name: values[place : place + count] for name, values in columns.items()}
            figures = {
                name: sum(piece_values) / len(piece_values)
                for name, piece_values in parts.items()
                if piece_values
            }
            tokens.append(
                DrawnToken(
                    "" if isinstance(piece, int) else str(piece), count, figures, isinstance(piece, int)
                )
            )
            place += count
        return tokens

    @property
    def speech_file(self) -> tuple[Path, str] | None:
        """The file of the answer's speech, and the name of its codes there; None for an answer in words."""
        name, step = self.row.get("speech"), self.row.get("step")
        if not isinstance(name, str) or not isinstance(step, int):
            return None
        return self.folder / f"{step:06d}.safetensors", name

    def codes(self) -> Tensor | None:
        """Codes `[K, T]` of its speech; None where it has none, or the file is not there.

        Raises:
            DamagedFile: the file is not whole.
        """
        from audiollm.files.tensors import open_tensors

        if self.speech_file is None or not self.speech_file[0].is_file():
            return None
        path, name = self.speech_file
        with open_tensors(path) as file:
            return file.get_tensor(name).long() if name in file.keys() else None  # noqa: SIM118


@dataclass(frozen=True)
class GroupRecord:
    """The answers to one prompt of a step."""

    id: str
    """Id of the prompt's sample."""
    answers: Sequence[AnswerRecord]
    """The best first; those without a reward last."""

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The prompt's, with the right answer as the last one where it has one."""
        messages = self.answers[0].row.get("messages")
        return (
            [message for message in messages if isinstance(message, dict)]
            if isinstance(messages, list)
            else []
        )

    @property
    def question(self) -> list[dict[str, Any]]:
        """The parts of the messages before the right answer."""
        return [
            content_part
            for message in self.messages
            if not self._is_key(message)
            for content_part in _content_parts(message)
        ]

    @property
    def key(self) -> list[dict[str, Any]]:
        """The parts of the right answer, without its tags and thought; none where the prompt has no answer."""
        parts = [
            content_part
            for message in self.messages
            if self._is_key(message)
            for content_part in _content_parts(message)
        ]
        return [
            {**content_part, "text": read_answer(str(content_part["text"])).answer}
            if content_part.get("text") is not None
            else content_part
            for content_part in parts
        ]

    @property
    def spread(self) -> float:
        """The reward of the best answer less that of the worst."""
        rewards = [answer.reward for answer in self.answers if answer.reward is not None]
        return max(rewards) - min(rewards) if rewards else 0.0

    @property
    def mean(self) -> float | None:
        """Mean reward of its answers."""
        rewards = [answer.reward for answer in self.answers if answer.reward is not None]
        return sum(rewards) / len(rewards) if rewards else None

    def _is_key(self, message: Mapping[str, Any]) -> bool:
        return message is self.messages[-1] and message.get("role") == "assistant"


@dataclass(frozen=True)
class RolloutRecords:
    """The files of rollouts in a stage's folder."""

    folder: Path
    """`rollouts` in the stage's folder."""

    @cached_property
    def steps(self) -> list[int]:
        """Numbers of the steps that have a file."""
        names = [path.name for path in self.folder.glob("*.jsonl")] if self.folder.is_dir() else []
        return sorted(int(match[1]) for name in names if (match := _FILE.fullmatch(name)))

    def groups(self, step: int) -> list[GroupRecord]:
        """The groups of a step in the order of the file; broken lines are left out.

        Raises:
            OSError: the step has no file, or it cannot be read.
        """
        rows = read_whole_lines(self.folder / f"{step:06d}.jsonl", {"id": str, "answer": str}).rows
        return groups_of_rows(rows, self.folder)


def groups_of_rows(rows: Sequence[Mapping[str, Any]], folder: Path) -> list[GroupRecord]:
    """Group rows of answers by their prompt and step.

    Args:
        folder: that of the codes of speech.
    """
    groups: dict[Any, list[AnswerRecord]] = {}
    for row in _number_groups(rows):
        groups.setdefault(row[0], []).append(AnswerRecord(row[1], folder))
    return [
        GroupRecord(str(answers[0].row["id"]), sorted(answers, key=_badness)) for answers in groups.values()
    ]


def finite(value: Any) -> float | None:
    """The value as a float where it is a finite number."""
    return float(value) if is_number(value) and math.isfinite(value) else None


def is_number(value: Any) -> bool:
    """Whether a value of a row is a number and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number_groups(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """Rows with what tells their groups apart: of records of two sources that share an id, numbers are there twice."""
    counts: dict[Any, int] = {}
    for row in rows:
        answer = (row["id"], row.get("step"), row.get("number"))
        counts[answer] = counts.get(answer, 0) + 1
        yield (row["id"], row.get("step"), counts[answer]), row


def _badness(answer: AnswerRecord) -> tuple[bool, float, int]:
    return answer.reward is None, -(answer.reward or 0.0), answer.number


def _content_parts(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [content_part for content_part in message.get("content") or [] if isinstance(content_part, dict)]
