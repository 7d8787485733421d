"""Spoken answers as rows behind their text, and batches of them.

Shapes: A answers, L rows, T targets, K codebooks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from audiollm.data.inspection import StreamRow
from audiollm.errors import BadSample
from audiollm.families.prompts import PromptedContents
from toy_talker.model import BEGIN, FRAME, TalkerConfig


@dataclass(frozen=True)
class EncodedSpeech:
    """A text and the codes that say it."""

    text: Tensor
    """int64: the text's bytes, and `BEGIN`."""
    codes_KT: Tensor
    ended: bool
    """Whether the end of the speech is a target, too; a sampled answer that a limit cut has none."""

    @property
    def num_targets(self) -> int:
        return self.codes_KT.numel() + self.ended

    @property
    def num_rows(self) -> int:
        return len(self.text) + self.codes_KT.shape[1]


@dataclass(frozen=True)
class SpeechBatch:
    """Answers side by side, padded behind."""

    text_AL: Tensor
    codes_ALK: Tensor
    is_frame_AL: Tensor
    row_F: Tensor
    """The row of the flattened `[A * L]` that each frame is chosen from, and each end."""
    codes_FK: Tensor
    """The codes of each frame; of an end, zeros."""
    target_T: Tensor
    place_T: Tensor
    """The place of each target in the flattened `[F * K]`."""
    answer_T: Tensor
    num_answers: int

    def to(self, device: torch.device) -> SpeechBatch:
        """Return the batch on a device."""
        tensors = {key: value.to(device) for key, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **tensors)

    def with_prompts(self) -> SpeechBatch:
        """The talker writes no text: none of a prompt's tokens has a likelihood."""
        return self


def text_rows(prompted: PromptedContents) -> Tensor:
    """The text of a prompt as rows.

    Raises:
        BadSample: it has a recording.
    """
    if prompted.audio:
        raise BadSample(
            prompted.place, prompted.id, "this model reads text and does not hear", "does not hear"
        )
    texts = [
        part.text for part in prompted.prompt[-1].content
    ]  # what is said: the last turn, which is text alone
    return torch.tensor([*"\n".join(texts).encode(), BEGIN])


def spoken_answers(prompted: PromptedContents, config: TalkerConfig) -> list[EncodedSpeech]:
    """The answers behind their prompt.

    Raises:
        BadSample: an answer that is not one stretch of speech, or that was coded by another codec.
    """
    encoded = []
    for answer in prompted.answers:
        if len(answer.codes) != 1 or len(answer.content) != 1:
            reason = "an answer is one stretch of speech, and this one is another"
            raise BadSample(prompted.place, prompted.id, reason, "no speech")
        codes_KT = answer.codes[0].long()
        if len(codes_KT) != config.num_codebooks or not 0 <= int(codes_KT.max()) < config.codebook_size:
            reason = f"codes of {config.num_codebooks} codebooks of {config.codebook_size} are read"
            raise BadSample(prompted.place, prompted.id, reason, "another codec")
        encoded.append(EncodedSpeech(text_rows(prompted), codes_KT, ended=True))
    return encoded


def speech_batch(answers: Sequence[EncodedSpeech], config: TalkerConfig) -> SpeechBatch:
    """Join answers; of none, a batch of one empty answer without targets."""
    answers = answers or [
        EncodedSpeech(torch.tensor([BEGIN]), torch.zeros(config.num_codebooks, 0).long(), False)
    ]
    text, codes, rows, frames, targets, places, owners = [], [], [], [], [], [], []
    longest, frame = max(answer.num_rows for answer in answers), 0
    for number, answer in enumerate(answers):
        codes_TK, prompt = answer.codes_KT.T, len(answer.text)
        count = len(codes_TK) + answer.ended
        text.append(torch.cat([answer.text, torch.full((len(codes_TK),), FRAME)]))
        codes.append(torch.cat([torch.zeros(prompt, config.num_codebooks).long(), codes_TK]))
        rows.append(number * longest + prompt - 1 + torch.arange(count))  # a row chooses the frame behind it
        frames.append(torch.cat([codes_TK, torch.zeros(int(answer.ended), config.num_codebooks).long()]))
        end = torch.full((int(answer.ended),), config.codebook_size)
        targets.append(torch.cat([codes_TK.flatten(), end]))
        places.append(frame * config.num_codebooks + torch.arange(answer.num_targets))
        owners.append(torch.full((answer.num_targets,), number))
        frame += count
    text_AL = pad_sequence(text, batch_first=True)
    return SpeechBatch(
        text_AL,
        pad_sequence(codes, batch_first=True),
        text_AL == FRAME,
        torch.cat(rows),
        torch.cat(frames),
        torch.cat(targets),
        torch.cat(places),
        torch.cat(owners),
        len(answers),
    )


def speech_rows(answer: EncodedSpeech) -> list[StreamRow]:
    """The rows of an answer as `inspect` shows them: its text, its frames, and its end."""
    text = [
        StreamRow(
            place, "text", token, "<speech>" if token == BEGIN else repr(chr(token)), (), (False,), (0.0,)
        )
        for place, token in enumerate(answer.text.tolist())
    ]
    weight, books = 1 / answer.num_targets, len(answer.codes_KT)
    frames = [
        StreamRow(
            place, "audio out", FRAME, "<frame>", tuple(map(str, codes)), (True,) * books, (weight,) * books
        )
        for place, codes in enumerate(answer.codes_KT.T.tolist(), len(text))
    ]
    end = StreamRow(answer.num_rows, "audio out", FRAME, "<frame>", ("EOS",), (True,), (weight,))
    return [*text, *frames, *([end] if answer.ended else [])]
