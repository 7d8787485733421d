"""`audiollm convert`: what others' datasets hold arrives as samples, and every row that does not is named."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from audiollm.audio import save
from audiollm.commands.cli import build_app
from audiollm.data.convert import huggingface
from audiollm.data.records.opening import open_source
from audiollm.data.records.sample import AudioPart, Sample, TextPart
from audiollm.errors import ConfigError, StageError


def convert(*arguments: object) -> None:
    build_app("convert")(["convert", *map(str, arguments)], standalone_mode=False)


def sounds(folder: Path, *names: str) -> None:
    for name in names:
        save(folder / name, torch.zeros(1, 800), 8_000)


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def flat(sample: Sample) -> list[str]:
    """`role: text` and `role: <path>` for every part."""
    return [
        f"{message.role}: {part.text if isinstance(part, TextPart) else f'<{part.path}>'}"
        for message in sample.messages
        for part in message.content
    ]


def read(path: Path) -> list[Sample]:
    """All samples as they stand there."""
    source = open_source(path)
    return [source[index].sample for index in range(len(source))]


def test_ljspeech(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sounds(tmp_path / "lj/wavs", "LJ1.wav", "LJ2.wav", "LJ3.wav", "LJ5.wav")
    table = ['LJ1|Dr. "A"|Doctor "A"', "LJ2|plain", "LJ4|no fïle|x", "LJ1|again|again", "LJ3", "", "LJ5||"]
    content = "\n".join(table).encode() + b"\nLJ2|x|caf\xe9\n"
    (tmp_path / "lj/metadata.csv").write_bytes(content)
    convert("ljspeech", tmp_path / "lj", "-o", tmp_path / "lj/out.jsonl")
    samples = read(tmp_path / "lj/out.jsonl")
    assert [sample.id for sample in samples] == ["LJ1", "LJ2"]
    assert flat(samples[0])[1:] == ['user: Doctor "A"', "assistant: <wavs/LJ1.wav>"]
    assert samples[0].task == "tts" and samples[0].metadata == {"text": 'Doctor "A"'}
    bad = rows(tmp_path / "lj/out.set_aside.jsonl")
    assert [(row["id"], row["kind"]) for row in bad] == [
        ("LJ4", "unusable row"),
        ("LJ1", "doubled id"),
        ("LJ3", "unusable row"),
        ("LJ5", "unusable row"),
        ("", "text encoding"),
    ]
    assert bad[0]["place"].endswith("metadata.csv:3") and "no such file" in bad[0]["reason"]
    output = capsys.readouterr().out
    assert "out.jsonl: 2 samples" in output and "5 set aside in all" in output
    source = open_source(tmp_path / "lj/out.jsonl")
    assert source[0].audio[0].load().num_samples == 800, "the paths hold from the manifest's folder"


@pytest.mark.parametrize(("suffix", "delimiter"), [(".csv", ","), (".tsv", "\t"), (".csv", "|")])
def test_tables_with_a_header(tmp_path: Path, suffix: str, delimiter: str) -> None:
    sounds(tmp_path / "data", "a.wav", "b/c.flac")
    lines = [
        ["clip", "sentence", "speaker", "split", "start_s", "end_s"],
        ["a.wav", "one", "ann", "test", "", ""],
        ["b/c.flac", "two", "", "train", "0.02", "0.05"],
        ["b/c.flac", "three"],
    ]
    table = tmp_path / f"data/list{suffix}"
    table.write_text("\n".join(delimiter.join(line) for line in lines))
    out = tmp_path / "elsewhere/asr.jsonl"
    convert("ljspeech", table, "-o", out, "--columns", "audio=clip", "--task", "asr")
    first, second = read(out)
    assert (first.id, first.task, first.metadata) == (
        "a",
        "asr",
        {"text": "one", "speaker": "ann", "split": "test"},
    )
    assert first.audio("user")[0].speaker == "ann" and first.texts("assistant") == ["one"]
    part = second.audio("user")[0]
    assert (part.start_s, part.end_s, part.path) == (0.02, 0.05, str(tmp_path / "data/b/c.flac"))
    (bad,) = rows(tmp_path / "elsewhere/asr.set_aside.jsonl")
    assert "2 fields for 6 columns" in bad["reason"]


@pytest.mark.parametrize(
    ("suffix", "delimiter"), [(".csv", ","), (".tsv", "\t"), (".csv", "|"), (".csv", ";")]
)
def test_an_open_quotation_mark_swallows_no_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str, delimiter: str
) -> None:
    sounds(tmp_path, *(f"{name}.wav" for name in "abcdefg"))
    lines = [
        ("path", "text"),
        ("a.wav", '"I see'),
        ("b.wav", "fine"),
        ("c.wav", '"Yes" she said'),
        ("d.wav", 'in the "middle"'),
        ("e.wav", '"two ""quoted""\nlines"'),
        ("f.wav", f'"open{delimiter} with a separator'),
        ("g.wav", '"to the end'),
    ]
    table = tmp_path / f"list{suffix}"
    table.write_text("".join(f"{delimiter.join(line)}\n" for line in lines))
    convert("ljspeech", table, "-o", tmp_path / "out.jsonl")
    assert {sample.id: sample.metadata["text"] for sample in read(tmp_path / "out.jsonl")} == {
        "a": '"I see',
        "b": "fine",
        "c": '"Yes" she said',
        "d": 'in the "middle"',
        "e": 'two "quoted"\nlines',
        "g": '"to the end',
    }
    (bad,) = rows(tmp_path / "out.set_aside.jsonl")
    assert bad["place"].endswith(":8") and "3 fields for 2 columns" in bad["reason"]
    assert "read as text: 3 rows (lines 2, 4, 9)" in capsys.readouterr().out


def test_a_name_that_is_not_utf8_costs_its_file_alone(tmp_path: Path) -> None:
    sounds(tmp_path / "in", "a.wav")
    (tmp_path / "in/a.txt").write_text("one")
    for name in (b"caf\xe9", b"caf\xe8"):  # the text of the second is missing, too
        Path(os.fsdecode(os.fsencode(tmp_path / "in") + b"/" + name + b".wav")).write_bytes(b"RIFF")
    (tmp_path / "in" / os.fsdecode(b"caf\xe9.txt")).write_text("coffee")
    convert("folder", tmp_path / "in", "-o", tmp_path / "out.jsonl")
    assert [sample.id for sample in read(tmp_path / "out.jsonl")] == ["a"]
    bad = rows(tmp_path / "out.set_aside.jsonl")
    assert [row["place"].rpartition("/")[2] for row in bad] == ["caf\\udce8.wav", "caf\\udce9.wav"]
    assert {row["reason"] for row in bad} == {"its name is not valid UTF-8: rename it"}


def test_audio_stays_in_its_folder(tmp_path: Path) -> None:
    sounds(tmp_path, "secret.wav", "in/a.wav")
    (tmp_path / "in/link.wav").symlink_to(tmp_path / "secret.wav")
    table = tmp_path / "in/list.csv"
    names = ["../secret.wav", str(tmp_path / "secret.wav"), "link.wav", "x" * 5000, "a.wav"]
    table.write_text("path,text\n" + "".join(f"{name},hello\n" for name in names))
    convert("ljspeech", table, "-o", tmp_path / "out.jsonl")
    assert [part.path for s in read(tmp_path / "out.jsonl") for part in s.audio("assistant")] == ["in/a.wav"]
    reasons = [row["reason"] for row in rows(tmp_path / "out.set_aside.jsonl")]
    assert ["lies outside" in reason for reason in reasons] == [True, True, True, False]
    table.write_text("path,text\n../secret.wav,hello\n")
    convert("ljspeech", table, "-o", tmp_path / "out.jsonl", "--audio", tmp_path / "in/..")
    with pytest.raises(ConfigError, match="no usable sample"):
        convert("ljspeech", table, "-o", tmp_path / "other.jsonl")
    assert not (tmp_path / "other.jsonl").exists()


def test_recordings_that_were_cut_off_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without decoding them all: by their sizes, pages, frames, and by whether a FLAC has its last frame."""
    noise_1N = 0.1 * torch.randn(1, 32000, generator=torch.Generator().manual_seed(0))
    names = ("a.wav", "b.flac", "c.ogg", "d.mp3", "whole1.wav", "whole2.flac", "whole3.ogg", "whole4.mp3")
    for name in names:
        save(tmp_path / name, noise_1N, 16000)
        if not name.startswith("whole"):
            content = (tmp_path / name).read_bytes()
            (tmp_path / name).write_bytes(content[: len(content) * 6 // 10])
    (tmp_path / "t.csv").write_text("path,text\n" + "".join(f"{name},yes\n" for name in names))
    convert("ljspeech", tmp_path / "t.csv", "-o", tmp_path / "o.jsonl")
    lines = capsys.readouterr().out.splitlines()
    assert any("of 8 recordings looked at, 4 are not what their headers promise" in line for line in lines)
    assert {name for name in names if any(f"{name}: " in line for line in lines)} == set(names[:4])
    assert len(read(tmp_path / "o.jsonl")) == 8


def test_folder_with_side_files(tmp_path: Path) -> None:
    sounds(tmp_path, "a.wav", "deep/b.wav", "c.wav", "d.wav", "e.wav")
    (tmp_path / "a.txt").write_text("one\n", encoding="utf-8-sig")
    (tmp_path / "deep/b.lab").write_text("two")
    (tmp_path / "c.json").write_text(json.dumps({"text": "three", "speaker": "x", "nested": {}}))
    (tmp_path / "d.txt").write_bytes(b"\xff")
    convert("folder", tmp_path, "-o", tmp_path / "out/s.jsonl")
    samples = {sample.id: sample for sample in read(tmp_path / "out/s.jsonl")}
    assert {name: sample.texts("user") for name, sample in samples.items()} == {
        "a": ["one"],
        "deep/b": ["two"],
        "c": ["three"],
    }
    assert "Speaker: x" in samples["c"].texts("system")[0]
    bad = {Path(row["place"]).name: row["kind"] for row in rows(tmp_path / "out/s.set_aside.jsonl")}
    assert bad == {"d.txt": "text encoding", "e.wav": "unusable row"}


def cut(id: str, **changes: Any) -> dict[str, Any]:
    """A cut in the form that lhotse writes (docs of `lhotse.cut.MonoCut`)."""
    recording = {
        "id": "rec",
        "sources": [{"type": "file", "channels": [0], "source": "rec.wav"}],
        "sampling_rate": 8000,
        "num_samples": 80000,
        "duration": 10.0,
    }
    said = {"id": f"{id}-s", "recording_id": "rec", "start": 0, "duration": 2.0, "channel": 0, "text": "hi"}
    said |= {"speaker": "ann", "language": "English", "custom": {"mood": "glad"}}
    whole = {"id": id, "start": 3.0, "duration": 2.0, "channel": 0, "supervisions": [said]}
    return {**whole, "recording": recording, "type": "MonoCut", **changes}


def test_lhotse(tmp_path: Path) -> None:
    sounds(tmp_path, "rec.wav")
    ran = tmp_path / "ran"
    base = cut("x")
    sources = [{"type": "command", "channels": [0], "source": f"touch {ran}"}]
    two = [{**base["supervisions"][0], "id": i, "start": s} for i, s in (("p", -1.0), ("q", 1.0))]
    cuts = [
        cut("span"),
        cut("whole", start=0, duration=10.0),
        cut("two", supervisions=two),
        cut("command", recording={**base["recording"], "sources": sources}),
        cut("none", supervisions=[]),
        cut("mixed", type="MixedCut"),
        {"id": "broken"},
    ]
    lines = [json.dumps(row) for row in cuts]
    with gzip.open(tmp_path / "cuts.jsonl.gz", "wt") as file:
        file.write("\n".join([*lines, "{"]))
    convert("lhotse", tmp_path / "cuts.jsonl.gz", "-o", tmp_path / "s.jsonl")
    samples = {sample.id: sample for sample in read(tmp_path / "s.jsonl")}
    spans = {name: (p.start_s, p.end_s) for name, s in samples.items() for p in s.audio("assistant")}
    assert spans == {"span": (3.0, 5.0), "whole": (0.0, 2.0), "two/p": (2.0, 4.0), "two/q": (4.0, 6.0)}
    assert samples["span"].metadata == {"text": "hi", "speaker": "ann", "language": "English", "mood": "glad"}
    bad = rows(tmp_path / "s.set_aside.jsonl")
    assert [row["id"] for row in bad] == ["command", "none", "mixed", "broken", ""]
    assert not ran.exists()


def test_alpaca(tmp_path: Path) -> None:
    sounds(tmp_path, "a.wav")
    chats: list[Any] = [
        {
            "instruction": "Add.",
            "input": "1+1",
            "output": "2",
            "system": "Be brief.",
            "history": [["q", "a"]],
        },
        {
            "id": "bad",
            "instruction": "What is heard?",
            "output": "silence",
            "audio": "a.wav",
            "kto_tag": False,
        },
        {"instruction": "x", "output": "y", "kto_tag": "yes"},
        {"instruction": "x"},
        "no object",
        {"instruction": "x", "output": "y", "audios": ["none.wav"]},
    ]
    (tmp_path / "a.json").write_text(json.dumps(chats))
    convert("alpaca", tmp_path / "a.json", "-o", tmp_path / "s.jsonl")
    text, heard = read(tmp_path / "s.jsonl")
    assert flat(text) == ["system: Be brief.", "user: q", "assistant: a", "user: Add.\n1+1", "assistant: 2"]
    assert flat(heard) == ["user: <a.wav>", "user: What is heard?", "assistant: silence"]
    assert (text.id, text.task, text.metadata) == ("a-0", "text", {})
    assert (heard.id, heard.task, heard.metadata) == ("bad", "audio_qa", {"kto_tag": False})
    assert [row["place"].rpartition("a.json")[2] for row in rows(tmp_path / "s.set_aside.jsonl")] == [
        "[2]",
        "[3]",
        "[4]",
        "[5]",
    ]


def test_sharegpt_and_openai(tmp_path: Path) -> None:
    sounds(tmp_path, "a.wav", "b.wav")
    first = {
        "conversations": [
            {"from": "human", "value": "Compare <audio> with <audio>."},
            {"from": "gpt", "value": "Alike."},
        ],
        "system": "Listen.",
        "audios": ["a.wav", "b.wav"],
        "kto_tag": True,
    }
    content = [{"type": "audio", "audio_url": {"url": "b.wav"}}, {"type": "text", "text": "Who?"}]
    second = {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "Ann."}]}
    bad = [
        {"conversations": [{"from": "human", "value": "x"}, {"from": "observation", "value": "y"}]},
        {**first, "audios": ["a.wav"]},
        {"conversations": [{"from": "human", "value": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "AA"}}]}]},
        {"conversations": []},
    ]
    lines = [json.dumps(row).encode() for row in [first, second, *bad]]
    (tmp_path / "c.jsonl").write_bytes(b"\n".join([*lines, b"\xff", b"{", b""]))
    convert("sharegpt", tmp_path / "c.jsonl", "-o", tmp_path / "s.jsonl")
    marked, parts = read(tmp_path / "s.jsonl")
    assert flat(marked) == [
        "system: Listen.",
        "user: Compare ",
        "user: <a.wav>",
        "user:  with ",
        "user: <b.wav>",
        "user: .",
        "assistant: Alike.",
    ]
    assert marked.metadata == {"kto_tag": True}
    assert flat(parts) == ["user: <b.wav>", "user: Who?", "assistant: Ann."]
    reasons = [row["reason"] for row in rows(tmp_path / "s.set_aside.jsonl")]
    for reason, expected in zip(
        reasons,
        [
            "'observation'",
            "1 audio files for 2 marks",
            "nothing to learn",
            "'input_audio'",
            "no conversations",
        ],
        strict=False,
    ):
        assert expected in reason
    assert [row["kind"] for row in rows(tmp_path / "s.set_aside.jsonl")][5:] == [
        "text encoding",
        "wrong JSON",
    ]


def test_huggingface(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    sounds(tmp_path / "raw", "a.wav", "b.wav", "c.wav")
    columns = {
        "audio": [str(tmp_path / f"raw/{name}.wav") for name in "abc"],
        "sentence": ["one", "two", ""],
        "client_id": [7, 8, 9],
    }
    dataset = datasets.Dataset.from_dict(columns).cast_column("audio", datasets.Audio())
    dataset.save_to_disk(str(tmp_path / "saved"))
    convert("huggingface", tmp_path / "saved", "-o", tmp_path / "s.jsonl", "--audio", tmp_path)
    samples = read(tmp_path / "s.jsonl")
    assert [s.texts("user") for s in samples] == [["one"], ["two"]]
    assert samples[1].metadata == {"text": "two", "speaker": "8"}
    assert len(rows(tmp_path / "s.set_aside.jsonl")) == 1
    content = {"bytes": (tmp_path / "raw/a.wav").read_bytes(), "path": None}
    embedded = datasets.Dataset.from_dict({"audio": [content], "text": ["hi"], "id": ["x"]})
    (tmp_path / "parquet").mkdir()
    embedded.cast_column("audio", datasets.Audio(decode=False)).to_parquet(
        str(tmp_path / "parquet/test-0.parquet")
    )
    convert("huggingface", tmp_path / "parquet", "-o", tmp_path / "p/s.jsonl")
    (sample,) = read(tmp_path / "p/s.jsonl")
    assert sample.id == "x" and sample.metadata == {"text": "hi", "split": "test"}
    assert open_source(tmp_path / "p/s.jsonl")[0].audio[0].load().num_samples == 800


def test_the_name_of_a_column_leads_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of a downloaded dataset may have any name, and a recording is written to a file of that name."""
    sounds(tmp_path / "raw", "a.wav")
    content = {"bytes": (tmp_path / "raw/a.wav").read_bytes(), "path": None}
    row = {"audio": content, "text": "hi", "x/../../../outside": content}
    monkeypatch.setattr(huggingface, "open_splits", lambda source: {"train": [row]})
    convert("huggingface", tmp_path / "raw", "-o", tmp_path / "made/deep/s.jsonl")
    assert not (tmp_path / "made/outside.wav").exists()
    assert {path.parent.name for path in (tmp_path / "made").rglob("*.wav")} == {"s_audio"}


def test_without_the_package_datasets_the_remedy_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(ConfigError, match="pip install datasets"):
        convert("huggingface", tmp_path, "-o", tmp_path / "s.jsonl")


def test_strict_stops_and_options_that_do_nothing_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "a.json"
    source.write_text(json.dumps([{"instruction": "x"}, {"instruction": "x", "output": "y"}]))
    out = ("-o", tmp_path / "s.jsonl")
    with pytest.raises(StageError, match="without --strict") as caught:
        convert("alpaca", source, *out, "--strict")
    assert caught.value.exit_code == 2 and not (tmp_path / "s.jsonl").exists()
    assert len(rows(tmp_path / "s.set_aside.jsonl")) == 1
    for wrong, match in (
        (("--columns", "text=x"), "has no columns"),
        (("--seed", 3), "draws no phrasings"),
        (("--tasks", source), "no task of it is named"),
        (("--task", "ttss"), "no such task"),
    ):
        with pytest.raises(ConfigError, match=match):
            convert("alpaca", source, *out, *wrong)
    (tmp_path / "t.csv").write_text("path,text\n")
    with pytest.raises(ConfigError, match="no such column"):
        convert("ljspeech", tmp_path / "t.csv", *out, "--columns", "text=txet")
    with pytest.raises(ConfigError, match="no such file or folder"):
        convert("folder", tmp_path / "none", *out)
    source.write_text(json.dumps([{"instruction": "x", "output": "y"}]))
    convert("alpaca", source, *out)
    assert not (tmp_path / "s.set_aside.jsonl").exists(), "that of an earlier attempt is gone"
    assert isinstance(read(tmp_path / "s.jsonl")[0].messages[0].content[0], TextPart | AudioPart)
