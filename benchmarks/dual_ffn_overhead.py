"""Cost of the second feed-forward: a training step of DualFFN over that of the same decoder with one.

    OMP_WAIT_POLICY=passive python benchmarks/dual_ffn_overhead.py --data DATA [--full] [--sizes 256x6]

Both are `DualFFN`: the single one has `audio_ffn_layers=()`, so that text and audio take one set of norms and one
feed-forward in every layer, by the same code; embeddings and heads are the same. Both take the same packs of real
lengths (see `llm_train.py`), 4,096 positions of samples to a step, and pay for forward, backward, clipping and AdamW.
A row meets as many weights in either; what the second set costs is its place in the optimizer and in memory, and two
products where there was one. `ratio` is DualFFN's time over the single one's (Higgs Audio V2 reports 91 % of the
original speed: 1.10), by the CPU time of the process, `clock ratio` by the clock; the two take turns in one process,
and the median over the rounds counts. On a GPU, `--device cuda --sizes 1b --precisions bf16`: by the clock, with the
share of the peak.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from llm_train import (
    FULL,
    Trained,
    add_common_arguments,
    in_order,
    in_turns,
    loss_of,
    packed,
    random_model,
    read_durations,
    shape_of,
    speech,
    speech_template,
)
from measure import bench_parser, parse_options

from audiollm.data.chat.template import Template
from audiollm.data.packing import PackedBatch
from audiollm.families.dual_ffn.flops import training_flops
from audiollm.families.dual_ffn.losses import TokenLosses
from audiollm.train.loop.monitor import peak_flops
from audiollm.train.loop.optim import build_optimizer


def main() -> None:
    parser = bench_parser(__doc__)
    add_common_arguments(parser)
    arguments = parse_options(parser, rounds=5, **FULL)
    torch.set_num_threads(arguments.threads)
    template = speech_template()
    groups = in_order(speech(read_durations(arguments.data), template))[: arguments.steps]
    packs = [packed(group).to(torch.device(arguments.device)) for group in groups]
    for size in arguments.sizes.split(","):
        compare(size, template, packs, sum(map(len, (s for group in groups for s in group))), arguments)


def compare(
    size: str, template: Template, packs: list[PackedBatch], trained: int, arguments: argparse.Namespace
) -> None:
    """Measure and print one size in all precisions."""
    device = torch.device(arguments.device)
    shape = shape_of(size, template)
    sides, parameters = {}, {}
    for name, config in (("dual", shape), ("single", replace(shape, audio_ffn_layers=()))):
        losses = TokenLosses(random_model(config, device))
        optimizer = build_optimizer(losses.named_parameters(), 0.1, (0.9, 0.95))
        sides[name] = Trained([partial(loss_of, losses, batch) for batch in packs], optimizer)
        parameters[name] = sum(weight.numel() for weight in losses.parameters())
    flops = sum(training_flops(shape, batch) for batch in packs)
    for precision in arguments.precisions.split(","):
        seconds = in_turns(sides, precision, device, arguments.rounds)
        dual, single = (seconds[name] for name in ("dual", "single"))
        on_gpu = device.type == "cuda"
        spent = {name: times.clock if on_gpu else times.cpu for name, times in seconds.items()}
        line: dict[str, Any] = {"bench": "dual_ffn_overhead", "case": f"{size}, {precision}"}
        line |= {name: round(spent[name] / len(packs), 4) for name in sides}
        line |= {"unit": f"{'seconds' if on_gpu else 'CPU-seconds'} a step"}
        line |= {"ratio": round(spent["dual"] / spent["single"], 3)}
        line |= {"clock ratio": round(dual.clock / single.clock, 3)}
        if on_gpu and (peak := peak_flops(device)):
            line |= {f"mfu {name}": round(flops / times.clock / peak, 3) for name, times in seconds.items()}
        print(json.dumps(line | {"threads": arguments.threads}), flush=True)
    text = sum(batch.num_text for batch in packs) / sum(len(batch.positions_S) for batch in packs)
    print(json.dumps({"size": size, "parameters": parameters, "tokens a step": round(trained / len(packs)),
                      "share of text rows": round(text, 3)}))  # fmt: skip


if __name__ == "__main__":
    main()
