"""Answers as tokens behind their prompts, and padded batches of them, for models of transformers.

The tokens of prompt and answer are exactly those that the model reads and would write: the chat template's prompt with
the header of the assistant's turn, the answer, and the token that ends the turn.

Shapes: A answers, L tokens of the longest, T answer tokens of a batch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from audiollm.audio import Waveform
from audiollm.errors import BadSample
from audiollm.models.processor_inputs import (
    InputsError,
    processor_inputs,
    sampling_rate,
    writes_mistral_turns,
)
from audiollm.rl.policy.protocol import PromptedAnswers


@dataclass(frozen=True)
class EncodedAnswer:
    """One answer behind its prompt."""

    tokens: Mapping[str, Tensor]
    """`[tokens]` each, by the processor's keys: `input_ids`, `attention_mask`, ..."""
    features: Mapping[str, Tensor]
    """What the processor makes of the recordings, by its keys; the first dimension goes over recordings or windows.
    The answers to one prompt share the tensors."""
    num_answer_tokens: int
    """Tokens at the end of `tokens` that are the answer's, with the end of the turn."""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens["input_ids"])


@dataclass(frozen=True)
class PaddedAnswers:
    """A batch of answers, padded behind: positions are those of a single sample."""

    inputs: Mapping[str, Tensor]
    """Every key of the processor; tokens are `[A, L]` (and a row for silence, if any), features go over the recordings
    of all answers in order."""
    row_T: Tensor
    """int64: the place, in the flattened `[A * L]`, whose logits predict each answer token."""
    target_T: Tensor
    """int64: the answer tokens, answer after answer."""
    answer_T: Tensor
    """int64: the answer of each token, as the answers were given."""
    num_answers: int

    def to(self, device: torch.device) -> PaddedAnswers:
        """Return the batch on a device."""
        return PaddedAnswers(
            {key: value.to(device, non_blocking=True) for key, value in self.inputs.items()},
            self.row_T.to(device),
            self.target_T.to(device),
            self.answer_T.to(device),
            self.num_answers,
        )


def encode_answers(processor: Any, ends: Collection[int], prompted: PromptedAnswers) -> list[EncodedAnswer]:
    """Encode the answers to a prompt.

    Args:
        ends: ids of the tokens at which the model stops to generate.

    Raises:
        BadSample: a recording or text that the model cannot take, no answers, an empty answer, an answer that holds
            an end of turn, or a chat template whose whole conversation does not begin with its prompt.
    """
    try:
        if not prompted.answers:
            raise InputsError("there is no answer", "no answer")
        prompt = processor_inputs(processor, prompted.prompt, True, prompted.recordings)
        return [_encode_answer(processor, ends, prompted, prompt, answer) for answer in prompted.answers]
    except InputsError as error:
        raise BadSample(prompted.place, prompted.id, error.reason, error.kind) from error


def encode_silence(processor: Any) -> EncodedAnswer:
    """Encode a second of silence without an answer: see `filler` of `pad_answers`."""
    rate = sampling_rate(processor)
    inputs = processor_inputs(processor, [("user", [Waveform(torch.zeros(1, rate), rate)])], True)
    return _split(inputs, inputs, inputs["input_ids"].shape[1], 0)


def pad_answers(
    encoded: Sequence[EncodedAnswer], pad_id: int, filler: EncodedAnswer | None = None
) -> PaddedAnswers:
    """Join answers in the order given; token keys are padded behind with 0, ids with `pad_id`.

    Answers without recordings may stand beside answers with several. Features of other lengths (Qwen3-Omni pads to
    the longest recording of a prompt) are padded with 0, which their masks leave out.

    Args:
        filler: a row without answer tokens that is added where no answer has a recording. The audio encoder then runs
            on every rank and has a gradient, of exactly 0: DDP and FSDP2 wait for ranks whose encoder does not run.

    Raises:
        ValueError: no answers.
    """
    if not encoded:
        raise ValueError("a batch needs at least one answer")
    silent = filler is not None and not any(answer.features for answer in encoded)
    padded = [*encoded, filler] if filler is not None and silent else encoded
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
    return PaddedAnswers(inputs, torch.cat(rows), torch.cat(targets), torch.cat(answers), len(encoded))


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


def _encode_answer(
    processor: Any,
    ends: Collection[int],
    prompted: PromptedAnswers,
    prompt: Mapping[str, Tensor],
    answer: str,
) -> EncodedAnswer:
    if not answer.strip():
        raise InputsError("an answer is empty", "empty answer")
    if writes_mistral_turns(processor):
        whole = _followed_by_answer(processor, prompt, answer)
    else:
        turns = [*prompted.prompt, ("assistant", [answer])]
        whole = processor_inputs(processor, turns, False, prompted.recordings)
    prompt_ids, ids = prompt["input_ids"][0], whole["input_ids"][0]
    start = len(prompt_ids)
    if len(ids) <= start or not torch.equal(ids[:start], prompt_ids):
        raise InputsError(
            "the chat template writes the prompt in another way once it is answered: the whole conversation does not "
            "begin with the tokens that the model would answer to",
            "prompt is no prefix",
        )
    found = [place for place in range(start, len(ids)) if int(ids[place]) in ends]
    if not found:
        raise InputsError(
            f"the chat template ends the answer with none of the tokens {sorted(ends)} at which the model stops",
            "no end of turn",
        )
    if len(found) > 1:
        raise InputsError("an answer contains the token that ends a turn", "end of turn in answer")
    stop = found[0] + 1
    if stop == start + 1:
        raise InputsError("an answer has no tokens", "empty answer")
    return _split(whole, prompt, stop, stop - start)


def _split(
    whole: Mapping[str, Tensor], prompt: Mapping[str, Tensor], stop: int, num_answer_tokens: int
) -> EncodedAnswer:
    """Part inputs into those per token, up to `stop`, and the prompt's features."""
    per_token = [key for key, value in whole.items() if value.shape == whole["input_ids"].shape]
    return EncodedAnswer(
        {key: whole[key][0, :stop] for key in per_token},
        {key: value for key, value in prompt.items() if key not in per_token},
        num_answer_tokens,
    )


def _followed_by_answer(processor: Any, prompt: Mapping[str, Tensor], answer: str) -> dict[str, Tensor]:
    """Return the prompt's inputs with the answer's tokens behind, as mistral-common writes an assistant's turn."""
    tokenizer = processor.tokenizer
    ids = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
    answer_1L = torch.tensor([ids])
    return {
        **prompt,
        "input_ids": torch.cat([prompt["input_ids"], answer_1L], dim=1),
        "attention_mask": torch.cat([prompt["attention_mask"], torch.ones_like(answer_1L)], dim=1),
    }


def _pad_tokens(values: Sequence[Tensor], longest: int, key: str, pad_id: int) -> Tensor:
    fill = pad_id if key == "input_ids" else 0
    return torch.stack([functional.pad(value, (0, longest - len(value)), value=fill) for value in values])


def _join_features(values: Sequence[Tensor]) -> Tensor:
    """Join along the first dimension, the others padded behind to their largest size."""
    sizes = [max(value.shape[axis] for value in values) for axis in range(1, values[0].ndim)]
    padded = []
    for value in values:
        missing = [size - have for size, have in zip(sizes, value.shape[1:], strict=True)]
        padding = [amount for size in reversed(missing) for amount in (0, size)]
        padded.append(functional.pad(value, padding) if any(missing) else value)
    return torch.cat(padded)
