"""The commands `tokenize` and `detokenize`: what they take, print and refuse."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from click.testing import Result
from typer.testing import CliRunner

from audiollm.audio import load, save
from audiollm.data.records.sample import AudioPart, Message, Sample, TextPart, write_samples
from audiollm.data.records.shards import read_index, read_shards
from audiollm.errors import ConfigError, StageError
from tokenizer import AudioTokenizer, TokenizerConfig
from tokenizer.corpus.command import detokenize, read_inputs, tokenize

TINY = TokenizerConfig(
    mel_hidden_size=16,
    hidden_size=16,
    encoder_layers=(1, 1),
    decoder_layers=(1, 1),
    latent_dim=8,
    codebook_size=16,
)
app = typer.Typer()
app.command()(tokenize)
app.command()(detokenize)


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("codec")
    AudioTokenizer(TINY).save_pretrained(folder)
    return folder


@pytest.fixture
def recordings(tmp_path: Path) -> Path:
    for name, seed in (("one.wav", 0), ("deep/two.flac", 1), ("deep/one.wav", 2)):
        random = np.random.default_rng(seed)
        samples_1N = torch.from_numpy(0.1 * random.standard_normal((1, 7000 + 1000 * seed)))
        save(tmp_path / "recordings" / name, samples_1N, 16_000)
    (tmp_path / "recordings/notes.txt").write_text("not sound")
    (tmp_path / "recordings/deep/broken.mp3").write_text("not sound either")
    return tmp_path / "recordings"


def run(*arguments: Any) -> Result:
    """The command's result; its errors come through, as they do to `audiollm.commands.cli.main`."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if isinstance(result.exception, (ConfigError, StageError)):
        raise result.exception
    return result


def test_there_and_back(recordings: Path, codec: Path, tmp_path: Path) -> None:
    shards, out = tmp_path / "shards", tmp_path / "out"
    result = run("tokenize", recordings, "-o", shards, "--codec", codec, "--samples-per-shard", 2)
    assert result.exit_code == 0, result.output
    assert "3 samples, 39 frames in 2 shards" in result.output
    assert "left alone: 1" in result.output and "1 set aside in all" in result.output
    assert [
        row["place"] for row in map(json.loads, (shards / "set_aside.jsonl").read_text().splitlines())
    ] == [str(recordings / "deep/broken.mp3")]
    assert [coded.sample.id for coded in read_shards(shards)] == ["deep/one", "deep/two", "one"]
    result = run("detokenize", shards, "-o", out)
    assert result.exit_code == 0 and "3 files written" in result.output
    for name, number in (("one", 7000), ("deep/two", 8000), ("deep/one", 9000)):
        assert load(out / f"{name}.flac").num_samples == number * 3 // 2
    assert "0 files written, 3 were there" in run("detokenize", shards, "-o", out).output


def test_the_same_command_goes_on_without_naming_the_codec(
    recordings: Path, codec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run("tokenize", "recordings", "-o", "shards", "--codec", codec, "--codebooks", 2)
    before = {path: path.read_bytes() for path in (tmp_path / "shards").iterdir()}
    stamp = (tmp_path / "shards/shard-000000.tar").stat().st_mtime_ns
    monkeypatch.chdir(recordings)  # another way to write the same inputs
    run("tokenize", "../recordings", "-o", "../shards", "--codebooks", 2)
    assert before == {path: path.read_bytes() for path in (tmp_path / "shards").iterdir()}
    assert stamp == (tmp_path / "shards/shard-000000.tar").stat().st_mtime_ns
    assert read_index(tmp_path / "shards")["codec"]["num_codebooks"] == 2


def test_nothing_is_mixed_in_one_folder(recordings: Path, codec: Path, tmp_path: Path) -> None:
    shards, other = tmp_path / "shards", tmp_path / "other"
    AudioTokenizer(TINY).save_pretrained(other)
    run("tokenize", recordings, "-o", shards, "--codec", codec)
    for arguments, reason in (
        ([recordings, "--codec", other], "another codec"),
        ([recordings / "one.wav"], "another list of inputs"),
        ([recordings, "--level", "-23"], "another --level"),
        ([recordings, "--codebooks", 3], "another --codebooks"),
        ([recordings, "--samples-per-shard", 3], "another --samples-per-shard"),
    ):
        with pytest.raises(ConfigError, match=reason):
            run("tokenize", "-o", shards, *arguments)
    run("detokenize", shards, "-o", tmp_path / "out")
    with pytest.raises(ConfigError, match="another --codebooks: 8, not 1"):
        run("detokenize", shards, "-o", tmp_path / "out", "--codebooks", 1)
    (shards / "tokenize.json").unlink()
    with pytest.raises(ConfigError, match="not of this command"):
        run("tokenize", recordings, "-o", shards, "--codec", codec)


def test_what_cannot_be_run(recordings: Path, codec: Path, tmp_path: Path) -> None:
    out = ["-o", tmp_path / "out"]
    for arguments, reason in (
        ([recordings, *out], "no codec given"),
        ([recordings, *out, "--codec", tmp_path], "no model here"),
        ([recordings, *out, "--codec", codec, "--codebooks", 9], "the codec has 8"),
        ([recordings, *out, "--codec", codec, "--level", "loud"], "not a level"),
        ([tmp_path / "nowhere", *out, "--codec", codec], "no such file or folder"),
        ([codec, *out, "--codec", codec], "no sound to encode"),
    ):
        with pytest.raises(ConfigError, match=reason):
            run("tokenize", *arguments)
    assert not (tmp_path / "out").exists()
    with pytest.raises(StageError, match="broken.mp3") as stopped:
        run("tokenize", recordings, *out, "--codec", codec, "--strict")
    assert stopped.value.exit_code == 2


def test_help_has_examples() -> None:
    for name in ("tokenize", "detokenize"):
        assert f"audiollm {name} " in " ".join(run(name, "--help").output.split())


# What the inputs mean


def test_each_file_once_and_each_id_once(recordings: Path) -> None:
    pattern = str(recordings / "**/*.wav")
    inputs = read_inputs([str(recordings / "deep"), pattern, str(recordings)])
    files = [sample.audio("assistant")[0].path for sample in inputs.samples]
    assert len(files) == len(set(files)) == 4
    assert [sample.id for sample in inputs.samples] == ["broken", "one", "two", "one-2"]


def test_a_table_of_files(recordings: Path) -> None:
    table = recordings / "list.csv"
    table.write_text("path,speaker\none.wav,aria\ndeep/../deep/two.flac,\n")
    first, second = read_inputs([str(table)]).samples
    assert (first.id, first.metadata) == ("one", {"speaker": "aria"})
    assert first.audio("assistant") == [AudioPart(path=str(recordings / "one.wav"))]
    assert (second.id, second.metadata) == ("two", {"speaker": ""})
    for content, reason in (("name,text\na.wav,x\n", "no path"), ("path\na,b\n", "2 fields for 1 columns")):
        table.write_text(content)
        with pytest.raises(ConfigError, match=reason) as caught:
            read_inputs([str(table)])
        assert "list.csv:2" in str(caught.value)


def test_an_open_quotation_mark_in_a_table_swallows_no_rows(recordings: Path) -> None:
    table = recordings / "list.csv"
    table.write_text('path,text\none.wav,"I see\ndeep/one.wav,"Yes" she said\ndeep/two.flac,fine\n')
    texts = [sample.metadata["text"] for sample in read_inputs([str(table)]).samples]
    assert texts == ['"I see', '"Yes" she said', "fine"]


def test_a_name_that_is_not_utf8_costs_its_file_alone(recordings: Path) -> None:
    odd = os.fsencode(recordings / "deep") + b"/caf\xe9.wav"
    Path(os.fsdecode(odd)).write_bytes((recordings / "one.wav").read_bytes())
    inputs = read_inputs([str(recordings / "deep"), os.fsdecode(odd)])
    assert [sample.id for sample in inputs.samples] == ["broken", "one", "two"]
    assert [(bad.place, bad.reason) for bad in inputs.bad] == [
        (f"{recordings}/deep/caf\\udce9.wav", "its name is not valid UTF-8: rename it")
    ]


def test_samples_stay_as_they_are(recordings: Path, codec: Path, tmp_path: Path) -> None:
    said = AudioPart(path=str(recordings / "one.wav"), start_s=0.1, end_s=0.3, speaker="aria")
    messages = [
        Message(
            role="user", content=[TextPart(text="say it"), AudioPart(path=str(recordings / "deep/one.wav"))]
        ),
        Message(role="assistant", content=[said]),
    ]
    chat = Sample(id="chat", messages=messages, task="tts", metadata={"split": "train"})
    silent = Sample(
        id="silent", messages=[messages[0].model_copy(update={"content": [TextPart(text="x")]})], task="t"
    )
    listing = tmp_path / "samples.jsonl"
    write_samples(listing, [chat, silent])
    listing.write_text(listing.read_text() + '{"id": "bad"}\n')
    result = run("tokenize", listing, listing, "-o", tmp_path / "shards", "--codec", codec)
    assert result.exit_code == 0, result.output
    (coded,) = read_shards(tmp_path / "shards")
    assert coded.sample.messages == messages and coded.sample.metadata["split"] == "train"
    assert [codes_KT.shape[1] for codes_KT in coded.encodings[0]] == [15, 5]
    reasons = (tmp_path / "shards/set_aside.jsonl").read_text()
    assert "no audio part" in reasons and "samples.jsonl:3" in reasons and "'chat' was used" in reasons
    run("detokenize", tmp_path / "shards", "-o", tmp_path / "out", "--format", "wav")
    assert load(tmp_path / "out/chat-2.wav").num_samples == 4800
