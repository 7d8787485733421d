"""Token streams: what is a target and what is not."""

from __future__ import annotations

import pytest
import torch

from audiollm.data import text_tokenizer as tokens
from audiollm.data.delay import IGNORE
from audiollm.data.packing import pack
from audiollm.data.sample import AudioPart, Message, TextPart
from audiollm.data.template import Kind, Template
from audiollm.data.text_tokenizer import train_text_tokenizer


@pytest.fixture(scope="module")
def template() -> Template:
    tokenizer = train_text_tokenizer(["say seven", "system user assistant", "Speaker: theo"] * 3, 300)
    return Template(tokenizer, num_codebooks=3, codebook_size=32)


def messages() -> list[Message]:
    return [
        Message(role="system", content=[TextPart(text="Speaker: theo")]),
        Message(role="user", content=[TextPart(text="hear "), AudioPart(path="in.wav")]),
        Message(role="assistant", content=[TextPart(text="well"), AudioPart(path="out.wav")]),
    ]


def test_targets_are_the_assistants_alone(template: Template) -> None:
    heard, spoken = torch.randint(32, (3, 4)), torch.randint(32, (3, 6))
    stream = template.compile(messages(), [heard, spoken])
    assert len(stream) == len(stream.kinds_S)
    decoded = template.tokenizer.decode(
        [int(t) for t in stream.text_targets_S if t != IGNORE], skip_special_tokens=False
    )
    assert decoded == f"well{tokens.AUDIO_OUT_BOS}{tokens.AUDIO_EOS}{tokens.END_OF_TURN}"
    assert bool((stream.audio_targets_SK[stream.kinds_S != Kind.AUDIO_OUT] == IGNORE).all())
    for book in range(3):
        column = stream.audio_targets_SK[:, book]
        assert column[column != IGNORE].tolist() == [*spoken[book].tolist(), template.audio_eos]


def test_the_prompt_is_the_beginning_of_the_sample(template: Template) -> None:
    """What generation shows the model is, id by id, what training showed before the first audio row."""
    chat = messages()
    heard, spoken = torch.randint(32, (3, 4)), torch.randint(32, (3, 6))
    chat[2] = Message(role="assistant", content=[AudioPart(path="out.wav")])
    whole, prompt = template.compile(chat, [heard, spoken]), template.prompt(chat[:2], [heard])
    length = len(prompt)
    assert torch.equal(whole.text_ids_S[:length], prompt.text_ids_S)
    assert torch.equal(whole.codes_SK[:length], prompt.codes_SK)
    assert int(whole.kinds_S[length]) == Kind.AUDIO_OUT
    assert whole.codes_SK[length].tolist() == [template.audio_bos] * 3


def test_pack_shifts_by_one_inside_each_sequence(template: Template) -> None:
    chat = messages()
    streams = [template.compile(chat, [torch.randint(32, (3, 2)), torch.randint(32, (3, n))]) for n in (3, 9)]
    batch = pack(streams)
    assert float(batch.text_weights.sum()) == pytest.approx(1.0)
    assert float(batch.audio_weights_XK.sum()) == pytest.approx(1.0)
    assert batch.layout.cumulative_lengths.tolist() == [0, len(streams[0]), len(streams[0]) + len(streams[1])]
    row = 0
    for stream in streams:
        for place in range(len(stream) - 1):
            target = int(stream.text_targets_S[place + 1])
            where = (batch.text_target_index == batch.row_of_S[row + place]).nonzero()
            assert (target != IGNORE) == bool(len(where))
            if len(where):
                assert int(batch.text_targets[where[0, 0]]) == target
        row += len(stream)


@pytest.mark.parametrize(
    "codes", [torch.zeros(2, 4).long(), torch.zeros(3, 0).long(), torch.full((3, 4), 32)]
)
def test_codes_of_another_shape_or_range(template: Template, codes: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="codes must be"):
        template.compile(messages()[1:2], [codes])


def test_codes_and_audio_parts_must_match(template: Template) -> None:
    good = torch.zeros(3, 4).long()
    with pytest.raises(ValueError, match="more codes"):
        template.compile(messages(), [good, good, good])
    with pytest.raises(ValueError, match="more audio parts"):
        template.compile(messages(), [good])


def test_any_text_can_be_written(template: Template) -> None:
    text = "ż 語 \U0001f600 never seen"
    assert template.tokenizer.decode(template.tokenizer.encode(text).ids) == text
