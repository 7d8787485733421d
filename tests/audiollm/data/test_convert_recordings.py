"""`audiollm convert` of LJSpeech's layout, NeMo, Kaldi, lhotse's channels, classes, chats and prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from audiollm.audio import load, save
from audiollm.commands.cli import build_app
from audiollm.data.records.opening import open_source
from audiollm.data.records.sample import Sample, TextPart
from audiollm.errors import ConfigError


def convert(folder: Path, *arguments: object) -> list[Sample]:
    """The samples of `audiollm convert ARGUMENTS -o FOLDER/out.jsonl`."""
    out = folder / "out.jsonl"
    command = ["convert", *map(str, arguments), "-o", str(out)]
    build_app("convert")(command, standalone_mode=False)
    source = open_source(out)
    return [source[index].sample for index in range(len(source))]


def aside(folder: Path) -> list[dict[str, str]]:
    path = folder / "out.set_aside.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def sounds(folder: Path, *names: str) -> None:
    for name in names:
        save(folder / name, torch.zeros(1, 16_000), 8_000)


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


# -------------------------------------------------------------------------------------------------- splits


def test_held_out_rows_are_held_out_and_unknown_splits_refused(tmp_path: Path) -> None:
    sounds(tmp_path, "a.wav", "b.wav", "c.wav", "d.wav", "e.wav")
    questions = [
        {"prompt": f"{n}?", "audios": [f"{n % 5}.wav"], "solution": "x", **({} if n else {"split": "train"})}
        for n in range(20)
    ]
    sounds(tmp_path, *(f"{n}.wav" for n in range(5)))
    drawn = convert(
        tmp_path, "grpo", write_lines(tmp_path / "h.jsonl", questions), "--held-out", "0.2", "--seed", 3
    )
    held_out = {sample.audio_parts()[0].path for sample in drawn if sample.is_held_out}
    assert len(held_out) == 1 and sum(sample.is_held_out for sample in drawn) in (3, 4)
    assert all(sample.is_held_out or sample.metadata["split"] == "train" for sample in drawn)
    table = tmp_path / "t.csv"
    rows = [
        "a.wav,one,train",
        "b.wav,two,evaluation",
        "c.wav,three,Development",
        "d.wav,four,holdout",
        "e.wav,five,",
    ]
    table.write_text("\n".join(["path,text,split", *rows]))
    assert [sample.is_held_out for sample in convert(tmp_path, "ljspeech", table)] == [
        False,
        True,
        True,
        True,
        False,
    ]
    (tmp_path / "out.jsonl").unlink()
    table.write_text("path,text,split\na.wav,one,train\nb.wav,two,validated\n")
    with pytest.raises(ConfigError, match=r"t\.csv:3  split 'validated'.*known: train, .*evaluation"):
        convert(tmp_path, "ljspeech", table)
    assert not (tmp_path / "out.jsonl").exists()


def test_a_split_of_a_manifest_that_is_not_known_is_refused(tmp_path: Path) -> None:
    messages = [{"role": "assistant", "content": [{"type": "text", "text": "x"}]}]
    row = {"id": "a", "task": "text", "messages": messages}
    rows = [
        row | {"id": name, "metadata": {"split": name}} for name in ("evaluation", "train_sft", "validated")
    ]
    source = open_source(write_lines(tmp_path / "s.jsonl", rows))
    held_out = []
    for index in range(len(source)):
        try:
            held_out.append(source[index].sample.is_held_out)
        except Exception as error:
            assert "split 'validated'" in str(error) and "known: train" in str(error)
    assert held_out == [True, False]


# ------------------------------------------------------------------------------------------------ LJSpeech


@pytest.mark.parametrize(
    ("lines", "columns", "expected"),
    [
        (["LJ001-0001|in 1455,|in fourteen fifty-five,"], None, {"text": "in fourteen fifty-five,"}),
        (["s1|Hello there.|anna"], "id=1,text=2,speaker=3", {"text": "Hello there.", "speaker": "anna"}),
        (["s1|Dr. No|Doctor No"], "id=1,text=3", {"text": "Doctor No"}),
        (["anna|wavs/s1.wav|Hello."], "speaker=1,audio=2,text=3", {"text": "Hello.", "speaker": "anna"}),
        (["id|text|speaker", "s1|Hello.|anna"], None, {"text": "Hello.", "speaker": "anna"}),
        (["s1|Hello."], None, {"text": "Hello."}),
        (["wavs/s1.wav|Hello."], None, {"text": "Hello."}),
    ],
)
def test_columns_of_ljspeechs_layout(
    tmp_path: Path, lines: list[str], columns: str | None, expected: dict[str, str]
) -> None:
    sounds(tmp_path, "wavs/s1.wav", "wavs/LJ001-0001.wav")
    (tmp_path / "metadata.csv").write_text("\n".join(lines))
    named = ["--columns", columns] if columns else []
    (sample,) = convert(tmp_path, "ljspeech", tmp_path, *named)
    assert sample.metadata == expected and sample.audio("assistant")[0].path.startswith("wavs/")


@pytest.mark.parametrize("line", ["s1|Hello there, friend.|anna", "LJ001-0001|Hello there, friend.|anna"])
def test_a_third_column_that_may_be_anything_is_asked_for(tmp_path: Path, line: str) -> None:
    sounds(tmp_path, "wavs/s1.wav")
    (tmp_path / "metadata.csv").write_text(f"{line}\n")
    with pytest.raises(ConfigError, match=r"the third column \(anna\)") as caught:
        convert(tmp_path, "ljspeech", tmp_path)
    assert "--columns id=1,text=2,speaker=3" in str(caught.value)


def test_nan_is_no_speaker_and_htss_labels_are_no_text(tmp_path: Path) -> None:
    sounds(tmp_path, "in/a.wav", "in/b.wav", "in/c.wav")
    table = tmp_path / "in/t.csv"
    table.write_text(
        ",path,text,speaker,split\n0,a.wav,one,nan,nan\n1,b.wav,nan,Nan,train\n2,c.wav,None,x,\n"
    )
    first, second = convert(tmp_path, "ljspeech", table)
    assert first.metadata == {"text": "one"} and first.audio("assistant")[0].speaker is None
    assert second.metadata == {"text": "None", "speaker": "x"}
    assert [row["id"] for row in aside(tmp_path)] == ["b"]
    (tmp_path / "in/a.lab").write_text("0 2050000 sil\n2050000 3000000 hh\n")
    (tmp_path / "in/b.lab").write_text("xx^xx-sil+hh=ax@1_1\nxx^sil-hh+ax=l@1_2\n")
    (tmp_path / "in/c.lab").write_text("7 10 2\n")
    (digits,) = convert(tmp_path, "folder", tmp_path / "in")
    assert digits.texts("user") == ["7 10 2"]
    assert all("HTS's labels" in row["reason"] for row in aside(tmp_path)) and len(aside(tmp_path)) == 2


# -------------------------------------------------------------------------------- NeMo, JSON lines, Kaldi


@pytest.mark.parametrize("kind", ["nemo", "jsonl"])
def test_manifests_of_nemo(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    sounds(tmp_path, "clips/a.wav")
    rows: list[dict[str, Any]] = [
        {"audio_filepath": "clips/a.wav", "duration": 2.0, "text": "whole", "lang": "en"},
        {"audio_filepath": "clips/a.wav", "duration": 0.5, "offset": 0.25, "text": "first"},
        {"audio_filepath": "clips/a.wav", "duration": 0.5, "offset": 1.0, "text": "second", "speaker": 7},
        {"audio_filepath": "clips/none.wav", "duration": 1.0, "text": "gone"},
        {"audio_filepath": "clips/a.wav", "duration": 1.0, "text": None},
        {"audio": "clips/a.wav", "sentence": "other keys", "id": "x"},
    ]
    samples = convert(tmp_path, kind, write_lines(tmp_path / "m.json", rows), "--task", "asr")
    spans = [(part.start_s, part.end_s) for s in samples for part in s.audio("user")]
    assert spans == [(0.0, None), (0.25, 0.75), (1.0, 1.5), (0.0, None)]
    assert [sample.texts("assistant") for sample in samples] == [
        ["whole"],
        ["first"],
        ["second"],
        ["other keys"],
    ]
    assert samples[0].metadata["language"] == "en" and samples[2].metadata["speaker"] == "7"
    assert len({sample.id for sample in samples}) == 4 and samples[3].id == "x"
    assert ["no such file" in aside(tmp_path)[0]["reason"], len(aside(tmp_path))] == [True, 2]
    assert "columns read: audio, text, speaker, id, lang as language" in capsys.readouterr().out


def test_a_list_without_recordings_names_the_usual_columns(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "m.jsonl", [{"sound": "a.wav", "text": "x"}])
    with pytest.raises(ConfigError, match=r"no column of audio files among sound, text") as caught:
        convert(tmp_path, "jsonl", source)
    assert "audio_filepath" in str(caught.value)
    sounds(tmp_path, "a.wav")
    assert len(convert(tmp_path, "jsonl", source, "--columns", "audio=sound")) == 1


def test_kaldis_folders(tmp_path: Path) -> None:
    sounds(tmp_path, "audio/r1.wav", "audio/r2.flac")
    ran = tmp_path / "ran"
    files = {
        "wav.scp": f"r1 {tmp_path}/audio/r1.wav\nr2 flac -c -d -s {tmp_path}/audio/r2.flac |\nr3 touch {ran} |\n"
        "r4 raw.ark:17\n",
        "segments": "u1 r1 0.5 1.25\nu2 r2 0 -1\nu3 r3 0 1\nu4 r4 0 1\nu5 r9 0 1\nu6 r1 0 1\n",
        "text": "u1 hello there\nu2 good day\nu3 x\nu4 y\nu5 z\nu7 no segment\nu8\n",
        "utt2spk": "u1 ann\nu2 ben\n",
        "spk2gender": "ann f\n",
    }
    folder = tmp_path / "data" / "dev_clean"
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_text(content)
    first, second = convert(tmp_path, "kaldi", folder, "--task", "asr", "--audio", tmp_path)
    part = first.audio("user")[0]
    assert (part.path, part.start_s, part.end_s, part.speaker) == ("audio/r1.wav", 0.5, 1.25, "ann")
    assert first.texts("assistant") == ["hello there"] and first.metadata["gender"] == "f"
    assert (second.id, second.audio("user")[0].end_s, second.metadata["speaker"]) == ("u2", None, "ben")
    assert first.is_held_out, "the folder's name is that of a split"
    reasons = {row["id"]: row["reason"] for row in aside(tmp_path)}
    assert list(reasons) == ["u3", "u4", "u5", "u7", "u8", "u6"] and not ran.exists()
    assert (
        "none is run" in reasons["u3"]
        and "archive" in reasons["u4"]
        and "no line in wav.scp" in reasons["u5"]
    )
    assert reasons["u7"] == "has no line in segments" and reasons["u6"] == "has no text"
    (folder / "text").unlink()
    with pytest.raises(ConfigError, match="has no text"):
        convert(tmp_path, "kaldi", folder)


# -------------------------------------------------------------------------------------------------- lhotse


def cut(id: str, channel: int, channels: list[int], file: str, **supervision: Any) -> dict[str, Any]:
    said = {"id": f"{id}-s", "start": 0.0, "duration": 2.0, "channel": channel, "text": id, **supervision}
    recording = {
        "id": file,
        "sources": [{"type": "file", "channels": channels, "source": file}],
        "sampling_rate": 8_000,
        "num_samples": 16_000,
        "duration": 2.0,
    }
    return {
        "id": id, "start": 0.0, "duration": 2.0, "channel": channel, "supervisions": [said], "recording": recording,
        "type": "MonoCut",
    }  # fmt: skip


def test_the_span_and_the_channel_of_a_supervision(tmp_path: Path) -> None:
    sounds(tmp_path, "mono.wav")
    left, right = torch.full((1, 16_000), 0.25), torch.full((1, 16_000), -0.5)
    save(tmp_path / "stereo.wav", torch.cat([left, right]), 8_000)
    rows = [
        cut("part", 0, [0], "mono.wav", start=0.5, duration=0.4),
        cut("beyond", 0, [0], "mono.wav", start=1.0, duration=1.5),
        cut("outside", 0, [0], "mono.wav", start=3.0, duration=1.0),
        cut("right", 1, [1], "stereo.wav", start=0.5, duration=1.0),
        cut("left", 0, [0, 1], "stereo.wav"),
        cut("none", 2, [0, 1], "stereo.wav"),
        {**cut("multi", 0, [0, 1], "stereo.wav"), "type": "MultiCut", "channel": [0, 1]},
        {**cut("both", 0, [0, 1], "stereo.wav"), "type": "MultiCut", "channel": [0, 1]},
    ]
    rows[-1]["supervisions"][0]["channel"] = [0, 1]
    samples = convert(tmp_path, "lhotse", write_lines(tmp_path / "cuts.jsonl", rows), "--task", "asr")
    parts = {sample.id: sample.audio("user")[0] for sample in samples}
    spans = {id: (part.start_s, part.end_s) for id, part in parts.items()}
    assert spans == {
        "part": (0.5, 0.9), "beyond": (1.0, None), "right": (0.5, 1.5), "left": (0.0, None), "multi": (0.0, None),
    }  # fmt: skip
    assert parts["part"].path == "mono.wav" and parts["left"].path == parts["multi"].path
    levels = {id: load(tmp_path / parts[id].path).samples_CN for id in ("left", "right")}
    assert all(samples_CN.shape == (1, 16_000) for samples_CN in levels.values())
    assert torch.allclose(levels["left"], left, atol=1e-4) and torch.allclose(
        levels["right"], right, atol=1e-4
    )
    assert [row["id"] for row in aside(tmp_path)] == ["outside", "none", "both"]


# -------------------------------------------------------------------------------------------- Hugging Face


def test_classes_have_names(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    sounds(tmp_path, "a.wav")
    features = datasets.Features(
        {
            "audio": datasets.Value("string"),
            "label": datasets.ClassLabel(names=["dog", "cat"]),
            "tags": datasets.List(datasets.ClassLabel(names=["far", "near"])),
            "speaker": datasets.Value("float64"),
        }
    )
    rows = [
        {"audio": "a.wav", "label": 1, "tags": [0, 1], "speaker": 7.0},
        {"audio": "a.wav", "label": 0, "tags": [], "speaker": float("nan")},
        {"audio": "a.wav", "label": -1, "tags": [], "speaker": None},
    ]
    datasets.Dataset.from_list(rows, features=features).save_to_disk(str(tmp_path / "set"))
    arguments = ("--task", "asr", "--columns", "text=label", "--audio", tmp_path)
    first, second = convert(tmp_path, "huggingface", tmp_path / "set", *arguments)
    assert first.texts("assistant") == ["cat"] and first.metadata == {"text": "cat", "speaker": "7"}
    assert second.texts("assistant") == ["dog"] and "speaker" not in second.metadata
    assert len(aside(tmp_path)) == 1, "-1 is no class"


def test_parquet_with_sound_in_it(tmp_path: Path) -> None:
    """As `datasets` writes it (bytes and path), and as a plain column of bytes."""
    pq = pytest.importorskip("pyarrow.parquet")
    pa = pytest.importorskip("pyarrow")
    sounds(tmp_path, "a.wav")
    content = (tmp_path / "a.wav").read_bytes()
    struct = [{"bytes": content, "path": "a.wav"}]
    for name, column in (("struct", struct), ("bytes", [content]), ("alone", [{"bytes": content}])):
        (tmp_path / name).mkdir()
        pq.write_table(pa.table({"audio": column, "text": ["hi"]}), tmp_path / name / "x.parquet")
        for source in (tmp_path / name, tmp_path / name / "x.parquet"):
            (sample,) = convert(tmp_path, "huggingface", source, "--task", "asr")
            assert load(tmp_path / sample.audio("user")[0].path).num_samples == 16_000


def test_parquet_of_the_audio_feature(tmp_path: Path) -> None:
    """As datasets on the hub have it: the sound inside, and the feature in the file's metadata."""
    datasets = pytest.importorskip("datasets")
    sounds(tmp_path, "a.wav")
    content = {"bytes": (tmp_path / "a.wav").read_bytes(), "path": "a.wav"}
    features = datasets.Features({"audio": datasets.Audio(16_000), "text": datasets.Value("string")})
    plain = datasets.Dataset.from_list([{"audio": content, "text": "hi"}])
    plain.cast(features).to_parquet(str(tmp_path / "in/test-00000-of-00001.parquet"))
    (sample,) = convert(tmp_path, "huggingface", tmp_path / "in", "--task", "asr")
    assert load(tmp_path / sample.audio("user")[0].path).num_samples == 16_000 and sample.is_held_out


def test_files_of_an_unknown_split_beside_known_ones_are_refused(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    sounds(tmp_path, "a.wav")
    dataset = datasets.Dataset.from_list([{"audio": "a.wav", "text": "x"}])
    (tmp_path / "data").mkdir()
    for name in ("train", "evaluation", "development"):
        dataset.to_parquet(str(tmp_path / f"data/{name}-00000-of-00001.parquet"))
    samples = convert(tmp_path, "huggingface", tmp_path / "data", "--audio", tmp_path)
    assert {s.id.partition("-")[0]: s.is_held_out for s in samples} == {
        "train": False, "evaluation": True, "development": True,
    }  # fmt: skip
    dataset.to_parquet(str(tmp_path / "data/validated-00000-of-00001.parquet"))
    with pytest.raises(ConfigError, match="split 'validated'"):
        convert(tmp_path, "huggingface", tmp_path / "data", "--audio", tmp_path)


# --------------------------------------------------------------------------------------------------- chats


def test_oddities_of_chats_are_kept_or_set_aside_with_their_reason(tmp_path: Path) -> None:
    def chat(id: str, *answers: dict[str, Any]) -> dict[str, Any]:
        turns = [turn for answer in answers for turn in ({"role": "user", "content": "q"}, answer)]
        return {"id": id, "messages": [dict({"role": "assistant"}, **turn) for turn in turns]}

    rows = [
        chat("weighed", {"content": "bad", "weight": 0}, {"content": "good", "weight": 1}),
        chat("thought", {"content": "42.", "reasoning_content": "Six by seven."}),
        chat("empty", {"content": ""}, {"content": "a"}),
        chat("blank", {"content": "a"}, {"content": "  \n"}),
        chat("nil", {"content": None}),
        chat("tools", {"content": None, "tool_calls": [{"x": 1}]}),
        chat("half", {"content": "a", "weight": 0.5}),
        chat("nothing", {"content": "a", "weight": 0}),
        {"id": 0, "conversations": [{"from": "Human", "value": "q"}, {"from": "GPT", "value": "a"}]},
        {
            "id": "silent",
            "system": "",
            "conversations": [{"from": "human", "value": " "}, {"from": "gpt", "value": "a"}],
        },
    ]
    weighed, thought, capitals = convert(tmp_path, "sharegpt", write_lines(tmp_path / "c.jsonl", rows))
    assert [message.weight for message in weighed.messages] == [1, 0, 1, 1]
    assert thought.texts("assistant") == ["<think>Six by seven.</think>\n42."]
    assert capitals.id == "0" and [message.role for message in capitals.messages] == ["user", "assistant"]
    reasons = {row["id"]: row["reason"] for row in aside(tmp_path)}
    assert reasons == {
        "empty": "turn 2, of the assistant, is empty",
        "blank": "turn 4, of the assistant, is empty",
        "nil": "turn 2, of the assistant, is null",
        "tools": "a turn calls tools, and such chats are not read",
        "half": "weight of a message must be 0 or 1, not 0.5",
        "nothing": "every assistant's turn has weight 0: nothing to learn from it",
        "silent": "turn 1, of the user, is empty",
    }


def test_oddities_of_alpaca(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"instruction": "Say hi", "input": None, "output": "hi"},
        {"instruction": "Say hi", "output": " "},
        {"instruction": "n", "input": 5, "output": "o"},
        {"instruction": "Say", "output": "y", "history": [["q", ""]]},
    ]
    (sample,) = convert(tmp_path, "alpaca", write_lines(tmp_path / "c.jsonl", rows))
    assert sample.texts("assistant") == ["hi"]
    assert [row["reason"] for row in aside(tmp_path)] == [
        "turn 2, of the assistant, is empty", "input: a text is expected, not 5", "turn 2, of the assistant, is empty",
    ]  # fmt: skip


def test_pairs_whose_scores_contradict_their_order_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"prompt": "q", "chosen": "a", "rejected": "b"}
    scores = [(1.0, 2.0), (2.0, 1.0), (1.0, 1.0)]
    rows = [{**row, "id": str(n), "score_chosen": a, "score_rejected": b} for n, (a, b) in enumerate(scores)]
    assert len(convert(tmp_path, "preferences", write_lines(tmp_path / "p.jsonl", rows))) == 3
    assert "score_chosen is below score_rejected in 1 of the rows" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------ prompts of GRPO


def test_rows_of_trl_and_ms_swift(tmp_path: Path) -> None:
    sounds(tmp_path, "a.wav")
    rows: list[dict[str, Any]] = [
        {"prompt": "2 + 2?", "solution": "4", "split": "evaluation", "level": 1},
        {
            "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "3 + 3?"}],
            "solution": 6,
        },
        {
            "messages": [{"role": "user", "content": "<audio>What is heard?"}],
            "audios": ["a.wav"],
            "solution": "<answer>B</answer>",
        },
        {
            "messages": [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": "old"}],
            "audios": ["a.wav"],
            "solution": "a dog",
            "choices": ["rain", "a dog"],
        },
        {"prompt": "no key", "solution": None},
        {"messages": [{"role": "user", "content": "<image>Which?"}], "images": ["x.png"], "solution": "x"},
        {"prompt": "gone", "audios": ["none.wav"], "solution": "x"},
    ]
    first, second, heard, chosen = convert(tmp_path, "grpo", write_lines(tmp_path / "p.jsonl", rows))
    assert first.texts("user") == ["2 + 2?"] and first.texts("assistant") == ["4"] and first.is_held_out
    assert first.metadata == {"split": "test", "level": 1} and first.task == "text"
    assert second.texts("system") == ["Be brief."] and second.texts("assistant") == ["6"]
    assert heard.audio("user")[0].path == "a.wav" and heard.task == "audio_qa"
    assert heard.messages[-1].content == [TextPart(text="<answer>B</answer>")]
    assert chosen.texts("assistant") == ["a dog"] and chosen.metadata["choices"] == ["rain", "a dog"]
    assert [row["kind"] for row in aside(tmp_path)] == ["no solution", "pictures", "unusable recording"]
    table = tmp_path / "t.csv"
    table.write_text("file,question,options,answer\na.wav,Which?,rain|a dog,a dog\n")
    (row,) = convert(tmp_path, "grpo", table)
    assert row.audio("user")[0].path == "a.wav" and row.metadata["choices"] == ["rain", "a dog"]
    table.write_text("take,question,answer\na.wav,Which?,a dog\n")
    with pytest.raises(ConfigError, match="column take: looks like a recording, .*--columns audios=take"):
        convert(tmp_path, "grpo", table)
    with pytest.raises(ConfigError, match="no column of solutions among prompt"):
        convert(tmp_path, "grpo", write_lines(tmp_path / "q.jsonl", [{"prompt": "x"}]))
