"""`audiollm convert realsi`, `duplex` and `translations`: recordings with translations, for `compose_streams`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from audiollm.audio import load, save
from audiollm.commands.cli import build_app
from audiollm.data.records.aligned_recording import AlignedRecording, target_units
from audiollm.errors import ConfigError


def converted(folder: Path, kind: str, source: Path, *options: object) -> dict[str, AlignedRecording]:
    out = folder / "out.jsonl"
    build_app("convert")(
        ["convert", kind, str(source), "-o", str(out), *map(str, options)], standalone_mode=False
    )
    rows = map(json.loads, out.read_text(encoding="utf-8").splitlines())
    return {row["id"]: AlignedRecording.model_validate(row) for row in rows}


def reasons(folder: Path) -> dict[str, str]:
    rows = map(json.loads, (folder / "out.set_aside.jsonl").read_text(encoding="utf-8").splitlines())
    return {row["id"]: row["reason"] for row in rows}


def tone(seconds: float, level: float, channels: int = 1, rate: int = 8000) -> torch.Tensor:
    return torch.full((channels, round(seconds * rate)), level)


# ------------------------------------------------------------------------------------------------ RealSI


def utterance(start: int, end: int, text: str, target: str) -> dict[str, Any]:
    return {
        "sub_start_time": start,
        "sub_end_time": end,
        "sub_src_text": text,
        "sub_trg_text": target,
        "term": [],
    }


def test_realsi_gives_utterances_inside_their_recording(tmp_path: Path) -> None:
    """Its last times lie up to 1.2 s beyond the recording; a talk without sound is set aside."""
    direction = tmp_path / "RealSI" / "data" / "en2zh"
    (direction / "json").mkdir(parents=True)
    for name in ("en2zh-01-tech", "en2zh-02-health"):
        talk = {
            "vid": name, "duration": 3000,
            "segment": [
                {"start_time": 0, "end_time": 1500, "src_text": "a b", "trg_text": "x y", "utterance": [
                    utterance(0, 700, "a", "甲"), utterance(800, 1500, "b", "乙。")]},
                {"start_time": 2000, "end_time": 3900, "src_text": "c", "trg_text": "丙"},
            ],
        }  # fmt: skip
        (direction / "json" / f"{name}.json").write_text(
            json.dumps(talk, ensure_ascii=False), encoding="utf-8"
        )
    save(direction / "audio" / "en2zh-01-tech.flac", tone(3.0, 0.1), 8000)
    found = converted(tmp_path, "realsi", tmp_path / "RealSI")
    (talk,) = found.values()
    assert [(each.start_s, each.end_s, each.target) for each in talk.segments] == [
        (0.0, 0.7, "甲"), (0.8, 1.5, "乙。"), (2.0, 3.0, "丙"),
    ]  # fmt: skip
    assert talk.split == "test"
    assert (tmp_path / talk.audio).is_file()
    assert "no such file" in reasons(tmp_path)["en2zh-02-health"]


def test_the_published_annotations_of_realsi_are_read(tmp_path: Path, shared_data: Path) -> None:
    talk = shared_data / "text_benchmarks" / "RealSI" / "data" / "zh2en" / "json" / "zh2en-08-sci.json"
    if not talk.is_file():
        pytest.skip("RealSI's annotations are not here")
    save(tmp_path / "zh2en-08-sci.wav", tone(286.5, 0.1, rate=1000), 1000)
    (found,) = converted(tmp_path, "realsi", talk, "--audio", tmp_path).values()
    assert len(found.segments) == 88
    assert found.segments[0].target == "OK. Apart from that, there is another question: the size of the sun,"
    assert found.segments[-1].end_s == pytest.approx(286.5)


# ------------------------------------------------------------------------------------------------ duplex


def test_a_duplex_recording_is_heard_right_and_said_left(tmp_path: Path) -> None:
    folder = tmp_path / "calls"
    stereo = torch.cat([tone(2.0, 0.25), tone(2.0, 0.5)])
    save(folder / "data" / "a.wav", stereo, 8000)
    save(folder / "data" / "mono.wav", tone(1.0, 0.1), 8000)
    save(folder / "data" / "quiet.wav", stereo, 8000)
    words = [
        ["hallo", [0.5, 0.8], "SPEAKER_MAIN"], ["hello", [0.1, 0.4], "SPEAKER_OTHER"],
        ["du", [0.9, 0.9], "SPEAKER_MAIN"], ["da", [1.8, 2.3], "SPEAKER_MAIN"],
    ]  # fmt: skip
    for name in ("a", "mono"):
        (folder / "data" / f"{name}.json").write_text(json.dumps({"alignments": words}))
    names = ("a", "mono", "quiet")
    rows = [{"path": f"data/{name}.wav", "duration": 2.0, "split": "test"} for name in names]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (call,) = converted(tmp_path, "duplex", folder / "data.jsonl").values()
    assert load(tmp_path / call.audio).samples_CN.mean() == pytest.approx(0.5, abs=1e-3)
    said = [each.said for each in call.segments]
    assert [(each.target, each.due_s) for each in call.segments] == [("hallo", 0.5), ("du", 0.9), ("da", 1.8)]
    # a word that another follows at once lasts until it; one of no length gets some; none exceeds the recording
    assert [(span.start_s, span.end_s) for span in said if span] == [(0.5, 0.9), (0.9, 0.92), (1.8, 2.0)]
    assert said[0] is not None
    assert load(tmp_path / said[0].path).samples_CN.mean() == pytest.approx(0.25, abs=1e-3)
    assert [word.text for word in call.words] == ["hello"]
    found = reasons(tmp_path)
    assert "1 channel" in found["data/mono.wav"]
    assert "quiet.json" in found["data/quiet.wav"]


def test_duplex_recordings_of_like_names_keep_their_own_channels(tmp_path: Path) -> None:
    levels = {"a/b": 0.2, "a_b": 0.4}
    for name, level in levels.items():
        save(tmp_path / "calls" / f"{name}.wav", tone(1.0, level, channels=2), 8000)
        words = {"alignments": [["hallo", [0.1, 0.4], "SPEAKER_MAIN"]]}
        (tmp_path / "calls" / f"{name}.json").write_text(json.dumps(words))
    source = tmp_path / "calls" / "data.jsonl"
    source.write_text("".join(json.dumps({"path": f"{name}.wav"}) + "\n" for name in levels))
    calls = converted(tmp_path, "duplex", source)
    heard = {id: float(load(tmp_path / call.audio).samples_CN.mean()) for id, call in calls.items()}
    assert heard == pytest.approx(levels, abs=1e-3)


# ------------------------------------------------------------------------------------------------ tables


def test_tables_of_pairs_are_read(tmp_path: Path) -> None:
    save(tmp_path / "clips" / "a.wav", tone(1.0, 0.1), 8000)
    save(tmp_path / "clips" / "de.wav", tone(1.0, 0.1), 8000)
    table = tmp_path / "covost.tsv"
    table.write_text(
        "path\tsentence\ttranslation\tclient_id\nclips/a.wav\tgood day\tguten Tag\tx\nclips/b.wav\tb\tb\tx\n"
        "clips/a.wav\tgood day\t\tx\n"
    )
    (pair,) = converted(tmp_path, "translations", table).values()
    assert (pair.id, pair.audio, pair.text, pair.target, pair.speaker) == (
        "clips/a", "clips/a.wav", "good day", "guten Tag", "x",
    )  # fmt: skip
    assert "no such file" in reasons(tmp_path)["clips/b.wav"]
    assert "no translation" in reasons(tmp_path)["clips/a"]
    words = [{"text": "guten", "start_s": 0.0, "end_s": 0.4}, {"text": "Tag", "start_s": 0.4, "end_s": 0.9}]
    rows = [
        {"id": "p", "audio": "clips/a.wav", "tgt_text": "guten Tag", "tgt_audio": "clips/de.wav",
         "target_words": words},
        {"id": "q", "audio": "clips/a.wav", "target": "x", "target_words": words},
    ]  # fmt: skip
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (pair,) = converted(tmp_path, "translations", tmp_path / "pairs.jsonl").values()
    assert pair.target_audio == "clips/de.wav"
    assert [word.end_s for word in pair.target_words] == [0.4, 0.9]
    assert "target_audio" in reasons(tmp_path)["q"]
    with pytest.raises(ConfigError, match="teaches no task"):
        converted(tmp_path, "translations", table, "--task", "asr")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Guten Morgen, Welt", ["Guten", " Morgen,", " Welt"]),
        ("我爱 AI。好", ["我", "爱", " AI。", "好"]),
        ("", []),
    ],
)
def test_units_are_words_or_characters(text: str, expected: list[str]) -> None:
    units = target_units(text)
    assert [
        unit.text if unit.is_glued or not place else f" {unit.text}" for place, unit in enumerate(units)
    ] == expected
    assert all(text[unit.start : unit.start + len(unit.text)] == unit.text for unit in units)
