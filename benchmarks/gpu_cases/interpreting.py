"""The live loop of an interpreter: real-time factor, beside the peers', and the number of streams in real time."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

import interpret as bench
import torch
from gpu_cases.measuring import Scale, forget_peak, peak_gb, rounded, say, tell, try_option

from audiollm.devices import default_device
from audiollm.models.dual_ffn import DualFFN

STREAMS, TINY_STREAMS = (1, 8, 32, 64, 128), (1, 2)
CHUNK_S = bench.CHUNK_FRAMES / bench.FRAME_RATE
PEER_STEPS = {"text": 60, "speech": 48}
"""Steps of the peers that count, 12.5 a second of sound; Moshi speaks in half of them."""


def interpret(scale: Scale) -> None:
    """Answers in text, then in speech, each with one stream, beside a peer, and with more and more at once."""
    for kind in ("text", "speech"):
        shape = bench.Shape(64, 2, 1.0) if scale.tiny else bench.Shape(2048, 16)
        with default_device():
            model, template = bench.interpreter(shape, kind == "speech")
        loop = Loop(scale, kind, model.to(torch.bfloat16), template)
        one = loop.tell_chunk(1)
        try_option(scale, f"{loop.name}, peer", partial(compare, scale, loop.name, kind, shape, one))
        loop.tell_streams(TINY_STREAMS if scale.tiny else STREAMS)
        del model, loop
        forget_peak()


class Loop:
    """A model whose streams all hear a chunk at a time."""

    def __init__(self, scale: Scale, kind: str, model: DualFFN, template: Any) -> None:
        self._scale, self._kind, self._model, self._template = scale, kind, model, template
        self.name = f"interpret {kind} {scale.name}"
        self._is_late: dict[int, bool] = {}

    def tell_chunk(self, streams: int) -> float:
        """Print and return the seconds of a chunk of all streams, whose windows are full."""
        forget_peak()
        device, speaks = default_device(), self._kind == "speech"
        slowest, median = bench.device_chunks(self._model, self._template, streams, device, speaks)
        more: dict[str, Any] = {"slowest": rounded(slowest), "peak_gb": peak_gb()}
        more["sound_s_per_s"] = rounded(streams * CHUNK_S / median)
        tell(f"{self.name}, {streams} streams", "real-time factor", median / CHUNK_S, less=True, **more)
        self._is_late[streams] = slowest > CHUNK_S
        return median

    def tell_streams(self, counts: Sequence[int]) -> None:
        """More and more streams, as long as every chunk is done in its time."""
        most, ended, half = 0, "all were tried", self._scale.remaining_s / (2 if self._kind == "text" else 1)
        for streams in counts:
            if streams not in self._is_late:
                if self._scale.remaining_s < half / 3:
                    ended = "no time for more"
                    break
                try:
                    self.tell_chunk(streams)
                except torch.OutOfMemoryError as error:
                    say(f"{self.name}, {streams} streams: {error}")
                    ended = "out of memory"
                    break
            if self._is_late[streams]:
                ended = f"{streams} are too slow"
                break
            most = streams
        tell(f"{self.name}, real-time streams", "streams", most, ended=ended)


def compare(scale: Scale, case: str, kind: str, shape: bench.Shape, ours_s: float) -> None:
    """Kyutai's speech-to-text model beside answers in text, Moshi beside those in speech: one stream."""
    make = bench.kyutai_loop if kind == "text" else bench.moshi_loop
    run = make(shape, bench.Place(default_device(), torch.bfloat16, 4 if scale.tiny else 30))
    forget_peak()
    step_s = statistics.mean(run(4 if scale.tiny else PEER_STEPS[kind]))
    name = "Kyutai STT" if kind == "text" else "Moshi"
    factors = ours_s / CHUNK_S, step_s * bench.PEER_FRAME_RATE
    tell(f"{case}, 1 stream, against {name}", "real-time factor", *factors, less=True, peer_peak_gb=peak_gb())
