"""Sampling: solvers and schedules of the flow from noise to data, and guidance.

Guidance is v_0 + s (v_c - v_0); or for several modalities in a stated order v_0 + sum_i s_i (v_1..i - v_1..i-1), where
v_1..i has the first i of them (nested classifier-free guidance, arXiv 2208.12242's rule for each further condition).
v_0 has no condition; the audio context is in every branch unless asked otherwise.

Shapes: B samples, L latents of all samples, D latent dimension, N steps.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from audiollm.flow.model.context import AudioContext
from audiollm.flow.model.objective import on_path, shift_times
from audiollm.flow.model.packed import Modality, PackedConditions
from audiollm.flow.model.rows import SampleRows

SolverName = Literal["euler", "midpoint", "heun"]
FlowScheduleName = Literal["uniform", "cosine", "shifted"]
Velocity = Callable[[Tensor, float], Tensor]
"""The velocity at latents `[L, D]` and a time."""


class VelocityModel(Protocol):
    """A model of velocities, as samplers and training use it."""

    @property
    def takes_context(self) -> bool: ...
    def project(self, conditions: PackedConditions, latents: SampleRows) -> object:
        """Project the conditions once for all steps."""

    def velocity(
        self, x_LD: Tensor, t_B: Tensor, projected: object, context_LE: Tensor | None = None
    ) -> Tensor: ...


@dataclass(frozen=True)
class SamplerSettings:
    """How sound is sampled."""

    steps: int = 24
    solver: SolverName = "euler"
    """`euler` evaluates the model once per step, `midpoint` and `heun` twice."""
    schedule: FlowScheduleName = "uniform"
    """Times of the steps: `uniform`; `cosine`, dense at noise; `shifted`, denser at noise the longer the sound is."""
    guidance: float = 4.5
    """Scale of all conditions together; 1: none is extrapolated, and the unconditional branch is not computed."""
    guidance_by: Mapping[Modality, float] = field(default_factory=dict)
    """Scale of each modality, in this order, in place of `guidance`; those that are not named have the last scale."""
    guide_context: bool = False
    """Whether the audio context is left out of the unconditional branch, so that it is extrapolated, too."""
    guidance_rescale: float = 0.7
    """Share of the guided estimate of the data that has the deviation of the one without extrapolation, from 0 to 1:
    guidance else makes sounds louder than those of the training (arXiv 2305.08891, section 3.4)."""
    on_step: Callable[[int], None] | None = field(default=None, compare=False)
    """Called after each step with the number of steps done; an exception that it raises ends the sampling."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, not {self.steps}")
        scales = [self.guidance, *self.guidance_by.values()]
        if not all(math.isfinite(scale) and scale >= 0 for scale in scales):
            raise ValueError(f"guidance scales must be finite and not negative: {scales}")
        if not 0 <= self.guidance_rescale <= 1:
            raise ValueError(f"guidance_rescale must be from 0 to 1, not {self.guidance_rescale}")

    @property
    def is_guided(self) -> bool:
        """Whether a branch without conditions is computed."""
        return any(scale != 1 for scale in (self.guidance_by.values() or (self.guidance,)))


def schedule_times(
    name: FlowScheduleName, steps: int, length: int = 194, base_latents: int = 194
) -> list[float]:
    """The times of a schedule, `steps` + 1 values from 0 to 1."""
    uniform = torch.linspace(0, 1, steps + 1, dtype=torch.float64)
    if name == "uniform":
        times = uniform
    elif name == "cosine":
        times = 1 - torch.cos(uniform * torch.pi / 2)
    else:
        times = shift_times(uniform, torch.tensor([float(length)]), base_latents)
    return [0.0, *times[1:-1].tolist(), 1.0]


def integrate(
    velocity: Velocity,
    noise_LD: Tensor,
    times: Sequence[float],
    solver: SolverName = "euler",
    after_step: Callable[[Tensor, float], Tensor] | None = None,
) -> Tensor:
    """Follow the velocity from noise to data.

    Args:
        times: from 0 to 1, rising; one step less than there are times.
        after_step: changes the latents after each step (kept latents are put back).
    """
    x_LD = noise_LD
    for begin, end in itertools.pairwise(times):
        span = end - begin
        first_LD = velocity(x_LD, begin)
        if solver == "euler":
            step_LD = first_LD
        elif solver == "midpoint":
            step_LD = velocity(x_LD + first_LD * (span / 2), begin + span / 2)
        else:
            step_LD = (first_LD + velocity(x_LD + first_LD * span, end)) / 2
        x_LD = x_LD + step_LD * span
        if after_step is not None:
            x_LD = after_step(x_LD, end)
    return x_LD


@torch.no_grad()
def sample_latents(
    model: VelocityModel,
    noise_LD: Tensor,
    conditions: PackedConditions,
    latents: SampleRows,
    settings: SamplerSettings,
    context: AudioContext | None = None,
) -> Tensor:
    """Sample normalized latents `[L, D]` of B sounds; kept latents of the context come back exactly.

    Args:
        noise_LD: standard normal numbers; the result is a function of them.
    """
    guided = guided_velocity(model, conditions, latents, settings, context)
    times = schedule_times(settings.schedule, settings.steps, max(latents.lengths))
    fixed_L1 = None
    if context is not None and bool(context.fixed_L.any()):
        fixed_L1 = context.fixed_L[:, None]
    steps_done = 0

    def after_step(x_LD: Tensor, t: float) -> Tensor:
        nonlocal steps_done
        steps_done += 1
        if settings.on_step is not None:
            settings.on_step(steps_done)
        if fixed_L1 is None or context is None:
            return x_LD
        return torch.where(fixed_L1, on_path(noise_LD, context.latents_LD, noise_LD.new_tensor(t)), x_LD)

    return integrate(guided, noise_LD, times, settings.solver, after_step)


def guided_velocity(
    model: VelocityModel,
    conditions: PackedConditions,
    latents: SampleRows,
    settings: SamplerSettings,
    context: AudioContext | None = None,
) -> Velocity:
    """The guided velocity, with all conditions projected once."""
    branches = guidance_branches(conditions, settings)
    everything = None if context is None or not model.takes_context else context.channels()
    without = everything
    if everything is not None and context is not None and settings.guide_context:
        without = context.without().channels()
    projected = [
        (weight, model.project(branch_conditions, latents), is_bare)
        for weight, branch_conditions, is_bare in branches
    ]

    def velocity(x_LD: Tensor, t: float) -> Tensor:
        t_B = torch.full((len(latents.lengths),), t, device=x_LD.device)
        parts = [
            model.velocity(x_LD, t_B, projection, without if is_bare else everything)
            for _, projection, is_bare in projected
        ]
        weighted = [part_LD * weight for part_LD, (weight, _, _) in zip(parts, projected, strict=True)]
        guided_LD = functools.reduce(operator.add, weighted)
        if settings.guidance_rescale == 0 or len(parts) == 1:
            return guided_LD
        return rescaled_velocity(guided_LD, parts[-1], x_LD, t, latents, settings.guidance_rescale)

    return velocity


def rescaled_velocity(
    guided_LD: Tensor, full_LD: Tensor, x_LD: Tensor, t: float, latents: SampleRows, share: float
) -> Tensor:
    """The guided velocity whose estimate of the data, x + (1 - t) v, has the deviation of another one's, by `share`.

    Deviations are those of all latents of a sample.

    Args:
        full_LD: the velocity with all conditions, without extrapolation.
    """
    if t >= 1:
        return guided_LD
    rescaled = []
    for guided, full in zip(
        (x_LD + (1 - t) * guided_LD).split(latents.lengths),
        (x_LD + (1 - t) * full_LD).split(latents.lengths),
        strict=True,
    ):
        scale = full.std() / guided.std().clamp_min(1e-8)
        rescaled.append(guided * (share * scale + 1 - share))
    return (torch.cat(rescaled) - x_LD) / (1 - t)


def guidance_branches(
    conditions: PackedConditions, settings: SamplerSettings
) -> list[tuple[float, PackedConditions, bool]]:
    """The branches of guidance: weight, conditions, and whether it is the one without any condition.

    The weights add up to 1; branches of weight 0 are left out.
    """
    there = list(conditions.features)
    bare = conditions.without(there)
    if not settings.guidance_by:
        scales, groups = [settings.guidance], [there]
    else:
        named = [name for name in settings.guidance_by if name in there]
        remaining = [name for name in there if name not in settings.guidance_by]
        scales = [settings.guidance_by[name] for name in named]
        groups = [[name] for name in named]
        if remaining or not named:
            scales, groups = [*scales, list(settings.guidance_by.values())[-1]], [*groups, remaining]
    if not there and not settings.guide_context:
        return [(1.0, bare, True)]
    branches = [(1.0 - scales[0] if scales else 1.0, bare, True)]
    kept_names: list[Modality] = []
    for number, (scale, group) in enumerate(zip(scales, groups, strict=True)):
        kept_names += group
        after = scales[number + 1] if number + 1 < len(scales) else 0.0
        hidden = [name for name in there if name not in kept_names]
        branches.append((scale - after, conditions.without(hidden), False))
    return [branch for branch in branches if branch[0] != 0.0]
