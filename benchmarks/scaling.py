"""What ranks that train together lose: CPU-seconds of steps with the reduction of gradients, and without it.

    python benchmarks/scaling.py [--full] [--ranks 1 2 4] [--rounds 9]

Each rank is a process with one thread that takes steps of a DualFFN on its own 512 rows (weak scaling), forward and
backward, wrapped as the strategy `ddp` wraps it; steps with the reduction over gloo and without it take turns, and the
median over the rounds counts, of the slowest rank. By CPU-seconds, as ranks share the cores where there are fewer of
them: waiting for other ranks does not count. `ratio` is the efficiency; `of_fewest_ranks` counts what ranks on the same
cores lose by sharing caches, too. The last lines compare the efficiency with what `audiollm plan` computes
(`audiollm.commands.cluster.efficiency`), whose speed of reduction is that of the largest number of ranks.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from measure import bench_parser, parse_options, print_row
from packing import CONFIG, sample
from torch import Tensor

from audiollm.commands.cluster import efficiency, reduction_seconds
from audiollm.data.packing import PackedBatch, pack
from audiollm.families.dual_ffn.losses import TokenLosses
from audiollm.models.dual_ffn import DualFFN
from audiollm.recipe.ranks import join_ranks, leave
from audiollm.train.parallel.wrapping import ddp

SAMPLE_ROWS = 256


class RankCost(NamedTuple):
    """CPU-seconds of a step of one rank, and the bytes of its gradients."""

    reduced_s: float
    alone_s: float
    gradient_bytes: int


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rows", type=int, default=512, help="of a step and rank")
    parser.add_argument("--rounds", type=int, default=9)
    options = parse_options(parser, rounds=31)
    costs = {ranks: measure(ranks, options.rows, options.rounds) for ranks in options.ranks}
    unit = "CPU-seconds per step and rank (peer: without reduction)"
    for ranks, cost in costs.items():
        alone_s = costs[min(costs)].alone_s
        print_row(
            "scaling", f"{ranks} rank{'s' * (ranks > 1)}", cost.reduced_s, cost.alone_s, unit,
            gradient_mb=round(cost.gradient_bytes / 1e6, 2), of_fewest_ranks=round(alone_s / cost.reduced_s, 3),
        )  # fmt: skip
    several = [ranks for ranks in costs if ranks > 1]
    if not several:
        return
    speed = reduction_bytes_per_second(max(several), costs[max(several)])
    print_row("scaling", "speed of the reduction", speed / 1e9, None, "GB per CPU-second of a rank")
    unit = "of their sum (peer: computed)"
    for ranks in several:
        cost = costs[ranks]
        measured = cost.alone_s / cost.reduced_s
        computed = efficiency(cost.alone_s, cost.gradient_bytes, ranks, speed)
        print_row("scaling", f"efficiency of {ranks} ranks", measured, computed, unit, more_is_better=True)


def reduction_bytes_per_second(ranks: int, cost: RankCost) -> float:
    """Bytes of gradients that a rank sums per CPU-second, by the rule of `reduction_seconds`."""
    seconds = max(cost.reduced_s - cost.alone_s, 1e-6)
    return reduction_seconds(cost.gradient_bytes, ranks, 1.0) / seconds


def measure(ranks: int, rows: int, rounds: int) -> RankCost:
    """The costs of the slowest of the ranks, each in a process of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = [(rank, ranks, port, rows, rounds) for rank in range(ranks)]
    with multiprocessing.get_context("spawn").Pool(ranks) as pool:
        costs: Sequence[RankCost] = pool.starmap(run_rank, arguments, chunksize=1)
    return max(costs)


def run_rank(rank: int, world: int, port: int, rows: int, rounds: int) -> RankCost:
    """Take steps in turns with the other ranks; the first round is thrown away."""
    torch.set_num_threads(1)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), **address})
    ranks = join_ranks()
    torch.manual_seed(0)
    losses = TokenLosses(DualFFN(CONFIG))
    wrapped = losses if world == 1 else ddp(torch.device("cpu"), False)(losses)
    batch = pack([sample(SAMPLE_ROWS, rank * rows + number) for number in range(rows // SAMPLE_ROWS)])
    seconds: dict[str, list[float]] = {"reduced": [], "alone": []}
    for _ in range(rounds + 1):
        for way, times in seconds.items():
            ranks.barrier()
            began = time.process_time()
            if way == "alone" and world > 1:
                with wrapped.no_sync():  # type: ignore[operator]
                    step(wrapped, batch)
            else:
                step(wrapped, batch)
            times.append(time.process_time() - began)
            losses.zero_grad()
    gradient_bytes = sum(4 * weight.numel() for weight in losses.parameters() if weight.requires_grad)
    leave(ranks)
    reduced_s, alone_s = (statistics.median(times[1:]) for times in seconds.values())
    return RankCost(reduced_s, alone_s, gradient_bytes)


def step(losses: torch.nn.Module, batch: PackedBatch) -> Tensor:
    """Forward and backward; the sum of the losses."""
    values = losses(batch)
    loss: Tensor = values["text"] / batch.counts["text"] + values["audio"] / batch.counts["audio"]
    loss.backward()
    return loss.detach()


if __name__ == "__main__":
    main()
