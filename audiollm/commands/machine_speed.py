"""Speeds from which `plan` computes times. Loads no torch: `measuring` measures them."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class MachineSpeed:
    """What a plan's times are computed from.

    Args:
        tflops: training throughput of one device, in 10^12 operations per second.
        core: speed of a core with sound, over the one that `core_seconds` were measured on.
        disk_mb: written per second, in MB; infinite where writing is not counted.
        gradient_bytes: summed per second and device, where several train together.
        notes: what was measured, or assumed, a sentence each.
    """

    tflops: float
    core: float = 1.0
    disk_mb: float = math.inf
    gradient_bytes: float = math.inf
    notes: tuple[str, ...] = ()


REFERENCE = MachineSpeed(0.046)
"""The machine that stages' seconds were measured on: one core of an AMD EPYC with AVX2, whose products reach 0.073
TFLOP/s in float32."""
