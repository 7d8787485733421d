"""Products by oneDNN are those of PyTorch, with their gradients, and are left alone where they cannot be."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from audiollm import products
from audiollm.products import Linear, accelerate_products, input_gradient, multiply, weight_gradient

ROWS, INPUTS, OUTPUTS = 96, 256, 320
"""Large enough for the faster library to be asked for."""


@pytest.fixture(params=["plain", "onednn", ""])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(products.ENVIRONMENT, request.param)
    return str(request.param)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the products that oneDNN computes."""
    shapes: list[tuple[int, ...]] = []
    compute = products._multiply_by_onednn

    def count(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        shapes.append((*x.shape, len(weight)))
        return compute(x, weight, bias)

    monkeypatch.setattr(products, "_multiply_by_onednn", count)
    return shapes


def gradients(module: nn.Module, x: Tensor, upstream: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    out = module(x)
    out.backward(upstream)
    return [out.detach(), x.grad, *(parameter.grad for parameter in module.parameters())]


@pytest.mark.parametrize("has_bias", [True, False])
def test_a_product_and_its_gradients_are_those_of_float64(library: str, has_bias: bool) -> None:
    torch.manual_seed(0)
    module = Linear(INPUTS, OUTPUTS, bias=has_bias)
    exact = nn.Linear(INPUTS, OUTPUTS, bias=has_bias, dtype=torch.float64)
    exact.load_state_dict(module.state_dict())
    x, upstream = torch.randn(3, ROWS // 3, INPUTS), torch.randn(3, ROWS // 3, OUTPUTS)
    measured = gradients(module, x, upstream)
    for value, expected in zip(measured, gradients(exact, x.double(), upstream.double()), strict=True):
        torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=2e-5)
    with torch.no_grad():
        torch.testing.assert_close(module(x), measured[0], rtol=1e-5, atol=1e-5)


def test_parts_that_need_no_gradient_get_none(library: str) -> None:
    module = Linear(INPUTS, OUTPUTS)
    module.weight.requires_grad_(False)
    x = torch.randn(ROWS, INPUTS, requires_grad=True)
    module(x).sum().backward()
    assert module.weight.grad is None and x.grad is not None and module.bias.grad is not None
    torch.testing.assert_close(module.bias.grad, torch.full((OUTPUTS,), float(ROWS)))


def test_products_are_added_to_totals(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "BLOCK", 7 * INPUTS)  # blocks of 7 rows, and a last one of fewer
    torch.manual_seed(1)
    x, weight, grad = torch.randn(ROWS, INPUTS), torch.randn(OUTPUTS, INPUTS), torch.randn(ROWS, OUTPUTS)
    total_RI, total_OI, out = (
        torch.ones(ROWS, INPUTS),
        torch.ones(OUTPUTS, INPUTS),
        torch.empty(ROWS, OUTPUTS),
    )
    assert input_gradient(grad, weight, total_RI=total_RI) is total_RI
    assert weight_gradient(grad, x, total_OI=total_OI) is total_OI
    assert multiply(x, weight, out_RO=out) is out
    close = {"rtol": 1e-5, "atol": 1e-4}
    torch.testing.assert_close(total_RI, 1 + grad @ weight, **close)
    torch.testing.assert_close(total_OI, 1 + grad.T @ x, **close)
    torch.testing.assert_close(out, x @ weight.T, **close)


def test_onednn_computes_all_three_products(
    monkeypatch: pytest.MonkeyPatch, calls: list[tuple[int, ...]]
) -> None:
    monkeypatch.setenv(products.ENVIRONMENT, "onednn")
    module = Linear(INPUTS, OUTPUTS)
    module(torch.randn(ROWS, INPUTS, requires_grad=True)).sum().backward()
    assert calls == [(ROWS, INPUTS, OUTPUTS), (ROWS, OUTPUTS, INPUTS), (OUTPUTS, ROWS, INPUTS)]


class OperatorWeights(TorchDispatchMode):
    """Records the weights that oneDNN's operator is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.mkldnn._linear_pointwise.default:
            self.weights.append(args[1])
        return func(*args, **(kwargs or {}))


def test_parts_of_larger_tensors_are_copied_before_onednn_has_them_as_weights(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With gaps between its rows a weight is multiplied some thousand times slower."""
    monkeypatch.setattr(products, "BLOCK", 7 * INPUTS)
    torch.manual_seed(2)
    x, weight, grad = (
        torch.randn(ROWS, 3, INPUTS),
        torch.randn(3, OUTPUTS, INPUTS),
        torch.randn(ROWS, 3, OUTPUTS),
    )
    weight = weight.transpose(0, 1)
    close = {"rtol": 1e-5, "atol": 1e-4}
    with OperatorWeights() as calls:
        out = multiply(x[:, 1], weight[:, 1])
        input_change = input_gradient(grad[:, 1], weight[:, 1])
        weight_change = weight_gradient(grad[:, 1], x[:, 1])
        total = weight_gradient(grad[:, 1], x[:, 1], total_OI=torch.ones(OUTPUTS, INPUTS))
    assert all(each.is_contiguous() or each.T.is_contiguous() for each in calls.weights)
    assert library != "onednn" or len(calls.weights) > 3
    torch.testing.assert_close(out, x[:, 1] @ weight[:, 1].T, **close)
    torch.testing.assert_close(input_change, grad[:, 1] @ weight[:, 1], **close)
    torch.testing.assert_close(weight_change, grad[:, 1].T @ x[:, 1], **close)
    torch.testing.assert_close(total, 1 + grad[:, 1].T @ x[:, 1], **close)


@pytest.mark.parametrize("case", ["small", "large", "bfloat16", "float64", "autocast", "subclass"])
def test_all_else_goes_the_plain_way(
    case: str, monkeypatch: pytest.MonkeyPatch, calls: list[tuple[int, ...]]
) -> None:
    monkeypatch.setenv(products.ENVIRONMENT, "onednn")

    class Marked(Tensor):
        """As sharded tensors are."""

    module, x = Linear(INPUTS, OUTPUTS), torch.randn(ROWS, INPUTS)
    if case == "small":
        x = x[:1]
    elif case == "large":
        monkeypatch.setattr(products, "MAX_WEIGHT", INPUTS * OUTPUTS - 1)
    elif case in ("bfloat16", "float64"):
        module, x = module.to(getattr(torch, case)), x.to(getattr(torch, case))
    elif case == "subclass":
        x = x.as_subclass(Marked)
    with torch.autocast("cpu", enabled=case == "autocast"):
        out = module(x)
    assert out.shape == (len(x), OUTPUTS) and calls == []


def test_a_library_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(products.ENVIRONMENT, "mkl")
    with pytest.raises(ValueError, match="AUDIOLLM_PRODUCTS is plain, onednn or not set, and not 'mkl'"):
        Linear(INPUTS, OUTPUTS)(torch.randn(ROWS, INPUTS))


def test_published_modules_are_accelerated_in_place() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8)), nn.Bilinear(2, 2, 2))
    before = copy.deepcopy(model.state_dict())
    accelerate_products(model)
    assert [type(module) for module in model.modules() if isinstance(module, nn.Linear)] == [Linear, Linear]
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_product_that_is_compiled_is_the_compilers() -> None:
    module, x = Linear(INPUTS, OUTPUTS), torch.randn(ROWS, INPUTS)
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    out = torch.compile(module, backend=backend, fullgraph=True)(x)
    torch.testing.assert_close(out, module(x), rtol=1e-5, atol=1e-5)
    assert len(graphs) == 1
