"""How fast this machine is, for `plan`: the products of a training, sound, and the disk, in two seconds.

Shapes: R rows, C channels of the decoder that is timed, S samples of sound, M mel bands.
"""

from __future__ import annotations

import io
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import soundfile
import torch
from torch import nn
from torch.nn import functional

from audiollm.audio.files import encode_bytes
from audiollm.audio.samples import resample
from audiollm.commands.cluster import CPU_REDUCTION_BYTES, GPU_REDUCTION_BYTES
from audiollm.commands.machine_speed import REFERENCE, MachineSpeed
from audiollm.devices import default_device, is_bf16_fast, one_thread
from audiollm.train.loop.optim import build_optimizer

LAYERS, WIDTH, HEADS, HIDDEN = 4, 256, 4, 704
"""Shape of the decoder whose training step is timed."""
ROWS, SEQUENCE = 512, 64
"""Rows of its step, and of them those that see one another: few for its parameters, as in the tiny recipes."""
TRAINING_SHARE = 0.6
"""Operations per second of whole trainings of size tiny, over those of that decoder."""
SOUND_PER_SECOND = 240.0
"""Seconds of sound that the core processes per second which stages' `core_seconds` were measured on (AMD EPYC with
AVX2)."""
SOUND_S, SOUND_RATE, MODEL_RATE = 4.0, 16_000, 24_000
DISK_CHUNK_MB = 8
TRAINING_S, SOUND_BUDGET_S, DISK_S = 0.6, 0.4, 0.3
"""Seconds of each measurement, after its first round."""


def measure_machine(
    folder: Path, devices: int = 1, *, products: bool = True, sound: bool = True, disk: bool = True
) -> MachineSpeed:
    """Measure what a plan needs, each in less than a second.

    Args:
        folder: where runs are written; the nearest folder above it that exists is measured.
        devices: number of processes that train together, which share the cores of a machine without GPU.
        products, sound, disk: what is measured; the speeds that are not are those of `REFERENCE`.
    """
    device, notes = default_device(), []
    tflops, core, disk_mb = REFERENCE.tflops, REFERENCE.core, REFERENCE.disk_mb
    if products:
        tflops = training_tflops(device)
        notes.append(f"a small decoder trains at {tflops:.3g} TFLOP/s")
        tflops *= TRAINING_SHARE
        if device.type == "cpu":
            # the threads of one process are worth the root of their number: 1.2 to 1.6 for two, measured
            cores = torch.get_num_threads()
            tflops *= math.sqrt(cores / devices) if devices < cores else cores / devices
    if sound:
        rate = sound_per_second()
        notes.append(
            f"a core passes {rate:.0f} s of sound per second through FLAC, mel bands and convolutions"
        )
        core = rate / SOUND_PER_SECOND
    if disk:
        written = disk_mb_per_second(folder)
        notes.append(f"the disk takes {written:.0f} MB/s" if written else f"{folder} cannot be written to")
        disk_mb = written or REFERENCE.disk_mb
    reduction = CPU_REDUCTION_BYTES if device.type == "cpu" else GPU_REDUCTION_BYTES
    return MachineSpeed(tflops, core, disk_mb, reduction, tuple(notes))


def training_tflops(device: torch.device, seconds: float = TRAINING_S) -> float:
    """Forward, backward and optimizer of a small decoder, in 10^12 operations per second.

    On a CPU with one thread, by its CPU-seconds: a busy neighbour does not count.
    """
    decoder = nn.Sequential(*(_Block() for _ in range(LAYERS))).to(device)
    optimizer = build_optimizer(decoder.named_parameters(), 0.1, (0.9, 0.95))
    rows_RC = torch.randn(ROWS, WIDTH, device=device)
    dtype = torch.bfloat16 if is_bf16_fast(device) else None

    def step() -> None:
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            loss = decoder(rows_RC).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    weights = sum(parameter.numel() for parameter in decoder.parameters())
    operations = 6 * ROWS * (weights + 2 * LAYERS * WIDTH * SEQUENCE)
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    with one_thread():
        return operations / median_seconds(step, seconds, clock) / 1e12


def sound_per_second(seconds: float = SOUND_BUDGET_S) -> float:
    """Seconds of sound that one core writes, reads, resamples, and passes through mel bands and convolutions."""
    wave_1S = torch.randn(1, round(SOUND_S * SOUND_RATE)).mul_(0.1)
    mel_MF = torch.rand(100, 513)
    layers = nn.Sequential(
        *(nn.Conv1d(100, 192, 7, padding=3), nn.Conv1d(192, 192, 7, padding=3, groups=192), nn.GELU()),
        *(nn.Conv1d(192, 768, 1), nn.GELU(), nn.Conv1d(768, 192, 1)),
    )

    @torch.no_grad()
    def process() -> None:
        stored_S1, _ = soundfile.read(
            io.BytesIO(encode_bytes(wave_1S, SOUND_RATE, "flac")), dtype="float32", always_2d=True
        )
        samples_1S = resample(torch.from_numpy(stored_S1.T), SOUND_RATE, MODEL_RATE)
        spectrum = torch.stft(samples_1S, 1024, 240, window=torch.hann_window(1024), return_complex=True)
        layers((mel_MF @ spectrum.abs()).log1p())

    with one_thread():
        return SOUND_S / median_seconds(process, seconds, time.process_time)


def disk_mb_per_second(folder: Path, seconds: float = DISK_S) -> float | None:
    """MB per second that are written to the folder's disk, and are on it; None: nothing can be written there."""
    while not folder.exists():
        folder = folder.parent
    chunk, written = os.urandom(DISK_CHUNK_MB << 20), 0
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            began = time.monotonic()
            while time.monotonic() - began < seconds:
                file.write(chunk)
                os.fsync(file.fileno())
                written += DISK_CHUNK_MB
            return written / (time.monotonic() - began)
    except OSError:
        return None


def median_seconds(work: Callable[[], None], seconds: float, clock: Callable[[], float]) -> float:
    """The median time of the work by a clock, in as many seconds, without its first round."""
    work()
    times: list[float] = []
    ends = time.monotonic() + seconds
    while not times or time.monotonic() < ends:
        began = clock()
        work()
        times.append(clock() - began)
    return statistics.median(times)


class _Block(nn.Module):
    """A layer of a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 2 * HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, rows_RC: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norms[0](rows_RC)).view(-1, SEQUENCE, 3, HEADS, WIDTH // HEADS)
        queries, keys, values = heads.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        rows_RC = rows_RC + self.out(attended.transpose(1, 2).reshape(rows_RC.shape))
        gates, inputs = self.up(self.norms[1](rows_RC)).chunk(2, dim=1)
        return rows_RC + self.down(functional.silu(gates) * inputs)
