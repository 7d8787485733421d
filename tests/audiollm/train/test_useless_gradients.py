"""No product is computed for a weight that does not learn, nor for inputs before the first trained one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from audiollm.data.packing import pack
from audiollm.data.records.manifest import ManifestSource
from audiollm.families.dual_ffn.adapting import adapt
from audiollm.families.dual_ffn.losses import TokenLosses
from audiollm.families.logprobs.token_figures import TokenRequest, linear_token_figures
from audiollm.families.policies import load_policy
from audiollm.models.chunked_cross_entropy import linear_cross_entropy
from audiollm.models.frozen.shrink import shrink_frozen
from audiollm.products import Linear
from audiollm.train.settings import LoRASettings
from tests.audiollm.models.tiny_audio_llms import save_tiny
from tests.audiollm.rl.preference.records import write_records
from tests.audiollm.supervised.heard_samples import ENCODER, small_model, small_template, streams

PRODUCTS = ("mm", "addmm", "addmm_", "bmm", "_linear_pointwise")


class CountedProducts(TorchDispatchMode):
    """Counts products of matrices by the shape of their result."""

    def __init__(self) -> None:
        super().__init__()
        self.by_shape: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(
        self, operator: Any, types: Any, inputs: Sequence[Any] = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        result = operator(*inputs, **(named or {}))
        if operator.overloadpacket.__name__ in PRODUCTS:
            self.by_shape[tuple(result.shape)] += 1
        return result


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUDIOLLM_PRODUCTS", "plain")


def step_of(
    trained: Any, lora: LoRASettings | None = None, format: Any = None
) -> tuple[Any, Counter[Any], Counter[Any]]:
    """A model that hears, and the products of a forward and of a backward pass."""
    model = small_model(small_template()).float()
    adapt(model, trained, lora, encoder_trained=False)
    if format is not None:
        shrink_frozen(model, format)
    losses = TokenLosses(model)
    batch = pack(streams(small_template()), encoder=ENCODER.features)
    with CountedProducts() as forward:
        sums = losses(batch)
        loss = sums["text"] + sums["audio"]
    with CountedProducts() as backward:
        loss.backward(inputs=[p for p in losses.parameters() if p.requires_grad])
    return model, forward.by_shape, backward.by_shape


def shapes_of_frozen(model: torch.nn.Module) -> set[tuple[int, ...]]:
    trained = {tuple(p.shape) for p in model.parameters() if p.requires_grad}
    return {tuple(p.shape) for p in model.parameters() if not p.requires_grad and p.ndim == 2} - trained


@pytest.mark.parametrize("format", [None, "int8"])
def test_a_projector_costs_one_gradient_of_a_weight(format: Any) -> None:
    """All else of the backward pass are gradients of inputs: one for each of the layers' products."""
    model, _, backward = step_of(["audio_encoder_proj.*"], format=format)
    projector = tuple(model.audio_encoder_proj.linear.weight.shape)
    weight_gradients = {shape: count for shape, count in backward.items() if shape == projector}
    assert weight_gradients == {projector: 1}
    layers = 4 * 2 + 2 * 3 * 2  # products of attention, and of the two feed-forwards, in two layers
    assert sum(backward.values()) == layers + 1
    assert not (shapes_of_frozen(model) - {(32, 32)}) & backward.keys()


def test_layers_before_the_first_trained_one_have_no_backward_pass() -> None:
    """Of two layers the second is trained: a gradient of each of its weights, and of each input, for its norm."""
    _, _, backward = step_of(["model.layers.1.*"])
    whole = 4 + 2 * 3  # of a layer
    assert sum(backward.values()) == 2 * whole
    _, _, both = step_of(["model.layers.*"])
    assert sum(both.values()) == 4 * whole


def test_a_frozen_encoder_has_neither_adapters_nor_a_graph() -> None:
    settings = LoRASettings(rank=3)
    model, _, _ = step_of("adapter", settings)
    adapted = [name for name, _ in model.named_modules() if name.endswith("lora_A")]
    assert adapted and not any("audio_tower" in name for name in adapted)


@pytest.mark.parametrize("loss", ["cross entropy", "figures"])
def test_a_frozen_head_beside_an_adapter_has_no_gradient(loss: str) -> None:
    """Of a weight of 40 words and 16 columns, and an adapter's 3 columns, the latter alone."""
    torch.manual_seed(0)
    hidden_XC, weight_VC = torch.randn(9, 19, requires_grad=True), torch.randn(40, 16)
    expanded_VR = torch.randn(40, 3, requires_grad=True)
    targets_X1 = torch.randint(40, (9, 1))

    def total(weight: Any) -> Tensor:
        if loss == "figures":
            return linear_token_figures(hidden_XC, weight, targets_X1, TokenRequest()).logprob_T.sum()
        return linear_cross_entropy(hidden_XC, weight, targets_X1, torch.ones(9, 1)).total

    whole = torch.cat([weight_VC, expanded_VR], dim=1)
    expected = torch.autograd.grad(total(whole), [hidden_XC, expanded_VR])
    with CountedProducts() as counted:
        gradients = torch.autograd.grad(total((weight_VC, expanded_VR)), [hidden_XC, expanded_VR])
    for gradient, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, wanted)
    assert counted.by_shape[40, 3] == 1 and not counted.by_shape[40, 19] and not counted.by_shape[40, 16]


def test_an_adapter_of_the_head_costs_what_it_is_wide() -> None:
    settings = LoRASettings(rank=3, target_modules=("text_lm_head",))
    model, forward, _ = step_of("adapter", settings)
    words = model.config.vocab_size
    assert forward[words, 3] == 1 and not forward[words, 35] and not forward[words, 32]


def test_an_accelerated_product_keeps_no_input_for_a_frozen_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUDIOLLM_PRODUCTS", "onednn")
    layer = Linear(1024, 512, bias=False).requires_grad_(False)
    kept: list[tuple[int, ...]] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    x_RI = torch.randn(64, 1024, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(x_RI)
    assert kept == [(512, 1024)]


@pytest.mark.parametrize("trained", [["*multi_modal_projector*"], "adapter"])
def test_models_of_transformers_have_no_gradient_of_frozen_weights(tmp_path: Path, trained: Any) -> None:
    write_records(tmp_path, 2)
    save_tiny("qwen2_audio", tmp_path / "model")
    lora = LoRASettings(rank=3, target_modules=("language_model.layers.1.self_attn.q_proj",))
    policy: Any = load_policy(tmp_path / "model", trained, lora)
    source = ManifestSource(tmp_path / "records.jsonl")
    batch = policy.batch(policy.encode(policy.take(source[0], [0, 1])))
    loss = policy.answer_logprobs(policy.root, batch, TokenRequest(reference=False)).policy_T.sum()
    with CountedProducts() as backward:
        loss.backward(inputs=[p for p in policy.root.parameters() if p.requires_grad])
    if (
        trained == "adapter"
    ):  # the head; the last layer's feed-forward and output; two of LoRA for each of A and B
        assert sum(backward.by_shape.values()) <= 1 + 3 + 1 + 4 + 4
    else:
        weights = {tuple(p.shape) for p in policy.root.parameters() if p.requires_grad}
        frozen = {tuple(p.shape) for p in policy.root.parameters() if not p.requires_grad} - weights
        assert not frozen & backward.by_shape.keys()
