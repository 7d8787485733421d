"""State machine of an answer: the row that is fed next, the effect of a drawn token or code, the complete parts.

An answer is a stream of text and speech. Text is drawn token by token until the turn ends or `<|audio_out_bos|>`
opens a stretch of speech; speech is drawn row by row in the delay pattern (BOS and EOS are forced where the pattern
has them) until its first codebook ends, and the last codebook's EOS returns to text.

Shapes: K codebooks, T complete code frames, W rows of the recent past.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from audiollm.data.chat.template import Template
from audiollm.data.text import tokenizer as tokens
from audiollm.generation.engine.record import Logprobs, TokenRecord
from audiollm.generation.engine.request import AnswerKind, Limits, Reason, SampledTokens, SpokenPhrase

Codes = NDArray[np.int64]
REPLACEMENT = "\ufffd"
MAX_PENDING_TOKENS = 16
"""Most tokens that wait for a whole character; a longer sequence is invalid UTF-8 and is given out as it is."""


@dataclass(frozen=True)
class Marks:
    """Control tokens of a vocabulary and codec that steer an answer."""

    num_codebooks: int
    audio_bos: int
    audio_eos: int
    opens_speech: int
    """`<|audio_out_bos|>`"""
    closes_speech: int
    """`<|audio_eos|>`"""
    ends: frozenset[int]
    """Tokens that end the turn or the message."""

    @classmethod
    def of(cls, template: Template) -> Marks:
        style = tokens.HEADER_STYLES[template.header_style]
        token_id = template.tokenizer.token_to_id
        ends = [token_id(name) for name in (style.end_of_turn, style.end_of_message, style.pad) if name]
        opens, closes = token_id(tokens.AUDIO_OUT_BOS), token_id(tokens.AUDIO_EOS)
        assert opens is not None and closes is not None  # a template has them
        return cls(
            template.num_codebooks,
            template.audio_bos,
            template.audio_eos,
            opens,
            closes,
            frozenset(token for token in ends if token is not None),
        )


class SpeechState:
    """One stretch of speech in the making: delayed rows, from the one that is all BOS.

    Codebook k of frame t lies in row 1 + t + k. The number of frames T is the same in all codebooks, and the first
    one's EOS (row T + 1) tells it: codebook k then has its EOS k rows later, as in training.
    """

    def __init__(self, marks: Marks, max_frames: int) -> None:
        self._marks, self._max_frames = marks, max_frames
        self._rows_FK: Codes = np.full((64, marks.num_codebooks), marks.audio_bos, dtype=np.int64)
        self.rows = 1
        self.frames: int | None = None
        """Number of frames T; None: not known yet."""
        self.said_end = False
        """Whether the model ended the stretch, not the limit."""

    @property
    def last_K(self) -> Codes:
        """The row that is fed next."""
        return self._rows_FK[self.rows - 1]

    @property
    def complete(self) -> int:
        """Number of frames whose codes are complete in all codebooks."""
        done = max(0, self.rows - self._marks.num_codebooks)
        return done if self.frames is None else min(done, self.frames)

    @property
    def all_complete(self) -> bool:
        return self.frames is not None and self.complete == self.frames

    @property
    def closed(self) -> bool:
        """Whether the last row, all EOS, has been made."""
        return self.frames is not None and self.rows == self.frames + self._marks.num_codebooks + 1

    def take(self, drawn_K: Codes) -> None:
        """The next row, with BOS and EOS where the pattern has them."""
        if self.rows == len(self._rows_FK):
            self._rows_FK = np.concatenate([self._rows_FK, np.empty_like(self._rows_FK)])
        row_K, row = self._rows_FK[self.rows], self.rows
        row_K[:] = drawn_K
        if row < len(row_K):
            row_K[row:] = self._marks.audio_bos
        if self.frames is None and (row_K[0] == self._marks.audio_eos or row > self._max_frames):
            self.frames, self.said_end = row - 1, bool(row_K[0] == self._marks.audio_eos)
        if self.frames is not None:
            row_K[: row - self.frames] = self._marks.audio_eos
        self.rows += 1

    def frame_K(self, frame: int) -> Codes:
        """A complete frame."""
        return self._rows_FK[frame + 1 : frame + 1 + self._marks.num_codebooks].diagonal()

    def codes_KT(self) -> Tensor:
        """All complete frames."""
        books = self._marks.num_codebooks
        rows = [self._rows_FK[1 + k : 1 + k + self.complete, k] for k in range(books)]
        return torch.from_numpy(np.stack(rows))

    def recent_WK(self, window: int) -> Codes:
        """The last rows, with -1 for BOS (and for what lies before the first)."""
        rows_WK = self._rows_FK[max(0, self.rows - window) : self.rows]
        missing = ((window - len(rows_WK), 0), (0, 0))
        return np.pad(np.where(rows_WK == self._marks.audio_bos, -1, rows_WK), missing, constant_values=-1)


class IdsDecoder(Protocol):
    """A tokenizer, as far as `Text` needs it; control tokens leave no text."""

    def decode(self, ids: Any, /) -> str:
        """Return the text of token ids."""


class Text:
    """One stretch of text in the making; what it gives out is whole characters.

    Each token is decoded behind those that gave the last piece, since a decoder may look at what comes before (spaces
    at the beginning, runs of bytes). The library's own `DecodeStream` raises on bytes that are no UTF-8.
    """

    def __init__(self, tokenizer: IdsDecoder, in_pieces: bool = True) -> None:
        """`in_pieces`: False where nobody reads along; the text is then decoded once, when it is finished."""
        self._tokenizer, self._in_pieces = tokenizer, in_pieces
        self._ids: list[int] = []
        self._context = self._decoded_end = 0
        """First and last index of the ids of the last piece."""
        self.text = ""

    def take(self, token: int) -> str:
        """Add a token; return the text that it completes, empty while a character is cut in two."""
        self._ids.append(token)
        if not self._in_pieces:
            return ""
        piece = self._beyond()
        cut = piece.endswith(REPLACEMENT) and len(self._ids) - self._decoded_end < MAX_PENDING_TOKENS
        return "" if cut else self._give(piece)

    def finish(self) -> str:
        """Return the remaining text; a character that never became whole is U+FFFD."""
        return self._give(self._beyond())

    def _give(self, piece: str) -> str:
        if piece:
            self._context, self._decoded_end = self._decoded_end, len(self._ids)
            self.text += piece
        return piece

    def _beyond(self) -> str:
        """The text of the ids that have given nothing yet."""
        prefix: str = self._tokenizer.decode(self._ids[self._context : self._decoded_end])
        text: str = self._tokenizer.decode(self._ids[self._context :])
        return text[len(prefix) :]


@dataclass(frozen=True)
class PhraseTokens:
    """A phrase that an answer is to say."""

    ids: Sequence[int]
    """Tokens of its words."""
    max_frames: int

    @classmethod
    def of(cls, phrases: Sequence[SpokenPhrase], template: Template) -> list[PhraseTokens]:
        return [cls(template.phrase_ids(phrase.text), phrase.max_frames) for phrase in phrases]

    def most_rows(self, num_codebooks: int) -> int:
        """Return the rows of the phrase at its longest: words, marks, and the delayed frames."""
        return len(self.ids) + 2 + self.max_frames + num_codebooks + 1


@dataclass
class AnswerState:
    """The state machine of one answer.

    Args:
        first_id: the text token that is fed first; None to begin with speech.
        room: rows that may still be fed.
        record: where tokens are recorded.
    """

    marks: Marks
    tokenizer: Tokenizer
    kind: AnswerKind
    limits: Limits
    room: int
    first_id: int | None
    record: TokenRecord | None = None
    phrases: Sequence[PhraseTokens] = ()
    """Phrases that are said one after the other; the prompt ends with the words of the first."""
    parts: list[Text | SpeechState] = field(default_factory=list, init=False)
    input_id: int | None = field(default=None, init=False)
    """The text token that is fed next; None where a row of codes is."""
    reason: Reason | None = field(default=None, init=False)
    """Why the answer ended; None: it goes on."""
    drawn_end: int | None = field(default=None, init=False)
    """The token that ended the answer; None: it goes on, or a limit ended it."""
    turning: PhraseTokens | None = field(default=None, init=False)
    """The phrase that begins: the rows up to its codes are fed at once (`turn_rows`). None: one row is fed next."""
    _text_tokens: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.input_id = self.first_id
        if self.first_id is None:
            if self.record is not None:
                self.record.forced(self.marks.opens_speech)
            self._open_speech()

    @property
    def speech(self) -> SpeechState:
        """The present stretch of speech."""
        last = self.parts[-1]
        assert isinstance(last, SpeechState)
        return last

    @property
    def stretches(self) -> int:
        """Number of stretches of speech so far."""
        return sum(isinstance(stretch, SpeechState) for stretch in self.parts)

    @property
    def speaks(self) -> bool:
        """Whether the next row is codes, not text."""
        return self.input_id is None

    def tokens(self, has_logprobs: bool) -> SampledTokens | None:
        """Return the tokens of a complete answer; None where they were not recorded."""
        if self.record is None:
            return None
        return self.record.tokens(self.speech_codes(), has_logprobs)

    def speech_codes(self) -> list[tuple[Tensor, bool]]:
        """Return the codes of each stretch of speech, and whether the model ended it."""
        speech = [stretch for stretch in self.parts if isinstance(stretch, SpeechState)]
        return [(stretch.codes_KT(), stretch.said_end) for stretch in speech]

    def unfed(self, end_of_turn: int) -> list[int | Codes]:
        """Return the rows of a finished action that the model has not been fed: its end, as training lays it out.

        Rows that nothing drew are recorded as forced.
        """
        if self.drawn_end is not None:
            return [self.drawn_end]
        rows: list[int | Codes] = []
        forced = [end_of_turn]
        if self.speaks:
            all_eos_K = np.full(self.marks.num_codebooks, self.marks.audio_eos, dtype=np.int64)
            rows = [self.speech.last_K.copy(), all_eos_K]
            forced = [self.marks.closes_speech, end_of_turn]
        for token in forced:
            if self.record is not None:
                self.record.forced(token)
        return [*rows, *forced]

    def take_text(self, token: int, logprob: float = 0.0) -> str:
        """Advance by the token drawn after a text row; return the text that it completes.

        A token that a limit takes away again is not recorded.
        """
        self.room -= 1
        if self.input_id == self.marks.opens_speech:
            self._open_speech()
            return ""
        if token in self.marks.ends:
            self.reason, self.drawn_end = "end", token
            self._record(token, logprob)
            return self._finish_text()
        self._text_tokens += 1
        opens = token == self.marks.opens_speech
        if (
            self._text_tokens > self.limits.max_text_tokens
            or self.room < 1
            or (opens and not self._frames_left(1))
        ):
            self.reason = "length"
            return self._finish_text()
        self.input_id = token
        self._record(token, logprob)
        if opens:
            return self._finish_text()
        if not self.parts or not isinstance(self.parts[-1], Text):
            self.parts.append(Text(self.tokenizer, in_pieces=self.record is None))
        last = self.parts[-1]
        assert isinstance(last, Text)
        return last.take(token)

    def take_codes(self, drawn_K: Codes, logprob_K: Logprobs | None = None) -> Tensor | None:
        """Advance by the codes drawn after a row of codes; return the frames `[K, t]` that they complete.

        Args:
            logprob_K: log-probabilities of the codes, where they are recorded.
        """
        self.room -= 1
        speech = self.speech
        if speech.closed:  # only a text goes on here
            self.input_id = self.marks.closes_speech
            if self.record is not None:
                self.record.forced(self.marks.closes_speech)
            return None
        if self.record is not None and logprob_K is not None:
            self.record.drew_codes(logprob_K)
        before = speech.complete
        speech.take(drawn_K)
        goes_on = self.kind != "audio" and speech.said_end and self.room >= 3
        if speech.all_complete and not self._begin_phrase() and not goes_on:
            self.reason = "end" if self.kind == "audio" and self._said_all else "length"
        if speech.complete == before:
            return None
        return torch.from_numpy(speech.frame_K(before).copy())[:, None]

    def turn_rows(self, shows_words: bool) -> list[int | Codes]:
        """Return the rows from the last one drawn of a phrase to the first one of the next, which is all BOS.

        Args:
            shows_words: False on the side of the guidance that does not see the text.
        """
        assert self.turning is not None
        books = self.marks.num_codebooks
        ended, begun = self.parts[-2:]
        assert isinstance(ended, SpeechState) and isinstance(begun, SpeechState)
        all_eos_K = np.full(books, self.marks.audio_eos, dtype=np.int64)
        words = self.turning.ids if shows_words else ()
        marks = self.marks
        return [ended.last_K, all_eos_K, marks.closes_speech, *words, marks.opens_speech, begun.last_K]

    @property
    def _said_all(self) -> bool:
        """Whether the model itself ended all stretches of speech, and every phrase was said."""
        codes = self.speech_codes()
        return all(ended for _, ended in codes) and (not self.phrases or len(codes) == len(self.phrases))

    def _begin_phrase(self) -> bool:
        """Begin the next phrase; False where there is none, or no room for it."""
        if self.stretches >= len(self.phrases):
            return False
        phrase = self.phrases[self.stretches]
        rows = len(phrase.ids) + 4
        if self._frames_left(rows) < 1:
            return False
        self.room -= rows
        self.turning = phrase
        self._open_speech()
        return True

    def _frames_left(self, rows: int = 0) -> int:
        """Frames that limits and room leave after `rows` more; a stretch of speech takes K rows beside its frames."""
        num_frames = sum(stretch.complete for stretch in self.parts if isinstance(stretch, SpeechState))
        return max(
            0, min(self.limits.max_frames - num_frames, self.room - rows - self.marks.num_codebooks - 1)
        )

    def _open_speech(self) -> None:
        most = self._frames_left()
        if self.phrases:
            most = min(most, self.phrases[self.stretches].max_frames)
        self.parts.append(SpeechState(self.marks, most))
        self.input_id = None
        if self.record is not None:
            self.record.opened_speech()

    def _record(self, token: int, logprob: float) -> None:
        if self.record is not None:
            self.record.drew(token, logprob)

    def _finish_text(self) -> str:
        last = self.parts[-1] if self.parts else None
        return last.finish() if isinstance(last, Text) else ""


def forbidden_words(template: Template, vocab_size: int) -> dict[str, Tensor]:
    """Masks `[V]`, by the kind of the answer, of the tokens that are never drawn: control tokens and unused ids."""
    marks = Marks.of(template)
    vocabulary = template.tokenizer.get_vocab_size(with_added_tokens=True)
    style = tokens.HEADER_STYLES[template.header_style]
    ids = map(template.tokenizer.token_to_id, (*style.special_tokens, tokens.AUDIO_DELAY))
    control = [token for token in ids if token is not None]
    text_V = torch.arange(vocab_size) >= vocabulary
    text_V[[token for token in control if token not in marks.ends]] = True
    any_V = text_V.clone()
    any_V[marks.opens_speech] = False
    return {"text": text_V, "any": any_V}


def forbidden_codes(marks: Marks, num_codes: int) -> tuple[Tensor, Tensor]:
    """Masks `[K, V]` of the codes that are never drawn: BOS, and EOS outside of the first codebook.

    Args:
        num_codes: entries of a codebook, BOS and EOS included.

    Returns:
        The mask of every row, and that of the first row of a stretch of speech, where EOS is forbidden, too: it has at
        least one frame.
    """
    later_KV = torch.zeros(marks.num_codebooks, num_codes, dtype=torch.bool)
    later_KV[:, marks.audio_bos] = True
    later_KV[1:, marks.audio_eos] = True
    first_KV = later_KV.clone()
    first_KV[0, marks.audio_eos] = True
    return later_KV, first_KV
