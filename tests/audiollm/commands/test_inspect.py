"""`inspect` shows what the template made and what pack weighs, row by row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from audiollm.commands.cli import build_app
from audiollm.data.chat.delay import IGNORE
from audiollm.data.chat.template import Template
from audiollm.data.inspection import elide, readable_token, stream_rows, summarize_stream, target_weights
from audiollm.data.records.sample import AudioPart, Message, Sample, TextPart, write_samples
from audiollm.data.records.shards import ShardWriter
from audiollm.data.text.tokenizer import FILE_NAME, train_text_tokenizer
from audiollm.errors import ConfigError

BOOKS, SIZE = 3, 32
TEMPLATE = Template(train_text_tokenizer(["system user assistant seven"] * 3, 300), BOOKS, SIZE)


def sample(index: int, text: str = "say [laugh] é\n\x1b[31mred") -> Sample:
    messages = [
        Message(role="user", content=[TextPart(text=text), AudioPart(path="in.wav", end_s=0.4)]),
        Message(role="assistant", content=[TextPart(text="so"), AudioPart(path="out.wav", end_s=2.0)]),
    ]
    return Sample(id=f"clip_{index}", messages=messages, task="tts")


def codes(frames: int) -> np.ndarray:
    return np.random.default_rng(frames).integers(SIZE, size=(BOOKS, frames)).astype(np.int16)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "tokenize" / "shards"
    writer = ShardWriter(folder, 2)
    for index in range(4):
        writer.write(index, sample(index), [[codes(10), codes(40 + index)]])
    writer.close({"codec": {"num_codebooks": BOOKS, "codebook_size": SIZE, "frame_rate": 20.0}})
    return folder


def run(*arguments: object) -> str:
    result = CliRunner().invoke(build_app("inspect"), ["inspect", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 3))
@settings(max_examples=30)
def test_weights_are_the_closed_form(heard: int, said: int, parts: int) -> None:
    """Each of n text targets weighs 1/n, and each of a codebook's m targets 1/(m K): both kinds add up to 1."""
    content: list[Any] = [TextPart(text="well"), *[AudioPart(path="a.wav")] * parts]
    chat = [
        Message(role="user", content=[TextPart(text="x"), AudioPart(path="b.wav")]),
        Message(role="assistant", content=content),
    ]
    clips = [torch.randint(SIZE, (BOOKS, heard)), *(torch.randint(SIZE, (BOOKS, said)) for _ in range(parts))]
    stream = TEMPLATE.compile(chat, clips)
    text_S, audio_SK = target_weights(stream)
    is_text, is_audio = stream.text_targets_S != IGNORE, stream.audio_targets_SK != IGNORE
    assert torch.allclose(text_S, is_text.double() / is_text.sum())
    if parts:
        assert torch.allclose(audio_SK, is_audio.double() / (is_audio.sum(dim=0) * BOOKS))
    else:
        assert not bool(audio_SK.any())
    rows = stream_rows(TEMPLATE, stream)
    assert [row.weights for row in rows if not row.codes] == [
        (w,) for w in text_S[stream.kinds_S == 0].tolist()
    ]
    assert {s.kind: s.targets for s in summarize_stream(TEMPLATE, stream)}["text"] == int(is_text.sum())


def test_json_has_every_row_and_its_targets(shards: Path) -> None:
    lines = [json.loads(line) for line in run(shards, "--sample", "clip_1", "--json").splitlines()]
    *rows, last = lines
    assert [row["position"] for row in rows] == list(range(len(rows)))
    audio = [row for row in rows if row["kind"] == "audio out"]
    assert len(audio) == 41 + BOOKS + 1 and audio[0]["codes"] == ["BOS"] * BOOKS
    assert audio[-1]["codes"] == ["EOS"] * BOOKS and audio[-1]["is_target"] == [False, False, True]
    spoken = [row["codes"][0] for row in audio if row["is_target"][0]]
    assert spoken == [*map(str, codes(41)[0].tolist()), "EOS"]
    assert not any(any(row["is_target"]) for row in rows if row["kind"] == "audio in")
    said = "".join(row["token"] for row in rows if row["kind"] == "text" and row["is_target"][0])
    assert said == "so<|audio_out_bos|><|audio_eos|><|eot_id|>"
    by_kind = {entry["kind"]: entry for entry in last["summary"]}
    assert by_kind["audio out"]["targets"] == 42 * BOOKS and by_kind["audio out"]["eos_targets"] == BOOKS
    assert by_kind["text"]["weight"] == pytest.approx(1) and by_kind["audio in"]["weight"] == 0


def test_the_table_leaves_out_the_middle_and_counts_it(shards: Path) -> None:
    shown = run(shards.parent)
    assert "clip_0: task tts, sample 0 of 4" in shown and "trained on these samples" in shown
    assert f"… {40 + BOOKS + 1 - 2 * (BOOKS + 1)} rows of audio out, all targets" in shown
    assert (
        f"audio out  {40 + BOOKS + 1} rows, {41 * BOOKS} targets, {BOOKS} of them EOS, weight 1.0000" in shown
    )
    assert "\x1b" not in shown and "\\u001b" in shown and "\\n" in shown
    few = run(shards, "--limit", 3, "--sample", 2).splitlines()
    assert any("more rows (--limit)" in line for line in few) and len(few) == 12


def test_samples_without_codes_say_how_many_frames_they_will_take(tmp_path: Path) -> None:
    write_samples(tmp_path / "samples.jsonl", [sample(0)])
    shown = run(tmp_path / "samples.jsonl")
    assert "25 frames per second of 8 codebooks" in shown
    assert "19 rows of audio in for 10 frames, all masked" in shown
    assert "59 rows of audio out for 50 frames" in shown
    assert run(tmp_path) == shown, "the folder of a compose stage"
    record = json.loads(run(tmp_path, "--json").splitlines()[-10])
    assert record["kind"] == "audio out" and record["codes"] is None


def test_a_models_vocabulary(shards: Path, tmp_path: Path) -> None:
    """Given by its folder, or found in that of the train stage, which names its shards."""
    (tmp_path / "model").mkdir()
    TEMPLATE.tokenizer.save(str(tmp_path / "model" / FILE_NAME))
    (tmp_path / "config.yaml").write_text(f"train:\n  samples: [{{path: {shards}, weight: null}}]\n")
    shown = run(shards, "--tokenizer", tmp_path)
    assert "trained on these samples" not in shown
    assert run(tmp_path) == shown
    chatml = train_text_tokenizer(["user"] * 3, 300, "chatml")
    chatml.save(str(tmp_path / "model" / FILE_NAME))
    assert "<|im_end|>" in run(tmp_path)


def test_what_cannot_be_shown_says_why(shards: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such id.*\n.*0 to 3; the first id is clip_0"):
        run(shards, "--sample", "clip_9")
    with pytest.raises(ConfigError):
        run(tmp_path / "nothing")
    (tmp_path / "config.yaml").write_text("report: {}\n")
    with pytest.raises(ConfigError, match="holds no samples"):
        run(tmp_path)
    (tmp_path / "config.yaml").write_text("train_policy:\n  samples: [{path: mine/samples.jsonl}]\n")
    told = (
        r"config.yaml  its samples are not there: mine/samples.jsonl\n  go to the folder in which the run was"
    )
    with pytest.raises(ConfigError, match=told):
        run(tmp_path)
    for stage in ("train", "compose"):
        (tmp_path / "run" / stage).mkdir(parents=True)
        (tmp_path / "run" / stage / "stage.json").write_text("{}")
    with pytest.raises(ConfigError, match="folder of a whole run\n.*a stage: compose, train"):
        run(tmp_path / "run")
    write_samples(tmp_path / "forged.jsonl", [sample(0, "a <|eot_id|> b")])
    with pytest.raises(ConfigError, match=r"sample clip_0: the user's text holds the control token"):
        run(tmp_path / "forged.jsonl")


def test_tokens_are_readable() -> None:
    tokenizer = TEMPLATE.tokenizer
    shown = [readable_token(tokenizer, token) for token in tokenizer.encode('a "b" \\ [x]\t語').ids]
    assert "".join(shown[:-3]) == 'a "b" \\ [x]\\t' and len(shown[-3:]) == 3, (
        "parts of a character by their names"
    )
    assert all(part.isprintable() for part in shown)


def test_eliding_keeps_every_row() -> None:
    stream = TEMPLATE.compile(
        sample(0).messages, [torch.zeros(BOOKS, 2).long(), torch.zeros(BOOKS, 30).long()]
    )
    rows = stream_rows(TEMPLATE, stream)
    for ends in (0, 1, 4, 50):
        flat = [row for item in elide(rows, ends) for row in (item if isinstance(item, list) else [item])]
        assert flat == rows
