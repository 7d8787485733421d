"""Near duplicates: how many are found by coding, what is found that is none, and how fast, against comparing all pairs.

    python benchmarks/duplicates.py [--data ../shared/data] [--full] [--rows 20000]

Speech is cut to 6 s (`librispeech_speakers`) and spoken digits are whole (`fsdd`, 0.2 to 2 s; less than four fifths of
the shortest is left when they are trimmed by 64 ms, and then they are no duplicates). Each is coded anew, and the pair
is found or not. The speed is of rows made of real fingerprints: pieces of 0.3 to 1.3 s put together at random with a
fifth of their bits changed in runs, a twentieth of the rows again with 6 % of the bits wrong and up to three frames cut
off. The peer compares all pairs at all shifts by `bit_errors`, on few rows; its time for all of them is by the square.
"""

from __future__ import annotations

import io
import resource
import time
from collections import Counter
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from measure import bench_parser, parse_options, print_row
from numpy.typing import NDArray

from audiollm.audio import Waveform, load, load_bytes
from pipelines.annotate.execution.corpus import bit_errors, find_duplicates
from pipelines.annotate.steps.fingerprint import SAMPLE_RATE, fingerprint

PEER_ROWS = 400
CODINGS = {
    "MP3 48 kbit/s": ("libmp3lame", "mp3", 48_000, 24_000),
    "MP3 32 kbit/s": ("libmp3lame", "mp3", 32_000, 24_000),
    "Opus 32 kbit/s": ("libopus", "ogg", 32_000, 48_000),
    "Opus 16 kbit/s": ("libopus", "ogg", 16_000, 48_000),
}
Bits = NDArray[np.uint16]

BENCH = "duplicates"


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--data", type=Path, default=Path(__file__).resolve().parents[2] / "shared" / "data")
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--clips", type=int, default=10)
    arguments = parse_options(parser, rows=100_000, clips=30)
    torch.set_num_threads(1)
    speech = sorted(
        p for p in (arguments.data / "librispeech_speakers").rglob("*") if p.suffix in (".flac", ".wav")
    )
    digits = sorted((arguments.data / "fsdd" / "recordings").glob("*.wav"))
    for name, paths in (
        ("speech of 6 s", speech),
        ("spoken digits", [p for p in digits if p.stem.endswith("_1")]),
    ):
        for coding, (num_found, of) in rates(paths[:: max(1, len(paths) // arguments.clips)]).items():
            print_row(
                BENCH,
                f"{name}: {coding}",
                num_found / of,
                1.0,
                "share of pairs found",
                more_is_better=True,
                pairs=of,
            )
    takes = [row(path.stem, bits(load(path).mono())) for path in digits]
    case, num_found = "other takes of a digit by its speaker", len(find_duplicates(takes))
    print_row(BENCH, case, num_found, 0, "found, of none", more_is_better=True, rows=len(takes))
    pieces = [bits(load(path).mono()) for path in speech]
    speed(np.concatenate(pieces), arguments.rows)


def rates(paths: list[Path]) -> dict[str, tuple[int, int]]:
    """Coding -> pairs found, and how many there are."""
    counts: Counter[str] = Counter()
    for path in paths:
        wave = load(path).mono()
        wave = Waveform(wave.samples_CN[:, : 6 * wave.sample_rate], wave.sample_rate)
        for name, version in versions(wave).items():
            counts[name] += len(find_duplicates([row("a", bits(wave)), row("b", bits(version))]))
    return {name: (counts[name], len(paths)) for name in versions(wave)}


def versions(wave: Waveform) -> dict[str, Waveform]:
    """The same in other codings, and cut at the edges."""
    first, last = round(0.043 * wave.sample_rate), wave.num_samples - round(0.021 * wave.sample_rate)
    return {
        "8 kHz": wave.resample(8_000),
        "-12 dB": Waveform(wave.samples_CN * 10 ** (-12 / 20), wave.sample_rate),
        "trimmed": Waveform(wave.samples_CN[:, first:last].contiguous(), wave.sample_rate),
        **{name: coded(wave, *settings) for name, settings in CODINGS.items()},
    }


def coded(wave: Waveform, codec: str, container: str, bitrate: int, rate: int) -> Waveform:
    """Through a lossy coder of FFmpeg and back."""
    samples = (wave.resample(rate).samples_CN.numpy() * 32767).round().astype(np.int16)
    target = io.BytesIO()
    with av.open(target, "w", format=container) as out:
        stream = out.add_stream(codec, rate=rate, layout="mono")
        stream.bit_rate = bitrate
        frame = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
        frame.sample_rate = rate
        sized = av.AudioResampler(stream.format.name, "mono", rate, stream.frame_size or None)
        for piece in [*sized.resample(frame), *sized.resample(None)]:
            out.mux(stream.encode(piece))
        out.mux(stream.encode(None))
    return load_bytes(target.getvalue(), f"clip.{container}").mono()


def speed(real_A: Bits, count: int) -> None:
    """Ours on all rows; both on the first few."""
    random = np.random.default_rng(0)
    rows = [make_row(real_A, random) for _ in range(count)]
    rows += [again(rows[index], random) for index in range(count // 20)]
    numbered = [row(f"{index:07d}", row_bits) for index, row_bits in enumerate(rows)]
    started = time.process_time()
    matches = find_duplicates(numbered)
    ours_s = time.process_time() - started
    planted = {f"{count + index:07d}": f"{index:07d}" for index in range(count // 20)}
    right = sum({copy: of, of: copy}.get(stays) == id for id, stays in matches.items() for copy, of in
                [(max(id, stays), planted.get(max(id, stays), ""))])  # fmt: skip
    started = time.process_time()
    few = rows[:PEER_ROWS]
    for index, first in enumerate(few):
        for second in few[:index]:
            bit_errors(first, second)
    # the pairs grow with the square of the rows
    peer_s = (time.process_time() - started) * (len(rows) / PEER_ROWS) ** 2
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print_row(
        BENCH, f"{len(rows)} rows", ours_s, peer_s, "CPU-seconds", digits=2,
        planted=len(planted), planted_found=right, others_found=len(matches) - right, peak_mb=round(peak),
        peer_measured_on_rows=PEER_ROWS,
    )  # fmt: skip


def make_row(real_A: Bits, random: np.random.Generator) -> Bits:
    frames = int(random.integers(3, 16) * 62.5) if random.random() < 0.8 else int(random.integers(20, 60))
    parts: list[Bits] = []
    while sum(map(len, parts)) < frames:
        start = random.integers(len(real_A) - 80)
        parts.append(real_A[start : start + random.integers(20, 80)])
    joined = np.concatenate(parts)[:frames]
    wrong = np.repeat(random.random((frames // 8 + 1, 16)) < 0.2, 8, axis=0)[:frames]
    return joined ^ packed(wrong)


def again(bits_F: Bits, random: np.random.Generator) -> Bits:
    cut = bits_F[int(random.integers(0, 4)) :]
    return cut ^ packed(random.random((len(cut), 16)) < 0.06)


def packed(wrong: NDArray[np.bool_]) -> Bits:
    flips: Bits = np.packbits(wrong, axis=1).view(">u2")[:, 0].astype(np.uint16)
    return flips


def bits(wave: Waveform) -> Bits:
    return fingerprint(wave.resample(SAMPLE_RATE).samples_CN[0].numpy())


def row(id: str, bits_F: Bits) -> dict[str, Any]:
    text = bits_F.astype(">u2").tobytes().hex()
    return {"id": id, "duration_s": len(bits_F) * 0.016, "measured": {"fingerprint": {"bits": text}}}


if __name__ == "__main__":
    main()
