"""Two ranks over gloo end with the codebooks of one rank on both batches, to 1e-9 in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed, multiprocessing

from tests.forked import forked
from tokenizer.higgs.quantizer import HiggsQuantizer
from tokenizer.quantizers.codebooks import sum_over_ranks
from tokenizer.quantizers.residual import QUANTIZERS

LEVELS, SIZE, DIM, FRAMES = 3, 16, 6, 40
ITEMS_OF_RANK = (3, 2)
"""Unequal, so that the ranks' offsets matter."""


def train_quantizer(kind: str, first: int, last: int) -> dict[str, Tensor]:
    """Start, train, revive and train again on items `first` to `last` of every batch; the same data everywhere."""
    torch.manual_seed(0)
    quantizer = QUANTIZERS[kind](LEVELS, SIZE, DIM).double().train()
    quantizer.initialize(batch_of(quantizer.latent_dim, 0)[first:last].flatten(0, 1), seeded(1))
    for step in range(1, 13):
        # narrower and narrower, so that codes die; 4 frames of padding at the end of every item
        latent = batch_of(quantizer.latent_dim, step)[first:last] * 0.8**step
        counts = torch.tensor([3, 1, 3, 2, 3])[first:last]
        mask = torch.arange(FRAMES) < FRAMES - 4
        quantizer(latent, counts if step % 2 else None, mask.expand(last - first, FRAMES))
        if step == 10:
            revived = quantizer.revive(latent, seeded(2), 0.5, mask.expand(last - first, FRAMES))
    return {"revived": torch.tensor(float(revived)), **quantizer.state_dict()}


def train_higgs_quantizer(first: int, last: int) -> dict[str, Tensor]:
    """The same for the `higgs` preset, in float32; the ranks' commitments add up to that of one rank."""
    torch.manual_seed(0)
    quantizer = HiggsQuantizer(LEVELS, DIM, SIZE, 4).train()
    quantizer.initialize(batch_of(DIM, 0)[first:last].flatten(0, 1).float(), seeded(1))
    for step in range(1, 7):
        latent = batch_of(DIM, step)[first:last].float() * 0.8**step
        commitment = quantizer(latent, torch.tensor([3, 1, 3, 2, 3])[first:last]).commitment.detach()
        if step == 5:
            revived = quantizer.revive(latent, seeded(2), 1.0)
    total = sum_over_ranks(commitment.clone())
    return {"revived": torch.tensor(float(revived)), "commitment": total, **quantizer.state_dict()}


def batch_of(width: int, step: int) -> Tensor:
    shape = (sum(ITEMS_OF_RANK), FRAMES, width)
    return torch.randn(shape, generator=seeded(100 + step), dtype=torch.float64)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def run_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    first = sum(ITEMS_OF_RANK[:rank])
    states = {kind: train_quantizer(kind, first, first + ITEMS_OF_RANK[rank]) for kind in QUANTIZERS}
    states["higgs"] = train_higgs_quantizer(first, first + ITEMS_OF_RANK[rank])
    torch.save(states, f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Tensor]]]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    with forked():
        multiprocessing.start_processes(run_rank, (str(folder),), nprocs=2, start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("kind", sorted(QUANTIZERS))
def test_two_ranks_are_one(kind: str, two_ranks: list[dict[str, dict[str, Tensor]]]) -> None:
    one = train_quantizer(kind, 0, sum(ITEMS_OF_RANK))
    assert (float(one["revived"]) > 0) == (kind != "fsq")
    for key, value in one.items():
        for rank in two_ranks:
            torch.testing.assert_close(rank[kind][key], value, atol=1e-9, rtol=0, msg=f"{kind} {key}")
        assert torch.equal(two_ranks[0][kind][key], two_ranks[1][kind][key])
    alone = train_quantizer(kind, 0, ITEMS_OF_RANK[0])
    assert any((alone[key] - one[key]).abs().max() > 1e-3 for key in one), "one rank's half must differ"


def test_two_ranks_are_one_for_the_higgs_quantizer(two_ranks: list[dict[str, dict[str, Tensor]]]) -> None:
    one = train_higgs_quantizer(0, sum(ITEMS_OF_RANK))
    assert float(one["revived"]) > 0
    for key, value in one.items():
        for rank in two_ranks:
            torch.testing.assert_close(rank["higgs"][key], value, atol=1e-4, rtol=1e-4, msg=f"higgs {key}")
        assert torch.equal(two_ranks[0]["higgs"][key], two_ranks[1]["higgs"][key])
