"""The command in a process of its own, with folders on the disk, from its start to a signal."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from audiollm.audio.sound_encoder import encode_sound
from audiollm.errors import ConfigError
from audiollm.families.registry import load_speech_generator
from audiollm.serve.limits import ServeLimits
from audiollm.serve.load import load_state, split_model_name
from tests.audiollm.generation.test_generation_bad_input import write_codec, write_model

PATIENCE_S = 120.0
START = "from audiollm.commands.cli import main; main()"


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    write_model(tmp_path / "r/train/model")
    write_codec(tmp_path / "r/train_tokenizer/model")
    return tmp_path / "r"


def test_a_folder_is_served_until_a_signal(run_folder: Path) -> None:
    command = [sys.executable, "-c", START, "serve", f"voice={run_folder / 'train'}", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address, abilities = process.stdout.readline().strip(), process.stdout.readline().strip()
            assert address.startswith("http://127.0.0.1:") and abilities == "voice: writes, speaks, hears"
            client = openai.OpenAI(api_key="unused", base_url=address, max_retries=0, timeout=PATIENCE_S)
            spoken = client.audio.speech.create(
                model="voice", input="one two", voice="anna", response_format="wav",
                extra_body={"seed": 3, "max_new_tokens": 20},
            )  # fmt: skip
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert process.returncode == 0
    (line,) = errors.strip().splitlines()
    assert json.loads(line).keys() == {"path", "method", "status", "seconds"}
    generator = load_speech_generator(run_folder / "train")
    speech = generator.speak(
        "one two", speaker="anna", seed=3, max_duration_s=20 / generator.codec.frame_rate
    )
    assert spoken.content == encode_sound(speech.samples_1N, speech.sample_rate, "wav")


def test_names_of_folders(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = run_folder / "train"
    state = load_state([str(train), f"b={train}"], ServeLimits())
    assert [*state.models] == ["r-train", "b"]
    state.service.close()
    with pytest.raises(ConfigError, match="two models are called a"):
        load_state([f"a={train}", f"a={train}"], ServeLimits())
    with pytest.raises(ConfigError, match="there is no name before ="):
        split_model_name("=folder")
    monkeypatch.chdir(run_folder)
    (run_folder / "a=b").mkdir()
    assert split_model_name("a=b") == ("", Path("a=b"))
