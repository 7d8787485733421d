"""Quantizers: closed forms, parity with the encodec package, straight-through gradients, revival that lasts."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from itertools import pairwise

import pytest
import torch
from encodec.quantization.core_vq import EuclideanCodebook
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tokenizer.quantizers.codebooks import kmeans
from tokenizer.quantizers.residual import (
    QUANTIZERS,
    Quantizer,
    ResidualVectorQuantizer,
    SplitResidualQuantizer,
    nearest_codes,
    perplexity,
)

LEVELS, SIZE, DIM = 4, 16, 6
EVERY_KIND = pytest.mark.parametrize("kind", sorted(QUANTIZERS))


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def started(kind: str, seed: int = 0) -> Quantizer:
    """A small quantizer, started on Gaussian latents, in float64 so that sums can be compared closely."""
    torch.manual_seed(seed)
    quantizer = QUANTIZERS[kind](LEVELS, SIZE, DIM).double()
    quantizer.initialize(latents(quantizer, 1000, seed)[0], seeded(seed))
    return quantizer.eval()


def latents(quantizer: Quantizer, frames: int, seed: int, batch: int = 1) -> Tensor:
    shape = (batch, frames, quantizer.latent_dim)
    return torch.randn(shape, generator=seeded(seed), dtype=torch.float64)


# --- any quantizer


@EVERY_KIND
@settings(max_examples=15)
@given(
    levels=st.integers(1, LEVELS), batch=st.integers(1, 3), frames=st.integers(1, 9), seed=st.integers(0, 99)
)
def test_the_quantized_latent_is_the_decoded_codes(
    kind: str, levels: int, batch: int, frames: int, seed: int
) -> None:
    quantizer = started(kind)
    latent = latents(quantizer, frames, seed, batch)
    out = quantizer(latent, levels)
    assert out.codes_BKT.shape == (batch, levels, frames)
    torch.testing.assert_close(quantizer.decode(out.codes_BKT), out.latent_BTD, atol=1e-12, rtol=0)
    assert torch.equal(out.codes_BKT, quantizer(latent).codes_BKT[:, :levels])


@EVERY_KIND
def test_every_further_level_lowers_the_error(kind: str) -> None:
    quantizer = started(kind)
    latent = latents(quantizer, 500, 5)
    rebuilt = [quantizer(latent, n).latent_BTD.detach() for n in range(1, LEVELS + 1)]
    errors = [float((one - latent).square().mean()) for one in rebuilt]
    assert all(later < 0.95 * earlier for earlier, later in pairwise(errors)), errors


@EVERY_KIND
def test_each_item_with_its_own_number_of_levels_is_that_item_alone(kind: str) -> None:
    quantizer = started(kind)
    latent = latents(quantizer, 7, 1, batch=4)
    counts = torch.tensor([4, 1, 3, 2])
    out = quantizer(latent, counts)
    assert out.codes_BKT.shape == (4, LEVELS, 7)
    alone = [quantizer(latent[i : i + 1], int(n)) for i, n in enumerate(counts)]
    torch.testing.assert_close(out.latent_BTD, torch.cat([one.latent_BTD for one in alone]))
    pairs = sum(one.commitment * n for one, n in zip(alone, counts, strict=True)) / counts.sum()
    torch.testing.assert_close(out.commitment, pairs)


@EVERY_KIND
def test_masked_frames_count_nowhere(kind: str) -> None:
    short, padded = started(kind).train(), started(kind).train()
    latent = latents(short, 20, 3, batch=2)
    mask = torch.ones(2, 32, dtype=torch.bool)
    mask[:, 20:] = False
    longer = torch.cat([latent, 9 * torch.ones(2, 12, short.latent_dim, dtype=torch.float64)], dim=1)
    plain, masked = short(latent), padded(longer, None, mask)
    torch.testing.assert_close(masked.commitment, plain.commitment)
    torch.testing.assert_close(masked.latent_BTD[:, :20], plain.latent_BTD)
    for key, value in short.state_dict().items():
        torch.testing.assert_close(padded.state_dict()[key], value)
    unmasked = started(kind).train()
    unmasked(longer)
    assert not torch.allclose(unmasked.ema_perplexity_K(), short.ema_perplexity_K())


@EVERY_KIND
def test_levels_that_an_item_does_not_use_get_no_statistics(kind: str) -> None:
    quantizer = started(kind).train()
    before = quantizer.ema_perplexity_K().clone(), quantizer.vectors_KVD.clone()
    quantizer(latents(quantizer, 50, 4, batch=2), torch.tensor([2, 1]))
    after = quantizer.ema_perplexity_K(), quantizer.vectors_KVD
    changed = [not torch.equal(before[0][level], after[0][level]) for level in range(LEVELS)]
    assert changed == [True, True, False, False]
    assert torch.equal(before[1][2:], after[1][2:])


@EVERY_KIND
def test_a_quantizer_that_does_not_train_stays_as_it_is(kind: str) -> None:
    quantizer = started(kind)
    before = {key: value.clone() for key, value in quantizer.state_dict().items()}
    quantizer(latents(quantizer, 50, 4))
    assert all(torch.equal(value, before[key]) for key, value in quantizer.state_dict().items())


@EVERY_KIND
def test_figures_of_even_and_of_collapsed_use(kind: str) -> None:
    quantizer = QUANTIZERS[kind](LEVELS, SIZE, DIM).train()
    quantizer.initialize(torch.randn(1000, quantizer.latent_dim, generator=seeded()), seeded())
    assert float(quantizer.alive_K().min()) > 0.5 and float(quantizer.ema_perplexity_K().min()) > 5
    for _ in range(400):
        quantizer(torch.ones(1, 8, quantizer.latent_dim))
    assert quantizer.alive_K().tolist() == pytest.approx([1 / SIZE] * LEVELS)
    assert float(quantizer.ema_perplexity_K().max()) < 1.1


@EVERY_KIND
@pytest.mark.parametrize("count", [0, LEVELS + 1, torch.tensor([1, LEVELS + 1]), torch.tensor([1])])
def test_wrong_number_of_levels(kind: str, count: int | Tensor) -> None:
    quantizer = started(kind)
    with pytest.raises(ValueError, match="num_codebooks"):
        quantizer(latents(quantizer, 3, 0, batch=2), count)


@EVERY_KIND
def test_no_latents_and_a_wrong_mask_are_named(kind: str) -> None:
    quantizer = started(kind)
    with pytest.raises(ValueError, match="needs latents"):
        quantizer.initialize(torch.zeros(0, quantizer.latent_dim), seeded())
    with pytest.raises(ValueError, match="mask_BT"):
        quantizer(latents(quantizer, 3, 0), None, torch.ones(1, 4, dtype=torch.bool))


# --- residual vector quantization


def test_nearest_is_nearest_far_from_the_origin() -> None:
    x, vectors = torch.randn(200, 5) + 1000, torch.randn(30, 5) + 1000
    exact = torch.cdist(x.double(), vectors.double()).argmin(1)
    assert torch.equal(nearest_codes(x, vectors), exact)
    expanded = (vectors.square().sum(1) - 2 * x @ vectors.T).argmin(1)
    assert not torch.equal(expanded, exact), "without centring the same test must fail"


def test_nearest_in_blocks_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x, vectors = torch.randn(203, 5), torch.randn(30, 5)
    whole = nearest_codes(x, vectors)
    monkeypatch.setattr("tokenizer.quantizers.codebooks.DISTANCES_AT_ONCE", 300)
    assert torch.equal(nearest_codes(x, vectors), whole)


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
    assert torch.equal(quantizer.decode(out.codes_BKT), out.latent_BTD)


@settings(max_examples=20)
@given(levels=st.integers(0, 3), seed=st.integers(0, 99))
def test_gradient_passes_straight_through(levels: int, seed: int) -> None:
    """Identity; and nothing where no level was used, as the output is zero whatever the latent."""
    quantizer = ResidualVectorQuantizer(3, 8, 3).eval()
    latent = torch.randn(1, 5, 3, generator=seeded(seed), requires_grad=True)
    weight = torch.randn(1, 5, 3, generator=seeded(seed + 1))
    (quantizer(latent, torch.tensor([levels])).latent_BTD * weight).sum().backward()
    torch.testing.assert_close(latent.grad, weight if levels else torch.zeros_like(weight))


def test_one_update_is_that_of_the_encodec_package() -> None:
    ours, theirs = ResidualVectorQuantizer(1, 12, 5, decay=0.9).double(), encodec_codebook(12, 5, 0.9)
    vectors = torch.randn(12, 5, dtype=torch.float64, generator=seeded())
    usage = 1 + torch.rand(12, dtype=torch.float64, generator=seeded(1))
    ours.embed_sum_KVD.copy_(vectors * usage[:, None])
    ours.usage_KV.copy_(usage)
    theirs.embed.copy_(vectors)
    theirs.embed_avg.copy_(vectors * usage[:, None])
    theirs.cluster_size.copy_(usage)
    for step in range(3):
        latent = torch.randn(1, 40, 5, dtype=torch.float64, generator=seeded(10 + step))
        codes = ours(latent).codes_BKT[0]
        _, expected = theirs(latent)
        assert torch.equal(codes, expected)
        torch.testing.assert_close(ours.usage_KV[0], theirs.cluster_size, atol=1e-12, rtol=0)
        torch.testing.assert_close(ours.vectors_KVD[0], theirs.embed, atol=1e-12, rtol=0)


def test_statistics_move_vectors_to_the_mean_of_what_they_quantize() -> None:
    quantizer = ResidualVectorQuantizer(1, 2, 1, decay=0.9)
    quantizer.embed_sum_KVD.copy_(torch.tensor([[[-0.5], [0.5]]]))
    data = torch.tensor([-3.0, -1.0, 1.0, 2.0, 3.0]).reshape(1, 5, 1)
    for _ in range(300):
        quantizer(data)
    torch.testing.assert_close(quantizer.vectors_KVD[0, :, 0], torch.tensor([-2.0, 2.0]), atol=1e-3, rtol=0)


def test_a_code_that_nothing_chooses_keeps_its_vector() -> None:
    """Its usage and sum decay together; without a floor both end as denormals and the ratio as noise."""
    quantizer = ResidualVectorQuantizer(1, 2, 1, decay=0.5)
    quantizer.embed_sum_KVD.copy_(torch.tensor([[[-70.0], [1.0]]]))
    for _ in range(400):
        quantizer(torch.ones(1, 4, 1))
    assert quantizer.vectors_KVD[0, :, 0].tolist() == pytest.approx([-70.0, 1.0], rel=1e-4)


def test_codes_follow_codebooks_that_change_between_two_calls() -> None:
    quantizer = started("rvq")
    assert isinstance(quantizer, ResidualVectorQuantizer)
    latent_BTD = latents(quantizer, 200, 5)

    def fresh() -> Tensor:
        again = ResidualVectorQuantizer(LEVELS, SIZE, DIM).double()
        again.load_state_dict(quantizer.state_dict())
        return again.encode([latent_BTD])[0]

    seen = [quantizer.encode([latent_BTD])[0]]
    assert torch.equal(quantizer.encode([latent_BTD])[0], seen[0])
    quantizer.train()(latent_BTD + 0.5)  # an update of the statistics
    seen.append(quantizer.eval().encode([latent_BTD])[0])
    assert torch.equal(seen[-1], fresh())
    quantizer.embed_sum_KVD[1] = 0.5 - quantizer.embed_sum_KVD[1]
    seen.append(quantizer.encode([latent_BTD])[0])
    assert torch.equal(seen[-1], fresh())
    quantizer.load_state_dict(started("rvq", 9).state_dict())
    seen.append(quantizer.encode([latent_BTD])[0])
    assert torch.equal(seen[-1], fresh())
    quantizer.refit(latent_BTD[0], seeded())
    assert torch.equal(quantizer.encode([latent_BTD])[0], fresh())
    copied = deepcopy(quantizer)
    while copied.usage_KV._version < quantizer.usage_KV._version:  # until the copy counts as many writes
        copied.usage_KV[0] *= torch.linspace(0.8, 1.25, SIZE)
    while copied.embed_sum_KVD._version < quantizer.embed_sum_KVD._version:
        copied.embed_sum_KVD[1] *= -1
    assert not torch.equal(copied.encode([latent_BTD])[0], quantizer.encode([latent_BTD])[0])
    assert torch.equal(quantizer.encode([latent_BTD])[0], fresh())
    assert all(not torch.equal(one, other) for one, other in pairwise(seen))
    with torch.inference_mode():
        unseen = started("rvq", 3)  # its tensors count no versions
        before = unseen.encode([latent_BTD])[0]
        assert isinstance(unseen, ResidualVectorQuantizer)
        unseen.embed_sum_KVD.mul_(-1)
        assert not torch.equal(unseen.encode([latent_BTD])[0], before)


def test_revived_codes_stay_in_use() -> None:
    """All data near one vector, so most codes die; revived ones must still be in use 50 updates later."""
    quantizer = ResidualVectorQuantizer(1, 32, 4)
    quantizer.embed_sum_KVD.copy_(50 + torch.randn(1, 32, 4, generator=seeded()))

    def update(data: Tensor) -> Tensor:
        return quantizer(data).codes_BKT.flatten()

    def revive(data: Tensor) -> None:
        assert quantizer.revive(data, seeded(1)) > 20

    before, after = used_before_and_after(update, revive)
    assert before < 8 and after == 32
    assert float(quantizer.alive_K()) == 1.0
    assert quantizer.revive(torch.randn(1, 256, 4), seeded(2)) == 0


def test_revival_that_writes_the_ratio_only_is_undone() -> None:
    """The negative control: the encodec package's codebook in the same scenario."""
    codebook = encodec_codebook(32, 4, 0.98).float()
    codebook.embed.copy_(50 + torch.randn(32, 4, generator=seeded()))
    codebook.embed_avg.copy_(codebook.embed)
    codebook.cluster_size.fill_(1.0)

    def update(data: Tensor) -> Tensor:
        return codebook(data)[1].flatten()

    def revive(data: Tensor) -> None:
        codebook.threshold_ema_dead_code = 2
        codebook(data)
        codebook.threshold_ema_dead_code = 0

    before, after = used_before_and_after(update, revive)
    assert before < 8 and after < 8


def test_revival_leaves_masked_frames_alone() -> None:
    quantizer = ResidualVectorQuantizer(1, 8, 2)
    quantizer.usage_KV[0, 1:] = 1e-4
    latent = torch.randn(2, 30, 2, generator=seeded())
    mask = torch.arange(30) < torch.tensor([[20], [10]])
    latent[~mask] = 1e6
    assert quantizer.revive(latent, seeded(), mask_BT=mask) == 7
    assert float(quantizer.vectors_KVD.abs().max()) < 100
    assert quantizer.revive(latent, seeded(), mask_BT=torch.zeros_like(mask)) == 0


# --- the start


def test_kmeans_start_finds_the_clusters() -> None:
    centres = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0], [10.0, 10.0]])
    points = centres.repeat(100, 1) + 0.1 * torch.randn(400, 2, generator=seeded(3))
    quantizer = ResidualVectorQuantizer(2, 16, 2)
    quantizer.initialize(points, seeded(3))
    rebuilt = quantizer.eval()(points[None]).latent_BTD[0]
    assert float((rebuilt - points).square().mean()) < 0.1 * 0.01


def test_kmeans_wastes_no_code_on_a_heap_of_equal_frames() -> None:
    """As silence is: nine random starts of ten lie in the heap, and all but one of them are empty."""
    points = torch.cat([torch.full((900, 2), 5.0), torch.randn(100, 2, generator=seeded(1))])
    vectors, counts = kmeans(points, 64, seeded(2), iterations=12)
    assert torch.equal(counts, torch.bincount(nearest_codes(points, vectors), minlength=64).float())
    assert int((counts == 0).sum()) == 0
    assert int(counts.max()) == 900


def test_fewer_latents_than_codes_are_all_codes() -> None:
    quantizer = ResidualVectorQuantizer(1, 16, 3)
    points = torch.randn(5, 3, generator=seeded())
    quantizer.initialize(points, seeded())
    torch.testing.assert_close(quantizer.eval()(points[None]).latent_BTD[0], points)


def test_the_first_update_after_the_start_shrinks_nothing() -> None:
    points = torch.randn(640, 4, generator=seeded())
    quantizer = ResidualVectorQuantizer(1, 32, 4, decay=0.99)
    quantizer.initialize(points, seeded())
    before = quantizer.vectors_KVD[0].norm(dim=1)
    quantizer(points[None])
    assert float((quantizer.vectors_KVD[0].norm(dim=1) / before).min()) > 0.95
    theirs = EuclideanCodebook(4, 32, kmeans_init=True, threshold_ema_dead_code=0)
    theirs.eval()(points[None])
    before = theirs.embed.norm(dim=1)
    theirs.train()(points[None])
    assert float((theirs.embed.norm(dim=1) / before).median()) < 0.2, "the control must shrink"


# --- the split structure


def test_split_is_one_quantizer_beside_another() -> None:
    split = started("split_rvq")
    assert isinstance(split, SplitResidualQuantizer)
    latent = latents(split, 9, 2, batch=2)
    out = split(latent)
    semantic, acoustic = split.semantic(latent[..., :DIM]), split.acoustic(latent[..., DIM:])
    assert torch.equal(out.codes_BKT, torch.cat([semantic.codes_BKT, acoustic.codes_BKT], dim=1))
    assert torch.equal(out.latent_BTD, torch.cat([semantic.latent_BTD, acoustic.latent_BTD], dim=-1))
    torch.testing.assert_close(out.commitment, (semantic.commitment + 3 * acoustic.commitment) / 4)
    assert split.vectors_KVD.shape == (LEVELS, SIZE, DIM)
    first = split(latent, 1)
    assert torch.equal(first.latent_BTD[..., DIM:], torch.zeros_like(latent[..., DIM:]))
    torch.testing.assert_close(first.commitment, semantic.commitment)
    with pytest.raises(ValueError, match="at least 2"):
        SplitResidualQuantizer(1, SIZE, DIM)


def test_split_revives_both_parts() -> None:
    split = SplitResidualQuantizer(3, 8, 2)
    split.semantic.usage_KV[0, :2] = 1e-3
    split.acoustic.usage_KV[1, :3] = 1e-3
    assert split.revive(torch.randn(1, 50, 4), seeded()) == 5
    assert split.alive_K().tolist() == [1.0, 1.0, 1.0]


def test_perplexity_of_uniform_and_of_collapsed_use() -> None:
    codes = torch.stack([torch.arange(64).repeat(4), torch.zeros(256, dtype=torch.long)])
    assert perplexity(codes, 64).tolist() == pytest.approx([64.0, 1.0], rel=1e-4)


def encodec_codebook(size: int, dim: int, decay: float) -> EuclideanCodebook:
    """Without smoothing and without revival, so that only the update is compared."""
    codebook = EuclideanCodebook(dim, size, decay=decay, epsilon=0.0, threshold_ema_dead_code=0)
    return codebook.double().train()


def used_before_and_after(
    update: Callable[[Tensor], Tensor], revive: Callable[[Tensor], None]
) -> tuple[int, int]:
    """Codes used by Gaussian data after 200 updates, and 50 updates after one revival."""
    generator = seeded(7)

    def used() -> int:
        return len(
            torch.cat([update(torch.randn(1, 256, 4, generator=generator)) for _ in range(10)]).unique()
        )

    for _ in range(190):
        update(torch.randn(1, 256, 4, generator=generator))
    before = used()
    revive(torch.randn(1, 256, 4, generator=generator))
    for _ in range(40):
        update(torch.randn(1, 256, 4, generator=generator))
    return before, used()


@pytest.mark.parametrize("kind", ["rvq", "split_rvq"])
def test_a_refit_follows_an_encoder_that_moved_and_brings_every_code_into_use(kind: str) -> None:
    """The codebooks of latents that have since been shrunk and shifted: distance falls, and no code is idle."""
    dice = torch.Generator().manual_seed(0)
    quantizer = QUANTIZERS[kind](4, 32, 6)
    before_SD = torch.randn(4000, quantizer.latent_dim, generator=dice)
    quantizer.initialize(before_SD, dice)
    moved_SD = 0.5 * before_SD + 0.3

    def left_over() -> float:
        codes_BKT = quantizer.encode([moved_SD[None]])[0]
        return float((quantizer.decode(codes_BKT)[0] - moved_SD).square().mean())

    stale = left_over()
    quantizer.refit(moved_SD, dice)
    assert left_over() < 0.7 * stale
    codes_BKT = quantizer.encode([moved_SD[None]])[0]
    assert [len(codes_T.unique()) for codes_T in codes_BKT[0]] == [32] * 4
