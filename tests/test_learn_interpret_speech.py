"""`benchmarks/learn_interpret_speech.py`: truth in German order, scores of what is heard."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from audiollm.audio import load, save
from audiollm.data.records.aligned_recording import AlignedRecording
from audiollm.data.records.manifest import read_samples
from audiollm.data.records.sample import AudioPart
from audiollm.evaluate.judges.classifier import ClipClassifier
from audiollm.files.atomic import read_jsonl
from audiollm.recipe.runner import run_recipe

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import learn_interpret_speech as bench
import proof


def test_digits_are_in_the_order_of_the_german_word() -> None:
    words = {row["text"]: row["target"] for row in bench.digit_phrases()}
    assert len(words) == 100
    expected = {
        "two one": "one two", "one three": "three one", "one two": "one two", "two zero": "two zero", "two": "two",
    }  # fmt: skip
    assert {text: words[text] for text in expected} == expected


def takes(folder: Path) -> list[dict[str, Any]]:
    """Two takes of two digits by two speakers, told apart by their level and length; the second ones are held out."""
    rows = []
    for number, (digit, speaker, take) in enumerate(
        (digit, speaker, take) for digit in ("one", "two") for speaker in "ab" for take in range(2)
    ):
        path = folder / f"{digit}-{speaker}-{take}.wav"
        save(path, torch.full((1, 2000 + 100 * number), 0.1 + 0.1 * number), 8000)
        split = "test" if take else "train"
        times = {"start_s": 0.0, "end_s": (2000 + 100 * number) / 8000, "split": split}
        rows.append({"id": path.stem, "path": str(path), "speaker": speaker, "text": digit, **times})
    return rows


def test_targets_are_takes_of_the_speaker_at_the_time_of_the_group(tmp_path: Path) -> None:
    """From the talks of `compose_talks` to streams: a part of speech for each digit, in order, behind one text."""
    segments = takes(tmp_path)
    save(tmp_path / "talk.wav", torch.zeros(1, 8000 * 3), 8000)
    segment = {"start_s": 0.2, "end_s": 0.9, "text": "two one", "target": "one two", "speaker": "b"}
    talk = {"id": "t", "audio": "talk.wav", "segments": [segment], "split": "test"}
    (row,) = bench.spoken_talks([talk], segments, tmp_path)
    AlignedRecording.model_validate(row)
    assert [Path(each["said"]["path"]).stem for each in row["segments"]] == ["one-b-1", "two-b-1"]
    (tmp_path / "spoken_talks.jsonl").write_text(json.dumps(row) + "\n")
    recipe = proof.Proof(tmp_path).load(bench.NAME, codec=tmp_path / "codec", absent=[])
    streams = replace(recipe, stages=tuple(stage for stage in recipe.stages if stage.name == "streams"))
    run_recipe(streams, Console(quiet=True))
    (sample,), bad = read_samples(tmp_path / "streams" / "streams.jsonl")
    assert not bad
    actions = sample.messages[-1].actions()
    texts = [getattr(action[0], "text", None) for action in actions]
    assert texts == ["", "", "one two", *[""] * 7]  # 0.9 s is in the third chunk of 0.32 s
    said = [Path(part.path).stem for part in actions[2] if isinstance(part, AudioPart)]
    assert said == ["one-b-1", "two-b-1"]


def test_digits_right_count_what_is_left_out_and_what_is_too_much() -> None:
    truth = [["one", "two"], ["three"]]
    assert bench.digits_right(truth, truth) == 1
    assert bench.digits_right([["two", "one"], ["three"]], truth) == 2 / 3
    assert bench.digits_right([["one"], []], truth) == 1 / 3
    assert bench.digits_right([["one", "one", "two", "nine"], ["three"]], truth) == 3 / 5
    assert bench.digits_right([[], []], truth) == 0


class ByLevel:
    """A judge that tells a label by the mean level of a clip, as the takes above have it."""

    def __init__(self, labels: list[str]) -> None:
        self._labels = labels

    def predict_many(self, clips: list[tuple[torch.Tensor, int]]) -> list[tuple[str, float]]:
        middle = [samples_CN[0, samples_CN.shape[1] // 2] for samples_CN, _ in clips]
        return [(self._labels[round(10 * float(level)) - 1], 1.0) for level in middle]


def test_a_system_is_scored_by_what_is_heard_and_when(tmp_path: Path) -> None:
    """Of two streams the first is answered right, the second in another voice and half; the third not at all."""

    def digit(level: float, time_s: float) -> bench.SaidDigit:
        return bench.SaidDigit(torch.full((1, 4000), level), 8000, time_s)

    def stream(name: str, said: list[bench.SaidDigit]) -> bench.SpokenStream:
        return bench.SpokenStream(name, tmp_path / f"{name}.wav", "a", ["one", "two"], 4.0, said, "one two")

    streams = [
        stream("x", [digit(0.1, 1.0), digit(0.2, 1.0)]), stream("y", [digit(0.4, 2.0)]), stream("z", []),
    ]  # fmt: skip
    digits, speakers = ByLevel(["one", "two", "one", "two"]), ByLevel(["a", "a", "b", "b"])
    found = bench.scores_of(streams, bench.Judges(digits, speakers), tmp_path / "out")  # type: ignore[arg-type]
    assert found["digits"] == 3 / 6 and found["voice"] == 2 / 3 and found["said"] == 3 / 6
    assert found["empty"] == 1 and found["gaps"] == 0
    # both digits of x come out at 1 s, y's at 2 s, z counts as said at its end: LAAL is 0, 2 and 4 s
    assert found["LAAL"] == pytest.approx((0 + 2 + 4) / 3)
    first, second, silent = read_jsonl(tmp_path / "out" / "instances.log")
    assert first["prediction_offset"] == 0 and not silent["delays"]
    nothing = load(tmp_path / "out" / silent["prediction"])
    assert nothing.samples_CN.shape[1] == 4 * nothing.sample_rate and not nothing.samples_CN.any()
    heard = load(tmp_path / "out" / first["prediction"]).samples_CN[0]
    assert heard[:8000].abs().max() == 0  # the second digit is played when the first is over
    assert heard[[8001, 11999, 12001, 15999]].tolist() == pytest.approx([0.1, 0.1, 0.2, 0.2], abs=1e-3)
    assert second["delays"] == [2000]


@pytest.mark.parametrize(("digits", "voice", "expected"), [
    (0.84, 0.9, [True, True]),
    (0.80, 0.9, [False, True]),
    (0.84, 0.8, [True, False]),
])  # fmt: skip
def test_the_bars(digits: float, voice: float, expected: list[bool]) -> None:
    found = bench.bars({"digits": digits, "voice": voice, "exchanged": 0.1}, real=0.98)
    assert [line["met"] for line in found] == expected
    assert json.dumps(found)


def test_judges_learn_real_takes_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    segments = takes(tmp_path)
    trained: list[tuple[int, list[str]]] = []

    def train(clips: list[Any], labels: list[str], config: Any) -> ClipClassifier:
        trained.append((len(clips), labels))
        return ByLevel([])  # type: ignore[return-value]

    monkeypatch.setattr(bench, "train_classifier", train)
    bench.trained_judges(segments, bench.JUDGE)
    assert trained == [(4, ["one", "one", "two", "two"]), (4, ["a", "b", "a", "b"])]
