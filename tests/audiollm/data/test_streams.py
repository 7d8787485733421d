"""Streams in the chat template: compact rows, targets, cuts at chunk boundaries, and what is refused."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from audiollm.data.chat.conditions import without_conditions
from audiollm.data.chat.delay import IGNORE, delay
from audiollm.data.chat.fitting import Fitting, fit_stream
from audiollm.data.chat.template import Kind, Template
from audiollm.data.hearing.features import ClipFeatures, FeatureWindow
from audiollm.data.inspection import elide, stream_rows
from audiollm.data.packing import SilenceWeight, pack
from audiollm.data.records.sample import AudioPart, Message, Sample, TextPart, parse_sample
from audiollm.data.text import tokenizer as tokens
from audiollm.data.text.tokenizer import train_text_tokenizer

ACTIONS = ["", "ein", "", "und zwanzig"]


@pytest.fixture(scope="module")
def template() -> Template:
    tokenizer = train_text_tokenizer(["ein und zwanzig", "system user assistant", "Interpret"] * 3, 300)
    return Template(tokenizer, num_codebooks=3, codebook_size=32)


def messages(actions: list[str] = ACTIONS, chunk_frames: int = 4) -> list[Message]:
    return [
        Message(role="system", content=[TextPart(text="Interpret")]),
        Message(role="user", content=[TextPart(text="hear"), AudioPart(path="in.wav")]),
        Message(
            role="assistant", content=[TextPart(text=text) for text in actions], chunk_frames=chunk_frames
        ),
    ]


CODES = torch.randint(32, (3, 14), generator=torch.Generator().manual_seed(0))


def test_a_silence_costs_one_row_and_heard_frames_are_not_delayed(template: Template) -> None:
    stream = template.compile(messages(), [CODES])
    prefix = template.stream_prompt(messages()[:1])
    heard_S = stream.kinds_S == Kind.AUDIO_IN
    assert torch.equal(stream.codes_SK[heard_S].T, CODES)
    end = template.tokenizer.token_to_id(tokens.END_OF_TURN)
    first = int(heard_S.nonzero()[0])
    assert stream.pinned_rows == first
    rows = stream.text_ids_S[first:].tolist()
    placeholder = template.tokenizer.token_to_id(tokens.AUDIO_IN)
    expected: list[int] = []
    for place, text in enumerate(ACTIONS):
        frames = 4 if place < 3 else 2
        ids = template.tokenizer.encode(text, add_special_tokens=False).ids if text else []
        expected += [placeholder] * frames + ids + [end]
    assert rows == expected
    targets = stream.text_targets_S[first:]
    assert targets[~heard_S[first:]].tolist() == [each for each in rows if each != placeholder]
    assert bool((targets[heard_S[first:]] == IGNORE).all())
    assert bool((stream.audio_targets_SK == IGNORE).all())
    # the prompt of the live loop, here without the words that precede the recording, begins alike
    assert prefix.text_ids_S.tolist()[:-1] == stream.text_ids_S[: len(prefix) - 1].tolist()
    assert prefix.pinned_rows == len(prefix)


def test_the_first_token_of_an_action_is_predicted_by_the_last_heard_frame(template: Template) -> None:
    stream = template.compile(messages(), [CODES])
    batch = pack([stream])
    positions = batch.text_target_position[batch.text_weights > 0]
    heard_S = stream.kinds_S == Kind.AUDIO_IN
    last_heard = (heard_S[:-1] & ~heard_S[1:]).nonzero()[:, 0]
    assert set(last_heard.tolist()) <= set(positions.tolist())
    assert batch.layout.pinned_rows[0] == stream.pinned_rows


@pytest.mark.parametrize("normalization", ["sequence", "token"])
def test_silences_weigh_as_asked(template: Template, normalization: str) -> None:
    """Ends of spoken actions, and texts, keep their weight; a sequence still weighs 1, and sums are what is counted."""
    silent = template.compile(messages(["", "", "", ""]), [CODES])
    streams = [template.compile(messages(), [CODES]), silent]
    end = template.end_of_turn
    batch = pack(streams, normalization=normalization, silence=SilenceWeight(end, 0.25))  # type: ignore[arg-type]
    share = []
    for number, stream in enumerate(streams):
        targets, kinds = stream.text_targets_S, stream.kinds_S
        own = [
            0.25 if int(targets[row]) == end and kinds[row - 1] == Kind.AUDIO_IN else 1.0
            for row in (targets != IGNORE).nonzero()[:, 0].tolist()
        ]
        assert own.count(0.25) == (2, 4)[number]
        share += [each / (sum(own) if normalization == "sequence" else 1) for each in own]
    assert batch.text_weights.tolist() == pytest.approx(share)
    assert batch.counts["text"] == pytest.approx(2 if normalization == "sequence" else sum(share))
    plain = pack(streams, normalization=normalization)  # type: ignore[arg-type]
    same = pack(streams, normalization=normalization, silence=SilenceWeight(end, 1.0))  # type: ignore[arg-type]
    assert torch.equal(plain.text_weights, same.text_weights)


def test_speech_of_an_action_is_delayed_inside_the_action(template: Template) -> None:
    content = [
        TextPart(text=""),
        TextPart(text="ein"),
        AudioPart(path="out.wav"),
        TextPart(text=""),
        TextPart(text=""),
    ]
    chat = [*messages()[:2], Message(role="assistant", content=content, chunk_frames=4)]
    spoken = torch.randint(32, (3, 5))
    stream = template.compile(chat, [CODES, spoken])
    said_S = stream.kinds_S == Kind.AUDIO_OUT
    assert torch.equal(stream.codes_SK[said_S], delay(spoken, template.audio_bos, template.audio_eos))
    assert len(chat[2].actions()) == 4


@pytest.mark.parametrize("max_length", range(20, 60, 3))
def test_a_stream_is_cut_at_the_end_of_an_action(template: Template, max_length: int) -> None:
    whole = template.compile(messages(), [CODES])
    stream, plan = fit_stream(template, messages(), [CODES], max_length, "cut")
    ends = (whole.text_targets_S == template.tokenizer.token_to_id(tokens.END_OF_TURN)).nonzero()[:, 0] + 1
    fits = [int(end) for end in ends if end <= max_length]
    if stream is None:
        assert not fits
        assert plan.fitting == Fitting.REFUSED
        return
    assert len(stream) == plan.rows == fits[-1]
    assert stream.pinned_rows == whole.pinned_rows
    assert torch.equal(stream.text_targets_S, whole.text_targets_S[: len(stream)])


def test_a_stream_is_shown_chunk_by_chunk(template: Template) -> None:
    rows = stream_rows(template, template.compile(messages(), [CODES]))
    shown = list(elide(rows, 1))
    assert sum(isinstance(each, list) for each in shown) == 3  # the chunks of 4 frames
    assert (
        sum(
            not isinstance(each, list) and each.token == tokens.END_OF_TURN and any(each.is_target)
            for each in shown
        )
        == 4
    )


def test_conditions_hide_nothing_of_a_stream(template: Template) -> None:
    chat, audio = without_conditions(messages(), [CODES], False, True)
    assert chat[2] == messages()[2]
    assert len(audio) == 1


def test_a_stream_survives_its_record() -> None:
    sample = Sample(id="a", messages=messages(), task="interpret")
    again = parse_sample(sample.model_dump_json().encode(), "here")
    assert again == sample
    assert "chunk_frames" not in again.messages[0].model_dump(mode="json")


def test_what_is_no_stream_is_refused(template: Template) -> None:
    with pytest.raises(ValueError, match="3 actions for 4 chunks: 14 frames in chunks of 4"):
        template.compile(messages(ACTIONS[:3]), [CODES])
    with pytest.raises(ValueError, match="last part of the message before it"):
        template.compile([messages()[0], messages()[2]], [CODES])
    features = ClipFeatures((FeatureWindow(torch.zeros(80, 8), 14),))
    with pytest.raises(ValueError, match="given as a whole"):
        template.compile(messages(), [features])
    with pytest.raises(ValueError, match="control token"):
        template.compile(messages(["", f"a{tokens.END_OF_TURN}", "", ""]), [CODES])
    with pytest.raises(ValidationError, match="actions are the assistant's"):
        Message(role="user", content=[TextPart(text="")], chunk_frames=4)
    with pytest.raises(ValidationError, match="begins with a text part"):
        Message(role="assistant", content=[AudioPart(path="x")], chunk_frames=4)
