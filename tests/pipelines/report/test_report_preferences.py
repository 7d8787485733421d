"""The sections on preferences and reward models: of a real tiny run, of several methods, and of what is missing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from audiollm.data.records.sample import AudioPart, Message, Sample, TextPart, write_samples
from audiollm.files.atomic import read_json, read_jsonl, write_json, write_jsonl
from audiollm.pages.charts import MAX_COMPARED, Series, compared_chart, line_style, reliability_chart
from audiollm.recipe.runner import run_recipe
from audiollm.recipe.stages import load_recipe
from audiollm.rl.preference.report_section import preferences_section
from audiollm.rl.report.cases import NO_PAIRS
from audiollm.rl.reward_models.report_section import rewards_section
from tests.audiollm.models.tiny_audio_llms import save_tiny
from tests.audiollm.rl.preference.records import write_records
from tests.pipelines.report.report_run import HOSTILE, Node, Page, Run, beep, section_of

SCRIPT = "<script>alert(1)</script>"
STAGE = '{samples: "${compose.samples}", start: AUDIO, objective: OBJECTIVE}'
COMPARING = f"""
name: methods
stages:
  - compose: {{segments: AUDIO}}
  - name: plain
    train_preference: {STAGE.replace("OBJECTIVE", "{name: dpo, beta: 0.2}")}
  - name: short
    train_preference: {STAGE.replace("OBJECTIVE", "[{name: r_dpo, weight: 0.5}, sft]")}
  - name: thumbs
    train_preference: {STAGE.replace("OBJECTIVE", "kto")}
  - name: heard-before
    evaluate_listening: {{model: AUDIO, samples: "${{compose.samples}}"}}
  - name: heard-plain
    evaluate_listening: {{model: "${{plain.checkpoint}}", samples: "${{compose.samples}}"}}
  - report: {{}}
"""
CHARTS = [
    "Margin", "Implicit reward, held out", "Implicit reward, training", "In the right order",
    "KL from the reference", "Length of answers", "Loss", "Gradient norm",
]  # fmt: skip


def answers_of(id: str, clip: Path, steps: tuple[int, ...], spoken: bool = False) -> list[dict[str, Any]]:
    asked = [{"type": "audio", "path": str(clip), "start_s": 0.0, "end_s": 0.1, "part": 0}]
    messages = [{"role": "user", "content": [*asked, {"type": "text", "text": f"Which one? {HOSTILE}"}]}]
    return [
        {
            "step": step, "id": id, "messages": messages, "answer": "" if spoken else f"{SCRIPT} at {step}",
            "tokens": 10 + step, "seconds": 0.75 if spoken else None, "stopped": step > 0,
        }
        for step in steps
    ]  # fmt: skip


def pair_of(id: str, clip: Path, margin: float, rejected: str = SCRIPT) -> dict[str, Any]:
    answers = [
        {"role": role, "content": [{"type": "text", "text": text}], "reward": reward, "tokens": 4}
        for role, text, reward in (("chosen", "low", margin), ("rejected", rejected, 0.0))
    ]
    asked = answers_of(id, clip, (0,))[0]["messages"]
    return {
        "step": 9, "id": id, "messages": asked, "answers": answers, "margin": margin, "right": margin > 0
    }  # fmt: skip


def aligned(run: Run, stage: str, accuracy: float = 0.75, prefix: str = "", single: bool = False) -> None:
    """What a stage train_preference leaves behind; `prefix` as the later terms of a mix have it."""
    clip = run.audio / "heard.wav"
    beep(clip)
    names = ("reward_desirable", "reward_undesirable") if single else ("reward_chosen", "reward_rejected")
    figures = {f"{prefix}{names[0]}": 0.5, f"{prefix}{names[1]}": -1.0}
    if not single:
        figures |= {f"{prefix}margin": 1.5, f"{prefix}accuracy": accuracy, f"{prefix}length_chosen": 4.0}
    training = {**figures, "loss": 0.5, "gradient_norm": 2.0}
    held_out = {f"evaluation/{key}": value for key, value in figures.items()}
    held_out |= {"evaluation/loss": 0.4, "evaluation/kl_per_token": 0.25, "evaluation/answer_length": 19.0}
    rows = [{"step": step, **training} for step in (3, 6, 9)] + [{"step": s, **held_out} for s in (5, 9)]
    write_jsonl(run.folder(stage) / "metrics.jsonl", rows)
    answers = [row for id in ("a", "b") for row in answers_of(id, clip, (0, 5, 9))]
    write_jsonl(run.folder(stage) / "answers.jsonl", sorted(answers, key=lambda row: row["step"]))
    write_jsonl(run.folder(stage) / "pairs.jsonl", [pair_of(f"p{n}", clip, n - 1.5) for n in range(20)])
    told = {**figures, "records": 40, "held_out_records": 20, "steps": 9, "kl_per_token": 0.25}
    run.done(stage, {**told, "loss": 0.4, "answer_length": 19.0, "set_aside": 0})


# ---------------------------------------------------------------------------------------------- real runs


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A tiny training and its report, as `audiollm run` makes them; an answer is a script."""
    folder = tmp_path_factory.mktemp("real")
    records = write_records(folder)
    rows = [json.loads(line) for line in records.read_text().splitlines()]
    for row in rows[-4:]:
        row["answers"][1]["content"][0]["text"] = SCRIPT
    write_jsonl(records, rows)
    save_tiny("qwen2_audio", folder / "model")
    stage = {
        "samples": str(records), "start": str(folder / "model"), "objective": "dpo", "learning_rate": 1e-2,
        "steps": 20, "evaluations": 2, "batch_size": 8, "report_to": [],
    }  # fmt: skip
    recipe = {"name": "one", "stages": [{"train_preference": stage}, {"report": {}}]}
    (folder / "one.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    loaded = load_recipe(folder / "one.yaml", runs=folder / "runs")
    run_recipe(loaded, Console(quiet=True))
    return loaded.folder, (loaded.folder / "report.html").read_text(encoding="utf-8")


def test_a_real_run_shows_its_curves_figures_and_pairs(real: tuple[Path, str]) -> None:
    folder, html = real
    page = Page(html)
    figures = read_json(folder / "train_preference" / "stage.json")["figures"]
    assert page.tags["svg"] == len(CHARTS)
    for title in CHARTS:
        assert title in page.text, title
    for text in (
        f"{100 * figures['accuracy']:.1f} %", f"{figures['margin']:.3f}", f"{figures['kl_per_token']:.4f}",
        f"{figures['answer_length']:.1f} tokens", "held-out pairs in order", "step 0", "step 20",
    ):  # fmt: skip
        assert text in page.text, text
    pairs = read_jsonl(folder / "train_preference" / "pairs.jsonl")
    shown = [alt.rpartition(" ")[2] for _, key, alt in page.attributes if key == "alt"][4:]
    assert shown == [row["id"] for row in pairs] and len(shown) == 8  # all held-out ones, the worst first
    assert page.tags["audio"] == 4 + 8  # prompts that it answers, and pairs
    summary = read_json(folder / "summary.json")
    assert summary["train_preference"]["accuracy"] == figures["accuracy"]


def test_answers_are_escaped(real: tuple[Path, str]) -> None:
    page = Page(real[1])
    assert SCRIPT not in real[1] and SCRIPT in page.text
    assert page.tags["script"] == 1  # the page's own


# ------------------------------------------------------------------------------------------ several methods


def titles_of(figures: list[Node]) -> list[str]:
    return [figure.all("figcaption")[0].text for figure in figures]


def pairs_in(part: Node) -> list[Node]:
    return [card for card in part.all("article", "card") if card.all("div", "answers")]


@pytest.fixture
def compared(tmp_path: Path) -> Run:
    run = Run(tmp_path, recipe=COMPARING)
    run.done("compose", {"train_samples": 2, "test_samples": 1})
    aligned(run, "plain", 0.875)
    aligned(run, "short", prefix="r_dpo/")
    aligned(run, "thumbs", single=True)
    table = {"low": 0.5, "high": 0.9, "questions": 40, "chance": 0.25}
    run.done("heard-before", {"accuracy": 0.4, **table})
    run.done("heard-plain", {"accuracy": 0.8, **table})
    return run


def test_several_methods_share_pictures_and_a_table(compared: Run) -> None:
    html, summary = compared.report()
    page = Page(html)
    assert HOSTILE not in html and SCRIPT not in html
    section = section_of(compared, preferences_section)
    pictures = section.all("div", "two")[0].all("figure")
    assert titles_of(pictures) == [
        "Length of its own answers", "In the right order", "Margin", "Implicit reward, chosen",
        "Implicit reward, rejected", "KL from the reference", "Gradient norm",
    ]  # fmt: skip
    styles = " ".join(path.attributes.get("style", "") for path in pictures[2].all("path"))
    assert all(f"var(--m{place})" in styles for place in range(3)) and "var(--m3)" not in styles
    start, plain, short, thumbs = section.all("table", "methods")[0].rows()
    assert start[1] == "before the training" and start[-1].startswith("40.0 %")
    assert (plain[1], short[1]) == ("dpo (beta 0.2)", "0.5 r_dpo + 1 sft")
    assert (plain[2], short[2], thumbs[2]) == ("87.5 %", "75.0 %", "–")
    assert [row[3] for row in (plain, short, thumbs)] == ["1.500"] * 3  # 0.5 less −1.0 for thumbs
    assert plain[5] == "10.0 → 19.0" and plain[4] == "0.2500"
    assert plain[-1].startswith("80.0 %") and short[-1] == "–"
    assert "80.0 %" in page.text and "10.0 → 19.0" in page.text and "40.0 %" in page.text
    assert "plain, the best of 2 trainings" in page.text  # of the third no share is known
    assert page.tags["svg"] == 7 + 8 + 8 + 6  # single answers have no share in order, and no length
    assert summary["train_preference"]["short"]["kl_per_token"] == 0.25


def test_each_method_answers_the_same_prompts(compared: Run) -> None:
    prompts = section_of(compared, preferences_section).all("div", "wide-cards")[0].all("article")
    assert [prompt.all("span", "file")[0].text for prompt in prompts] == ["a", "b"]
    answers = prompts[0].all("dl", "steps")[0].all("div")
    names = [(answer.all("dt")[0].text, answer.all("span")[0].text[:9]) for answer in answers]
    assert names == [("before", "10 tokens"), *((name, "19 tokens") for name in ("plain", "short", "thumbs"))]
    assert "0.10 s" in prompts[0].text


def test_the_worst_pairs_come_first_and_are_shared_out(compared: Run) -> None:
    stages = section_of(compared, preferences_section).all("details", "stage")
    pairs = [pairs_in(stage) for stage in stages]
    assert [len(of_stage) for of_stage in pairs] == [4, 4, 4]
    assert [pair.all("span", "file")[0].text for pair in pairs[0]] == ["p0", "p1", "p2", "p3"]
    assert ["✗ wrong order" in pair.text for pair in pairs[0]] == [True, True, False, False]
    assert "4 of 20 that were kept; 2 of these are in the wrong order" in stages[0].text


def test_missing_files_leave_sentences(compared: Run) -> None:
    for file in ("pairs.jsonl", "answers.jsonl"):
        (compared.folder("plain") / file).unlink()
    (compared.folder("short") / "metrics.jsonl").unlink()
    (compared.folder("short") / "pairs.jsonl").write_text('{"id": "x"}\n{"broken')
    (compared.audio / "heard.wav").unlink()
    del compared.results["thumbs"]
    page = Page(compared.report()[0])
    for text in (
        NO_PAIRS, "It left no answers of its own (answers.jsonl).",
        "The stage thumbs has not run.", "heard.wav: its file is no longer there, or it is in a shard",
    ):  # fmt: skip
        assert text in page.text, text


def test_more_methods_than_a_picture_tells_apart_are_in_the_table_alone() -> None:
    many = [Series(str(n), [(0, n), (5, n + 1)]) for n in range(MAX_COMPARED + 3)]
    styles = [line_style(place) for place in range(MAX_COMPARED)]
    assert len(set(styles)) == MAX_COMPARED
    assert str(compared_chart(many, "unit", "title")).count("<path") == str(
        compared_chart(many[:MAX_COMPARED], "unit", "title")
    ).count("<path")
    assert compared_chart([Series("none", [])], "unit", "title") is None


def test_many_evaluations_share_one_tile(tmp_path: Path) -> None:
    asked = "".join(
        f"  - name: heard{n}\n    evaluate_listening: {{model: AUDIO, samples: '${{compose.samples}}'}}\n"
        for n in range(8)
    )
    recipe = f"name: many\nstages:\n  - compose: {{segments: AUDIO}}\n{asked}  - report: {{}}\n"
    run = Run(tmp_path, recipe=recipe)
    table = {"low": 0.1, "high": 0.9, "questions": 40, "chance": 0.25}
    for n in range(7):
        run.done(f"heard{n}", {"accuracy": 0.5 + 0.01 * (n == 4), **table})
    page = Page(run.report()[0])
    assert "right answers, the best of 7" in page.text and "heard4: 40 questions" in page.text
    assert "heard5: right answers" not in page.text


# -------------------------------------------------------------------------------------- sound from shards


def test_a_recording_in_a_shard_is_heard_from_the_manifest(compared: Run) -> None:
    beep(compared.audio / "question.wav", 0.3)
    beep(compared.audio / "answer.wav", 0.45)
    asked = Message(role="user", content=[AudioPart(path=str(compared.audio / "question.wav"))])
    said = Message(role="assistant", content=[AudioPart(path=str(compared.audio / "answer.wav"))])
    other = Message(role="user", content=[TextPart(text="else")])
    samples = [
        Sample(id="else", messages=[other], task="any"),
        Sample(id="spoken", messages=[asked, said], task="any"),
    ]
    manifest = next(
        stage.settings()["samples"] for stage in compared.recipe.stages if stage.name == "heard-plain"
    )
    write_samples(Path(manifest), samples)
    row = pair_of("spoken", Path("0.flac"), -1.0)
    row["answers"][0]["content"] = [
        {"type": "audio", "path": "1.flac", "start_s": 0, "end_s": None, "part": 1}
    ]
    row["answers"][1]["content"] = [
        {"type": "audio", "path": "2.flac", "start_s": 0, "end_s": None, "part": 2}
    ]
    write_jsonl(compared.folder("thumbs") / "pairs.jsonl", [row])
    result = compared.results["thumbs"]
    told = {**result.settings, "samples": [{"path": manifest}]}
    compared.results["thumbs"] = replace(result, settings=told)
    (pair,) = pairs_in(section_of(compared, preferences_section).all("details", "stage")[2])
    chosen, rejected = pair.all("div", "answer")
    assert "0.30 s" in pair.text and "0.45 s" in chosen.text and "2.flac" in rejected.text


# ------------------------------------------------------------------------------------------- reward models


def as_reward_models(run: Run, *names: str) -> None:
    """Make stages of the recipe ones of the kind `train_reward`."""
    stages = tuple(
        replace(each, stage=replace(each.stage, kind="train_reward")) if each.name in names else each
        for each in run.recipe.stages
    )
    run.recipe = replace(run.recipe, stages=stages)


@pytest.mark.slow
def test_a_reward_model_has_its_ranking_and_its_reliability(compared: Run) -> None:
    as_reward_models(compared, "plain")
    bins = [{"confidence": 0.05 + 0.1 * n, "accuracy": 0.1 * n, "count": 10 * (n % 4)} for n in range(5, 10)]
    write_json(compared.folder("plain") / "reliability.json", {"bins": [*bins, "broken"], "error": 0.0625})
    section = section_of(compared, rewards_section)
    assert titles_of(section.all("figure")) == [
        "In the right order", "Margin", "Loss", "Gradient norm", "Reliability",
    ]  # fmt: skip
    facts = section.all("dl", "facts")[0].text
    assert "calibration error 0.062" in facts and "in order, held out 87.5 %" in facts
    assert "margin, held out 1.500" in facts and len(pairs_in(section)) == 12
    page = Page(compared.report()[0])
    assert "reward model: held-out pairs in order" in page.text and "calibration error 0.062" in page.text
    assert "Reward models" in page.text and "as often right as sure" in page.text
    assert [value for tag, key, value in page.attributes if (tag, key) == ("a", "href")] == [
        "#recordings", "#preferences", "#rewards", "#answers", "#run",
    ]  # fmt: skip
    (compared.folder("plain") / "reliability.json").write_text("{")
    page = Page(compared.report()[0])
    assert "as often right as sure" not in page.text


@pytest.mark.slow
def test_reward_models_are_compared(compared: Run) -> None:
    as_reward_models(compared, "plain", "short")
    write_json(compared.folder("short") / "reliability.json", {"bins": [], "error": 0.125})
    section = section_of(compared, rewards_section)
    assert [row[4] for row in section.all("table", "methods")[0].rows()] == ["–", "0.125"]
    assert titles_of(section.all("div", "two")[0].all("figure")) == [
        "In the right order", "Margin", "Gradient norm",
    ]  # fmt: skip
    assert "calibration error" in Page(compared.report()[0]).text


def test_reliability_without_pairs_is_no_picture() -> None:
    assert reliability_chart([], "title") is None and reliability_chart([(0.5, 0.5, 0)], "title") is None
    drawn = str(reliability_chart([(0.55, 0.5, 7), (0.95, 1.0, 1234)], "title"))
    assert "1,234" in drawn and "var(--first)" in drawn
