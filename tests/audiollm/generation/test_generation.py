"""Sampling against closed forms, and the state machine of an answer by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from audiollm.data.chat.delay import delay
from audiollm.data.chat.template import Template
from audiollm.data.text.tokenizer import train_text_tokenizer
from audiollm.generation.engine.request import Limits
from audiollm.generation.engine.sampling import (
    SORTED_CODES,
    SamplingConfig,
    guide,
    pick,
    sample_codes,
    truncate,
)
from audiollm.generation.engine.state import AnswerState, Marks, SpeechState, Text

BOOKS, SIZE = 3, 16
BYTES = train_text_tokenizer(["one two \u6f22\u5b57 three"] * 3, 300)


def uniform(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0))


def test_guidance_of_one_changes_nothing_and_two_squares_the_ratio() -> None:
    full, bare = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    none = SamplingConfig(text_guidance=1, speaker_guidance=1)
    torch.testing.assert_close(guide(full, bare, bare, none).softmax(-1), full.softmax(-1))
    twice = guide(full, bare, None, SamplingConfig(text_guidance=2)).softmax(-1)
    ratio = full.softmax(-1) ** 2 / bare.softmax(-1)
    torch.testing.assert_close(twice, ratio / ratio.sum(-1, keepdim=True))


def test_top_k_and_top_p_keep_what_they_say() -> None:
    logits = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05]).log()
    assert torch.isfinite(truncate(logits, 2, 1.0)).tolist() == [True, True, False, False, False]
    assert torch.isfinite(truncate(logits, 0, 0.69)).tolist() == [True, True, False, False, False]
    assert torch.isfinite(truncate(logits, 0, 0.71)).tolist() == [True, True, True, False, False]
    assert torch.isfinite(truncate(logits, 0, 1e-6)).tolist() == [True, False, False, False, False]
    # both: the share is of what top-k left, 0.5 + 0.2 of 0.85
    assert torch.isfinite(truncate(logits, 3, 0.8)).tolist() == [True, True, False, False, False]


@pytest.mark.parametrize("scale", [0.1, 1.0, 6.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(50, 1.0), (0, 0.9), (0, 0.5), (50, 0.9), (300, 0.95)])
def test_truncation_is_that_of_transformers(scale: float, top_k: int, top_p: float) -> None:
    """Flat distributions, whose nucleus is larger than what is sorted first, and peaked ones."""
    process = pytest.importorskip("transformers.generation.logits_process")
    logits = scale * torch.randn(7, 4 * SORTED_CODES, generator=torch.Generator().manual_seed(1))
    theirs = logits
    if top_k:
        theirs = process.TopKLogitsWarper(top_k)(None, theirs)
    if top_p < 1:
        theirs = process.TopPLogitsWarper(top_p)(None, theirs)
    assert torch.equal(truncate(logits, top_k, top_p), theirs)


def test_draws_follow_the_distribution() -> None:
    shares = torch.tensor([0.6, 0.3, 0.1])
    logits = shares.log().expand(1, 4000, 3)
    for temperature in (1.0, 0.5):
        config = SamplingConfig(temperature=temperature, top_p=1)
        counts = torch.bincount(sample_codes(logits, config, uniform(1, 2, 4000))[0], minlength=3)
        wanted = shares ** (1 / temperature)
        torch.testing.assert_close(counts / 4000, wanted / wanted.sum(), atol=0.03, rtol=0)


def test_a_uniform_number_picks_by_the_cumulated_shares_and_never_what_has_none() -> None:
    shares = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]])
    for number, wanted in ((0.0, 1), (0.249, 1), (0.251, 3), (1.0, 3)):
        assert pick(shares, torch.tensor([number])).tolist() == [wanted]


def test_a_code_that_was_there_twice_in_the_window_is_drawn_again_from_all() -> None:
    """By hand: three codes of shares .9, .08 and .02, top-p of .5, so that code 0 is all that can be drawn at first.

    Codebook 0 had it twice in the window, codebook 1 once: the first is drawn again at temperature 1 from all
    three, with its second number, .95, which lies in code 1's share (.9 to .98); the other keeps code 0.
    """
    logits = torch.tensor([0.9, 0.08, 0.02]).log().expand(1, 2, 3)
    config = SamplingConfig(temperature=0.1, top_p=0.5, ras_window=3, ras_repeats=2)
    numbers = torch.tensor([[[0.5, 0.5], [0.95, 0.95]]])
    recent = torch.tensor([[[0, 0], [-1, 2], [0, 1]]])
    assert sample_codes(logits, config, numbers, recent).tolist() == [[1, 0]]
    assert sample_codes(logits, config, numbers).tolist() == [[0, 0]]


def test_the_window_holds_the_last_rows_and_neither_bos_nor_what_lies_before() -> None:
    speech = SpeechState(marks(), max_frames=9)
    for row in range(1, 4):
        speech.take(np.full(BOOKS, row))
    assert speech.recent_WK(3).tolist() == [[1, -1, -1], [2, 2, -1], [3, 3, 3]]
    assert speech.recent_WK(6).tolist() == [[-1] * 3] * 3 + speech.recent_WK(3).tolist()


def template() -> Template:
    words = ["system user assistant one two three"] * 3
    return Template(train_text_tokenizer(words, 280), BOOKS, SIZE)


def marks() -> Marks:
    return Marks.of(template())


@pytest.mark.parametrize("frames", [1, 2, 7, 200])
def test_speech_makes_the_rows_that_training_has(frames: int) -> None:
    """Whatever is drawn where the pattern has BOS or EOS, `delay` of the frames comes out, and the frames in time."""
    codes_KT = torch.randint(SIZE, (BOOKS, frames), generator=torch.Generator().manual_seed(frames))
    wanted_FK = delay(codes_KT, SIZE, SIZE + 1)
    speech, rows = SpeechState(marks(), max_frames=500), []
    while not speech.closed:
        row = speech.rows
        drawn_K = np.array([5] * BOOKS)  # what a codebook draws before it begins and after it has ended
        for k in range(BOOKS):
            if 0 <= row - 1 - k < frames:
                drawn_K[k] = codes_KT[k, row - 1 - k]
        if row == frames + 1:
            drawn_K[0] = SIZE + 1
        rows.append(speech.last_K.tolist())
        speech.take(drawn_K)
        assert speech.complete == min(frames, max(0, row + 1 - BOOKS))
    assert [*rows, speech.last_K.tolist()] == wanted_FK.tolist()
    assert torch.equal(speech.codes_KT(), codes_KT) and speech.said_end
    assert speech.frame_K(frames - 1).tolist() == codes_KT[:, -1].tolist()


def test_the_limit_ends_speech_as_its_own_end_would() -> None:
    speech = SpeechState(marks(), max_frames=4)
    while not speech.all_complete:
        speech.take(np.full(BOOKS, 7))
    assert speech.codes_KT().tolist() == [[7] * 4] * BOOKS and not speech.said_end


def state(kind: str, room: int = 100, **limits: int) -> AnswerState:
    shape = template()
    first = None if kind == "audio" else 9
    return AnswerState(Marks.of(shape), shape.tokenizer, kind, Limits(**limits), room, first)  # type: ignore[arg-type]


def test_text_then_speech_then_text() -> None:
    """The way of `any`, step by step: what is drawn where something is forced changes nothing."""
    answer, known = state("any"), marks()
    word = template().tokenizer.encode("one").ids[0]
    assert not answer.speaks
    answer.take_text(word)
    answer.take_text(known.opens_speech)
    assert answer.input_id == known.opens_speech and answer.parts[0].text == "one"  # type: ignore[union-attr]
    answer.take_text(known.closes_speech)  # forced: speech follows
    assert answer.speaks and answer.speech.last_K.tolist() == [SIZE] * BOOKS
    said = [answer.take_codes(np.array([code] * BOOKS)) for code in (1, 2, SIZE + 1, 3)]
    # frame 0 lies in rows 1, 2 and 3, frame 1 in rows 2, 3 and 4: codes 1, 2 and then what each row was given
    assert [None if each is None else each[:, 0].tolist() for each in said] == [
        None, None, [1, 2, SIZE + 1], [2, SIZE + 1, 3],
    ]  # fmt: skip
    answer.take_codes(np.array([0] * BOOKS))
    assert answer.speech.closed and answer.speaks
    answer.take_codes(np.array([0] * BOOKS))
    assert answer.input_id == known.closes_speech and answer.reason is None
    answer.take_text(word)
    answer.take_text(next(iter(known.ends)))
    assert answer.reason == "end" and answer.stretches == 1
    assert [part.text for part in answer.parts if isinstance(part, Text)] == ["one", "one"]


def test_what_ends_an_answer() -> None:
    word = template().tokenizer.encode("one").ids[0]
    for limits, room in (({"max_text_tokens": 3}, 100), ({}, 4)):
        answer, count = state("text", room, **limits), 0
        while answer.reason is None:
            answer.take_text(word)
            count += 1
        assert answer.reason == "length" and count == 4
    answer = state("any", max_frames=0)
    answer.take_text(marks().opens_speech)
    assert answer.reason == "length"
    spoken = state("audio", max_frames=2)
    while spoken.reason is None:
        spoken.take_codes(np.array([1] * BOOKS))
    assert spoken.reason == "length" and spoken.speech.complete == 2


@given(
    # a control token's name is encoded as that token, which is never decoded
    st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40).filter(
        lambda text: "<|" not in text
    )
)
def test_any_text_comes_out_as_it_is(words: str) -> None:
    text, tokenizer = Text(BYTES), BYTES
    pieces = [text.take(token) for token in tokenizer.encode(words).ids]
    assert "".join([*pieces, text.finish()]) == text.text == words


def test_text_comes_in_whole_characters() -> None:
    """A vocabulary of bytes: a character of three bytes takes three tokens and comes out with the last."""
    tokenizer = template().tokenizer
    words = "one 漢字 é 😀!"
    ids = tokenizer.encode(words).ids
    assert len(ids) > len(words)
    text = Text(tokenizer)
    pieces = [text.take(token) for token in ids]
    assert "".join(pieces) == text.text == words and text.finish() == ""
    assert all("\ufffd" not in piece for piece in pieces) and "" in pieces
    cut = Text(tokenizer)
    cut.take(ids[0])
    for token in tokenizer.encode("漢").ids[:2]:
        assert cut.take(token) == ""
    assert cut.finish() == "\ufffd" and cut.text.endswith("\ufffd")
