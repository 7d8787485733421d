"""Training figures and alarms as JSON lines for programs, and on boards for people."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch

from audiollm.files.atomic import line_numbers, read_whole_lines, write_jsonl
from audiollm.train.loop.boards import open_boards
from audiollm.train.loop.task import PHASE_PREFIX

PEAK_FLOPS: Mapping[str, float] = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "L40S": 362e12,
    "A100": 312e12,
    "RTX 4090": 165e12,
    "V100": 125e12,
}
"""Dense bf16 (V100: fp16) operations a second by NVIDIA's data sheets, by a part of the device's name."""


class Monitor:
    """Writes figures and alarms of one run into its folder.

    `metrics.jsonl` and `alarms.jsonl` (once there is an alarm) depend on settings and data alone: a resumed run's
    equal an uninterrupted one's. What depends on the machine and the hour is in `performance.jsonl`.

    Args:
        folder: the stage's folder.
        resume_step: rows of an earlier attempt at or beyond this step are dropped.
        report_to: where figures are drawn beside.
        say: told of broken lines in what an earlier attempt wrote, which are dropped, too.
    """

    def __init__(
        self,
        folder: Path,
        resume_step: int = 0,
        report_to: Sequence[str] = ("tensorboard",),
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        paths = [folder / f"{name}.jsonl" for name in ("metrics", "performance")]
        for path in paths:
            _rows_before(path, resume_step, say)
        self._metrics, self._performance = (path.open("a", encoding="utf-8") for path in paths)
        self._alarms_path = folder / "alarms.jsonl"
        alarms = _rows_before(self._alarms_path, resume_step, say)
        self._alarms = [row for row in alarms if isinstance(row.get("kind"), str)]
        self.boards = open_boards(report_to, folder, resume_step, say)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """A step's figures, or those of an evaluation."""
        _write_row(self._metrics, step, values)
        for board in self.boards:
            board.scalars(step, values)

    def performance(self, step: int, values: Mapping[str, float]) -> None:
        """How fast it went, and what memory it took."""
        _write_row(self._performance, step, values)
        for board in self.boards:
            board.scalars(step, {f"performance/{key}": value for key, value in values.items()})

    def alarm(self, step: int, kind: str, text: str) -> bool:
        """Record an alarm; False where one of this kind is on record."""
        if any(row["kind"] == kind for row in self._alarms):
            return False
        self._alarms.append({"step": step, "kind": kind, "text": text})
        write_jsonl(self._alarms_path, self._alarms)
        for board in self.boards:
            board.text(step, f"alarm/{kind}", text)
        return True

    def close(self) -> None:
        self._metrics.close()
        self._performance.close()
        for board in self.boards:
            board.close()


class Speed:
    """Throughput of the training steps since the last look: seconds a step, tokens a second, share of the device's
    peak; and memory."""

    def __init__(self, device: torch.device, devices: int) -> None:
        self._device, self._devices, self.paused_seconds = device, devices, 0.0
        self._started, self._steps, self._tokens, self._flops = time.monotonic(), 0, 0.0, 0.0
        self._phases: dict[str, float] = {}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock while the block runs: evaluations and checkpoints do not count."""
        began = time.monotonic()
        yield
        seconds = time.monotonic() - began
        self._started += seconds
        self.paused_seconds += seconds

    def add(self, tokens: float, flops: float, phases: Mapping[str, float]) -> None:
        """A step of this rank: the tokens it trained on, its operations (0: not told), and seconds by phase."""
        self._steps += 1
        self._tokens += tokens
        self._flops += flops
        for name, seconds in phases.items():
            self._phases[name] = self._phases.get(name, 0.0) + seconds

    def take_rank_figures(self) -> dict[str, float]:
        """Return this rank's figures since the last call, to be added up over ranks."""
        now = time.monotonic()
        seconds = max(1e-9, now - self._started)
        steps, tokens, flops = self._steps, self._tokens, self._flops
        phases, self._phases = self._phases, {}
        self._started, self._steps, self._tokens, self._flops = now, 0, 0.0, 0.0
        counted = {"seconds": seconds, "steps": steps, "tokens": tokens, "flops": flops}
        return {**counted, **phases, **memory(self._device)}

    def figures(self, rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """For the log, from what every rank gave."""
        seconds = max(row["seconds"] for row in rows)
        figures = {"seconds_per_step": seconds / max(1, rows[0]["steps"])}
        if tokens := sum(row["tokens"] for row in rows):
            figures["tokens_per_second"] = tokens / seconds
        peak = peak_flops(self._device)
        if (flops := sum(row["flops"] for row in rows)) and peak:
            figures["mfu"] = flops / (seconds * peak * self._devices)
        steps = max(1, rows[0]["steps"])
        for phase in sorted({key for row in rows for key in row if key.startswith(PHASE_PREFIX)}):
            figures[phase] = max(row.get(phase, 0.0) for row in rows) / steps
        memory_keys = [key for key in rows[0] if key.startswith("memory")]
        return {**figures, **{key: max(row[key] for row in rows) for key in memory_keys}}


def peak_flops(device: torch.device) -> float | None:
    """Operations a second that the device could do at best, where it is known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for device_name, flops in PEAK_FLOPS.items() if device_name in name), None)


def memory(device: torch.device) -> dict[str, float]:
    """In MB: this process's now, and the most that tensors took on the GPU."""
    figures = {"memory_mb": psutil.Process().memory_info().rss / 2**20}
    if device.type == "cuda":
        figures["memory_gpu_mb"] = torch.cuda.max_memory_allocated(device) / 2**20
    return figures


def _write_row(file: Any, step: int, values: Mapping[str, float]) -> None:
    rounded = {key: float(f"{value:.6g}") for key, value in values.items()}
    file.write(json.dumps({"step": step, **rounded}) + "\n")
    file.flush()


def _rows_before(path: Path, step: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """The rows of the steps before `step`; the others leave the file."""
    if not path.exists():
        return []
    lines = read_whole_lines(path, {"step": int})
    # a kill cuts the last line short: that is not worth a word
    if lines.broken and (len(lines.broken) > 1 or not lines.rows or lines.broken[0] <= len(lines.rows)):
        say(f"{path}: {line_numbers(lines.broken)} broken and left out; all others are kept")
    rows = [row for row in lines.rows if row["step"] < step]
    write_jsonl(path, rows)
    return rows
