"""The errors that a person meets, and the nearest known name for one that is misspelt."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from pydantic import ValidationError


class ConfigError(Exception):
    """A recipe, an override or a command that cannot be used.

    Args:
        message: what is wrong, beginning with the key.
        where: file and line (`recipe.yaml:9`), or `command line`.
        remedy: what to do about it.
    """

    def __init__(self, message: str, where: str = "", remedy: str = "") -> None:
        self.message, self.where, self.remedy = message, where, remedy
        super().__init__("\n".join(filter(None, [f"{where}  {message}".strip(), remedy and f"  {remedy}"])))


def first_problem(error: ValidationError) -> str:
    """The first of a record's problems: its key and what is wrong."""
    problem = error.errors(include_url=False)[0]
    key, message = ".".join(map(str, problem["loc"])), problem["msg"].removeprefix("Value error, ")
    return f"{key}: {message}" if key else message


def suggestion(word: str, candidates: Iterable[str]) -> str:
    """`did you mean 'x'?` for the closest of `candidates`, or the whole list where nothing is close."""
    candidates = sorted(candidates)
    close = difflib.get_close_matches(word, candidates, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known: {', '.join(candidates)}" if candidates else "there is none to choose from"


class StageError(Exception):
    """A stage that cannot go on, with what the person can do about it and the exit code to end with."""

    def __init__(self, message: str, remedy: str = "", exit_code: int = 1) -> None:
        self.exit_code = exit_code
        super().__init__("\n".join(filter(None, [message, remedy and f"  {remedy}"])))


class TransientError(Exception):
    """Something that may succeed later, such as a request to a busy server: a run stops, and can be continued."""


class BadSample(Exception):
    """A sample that cannot be used: it is set aside and counted, and the rest goes on.

    Args:
        place: the file, and the line, the member or the byte in it.
        id: of the sample, as far as it is known.
        reason: what is wrong with it, for a person.
        kind: the few words that are counted by ("wrong JSON"); by default the reason itself.
    """

    def __init__(self, place: str, id: str, reason: str, kind: str = "") -> None:
        # a file's name may hold bytes that are not UTF-8, which neither JSON nor a terminal takes
        place, id, reason = (text.encode(errors="backslashreplace").decode() for text in (place, id, reason))
        super().__init__(place, id, reason, kind)  # all in args, so that it survives pickling
        self.place, self.id, self.reason, self.kind = place, id, reason, kind or reason

    def __str__(self) -> str:
        return f"{self.place}: {self.id and f'sample {self.id!r}: '}{self.reason}"

    def row(self) -> dict[str, str]:
        """Return the four texts by name; `set_aside.row_of` adds the stage that set the item aside."""
        return {"place": self.place, "id": self.id, "reason": self.reason, "kind": self.kind}


def error_line(error: BaseException) -> str:
    """Format an error as one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
