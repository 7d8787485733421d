"""`audiollm serve --ray`: replicas on a Ray cluster answer as one server does."""

from __future__ import annotations

import importlib.util
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from audiollm.audio.sound_encoder import pcm16
from audiollm.errors import ConfigError
from audiollm.families.registry import load_speech_generator
from audiollm.serve.ray_replicas import ReplicaShare, parse_replicas
from tests.audiollm.serve.test_process import PATIENCE_S, START, run_folder  # noqa: F401

KEY = "a key of sixteen and more"
INSTALLED = importlib.util.find_spec("grpc_reflection") is not None  # comes with ray[serve] alone


@pytest.mark.parametrize(
    ("text", "share"), [("2", ReplicaShare(2, 2)), (" 1-4 ", ReplicaShare(1, 4)), ("3-3", ReplicaShare(3, 3))]
)
def test_numbers_of_replicas(text: str, share: ReplicaShare) -> None:
    assert parse_replicas(text) == share


@pytest.mark.parametrize("text", ["0", "4-1", "many", "-2", "1.5", ""])
def test_what_is_no_number_of_replicas_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no number of replicas"):
        parse_replicas(text)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def replicas_of(process: psutil.Process) -> list[psutil.Process]:
    names = [(child, child.name()) for child in process.children(recursive=True) if child.is_running()]
    return [child for child, name in names if "ServeReplica" in name]


@pytest.mark.slow
@pytest.mark.skipif(not INSTALLED, reason="Ray Serve is not installed: pip install 'audiollm[ray-serve]'")
def test_two_replicas_answer_as_one_server(run_folder: Path, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "key").write_text(KEY)
    port = free_port()
    command = [sys.executable, "-c", START, "serve", f"voice={run_folder / 'train'}", "--port", str(port)]
    command += ["--ray", "2", "--replica-cpus", "0.5", "--key-file", str(tmp_path / "key")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            lines = iter(process.stdout.readline, "")
            address = next(line.strip() for line in lines if line.startswith("http://"))
            assert address == f"http://127.0.0.1:{port}/v1"
            replicas = replicas_of(psutil.Process(process.pid))
            assert len(replicas) == 2
            client = openai.OpenAI(api_key=KEY, base_url=address, max_retries=0, timeout=PATIENCE_S)

            def say(seed: int) -> bytes:
                stream = {"stream_format": "audio"} if seed % 2 else {}
                answer = client.audio.speech.create(
                    model="voice", input="one two", voice="anna", response_format="pcm",
                    extra_body={"seed": seed, "max_new_tokens": 20, **stream},
                )  # fmt: skip
                return answer.content

            with ThreadPoolExecutor(8) as pool:
                spoken = list(pool.map(say, range(16)))
            refused = httpx.post(f"{address}/audio/speech", json={"model": "voice", "input": "a"})
            assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0
            assert not any(replica.is_running() for replica in replicas)
        finally:
            process.kill()
    generator = load_speech_generator(run_folder / "train")
    limit = {"max_duration_s": 20 / generator.codec.frame_rate}
    for seed, sound in enumerate(spoken):
        if seed % 2:
            pieces = generator.stream("one two", speaker="anna", seed=seed, **limit)
            expected = b"".join(pcm16(piece.samples_CN) for piece in pieces)
        else:
            expected = pcm16(generator.speak("one two", speaker="anna", seed=seed, **limit).samples_1N)
        assert sound == expected


@pytest.mark.slow
@pytest.mark.skipif(not INSTALLED, reason="Ray Serve is not installed: pip install 'audiollm[ray-serve]'")
def test_a_model_that_does_not_load_ends_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "-c", START, "serve", str(tmp_path), "--port", str(free_port()), "--ray", "1"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert result.returncode == 2 and str(tmp_path) in result.stderr
