"""Answers as they were sampled, as token streams behind their prompts; the masks that they were sampled under.

Targets are the actions alone (`SampledTokens`): forced marks, BOS and EOS are inputs and no targets, so that the
log-probabilities of a pack's answers stand beside those of the engine one by one.

Shapes: S positions, X text targets and Y rows of audio targets of a pack, V entries of a head, K codebooks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from audiollm.data.chat.delay import IGNORE, delay, delay_targets
from audiollm.data.chat.template import Kind, Template, TokenStream
from audiollm.data.hearing.features import ClipFeatures, FeatureShape, PartAudio
from audiollm.data.packing import PackedBatch
from audiollm.data.text import tokenizer as tokens
from audiollm.families.dual_ffn.streams import PackedAnswers, bad_prompt, check_prompt, pack_answers
from audiollm.families.logprobs.token_figures import ForbiddenTargets
from audiollm.families.prompts import PromptedContents
from audiollm.generation.engine.request import AnswerKind, SampledTokens
from audiollm.generation.engine.state import Marks, forbidden_codes, forbidden_words


@dataclass(frozen=True)
class SampledStream(TokenStream):
    """A token stream whose targets were sampled."""

    kind: AnswerKind = "any"
    """Which words could be drawn."""


def encode_sampled_contents(
    template: Template,
    prompted: PromptedContents,
    sampled: Sequence[SampledTokens],
    encoder: FeatureShape | None,
    max_tokens: int,
) -> list[SampledStream]:
    """Put sampled answers behind their prompt, token by token; nothing is encoded again.

    Args:
        prompted: the prompt; its `answers` are not read, and its conditions are those of sampling: none.
        sampled: what the engine drew.
        encoder: of the model, where it has one.
        max_tokens: positions of a pack, which holds all answers of a prompt.

    Raises:
        BadSample: no answers, a recording that the model cannot take, codes of another codec, or answers that do not
            fit into one pack together.
    """
    check_prompt(template, prompted, encoder)
    try:
        if prompted.chunk_frames is None:
            prompt = template.text_prompt(prompted.prompt, prompted.audio)
        else:
            before = prompted.before_stream
            prompt = template.stream_prompt(before.prompt, before.audio)
        for answer in sampled:
            for codes in answer.codes:
                template.check_codes(codes)
    except ValueError as error:
        raise bad_prompt(prompted, str(error), "does not compile") from None
    if not sampled:
        raise bad_prompt(prompted, "there is no answer", "no answer")
    streams = [_behind(prompt, _answer_rows(template, answer), answer.kind) for answer in sampled]
    total = sum(map(len, streams))
    if total > max_tokens:
        reason = f"its {len(streams)} answers take {total} positions together, a pack holds {max_tokens}"
        raise bad_prompt(prompted, reason, "too long")
    return streams


def pack_sampled(
    streams: Sequence[TokenStream],
    template: Template,
    vocab_size: int,
    multiple: int = 1,
    encoder: FeatureShape | None = None,
) -> PackedAnswers:
    """Pack answers as `pack_answers` does; those that were sampled get the masks of their sampling.

    Args:
        vocab_size: entries of the model's text head.
    """
    packed = pack_answers(streams, template.num_codebooks, multiple, encoder)
    if not any(isinstance(stream, SampledStream) for stream in streams):
        return packed
    return replace(
        packed,
        forbidden_words=_forbidden_words(template, vocab_size, packed.pack, streams),
        forbidden_codes=_forbidden_codes(template, packed.pack, streams),
    )


def _answer_rows(template: Template, answer: SampledTokens) -> TokenStream:
    """Lay out the rows of an answer: its text tokens, and the delayed codes behind each `<|audio_out_bos|>`.

    Frames that an open request heard stand between, as they are.
    """
    opens = template.tokenizer.token_to_id(tokens.AUDIO_OUT_BOS)
    stretches = iter(zip(answer.codes, answer.ended, strict=True))
    pieces = [_text_rows(template, [], [])]
    ids, is_action = answer.ids_N.tolist(), answer.is_action_N.tolist()
    first = 0
    heard_chunks: dict[int, list[PartAudio]] = {}
    for place, chunk in answer.input_frames:
        heard_chunks.setdefault(place, []).append(chunk)
    for place in range(len(ids) + 1):
        for chunk in heard_chunks.get(place, ()):
            pieces.append(_text_rows(template, ids[first:place], is_action[first:place]))
            pieces.append(_heard_rows(template, chunk))
            first = place
        if place < len(ids) and ids[place] == opens:
            pieces.append(_text_rows(template, ids[first : place + 1], is_action[first : place + 1]))
            pieces.append(_speech_rows(template, *next(stretches)))
            first = place + 1
    pieces.append(_text_rows(template, ids[first:], is_action[first:]))
    return _join_sampled_rows(pieces)


def _text_rows(template: Template, ids: list[int], is_action: list[bool]) -> TokenStream:
    ids_S = torch.tensor(ids, dtype=torch.long)
    targets_S = torch.where(torch.tensor(is_action, dtype=torch.bool), ids_S, IGNORE)
    codes_SK = torch.zeros(len(ids), template.num_codebooks, dtype=torch.long)
    return TokenStream(ids_S, codes_SK, torch.full_like(ids_S, Kind.TEXT), targets_S, codes_SK + IGNORE)


def _heard_rows(template: Template, chunk: PartAudio) -> TokenStream:
    placeholder = template.tokenizer.token_to_id(tokens.AUDIO_IN)
    assert placeholder is not None  # a template has it
    if isinstance(chunk, ClipFeatures):
        kind, windows = Kind.FEATURE, chunk.windows
        codes_SK = torch.zeros(chunk.rows, template.num_codebooks, dtype=torch.long)
    else:
        kind, windows, codes_SK = Kind.AUDIO_IN, (), chunk.T.contiguous()
    ids_S = torch.full((len(codes_SK),), placeholder, dtype=torch.long)
    none_S, kinds_S = torch.full_like(ids_S, IGNORE), torch.full_like(ids_S, kind)
    return TokenStream(ids_S, codes_SK, kinds_S, none_S, codes_SK * 0 + IGNORE, windows)


def _speech_rows(template: Template, codes_KT: Tensor, ended: bool) -> TokenStream:
    codes_SK = delay(codes_KT, template.audio_bos, template.audio_eos)
    targets_SK = delay_targets(codes_KT, template.audio_eos)
    is_end_SK = targets_SK == template.audio_eos
    if ended:  # the first codebook's was drawn
        is_end_SK[:, 0] = False
    placeholder = template.tokenizer.token_to_id(tokens.AUDIO_OUT)
    assert placeholder is not None  # a template has it
    ids_S = torch.full((len(codes_SK),), placeholder, dtype=torch.long)
    return TokenStream(
        ids_S,
        codes_SK,
        torch.full_like(ids_S, Kind.AUDIO_OUT),
        torch.full_like(ids_S, IGNORE),
        targets_SK.masked_fill(is_end_SK, IGNORE),
    )


def _join_sampled_rows(pieces: Sequence[TokenStream]) -> TokenStream:
    return TokenStream(
        torch.cat([piece.text_ids_S for piece in pieces]),
        torch.cat([piece.codes_SK for piece in pieces]),
        torch.cat([piece.kinds_S for piece in pieces]),
        torch.cat([piece.text_targets_S for piece in pieces]),
        torch.cat([piece.audio_targets_SK for piece in pieces]),
        tuple(window for piece in pieces for window in piece.features),
    )


def _behind(prompt: TokenStream, answer: TokenStream, kind: AnswerKind) -> SampledStream:
    none_S, none_SK = torch.full_like(prompt.text_ids_S, IGNORE), torch.full_like(prompt.codes_SK, IGNORE)
    untargeted_prompt = replace(prompt, text_targets_S=none_S, audio_targets_SK=none_SK)
    both = {
        **_join_sampled_rows([untargeted_prompt, answer]).__dict__,
        "pinned_rows": prompt.pinned_rows,
    }
    return SampledStream(**both, kind=kind)


def _forbidden_words(
    template: Template, vocab_size: int, batch: PackedBatch, streams: Sequence[TokenStream]
) -> ForbiddenTargets:
    masks = forbidden_words(template, vocab_size)
    allowed_V = torch.zeros(vocab_size, dtype=torch.bool)
    kinds = {"text": 1, "any": 2, "audio": 0}  # an answer in speech alone draws no words
    mask_A = [kinds[stream.kind] if isinstance(stream, SampledStream) else 0 for stream in streams]
    mask_MKV = torch.stack([allowed_V, masks["text"], masks["any"]])[:, None]
    return ForbiddenTargets(mask_MKV, torch.tensor([*mask_A, 0])[batch.text_sequence])  # -1: filled up


def _forbidden_codes(
    template: Template, batch: PackedBatch, streams: Sequence[TokenStream]
) -> ForbiddenTargets:
    later_KV, first_KV = forbidden_codes(Marks.of(template), template.codebook_size + 2)
    mask_A = torch.tensor([*(isinstance(stream, SampledStream) for stream in streams), False])
    is_sampled_Y = mask_A[batch.audio_sequence]
    codes_YK = batch.codes_YK[(batch.audio_target_index - batch.num_text).clamp_min(0)]
    is_first_Y = (codes_YK == template.audio_bos).all(dim=1)  # the row that is fed before the first frame
    mask_MKV = torch.stack([torch.zeros_like(later_KV), later_KV, first_KV])
    return ForbiddenTargets(mask_MKV, torch.where(is_sampled_Y, 1 + is_first_Y.long(), 0))
