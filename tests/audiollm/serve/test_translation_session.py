"""`/v1/realtime/translations` with the published client: a model of streams translates while it hears."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from audiollm.audio.sound_encoder import pcm16
from audiollm.errors import StageError
from audiollm.interpret.live.live_model import LiveModel
from audiollm.interpret.live.live_session import LiveAction, LiveSession
from audiollm.serve.interpreters import ServedInterpreter
from audiollm.serve.limits import ServeLimits
from audiollm.serve.load import load_state
from audiollm.serve.translation_session import RATE
from tests.audiollm.interpret.test_live import noise, run_folder  # noqa: F401
from tests.audiollm.serve.running import PATIENCE_S, RunningServer, running_server, wait_for

LIMITS = ServeLimits(max_length=4096, streams=2)


@pytest.fixture(scope="module")
def live(run_folder: Path) -> LiveModel:  # noqa: F811
    return LiveModel.load(run_folder / "train")


@pytest.fixture(scope="module")
def server(live: LiveModel) -> Iterator[RunningServer]:
    models = [ServedInterpreter("ears", live, 0), ServedInterpreter("voice", replace(live, speaks=True), 0)]
    with running_server(LIMITS, interpreters=models) as running:
        yield running


@contextmanager
def connected(server: RunningServer, model: str) -> Iterator[Any]:
    client = server.client(websocket_base_url=f"ws://127.0.0.1:{server.port}/v1")
    options: Any = {"open_timeout": PATIENCE_S}
    with client.realtime.translations.connect(
        model=model, websocket_connection_options=options
    ) as connection:
        yield connection


def append(connection: Any, samples_1N: torch.Tensor) -> None:
    audio = base64.b64encode(pcm16(samples_1N)).decode()
    connection.send({"type": "session.input_audio_buffer.append", "audio": audio})


def events_to(connection: Any, kind: str) -> list[Any]:
    events: list[Any] = []
    while not events or events[-1].type not in (kind, "error"):
        events.append(connection.recv())
    return events


def as_sent(samples_1N: torch.Tensor) -> torch.Tensor:
    """The samples after their way as 16 bits."""
    values = torch.frombuffer(bytearray(pcm16(samples_1N)), dtype=torch.int16)
    return (values.float() / 32768)[None]


def alone(live: LiveModel, speaks: bool, samples_1N: torch.Tensor) -> tuple[list[str], bytes]:
    """What a session of the model says without a server: words, and sound at the rate of the clients."""
    session = replace(live, speaks=speaks).session()
    assert live.sample_rate == live.model.codec.sample_rate == RATE
    actions = [*session.hear(as_sent(samples_1N)), *session.finish()]
    words = [action.text.strip() for action in actions if action.text.strip()]
    return words, pcm16(torch.cat([action.samples_1N for action in actions], dim=1))


@pytest.mark.parametrize(("model", "speaks"), [("ears", False), ("voice", True)])
def test_a_stream_is_translated_as_without_a_server(
    server: RunningServer, live: LiveModel, model: str, speaks: bool
) -> None:
    talk_1N = noise(3.0, 3)
    words, sound = alone(live, speaks, talk_1N)
    assert words and (len(sound) > 0) == speaks
    with connected(server, model) as connection:
        (created,) = events_to(connection, "session.created")
        assert created.session.type == "translation" and created.session.model == model
        for piece_1N in talk_1N.split(4800, dim=1):
            append(connection, piece_1N)
        connection.send({"type": "session.close"})
        events = events_to(connection, "session.closed")
    deltas = [event for event in events if event.type == "session.output_transcript.delta"]
    assert "".join(event.delta for event in deltas) == " ".join(words)
    times = [event.elapsed_ms for event in deltas]
    assert times == sorted(times) and times[0] > 0 and times[-1] <= 3000
    sounds = [event for event in events if event.type == "session.output_audio.delta"]
    assert b"".join(base64.b64decode(event.delta) for event in sounds) == sound
    assert all((event.sample_rate, event.channels, event.format) == (RATE, 1, "pcm16") for event in sounds)
    wait_for(server.is_idle)


def test_two_streams_beside_each_other_are_as_alone(server: RunningServer, live: LiveModel) -> None:
    talks = [noise(2.0, seed) for seed in (5, 6)]
    with connected(server, "ears") as first, connected(server, "ears") as second:
        for pieces in zip(*(talk_1N.split(4800, dim=1) for talk_1N in talks), strict=True):
            for connection, piece_1N in zip((first, second), pieces, strict=True):
                append(connection, piece_1N)
        with connected(server, "ears") as third:
            refused = events_to(third, "error")[-1].error
            assert refused.code == "too_many_streams"
        texts = []
        for connection in (first, second):
            connection.send({"type": "session.close"})
            events = events_to(connection, "session.closed")
            texts.append("".join(event.delta for event in events if "transcript" in event.type))
    assert texts == [" ".join(alone(live, False, talk_1N)[0]) for talk_1N in talks]
    wait_for(server.is_idle)


def test_what_cannot_be_followed_is_refused_and_the_session_goes_on(server: RunningServer) -> None:
    with connected(server, "ears") as connection:
        events_to(connection, "session.created")
        for event, field in (
            ({"type": "session.update", "session": {"audio": {"output": {"language": "pt"}}}}, "session.audio.output"),
            ({"type": "session.update", "session": {"audio": {"input": {"transcription": {"model": "a"}}}}}, "session"),
            ({"type": "session.input_audio_buffer.append", "audio": "***"}, "audio"),
            ({"type": "response.create"}, "type"),
        ):  # fmt: skip
            connection.send({**event, "event_id": "mine"})
            error = events_to(connection, "error")[-1].error
            assert error.param.startswith(field) and error.event_id == "mine"
        connection.send({"type": "session.update", "session": {"audio": {"output": {"language": None}}}})
        assert events_to(connection, "session.updated")[-1].session.audio.output.language is None
        append(connection, noise(0.5, 1))
        connection.send({"type": "session.close"})
        assert events_to(connection, "session.closed")[-1].type == "session.closed"


@pytest.mark.parametrize(
    ("model", "problem"), [("nobody", "no model of streams"), ("toy", "was not trained on streams")]
)
def test_other_models_are_refused_by_name(server: RunningServer, model: str, problem: str) -> None:
    with connected(server, model) as connection:
        error = events_to(connection, "error")[-1].error
        assert problem in error.message and error.param == "model"


def test_a_model_of_streams_does_nothing_else(server: RunningServer) -> None:
    client = server.client()
    with pytest.raises(openai.BadRequestError, match="connect to /v1/realtime/translations") as refused:
        client.chat.completions.create(model="ears", messages=[{"role": "user", "content": "hello"}])
    assert refused.value.code == "model_interprets"
    toy, ears, _ = client.models.list()
    assert (toy.interprets, ears.interprets, ears.hears) == (False, True, False)  # type: ignore[attr-defined]


def test_a_stream_that_is_too_long_for_its_model_ends(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model without a sliding window keeps all that it heard: the client is told, and the stream's place is free."""

    def full(self: LiveSession, samples_1N: torch.Tensor) -> Iterator[LiveAction]:
        raise StageError("after 120 s: no room", "train the model with shape.sliding_window", 1)
        yield

    monkeypatch.setattr(LiveSession, "hear", full)
    with connected(server, "ears") as connection:
        events_to(connection, "session.created")
        append(connection, noise(0.5, 1))
        error = events_to(connection, "error")[-1].error
        assert error.code == "stream_too_long" and "sliding_window" in error.message
    wait_for(server.is_idle)


def test_who_leaves_is_forgotten(server: RunningServer) -> None:
    for _ in range(3):
        with connected(server, "ears") as connection:
            events_to(connection, "session.created")
            append(connection, noise(0.5, 1))
    wait_for(server.is_idle)


def test_folders_of_streams_are_loaded_as_interpreters(run_folder: Path) -> None:  # noqa: F811
    state = load_state([f"live={run_folder / 'train'}"], LIMITS)
    assert not state.models and state.interpreters["live"].live.chunk_frames == 6
    state.service.close()
