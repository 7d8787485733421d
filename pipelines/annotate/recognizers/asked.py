"""Recognizer `audio_llm`: an audio LLM that is prompted to transcribe."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from pipelines.annotate.recognizers.value import RecognizerConfig, transcript_value
from pipelines.annotate.step import Segment
from pipelines.steps.step import Resources, Value

PROMPT = "Transcribe the speech."
"""Prompt: a phrasing of the task `asr` (`audiollm/data/chat/tasks.yaml`), which audiollm models are trained with."""
_QUOTES = {'"': '"', "'": "'", "“": "”", "«": "»", "「": "」"}


class AudioLlmConfig(RecognizerConfig):
    """Settings of an audio LLM of audiollm or of transformers."""

    kind: Literal["audio_llm"] = "audio_llm"
    model: str
    """The folder of a model or of the stage that trained it, or `package.module:factory` (see `evaluate.subjects`)."""
    codec: Path | None = None
    """Codec of an audiollm model that hears through one; None: the codec of its run."""
    prompt: str = Field(PROMPT, min_length=1)
    max_tokens: int = Field(256, ge=1)
    language: str | None = None
    """Language of the speech, for the steps that read the text; the model only learns it from the prompt."""
    gpus: float = Field(0.0, ge=0)
    """Share of a GPU for each worker."""


class AudioLlm:
    """Transcription by an audio LLM: the greedy answer, without quotation marks around it."""

    level: ClassVar[Literal["segment"]] = "segment"
    needs: tuple[str, ...] = ()
    version: ClassVar[int] = 1

    def __init__(self, config: AudioLlmConfig) -> None:
        self.name = config.name or config.kind
        self.resources = Resources(gpus=config.gpus)
        self._config = config

    def missing(self) -> str | None:
        model = Path(self._config.model)
        places = (model / "config.json", model / "model" / "config.json")
        if ":" in self._config.model and not model.exists():
            return None  # an import path: whether it can be made is known when it is made
        if any(place.is_file() for place in places):
            return None
        return f"{self.name}.model: no model in {model} (config.json): give a trained model's folder"

    def setup(self) -> None:
        """Raises: ConfigError: no such model, or its codec is not there."""
        from audiollm.evaluate.subjects.loading import load_answerer

        self._model = load_answerer(self._config.model, self._config.codec, self._config.max_tokens).model

    def process(self, segment: Segment) -> Value:
        answer = self._model.answer(segment.waveform(), self._config.prompt)
        return transcript_value(unquoted(answer), language=self._config.language)


def unquoted(answer: str) -> str:
    """Remove quotation marks around the whole text."""
    text = answer.strip()
    if len(text) > 1 and _QUOTES.get(text[0]) == text[-1] and text[-1] not in text[1:-1].replace("'", ""):
        return text[1:-1].strip()
    return text
