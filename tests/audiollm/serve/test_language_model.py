"""A plain language model behind the server: its chats go through the engine side by side, token by token."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from audiollm.data.text.tokenizer import HEADER_STYLES, train_text_tokenizer
from audiollm.families.answering import AnswerRequest
from audiollm.families.registry import open_model_folder
from audiollm.generation.engine.engine import Engine
from audiollm.models.processor_files import save_tokenizer
from audiollm.serve.limits import ServeLimits
from audiollm.serve.model import load_served_model
from tests.audiollm.serve.running import RunningServer, running_server

TEXTS = ["one two", "three", "What is it?", "one one one"]
LIMITS = ServeLimits(max_length=1024)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("llm")
    words = train_text_tokenizer(["system user assistant one two three what is it"] * 3, 330)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=words.get_vocab_size(),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            eos_token_id=words.token_to_id("<|eot_id|>"),
        )
    )
    with torch.no_grad():  # no end before the limit
        model.lm_head.weight[
            [words.token_to_id(token) for token in HEADER_STYLES["llama3"].special_tokens]
        ] = 0
    model.save_pretrained(place)
    save_tokenizer(place, words)
    return place


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    def make(service: object) -> object:
        return load_served_model(folder, service, LIMITS, "llm")  # type: ignore[arg-type]

    with running_server(LIMITS, more_models=[make]) as running:
        yield running


def ask(client: openai.OpenAI, text: str) -> openai.types.chat.ChatCompletion:
    return client.chat.completions.create(
        model="llm", messages=[{"role": "user", "content": text}], temperature=0, max_tokens=12
    )


def test_chats_side_by_side_answer_as_alone(server: RunningServer, folder: Path) -> None:
    client = server.client()
    with ThreadPoolExecutor(len(TEXTS)) as pool:
        replies = list(pool.map(lambda text: ask(client, text), TEXTS))
    model = open_model_folder(folder).answering_model()
    for text, reply in zip(TEXTS, replies, strict=True):
        (alone,) = model.answer([AnswerRequest([("user", [text])], max_tokens=12)])
        assert str(reply.choices[0].message.content).strip() == alone.text
        assert reply.choices[0].finish_reason == "length"  # and not `stop`: it has all that was asked for
    assert isinstance(server.state.service.lanes[1]._engine, Engine)
    assert client.models.retrieve("llm").id == "llm"


def test_words_come_one_by_one(server: RunningServer) -> None:
    client = server.client()
    stream = client.chat.completions.create(
        model="llm",
        messages=[{"role": "user", "content": "one two"}],
        temperature=0,
        max_tokens=12,
        stream=True,
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert sum(map(bool, pieces)) > 1
    assert "".join(pieces) == ask(client, "one two").choices[0].message.content


def test_it_neither_hears_nor_speaks(server: RunningServer) -> None:
    with pytest.raises(openai.BadRequestError, match="does not speak"):
        server.client().audio.speech.create(model="llm", input="one", voice="anna")
    with pytest.raises(openai.BadRequestError, match="does not hear"):
        server.client().audio.transcriptions.create(model="llm", file=("a.wav", b"RIFF"))
