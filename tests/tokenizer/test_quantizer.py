"""Residual vector quantization: closed forms, straight-through gradients, and revival that lasts."""

from __future__ import annotations

import pytest
import torch

from tokenizer.quantizer import ResidualVectorQuantizer, nearest_codes, perplexity


def test_nearest_is_nearest() -> None:
    x, vectors = torch.randn(200, 5) + 100, torch.randn(30, 5) + 100
    assert torch.equal(nearest_codes(x, vectors), torch.cdist(x.double(), vectors.double()).argmin(1))


def test_levels_quantize_what_is_left_over() -> None:
    quantizer = ResidualVectorQuantizer(3, 16, 4).eval()
    latent = torch.randn(2, 7, 4)
    out = quantizer(latent)
    residual = latent.reshape(-1, 4)
    for level in range(3):
        codes = torch.cdist(residual, quantizer.vectors_KVD[level]).argmin(1)
        assert torch.equal(out.codes_BKT[:, level].reshape(-1), codes)
        residual = residual - quantizer.vectors_KVD[level][codes]
    torch.testing.assert_close(out.latent_BTD.reshape(-1, 4), latent.reshape(-1, 4) - residual)
    torch.testing.assert_close(quantizer.decode(out.codes_BKT), out.latent_BTD)


def test_a_prefix_of_codebooks_is_the_prefix_of_the_codes() -> None:
    quantizer = ResidualVectorQuantizer(4, 16, 4).eval()
    latent = torch.randn(1, 9, 4)
    assert torch.equal(quantizer(latent, 2).codes_BKT, quantizer(latent).codes_BKT[:, :2])


def test_gradient_passes_straight_through() -> None:
    quantizer = ResidualVectorQuantizer(2, 8, 3).eval()
    latent = torch.randn(1, 5, 3, requires_grad=True)
    weight = torch.randn(1, 5, 3)
    (quantizer(latent).latent_BTD * weight).sum().backward()
    torch.testing.assert_close(latent.grad, weight)


def test_statistics_move_vectors_to_the_mean_of_what_they_quantize() -> None:
    torch.manual_seed(0)
    quantizer = ResidualVectorQuantizer(1, 2, 1, decay=0.9)
    quantizer.embed_sum_KVD.copy_(torch.tensor([[[-0.5], [0.5]]]))
    data = torch.tensor([-3.0, -1.0, 1.0, 2.0, 3.0]).reshape(1, 5, 1)
    for _ in range(300):
        quantizer(data)
    torch.testing.assert_close(quantizer.vectors_KVD[0, :, 0], torch.tensor([-2.0, 2.0]), atol=1e-3, rtol=0)
    quantizer.eval()
    before = quantizer.vectors_KVD.clone()
    quantizer(data)
    assert torch.equal(before, quantizer.vectors_KVD)


def test_revived_codes_are_used_and_stay() -> None:
    """All data near one vector: most codes die; revived ones must outlive the next updates."""
    torch.manual_seed(0)
    quantizer = ResidualVectorQuantizer(1, 32, 4)
    quantizer.embed_sum_KVD.add_(50)
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        quantizer(torch.randn(1, 256, 4, generator=generator))
    data = torch.randn(1, 256, 4, generator=generator)
    assert len(quantizer(data).codes_BKT.unique()) < 8
    assert quantizer.revive(data, generator) > 20
    for _ in range(20):
        quantizer(torch.randn(1, 256, 4, generator=generator))
    assert len(quantizer(data).codes_BKT.unique()) > 24
    assert quantizer.revive(data, generator) < 6


def test_kmeans_start_finds_the_clusters() -> None:
    centres = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0], [10.0, 10.0]])
    generator = torch.Generator().manual_seed(3)
    points = centres.repeat(100, 1) + 0.1 * torch.randn(400, 2, generator=generator)
    quantizer = ResidualVectorQuantizer(2, 16, 2)
    quantizer.initialize(points, generator)
    rebuilt = quantizer.eval()(points[None]).latent_BTD[0]
    assert float((rebuilt - points).square().mean()) < 0.1 * 0.01


def test_perplexity_of_uniform_and_of_collapsed_use() -> None:
    codes = torch.stack([torch.arange(64).repeat(4), torch.zeros(256, dtype=torch.long)])
    assert perplexity(codes, 64).tolist() == pytest.approx([64.0, 1.0], rel=1e-4)
