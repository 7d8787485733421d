"""`inspect` of a preference: every answer's judgements, then chosen beside rejected, row by row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from audiollm.commands.cli import build_app
from audiollm.data.records.sample import (
    AudioPart,
    ContentPart,
    Message,
    RatedAnswer,
    Sample,
    TextPart,
    write_samples,
)
from audiollm.data.records.shards import ShardWriter
from audiollm.data.text.tokenizer import FILE_NAME, train_text_tokenizer
from audiollm.errors import ConfigError

BOOKS, SIZE = 3, 32


def run(*arguments: object) -> str:
    result = CliRunner().invoke(build_app("inspect"), ["inspect", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def json_rows(*arguments: object) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    *rows, last = [json.loads(line) for line in run(*arguments, "--json").splitlines()]
    return rows, last


def answer(text: str, *more: ContentPart, **judged: Any) -> RatedAnswer:
    return RatedAnswer(content=[TextPart(text=text), *more], **judged)


def chat(*answers: RatedAnswer, id: str = "pair") -> Sample:
    """Two questions, the first of which is answered already."""
    turns = [("user", "Hi"), ("assistant", "Hello."), ("user", "Which colour is the sky?")]
    messages = [Message(role=role, content=[TextPart(text=text)]) for role, text in turns]
    return Sample(id=id, messages=messages, task="text", answers=list(answers))


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A heard question, and three answers in text and speech."""
    folder = tmp_path_factory.mktemp("shards")
    asked = [Message(role="user", content=[AudioPart(path="q.wav"), TextPart(text="say seven")])]
    answers = [
        answer("so", AudioPart(path=f"{n}.wav"), score=score, origin="policy")
        for n, score in enumerate((0.5, 0.25, 0.875))
    ]
    writer = ShardWriter(folder, 2)
    rng = np.random.default_rng(0)
    codes = [rng.integers(SIZE, size=(BOOKS, frames)).astype(np.int16) for frames in (6, 30, 40, 9)]
    writer.write(0, Sample(id="spoken", messages=asked, task="tts", answers=answers), [codes])
    writer.close({"codec": {"num_codebooks": BOOKS, "codebook_size": SIZE, "frame_rate": 20.0}})
    return folder


def test_chosen_stands_beside_rejected(tmp_path: Path) -> None:
    sample = chat(answer("It is \x1b[31mgreen.", rank=2, score=3.0), answer("It is blue.", rank=1, score=8.5))
    write_samples(tmp_path / "s.jsonl", [sample])
    shown = run(tmp_path / "s.jsonl")
    lines = shown.splitlines()
    assert "pair: task text, sample 0 of 1" in lines[0] and "\x1b" not in shown and "\\u001b" in shown
    judged = [line.split() for line in lines[lines.index(next(x for x in lines if "verdict" in x)) + 1 :][:2]]
    assert [row[:3] for row in judged] == [["0", "2", "3"], ["1", "1", "8.5"]]
    names = next(line for line in lines if "(chosen)" in line)
    assert names.index("answer 1 (chosen)") < names.index("answer 0 (rejected)")
    first = lines[lines.index(names) + 2]
    assert first.count("text") == 2 and first.count("●") == 2, "both answers are on one line"
    prompt = lines[lines.index(next(line for line in lines if line.strip() == "prompt")) :]
    prompt = prompt[: prompt.index(next(line for line in prompt if "chosen" in line))]
    assert "●" not in "".join(prompt), "an earlier answer in the prompt is no target"
    few = run(tmp_path / "s.jsonl", "--limit", 4)
    assert "more lines (--limit)" in few and len(few.splitlines()) < len(lines)


def test_json_has_every_row_of_every_answer(shards: Path) -> None:
    rows, last = json_rows(shards)
    prompt = [row for row in rows if row["answer"] is None]
    assert len(prompt) == last["prompt_rows"] and not any(any(row["is_target"]) for row in prompt)
    assert last["compared"] == [2, 1] and "weights" not in rows[0]
    for index, (about, frames) in enumerate(zip(last["answers"], (30, 40, 9), strict=True)):
        own = [row for row in rows if row["answer"] == index]
        assert [row["position"] for row in own] == list(range(len(prompt), len(prompt) + len(own)))
        audio = [row for row in own if row["kind"] == "audio out"]
        assert len(audio) == frames + BOOKS + 1 and audio[0]["codes"] == ["BOS"] * BOOKS
        said = "".join(row["token"] for row in own if row["kind"] == "text" and row["is_target"][0])
        assert said == "so<|audio_out_bos|><|audio_eos|><|eot_id|>"
        targets = sum(sum(row["is_target"]) for row in own)
        assert about["targets"] == targets and about["rows"] == len(own)
        assert about["origin"] == "policy" and about["score"] == (0.5, 0.25, 0.875)[index]
    assert len({tuple(row["codes"]) for row in rows if row["answer"] == 0 and row["codes"]}) > 10


def test_the_middle_of_long_speech_is_counted(shards: Path) -> None:
    shown = run(shards)
    assert "rows of audio" in shown and "answer 2 (chosen)" in shown and "answer 1 (rejected)" in shown
    other = run(shards, "--answers", "0,2")
    assert "answer 0 (chosen)" in other and "answer 2 (rejected)" in other
    for wrong in ("0", "0,3", "x,y", "0,1,2"):
        with pytest.raises(ConfigError, match=r"two answers are compared.*\n.*0 to 2"):
            run(shards, "--answers", wrong)


def test_speech_without_codes_says_how_long_it_will_be(tmp_path: Path) -> None:
    spoken = [
        answer("so", AudioPart(path=f"{n}.wav", end_s=seconds), rank=n) for n, seconds in ((1, 2.0), (2, 1.0))
    ]
    write_samples(tmp_path / "s.jsonl", [chat(*spoken)])
    shown = run(tmp_path / "s.jsonl")
    assert "25 frames per second of 8 codebooks" in shown and "rows of audio" in shown
    rows, _ = json_rows(tmp_path / "s.jsonl")
    audio = [row for row in rows if row["kind"] == "audio out"]
    assert len(audio) == 50 + 25 + 2 * 9 and all(row["codes"] is None for row in audio)


def test_answers_that_are_not_compared(tmp_path: Path) -> None:
    """Single answers with a verdict, steps with labels, and a list that nobody judged."""
    steps = RatedAnswer(content=[TextPart(text="one. "), TextPart(text="two.")], steps=[1, 0.25])
    samples = [
        chat(answer("yes", verdict="undesirable"), id="thumb"),
        chat(steps, id="steps"),
        chat(answer("x"), answer("y"), id="unjudged"),
    ]
    write_samples(tmp_path / "s.jsonl", samples)
    thumb = run(tmp_path / "s.jsonl")
    assert "undesirable" in thumb and "answer 0" in thumb and "chosen" not in thumb
    labelled = run(tmp_path / "s.jsonl", "--sample", "steps")
    assert "steps 1, 0.25" in labelled and labelled.count("  step ") == 2
    rows, _ = json_rows(tmp_path / "s.jsonl", "--sample", "steps")
    assert [row["step"] for row in rows if "step" in row] == [1.0, 0.25]
    unjudged = run(tmp_path / "s.jsonl", "--sample", "unjudged")
    assert "no answer is better than another: answers 0, 1 have neither" in unjudged
    assert "answer 0 " in unjudged and "answer 1 " in unjudged and "rejected" not in unjudged


def test_the_stage_that_trains_on_them(tmp_path: Path) -> None:
    """Its settings name the samples, and the model that it begins from has the vocabulary."""
    write_samples(tmp_path / "s.jsonl", [chat(answer("blue", rank=1), answer("green", rank=2))])
    (tmp_path / "stage").mkdir()
    (tmp_path / "begun").mkdir()
    train_text_tokenizer(["user assistant"] * 3, 300).save(str(tmp_path / "begun" / FILE_NAME))
    settings = {"samples": [{"path": str(tmp_path / "s.jsonl")}], "start": str(tmp_path / "begun")}
    (tmp_path / "stage" / "config.yaml").write_text(json.dumps({"train_preference": settings}))
    shown = run(tmp_path / "stage")
    assert "answer 0 (chosen)" in shown and "trained on these samples" not in shown


def test_the_option_is_for_samples_with_answers(tmp_path: Path) -> None:
    write_samples(tmp_path / "s.jsonl", [chat(answer("x")).answered(0)])
    with pytest.raises(ConfigError, match="has no answers to choose among"):
        run(tmp_path / "s.jsonl", "--answers", "0,1")
