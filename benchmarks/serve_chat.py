"""Tokens per CPU-second of chats: `audiollm serve` against `transformers serve` on the same folder.

    python benchmarks/serve_chat.py [--full] [--tokens 64] [--rounds 3] [--concurrency 1,16]

Server and clients are processes on loopback, each server in one thread; the sides take turns, and CPU-seconds are those
of the server's process. Both open one folder: a Llama of random weights at 256 x 6 with a vocabulary of words, whose
special tokens are never the likeliest. Greedy; the answers must be equal, and each has all its tokens.

Bars: 1.2 times the tokens per CPU-second at one caller, 2 at 16. Beside them, without a bar: the same against
`transformers serve --continuous-batching`.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch
from llm_generate import TEXTS
from measure import bench_parser, parse_options, print_row
from serve import PATIENCE_S, Side, running, server_environment

from audiollm.data.text import tokenizer as tokens
from audiollm.models.processor_files import chat_template, save_tokenizer

CHAT = "/v1/chat/completions"
WORDS, START_TIMEOUT_S = 2_000, 180.0
PEERS: dict[str, list[str]] = {"": [], " against continuous batching": ["--continuous-batching"]}
"""Ways of the peer: what a case's name says of it, and its flags."""


@dataclass(frozen=True)
class ChatSide:
    """A running server, and the name by which it knows the model."""

    side: Side
    model: str

    def answer(self, text: str, max_tokens: int) -> str:
        """The answer to a text. Raises: SystemExit: it has fewer tokens."""
        body = {
            "model": self.model, "messages": [{"role": "user", "content": text}], "temperature": 0,
            "max_tokens": max_tokens,
        }  # fmt: skip
        reply = httpx.post(self.side.address + CHAT, json=body, timeout=PATIENCE_S)
        reply.raise_for_status()
        choice = reply.json()["choices"][0]
        if choice["finish_reason"] != "length":
            raise SystemExit(f"{self.model} ended before {max_tokens} tokens: {choice}")
        return str(choice["message"]["content"]).strip()


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", default="1,16")
    options = parse_options(parser, rounds=7)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "llm"
        write_language_model(folder)
        serve = ["-m", "audiollm.commands.cli", "serve", f"toy={folder}", "--port", "0", "--slots", "32"]
        with running(serve) as our_side:
            for label, flags in PEERS.items():
                with transformers_server(folder, flags) as peer_side:
                    ours, peer = ChatSide(our_side, "toy"), ChatSide(peer_side, str(folder))
                    check_equal_answers(ours, peer, options.tokens)
                    for callers in map(int, options.concurrency.split(",")):
                        compare_chats(ours, peer, f"chat{label}, {callers} callers", callers, options)


def write_language_model(folder: Path) -> None:
    """A Llama of random weights that both servers open; no special token is ever the likeliest."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    folder.mkdir(parents=True)
    vocabulary = tokens.train_text_tokenizer(TEXTS, WORDS)
    special = {
        token: vocabulary.token_to_id(token) for token in tokens.HEADER_STYLES["llama3"].special_tokens
    }
    config = LlamaConfig(
        vocab_size=vocabulary.get_vocab_size(), hidden_size=256, intermediate_size=1024, num_hidden_layers=6,
        num_attention_heads=8, num_key_value_heads=4, head_dim=32, max_position_embeddings=1024,
        bos_token_id=special[tokens.BEGIN_OF_TEXT], eos_token_id=special[tokens.END_OF_TURN],
        pad_token_id=special[tokens.PAD], tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight[list(special.values())] = 0.0
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    model.save_pretrained(folder)
    save_tokenizer(folder, vocabulary)
    opened = chat_template("llama3").replace(tokens.AUDIO_OUT_BOS + "' }}{%- endif %}", "' }}{%- endif %}")
    (folder / "chat_template.jinja").write_text(opened)


@contextmanager
def transformers_server(folder: Path, flags: list[str]) -> Iterator[Side]:
    """`transformers serve` in one thread, once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        "-m",
        "transformers.cli.transformers",
        "serve",
        str(folder),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    process = subprocess.Popen(
        [sys.executable, *command, "--device", "cpu", *flags],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=server_environment(),
    )
    try:
        side, began = Side(f"http://127.0.0.1:{port}", psutil.Process(process.pid)), time.perf_counter()
        while True:
            try:
                httpx.get(side.address + "/health", timeout=5).raise_for_status()
                break
            except httpx.HTTPError:
                if process.poll() is not None or time.perf_counter() - began > START_TIMEOUT_S:
                    raise SystemExit(
                        "transformers serve does not start: pip install 'transformers[serving]'"
                    ) from None
                time.sleep(0.5)
        yield side
    finally:
        process.terminate()
        process.wait()


def check_equal_answers(ours: ChatSide, peer: ChatSide, max_tokens: int) -> None:
    """Raises: SystemExit: the servers give other answers."""
    for text in TEXTS:
        answers = [side.answer(text, max_tokens) for side in (ours, peer)]
        if answers[0] != answers[1]:
            raise SystemExit(f"answers to {text!r} differ: {answers}")


def compare_chats(
    ours: ChatSide, peer: ChatSide, case: str, callers: int, options: argparse.Namespace
) -> None:
    """Tokens per CPU-second with so many callers at once."""
    texts = [TEXTS[number % len(TEXTS)] for number in range(max(4, callers))]
    rates: dict[str, list[float]] = {"ours": [], "peer": []}
    clocks: dict[str, list[float]] = {"ours": [], "peer": []}
    for turn in range(options.rounds + 1):
        for name, chat in (("ours", ours), ("peer", peer)):
            before, began = chat.side.cpu_seconds(), time.perf_counter()
            with ThreadPoolExecutor(callers) as pool:
                list(pool.map(lambda text, chat=chat: chat.answer(text, options.tokens), texts))
            if turn:
                count = len(texts) * options.tokens
                rates[name].append(count / (chat.side.cpu_seconds() - before))
                clocks[name].append(count / (time.perf_counter() - began))
    medians: dict[str, Any] = {name: statistics.median(rates[name]) for name in rates}
    print_row(
        "serve_chat",
        case,
        medians["ours"],
        medians["peer"],
        "tokens per CPU-second of the server",
        more_is_better=True,
        digits=1,
        by_the_clock=[round(statistics.median(clocks[name]), 1) for name in ("ours", "peer")],
        tokens=options.tokens,
        rounds=options.rounds,
    )


if __name__ == "__main__":
    main()
