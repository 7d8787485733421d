"""A sample compiled to a token stream: one row a position, inputs and targets made in one place.

Targets are the assistant's turns only, without those of weight 0: its text with `<|eot_id|>`, every audio code, and
exactly one EOS a codebook; BOS never. A target stands at its own position; the shift by one happens once, inside
`pack`.

Shapes: S positions, K codebooks, T code frames, F delayed frames.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property

import torch
from tokenizers import Tokenizer
from torch import Tensor

from audiollm.data.chat.delay import IGNORE, delay, delay_targets, delayed_length
from audiollm.data.hearing.features import (
    NOT_IN_CHUNKS,
    ClipFeatures,
    FeatureRows,
    FeatureWindow,
    PartAudio,
    PartSize,
    size_of,
)
from audiollm.data.records.sample import AudioPart, Message, RecordedPhrase, TextPart, refuse_video
from audiollm.data.text import tokenizer as tokens
from audiollm.errors import ConfigError

ROLES = ("system", "user", "assistant")


class Kind(IntEnum):
    """Kind of a position."""

    TEXT = 0
    AUDIO_IN = 1
    AUDIO_OUT = 2
    FEATURE = 3
    """Heard audio through an encoder, as continuous features."""


@dataclass(frozen=True)
class TokenStream:
    """A sample as the model reads it: one row per position."""

    text_ids_S: Tensor
    codes_SK: Tensor
    """Model input at audio positions, zero elsewhere."""
    kinds_S: Tensor
    text_targets_S: Tensor
    audio_targets_SK: Tensor
    features: tuple[FeatureWindow, ...] = ()
    """The windows whose rows are those of the kind `FEATURE`, in their order."""
    pinned_rows: int = 0
    """First rows that a model with a sliding window sees from everywhere; 0: the window forgets all alike."""

    def __len__(self) -> int:
        return len(self.text_ids_S)


@dataclass(frozen=True)
class RowSpan:
    """Rows of one kind in succession: a piece of text, the delayed frames or the features of an audio part."""

    kind: Kind
    ids: list[int]
    """Token ids of the text; audio has only its placeholder."""
    rows: int
    is_target: bool
    is_content: bool
    """A part's own text or frames, and not a mark around it."""
    message: int
    """The number of the message that it belongs to."""
    heard_from: int | None = None
    """First frame (or row of features) of a stream's recording that the rows hold; None: rows hold a whole part."""
    ends_action: bool = False
    """The end of an action of a stream: where a stream may be cut."""
    frames: tuple[int, int] | None = None
    """First and last + 1 frame of the recording that the rows hold, where it is laid out in phrases; None: all."""


@dataclass(frozen=True)
class Template:
    """Headers of a style with Higgs's audio tokens around the delayed codes.

    The published form of Higgs Audio V2 (boson-ai/higgs-audio, `prepare_chatml_sample`): heard audio is
    `<|audio_bos|><|AUDIO|>…<|audio_eos|>` in system and user turns, spoken audio
    `<|audio_out_bos|><|AUDIO_OUT|>…<|audio_eos|>`; each part of a message is encoded by itself. A heard part is given
    as codes or as features of an encoder (`audiollm.data.hearing.features`), which have no rows of delay.

    A recording with phrases (`Message.phrases`) is laid out phrase by phrase: the tokens of its words, which are no
    targets, and `<|audio_out_bos|>…<|audio_eos|>` around its own delayed codes, cut from those of the recording.

    A stream (`Message.chunk_frames`) is laid out compactly, with one decoding of its recording:

        ... user header, <|audio_bos|>, then for each chunk: heard frames as they are, the action, the end of the turn

    Heard frames have no delay: all K codes of a frame are one row, so that a chunk's rows are known when it is over.
    Features are rows of a frozen encoder that heard each chunk from what came before its end (`chunk_features`). An
    action is its text (and speech), and silence is the end of the turn alone, one row. The first token of an action is
    the target of the last heard frame. Everything up to `<|audio_bos|>` is the stream's kept prefix.

    Args:
        tokenizer: the text vocabulary, special tokens included.
        num_codebooks, codebook_size: of the codec; BOS is `codebook_size`, EOS the one after.
        header_style: a name of `HEADER_STYLES`.

    Raises:
        ConfigError: no such style, or a vocabulary without its special tokens.
    """

    tokenizer: Tokenizer
    num_codebooks: int
    codebook_size: int
    header_style: str = "llama3"

    def __post_init__(self) -> None:
        missing = tokens.missing_tokens(self.tokenizer, self.header_style)
        if missing:
            raise ConfigError(
                f"the vocabulary lacks {' '.join(missing)}",
                f"header style {self.header_style}",
                "see audiollm.data.text.tokenizer.add_special_tokens",
            )

    @property
    def audio_bos(self) -> int:
        return self.codebook_size

    @property
    def audio_eos(self) -> int:
        return self.codebook_size + 1

    @property
    def end_of_turn(self) -> int:
        """The token that ends a turn, and every action of a stream."""
        (ending,) = self._mark_ids[self._style.end_of_turn]
        return ending

    def check_codes(self, codes_KT: Tensor) -> None:
        """Raises: ValueError: of another shape or range than this codec's."""
        if codes_KT.ndim != 2 or codes_KT.shape[0] != self.num_codebooks or codes_KT.shape[1] == 0:
            raise ValueError(f"codes must be [{self.num_codebooks}, frames >= 1], not {list(codes_KT.shape)}")
        low, high = torch.aminmax(codes_KT)
        if int(low) < 0 or int(high) >= self.codebook_size:
            raise ValueError(f"codes must be 0..{self.codebook_size - 1}, not {int(low)}..{int(high)}")

    def layout(self, messages: Sequence[Message], sizes: Sequence[PartSize]) -> list[RowSpan]:
        """Lay out the rows of the messages, without their codes and features.

        Args:
            sizes: code frames T, or rows of features, of each audio part, in order of appearance.

        Raises:
            ValueError: the number of sizes differs from that of audio parts, a part is empty, the assistant's speech
                is given as features, a text holds a control token, or there is a video part.
        """
        refuse_video(messages)
        style, remaining = self._style, list(sizes)
        spans = [self._mark(style.begin, 0)] if style.begin else []
        for number, message in enumerate(messages):
            if message.chunk_frames is not None:
                spans += self._stream(messages, number, remaining)
                continue
            speaking, streamed = message.role == "assistant", is_streamed(messages, number)
            is_target = speaking and message.weight > 0
            spans.append(self._mark(style.header(message.role), number))
            if message.phrases:
                spans += self._phrases(message, number, remaining)
            parts = message.content[:-1] if streamed or message.phrases else message.content
            for content_part in parts:
                if isinstance(content_part, TextPart):
                    ids = self._content_ids(content_part.text, message.role)
                    spans.append(RowSpan(Kind.TEXT, ids, len(ids), is_target, True, number))
                    continue
                if not remaining:
                    raise ValueError("more audio parts than codes or features")
                spans += self._audio(remaining.pop(0), speaking, number, is_target)
            if streamed:
                spans.append(self._mark(tokens.AUDIO_BOS, number))
                continue
            ending_is_target = is_target and not message.phrases
            spans.append(self._mark(self._ending(messages, number), number, ending_is_target))
            if style.after_turn:
                spans.append(self._mark(style.after_turn, number))
        if remaining:
            raise ValueError("more codes or features than audio parts")
        return spans

    def length(self, messages: Sequence[Message], sizes: Sequence[PartSize]) -> int:
        """Rows that `compile` would make, from the text and the sizes of the audio parts alone."""
        return sum(span.rows for span in self.layout(messages, sizes))

    def compile(self, messages: Sequence[Message], audio: Sequence[PartAudio]) -> TokenStream:
        """All messages, with the codes `[K, T]` or features of their audio parts in order of appearance.

        Raises:
            ValueError: not as many as audio parts, codes of another shape or range, features of what the assistant
                says, or a text that holds a control token.
        """
        return self._fill(self._checked_layout(messages, audio), audio)

    def prompt(
        self, messages: Sequence[Message], audio: Sequence[PartAudio] = (), words: str = ""
    ) -> TokenStream:
        """The messages, then an opened assistant turn that is about to speak: ends with `<|audio_out_bos|>`.

        Args:
            words: those of the first phrase, where speech is laid out in phrases.
        """
        return self._opened(messages, audio, tokens.AUDIO_OUT_BOS, words)

    def text_prompt(self, messages: Sequence[Message], audio: Sequence[PartAudio] = ()) -> TokenStream:
        """The messages, then an opened assistant turn that is about to write: ends with its header."""
        return self._opened(messages, audio, "")

    def _opened(
        self, messages: Sequence[Message], audio: Sequence[PartAudio], opening: str, words: str = ""
    ) -> TokenStream:
        number = len(messages)
        ids = self.phrase_ids(words)
        opened = [
            self._mark(self._style.header("assistant"), number),
            RowSpan(Kind.TEXT, ids, len(ids), False, True, number),
            *([self._mark(opening, number)] if opening else []),
        ]
        return self._fill([*self._checked_layout(messages, audio), *opened], audio)

    def _checked_layout(self, messages: Sequence[Message], audio: Sequence[PartAudio]) -> list[RowSpan]:
        for audio_input in audio:
            if not isinstance(audio_input, ClipFeatures):
                self.check_codes(audio_input)
        return self.layout(messages, [size_of(audio_input) for audio_input in audio])

    def _fill(self, spans: Iterable[RowSpan], audio: Sequence[PartAudio]) -> TokenStream:
        spans, remaining = list(spans), list(audio)
        features: list[FeatureWindow] = []
        text_ids: list[int] = []
        text_targets: list[int] = []
        for span in spans:
            is_text = span.kind == Kind.TEXT
            text_ids += span.ids if is_text else span.ids * span.rows
            text_targets += span.ids if is_text and span.is_target else [IGNORE] * span.rows
        kinds_S = torch.zeros(len(text_ids), dtype=torch.long)
        codes_SK = torch.zeros(len(text_ids), self.num_codebooks, dtype=torch.long)
        audio_targets_SK = torch.full_like(codes_SK, IGNORE)
        start = 0
        heard_KT = codes_SK[:0].T
        pinned_rows = 0
        for span in spans:
            end = start + span.rows
            kinds_S[start:end] = int(span.kind)
            if span.heard_from is not None:
                if span.heard_from == 0:
                    first, pinned_rows = remaining.pop(0), pinned_rows or start
                    if isinstance(first, ClipFeatures):
                        if not first.is_encoded:
                            raise ValueError(NOT_IN_CHUNKS)
                        features += first.windows
                    else:
                        heard_KT = first
                if span.kind == Kind.AUDIO_IN:
                    codes_SK[start:end] = heard_KT[:, span.heard_from : span.heard_from + span.rows].T
                start = end
                continue
            audio_input = None
            if span.kind != Kind.TEXT:
                is_last = span.frames is None or span.frames[1] == size_of(remaining[0])
                audio_input = remaining.pop(0) if is_last else remaining[0]
            if isinstance(audio_input, ClipFeatures):
                features += audio_input.windows
            elif audio_input is not None:
                if span.frames is not None:
                    audio_input = audio_input[:, slice(*span.frames)]
                codes_SK[start:end] = delay(audio_input, self.audio_bos, self.audio_eos)
                if span.is_target:
                    audio_targets_SK[start:end] = delay_targets(audio_input, self.audio_eos)
            start = end
        text_ids_S, text_targets_S = (torch.tensor(ids, dtype=torch.long) for ids in (text_ids, text_targets))
        return TokenStream(
            text_ids_S, codes_SK, kinds_S, text_targets_S, audio_targets_SK, tuple(features), pinned_rows
        )

    def stream_prompt(self, messages: Sequence[Message], audio: Sequence[PartAudio] = ()) -> TokenStream:
        """The messages, then an opened stream that is about to hear: the kept prefix, ends with `<|audio_bos|>`."""
        spans = self._checked_layout(messages, audio)
        opened = [self._style.header("user"), tokens.AUDIO_BOS]
        stream = self._fill([*spans, *(self._mark(text, len(messages)) for text in opened)], audio)
        return replace(stream, pinned_rows=len(stream))

    def _stream(self, messages: Sequence[Message], number: int, remaining: list[PartSize]) -> list[RowSpan]:
        """Lay out the chunks of a stream and the actions after them."""
        message = messages[number]
        assert message.chunk_frames is not None
        if number == 0 or not is_streamed(messages, number - 1):
            raise ValueError("a stream needs the user's recording as the last part of the message before it")
        if not remaining:
            raise ValueError("more audio parts than codes or features")
        size = remaining.pop(0)
        frames, kind = (size.rows, Kind.FEATURE) if isinstance(size, FeatureRows) else (size, Kind.AUDIO_IN)
        actions = message.actions()
        chunks = -(-frames // message.chunk_frames)
        if len(actions) != chunks:
            raise ValueError(
                f"{len(actions)} actions for {chunks} chunks: {frames} frames in chunks of {message.chunk_frames}"
            )
        audio_in_ids, ending = self._mark_ids[tokens.AUDIO_IN], self._mark_ids[self._style.end_of_turn]
        is_learned = message.weight > 0
        spans: list[RowSpan] = []
        for place, action in enumerate(actions):
            first = place * message.chunk_frames
            rows = min(message.chunk_frames, frames - first)
            spans.append(RowSpan(kind, audio_in_ids, rows, False, True, number, heard_from=first))
            for content_part in action:
                if isinstance(content_part, TextPart):
                    ids = self._content_ids(content_part.text, message.role)
                    spans.append(RowSpan(Kind.TEXT, ids, len(ids), is_learned, True, number))
                elif remaining:
                    spans += self._audio(remaining.pop(0), True, number, is_learned)
                else:
                    raise ValueError("more audio parts than codes or features")
            spans.append(RowSpan(Kind.TEXT, ending, len(ending), is_learned, False, number, ends_action=True))
        return spans

    def _phrases(self, message: Message, number: int, remaining: list[PartSize]) -> list[RowSpan]:
        """Lay out a recording phrase by phrase: the words, then the codes, which alone are learned."""
        if not remaining:
            raise ValueError("more audio parts than codes or features")
        frames = remaining.pop(0)
        if not isinstance(frames, int):
            raise ValueError("what the assistant says is given as codes, never as features")
        spans: list[RowSpan] = []
        for phrase, (first, end) in zip(message.phrases, phrase_frames(message.phrases, frames), strict=True):
            ids = self.phrase_ids(phrase.reading)
            spans.append(RowSpan(Kind.TEXT, ids, len(ids), False, True, number))
            opening, codes, closing = self._audio(end - first, True, number, message.weight > 0)
            spans.append(replace(opening, is_target=False))
            spans.append(replace(codes, frames=(first, end)))
            spans.append(replace(closing, is_target=False))
        return spans

    def phrase_ids(self, text: str) -> list[int]:
        """Return the tokens of a phrase's words: as within a sentence, behind a space. Hidden words have none.

        Raises:
            ValueError: control tokens in the words.
        """
        return self._content_ids(f" {text}", "assistant") if text else []

    def _audio(self, size: PartSize, speaking: bool, message: int, is_target: bool) -> list[RowSpan]:
        featured = isinstance(size, FeatureRows)
        frames = size.rows if isinstance(size, FeatureRows) else size
        if frames < 1:
            raise ValueError("an audio part has no frames")
        if speaking and featured:
            raise ValueError("what the assistant says is given as codes, never as features")
        if speaking:
            opening, kind, placeholder = tokens.AUDIO_OUT_BOS, Kind.AUDIO_OUT, tokens.AUDIO_OUT
        else:
            kind = Kind.FEATURE if featured else Kind.AUDIO_IN
            opening, placeholder = tokens.AUDIO_BOS, tokens.AUDIO_IN
        rows = frames if featured else delayed_length(frames, self.num_codebooks)
        return [
            self._mark(opening, message, is_target),
            RowSpan(kind, self._mark_ids[placeholder], rows, is_target, True, message),
            self._mark(tokens.AUDIO_EOS, message, is_target),
        ]

    def _ending(self, messages: Sequence[Message], number: int) -> str:
        """An assistant's message that is followed by another of its own ends the message and not the turn."""
        style = self._style
        goes_on = [message.role for message in messages[number : number + 2]] == ["assistant", "assistant"]
        return (
            style.end_of_message if goes_on and style.end_of_message in self._mark_ids else style.end_of_turn
        )

    def _mark(self, text: str, message: int, is_target: bool = False) -> RowSpan:
        ids = self._mark_ids[text]
        return RowSpan(Kind.TEXT, ids, len(ids), is_target, False, message)

    def _content_ids(self, text: str, role: str) -> list[int]:
        held = self._control.search(text) if "<|" in text else None
        if held:
            raise ValueError(f"the {role}'s text holds the control token {held[0]}; take it out of the data")
        return self._encode(text)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    @property
    def _style(self) -> tokens.HeaderStyle:
        return tokens.HEADER_STYLES[self.header_style]

    @cached_property
    def _control(self) -> re.Pattern[str]:
        """Control tokens, which would forge a turn or an audio part if a text held them."""
        style = self._style
        control_tokens = [
            *style.special_tokens,
            tokens.AUDIO_DELAY,
            *([style.end_of_message] if style.end_of_message else []),
        ]
        return re.compile("|".join(re.escape(token) for token in control_tokens))

    @cached_property
    def _mark_ids(self) -> dict[str, list[int]]:
        """The ids of everything between the parts: encoded once."""
        style = self._style
        marks = [style.begin, style.end_of_turn, style.after_turn, *tokens.AUDIO_TOKENS]
        marks += [style.header(role) for role in ROLES]
        if style.end_of_message and self.tokenizer.token_to_id(style.end_of_message) is not None:
            marks.append(style.end_of_message)
        return {mark: self._encode(mark) for mark in marks if mark}


def phrase_frames(phrases: Sequence[RecordedPhrase], frames: int) -> list[tuple[int, int]]:
    """Return the first and last + 1 code frame of each phrase; the last phrase ends with the recording.

    Ends are shares of the recording, so that they hold for codes of it at another speed.

    Raises:
        ValueError: a phrase would have no frame.
    """
    last_s = phrases[-1].end_s
    ends = [round(phrase.end_s / last_s * frames) for phrase in phrases]
    spans = list(zip([0, *ends[:-1]], ends, strict=True))
    if any(first >= end for first, end in spans):
        raise ValueError(
            f"{len(phrases)} phrases in {frames} frames: one of them has no frame; make them longer"
        )
    return spans


def is_streamed(messages: Sequence[Message], number: int) -> bool:
    """Return whether a message is the heard side of a stream: the user's, ends with a recording, and actions follow."""
    message = messages[number]
    follows = messages[number + 1] if number + 1 < len(messages) else None
    return (
        message.role == "user"
        and isinstance(message.content[-1], AudioPart)
        and follows is not None
        and follows.chunk_frames is not None
    )
