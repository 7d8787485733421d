"""The report of a run: one safe, self-contained page, and figures that depend on the run alone."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from audiollm.errors import StageError
from audiollm.files.atomic import read_json, write_jsonl
from audiollm.recipe.runner import Context, run_recipe
from audiollm.recipe.stages import load_recipe
from pipelines.report import page as page_module
from pipelines.report.settings import ReportConfig
from tests.pipelines.report.report_run import HOSTILE, Page, Run, annotated, judged, spoken, whole_run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    return whole_run(tmp_path_factory.mktemp("run")).report()


# ------------------------------------------------------------------------------------------ the page


def test_the_page_needs_nothing_beside_itself(whole: tuple[str, dict[str, Any]]) -> None:
    page = Page(whole[0])
    links = [
        (tag, value) for tag, key, value in page.attributes if key in ("src", "href", "xlink:href", "srcset")
    ]
    assert links
    assert all(value.startswith(("data:", "#")) for _, value in links)
    assert not {"link", "iframe", "object", "embed", "base"} & set(page.tags)
    assert "http://" not in whole[0] and "https://" not in whole[0] and "@import" not in whole[0]
    assert "url(" not in whole[0].replace("url(#", "")
    policy = next(value for tag, key, value in page.attributes if key == "content" and "default-src" in value)
    assert "default-src 'none'" in policy


def test_names_and_texts_of_the_run_are_escaped(whole: tuple[str, dict[str, Any]]) -> None:
    page = Page(whole[0])
    assert HOSTILE not in whole[0]
    assert page.text.count(HOSTILE) >= 4  # a transcript, what was heard of it, a file set aside, a verdict
    assert not [key for _, key, _ in page.attributes if key.startswith("on")]
    assert all(
        value.startswith("data:image/png")
        for tag, key, value in page.attributes
        if (tag, key) == ("img", "src")
    )
    assert "a&<b>bold" in page.text and "b" not in {tag for tag in page.tags if tag == "bold"}


def test_the_page_holds_what_happened(whole: tuple[str, dict[str, Any]]) -> None:
    page = Page(whole[0])
    assert page.tags["audio"] == 3 + 3 + 4 + 1 + 4  # segments, codec examples, prompts, generated clips
    assert page.tags["img"] == page.tags["audio"]
    assert page.tags["svg"] == 3 + 5  # no commitment chart: its values are not finite
    labels = [
        value for tag, key, value in page.attributes if tag == "img" and "step" in value and key == "alt"
    ]
    said = f"spectrogram of {HOSTILE} seven"
    assert labels == [f"{said}, step {n}" for n in (50, 150, 200, 1000)] + ["spectrogram of eight, step 50"]
    for text in (
        "240", "6 not audio", "231 set aside whole", "no speech found", "-71.5 dBFS, the limit is -60.0 dBFS",
        "231 set aside, beside 3 segments", "7.00 M", "2 kbit/s", "first codebook alone", "11.00 M",
        "step 1,000", "at 4 of 6 evaluations", "Audio loss by codebook",
        "75.0 %", "30.1 % to 95.4 %, n = 4", "0.750", "with a grammar of 2 texts", "99 clips", "✗ wrong", "25.0 %",
    ):  # fmt: skip
        assert text in page.text, text
    assert ("span", "aria-label", "wrong") in page.attributes
    assert ("span", "aria-label", "right") in page.attributes
    assert "/home/alice" not in whole[0]
    assert str(Path.home()) + "/" not in whole[0] or str(Path.home()) == "/"
    assert "<b>codebook collapse</b> (step 4): 2% of &lt;codes&gt;" in whole[0]


def test_without_players_the_page_is_silent(tmp_path: Path) -> None:
    run = Run(tmp_path)
    judged(run, spoken(run))
    html, _ = run.report(players=False, samples=2)
    page = Page(html)
    assert page.tags["audio"] == 0 and page.tags["img"] == 2
    assert "None was asked for" in Page(run.report(samples=0)[0]).text


def test_a_run_that_failed_says_where_and_why(tmp_path: Path) -> None:
    run = Run(tmp_path)
    annotated(run)
    spoken(run)
    del run.results["generate"]  # its folder is left from an earlier run
    message = f"compose: too little to train on: 3 s found, 300 s needed {HOSTILE} in /home/alice/x"
    run.done("compose", {}, state="failed", error=message)
    html, summary = run.report()
    page = Page(html)
    assert "The stage compose failed" in page.text and "3 s found, 300 s needed" in page.text
    assert "The stage train has not run." in page.text and "The stage generate has not run." in page.text
    assert "too quiet" in page.text
    assert summary["failed"] == {"stage": "compose", "message": message.replace("/home/alice", "~")}
    assert summary["generated_accuracy"] is None and summary["compose"] is None
    assert summary["annotate"]["files_seen"] == 240


def test_a_run_of_nothing_has_a_page(tmp_path: Path) -> None:
    run = Run(tmp_path)
    html, summary = run.report()
    assert "The stage annotate has not run." in Page(html).text
    assert summary["failed"] is None and summary["train"] is None


def test_what_is_missing_or_broken_leaves_a_gap(tmp_path: Path) -> None:
    run = Run(tmp_path)
    annotated(run)
    (run.audio / "1.wav").unlink()
    (run.audio / "2.wav").write_bytes(b"not audio at all")
    rows = spoken(run)
    (run.folder("generate") / rows[0]["path"]).unlink()
    html, _ = run.report()
    page = Page(html)
    assert page.text.count("No sound:") == 3
    assert "No judge has heard them. The stage evaluate has not run." in page.text
    assert page.tags["audio"] == 1 + 3


def test_a_section_that_breaks_does_not_take_the_page_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise KeyError("sets")

    monkeypatch.setattr("audiollm.evaluate.speech.report_section.scores_section", broken)
    run, output = Run(tmp_path), io.StringIO()
    context = Context(run.folder("report"), run.recipe, Console(file=output), {})
    page_module.write_run_report(ReportConfig(), context)
    html = (run.folder("report") / "report.html").read_text(encoding="utf-8")
    assert "This section could not be made: KeyError: 'sets'" in Page(html).text
    assert "could not be made" in output.getvalue()


def test_an_open_vocabulary_is_scored_by_word_errors(tmp_path: Path) -> None:
    run = Run(tmp_path)
    judged(run, spoken(run), closed=False)
    page = Page(run.report()[0])
    assert "1 − word error rate" in page.text and "open vocabulary" in page.text
    assert "No classifier judge: 70 different texts." in page.text
    assert page.text.count("right text, relative to real") == 1


def test_the_runner_reports_a_failure(tmp_path: Path) -> None:
    segment = {"id": "a", "path": "a.wav", "start_s": 0, "end_s": 2, "speaker": "s", "text": "one"}
    write_jsonl(tmp_path / "segments.jsonl", [segment])
    text = f"name: short\nstages:\n  - compose: {{segments: {tmp_path}/segments.jsonl}}\n  - report: {{}}\n"
    (tmp_path / "recipe.yaml").write_text(text)
    recipe = load_recipe(tmp_path / "recipe.yaml", [], None, tmp_path / "runs")
    with pytest.raises(StageError) as caught:
        run_recipe(recipe, Console(file=io.StringIO()))
    assert caught.value.exit_code == 2
    assert "2 s found" in Page((recipe.folder / "report.html").read_text(encoding="utf-8")).text
    assert read_json(recipe.folder / "summary.json")["failed"]["stage"] == "compose"


# --------------------------------------------------------------------------------------- the summary


def test_the_summary_has_its_keys(whole: tuple[str, dict[str, Any]]) -> None:
    summary = whole[1]
    assert summary["real_accuracy"] == summary["pocketsphinx_relative"] == 0.75
    assert summary["speaker_generated_accuracy"] == 0.75 and summary["n_generated"] == 4
    assert summary["judge"] == "classifier"
    assert (summary["name"], summary["size"], summary["seed"], summary["failed"]) == (
        "a&<b>bold",
        "tiny",
        0,
        None,
    )
    assert summary["tokenizer"]["parameters"] == 7_000_000 and summary["tokenizer"]["mel"] is None
    assert summary["train"]["steps"] == 5 and summary["generate"]["clips"] == 4
    assert summary["annotate"]["not_audio"] == 6 and summary["compose"]["train_samples"] == 2
    assert summary["seconds"]["train"] == 10.0 and summary["seconds"]["total"] >= 70.0
    assert summary["memory_mb"]["annotate"] == 900.0
    assert summary["peak_memory_mb"] == max(summary["memory_mb"].values())


def test_the_summary_depends_on_the_run_alone(tmp_path: Path) -> None:
    texts = []
    for number in (1, 2):
        run = whole_run(tmp_path / str(number))
        run.results = {name: run.results[name] for name in sorted(run.results, reverse=number == 2)}
        run.done("generate", {"clips": 4, "stopped": 4, "prompts": 4}, seconds=number * 7.0)
        _, summary = run.report(players=False, samples=0)
        text = (run.folder("report") / "summary.json").read_text(encoding="utf-8")
        assert "NaN" not in text and "Infinity" not in text
        for key in ("seconds", "memory_mb", "peak_memory_mb"):
            del summary[key]
        assert list(summary) == sorted(summary)
        texts.append(json.dumps(summary))
    assert texts[0] == texts[1]
