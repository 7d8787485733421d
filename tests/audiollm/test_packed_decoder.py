"""The packed layers against the model's own, row by row over a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from audiollm.data.packing import pack
from audiollm.data.sample import Message, TextPart
from audiollm.data.template import Template
from audiollm.data.text_tokenizer import train_text_tokenizer
from audiollm.generation.engine import Engine
from audiollm.generation.request import Limits, Request
from audiollm.generation.sampling import SamplingConfig
from audiollm.models.cache import Cache
from audiollm.models.decoder import DualFFNConfig
from audiollm.models.dual_ffn import DualFFN
from audiollm.models.packed_decoder import PackedDecoder, packed_decoder

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
    [{}, {"sliding_window": 4}, {"audio_ffn_layers": (1,)}, {"qkv_bias": True}, {"qk_norm": True}],
    ids=lambda changes: next(iter(changes), "plain"),
)
@pytest.mark.parametrize("rows", [1, 3])
@torch.no_grad()
def test_the_packed_layers_compute_what_the_model_does(changes: dict[str, Any], rows: int) -> None:
    """After prompts of one length, and of several; the caches stay the same, too."""
    model, shape = model_of(**changes), template()
    packed = packed_decoder(model)
    assert packed is not None
    for lengths in ([7] * rows, [4 + 2 * row for row in range(rows)]):
        text = [Message(role="user", content=[TextPart(text="one " * 9)])]
        stream = shape.text_prompt(text)
        streams = [
            type(stream)(*(each[:length] for each in list(stream.__dict__.values())[:5]))
            for length in lengths
        ]
        caches = [Cache.empty(model.config, rows + 1, 40, torch.device("cpu")) for _ in range(2)]
        for cache in caches:
            model.prefill(pack(streams), cache, range(rows), lengths)
        for step in range(6):
            generator = torch.Generator().manual_seed(step)
            codes_RK = torch.randint(SIZE + 2, (rows, BOOKS), generator=generator)
            wanted = model.extend(torch.zeros(0, dtype=torch.long), codes_RK, caches[0])
            hidden = packed.extend(codes_RK, caches[1])
            torch.testing.assert_close(hidden, wanted, atol=1e-4, rtol=1e-4)
            logits = packed.audio_logits(hidden)
            torch.testing.assert_close(logits, model.audio_logits(wanted), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(caches[0].keys_NRGLD, caches[1].keys_NRGLD, atol=1e-4, rtol=1e-4)
        assert caches[0].lengths == caches[1].lengths == [*(length + 6 for length in lengths), 0]


def test_an_engine_speaks_with_the_weights_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Changed in place between two answers, by an optimizer or by loading, they are packed again, and not sooner."""
    made: list[int] = []
    original = PackedDecoder.__init__
    monkeypatch.setattr(
        PackedDecoder, "__init__", lambda self, model: (made.append(1), original(self, model))[1]
    )
    model, shape, request = model_of(), template(), greedy_request()
    engine = Engine(model, shape, 1, 80)
    before = [engine.run([request])[0].codes_KT for _ in range(2)]
    assert torch.equal(*before) and len(made) == 1
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    after = engine.run([request])[0].codes_KT
    assert len(made) == 2 and not torch.equal(before[0], after)
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
