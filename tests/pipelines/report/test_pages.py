"""Every page in one frame: it reads well by itself, by keyboard and on a telephone; a browser looks where there is one.

`make -C benchmarks pages-check` installs playwright and axe-core; without them or chromium, its tests are skipped.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from audiollm.evaluate.codec.report import write_codec_report
from audiollm.evaluate.codec.scores import METRICS
from audiollm.evaluate.report.statistics import metric_table
from audiollm.evaluate.report.suite import Example, ScoreTable, Sound, SuiteResult, write_page
from audiollm.evaluate.sound.edited_sounds import MEASURES
from audiollm.evaluate.suites import suite_catalog
from audiollm.files.atomic import write_json, write_jsonl
from audiollm.pages import page
from audiollm.pages.histogram import draw_histogram
from audiollm.pages.page import Tile
from pipelines.annotate.report import write_annotation_report
from pipelines.audiocot.report import write_audiocot_report
from tests.pipelines.annotate.annotation_report_run import annotated
from tests.pipelines.report.report_run import Page, Run, beep, whole_run
from tests.pipelines.report.suite_pages import OUTCOMES, write_suite_pages
from tests.pipelines.report.test_report_sounds import SOUNDS, sounds_made

STYLE = Path(page.__file__).parent / "page.css"
AXE = Path(os.environ.get("PAGES_AXE") or "build/axe/node_modules/axe-core/axe.min.js")
"""The file axe.min.js of npm's axe-core."""
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SCREENS = os.environ.get("PAGES_SCREENS")
WINDOWS = ((1440, 900, "light"), (1440, 900, "dark"), (390, 844, "light"))
"""Width and height in CSS pixels, and the colour scheme."""
CUT = """
[...document.querySelectorAll('svg text')].filter((text) => {
  const [inner, outer] = [text, text.closest('svg')].map((each) => each.getBoundingClientRect());
  return inner.width && (inner.left < outer.left - 1 || inner.right > outer.right + 1 || inner.top < outer.top - 1
    || inner.bottom > outer.bottom + 1);
}).map((text) => 'axis: ' + text.textContent).concat(
[...document.querySelectorAll('header *, main *')].filter((part) =>
  part.scrollWidth > part.clientWidth + 1 && part.clientWidth && !part.closest('svg, .screen, .wide, .interpreted')
  && getComputedStyle(part).display !== 'inline'
).map((part) => part.className + ': ' + part.textContent.trim().slice(0, 60)))
"""
"""Texts that reach beyond their picture or their place."""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    run = whole_run(folder / "run")
    run.report()
    sounds = Run(folder / "sounds", name="sounds", recipe=SOUNDS)
    sounds_made(sounds)
    sounds.report()
    (folder / "annotation").mkdir()
    annotated(folder / "annotation", folder / "run" / "recordings")
    return {
        "run": run.folder("report") / "report.html",
        "sounds": sounds.folder("report") / "report.html",
        "annotation": write_annotation_report(folder / "annotation"),
        "audiocot": audiocot_page(folder / "audiocot"),
        "suite": suite_page(folder / "suite.html", folder / "run" / "beep.wav"),
        "codecs": codec_page(folder / "codecs.html"),
        **write_suite_pages(folder / "suites"),
    }


def audiocot_page(folder: Path) -> Path:
    """A clip that was kept, one that was dropped, and a pair."""
    folder.mkdir()
    beep(folder / "bell.wav", 1.0)
    record = {
        "events": [{"sound": "bell", "start_s": 0.1, "end_s": 0.4}],
        "background": ["rain"],
        "avoid": ["music"],
    }
    clip = {
        "id": "bell-0", "path": str(folder / "bell.wav"), "start_s": 0.0, "end_s": 1.0, "caption": "a bell",
        "thought": "First, a bell.", "record": record, "measured": {"levels": {"dbfs": -20.0}},
    }  # fmt: skip
    dropped = {
        "step": "levels",
        "rule": "min_dbfs",
        "kind": "silent",
        "reason": "-60 dBFS, the limit is -50 dBFS",
    }
    pair = [
        {"role": role, "content": [{"type": "audio", "path": "bell.wav"}]} for role in ("user", "assistant")
    ]
    edit = {
        "id": "bell-add",
        "messages": pair,
        "metadata": {"operation": "add", "instruction": "Add a bell."},
    }
    write_jsonl(folder / "clips.jsonl", [clip])
    write_jsonl(folder / "filtered.jsonl", [{**clip, "id": "bell-1", "dropped": dropped}])
    write_jsonl(folder / "edits.jsonl", [edit])
    write_jsonl(folder / "review.jsonl", [{**clip, "verdict": "rejected", "note": "It is a horn."}])
    write_json(
        folder / "timings.json",
        {"steps": {"tags": {"seconds": 9.0, "audio_s": 60.0, "calls": 1}}, "audio_s": 60.0},
    )
    return write_audiocot_report(folder)


def suite_page(path: Path, sound: Path) -> Path:
    """The widest table that a suite has: that of edits, which was cut at 1440 pixels."""
    beep(sound)
    edits = ScoreTable(
        "Edits", ["edit", *MEASURES], [["add by words", *["75.0 % (35.6 to 95.5), n = 8"] * len(MEASURES)]]
    )
    whole = ScoreTable(
        "All sounds together", ["measure", "value", "n/a because"], [["inception score", "n/a", "no judge"]]
    )
    example = Example(
        "a: add by words", [("heard", "a bell")], [Sound("before", sound), Sound("after", sound)]
    )
    outcome = SuiteResult(
        "Generated sounds", ["24 sounds"], {}, [whole, edits], [example], [("a", "KL softmax: no real sound")],
        tiles=[Tile("75.0 %", "asked sounds recognized", "35.6 to 95.5, n = 8"), Tile("1,234,567.89", "distance")],
    )  # fmt: skip
    return write_page(path, outcome, 4)


def codec_page(path: Path) -> Path:
    """Three codecs with every metric: a table that was cut at 1440 pixels."""
    names = ("a codec with a long name", "mimi", "encodec-24khz")
    tables = {name: metric_table([1.0, 1234.5678, "no judge given"]) for name in METRICS}
    codec = {
        "bitrate_bps": 2000, "num_codebooks": 8, "codebook_size": 1024, "frame_rate": 25, "sample_rate": 24000,
        "parameters": 7e6, "failed_clips": 1, "prefixes": {}, "prefix_bitrates_bps": {}, "kinds": {"speech": tables},
        "codebooks": {"frames": 900, "usage": [0.5, 0.6], "perplexity": [300.0, 500.0]},
        "speed": {"encode_cpu_s_per_audio_s": 0.01, "decode_cpu_s_per_audio_s": None},
    }  # fmt: skip
    result: dict[str, Any] = {
        "clips": {"speech": {"clips": 3, "seconds": 9.0}}, "metrics": list(METRICS), "original": {},
        "best": {"speech": {"stoi": "mimi"}},
        "codecs": dict.fromkeys(names, codec), "set_aside": [{"path": "b.wav", "reason": "it is empty"}],
        "judges": {"recognizer": None, "speaker": None},
    }  # fmt: skip
    return write_codec_report(path, result, dict.fromkeys(names), (), 0)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------- without a browser

PAGES = ("run", "sounds", "annotation", "audiocot", "suite", "codecs", *OUTCOMES)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_the_frame_and_names_what_it_holds(pages: dict[str, Path], name: str) -> None:
    html = pages[name].read_text(encoding="utf-8")
    page = Page(html)
    assert page.tags["h1"] == page.tags["main"] == page.tags["nav"] == 1 and 'class="eyebrow"' in html
    assert ("html", "lang", "en") in page.attributes
    ids = [value for _, key, value in page.attributes if key == "id"]
    links = [value for tag, key, value in page.attributes if (tag, key) == ("a", "href")]
    assert links and {link.removeprefix("#") for link in links} <= set(ids)
    assert len({*ids}) == len(ids)
    for tag in re.findall(r"<(?:audio|button|input|select|svg)\b[^>]*>", html):
        is_named = "aria-label=" in tag or (tag.startswith("<button") and "aria-pressed" in tag)
        assert is_named, tag
    assert all('alt="' in tag for tag in re.findall(r"<img\b[^>]*>", html))


def test_every_subcommand_of_evaluate_has_a_page_here() -> None:
    assert {*suite_catalog().entries} == {*OUTCOMES, "codec"}


def test_a_value_that_is_missing_has_its_remedy(pages: dict[str, Path]) -> None:
    assert (
        "no judge given (give --recognizer for words, --speaker-judge for voices"
        in Page(pages["codecs"].read_text()).text
    )
    assert (
        "KL softmax: no real sound (give the list a column reference)"
        in Page(pages["suite"].read_text()).text
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_ground(scheme: str) -> None:
    """WCAG 2.2: a contrast of 4.5 for text of any size."""
    rules = STYLE.read_text().split("@media")[scheme == "dark"]
    colours = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", rules))
    for text in ("ink", "muted", "first", "second", "right", "wrong"):
        for ground in ("ground", "surface"):
            assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)


def contrast(first: str, second: str) -> float:
    dark, light = sorted(map(luminance, (first, second)))
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    parts = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize(
    "values", [[-0.0012, 0.0012], [12_345.0, 99_999.0], [4.99, 5.0, 5.01], [0.0, 1234.5]]
)
def test_ticks_of_a_histogram_are_within_it_and_differ(values: list[float]) -> None:
    chart = str(draw_histogram(values * 1500, [1] * 1500 * len(values), [], "h"))
    texts = re.findall(r'<text x="([\d.]+)" y="([\d.]+)" text-anchor="(\w+)">([^<]*)', chart)
    for x, _, anchor, text in texts:
        width = 6.4 * len(text)  # 10.5 pixels of DejaVu Sans, the widest of the fonts
        left = float(x) - {"start": 0, "middle": width / 2, "end": width}[anchor]
        assert left >= 0 and left + width <= 264, text
    ticks = [text for _, y, _, text in texts if y == "132"]
    assert len(ticks) > 1 and len({*ticks}) == len(ticks)


# ----------------------------------------------------------------------------------------- in a browser


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: make -C benchmarks pages-check"
    )
    if CHROMIUM is None:
        pytest.skip("no chromium: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=240_000)
        yield browser
        browser.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_a_page_in_a_browser(pages: dict[str, Path], chromium: Any, name: str) -> None:
    for width, height, scheme in WINDOWS:
        context = chromium.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        page = context.new_page()
        page.set_default_timeout(240_000)
        page.goto(pages[name].as_uri())
        page.evaluate("for (const part of document.querySelectorAll('details')) part.open = true")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(CUT) == []
        if width > 1000:
            tables = "[...document.querySelectorAll('.wide')].filter((place) => place.scrollWidth > place.clientWidth)"
            assert page.evaluate(f"{tables}.map((place) => place.textContent.trim().slice(0, 60))") == []
        if SCREENS:
            Path(SCREENS).mkdir(parents=True, exist_ok=True)
            page.screenshot(path=f"{SCREENS}/{name}-{width}-{scheme}.png", full_page=True)
        if AXE.is_file():
            page.evaluate(AXE.read_text())
            nodes = "each.nodes.map((node) => node.html.slice(0, 160))"
            violations = page.evaluate(
                f"axe.run().then((r) => r.violations.map((each) => [each.impact, each.id, {nodes}]))"
            )
            assert [each for each in violations if each[0] in ("serious", "critical")] == []
        context.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["run", "audiocot", "suite"])
def test_a_sound_is_played_by_keyboard(pages: dict[str, Path], chromium: Any, name: str) -> None:
    page = chromium.new_page()
    page.set_default_timeout(240_000)
    page.goto(pages[name].as_uri())
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.matches('.screen button')"):
            break
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    played = "document.activeElement.closest('.clip').querySelector('audio').played.length"
    for _ in range(300):  # the page's policy forbids the evaluation of text, by which Playwright waits
        if page.evaluate(played):
            break
        page.wait_for_timeout(100)
    assert page.evaluate(played)
    page.close()
