"""Shards of segments: what webdataset reads of them, the same bytes again, and what a kill leaves."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch
import webdataset

from audiollm.audio import Waveform, integrated_loudness_lufs, load, save
from audiollm.files.atomic import read_json
from pipelines.annotate.execution.shards import (
    ShardConfig,
    finish_shards,
    make_shard,
    plan_shards,
    remove_shards,
    standardize,
)

RATE = 16_000


def tone(seconds: float, level: float, hz: float = 440.0) -> torch.Tensor:
    return level * torch.sin(2 * math.pi * hz * torch.arange(round(seconds * RATE)) / RATE)


@pytest.fixture
def rows(tmp_path: Path) -> list[dict[str, Any]]:
    """Five seconds of a quiet tone in the left channel and a loud one in the right, in parts of a second."""
    save(tmp_path / "a.wav", torch.stack([tone(5, 0.02), tone(5, 0.1, 660)]), RATE)
    return [
        {"id": f"a--{n:05d}", "path": str(tmp_path / "a.wav"), "start_s": float(n), "end_s": n + 1.0,
         "text": f"Wört {n}", "sample_rate": RATE, "num_channels": 2, "duration_s": 1.0,
         "measured": {"signal": {"level_dbfs": -24.0}}}
        for n in range(5)
    ]  # fmt: skip


def read(folder: Path) -> list[dict[str, Any]]:
    shards = [str(path) for path in sorted(folder.glob("*.tar"))]
    return list(webdataset.WebDataset(shards, shardshuffle=False, empty_check=False))


def write_shards(
    rows: list[dict[str, Any]], folder: Path, config: ShardConfig | None = None
) -> dict[str, Any]:
    """Write shards as a run does, but one after the other."""
    config = config or ShardConfig()
    return finish_shards(
        folder, config, [make_shard(each, folder, config) for each in plan_shards(rows, config)]
    )


def test_webdataset_reads_what_was_written(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    index = write_shards(rows, tmp_path / "shards", ShardConfig(max_bytes=110_000))
    assert [shard["segments"] for shard in index["shards"]] == [2, 2, 1]
    assert index["segments"] == 5 and index["seconds"] == pytest.approx(5.0)
    samples = read(tmp_path / "shards")
    assert [sample["__key__"] for sample in samples] == [row["id"] for row in rows]
    for sample, row in zip(samples, rows, strict=True):
        about = json.loads(sample["json"])
        assert {name: about[name] for name in ("id", "text", "measured", "path")} == {
            name: row[name] for name in ("id", "text", "measured", "path")
        }
        assert about["source"] == {"sample_rate": RATE, "num_channels": 2, "duration_s": 1.0}
        samples_N, rate = soundfile.read(io.BytesIO(sample["flac"]))
        assert samples_N.ndim == 1 and rate == about["sample_rate"] == 24_000
        assert len(samples_N) / rate == pytest.approx(about["duration_s"]) == pytest.approx(1.0)
        wave = Waveform(torch.tensor(samples_N)[None].float(), rate)
        assert integrated_loudness_lufs(wave) == pytest.approx(-23.0, abs=0.1)


def test_the_bytes_follow_from_rows_and_settings_alone(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    config = ShardConfig(max_bytes=110_000)
    write_shards(rows, tmp_path / "one", config)
    shards = plan_shards(rows, config)
    made = [make_shard(shard, tmp_path / "two", config) for shard in reversed(shards)]
    assert finish_shards(tmp_path / "two", config, made) == read_json(tmp_path / "one" / "index.json")
    for path in sorted((tmp_path / "one").iterdir()):
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes(), path.name


def test_what_is_whole_stays_and_what_changed_is_made_again(
    rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    folder, config = tmp_path / "shards", ShardConfig(max_bytes=110_000)
    write_shards(rows, folder, config)
    wanted = {path.name: path.read_bytes() for path in folder.iterdir()}
    (folder / "000001.tar").unlink()  # as a kill leaves it: a shard missing, another without its note,
    (folder / "000002.json").unlink()  # and half of a file under a name of its own
    (folder / ".000001.77.tar").write_bytes(b"half")
    before = (folder / "000000.tar").stat().st_mtime_ns
    write_shards(rows, folder, config)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == wanted
    assert (folder / "000000.tar").stat().st_mtime_ns == before
    rows[0]["text"] = "another"
    write_shards(rows[:3], folder, config)
    assert json.loads(read(folder)[0]["json"])["text"] == "another"
    assert sorted(path.name for path in folder.glob("*.tar")) == ["000000.tar", "000001.tar"]


def test_only_shards_of_an_earlier_run_are_removed(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    """The folder of results may be one in which somebody keeps shards of another kind."""
    folder = tmp_path / "shards"
    write_shards(rows, folder)
    remove_shards(folder)
    assert not folder.exists()
    folder.mkdir()
    for name in ("shard-000000.tar", "index.json", "notes.txt"):
        (folder / name).write_text("{}")
    remove_shards(folder)
    assert len(list(folder.iterdir())) == 3


def test_a_recording_that_is_gone_is_reported_and_the_others_are_there(
    rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    rows[1]["path"] = str(tmp_path / "gone.wav")
    index = write_shards(rows, tmp_path / "shards")
    assert index["segments"] == 4 == len(read(tmp_path / "shards"))
    assert [(row["id"], row["kind"]) for row in index["set_aside"]] == [(rows[1]["id"], "cannot be read")]
    assert index == write_shards(rows, tmp_path / "shards"), "a second run says the same"


@pytest.mark.parametrize("id", ["../up", "a.b", "", "a/b", "x" * 201, "a\nb", "ä"])
def test_an_id_cannot_leave_the_shard(rows: list[dict[str, Any]], tmp_path: Path, id: str) -> None:
    with pytest.raises(ValueError, match="id|no file's name"):
        write_shards([{**rows[0], "id": id}], tmp_path / "shards")
    with pytest.raises(ValueError, match="twice"):
        write_shards([rows[0], rows[0]], tmp_path / "shards")


def test_long_ids_are_read_by_webdataset(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    rows[0]["id"] = "long-" * 39 + "name"
    write_shards(rows[:1], tmp_path / "shards")
    assert read(tmp_path / "shards")[0]["__key__"] == rows[0]["id"]


def test_one_gain_brings_the_loudness_and_never_clips() -> None:
    config = ShardConfig(sample_rate=RATE)
    quiet = Waveform(tone(2, 0.03)[None], RATE)
    assert integrated_loudness_lufs(standardize(quiet, config)) == pytest.approx(-23.0, abs=0.01)
    peaky = tone(2, 0.001)
    peaky[RATE] = 0.5  # a click, far above the rest
    clicked = standardize(Waveform(peaky[None], RATE), config)
    assert clicked.samples_CN.abs().max() == pytest.approx(0.99, abs=1e-4)
    faint = Waveform(tone(2, 1e-3)[None], RATE)
    gain = standardize(faint, config).samples_CN.abs().max() / faint.samples_CN.abs().max()
    assert gain == pytest.approx(10.0, rel=1e-3), "20 dB and no more"
    silent = Waveform(torch.zeros(1, RATE), RATE)
    assert torch.equal(standardize(silent, config).samples_CN, silent.samples_CN)


def test_sound_can_stay_as_it_is(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    config = ShardConfig(sample_rate=RATE, loudness_lufs=None)
    write_shards(rows[:1], tmp_path / "shards", config)
    (sample,) = read(tmp_path / "shards")
    samples_N, _ = soundfile.read(io.BytesIO(sample["flac"]), dtype="float32")
    recorded_N = load(rows[0]["path"], 0.0, 1.0, mono=True).samples_CN[0].numpy()
    assert abs(samples_N - recorded_N).max() <= 1 / 32768
