"""Token streams: what is a target and what is not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from audiollm.data.chat.delay import IGNORE
from audiollm.data.chat.template import Kind, Template
from audiollm.data.packing import pack
from audiollm.data.records.sample import AudioPart, Message, TextPart
from audiollm.data.text import tokenizer as tokens
from audiollm.data.text.tokenizer import (
    add_special_tokens,
    header_style_of,
    load_text_tokenizer,
    train_text_tokenizer,
)
from audiollm.errors import ConfigError


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
    """The prompt of generation equals, id by id, the rows before the first audio row in training."""
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
    ends = [0, len(streams[0]), len(streams[0]) + len(streams[1])]
    assert batch.layout.cumulative_lengths.tolist()[:3] == ends
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


chats = st.lists(
    st.builds(
        Message,
        role=st.sampled_from(["system", "user", "assistant"]),
        content=st.lists(
            st.builds(TextPart, text=st.text(max_size=8).filter(lambda text: "<|" not in text))
            | st.builds(AudioPart, path=st.just("clip.wav")),
            min_size=1,
            max_size=3,
        ),
    ),
    min_size=1,
    max_size=5,
)


def codes_for(chat: list[Message], seed: int, books: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    parts = [part for message in chat for part in message.content if isinstance(part, AudioPart)]
    frames = torch.randint(1, 9, (len(parts),), generator=generator).tolist()
    return [torch.randint(32, (books, count), generator=generator) for count in frames]


@given(chats, st.integers(0, 2**31), st.sampled_from(["llama3", "chatml"]))
@settings(max_examples=80)
def test_any_chat(chat: list[Message], seed: int, style: str) -> None:
    """The length is known beforehand; targets are what the assistant says, with one EOS a codebook and part."""
    template = STYLES[style]
    codes = codes_for(chat, seed)
    stream = template.compile(chat, codes)
    assert template.length(chat, [codes_KT.shape[1] for codes_KT in codes]) == len(stream)
    spoken, said, remaining = [], "", list(codes)
    for message in chat:
        for part in message.content:
            codes_KT = None if isinstance(part, TextPart) else remaining.pop(0)
            if message.role != "assistant":
                continue
            if isinstance(part, TextPart):
                said += part.text
            else:
                assert codes_KT is not None
                spoken.append(codes_KT)
                said += tokens.AUDIO_OUT_BOS + tokens.AUDIO_EOS
        if message.role == "assistant":
            said += tokens.HEADER_STYLES[style].end_of_turn
    chosen = stream.text_targets_S[stream.text_targets_S != IGNORE]
    assert template.tokenizer.decode(chosen.tolist(), skip_special_tokens=False) == said
    for book in range(3):
        column = stream.audio_targets_SK[:, book]
        expected = [code for codes_KT in spoken for code in [*codes_KT[book].tolist(), template.audio_eos]]
        assert column[column != IGNORE].tolist() == expected
    audio_S = stream.kinds_S != Kind.TEXT
    chosen_SK = stream.audio_targets_SK != IGNORE
    assert torch.equal(stream.audio_targets_SK[chosen_SK], stream.codes_SK[chosen_SK])
    assert bool((stream.codes_SK[~audio_S] == 0).all()) and not bool(chosen_SK[~audio_S].any())


STYLES = {
    style: Template(train_text_tokenizer(["system user assistant"] * 3, 300, style), 3, 32, style)
    for style in tokens.HEADER_STYLES
}


def test_chatml_is_as_published(tmp_path: Path) -> None:
    """The form of Qwen's chat template: a line break after every turn, never a target; no token at the beginning."""
    template = STYLES["chatml"]
    chat = [
        Message(role="system", content=[TextPart(text="Be brief.")]),
        Message(role="user", content=[TextPart(text="Hi")]),
        Message(role="assistant", content=[TextPart(text="Hello")]),
    ]
    stream = template.compile(chat, [])
    assert template.tokenizer.decode(stream.text_ids_S.tolist(), skip_special_tokens=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello<|im_end|>\n"
    )
    assert int(stream.text_targets_S[-1]) == IGNORE
    assert int(stream.text_targets_S[-2]) == template.tokenizer.token_to_id("<|im_end|>")
    template.tokenizer.save(str(tmp_path / tokens.FILE_NAME))
    assert header_style_of(load_text_tokenizer(tmp_path)) == "chatml"
    with pytest.raises(ConfigError, match=r"lacks <\|begin_of_text\|>"):
        load_text_tokenizer(tmp_path, "llama3")
    with pytest.raises(ConfigError, match="did you mean 'chatml'"):
        Template(template.tokenizer, 3, 32, "chatmi")


def test_an_assistant_that_goes_on_ends_its_message_and_not_its_turn() -> None:
    tokenizer = train_text_tokenizer(["system user assistant"] * 3, 300)
    chat = [Message(role="assistant", content=[TextPart(text=text)]) for text in ("one", "two")]
    ends = {}
    for known in (False, True):
        if known:
            tokenizer.add_special_tokens([AddedToken("<|eom_id|>", special=True)])
        stream = Template(tokenizer, 3, 32).compile(chat, [])
        ends[known] = tokenizer.decode(
            stream.text_targets_S[stream.text_targets_S != IGNORE].tolist(), skip_special_tokens=False
        )
    assert ends == {False: "one<|eot_id|>two<|eot_id|>", True: "one<|eom_id|>two<|eot_id|>"}


@pytest.mark.parametrize("token", ["<|eot_id|>", "<|AUDIO_OUT|>", "<|start_header_id|>", "<|eom_id|>"])
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_a_text_cannot_forge_a_turn(template: Template, role: str, token: str) -> None:
    chat = [Message.model_validate({"role": role, "content": [{"type": "text", "text": f"a {token} b"}]})]
    with pytest.raises(ValueError, match=rf"the {role}'s text holds the control token .*; take it out"):
        template.compile(chat, [])
    with pytest.raises(ValueError, match="control token"):
        template.length(chat, [])


def llama_like() -> Tokenizer:
    """Laid out as Llama 3's tokenizer.json: words first, special tokens after, BOS added by a post-processor."""
    pattern = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    names = ["begin_of_text", "end_of_text", "start_header_id", "end_header_id", "eom_id", "eot_id"]
    tokenizer.add_special_tokens([AddedToken(f"<|{name}|>", special=True) for name in names])
    begin = tokenizer.token_to_id("<|begin_of_text|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", begin)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.enable_truncation(16)
    return tokenizer


def test_a_vocabulary_of_others(tmp_path: Path) -> None:
    tokenizer = llama_like()
    tokenizer.save(str(tmp_path / tokens.FILE_NAME))
    with pytest.raises(ConfigError, match=r"lacks <\|audio_bos\|> .*<\|AUDIO_OUT\|>") as caught:
        load_text_tokenizer(tmp_path)
    assert str(tmp_path) in str(caught.value) and "add_special_tokens" in str(caught.value)
    with pytest.raises(ConfigError, match="lacks"):
        Template(tokenizer, 3, 32)
    before = tokenizer.get_vocab()
    assert add_special_tokens(tokenizer, "llama3") == len(tokens.AUDIO_TOKENS) + 1 + len(tokens.MARKS_IN_TEXT)
    assert add_special_tokens(tokenizer, "llama3") == 0
    assert before.items() <= tokenizer.get_vocab().items()
    tokenizer.save(str(tmp_path / tokens.FILE_NAME))
    template = Template(load_text_tokenizer(tmp_path), 3, 32)
    text = "a text that is longer than what its file would cut"
    stream = template.compile([Message(role="user", content=[TextPart(text=text)])], [])
    assert template.tokenizer.decode(stream.text_ids_S.tolist(), skip_special_tokens=False) == (
        f"<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n{text}<|eot_id|>"
    )
    assert stream.text_ids_S.tolist().count(before["<|begin_of_text|>"]) == 1


def test_a_file_that_is_no_vocabulary(tmp_path: Path) -> None:
    (tmp_path / tokens.FILE_NAME).write_text("{}")
    with pytest.raises(ConfigError, match="not a vocabulary"):
        load_text_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match="no tokenizer.json"):
        load_text_tokenizer(tmp_path / "elsewhere")


def test_marks_of_a_scene_are_tokens_where_the_training_texts_use_them() -> None:
    scene = f"{tokens.SCENE_START}\nA quiet room.\n{tokens.SCENE_END}"
    with_scene, plain = train_text_tokenizer([scene] * 2, 300), train_text_tokenizer(["A room."] * 2, 300)
    assert len(with_scene.encode(tokens.SCENE_START).ids) == 1
    assert plain.token_to_id(tokens.SCENE_START) is None
    assert plain.decode(plain.encode(scene).ids) == scene


def test_a_vocabulary_is_learned_from_texts_that_come_once() -> None:
    """Each text is read once: an iterator works as well as a list, and its error is passed on."""
    scene = f"{tokens.SCENE_START}\nA quiet room.\n{tokens.SCENE_END}"
    texts = [f"number {n} {'seven ' * (n % 5)}" for n in range(300)]
    once, listed = (
        train_text_tokenizer(iter([*texts, scene]), 400),
        train_text_tokenizer([*texts, scene], 400),
    )
    assert once.to_str() == listed.to_str()
    plain = train_text_tokenizer(iter(texts), 400)
    marks = [tokens.SCENE_START, tokens.SCENE_END]
    assert once.get_vocab_size() <= 400 + len(marks) and set(marks) <= set(once.get_vocab())
    assert not set(tokens.MARKS_IN_TEXT) & set(plain.get_vocab())

    def broken() -> Iterator[str]:
        yield "seven"
        raise ConfigError("sample 2 is bad")

    with pytest.raises(ConfigError, match="sample 2 is bad"):
        train_text_tokenizer(broken(), 400)


def test_an_answer_of_weight_0_is_read_and_not_learned(template: Template) -> None:
    """As OpenAI's `weight: 0`: the rows are the same, the targets of the other answers, too."""
    chat = [
        Message(role="user", content=[TextPart(text="hello")]),
        Message(role="assistant", content=[TextPart(text="hello"), AudioPart(path="a.wav")]),
        Message(role="user", content=[TextPart(text="hello")]),
        Message(role="assistant", content=[TextPart(text="hello")]),
    ]
    codes = [torch.zeros(template.num_codebooks, 3, dtype=torch.long)]
    whole = template.compile(chat, codes)
    first = chat[1].model_copy(update={"weight": 0})
    stream = template.compile([chat[0], first, *chat[2:]], codes)
    assert torch.equal(stream.text_ids_S, whole.text_ids_S) and torch.equal(stream.codes_SK, whole.codes_SK)
    assert bool((stream.audio_targets_SK == IGNORE).all()) and not bool(
        (whole.audio_targets_SK == IGNORE).all()
    )
    learned = stream.text_targets_S != IGNORE
    assert int(learned.sum()) == len(template.compile(chat[2:], []).text_targets_S.ne(IGNORE).nonzero())
    assert torch.equal(stream.text_targets_S[learned], whole.text_targets_S[learned])
    with pytest.raises(ValueError, match="the assistant's alone are learned"):
        Message(role="user", content=[TextPart(text="x")], weight=0)
