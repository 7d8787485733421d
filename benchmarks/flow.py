"""A training step, sampling and memory of the flow-matching models against the class of the package `thinksound`.

    python benchmarks/flow.py --thinksound FOLDER [--full] [--widths 128] [--rounds 1] [--device cpu]
        [--cases "train full,train real,sample,memory"] [--steps 4]

FOLDER holds the package's code: `pip install --no-deps --target FOLDER thinksound==0.0.19`. Widths are 128 x (2 + 4)
blocks with 16 clips of 9 s and 1024 x (1 + 2) with one. Weights and velocity are compared first; then the sides take
turns in one process on one thread, and the median of the rounds counts, in CPU-seconds.

- `train full`: a step with AdamW, everything at full length; ours is `ThinkSound` with the same weights.
- `train real`: captions of 8 to 20 tokens, CoT of 30 to 80, modalities hidden as in training; ours is `MMDiT` with the
  same width and blocks, which has no rows for pads and for what is hidden. At one clip a step the figure is the mean
  of 16, since what is hidden decides the time.
- `sample`: Euler steps with guidance, the same texts; ours is `MMDiT`.
- `memory`: peak of a step of `train full` above the start of the step, each in a process of its own.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
import time
import types
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from measure import bench_parser, parse_options, peak_mb_of, print_row
from torch import Tensor

from audiollm.flow.model.mmdit import MMDiT, MMDiTConfig
from audiollm.flow.model.objective import ConditionDropout, hide
from audiollm.flow.model.packed import Conditions, Features, PackedConditions, pack_conditions
from audiollm.flow.model.rows import rows_of
from audiollm.flow.model.sampling import SamplerSettings, sample_latents
from audiollm.flow.model.thinksound import ThinkSound, ThinkSoundConfig

LATENTS, FRAMES, SYNC, TEXT, STEPS = 194, 72, 216, 77, 24
CASES = ("train full", "train real", "sample", "memory")
SHAPES = {128: (4, 2, 4, 16), 1024: (16, 1, 2, 1)}
"""Heads, multi-stream and single-stream blocks, clips, by width."""
DRAWS = 16
"""Clips whose texts and hidden modalities are drawn for `train real`."""


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--thinksound", type=Path, required=True)
    parser.add_argument("--widths", default="128")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(
        "--draws",
        type=int,
        default=8,
        help="draws of conditions and dropout in `train real`, at least one pack",
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--steps", type=int, default=4, help="of the sampler")
    parser.add_argument("--memory", choices=["ours", "peer"], help=argparse.SUPPRESS)
    arguments = parse_options(parser, widths="128,1024", rounds=3, draws=DRAWS, steps=STEPS)
    torch.set_num_threads(1)
    released = load_released(arguments.thinksound)
    for width in map(int, arguments.widths.split(",")):
        if arguments.memory:
            print(peak_of_a_step(released, width, arguments.memory))
            return
        compare(released, width, arguments)


def load_released(folder: Path) -> Any:
    """The module with the released class, without its package's own imports; `dac` is a stand-in."""
    root = folder / "ThinkSound"
    for name, path in (("ThinkSound", root), ("ThinkSound.models", root / "models")):
        package = types.ModuleType(name)
        package.__path__ = [str(path)]
        sys.modules[name] = package
    for name in ("dac", "dac.nn", "dac.nn.layers"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["dac.nn.layers"].Snake1d = torch.nn.Identity  # type: ignore[attr-defined]
    return import_module("ThinkSound.models.mmdit")


def compare(released: Any, width: int, arguments: argparse.Namespace) -> None:
    device, clips = torch.device(arguments.device), SHAPES[width][3]
    peer, ours, native = models_of(released, width)
    for model in (peer, ours, native):
        model.to(device)
    full = full_batch(clips, device)
    check_velocity(peer, ours, full)
    draws = -(-arguments.draws // clips) * clips
    real = [real_conditions(index) for index in range(draws)]
    dropout, dice = ConditionDropout(), torch.Generator().manual_seed(0)
    hidden = [hide(conditions, dropout.draw(conditions, dice)) for conditions in real]
    packs = [pack_conditions(hidden[first : first + clips], device) for first in range(0, draws, clips)]
    unhidden = pack_conditions(real[:clips], device)
    latents = rows_of([LATENTS] * clips, device)
    sampled: Any = native
    cases: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "train full": (trainer(ours, full), peer_trainer(peer, full, 0.0)),
        "train real": (native_trainer(native, packs, full), peer_trainer(peer, full, 0.2, len(packs))),
        "sample": (
            lambda: sample_latents(
                sampled,
                full["x_LD"],
                unhidden,
                latents,
                SamplerSettings(arguments.steps, guidance=5.0, guidance_rescale=0),  # as the peer
            ),
            lambda: peer_sample(peer, full, arguments.steps),
        ),
    }
    for name, (mine, theirs) in cases.items():
        if name not in arguments.cases.split(","):
            continue
        seconds: dict[str, list[float]] = {"ours": [], "peer": []}
        for _ in range(arguments.rounds + 1):
            for side, work in (("ours", mine), ("peer", theirs)):
                seconds[side].append(seconds_of(work, device))
        steps = len(packs) if name == "train real" else 1
        medians = {side: statistics.median(rounds[1:]) / steps for side, rounds in seconds.items()}
        unit = "CPU-s" if device.type == "cpu" else "s"
        print_row("flow", f"{name} {width}", medians["ours"], medians["peer"], unit)
    if device.type == "cpu" and "memory" in arguments.cases.split(","):
        peaks = {side: peak_elsewhere(arguments, width, side) for side in ("ours", "peer")}
        print_row("flow", f"memory {width}", peaks["ours"], peaks["peer"], "MiB")


def models_of(released: Any, width: int) -> tuple[Any, ThinkSound, MMDiT]:
    heads, multi, single, _ = SHAPES[width]
    peer = released_model(released, width, (heads, multi, single))
    ours = ThinkSound(
        ThinkSoundConfig(hidden_size=width, depth=multi + single, fused_depth=single, num_heads=heads)
    )
    ours.load_state_dict(peer.state_dict())
    native = MMDiT(
        MMDiTConfig(
            hidden_size=width, num_heads=heads, multi_stream_blocks=multi, single_stream_blocks=single
        )
    )
    return peer, ours, native


def released_model(released: Any, width: int, shape: tuple[int, int, int]) -> Any:
    """The released class of random weights.

    Args:
        shape: heads, multi-stream and single-stream blocks.
    """
    heads, multi, single = shape
    torch.manual_seed(0)
    peer = released.MMmodule(
        latent_dim=64, clip_dim=1024, sync_dim=768, text_dim=2048, hidden_dim=width, depth=multi + single,
        fused_depth=single, num_heads=heads, latent_seq_len=LATENTS, clip_seq_len=FRAMES, sync_seq_len=SYNC,
        v2=True, kernel_size=3,
    )  # fmt: skip
    with torch.no_grad():
        for parameter in peer.parameters():
            if float(parameter.abs().max()) == 0.0:
                parameter.normal_(std=0.02)
    return peer


def full_batch(clips: int, device: torch.device) -> dict[str, Any]:
    dice = torch.Generator().manual_seed(1)

    def draw_normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=dice).to(device)

    tensors = {
        "x": draw_normal(clips, 64, LATENTS),
        "frames": draw_normal(clips, FRAMES, 1024),
        "sync": draw_normal(clips, SYNC, 768),
        "caption": draw_normal(clips, TEXT, 1024),
        "cot": draw_normal(clips, TEXT, 2048),
    }
    conditions: list[Conditions] = [
        {
            "frames": Features(tensors["frames"][n], torch.arange(FRAMES) / 8),
            "sync": Features(tensors["sync"][n], torch.arange(SYNC) / 24),
            "caption": Features(tensors["caption"][n]),
            "cot": Features(tensors["cot"][n]),
        }
        for n in range(clips)
    ]
    latents = rows_of([LATENTS] * clips, device)
    x_LD = tensors["x"].transpose(1, 2).flatten(0, 1).contiguous()
    t_B = torch.full((clips,), 0.375, device=device)
    return {
        **tensors,
        "packed": pack_conditions(conditions, device),
        "latents": latents,
        "x_LD": x_LD,
        "t": t_B,
    }


def real_conditions(index: int) -> Conditions:
    """Texts of real lengths, pictures in full."""
    dice = torch.Generator().manual_seed(100 + index)
    caption, cot = (int(torch.randint(a, b + 1, (1,), generator=dice)) for a, b in ((8, 20), (30, 80)))
    return {
        "frames": Features(torch.randn(FRAMES, 1024, generator=dice), torch.arange(FRAMES) / 8),
        "sync": Features(torch.randn(SYNC, 768, generator=dice), torch.arange(SYNC) / 24),
        "caption": Features(torch.randn(caption, 1024, generator=dice)),
        "cot": Features(torch.randn(cot, 2048, generator=dice)),
    }


def peer_velocity(
    peer: Any, full: dict[str, Any], dropout: float = 0.0, scale: float = 1.0, t: Any = None
) -> Tensor:
    t_B = full["t"] if t is None else t
    arguments = (full["frames"], full["sync"], full["caption"], None, full["cot"], None, scale, dropout, 0.0)
    velocity: Tensor = peer(full["x"], t_B, *arguments)
    return velocity


@torch.no_grad()
def check_velocity(peer: Any, ours: ThinkSound, full: dict[str, Any]) -> None:
    for name, tensor in peer.state_dict().items():
        assert torch.equal(tensor, ours.state_dict()[name]), name
    expected = peer_velocity(peer, full)
    found_LD = -ours(full["x_LD"], 1 - full["t"], full["packed"], full["latents"])
    velocity = found_LD.unflatten(0, (len(expected), -1)).transpose(1, 2)
    torch.testing.assert_close(velocity, expected, atol=1e-4, rtol=1e-3)


def trainer(model: ThinkSound, full: dict[str, Any]) -> Callable[[], None]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-9)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        velocity_LD = model(full["x_LD"], full["t"], full["packed"], full["latents"])
        (velocity_LD - full["x_LD"]).square().mean().backward()
        optimizer.step()

    return step


def native_trainer(
    model: MMDiT, packs: Sequence[PackedConditions], full: dict[str, Any]
) -> Callable[[], None]:
    """A step with each of the packs."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-9)

    def steps() -> None:
        for packed in packs:
            optimizer.zero_grad(set_to_none=True)
            velocity_LD = model(full["x_LD"], full["t"], packed, full["latents"])
            (velocity_LD - full["x_LD"]).square().mean().backward()
            optimizer.step()

    return steps


def peer_trainer(peer: Any, full: dict[str, Any], dropout: float, steps: int = 1) -> Callable[[], None]:
    optimizer = torch.optim.AdamW([p for p in peer.parameters() if p.requires_grad], 1e-9)

    def run_steps() -> None:
        for _ in range(steps):
            optimizer.zero_grad(set_to_none=True)
            (peer_velocity(peer, full, dropout) - full["x"]).square().mean().backward()
            optimizer.step()

    return run_steps


@torch.no_grad()
def peer_sample(peer: Any, full: dict[str, Any], steps: int) -> None:
    """The released sampler: Euler from t = 1 to 0, both branches in one batch, conditions projected at every step."""
    x, times = full["x"], torch.linspace(1, 0, steps + 1).tolist()
    for begin, end in itertools.pairwise(times):
        t_B = torch.full((len(x),), begin, device=x.device)
        x = x + (end - begin) * peer_velocity(peer, {**full, "x": x}, scale=5.0, t=t_B)


def seconds_of(work: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize()
        return time.perf_counter() - begin
    begin = time.process_time()
    work()
    return time.process_time() - begin


def peak_of_a_step(released: Any, width: int, side: str) -> float:
    """Peak memory of a step above what the process held before it, MiB."""
    peer, ours, _ = models_of(released, width)
    full = full_batch(SHAPES[width][3], torch.device("cpu"))
    step = trainer(ours, full) if side == "ours" else peer_trainer(peer, full, 0.0)
    return peak_mb_of(step)


def peak_elsewhere(arguments: argparse.Namespace, width: int, side: str) -> float:
    command = [
        sys.executable, "-W", "ignore", __file__, "--thinksound", str(arguments.thinksound), "--widths", str(width),
        "--memory", side,
    ]  # fmt: skip
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


if __name__ == "__main__":
    main()
