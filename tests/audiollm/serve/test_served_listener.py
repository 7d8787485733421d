"""An audio LLM of transformers behind the server: chats and transcripts side by side, word by word."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from audiollm.audio import load_bytes
from audiollm.families.answering import AnsweringModel, AnswerRequest
from audiollm.families.answering_engine import AnsweringEngine
from audiollm.families.listener.answering_rows import ListenerEngine
from audiollm.families.registry import open_model_folder
from audiollm.generation.engine.step_engine import ThreadedEngine
from audiollm.models.audio_llms.inputs import Turn
from audiollm.serve.limits import ServeLimits
from audiollm.serve.model import load_served_model
from tests.audiollm.models.tiny_audio_llms import save_thinker, save_tiny
from tests.audiollm.serve.running import RunningServer, running_server, voice_wav, wait_for

LIMITS = ServeLimits(max_length=2048, answer_tokens=900, prefill_positions=32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_thinker(tmp_path_factory.mktemp("ears"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    def make(service: Any) -> Any:
        return load_served_model(folder, service, LIMITS, "ears")

    with running_server(LIMITS, more_models=[make]) as running:
        yield running


@pytest.fixture(scope="module")
def model(folder: Path) -> AnsweringModel:
    return open_model_folder(folder).answering_model()


def chat(number: int) -> dict[str, Any]:
    """A chat of the published client, with a recording in every second one."""
    content: list[dict[str, Any]] = [{"type": "text", "text": "What is said? " * (1 + number)}]
    if number % 2:
        data = base64.b64encode(voice_wav(1.1 + number / 10)).decode()
        content.append({"type": "input_audio", "input_audio": {"data": data, "format": "wav"}})
    return {
        "model": "ears", "messages": [{"role": "user", "content": content}], "seed": number,
        "temperature": [0.0, 1.0, 0.7][number % 3], "top_p": [1.0, 0.9][number // 4], "max_tokens": 10 + 5 * number,
    }  # fmt: skip


def alone(model: AnsweringModel, number: int) -> str:
    asked = chat(number)
    (message,) = asked["messages"]
    parts: list[Any] = [message["content"][0]["text"]]
    if number % 2:
        parts.append(load_bytes(voice_wav(1.1 + number / 10)))
    turns: list[Turn] = [("user", parts)]
    request = AnswerRequest(turns, number, asked["temperature"], asked["top_p"], asked["max_tokens"])
    return model.answer([request])[0].text


def is_idle(server: RunningServer) -> bool:
    lane = server.state.models["ears"].lane
    return server.is_idle() and not lane.jobs and not lane._engine.acting


def test_mixed_requests_at_once_answer_as_alone(server: RunningServer, model: AnsweringModel) -> None:
    """Whole and streamed chats and transcripts; a third of the callers leave."""
    engine = server.state.models["ears"].lane._engine
    assert isinstance(engine, ThreadedEngine) and isinstance(engine.engine, ListenerEngine)
    wav = voice_wav(1.5)

    async def ask(client: openai.AsyncOpenAI, number: int) -> str:
        if number == 8:
            return (await client.audio.transcriptions.create(model="ears", file=("a.wav", wav))).text
        if number % 3 == 1:
            pieces = []
            async for chunk in await client.chat.completions.create(**chat(number), stream=True):
                pieces.append(chunk.choices[0].delta.content or "")
            assert sum(map(bool, pieces)) > 1
            return "".join(pieces).strip()
        answer = await client.chat.completions.create(**chat(number))
        return str(answer.choices[0].message.content or "").strip()

    async def leave(client: openai.AsyncOpenAI, number: int) -> str:
        task = asyncio.create_task(ask(client, number))
        await asyncio.sleep(0.03 * number)
        task.cancel()
        return ""

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(**server.client_options()) as client:
            calls = [ask(client, number) for number in range(9)]
            return list(await asyncio.gather(*calls, *(leave(client, number) for number in (1, 2, 3, 7))))

    answers = asyncio.run(ask_all())
    for number in range(8):
        assert answers[number] == alone(model, number)
    turns: list[Turn] = [("user", [load_bytes(wav), "Transcribe the speech."])]
    assert answers[8] == model.answer([AnswerRequest(turns, max_tokens=448)])[0].text
    wait_for(lambda: is_idle(server))


def test_a_short_request_beside_a_long_one_is_answered_first(server: RunningServer) -> None:
    client = server.client()
    long = client.chat.completions.create(**{**chat(0), "max_tokens": 900}, stream=True)
    first = next(iter(long))
    short = client.chat.completions.create(**{**chat(3), "max_tokens": 5})
    assert first.choices[0].delta.role == "assistant" and short.choices[0].message.content
    assert server.state.service.num_jobs == 1  # the long one still answers
    long.close()
    wait_for(lambda: is_idle(server))


def test_limits_and_refusals(server: RunningServer) -> None:
    """An answer that its limit ends says so; a recording that the model cannot take is refused as before."""
    client = server.client()
    answer = client.chat.completions.create(**{**chat(0), "max_tokens": 3})
    assert answer.choices[0].finish_reason == "length"
    too_long = base64.b64encode(voice_wav(2.6)).decode()
    asked = chat(1)
    asked["messages"][0]["content"][1]["input_audio"]["data"] = too_long
    with pytest.raises(openai.BadRequestError, match="this model hears at most 2 s"):
        client.chat.completions.create(**asked)
    with pytest.raises(openai.BadRequestError, match="this model hears at most 2 s"):
        list(client.chat.completions.create(**asked, stream=True))
    wait_for(lambda: is_idle(server))


def test_a_model_whose_class_joins_no_rows_answers_one_after_the_other(tmp_path: Path) -> None:
    model, _ = save_tiny("qwen2_audio", tmp_path)
    model.generation_config.num_beams = 2
    model.generation_config.save_pretrained(tmp_path)

    def make(service: Any) -> Any:
        return load_served_model(tmp_path, service, LIMITS, "ears")

    with running_server(LIMITS, more_models=[make]) as running:
        lane = running.state.models["ears"].lane
        assert isinstance(lane._engine, AnsweringEngine)
        answer = running.client().chat.completions.create(**{**chat(0), "temperature": 0, "max_tokens": 4})
        expected = open_model_folder(tmp_path).answering_model()
        (text,) = expected.answer([AnswerRequest([("user", ["What is said? "])], max_tokens=4)])
        assert str(answer.choices[0].message.content or "").strip() == text.text
