"""`audiollm ask`: the answer alone goes to the output."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from audiollm.audio import save
from audiollm.commands.ask import ask
from audiollm.errors import ConfigError
from audiollm.families import registry
from audiollm.families.dual_ffn.answering import DualFFNAnswers
from audiollm.generation.speaking.generator import Generator
from tests.audiollm.generation.toy_speech import RATE, a_voice, toy_generator


@pytest.fixture()
def toy(monkeypatch: pytest.MonkeyPatch) -> Generator:
    generator = toy_generator()
    model = SimpleNamespace(answering_model=lambda codec: DualFFNAnswers(generator, Path("m"), ""))
    monkeypatch.setattr(registry, "open_model_folder", lambda folder: model)
    return generator


def app() -> typer.Typer:
    made = typer.Typer()
    made.command()(ask)
    return made


def test_the_answer_is_that_of_the_generator(toy: Generator, tmp_path: Path) -> None:
    save(tmp_path / "door.wav", a_voice(0.5).samples_CN, RATE)
    wanted = toy.answer(tmp_path / "door.wav", "How many?", max_tokens=6)
    result = CliRunner().invoke(
        app(), [str(tmp_path / "door.wav"), "How many?", "--model", "m", "--max-tokens", "6"]
    )
    assert result.exit_code == 0 and result.stdout.strip() == wanted


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["door.wav", " "], "no question"),
        (["gone.wav", "What?"], "gone.wav"),
        (["x", "y", "--temperature", "inf"], "inf"),
    ],
)
def test_one_clear_error(toy: Generator, arguments: list[str], problem: str) -> None:
    result = CliRunner().invoke(app(), [*arguments, "--model", "m"])
    assert isinstance(result.exception, ConfigError) and problem in str(result.exception)


def test_a_question_is_asked_as_it_is_written_behind_the_recording(toy: Generator) -> None:
    written = "Which digit?\n(A)  one\n(B)  two"
    (message,) = toy.question(a_voice(0.5), f" {written}\n").messages
    assert [part.type for part in message.content] == ["audio", "text"]
    assert message.role == "user" and getattr(message.content[1], "text", None) == written
