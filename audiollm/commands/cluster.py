"""What a plan says of clusters: how the throughput of many devices adds up, and the time of a pass over much sound."""

from __future__ import annotations

from collections.abc import Mapping

from audiollm.recipe.stages import StagePlan

H100_TFLOPS, H100_PEAK_TFLOPS = 400.0, 989.0
"""Training throughput assumed of a device for all sizes but tiny, and an H100's products in bf16 by its data sheet, in
10^12 operations per second."""
GPU_REDUCTION_BYTES = 300e9
"""Bytes of gradients per second and device that are summed, assumed: machines of eight H100 with NVLink and eight cards
of 400 Gb/s each."""
CPU_REDUCTION_BYTES = 1.46e9
"""The same of ranks on CPU cores over gloo, per CPU-second of a rank, measured with 4 ranks."""
MEASURED_EFFICIENCY: Mapping[int, tuple[float, float]] = {2: (0.841, 0.860), 4: (0.811, 0.811)}
"""Efficiency by number of ranks: measured, and computed by `efficiency`. CPU-seconds of steps of 512 rows with the
reduction of 5.8 M gradients, against steps without it; an Intel Xeon with AMX, 2 cores, load 7."""
MEASURED_BY = "benchmarks/scaling.py, 2026-11-29"
PASS_HOURS = (1_000, 100_000)
"""Hours of sound of the passes whose time is told."""


def reduction_seconds(gradient_bytes: float, devices: int, bytes_per_second: float) -> float:
    """Seconds in which gradients are summed over devices: each sends and receives twice all parts but its own.

    Args:
        gradient_bytes: of one device.
        bytes_per_second: of one device.
    """
    return 2 * (devices - 1) / devices * gradient_bytes / bytes_per_second


def efficiency(work_s: float, gradient_bytes: float, devices: int, bytes_per_second: float) -> float:
    """Share of the devices' time that is work, when no reduction is hidden behind it.

    Args:
        work_s: of a device, between two reductions.
    """
    return work_s / (work_s + reduction_seconds(gradient_bytes, devices, bytes_per_second))


def cluster_lines(
    plans: Mapping[str, StagePlan], devices: int, tflops: float, *, is_assumed: bool
) -> list[str]:
    """The assumptions behind the times of trainings, and the time of a pass over 1,000 and 100,000 hours of sound.

    Args:
        plans: of stages by name, with `seconds` on these devices.
        tflops: training throughput of a device, in 10^12 operations per second.
        is_assumed: the throughput is that of an H100, and not the command line's.
    """
    source = (
        f"an H100 in bf16, MFU {H100_TFLOPS / H100_PEAK_TFLOPS:.0%}, assumed" if is_assumed else "--tflops"
    )
    lines = [
        f"cluster: {devices} device{'s' * (devices > 1)}, each {tflops:.3g} TFLOP/s ({source}); gradients are summed "
        f"at {GPU_REDUCTION_BYTES / 1e9:g} GB/s a device, not hidden behind the passes (assumed)"
    ]
    checks = [
        f"{ranks} ranks {measured:.2f} (computed {computed:.2f})"
        for ranks, (measured, computed) in MEASURED_EFFICIENCY.items()
    ]
    lines.append(f"the same rule on CPU ranks: {', '.join(checks)} of their sum, measured by {MEASURED_BY}")
    for name, plan in plans.items():
        if plan.sound_s and plan.seconds:
            lines.append(f"{name}: {_pass_text(plan, devices, tflops)}")
    return lines


def _pass_text(plan: StagePlan, devices: int, tflops: float) -> str:
    assert plan.seconds is not None
    text = f"{plan.sound_s / 3600:,.0f} hours of sound"
    if plan.gradient_bytes and plan.flops and devices > 1:
        work_s = plan.flops / (devices * tflops * 1e12)
        text += f", efficiency {efficiency(work_s, plan.gradient_bytes, devices, GPU_REDUCTION_BYTES):.2f}"
    passes = [
        f"{hours:,} hours take {format_duration(plan.seconds * hours * 3600 / plan.sound_s)}"
        for hours in PASS_HOURS
    ]
    return f"{text}; {', '.join(passes)}"


def format_duration(seconds: float) -> str:
    """Seconds in the unit in which they are two or more."""
    for factor, unit in ((86_400, "days"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * factor:
            return f"{seconds / factor:,.1f} {unit}"
    return f"{max(seconds, 1):.0f} s"
