"""A recognizer that loops is refused with its reason, counted, and never scored as if it wrote text."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from audiollm.audio import Waveform, save
from audiollm.commands.cli import build_app
from audiollm.evaluate.codec.measures import CodecJudges, ReferenceClip, score_clip
from audiollm.evaluate.interpret.logged_outputs import LoggedOutput
from audiollm.evaluate.interpret.quality import hear
from audiollm.evaluate.judges.judging import LoopRefused, SpeechClip, SpeechJudges, recognize, words_score
from audiollm.evaluate.listening.asr import TranscribedRecording, evaluate_asr
from audiollm.evaluate.listening.replies import Reply
from audiollm.evaluate.report.metric_error import MetricError
from audiollm.evaluate.report.text_errors import choose_form
from audiollm.evaluate.speech.dialogues import Dialogue, ScriptedTurn
from audiollm.evaluate.speech.multi_speaker import evaluate_dialogues
from audiollm.evaluate.speech.scoring import Bench
from audiollm.evaluate.speech.tts import SpeechItem, evaluate_list
from tests.audiollm.evaluate.test_evaluate_codec import tiny_codec

LOOP = "the " * 448
REASON = "stuck loops: more words than the clip can hold"
RATE = 16_000


class StuckRecognizer:
    """Loops on clips whose mean is positive, and hears "a b c d" in all others."""

    name = "stuck"

    def recognize(self, samples_CN: Tensor, sample_rate: int) -> str:
        return LOOP if float(samples_CN.mean()) > 0 else "a b c d"


def wave(sign: float, seconds: float = 2.0) -> Waveform:
    return Waveform(torch.full((1, int(seconds * RATE)), 0.1 * sign), RATE)


def clip(folder: Path, name: str, sign: float) -> Path:
    path = folder / f"{name}.wav"
    save(path, wave(sign).samples_CN, RATE)
    return path


def test_every_judgement_of_words_refuses_a_loop() -> None:
    judge = StuckRecognizer()
    assert recognize(judge, wave(-1)) == "a b c d"
    with pytest.raises(LoopRefused) as refused:
        recognize(judge, wave(1))
    assert refused.value.reason == REASON and refused.value.text == LOOP


def test_a_reward_of_a_loop_is_that_of_no_word() -> None:
    form = choose_form("whisper", "en")
    assert words_score(StuckRecognizer(), form, wave(-1), "a b c e") == (0.75, "a b c d")
    assert words_score(StuckRecognizer(), form, wave(1), "a b c d") == (0.0, REASON)
    with pytest.raises(MetricError, match="no words"):
        words_score(StuckRecognizer(), form, wave(1), "")


def test_codecs_are_not_scored_by_loops() -> None:
    judges = CodecJudges(StuckRecognizer())
    for sign, score in ((-1, 0.0), (1, REASON)):
        reference = ReferenceClip(wave(sign), "speech", "a b c d", judges)
        assert score_clip(reference, wave(sign).samples_CN, ["word_error_rate"]) == {"word_error_rate": score}


def test_words_of_codecs_are_counted_in_the_language_of_the_speech() -> None:
    class Listener(StuckRecognizer):
        def recognize(self, samples_CN: Tensor, sample_rate: int) -> str:
            return "今天天气好"

    for language, rate in (("zh", 1 / 6), ("en", 1.0)):
        judges = CodecJudges(Listener())
        reference = ReferenceClip(wave(-1), "speech", "今天天气很好", judges, language)
        scores = score_clip(reference, wave(-1).samples_CN, ["word_error_rate"])
        assert scores["word_error_rate"] == pytest.approx(rate)


def test_speech_with_a_loop_counts_as_missing(tmp_path: Path) -> None:
    items = [SpeechItem("good", "a b c d"), SpeechItem("bad", "a b c d")]
    clips = {
        item.id: SpeechClip(item.id, item.text, clip(tmp_path, item.id, sign))
        for item, sign in zip(items, (-1, 1), strict=True)
    }
    bench = Bench(choose_form("whisper", "en"), SpeechJudges(StuckRecognizer()))
    outcome = evaluate_list(items, clips, bench)
    words = outcome.result["generated"]["words"]
    assert (words["rate"], words["n"], words["reasons"]) == (0.0, 1, {REASON: 1})
    assert (words["rate_with_missing"], words["missing"]) == (0.5, 1)
    assert ("bad", REASON) in outcome.missing
    assert outcome.rows[1]["heard"] is None and outcome.rows[1]["loop"] == LOOP


def test_replies_of_any_source_that_loop_count_as_missing(tmp_path: Path) -> None:
    recordings = [
        TranscribedRecording("good", clip(tmp_path, "good", -1), "a b c d", "en"),
        TranscribedRecording("bad", clip(tmp_path, "bad", 1), "a b c d", "en"),
        TranscribedRecording("span", tmp_path / "gone.wav", "a b", "en", 1.0, 2.0),
        TranscribedRecording("gone", tmp_path / "gone.wav", "a b", "en"),
    ]
    texts = {"good": "a b c d", "bad": "the " * 60, "span": "the " * 30, "gone": "w " * 40}
    outcome = evaluate_asr(recordings, {id: Reply(text) for id, text in texts.items()}, "whisper")
    words = outcome.result["words"]["en"]
    assert (words["rate"], words["n"], words["rate_with_missing"]) == (0.0, 1, 8 / 12)
    assert words["reasons"] == {
        "a loop: more words than the clip can hold": 2,
        "a loop: one phrase again and again": 1,
    }
    assert outcome.rows[1]["heard"] == texts["bad"]


def test_the_rest_of_a_recording_holds_the_words_of_its_own_length(tmp_path: Path) -> None:
    path = clip(tmp_path, "tail", 1)  # 2 s, of which 0.5 s are transcribed
    recording = TranscribedRecording("tail", path, "a b", "en", start_s=1.5)
    texts = [" ".join(f"w{number}" for number in range(count)) for count in (18, 19)]
    outcomes = [evaluate_asr([recording], {"tail": Reply(text)}, "whisper") for text in texts]
    reasons = [outcome.result["words"]["en"]["reasons"] for outcome in outcomes]
    assert reasons == [{}, {"a loop: more words than the clip can hold": 1}]


def test_a_dialogue_with_a_loop_counts_as_missing(tmp_path: Path) -> None:
    turns = tuple(
        ScriptedTurn(speaker=name, text="a b c d", audio=clip(tmp_path, name, sign))
        for name, sign in (("x", -1), ("y", 1))
    )
    bench = Bench(choose_form("whisper", "en"), SpeechJudges(StuckRecognizer()))
    words = evaluate_dialogues([Dialogue(id="d", turns=turns)], bench).result["words"]
    assert (words["n"], words["missing"], words["rate_with_missing"]) == (0, 1, 1.0)


def test_interpreted_speech_with_a_loop_has_no_text(tmp_path: Path) -> None:
    path = clip(tmp_path, "loop", 1)
    output = LoggedOutput.model_construct(index=0, prediction=path.name, delays=[1.0])
    result = hear(output, tmp_path, StuckRecognizer())
    assert (result.text, result.problem) == ("", REASON)


def test_the_command_tells_loops_on_screen_and_in_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("stuck_judges")
    module.make = StuckRecognizer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "stuck_judges", module)
    tiny_codec().save_pretrained(tmp_path / "codec")
    rows = [f"{clip(tmp_path, name, sign)},speech,a b c d" for name, sign in (("x", -1.0), ("y", 1.0))]
    (tmp_path / "list.csv").write_text("path,kind,text\n" + "\n".join(rows) + "\n")
    arguments = ["evaluate", "codec", str(tmp_path / "codec"), "--list", str(tmp_path / "list.csv")]
    arguments += ["--metrics", "word_error_rate", "--recognizer", "stuck_judges:make"]
    answer = CliRunner().invoke(
        build_app(), [*arguments, "-o", str(tmp_path / "out")], catch_exceptions=False
    )
    assert answer.exit_code == 0, answer.output
    assert f"n/a  word error rate of 1 speech clips, original: {REASON}" in answer.output
    table = json.loads((tmp_path / "out" / "results.json").read_text())["original"]["speech"]
    assert (table["word_error_rate"]["mean"], table["word_error_rate"]["n"]) == (0.0, 1)
    assert REASON in (tmp_path / "out" / "report.html").read_text()
