"""Turns of words and recordings as a prompt of a model that is loaded to speak."""

from __future__ import annotations

from collections.abc import Sequence

from audiollm.audio import Waveform
from audiollm.data.hearing.features import PartAudio
from audiollm.data.records.sample import AudioPart, Message, TextPart
from audiollm.errors import ConfigError
from audiollm.generation.speaking.speech_generator import SpeechGenerator, check_recording_length
from audiollm.models.audio_llms.inputs import Turn


def encode_turns(
    generator: SpeechGenerator,
    turns: Sequence[Turn],
    encoded_audio: dict[tuple[int, bool], PartAudio] | None = None,
) -> tuple[list[Message], list[PartAudio]]:
    """Encode the recordings of turns, and check that the model takes them.

    Args:
        encoded_audio: recordings that are encoded, by identity and whether the model speaks them; it is added to.

    Returns:
        Messages, and the recordings in them in order.

    Raises:
        ConfigError: pictures, recordings for a model that does not hear or too long ones, or control tokens.
    """
    messages, audio = list[Message](), list[PartAudio]()
    encoded_audio = {} if encoded_audio is None else encoded_audio
    for role, parts in turns:
        content: list[TextPart | AudioPart] = []
        for content_part in parts:
            if isinstance(content_part, str):
                content.append(TextPart(text=content_part))
            elif isinstance(content_part, Waveform):
                if not generator.hears:
                    raise ConfigError("this model does not hear: it has no encoder and no codec", "messages")
                content.append(AudioPart(path="(recording)"))
                check_recording_length(content_part)
                key = (id(content_part), role == "assistant")
                if key not in encoded_audio:
                    encode = generator.encode if key[1] else generator.encode_input_audio
                    encoded_audio[key] = encode(content_part)
                audio.append(encoded_audio[key])
            else:
                raise ConfigError("this model takes no pictures", "messages")
        messages.append(Message(role=role, content=content))
    try:
        generator.check_messages(messages, len(audio))
    except ValueError as error:
        raise ConfigError(str(error).partition(";")[0], "messages", "leave it out") from error
    return messages, audio
