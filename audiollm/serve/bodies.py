"""What clients send: the bodies of their requests. A field that is not here is refused by name."""

# no `from __future__ import annotations`: FastAPI reads the types

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from audiollm.audio.sound_encoder import SoundFormat

Seed = Annotated[int, Field(ge=0, le=2**62)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Weight = Annotated[float, Field(ge=0, le=20, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Name = Annotated[str, Field(max_length=256)]
Recording = Annotated[str, Field(max_length=100_000_000)]
"""A data URI, or base64."""


class ServeBody(BaseModel):
    """A body without unknown fields."""

    model_config = ConfigDict(extra="forbid")


class VoiceId(ServeBody):
    id: Name


class SpeechSettings(ServeBody):
    """How texts are said: OpenAI's fields, and those that other servers added."""

    model: Name
    voice: Name | VoiceId | None = None
    """A speaker of the model, an added voice, or `default`: the model chooses."""
    response_format: SoundFormat = "mp3"
    speed: Finite = 1.0
    instructions: Annotated[str, Field(max_length=4096)] | None = None
    """Description of place and mood: the scene of the model's prompts."""
    language: Annotated[str, Field(max_length=16)] | None = None
    """Language of the text, by whose rules numbers are read."""
    seed: Seed = 0
    ref_audio: Recording | None = None
    """A recording of the voice: a data URI, or base64."""
    ref_text: Annotated[str, Field(max_length=4096)] | None = None
    """The words of `ref_audio`."""
    max_new_tokens: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """Code frames of the longest speech."""
    sample_rate: Annotated[int, Field(ge=8000, le=48_000)] | None = None
    """Of the answer, in Hz; None: that of the model's codec."""
    temperature: Weight | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Field(ge=0, le=100_000)] | None = None
    ras_window: Annotated[int, Field(ge=0, le=1000)] | None = None
    text_guidance: Weight | None = None
    speaker_guidance: Weight | None = None

    @property
    def voice_name(self) -> str | None:
        return self.voice.id if isinstance(self.voice, VoiceId) else self.voice


class SpeechBody(SpeechSettings):
    """`/v1/audio/speech`."""

    input: str
    """The text, or a script where `dialogue` is true."""
    stream_format: Literal["audio", "sse"] | None = None
    """Send the sound while it is made; None: once it is complete."""
    stream: bool = False
    """The same as `stream_format=audio`."""
    dialogue: bool = False
    """Whether `input` is a script: `[SPEAKER0] Hello.`, or `Ann: Hello.` on a line."""
    voices: Annotated[dict[Name, Name], Field(max_length=32)] = Field(default_factory=dict)
    """Added voices of a dialogue's speakers, by their names in the script."""
    together: bool = False
    """Make all turns of a dialogue in one go."""


class SpeechSessionBody(SpeechSettings):
    """`session.config` of `/v1/audio/speech/stream`: how the texts of a session are said."""

    type: Literal["session.config"]
    response_format: SoundFormat = "wav"
    stream_audio: bool = False
    """Send the sound of a sentence while it is made; else each sentence in one message."""
    split_granularity: Literal["sentence"] = "sentence"


class SpeechBatchBody(ServeBody):
    """`/v1/audio/speech/batch`: texts that are said side by side."""

    items: Annotated[list[SpeechBody], Field(min_length=1, max_length=64)]


class TextContent(ServeBody):
    type: Literal["text"]
    text: str


class InputAudio(ServeBody):
    data: Recording
    format: Annotated[str, Field(max_length=16)] | None = None
    """Not needed: the content tells."""


class InputAudioContent(ServeBody):
    type: Literal["input_audio"]
    input_audio: InputAudio


class AudioUrl(ServeBody):
    url: Recording
    """A data URI: nothing is fetched."""


class AudioUrlContent(ServeBody):
    type: Literal["audio_url"]
    audio_url: AudioUrl


ContentPart = Annotated[TextContent | InputAudioContent | AudioUrlContent, Field(discriminator="type")]


class ChatMessage(ServeBody):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[ContentPart], Field(min_length=1, max_length=64)]


class ChatAudio(ServeBody):
    format: SoundFormat = "wav"


class StreamOptions(ServeBody):
    include_usage: bool = False


class ChatBody(ServeBody):
    """`/v1/chat/completions`: words and recordings in, words and speech out."""

    model: Name
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=256)]
    modalities: Annotated[list[Literal["text", "audio"]], Field(min_length=1, max_length=2)] = ["text"]
    """`text`; `text` and `audio`: words, with speech where the model opens it; `audio`: speech alone."""
    audio: ChatAudio | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: Weight | None = None
    top_p: Share | None = None
    seed: Seed = 0
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Literal[1] = 1
