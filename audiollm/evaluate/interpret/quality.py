"""Quality of interpreted outputs over a corpus: BLEU and chrF with their signatures, and ASR-BLEU of speech."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from audiollm.evaluate.interpret.logged_outputs import LoggedOutput
from audiollm.evaluate.judges.judging import Recognizer, recognize
from audiollm.evaluate.judges.text_scorers import Translation, bleu_tokenizer
from audiollm.evaluate.report.metric_error import MetricError
from audiollm.evaluate.report.text_errors import TextForm

_BOOTSTRAP_DRAWS = 1000


@dataclass(frozen=True)
class CorpusQuality:
    """BLEU and chrF of a corpus, from 0 to 100, and the signatures by which they can be reproduced.

    Args:
        intervals: the 95 % interval of each, by name, when the outputs are drawn anew (bootstrap, Koehn 2004); empty
            for a single output.
    """

    bleu: float
    chrf: float
    signatures: dict[str, str]
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        return {
            "BLEU": self.bleu,
            "chrF": self.chrf,
            "signatures": self.signatures,
            "intervals": {name: list(interval) for name, interval in self.intervals.items()},
        }


def corpus_quality(translations: Sequence[Translation], language: str) -> CorpusQuality:
    """Score outputs of a language; an empty output counts as an empty sentence."""
    from sacrebleu.metrics import BLEU, CHRF

    outputs = [translation.output for translation in translations]
    references = [[translation.reference for translation in translations]]
    bleu, chrf = BLEU(tokenize=bleu_tokenizer(language)), CHRF()
    metrics = {"BLEU": bleu, "chrF": chrf}
    scores = {name: metric.corpus_score(outputs, references) for name, metric in metrics.items()}
    signatures = {name: str(metric.get_signature()) for name, metric in metrics.items()}
    intervals = {
        name: _bootstrap_interval(metric, outputs, references)
        for name, metric in metrics.items()
        if len(outputs) > 1
    }
    return CorpusQuality(scores["BLEU"].score, scores["chrF"].score, signatures, intervals)


def _bootstrap_interval(
    metric: Any, outputs: Sequence[str], references: Sequence[Sequence[str]]
) -> tuple[float, float]:
    """The 95 % percentile interval of a metric of sacrebleu when the outputs are drawn anew.

    Its own bootstrap fails where some draws score 0 (sacrebleu 2.6: it averages float32 and float).
    """
    import numpy as np

    statistics_ND = np.asarray(metric._extract_corpus_statistics(outputs, references), dtype=float)
    random = np.random.default_rng(0)
    draws = [
        metric._compute_score_from_stats(
            statistics_ND[random.integers(len(outputs), size=len(outputs))].sum(axis=0).tolist()
        ).score
        for _ in range(_BOOTSTRAP_DRAWS)
    ]
    low, high = np.percentile(np.asarray(draws, dtype=float), [2.5, 97.5])
    return float(low), float(high)


@dataclass(frozen=True)
class HeardOutput:
    """An output's speech as a recognizer writes it down."""

    text: str
    problem: str = ""
    """Why there is no text; empty where there is."""


def hear(output: LoggedOutput, folder: Path, recognizer: Recognizer) -> HeardOutput:
    """Write down the speech of an output. The silences at its ends are cut, as recognizers write words into them.

    Args:
        folder: the folder that relative paths of sound are relative to.
    """
    from audiollm.audio import AudioError, Waveform, load
    from audiollm.generation.speaking.long_text import trim

    path = folder / output.prediction
    if not output.delays:
        return HeardOutput("")
    try:
        wave = load(path, mono=True)
    except AudioError as error:
        return HeardOutput("", error.reason)
    trimmed = Waveform(trim(wave.samples_CN, wave.sample_rate), wave.sample_rate)
    try:
        return HeardOutput(recognize(recognizer, trimmed))
    except MetricError as error:
        return HeardOutput("", error.reason)


def in_form(translation: Translation, form: TextForm) -> Translation:
    """Return a translation whose output and reference are in the form in which recognized texts are compared."""
    return Translation(translation.source, form.apply(translation.output), form.apply(translation.reference))
