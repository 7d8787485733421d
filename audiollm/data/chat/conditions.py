"""Condition dropout for guidance, and corruption of input codes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import torch

from audiollm.data.chat.template import Kind, TokenStream
from audiollm.data.records.sample import AudioPart, ContentPart, Message, RecordedPhrase, TextPart

Audio = TypeVar("Audio")
Encoding = TypeVar("Encoding")


class Conditions(NamedTuple):
    """How a sample is shown this time: drawn once, for all answers to its prompt and for all models that see them."""

    encoding: float = 0.0
    """In [0, 1): the place of the sample's encoding among those that it has."""
    no_text: bool = False
    no_speaker: bool = False
    corrupted: float = 0.0
    """Share of the spoken input codes that is replaced at random."""

    def choose(self, encodings: Sequence[Encoding], default: Encoding) -> Encoding:
        """Return one of the encodings; the default where there is none."""
        return encodings[int(self.encoding * len(encodings))] if encodings else default


def draw_conditions(
    generator: torch.Generator, text_dropout: float, speaker_dropout: float, corrupt_codes: float
) -> Conditions:
    """Draw an encoding, whether text and speaker are hidden (by their shares), and a share of corrupted codes.

    Args:
        corrupt_codes: the largest share.
    """
    dice = torch.rand(4, generator=generator).tolist()
    return Conditions(dice[0], dice[1] < text_dropout, dice[2] < speaker_dropout, dice[3] * corrupt_codes)


def is_spoken(messages: Sequence[Message]) -> bool:
    """Return whether the last message is speech by the assistant."""
    last = messages[-1]
    return last.role == "assistant" and any(
        isinstance(content_part, AudioPart) for content_part in last.content
    )


def hide_conditions(
    messages: Sequence[Message], audio: Sequence[Audio], no_text: bool, no_speaker: bool
) -> tuple[list[Message], list[Audio]]:
    """A training sample without what is to be said and/or without the speaker, and the audio of its parts.

    A conversation whose answer is written stays as it is: what it is asked is no condition of a voice.
    """
    if not is_spoken(messages):
        return list(messages), list(audio)
    return without_conditions(messages, audio, no_text, no_speaker)


def without_conditions(
    messages: Sequence[Message], audio: Sequence[Audio], no_text: bool, no_speaker: bool
) -> tuple[list[Message], list[Audio]]:
    """A prompt for speech as the unconditional side of the guidance sees it, and the audio of the parts that stay.

    What is dropped leaves its turn in place, empty: of the user the text, of phrases their words, of the system prompt
    the speaker's line and every reference recording. A reference that is a turn of the assistant's stays.
    """
    kept_messages, kept_audio, remaining_audio = [], [], iter(audio)
    for message in messages:
        parts: list[ContentPart] = []
        for content_part in message.content:
            recordings = list(islice(remaining_audio, 1)) if isinstance(content_part, AudioPart) else []
            if unconditional_part := _drop_condition(content_part, message.role, no_text, no_speaker):
                parts.append(unconditional_part)
                kept_audio += recordings
        phrases = [_without_words(phrase) for phrase in message.phrases] if no_text else message.phrases
        changes = {"content": parts or [TextPart(text="")], "phrases": phrases}
        kept_messages.append(message.model_copy(update=changes))
    return kept_messages, kept_audio


def corrupt(stream: TokenStream, share: float, codebook_size: int, generator: torch.Generator) -> TokenStream:
    """Replace a share of the spoken input codes (never BOS or EOS, never a target) by random ones."""
    codes_SK = stream.codes_SK
    dice_SK = torch.rand(codes_SK.shape, generator=generator)
    random_SK = torch.randint(codebook_size, codes_SK.shape, generator=generator)
    is_replaced_SK = (
        (dice_SK < share) & (codes_SK < codebook_size) & (stream.kinds_S == Kind.AUDIO_OUT)[:, None]
    )
    fields: dict[str, Any] = {**stream.__dict__, "codes_SK": torch.where(is_replaced_SK, random_SK, codes_SK)}
    return TokenStream(**fields)


def _drop_condition(
    content_part: ContentPart, role: str, no_text: bool, no_speaker: bool
) -> ContentPart | None:
    """The part as it is shown; None: not at all."""
    if role == "user" and no_text:
        return None if isinstance(content_part, TextPart) else content_part
    if role == "system" and no_speaker:
        return _without_speaker(content_part) if isinstance(content_part, TextPart) else None
    return content_part


def _without_words(phrase: RecordedPhrase) -> RecordedPhrase:
    return phrase.model_copy(update={"text": "", "phonemes": None})


def _without_speaker(text_part: TextPart) -> TextPart:
    lines = [line for line in text_part.text.split("\n") if not line.startswith("Speaker:")]
    return TextPart(text="\n".join(lines).rstrip("\n"))
