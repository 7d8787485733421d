"""A run's folder as its stages would have left it, and a page as a browser reads it: what the report's tests share."""

from __future__ import annotations

import io
import math
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from audiollm.audio import save
from audiollm.evaluate.report.statistics import confusion, lengths, share, shares_by
from audiollm.evaluate.report.text_errors import word_error_rate
from audiollm.files.atomic import read_json, write_json, write_jsonl
from audiollm.files.set_aside import set_aside_row
from audiollm.pages.clips import Gallery
from audiollm.pages.run_record import RunRecord
from audiollm.pages.sections import ReportContext, SectionBuilder
from audiollm.recipe.runner import Context, StageResult
from audiollm.recipe.stages import Recipe, load_recipe
from pipelines.report.settings import ReportConfig

RATE = 24_000
HOSTILE = "<img src=x onerror=alert(1)>"
RECIPE = """
name: demo
stages:
  - annotate: {input: AUDIO}
  - compose: {segments: "${annotate.segments}"}
  - train_tokenizer: {audio: "${compose.samples}"}
  - tokenize: {samples: "${compose.samples}", codec: "${train_tokenizer.checkpoint}"}
  - train: {samples: "${tokenize.shards}"}
  - generate: {model: "${train.checkpoint}", codec: "${train_tokenizer.checkpoint}", samples: "${compose.samples}"}
  - evaluate: {audio: "${generate.audio}", samples: "${compose.samples}"}
  - report: {}
"""
VOID = {"meta", "img", "br", "link", "input", "hr"}


class Run:
    """A run's folder with whatever its stages would have left there."""

    def __init__(self, folder: Path, name: str = "demo", recipe: str = RECIPE) -> None:
        (folder / "recordings").mkdir(parents=True)
        text = recipe.replace("AUDIO", str(folder / "recordings"))
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
        self.recipe.stages[-1].stage.run(ReportConfig(**settings), context)
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
        "files_seen": 240, "not_audio": 6, "audio_files": 234, "files_kept": 3, "files_filtered": 231,
        "files_failed": 0,
        "segments": segments, "seconds": 0.45, "reasons": {"no speech found": 230, "too quiet": 1},
        "text_agreement": 0.5, "quality": {"n": 3, "sig": 3.0, "bak": 3.5, "ovr": 2.5},
    })  # fmt: skip


def trained(run: Run) -> None:
    run.done("compose", {"train_samples": 2, "test_samples": 1, "train_seconds": 0.3, "test_seconds": 0.15})
    tokenizer_trained(run)
    run.done("tokenize", {"samples": 3})
    model_trained(run)


def tokenizer_trained(
    run: Run, stage: str = "train_tokenizer", mel: float = float("inf"), examples: int = 1
) -> None:
    codec = run.folder(stage)
    for part in ("original", "first_codebook", "decoded"):
        beep(codec / f"{part}.wav")
    row = {"source": "/home/alice/0.wav", "original": "original.wav", "first_codebook": "first_codebook.wav"}
    write_json(codec / "examples.json", [{**row, "decoded": "decoded.wav"}] * examples)
    metrics = [{"step": n, "mel": 1 / (n + 1), "stft": 2.0, "commitment": float("nan")} for n in range(5)]
    perplexities = {"evaluation/perplexity_first": 9.0, "evaluation/perplexity_mean": 8.0}
    write_jsonl(codec / "metrics.jsonl", [*metrics, {"step": 4, "evaluation/mel": 0.4, **perplexities}])
    run.done(stage, {"parameters": 7_000_000, "bitrate_bps": 2000.0, "steps": 5, "mel": mel})
    write_jsonl(codec / "alarms.jsonl", [{"step": 3, "kind": "codebook collapse", "text": "2% of <codes>"}])


def model_trained(run: Run, stage: str = "train", audio_loss: float = 2.0) -> None:
    losses = {"text_loss": 1.0, "audio_loss": audio_loss, "gradient_norm": 0.5, "learning_rate": 1e-3}
    losses |= {"audio_loss/0": 1.5, "audio_loss/1": 2.5}
    write_jsonl(run.folder(stage) / "metrics.jsonl", [{"step": n, **losses} for n in range(5)])
    with (run.folder(stage) / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "aud')  # cut short by a kill
    listened(run.folder(stage) / "listening")
    run.done(stage, {"steps": 5, "parameters": 11_000_000, "audio_loss": audio_loss})


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
    run: Run,
    texts: tuple[str, ...] = ("one", "two"),
    speakers: tuple[str, ...] = ("aria", "finn"),
    stage: str = "generate",
) -> list[dict[str, Any]]:
    rows = []
    for text in texts:
        for speaker in speakers:
            name = f"{text}_{speaker}"
            beep(run.folder(stage) / "audio" / f"{name}.wav")
            rows.append(
                {"id": name, "path": f"audio/{name}.wav", "text": text, "speaker": speaker, "stopped": True}
            )
    write_jsonl(run.folder(stage) / "generated.jsonl", rows)
    run.done(stage, {"clips": len(rows), "stopped": len(rows), "prompts": len(rows)})
    return rows


def judged(
    run: Run,
    rows: list[dict[str, Any]],
    closed: bool = True,
    stage: str = "evaluate",
    generate: str = "generate",
) -> None:
    """The first clip is heard wrong by all; scores as the stage evaluate writes them."""
    clips = []
    for index, row in enumerate(rows):
        heard = HOSTILE if index == 0 else row["text"]
        verdict = {"classifier": index > 0, "pocketsphinx": index > 0, "speaker": index > 0}
        names = ["classifier", "pocketsphinx"] if closed else ["pocketsphinx"]
        clips.append({
            **row, "path": f"../{generate}/{row['path']}", "heard": dict.fromkeys(names, heard),
            "speaker_heard": row["speaker"], "correct": verdict if closed else {"pocketsphinx": index > 0},
            "confidence": {"classifier": 0.75, "speaker": 0.5}, "duration_s": 0.2, "problem": None,
        })  # fmt: skip
    write_jsonl(run.folder(stage) / "clips.jsonl", clips)
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
    write_json(run.folder(stage) / "scores.json", scores)
    keys = ("real_accuracy", "generated_accuracy", "relative_accuracy", "speaker_real_accuracy")
    keys += ("pocketsphinx_real_accuracy", "pocketsphinx_generated_accuracy", "pocketsphinx_relative")
    figures: dict[str, Any] = dict.fromkeys((*keys, "speaker_generated_accuracy"), 0.75)
    judge = "classifier" if closed else "pocketsphinx, open vocabulary, 1 - word error rate"
    run.done(stage, {**figures, "judge": judge, "n_generated": len(rows)})


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


class Page(HTMLParser):
    """Tags, attributes and text of a page; raises where tags are not nested as they should be."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.text = ""
        self.details: list[tuple[str, bool]] = []
        """The first words of each `details`, and whether it is open."""
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert not self._open, f"never closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, key, value or "") for key, value in attrs]
        if tag == "details":
            self.details.append(("", ("open", None) in attrs))
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
        if self.details and not self.details[-1][0]:
            self.details[-1] = (data.strip(), self.details[-1][1])


class Node:
    """An element of a page: its tag, attributes, and what is in it."""

    def __init__(self, tag: str, attributes: dict[str, str]) -> None:
        self.tag, self.attributes = tag, attributes
        self.children: list[Node | str] = []

    @property
    def text(self) -> str:
        """All text, with single spaces."""
        return " ".join(
            " ".join(part if isinstance(part, str) else part.text for part in self.children).split()
        )

    def all(self, tag: str, style: str = "") -> list[Node]:
        """The elements of a tag below this one, those of a class where one is asked for."""
        below = [part for part in self.children if isinstance(part, Node)]
        own = [
            part
            for part in below
            if part.tag == tag and (not style or style in part.attributes.get("class", "").split())
        ]
        return [found for part in below for found in ([part] if part in own else []) + part.all(tag, style)]

    def rows(self) -> list[list[str]]:
        """The texts of a table's cells, without its head."""
        lines = [row for row in self.all("tr") if row.all("td")]
        return [[part.text for part in row.children if isinstance(part, Node)] for row in lines]


class _Tree(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.path = [Node("root", {})]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        node = Node(tag, {key: value or "" for key, value in attrs})
        self.path[-1].children.append(node)
        if tag not in VOID:
            self.path.append(node)

    def handle_endtag(self, tag: str) -> None:
        assert self.path.pop().tag == tag, tag

    def handle_data(self, data: str) -> None:
        self.path[-1].children.append(data)


def tree(html: str) -> Node:
    """A page, or a part of one, as a tree."""
    parser = _Tree()
    parser.feed(html)
    assert len(parser.path) == 1, parser.path[-1].tag
    return parser.path[0]


def section_of(run: Run, build: SectionBuilder, players: bool = False, **options: Any) -> Node:
    """What a section shows of a run."""
    section = build(ReportContext(RunRecord(run.recipe, run.results), Gallery(players), **options))
    assert section is not None
    return tree(str(section.content))
