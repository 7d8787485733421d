"""Cost of the annotation: engine over its steps, one worker against two, hours by step, memory of a long file.

    make -C benchmarks annotate-speed DATA=../shared/data

Cases: `overhead` (CPU seconds of a run in one process against those its steps took by themselves: asked 1.05 at
most), `two workers` (wall-clock of one worker over that of two, alternated; asked 1.6; CPU-seconds may grow by 5 %),
a line for each step (hours of audio an hour of one core), and `N hours` (peak memory of a file of that length, 3 with
`--full`; asked below 1,500 MB). Recordings are read speech of seconds each; the load of the machine is told with the
times.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from measure import adopt_descendants, bench_parser, cpu_seconds, parse_options, print_row
from rich.console import Console

from audiollm.audio import load
from audiollm.audio.streams import save_stream
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import Recipe
from pipelines.annotate.execution.config import AnnotationConfig
from pipelines.annotate.stage import STAGE

SPEECH = ("librispeech_speakers", "ljspeech_32")
LONG_S = 3 * 3600.0
STEPS: dict[str, Any] = {"recognizers": ["pocketsphinx"], "steps": {"quality": {}}}
"""Beside those of the preset."""
PLAIN = {"quality_sample": 0, "grammar": "open"}


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--clips", type=int, default=48, help="recordings of a run")
    parser.add_argument("--pairs", type=int, default=1, help="of one worker and two")
    parser.add_argument("--long-s", type=float, default=900.0, help="seconds of the long file; 0: without it")
    arguments = parse_options(parser, clips=96, pairs=5, long_s=LONG_S)
    clips = speech(arguments.data, arguments.clips)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        report_costs(clips, folder)
        report_workers(clips, folder, arguments.pairs)
        if arguments.long_s:
            report_long_file(clips, folder, arguments.long_s)


def speech(data: Path, count: int) -> list[str]:
    """Recordings of 4 s and more, spread over those that are there."""
    paths = [path for name in SPEECH for path in sorted((data / name).rglob("*.flac"))]
    paths += [path for name in SPEECH for path in sorted((data / name).rglob("*.wav"))]
    if len(paths) < count:
        raise SystemExit(f"fewer than {count} recordings in {data}: give the folder of real data with --data")
    return [str(path) for path in paths[:: len(paths) // count][:count]]


def report_costs(clips: Sequence[str], folder: Path) -> None:
    """The engine over its steps, and every step by itself."""
    # imports and models are no part of what a recording costs
    annotate(folder / "warm", {**STEPS, "input": list(clips[:1])})
    annotate(folder / "one", {**STEPS, "input": list(clips)})
    timings = json.loads((folder / "one" / "timings.json").read_text())
    took = timings["driver_cpu_s"]
    steps_s = sum(step["seconds"] for step in timings["steps"].values())
    line("overhead", took, steps_s, steps_s / took, "CPU-seconds of a run (peer: of its steps alone)")
    for name, step in timings["steps"].items():
        if step["seconds"]:
            hours = step["audio_s"] / step["seconds"]
            line(f"step {name}", round(hours, 1), None, None, "hours of audio an hour of one core")
    total = timings["audio_s"] / steps_s
    line("all steps", round(total, 2), None, None, "hours of audio an hour of one core")


def report_workers(clips: Sequence[str], folder: Path, pairs: int) -> None:
    """Runs of one worker, of two, and two runs side by side with half of the recordings each, in turns.

    Each is a command of its own. Wall-clock is that of the engine, the start of its workers included; CPU-seconds are
    those of whole commands. What two runs by hand take more is the machine's doing: its cores share caches and memory.
    """
    cases = {
        "one": [(clips, 1)],
        "two": [(clips, 2)],
        "apart": [(clips[::2], 1), (clips[1::2], 1)],
    }
    walls: dict[str, list[float]] = {case: [] for case in cases}
    cpus: dict[str, list[float]] = {case: [] for case in cases}
    for pair in range(pairs):
        for case in sorted(cases, reverse=bool(pair % 2)):
            wall_s, cpu_s = side_by_side(cases[case], folder / f"{pair}-{case}")
            walls[case].append(wall_s)
            cpus[case].append(cpu_s)
    ratio = median(single / two for single, two in zip(walls["one"], walls["two"], strict=True))
    grown, apart = (
        median(cpu / single for cpu, single in zip(cpus[case], cpus["one"], strict=True))
        for case in ("two", "apart")
    )
    load_now = os.getloadavg()[0]
    line(
        "two workers", round(median(walls["two"]), 2), round(median(walls["one"]), 2), ratio,
        f"wall-clock seconds (peer: one worker); CPU-seconds x {grown:.3f}, of two runs by hand x {apart:.3f}; "
        f"load {load_now:.1f}",
    )  # fmt: skip


def side_by_side(runs: Sequence[tuple[Sequence[str], int]], folder: Path) -> tuple[float, float]:
    """Run several `audiollm annotate` at once; return the slowest run's wall-clock, and the CPU-seconds of all."""
    adopt_descendants()
    used, processes = cpu_seconds(), []
    folders = [Path(f"{folder}-{number}") for number in range(len(runs))]
    for where, (clips, workers) in zip(folders, runs, strict=True):
        listed, settings = where.with_suffix(".csv"), where.with_suffix(".yaml")
        listed.write_text("\n".join(["path", *(str(Path(clip).resolve()) for clip in clips)]))
        settings.write_text(json.dumps({**STEPS, **PLAIN}))
        command = [str(Path(sys.executable).parent / "audiollm"), "annotate", str(listed), "-o", str(where)]
        command += ["--workers", str(workers), "--settings", str(settings)]
        processes.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    for process in processes:
        output = process.communicate()[0]
        if process.returncode:
            raise SystemExit(f"a run of {folder.name} failed:\n{output}")
    # what a run's workers are forked from ends after it, and is counted, too
    with suppress(ChildProcessError):
        while True:
            os.wait()
    walls = [json.loads((where / "timings.json").read_text())["wall_s"] for where in folders]
    return max(walls), cpu_seconds() - used


def report_long_file(clips: Sequence[str], folder: Path, seconds: float) -> None:
    """Speech over and over for so long, through speaker turns, segments and a recognizer with ten words."""
    path = folder / "long.flac"
    sounds = [load(clip, sample_rate=16000, mono=True).samples_CN for clip in clips]
    round_s = sum(sound.shape[1] for sound in sounds) / 16000
    save_stream(path, (sound for _ in range(int(seconds / round_s) + 1) for sound in sounds), 16000)
    words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    settings = {
        "input": str(path),
        "grammar": words,
        "steps": {"speakers": {}, "fingerprint": {}},
        "shards": True,
    }
    with PeakMemory() as peak:
        began = time.monotonic()
        annotate(folder / "long", {**settings, "missing_scorer": "skip"})
        took = time.monotonic() - began
    line(
        f"{seconds / 3600:g} hours", round(peak.megabytes), 1500, 1500 / peak.megabytes,
        f"MB at most, all processes together (peer: what is allowed); {took:.0f} s for {seconds:.0f} s of audio",
    )  # fmt: skip


def annotate(folder: Path, settings: dict[str, Any]) -> None:
    folder.mkdir()
    config = AnnotationConfig.model_validate({"workers": 1, **PLAIN, **settings})
    recipe = Recipe("benchmark", folder, "tiny", 0, folder, (), {})
    context = Context(folder, recipe, Console(stderr=True, quiet=True), {})
    STAGE.run(config, context)


class PeakMemory:
    """The largest sum of what this process and its children hold, looked at ten times a second."""

    def __enter__(self) -> PeakMemory:
        self.megabytes = 0.0
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _look(self) -> None:
        parent = psutil.Process()
        while not self._ends.wait(0.1):
            held = 0
            for process in (parent, *parent.children(recursive=True)):
                try:
                    held += process.memory_full_info().pss
                except psutil.Error:
                    continue
            self.megabytes = max(self.megabytes, held / 1e6)


def line(case: str, ours: float, peer: float | None, ratio: float | None, unit: str) -> None:
    print_row("annotate", case, ours, peer, unit, ratio=ratio)


if __name__ == "__main__":
    main()
