"""Recognizers behind an OpenAI-compatible address: `endpoint` (audio/transcriptions) and `chat_endpoint` (chat).

Retries, time-outs and the secrecy of the key are those of `audiollm.endpoints`.
"""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from audiollm.endpoints import EndpointClient, EndpointError, check_address
from audiollm.models.recognition.transcript import SpokenWord
from pipelines.annotate.recognizers.folder_models import PROMPT, unquoted
from pipelines.annotate.recognizers.value import RecognizerConfig, RecognizerStep, transcript_value
from pipelines.annotate.step import Segment
from pipelines.steps.step import Value

SENT_RATE = 16000
_FORM_REFUSED = (400, 415, 422)
"""HTTP status codes of servers that do not have the form of reply that is asked for."""


class _AddressConfig(RecognizerConfig):
    """The address of a model, and how it is asked."""

    url: str
    """For example http://localhost:8000/v1."""
    model: str
    """The model's name at the endpoint."""
    key_variable: str = "OPENAI_API_KEY"
    """The environment variable with the key; unset or empty: no key is sent."""
    language: str | None = None
    """The language that is spoken; None: not known."""
    timeout_s: float = Field(120.0, gt=0)
    attempts: int = Field(4, ge=1)
    """Tries of each request."""
    pause_s: float = Field(2.0, ge=0)
    """Wait before the second attempt; it doubles before each further one."""

    @field_validator("url")
    @classmethod
    def _is_address(cls, url: str) -> str:
        check_address(url)
        return url


class EndpointConfig(_AddressConfig):
    """A model that is sent a file (`audio/transcriptions`): OpenAI, vLLM, speaches, whisper.cpp."""

    kind: Literal["endpoint"] = "endpoint"
    words: bool = False
    """Ask for words with times; not every server has them."""
    prompt: str | None = None
    """A text for the model to continue."""


class ChatEndpointConfig(_AddressConfig):
    """An audio LLM that is asked (`chat/completions` with an `input_audio` part)."""

    kind: Literal["chat_endpoint"] = "chat_endpoint"
    prompt: str = Field(PROMPT, min_length=1)
    max_tokens: int = Field(512, ge=1)


class Endpoint(RecognizerStep[EndpointConfig]):
    """Sends each segment as a 16-bit WAV of 16 kHz, mono.

    It asks for `verbose_json`, which has the language and the model's signals of doubt. A server that refuses it at the
    first request is asked for `json`, and its texts are judged without them.
    """

    version: ClassVar[int] = 2

    def __init__(self, config: EndpointConfig) -> None:
        super().__init__(config)
        self._format: str | None = "verbose_json" if config.words else None
        """The form of replies that the server is known to have; None: it was not asked yet."""

    def process(self, segment: Segment) -> Value:
        """
        Raises:
            EndpointError: no answer, or one that is not understood.
        """
        from audiollm.audio import encode_bytes

        wave = segment.waveform().mono().resample(SENT_RATE)
        sound = encode_bytes(wave.samples_CN, SENT_RATE, "wav")
        return _make_endpoint_value(self._ask(sound), self.config.language, self.name, segment.duration_s)

    def _ask(self, sound: bytes) -> dict[str, Any]:
        if self._format is not None:
            return self._request(sound, self._format)
        try:
            reply = self._request(sound, "verbose_json")
        except EndpointError as error:
            if not any(f"HTTP {status}:" in str(error) for status in _FORM_REFUSED):
                raise
            reply = self._request(sound, "json")
            self._format = "json"
        else:
            self._format = "verbose_json"
        return reply

    def _request(self, sound: bytes, response_format: str) -> dict[str, Any]:
        config = self.config
        fields = {"model": config.model, "temperature": "0", "response_format": response_format}
        if config.words:
            fields["timestamp_granularities[]"] = "word"
        if config.language:
            fields["language"] = config.language
        if config.prompt:
            fields["prompt"] = config.prompt
        body, content_type = form_data(fields, sound)
        client = EndpointClient(
            config.url, config.key_variable, config.timeout_s, config.attempts, config.pause_s
        )
        try:
            return _transcription(client.post("audio/transcriptions", body, content_type), client)
        except EndpointError as error:
            raise type(error)(f"{self.name}: {config.url}: {error}") from None


class ChatEndpoint(RecognizerStep[ChatEndpointConfig]):
    """The same question about every segment, at temperature 0."""

    def setup(self) -> None:
        from audiollm.evaluate.subjects.chat import EndpointChat

        config = self.config
        self._chat = EndpointChat(
            config.url, config.model, config.key_variable, config.max_tokens, config.timeout_s, config.attempts,
            config.pause_s,
        )  # fmt: skip

    def process(self, segment: Segment) -> Value:
        """
        Raises:
            ChatError: there is no answer.
        """
        answer = self._chat.ask([segment.waveform().mono(), self.config.prompt])
        return transcript_value(unquoted(answer), language=self.config.language)


def form_data(fields: Mapping[str, str], sound: bytes) -> tuple[bytes, str]:
    """A `multipart/form-data` body of fields and the file `file`, and its content type (RFC 7578)."""
    border = uuid.uuid5(uuid.NAMESPACE_OID, sound.hex()).hex
    parts = [
        f'--{border}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
        for name, value in fields.items()
    ]
    head = f'--{border}\r\nContent-Disposition: form-data; name="file"; filename="segment.wav"\r\n'
    file = f"{head}Content-Type: audio/wav\r\n\r\n".encode() + sound
    return b"".join(
        parts
    ) + file + f"\r\n--{border}--\r\n".encode(), f"multipart/form-data; boundary={border}"


# ------------------------------------------------------------------------------------------------ private


def _transcription(content: bytes, client: EndpointClient) -> dict[str, Any]:
    try:
        reply = json.loads(content)
    except ValueError:
        reply = None
    if not isinstance(reply, dict) or not isinstance(reply.get("text"), str):
        raise EndpointError(f"no text in the reply: {client.excerpt(content)}")
    return reply


def _make_endpoint_value(
    reply: Mapping[str, Any], given_language: str | None, name: str, duration_s: float
) -> Value:
    """The value of a reply, `json` or `verbose_json`."""
    try:
        words = [
            SpokenWord(
                str(word["word"]),
                min(float(word["start"]), duration_s),
                min(float(word["end"]), duration_s),
                None,
            )
            for word in reply.get("words") or ()
        ]
        segments = reply.get("segments") or ()
        weighted_log_probabilities = [
            (min(float(segment["avg_logprob"]), 0.0), float(segment["end"]) - float(segment["start"]))
            for segment in segments
            if segment.get("avg_logprob") is not None
        ]
        silences = [
            float(segment["no_speech_prob"])
            for segment in segments
            if segment.get("no_speech_prob") is not None
        ]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise EndpointError(f"{name}: the reply's words or segments are not understood: {error!r}") from error
    length = sum(seconds for _, seconds in weighted_log_probabilities)
    mean = (
        sum(value * seconds for value, seconds in weighted_log_probabilities) / length if length > 0 else None
    )
    language = given_language or _language_code(reply.get("language"))
    return transcript_value(
        str(reply["text"]),
        words,
        language,
        None if given_language else _probability(reply.get("language_probability")),
        None if mean is None else math.exp(mean),
        mean,
        min(silences, default=None),
    )


def _probability(value: object) -> float | None:
    """Some servers (speaches, whisper.cpp) tell the probability of the language that they detect."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _language_code(language: object) -> str | None:
    """`en` of `en` and of `english`, as Whisper's servers write it."""
    if not isinstance(language, str) or not language:
        return None
    if len(language) <= 3:
        return language.lower()
    from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

    code: str | None = TO_LANGUAGE_CODE.get(language.lower())
    return code
