"""The report of a run: one safe, self-contained page, and figures that depend on the run alone."""

from __future__ import annotations

import io
import json
import math
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from audiollm.audio import save
from audiollm.evaluate.statistics import confusion, lengths, share, shares_by, word_error_rate
from audiollm.files import read_json, write_json, write_jsonl
from audiollm.recipe import Recipe, load_recipe
from audiollm.runner import Context, StageError, StageResult, run_recipe
from audiollm.set_aside import set_aside_row
from pipelines.report import page as page_module
from pipelines.report.stage import Config

RATE = 24_000
HOSTILE = "<img src=x onerror=alert(1)>"
RECIPE = """
name: demo
stages:
  - annotate: {input: AUDIO}
  - compose: {segments: "${annotate.segments}"}
  - train_tokenizer: {audio: "${compose.samples}"}
  - tokenize: {samples: "${compose.samples}", codec: "${train_tokenizer.checkpoint}"}
  - train: {shards: "${tokenize.shards}"}
  - generate: {model: "${train.checkpoint}", codec: "${train_tokenizer.checkpoint}", samples: "${compose.samples}"}
  - evaluate: {audio: "${generate.audio}", samples: "${compose.samples}"}
  - report: {}
"""
VOID = {"meta", "img", "br", "link", "input", "hr"}


# ------------------------------------------------------------------------------------ a run, made up


class Run:
    """A run's folder with whatever its stages would have left there."""

    def __init__(self, folder: Path, name: str = "demo") -> None:
        (folder / "recordings").mkdir(parents=True)
        text = RECIPE.replace("AUDIO", str(folder / "recordings"))
        (folder / "recipe.yaml").write_text(text)
        self.recipe: Recipe = load_recipe(folder / "recipe.yaml", [], name, folder / "runs")
        self.audio = folder / "recordings"
        self.results: dict[str, StageResult] = {}

    def folder(self, stage: str) -> Path:
        return self.recipe.folder / stage

    def done(
        self, name: str, figures: dict[str, Any], seconds: float = 10.0, state: str = "done", error: str = ""
    ) -> None:
        stage = next(stage for stage in self.recipe.stages if stage.name == name)
        values = {
            "settings": stage.settings(),
            "figures": figures,
            "seconds": seconds,
            "peak_memory_mb": 900.0,
        }
        self.results[name] = StageResult(name, stage.stage.kind, "f", state, error=error, **values)

    def report(self, **settings: Any) -> tuple[str, dict[str, Any]]:
        """The page and the summary; a section that could not be made fails the test."""
        output = io.StringIO()
        context = Context(self.folder("report"), self.recipe, Console(file=output), self.results)
        self.recipe.stages[-1].stage.run(Config(**settings), context)
        assert "could not be made" not in output.getvalue(), output.getvalue()
        html = (self.folder("report") / "report.html").read_text(encoding="utf-8")
        return html, read_json(self.folder("report") / "summary.json")


def beep(path: Path, duration_s: float = 0.2) -> None:
    times = torch.arange(round(duration_s * RATE)) / RATE
    save(path, 0.3 * torch.sin(2 * math.pi * 440 * times)[None], RATE)


def annotated(run: Run, segments: int = 3) -> None:
    rows = []
    for number in range(segments):
        beep(run.audio / f"{number}.wav")
        rows.append({
            "id": str(number), "path": str(run.audio / f"{number}.wav"), "file": f"{number}.wav", "start_s": 0.0,
            "end_s": 0.15, "text": HOSTILE if number == 0 else f"word {number}", "text_source": "given",
            "heard": {"pocketsphinx": f"{HOSTILE} heard"}, "speaker": "aria", "quality": {"ovr": 2.5},
        })  # fmt: skip
    aside = [set_aside_row("annotate", f"/elsewhere/{n}.wav", "no speech found") for n in range(230)]
    quiet = "-71.5 dBFS, the limit is -60.0 dBFS"
    aside.insert(0, set_aside_row("annotate", str(run.audio / f"{HOSTILE}.wav"), "too quiet", quiet))
    write_jsonl(run.folder("annotate") / "segments.jsonl", rows)
    write_jsonl(run.folder("annotate") / "set_aside.jsonl", aside)
    run.done("annotate", {
        "files_seen": 240, "not_audio": 6, "audio_files": 234, "files_used": 3, "files_set_aside": 231,
        "segments": segments, "seconds": 0.45, "reasons": {"no speech found": 230, "too quiet": 1},
        "text_agreement": 0.5, "quality": {"n": 3, "sig": 3.0, "bak": 3.5, "ovr": 2.5},
    })  # fmt: skip


def trained(run: Run) -> None:
    run.done("compose", {"train_samples": 2, "test_samples": 1, "train_seconds": 0.3, "test_seconds": 0.15})
    codec = run.folder("train_tokenizer")
    for part in ("original", "first_codebook", "decoded"):
        beep(codec / f"{part}.wav")
    row = {"source": "/home/alice/0.wav", "original": "original.wav", "first_codebook": "first_codebook.wav"}
    write_json(codec / "examples.json", [{**row, "decoded": "decoded.wav"}])
    metrics = [{"step": n, "mel": 1 / (n + 1), "stft": 2.0, "commitment": float("nan")} for n in range(5)]
    perplexities = {"evaluation/perplexity_first": 9.0, "evaluation/perplexity_mean": 8.0}
    write_jsonl(codec / "metrics.jsonl", [*metrics, {"step": 4, "evaluation/mel": 0.4, **perplexities}])
    run.done(
        "train_tokenizer", {"parameters": 7_000_000, "bitrate_bps": 2000.0, "steps": 5, "mel": float("inf")}
    )
    write_jsonl(codec / "alarms.jsonl", [{"step": 3, "kind": "codebook collapse", "text": "2% of <codes>"}])
    run.done("tokenize", {"samples": 3})
    losses = {"text_loss": 1.0, "audio_loss": 2.0, "gradient_norm": 0.5, "learning_rate": 1e-3}
    losses |= {"audio_loss/0": 1.5, "audio_loss/1": 2.5}
    write_jsonl(run.folder("train") / "metrics.jsonl", [{"step": n, **losses} for n in range(5)])
    with (run.folder("train") / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "aud')  # cut short by a kill
    listened(run.folder("train") / "listening")
    run.done("train", {"steps": 5, "parameters": 11_000_000, "audio_loss": 2.0})


def listened(folder: Path) -> None:
    """Two prompts at six evaluations, of which the second prompt missed all but one; and a third never spoken."""
    names = ("seven_anna", "eight", "../escape")
    texts = (f"{HOSTILE} seven", "eight", "never spoken")
    rows = [
        {"name": n, "id": n, "text": text, "speaker": "anna"} for n, text in zip(names, texts, strict=True)
    ]
    write_jsonl(folder / "prompts.jsonl", rows)
    for step in (50, 100, 150, 200, 250, 1000):
        beep(folder / f"step-{step:06d}" / "seven_anna.wav")
    beep(folder / "step-000050" / "eight.wav")
    beep(folder / "escape.wav")
    (folder / "step-notes").mkdir()


def spoken(
    run: Run, texts: tuple[str, ...] = ("one", "two"), speakers: tuple[str, ...] = ("aria", "finn")
) -> list[dict[str, Any]]:
    rows = []
    for text in texts:
        for speaker in speakers:
            name = f"{text}_{speaker}"
            beep(run.folder("generate") / "audio" / f"{name}.wav")
            rows.append(
                {"id": name, "path": f"audio/{name}.wav", "text": text, "speaker": speaker, "stopped": True}
            )
    write_jsonl(run.folder("generate") / "generated.jsonl", rows)
    run.done("generate", {"clips": len(rows), "stopped": len(rows), "prompts": len(rows)})
    return rows


def judged(run: Run, rows: list[dict[str, Any]], closed: bool = True) -> None:
    """The first clip is heard wrong by all; scores as the stage evaluate writes them."""
    clips = []
    for index, row in enumerate(rows):
        heard = HOSTILE if index == 0 else row["text"]
        verdict = {"classifier": index > 0, "pocketsphinx": index > 0, "speaker": index > 0}
        names = ["classifier", "pocketsphinx"] if closed else ["pocketsphinx"]
        clips.append({
            **row, "path": f"../generate/{row['path']}", "heard": dict.fromkeys(names, heard),
            "speaker_heard": row["speaker"], "correct": verdict if closed else {"pocketsphinx": index > 0},
            "confidence": {"classifier": 0.75, "speaker": 0.5}, "duration_s": 0.2, "problem": None,
        })  # fmt: skip
    write_jsonl(run.folder("evaluate") / "clips.jsonl", clips)
    texts, speakers = [row["text"] for row in rows], [row["speaker"] for row in rows]
    table = _judge_table(texts, speakers, ["?", *texts[1:]], closed)
    tables = (
        {"classifier": table, "speaker": table, "pocketsphinx": table} if closed else {"pocketsphinx": table}
    )
    counts = {"n": len(rows), "unreadable": [], "durations": lengths([0.2] * len(rows)), "not_stopped": 0.25}
    facts: dict[str, Any] = {
        "classifier": {"training_clips": 99} if closed else {"left_out": "70 different texts"}
    }
    facts["pocketsphinx"] = {"grammar": sorted(set(texts)) if closed else None, "note": ""}
    relative = dict.fromkeys(tables, 0.75)
    sets = {"real": {**counts, **tables}, "generated": {**counts, **tables}}
    scores = {"suite": "tts", "judge": "classifier", "judges": facts, "sets": sets, "relative": relative}
    write_json(run.folder("evaluate") / "scores.json", scores)
    keys = ("real_accuracy", "generated_accuracy", "relative_accuracy", "speaker_real_accuracy")
    keys += ("pocketsphinx_real_accuracy", "pocketsphinx_generated_accuracy", "pocketsphinx_relative")
    figures: dict[str, Any] = dict.fromkeys((*keys, "speaker_generated_accuracy"), 0.75)
    judge = "classifier" if closed else "pocketsphinx, open vocabulary, 1 - word error rate"
    run.done("evaluate", {**figures, "judge": judge, "n_generated": len(rows)})


def _judge_table(texts: list[str], speakers: list[str], heard: list[str], closed: bool) -> dict[str, Any]:
    correct = [asked == answer for asked, answer in zip(texts, heard, strict=True)]
    table = share(correct) | {"not_judged": 0, "word_error_rate": word_error_rate(texts, heard)}
    table["by_speaker"] = shares_by(speakers, correct)
    if closed:
        table["by_text"] = shares_by(texts, correct)
        table["confusion"] = confusion(texts, heard, sorted(set(texts)))
    return table


def whole_run(folder: Path) -> Run:
    run = Run(folder, name="a&<b>bold")
    annotated(run)
    trained(run)
    judged(run, spoken(run))
    return run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    return whole_run(tmp_path_factory.mktemp("run")).report()


# ------------------------------------------------------------------------------------------ the page


class Page(HTMLParser):
    """Tags, attributes and text of a page; raises where tags are not nested as they should be."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert not self._open, f"never closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, key, value or "") for key, value in attrs]
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self._open and self._open.pop() == tag, f"</{tag}> at {self.getpos()}"

    def handle_data(self, data: str) -> None:
        self.text += data


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
        "And 31 more in set_aside.jsonl", "7.00 M", "2 kbit/s", "first codebook alone", "11.00 M",
        "step 1,000", "at 4 of 6 evaluations", "Audio loss by codebook",
        "75.0 %", "30.1 % to 95.4 %, n = 4", "0.750", "with a grammar of 2 texts", "99 clips", "✗ wrong", "25.0 %",
    ):  # fmt: skip
        assert text in page.text, text
    assert ("span", "aria-label", "wrong") in page.attributes
    assert ("span", "aria-label", "right") in page.attributes
    assert "/home/alice" not in whole[0]
    assert str(Path.home()) + "/" not in whole[0] or str(Path.home()) == "/"
    assert "<b>codebook collapse</b> (step 3): 2% of &lt;codes&gt;" in whole[0]


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

    monkeypatch.setattr(page_module, "scores_section", broken)
    run, output = Run(tmp_path), io.StringIO()
    context = Context(run.folder("report"), run.recipe, Console(file=output), {})
    page_module.write_report(Config(), context)
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
