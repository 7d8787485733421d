"""The settings of a session of `/v1/realtime`, in OpenAI's form. A field that is not here is refused by name."""

# no `from __future__ import annotations`: FastAPI reads the types

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from audiollm.serve.bodies import Name, Seed, ServeBody, VoiceId, Weight

Rate = Annotated[int, Field(ge=8000, le=48_000)]
Modalities = Annotated[list[Literal["text", "audio"]], Field(min_length=1, max_length=2)]
MaxTokens = Annotated[int, Field(ge=1)] | Literal["inf"]


class PcmFormat(ServeBody):
    """Mono samples of 16 bits, little-endian, in base64."""

    type: Literal["audio/pcm"] = "audio/pcm"
    rate: Rate = 24_000


class TurnDetection(ServeBody):
    """Ends a turn of the user by the level of the sound."""

    type: Literal["server_vad"] = "server_vad"
    threshold: Annotated[float, Field(ge=0, le=1)] = 0.5
    """0: what is 6 dB above the noise counts as speech; 1: what is 18 dB above it."""
    prefix_padding_ms: Annotated[int, Field(ge=0, le=5000)] = 300
    """Sound before the beginning of speech that belongs to the turn."""
    silence_duration_ms: Annotated[int, Field(ge=100, le=10_000)] = 500
    """Silence that ends a turn."""
    create_response: bool = True
    interrupt_response: bool = True
    """Whether the user's speech ends the answer that is being given."""


class InputTranscription(ServeBody):
    model: Name
    """A served model that hears."""
    language: Annotated[str, Field(max_length=64)] | None = None


class RealtimeInput(ServeBody):
    format: PcmFormat = Field(default_factory=PcmFormat)
    transcription: InputTranscription | None = None
    """Write down what the user said; None: answer without."""
    turn_detection: TurnDetection | None = Field(default_factory=TurnDetection)
    """None: turns end by `input_audio_buffer.commit`."""


class RealtimeOutput(ServeBody):
    format: PcmFormat = Field(default_factory=PcmFormat)
    voice: Name | VoiceId | None = None
    """`default`: conversations are answered in the voice that the model chooses."""


class RealtimeAudio(ServeBody):
    input: RealtimeInput = Field(default_factory=RealtimeInput)
    output: RealtimeOutput = Field(default_factory=RealtimeOutput)


class SessionSettings(ServeBody):
    """A session as it is; `session.update` changes the fields that it names."""

    type: Literal["realtime"] = "realtime"
    model: Name
    instructions: Annotated[str, Field(max_length=20_000)] = ""
    output_modalities: Modalities
    """`text`; `audio`: speech alone; both: words, with speech where the model opens it."""
    audio: RealtimeAudio = Field(default_factory=RealtimeAudio)
    max_output_tokens: MaxTokens = "inf"
    temperature: Weight | None = None
    seed: Seed = 0


class ResponseSettings(ServeBody):
    """`response` of `response.create`: what differs from the session for this answer."""

    instructions: Annotated[str, Field(max_length=20_000)] | None = None
    output_modalities: Modalities | None = None
    max_output_tokens: MaxTokens | None = None


class InputTextPart(ServeBody):
    type: Literal["input_text", "output_text", "text"]
    text: str


class InputAudioPart(ServeBody):
    type: Literal["input_audio"]
    audio: Annotated[str, Field(max_length=100_000_000)]
    """Samples in the form of the session's input, in base64."""
    transcript: str | None = None


class MessageItem(ServeBody):
    """An item of the conversation that a client adds."""

    type: Literal["message"]
    role: Literal["system", "user", "assistant"]
    content: Annotated[
        list[Annotated[InputTextPart | InputAudioPart, Field(discriminator="type")]],
        Field(min_length=1, max_length=64),
    ]
    id: Name | None = None
    object: Literal["realtime.item"] | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None


def update_settings(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with some changed; objects within them are merged, lists and values are replaced."""
    merged = dict(settings)
    for key, value in changes.items():
        before = merged.get(key)
        both = isinstance(value, Mapping) and isinstance(before, Mapping)
        merged[key] = update_settings(before, value) if both else value  # type: ignore[arg-type]
    return merged
