"""The parts of the report that need no run: picking samples, clips, spectrograms, charts, safe text."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from audiollm.audio import save
from audiollm.pages.charts import Series, curve_chart, running_means, series_of
from audiollm.pages.clips import Gallery
from audiollm.pages.formats import without_home
from audiollm.pages.run_record import pick_evenly, plain
from audiollm.pages.spectrograms import draw_spectrogram, mel_decibels
from audiollm.synthesis.report_section import choose_samples, is_wrong


def test_plain_values_are_strict_json() -> None:
    value = {"b": float("nan"), "a": [float("inf"), (1, {"d": 2, "c": 3})]}
    assert json.dumps(plain(value)) == '{"a": [null, [1, {"c": 3, "d": 2}]], "b": null}'


def test_homes_are_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: Path("/srv/people/bo"))
    assert without_home("in /srv/people/bo/x, not /srv/people/bob") == "in ~/x, not /srv/people/bob"
    assert without_home("'/home/alice/a' and /Users/eve") == "'~/a' and ~"


# ----------------------------------------------------------------------------------- samples, clips


def test_samples_are_spread_evenly_and_the_wrong_ones_are_among_them() -> None:
    rows = [
        {
            "id": f"{t}{s}{take}",
            "text": str(t),
            "speaker": str(s),
            "correct": {"classifier": t != 3 or take != 0},
        }
        for t in range(10)
        for s in range(6)
        for take in range(3)
    ]
    chosen = choose_samples(rows, 24)
    assert len({row["id"] for row in chosen}) == 24
    assert sum(is_wrong(row) for row in chosen) == 6  # 6 of 180 are wrong: a quarter of what is shown
    assert set(Counter(row["speaker"] for row in chosen).values()) == {4}
    right = Counter(row["text"] for row in chosen if not is_wrong(row))
    assert max(right.values()) - min(right.get(str(t), 0) for t in range(10) if t != 3) <= 1
    all_wrong = [{**row, "correct": {"classifier": False}} for row in rows]
    assert len(choose_samples(all_wrong, 24)) == 24
    assert len(choose_samples(rows[:5], 24)) == 5


def test_picking_evenly_counts_what_was_picked_before() -> None:
    rows = [{"voice": voice} for voice in "aab"]
    assert pick_evenly(rows, 2, ["voice"]) == [0, 2]
    assert pick_evenly(rows, 1, ["voice"], [{"voice": "a"}]) == [2]


def test_sound_is_left_out_when_the_page_is_full(tmp_path: Path) -> None:
    save(tmp_path / "a.wav", 0.3 * torch.sin(torch.arange(4_800) / 9)[None], 24_000)
    gallery = Gallery(most_bytes=6_000)
    clips = [gallery.clip(tmp_path / "a.wav") for _ in range(4)]
    assert clips[0].audio.startswith("data:audio/mpeg;base64,") and not clips[3].audio
    assert all(clip.spectrogram for clip in clips)
    assert gallery.num_silent == sum(not clip.audio for clip in clips)


def test_a_long_clip_is_cut_and_says_so(tmp_path: Path) -> None:
    save(tmp_path / "long.wav", torch.zeros(1, 8_000 * 40), 8_000)
    clip = Gallery().clip(tmp_path / "long.wav")
    assert clip.cut and clip.duration_s == pytest.approx(30.0)
    assert not Gallery().clip(tmp_path / "long.wav", 5.0, 8.0).cut


@pytest.mark.parametrize("rate", [8_000, 24_000, 96_000])
def test_a_tone_is_drawn_at_its_frequency(rate: int) -> None:
    samples_N = np.sin(2 * np.pi * 1000 * np.arange(rate) / rate).astype(np.float32)
    decibels_MT = mel_decibels(samples_N, rate)
    picture = draw_spectrogram(decibels_MT, rate, 1.0)
    place = next(place for place, label in picture.frequency_ticks if label == "1")
    loudest = float(decibels_MT.mean(axis=1).argmax())
    assert loudest == pytest.approx(place / 100 * len(decibels_MT), abs=1.5)
    assert [label for _, label in picture.time_ticks][:2] == ["0", "0.2"]
    assert decibels_MT.shape[1] <= 430


# --------------------------------------------------------------------------------------------- charts


def test_a_chart_is_well_formed_and_takes_the_colours_of_the_page() -> None:
    series = [
        Series("training", [(n, 5 / (n + 1)) for n in range(2000)]),
        Series("a < b & c", [(9, 1.0)], True),
    ]
    chart = curve_chart(series, "loss", "Loss <&>")
    root = ElementTree.fromstring(str(chart).replace("xlink:href", "href"))
    assert root.get("aria-label") == "Loss <&>"
    assert "currentColor" in chart and "var(--first)" in chart and "var(--second)" in chart
    assert "#0102" not in chart and "a &lt; b &amp; c" in chart
    assert len(chart) < 60_000


def test_one_row_of_a_training_does_not_bend_the_curve() -> None:
    """A row is of a single step and its batch: the loss of a tokenizer plunged where the last batch was an easy one."""
    loss = [(20 * n + 19, 0.45 + (0.08 if n % 2 else -0.08)) for n in range(52)]
    means = running_means([*loss, (1043, 0.1)])
    assert [step for step, _ in means] == [*(step for step, _ in loss), 1043]
    assert all(0.42 < value < 0.48 for _, value in means[3:-4])
    assert means[-1][1] > 0.33, "the last point is no plunge"
    few = [(0, 1.0), (1, 5.0)]
    assert running_means(few) is few


def test_no_two_pictures_of_a_page_have_an_id_in_common() -> None:
    charts = [str(curve_chart([Series("x", [(0, n), (1, 1.0)], True)], "loss", "Loss")) for n in (2.0, 3.0)]
    ids = [set(re.findall(r'\bid="([^"]+)"', chart)) for chart in charts]
    assert ids[0] and not ids[0] & ids[1]
    assert all(
        set(re.findall(r'href="#([^"]+)"', chart)) <= own for chart, own in zip(charts, ids, strict=True)
    )


def test_every_series_has_a_colour_of_its_own() -> None:
    chart = curve_chart([Series(str(n), [(0, n), (1, n)]) for n in range(8)], "loss", "t", "codebook")
    assert chart is not None and ElementTree.fromstring(str(chart).replace("xlink:href", "href")) is not None
    lines = set(re.findall(r"stroke: ((?:color-mix|var\(--[fs]).*?)[;\"]", chart))
    assert len(lines) == 8 and "#0102" not in chart and "codebook" in chart


@pytest.mark.parametrize("name", [r"$\x$", "$x", "a$b$c", r"\frac", "_x", "%s {y}", "<&>", "$$", "^_"])
def test_a_name_in_a_chart_is_shown_as_it_is_written(name: str) -> None:
    """A formula in a name would end the report."""
    series = [Series(f"a {name}", [(0, 1.0), (1, 2.0)]), Series("b", [(0, 2.0)])]
    chart = curve_chart(series, name, f"over {name}", name)
    texts = set(ElementTree.fromstring(str(chart).replace("xlink:href", "href")).itertext())
    assert {name, f"a {name}"} <= {text.strip() for text in texts}


def test_figures_that_no_axis_holds_are_left_out() -> None:
    """A damaged file of figures may say anything."""
    rows = [
        {"step": 0, "x": 1.0},
        {"step": 1, "x": 1e308},
        {"step": 10**400, "x": 1.0},
        {"step": 2, "x": 10**400},
    ]
    rows += [{"step": float("inf"), "x": 2.0}, {"step": "3", "x": 2.0}, {"step": 3, "x": float("nan")}]
    assert series_of(rows, "x", "x").points == [(0.0, 1.0)]


CHARTS: list[Callable[[], Any]] = [
    lambda: curve_chart([Series("x", [(0, 0.0)])], "y", "one point"),
    lambda: curve_chart([Series("x", [(0, 3.0), (1, 3.0)])], "y", "a flat line"),
    lambda: curve_chart([Series("x", [(0, -5.0), (9, 1e9)])], "y", "far apart"),
]


@pytest.mark.parametrize("draw", CHARTS)
def test_odd_curves_can_be_drawn(draw: Callable[[], Any]) -> None:
    assert draw().startswith("<svg")


def test_no_points_make_no_chart() -> None:
    assert curve_chart([Series("x", [])], "y", "nothing") is None


def test_importing_the_stage_is_cheap() -> None:
    code = (
        "import sys, pipelines.report.settings; print({'torch', 'matplotlib', 'librosa'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
