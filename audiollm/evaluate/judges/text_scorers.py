"""Scorers of translations: chrF, BLEU and word accuracy, or a command in an environment of its own (COMET, MetricX).

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
from audiollm.evaluate.report.text_errors import CHARACTER_LANGUAGES
from audiollm.json_process import JsonProcess, ProcessFailed, command_words

COMMAND_PREFIX = "command:"
TEXT_SCORERS = ("chrf", "bleu", "word_accuracy")
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

    def close(self) -> None:
        """End what the scorer runs."""


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
        return [
            self._metric.sentence_score(translation.output, [translation.reference]).score
            for translation in translations
        ]

    def close(self) -> None:
        """Do nothing: it runs in this process."""


class WordAccuracy:
    """100 (1 - edits between the words of output and reference / words of the reference), at least 0.

    Each word that is too much costs as much as one that is missing, which chrF, a recall above all, hardly notices. Of
    languages without spaces the characters are counted.
    """

    name = "word_accuracy"

    def __init__(self, language: str) -> None:
        self._splits = language.split("-")[0].lower() not in CHARACTER_LANGUAGES

    def score(self, translations: Sequence[Translation]) -> list[float | str]:
        """Return a score for each; where there is no word in the reference, 100 for none and 0 for any."""
        from rapidfuzz.distance import Levenshtein

        scores: list[float | str] = []
        for translation in translations:
            reference, output = self._units(translation.reference), self._units(translation.output)
            edits = Levenshtein.distance(reference, output)
            scores.append(100 * max(0.0, 1 - edits / len(reference)) if reference else 100.0 * (not output))
        return scores

    def _units(self, text: str) -> list[str]:
        return text.split() if self._splits else list("".join(text.split()))

    def close(self) -> None:
        """Do nothing: it runs in this process."""


class CommandScorer:
    """A scorer in another process. One that dies, hangs or answers too little costs its batch, not the run.

    After a failure the process is ended, and started again for the next batch.

    Args:
        command: as in a shell, without a shell's operators.
        timeout_s: longest wait for the next answer.
        setting: the option that the command was given with, for errors.
    """

    def __init__(self, command: str, timeout_s: float = 600.0, setting: str = "--scorer") -> None:
        self.name = command
        self._process = JsonProcess(command, timeout_s, setting)

    def score(self, translations: Sequence[Translation]) -> list[float | str]:
        """Return a score for each, or the reason why there is none.

        Scores that came before a failure are kept where they surely belong to the first translations: the program
        crashed, or gave no number. One that left an answer out may have left out any.

        Raises:
            ConfigError: the program cannot be started.
        """
        requests = [
            {"src": translation.source, "mt": translation.output, "ref": translation.reference}
            for translation in translations
        ]
        scores: list[float | str] = []
        try:
            for line in self._process.ask(requests):
                value = _parse_score_line(line)
                if value is None:
                    self.close()
                    raise ProcessFailed(f"answered {line.strip()[:80]!r}, which is no score", True)
                scores.append(value)
        except ProcessFailed as failure:
            aligned_scores = scores if failure.is_aligned else []
            return aligned_scores + [f"the scorer {failure}"] * (len(translations) - len(aligned_scores))
        return scores

    def close(self) -> None:
        """End the process."""
        self._process.close()


def choose_text_scorer(
    name: str, language: str, timeout_s: float = 600.0, setting: str = "--scorer"
) -> TextScorer:
    """Return `chrf`, `bleu`, `word_accuracy`, or the scorer of `command:PYTHON SCRIPT`.

    Args:
        setting: the option that gave the name, for errors.

    Raises:
        ConfigError: there is none of that name.
    """
    check_text_scorer(name, setting)
    if name.startswith(COMMAND_PREFIX):
        return CommandScorer(name.removeprefix(COMMAND_PREFIX), timeout_s, setting)
    return WordAccuracy(language) if name == WordAccuracy.name else SentenceScorer(name, language)


def check_text_scorer(name: str, setting: str) -> None:
    """Check that a name is one that `choose_text_scorer` knows, without starting anything.

    Raises:
        ConfigError: it is none, or its command names no program.
    """
    if name.startswith(COMMAND_PREFIX):
        command_words(name.removeprefix(COMMAND_PREFIX), setting)
    elif name not in TEXT_SCORERS:
        raise ConfigError(
            f"{name}: no such scorer", setting, suggestion(name, (*TEXT_SCORERS, COMMAND_PREFIX))
        )


def bleu_tokenizer(language: str) -> str:
    """Return the name of sacrebleu's tokenizer for a language: `en`, `zh`, `pt-BR`, ..."""
    return TOKENIZERS.get(language.split("-")[0].lower(), "13a")


def _parse_score_line(line: str) -> float | None:
    try:
        value = json.loads(line)
    except json.JSONDecodeError:
        return None
    value = value.get("score") if isinstance(value, dict) else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        return None
    return float(value)
