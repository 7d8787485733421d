"""Scorers of translations: chrF and BLEU here, or a command in an environment of its own (COMET, BLEURT, MetricX).

A command gets one line of JSON per translation, `{"src": ..., "mt": ..., "ref": ...}`, and an empty line after the last
one of a batch. It answers one line per translation, in order: a number, or `{"score": number}`. It is started once and
fed batch after batch; its errors go to the terminal.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from audiollm.errors import ConfigError, suggestion
from audiollm.json_process import JsonProcess, ProcessFailed

COMMAND_PREFIX = "command:"
TEXT_SCORERS = ("chrf", "bleu")
TOKENIZERS = {"zh": "zh", "yue": "zh"} | dict.fromkeys(("ja", "ko", "th", "lo", "my"), "char")
"""sacrebleu's tokenizer by language; `13a` for all others. Without it, BLEU of Chinese is 0."""


@dataclass(frozen=True)
class Translation:
    """A translation, its source and its reference."""

    source: str
    output: str
    reference: str


class TextScorer(Protocol):
    """Scores translations."""

    name: str

    def score(self, translations: Sequence[Translation]) -> list[float | str]:
        """Return a score for each, or the reason why there is none."""


class SentenceScorer:
    """chrF or BLEU of single sentences, from 0 to 100 (sacrebleu; BLEU with its effective order)."""

    def __init__(self, name: str, language: str) -> None:
        from sacrebleu.metrics import BLEU, CHRF

        self.name = name
        self._metric = (
            CHRF() if name == "chrf" else BLEU(tokenize=bleu_tokenizer(language), effective_order=True)
        )

    def score(self, translations: Sequence[Translation]) -> list[float | str]:
        """Return a score for each; an empty output scores 0."""
        return [self._metric.sentence_score(each.output, [each.reference]).score for each in translations]


class CommandScorer:
    """A scorer in another process. One that dies, hangs or answers too little costs its batch, not the run.

    After a failure the process is ended, and started again for the next batch.

    Args:
        command: as in a shell, without a shell's operators.
        timeout_s: longest wait for the next answer.
    """

    def __init__(self, command: str, timeout_s: float = 600.0) -> None:
        self.name = command
        self._process = JsonProcess(command, timeout_s, "--scorer")

    def score(self, translations: Sequence[Translation]) -> list[float | str]:
        """Return a score for each; behind the first that did not come, the reason.

        Raises:
            ConfigError: the program cannot be started.
        """
        asked = [{"src": each.source, "mt": each.output, "ref": each.reference} for each in translations]
        scores: list[float | str] = []
        try:
            for line in self._process.ask(asked):
                value = _number(line)
                if value is None:
                    self.close()
                    raise ProcessFailed(f"answered {line.strip()[:80]!r}, which is no score")
                scores.append(value)
        except ProcessFailed as failure:
            return scores + [f"the scorer {failure}"] * (len(translations) - len(scores))
        return scores

    def close(self) -> None:
        """End the process."""
        self._process.close()


def choose_text_scorer(name: str, language: str, timeout_s: float = 600.0) -> TextScorer:
    """Return `chrf`, `bleu`, or the scorer of `command:PYTHON SCRIPT`.

    Raises:
        ConfigError: there is none of that name.
    """
    if name.startswith(COMMAND_PREFIX):
        return CommandScorer(name.removeprefix(COMMAND_PREFIX), timeout_s)
    if name not in TEXT_SCORERS:
        raise ConfigError(
            f"{name}: no such scorer", "--scorer", suggestion(name, (*TEXT_SCORERS, COMMAND_PREFIX))
        )
    return SentenceScorer(name, language)


def bleu_tokenizer(language: str) -> str:
    """Return the name of sacrebleu's tokenizer for a language: `en`, `zh`, `pt-BR`, ..."""
    return TOKENIZERS.get(language.split("-")[0].lower(), "13a")


def _number(line: str) -> float | None:
    try:
        value = json.loads(line)
    except json.JSONDecodeError:
        return None
    value = value.get("score") if isinstance(value, dict) else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        return None
    return float(value)
