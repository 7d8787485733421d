"""How texts are said: the checks, the voice and the plan of speech that is sent while it is made.

Shapes: N samples.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable

from audiollm.audio.sound_encoder import SoundEncoder, SoundFormat, StreamResampler
from audiollm.generation.service.jobs import Emit, Emitted, MakePlan
from audiollm.generation.speaking.manner import Manner
from audiollm.generation.speaking.plans import Plan
from audiollm.generation.speaking.speech_stream import SpeechStream, text_stream
from audiollm.serve.app_state import AppState
from audiollm.serve.bodies import SpeechSettings
from audiollm.serve.calls import Chunk
from audiollm.serve.errors import ApiError
from audiollm.serve.model import ServerModel
from audiollm.serve.voices import Reference

SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "ras_window", "text_guidance", "speaker_guidance")


def check_speech_settings(state: AppState, settings: SpeechSettings) -> ServerModel:
    """Check what needs no voice, and return the model.

    Raises:
        ApiError: a field that cannot be followed.
    """
    model = state.model(settings.model)
    codec = model.speaking().codec
    if settings.speed != 1.0:
        raise ApiError(400, "the speed of speech cannot be set: leave it out", "speed", "not_supported")
    if settings.ref_text is not None and settings.ref_audio is None:
        raise ApiError(400, "has no recording: give ref_audio, too", "ref_text")
    if settings.ref_audio is not None and settings.voice is not None:
        raise ApiError(400, "a voice by name and ref_audio exclude each other: give one of them", "voice")
    longest = state.limits.speech_s * codec.frame_rate
    if settings.max_new_tokens is not None and settings.max_new_tokens > longest:
        message = f"more than {state.limits.speech_s:g} s of speech: at most {int(longest)} frames are made"
        raise ApiError(400, message, "max_new_tokens")
    return model


async def read_voice(state: AppState, model: ServerModel, settings: SpeechSettings) -> str | Reference | None:
    """Return the speaker or the reference of a text; None: the model chooses.

    Raises:
        ApiError: there is no such voice, or its recording cannot be read.
    """
    if settings.ref_audio is None:
        return state.voice(model, settings.voice_name)
    waveform = await state.read_base64(settings.ref_audio, "ref_audio")
    return Reference.of(waveform, settings.ref_text, settings.language)


def manner_of(model: ServerModel, settings: SpeechSettings, voice: str | Reference | None) -> Manner:
    """How a text is said; called by the thread of the service."""
    generator = model.speaking()
    sampling = generator.defaults.over(**{name: getattr(settings, name) for name in SAMPLING_FIELDS}).sampling
    frames = settings.max_new_tokens
    return generator.manner(
        speaker=voice if isinstance(voice, str) else None,
        reference=model.encoded_voice(voice) if isinstance(voice, Reference) else None,
        scene=settings.instructions,
        seed=settings.seed,
        sampling=sampling,
        max_duration_s=None if frames is None else frames / generator.codec.frame_rate,
        language=settings.language,
    )


def streamed_speech_plan(
    model: ServerModel, settings: SpeechSettings, voice: str | Reference | None, text: str
) -> MakePlan:
    """The plan that emits the samples of a text, `[1, N]` each time, and ends with its `SpeechStream`."""
    return emit_stream(lambda: text_stream(model.speaking(), text, manner_of(model, settings, voice)))


def emit_stream(open_stream: Callable[[], SpeechStream]) -> MakePlan:
    """The plan that emits the samples of a stream, which is opened in the thread of the service."""

    def make(emit: Emit) -> Plan[SpeechStream]:
        stream = open_stream()
        yield from stream.plan(lambda piece: emit(piece.samples_CN, piece.duration_s))
        return stream

    return make


async def encode_pieces(
    pieces: AsyncIterator[Emitted], format: SoundFormat, codec_rate: int, rate: int
) -> AsyncGenerator[Chunk, None]:
    """Yield the bytes of a sound file whose samples arrive in pieces.

    Args:
        codec_rate: Hz of the samples.
        rate: Hz of the file.
    """
    encoder = SoundEncoder(format, rate)
    resampler = None if rate == codec_rate else StreamResampler(codec_rate, rate)
    async for piece in pieces:
        samples_1N = piece.item if resampler is None else resampler.push(piece.item)
        yield encoder.push(samples_1N), piece.sound_s
    last = b"" if resampler is None else encoder.push(resampler.finish())
    yield last + encoder.finish(), 0.0
