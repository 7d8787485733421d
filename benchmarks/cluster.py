"""`annotate`, `audiocot` and `tokenize` on a Ray cluster of four machines, which are simulated on this one.

    make -C benchmarks cluster DATA=../shared/data        # FULL=1: 100,000 files and ten hours

A machine is a raylet of `ray.cluster_utils` with one CPU; the head has none. All processes share the cores of this
machine, so that cost is told in CPU-seconds and no case claims a speed. Cases: `equal` (files that differ from those of
one process: 0 asked), `overhead` (CPU-seconds per hour of sound, and of the start), `a machine dies` (kill -9 of a
raylet and all of its processes, amid the run), `a machine stands` (SIGSTOP of a worker until the others have nothing
left to do), `tiny files` and `one long file` (peak memory).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import soundfile
import torch
from measure import bench_parser, parse_options, print_row

from audiollm.audio import load
from audiollm.audio.streams import save_stream
from tokenizer import AudioTokenizer, TokenizerConfig

MACHINES = 4
SPEECH = ("librispeech_speakers", "ljspeech_32")
WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
RATE = 16_000
START_ATTEMPTS = 8
POLL_S = 0.1
WAIT_S = 900.0
OF_THE_RUN = {"timings.json", "report.html", "config.yaml"}
"""Files that describe the run itself: times, and the engine."""
YAMNET = "judge_models/tflite-support/tensorflow_lite_support/cc/test/testdata/task/audio"
ANNOTATION: dict[str, Any] = {
    "grammar": WORDS,
    "quality_sample": 0,
    "steps": {"speakers": {}, "fingerprint": {}},
    "thresholds": {"min_duration_s": 0.3},
}
"""Voice activity, speaker turns, a recognizer with ten words, fingerprints."""
LIGHT: dict[str, Any] = {"quality_sample": 0, "recognizers": []}
"""Steps of every annotation: probe, voice activity, segments, their level."""
CASES = ("equal", "overhead", "dies", "stands", "tiny", "long")


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--clips", type=int, default=48, help="recordings of read speech")
    parser.add_argument("--tiny", type=int, default=3_000, help="files of 0.1 s")
    parser.add_argument("--long-s", type=float, default=3600.0, help="seconds of the long file")
    parser.add_argument("--only", nargs="*", choices=CASES, default=CASES, help="these cases alone")
    arguments = parse_options(parser, clips=96, tiny=100_000, long_s=36_000.0)
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as temporary:
        jobs = Jobs(arguments.data.resolve(), Path(temporary), arguments.clips)
        cases: dict[str, Callable[[], None]] = {
            "equal": lambda: report_equal(jobs),
            "overhead": lambda: report_overhead(jobs),
            "dies": lambda: report_death(jobs),
            "stands": lambda: report_standing(jobs),
            "tiny": lambda: report_tiny(jobs, arguments.tiny),
            "long": lambda: report_long(jobs, arguments.long_s),
        }
        for name in arguments.only:
            cases[name]()


# ------------------------------------------------------------------------------------------- the cluster


@dataclass
class Machines:
    """A head without CPUs and machines with one each."""

    cluster: Any
    nodes: list[Any] = field(default_factory=list)

    @property
    def options(self) -> list[str]:
        """Options of a command that runs on it."""
        return ["--engine", "ray", "--ray-address", self.cluster.address, "--workers", str(MACHINES)]

    def processes(self, node: Any) -> list[psutil.Process]:
        """The raylet of a machine and all that it has started."""
        raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
        return [raylet, *raylet.children(recursive=True)]

    def workers(self) -> list[tuple[Any, psutil.Process]]:
        """Machine and process of each actor that has begun."""
        return [
            (node, process)
            for node in self.nodes
            for process in self.processes(node)
            if process.name().startswith(("ray::_Host", "ray::_Encoding"))
        ]

    def kill(self, node: Any) -> None:
        """End a machine as a power cut does."""
        for process in reversed(self.processes(node)):
            process.kill()
        self.nodes.remove(node)


@contextmanager
def machines() -> Iterator[Machines]:
    # as audiollm.cluster has them for a cluster of its own
    os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    try:
        for cpus in (0, *[1] * MACHINES):
            add_machine(cluster, cpus)
        yield Machines(cluster, list(cluster.worker_nodes))
    finally:
        cluster.shutdown()


def add_machine(cluster: Any, cpus: int) -> None:
    """Add a machine; on a busy one Ray's 30 s for the start may pass."""
    for attempt in range(START_ATTEMPTS):
        try:
            cluster.add_node(
                num_cpus=cpus, include_dashboard=False, include_log_monitor=False, no_monitor=True
            )
            return
        except Exception as error:  # Ray has no class of its own for it
            if "timed out during startup" not in str(error) or attempt == START_ATTEMPTS - 1:
                raise


class CpuMeter:
    """CPU-seconds of all processes that are started meanwhile, looked at five times a second.

    A raylet takes no account of what its workers took: it is not in the counters of any parent.
    """

    def __enter__(self) -> CpuMeter:
        self._ends, self._seconds = threading.Event(), dict[tuple[int, float], float]()
        self._look()
        self._before = sum(self._seconds.values())
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()
        self._look()
        self.seconds = sum(self._seconds.values()) - self._before

    def _watch(self) -> None:
        while not self._ends.wait(2 * POLL_S):
            self._look()

    def _look(self) -> None:
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                times = process.cpu_times()
                self._seconds[process.pid, process.create_time()] = times.user + times.system


@dataclass
class PeakMemory:
    """Largest resident memory, in MB, of the process that directs and of any worker, as the kernel counts it."""

    driver: int
    cluster: Machines
    driver_mb: float = 0.0
    worker_mb: float = 0.0

    def watch(self, process: subprocess.Popen[str]) -> None:
        while process.poll() is None:
            self.driver_mb = max(self.driver_mb, peak_mb(self.driver))
            with suppress(psutil.Error):
                for _, worker in self.cluster.workers():
                    self.worker_mb = max(self.worker_mb, peak_mb(worker.pid))
            time.sleep(5 * POLL_S)


def peak_mb(pid: int) -> float:
    """The high-water mark of a process's resident memory; 0: it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    return int(status.split("VmHWM:")[1].split()[0]) / 1024 if "VmHWM:" in status else 0.0


# --------------------------------------------------------------------------------------------- the commands


@dataclass
class Jobs:
    """Commands over real recordings, each of which writes to `folder / out` and is then moved, so that paths in the
    output are the same."""

    data: Path
    folder: Path
    clips: int

    def annotate(self, paths: Sequence[Path | str], settings: Mapping[str, Any] = ANNOTATION) -> list[str]:
        listing, file = self.folder / "clips.csv", self.folder / "annotate.yaml"
        listing.write_text("\n".join(["path", *map(str, paths)]))
        file.write_text(json.dumps(settings))
        return ["annotate", str(listing), "--settings", str(file), "--no-shards"]

    def audiocot(self) -> list[str]:
        paths = sorted((self.data / "esc10").rglob("*.ogg"))[: self.clips // 2]
        tagger = self.data / YAMNET / "yamnet_audio_classifier_with_metadata.tflite"
        listing, file = self.folder / "sounds.csv", self.folder / "audiocot.yaml"
        listing.write_text("\n".join(["path", *map(str, paths)]))
        settings = {
            "clip_s": 2.5,
            "steps": {"tags": {"model": str(tagger)}},
            "thresholds": {"max_voice": None, "max_balance": None, "min_level_dbfs": None},
            "made": {"sample_rate": RATE, "channels": 1},
        }
        file.write_text(json.dumps(settings))
        return ["audiocot", str(listing), "--settings", str(file)]

    def tokenize(self, paths: Sequence[Path]) -> list[str]:
        codec, listing = self.folder / "codec", self.folder / "tokenize.csv"
        if not codec.exists():
            torch.manual_seed(0)
            shape = TokenizerConfig(
                mel_hidden_size=32, hidden_size=64, encoder_layers=(1, 1), decoder_layers=(1, 1)
            )
            AudioTokenizer(shape).save_pretrained(codec)
        listing.write_text("\n".join(["path", *map(str, paths)]))
        return ["tokenize", str(listing), "--codec", str(codec), "--samples-per-shard", "8"]

    def speech(self, count: int | None = None) -> list[Path]:
        """Recordings of read speech."""
        paths = [path for name in SPEECH for path in sorted((self.data / name).rglob("*"))]
        paths = [path for path in paths if path.suffix in (".flac", ".wav")]
        if len(paths) < (count or self.clips):
            raise SystemExit(
                f"fewer than {count or self.clips} recordings in {self.data}: give its folder with --data"
            )
        return paths[:: len(paths) // (count or self.clips)][: count or self.clips]

    def begin(self, command: Sequence[str], options: Sequence[str]) -> subprocess.Popen[str]:
        out = self.folder / "out"
        shutil.rmtree(out, ignore_errors=True)
        call = [str(Path(sys.executable).parent / "audiollm"), *command, "-o", str(out), *options]
        return subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def finish(self, process: subprocess.Popen[str]) -> Path:
        """Wait for a command, and move its output away."""
        output = process.communicate()[0]
        if process.returncode:
            raise SystemExit(f"a run failed:\n{output}")
        moved = Path(tempfile.mkdtemp(dir=self.folder)) / "out"
        return (self.folder / "out").rename(moved)

    def finish_watched(self, process: subprocess.Popen[str], peak: PeakMemory) -> Path:
        """Wait for a command whose memory is looked at meanwhile."""
        watching = threading.Thread(target=peak.watch, args=(process,), daemon=True)
        watching.start()
        out = self.finish(process)
        watching.join()
        return out

    @property
    def ledger(self) -> LedgerCount:
        """A count of the calls of the command that runs."""
        return LedgerCount(self.folder / "out" / "ledger" / "ledger.sqlite-recent")

    def run(self, command: Sequence[str], options: Sequence[str]) -> Path:
        return self.finish(self.begin(command, options))


@dataclass
class LedgerCount:
    """Calls whose outcomes are in the ledger of the command that runs, as lines beside the database, which takes over
    some hundreds at a time."""

    path: Path
    _committed: int = 0
    _recent: int = 0

    def calls(self) -> int:
        try:
            lines = self.path.read_bytes().splitlines()
        except OSError:
            lines = []
        recent = sum(b'"step": "digest"' not in text for text in lines)
        if recent < self._recent:
            self._committed += self._recent
        self._recent = recent
        return self._committed + recent


def contents(folder: Path) -> dict[str, str]:
    """Digest of each file of an output that describes the sound and not the run."""
    return {
        path.relative_to(folder).as_posix(): sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and "ledger" not in path.parts and path.name not in OF_THE_RUN
    }


def differing_files(first: Path, second: Path) -> list[str]:
    """Names of the files that are not in both, byte for byte."""
    content, reference = contents(first), contents(second)
    return sorted(
        name for name in content.keys() | reference.keys() if content.get(name) != reference.get(name)
    )


def failed_calls(folder: Path) -> int:
    """Calls whose outcome is an error, in the ledger of a run."""
    import sqlite3

    with sqlite3.connect(folder / "ledger" / "ledger.sqlite") as database:
        count: int = database.execute("select count(*) from calls where error is not null").fetchone()[0]
    return count


def calls_by_step(folder: Path) -> dict[str, int]:
    """Answered calls of each step."""
    steps = json.loads((folder / "timings.json").read_text())["steps"]
    return {name: step["calls"] for name, step in steps.items()}


def wait_until(is_reached: Callable[[], bool], what: str) -> None:
    ends = time.monotonic() + WAIT_S
    while not is_reached():
        if time.monotonic() > ends:
            raise SystemExit(f"{what}: not within {WAIT_S:.0f} s")
        time.sleep(POLL_S)


# ------------------------------------------------------------------------------------------------- cases


def report_equal(jobs: Jobs) -> None:
    """Files that differ between four machines and one process."""
    commands = {
        "annotate": jobs.annotate(jobs.speech()),
        "audiocot": jobs.audiocot(),
        "tokenize": jobs.tokenize(jobs.speech()),
    }
    for name, command in commands.items():
        here = jobs.run(command, ["--workers", "1"])
        with machines() as cluster:
            there = jobs.run(command, cluster.options)
        differing = differing_files(there, here)
        unit = f"files of {len(contents(here))} that differ from those of one process"
        line(f"{name}: equal", len(differing), 0, None, unit, differing=differing[:5])


def report_overhead(jobs: Jobs) -> None:
    """CPU-seconds of four machines and of one process, by the start and by the hour of sound."""
    many, few = jobs.speech(), jobs.speech(MACHINES)
    hours = sum(soundfile.info(path).duration for path in many) / 3600
    for name, command in (("annotate", jobs.annotate), ("tokenize", jobs.tokenize)):
        costs: dict[tuple[str, int], float] = {}
        for paths in (few, many):
            with CpuMeter() as meter:
                jobs.run(command(paths), ["--workers", "1"])
            costs["one", len(paths)] = meter.seconds
            with machines() as cluster, CpuMeter() as meter:
                jobs.run(command(paths), cluster.options)
            costs["ray", len(paths)] = meter.seconds
        slopes = {
            side: (costs[side, len(many)] - costs[side, len(few)]) / (1 - len(few) / len(many)) / hours
            for side in ("one", "ray")
        }
        unit = f"CPU-seconds per hour of sound without the start (peer: one process); {hours:.3f} hours"
        line(f"{name}: overhead", slopes["ray"], slopes["one"], slopes["one"] / slopes["ray"], unit)
        start = costs["ray", len(few)] - costs["one", len(few)]
        unit = f"CPU-seconds more than one process, of which {MACHINES} clips take few"
        line(f"{name}: start of {MACHINES} workers", start, None, None, unit)


def report_death(jobs: Jobs) -> None:
    """A machine that dies when a third of the calls are done."""
    command = jobs.annotate(jobs.speech())
    here = jobs.run(command, ["--workers", "1"])
    total = sum(calls_by_step(here).values())
    with machines() as cluster:
        process, ledger = jobs.begin(command, cluster.options), jobs.ledger
        wait_until(lambda: ledger.calls() >= total // 3, "a third of the calls")
        cluster.kill(cluster.workers()[0][0])
        there = jobs.finish(process)
    report_same("a machine dies", there, here)
    command = jobs.tokenize(jobs.speech())
    here = jobs.run(command, ["--workers", "1"])
    with machines() as cluster:
        process = jobs.begin(command, cluster.options)
        wait_until(lambda: len(list((jobs.folder / "out").glob("shard-*.tar"))) > 0, "the first shard")
        cluster.kill(cluster.workers()[0][0])
        there = jobs.finish(process)
    differing = differing_files(there, here)
    line("tokenize: a machine dies", len(differing), 0, None, "files that differ", differing=differing[:5])


def report_standing(jobs: Jobs) -> None:
    """A worker that is stopped while the others do all that does not wait for it."""
    command = jobs.annotate(jobs.speech())
    here = jobs.run(command, ["--workers", "1"])
    total = sum(calls_by_step(here).values())
    with machines() as cluster:
        process, ledger = jobs.begin(command, cluster.options), jobs.ledger
        wait_until(lambda: ledger.calls() >= total // 10, "a tenth of the calls")
        stopped = cluster.workers()[0][1]
        stopped.send_signal(signal.SIGSTOP)
        done = wait_for_standstill(ledger)
        stopped.send_signal(signal.SIGCONT)
        there = jobs.finish(process)
    report_same("a machine stands", there, here)
    line("annotate: calls done beside a stopped worker", done, total, done / total, "calls (peer: all)")


def wait_for_standstill(ledger: LedgerCount) -> int:
    """Calls in the ledger when no more have come for 20 s."""
    recorded, since = ledger.calls(), time.monotonic()
    while time.monotonic() - since < 20:
        time.sleep(POLL_S)
        if (now := ledger.calls()) != recorded:
            recorded, since = now, time.monotonic()
    return recorded


def report_same(case: str, there: Path, here: Path) -> None:
    """The output of a disturbed run beside that of one process."""
    differing = differing_files(there, here)
    calls = {name: count for name, count in calls_by_step(there).items() if name != "report"}
    reference = {name: count for name, count in calls_by_step(here).items() if name != "report"}
    unit = "files that differ; calls answered (peer: one process)"
    line(
        f"annotate: {case}", len(differing), 0, None, unit, differing=differing[:5], failed=failed_calls(there),
        calls=[sum(calls.values()), sum(reference.values())],
    )  # fmt: skip


def report_tiny(jobs: Jobs, count: int) -> None:
    """Files of 0.1 s of real speech, each of its own content."""
    folder = jobs.folder / "tiny"
    folder.mkdir()
    speech_N = np.concatenate(
        [load(path, sample_rate=RATE, mono=True).samples_CN[0].numpy() for path in jobs.speech(16)]
    )
    random = np.random.default_rng(0)
    for number, start in enumerate(random.integers(0, len(speech_N) - RATE // 10, count).tolist()):
        piece_N = speech_N[start : start + RATE // 10] * random.uniform(0.5, 1)
        soundfile.write(folder / f"{number:06d}.wav", piece_N, RATE, subtype="PCM_16")
    (file := jobs.folder / "light.yaml").write_text(json.dumps(LIGHT))
    command = ["annotate", str(folder), "--settings", str(file), "--no-shards", "--recognizer", "none"]
    began = time.monotonic()
    with machines() as cluster, CpuMeter() as meter:
        process = jobs.begin(command, cluster.options)
        peak = PeakMemory(process.pid, cluster)
        out = jobs.finish_watched(process, peak)
    cpu_s, wall_s = meter.seconds, time.monotonic() - began
    funnel = json.loads((out / "funnel.json").read_text())
    if funnel["audio_files"] != count:
        raise SystemExit(f"{funnel['audio_files']} of {count} files are answered for")
    shutil.rmtree(folder)
    note = f"load {os.getloadavg()[0]:.1f}"
    timings = json.loads((out / "timings.json").read_text())
    calls = sum(step["calls"] for step in timings["steps"].values())
    steps_s = sum(step["seconds"] for step in timings["steps"].values())
    worker_ms = (cpu_s - steps_s - timings["driver_cpu_s"]) / calls * 1000
    unit = "CPU-ms per call of workers and raylets beside their steps, their start included"
    line(f"annotate: {count} files of 0.1 s, workers", worker_ms, None, None, unit)
    unit = f"CPU-ms per call of the driver, {calls} calls"
    line(
        f"annotate: {count} files of 0.1 s, driver", timings["driver_cpu_s"] / calls * 1000, None, None, unit
    )
    line(f"annotate: {count} files of 0.1 s", peak.driver_mb, None, None, "MB, peak of the driver")
    line(f"annotate: {count} files of 0.1 s, a worker", peak.worker_mb, None, None, "MB, peak")
    unit = f"CPU-ms per file, all processes; {cpu_s:.0f} CPU-seconds, {wall_s:.0f} s of wall time, {note}"
    line(f"annotate: {count} files of 0.1 s, cost", cpu_s / count * 1000, None, None, unit)


def report_long(jobs: Jobs, seconds: float) -> None:
    """Speech over and over for so long, in one file."""
    path = jobs.folder / "long.wav"
    sounds = [load(clip, sample_rate=RATE, mono=True).samples_CN for clip in jobs.speech()]
    round_s = sum(sound.shape[1] for sound in sounds) / RATE
    save_stream(path, (sound for _ in range(int(seconds / round_s) + 1) for sound in sounds), RATE)
    length_s = soundfile.info(path).duration
    (file := jobs.folder / "light.yaml").write_text(json.dumps(LIGHT))
    command = ["annotate", str(path), "--settings", str(file), "--no-shards", "--recognizer", "none"]
    with machines() as cluster, CpuMeter() as meter:
        process = jobs.begin(command, cluster.options)
        peak = PeakMemory(process.pid, cluster)
        out = jobs.finish_watched(process, peak)
    path.unlink()
    found = json.loads((out / "funnel.json").read_text())["segments_found"]
    name = f"annotate: a file of {length_s / 3600:.1f} hours"
    line(
        name,
        peak.worker_mb,
        None,
        None,
        f"MB, peak of the worker that takes it; {found} segments, {meter.seconds:.0f} CPU-seconds",
    )
    line(f"{name}, driver", peak.driver_mb, None, None, "MB, peak")


def line(case: str, ours: float, peer: float | None, ratio: float | None, unit: str, **more: Any) -> None:
    print_row("cluster", case, ours, peer, unit, ratio=ratio, **more)


if __name__ == "__main__":
    main()
