"""Answers of models that are paid for once: kept by their content in one file, and counted against a budget.

Several processes may share the file: each answer is in it before anything is made of it, and of several that ask the
same, one asks the model and the others wait for its answer.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from audiollm.audio import Waveform
from audiollm.endpoints import Budget
from audiollm.errors import TransientError
from audiollm.evaluate.subjects.chat import ChatError, ChatReply, EmptyReply
from audiollm.models.audio_llms.inputs import Parts, Pictures, Turn

Checked = TypeVar("Checked")
_TABLES = (
    "create table if not exists answers (key text primary key, text text not null, tokens integer) without rowid",
    "create table if not exists spent (run text primary key, calls integer not null, tokens integer not null)",
)
_WAIT_S = 60.0
_MAX_QUOTED_CHARACTERS = 4000
AGAIN = (
    "That answer cannot be used: {problem}\nAnswer the question again, with one JSON object and nothing else."
)


class BudgetSpent(TransientError):
    """The budget of calls or tokens is spent; answers so far are kept."""


class RefusedAnswer(Exception):
    """No answer passed the check; the message quotes the last problem."""


class CountedChat(Protocol):
    """A chat of any number of turns that tells what a reply cost."""

    def reply_counted(self, turns: Sequence[Turn]) -> ChatReply:
        """The assistant's next turn, and its cost."""


@dataclass
class StoredAnswers:
    """Answers by a hash of the question, in a SQLite file.

    Args:
        path: made with its folder where it is absent; beside it lies an empty file by which processes wait for each
            other.
    """

    path: Path
    budget: Budget

    def __post_init__(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._database = sqlite3.connect(self.path, isolation_level=None, timeout=_WAIT_S)
        self._database.execute("pragma journal_mode = wal")
        for table in _TABLES:
            self._database.execute(table)

    def reply(self, chat: CountedChat, identity: str, turns: Sequence[Turn]) -> str:
        """The answer to these turns: the one that is kept, or a new one, which is kept.

        Args:
            identity: of the model and its settings.

        Raises:
            BudgetSpent: a new answer would exceed the budget.
            ChatError: there is no answer.
        """
        key = question_key(identity, turns)
        stored = self._stored_answer(key)
        if stored is not None:
            return stored
        with self._asked_by_one(key):
            stored = self._stored_answer(key)
            if stored is not None:
                return stored
            self._begin_call()
            try:
                reply = chat.reply_counted(turns)
            except EmptyReply:
                raise  # it is paid for as an answer is
            except ChatError:
                self._take_back_call()
                raise
            with self._transaction() as database:
                database.execute(
                    "insert or ignore into answers values (?, ?, ?)", (key, reply.text, reply.tokens)
                )
                database.execute(
                    "update spent set tokens = tokens + ? where run = ?", (reply.tokens or 0, self.budget.run)
                )
            return reply.text

    def spent(self) -> tuple[int, int]:
        """Calls that were replied to, and the tokens of this run."""
        row = self._database.execute(
            "select calls, tokens from spent where run = ?", (self.budget.run,)
        ).fetchone()
        return (0, 0) if row is None else (int(row[0]), int(row[1]))

    def close(self) -> None:
        self._database.close()

    def _stored_answer(self, key: str) -> str | None:
        row = self._database.execute("select text from answers where key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    @contextmanager
    def _asked_by_one(self, key: str) -> Iterator[None]:
        """Within, no other process asks this question; a process that is killed holds no place."""
        with self.path.with_name(f"{self.path.name}.asked").open("ab") as file:
            fcntl.lockf(file, fcntl.LOCK_EX, 1, int(key[:15], 16))  # one byte for each question, by its hash
            yield

    def _begin_call(self) -> None:
        """Count a call before it is made, so that several processes together keep to the budget.

        A call during which its process is killed stays counted: it may have been paid for.
        """
        budget = self.budget
        with self._transaction() as database:
            database.execute("insert or ignore into spent values (?, 0, 0)", (budget.run,))
            calls, tokens = self.spent()
            if budget.calls is not None and calls >= budget.calls:
                raise BudgetSpent(f"the budget of {budget.calls} calls is spent")
            if budget.tokens is not None and tokens >= budget.tokens:
                raise BudgetSpent(f"the budget of {budget.tokens} tokens is spent: {tokens} were used")
            database.execute("update spent set calls = calls + 1 where run = ?", (budget.run,))

    def _take_back_call(self) -> None:
        """Count a call no more that nobody replied to."""
        with self._transaction() as database:
            database.execute("update spent set calls = calls - 1 where run = ?", (self.budget.run,))

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Within, all is written or nothing is; an error leaves no lock that other processes wait for."""
        self._database.execute("begin immediate")
        try:
            yield self._database
            self._database.execute("commit")
        except BaseException:
            if self._database.in_transaction:
                self._database.execute("rollback")
            raise


def ask_checked(
    reply: Callable[[Sequence[Turn]], str], parts: Parts, check: Callable[[str], Checked], asks: int
) -> tuple[Checked, int]:
    """Ask until an answer passes the check; each new request quotes the answer and what is wrong with it.

    Args:
        reply: gives the answer to turns.
        check: reads an answer, or raises `ValueError` with what is wrong with it.
        asks: the most requests.

    Returns:
        What the check made of the answer, and the number of requests.

    Raises:
        RefusedAnswer: no answer passed.
    """
    turns: list[Turn] = [("user", parts)]
    for number in range(1, asks + 1):
        answer = reply(turns)
        try:
            return check(answer), number
        except ValueError as error:
            problem = str(error)
        turns = [
            ("user", parts),
            ("assistant", [answer[:_MAX_QUOTED_CHARACTERS] or "(nothing)"]),
            ("user", [AGAIN.format(problem=problem)]),
        ]
    raise RefusedAnswer(f"{asks} answer{'s' * (asks > 1)} could not be used; the last one: {problem}")


def question_key(identity: str, turns: Sequence[Turn]) -> str:
    """SHA-256 of a model and all that it is asked: texts, samples and pixels."""
    turn_facts = [[role, [_hashable_content(content) for content in parts]] for role, parts in turns]
    return hashlib.sha256(json.dumps([identity, turn_facts]).encode()).hexdigest()


def _hashable_content(content_part: str | Waveform | Pictures) -> Any:
    if isinstance(content_part, str):
        return content_part
    if isinstance(content_part, Waveform):
        samples = content_part.samples_CN.contiguous().numpy()
        return [
            "sound",
            content_part.sample_rate,
            list(samples.shape),
            hashlib.sha256(samples.tobytes()).hexdigest(),
        ]
    frames = [
        [list(picture.shape), hashlib.sha256(picture.tobytes()).hexdigest()]
        for picture in content_part.frames
    ]
    return ["pictures", list(content_part.times_s), frames]
