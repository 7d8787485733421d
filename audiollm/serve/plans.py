"""Plans of answers in words and speech, and of transcripts; they are carried out in the thread of the service.

Shapes: N samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from audiollm.audio import Waveform, peak_dbfs
from audiollm.audio.samples import SILENCE_DBFS
from audiollm.generation.engine.request import Answer, Event, TextPiece
from audiollm.generation.engine.streaming import EventSound
from audiollm.generation.service.jobs import Emit
from audiollm.generation.speaking.plans import Ask, Plan
from audiollm.models.recognition.cutting import cut_points
from audiollm.serve.model import ChatPrompt, ServerModel

PIECES_TOGETHER = 4
"""Pieces of a recording that are written down side by side."""
TRANSCRIBE = "Transcribe the speech."
"""The question of the task `asr` (`audiollm/data/chat/tasks.yaml`)."""
TOKENS_PER_PIECE = 448
"""Longest transcript of a piece of a recording, in text tokens."""


@dataclass(frozen=True)
class ChatAnswer:
    """The end of an answer, whose words and sound were emitted before."""

    text: str
    stopped: bool
    """Whether it ended by itself, not by a limit."""
    prompt_tokens: int | None
    answer_tokens: int | None
    """Text tokens and code frames; None: not known."""
    samples_1N: Tensor | None = None
    """All speech of an answer that is not streamed; None: there is none."""


@dataclass(frozen=True)
class TranscriptSegment:
    """A piece of a recording with its words."""

    start_s: float
    end_s: float
    text: str


def chat_plan(model: ServerModel, prompt: ChatPrompt, emit: Emit, *, streamed: bool) -> Plan[ChatAnswer]:
    """Answer a conversation.

    Args:
        emit: called with words (str) and samples (`[1, N]`) as they come, where the answer is `streamed`.
    """
    request, prompt_tokens = model.chat_request(prompt)
    if not streamed:
        (answer,) = yield Ask([request])
        speech = [
            model.speaking().codec.decode(part).cpu() for part in answer.parts if isinstance(part, Tensor)
        ]
        samples_1N = torch.cat(speech, dim=1) if speech else None
        return _chat_answer(model, answer, prompt_tokens, samples_1N)
    sound = None if prompt.answer == "text" else EventSound(model.speaking().codec)

    def on_event(event: Event) -> None:
        if sound is None:
            if isinstance(event, TextPiece):
                emit(event.text)
            return
        for piece in sound.push(event):
            if piece.text:
                emit(piece.text)
            elif piece.samples_1N.shape[1]:
                emit(piece.samples_1N, piece.samples_1N.shape[1] / model.speaking().codec.sample_rate)

    (answer,) = yield Ask([request], on_event)
    return _chat_answer(model, answer, prompt_tokens)


def transcription_prompt(language: str | None, answer_tokens: int, **sampling: Any) -> ChatPrompt:
    """The question after the words of a recording.

    Args:
        language: of the speech, which the question then names.
        answer_tokens: of the longest answer of the server.
        sampling: `seed` and `temperature` of the prompt.
    """
    question = TRANSCRIBE if not language else f"{TRANSCRIBE} Language: {language}."
    longest = min(TOKENS_PER_PIECE, answer_tokens)
    return ChatPrompt([("user", [question])], "text", max_tokens=longest, **sampling)


def translation_prompt(target_language: str, answer_tokens: int, **sampling: Any) -> ChatPrompt:
    """The question after what a recording says, in another language; arguments as those of `transcription_prompt`."""
    question = f"Translate what is said into {target_language}."
    longest = min(TOKENS_PER_PIECE, answer_tokens)
    return ChatPrompt([("user", [question])], "text", max_tokens=longest, **sampling)


def transcription_plan(
    model: ServerModel, recording: Waveform, prompt: ChatPrompt, emit: Emit, *, in_order: bool
) -> Plan[list[TranscriptSegment]]:
    """Write down a mono recording, piece by piece where it is too long for the model, cut at its quietest moments.

    Args:
        prompt: its one turn has the question alone, of `transcription_prompt` or `translation_prompt`.
        in_order: transcribe one piece after the other, and emit the words as they come.
    """
    rate = recording.sample_rate
    cuts = cut_points(recording.samples_CN[0].numpy(), rate, model.piece_s())
    spans = list(pairwise(cuts))
    segments: list[TranscriptSegment] = []

    def on_event(event: Event) -> None:
        if isinstance(event, TextPiece):
            emit(event.text)

    together = 1 if in_order else PIECES_TOGETHER
    for first in range(0, len(spans), together):
        group = spans[first : first + together]
        sounding = [
            span for span in group if peak_dbfs(recording.samples_CN[:, slice(*span)]) >= SILENCE_DBFS
        ]
        texts: dict[tuple[int, int], str] = {}
        if sounding:
            requests = [_piece_request(model, recording, span, prompt) for span in sounding]
            answers = yield Ask(requests, on_event) if in_order else Ask(requests)
            texts = {span: answer.text.strip() for span, answer in zip(sounding, answers, strict=True)}
        if in_order and first + together < len(spans):
            emit(" ")
        segments += [
            TranscriptSegment(start / rate, end / rate, texts.get((start, end), "")) for start, end in group
        ]
    return segments


def join_segments(segments: Sequence[TranscriptSegment]) -> str:
    """The words of all segments."""
    return " ".join(segment.text for segment in segments if segment.text)


def _chat_answer(
    model: ServerModel, answer: Answer, prompt_tokens: int | None, samples_1N: Tensor | None = None
) -> ChatAnswer:
    tokens = None
    if model.generator is not None:
        tokens = model.generator.num_tokens(answer.text) + answer.codes_KT.shape[1]
    return ChatAnswer(answer.text.strip(), answer.stopped, prompt_tokens, tokens, samples_1N)


def _piece_request(
    model: ServerModel, recording: Waveform, span: tuple[int, int], prompt: ChatPrompt
) -> object:
    piece = Waveform(recording.samples_CN[:, slice(*span)], recording.sample_rate)
    ((_, question),) = prompt.turns
    return model.chat_request(replace(prompt, turns=[("user", [piece, *question])]))[0]
