"""Step `consensus`: one text out of those of all recognizers, and how far they agree."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from pipelines.annotate.step import Segment, SegmentStep
from pipelines.annotate.words.rover import Confidences, Hypothesis, vote
from pipelines.steps.step import StepConfig, Value


class ConfidencesConfig(StepConfig):
    """Weight of the recognizers' confidences beside their votes."""

    of: Literal["average", "maximum"] = "average"
    """How the confidences of recognizers that agree on a word are combined."""
    alpha: float = Field(0.8, ge=0, le=1)
    """Weight of the votes in a word's score; 1: confidences decide only where votes tie."""
    null: float = Field(0.5, ge=0, le=1)
    """Confidence of the empty word: a higher value leaves out more of the words that only some recognizers heard."""


class ConsensusConfig(StepConfig):
    confidences: ConfidencesConfig | None = ConfidencesConfig()
    """None: votes alone. Confidences of different recognizers are not on one scale; where they mislead, leave them."""


class Consensus(SegmentStep[ConsensusConfig]):
    """ROVER over the recognizers' texts (`pipelines.annotate.words.rover`).

    Value: `text`; `words: [{word, share, confidence}]`, each with the share of the recognizers that have it; the mean
    `pairwise_wer` between recognizers and the mean `vote_share` of the slots, both None where there is one recognizer;
    `unit`, `word` or `character`. The language is the given one, else what the recognizers find, else by the script.

    Args:
        recognizers: names of the steps whose texts are put to the vote; their order decides where nothing else
            does.
    """

    name = "consensus"
    settings = ConsensusConfig

    def __init__(self, config: ConsensusConfig, recognizers: Sequence[str]) -> None:
        super().__init__(config)
        self.needs = tuple(recognizers)
        settings = config.confidences
        self._confidences = Confidences(settings.of, settings.alpha, settings.null) if settings else None

    def missing(self) -> str | None:
        return None if self.needs else "consensus: no recognizers to put to the vote: give at least one"

    def process(self, segment: Segment) -> Value:
        """
        Raises:
            ValueError: no recognizer heard this segment, or a text too long for the alignment.
        """
        values = [segment.values[name] for name in self.needs if name in segment.values]
        if not values:
            raise ValueError("no recognizer has a result for this segment")
        hypotheses = [
            Hypothesis(value["text"], [(word["word"], word["confidence"]) for word in value["words"]])
            for value in values
        ]
        voted = vote(hypotheses, spoken_language(segment.metadata.language, values), self._confidences)
        return {
            # one recognizer alone is kept as it writes
            "text": voted.text if len(values) > 1 else values[0]["text"],
            "words": [
                {"word": word.word, "share": round(word.share, 4), "confidence": _rounded(word.confidence)}
                for word in voted.words
            ],
            "pairwise_wer": _rounded(voted.pairwise_wer),
            "vote_share": _rounded(voted.vote_share),
            "unit": voted.unit,
        }


def spoken_language(given_language: str | None, transcripts: Sequence[Mapping[str, object]]) -> str | None:
    """The given language, or that with the most weight among recognizers that tell one; None where none does.

    A language without a probability weighs 0.5: recognizers of one language name theirs whatever they hear.
    """
    if given_language:
        return given_language
    weights: dict[str, float] = defaultdict(float)
    for value in transcripts:
        language, probability = value.get("language"), value.get("language_probability")
        if isinstance(language, str):
            weights[language] += float(probability) if isinstance(probability, int | float) else 0.5
    return max(sorted(weights), key=lambda language: weights[language]) if weights else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
