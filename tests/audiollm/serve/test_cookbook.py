"""Every block of `docs/site/serving.md` is run: against a server with the page's models, on the page's files."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from audiollm.audio import load, save
from audiollm.families.answering_engine import AnsweringEngine
from audiollm.generation.service.service import GenerationService
from audiollm.serve.limits import ServeLimits
from audiollm.serve.model import ServerModel, serve_generator
from pipelines.annotate.synthesizers.espeak import SAMPLE_RATE, Espeak
from tests.audiollm.generation.toy_speech import a_voice, talkative_generator
from tests.audiollm.serve.running import RunningServer, running_server
from tests.audiollm.serve.test_clients import Scribe
from tests.documented import ROOT

PAGE = ROOT / "docs" / "site" / "serving.md"
ADDRESS = "http://127.0.0.1:8000"
LIMITS = ServeLimits(max_length=4096, speech_s=2.0)
MADE = {"out.mp3": 0.2, "me.mp3": 0.2, "talk.wav": 0.2, "out.wav": 0.2}
"""Files that the blocks write, and the seconds of sound that they have at least."""


def blocks(language: str) -> list[str]:
    return re.findall(
        rf"^```{language}\b.*?\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )


def voice_model(service: GenerationService) -> ServerModel:
    return serve_generator(talkative_generator(), "voice", service, LIMITS)


def ears_model(service: GenerationService) -> ServerModel:
    scribe = Scribe()
    return ServerModel(
        "ears", service.add_engine(lambda: AnsweringEngine(scribe)), 0, None, scribe, frozenset({"asr"})
    )


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(LIMITS, more_models=[voice_model, ears_model]) as running:
        yield running


@pytest.fixture
def readers_folder(tmp_path: Path) -> Path:
    """A folder with the recordings that the page names."""
    save(tmp_path / "me.wav", a_voice(2.0).samples_CN, 24_000)
    with Espeak() as espeak:
        words = [torch.from_numpy(espeak.speak(word, "en-us")) for word in ("seven", "three")]
    silence = torch.zeros(SAMPLE_RATE // 2)
    clip_N = torch.cat([silence, words[0], silence, words[1], silence])
    save(tmp_path / "clip.wav", clip_N[None], SAMPLE_RATE)
    return tmp_path


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_commands_and_the_client_do_what_the_page_says(
    server: RunningServer,
    readers_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for block in blocks("bash"):
        for line in block.splitlines():
            # a player that is not here: what it would play stays in a file
            command = re.sub(r"\| ffplay .*", "> played.pcm", line).replace(ADDRESS, server.address)
            assert ADDRESS not in command and "curl" in command
            command = command.replace("curl ", "curl --fail-with-body --no-progress-meter ", 1)
            run = subprocess.run(["bash", "-c", command], cwd=readers_folder, capture_output=True, text=True)
            assert run.returncode == 0, (line, run.stdout, run.stderr)
    assert (readers_folder / "played.pcm").stat().st_size > 10_000
    (block,) = blocks("python")
    monkeypatch.chdir(readers_folder)
    exec(compile(block.replace(ADDRESS, server.address), str(PAGE), "exec"), {})
    for name, seconds in MADE.items():
        assert load(readers_folder / name).duration_s >= seconds, name
    printed = capsys.readouterr().out
    assert printed.startswith("[('Seven,', 0.") and "'three!'" in printed


def test_models_of_the_first_block_are_those_that_the_others_name() -> None:
    (console,) = blocks("console")
    named = set(re.findall(r"(\w+)=runs/", console))
    asked = {
        name
        for block in blocks("bash") + blocks("python")
        for name in re.findall(r'model"?[=:] ?"(\w+)"', block)
    }
    assert named == asked == {"voice", "ears"}
