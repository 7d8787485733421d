"""The packed layers against the model's own, row by row over a cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from audiollm.data.chat.template import Template, TokenStream
from audiollm.data.packing import pack
from audiollm.data.records.sample import AudioPart, Message, TextPart
from audiollm.data.text.tokenizer import train_text_tokenizer
from audiollm.generation.engine.engine import Engine
from audiollm.generation.engine.request import Limits, Request
from audiollm.generation.engine.sampling import SamplingConfig
from audiollm.models.cache import Cache
from audiollm.models.decoder import DualFFNConfig
from audiollm.models.dual_ffn import DualFFN
from audiollm.models.packed_decoder import GenerationDecoder, PackedDecoder, RotaryAngles, packed_decoder

BOOKS, SIZE = 3, 16
SHAPE: dict[str, Any] = {
    "vocab_size": 300, "num_codebooks": BOOKS, "codebook_size": SIZE + 2, "hidden_size": 32, "num_layers": 3,
    "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "intermediate_size": 48,
}  # fmt: skip


def model_of(**changes: Any) -> DualFFN:
    torch.manual_seed(0)
    model = DualFFN(DualFFNConfig(**{**SHAPE, **changes})).eval()
    for parameter in model.parameters():  # far from the symmetric start, norms and biases included
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def template() -> Template:
    return Template(train_text_tokenizer(["system user one two"] * 3, 280), BOOKS, SIZE)


def greedy_request() -> Request:
    sampling = SamplingConfig(temperature=0, text_guidance=1, speaker_guidance=1)
    messages = [Message(role="user", content=[TextPart(text="one two")])]
    return Request(messages, sampling=sampling, limits=Limits(max_frames=10))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sliding_window": 4},
        {"sliding_window": 4, "sliding_window_layers": (0,)},
        {"audio_ffn_layers": (1,)},
        {"qkv_bias": True},
        {"qk_norm": True},
    ],
    ids=lambda changes: next(iter(changes), "plain"),
)
@pytest.mark.parametrize("rows", [1, 3])
@torch.no_grad()
def test_the_packed_layers_compute_what_the_model_does(changes: dict[str, Any], rows: int) -> None:
    """Prompts of one length, and of several; steps of codes, of text, and of both; the caches, too."""
    model, shape = model_of(**changes), template()
    packed = packed_decoder(model)
    assert packed is not None
    for lengths in ([7] * rows, [4 + 2 * row for row in range(rows)]):
        streams = [cut(shape, length) for length in lengths]
        caches = [Cache.empty(model.config, rows + 1, 40, torch.device("cpu")) for _ in range(2)]
        for layers, cache in zip((model, packed), caches, strict=True):
            layers.prefill(pack(streams), cache, range(rows), lengths)
        same_caches(*caches)
        for step in range(6):
            generator = torch.Generator().manual_seed(step)
            num_text = (0, 0, rows // 2, rows)[step % 4]
            ids_X = torch.randint(280, (num_text,), generator=generator)
            codes_YK = torch.randint(SIZE + 2, (rows - num_text, BOOKS), generator=generator)
            order_R = torch.randperm(rows, generator=generator) if 0 < num_text < rows else None
            wanted = model.extend(ids_X, codes_YK, caches[0], order_R)
            hidden = packed.extend(ids_X, codes_YK, caches[1], order_R)
            torch.testing.assert_close(hidden, wanted, atol=1e-4, rtol=1e-4)
            logits = packed.audio_logits(hidden)
            torch.testing.assert_close(logits, model.audio_logits(wanted), atol=1e-4, rtol=1e-4)
            words = packed.text_logits(hidden)
            torch.testing.assert_close(words, model.text_logits(wanted), atol=1e-4, rtol=1e-4)
        same_caches(*caches)
        assert caches[0].lengths == caches[1].lengths == [*(length + 6 for length in lengths), 0]


def cut(shape: Template, length: int) -> TokenStream:
    """The first positions of a prompt: text, two frames of codes, text."""
    heard = AudioPart(path="(heard)")
    told = [Message(role="user", content=[TextPart(text="one"), heard, TextPart(text="one " * 9)])]
    stream = shape.text_prompt(told, [torch.arange(2 * BOOKS).view(BOOKS, 2)])
    rows = {name: each[:length] for name, each in stream.__dict__.items() if isinstance(each, torch.Tensor)}
    return replace(stream, **rows)


def same_caches(one: Cache, other: Cache) -> None:
    for name in ("keys_NRGDL", "values_NRGLD"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name), atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_small_steps_take_one_thread_and_leave_the_number_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, seen = torch.get_num_threads(), []
    turn = RotaryAngles.__call__
    monkeypatch.setattr(
        RotaryAngles,
        "__call__",
        lambda self, heads: (seen.append(torch.get_num_threads()), turn(self, heads))[1],
    )
    none_X, codes_YK = torch.zeros(0, dtype=torch.long), torch.zeros(2, BOOKS, dtype=torch.long)
    try:
        torch.set_num_threads(2)
        for changes, wanted in (({}, 1), ({"hidden_size": 1024, "intermediate_size": 2816}, 2)):
            model = model_of(num_layers=1, **changes)
            packed = packed_decoder(model)
            assert packed is not None
            cache = Cache.empty(model.config, 2, 1, torch.device("cpu"))
            packed.extend(none_X, codes_YK, cache)
            assert seen.pop() == wanted and torch.get_num_threads() == 2
            with pytest.raises(ValueError, match="one is full"):
                packed.extend(none_X, codes_YK, cache)
            with pytest.raises(RuntimeError, match="valid range|index_size"):  # in the middle of a step
                cache.lengths = [0, 0]
                packed.extend(none_X, codes_YK + SIZE + 100, cache)
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_an_engine_speaks_with_the_weights_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Changed in place between two answers, by an optimizer or by loading, they are packed again, and not sooner."""
    made: list[int] = []
    original = PackedDecoder.__init__
    monkeypatch.setattr(
        PackedDecoder, "__init__", lambda self, model: (made.append(1), original(self, model))[1]
    )
    model, shape, request = model_of(), template(), greedy_request()
    decoder = GenerationDecoder(model)
    engine = Engine(model, shape, 1, 80, decoder)
    before = [engine.run([request])[0].codes_KT for _ in range(2)]
    assert torch.equal(*before) and len(made) == 1
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    after = engine.run([request])[0].codes_KT
    assert len(made) == 2 and not torch.equal(before[0], after)
    assert torch.equal(after, Engine(model, shape, 1, 80, decoder).run([request])[0].codes_KT)
    assert len(made) == 2  # engines may share it
    assert torch.equal(after, Engine(model, shape, 1, 80).run([request])[0].codes_KT)


def test_what_cannot_be_packed_is_left_to_the_model() -> None:
    peft = pytest.importorskip("peft")
    assert packed_decoder(model_of().double()) is None
    assert packed_decoder(model_of().bfloat16()) is None
    with torch.inference_mode():
        assert packed_decoder(model_of()) is None
    model = model_of()
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["q_proj"]), model)
    assert packed_decoder(model) is None
