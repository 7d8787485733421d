"""Convolutions along rows are those of `Conv1d` of each sample alone, in every way that computes them."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from audiollm import products
from audiollm.flow.model.row_convolutions import RowConv, RowMLP
from audiollm.flow.model.rows import rows_of

CHANNELS, OUTPUTS = 96, 128
LENGTHS = [(60, 60, 60), (50, 0, 1, 90, 39)]


@pytest.fixture(params=["plain", "onednn", ""])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(products.ENVIRONMENT, request.param)
    return str(request.param)


def convolve_alone(x_RC: Tensor, lengths: tuple[int, ...], weight_OCK: Tensor) -> Tensor:
    samples = [sample.T[None] for sample in x_RC.split(list(lengths)) if len(sample)]
    padding = weight_OCK.shape[2] // 2
    return torch.cat([functional.conv1d(sample, weight_OCK, padding=padding)[0].T for sample in samples])


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("size", [3, 7])
def test_rows_are_convolved_as_samples_alone(library: str, lengths: tuple[int, ...], size: int) -> None:
    torch.manual_seed(0)
    conv = RowConv(CHANNELS, OUTPUTS, size, bias=False)
    rows = rows_of(lengths, torch.device("cpu"))
    assert rows.total * conv.weight.numel() >= products.MIN_MULTIPLY_ADDS
    x, upstream = torch.randn(rows.total, CHANNELS), torch.randn(rows.total, OUTPUTS)
    ours, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    out = conv(ours, rows)
    out.backward(upstream)
    weight = conv.weight.detach().double().requires_grad_()
    expected = convolve_alone(exact, lengths, weight)
    expected.backward(upstream.double())
    for value, reference in ((out, expected), (ours.grad, exact.grad), (conv.weight.grad, weight.grad)):
        assert value is not None and reference is not None
        torch.testing.assert_close(value.double(), reference, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_swiglu_with_convolutions_has_the_gradients_of_autograd(
    library: str, lengths: tuple[int, ...]
) -> None:
    torch.manual_seed(1)
    mlp, rows = RowMLP(CHANNELS, 3 * CHANNELS, 3), rows_of(lengths, torch.device("cpu"))
    x, upstream = torch.randn(rows.total, CHANNELS), torch.randn(rows.total, CHANNELS)
    ours, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    mlp(ours, rows).backward(upstream)
    w1, w2, w3 = (layer.weight.detach().double().requires_grad_() for layer in (mlp.w1, mlp.w2, mlp.w3))
    gated = functional.silu(convolve_alone(exact, lengths, w1)) * convolve_alone(exact, lengths, w3)
    convolve_alone(gated, lengths, w2).backward(upstream.double())
    grads = [ours.grad, *(layer.weight.grad for layer in (mlp.w1, mlp.w2, mlp.w3))]
    for value, reference in zip(grads, [exact.grad, w1.grad, w2.grad, w3.grad], strict=True):
        assert value is not None and reference is not None
        torch.testing.assert_close(value.double(), reference, rtol=1e-4, atol=1e-4)
