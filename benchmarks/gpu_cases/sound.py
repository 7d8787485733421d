"""Flow matching at the published shape: training steps, sampling, and the class of the package thinksound."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import flow as bench
import torch
from gpu_cases.measuring import (
    Scale,
    compile_backend,
    compiled_graphs,
    forget_peak,
    leave_out,
    mfu,
    peak_gb,
    rate_of,
    rounded,
    tell,
    timed,
    try_option,
)
from llm_train import optimizer_step
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from audiollm.devices import default_device
from audiollm.flow.model.mmdit import MMDiT, MMDiTConfig
from audiollm.flow.model.objective import (
    ConditionDropout,
    TimeDensity,
    hide,
    on_path,
    velocity_loss,
    velocity_target,
)
from audiollm.flow.model.packed import pack_conditions
from audiollm.flow.model.rows import rows_of
from audiollm.flow.model.sampling import SamplerSettings, sample_latents
from audiollm.train.loop.optim import autocast, build_optimizer

CLIPS, CLIP_S = (16, 64), 9.0
UNIT = "seconds of sound per second"
THINKSOUND = Path(__file__).parents[2] / "build" / "thinksound"
"""Code of the package, as `make -C benchmarks flow` installs it."""


def flow(scale: Scale) -> None:
    """Training steps of both sizes, sampling, and the peer."""
    model = flow_model(scale)
    training = FlowTraining(scale, model)
    rates = {clips: training.tell(clips) for clips in ((2,) if scale.tiny else CLIPS)}
    try_option(scale, f"flow {scale.name}, sampling", partial(sample, scale, model))
    if THINKSOUND.is_dir():
        clips, rate = min(rates.items())
        del training, model
        forget_peak()
        try_option(scale, f"flow {scale.name}, thinksound", partial(compare, scale, clips, rate))
    else:
        leave_out(
            f"flow {scale.name}, thinksound",
            "build/thinksound is not there: `make -C benchmarks flow` installs it",
        )


def flow_compiled(scale: Scale) -> None:
    """A step through `torch.compile`, as the setting `compile` has it, beside the same step without."""
    model = flow_model(scale)
    training = FlowTraining(scale, model)
    clips = 2 if scale.tiny else min(CLIPS)
    plain = training.tell(clips)
    model.compile(backend=compile_backend(scale))  # as the training loop does
    training.tell(clips, plain=plain)


class FlowTraining:
    """Training steps of a model in bf16."""

    def __init__(self, scale: Scale, model: MMDiT) -> None:
        self._scale, self._model = scale, model
        self._optimizer = build_optimizer(model.named_parameters(), 0.01, (0.9, 0.95))

    def tell(self, clips: int, plain: float | None = None) -> float:
        """Print and return seconds of sound per second; compiled, where there is a plain figure."""
        steps = flow_steps(clips, 1 if self._scale.tiny else 4)
        operations = None
        if plain is None:
            operations = 3 * statistics.mean(forward_operations(self._model, step.inputs) for step in steps)
        forget_peak()

        def take_step(number: int) -> None:
            loss = partial(steps[number % len(steps)].loss, self._model)
            optimizer_step(loss, self._optimizer, "bf16", default_device())

        # the shapes of the steps are met once before they count
        warm = 1 if self._scale.tiny else len(steps) + 1
        seconds = rate_of(take_step, self._scale.seconds(8), warm, len(steps))
        more: dict[str, Any] = {"steps_per_s": rounded(1 / seconds), "peak_gb": peak_gb()}
        if operations is not None:
            more |= {"mfu": mfu(operations, seconds), "tflop_per_step": rounded(operations / 1e12)}
        else:
            more["graphs"] = compiled_graphs()
        parameters = sum(weight.numel() for weight in self._model.parameters())
        name = (
            f"flow {self._scale.name}, {clips} clips of {CLIP_S:g} s{'' if plain is None else ', compiled'}"
        )
        rate = clips * CLIP_S / seconds
        tell(name, UNIT, rate, plain=plain, **more, parameters=parameters)
        return rate


def sample(scale: Scale, model: Any) -> None:
    """Latents of one sound, 24 steps of Euler with guidance: in float32, then with weights in bf16."""
    device, model = default_device(), model.eval()
    settings = SamplerSettings(1 if scale.tiny else bench.STEPS, guidance=4.5)
    packed, latents = pack_conditions([bench.real_conditions(0)], device), rows_of([bench.LATENTS], device)
    noise_LD = torch.randn(bench.LATENTS, 64, generator=torch.Generator().manual_seed(0)).to(device)

    def draw(number: int) -> Tensor:
        return sample_latents(model, noise_LD, packed, latents, settings)

    calls = {"warm": 1, "min_calls": 1 if scale.tiny else 3}
    plain = timed(draw, scale.seconds(3), **calls)
    model.to(torch.bfloat16)
    with autocast("bf16", device):
        seconds = timed(draw, scale.seconds(3), **calls)
    case = f"flow {scale.name}, {CLIP_S:g} s of sound in {settings.steps} steps with guidance, batch 1"
    tell(case, "seconds", seconds, less=True, float32=rounded(plain))


def compare(scale: Scale, clips: int, rate: float) -> None:
    """The released class at the same width and blocks, whose texts and pictures are padded and never left out."""
    config, device = tiny_config() if scale.tiny else MMDiTConfig(), default_device()
    with device:
        peer = bench.released_model(
            bench.load_released(THINKSOUND),
            config.hidden_size,
            (config.num_heads, config.multi_stream_blocks, config.single_stream_blocks),
        )
    full = bench.full_batch(clips, device)
    optimizer = build_optimizer(peer.named_parameters(), 0.01, (0.9, 0.95))

    def loss() -> Tensor:
        velocity = bench.peer_velocity(peer, full, dropout=0.2)
        squares: Tensor = (velocity - full["x"]).square().mean()
        return squares

    forget_peak()
    warm = 1 if scale.tiny else 3
    seconds = rate_of(
        lambda number: optimizer_step(loss, optimizer, "bf16", device), scale.seconds(6), warm, warm
    )
    title = f"flow {scale.name}, {clips} clips of {CLIP_S:g} s, against thinksound"
    tell(title, UNIT, rate, clips * CLIP_S / seconds, peer_peak_gb=peak_gb())


def tiny_config() -> MMDiTConfig:
    return replace(MMDiTConfig(), hidden_size=64, num_heads=4, multi_stream_blocks=1, single_stream_blocks=1)


@dataclass(frozen=True)
class FlowStep:
    """A batch of clips as a training step of the flow takes it."""

    inputs: tuple[Any, ...]
    """Latents on the way, times, conditions and the layout of the latents."""
    target_LD: Tensor

    def loss(self, model: torch.nn.Module) -> Tensor:
        velocity_LD = model(*self.inputs)
        counted_L = torch.ones(len(velocity_LD), dtype=torch.bool, device=velocity_LD.device)
        return velocity_loss(velocity_LD, self.target_LD, counted_L, float(len(velocity_LD)))


def flow_model(scale: Scale) -> MMDiT:
    torch.manual_seed(0)
    with default_device():
        return MMDiT(tiny_config() if scale.tiny else MMDiTConfig())


def flow_steps(clips: int, number: int) -> list[FlowStep]:
    """Batches with texts of real lengths and hidden modalities, as `flow.py` draws them."""
    device, dice, dropout = default_device(), torch.Generator().manual_seed(0), ConditionDropout()
    steps = []
    for place in range(number):
        real = [bench.real_conditions(place * clips + clip) for clip in range(clips)]
        packed = pack_conditions(
            [hide(conditions, dropout.draw(conditions, dice)) for conditions in real], device
        )
        latents = rows_of([bench.LATENTS] * clips, device)
        noise_LD, data_LD = (torch.randn(latents.total, 64, generator=dice).to(device) for _ in range(2))
        t_B = TimeDensity().draw([bench.LATENTS] * clips, dice).to(device)
        x_LD = on_path(noise_LD, data_LD, t_B[latents.sample_R][:, None])
        steps.append(FlowStep((x_LD, t_B, packed, latents), velocity_target(noise_LD, data_LD)))
    return steps


@torch.no_grad()
def forward_operations(model: torch.nn.Module, inputs: tuple[Any, ...]) -> float:
    """Operations of the products of a forward pass; in float32, whose attention torch can count."""
    with FlopCounterMode(display=False) as counter:
        model(*inputs)
    return float(counter.get_total_flops())
