"""The studio in a process of its own and a person in a real Chromium, for tests of the page.

It needs gradio, playwright and Debian's chromium.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from audiollm.audio import save
from audiollm.files.atomic import write_jsonl
from tests.audiollm.flow.toy import tone
from tests.pipelines.studio.tiny_studio import write_film

ROOT = Path(__file__).parents[3]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
playwright = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: pip install playwright"
)
pytest.importorskip("gradio", reason="the extra `studio` is not installed")
if CHROMIUM is None:
    pytest.skip("no chromium: apt-get install chromium", allow_module_level=True)
CUT = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost"
"""Cuts Chromium off from all but this machine."""
PATIENCE_S = 120
"""Longest wait for anything: on a busy machine a request takes a minute."""
PATIENCE_MS = 1000 * PATIENCE_S
SCREENS = os.environ.get("STUDIO_SCREENS")
AXE = os.environ.get("STUDIO_AXE")
"""The file axe.min.js of npm's axe-core."""
needs_axe = pytest.mark.skipif(
    not AXE, reason="no axe-core: make -C benchmarks studio-check installs it with npm"
)
SHARED = Path(
    os.environ.get("AUDIOLLM_SHARED_DATA") or Path(__file__).resolve().parents[4] / "shared" / "data"
)
MOST_TABS = 120
"""Presses of Tab within which everything on the page is reached."""

CUT_OFF = """
import os, socket
connect = socket.socket.connect
def connect_here(self, address):
    if self.family != socket.AF_UNIX and str(address[0]) not in ("127.0.0.1", "::1", "localhost"):
        open(os.environ["STUDIO_TRIED"], "a").write(f"{address}\\n")
        raise OSError("the network is cut")
    return connect(self, address)
socket.socket.connect = connect_here
"""
"""Cuts a server off from all but this machine, and notes what it tried to reach."""


@contextmanager
def launched(*arguments: str) -> Iterator[Any]:
    """Chromium, cut off from all but this machine."""
    usual = ["--no-sandbox", "--autoplay-policy=no-user-gesture-required", CUT]
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(
            executable_path=CHROMIUM, args=[*usual, *arguments], timeout=PATIENCE_MS
        )
        yield found
        found.close()


class Server:
    """The command in a process of its own."""

    runs: Path
    data: Path

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder, self._options = folder, options
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        code = (
            CUT_OFF + "import sys; from audiollm.commands.cli import main; sys.argv[0] = 'audiollm'; main()"
        )
        options = ["--folder", str(self.folder), "--port", str(self.port), *self._options]
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, "studio", *options],
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
                "STUDIO_TRIED": str(self.folder.parent / "tried.txt"),
                "PYTHONUNBUFFERED": "1",
            },
            stdout=(self.folder.parent / f"{self.folder.name}.console.txt").open("w"),
        )
        latest = time.monotonic() + PATIENCE_S
        while time.monotonic() < latest:
            try:
                urllib.request.urlopen(self.url, timeout=2).close()
                return
            except OSError:
                code = self.process.poll()
                assert code is None, f"the server ended with {code} before it answered"
                time.sleep(0.1)
        self.kill()
        raise AssertionError(f"waited {PATIENCE_S} s for the server's first answer")

    def recovery_link(self) -> str:
        """The link that the console printed for projects of other browsers."""
        console = (self.folder.parent / f"{self.folder.name}.console.txt").read_text()
        return next(word for word in console.split() if "?recover=" in word)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self._wait_for_end(PATIENCE_S)

    def end(self) -> None:
        self.process.terminate()
        try:
            self._wait_for_end(20)
        except AssertionError:
            self.kill()
            raise

    def _wait_for_end(self, seconds: float) -> None:
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"waited {seconds:g} s for the end of the server's process") from None


class Person:
    """A browser of its own, in which every request is watched."""

    def __init__(self, chromium: Any, url: str, width: int = 1440) -> None:
        self.context = chromium.new_context(
            viewport={"width": width, "height": 900}, accept_downloads=True, reduced_motion="reduce"
        )
        self.page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE_MS)
        # Playwright begins to catch the choosers of files with the first listener, and does not wait until Chromium
        # does: a key right after it opens Chromium's own, which nobody sees
        self.page.on("filechooser", lambda _: None)
        processes = chromium.new_browser_cdp_session().send("SystemInfo.getProcessInfo")["processInfo"]
        self._chromium = next(each["id"] for each in processes if each["type"] == "browser")
        self.foreign: list[str] = []
        self.problems: list[str] = []
        self.page.on("request", lambda request: self._watch(request.url, url))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        with self.waiting("the page"):
            self.page.goto(url)
            self.page.wait_for_selector("#studio[data-ready=yes]")

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Tell in a failure what was waited for, and what the page shows.

        Some calls of Playwright know no timeout: Chromium is ended when one lasts twice as long as the others may.
        """
        begun = time.monotonic()
        late = threading.Timer(2 * PATIENCE_S, os.kill, (self._chromium, signal.SIGKILL))
        late.start()
        try:
            yield
        except playwright.Error as error:
            late.cancel()
            waited = f"waited {time.monotonic() - begun:.0f} s for {what}"
            raise AssertionError(f"{waited} ({error.message.splitlines()[0]}); {self._shown()}") from error
        finally:
            late.cancel()

    def _shown(self) -> str:
        """Return the text of the page and its notices, for a failure's message."""
        try:
            texts = {
                name: self.page.locator(f"#st-{name}").text_content(timeout=1000)
                for name in ("problem", "status", "jobs")
            }
            return f"the page shows {texts}, its scripts failed with {self.problems}"
        except playwright.Error as error:
            return f"the page does not answer ({error.message.splitlines()[0]})"

    def _watch(self, asked: str, url: str) -> None:
        if not asked.startswith((url, "data:", f"blob:{url}")):
            self.foreign.append(asked)

    def open(self, path: Path, versions: int = 1) -> None:
        before = self.finished()
        with self.waiting(f"{path.name} to be opened"):
            self.page.set_input_files("#st-open", str(path))
            self.page.wait_for_selector("#st-work:not([hidden])")
        if versions:
            with self.waiting(f"{versions} versions of {path.name}"):
                self.page.wait_for_selector(f".st-version >> nth={versions - 1}")
            self.wait_finished(before + 1)

    def choose_by_key(self, path: Path, back: bool = False) -> None:
        """Open a file by keyboard alone."""
        self.tab_to("#st-open", back)
        with self.waiting("the chooser of files after Enter"):
            with self.page.expect_file_chooser() as chooser:
                self.page.keyboard.press("Enter")
            chooser.value.set_files(str(path))

    def tab_to(self, selector: str, back: bool = False) -> None:
        """Press Tab, or Shift and Tab, until what the selector names has the focus."""
        for _ in range(MOST_TABS):
            if self.page.evaluate(f"document.activeElement.matches({json.dumps(selector)})"):
                return
            self.page.keyboard.press("Shift+Tab" if back else "Tab")
        raise AssertionError(f"Tab does not reach {selector}")

    def press(self, selector: str, back: bool = False) -> None:
        """Reach a button by keyboard, and press it."""
        self.tab_to(selector, back)
        self.page.keyboard.press("Enter")

    def detail(self) -> Any:
        """The facts of the open project, as the server has them."""
        address = f"/studio/api/projects/{self.page.input_value('#st-projects')}"
        with self.waiting("the facts of the project"):
            return self.page.evaluate(f"fetch('{address}').then((answer) => answer.json())")

    def followed(self, act: Callable[[], Any]) -> list[dict[str, float]]:
        """The region of the object after something was done to it."""
        with self.waiting("the object to be followed"):
            with self.page.expect_response("**/region") as answer:
                act()
            region: list[dict[str, float]] = answer.value.json()["region"]
            self.page.wait_for_function("document.getElementById('st-status').textContent === ''")
        return region

    def drag(self, selector: str, begin: tuple[float, float], end: tuple[float, float]) -> None:
        """Drag with the mouse between two places, each a share of the width and height of an element."""
        self.page.locator(selector).scroll_into_view_if_needed()
        box = self.page.locator(selector).bounding_box()
        places = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in (begin, end)]
        self.page.mouse.move(*places[0])
        self.page.mouse.down()
        self.page.mouse.move(*places[1], steps=5)
        self.page.mouse.up()

    def finished(self) -> int:
        return int(self.page.evaluate("document.getElementById('studio').dataset.finished || 0"))

    def wait_finished(self, count: int) -> None:
        with self.waiting(f"the end of request {count} of this window"):
            self.page.wait_for_function(
                f"Number(document.getElementById('studio').dataset.finished || 0) >= {count}"
            )

    def click_and_wait(self, selector: str) -> None:
        before = self.finished()
        self.page.click(selector)
        self.wait_finished(before + 1)
        assert self.problem() == "", self.problem()

    def problem(self) -> str:
        found = self.page.locator("#st-problem")
        return str(found.inner_text()) if found.is_visible() else ""

    def versions(self) -> list[str]:
        return [str(text) for text in self.page.locator(".st-version").all_inner_texts()]

    def say(self, words: str) -> None:
        self.page.fill("#st-words", words)
        before = self.page.inner_text("#st-plan-said")
        self.page.click("#st-plan")
        with self.waiting(f"{words!r} to be read"):
            self.page.wait_for_function(
                "before => document.getElementById('st-plan-said').textContent !== before", arg=before
            )

    def download(self, selector: str, path: Path) -> Path:
        return self.downloaded(lambda: self.page.click(selector), path)[1]

    def downloaded(self, act: Callable[[], Any], path: Path) -> tuple[str, Path]:
        """Keep the file that is saved when something is done; its name in the browser, and its place."""
        with self.waiting(f"a file to be saved as {path.name}"):
            with self.page.expect_download() as waiting:
                act()
            waiting.value.save_as(path)
        return str(waiting.value.suggested_filename), path

    def screen(self, name: str) -> None:
        if SCREENS:
            Path(SCREENS).mkdir(parents=True, exist_ok=True)
            with self.waiting(f"the screen {name}"):
                self.page.screenshot(path=f"{SCREENS}/{name}.png", full_page=True)

    def check_access(self) -> None:
        """axe-core finds nothing serious in what is shown; see `needs_axe`."""
        self.page.add_script_tag(path=AXE)
        nodes = "v.nodes.map(n => n.html.slice(0, 160))"
        with self.waiting("axe-core"):
            found = self.page.evaluate(
                f"axe.run().then(r => r.violations.map(v => [v.impact, v.id, {nodes}]))"
            )
        serious = [each for each in found if each[0] in ("serious", "critical")]
        assert serious == [], json.dumps(serious, indent=1)

    def check(self) -> None:
        """Nothing was asked of another machine, and no script failed."""
        assert self.foreign == [] and self.problems == []


def write_run(runs: Path) -> Path:
    """A run with a report, whose script tries to reach the page, and curves."""
    folder = runs / "tiny"
    (folder / "train_flow").mkdir(parents=True)
    script = "try { parent.document.title = 'taken' } catch (e) { document.body.dataset.kept = 'yes' }"
    (folder / "report.html").write_text(f"<h1>Report of tiny</h1><script>{script}</script>")
    rows = [
        json.dumps({"step": step, "loss": 3.0 - step / 100, "learning_rate": 1e-3}) for step in range(1, 60)
    ]
    (folder / "train_flow" / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    return runs


def write_data(folder: Path) -> Path:
    """The output of `audiocot` on a film and two recordings, one of which was dropped."""
    folder.mkdir(parents=True)
    film = write_film(folder / "film.mp4")
    save(folder / "bell.wav", tone(440.0, 1.0), 8000)
    save(folder / "hiss.wav", tone(900.0, 1.0, 0.001), 8000)
    bell = {
        "id": "bell-0",
        "path": str(folder / "bell.wav"),
        "start_s": 0.0,
        "end_s": 1.0,
        "thought": "First, a bell.",
    }
    hiss = {"id": "hiss-0", "path": str(folder / "hiss.wav"), "start_s": 0.0, "end_s": 1.0}
    dropped = {"kind": "silent", "reason": "-60 dBFS, the limit is -50 dBFS"}
    shown = {
        "id": "film-0",
        "path": str(film),
        "video": str(film),
        "start_s": 0.0,
        "end_s": 3.0,
        "thought": "It slides.",
    }
    rows = (
        ("clips.jsonl", bell, shown),
        ("filtered.jsonl", {**hiss, "dropped": dropped}),
        ("review.jsonl", {**bell, "verdict": None, "note": ""}),
    )
    for name, *each in rows:
        write_jsonl(folder / name, each)
    return folder
