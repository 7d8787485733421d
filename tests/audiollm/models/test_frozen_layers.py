"""Weights in fewer bytes: their values, products and gradients, which layers have them, and what is left as it is."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from audiollm.errors import ConfigError
from audiollm.models.audio_encoder import AudioEncoderConfig
from audiollm.models.decoder import DualFFNConfig
from audiollm.models.dual_ffn import DualFFN
from audiollm.models.frozen import formats, layers
from audiollm.models.frozen.formats import SmallFormat, check_format, stored_bytes
from audiollm.models.frozen.layers import FrozenEmbedding, FrozenHead, FrozenLinear, frozen_product
from audiollm.models.frozen.shrink import (
    check_whole,
    load_trained,
    planned_savings,
    shrink_frozen,
    small_weights,
)
from audiollm.models.frozen.stored import FORMATS

LARGEST_ERROR: dict[SmallFormat, float] = {"bf16": 0.003, "int8": 0.012, "nf4": 0.11}
"""Of the root mean square of normally distributed weights."""


@pytest.fixture(params=[False, True], ids=["fp32 products", "bf16 products"])
def bf16_is_fast(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    monkeypatch.setattr(layers, "is_bf16_fast", lambda device: request.param)
    yield request.param


IN_TRAINING = ("bf16", "int8", "nf4")
"""Formats that `frozen_weights` takes; `test_stored_weights` has those of generation."""


@pytest.mark.parametrize("format", IN_TRAINING)
def test_values_are_close_and_as_small_as_planned(format: SmallFormat) -> None:
    weight_OI = torch.randn(96, 128, generator=torch.Generator().manual_seed(0))
    weight_OI[3] = 0.0
    small = FORMATS[format](weight_OI)
    error = float((small.weight() - weight_OI).norm() / weight_OI.norm())
    assert 0 < error < LARGEST_ERROR[format]
    assert not small.weight()[3].any()
    assert small.nbytes == stored_bytes((96, 128), format)
    assert not small.state_dict()


@pytest.mark.parametrize("format", IN_TRAINING)
def test_products_and_gradients_are_those_of_the_stored_weight(
    format: SmallFormat, bf16_is_fast: bool
) -> None:
    torch.manual_seed(0)
    weight_OI, bias_O = torch.randn(64, 32), torch.randn(64)
    small = FORMATS[format](weight_OI)
    x_BRI = torch.randn(2, 5, 32, requires_grad=True)
    expected_BRO = functional.linear(x_BRI, small.weight(), bias_O)
    (expected_grad,) = torch.autograd.grad(expected_BRO.square().sum(), x_BRI)
    out_BRO = frozen_product(x_BRI, small, bias_O)
    (grad,) = torch.autograd.grad(out_BRO.square().sum(), x_BRI)
    for actual, expected in ((out_BRO, expected_BRO), (grad, expected_grad)):
        assert float((actual - expected).norm() / expected.norm()) < (0.01 if bf16_is_fast else 1e-5)
    assert out_BRO.dtype == torch.float32 and grad.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert frozen_product(x_BRI, small, bias_O).dtype == torch.bfloat16
    assert frozen_product(x_BRI.double(), small, bias_O).dtype == torch.float64


def test_no_input_is_kept_for_the_backward_pass() -> None:
    """Only what stands before the layer is in the graph."""
    kept: list[Tensor] = []
    x_RI = torch.randn(8, 32, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        frozen_product(x_RI, FORMATS["int8"](torch.randn(16, 32)), None)
    assert not kept


def model_that_hears() -> DualFFN:
    encoder = AudioEncoderConfig(16, 1, 2, 24, num_mel_bins=20, max_source_positions=60, projector_size=12)
    torch.manual_seed(0)
    return DualFFN(
        DualFFNConfig(
            vocab_size=50, num_codebooks=2, codebook_size=10, hidden_size=32, num_layers=2, num_heads=2,
            num_kv_heads=2, head_dim=16, intermediate_size=48, audio_ffn_layers=(), audio_encoder=encoder,
        )
    )  # fmt: skip


@pytest.mark.parametrize("format", IN_TRAINING)
def test_trained_layers_norms_and_tables_are_not_quantized(format: SmallFormat) -> None:
    model = model_that_hears().requires_grad_(False)
    model.audio_encoder_proj.requires_grad_(True)
    model.model.layers[1].mlp.down_proj.requires_grad_(True)  # type: ignore[union-attr]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    numbers, planned = planned_savings(model, format)
    sizes = shrink_frozen(model, format)
    after = model.state_dict()
    left_out = {name for name, _ in small_weights(model)}
    assert left_out == before.keys() - after.keys()
    assert all(torch.equal(before[name], after[name]) for name in after)
    assert sizes.before - sizes.after == 4 * numbers - planned
    quantized = {name for name, layer in model.named_modules() if type(layer) is FrozenLinear}
    assert quantized == {
        name
        for name, layer in model_that_hears().named_modules()
        if isinstance(layer, nn.Linear)
        and not name.startswith(("audio_encoder_proj", "text_lm_head", "audio_lm_head"))
        and name != "model.layers.1.mlp.down_proj"
    }
    assert isinstance(model.model.embed_tokens, FrozenEmbedding)
    assert isinstance(model.text_lm_head, FrozenHead) and model.text_lm_head.weight.dtype == torch.bfloat16
    assert not any(name.startswith("model.layers.1.mlp.down") for name in left_out)
    with pytest.raises(ValueError, match="load_trained"):
        check_whole(model)
    again = model_that_hears().requires_grad_(False)
    again.audio_encoder_proj.requires_grad_(True)
    again.model.layers[1].mlp.down_proj.requires_grad_(True)  # type: ignore[union-attr]
    load_trained(again, after, is_small=True)
    assert all(torch.equal(before[name], value) for name, value in again.state_dict().items())
    with pytest.raises(RuntimeError, match="Missing"):
        load_trained(
            again, {k: v for k, v in after.items() if "projector" not in k and "norm" not in k}, True
        )


class Tied(nn.Module):
    """Two layers of one weight, of which one may have a bias that is trained, and one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.own = nn.Linear(8, 8, bias=False), nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight


def test_tied_weights_stay_one_or_stay_whole() -> None:
    model = Tied().requires_grad_(False)
    shrink_frozen(model, "int8")
    assert model.first.weight is model.second.weight and model.first.weight.dtype == torch.bfloat16
    assert model.own.stored.values_OI.dtype == torch.int8  # type: ignore[union-attr]
    model = Tied().requires_grad_(False)
    model.second.bias.requires_grad_(True)
    shrink_frozen(model, "int8")
    assert type(model.first) is nn.Linear and model.first.weight is model.second.weight


def test_a_reference_shares_what_it_has_in_common() -> None:
    model, reference = (model_that_hears().requires_grad_(False) for _ in range(2))
    reference.model.layers[0].mlp.up_proj.weight.data += 1.0  # type: ignore[union-attr, operator]
    for name, parameter in reference.named_parameters():
        if "up_proj" not in name:
            parameter.data = model.get_parameter(name).data
    shrink_frozen(model, "int8", [reference])
    q_proj, up_proj = (
        [each.get_submodule(f"model.layers.0.{name}").stored for each in (model, reference)]
        for name in ("self_attn.q_proj", "mlp.up_proj")
    )
    assert q_proj[0] is q_proj[1] and up_proj[0] is not up_proj[1]


def test_a_model_without_a_frozen_layer_is_refused() -> None:
    with pytest.raises(ConfigError, match="no linear layer of the model is frozen"):
        shrink_frozen(model_that_hears(), "int8")


def test_a_library_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"audiollm\[nf4\]"):
        check_format("nf4")
    check_format("int8")


def test_bitsandbytes_is_not_let_download() -> None:
    """`kernels`, by which it fetches compiled code, cannot be imported while it is loaded."""
    seen: list[object] = []
    with formats.without_downloads():
        seen.append(sys.modules["kernels"])
        with pytest.raises(ImportError):
            importlib.import_module("kernels")
    assert seen == [None] and "kernels" not in sys.modules
