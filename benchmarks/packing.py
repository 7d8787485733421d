"""Trained tokens per CPU-second of the same model on the same samples: packed, sorted, padded.

    python benchmarks/packing.py [--rounds 3] [--samples 48]

Lengths have a long tail, as in LongAlign (arXiv 2401.18058): nine of ten samples are short, one lies near the
maximum. Each way takes one optimizer step over all samples, in packs of at most the same number of positions; the ways
take turns in one process on one thread, and the median over the rounds counts. `padded` takes the samples as they
come and pads each pack to its longest sample, `sorted` does so after sorting by length, `packed` is first fit without
padding. A trained token is a position of a sample; padding counts for nothing, but is computed, in the layers
alone: the loss takes positions with targets in all three ways, so padding costs less here than where its logits
are computed as well. The losses of the three must be equal (to 1e-4, in fp32): else it ends with exit code 1.
"""

from __future__ import annotations

import json
import statistics
import time

import torch
from measure import bench_parser, print_row
from torch import Tensor

from audiollm.data.chat.delay import IGNORE
from audiollm.data.chat.template import Kind, TokenStream
from audiollm.data.packing import PackedBatch, pack, pad_streams, plan_step
from audiollm.families.dual_ffn.losses import TokenLosses
from audiollm.models.decoder import DualFFNConfig
from audiollm.models.dual_ffn import DualFFN

MAXIMUM = 2048
CAPACITY = 8192
CONFIG = DualFFNConfig(
    vocab_size=1024, hidden_size=192, num_layers=3, num_heads=3, num_kv_heads=3, intermediate_size=512
)
TOLERANCE = 1e-4
TIES = (("packed", "padded"), ("sorted", "padded"), ("packed", "sorted"))


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=48)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    streams = [sample(length, seed) for seed, length in enumerate(long_tail(arguments.samples))]
    steps = {name: packs_of(streams, name) for name in ("packed", "sorted", "padded")}
    tokens = sum(len(stream) for stream in streams)
    seconds = measure(steps, arguments.rounds)
    rates = {name: tokens / statistics.median(times) for name, times in seconds.items()}
    for ours, peer in TIES:
        case, unit = f"{ours} against {peer}", "trained tokens per CPU-second"
        print_row("packing", case, rates[ours], rates[peer], unit, more_is_better=True, digits=1)
    positions = {name: sum(len(batch.positions_S) for batch in packs) for name, packs in steps.items()}
    print(json.dumps({"samples": len(streams), "tokens": tokens, "positions computed": positions,
                      "packs": {name: len(packs) for name, packs in steps.items()}}))  # fmt: skip


def long_tail(count: int, maximum: int = MAXIMUM, seed: int = 0) -> list[int]:
    """Positions of each sample: a log-normal body with median 120, every tenth between 0.6 and 1 of the maximum."""
    generator = torch.Generator().manual_seed(seed)
    short = (0.7 * torch.randn(count, generator=generator)).exp().mul(120).clamp(24, maximum)
    long = (0.6 + 0.4 * torch.rand(count, generator=generator)) * maximum
    is_long = torch.randperm(count, generator=generator) < max(1, count // 10)
    lengths: list[int] = torch.where(is_long, long, short).long().tolist()
    return lengths


def sample(length: int, seed: int) -> TokenStream:
    """Speech after a short prompt: every row of it is a target."""
    generator = torch.Generator().manual_seed(seed)
    is_audio_S = torch.arange(length) >= 12
    ids_S = torch.randint(CONFIG.vocab_size, (length,), generator=generator)
    codes_SK = torch.randint(CONFIG.codebook_size, (length, CONFIG.num_codebooks), generator=generator)
    codes_SK *= is_audio_S[:, None]
    return TokenStream(
        ids_S,
        codes_SK,
        torch.where(is_audio_S, int(Kind.AUDIO_OUT), int(Kind.TEXT)),
        torch.where(torch.arange(length) == length - 1, ids_S, IGNORE),
        torch.where(is_audio_S[:, None], codes_SK, IGNORE),
    )


def packs_of(streams: list[TokenStream], strategy: str) -> list[PackedBatch]:
    """The step's packs; with padding, but for `packed`."""
    name = {"padded": "in_order"}.get(strategy, strategy)
    plan = plan_step([len(stream) for stream in streams], CAPACITY, strategy=name)[0]
    groups = [[streams[index] for index in indices] for indices in plan]
    return [pack(group if strategy == "packed" else pad_streams(group)) for group in groups]


def measure(steps: dict[str, list[PackedBatch]], rounds: int) -> dict[str, list[float]]:
    """CPU-seconds of an optimizer step, the ways in turns; the first round is thrown away."""
    torch.manual_seed(0)
    losses = TokenLosses(DualFFN(CONFIG))
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 1):
        values = {}
        for name, packs in steps.items():
            started = time.process_time()
            values[name] = step(losses, packs)
            if turn:
                seconds[name].append(time.process_time() - started)
        for name in ("sorted", "padded"):
            if not torch.isclose(values[name], values["packed"], rtol=TOLERANCE, atol=0):
                raise SystemExit(
                    f"the losses differ: packed {values['packed']:.7g}, {name} {values[name]:.7g}"
                )
    return seconds


def step(losses: TokenLosses, packs: list[PackedBatch]) -> Tensor:
    """Forward and backward of every pack; the step's loss."""
    losses.zero_grad()
    counts = {key: sum(batch.counts[key] for batch in packs) for key in ("text", "audio")}
    total = torch.zeros(())
    for batch in packs:
        values = losses(batch)
        loss = values["text"] / counts["text"] + values["audio"] / counts["audio"]
        loss.backward()
        total += loss.detach()
    return total


if __name__ == "__main__":
    main()
