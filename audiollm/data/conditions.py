"""What of a sample the model is shown: conditions hidden now and then, for guidance, and input codes corrupted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from audiollm.data.sample import AudioPart, Message, TextPart
from audiollm.data.template import Kind, TokenStream


def is_spoken(messages: Sequence[Message]) -> bool:
    """Whether the last message is speech of the assistant's."""
    last = messages[-1]
    return last.role == "assistant" and any(isinstance(part, AudioPart) for part in last.content)


def hide_conditions(messages: Sequence[Message], no_text: bool, no_speaker: bool) -> list[Message]:
    """The messages without what is to be said and/or without the speaker line of the system prompt.

    A conversation whose answer is written stays as it is: what it is asked is no condition of a voice.
    """
    if not is_spoken(messages):
        return list(messages)
    return [without_condition(message, no_text, no_speaker) for message in messages]


def without_condition(message: Message, no_text: bool, no_speaker: bool) -> Message:
    """One message of a prompt for speech, as the unconditional side of the guidance sees it.

    What is dropped leaves its turn in place, empty; recordings stay.
    """
    if message.role == "user" and no_text:
        heard = [part for part in message.content if isinstance(part, AudioPart)]
        return message.model_copy(update={"content": heard or [TextPart(text="")]})
    if message.role == "system" and no_speaker:
        return message.model_copy(update={"content": [_without_speaker(part) for part in message.content]})
    return message


def corrupt(stream: TokenStream, share: float, codebook_size: int, generator: torch.Generator) -> TokenStream:
    """Replace a share of the spoken input codes (never BOS or EOS, never a target) by random ones."""
    codes_SK = stream.codes_SK
    dice_SK = torch.rand(codes_SK.shape, generator=generator)
    random_SK = torch.randint(codebook_size, codes_SK.shape, generator=generator)
    chosen = (dice_SK < share) & (codes_SK < codebook_size) & (stream.kinds_S == Kind.AUDIO_OUT)[:, None]
    fields: dict[str, Any] = {**stream.__dict__, "codes_SK": torch.where(chosen, random_SK, codes_SK)}
    return TokenStream(**fields)


def _without_speaker(part: Any) -> Any:
    if not isinstance(part, TextPart):
        return part
    lines = [line for line in part.text.split("\n") if not line.startswith("Speaker:")]
    return TextPart(text="\n".join(lines).rstrip("\n"))
