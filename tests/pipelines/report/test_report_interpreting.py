"""The section on interpretation: quality over latency, streams that play, and the training of an interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from audiollm.data.records.sample import AudioPart, Message, Sample, TextPart, write_samples
from audiollm.evaluate.interpret.logged_outputs import LOG_NAME, LoggedOutput, write_log
from audiollm.files.atomic import write_jsonl
from audiollm.interpret.report_section import stream_timeline
from tests.pipelines.report.report_run import HOSTILE, Page, Run, beep

RECIPE = """
name: interpreter
stages:
  - compose_streams: {recordings: AUDIO}
  - name: stage_1
    train_interpreter:
      samples: "${compose_streams.streams}"
      start: AUDIO
      kl: {controller: {name: proportional, target: 3.5}}
  - name: before
    evaluate_interpreter: {model: AUDIO, samples: "${compose_streams.streams}"}
  - name: after
    evaluate_interpreter: {model: "${stage_1.checkpoint}", samples: "${compose_streams.streams}"}
  - report: {}
"""


def said(index: int, words: str, times: list[float], source: str = "") -> LoggedOutput:
    return LoggedOutput(
        index=index, prediction=words, delays=times, reference=f"drei {HOSTILE}", source=source, source_length=2000.0,
        id=f"talk-{index}",
    )  # fmt: skip


def interpreted(run: Run) -> None:
    beep(run.audio / "talk.wav", duration_s=2.0)
    heard = Message(role="user", content=[AudioPart(path=str(run.audio / "talk.wav"))])
    acts = Message(role="assistant", content=[TextPart(text="drei")], chunk_frames=50)
    write_samples(
        run.folder("compose_streams") / "streams.jsonl",
        [Sample(id=f"talk-{index}", messages=[heard, acts], task="interpret") for index in (0, 1)],
    )
    run.done("compose_streams", {"streams": 2, "hours": 0.001})
    rewards = {"reward/detection": 0.5, "reward/lagging": -1.0}
    rows = [
        {"step": n, "reward": n / 10, **rewards, "kl": 2.0 + n, "kl_text": 1.5, "kl_audio": 0.5 + n, "kl_weight": 0.02,
         "kl_weight_audio": 0.03}
        for n in range(3)
    ]  # fmt: skip
    write_jsonl(run.folder("stage_1") / "metrics.jsonl", rows)
    run.done("stage_1", {"steps": 3, "reward": 0.2, "prompts": 2})
    for name, lag, quality in (("before", 1500.0, 60.0), ("after", 900.0, 61.0)):
        outputs = [said(0, f"drei {HOSTILE.replace(' ', '')}", [lag, 1900.0], "0"), said(1, "", [])]
        write_log(run.folder(name) / LOG_NAME, outputs)
        figures = {
            "AL": lag,
            "LAAL": lag,
            "chrF": quality,
            "BLEU": 40.0,
            "right_segments": 0.75,
            "empty": 1,
            "streams": 2,
        }
        run.done(name, figures)


def test_streams_play_with_the_words_of_every_stage(tmp_path: Path) -> None:
    run = Run(tmp_path, recipe=RECIPE, name="interpreter")
    interpreted(run)
    html, summary = run.report()
    page = Page(html)
    assert "Interpretation" in page.text
    assert "1.50" in page.text and "0.90" in page.text and "75.0%" in page.text.replace(" %", "%")
    words = [value for tag, key, value in page.attributes if key == "data-at"]
    assert words == ["1.5", "1.9", "0.9", "1.9"]
    assert page.tags["audio"] >= 2  # a source for each of the two streams
    assert ("div", "data-seconds", "2.0") in page.attributes
    assert "nothing" in page.text
    assert "<img src=x" not in html
    assert "Reward by function, training" in page.text and "detection" in page.text
    assert "KL from the reference" in page.text and "Weight of the KL" in page.text
    assert summary["evaluate_interpreter"]["after"]["AL"] == 900.0
    assert "chrF, interpreted live" in page.text


def test_what_is_missing_is_told(tmp_path: Path) -> None:
    run = Run(tmp_path, recipe=RECIPE, name="interpreter")
    interpreted(run)
    (run.audio / "talk.wav").unlink()
    (run.folder("before") / LOG_NAME).write_text('{"index": 0, "pred\n')
    run.done("after", {}, state="failed", error="no memory")
    html, _ = run.report()
    assert "The stage after failed." in Page(html).text
    run.results.pop("before")
    assert "The stage before has not run." in Page(run.report()[0]).text


def test_words_that_would_overlap_have_lanes_of_their_own() -> None:
    output = said(0, "eins zwei drei vier spaet", [500.0, 500.0, 510.0, 1500.0, 2500.0])
    drawn = stream_timeline(2.0, [("a", output)])
    (track,) = drawn["tracks"]
    assert [(word["text"], word["lane"]) for word in track["words"]] == [
        ("eins", 0), ("zwei", 1), ("drei", 2), ("vier", 0),
    ]  # fmt: skip
    assert [word["left"] for word in track["words"]] == pytest.approx([25.0, 25.0, 25.5, 75.0])
    assert [place for place, _ in drawn["ticks"]] == [0.0, 50.0, 100.0]
