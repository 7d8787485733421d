"""`audiollm generate`: what it writes, and one clear line for whatever a person mistypes."""

from __future__ import annotations

import io
import wave
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from audiollm.audio import load, save
from audiollm.errors import ConfigError
from audiollm.families import registry
from audiollm.generation.speaking.wav_stream import WavWriter
from audiollm.synthesis.command import generate
from tests.audiollm.generation.toy_speech import RATE, a_voice, toy_generator

SHORT = ["--max-duration-s", "0.5"]


@pytest.fixture(autouse=True)
def _toy(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = toy_generator()
    monkeypatch.setattr(registry, "load_speech_generator", lambda model, codec, dtype: toy)


def run(*arguments: Any, input: str | None = None) -> Result:
    app = typer.Typer()
    app.command()(generate)
    return CliRunner().invoke(app, ["--model", "toy", *map(str, arguments)], input=input)


def error_of(*arguments: Any, input: str | None = None) -> str:
    result = run(*arguments, input=input)
    assert isinstance(result.exception, ConfigError), result.output
    return str(result.exception)


def test_a_text_is_written_and_told_of(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "seven.wav"
    result = run("--text", "7 apples", "--speaker", "anna", "-o", out, *SHORT)
    sound = load(out)
    assert result.exit_code == 0 and sound.sample_rate == RATE and 0 < sound.duration_s <= 0.5
    assert f"{sound.duration_s:.2f} s" in result.output
    assert "real-time factor" in result.output and "first audio after" in result.output


@pytest.mark.parametrize(
    ("text", "options", "reads"),
    [
        ("7 apples", [], "reads: seven apples"),
        ("7  Äpfel", ["--language", "de"], "reads: sieben Äpfel"),
        ("No. He sat in the Sun.", [], None),
        ("two\nlines", [], None),
    ],
)
def test_the_text_that_is_read_is_printed_where_it_differs(
    tmp_path: Path, text: str, options: list[str], reads: str | None
) -> None:
    for stream in ([], ["--stream"]):
        result = run("--text", text, *options, *stream, "-o", tmp_path / "a.wav", *SHORT)
        assert result.exit_code == 0
        assert ("reads:" in result.output) == (reads is not None)
        assert (reads or "") in result.output


def test_a_dialogue_prints_what_is_read_where_it_differs(tmp_path: Path) -> None:
    for words, reads in (("one", False), ("1", True)):
        (tmp_path / "talk.txt").write_text(f"Ann: {words} two\nBob: three\n")
        result = run("--dialogue", tmp_path / "talk.txt", "-o", tmp_path / "a.wav", "--max-duration-s", 1)
        assert ("reads:" in result.output) == reads, result.output


def test_takes_are_files_of_their_own(tmp_path: Path) -> None:
    run("--text", "one", "-o", tmp_path / "a.wav", "--takes", 2, "--seed", 5, *SHORT)
    run("--text", "one", "-o", tmp_path / "b.wav", "--seed", 6, *SHORT)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a_1.wav", "a_2.wav", "b.wav"]
    assert torch.equal(load(tmp_path / "a_2.wav").samples_CN, load(tmp_path / "b.wav").samples_CN)


def test_text_from_a_file_and_from_the_input(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("\ufeffone\n", encoding="utf-8")
    run("--text-file", tmp_path / "t.txt", "-o", tmp_path / "a.wav", *SHORT)
    run("--text-file", "-", "-o", tmp_path / "b.wav", *SHORT, input="one")
    assert torch.equal(load(tmp_path / "a.wav").samples_CN, load(tmp_path / "b.wav").samples_CN)


def test_a_dialogue_with_references_by_name_and_in_order(tmp_path: Path) -> None:
    (tmp_path / "talk.txt").write_text("Ann: one two\nBob: three\n")
    save(tmp_path / "me.wav", a_voice(1.0).samples_CN, RATE)
    talk = ["--dialogue", tmp_path / "talk.txt", "--max-duration-s", "3"]
    named = run(*talk, "--reference", f"Bob={tmp_path / 'me.wav'}", "-o", tmp_path / "a.wav")
    assert named.exit_code == 0 and "no reference for Ann" in named.output and "Bob" not in named.output
    ordered = run(*talk, "--reference", tmp_path / "me.wav", "-o", tmp_path / "b.wav")
    assert "no reference for Bob" in ordered.output
    streamed = run(*talk, "--stream", "-o", tmp_path / "d.wav")
    assert streamed.exit_code == 0 and "no reference for Ann, Bob" in streamed.output
    assert load(tmp_path / "d.wav").duration_s > 0.3  # at least the pause between the turns
    together = run(*talk, "--together", "-o", tmp_path / "c.wav")
    assert together.exit_code == 0 and "no reference for Ann, Bob" in together.output


def test_a_stream_is_a_wav_file_of_the_same_sound(tmp_path: Path) -> None:
    run("--text", "one", "-o", tmp_path / "whole.wav", *SHORT)
    result = run("--text", "one", "--stream", "-o", tmp_path / "stream.wav", *SHORT)
    whole, streamed = (load(tmp_path / f"{name}.wav").samples_CN for name in ("whole", "stream"))
    edge = RATE // 100
    assert result.exit_code == 0
    assert streamed[:, edge:-edge].allclose(whole[:, edge:-edge], atol=2**-14)
    piped = run("--text", "one", "--stream", "-o", "-", *SHORT)
    assert piped.stdout_bytes[:4] == b"RIFF" and len(piped.stdout_bytes) == 44 + 2 * streamed.shape[1]


def test_a_streamed_file_is_read_by_others(tmp_path: Path) -> None:
    with WavWriter(tmp_path / "a.wav", 24_000) as writer:
        writer.write(torch.tensor([[0.0, 0.5, -1.0]]))
        writer.write(torch.tensor([[1.0]]))
    with wave.open(io.BytesIO((tmp_path / "a.wav").read_bytes())) as file:  # type: ignore[arg-type]
        assert file.getparams()[:4] == (1, 2, 24_000, 4)
        assert torch.frombuffer(bytearray(file.readframes(4)), dtype=torch.int16).tolist() == [
            0,
            16384,
            -32768,
            32767,
        ]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "nothing to say"),
        (["--text", "a", "--text-file", "b.txt"], "--text and --text-file"),
        (["--text", "  "], "no text"),
        (["--text-file", "missing.txt"], "missing.txt: No such file"),
        (["--text", "a", "--speaker", "ana"], "'anna'"),
        (["--text", "a <|eot_id|>"], "control token"),
        (["--text", "a", "--max-duration-s", "1e9"], "not in (0, 600]"),
        (["--text", "a", "--max-duration-s", "0"], "not in (0, 600]"),
        (["--text", "a", "--max-duration-s", "nan"], "not a number"),
        (["--text", "a", "--temperature", "inf"], "not a number"),
        (["--text", "a", "--reference", "gone.wav"], "gone.wav: no such file"),
        (["--text", "a", "--reference", "x", "--reference", "y"], "takes one reference"),
        (["--text", "a", "--reference-text", "x"], "more texts than references"),
        (["--text", "a", "--together"], "only a dialogue"),
        (["--text", "a", "--stream", "--takes", "2"], "one take"),
    ],
)
def test_one_clear_error(tmp_path: Path, arguments: list[str], problem: str) -> None:
    message = error_of(*arguments, "-o", tmp_path / "a.wav")
    assert problem in message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "problem"), [("a.txt", "cannot write"), ("", "is a folder")])
def test_a_file_that_cannot_be_sound(tmp_path: Path, name: str, problem: str) -> None:
    assert problem in error_of("--text", "a", "-o", tmp_path / name)
    assert ".wav" in error_of("--text", "a", "--stream", "-o", tmp_path / "a.mp3")


@pytest.mark.parametrize(
    ("script", "extra", "problem"),
    [
        ("Ann: one\nBob:\n", [], "line 2: the turn of Bob is empty"),
        ("hello there", [], "line 1 has no speaker"),
        ("", [], "no text"),
        ("Ann: one", ["--speaker", "anna"], "names its speakers"),
        ("Ann: one", ["--stream", "--together"], "said turn by turn"),
        ("Ann: one", ["--reference", "Bob=ME", "--max-duration-s", "1"], "Bob: no such speaker"),
        ("Ann: one", ["--reference", "ME", "--reference", "ME"], "2 references for 1 speakers"),
        ("Ann: one", ["--reference", "Ann=ME", "--reference", "Ann=ME"], "two references"),
    ],
)
def test_scripts_that_cannot_be_said(tmp_path: Path, script: str, extra: list[str], problem: str) -> None:
    (tmp_path / "talk.txt").write_text(script)
    save(tmp_path / "me.wav", a_voice(1.0).samples_CN, RATE)
    extra = [each.replace("ME", str(tmp_path / "me.wav")) for each in extra]
    assert problem in error_of("--dialogue", tmp_path / "talk.txt", *extra, "-o", tmp_path / "a.wav")
