"""How many listeners at once a server of this machine holds: streamed speech at 1 to 64 callers, and hours of it.

    python benchmarks/serve_load.py [--full] [--concurrency 1,4,16] [--requests 8] [--frames 100] [--chart load.svg]
    python benchmarks/serve_load.py --hours 3

`audiollm serve` and this client are processes on loopback; a random model of 256 x 6 says texts of 4 s, each caller the
next one as soon as the last one ended. For each concurrency: milliseconds to the first sound and to the whole (median,
95th percentile), the share of streams that hold real time (a player that begins 0.2 s after the first bytes never
waits), and CPU-seconds of the server per second of sound. At most 2,000 requests and 10 minutes; any error ends it.

`--hours`: 8 callers, of whom one in ten leaves in the middle and one in ten reads slowly, until so many hours of sound
were made; the server's memory at the end, relative to that after the first tenth, and its threads and files.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import httpx
from llm_generate import TEXTS
from measure import bench_parser, parse_options, print_row
from serve import FRAME_RATE, SPEECH, Side, running, speech_body, write_folders

MOST_REQUESTS, MOST_S = 2000, 600.0
BYTES_PER_S = 2 * 24_000
"""Of 16-bit samples of the codec."""
BUFFER_S = 0.2
"""Sound that a player waits for before it begins."""
SHARE_LEAVING = SHARE_SLOW = 0.1
CALLERS_FOR_HOURS = 8
SLOW_PAUSE_S = 0.5
_SECONDS = (0.1, 0.2, 0.5, 1, 2, 5, 10)
"""Marks of the chart."""


@dataclass
class Listened:
    """A stream as its listener had it."""

    first_s: float = 0.0
    whole_s: float = 0.0
    sound_s: float = 0.0
    holds: bool = True
    """Whether the sound never ran out while it was played from its first bytes on."""


@dataclass
class Load:
    """What callers do until nobody asks any more."""

    side: Side
    frames: int
    numbers: Iterator[int]
    deadline: float
    done: list[Listened] = field(default_factory=list)
    left: int = 0
    """Streams whose listener left in the middle."""

    async def call(self, client: httpx.AsyncClient, leaves: bool = False, is_slow: bool = False) -> None:
        """Listen to one stream."""
        number = next(self.numbers)
        body = speech_body(TEXTS[number % len(TEXTS)], self.frames) | {
            "stream_format": "audio",
            "seed": number,
        }
        begun, listened, received = time.perf_counter(), Listened(), 0
        async with client.stream("POST", self.side.address + SPEECH, json=body) as answer:
            if answer.status_code != 200:
                sys.exit(f"{answer.status_code}: {(await answer.aread()).decode()}")
            async for piece in answer.aiter_bytes():
                now = time.perf_counter() - begun
                if received and now - listened.first_s - BUFFER_S > received / BYTES_PER_S:
                    listened.holds = False
                listened.first_s = listened.first_s or now
                received += len(piece)
                if leaves and received > BYTES_PER_S:
                    self.left += 1
                    return
                if is_slow:
                    await asyncio.sleep(SLOW_PAUSE_S)
        listened.whole_s, listened.sound_s = time.perf_counter() - begun, received / BYTES_PER_S
        expected_s = self.frames / FRAME_RATE
        if not is_slow and abs(listened.sound_s - expected_s) > 0.5 * expected_s:
            sys.exit(f"a stream of {listened.sound_s:.1f} s in the place of {expected_s:.1f}")
        self.done.append(listened)


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--frames", type=int, default=100)
    parser.add_argument("--requests", type=int, default=8, help="of each caller")
    parser.add_argument("--concurrency", default="1,4,16")
    parser.add_argument("--hours", type=float, default=0.0)
    parser.add_argument("--chart", type=Path, help="an SVG of the figures by callers")
    options = parse_options(parser, concurrency="1,2,4,8,16,32,64")
    with tempfile.TemporaryDirectory() as place:
        model, codec = write_folders(Path(place))
        serve = ["-m", "audiollm.commands.cli", "serve", f"toy={model}", "--codec", str(codec), "--port", "0"]
        with running([*serve, "--slots", "64", "--queue", "128", "--streams", "128"]) as side:
            if options.hours:
                asyncio.run(run_hours(side, options))
                return
            began, asked = time.monotonic(), 0
            figures: dict[int, dict[str, Any]] = {}
            for callers in map(int, options.concurrency.split(",")):
                asked += callers * options.requests
                if asked > MOST_REQUESTS or time.monotonic() - began > MOST_S:
                    print(f"{callers} callers: left out, at most {MOST_REQUESTS} requests and {MOST_S:.0f} s")
                    break
                figures[callers] = asyncio.run(run_callers(side, callers, options, began + MOST_S))
            if options.chart:
                draw_load(figures, options.chart)


async def run_callers(
    side: Side, callers: int, options: argparse.Namespace, deadline: float
) -> dict[str, Any]:
    """One concurrency: each caller listens to some streams, one after the other. Returns the figures."""
    load = Load(side, options.frames, count(), deadline)
    before_s = side.cpu_seconds()

    async def repeat(client: httpx.AsyncClient) -> None:
        for _ in range(options.requests):
            if time.monotonic() < deadline:
                await load.call(client)

    limits = httpx.Limits(max_connections=callers)
    async with httpx.AsyncClient(timeout=MOST_S, limits=limits) as client:
        await asyncio.gather(*(repeat(client) for _ in range(callers)))
    sound_s = sum(listened.sound_s for listened in load.done)
    first_ms, whole_ms = ([1000 * getattr(one, name) for one in load.done] for name in ("first_s", "whole_s"))
    cost = (side.cpu_seconds() - before_s) / sound_s
    figures: dict[str, Any] = {
        "requests": len(load.done),
        "first_ms": _median_and_tail(first_ms),
        "whole_ms": _median_and_tail(whole_ms),
        "hold_real_time": round(statistics.fmean(listened.holds for listened in load.done), 3),
    }
    unit = "CPU-s per second of sound"
    print_row("serve_load", f"streams, {callers} callers", cost, None, unit, digits=3, **figures)
    return figures


def draw_load(figures: Mapping[int, Mapping[str, Any]], path: Path) -> None:
    """Write an SVG: the time to the first sound, and the share of streams that hold real time, by callers."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 2.6), layout="constrained")
    waiting, holding = figure.subplots(1, 2)
    callers = list(figures)
    for place, name in enumerate(("median", "95th percentile")):
        waiting.plot(
            callers, [figures[each]["first_ms"][place] / 1000 for each in callers], marker="o", label=name
        )
    waiting.set_yscale("log")
    waiting.set_yticks(_SECONDS, [f"{each:g}" for each in _SECONDS])
    waiting.minorticks_off()
    waiting.set_ylabel("seconds to the first sound")
    waiting.legend(frameon=False)
    holding.plot(callers, [figures[each]["hold_real_time"] for each in callers], marker="o")
    holding.set_ylabel("streams that hold real time")
    holding.set_ylim(-0.05, 1.05)
    for axes in (waiting, holding):
        axes.set_xscale("log", base=2)
        axes.set_xticks(callers, [str(each) for each in callers])
        axes.set_xlabel("callers at once")
        axes.grid(alpha=0.3)
    figure.savefig(path, metadata={"Date": None})


async def run_hours(side: Side, options: argparse.Namespace) -> None:
    """Hours of sound, with listeners who leave and who are slow."""
    wanted_s, draw = 3600 * options.hours, random.Random(0)
    load = Load(side, options.frames, count(), float("inf"))
    marks: list[dict[str, float]] = []

    def made_s() -> float:
        return sum(listened.sound_s for listened in load.done)

    async def repeat(client: httpx.AsyncClient) -> None:
        while made_s() < wanted_s:
            chance = draw.random()
            await load.call(
                client, chance < SHARE_LEAVING, SHARE_LEAVING <= chance < SHARE_LEAVING + SHARE_SLOW
            )
            if not marks and made_s() > wanted_s / 10:
                marks.append(_resources(side))

    async with httpx.AsyncClient(timeout=MOST_S) as client:
        await asyncio.gather(*(repeat(client) for _ in range(CALLERS_FOR_HOURS)))
    await asyncio.sleep(2.0)  # the last streams are closed
    marks.append(_resources(side))
    first, last = marks
    row: dict[str, Any] = {name: [first[name], last[name]] for name in first}
    ratio = last["memory_mb"] / first["memory_mb"]
    case, unit = f"{options.hours:g} hours of streams", "memory, end / after a tenth"
    print_row("serve_load", case, ratio, None, unit, left=load.left, **row)
    if ratio > 1.05:
        sys.exit(f"memory grew by {ratio:.3f}: at most 1.05")


def _resources(side: Side) -> dict[str, float]:
    process = side.process
    memory_mb = round(process.memory_info().rss / 2**20, 1)
    return {"memory_mb": memory_mb, "threads": process.num_threads(), "files": process.num_fds()}


def _median_and_tail(values: list[float]) -> list[int]:
    """The median and the 95th percentile."""
    ordered = sorted(values)
    return [
        round(statistics.median(ordered)),
        round(ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]),
    ]


if __name__ == "__main__":
    main()
