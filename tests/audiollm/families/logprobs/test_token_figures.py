"""Figures per token from logits: chunks, gradients, extremes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from audiollm.families.logprobs import token_figures as module
from audiollm.families.logprobs.token_figures import TokenRequest, token_figures

EVERYTHING = TokenRequest(temperature=1.3, kl=True, collision=True, contrast_k=2, entropy=True)


def case(tokens: int = 5, vocabulary: int = 7) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits, other = (
        torch.randn(tokens, vocabulary, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    target = torch.randint(vocabulary, (tokens,), generator=generator)
    return (
        logits.requires_grad_(),
        other,
        target,
        torch.rand(tokens, generator=generator, dtype=torch.float64),
    )


def test_chunks_change_neither_values_nor_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, other, target, draw = case()
    results = []
    for elements in (2**24, 14, 1):
        monkeypatch.setattr(module, "CHUNK_ELEMENTS", elements)
        figures = token_figures(logits, target, EVERYTHING, other, draw)
        values = torch.stack([figure for figure in figures if figure is not None])
        assert values.shape == (5, 5)
        (gradient,) = torch.autograd.grad((values * values.detach().cos()).sum(), logits)
        results.append((values, gradient))
    for values, gradient in results[1:]:
        torch.testing.assert_close(values, results[0][0], rtol=0, atol=1e-14)
        torch.testing.assert_close(gradient, results[0][1], rtol=0, atol=1e-14)


def test_gradients_are_those_of_finite_differences() -> None:
    logits, other, target, draw = case(3, 4)
    assert torch.autograd.gradcheck(
        lambda given: tuple(
            f for f in token_figures(given, target, EVERYTHING, other, draw) if f is not None
        ),
        (logits,),
    )


def test_contrast_tokens_are_drawn_by_their_probabilities() -> None:
    logits = torch.tensor([[2.0, 0.0, 1.0, -9.0]], dtype=torch.float64).expand(4000, 4)
    target = torch.zeros(4000, dtype=torch.long)
    draw = torch.arange(4000, dtype=torch.float64) / 4000
    drawn = token_figures(logits, target, TokenRequest(contrast_k=2), draw_T=draw).contrast_T
    log_probs = logits[0].log_softmax(0)
    assert drawn is not None and set(drawn.tolist()) == {log_probs[1].item(), log_probs[2].item()}
    share = float((drawn == log_probs[2]).double().mean())
    assert share == pytest.approx(float(torch.sigmoid(torch.tensor(1.0))), abs=1e-3)


def test_extreme_and_half_precision_logits() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, 1e4]], dtype=torch.bfloat16, requires_grad=True)
    request = TokenRequest(kl=True, collision=True, entropy=True)
    figures = token_figures(logits, torch.tensor([2]), request, logits.detach())
    values = torch.stack([figure for figure in figures if figure is not None])
    assert values.dtype == torch.float32 and not values.detach().any()
    values.sum().backward()
    assert logits.grad is not None and torch.isfinite(logits.grad).all()


def test_requests_that_lack_something() -> None:
    logits, _, target, _ = case()
    with pytest.raises(ValueError, match="kl needs"):
        token_figures(logits, target, TokenRequest(kl=True))
    with pytest.raises(ValueError, match="contrast_k needs"):
        token_figures(logits, target, TokenRequest(contrast_k=1))
    with pytest.raises(ValueError, match="temperature must be above 0"):
        TokenRequest(temperature=0)
    with pytest.raises(ValueError, match="contrast_k must be 0 or more"):
        TokenRequest(contrast_k=-1)
