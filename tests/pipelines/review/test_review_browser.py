"""A person corrects by keyboard alone in a real Chromium, in one window and in two, while the server is killed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from audiollm.files.atomic import read_jsonl
from pipelines.review.corrections import CORRECTIONS, read_corrections
from tests.pipelines.review.annotation import ReviewServer, write_annotation

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
playwright = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: pip install playwright"
)
pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
if CHROMIUM is None:
    pytest.skip("no chromium: apt-get install chromium", allow_module_level=True)
CUT = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
"""Cuts Chromium off from all but this machine."""
PATIENCE_MS = 120_000
AXE = os.environ.get("STUDIO_AXE")
"""The file axe.min.js of npm's axe-core; `make -C benchmarks studio-check` installs it."""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        arguments = ["--no-sandbox", "--autoplay-policy=no-user-gesture-required", CUT]
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=arguments, timeout=PATIENCE_MS)
        yield browser
        browser.close()


class Reviewer:
    """A window of a browser of its own, whose person uses the keyboard alone."""

    def __init__(self, chromium: Any, url: str, width: int = 1440, bypass_csp: bool = True) -> None:
        self.context = chromium.new_context(viewport={"width": width, "height": 900}, bypass_csp=bypass_csp)
        self.page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE_MS)
        self.foreign: list[str] = []
        self.problems: list[str] = []
        self.page.on("request", lambda request: self._watch(request.url, url))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on(
            "console", lambda line: self.problems.append(line.text) if "Policy" in line.text else None
        )
        self.page.goto(url)
        self.page.wait_for_selector("body[data-ready=yes]")

    def _watch(self, address: str, url: str) -> None:
        if not address.startswith((url, "data:")):
            self.foreign.append(address)

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)

    def write(self, key: str, text: str) -> None:
        """Go into a field by its key, replace what stands there, and save."""
        self.press(key, "Control+a")
        self.page.keyboard.type(text)
        self.press("Enter")

    def wait_saved(self) -> None:
        self.page.wait_for_selector("body[data-waiting='0']")

    def wait_for(self, condition: str) -> None:
        self.page.wait_for_function(condition)

    def shown_texts(self) -> list[str]:
        return [str(text) for text in self.page.locator("#rows td.text").all_inner_texts()]

    def check(self) -> None:
        """Nothing was asked of another machine, and no script failed."""
        assert self.foreign == [] and self.problems == []
        self.context.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ReviewServer]:
    running = ReviewServer(write_annotation(tmp_path / "corpus"))
    yield running
    running.kill()


def latest_fields(folder: Path) -> dict[str, dict[str, Any]]:
    """Corrected fields by recording and machine start in ms."""
    return {f"{c.file}@{c.start_ms}": c.fields.as_row() for c in read_corrections(folder).values()}


def test_twelve_corrections_by_keyboard_alone(server: ReviewServer, chromium: Any) -> None:
    person = Reviewer(chromium, server.url, bypass_csp=False)
    page = person.page
    person.press("a")  # r0 at 0.1 s was dropped as too quiet: accepted, and on to the next
    person.write("t", "a dog barked three times")
    person.press("n")
    person.press("2", "a")  # the second recognizer's text in place of the refused one
    person.press("r")
    person.write("k", "carla")
    person.press("n", "]", "]", "{", "Enter")
    person.press("n", "r", "u")  # rejected, and taken back
    person.press("n", "t")
    page.keyboard.type(" discarded")
    person.press("Escape", "n", "a", "a", "a", "p", "p", "r")
    person.wait_saved()
    fields = latest_fields(server.folder)
    assert fields["r0.wav@100"] == {"keep": True, "text": "seven ships sailed"}
    assert fields["r0.wav@1100"] == {"text": "a dog barked three times"}
    assert fields["r0.wav@2100"] == {"keep": True, "text": "rain fell all day up"}
    assert fields["r0.wav@3100"] == {"keep": False}
    assert fields["r1.wav@100"] == {"speaker": "carla"}
    assert fields["r1.wav@1100"] == {"start_s": 1.2, "end_s": 1.85}
    assert fields["r1.wav@2100"] == {}
    assert "r1.wav@3100" not in fields
    judged = [fields[f"r2.wav@{start}"] for start in (100, 1100, 2100)]
    assert [row["keep"] for row in judged] == [True, False, True]
    page.reload()
    page.wait_for_selector("body[data-ready=yes]")
    assert person.shown_texts()[1] == "a dog barked three times"
    assert page.inner_text("#counts") == "9 of 16 segments judged"
    person.check()


@pytest.mark.slow
def test_sound_is_played_also_slower_and_the_list_is_filtered_by_keyboard(
    server: ReviewServer, chromium: Any
) -> None:
    person = Reviewer(chromium, server.url)
    page = person.page
    person.wait_for("document.getElementById('sound').readyState > 2")
    person.press("s")
    person.wait_for("!document.getElementById('sound').paused")
    assert page.evaluate("document.getElementById('sound').playbackRate") == 0.6
    person.press("s")
    assert page.evaluate("document.getElementById('sound').paused")
    person.press(" ")
    person.wait_for("document.getElementById('sound').currentTime > 0.3")
    assert page.evaluate("document.getElementById('sound').playbackRate") == 1
    person.wait_for("document.getElementById('sound').paused")  # at the end of the span
    person.press("f")
    page.keyboard.type("ships r2")
    person.press("Enter")
    page.wait_for_selector("text=1 to 1 of 1 segments")
    person.press("?")
    assert page.locator("#keys").get_attribute("open") is None
    person.press("?")
    assert page.get_by_text("undo the last correction").is_visible()
    page.uncheck("#keys-on")
    page.focus("#rows")
    person.press("r")
    assert page.inner_text("#counts").startswith("0 of")
    person.check()


def test_a_conflict_is_shown_and_neither_side_is_lost(server: ReviewServer, chromium: Any) -> None:
    anna, ben = Reviewer(chromium, server.url), Reviewer(chromium, server.url)
    anna.page.fill("#by", "Anna")
    anna.page.focus("#rows")
    anna.write("t", "nine ships")
    anna.wait_saved()
    ben.write("t", "ten ships")
    ben.page.wait_for_selector("#conflict:not([hidden])")
    assert "Anna corrected this segment" in ben.page.inner_text("#conflict-title")
    assert "nine ships" in ben.page.inner_text("#conflict") and "ten ships" in ben.page.inner_text(
        "#conflict"
    )
    assert latest_fields(server.folder)["r0.wav@100"] == {"text": "nine ships"}
    ben.press("Tab", "Tab", "Enter")  # save mine over it
    ben.wait_saved()
    assert latest_fields(server.folder)["r0.wav@100"] == {"text": "ten ships"}
    anna.write("t", "eleven ships")
    anna.page.wait_for_selector("#conflict:not([hidden])")
    anna.press("Tab", "Enter")  # keep theirs
    anna.wait_saved()
    assert anna.shown_texts()[0] == "ten ships"
    lines = read_jsonl(server.folder / CORRECTIONS)
    assert [line["fields"]["text"] for line in lines] == ["nine ships", "ten ships"]
    anna.check()
    ben.check()


@pytest.mark.slow
@pytest.mark.skipif(not AXE, reason="no axe-core: make -C benchmarks studio-check installs it with npm")
@pytest.mark.parametrize("width", [1440, 390])
def test_nothing_is_found_by_axe(server: ReviewServer, chromium: Any, width: int) -> None:
    person, rival = Reviewer(chromium, server.url, width), Reviewer(chromium, server.url)
    rival.write("t", "nine ships")
    rival.wait_saved()
    person.page.evaluate("document.getElementById('search-box').open = true")
    person.page.evaluate("document.getElementById('measures').open = true")
    person.write("t", "ten ships")
    person.page.wait_for_selector("#conflict:not([hidden])")
    person.page.add_script_tag(path=AXE)
    nodes = "v.nodes.map(n => n.html.slice(0, 160))"
    problems = person.page.evaluate(f"axe.run().then(r => r.violations.map(v => [v.impact, v.id, {nodes}]))")
    assert problems == [], json.dumps(problems, indent=1)
    assert person.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    person.check()
    rival.check()


@pytest.mark.slow
def test_two_hundred_corrections_in_two_windows_while_the_server_is_killed_five_times(
    tmp_path: Path, chromium: Any
) -> None:
    """One window judges from the first row on, the other from the last; they meet in the middle."""
    server = ReviewServer(write_annotation(tmp_path / "corpus", 200, 8))
    windows = [Reviewer(chromium, server.url), Reviewer(chromium, server.url)]
    windows[1].page.select_option("#order", "down")
    windows[1].page.wait_for_selector("#row-0:has-text('r7.wav')")
    windows[1].page.focus("#rows")
    for number in range(100):
        for window in windows:
            window.press("r" if number % 10 == 0 else "a")
            if number % 50 == 49:  # the next page is asked for, which waits for the server
                window.wait_saved()
                window.page.wait_for_selector("#row-0[aria-selected=true]") if number < 99 else None
        if number % 20 == 10:
            server.kill()
            server.start()
    for window in windows:
        window.wait_saved()
        assert window.page.locator("#conflict").is_hidden()
        window.check()
    server.kill()
    lines = read_jsonl(server.folder / CORRECTIONS)
    assert server.starts == 6
    assert (
        len(lines)
        == len({line["operation"] for line in lines})
        == len(read_corrections(server.folder))
        == 200
    )
    assert sum(line["fields"]["keep"] for line in lines) == 180
