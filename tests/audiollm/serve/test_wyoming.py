"""The published client of the protocol Wyoming over a real socket: everyone gets what the model gives alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from typer.testing import CliRunner
from wyoming.asr import Transcribe, Transcript
from wyoming.audio import AudioChunk, AudioStart, AudioStop
from wyoming.client import AsyncTcpClient
from wyoming.error import Error
from wyoming.event import Event, Eventable
from wyoming.info import Describe, Info
from wyoming.ping import Ping, Pong
from wyoming.tts import (
    Synthesize,
    SynthesizeChunk,
    SynthesizeStart,
    SynthesizeStop,
    SynthesizeStopped,
    SynthesizeVoice,
)

from audiollm.audio.sound_encoder import pcm16
from audiollm.serve.limits import ServeLimits
from audiollm.serve.voices import Reference, VoiceStore
from tests.audiollm.generation.toy_speech import RATE, a_voice
from tests.audiollm.serve.running import PATIENCE_S, RunningServer, running_server, streamed_sound, wait_for
from tests.audiollm.serve.test_clients import echo_model

T = TypeVar("T")
LIMITS = ServeLimits(max_length=4096, answer_tokens=40, recording_s=5, text_characters=200)
ANNA = SynthesizeVoice(name="toy", speaker="anna")


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    voices = VoiceStore()
    voices.add("mine", Reference.of(a_voice(2.0), "one two", "en"), "It is a tone.")
    with running_server(LIMITS, voices, more_models=[echo_model]) as running:
        yield running


def converse(server: RunningServer, talk: Callable[[AsyncTcpClient], Awaitable[T]]) -> T:
    async def connect() -> T:
        async with AsyncTcpClient("127.0.0.1", server.wyoming_port, read_timeout=PATIENCE_S) as client:
            return await talk(client)

    return asyncio.run(connect())


async def ask(client: AsyncTcpClient, *events: Eventable, until: type[Eventable]) -> list[Event]:
    """Send events, and read answers until one of a kind, or an error."""
    for event in events:
        await client.write_event(event.event())
    answers = []
    while not answers or not (until.is_type(answers[-1].type) or Error.is_type(answers[-1].type)):
        answer = await client.read_event()
        assert answer is not None
        answers.append(answer)
    return answers


def sound_of(answers: list[Event]) -> bytes:
    assert AudioStart.is_type(answers[0].type) and answers[0].data["rate"] == RATE
    assert (answers[0].data["width"], answers[0].data["channels"]) == (2, 1)
    return b"".join(AudioChunk.from_event(answer).audio for answer in answers[1:-1] if answer.payload)


def test_models_voices_and_speakers_are_described(server: RunningServer) -> None:
    async def talk(client: AsyncTcpClient) -> tuple[Info, Pong]:
        (info,) = await ask(client, Describe(), until=Info)
        (pong,) = await ask(client, Ping("hello"), until=Pong)
        return Info.from_event(info), Pong.from_event(pong)

    info, pong = converse(server, talk)
    (voice,) = info.tts[0].voices
    assert (voice.name, voice.languages, pong.text) == ("toy", ["en"], "hello")
    assert voice.speakers is not None
    assert [speaker.name for speaker in voice.speakers] == ["anna", "bruno", "mine"]
    assert info.tts[0].supports_synthesize_streaming
    assert [model.name for model in info.asr[0].models] == ["toy", "echo"]


def test_a_text_is_said_as_the_model_says_it_alone(server: RunningServer) -> None:
    text = "One two three. Hello one."

    async def talk(client: AsyncTcpClient) -> tuple[list[Event], list[Event]]:
        return (
            await ask(client, Synthesize(text, ANNA), until=AudioStop),
            await ask(client, Synthesize(text, SynthesizeVoice(name="toy", speaker="mine")), until=AudioStop),
        )

    by_anna, by_mine = (sound_of(answers) for answers in converse(server, talk))
    assert by_anna == pcm16(streamed_sound(server.generator, text, speaker="anna"))
    reference = server.generator.voice(a_voice(2.0), "one two", "en")
    assert by_mine == pcm16(streamed_sound(server.generator, text, reference=reference))


def test_a_text_that_arrives_in_pieces_is_said_by_sentences(server: RunningServer) -> None:
    async def talk(client: AsyncTcpClient) -> list[Event]:
        await client.write_event(SynthesizeStart(ANNA).event())
        for piece in ("One tw", "o three. Hel", "lo hello."):
            await client.write_event(SynthesizeChunk(piece).event())
        first = await client.read_event()  # the first sentence is said before the text has ended
        assert first is not None
        repeated = Synthesize("One two three. Hello hello.", ANNA)  # for servers that know no pieces
        return [first, *await ask(client, repeated, SynthesizeStop(), until=SynthesizeStopped)]

    *answers, stopped = converse(server, talk)
    assert SynthesizeStopped.is_type(stopped.type) and AudioStop.is_type(answers[-1].type)
    sentences = [
        streamed_sound(server.generator, text, speaker="anna") for text in ("One two three.", "Hello hello.")
    ]
    assert sound_of(answers) == pcm16(torch.cat(sentences, dim=1))


@pytest.mark.parametrize("width", [1, 2, 4])
def test_a_recording_is_written_down(server: RunningServer, width: int) -> None:
    async def talk(client: AsyncTcpClient) -> Transcript:
        chunk = AudioChunk(16_000, width, 2, bytes(8000 * width) + bytes([100]) * 8000 * width)
        events = (Transcribe(name="echo", language="en"), AudioStart(16_000, width, 2), chunk, AudioStop())
        return Transcript.from_event((await ask(client, *events, until=Transcript))[-1])

    assert converse(server, talk).text == "0.5 s Transcribe the speech. Language: en."


def test_a_mistake_is_answered_and_the_next_request_works(server: RunningServer) -> None:
    nobody = SynthesizeVoice(name="toy", speaker="nobody")
    mistakes: list[tuple[tuple[Eventable, ...], str]] = [
        ((Synthesize("hello", nobody),), "no such voice"),
        ((Synthesize("hello", SynthesizeVoice(name="bell")),), "no such model"),
        ((Synthesize("  ", ANNA),), "empty: give the words"),
        ((Synthesize("one " * 60, ANNA),), "at most 200"),
        ((SynthesizeStart(ANNA), SynthesizeChunk("one " * 60)), "more than 200"),
        ((AudioStop(),), "there is no recording"),
        ((AudioStart(16_000, 3, 1),), "1, 2 or 4 bytes"),
        ((AudioStart(8000, 2, 1), AudioChunk(8000, 2, 1, bytes(8000 * 2 * 6))), "longer than 5 s"),
        ((Transcribe(name="bell"), AudioChunk(8000, 2, 1, bytes(8000)), AudioStop()), "no such model"),
    ]  # fmt: skip

    async def talk(client: AsyncTcpClient) -> list[str]:
        texts = []
        for events, _ in mistakes:
            (answer,) = await ask(client, *events, until=Error)
            texts.append(Error.from_event(answer).text)
        await client.write_event(Event("synthesize", {"voice": {}}))
        answer = await client.read_event()
        assert answer is not None and "'text'" in Error.from_event(answer).text
        await client.write_event(Event("of-a-later-version"))
        assert sound_of(await ask(client, Synthesize("hello", ANNA), until=AudioStop))
        return texts

    for (_, expected), text in zip(mistakes, converse(server, talk), strict=True):
        assert expected in text
    wait_for(server.is_idle)
    requests = server.state.server.requests
    assert requests["wyoming:synthesize", 400] >= 4 and requests["wyoming:(other)", 400] >= 3


def test_what_is_no_event_ends_the_connection_and_nothing_else(server: RunningServer) -> None:
    many = [
        b"hello\n",
        b"[]\n",
        b"{}\n",
        b"x" * 100_000 + b"\n",
        b'{"type": 1}\n',
        json.dumps({"type": "audio-chunk", "payload_length": 10**12}).encode() + b"\n",
        json.dumps({"type": "describe", "data_length": -1}).encode() + b"\n",
        json.dumps({"type": "describe", "data_length": 4}).encode() + b"\n....",
    ]

    async def send(content: bytes) -> Event | None:
        client = AsyncTcpClient("127.0.0.1", server.wyoming_port, read_timeout=PATIENCE_S)
        await client.connect()
        assert client._writer is not None
        client._writer.write(content)
        answer = await client.read_event()
        assert await client.read_event() is None  # the connection is closed
        await client.disconnect()
        return answer

    for content in many:
        answer = asyncio.run(send(content))
        assert answer is not None and answer.data["code"] == "bad_event", content
    assert converse(server, lambda client: ask(client, Describe(), until=Info))


def test_who_leaves_ends_his_request(server: RunningServer) -> None:
    async def talk(client: AsyncTcpClient) -> None:
        await client.write_event(Synthesize("One two three. Hello hello hello. " * 5, ANNA).event())
        first = await client.read_event()
        assert first is not None and AudioStart.is_type(first.type)

    converse(server, talk)
    wait_for(server.is_idle)


def test_a_server_that_ends_answers_what_is_under_way_and_refuses_the_next() -> None:
    text = "One two three. Hello hello hello. " * 2
    with running_server(LIMITS) as server:

        async def talk(client: AsyncTcpClient) -> tuple[Event, bytes]:
            await client.write_event(Synthesize(text, ANNA).event())
            first = await client.read_event()
            assert first is not None
            server.state.server.is_draining = True
            answers = await ask(client, Synthesize("hello", ANNA), until=AudioStop)
            refusal = await client.read_event()
            assert refusal is not None
            return refusal, sound_of([first, *answers])

        refusal, sound = converse(server, talk)
        assert refusal.data["code"] == "draining"
        assert sound == pcm16(streamed_sound(server.generator, text.strip(), speaker="anna"))


def test_the_command_offers_it_on_this_machine_alone(tmp_path: Path) -> None:
    from audiollm.commands.cli import build_app

    help_text = CliRunner().invoke(build_app(), ["serve", "--help"], env={"COLUMNS": "200"}).output
    assert "--wyoming" in help_text and "on this machine alone" in " ".join(help_text.split())
