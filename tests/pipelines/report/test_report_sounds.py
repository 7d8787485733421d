"""The section on flow matching: edits with their span drawn in, generated sounds, scores, trainings."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from audiollm.evaluate.report.statistics import share
from audiollm.evaluate.sound.edited_sounds import DONE, MEASURES, UNTOUCHED, VERDICT, WHY
from audiollm.files.atomic import write_jsonl
from audiollm.files.set_aside import set_aside_row
from audiollm.flow.report_section import with_span
from audiollm.pages.clips import PageClip
from audiollm.pages.spectrograms import draw_spectrogram, mel_decibels
from tests.pipelines.report.report_run import HOSTILE, Page, Run, beep

SOUNDS = """
name: sounds
stages:
  - encode_latents: {samples: AUDIO, autoencoder: AUDIO}
  - train_flow: {samples: "${encode_latents.shards}"}
  - generate_sound: {model: "${train_flow.checkpoint}", autoencoder: AUDIO, samples: AUDIO}
  - edit_sounds: {model: "${train_flow.checkpoint}", autoencoder: AUDIO, samples: AUDIO}
  - evaluate_sound: {sounds: "${generate_sound.audio}", edits: "${edit_sounds.audio}"}
  - report: {}
"""


def sounds_made(run: Run) -> None:
    losses = [
        {"step": n, "loss": 2.0 - n / 10, "gradient_norm": 1.0, "learning_rate": 1e-3} for n in range(4)
    ]
    held_out = {"evaluation/loss": 1.5, "evaluation/loss_unconditional": 1.75}
    write_jsonl(run.folder("train_flow") / "metrics.jsonl", [*losses, {"step": 3, **held_out}])
    figures = {"parameters": 9_000_000, "steps": 4, "loss": 1.5, "conditions_gain": 0.143}
    run.done("train_flow", figures)
    made, edited = run.folder("generate_sound"), run.folder("edit_sounds")
    for name in ("a", "b"):
        beep(made / f"audio/{name}.wav")
        beep(run.audio / f"{name}.wav")
    rows = [
        {"id": name, "audio": f"audio/{name}.wav", "reference": str(run.audio / f"{name}.wav"), "caption": HOSTILE}
        for name in ("a", "b")
    ]  # fmt: skip
    write_jsonl(made / "generated.jsonl", rows)
    run.done("generate_sound", {"sounds": 2})
    edits = []
    for operation in ("add", "extend"):
        for part in ("before", "after", "real"):
            beep(edited / f"audio/{operation}-{part}.wav", duration_s=0.4)
        paths = {"before": "before", "audio": "after", "reference": "real"}
        edits.append(
            {
                "id": "a", "operation": operation, "by": "words", "caption": "a bell", "span": [0.1, 0.3],
                "event": {"name": "a bell", "label": "bell", "start_s": 0.1, "end_s": 0.3},
                **{key: f"audio/{operation}-{part}.wav" for key, part in paths.items()},
            }
        )  # fmt: skip
    write_jsonl(edited / "edited.jsonl", edits)
    run.done("edit_sounds", {"edits": 2})
    judged = [
        {"id": "a", "recognized": [["bell", "bell"], ["drum", HOSTILE]], "far": [True, False]},
        {"id": "a", "case": "add by words", "heard": "drum", DONE: False},
        {
            "id": "a",
            "case": "extend by words",
            "heard": "bell",
            DONE: True,
            VERDICT: False,
            WHY: "far from a perfect edit",
        },
    ]
    write_jsonl(run.folder("evaluate_sound") / "rows.jsonl", judged)
    measures = {name: share([True, False] if name in (UNTOUCHED, DONE) else []) for name in MEASURES}
    figures = {
        "recognized": share([True, False, False, False]), "judges": {"classes": HOSTILE},
        "edits": {"add by words": measures},
        "whole": {"Fréchet distance": 3.25, "inception score": None},
        "measures": {"onset error, s": {"mean": 0.125, "n": 2}, "CLAP CoT": {"mean": None, "n": 0}},
    }  # fmt: skip
    run.done("evaluate_sound", figures)


def test_what_the_stages_of_sound_set_aside_is_named(tmp_path: Path) -> None:
    run = Run(tmp_path, recipe=SOUNDS)
    sounds_made(run)
    stages = ("encode_latents", "train_flow", "generate_sound", "edit_sounds")
    for stage in stages:
        aside = set_aside_row(stage, "scenes.jsonl", "unreadable video", f"not for {stage}", "scene-3")
        write_jsonl(run.folder(stage) / "set_aside.jsonl", [aside])
    run.done("encode_latents", {"samples": 9, "set_aside": 1})
    text = Page(run.report()[0]).text
    assert all(f"not for {stage}" in text for stage in stages)


def test_sounds_and_edits_are_shown_with_their_verdicts(tmp_path: Path) -> None:
    run = Run(tmp_path, recipe=SOUNDS)
    sounds_made(run)
    html, summary = run.report()
    page = Page(html)
    assert page.tags["audio"] == 2 * 3 + 2 * 2, "before, after and a perfect edit; made and real"
    assert html.count('class="span" style="left:25.0%;width:50.0%"') == 2 * 3
    assert "heard in its place: drum" in page.text and page.text.count("✗ wrong") == 2
    assert "bell far from a perfect edit" in page.text and "heard bell far from the real sound" in page.text
    assert "drum: heard <img" in page.text and "bell: heard bell" in page.text
    for shown in (
        "3.250",
        "0.125",
        "lowered by the conditions",
        "14.3%",
        "asked sounds recognized",
        "25.0 %",
    ):
        assert shown in page.text, shown
    assert "inception score" not in page.text and "CLAP CoT" not in page.text, "what was not measured"
    assert summary["edit_sounds"] == {"edits": 2} and summary["train_flow"]["loss"] == 1.5


def test_stages_that_did_not_run_say_so(tmp_path: Path) -> None:
    run = Run(tmp_path, recipe=SOUNDS)
    run.done("train_flow", {}, state="failed", error="no sound")
    page = Page(run.report()[0])
    assert "The stage train_flow failed." in page.text
    for stage in ("generate_sound", "edit_sounds", "evaluate_sound"):
        assert f"The stage {stage} has not run." in page.text


def test_silence_is_dark_and_a_tone_is_not() -> None:
    def brightness(samples_N: np.ndarray[Any, Any]) -> float:
        drawn = draw_spectrogram(mel_decibels(samples_N.astype(np.float32), 16_000), 16_000, 1.0)
        picture = Image.open(io.BytesIO(base64.b64decode(drawn.image.split(",")[1])))
        return float(np.asarray(picture.convert("L")).max())

    tone_N = np.sin(np.arange(16_000) * 0.3)
    assert brightness(0 * tone_N) < 10
    assert brightness(tone_N) > 200 and brightness(0.001 * tone_N) > 200


@pytest.mark.parametrize(
    ("span", "drawn"), [((0.5, 1.0), (25.0, 25.0)), ((1.5, 4.0), (75.0, 25.0)), ((3.0, 4.0), (100.0, 0.0))]
)
def test_a_span_is_drawn_within_its_clip(span: tuple[float, float], drawn: tuple[float, float]) -> None:
    assert with_span(PageClip(duration_s=2.0), *span).span == drawn
    assert with_span(PageClip(problem="gone"), *span).span is None
