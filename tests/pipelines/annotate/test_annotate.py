"""The annotate stage on speech that is made here, so that what is said, and where, is known."""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from rich.console import Console

from audiollm.audio import find_audio, load, save
from audiollm.errors import StageError
from audiollm.files.set_aside import read_set_aside
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import Recipe
from pipelines.annotate.execution.config import AnnotationConfig
from pipelines.annotate.input.synthetic import SAMPLE_RATE, CorpusConfig, speak_corpus
from pipelines.annotate.stage import STAGE
from pipelines.steps import step as step_module
from pipelines.steps.results import dropped_part_row, merge_set_aside, open_lines, part_ids, put_line
from tests.pipelines.audiocot.cot_run import ChatServer

SHARED = Path(
    os.environ.get("AUDIOLLM_SHARED_DATA") or Path(__file__).resolve().parents[4] / "shared" / "data"
)
CORPUS = CorpusConfig(words=["one", "seven", "nine"], voices=2, takes=3, test_takes=1)
PATTERN = "{text}_{speaker}_{take}.wav"
HEAVY = {"torch", "onnxruntime", "silero_vad", "pocketsphinx", "soundfile", "soxr", "num2words"}


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("spoken")
    speak_corpus(folder, CORPUS, seed=0, on_done=lambda done: None)
    return folder


def _annotate(folder: Path, **settings: Any) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    recipe = Recipe("test", folder / "test.yaml", "tiny", 0, folder, (), {})
    config = AnnotationConfig.model_validate({"workers": 0, "quality_sample": 0, **settings})
    figures = STAGE.run(config, Context(folder, recipe, Console(quiet=True), {}))
    assert figures == json.loads((folder / "funnel.json").read_text())
    return figures


def _rows(folder: Path, name: str = "segments") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def _clip(folder: Path, name: str) -> torch.Tensor:
    return load(folder / f"{name}.wav").samples_CN


def _quiet(seconds: float, seed: int = 0) -> torch.Tensor:
    noise = np.random.default_rng(seed).normal(0, 1e-3, (1, round(seconds * SAMPLE_RATE)))
    return torch.from_numpy(noise).float()


def _check_accounts(funnel: Mapping[str, Any], folder: Path, source: Path) -> None:
    """Every audio file of `source` is used or set aside with a reason, and all counts add up."""
    audio, others = find_audio(source)
    used = {row["path"] for row in _rows(folder)}
    aside = _rows(folder, "set_aside")
    listed = {row["place"] for row in aside if "start_s" not in row or row["place"] not in used}
    assert {str(path.absolute()) for path in audio} == used | listed
    files = _rows(folder, "files")
    assert Counter(row["path"] for row in files) == Counter(str(path.absolute()) for path in audio)
    assert all(row["reason"] for row in files if row["status"] != "kept")
    assert {row["path"] for row in files if row["status"] == "kept"} == used
    assert funnel["segments_found"] == len(_rows(folder)) + len(_rows(folder, "filtered"))
    assert all(row["kind"] and row["reason"] and row["stage"] == "annotate" for row in aside)
    assert funnel["files_seen"] == len(audio) + len(others)
    assert (funnel["audio_files"], funnel["not_audio"]) == (len(audio), len(others))
    by_status = [funnel[f"files_{status}"] for status in ("kept", "filtered", "failed")]
    assert by_status[0] == len(used) and sum(by_status) == len(audio)
    assert sum(funnel["reasons"].values()) == len(aside)


# ------------------------------------------------------------------------------------- the own corpus


def test_the_corpus_is_the_same_however_it_is_cut_short(tmp_path: Path, spoken: Path) -> None:
    again = tmp_path / "again"
    shutil.copytree(spoken, again)
    for path in sorted(again.iterdir())[::2]:
        path.unlink()
    counts: list[int] = []
    assert speak_corpus(again, CORPUS, seed=0, on_done=counts.append) == 18
    assert counts[-1] == 18 and counts == sorted(counts)
    contents = {path.name: path.read_bytes() for path in spoken.iterdir()}
    assert {path.name: path.read_bytes() for path in again.iterdir()} == contents
    assert len(set(contents.values())) == 18  # no take is like another
    assert set(contents) == {
        f"{w}_{v}_{t}.wav" for w in CORPUS.words for v in ("anna", "bruno") for t in range(3)
    }


def test_without_input_it_speaks_and_annotates_a_corpus(tmp_path: Path) -> None:
    funnel = _annotate(tmp_path, corpus=CORPUS.model_dump(), quality_sample=2)
    rows = _rows(tmp_path)
    _check_accounts(funnel, tmp_path, tmp_path / "corpus")
    assert [row["path"] for row in rows] == sorted(row["path"] for row in rows)
    assert {row["split"] for row in rows if row["file"].endswith("_0.wav")} == {"test"}
    assert {row["split"] for row in rows if not row["file"].endswith("_0.wav")} == {"train"}
    assert {(row["text"], row["speaker"]) for row in rows} == {
        (w, v) for w in CORPUS.words for v in ("anna", "bruno")
    }
    assert funnel["text_agreement"] >= 0.8  # 1 of 3 by chance
    assert funnel["quality"]["n"] == sum("quality" in row["measured"] for row in rows) == 2
    assert all(1 <= funnel["quality"][name] <= 5 for name in ("sig", "bak", "ovr"))
    for row in rows:
        waveform = load(row["path"], row["start_s"], row["end_s"])
        assert waveform.duration_s == pytest.approx(row["duration_s"], abs=1e-3)
        assert (row["sample_rate"], row["num_channels"]) == (SAMPLE_RATE, 1)
        assert -40 < row["level_dbfs"] < row["peak_dbfs"] < 0 and row["clipped_share"] == 0
        assert 0 < row["speech_s"] <= row["duration_s"] + 1e-6


def _some(spoken: Path, folder: Path, pattern: str) -> Path:
    """A folder with some of the clips."""
    folder.mkdir()
    for path in spoken.glob(pattern):
        shutil.copy(path, folder)
    return folder


def test_workers_and_restarts_change_nothing(tmp_path: Path, spoken: Path) -> None:
    settings = {"input": str(_some(spoken, tmp_path / "in", "*_1.wav")), "transcripts": PATTERN}
    results = []
    for name, workers in (("here", 0), ("restarted", 0), ("restarted", 2)):
        _annotate(tmp_path / name, **settings, workers=workers)
        results.append(
            [(tmp_path / name / f"{file}.jsonl").read_bytes() for file in ("segments", "set_aside", "files")]
        )
        with closing(sqlite3.connect(tmp_path / name / "ledger" / "ledger.sqlite")) as ledger, ledger:
            ledger.execute("delete from calls where key < '8'")  # as after a kill
    assert results[0] == results[1] == results[2]


# -------------------------------------------------------------------------------------- given transcripts


def test_given_transcripts_are_kept_raw_beside_what_was_heard(tmp_path: Path, spoken: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    for index, name in enumerate(("one_bruno_1", "seven_anna_1", "nine_anna_1")):
        shutil.copy(spoken / f"{name}.wav", source / f"{index}.wav")
    table = tmp_path / "table.csv"
    table.write_text("path,text,speaker,split\n0.wav,1,bruno,test\n1.wav,Nine!,,train\n2.wav,9,anna,\n")
    funnel = _annotate(tmp_path / "out", input=str(source), transcripts=str(table), grammar=["1", "7", "9"])
    rows = _rows(tmp_path / "out")
    assert [(row["text"], row["text_source"], row["speaker"], row["split"]) for row in rows] == [
        ("1", "given", "bruno", "test"),
        ("Nine!", "given", "speaker", "train"),
        ("9", "given", "anna", None),
    ]
    assert [row["heard"] for row in rows] == [{"pocketsphinx": word} for word in ("one", "seven", "nine")]
    assert funnel["text_agreement"] == pytest.approx(2 / 3, abs=1e-3)


def test_texts_of_some_recordings_leave_the_vocabulary_open_for_the_others(
    tmp_path: Path, spoken: Path
) -> None:
    source, table = _some(spoken, tmp_path / "in", "seven_*_1.wav"), tmp_path / "table.csv"
    first, second = sorted(path.name for path in source.iterdir())
    table.write_text(f"path,text\n{first},seven\n")
    settings = {"input": str(source), "transcripts": str(table)}
    _annotate(tmp_path / "given", **settings)
    (row,) = _rows(tmp_path / "given")
    assert row["measured"]["pocketsphinx"]["confidence"] is None  # a grammar of the given texts
    funnel = _annotate(tmp_path / "all", **settings, untranscribed="recognize")
    rows = _rows(tmp_path / "all")
    assert [(row["file"], row["text_source"] == "given") for row in rows] == [(first, True), (second, False)]
    assert all(row["measured"]["pocketsphinx"]["confidence"] is not None for row in rows)
    assert funnel["files_kept"] == 2 and "no transcript" not in funnel["reasons"]


def test_only_long_edges_without_speech_are_trimmed(tmp_path: Path, spoken: Path) -> None:
    source = tmp_path / "in"
    clip = _clip(spoken, "seven_anna_1")
    spoken_s = clip.shape[1] / SAMPLE_RATE
    save(source / "long.wav", torch.cat([_quiet(2.0), clip, _quiet(1.5)], dim=1), SAMPLE_RATE)
    save(source / "short.wav", torch.cat([_quiet(0.3), clip, _quiet(0.3)], dim=1), SAMPLE_RATE)
    save(source / "noise.wav", _quiet(1.0) * 20, SAMPLE_RATE)
    _annotate(tmp_path / "out", input=str(source), transcripts="{text}.wav", recognizers=[])
    rows = {row["file"]: row for row in _rows(tmp_path / "out")}
    assert 1.5 <= rows["long.wav"]["start_s"] <= 2.0
    assert 1.9 + spoken_s <= rows["long.wav"]["end_s"] <= 2.5 + spoken_s
    assert (rows["short.wav"]["start_s"], rows["noise.wav"]["start_s"]) == (0, 0)
    assert rows["short.wav"]["duration_s"] == pytest.approx(spoken_s + 0.6, abs=1e-3)
    assert rows["noise.wav"]["duration_s"] == 1.0
    assert "no speech" in rows["noise.wav"]["note"] and "note" not in rows["long.wav"]


def test_channels_that_cancel_each_other_are_measured_as_they_are_heard(tmp_path: Path, spoken: Path) -> None:
    """Their mean is silence: its level was that of the channels, and the text stayed beside silence."""
    voice_1N = torch.cat([_clip(spoken, "seven_anna_1")] * 2, dim=1)
    sounds = {
        "seven": torch.cat([voice_1N, -voice_1N]),
        "nine": torch.cat([voice_1N, voice_1N]),
        "one": torch.zeros(2, voice_1N.shape[1]),
    }
    for name, samples_CN in sounds.items():
        save(tmp_path / "in" / f"{name}.wav", samples_CN, SAMPLE_RATE)
    _annotate(tmp_path / "out", input=str(tmp_path / "in"), transcripts="{text}.wav", recognizers=[])
    rows = {row["text"]: row for row in _rows(tmp_path / "out")}
    (silent,) = _rows(tmp_path / "out", "filtered")
    assert (silent["text"], silent["dropped"]["kind"]) == ("one", "too quiet")
    assert rows["seven"]["level_dbfs"] == rows["nine"]["level_dbfs"] > -40
    assert rows["seven"]["speech_s"] == rows["nine"]["speech_s"] > 0.3
    assert "channel 1 alone is heard" in rows["seven"]["note"] and "note" not in rows["nine"]


# ----------------------------------------------------------------------------------- without transcripts


@pytest.mark.parametrize("block_s", [300.0, 1.6])
def test_a_long_recording_is_cut_where_people_pause(
    tmp_path: Path, spoken: Path, monkeypatch: pytest.MonkeyPatch, block_s: float
) -> None:
    monkeypatch.setattr(step_module, "_MAX_CACHED_S", block_s)
    words, parts, places, at_s = ["one", "seven", "nine", "seven"], [], [], 0.0
    for index, word in enumerate(words):
        clip = _clip(spoken, f"{word}_bruno_{index % 3}")
        parts += [_quiet(1.0, index), clip]
        places.append((at_s + 1.0, at_s + 1.0 + clip.shape[1] / SAMPLE_RATE))
        at_s = places[-1][1]
    save(tmp_path / "in" / "ann" / "talk.wav", torch.cat([*parts, _quiet(1.0, 9)], dim=1), SAMPLE_RATE)
    funnel = _annotate(tmp_path / "out", input=str(tmp_path / "in"), grammar=["one", "seven", "nine"])
    rows = _rows(tmp_path / "out")
    assert [row["id"] for row in rows] == [f"ann-talk--{index:05d}" for index in range(4)]
    assert [(row["text"], row["text_source"], row["speaker"], row["split"]) for row in rows] == [
        (word, "pocketsphinx", "ann", None) for word in words
    ]
    for row, (start_s, end_s) in zip(rows, places, strict=True):
        assert start_s - 0.45 <= row["start_s"] <= start_s + 0.05
        assert end_s - 0.1 <= row["end_s"] <= end_s + 0.45
    assert funnel["text_agreement"] is None


def test_what_is_left_out_is_named_with_value_and_threshold(tmp_path: Path, spoken: Path) -> None:
    source = tmp_path / "in"
    clip = _clip(spoken, "one_bruno_1")
    save(source / "fine.wav", clip, SAMPLE_RATE)
    save(source / "short.wav", clip[:, 2000:3000], SAMPLE_RATE)
    save(source / "long.wav", clip.repeat(1, 20), SAMPLE_RATE)
    save(source / "endless.wav", clip.repeat(1, 300), SAMPLE_RATE)
    save(source / "quiet.wav", clip * 1e-3, SAMPLE_RATE)
    save(source / "clipped.wav", (clip * 100).clamp(-1, 1), SAMPLE_RATE)
    save(source / "stereo.flac", clip.repeat(2, 1), SAMPLE_RATE)
    (source / "empty.wav").touch()
    (source / "torn.wav").write_bytes((source / "fine.wav").read_bytes()[:30])
    (source / "garbage.mp3").write_bytes(os.urandom(4000))
    (source / "raw.pcm").write_bytes(bytes(4000))
    (source / "notes.txt").write_text("hello")
    settings = {"transcripts": "{text}", "recognizers": [], "thresholds": {"max_duration_s": 5}}
    funnel = _annotate(tmp_path / "out", input=str(source), **settings)
    _check_accounts(funnel, tmp_path / "out", source)
    assert {row["file"] for row in _rows(tmp_path / "out")} == {"fine.wav", "stereo.flac"}
    aside = {Path(row["place"]).name: row for row in _rows(tmp_path / "out", "set_aside")}
    assert {name: row["kind"] for name, row in aside.items()} == {
        "short.wav": "too short",
        "long.wav": "too long",
        "endless.wav": "too long",
        "quiet.wav": "too quiet",
        "clipped.wav": "clipped",
        "empty.wav": "cannot be read",
        "torn.wav": "cannot be read",
        "garbage.mp3": "cannot be read",
        "raw.pcm": "cannot be read",
    }
    assert (aside["long.wav"]["threshold"], aside["short.wav"]["threshold"]) == (5, 0.1)
    assert aside["long.wav"]["value"] == pytest.approx(20 * clip.shape[1] / SAMPLE_RATE, abs=0.01)
    assert aside["empty.wav"]["reason"].startswith("is empty")
    seconds = f"{1000 / SAMPLE_RATE:.4g}"
    assert aside["short.wav"]["reason"] == f"{seconds} s, the limit is 0.1 s; from 0.00 to 0.05 s"


def test_nothing_said_and_nothing_heard(tmp_path: Path, spoken: Path) -> None:
    save(tmp_path / "in" / "hush.wav", _quiet(1.0), SAMPLE_RATE)
    shutil.copy(spoken / "one_anna_1.wav", tmp_path / "in" / "one.wav")
    _annotate(tmp_path / "out", input=str(tmp_path / "in"), recognizers=[])
    assert [row["kind"] for row in _rows(tmp_path / "out", "set_aside")] == [
        "no speech found",
        "no text given and no recognizer asked for",
    ]


def test_a_single_file_is_an_input_too(tmp_path: Path, spoken: Path) -> None:
    funnel = _annotate(tmp_path, input=str(spoken / "nine_anna_2.wav"), transcripts=PATTERN)
    assert (funnel["files_seen"], funnel["segments"]) == (1, 1)
    assert _rows(tmp_path)[0]["heard"] == {"pocketsphinx": "nine"}


def test_odd_formats(tmp_path: Path) -> None:
    source = SHARED / "odd_formats"
    if not source.is_dir():
        pytest.skip(f"no odd formats at {source}")
    funnel = _annotate(tmp_path, input=str(source), grammar=["yes", "no"])
    _check_accounts(funnel, tmp_path, source)
    said = {Path(row["file"]).name: row["text"] for row in _rows(tmp_path)}
    assert (said["yes_1000ms.wav"], said["no_1000ms.wav"]) == ("yes", "no")
    assert {"testing.m4a", "jfk.mp3", "jfk.wav"} <= set(said)
    aside = {Path(row["place"]).name: row["kind"] for row in _rows(tmp_path, "set_aside")}
    assert aside["wrong_extension.aac"] == "duplicate"  # of format_test.m4a
    assert aside["test1_empty.wav"] == aside["mono.raw"] == "cannot be read"
    assert aside["digital_silence.wav"] == aside["silence_1000ms.wav"] == "no speech found"


# ----------------------------------------------------------------------------------------------- settings


def test_an_endpoint_that_refuses_every_request_ends_the_run_and_it_goes_on_later(
    tmp_path: Path, spoken: Path
) -> None:
    (tmp_path / "in").mkdir()
    shutil.copy(spoken / "one_anna_0.wav", tmp_path / "in")
    replies: list[str | int] = [404, "one"]
    server = ChatServer(lambda request: replies.pop(0))
    endpoint = {"kind": "chat_endpoint", "url": server.url, "model": "m"}
    settings: dict[str, Any] = {"input": str(tmp_path / "in"), "recognizers": [endpoint]}
    try:
        with pytest.raises(StageError, match=r"annotate stopped: m: HTTP 404: .*; check the address"):
            _annotate(tmp_path / "out", **settings)
        _annotate(tmp_path / "out", **settings)
    finally:
        server.close()
    assert replies == []


def test_recognizers_of_a_kind_have_the_names_of_their_models(tmp_path: Path) -> None:
    folders = [tmp_path / "whisper-base", tmp_path / "whisper@tiny.en"]
    for folder in folders:
        folder.mkdir()
    recognizers = [{"kind": "transformers", "model": str(folder)} for folder in folders]
    config = AnnotationConfig(recognizers=[*recognizers, "pocketsphinx"])
    assert [each.name for each in config.recognizer_settings()] == ["whisper-base", "whisper-tiny.en", None]
    assert [each.name for each in AnnotationConfig(recognizers=recognizers[:1]).recognizer_settings()] == [
        None
    ]
    with pytest.raises(ValidationError, match="same name"):
        AnnotationConfig(recognizers=[recognizers[0], recognizers[0]])


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"input": "/no/such/folder"}, "no such file or folder"),
        ({"transcripts": "/no/such.csv"}, "no such file or folder"),
        ({"transcripts": "{speaker}.wav"}, r"needs a field \{text\}"),
        ({"test": "take=5"}, "not a comparison"),
        ({"test": "take<5"}, "give `transcripts`"),
        ({"input": None, "transcripts": PATTERN}, "give `input`"),
        ({"thresholds": {"min_duration_s": 40}}, "below max_duration_s"),
        ({"thresholds": {"min_duration": 4}}, "did you mean 'min_duration_s'"),
        ({"steps": {"event": {}}}, "did you mean 'events'"),
        ({"steps": {"segments": {"covers": "all"}}}, "covers"),
        ({"steps": {"probe": None}}, "always there"),
        ({"recognizers": ["whisper"]}, "pocketsphinx"),
        ({"recognizers": ["pocketsphinx", "pocketsphinx"]}, "same name"),
        ({"recognizers": [{"kind": "pocketsphinx", "name": "quality"}]}, "cannot have the name"),
        ({"preset": "emily"}, "quickstart"),
        ({"corpus": {"takes": 3}}, "below takes"),
        ({"corpus": {"words": ["a/b"]}}, "not made of letters"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(
    tmp_path: Path, settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValidationError, match=reason):
        AnnotationConfig.model_validate({"input": str(tmp_path), **settings})


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"transcripts": "{text}={take}.wav"}, "not one of the 18 recordings has a transcript"),
        ({"transcripts": PATTERN, "test": "take>7"}, "holds for none"),
        ({"grammar": ["qwxyz"]}, "dictionary of pocketsphinx: qwxyz"),
    ],
)
def test_what_does_not_fit_ends_with_2_before_any_work(
    tmp_path: Path, spoken: Path, settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(StageError, match=reason) as caught:
        _annotate(tmp_path / "out", input=str(spoken), **settings)
    assert caught.value.exit_code == 2
    with closing(sqlite3.connect(tmp_path / "out" / "ledger" / "ledger.sqlite")) as ledger:
        assert not ledger.execute("select * from calls where step != 'digest'").fetchall()


def test_thresholds_come_from_the_preset_unless_set() -> None:
    limits = AnnotationConfig(thresholds={"max_duration_s": 12}).limits
    assert (limits.min_duration_s, limits.max_duration_s, limits.min_level_dbfs) == (0.1, 12, -60)


def test_the_plan_knows_how_much_audio_there_is(spoken: Path) -> None:
    assert STAGE.plan is not None
    plan = STAGE.plan(AnnotationConfig.model_validate({"input": str(spoken)}), {})
    assert plan.facts["clips"] == 18
    assert plan.facts["audio_s"] == pytest.approx(sum(load(p).duration_s for p in spoken.iterdir()), rel=1e-6)
    assert STAGE.plan(AnnotationConfig(), {}).facts["clips"] == 10 * 6 * 24


def test_reading_the_settings_loads_nothing_heavy() -> None:
    code = "import sys, pipelines.annotate.stage, pipelines.compose.stage; print(*sorted(sys.modules))"
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert not HEAVY & set(done.stdout.split())


@pytest.mark.slow
def test_with_two_workers_the_command_itself_loads_nothing_heavy(spoken: Path, tmp_path: Path) -> None:
    """A module loaded by the command would be loaded once more than there are workers."""
    code = (
        "import sys; from audiollm.commands.cli import build_app; build_app()(standalone_mode=False); "
        "print('loaded', *sys.modules)"
    )
    source, out = _some(spoken, tmp_path / "in", "*_anna_1.wav"), tmp_path / "out"
    command = [sys.executable, "-c", code, "annotate", str(source), "-o", str(out), "--workers", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert not HEAVY & set(done.stdout.rpartition("loaded ")[2].split())
    assert (out / "report.html").exists() and (out / "segments.jsonl").exists()


def test_a_file_may_have_the_name_of_another_ones_part() -> None:
    """Parts of an earlier run lie beside the recordings: their names are those that a cut recording's parts get."""
    names = {0: "talk.wav", 1: "talk--00001.flac", 2: "other.wav"}
    ids = part_ids([(0, 0), (0, 1), (1, 0), (2, 0)], names)
    assert len(set(ids.values())) == 4 and ids[2, 0] == "other"


@pytest.mark.parametrize("odd", ["\u2028", "\x85", "\x0b", "\n"])
def test_what_is_set_aside_may_have_any_name(tmp_path: Path, odd: str) -> None:
    row = {"path": f"/in/a{odd}b.wav", "id": "a-b", "start_s": 0.0, "end_s": 1.0}
    drop = {"kind": "too short", "reason": "", "step": "", "rule": "", "value": None, "threshold": None}
    with open_lines(tmp_path / "aside.jsonl") as file:
        put_line(file, dropped_part_row("annotate", row, drop))
    merge_set_aside(tmp_path, tmp_path / "aside.jsonl", [])
    assert [each["place"] for each in read_set_aside(tmp_path / "set_aside.jsonl")] == [row["path"]]


@given(st.lists(st.text(min_size=1, max_size=20), unique=True, max_size=6), st.integers(1, 3))
def test_ids_are_unique_safe_and_stable(files: list[str], copies: int) -> None:
    places = [(file, number) for file in range(len(files)) for number in range(copies)]
    ids = part_ids(places, dict(enumerate(files)))
    assert len({name.casefold() for name in ids.values()}) == len(places)
    assert all(re.fullmatch(r"[A-Za-z0-9_-]+", name) for name in ids.values())
    backwards = [(len(files) - 1 - file, number) for file, number in places]
    again = part_ids(backwards, dict(enumerate(reversed(files))))
    assert {(files[f], n): name for (f, n), name in ids.items()} == {
        (files[::-1][f], n): name for (f, n), name in again.items()
    }
