"""First sound and cost of a stream at 100 M parameters: `audiollm serve`, and `pocket-tts serve` beside it.

    python benchmarks/serve_pocket.py --pocket .venv/pocket-tts [--full] [--frames 100] [--requests 5] [--dtype int8]

Both servers are processes on loopback, each in one thread; they take turns. Both models have random weights: ours a
DualFFN of 95 M with the `native` tokenizer of 10 M, theirs the published English shape with a vocabulary of letters.
They differ in all else (theirs predicts latents at 12.5 Hz by a flow of one step, ours 8 codebooks at 25 Hz), so there
is no ratio: milliseconds from the request to the first samples behind the header, and CPU-seconds of the server per
second of sound. Aim: our first sound below 50 ms.
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import soundfile
import torch
import yaml
from llm_generate import TEXTS, speaking_model
from measure import bench_parser, parse_options, print_row
from serve import BOOKS, CODES, PATIENCE_S, SPEECH, Side, running, server_environment, speech_body
from tokenizers import Tokenizer, models

from audiollm.data.chat.template import Template
from audiollm.data.text import tokenizer as tokens
from audiollm.models.dual_ffn import DualFFNConfig
from tokenizer.native.model import AudioTokenizer, TokenizerConfig

OURS = DualFFNConfig(
    vocab_size=512, hidden_size=768, num_layers=8, num_heads=12, num_kv_heads=12, intermediate_size=2048
)
WAV_HEADER_BYTES, BYTES_PER_S = 44, 2 * 24_000
NEVER = 1e9
"""Their threshold of the end: each answer has the length that they expect of its text."""


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument(
        "--pocket", type=Path, required=True, help="where pip installed pocket-tts (--target)"
    )
    parser.add_argument("--frames", type=int, default=100)
    parser.add_argument("--requests", type=int, default=5)
    parser.add_argument(
        "--dtype", default="fp32", help="how our linear layers are held in memory: fp32, int8, int4"
    )
    options = parse_options(parser, requests=20)
    with tempfile.TemporaryDirectory() as place:
        model, codec = write_ours(Path(place))
        config, voice = write_theirs(Path(place), options.pocket)
        serve = ["-m", "audiollm.commands.cli", "serve", f"toy={model}", "--codec", str(codec), "--port", "0"]
        serve += ["--dtype", options.dtype]
        with running(serve) as ours, pocket_server(options.pocket, config, voice) as theirs:
            figures: dict[str, list[tuple[float, float]]] = {"ours": [], "peer": []}
            for number in range(options.requests + 1):
                text = TEXTS[number % len(TEXTS)]
                body = speech_body(text, options.frames) | {"stream_format": "audio"}
                measurements = {
                    "ours": listen(ours, SPEECH, 0, json=body),
                    "peer": listen(theirs, "/tts", WAV_HEADER_BYTES, data={"text": text}),
                }
                for name, figure in measurements.items():
                    figures[name] += [figure] if number else []
    for column, (case, unit) in enumerate((("first sound", "ms"), ("a stream", "CPU-s per second of sound"))):
        mine, other = (statistics.median(each[column] for each in figures[name]) for name in ("ours", "peer"))
        print_row(
            "serve_pocket", f"{case}, {options.dtype}", mine, None, unit, pocket_tts=round(other, 3), digits=3
        )


def listen(side: Side, path: str, header_bytes: int, **body: Any) -> tuple[float, float]:
    """Milliseconds to the first samples, and CPU-seconds per second of sound."""
    before_s, began, received, first_s = side.cpu_seconds(), time.perf_counter(), 0, 0.0
    with httpx.stream("POST", side.address + path, timeout=PATIENCE_S, **body) as answer:
        answer.raise_for_status()
        for piece in answer.iter_bytes():
            received += len(piece)
            if not first_s and received > header_bytes:
                first_s = time.perf_counter() - began
    sound_s = (received - header_bytes) / BYTES_PER_S
    return 1000 * first_s, (side.cpu_seconds() - before_s) / sound_s


def write_ours(place: Path) -> tuple[Path, Path]:
    """The folders of our model and of its codec."""
    template = Template(tokens.train_text_tokenizer(TEXTS, 400), BOOKS, CODES)
    speaking_model(OURS).save_pretrained(place / "model", template.tokenizer)
    torch.manual_seed(0)
    AudioTokenizer(TokenizerConfig(harmonic_source=True)).save_pretrained(place / "codec")
    return place / "model", place / "codec"


def write_theirs(place: Path, installed: Path) -> tuple[Path, Path]:
    """Their English configuration without weights and with a vocabulary of letters, and a voice of noise."""
    settings = yaml.safe_load((installed / "pocket_tts" / "config" / "english.yaml").read_text())
    del settings["weights_path"], settings["weights_path_without_voice_cloning"]
    settings["default_eos_threshold"] = NEVER
    table = settings["flow_lm"]["lookup_table"]
    vocabulary = {"<unk>": 0, **{chr(32 + number): number + 1 for number in range(95)}}
    vocabulary |= {f"piece {number}": number for number in range(len(vocabulary), table["n_bins"])}
    table["tokenizer_path"] = str(place / "letters.json")
    Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>")).save(table["tokenizer_path"])
    (place / "pocket.yaml").write_text(yaml.safe_dump(settings))
    noise_N = 0.05 * torch.randn(3 * 24_000, generator=torch.Generator().manual_seed(0))
    soundfile.write(place / "voice.wav", noise_N.numpy(), 24_000)
    return place / "pocket.yaml", place / "voice.wav"


@contextmanager
def pocket_server(installed: Path, config: Path, voice: Path) -> Iterator[Side]:
    """Their published server in one thread, once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--config", str(config), "--default-voice", str(voice), "--port", str(port)]
    process = subprocess.Popen(
        [sys.executable, "-m", "pocket_tts", "serve", *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={
            **server_environment(),
            "PYTHONPATH": os.pathsep.join([str(installed), os.environ.get("PYTHONPATH", "")]),
        },
    )
    try:
        side, deadline = Side(f"http://127.0.0.1:{port}", psutil.Process(process.pid)), time.monotonic() + 120
        while True:
            try:
                if httpx.get(side.address + "/health").is_success:
                    break
            except httpx.TransportError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"pocket-tts does not answer: status {process.poll()}") from None
                time.sleep(0.2)
        yield side
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    main()
