"""Answers in text and speech as token streams behind their prompts, and packs of them, for a DualFFN.

Targets are those of supervised training, in the answer alone: its text with the end of the turn, the marks around
speech, every code of all codebooks, and one stop per codebook.

Shapes: X text targets and Y rows of audio targets of a pack, K codebooks, T target tokens of all answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from audiollm.data.chat.conditions import corrupt, is_spoken, without_conditions
from audiollm.data.chat.delay import IGNORE
from audiollm.data.chat.template import Kind, Template, TokenStream
from audiollm.data.hearing.features import ClipFeatures, FeatureShape, size_of
from audiollm.data.packing import PackedBatch, idle_pack, pack
from audiollm.data.records.sample import AudioPart, Message, TextPart
from audiollm.errors import BadSample
from audiollm.families.logprobs.token_figures import ForbiddenTargets
from audiollm.families.prompts import PromptedContents


@dataclass(frozen=True)
class PackedAnswers:
    """A pack of answers behind their prompts."""

    pack: PackedBatch
    entry_T: Tensor
    """int64: the place of each token in `[X + Y * K]`: text targets, then codebooks of audio targets, row by row."""
    answer_T: Tensor
    """int64: the answer of each token. Tokens stand in reading order, the codebooks of a frame side by side."""
    num_answers: int
    forbidden_words: ForbiddenTargets | None = None
    """Text tokens that could not be drawn, by text target, where answers were sampled (`sampled_streams`) ..."""
    forbidden_codes: ForbiddenTargets | None = None
    """... and codes, by row of audio targets. They have no probability in any pass over the batch."""

    @property
    def codebook_T(self) -> Tensor:
        """int64: the codebook that each token is a code of, counted from 0; -1: it is a word."""
        texts, books = len(self.pack.text_targets), self.pack.audio_targets_XK.shape[1]
        return torch.where(self.entry_T < texts, -1, (self.entry_T - texts) % books)

    def with_prompts(self) -> PackedAnswers:
        """See `prompt_tokens.ScoredAnswers`."""
        packed, count = self.pack, self.num_answers
        ends_B = packed.layout.cumulative_lengths.long()
        position_T = torch.cat(
            [
                packed.text_target_position,
                packed.audio_target_position.repeat_interleave(packed.audio_targets_XK.shape[1]),
            ]
        )[self.entry_T]
        # the last position of each prompt, whose logits are those of the answer's first token
        last_A = ends_B[:count].scatter_reduce(0, self.answer_T, position_T, "amin", include_self=False)
        position_P = torch.arange(len(packed.row_of_S), device=ends_B.device)
        owner_P = torch.repeat_interleave(ends_B.diff())[: len(position_P)]
        is_prompt_P = owner_P < count
        is_prompt_P &= (position_P > ends_B[owner_P]) & (position_P <= torch.cat([last_A, ends_B])[owner_P])
        is_prompt_P &= packed.row_of_S < len(packed.text_ids_X)
        position_U = position_P[is_prompt_P]
        owner_U, before_U = owner_P[position_U], position_U - 1
        texts = len(packed.text_targets)
        entry_T = torch.where(self.entry_T < texts, self.entry_T, self.entry_T + len(position_U))
        pack_both = replace(
            packed,
            text_target_index=torch.cat([packed.text_target_index, packed.row_of_S[before_U]]),
            text_target_position=torch.cat([packed.text_target_position, before_U]),
            text_targets=torch.cat([packed.text_targets, packed.text_ids_X[packed.row_of_S[position_U]]]),
            text_weights=torch.cat([packed.text_weights, packed.text_weights.new_zeros(len(position_U))]),
            text_sequence=torch.cat([packed.text_sequence, owner_U]),
        )
        forbidden = self.forbidden_words
        if forbidden is not None:
            mask_X = torch.cat([forbidden.mask_X, torch.zeros_like(owner_U)])
            forbidden = forbidden._replace(mask_X=mask_X)
        return PackedAnswers(
            pack_both,
            torch.cat([entry_T, texts + torch.arange(len(position_U), device=entry_T.device)]),
            torch.cat([self.answer_T, owner_U + count]),
            2 * count,
            forbidden,
            self.forbidden_codes,
        )

    def to(self, device: torch.device) -> PackedAnswers:
        """Return the batch on a device."""
        moved = self.pack.to(device)
        return PackedAnswers(
            moved,
            self.entry_T.to(device),
            self.answer_T.to(device),
            self.num_answers,
            None if self.forbidden_words is None else self.forbidden_words.to(device),
            None if self.forbidden_codes is None else self.forbidden_codes.to(device),
        )


def encode_contents(
    template: Template, prompted: PromptedContents, encoder: FeatureShape | None, max_tokens: int
) -> list[TokenStream]:
    """Compile each answer behind the prompt; no target is in the prompt.

    Args:
        encoder: of the model, where it has one.
        max_tokens: positions of a pack, which holds all answers of a prompt.

    Raises:
        BadSample: no answers, an empty one, codes of another codec, features for a model without an encoder, what
            `Template.compile` refuses, or answers that do not fit into one pack together.
    """
    _check_answers(template, prompted, encoder)
    messages, audio = list(prompted.prompt), list(prompted.audio)
    turns = [Message(role="assistant", content=list(answer.content)) for answer in prompted.answers]
    conditions = prompted.conditions
    if (conditions.no_text or conditions.no_speaker) and all(is_spoken([turn]) for turn in turns):
        messages, audio = without_conditions(messages, audio, conditions.no_text, conditions.no_speaker)
    try:
        streams = [
            template.compile([*messages, turn], [*audio, *answer.codes])
            for turn, answer in zip(turns, prompted.answers, strict=True)
        ]
        sizes = [size_of(recording) for recording in (*audio, *prompted.answers[0].codes)]
        spans = template.layout([*messages, turns[0]], sizes)
    except ValueError as error:
        raise bad_prompt(prompted, str(error), "does not compile") from None
    rows = sum(span.rows for span in spans if span.message < len(messages))
    total = sum(map(len, streams))
    if total > max_tokens:
        reason = f"its {len(streams)} answers take {total} positions together, a pack holds {max_tokens}"
        raise bad_prompt(prompted, reason, "too long")
    codes_PK = _prompt_codes(streams[0], rows, prompted, template.codebook_size)
    return [_answer_alone(stream, rows, codes_PK) for stream in streams]


def part_ends_in_stream(
    template: Template, prompted: PromptedContents, streams: Sequence[TokenStream]
) -> list[list[int]]:
    """Find the last position of each part of each answer's content; that of speech is the mark behind it.

    Args:
        streams: what `encode_contents` made of `prompted`.
    """
    answer_ends = []
    for answer, stream in zip(prompted.answers, streams, strict=True):
        turn = Message(role="assistant", content=list(answer.content))
        spans = template.layout([turn], [size_of(codes) for codes in answer.codes])
        place = len(stream) - sum(span.rows for span in spans)  # of this turn's first row, were it alone
        ends = []
        for number, span in enumerate(spans):
            place += span.rows
            if span.is_content:
                is_speech = span.kind != Kind.TEXT
                ends.append(place - 1 + (spans[number + 1].rows if is_speech else 0))
        answer_ends.append(ends)
    return answer_ends


def pack_answers(
    streams: Sequence[TokenStream],
    num_codebooks: int,
    multiple: int = 1,
    encoder: FeatureShape | None = None,
) -> PackedAnswers:
    """Pack answers; what several share is computed once: recordings, and the rows that they begin with alike.

    Args:
        multiple: as `packing.pack` has it.

    Returns:
        The pack; an idle one where there are no answers.
    """
    if streams:
        batch = pack(streams, multiple, encoder=encoder, share=True)
    else:
        batch = idle_pack(num_codebooks, multiple, encoder)
    is_token_X = batch.text_sequence >= 0
    is_token_YK = (batch.audio_targets_XK != IGNORE) & (batch.audio_sequence >= 0)[:, None]
    places = torch.cat([is_token_X, is_token_YK.flatten()]).nonzero()[:, 0]
    books = num_codebooks
    text_key_X = batch.text_target_position * books
    audio_key_YK = (batch.audio_target_position * books)[:, None] + torch.arange(books)
    keys = torch.cat([text_key_X, audio_key_YK.flatten()])[places]
    owners = torch.cat([batch.text_sequence, batch.audio_sequence.repeat_interleave(books)])
    entry_T = places[keys.argsort()]
    return PackedAnswers(batch, entry_T, owners[entry_T], len(streams))


def _answer_alone(stream: TokenStream, rows: int, codes_PK: Tensor) -> TokenStream:
    """Put the prompt's codes into its first rows, and take its targets away."""
    text_targets_S, audio_targets_SK = stream.text_targets_S.clone(), stream.audio_targets_SK.clone()
    text_targets_S[:rows], audio_targets_SK[:rows] = IGNORE, IGNORE
    codes_SK = torch.cat([codes_PK, stream.codes_SK[rows:]])
    return replace(
        stream, codes_SK=codes_SK, text_targets_S=text_targets_S, audio_targets_SK=audio_targets_SK
    )


def _prompt_codes(stream: TokenStream, rows: int, prompted: PromptedContents, codebook_size: int) -> Tensor:
    """Return the input codes of the prompt, a share of those that were spoken in it corrupted."""
    if not prompted.conditions.corrupted:
        return stream.codes_SK[:rows]
    prompt = TokenStream(
        stream.text_ids_S[:rows],
        stream.codes_SK[:rows],
        stream.kinds_S[:rows],
        stream.text_targets_S[:rows],
        stream.audio_targets_SK[:rows],
    )
    generator = torch.Generator().manual_seed(prompted.seed)
    return corrupt(prompt, prompted.conditions.corrupted, codebook_size, generator).codes_SK


def _check_answers(template: Template, prompted: PromptedContents, encoder: FeatureShape | None) -> None:
    if not prompted.answers:
        raise bad_prompt(prompted, "there is no answer", "no answer")
    for answer in prompted.answers:
        texts = [content_part.text for content_part in answer.content if isinstance(content_part, TextPart)]
        has_speech = any(isinstance(content_part, AudioPart) for content_part in answer.content)
        if not has_speech and not "".join(texts).strip():
            raise bad_prompt(prompted, "an answer is empty", "empty answer")
    check_prompt(template, prompted, encoder)


def check_prompt(template: Template, prompted: PromptedContents, encoder: FeatureShape | None) -> None:
    """Check that the model takes the recordings of a prompt and of its answers.

    Raises:
        BadSample: codes of another codec, or features for another encoder or a model without one.
    """
    answer_codes = [codes for answer in prompted.answers for codes in answer.codes]
    for recording in (*prompted.audio, *answer_codes):
        if isinstance(recording, ClipFeatures):
            _check_features(recording, prompted, encoder)
            continue
        try:
            template.check_codes(recording)
        except ValueError as error:
            raise bad_prompt(prompted, str(error), "codes of another codec") from None


def _check_features(features: ClipFeatures, prompted: PromptedContents, encoder: FeatureShape | None) -> None:
    if encoder is None:
        raise bad_prompt(
            prompted,
            "a recording is given as features, and the model has no audio encoder",
            "no audio encoder",
        )
    bins = {len(window.mel_MF) for window in features.windows if window.encoded_RC is None}
    if bins and bins != {encoder.num_mel_bins}:
        reason = f"features of {sorted(bins)} mel bins, the model's encoder takes {encoder.num_mel_bins}"
        raise bad_prompt(prompted, reason, "features of another encoder")


def bad_prompt(prompted: PromptedContents, reason: str, kind: str) -> BadSample:
    """Make the error of a prompt that cannot be used."""
    return BadSample(prompted.place, prompted.id, reason, kind)
