"""The stage `evaluate`: judges gathered, everything heard, tables and figures."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor

from audiollm.audio import save
from audiollm.data.records.sample import AudioPart, Message, Sample, TextPart, write_samples
from audiollm.data.text.tokenizer import TRAINED_FILE
from audiollm.errors import StageError
from audiollm.evaluate.judges.choosing import recognizer_digest
from audiollm.evaluate.judges.classifier import (
    ClipClassifier,
    train_classifier,
)
from audiollm.evaluate.judges.judging import JudgedClip, SpeechClip, SpeechJudges
from audiollm.evaluate.report.metric_error import MetricError
from audiollm.evaluate.report.statistics import share
from audiollm.evaluate.speech import trained_judges as judges_module
from audiollm.evaluate.speech.new_voices import new_voice_scores
from audiollm.evaluate.speech.run import _deaf_judges, judge_all, score, speech_figures
from audiollm.evaluate.speech.settings import EvaluationConfig
from audiollm.evaluate.speech.stage import STAGE, run_evaluation
from audiollm.evaluate.speech.trained_judges import why_no_speaker_judge, why_no_text_judge
from audiollm.files.atomic import read_json, read_jsonl, write_json, write_jsonl
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import StagePlan
from tests.audiollm.generation.melodies import JUDGE_STEPS, RATE, SPEAKERS, TEXTS, melody
from tests.pipelines.annotate.steps.tiny_recognizers import ctc_folder


def write_corpus(folder: Path, new_speakers: Sequence[str] = ()) -> None:
    samples = []
    for text in TEXTS:
        for speaker in (*SPEAKERS, *new_speakers):
            for take in range(3 if speaker in new_speakers else 13):
                name = f"{text}_{speaker}_{take}"
                path = folder / "real" / f"{name}.wav"
                path.parent.mkdir(parents=True, exist_ok=True)
                save(path, melody(text, speaker, take), RATE)
                split = "test" if take < 3 else "train"
                messages = [
                    Message(role="user", content=[TextPart(text=text)]),
                    Message(role="assistant", content=[AudioPart(path=str(path), speaker=speaker)]),
                ]
                about = {"split": split, "speaker": speaker, "text": text, "segment": name}
                samples.append(Sample(id=name, messages=messages, task="tts", metadata=about))
    write_samples(folder / "samples.jsonl", samples)


def write_generated(
    folder: Path, name: str, heard_text: dict[str, str], heard_speaker: Mapping[str, str] | None = None
) -> Path:
    """Clips that say `heard_text[text]` where `text` is asked for, in the asked voice or in another."""
    rows = []
    for text in TEXTS:
        for speaker in heard_speaker or SPEAKERS:
            for take in range(3):
                path = folder / name / "audio" / f"{text}_{speaker}_{take}.wav"
                path.parent.mkdir(parents=True, exist_ok=True)
                heard = heard_speaker[speaker] if heard_speaker else speaker
                save(path, melody(heard_text[text], heard, 100 + take), RATE)
                row = {
                    "id": path.stem,
                    "path": f"audio/{path.name}",
                    "text": text.capitalize(),
                    "speaker": speaker,
                }
                rows.append({**row, "prompt_index": take, "duration_s": 0.4, "stopped": True})
    write_jsonl(folder / name / "generated.jsonl", rows)
    return folder / name / "generated.jsonl"


def evaluate(folder: Path, audio: Path, output: str, **settings: Any) -> dict[str, Any]:
    output_folder = folder / output
    output_folder.mkdir(exist_ok=True)
    console = Console(quiet=True)
    context = Context(output_folder, cast(Any, None), console, {})
    config = EvaluationConfig(
        audio=audio, samples=folder / "samples.jsonl", judge_steps=JUDGE_STEPS, **settings
    )
    return run_evaluation(config, context)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder)
    right = {text: text for text in TEXTS}
    evaluate(folder, write_generated(folder, "right", right), "evaluate")
    return folder


def fork(corpus: Path, name: str) -> None:
    """A stage folder in which the judges are trained already."""
    shutil.copytree(corpus / "evaluate" / "judges", corpus / name / "judges")


def test_good_clips_score_like_real_ones(corpus: Path) -> None:
    scores = read_json(corpus / "evaluate" / "scores.json")
    assert scores["judge"] == "classifier"
    assert scores["sets"]["real"]["classifier"]["accuracy"] >= 0.9
    assert 0.9 <= scores["relative"]["classifier"] <= 1.1
    assert scores["sets"]["generated"]["speaker"]["accuracy"] >= 0.9
    generated = scores["sets"]["generated"]
    counts = np.array(generated["classifier"]["confusion"]["counts"])
    assert counts.sum() == generated["n"] == 18
    assert np.trace(counts) == round(generated["classifier"]["accuracy"] * 18)
    assert set(generated["classifier"]["by_text"]) == set(TEXTS)
    assert {table["n"] for table in generated["classifier"]["by_speaker"].values()} == {9}
    assert scores["judges"]["pocketsphinx"]["grammar"] == sorted(TEXTS)
    assert scores["voicing"]["real"]["n"] > 0 and scores["voicing"]["generated"]["n"] == 18


def test_clips_are_listed_with_what_was_heard(corpus: Path) -> None:
    rows = read_jsonl(corpus / "evaluate" / "clips.jsonl")
    assert len(rows) == 18
    scores = read_json(corpus / "evaluate" / "scores.json")["sets"]["generated"]
    for judge in ("classifier", "speaker", "pocketsphinx"):
        assert np.mean([row["correct"][judge] for row in rows]) == pytest.approx(scores[judge]["accuracy"])
    for row in rows:
        assert (corpus / "evaluate" / row["path"]).is_file()
        assert set(row["heard"]) == {"classifier", "pocketsphinx"}
        assert row["correct"]["classifier"] == (row["heard"]["classifier"] == row["text"])
        assert 0 < row["confidence"]["speaker"] <= 1


def test_wrong_clips_score_low(corpus: Path) -> None:
    """Texts rotated by one: everything is said in a good voice, and nothing is what was asked for."""
    rotated = dict(zip(TEXTS, [*list(TEXTS)[1:], next(iter(TEXTS))], strict=True))
    fork(corpus, "wrong_run")
    found = evaluate(corpus, write_generated(corpus, "wrong", rotated), "wrong_run")
    assert found["generated_accuracy"] <= 0.1
    assert found["relative_accuracy"] <= 0.1
    assert found["speaker_generated_accuracy"] >= 0.9


def test_missing_and_broken_clips_count_as_wrong_and_are_named(corpus: Path) -> None:
    audio = write_generated(corpus, "broken", {text: text for text in TEXTS})
    (audio.parent / "audio" / "one_anna_0.wav").unlink()
    (audio.parent / "audio" / "two_bert_1.wav").write_bytes(b"RIFF not at all")
    fork(corpus, "broken_run")
    found = evaluate(corpus, audio, "broken_run", reference_audio=corpus / "right" / "generated.jsonl")
    whole = read_json(corpus / "evaluate" / "scores.json")["sets"]["generated"]
    assert found["n_generated"] == 18
    assert found["unreadable"] == 2
    assert found["generated_accuracy"] == pytest.approx(whole["classifier"]["accuracy"] - 2 / 18)
    assert found["speaker_generated_accuracy"] == pytest.approx(whole["speaker"]["accuracy"] - 2 / 18)
    assert found["reference_accuracy"] == whole["classifier"]["accuracy"]
    table = read_json(corpus / "broken_run" / "scores.json")["sets"]["generated"]
    assert {row["id"] for row in table["unreadable"]} == {"one_anna_0", "two_bert_1"}
    assert sum(row[-1] for row in table["classifier"]["confusion"]["counts"]) == 2
    (row,) = [row for row in read_jsonl(corpus / "broken_run" / "clips.jsonl") if row["id"] == "one_anna_0"]
    assert row["problem"] and row["correct"] == {"classifier": False, "speaker": False, "pocketsphinx": False}


@pytest.mark.slow
def test_a_killed_run_goes_on_and_ends_the_same(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A judge that is there is not trained again; one that is not, is, to the same weights bit for bit."""
    fork(corpus, "resumed_run")
    speaker = corpus / "resumed_run" / "judges" / "speaker"
    weights = (speaker / "classifier.safetensors").read_bytes()
    (speaker / "classifier.json").unlink()
    (speaker / "classifier.safetensors").write_bytes(b"cut off")
    trained = []

    def counted(*arguments: Any) -> ClipClassifier:
        trained.append(sorted(set(arguments[1])))
        return train_classifier(*arguments)

    monkeypatch.setattr(judges_module, "train_classifier", counted)
    evaluate(corpus, corpus / "right" / "generated.jsonl", "resumed_run", workers=1)
    assert trained == [list(SPEAKERS)]
    assert (speaker / "classifier.safetensors").read_bytes() == weights
    for name in ("scores.json", "clips.jsonl"):
        assert (corpus / "resumed_run" / name).read_text() == (corpus / "evaluate" / name).read_text()


def test_nothing_to_compare_with_ends_with_exit_code_2(corpus: Path, tmp_path: Path) -> None:
    lines = (corpus / "samples.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "samples.jsonl").write_text("".join(line for line in lines if '"train"' in line))
    with pytest.raises(StageError, match="no sample of split 'test'") as caught:
        evaluate(tmp_path, corpus / "right" / "generated.jsonl", "run")
    assert caught.value.exit_code == 2


def test_a_bad_row_is_named(corpus: Path, tmp_path: Path) -> None:
    shutil.copy(corpus / "samples.jsonl", tmp_path)
    (tmp_path / "generated.jsonl").write_text(json.dumps({"id": "a", "path": "a.wav"}) + "\n")
    with pytest.raises(StageError, match=r"generated\.jsonl, row 1: text: Field required"):
        evaluate(tmp_path, tmp_path / "generated.jsonl", "run")


def test_a_judge_is_left_out_with_its_reason() -> None:
    def takes(texts: Sequence[str], speaker: str | None = "anna") -> list[SpeechClip]:
        return [SpeechClip(f"{i}", text, Path("x.wav"), speaker=speaker) for i, text in enumerate(texts)]

    train = takes(["one"] * 5 + ["two"] * 5)
    assert why_no_text_judge(train, takes(["one"])) == ""
    assert why_no_text_judge(train, takes(["seven"])) == "'seven' is asked for and was never trained on"
    assert why_no_text_judge(train[:-1], []).startswith("only 4 training clips of 'two'")
    assert "61 different training texts" in why_no_text_judge(takes([str(i) for i in range(61)] * 5), [])
    assert why_no_speaker_judge(train).startswith("1 speakers")
    assert why_no_speaker_judge(train + takes(["one"] * 5, "bert")) == ""
    assert why_no_speaker_judge(train + takes(["one"] * 9, None)).startswith("1 speakers")


class Echo:
    """A recognizer with an open vocabulary that hears the same in every clip."""

    name = "pocketsphinx"

    def recognize(self, samples_CN: Tensor, sample_rate: int) -> str:
        return "one two four"


def test_open_vocabulary_is_scored_by_word_errors(tmp_path: Path) -> None:
    save(tmp_path / "a.wav", melody("one", "anna", 0), RATE)
    judges = SpeechJudges(Echo())
    takes = [
        SpeechClip("a", "one two three", tmp_path / "a.wav"),
        SpeechClip("b", "one", tmp_path / "b.wav"),
    ]
    context = Context(tmp_path, cast(Any, None), Console(quiet=True), {})
    answers = judge_all(takes, judges, context, "hearing")
    assert [bool(answer.problem) for answer in answers] == [False, True]
    sets = {
        "real": score(takes, answers, judges, may_fail=False),
        "generated": score(takes, answers, judges, may_fail=True),
    }
    voicing = {name: {"voiced_share": 0.5, "pitch_right": None} for name in sets}
    result = {
        "judge": "pocketsphinx", "recognizer": "pocketsphinx", "sets": sets, "relative": {"pocketsphinx": 0.75},
        "voicing": voicing,
    }  # fmt: skip
    found = speech_figures(result)
    assert (found["generated_voiced_share"], found["generated_pitch_right"]) == (0.5, None)
    assert found["real_accuracy"] == pytest.approx(1 - 1 / 3), "the unreadable real take is left out"
    assert found["generated_accuracy"] == pytest.approx(1 - 2 / 4), "the unreadable clip is one word wrong"
    assert found["speaker_real_accuracy"] is None
    assert (found["n_real"], found["n_generated"]) == (1, 2)


def test_a_recognizer_by_its_folder_hears_the_words(corpus: Path, tmp_path: Path) -> None:
    """Its transcripts are compared in the form of texts, its name is in the figures, and its loops are no words."""
    folder = ctc_folder(tmp_path / "letters")
    fork(corpus, "by_folder")
    pupil = tmp_path / "pupil"
    pupil.mkdir()
    write_json(pupil / TRAINED_FILE, {"recognizers": {recognizer_digest(str(folder)): "transcripts"}})
    found = evaluate(
        corpus, corpus / "right" / "generated.jsonl", "by_folder", recognizer=folder, model=pupil
    )
    scores = read_json(corpus / "by_folder" / "scores.json")
    assert found["warnings"] == scores["warnings"]
    assert found["warnings"][0].startswith("letters wrote transcripts that the model was trained on")
    assert scores["recognizer"] == found["recognizer"] == "letters"
    assert scores["judges"]["letters"] == {"grammar": None, "note": "open vocabulary"}
    table = scores["sets"]["generated"]["letters"]
    assert found["recognizer_generated_word_error_rate"] == table["word_error_rate"] > 0.5
    assert "pocketsphinx_generated_accuracy" not in found
    heard = {row["heard"]["letters"] for row in read_jsonl(corpus / "by_folder" / "clips.jsonl")}
    assert heard and all(text == text.lower() for text in heard)


def test_a_judge_that_does_not_know_real_recordings_is_told() -> None:
    tables = {
        name: {"accuracy": share_right, "confusion": {}, "word_error_rate": None}
        for name, share_right in (("classifier", 0.108), ("speaker", 1.0))
    }
    (sentence,) = _deaf_judges({**tables, "n": 240}, ["classifier", "speaker"])
    assert sentence.startswith("classifier is right of 11% of the real recordings")


def test_an_unknown_voice_is_not_judged() -> None:
    judge = cast(Any, type("Known", (), {"labels": ["anna", "bert"]}))
    judges = SpeechJudges(Echo(), classifiers={"speaker": judge})
    takes = [SpeechClip(name[0], "one", Path(name[0]), speaker=name) for name in ("anna", "carl")]
    heard = [JudgedClip(0.5, words="", labels={"speaker": "anna"})] * 2
    table = score(takes, heard, judges, may_fail=True)["speaker"]
    assert (table["accuracy"], table["n"], table["not_judged"]) == (1.0, 1, 1)


def test_voices_of_the_test_alone_are_told_apart_without_training_on_them(tmp_path: Path) -> None:
    """Two new voices are as different in what they are like as the two that the judge was trained on."""
    write_corpus(tmp_path, ["carl", "dora"])
    right = {text: text for text in TEXTS}
    true_voices = write_generated(tmp_path, "true", right, {"carl": "carl", "dora": "dora", "anna": "anna"})
    found = evaluate(tmp_path, true_voices, "evaluate")
    assert found["new_voices"] == 2
    assert found["new_voice_real_accuracy"] == found["new_voice_generated_accuracy"] == 1.0
    scores = read_json(tmp_path / "evaluate" / "scores.json")
    counts = {name: table["n"] for name, table in scores["new_voices"]["sets"].items()}
    assert counts == {"real": 18, "generated": 18}, "known voices are not among them"
    rates = {name: table["word_error_rate"] for name, table in scores["new_voices"]["sets"].items()}
    assert 0 <= rates["generated"] == found["new_voice_generated_word_error_rate"]
    whole = scores["sets"]["real"]["pocketsphinx"]["word_error_rate"]
    assert rates["real"] >= 0 and rates["real"] != whole, "of the clips of new voices alone"
    fork(tmp_path, "wrong_voice")
    same_voice = write_generated(tmp_path, "same", right, {"carl": "carl", "dora": "carl"})
    found = evaluate(tmp_path, same_voice, "wrong_voice")
    assert found["new_voice_generated_accuracy"] == 0.5


def test_a_real_clip_of_a_new_voice_is_compared_without_itself() -> None:
    def heard(*directions: Sequence[float] | None) -> list[JudgedClip]:
        return [
            JudgedClip(embedding=MetricError("silent") if at is None else torch.tensor(at))
            for at in directions
        ]

    def of(*speakers: str) -> list[SpeechClip]:
        return [SpeechClip(f"{number}", "one", speaker=name) for number, name in enumerate(speakers)]

    east, south, between, away = (1.0, 0.0), (0.0, -1.0), (0.8, -0.6), (-0.6, -0.8)
    sets = {"real": of("a", "a", "b", "b", "known"), "generated": of("a", "b", "b", "known")}
    judged = {
        "real": heard(east, south, between, between, east),
        "generated": heard(away, between, None, east),
    }
    scores = new_voice_scores(sets, judged, {"known"})
    assert scores["voices"] == ["a", "b"]
    assert scores["sets"]["real"] == share([False, False, True, True]), (
        "the other clip of a is farther than those of b"
    )
    assert scores["sets"]["generated"] == share([True, True, False]), "a clip without voice is wrong"
    assert new_voice_scores(sets, judged, {"known", "b"}) == {}, "one voice alone is told from nothing"


def test_the_stage_is_found_fast_and_plans() -> None:
    code = "import sys, audiollm.evaluate.speech.settings; assert not {'torch', 'scipy', 'jiwer'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    plan = STAGE.plan
    assert plan is not None
    config = EvaluationConfig(audio=Path("/"), samples=Path("/"))
    longer = EvaluationConfig(audio=Path("/"), samples=Path("/"), judge_steps=800)
    few, many = (plan(each, {"train": StagePlan()}).core_seconds or 0 for each in (config, longer))
    assert 0 < few < many
