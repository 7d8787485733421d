"""Samples per CPU-second from shards with FLAC decode, ours against a bare webdataset pipeline; and a large manifest.

    python benchmarks/loader.py [--data ../shared/data] [--full] [--rounds 3]

*Shards*: the same tars (json, and FLAC of every clip found below --data, or of generated tones) are read and decoded
to float32 by `open_source` and `Loader` (checked, in our order) and by `webdataset.WebDataset` with soundfile and json.
Both in one process on one thread, in turns; medians over the rounds; the first round is thrown away. Where they do not
read equally much sound, it ends with exit code 1.
*Manifest*: CPU-seconds and the MB held to open it by number (and to read a thousand samples of it), against reading it
with json line by line, a process of its own each.
"""

from __future__ import annotations

import io
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import soundfile
import torch
import webdataset
from measure import bench_parser, in_own_process, parse_options, print_row

from audiollm.audio import AudioError, encode_bytes, find_audio, load
from audiollm.data.records.loader import Loader
from audiollm.data.records.manifest import Manifest
from audiollm.data.records.mixture import Mixture
from audiollm.data.records.opening import open_source
from audiollm.data.records.sample import AudioPart, Message, Sample, TextPart
from audiollm.data.records.shards import ShardWriter
from audiollm.data.records.source import Source
from audiollm.errors import BadSample

BATCH = 16
CLIPS = 400
LONGEST_S = 15.0


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--data", type=Path, help="folder of sound; by default tones are made")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--manifest-samples", type=int, default=200_000)
    arguments = parse_options(parser, rounds=7, manifest_samples=1_000_000)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "shards"
        write_shards(folder, speech(arguments.data) if arguments.data else tones())
        compare_shards(folder, arguments.rounds, "real audio" if arguments.data else "tones")
        compare_manifests(Path(name) / "samples.jsonl", arguments.manifest_samples)


# Shards


def speech(data: Path) -> Iterator[bytes]:
    """Up to `CLIPS` clips, spread over all files of the folder, as 16-bit FLAC at their own rate."""
    paths, _ = find_audio(data)
    for path in paths[:: max(1, len(paths) // CLIPS)]:
        try:
            waveform = load(path, end_s=LONGEST_S)
        except AudioError:  # a file that is broken on purpose
            continue
        yield encode_bytes(waveform.mono().samples_CN, waveform.sample_rate, "flac")


def tones() -> Iterator[bytes]:
    """Clips of 2 to 10 s at 24 kHz: harmonics with noise, about as hard to code as speech."""
    generator = torch.Generator().manual_seed(0)
    for number in range(CLIPS):
        times_N = torch.arange(24_000 * (2 + number % 9)) / 24_000
        pitch = 100 + 3 * (number % 60)
        tone_N = sum(torch.sin(2 * torch.pi * pitch * k * times_N) / k for k in range(1, 6)) * 0.2
        noise_N = 0.01 * torch.randn(len(times_N), generator=generator)
        yield encode_bytes((tone_N + noise_N)[None], 24_000, "flac")


def write_shards(folder: Path, clips: Iterator[bytes]) -> None:
    writer = ShardWriter(folder, 64)
    for number, content in enumerate(clips):
        messages = [
            Message(role="user", content=[TextPart(text=f"say the text of clip {number}, as it is written")]),
            Message(role="assistant", content=[AudioPart(path="0.flac", speaker="someone")]),
        ]
        sample = Sample(id=f"clip{number}", messages=messages, task="tts", metadata={"split": "train"})
        writer.write(number, sample, [], {"0.flac": content})
    writer.close({})


@dataclass
class Decoding:
    """A step of ours: samples of the first pass, decoded; the length of their sound."""

    source: Source
    mixture: Mixture

    def __call__(self, step: int) -> int:
        items = self.mixture.items(step * BATCH, min((step + 1) * BATCH, len(self.source)))
        return sum(clip.load().num_samples for item in items for clip in self.source[item.index].audio)


def read_ours(folder: Path) -> int:
    """Samples of sound in one pass."""
    source = open_source(folder)
    loader = Loader(Decoding(source, Mixture([len(source)], seed=1)), workers=0)
    return sum(loader[step] for step in range(-(-len(source) // BATCH)))


def read_webdataset(folder: Path) -> int:
    """The same by the peer, in the order of the tars."""
    urls = [str(path) for path in sorted(folder.glob("*.tar"))]
    total = 0
    for row in webdataset.WebDataset(urls, shardshuffle=False):
        json.loads(row["json"])
        samples_NC, _ = soundfile.read(io.BytesIO(row["0.flac"]), dtype="float32", always_2d=True)
        total += len(samples_NC)
    return total


def compare_shards(folder: Path, rounds: int, case: str) -> None:
    count = len(open_source(folder))
    times: dict[str, list[float]] = {"ours": [], "peer": []}
    for number in range(rounds + 1):
        sides = [("ours", read_ours), ("peer", read_webdataset)]
        lengths = set()
        for name, read in sides if number % 2 else reversed(sides):
            started = time.process_time()
            lengths.add(read(folder))
            if number:
                times[name].append(time.process_time() - started)
        if len(lengths) != 1:
            raise SystemExit(f"the two sides read different amounts of sound: {sorted(lengths)} samples")
    ours, peer = (count / statistics.median(times[name]) for name in ("ours", "peer"))
    print_row(
        "loader", f"shards with FLAC, {case}", ours, peer, "samples per CPU-second", more_is_better=True
    )


# Manifest


def compare_manifests(path: Path, count: int) -> None:
    """Compare both readers as a user meets them: in a fresh process that opens the file."""
    write_manifest(path, count)
    (ours_s, ours_mb), (peer_s, peer_mb) = (
        in_own_process(_measured, read, path) for read in (open_by_number, read_by_line)
    )
    thousand_s, _ = in_own_process(_measured, read_a_thousand, path)
    print_row("loader", f"manifest of {count} samples, to open", ours_s, peer_s, "CPU-seconds")
    print_row("loader", f"manifest of {count} samples, memory", ours_mb, peer_mb, "MB")
    print_row("loader", f"manifest of {count} samples, open and read 1000", thousand_s, peer_s, "CPU-seconds")


def write_manifest(path: Path, count: int) -> None:
    messages = [
        Message(
            role="user", content=[TextPart(text="Printing, in the only sense with which we are concerned")]
        ),
        Message(role="assistant", content=[AudioPart(path="wavs/PLACE.flac", start_s=0.0, end_s=4.25)]),
    ]
    line = Sample(id="clip-PLACE", messages=messages, task="tts", metadata={"speaker": "x"}).model_dump_json()
    with path.open("w") as file:
        for number in range(count):
            file.write(line.replace("PLACE", f"{number:08d}") + "\n")


def open_by_number(path: Path) -> object:
    return Manifest(path)


def read_a_thousand(path: Path) -> object:
    manifest = Manifest(path)
    picked = np.random.default_rng(0).integers(len(manifest), size=1000)
    try:
        return [manifest[int(index)] for index in picked]
    except BadSample as bad:
        raise SystemExit(str(bad)) from bad


def read_by_line(path: Path) -> object:
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def _measured(read: Callable[[Path], object], path: Path) -> tuple[float, float]:
    """CPU-seconds, and by how many MB the process has grown."""
    process = psutil.Process()
    before, started = process.memory_info().rss, time.process_time()
    result = read(path)
    seconds = time.process_time() - started
    grown = process.memory_info().rss - before
    del result
    return seconds, grown / 2**20


if __name__ == "__main__":
    main()
