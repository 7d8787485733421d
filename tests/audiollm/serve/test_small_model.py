"""A model of recipes/understanding/small behind the server: Whisper before SmolLM2, asked by published clients."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from wyoming.asr import Transcribe, Transcript
from wyoming.audio import AudioChunk, AudioStart, AudioStop
from wyoming.client import AsyncTcpClient

from audiollm.audio import load_bytes
from audiollm.audio.sound_encoder import encode_sound, pcm16
from audiollm.families.answering import AnsweringModel, AnswerRequest
from audiollm.families.registry import open_model_folder
from audiollm.models.audio_llms.inputs import TurnPart
from audiollm.serve.limits import ServeLimits
from audiollm.serve.model import load_served_model
from pipelines.annotate.synthesizers.choice import make_synthesizer
from tests.audiollm.serve.running import PATIENCE_S, RunningServer, running_server, wait_for
from tests.audiollm.serve.test_clients import refusal
from tests.audiollm.serve.test_realtime import encoded, talking
from tests.published_weights import SENTENCES, short_understanding

pytestmark = pytest.mark.slow
LIMITS = ServeLimits(max_length=2048, answer_tokens=40)
QUESTION = "Transcribe the speech."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return short_understanding(tmp_path_factory.mktemp("small")) / "train"


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    with running_server(
        LIMITS, more_models=[lambda service: load_served_model(folder, service, LIMITS, "small")]
    ) as s:
        yield s


@pytest.fixture(scope="module")
def model(folder: Path) -> AnsweringModel:
    return open_model_folder(folder).answering_model()


@pytest.fixture(scope="module")
def wavs() -> list[bytes]:
    """Sentences of a synthetic voice, at 16 kHz."""
    speaker = make_synthesizer("hibari")
    [voice] = speaker.pick_voices(1, 0)
    spoken = [speaker.speak(sentence, voice, rate=1.0, seed=0) for sentence in SENTENCES[:6]]
    return [encode_sound(torch.from_numpy(clip.samples_N)[None], clip.sample_rate, "wav") for clip in spoken]


def alone(model: AnsweringModel, parts: list[TurnPart]) -> str:
    return model.answer([AnswerRequest([("user", parts)], max_tokens=LIMITS.answer_tokens)])[0].text.strip()


def transcript(model: AnsweringModel, wav: bytes) -> str:
    return alone(model, [load_bytes(wav), QUESTION])


def heard_chat(wav: bytes, question: str) -> dict[str, Any]:
    audio = {"data": base64.b64encode(wav).decode(), "format": "wav"}
    content = [{"type": "input_audio", "input_audio": audio}, {"type": "text", "text": question}]
    return {
        "model": "small",
        "messages": [{"role": "user", "content": content}],
        "temperature": 0.0,
        "max_tokens": 40,
    }


def test_transcripts_in_every_form(server: RunningServer, model: AnsweringModel, wavs: list[bytes]) -> None:
    create, text = server.client().audio.transcriptions.create, transcript(model, wavs[0])
    seconds, file = load_bytes(wavs[0]).duration_s, ("a.wav", wavs[0])
    assert text and create(model="small", file=file).text == text
    assert create(model="small", file=file, response_format="text") == f"{text}\n"
    verbose = create(model="small", file=file, response_format="verbose_json")
    assert verbose.text == text and verbose.duration == pytest.approx(seconds, abs=0.01)
    assert f"00:00:00,000 --> 00:00:0{seconds:.3f}".replace(".", ",") in create(
        model="small", file=file, response_format="srt"
    )
    assert create(model="small", file=file, response_format="vtt").startswith("WEBVTT\n")
    events = list(create(model="small", file=file, stream=True))
    assert events[-1].type == "transcript.text.done" and events[-1].text == text
    assert "".join(event.delta for event in events[:-1]).strip() == text


def test_chats_about_recordings_and_in_words(
    server: RunningServer, model: AnsweringModel, wavs: list[bytes]
) -> None:
    client = server.client()
    question = heard_chat(wavs[1], "How many people speak?")
    expected = alone(model, [load_bytes(wavs[1]), "How many people speak?"])
    answer = client.chat.completions.create(**question).choices[0]
    assert expected and str(answer.message.content) == expected
    chunks = list(client.chat.completions.create(**question, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks).strip() == expected
    words = client.chat.completions.create(
        model="small",
        messages=[{"role": "user", "content": "Name a colour."}],
        temperature=0.0,
        max_tokens=40,
    )
    assert str(words.choices[0].message.content) == alone(model, ["Name a colour."])
    spoken = refusal(client.audio.speech.create, model="small", input="hello", voice="default")
    assert spoken["code"] == "model_cannot_speak"


def test_many_at_once_get_what_each_gets_alone(
    server: RunningServer, model: AnsweringModel, wavs: list[bytes]
) -> None:
    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(**server.client_options()) as client:
            transcribe = client.audio.transcriptions.create
            texts = [transcribe(model="small", file=("a.wav", wav)) for wav in wavs]
            chats = [client.chat.completions.create(**heard_chat(wav, "What is said?")) for wav in wavs]
            heard, chatted = await asyncio.gather(asyncio.gather(*texts), asyncio.gather(*chats))
            return [entry.text for entry in heard] + [
                str(entry.choices[0].message.content) for entry in chatted
            ]

    expected = [transcript(model, wav) for wav in wavs]
    expected += [alone(model, [load_bytes(wav), "What is said?"]) for wav in wavs]
    assert asyncio.run(ask_all()) == expected
    wait_for(server.is_idle)


def test_a_turn_of_a_conversation(server: RunningServer, model: AnsweringModel, wavs: list[bytes]) -> None:
    clip = load_bytes(wavs[2])
    by_hand = {"input": {"turn_detection": None, "format": {"rate": clip.sample_rate}}}
    by_hand["input"]["transcription"] = {"model": "small"}
    with talking(server, "small") as talk:
        talk.configure(audio=by_hand)
        talk.send("input_audio_buffer.append", audio=encoded(clip.samples_CN))
        talk.send("input_audio_buffer.commit")
        written = talk.until("conversation.item.input_audio_transcription.completed")[-1]
        talk.send("response.create")
        response = talk.until("response.done")[-1].response
    assert response.status == "completed" and response.output[0].content[0].text
    assert written.transcript == transcript(model, wavs[2])


def test_wyoming_writes_down(server: RunningServer, model: AnsweringModel, wavs: list[bytes]) -> None:
    clip = load_bytes(wavs[3])

    async def talk() -> str:
        async with AsyncTcpClient("127.0.0.1", server.wyoming_port, read_timeout=PATIENCE_S) as client:
            shape = {"rate": clip.sample_rate, "width": 2, "channels": 1}
            for event in (
                Transcribe(name="small"), AudioStart(**shape), AudioChunk(audio=pcm16(clip.samples_CN), **shape),
                AudioStop(),
            ):  # fmt: skip
                await client.write_event(event.event())
            answer = await client.read_event()
            assert answer is not None and Transcript.is_type(answer.type), json.dumps(answer and answer.data)
            return Transcript.from_event(answer).text

    assert asyncio.run(talk()) == transcript(model, wavs[3])
