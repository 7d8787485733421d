"""Packed attention against a dense masked softmax in float64; the choice of a backend; rotary scaling."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from audiollm.data.packing import SegmentLayout
from audiollm.models import attention
from audiollm.models.attention import (
    BackendName,
    RopeScaling,
    attention_backend,
    cached_attention,
    packed_attention,
    rotary_angles,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequence_S: Tensor,
    place_S: Tensor,
    window: int | None,
    causal: bool = True,
) -> Tensor:
    """Every score, a mask that is written out, a softmax."""
    k, v = (rows.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for rows in (k, v))
    behind_SS = place_S[:, None] - place_S[None]
    seen_SS = (sequence_S[:, None] == sequence_S[None]) & ((behind_SS >= 0) | (not causal))
    if window is not None:
        seen_SS &= behind_SS < window
    scores_HSS = torch.einsum("shd,thd->hst", q, k) / q.shape[2] ** 0.5
    return torch.einsum(
        "hst,thd->shd", scores_HSS.masked_fill(~seen_SS, -torch.inf).softmax(-1), v
    ).contiguous()


def random_pack(
    lengths: list[int], heads: int, groups: int, dim: int, seed: int = 0
) -> tuple[list[Tensor], SegmentLayout, Tensor, Tensor]:
    """Queries, keys and values in a random order of rows; of each row its sequence and place."""
    generator = torch.Generator().manual_seed(seed)
    size = sum(lengths)
    order_S = torch.randperm(size, generator=generator)
    rows = [
        torch.randn(size, h, dim, generator=generator, dtype=torch.float64) for h in (heads, groups, groups)
    ]
    sequence_S = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[order_S]
    place_S = torch.cat([torch.arange(length) for length in lengths])[order_S]
    return rows, SegmentLayout.of(lengths, order_S), sequence_S, place_S


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 23), min_size=1, max_size=6),
    window=st.one_of(st.none(), st.integers(1, 25)),
    groups=st.sampled_from([1, 2, 4]),
    causal=st.booleans(),
    equal=st.booleans(),
)
def test_values_and_gradients_equal_the_dense_softmax(
    lengths: list[int], window: int | None, groups: int, causal: bool, equal: bool
) -> None:
    window = window if causal else None
    lengths = [lengths[0]] * len(lengths) if equal else lengths
    rows, layout, sequence_S, place_S = random_pack(lengths, 4, groups, 8)
    results = []
    for attend in (
        lambda *qkv: packed_attention(*qkv, layout, window, causal=causal),
        lambda *qkv: dense(*qkv, sequence_S, place_S, window, causal),
    ):
        inputs = [each.clone().requires_grad_() for each in rows]
        out = attend(*inputs)
        (out * torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)).sum().backward()
        results.append([out.detach(), *(each.grad for each in inputs)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-10)


def test_a_window_that_looks_ahead_is_refused() -> None:
    rows, layout, _, _ = random_pack([4], 2, 2, 8)
    with pytest.raises(ValueError, match="causal=True"):
        packed_attention(*rows, layout, window=2, causal=False)


@pytest.mark.parametrize("window", [None, 5])
def test_a_sequence_does_not_see_another_even_where_that_is_not_finite(window: int | None) -> None:
    rows, layout, sequence_S, _ = random_pack([9, 14, 3], 2, 2, 8)
    before = packed_attention(*rows, layout, window)
    for each in rows:
        each[sequence_S == 1] = torch.nan
    after = packed_attention(*rows, layout, window)
    assert torch.equal(before[sequence_S != 1], after[sequence_S != 1])
    assert bool(after[sequence_S == 1].isnan().all())


def test_the_backend_says_why() -> None:
    for device, dtype, word in ((CPU, torch.bfloat16, "cpu"), (CUDA, torch.float32, "float32")):
        chosen = attention_backend(device, dtype, 64)
        assert chosen.name == "sdpa" and word in chosen.reason
    assert attention_backend(CPU, torch.float32, 64, "sdpa") == ("sdpa", "asked for")
    for wanted in ("flash_attn", "varlen"):
        with pytest.raises(ValueError, match="no CUDA device"):
            attention_backend(CPU, torch.bfloat16, 64, wanted)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no backend 'flash'"):
        attention_backend(CPU, torch.bfloat16, 64, "flash")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("capability", "installed", "head_dim", "expected"),
    [
        ((9, 0), True, 64, "flash_attn"),
        ((9, 0), False, 64, "varlen"),
        ((7, 5), True, 64, "sdpa"),
        ((9, 0), True, 60, "sdpa"),
        ((9, 0), True, 512, "sdpa"),
    ],
)
def test_the_backend_follows_the_device(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    installed: bool,
    head_dim: int,
    expected: BackendName,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(attention, "_flash_attn_installed", lambda: installed)
    assert attention_backend(CUDA, torch.bfloat16, head_dim).name == expected
    if not installed:
        with pytest.raises(ValueError, match="pip install"):
            attention_backend(CUDA, torch.bfloat16, head_dim, "flash_attn")


def test_rotary_scaling_is_that_of_transformers() -> None:
    rope = pytest.importorskip("transformers.modeling_rope_utils")
    transformers = pytest.importorskip("transformers")
    parameters = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = transformers.LlamaConfig(
        head_dim=128, rope_parameters=parameters, max_position_embeddings=131072
    )
    theirs, _ = rope.ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    position = torch.tensor([1])
    cosine, sine = rotary_angles(position, 128, 500_000.0, RopeScaling(32.0, 1.0, 4.0, 8192))
    torch.testing.assert_close(torch.atan2(sine, cosine)[0, :64], theirs, rtol=1e-5, atol=1e-9)
    plain = torch.atan2(*reversed(rotary_angles(position, 128, 500_000.0)))[0, :64]
    assert float((plain / theirs).max()) == pytest.approx(32.0, rel=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("backend", ["varlen", "flash_attn"])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("groups", [8, 2])
def test_half_precision_kernels_are_as_exact_as_sdpa(
    backend: BackendName, window: int | None, groups: int
) -> None:
    """Values and gradients in bf16 have at most 1.5 times the error of bf16 SDPA, both against float32."""
    if backend == "flash_attn" and importlib.util.find_spec("flash_attn") is None:
        pytest.skip("flash-attn is not installed")
    rows, layout, _, _ = random_pack([700, 64, 1, 333], 8, groups, 64)
    layout = layout.to(CUDA)

    def run(name: BackendName, dtype: torch.dtype) -> list[Tensor]:
        inputs = [each.to(CUDA, torch.bfloat16).to(dtype).requires_grad_() for each in rows]
        out = packed_attention(*inputs, layout, window, name)
        out.backward(torch.linspace(-1, 1, out.numel(), device=CUDA).view_as(out).to(dtype))
        return [out.detach().float(), *(each.grad.float() for each in inputs if each.grad is not None)]

    exact, sdpa, ours = (
        run("sdpa", torch.float32),
        run("sdpa", torch.bfloat16),
        run(backend, torch.bfloat16),
    )
    for reference, theirs, values in zip(exact, sdpa, ours, strict=True):
        assert float((values - reference).norm()) <= 1.5 * float((theirs - reference).norm())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shared", [1, 3])
@pytest.mark.parametrize("ragged", [False, True])
def test_attention_over_a_cache_is_a_softmax_over_what_may_be_seen(
    dtype: torch.dtype, shared: int, ragged: bool
) -> None:
    """Attention uses products in full precision and SDPA in half; hidden keys and values have no influence."""
    generator = torch.Generator().manual_seed(0)
    q_BQD, keys_BDL, values_BLD = (
        torch.randn(*shape, generator=generator).to(dtype)
        for shape in ((4, shared, 8), (4, 8, 11), (4, 11, 8))
    )
    seen_BL = torch.rand(4, 11, generator=generator) < 0.6 if ragged else torch.ones(4, 11, dtype=torch.bool)
    bias_B1L = torch.zeros(4, 1, 11, dtype=dtype).masked_fill(~seen_BL[:, None], -torch.inf)
    scores_BQL = q_BQD.double() @ keys_BDL.double() / 8**0.5
    shares_BQL = scores_BQL.masked_fill(~seen_BL[:, None], -torch.inf).softmax(-1)
    given = cached_attention(q_BQD, keys_BDL, values_BLD, bias_B1L if ragged else None)
    close = 1e-12 if dtype == torch.float64 else 2e-2
    torch.testing.assert_close(given.double(), shares_BQL @ values_BLD.double(), atol=close, rtol=close)


def test_sets_of_lengths_make_no_new_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_attend_segments", attention._attend_segments)
    attention.leave_attention_uncompiled()
    graphs: list[object] = []

    def counting(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    def attend(rows_SHD: Tensor, layout: SegmentLayout) -> Tensor:
        return 2.0 * packed_attention(rows_SHD + 1.0, rows_SHD, rows_SHD, layout, None)

    compiled = torch.compile(attend, backend=counting)
    counts = []
    for lengths in ((5, 4, 3), (7, 3, 2), (1, 9, 2), (9, 2, 1)):
        compiled(torch.randn(12, 2, 4), SegmentLayout.of(lengths, torch.arange(12)))
        counts.append(len(graphs))
    assert counts[0] > 0 and counts[-1] == counts[0]
