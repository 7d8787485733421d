"""Generation of speech: our engine against transformers' `generate`, and its steps as CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import llm_generate as bench
import torch
from gpu_cases.measuring import (
    FRAME_RATE,
    Scale,
    forget_peak,
    leave_out,
    mfu,
    peak_gb,
    rounded,
    tell,
    timed,
    try_option,
)

from audiollm.data.chat.template import Template
from audiollm.data.text import tokenizer as words
from audiollm.devices import default_device
from audiollm.generation.engine.engine import Engine
from audiollm.generation.engine.request import Request
from audiollm.models.dual_ffn import DualFFN
from audiollm.models.static_steps import StepKind

BATCHES, FRAMES = (1, 8, 64), 75
TINY_BATCHES, TINY_FRAMES = (1, 3), 10
UNIT = "audio frames per second"


def generate(scale: Scale) -> None:
    """Plain steps of all batches first, then the options, then the peer, and the wait for the first sound."""
    device, frames = default_device(), TINY_FRAMES if scale.tiny else FRAMES
    config = (
        replace(bench.SMALL, hidden_size=64, num_layers=2, intermediate_size=128)
        if scale.tiny
        else bench.BILLION
    )
    with device:
        model = bench.speaking_model(config).to(device, torch.bfloat16)
    learned = words.train_text_tokenizer(bench.TEXTS, 400)
    template = Template(learned, config.num_codebooks, config.codebook_size - 2)
    engines = Engines(scale, model, template, frames)
    batches = TINY_BATCHES if scale.tiny else BATCHES
    plain = {batch: engines.tell_rate(batch, "plain") for batch in batches}
    option: StepKind = "cuda_graph"
    if device.type == "cpu":
        leave_out(
            f"generate {scale.name}, steps cuda_graph", "no CUDA device: static shapes alone are measured"
        )
        option = "static"
    for batch in batches:
        case = f"generate {scale.name}, batch {batch}"
        try_option(scale, f"{case}, steps {option}", partial(engines.tell_rate, batch, option, plain[batch]))
    try_option(scale, f"generate {scale.name}, peer", partial(engines.compare, plain))
    try_option(scale, f"generate {scale.name}, first sound", engines.tell_first_sound)


class Engines:
    """Engines of one model, measured on batches of requests that all make the same number of frames."""

    def __init__(self, scale: Scale, model: DualFFN, template: Template, frames: int) -> None:
        self._scale, self._model, self._template, self._frames = scale, model, template, frames
        layers: Any = model.model.layers
        met = [part for layer in layers for part in (layer.self_attn, layer.audio_mlp)]
        weights = sum(weight.numel() for part in [*met, model.audio_lm_head] for weight in part.parameters())
        self._operations = 2 * weights
        """Operations of a frame; attention and the prompt, which are little beside them, do not count."""

    def tell_rate(self, batch: int, steps: StepKind, plain: float | None = None) -> float:
        """Print and return frames per second, prompts included."""
        requests = self._requests(batch)
        engine = Engine.sized_for(self._model, self._template, requests, steps=steps)
        forget_peak()
        seconds = timed(lambda number: engine.run(requests), self._scale.seconds(4), warm=1, min_calls=2)
        rate = batch * self._frames / seconds
        name = "" if plain is None else f", steps {steps}"
        self._tell(f"batch {batch}{name}", rate, plain=plain, peak_gb=peak_gb())
        return rate

    def compare(self, plain: dict[int, float]) -> None:
        """The same prompts through transformers, whose rows wait for one another."""
        with default_device():
            peer = bench.transformers_model(self._model, self._template)
        for batch, rate in plain.items():
            requests = self._requests(batch)

            def run(number: int, requests: list[Request] = requests) -> Any:
                return bench.generate(peer, self._template, requests, self._frames)

            forget_peak()
            seconds = timed(run, self._scale.seconds(4), warm=1, min_calls=1)
            peer_rate = batch * self._frames / seconds
            self._tell(f"batch {batch}, against transformers", rate, peer=peer_rate, peer_peak_gb=peak_gb())

    def tell_first_sound(self) -> None:
        """Milliseconds from a request to the first frame, and to the first samples of our tokenizer."""
        first = bench.first_sound(self._model, self._template, 1 if self._scale.tiny else 5)
        case = f"generate {self._scale.name}, first sound"
        tell(case, "ms", first["first sound ms"], less=True, first_frame_ms=first["first frame ms"])

    def _requests(self, batch: int) -> list[Request]:
        texts: Sequence[str] = [bench.TEXTS[number % len(bench.TEXTS)] for number in range(batch)]
        return [bench.request(text, self._frames) for text in texts]

    def _tell(self, case: str, rate: float, **more: Any) -> None:
        more |= {"sound_s_per_s": rounded(rate / FRAME_RATE), "mfu": mfu(self._operations, 1 / rate)}
        tell(f"generate {self._scale.name}, {case}", UNIT, rate, **more, frames=self._frames)
