"""A server on a real socket of this machine, in a thread of the test's process."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import torch

from audiollm.audio import encode_bytes
from audiollm.generation.service.service import GenerationService
from audiollm.generation.speaking.generator import Generator
from audiollm.serve.app_state import AppState
from audiollm.serve.gate import ServerState
from audiollm.serve.limits import ServeLimits
from audiollm.serve.model import ServerModel, serve_generator
from audiollm.serve.server import Wyoming, bound_listener, make_server
from audiollm.serve.voices import VoiceStore
from tests.audiollm.generation.toy_speech import RATE, a_voice, talkative_generator

PATIENCE_S = 60.0


@dataclass
class RunningServer:
    """A server that answers."""

    state: AppState
    uvicorn: Any
    port: int
    generator: Generator
    wyoming_port: int

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, **options: Any) -> openai.OpenAI:
        """The published client."""
        return openai.OpenAI(**self.client_options(**options))

    def client_options(self, **options: Any) -> dict[str, Any]:
        settings = {
            "api_key": "unused",
            "base_url": f"{self.address}/v1",
            "max_retries": 0,
            "timeout": PATIENCE_S,
        }
        return {**settings, **options}

    def post(self, path: str, **options: Any) -> httpx.Response:
        return httpx.post(self.address + path, timeout=PATIENCE_S, **options)

    def engine(self) -> Any:
        """The engine of the first model."""
        return self.state.service.lanes[0]._engine

    def is_idle(self) -> bool:
        """Whether all jobs, slots and streams are as at the start."""
        service = self.state.service
        return not (
            service.num_jobs or self.state.open_streams or self.engine().busy or service.lanes[0].jobs
        )


@contextmanager
def running_server(
    limits: ServeLimits | None = None,
    voices: VoiceStore | None = None,
    more_models: Any = (),
    interpreters: Any = (),
    **gate: Any,
) -> Iterator[RunningServer]:
    """Serve the toy that speaks for seconds, by the name `toy`.

    Args:
        more_models: makes further models: functions of the service.
        interpreters: models of streams.
        gate: fields of `ServerState`.
    """
    limits = limits or ServeLimits(max_length=4096)
    service, generator = GenerationService(limits.queue), talkative_generator()
    models: dict[str, ServerModel] = {"toy": serve_generator(generator, "toy", service, limits)}
    for make in more_models:
        model = make(service)
        models[model.name] = model
    by_name = {interpreter.name: interpreter for interpreter in interpreters}
    state = AppState(
        service, models, voices or VoiceStore(), limits, ServerState(**gate), interpreters=by_name
    )
    listener = bound_listener("127.0.0.1", 0)
    wyoming = Wyoming(bound_listener("127.0.0.1", 0), ["en"])
    uvicorn = make_server(state, wyoming)
    thread = threading.Thread(target=lambda: asyncio.run(uvicorn.serve(sockets=[listener])), daemon=True)
    thread.start()
    wait_for(lambda: uvicorn.started)
    wyoming_port = wyoming.listener.getsockname()[1]
    yield RunningServer(state, uvicorn, listener.getsockname()[1], generator, wyoming_port)
    uvicorn.should_exit = True
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    service.close()
    listener.close()


def wait_for(condition: Callable[[], Any]) -> None:
    limit = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


def voice_wav(seconds: float = 2.0, level: float = 0.3) -> bytes:
    return encode_bytes(a_voice(seconds, level).samples_CN, RATE)


def streamed_sound(generator: Generator, text: str, **options: Any) -> torch.Tensor:
    return torch.cat([piece.samples_CN for piece in generator.stream(text, **options)], dim=1)
