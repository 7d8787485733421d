"""Answers as tokens behind their prompts, and padded batches of them, for models of transformers.

The tokens of prompt and answer are exactly those that the model reads and would write: the chat template's prompt with
the header of the assistant's turn, the answer, and the token that ends the turn.

Shapes: A answers, L tokens of the longest, T answer tokens of a batch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from audiollm.audio import Waveform
from audiollm.errors import BadSample
from audiollm.families.listener.shared_recordings import SharedRecordings, is_of_pictures, shared_recordings
from audiollm.families.logprobs.token_figures import ForbiddenTargets
from audiollm.families.policy import PromptedAnswers
from audiollm.generation.engine.request import SampledTokens
from audiollm.models.audio_llms.inputs import (
    InputsError,
    Pictures,
    Turn,
    TurnPart,
    processor_inputs,
    sampling_rate,
    takes_recordings,
    template_text,
    writes_mistral_turns,
)


@dataclass(frozen=True)
class EncodedAnswer:
    """One answer behind its prompt."""

    tokens: Mapping[str, Tensor]
    """`[tokens]` each, by the processor's keys: `input_ids`, `attention_mask`, ..."""
    features: Mapping[str, Tensor]
    """Tensors that the processor makes of recordings and pictures, by its keys; the first dimension goes over
    recordings, windows, videos or patches. The answers to one prompt share the tensors."""
    num_answer_tokens: int
    """Tokens at the end of `tokens` that are the answer's, with the end of the turn."""
    is_sampled: bool = False
    """Whether the answer was sampled from the model, which never draws the tokens that stand for recordings."""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens["input_ids"])


@dataclass(frozen=True)
class PaddedAnswers:
    """A batch of answers, padded behind: positions are those of a single sample."""

    inputs: Mapping[str, Tensor]
    """Every key of the processor; tokens are `[A, L]` (and a filler's row, if any), features go over the recordings
    and videos of all answers in order."""
    row_T: Tensor
    """int64: the place, in the flattened `[A * L]`, whose logits predict each answer token."""
    target_T: Tensor
    """int64: the answer tokens, answer after answer."""
    answer_T: Tensor
    """int64: the answer of each token, as the answers were given."""
    num_answers: int
    shared: SharedRecordings
    """Rows that have the recordings of another one."""
    sampled_A: Tensor
    """bool: whether the answer was sampled."""
    never_drawn: tuple[int, ...] = ()
    """Ids that have no probability in sampled answers."""

    def forbidden(self, num_words: int) -> ForbiddenTargets | None:
        """Return the mask that sampled answers were drawn under; None where there is none."""
        if not self.never_drawn or not bool(self.sampled_A.any()):
            return None
        mask_MKV = torch.zeros(2, 1, num_words, dtype=torch.bool, device=self.row_T.device)
        mask_MKV[1, :, list(self.never_drawn)] = True
        return ForbiddenTargets(mask_MKV, self.sampled_A.long()[self.answer_T])

    def with_prompts(self) -> PaddedAnswers:
        """See `prompt_tokens.ScoredAnswers`."""
        ids_AL, count = self.inputs["input_ids"], self.num_answers
        longest = ids_AL.shape[1]
        first_A = torch.full((count,), longest, device=ids_AL.device)  # of each answer's own tokens
        first_A = first_A.scatter_reduce(0, self.answer_T, self.row_T % longest + 1, "amin")
        place_L = torch.arange(longest, device=ids_AL.device)
        stands_AL = torch.isin(ids_AL[:count], ids_AL.new_tensor(self.never_drawn))
        owner_U, place_U = ((place_L > 0) & (place_L < first_A[:, None]) & ~stands_AL).nonzero(as_tuple=True)
        return replace(
            self,
            row_T=torch.cat([self.row_T, owner_U * longest + place_U - 1]),
            target_T=torch.cat([self.target_T, ids_AL[owner_U, place_U]]),
            answer_T=torch.cat([self.answer_T, owner_U + count]),
            num_answers=2 * count,
            sampled_A=torch.cat([self.sampled_A, torch.zeros_like(self.sampled_A)]),
        )

    def to(self, device: torch.device) -> PaddedAnswers:
        """Return the batch on a device."""
        return PaddedAnswers(
            {key: value.to(device, non_blocking=True) for key, value in self.inputs.items()},
            self.row_T.to(device),
            self.target_T.to(device),
            self.answer_T.to(device),
            self.num_answers,
            self.shared,
            self.sampled_A.to(device),
            self.never_drawn,
        )


def encode_answers(processor: Any, ends: Collection[int], prompted: PromptedAnswers) -> list[EncodedAnswer]:
    """Encode the answers to a prompt; its recordings are resampled and analysed once.

    Args:
        ends: ids of the tokens at which the model stops to generate.

    Raises:
        BadSample: a recording or text that the model cannot take, no answers, an empty answer, an answer that holds
            an end of turn, or a chat template whose whole conversation does not begin with its prompt.
    """
    try:
        if not prompted.answers:
            raise InputsError("there is no answer", "no answer")
        prompt = encode_prompt(processor, prompted)
        return [
            _with_answer(prompt, _answer_ids(processor, ends, prompted.prompt, answer))
            for answer in prompted.answers
        ]
    except InputsError as error:
        raise BadSample(prompted.place, prompted.id, error.reason, error.kind) from error


def encode_prompt(processor: Any, prompted: PromptedAnswers) -> EncodedAnswer:
    """Encode a prompt without an answer; it ends with the header of the assistant's turn.

    Raises:
        InputsError: a recording or text that the model cannot take.
    """
    return _split_inputs(processor_inputs(processor, prompted.prompt, True, prompted.recordings))


def encode_sampled_answers(
    processor: Any, prompted: PromptedAnswers, sampled: Sequence[SampledTokens]
) -> list[EncodedAnswer]:
    """Put answers behind their prompt as they were sampled, token by token; the end of the turn is there if drawn.

    Raises:
        BadSample: a recording or text that the model cannot take, no answers, speech, or an answer without tokens.
    """
    try:
        if not sampled:
            raise InputsError("there is no answer", "no answer")
        if any(answer.codes for answer in sampled):
            raise InputsError("an answer is speech, and this policy writes text", "spoken answer")
        if not all(len(answer.ids_N) for answer in sampled):
            raise InputsError("an answer has no tokens", "empty answer")
        prompt = encode_prompt(processor, prompted)
        return [replace(_with_answer(prompt, answer.ids_N.tolist()), is_sampled=True) for answer in sampled]
    except InputsError as error:
        raise BadSample(prompted.place, prompted.id, error.reason, error.kind) from error


def part_ends_in_tokens(
    processor: Any, prompted: PromptedAnswers, encoded: Sequence[EncodedAnswer]
) -> list[list[int]]:
    """Find the position, in each encoded answer, of the token that holds the last character of each of its parts.

    Args:
        encoded: what `encode_answers` made of `prompted`.

    Raises:
        BadSample: the processor cannot tell which characters a token holds, or its chat template rewrites the answer.
    """
    try:
        return [
            _ends_of(processor, prompted.prompt, parts, answer)
            for parts, answer in zip(prompted.parts, encoded, strict=True)
        ]
    except InputsError as error:
        raise BadSample(prompted.place, prompted.id, error.reason, error.kind) from error


def encode_filler(processor: Any, with_pictures: bool = False) -> EncodedAnswer:
    """Encode a second of silence, and two dark pictures, without an answer: see `filler` of `pad_answers`.

    A model that sees alone has no silence.
    """
    parts: list[TurnPart] = []
    if with_pictures:
        parts.append(Pictures((np.zeros((28, 28, 3), np.uint8),) * 2, (0.25, 0.75)))
    if takes_recordings(processor):
        rate = sampling_rate(processor)
        parts.append(Waveform(torch.zeros(1, rate), rate))
    return _split_inputs(processor_inputs(processor, [("user", parts or ["."])], True))


def pad_answers(
    encoded: Sequence[EncodedAnswer],
    pad_id: int,
    filler: EncodedAnswer | None = None,
    never_drawn: Sequence[int] = (),
) -> PaddedAnswers:
    """Join answers in the order given; token keys are padded behind with 0, ids with `pad_id`.

    Answers without recordings may stand beside answers with several. Features of other lengths (Qwen3-Omni pads to
    the longest recording of a prompt) are padded with 0, which their masks leave out.

    Args:
        filler: a row without answer tokens that is added where no answer has a recording, or none has pictures and
            the filler has. The encoders then run on every rank and have a gradient, of exactly 0: DDP and FSDP2 wait
            for ranks whose encoder does not run.
        never_drawn: ids that have no probability in sampled answers.

    Raises:
        ValueError: no answers.
    """
    if not encoded:
        raise ValueError("a batch needs at least one answer")
    padded = list(encoded)
    if filler is not None and not _kinds([filler]) <= _kinds(encoded):
        padded.append(filler)
    longest = max(answer.num_tokens for answer in padded)
    inputs = {
        key: _pad_tokens([a.tokens[key] for a in padded], longest, key, pad_id) for key in encoded[0].tokens
    }
    for key in dict.fromkeys(key for answer in padded for key in answer.features):
        inputs[key] = _join_features([answer.features[key] for answer in padded if key in answer.features])
    rows, targets, answers = [], [], []
    for number, answer in enumerate(encoded):
        first = answer.num_tokens - answer.num_answer_tokens
        rows.append(torch.arange(first - 1, answer.num_tokens - 1) + number * longest)
        targets.append(answer.tokens["input_ids"][first:])
        answers.append(torch.full((answer.num_answer_tokens,), number))
    return PaddedAnswers(
        inputs,
        torch.cat(rows),
        torch.cat(targets),
        torch.cat(answers),
        len(encoded),
        shared_recordings([answer.features for answer in padded]),
        torch.tensor([answer.is_sampled for answer in encoded], dtype=torch.bool),
        tuple(never_drawn),
    )


def pad_prompts(prompts: Sequence[EncodedAnswer], pad_id: int) -> tuple[dict[str, Tensor], SharedRecordings]:
    """Join prompts that are answered by `generate`: padded in front, with 0 in all keys but the ids.

    Returns:
        The inputs, and the rows that have the recordings of another one.
    """
    longest = max(prompt.num_tokens for prompt in prompts)
    inputs = {
        key: _pad_tokens([prompt.tokens[key] for prompt in prompts], longest, key, pad_id, in_front=True)
        for key in prompts[0].tokens
    }
    for key in dict.fromkeys(key for prompt in prompts for key in prompt.features):
        inputs[key] = _join_features([prompt.features[key] for prompt in prompts if key in prompt.features])
    return inputs, shared_recordings([prompt.features for prompt in prompts])


def batches_by_length(groups: Sequence[Sequence[EncodedAnswer]], max_tokens: int) -> list[list[int]]:
    """Plan batches of whole groups (a pair, a list), sorted by length, so that little is padded.

    Args:
        groups: answers that stay in one batch.
        max_tokens: padded tokens per batch (answers times the longest); a larger group has a batch of its own.

    Returns:
        Numbers of the groups of each batch, longest groups first; each group is in one batch.
    """
    lengths = [max(answer.num_tokens for answer in group) for group in groups]
    order = sorted(range(len(groups)), key=lambda number: -lengths[number])
    batches: list[list[int]] = []
    longest = answers = 0
    for number in order:
        answers += len(groups[number])
        if not batches or answers * longest > max_tokens:
            batches.append([])
            longest, answers = lengths[number], len(groups[number])
        batches[-1].append(number)
    return batches


def _with_answer(prompt: EncodedAnswer, answer_ids: Sequence[int]) -> EncodedAnswer:
    """Put an answer's tokens behind a prompt: attended to, and of the kind 0 (text) in all other keys per token."""
    answer_L = torch.tensor(answer_ids)
    behind = {"input_ids": answer_L, "attention_mask": torch.ones_like(answer_L)}
    return EncodedAnswer(
        {
            key: torch.cat([value, behind.get(key, torch.zeros_like(answer_L)).to(value.dtype)])
            for key, value in prompt.tokens.items()
        },
        prompt.features,
        len(answer_ids),
    )


def _answer_ids(processor: Any, ends: Collection[int], turns: Sequence[Turn], answer: str) -> list[int]:
    """Return the tokens of an answer, as the model would write them, with the one that ends its turn."""
    if not answer.strip():
        raise InputsError("an answer is empty", "empty answer")
    tokenizer = processor.tokenizer
    if writes_mistral_turns(processor):
        behind = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
    else:
        behind = _behind_prompt(processor, turns, answer)
    end_places = [place for place, id in enumerate(behind) if id in ends]
    if not end_places:
        raise InputsError(
            f"the chat template ends the answer with none of the tokens {sorted(ends)} at which the model stops",
            "no end of turn",
        )
    if len(end_places) > 1:
        raise InputsError("an answer contains the token that ends a turn", "end of turn in answer")
    if end_places[0] == 0:
        raise InputsError("an answer has no tokens", "empty answer")
    return behind[: end_places[0] + 1]


def _behind_prompt(processor: Any, turns: Sequence[Turn], answer: str) -> list[int]:
    """Return the tokens that the chat template writes behind the prompt; recordings stand as their placeholders."""
    prompt = template_text(processor, turns, True)
    conversation = template_text(processor, [*turns, ("assistant", [answer])], False)
    prompt_ids, ids = (
        processor.tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, conversation)
    )
    if ids[: len(prompt_ids)] != prompt_ids:
        raise InputsError(
            "the chat template writes the prompt in another way once it is answered: the whole conversation does not "
            "begin with the tokens that the model would answer to",
            "prompt is no prefix",
        )
    return list(ids[len(prompt_ids) :])


def _ends_of(
    processor: Any, turns: Sequence[Turn], parts: Sequence[str], encoded: EncodedAnswer
) -> list[int]:
    kind, tokenizer = "no ends of steps", processor.tokenizer
    if writes_mistral_turns(processor) or not tokenizer.is_fast:
        raise InputsError("this model's tokenizer does not tell which characters a token holds", kind)
    answer = "".join(parts)
    prompt = template_text(processor, turns, True)
    conversation = template_text(processor, [*turns, ("assistant", [answer])], False)
    bare = answer.strip()  # some templates take the spaces around an answer away
    first = conversation.find(answer, len(prompt))
    if first < 0:
        if bare not in conversation[len(prompt) :]:
            raise InputsError(
                "the chat template rewrites the answer: the ends of its steps are not found", kind
            )
        first = conversation.find(bare, len(prompt)) - answer.index(bare)
    spans = tokenizer(conversation, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    answer_spans = spans[len(tokenizer(prompt, add_special_tokens=False)["input_ids"]) :][
        : encoded.num_answer_tokens
    ]
    begin, ends, length = encoded.num_tokens - encoded.num_answer_tokens, [], 0
    for step in parts:
        length += len(step)
        ends.append(begin - 1 + sum(start < first + length for start, _ in answer_spans[:-1]))
    return ends


def _split_inputs(inputs: Mapping[str, Tensor]) -> EncodedAnswer:
    """Part a prompt's inputs into those per token and the features of its recordings and pictures."""
    shape = inputs["input_ids"].shape
    # a mask over frames may have as many frames as there are tokens
    per_token = [key for key, value in inputs.items() if value.shape == shape and "feature" not in key]
    return EncodedAnswer(
        {key: inputs[key][0] for key in per_token},
        {key: value for key, value in inputs.items() if key not in per_token},
        0,
    )


def _kinds(encoded: Sequence[EncodedAnswer]) -> set[bool]:
    """Which features there are: True stands for pictures, False for sound."""
    return {is_of_pictures(key) for answer in encoded for key in answer.features}


def _pad_tokens(
    values: Sequence[Tensor], longest: int, key: str, pad_id: int, in_front: bool = False
) -> Tensor:
    fill = pad_id if key == "input_ids" else 0
    missing = [longest - len(value) for value in values]
    sides = [(rows, 0) if in_front else (0, rows) for rows in missing]
    return torch.stack(
        [functional.pad(value, side, value=fill) for value, side in zip(values, sides, strict=True)]
    )


def _join_features(values: Sequence[Tensor]) -> Tensor:
    """Join along the first dimension, the others padded behind to their largest size."""
    sizes = [max(value.shape[axis] for value in values) for axis in range(1, values[0].ndim)]
    padded = []
    for value in values:
        missing = [size - have for size, have in zip(sizes, value.shape[1:], strict=True)]
        padding = [amount for size in reversed(missing) for amount in (0, size)]
        padded.append(functional.pad(value, padding) if any(missing) else value)
    return torch.cat(padded)
