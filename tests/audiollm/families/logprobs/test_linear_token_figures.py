"""Figures per token from hidden states and a head's weight: against dense logits, with their gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from audiollm.data.chat.delay import IGNORE
from audiollm.families.dual_ffn.adapting import add_lora
from audiollm.families.dual_ffn.losses import linear_cross_entropy
from audiollm.families.logprobs.token_figures import (
    HeadRows,
    TokenFigures,
    TokenRequest,
    linear_token_figures,
    token_figures,
)
from audiollm.models.dual_ffn import Head, through_head
from audiollm.train.settings import LoRASettings

PLAIN = TokenRequest()
EVERYTHING = TokenRequest(temperature=1.3, kl=True, collision=True, contrast_k=2, entropy=True)


class Case:
    """Rows, a head's weight, targets (some ignored), a second model, and draws."""

    def __init__(self, rows: int, books: int, vocabulary: int, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(rows)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=dtype)

        self.hidden = random(rows, 6).requires_grad_()
        self.weight = random(books * vocabulary, 6).requires_grad_()
        self.other = HeadRows(random(rows, 4), random(books * vocabulary, 4))
        self.targets = torch.randint(vocabulary, (rows, books), generator=generator)
        self.targets[torch.rand(rows, books, generator=generator) < 0.2] = IGNORE
        self.draws = torch.rand(rows, books, generator=generator, dtype=torch.float64)
        self.upstream = random(5, rows, books)

    def figures(self, request: TokenRequest, chunk: int | None = None) -> TokenFigures:
        return linear_token_figures(
            self.hidden, self.weight, self.targets, request, self.other, self.draws, chunk
        )

    def gradients(self, figures: TokenFigures) -> tuple[Tensor, ...]:
        """Of a sum in which every figure of every target has a weight of its own."""
        computed = figures[: len(self.upstream)]  # values are a critic's
        present = [
            (value, own) for value, own in zip(computed, self.upstream, strict=True) if value is not None
        ]
        total = torch.stack([(value * own).sum() for value, own in present]).sum()
        return torch.autograd.grad(total, (self.hidden, self.weight))

    def dense(self, request: TokenRequest) -> TokenFigures:
        """The same written out, with all logits at once."""
        books = self.targets.shape[1]

        def log_probs(hidden: Tensor, weight: Tensor) -> Tensor:
            logits = (hidden @ weight.T).unflatten(1, (books, -1))
            return (logits / request.temperature).log_softmax(2)

        ours, theirs = log_probs(self.hidden, self.weight), log_probs(*self.other)
        index = self.targets.clamp_min(0)[..., None]
        figures = [ours.gather(2, index)[..., 0], (theirs.exp() * (theirs - ours)).sum(2)]
        figures.append(ours.exp().square().sum(2).log())
        top, tokens = ours.detach().scatter(2, index, -torch.inf).topk(2, dim=2)
        second = self.draws[..., None] >= top.softmax(2)[..., :1]
        figures.append(ours.gather(2, tokens.gather(2, second.long()))[..., 0])
        figures.append(-(ours.exp() * ours).sum(2))
        masked = [torch.where(self.targets >= 0, figure, 0.0) for figure in figures]
        return TokenFigures(*masked)


def assert_same(ours: TokenFigures, theirs: TokenFigures, tolerance: float) -> None:
    for name, value in ours._asdict().items():
        if value is not None:
            torch.testing.assert_close(
                value, getattr(theirs, name), rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )


@settings(max_examples=30)
@given(rows=st.integers(1, 13), books=st.integers(1, 3), chunk=st.integers(1, 14))
def test_values_and_gradients_are_those_of_dense_logits(rows: int, books: int, chunk: int) -> None:
    case = Case(rows, books, 11)
    ours, theirs = case.figures(EVERYTHING, chunk), case.dense(EVERYTHING)
    assert_same(ours, theirs, 1e-12)
    for own, other in zip(case.gradients(ours), case.gradients(theirs), strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-11)


def test_float32_values_are_those_of_log_softmax() -> None:
    case = Case(64, 2, 3_001, torch.float32)
    ours, theirs = case.figures(PLAIN), case.dense(PLAIN)
    torch.testing.assert_close(ours.logprob_T, theirs.logprob_T, rtol=0, atol=1e-5)
    own, other = (
        torch.autograd.grad((f.logprob_T * case.upstream[0]).sum(), (case.hidden, case.weight))
        for f in (ours, theirs)
    )
    for one, two in zip(own, other, strict=True):
        assert float((one - two).norm() / two.norm()) < 1e-5


@pytest.mark.parametrize("books", [1, 2])
def test_gradients_are_those_of_finite_differences(books: int) -> None:
    case = Case(4, books, 5)

    def figures(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        found = linear_token_figures(
            hidden, weight, case.targets, EVERYTHING, case.other, case.draws, chunk=3
        )
        return tuple(value for value in found if value is not None)

    assert torch.autograd.gradcheck(figures, (case.hidden, case.weight))


@pytest.mark.parametrize("name", ["kl", "collision", "contrast_k", "entropy"])
def test_each_figure_alone_has_its_gradient(name: str) -> None:
    case = Case(7, 2, 9)
    request = TokenRequest(temperature=0.7, **{name: 2 if name == "contrast_k" else True})  # type: ignore[arg-type]
    ours, theirs = case.figures(request), case.dense(request)
    assert sum(value is not None for value in ours) == 2
    kept = TokenFigures(*(b if a is not None else None for a, b in zip(ours, theirs, strict=True)))  # type: ignore[arg-type]
    for own, other in zip(case.gradients(ours), case.gradients(kept), strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("needs", [(False, False), (True, False), (False, True)])
def test_only_wanted_gradients_are_made(needs: tuple[bool, bool]) -> None:
    case = Case(6, 1, 9)
    case.hidden.requires_grad_(needs[0])
    case.weight.requires_grad_(needs[1])
    figures = case.figures(EVERYTHING)
    assert figures.logprob_T.requires_grad is any(needs)
    if any(needs):
        figures.logprob_T.sum().backward()
        assert (case.hidden.grad is not None, case.weight.grad is not None) == needs
    with torch.no_grad():
        assert not case.figures(EVERYTHING).logprob_T.requires_grad


def test_rows_of_logits_have_the_same_figures() -> None:
    """The path for heads that are no plain product."""
    case = Case(9, 1, 13)
    case.targets.clamp_min_(0)
    logits, other = case.hidden @ case.weight.T, case.other.hidden_XC @ case.other.weight_VC.T
    figures = token_figures(logits, case.targets[:, 0], EVERYTHING, other, case.draws[:, 0])
    as_rows = TokenFigures(*(None if value is None else value[:, None] for value in figures))  # type: ignore[arg-type]
    linear = case.figures(EVERYTHING)
    assert_same(as_rows, linear, 1e-12)
    for own, theirs in zip(case.gradients(as_rows), case.gradients(linear), strict=True):
        torch.testing.assert_close(own, theirs, rtol=0, atol=1e-12)


def test_their_weighted_sum_is_the_supervised_loss() -> None:
    case = Case(12, 3, 17)
    weights = torch.rand(12, 3, dtype=torch.float64)
    loss = linear_cross_entropy(case.hidden, case.weight, case.targets, weights)
    ours = -(weights * case.figures(PLAIN).logprob_T).sum()
    torch.testing.assert_close(ours, loss.total, rtol=0, atol=1e-12)
    inputs = (case.hidden, case.weight)
    for own, theirs in zip(
        torch.autograd.grad(ours, inputs), torch.autograd.grad(loss.total, inputs), strict=True
    ):
        torch.testing.assert_close(own, theirs, rtol=0, atol=1e-12)


def test_autocast_multiplies_in_bfloat16_and_sums_in_float32() -> None:
    case = Case(40, 1, 33, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        figures = case.figures(EVERYTHING, 7)
    rounded = [each.detach().bfloat16() for each in (case.hidden, case.weight)]
    expected = ((rounded[0] @ rounded[1].T).float() / 1.3).log_softmax(1)
    expected = expected.gather(1, case.targets.clamp_min(0)).where(case.targets >= 0, 0.0)
    assert figures.logprob_T.dtype == torch.float32
    torch.testing.assert_close(figures.logprob_T.detach(), expected, rtol=0, atol=1e-5)
    exact = case.gradients(case.dense(EVERYTHING))
    for own, theirs in zip(case.gradients(figures), exact, strict=True):
        assert own.dtype == torch.float32 and float((own - theirs).norm() / theirs.norm()) < 0.02


@pytest.mark.parametrize("adapted", [False, True])
def test_through_a_head_plain_or_adapted(adapted: bool) -> None:
    """Gradients reach the head's own weight, or the adapter's."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"text_lm_head": Head(6, 11, bias=False)}).double()
    if adapted:
        add_lora(model, LoRASettings(rank=2, dropout=0.0, target_modules=("text_lm_head",)))
        nn.init.normal_(model["text_lm_head"].lora_B["default"].weight)  # type: ignore[index, union-attr, arg-type]
    head, case = model["text_lm_head"], Case(5, 1, 11)
    found = through_head(
        head, case.hidden, lambda hidden, weight: linear_token_figures(hidden, weight, case.targets, PLAIN)
    ).logprob_T
    dense = head(case.hidden).log_softmax(1).gather(1, case.targets.clamp_min(0))
    dense = dense.where(case.targets >= 0, 0.0)
    torch.testing.assert_close(found, dense, rtol=0, atol=1e-12)
    trained = [case.hidden, *(p for p in model.parameters() if p.requires_grad)]
    assert len(trained) == (3 if adapted else 2)
    ours, theirs = (torch.autograd.grad((each * case.upstream[0]).sum(), trained) for each in (found, dense))
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-12)


def test_no_rows_and_ignored_rows_have_zero_gradients() -> None:
    for rows in (0, 4):
        case = Case(rows, 2, 7)
        case.targets.fill_(IGNORE)
        figures = case.figures(PLAIN)
        assert figures.logprob_T.shape == (rows, 2) and not figures.logprob_T.any()
        assert not any(bool(gradient.any()) for gradient in case.gradients(figures))


def test_shapes_that_do_not_fit_are_named() -> None:
    case = Case(6, 2, 9)
    with pytest.raises(ValueError, match=r"\[17, 6\]"):
        linear_token_figures(case.hidden, case.weight[:-1], case.targets, PLAIN)
    short = HeadRows(case.other.hidden_XC[:-1], case.other.weight_VC)
    with pytest.raises(ValueError, match="5 rows and 18 logits of the reference"):
        linear_token_figures(case.hidden, case.weight, case.targets, TokenRequest(kl=True), short)
    with pytest.raises(ValueError, match="kl needs"):
        linear_token_figures(case.hidden, case.weight, case.targets, TokenRequest(kl=True))
