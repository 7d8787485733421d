"""Answers of an audio LLM of transformers: side by side in the engine of `audiollm serve`, against one after the other.

    python benchmarks/serve_listeners.py [--full] [--callers 8] [--tokens 64] [--rounds 3]

A thinker of Qwen2.5-Omni with random weights at 256 x 6, in one thread: each caller asks about a recording of its own,
of 2 to 6 s. Both sides begin with the recordings and end with the words; they take turns in one process. The peer is
`generate` for one request after the other. Greedy answers must be equal, and each has all its tokens.

Beside it, by the clock: the time to the last word of a request of 8 tokens that comes after all the others. No bars.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from llm_generate import TEXTS
from measure import bench_parser, in_turns, parse_options, print_row

from audiollm.audio import Waveform
from audiollm.families.answering import AnswerRequest
from audiollm.families.listener.answering import ListenerAnswers
from audiollm.generation.engine.request import Finished
from audiollm.generation.engine.step_engine import StepEngine
from audiollm.models.audio_llms.new_thinker import NewThinkerConfig, write_thinker
from audiollm.serve.limits import ServeLimits

RATE = 16_000
SHORT_TOKENS = 8
"""Tokens of the request that comes last."""


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--callers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    options = parse_options(parser, rounds=7)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_thinker(folder, thinker_config(folder), TEXTS)
        model = ListenerAnswers(folder)
        model._model.generation_config.min_new_tokens = options.tokens  # no answer ends before
        limits = ServeLimits()
        engine = model.step_engine(limits.slots, limits.max_length, limits.prefill_positions)
        assert engine is not None
        for temperature in (0.0, 1.0):
            compare_sides(model, engine, temperature, options)
        model._model.generation_config.min_new_tokens = None
        compare_short(model, engine, options)


def thinker_config(folder: Path) -> NewThinkerConfig:
    """The size of the model; `samples` is not read."""
    return NewThinkerConfig.model_construct(
        samples=folder, vocabulary=2_000, width=256, layers=6, encoder_width=128, audio_layers=3, vision_layers=1,
        mel_bins=80, window_s=10, min_pixels=56 * 56, max_pixels=224 * 224, seed=0,
    )  # fmt: skip


def requests_of(callers: int, tokens: int, temperature: float) -> list[AnswerRequest]:
    """Questions about noise of unequal lengths."""
    generator = torch.Generator().manual_seed(0)
    requests = []
    for number in range(callers):
        samples = RATE * 2 + RATE * 4 * number // max(callers - 1, 1)
        recording = Waveform(0.1 * torch.randn(1, samples, generator=generator), RATE)
        question = TEXTS[number % len(TEXTS)]
        requests.append(AnswerRequest([("user", [recording, question])], number, temperature, 1.0, tokens))
    return requests


def answer_side_by_side(engine: StepEngine, requests: list[AnswerRequest]) -> list[str]:
    """Give the engine all requests at once, and return their answers."""
    numbers = [engine.submit(request) for request in requests]
    texts: dict[int, str] = {}
    while engine.acting:
        texts |= {event.request: event.answer.text for event in engine.step() if isinstance(event, Finished)}
    return [texts[number].strip() for number in numbers]


def compare_sides(
    model: ListenerAnswers, engine: StepEngine, temperature: float, options: argparse.Namespace
) -> None:
    """Tokens per CPU-second; greedy answers and drawn ones."""
    requests = requests_of(options.callers, options.tokens, temperature)
    expected = [answer.text for answer in model.answer(requests)]
    equal = sum(
        text == alone
        for text, alone in zip(answer_side_by_side(engine, requests), expected, strict=True)
    )  # fmt: skip
    if temperature == 0 and equal < len(requests):
        raise SystemExit(f"{len(requests) - equal} of {len(requests)} greedy answers differ")
    clocks: dict[str, list[float]] = {"ours": [], "peer": []}

    def timed(name: str) -> None:
        began = time.perf_counter()
        if name == "ours":
            answer_side_by_side(engine, requests)
        else:
            model.answer(requests)
        clocks[name].append(time.perf_counter() - began)

    seconds = in_turns({"ours": lambda: timed("ours"), "peer": lambda: timed("peer")}, options.rounds)
    print_row(
        "serve_listeners", f"{options.callers} callers, temperature {temperature:g}",
        statistics.median(seconds["ours"]), statistics.median(seconds["peer"]), "CPU-seconds",
        by_the_clock=[round(statistics.median(clocks[name][1:]), 3) for name in ("ours", "peer")],
        equal_answers=equal, tokens=options.tokens, rounds=options.rounds,
    )  # fmt: skip


def compare_short(model: ListenerAnswers, engine: StepEngine, options: argparse.Namespace) -> None:
    """Seconds until a short request that comes after the others is answered."""
    requests = requests_of(options.callers, options.tokens, 1.0)
    short = requests_of(1, SHORT_TOKENS, 0.0)
    seconds: dict[str, list[float]] = {"ours": [], "peer": []}
    for _ in range(options.rounds):
        for request in requests[1:]:
            engine.submit(request)
        began, number = time.perf_counter(), engine.submit(short[0])
        while engine.acting:
            if any(isinstance(event, Finished) and event.request == number for event in engine.step()):
                seconds["ours"].append(time.perf_counter() - began)
        began = time.perf_counter()
        model.answer([*requests[1:], *short])
        seconds["peer"].append(time.perf_counter() - began)
    print_row(
        "serve_listeners", f"{SHORT_TOKENS} tokens beside {options.callers - 1} of {options.tokens}",
        statistics.median(seconds["ours"]), statistics.median(seconds["peer"]), "seconds by the clock",
        rounds=options.rounds,
    )  # fmt: skip


if __name__ == "__main__":
    main()
