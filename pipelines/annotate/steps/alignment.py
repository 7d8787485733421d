"""Step `alignment`: when each word of a segment's text is said, and how well the sound bears it out.

By the aligners of `audiollm.evaluate.alignment`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field

from audiollm.data.text.languages import language_of
from audiollm.evaluate.alignment.word_times import (
    CtcAligner,
    PocketsphinxAligner,
    WordAligner,
    WordSpan,
    align_text,
)
from pipelines.annotate.pretrained_parts import FOLDER, part_path
from pipelines.annotate.recognizers.value import missing_folder
from pipelines.annotate.step import Segment, SegmentStep
from pipelines.steps.step import StepConfig, Value

_FILES = ("config.json", "preprocessor_config.json")
_EXPECTED_FOLDER = (
    "a CTC model of transformers with safetensors weights, its feature extractor and its tokenizer"
)


class AlignmentConfig(StepConfig):
    model: Annotated[Path, part_path(transformers=FOLDER)] | None = None
    """`transformers=FOLDER`: a CTC model that spells in letters (wav2vec2, MMS, ...), for its languages. None:
    Pocketsphinx, for English alone: a segment in another language is not aligned."""
    gpus: float = Field(0.0, ge=0)
    """Share of a GPU for each worker; 0: the CPU. Of the model."""


class Alignment(SegmentStep[AlignmentConfig]):
    """Value: `words: [{word, start_s, end_s, score}]`, all words as they are written, in order, in seconds from the
    start of the segment, and `score`, the mean of theirs by duration.

    The text is the given one, or that of `consensus`; its language the given one, that of `language`, or by the script.
    A word that cannot be spelled (a letter that the vocabulary lacks, a word that the dictionary lacks) has the time
    that its neighbours leave, by its length, and the score None. A text of which nothing can be spelled has no words
    and the score None; one that does not fit into the sound at all (too long for it, or no path through it) has no
    words and the score 0. Scores of Pocketsphinx and of a model are not on one scale.
    """

    name = "alignment"
    settings = AlignmentConfig
    reads_text = True
    needs: tuple[str, ...] = ("consensus", "language")

    def __init__(self, config: AlignmentConfig) -> None:
        self.shared = config.model is None
        super().__init__(config)

    def missing(self) -> str | None:
        if self.config.model is None:
            return None
        return missing_folder("alignment.model", self.config.model, _FILES, _EXPECTED_FOLDER)

    def setup(self) -> None:
        """Raises: ConfigError: no such model, or pickled weights only."""
        self._aligner: WordAligner
        if self.config.model is None:
            self._aligner = PocketsphinxAligner()
        else:
            from audiollm.models.recognition.ctc import CtcModel

            self._aligner = CtcAligner(CtcModel(self.config.model, "cuda" if self.config.gpus else "cpu"))

    def process(self, segment: Segment) -> Value:
        text = segment.metadata.text or segment.values.get("consensus", {}).get("text") or ""
        found_language = segment.values.get("language", {}).get("language")
        language = segment.metadata.language or found_language or language_of(text)
        samples_N = segment.samples(self._aligner.sample_rate)
        spans = align_text(self._aligner, samples_N, text, language)
        if spans is None:
            return {"words": [], "score": 0.0}
        return _make_alignment_value(spans)


# ------------------------------------------------------------------------------------------------ private


def _make_alignment_value(spans: Sequence[WordSpan]) -> Value:
    scored = [(span.end_s - span.start_s, span.score) for span in spans if span.score is not None]
    length = sum(seconds for seconds, _ in scored)
    rows = [
        {
            "word": span.word,
            "start_s": round(span.start_s, 3),
            "end_s": round(span.end_s, 3),
            "score": None if span.score is None else round(span.score, 4),
        }
        for span in spans
    ]
    mean = sum(seconds * score for seconds, score in scored) / length if length else None
    return {"words": rows, "score": None if mean is None else round(mean, 4)}
