"""Samples that are too long: what is left is a beginning of the whole, and never teaches a stop that is not there."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from audiollm.data.chat.delay import IGNORE
from audiollm.data.chat.fitting import Fitting, fit_stream, plan_fit
from audiollm.data.chat.template import Kind, Template
from audiollm.data.records.sample import AudioPart, Message, TextPart
from audiollm.data.text.tokenizer import train_text_tokenizer

BOOKS, SIZE = 3, 16
TEMPLATE = Template(train_text_tokenizer(["system user assistant"] * 3, 300), BOOKS, SIZE)

parts = st.builds(TextPart, text=st.sampled_from(["", "a", "some words"])) | st.just(AudioPart(path="a.wav"))
chats = st.lists(
    st.builds(
        Message,
        role=st.sampled_from(["system", "user", "assistant"]),
        content=st.lists(parts, min_size=1, max_size=2),
    ),
    min_size=1,
    max_size=6,
)


def codes_for(chat: list[Message], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    count = sum(isinstance(part, AudioPart) for message in chat for part in message.content)
    frames = torch.randint(1, 12, (count,), generator=generator).tolist()
    return [torch.randint(SIZE, (BOOKS, length), generator=generator) for length in frames]


@given(chats, st.integers(0, 2**31), st.integers(1, 120))
@settings(max_examples=150)
def test_any_chat_in_any_length(chat: list[Message], seed: int, max_length: int) -> None:
    codes = codes_for(chat, seed)
    frames = [codes_KT.shape[1] for codes_KT in codes]
    whole = TEMPLATE.compile(chat, codes)
    stream, plan = fit_stream(TEMPLATE, chat, codes, max_length, "cut")
    assert plan == plan_fit(TEMPLATE, chat, frames, max_length, "cut")
    assert (plan.fitting == Fitting.COMPLETE) == (len(whole) <= max_length)
    if stream is None:
        assert (plan.fitting, plan.rows) == (Fitting.REFUSED, 0)
        return
    assert len(stream) == plan.rows <= max_length
    assert torch.equal(stream.codes_SK, whole.codes_SK[: len(stream)])
    assert torch.equal(stream.kinds_S, whole.kinds_S[: len(stream)])
    if plan.fitting != Fitting.COMPLETE:
        assert bool((stream.text_targets_S != IGNORE).any() | (stream.audio_targets_SK != IGNORE).any())
    if plan.fitting == Fitting.FEWER_TURNS:
        kept = chat[: plan.num_messages]
        assert kept[-1].role == "assistant" != chat[plan.num_messages].role
        count = sum(isinstance(part, AudioPart) for message in kept for part in message.content)
        assert torch.equal(stream.text_ids_S, TEMPLATE.compile(kept, codes[:count]).text_ids_S)
    # the EOS of a codebook is a target as often as that of any other, and as often as whole parts are left
    ends = [(stream.audio_targets_SK[:, book] == TEMPLATE.audio_eos).sum() for book in range(BOOKS)]
    closing = TEMPLATE.tokenizer.token_to_id("<|audio_eos|>")
    assert len({int(end) for end in ends}) == 1
    assert int(ends[0]) - int((stream.text_targets_S == closing).sum()) in (0, 1)
    # every target that is left is that of the whole, but for EOS left out
    chosen_SK = stream.audio_targets_SK != IGNORE
    assert torch.equal(stream.audio_targets_SK[chosen_SK], whole.audio_targets_SK[: len(stream)][chosen_SK])
    missing_SK = (whole.audio_targets_SK[: len(stream)] != IGNORE) & ~chosen_SK
    assert bool((whole.audio_targets_SK[: len(stream)][missing_SK] == TEMPLATE.audio_eos).all())


def speech(frames: int, turns: int = 1) -> tuple[list[Message], list[torch.Tensor]]:
    chat = []
    for _ in range(turns):
        chat.append(Message(role="user", content=[TextPart(text="say it")]))
        chat.append(Message(role="assistant", content=[AudioPart(path="a.wav")]))
    return chat, [torch.randint(SIZE, (BOOKS, frames)) for _ in range(turns)]


@pytest.mark.parametrize("missing", range(1, BOOKS + 4))
def test_a_clip_cut_anywhere_near_its_end_teaches_no_stop(missing: int) -> None:
    """No stop is taught even in the last rows, where the first codebooks have ended and the last have not."""
    chat, codes = speech(20)
    whole = TEMPLATE.compile(chat, codes)
    audio_end = int((whole.kinds_S == Kind.AUDIO_OUT).nonzero()[-1]) + 1
    stream, plan = fit_stream(TEMPLATE, chat, codes, audio_end - missing, "cut")
    assert stream is not None and plan.fitting == Fitting.CUT_SHORT
    assert not bool((stream.audio_targets_SK == TEMPLATE.audio_eos).any())
    eot = TEMPLATE.tokenizer.token_to_id("<|eot_id|>")
    assert not bool((stream.text_targets_S == eot).any())


def test_whole_turns_go_first() -> None:
    chat, codes = speech(10, turns=3)
    lengths = [TEMPLATE.length(chat[: 2 * n], [10] * n) for n in (1, 2, 3)]
    found = {}
    for length in (lengths[2], lengths[2] - 1, lengths[1], lengths[1] - 1, lengths[0], lengths[0] - 1):
        _, plan = fit_stream(TEMPLATE, chat, codes, length, "cut")
        found[length] = (plan.fitting, plan.rows, plan.num_messages)
    assert list(found.values()) == [
        (Fitting.COMPLETE, lengths[2], 6),
        (Fitting.FEWER_TURNS, lengths[1], 4),
        (Fitting.FEWER_TURNS, lengths[1], 4),
        (Fitting.FEWER_TURNS, lengths[0], 2),
        (Fitting.FEWER_TURNS, lengths[0], 2),
        (Fitting.CUT_SHORT, lengths[0] - 1, 2),
    ]


def test_what_has_nothing_left_to_learn_is_refused() -> None:
    chat, codes = speech(20)
    prompt = len(TEMPLATE.prompt(chat[:1]))
    assert fit_stream(TEMPLATE, chat, codes, prompt + BOOKS, "cut")[0] is None
    stream, _ = fit_stream(TEMPLATE, chat, codes, prompt + BOOKS + 1, "cut")  # one code of every codebook
    assert stream is not None and bool((stream.audio_targets_SK != IGNORE).any(dim=0).all())
    assert fit_stream(TEMPLATE, chat[:1], [], 3, "cut")[0] is None
    stream, plan = fit_stream(TEMPLATE, chat, codes, TEMPLATE.length(chat, [20]) - 1, "refuse")
    assert stream is None and plan.fitting == Fitting.REFUSED
