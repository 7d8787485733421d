"""Times of the words of transcripts, by an aligner that shares nothing with the model that wrote them.

Shapes: N samples.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from audiollm.audio import Waveform, resample
from audiollm.data.text.languages import language_code, language_of
from audiollm.evaluate.alignment.word_times import (
    CtcAligner,
    PocketsphinxAligner,
    WordAligner,
    WordSpan,
    align_text,
)
from audiollm.evaluate.alignment.written_words import written_words
from audiollm.serve.errors import ApiError
from audiollm.serve.plans import TranscriptSegment

FIELD = "timestamp_granularities"
TAKE_SEGMENTS = "ask for segment in the place of word"


class WordPlacer:
    """Places words in recordings, one recording after the other, in a thread of its own.

    Args:
        model: folder of a CTC model of transformers, for its languages; None: Pocketsphinx, for English.
    """

    def __init__(self, model: Path | None = None) -> None:
        self._model = model
        self._aligner: WordAligner | None = None
        self._thread = ThreadPoolExecutor(1, "words")

    def open(self) -> None:
        """Load the aligner. Raises: ConfigError: the folder's model does not load."""
        if self._aligner is not None:
            return
        if self._model is None:
            self._aligner = PocketsphinxAligner()
        else:
            from audiollm.models.recognition.ctc import CtcModel

            self._aligner = CtcAligner(CtcModel(self._model, "cpu"))

    async def place(
        self, recording: Waveform, segments: Sequence[TranscriptSegment], language: str | None
    ) -> list[WordSpan]:
        """Place the words of all segments, in seconds from the start of the recording.

        Args:
            recording: mono.
            language: of the speech; None: by the script of the words.

        Raises:
            ApiError: the aligner does not know the words, or they do not fit into the sound.
        """
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, self._place, recording, segments, language
        )

    def _place(
        self, recording: Waveform, segments: Sequence[TranscriptSegment], language: str | None
    ) -> list[WordSpan]:
        self.open()
        assert self._aligner is not None
        rate = self._aligner.sample_rate
        samples_N = resample(recording.samples_CN, recording.sample_rate, rate)[0].numpy()
        spans: list[WordSpan] = []
        for segment in segments:
            code = language_code(language) or language_of(segment.text)
            piece_N = samples_N[round(segment.start_s * rate) : round(segment.end_s * rate)]
            placed = align_text(self._aligner, piece_N, segment.text, code)
            if placed is None:
                where = f"between {segment.start_s:.1f} and {segment.end_s:.1f} s"
                raise _unplaced_error(f"the words {where} do not fit into the sound")
            if not placed and written_words(segment.text, code):
                raise _unplaced_error(f"the aligner of this server does not know the words of {code!r}")
            spans += [
                span._replace(start_s=span.start_s + segment.start_s, end_s=span.end_s + segment.start_s)
                for span in placed
            ]
        return spans


def _unplaced_error(problem: str) -> ApiError:
    return ApiError(400, f"{problem}: {TAKE_SEGMENTS}", FIELD, "words_not_placed")
