"""Seconds of sound per CPU-second: `audiollm serve` against a plain FastAPI route around transformers' `generate`.

    python benchmarks/serve.py [--full] [--frames 50] [--rounds 1] [--concurrency 1,8]

Server and clients are processes on loopback, each server in one thread; the sides take turns, and CPU-seconds are those
of the server's process. Both speak with the same random weights at 256 x 6 and the same small codec of 25 Hz, greedy,
from the same prompts, and their sound is compared: it must be the same up to the last K frames, where our engine winds
down one codebook after the other and `generate` breaks off. A plain route answers one request after the other. Beside
it: milliseconds to the first bytes of a stream against those of the whole answer that the route gives, and what the
server costs against our engine in process at 8 answers side by side.

Bars: 1.8 times the sound per CPU-second at one caller, 4 at 8, 5 at 32; the first bytes 8 times sooner; at least 0.9 of
what the engine makes in process.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import torch
from llm_generate import SMALL, TEXTS, generate, request, speaking_model, transformers_model
from measure import bench_parser, parse_options, print_row

from audiollm.audio.sound_encoder import pcm16
from audiollm.codec import load_codec
from audiollm.data.chat.template import Template
from audiollm.data.text import tokenizer as tokens
from audiollm.data.text.tokenizer import load_text_tokenizer
from audiollm.generation.engine.engine import Engine
from audiollm.models.dual_ffn import DualFFN
from recipes.finetune_higgs.random_weights import BOOKS, CODES, write_tokenizer

FRAME_RATE, PATIENCE_S = 25.0, 600.0
SPEECH = "/v1/audio/speech"


@dataclass(frozen=True)
class Side:
    """A running server."""

    address: str
    process: psutil.Process

    def say(self, text: str, frames: int, **more: Any) -> bytes:
        """The 16-bit samples of a text."""
        answer = httpx.post(self.address + SPEECH, json=speech_body(text, frames) | more, timeout=PATIENCE_S)
        answer.raise_for_status()
        return answer.content

    def cpu_seconds(self) -> float:
        processes = [self.process, *self.process.children(recursive=True)]
        return sum(sum(process.cpu_times()[:2]) for process in processes)


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--frames", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--concurrency", default="1,8")
    parser.add_argument("--plain-route", nargs=2, help=argparse.SUPPRESS)
    options = parse_options(parser, frames=100, rounds=3, concurrency="1,8,32")
    torch.set_num_threads(1)
    if options.plain_route:
        model_folder, codec_folder = map(Path, options.plain_route)
        serve_plain_route(model_folder, codec_folder, options.frames)
        return
    with tempfile.TemporaryDirectory() as place:
        model, codec = write_folders(Path(place))
        serve = ["-m", "audiollm.commands.cli", "serve", f"toy={model}", "--codec", str(codec)]
        plain = [__file__, "--frames", str(options.frames), "--plain-route", str(model), str(codec)]
        with running([*serve, "--port", "0", "--slots", "32"]) as ours, running(plain) as peer:
            check_equal(ours, peer, options.frames)
            for callers in map(int, options.concurrency.split(",")):
                compare(ours, peer, callers, options)
            compare_first_bytes(ours, peer, options)
            compare_with_engine(ours, model, codec, options)


def write_folders(place: Path) -> tuple[Path, Path]:
    """The folders of the model and of the codec."""
    template = Template(tokens.train_text_tokenizer(TEXTS, 400), BOOKS, CODES)
    speaking_model(SMALL).save_pretrained(place / "model", template.tokenizer)
    torch.manual_seed(0)
    write_tokenizer(place / "codec")
    return place / "model", place / "codec"


def speech_body(text: str, frames: int) -> dict[str, Any]:
    plain = {"temperature": 0, "text_guidance": 1, "speaker_guidance": 1, "response_format": "pcm"}
    return {"model": "toy", "input": text, "max_new_tokens": frames, **plain}


# ------------------------------------------------------------------------------------------------- sides


def serve_plain_route(folder: Path, codec_folder: Path, frames: int) -> None:
    """The peer: a route that generates and decodes by transformers' classes, one request at a time."""
    import uvicorn
    from fastapi import FastAPI, Response
    from transformers import HiggsAudioV2TokenizerModel

    template = Template(load_text_tokenizer(folder), BOOKS, CODES)
    model = transformers_model(DualFFN.from_pretrained(folder), template)
    codec, guard, app = (
        HiggsAudioV2TokenizerModel.from_pretrained(codec_folder).eval(),
        threading.Lock(),
        FastAPI(),
    )

    @app.post(SPEECH)
    def speech(body: dict[str, Any]) -> Response:
        with guard, torch.inference_mode():
            (codes_KT,) = generate(model, template, [request(body["input"], frames)], frames)
            samples_1N = codec.decode(codes_KT.clamp(max=CODES - 1)[None]).audio_values[0]
        return Response(pcm16(samples_1N), media_type="audio/pcm")

    listener = uvicorn.Config(app, port=0, log_level="critical").bind_socket()
    print(f"http://127.0.0.1:{listener.getsockname()[1]}/v1", flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="critical")).run(sockets=[listener])


def server_environment() -> dict[str, str]:
    """The environment of a server in one thread."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}


@contextmanager
def running(command: Sequence[str]) -> Iterator[Side]:
    """A server in one thread, from the line with its address on."""
    process = subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=server_environment(),
    )
    try:
        assert process.stdout is not None
        addresses = (re.match(r"(http://\S+)/v1", line) for line in process.stdout)
        match = next((match for match in addresses if match), None)
        if match is None:
            raise SystemExit(f"{' '.join(command)} ended with status {process.wait()}")
        yield Side(match[1], psutil.Process(process.pid))
    finally:
        process.terminate()
        process.wait()


# ---------------------------------------------------------------------------------------------- measures


def check_equal(ours: Side, peer: Side, frames: int) -> None:
    """Raises: SystemExit: the sound of both differs before the last K frames."""
    for text in TEXTS[:3]:
        sounds = [np.frombuffer(side.say(text, frames), "<i2").astype(int) for side in (ours, peer)]
        length = round(len(sounds[1]) * (frames - 2 * BOOKS) / frames)
        if (difference := np.abs(sounds[0][:length] - sounds[1][:length]).max()) > 4:
            raise SystemExit(f"{text!r}: the sound of both differs by {difference} of 32768")


def compare(ours: Side, peer: Side, callers: int, options: argparse.Namespace) -> None:
    """Seconds of sound per CPU-second with so many callers at once."""
    texts = [TEXTS[number % len(TEXTS)] for number in range(max(4, 2 * callers))]
    rates: dict[str, list[float]] = {"ours": [], "peer": []}
    clocks: dict[str, list[float]] = {"ours": [], "peer": []}
    for turn in range(options.rounds + 1):
        for name, side in (("ours", ours), ("peer", peer)):
            before, began = side.cpu_seconds(), time.perf_counter()
            with ThreadPoolExecutor(callers) as pool:
                list(pool.map(lambda text, side=side: side.say(text, options.frames), texts))
            if turn:
                sound_s = len(texts) * options.frames / FRAME_RATE
                rates[name].append(sound_s / (side.cpu_seconds() - before))
                clocks[name].append(sound_s / (time.perf_counter() - began))
    print_row(
        "serve",
        f"speech, {callers} callers",
        statistics.median(rates["ours"]),
        statistics.median(rates["peer"]),
        "seconds of sound per CPU-second of the server",
        more_is_better=True,
        digits=2,
        by_the_clock=[round(statistics.median(clocks[name]), 2) for name in ("ours", "peer")],
        frames=options.frames,
        rounds=options.rounds,
    )


def compare_first_bytes(ours: Side, peer: Side, options: argparse.Namespace) -> None:
    """Milliseconds to the first bytes of a stream, and to those of the whole answer of the route."""

    def first_ms(side: Side, **more: Any) -> float:
        began = time.perf_counter()
        body = speech_body(TEXTS[1], options.frames) | more
        with httpx.stream("POST", side.address + SPEECH, json=body, timeout=PATIENCE_S) as answer:
            next(answer.iter_raw())
            return 1000 * (time.perf_counter() - began)

    sides: dict[str, Callable[[], float]] = {
        "ours": lambda: first_ms(ours, stream_format="audio"),
        "peer": lambda: first_ms(peer),
    }
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(2 * options.rounds + 1):
        for name, measure in sides.items():
            times[name].append(measure())
    ours_ms, peer_ms = (statistics.median(times[name][1:]) for name in ("ours", "peer"))
    print_row("serve", "first bytes", ours_ms, peer_ms, "ms", digits=1, frames=options.frames)


def compare_with_engine(ours: Side, model: Path, codec_folder: Path, options: argparse.Namespace) -> None:
    """CPU-seconds of 8 answers side by side: in process, and by the server; `peer` is the engine."""
    dual_ffn, codec = DualFFN.from_pretrained(model), load_codec(codec_folder)
    template = Template(load_text_tokenizer(model), BOOKS, CODES)
    requests = [request(text, options.frames) for text in TEXTS]
    engine = Engine.sized_for(dual_ffn, template, requests)

    def in_process() -> float:
        began = time.process_time()
        for answer in engine.run(requests):
            pcm16(codec.decode(answer.codes_KT))
        return time.process_time() - began

    def by_server() -> float:
        before = ours.cpu_seconds()
        with ThreadPoolExecutor(len(TEXTS)) as pool:
            list(pool.map(lambda text: ours.say(text, options.frames), TEXTS))
        return ours.cpu_seconds() - before

    seconds: dict[str, list[float]] = {"ours": [], "peer": []}
    for _ in range(options.rounds + 1):
        seconds["ours"].append(by_server())
        seconds["peer"].append(in_process())
    ours_s, peer_s = (statistics.median(seconds[name][1:]) for name in ("ours", "peer"))
    case = "what the server costs, 8 answers (peer: the engine in process)"
    print_row("serve", case, ours_s, peer_s, "CPU-seconds")


if __name__ == "__main__":
    main()
