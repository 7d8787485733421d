"""Aligners: a process over JSON lines that fails in every way, and the attention of a model of ours."""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from audiollm.audio import Waveform, save
from audiollm.data.chat.template import Template
from audiollm.data.packing import pack
from audiollm.data.records.aligned_recording import AlignedRecording
from audiollm.data.records.sample import AudioPart, Message, TextPart
from audiollm.data.text.tokenizer import train_text_tokenizer
from audiollm.errors import BadSample, ConfigError
from audiollm.families.dual_ffn.interpreting import DualFFNInterpreter, heard_attention
from audiollm.families.dual_ffn.losses import token_losses
from audiollm.generation.speaking.generator import Generator
from audiollm.interpret.aligners import CommandAligner
from audiollm.interpret.attention_aligner import (
    AttentionAligner,
    attended_rows,
    unit_attention,
)
from audiollm.json_process import JsonProcess
from audiollm.models.decoder import DualFFNConfig
from audiollm.models.dual_ffn import DualFFN

PAIR = AlignedRecording(id="p", audio="a.wav", text="one two", target="eins zwei drei")

PROGRAM = """
import json, sys, time
for line in sys.stdin:
    if not line.strip():
        continue
    asked = json.loads(line)
    what = asked["text"]
    if what == "dies":
        sys.exit(3)
    if what == "hangs":
        time.sleep(60)
    answers = {
        "few": [1.0], "none": {"error": "another language"}, "words": ["a", "b", "c"], "nan": [0.1, float("nan"), 1],
        "text": "no JSON",
    }
    answer = answers.get(what, {"ends": [0.5 * (place + 1) for place in range(len(asked["units"]))]})
    print(answer if what == "text" else json.dumps(answer), flush=True)
"""


def test_a_program_aligns_and_its_failures_are_named(tmp_path: Path) -> None:
    (tmp_path / "align.py").write_text(PROGRAM)
    aligner = CommandAligner(f"{sys.executable} {tmp_path / 'align.py'}", timeout_s=5.0)
    assert aligner.source_ends(PAIR, tmp_path / "a.wav") == [0.5, 1.0, 1.5]
    for text, reason in [
        ("few", "1 times for 3 units"), ("none", "another language"), ("words", "no list of seconds"),
        ("nan", "no list of seconds"), ("text", "no list of seconds"), ("dies", "code 3"),
    ]:  # fmt: skip
        with pytest.raises(BadSample, match=reason) as raised:
            aligner.source_ends(PAIR.model_copy(update={"text": text}), tmp_path / "a.wav")
        assert raised.value.kind == "cannot be aligned"
    assert len(aligner.source_ends(PAIR, tmp_path / "a.wav")) == 3  # started again
    aligner.close()
    hasty = CommandAligner(f"{sys.executable} {tmp_path / 'align.py'}", timeout_s=0.2)
    with pytest.raises(BadSample, match="no answer within 0.2 s"):
        hasty.source_ends(PAIR.model_copy(update={"text": "hangs"}), tmp_path / "a.wav")
    with pytest.raises(ConfigError, match="names no program"):
        CommandAligner("", 1.0)


def test_lines_beside_the_answers_answer_no_question(tmp_path: Path) -> None:
    """A program that says something before its first answer: each later answer would be that of the question before."""
    (tmp_path / "align.py").write_text("print('[1.0, 1.0, 1.0]', flush=True)\n" + PROGRAM)
    aligner = CommandAligner(f"{sys.executable} {tmp_path / 'align.py'}", timeout_s=30.0)
    assert aligner.source_ends(PAIR, tmp_path / "a.wav") == [1.0, 1.0, 1.0]  # nothing tells it from an answer
    deadline = time.monotonic() + 30
    while aligner._process._lines.empty() and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(BadSample, match="beside its answers: one line for each question"):
        aligner.source_ends(PAIR, tmp_path / "a.wav")
    aligner.close()
    process = JsonProcess(f"{sys.executable} {tmp_path / 'align.py'}", 30.0, "--x")
    asked = [{"text": "", "units": [0] * count} for count in (1, 2, 3)]
    next(process.ask(asked))
    (tmp_path / "align.py").write_text(PROGRAM)
    assert [len(json.loads(line)["ends"]) for line in process.ask(asked[1:])] == [2, 3]  # started again
    process.close()


def test_rows_that_all_words_look_at_are_levelled() -> None:
    """A sink takes most of the attention of every word; the rest tells where each word looks."""
    units_NT = torch.full((3, 30), 0.01)
    units_NT[:, 0] = torch.tensor([0.8, 0.82, 0.81])
    for unit, row in enumerate((25, 4, 15)):
        units_NT[unit, row - 2 : row + 3] += 0.03
    assert attended_rows(units_NT) == [27, 6, 17]
    tokens_NT = torch.eye(4, 20)
    found_NT = unit_attention(tokens_NT, [(0, 2), (2, 4), (4, 9), (9, 14)], PAIR.target)
    assert torch.equal(found_NT[0], tokens_NT[:2].mean(0))
    assert torch.equal(found_NT[1], tokens_NT[2])


BOOKS, SIZE = 2, 8
WORDS = ("a", "b", "c", "d", "e", "f", "g", "h")


class LevelGenerator(Generator):
    """Encodes recordings at their own level."""

    def encode(self, waveform: Waveform) -> Tensor:
        return self.codec.encode(waveform.samples_CN)


class WordCodec:
    """A codec whose codes are a sound's level, ten steps of it, 25 frames a second."""

    frame_rate, sample_rate, num_codebooks, codebook_size = 25.0, 24000, BOOKS, SIZE

    def encode(self, samples_1N: Tensor) -> Tensor:
        levels_T = samples_1N[0].unfold(0, 960, 960).mean(1)
        return (levels_T * 10).round().long().clamp(0, SIZE - 1)[None].repeat(BOOKS, 1)


def toy_generator(window: int | None = None) -> Generator:
    template = Template(
        train_text_tokenizer([" ".join(WORDS), "system user assistant"] * 3, 280), BOOKS, SIZE
    )
    torch.manual_seed(0)
    config = DualFFNConfig(
        vocab_size=template.tokenizer.get_vocab_size(), num_codebooks=BOOKS, codebook_size=SIZE + 2, hidden_size=32,
        num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=64, sliding_window=window,
    )  # fmt: skip
    return LevelGenerator(DualFFN(config), WordCodec(), template)  # type: ignore[arg-type]


def test_attention_is_that_of_the_formula() -> None:
    """Against probabilities computed row by row from the projections of the layer itself."""
    generator = toy_generator()
    model = generator.model
    codes_KT = torch.randint(SIZE, (BOOKS, 12), generator=torch.Generator().manual_seed(1))
    found = heard_attention(generator, "a b", codes_KT, "b c", [0])
    messages = [
        Message(role="system", content=[TextPart(text="a b")]),
        Message(role="user", content=[AudioPart(path="x")]),
        Message(role="assistant", content=[TextPart(text="b c")]),
    ]
    batch = pack([generator.template.compile(messages, [codes_KT])])
    layer = model.model.layers[0]
    with torch.no_grad():
        x_SC = layer._norm_in(model.embed_rows(batch), batch.num_text)[batch.row_of_S]
        q = layer.self_attn.q_proj(x_SC).unflatten(-1, (2, 16))
        k = layer.self_attn.k_proj(x_SC).unflatten(-1, (1, 16))
    places = torch.arange(len(x_SC)).float()
    frequencies = model.config.rope_theta ** (-torch.arange(0, 16, 2).float() / 16)
    turn = torch.polar(torch.ones(len(x_SC), 8), places[:, None] * frequencies)

    def rotated(x: Tensor) -> Tensor:
        return (
            torch.view_as_real(torch.complex(x[..., :8], x[..., 8:]) * turn[:, None])
            .transpose(-1, -2)
            .flatten(-2)
        )

    q, k = rotated(q), rotated(k)
    stream = generator.template.compile(messages, [codes_KT])
    texts = [place for place, id in enumerate(stream.text_targets_S.tolist()) if id >= 0]
    own = texts[: len(found.offsets)]
    heard_from = int((stream.kinds_S == 1).nonzero()[0]) + 1
    for number, place in enumerate(own):
        scores = (q[place - 1] @ k[:place, 0].T) / 4
        share = scores.softmax(-1).mean(0)[heard_from : heard_from + 12]
        assert torch.allclose(found.tokens_NT[number], share, atol=1e-6)
    assert found.logprob < 0
    with pytest.raises(ValueError, match="control token"):
        heard_attention(generator, "", codes_KT, "<|eot_id|>", [0])


def question(order: list[int], values: list[int], frames: int) -> tuple[Tensor, str]:
    """Codes of four words in an order, and their translation, whose order is fixed: each word has to be looked for."""
    codes_T = torch.tensor([2 * word + values[word] for word in order]).repeat_interleave(frames)
    return codes_T[None].repeat(BOOKS, 1), " ".join(WORDS[2 * word + values[word]] for word in range(4))


@pytest.mark.slow
def test_a_trained_model_aligns(tmp_path: Path) -> None:
    """Words in any order, of 0.2 s each: the model looks at each one's place while it writes its translation."""
    generator = toy_generator()
    model, template = generator.model, generator.template
    draw = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
    for _ in range(250):
        streams = []
        for _ in range(8):
            order, values = draw.sample(range(4), 4), [draw.randrange(2) for _ in range(4)]
            codes_KT, text = question(order, values, 5)
            messages = [
                Message(role="user", content=[AudioPart(path="x")]),
                Message(role="assistant", content=[TextPart(text=text)]),
            ]
            streams.append(template.compile(messages, [codes_KT]))
        batch = pack(streams)
        loss = token_losses(model, model(batch), batch)["text"] / 8
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    right = total = 0
    for _ in range(8):
        order, values = draw.sample(range(4), 4), [draw.randrange(2) for _ in range(4)]
        codes_KT, target = question(order, values, 5)
        save(tmp_path / "a.wav", (codes_KT[:1] / 10).repeat_interleave(960, 1), 24000)
        pair = AlignedRecording(id="p", audio="a.wav", target=target)
        ends = AttentionAligner(DualFFNInterpreter(generator), "").source_ends(pair, tmp_path / "a.wav")
        right += sum(
            0.2 * order.index(word) < end <= 0.2 * order.index(word) + 0.24 for word, end in enumerate(ends)
        )
        total += 4
        other = " ".join(WORDS[2 * word + 1 - values[word]] for word in range(4))
        with pytest.raises(BadSample, match="nats per token"):
            aligner = AttentionAligner(DualFFNInterpreter(generator), "", min_logprob=-1.0)
            aligner.source_ends(pair.model_copy(update={"target": other}), tmp_path / "a.wav")
    assert right >= 0.8 * total
