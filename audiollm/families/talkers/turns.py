"""Conversations as turns that are spoken, as prompts of talkers have them: who says what, and the codes of it.

Shapes: K codebooks, T frames, C hidden size.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from audiollm.data.hearing.features import PartAudio
from audiollm.data.records.sample import AudioPart, Message, Sample, TextPart

INSTRUCTION = "Generate audio following instruction."
"""What the tasks of `tasks.yaml` begin with: said of every text, and so nothing that a talker must be told."""
SPEAKER_LINE = re.compile(r"^Speaker: *(.+?) *$", re.MULTILINE)
SPEAKER_TAG = re.compile(r"^\[SPEAKER(\d+)\] *")
"""Before a text of a conversation: the number of its speaker."""
MARKS = re.compile(r"<\|scene_desc_(start|end)\|>")


PromptForm = Literal["whole", "interleaved"]
"""The text before the speech, or word by word beside its frames."""


@dataclass(frozen=True)
class SpokenTurn:
    """A text, and the codes that say it."""

    text: str
    codes_KT: Tensor
    speaker: str | None = None
    weight: int = 1
    """0: trainings read the turn and never learn it."""


@dataclass(frozen=True)
class SpeechPrompt:
    """What is to be said, and how."""

    text: str
    speaker: str | None = None
    """Name of the speaker."""
    instruction: str = ""
    """What the system prompt says beside the speaker: a scene, a manner of speaking."""
    before: tuple[SpokenTurn, ...] = ()
    """What was said before: the voice to go on in, or a conversation."""
    reference_KT: Tensor | None = None
    """Codes of a recording of the voice, whose words are not known."""
    language: str | None = None
    """Language of the text; None: not named."""
    vector_C: Tensor | None = None
    """The speaker encoder's vector of a recording of the voice."""
    form: PromptForm | None = None
    """Where the text stands, in models that know several places; None: the model's own choice."""
    learns_turns: bool = False
    """Whether the turns before are learned, too."""


def read_speech_prompt(
    messages: Sequence[Message], audio: Sequence[PartAudio], language: str | None = None
) -> SpeechPrompt:
    """Read the messages before the speech to make.

    Args:
        audio: codes of the recordings in the messages, in order.

    Raises:
        ValueError: what no talker's prompt can hold: no text at the end, a recording that is asked about, several
            voices' references, or an answer in words.
    """
    codes = _codes_of(audio)
    speaker, instruction, reference_KT = None, list[str](), None
    turns, said, tag = list[SpokenTurn](), None, None
    for message in messages:
        texts = [part.text for part in message.content if isinstance(part, TextPart)]
        recordings = [codes.pop(0) for part in message.content if isinstance(part, AudioPart)]
        if message.role == "system":
            if len(recordings) > 1 or (recordings and reference_KT is not None):
                raise ValueError("several reference recordings, and a talker speaks in one voice")
            reference_KT = recordings[0] if recordings else reference_KT
            named, rest = _read_system("".join(texts))
            speaker, instruction = named or speaker, [*instruction, *([rest] if rest else [])]
        elif message.role == "user":
            if recordings:
                raise ValueError(
                    "a recording in what is to be said: this model speaks, and hears no questions"
                )
            if said is not None:
                raise ValueError("two texts one after the other, and no speech between them")
            tag, said = _read_tag("\n".join(texts).strip())
        elif said is None or texts or len(recordings) != 1:
            raise ValueError("a turn of the assistant is one recording, behind the text that it says")
        else:
            turns.append(SpokenTurn(said, recordings[0], tag or speaker, message.weight))
            said = None
    if not said:
        raise ValueError("no text to say at the end of the messages")
    return SpeechPrompt(said, tag or speaker, "\n".join(instruction), tuple(turns), reference_KT, language)


def draw_shares(id: str) -> list[float]:
    """Five numbers in [0, 1) that depend on a sample's id alone."""
    digest = hashlib.sha256(id.encode()).digest()
    return [int.from_bytes(digest[place : place + 4], "little") / 2**32 for place in range(0, 20, 4)]


def speakers_of(samples: Iterable[Sample]) -> list[str]:
    """The names of speakers in the system prompts of samples, sorted."""
    texts = (text for sample in samples for text in sample.texts("system"))
    return sorted({name for text in texts for name in SPEAKER_LINE.findall(text)})


def _codes_of(audio: Sequence[PartAudio]) -> list[Tensor]:
    codes = []
    for recording in audio:
        if not isinstance(recording, Tensor) or recording.dtype == torch.float32:
            raise ValueError("a recording as features, and this model reads codes")
        codes.append(recording.long())
    return codes


def _read_tag(text: str) -> tuple[str | None, str]:
    """The number of the speaker that a text begins with, and what is said."""
    tagged = SPEAKER_TAG.match(text)
    return (tagged.group(1), text[tagged.end() :]) if tagged else (None, text)


def _read_system(text: str) -> tuple[str | None, str]:
    """The name of the speaker, and what else the system prompt says."""
    names = SPEAKER_LINE.findall(text)
    rest = SPEAKER_LINE.sub("", MARKS.sub("", text)).replace(INSTRUCTION, "").replace("SPEAKER0:", "")
    return (names[-1] if names else None), " ".join(rest.split())
