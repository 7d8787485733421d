"""Who may ask, and what nobody should be able to do."""

from __future__ import annotations

import base64
import json
import logging
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from audiollm.audio.sound_encoder import encode_sound
from audiollm.errors import ConfigError
from audiollm.serve.command import KEY_VARIABLE, read_key
from audiollm.serve.gate import ServerState, is_key, is_name_of_server
from audiollm.serve.limits import ServeLimits
from audiollm.serve.voices import VoiceStore
from tests.audiollm.generation.toy_speech import RATE, a_voice
from tests.audiollm.serve.running import RunningServer, running_server, voice_wav, wait_for

KEY = "a-key-of-some-length"
SPEECH = {"model": "toy", "input": "one", "response_format": "pcm", "max_new_tokens": 5}
SECRET_TEXT = "Helium three"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    limits = ServeLimits(max_length=4096, upload_mb=0.2, answer_tokens=8, recording_s=20.0)
    voices = VoiceStore(tmp_path_factory.mktemp("serve") / "voices", 5)
    with running_server(limits, voices, key=KEY, max_body_bytes=200_000) as running:
        yield running


def headers(**more: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEY}", **more}


def assert_answers(server: RunningServer) -> None:
    """The server still says what the model says."""
    answer = server.post("/v1/audio/speech", json=SPEECH, headers=headers())
    expected = server.generator.speak("one", max_duration_s=0.2).samples_1N
    assert answer.content == encode_sound(expected, RATE, "pcm")


@pytest.mark.parametrize(
    "sent", ["", "Bearer", "Bearer wrong", f"Basic {KEY}", f"Bearer {KEY}x", "Bearer \xe4"]
)
def test_no_key_and_a_wrong_key(server: RunningServer, sent: str) -> None:
    for path in ("/v1/audio/speech", "/metrics", "/v1/models", "/openapi.json", "/nowhere"):
        refused = httpx.get(server.address + path, headers={"Authorization": sent.encode("latin-1")})
        assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
    assert httpx.get(f"{server.address}/health").json() == {"status": "ready"}
    assert_answers(server)


def test_another_host_and_another_origin(server: RunningServer) -> None:
    for host in ("evil.example", f"evil.example:{server.port}", "127.0.0.1.evil.example", ""):
        refused = server.post("/v1/audio/speech", json=SPEECH, headers=headers(Host=host))
        assert refused.status_code in (400, 421)
    for origin in ("http://evil.example", "null", f"http://localhost:{server.port}"):
        refused = server.post("/v1/audio/speech", json=SPEECH, headers=headers(Origin=origin))
        assert refused.status_code == 403 and refused.json()["error"]["param"] == "Origin"
    own = server.post("/v1/audio/speech", json=SPEECH, headers=headers(Origin=server.address))
    assert own.status_code == 200 and "access-control-allow-origin" not in own.headers


def test_names_of_the_server() -> None:
    local = ServerState()
    assert all(is_name_of_server(name, local) for name in ("localhost:8000", "127.0.0.1", "[::1]:8000"))
    assert not any(is_name_of_server(name, local) for name in ("a.example", "10.0.0.1:80", "", "localhost.a"))
    public = ServerState(host="0.0.0.0", hostnames=("speech.example",))
    assert is_name_of_server("10.0.0.1:8000", public) and is_name_of_server("Speech.example:80", public)
    assert not is_name_of_server("other.example", public)
    assert is_key(f"bearer {KEY}", KEY) and not is_key(KEY, KEY)


def test_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert read_key(None, "127.0.0.1") is None
    with pytest.raises(ConfigError, match="can be reached by others"):
        read_key(None, "0.0.0.0")
    (tmp_path / "key").write_text(f"{KEY}\n")
    assert read_key(tmp_path / "key", "0.0.0.0") == KEY
    monkeypatch.setenv(KEY_VARIABLE, "short")
    with pytest.raises(ConfigError, match="5 characters"):
        read_key(None, "127.0.0.1")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_key(tmp_path, "127.0.0.1")


@pytest.mark.parametrize(
    "name",
    ["../evil", "..", "/etc/passwd", "a/b", "a\\b", "", "-rf", "default", "x" * 65, "ä", "a\0b", "a.json"],
)
def test_names_that_would_leave_the_folder(server: RunningServer, name: str) -> None:
    files = {"audio_sample": ("v.wav", voice_wav())}
    form = {"name": name, "consent": "by myself"}
    refused = server.post("/v1/audio/voices", data=form, files=files, headers=headers())
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "name"
    removed = httpx.delete(f"{server.address}/v1/audio/voices/{quote(name or 'x')}", headers=headers())
    assert removed.status_code in (404, 405)
    folder = server.state.voices._folder
    assert folder is not None and [path.name for path in folder.parent.iterdir()] == ["voices"]
    assert not [*folder.iterdir()]


def test_voices_without_consent_and_without_sound(server: RunningServer) -> None:
    silent = encode_sound(torch.zeros(1, RATE), RATE, "wav")
    for form, sample, field in (
        ({"name": "a"}, voice_wav(), "consent"),
        ({"name": "a", "consent": "  "}, voice_wav(), "consent"),
        ({"name": "a", "consent": "yes"}, silent, "audio_sample"),
        ({"name": "a", "consent": "yes"}, b"no sound at all", "audio_sample"),
        ({"name": "a", "consent": "yes", "more": "x"}, voice_wav(), "more"),
        ({"consent": "yes"}, voice_wav(), "name"),
        ({"name": "anna", "consent": "yes"}, voice_wav(), "name"),
    ):
        files = {"audio_sample": ("v.wav", sample)}
        refused = server.post("/v1/audio/voices", data=form, files=files, headers=headers())
        assert refused.status_code in (400, 409) and refused.json()["error"]["param"] == field, refused.text
    short = {"ref_audio": base64.b64encode(voice_wav(0.05)).decode()}
    refused = server.post("/v1/audio/speech", json={**SPEECH, **short}, headers=headers())
    assert (
        refused.json()["error"]["param"] == "ref_audio" and "too short" in refused.json()["error"]["message"]
    )


@pytest.mark.parametrize(
    "reference",
    ["http://127.0.0.1/a.wav", "file:///etc/passwd", "/etc/passwd", "data:text/html;base64,AAAA", "%%"],
)
def test_no_address_and_no_path_is_read(server: RunningServer, reference: str) -> None:
    content = [{"type": "audio_url", "audio_url": {"url": reference}}]
    chat = {"model": "toy", "messages": [{"role": "user", "content": content}]}
    for path, body, field in (
        ("/v1/audio/speech", {**SPEECH, "ref_audio": reference}, "ref_audio"),
        ("/v1/chat/completions", chat, "messages.0.content.0"),
    ):
        refused = server.post(path, json=body, headers=headers())
        assert refused.status_code == 400 and refused.json()["error"]["param"] == field


def test_bombs_of_size_and_of_duration(server: RunningServer) -> None:
    large = server.post("/v1/audio/speech", content=b"x" * 300_000, headers=headers())
    assert large.status_code == 413 and large.json()["error"]["code"] == "too_large"

    def pieces() -> Iterator[bytes]:
        yield from (b"x" * 20_000 for _ in range(20))

    chunked = server.post("/v1/audio/speech", content=pieces(), headers=headers())
    assert chunked.status_code == 413
    silence = encode_sound(torch.zeros(1, RATE * 900), RATE, "flac")  # a quarter of an hour in few bytes
    assert len(silence) < 200_000
    files = {"file": ("a.flac", silence)}
    long = server.post("/v1/audio/transcriptions", data={"model": "toy"}, files=files, headers=headers())
    assert long.status_code == 400 and long.json()["error"]["code"] == "recording_too_long"
    deep = "[" * 50_000
    nested = server.post("/v1/chat/completions", content=deep, headers=headers())
    assert nested.status_code == 400
    assert_answers(server)


def test_a_half_sent_upload_leaves_nothing(server: RunningServer) -> None:
    head = (
        f"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nAuthorization: Bearer {KEY}\r\n"
        "Content-Type: multipart/form-data; boundary=b\r\nContent-Length: 10000\r\n\r\n--b\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(
            head.encode() + b'Content-Disposition: form-data; name="file"; filename="a"\r\n\r\nabc'
        )
    wait_for(server.is_idle)
    assert_answers(server)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
SPEECH_FIELDS = st.sampled_from(
    ["model", "input", "voice", "response_format", "stream_format", "speed", "instructions", "language", "seed",
     "ref_audio", "ref_text", "max_new_tokens", "sample_rate", "temperature", "top_p", "top_k", "dialogue", "voices",
     "together", "unknown"]
)  # fmt: skip
CHAT_FIELDS = st.sampled_from(
    [
        "model",
        "messages",
        "modalities",
        "audio",
        "stream",
        "temperature",
        "top_p",
        "seed",
        "max_tokens",
        "n",
        "tools",
    ]
)
CHAT = {"model": "toy", "messages": [{"role": "user", "content": "one"}], "max_tokens": 2}
MEMBERS = st.sampled_from(
    ["toy", "one", "anna", "sse", "audio", "wav", "opus", 0, 1, 24_000, True, "[SPEAKER0] one"]
)


@settings(max_examples=20, derandomize=True, database=None)
@given(
    speech=st.dictionaries(SPEECH_FIELDS, json_values | MEMBERS, max_size=4),
    chat=st.dictionaries(CHAT_FIELDS, json_values | MEMBERS, max_size=3),
)
def test_no_body_is_a_server_error(
    server: RunningServer, speech: dict[str, Any], chat: dict[str, Any]
) -> None:
    for path, body in (
        ("/v1/audio/speech", {**SPEECH, **speech}),
        ("/v1/chat/completions", {**CHAT, **chat}),
    ):
        content = json.dumps(body)
        answer = server.post(path, content=content, headers=headers(**{"Content-Type": "application/json"}))
        assert answer.status_code < 500, (path, content, answer.text)
        if answer.status_code >= 400:
            assert answer.json()["error"]["message"] and answer.json()["error"]["param"], answer.text


@pytest.mark.parametrize("recordings", [15, pytest.param(500, marks=pytest.mark.slow)])
def test_damaged_recordings_are_no_server_error(server: RunningServer, recordings: int) -> None:
    draw = random.Random(0)
    for number in range(recordings):
        format = ("wav", "flac", "mp3", "opus", "aac")[number % 5]
        content = bytearray(encode_sound(a_voice(1.0).samples_CN, RATE, format))  # type: ignore[arg-type]
        for _ in range(draw.randrange(1, 40)):
            content[draw.randrange(len(content))] = draw.randrange(256)
        damaged = bytes(content[: draw.randrange(1, len(content) + 1)])
        if number % 3 < 2:
            path, field = (("/v1/audio/transcriptions", "file"), ("/v1/audio/voices", "audio_sample"))[
                number % 3
            ]
            data = {"model": "toy"} if field == "file" else {"name": f"v{number}", "consent": "own"}
            answer = server.post(path, data=data, files={field: ("a", damaged)}, headers=headers())
        else:
            field = "messages"
            sound = {"data": base64.b64encode(damaged).decode(), "format": format}
            content_parts = [{"type": "input_audio", "input_audio": sound}]
            chat = {**CHAT, "messages": [{"role": "user", "content": content_parts}]}
            answer = server.post("/v1/chat/completions", json=chat, headers=headers())
        assert answer.status_code < 500, answer.text
        if answer.status_code >= 400:
            assert str(answer.json()["error"]["param"]).startswith(field), answer.text
        elif field == "audio_sample":
            httpx.delete(f"{server.address}/v1/audio/voices/v{number}", headers=headers())
    assert_answers(server)


def test_the_log_has_no_texts_and_no_keys(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="audiollm.serve"):
        server.post("/v1/audio/speech", json={**SPEECH, "input": SECRET_TEXT}, headers=headers())
        server.post("/v1/audio/speech?key=secret", json=SPEECH, headers={"Authorization": "Bearer secret"})
        wait_for(lambda: len(caplog.records) >= 2)
    rows = [json.loads(record.message) for record in caplog.records]
    assert [(row["path"], row["status"]) for row in rows] == [("/v1/audio/speech", 200), ("(other)", 401)]
    assert not {"Helium", "secret", KEY} & {*caplog.text.replace('"', " ").split()}
    figures = httpx.get(f"{server.address}/metrics", headers=headers()).text
    assert 'audiollm_requests_total{path="/v1/audio/speech",status="200"}' in figures
    assert 'audiollm_jobs_total{model="toy",outcome="done"}' in figures and KEY not in figures
