"""Programs that answer JSON lines: questions go in by lines, an answer comes for each. Imports nothing heavy."""

from __future__ import annotations

import json
import queue
import shlex
import subprocess
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from audiollm.errors import ConfigError


class ProcessFailed(Exception):
    """A program died, hung, or gave another number of answers than it was asked for; the text says which.

    Args:
        is_aligned: whether the answers before belong to the first questions. Those of a program that went on behind a
            question without answering it do not, and nothing tells which question that was.
    """

    def __init__(self, reason: str, is_aligned: bool = False) -> None:
        super().__init__(reason)
        self.is_aligned = is_aligned


class JsonProcess:
    """A program that is started once and asked batch after batch.

    A batch is a line of JSON per question and an empty line; the program answers a line per question, in order. Its
    errors go to the terminal. After a failure it is ended, and started again for the next batch.

    Args:
        command: as in a shell, without a shell's operators.
        timeout_s: longest wait for the next answer.
        setting: the option that the command was given with, for errors.
    """

    def __init__(self, command: str, timeout_s: float, setting: str) -> None:
        self._command, self._timeout_s, self._setting = command_words(command, setting), timeout_s, setting
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str | None] = queue.Queue()

    def ask(self, questions: Sequence[Any], timeout_s: float | None = None) -> Iterator[str]:
        """Yield the line that answers each question.

        Args:
            timeout_s: longest wait for the next answer of this batch; None: that of the program.

        Raises:
            ConfigError: the program cannot be started.
            ProcessFailed: an answer did not come; those before it have been yielded.
        """
        if not questions:
            return
        self._refuse_lines_not_asked_for()
        process, count = self._started(), 0
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        threading.Thread(target=_write_questions, args=(process, questions), daemon=True).start()
        try:
            while count < len(questions):
                try:
                    line = self._lines.get(timeout=timeout_s)
                except queue.Empty:
                    raise ProcessFailed(f"no answer within {timeout_s:g} s") from None
                if line is None:
                    raise self._ended(process, count, len(questions))
                count += 1
                yield line
        finally:
            if count < len(questions):  # what it has still to say answers none of the next questions
                self.close()

    def close(self) -> None:
        """End the program."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        self._lines = queue.Queue()

    def _refuse_lines_not_asked_for(self) -> None:
        """
        Raises:
            ProcessFailed: the program has said something since its last answer, which would answer the next question.
        """
        if self._lines.empty():
            return
        line = self._lines.get_nowait()
        self.close()
        if line is not None:  # else it ended, and is started again
            raise ProcessFailed(
                f"printed {line.strip()[:80]!r} beside its answers: one line for each question, logs to stderr"
            )

    def _ended(self, process: subprocess.Popen[str], count: int, num_questions: int) -> ProcessFailed:
        """Wait for a program whose output is over, and return what is to be told of it."""
        try:
            code = process.wait(self._timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        self.close()
        after = f"after {count} of {num_questions} answers"
        if code is None:
            return ProcessFailed(f"closed its output {after}, and did not end")
        return ProcessFailed(f"ended with code {code} {after}", is_aligned=code != 0)

    def _started(self) -> subprocess.Popen[str]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        try:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8",
                errors="replace",
            )  # fmt: skip
        except OSError as error:
            raise ConfigError(
                f"{self._command[0]}: cannot be started: {error}", self._setting, "give command:PYTHON SCRIPT"
            ) from None
        self._lines = queue.Queue()
        threading.Thread(target=_queue_lines, args=(self._process, self._lines), daemon=True).start()
        return self._process


def command_words(command: str, setting: str) -> list[str]:
    """Divide a command into its words, as a shell does.

    Raises:
        ConfigError: it names no program, or a quotation does not end.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"{command}: {error}", setting, "close the quotation") from None
    if not words:
        raise ConfigError("command: names no program", setting, "give command:PYTHON SCRIPT")
    return words


def _write_questions(process: subprocess.Popen[str], questions: Sequence[Any]) -> None:
    """Write a batch. A process that ends earlier is noticed where its answers are read."""
    assert process.stdin is not None
    try:
        for question in questions:
            process.stdin.write(json.dumps(question, ensure_ascii=False) + "\n")
        process.stdin.write("\n")
        process.stdin.flush()
    except (BrokenPipeError, ValueError):
        return


def _queue_lines(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip():
            lines.put(line)
    lines.put(None)
