"""Choice of recognizers: any number of them, of any kind, each a step that transcribes a segment.

Value of each: `text, language, language_probability, words: [{word, start_s, end_s, confidence}], confidence,
mean_log_probability, no_speech_probability, compression_ratio`. Times are in seconds from the start of the segment. A
signal that a recognizer does not have is None, and `words` may be empty.

Shapes: N samples at 16 kHz.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from audiollm.models.recognition.transcript import SpokenWord, mean_confidence
from pipelines.annotate.recognizers.endpoint import (
    ChatEndpoint,
    ChatEndpointConfig,
    Endpoint,
    EndpointConfig,
)
from pipelines.annotate.recognizers.folder_models import (
    AudioLlm,
    AudioLlmConfig,
    FasterWhisper,
    FasterWhisperConfig,
    TransformersConfig,
    TransformersRecognizer,
)
from pipelines.annotate.recognizers.value import RecognizerConfig, RecognizerStep, transcript_value
from pipelines.annotate.step import Segment
from pipelines.steps.step import Value

if TYPE_CHECKING:
    from audiollm.evaluate.judges.recognizers import TimedWord

SAMPLE_RATE = 16000


class PocketsphinxConfig(RecognizerConfig):
    """CMU Pocketsphinx with its English model: installed with this package, in one thread of the CPU."""

    kind: Literal["pocketsphinx"] = "pocketsphinx"
    grammar: tuple[str, ...] | None = None
    """Texts of which each segment holds exactly one; None: open vocabulary."""


class Pocketsphinx(RecognizerStep[PocketsphinxConfig]):
    """Words with times and, with the open vocabulary, their posterior probabilities. `acoustic_fit` beside them is
    the mean of the words' fit by duration (`audiollm.evaluate.judges.recognizers.TimedWord`)."""

    version: ClassVar[int] = 2
    shared: ClassVar[bool] = True

    def setup(self) -> None:
        """Raises: ValueError: an empty grammar, or one with words that the dictionary does not know."""
        from audiollm.evaluate.judges.recognizers import PocketsphinxRecognizer

        self._recognizer = PocketsphinxRecognizer(self.config.grammar)

    def process(self, segment: Segment) -> Value:
        import torch

        samples_1N = torch.from_numpy(segment.samples(SAMPLE_RATE).copy())[None]
        recognized_words = self._recognizer.recognize_words(samples_1N, SAMPLE_RATE)
        words = [
            SpokenWord(
                word.word, word.start_s, word.end_s, word.score if self.config.grammar is None else None
            )
            for word in recognized_words
        ]
        value = transcript_value(
            " ".join(word.word for word in words), words, "en", None, mean_confidence(words)
        )
        return {**value, "acoustic_fit": _mean_fit(recognized_words)}


def _mean_fit(words: Sequence[TimedWord]) -> float | None:
    seconds = sum(word.end_s - word.start_s for word in words)
    if not seconds:
        return None
    return round(sum(word.fit * (word.end_s - word.start_s) for word in words) / seconds, 4)


RecognizerChoice = Annotated[
    PocketsphinxConfig
    | FasterWhisperConfig
    | TransformersConfig
    | AudioLlmConfig
    | EndpointConfig
    | ChatEndpointConfig,
    Field(discriminator="kind"),
]
"""The settings of one recognizer; `kind` says which."""


def make_recognizer(config: RecognizerChoice) -> RecognizerStep[Any]:
    """Make the step of a recognizer from its settings."""
    match config:
        case PocketsphinxConfig():
            return Pocketsphinx(config)
        case FasterWhisperConfig():
            return FasterWhisper(config)
        case TransformersConfig():
            return TransformersRecognizer(config)
        case AudioLlmConfig():
            return AudioLlm(config)
        case EndpointConfig():
            return Endpoint(config)
        case ChatEndpointConfig():
            return ChatEndpoint(config)


STRONGER = (
    "A stronger recognizer keeps more: --recognizer FOLDER, a folder with a published Whisper (config.json, "
    "model.safetensors, tokenizer.json, ...). It is faster in CTranslate2's format, with the package faster-whisper "
    "(pip install 'audiollm[whisper]'): ct2-transformers-converter --model openai/whisper-large-v3 --output_dir FOLDER "
    "--copy_files tokenizer.json preprocessor_config.json. From the hub: --recognizer transformers=openai/whisper-base "
    "--download."
)
"""Advice at the end of a report on texts of Pocketsphinx that were refused."""
