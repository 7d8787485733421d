"""The pictures of docs/studio.md, as a real Chromium shows the page.

    python -m tests.pipelines.studio.pictures runs/thinksound-tiny --data runs/audiocot_writer-tiny/audiocot

The film is a scene of the model's own run, and its sounds are named after the scene.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image

from audiollm.audio import load
from audiollm.data.records.manifest import read_samples
from audiollm.data.records.sample import Sample
from audiollm.video.writing import replace_sound
from tests.pipelines.studio.real_browser import Person, Server, launched

WIDE, NARROW = 1440, 390
SHOWN_WIDTH = 960
EVENTS = 3
STEPS = 24


def write_scene(run: Path, path: Path) -> list[str]:
    """Write the first scene of a run with enough events as a film with sound; returns the names of its events."""
    folder = run / "compose_scenes"
    for sample in read_samples(folder / "scenes.jsonl")[0]:
        if len(sample.metadata["events"]) >= EVENTS:
            picture, sound = _part(sample, "video"), _part(sample, "audio")
            replace_sound(folder / picture, load(folder / sound), path)
            return [str(event["name"]) for event in sample.metadata["events"]]
    raise SystemExit(f"{folder}: no scene has {EVENTS} events")


def main() -> None:
    """Take all pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="a run of recipes/thinksound")
    parser.add_argument("--data", type=Path, required=True, help="an output of audiocot with clips to review")
    parser.add_argument("--out", type=Path, default=Path("docs/studio"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        film = Path(folder) / "film.mp4"
        names = write_scene(options.run, film)
        server = Server(Path(folder) / "work", "--model", str(options.run), "--data", str(options.data))
        try:
            with launched() as chromium:
                person = Person(chromium, server.url, WIDE)
                take_sound(person, film, names, options.out)
                take_data(person, options.out)
                take_narrow(person, options.out)
        finally:
            server.end()


def take_sound(person: Person, film: Path, names: list[str], out: Path) -> None:
    """Open, correct, generate, click, say, edit, export."""
    page = person.page
    person.open(film)
    page.wait_for_function("document.getElementById('st-video').readyState >= 2")
    name_events(page, names)
    picture(page, out / "opened.jpg")
    page.evaluate("document.querySelector('#studio details').open = true")
    page.fill("#st-steps", str(STEPS))
    before = person.finished()
    page.click("#st-generate")
    page.wait_for_function("/step \\d+ of/.test(document.getElementById('st-jobs').textContent)")
    picture(page, out / "generating.png", ".st-columns")
    person.wait_finished(before + 1)
    page.click(".st-version >> nth=0")
    page.locator("#st-overlay").scroll_into_view_if_needed()
    box = page.locator("#st-overlay").bounding_box()
    person.followed(lambda: page.mouse.click(box["x"] + box["width"] / 2, box["y"] + 0.3 * box["height"]))
    page.fill("#st-from", "1")
    page.fill("#st-to", "1.5")
    page.keyboard.press("Tab")
    page.evaluate("scrollTo(0, 0)")
    picture(page, out / "object.jpg", height=830)
    person.click_and_wait("#st-object-add")
    page.click("#st-select-none")
    page.click(".st-version >> nth=0")
    person.say(f"replace the {names[0]} with a gong and add a bell at 2 s")
    picture(page, out / "words.jpg", "#st-wave", ".st-columns")
    person.click_and_wait("#st-apply")
    person.say(f"remove the {names[1]}")
    person.click_and_wait("#st-apply")
    page.select_option("#studio select[aria-label='Compare with another version']", index=1)
    picture(page, out / "edited.jpg")
    page.click("#st-compare-end")
    page.route("**/export?*", lambda route: None)  # while it is written
    page.click("text=Export MKV")
    page.wait_for_function("document.getElementById('st-status').textContent.startsWith('Writing')")
    picture(page, out / "exporting.png")
    page.unroute_all()


def take_data(person: Person, out: Path) -> None:
    """A clip to review."""
    page = person.page
    page.reload()
    page.wait_for_selector("#studio[data-ready=yes]")
    page.click("role=tab[name=Data]")
    page.get_by_label("to review").click()
    page.get_by_role("button", name="Accept").wait_for()
    page.wait_for_timeout(2000)  # pictures and players
    picture(page, out / "data.png", height=1100)


def take_narrow(person: Person, out: Path) -> None:
    """The editor on a narrow screen."""
    page = person.page
    page.click("role=tab[name=Sound]")
    page.set_viewport_size({"width": NARROW, "height": 900})
    page.wait_for_timeout(1000)
    picture(page, out / "narrow.jpg", height=1400, width=NARROW)


def name_events(page: Any, names: list[str]) -> None:
    """Give the measured events the names of the scene's, in their order, and remove the others."""
    rows = page.locator("#st-events tr")
    while rows.count() > len(names):
        page.click("#st-events tr:last-child button")
    for number, name in enumerate(names[: rows.count()]):
        rows.nth(number).locator("input").nth(0).fill(name)
        page.keyboard.press("Tab")
        page.wait_for_timeout(300)
    page.wait_for_function(
        "name => document.getElementById('st-prose').textContent.includes(name)", arg=names[0]
    )
    page.evaluate("document.activeElement.blur(); document.getElementById('st-status').textContent = ''")


def picture(page: Any, path: Path, *selectors: str, height: int = 0, width: int = SHOWN_WIDTH) -> None:
    """Take the page, or the part from the first to the last selector, or its first pixels, and scale it."""
    page.wait_for_timeout(400)
    boxes = [page.locator(selector).bounding_box() for selector in selectors]
    screenshot = path.with_suffix(".full.png")
    offset = page.evaluate("scrollY")
    page.screenshot(path=str(screenshot), full_page=True)
    with Image.open(screenshot) as screen:
        top = min((box["y"] + offset for box in boxes), default=0)
        bottom = max((box["y"] + box["height"] + offset for box in boxes), default=height or screen.height)
        part = screen.convert("RGB").crop((0, int(top), screen.width, min(int(bottom) + 8, screen.height)))
        part.resize((width, round(part.height * width / part.width)), Image.Resampling.LANCZOS).save(
            path, quality=88
        )
    screenshot.unlink()


def _part(sample: Sample, kind: str) -> str:
    return next(
        str(part.path) for message in sample.messages for part in message.content if part.type == kind
    )


if __name__ == "__main__":
    main()
