"""Sampling and the engine: closed forms, and independence of a prompt from its batch."""

from __future__ import annotations

import pytest
import torch

from audiollm.data.sample import Message, TextPart
from audiollm.data.template import Template
from audiollm.data.text_tokenizer import train_text_tokenizer
from audiollm.generation.engine import Prompt, generate_codes
from audiollm.generation.sampling import SamplingConfig, draw, guide, truncate
from audiollm.models.decoder import DualFFNConfig
from audiollm.models.dual_ffn import DualFFN


def generators(count: int, seed: int = 0) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed + i) for i in range(count)]


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


def test_draws_follow_the_distribution() -> None:
    shares = torch.tensor([0.6, 0.3, 0.1])
    logits = shares.log().expand(1, 4000, 3)
    counts = torch.bincount(
        draw(logits, SamplingConfig(temperature=1, top_p=1), generators(1))[0], minlength=3
    )
    torch.testing.assert_close(counts / 4000, shares, atol=0.03, rtol=0)
    cold = torch.bincount(
        draw(logits, SamplingConfig(temperature=0.5, top_p=1), generators(1))[0], minlength=3
    )
    torch.testing.assert_close(cold / 4000, shares**2 / (shares**2).sum(), atol=0.03, rtol=0)


@pytest.fixture(scope="module")
def speaking() -> tuple[DualFFN, Template]:
    template = Template(train_text_tokenizer(["system user assistant one two three"] * 3, 280), 3, 16)
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2, "head_dim": 16}
    config = DualFFNConfig(
        template.tokenizer.get_vocab_size(), num_codebooks=3, codebook_size=18, intermediate_size=64, **shape
    )
    model = DualFFN(config).eval()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.3)
    return model, template


def prompts() -> list[Prompt]:
    texts = ["one", "two three one two", "three"]
    system = Message(role="system", content=[TextPart(text="Speaker: anna")])
    return [
        Prompt([system, Message(role="user", content=[TextPart(text=t)])], i) for i, t in enumerate(texts)
    ]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("guidance", [1.0, 2.0])
def test_a_prompt_does_not_depend_on_its_batch(
    speaking: tuple[DualFFN, Template], temperature: float, guidance: float
) -> None:
    sampling = SamplingConfig(temperature, text_guidance=guidance, speaker_guidance=guidance)
    together = generate_codes(*speaking, prompts(), sampling, max_frames=20)
    alone = [generate_codes(*speaking, [prompt], sampling, max_frames=20)[0] for prompt in prompts()]
    for one, other in zip(together, alone, strict=True):
        assert torch.equal(one.codes_KT, other.codes_KT)
        assert one.stopped == other.stopped
    assert any(not torch.equal(together[0].codes_KT[:, :1], each.codes_KT[:, :1]) for each in together[1:])


def test_length_limit_and_code_range(speaking: tuple[DualFFN, Template]) -> None:
    model, template = speaking
    sampling = SamplingConfig(temperature=3.0, top_p=1, text_guidance=1, speaker_guidance=1)
    many = [Prompt(prompts()[seed % 3].messages, seed) for seed in range(24)]
    spoken = generate_codes(model, template, many, sampling, max_frames=9)
    lengths = {each.codes_KT.shape[1] for each in spoken}
    assert max(lengths) <= 9 and min(lengths) >= 1 and len(lengths) > 1
    assert {each.stopped for each in spoken} == {True, False}
    for each in spoken:
        assert each.codes_KT.shape[0] == 3
        assert int(each.codes_KT.min()) >= 0 and int(each.codes_KT.max()) < 16
        assert each.stopped or each.codes_KT.shape[1] == 9
