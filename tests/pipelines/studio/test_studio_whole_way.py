"""The studio in a real Chromium on a real recording, with the mouse, and by keyboard alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from tests.pipelines.studio.real_browser import SHARED, Person, Server
from tests.pipelines.studio.tiny_studio import write_film, write_recording

pytestmark = pytest.mark.slow
FOLLOWED = "document.getElementById('st-object-state').textContent.startsWith('Followed')"
ORANGE = """([from, to]) => {
  const canvas = document.getElementById('st-wave');
  const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
  let inside = 0, outside = 0;
  for (let n = 0; n < pixels.length; n += 4) {
    const [r, g, b] = pixels.slice(n, n + 3);
    if (r < g + 25 || r < b + 50 || g < 60) continue;  // the cursor is red
    const x = (n / 4) % canvas.width / canvas.width;
    if (x > from - 0.01 && x < to + 0.01) inside++; else outside++;
  }
  return [inside, outside];
}"""
"""Orange pixels of the waveform, below the grey of before or not, within a share of its width and outside of it."""


@pytest.fixture
def person(server: Server, chromium: Any) -> Iterator[Person]:
    found = Person(chromium, server.url)
    yield found
    found.check()
    found.context.close()


@pytest.mark.skipif(not (SHARED / "esc10").is_dir(), reason="no ../shared/data with ESC-10 on this machine")
def test_from_a_real_recording_to_its_edited_versions(person: Person, tmp_path: Path) -> None:
    page = person.page
    recording = sorted((SHARED / "esc10").glob("*Dog bark*/*.ogg"))[0]
    person.open(recording)
    # change the chain of thought
    if not page.locator("#st-events tr").count():
        page.click("#st-event-add")
    page.fill("#st-events tr:first-child input[type=text]", "dog bark")
    page.fill("#st-background", "rain")
    page.keyboard.press("Tab")
    page.wait_for_function("document.getElementById('st-prose').textContent.includes('rain')")
    page.evaluate("document.querySelector('#studio details').open = true")
    page.fill("#st-steps", "2")
    person.click_and_wait("#st-generate")
    assert "made: " in person.versions()[1] and "dog bark" in person.versions()[1]
    # edits of the recording itself
    page.click(".st-version >> nth=0")
    original = person.download("text=Export WAV", tmp_path / "original.wav")
    for words, kind in (
        ("let it rain on for one second", "extend"),
        ("fill 1-1.4 s with rain", "inpaint"),
        ("add a bell at 2 s", "add"),
        ("remove the dog bark between 0.5 and 0.9 s", "remove"),
    ):
        person.say(words)
        assert page.input_value("#st-kind") == kind
        person.click_and_wait("#st-apply")
    texts = person.versions()
    assert len(texts) == 6 and sum("unchanged elsewhere ✓" in text for text in texts) == 4
    # compare
    page.select_option("#studio select[aria-label='Compare with another version']", index=1)
    page.click("#st-switch")
    assert "You hear version 1" in page.inner_text("#st-compare-said")
    page.click("#st-compare-end")
    # export: outside of the four spans the recording is as it was
    before, rate = soundfile.read(original)
    after, _ = soundfile.read(person.download("text=Export WAV", tmp_path / "edited.wav"))
    assert rate == 44_100 and len(before) == soundfile.info(recording).frames
    assert len(after) == len(before) + rate
    seconds = np.arange(len(before)) / rate
    edited = np.zeros(len(before), bool)
    for begin_s, end_s in ((0.5, 0.9), (1.0, 1.4), (2.0, 3.0)):
        edited |= (seconds >= begin_s - 1e-4) & (seconds < end_s + 1e-4)
    assert np.array_equal(after[: len(before)][~edited], before[~edited])
    assert not np.array_equal(after[: len(before)][edited], before[edited])
    # reopen
    file = person.download("#st-save", tmp_path / "project.zip")
    page.reload()
    page.wait_for_selector("#studio[data-ready=yes]")
    person.open(file, 0)
    page.wait_for_function("document.querySelectorAll('.st-version').length === 6")
    page.wait_for_function("document.getElementById('st-prose').textContent.includes('dog bark')")
    assert [text.split(" · ")[1] for text in person.versions()] == [text.split(" · ")[1] for text in texts]


def test_an_object_is_refined_by_a_box_at_another_time(person: Person, tmp_path: Path) -> None:
    page = person.page
    person.open(write_film(tmp_path / "film.mp4"))
    page.wait_for_function("document.getElementById('st-overlay').clientWidth > 50")
    page.focus("#st-wave")
    page.keyboard.press("Shift+ArrowRight")
    box = page.locator("#st-overlay").bounding_box()
    place = {"x": box["width"] * 42 / 128, "y": box["height"] * 48 / 96}
    clicked = person.followed(lambda: page.locator("#st-overlay").click(position=place))
    at_one, at_two = (_box_at(clicked, at_s) for at_s in (1.0, 2.0))
    assert abs(_middle(at_one) - 42) < 4 and abs(_middle(at_two) - 66) < 4
    # another box at two seconds
    page.focus("#st-wave")
    page.keyboard.press("Shift+ArrowRight")
    dragged = person.followed(lambda: person.drag("#st-overlay", (70 / 128, 20 / 96), (110 / 128, 80 / 96)))
    refined = _box_at(dragged, 2.0)
    assert (
        abs(_middle(refined) - 90) < 3 and abs(refined["width"] - 44) < 4 and abs(refined["height"] - 66) < 4
    )
    assert _box_at(dragged, 1.0) == at_one  # the first click still holds
    assert "by 2 clicks" in page.inner_text("#st-object-state")
    assert abs(float(page.input_value("#st-box-w")) - 44) < 4


def test_a_span_is_dragged_and_its_change_is_drawn(person: Person, tmp_path: Path) -> None:
    page = person.page
    person.open(write_recording(tmp_path / "street.wav", 4.0))
    page.evaluate("document.querySelector('#studio details').open = true")
    page.fill("#st-steps", "1")
    person.drag("#st-wave", (0.25, 0.5), (0.5, 0.5))
    span = [float(page.input_value(f"#st-{name}")) for name in ("from", "to")]
    assert abs(span[0] - 1.0) < 0.05 and abs(span[1] - 2.0) < 0.05
    assert page.evaluate(ORANGE, [0.25, 0.5]) == [0, 0]
    page.select_option("#st-kind", "remove")
    page.fill("#st-sound", "rain")
    person.click_and_wait("#st-apply")
    page.wait_for_function(f"({ORANGE})([0.25, 0.5])[0] > 0")
    inside, outside = page.evaluate(ORANGE, [0.25, 0.5])
    assert inside > 100 and outside == 0
    page.click(".st-version >> nth=0")  # in the version before it nothing is orange
    page.wait_for_function(f"({ORANGE})([0.25, 0.5])[0] === 0")


def test_two_versions_are_compared_at_equal_loudness(person: Person, tmp_path: Path) -> None:
    page = person.page
    person.open(write_recording(tmp_path / "street.wav", 3.0))
    page.evaluate("document.querySelector('#studio details').open = true")
    page.fill("#st-steps", "1")
    page.fill("#st-caption", "a bell")
    person.click_and_wait("#st-generate")
    first, second = (version["loudness"] for version in person.detail()["versions"])
    assert abs(first - second) > 1
    page.click("button:has-text('Compare with 1')")
    volumes = page.evaluate("['a', 'b'].map((each) => document.getElementById(`st-audio-${each}`).volume)")
    heard = [second + 20 * np.log10(volumes[0]), first + 20 * np.log10(volumes[1])]
    assert max(volumes) == 1 and abs(heard[0] - heard[1]) < 0.01
    assert f"turned down by {abs(first - second):.1f} dB" in page.inner_text("#st-compare-said")
    page.click("#st-compare-end")
    assert page.evaluate("document.getElementById('st-audio-a').volume") == 1


def test_the_whole_way_by_keyboard_alone(person: Person, tmp_path: Path) -> None:
    page = person.page
    before = person.finished()
    person.choose_by_key(write_film(tmp_path / "film.mp4"))
    person.wait_finished(before + 1)
    # the chain of thought: a sound is added, named, removed; it is written anew
    count = page.locator("#st-events tr").count()
    person.press("#st-event-add")
    page.wait_for_function(f"document.querySelectorAll('#st-events tr').length === {count + 1}")
    page.keyboard.press("Control+A")
    page.keyboard.type("bell")
    page.keyboard.press("Tab")
    page.wait_for_function("document.getElementById('st-prose').textContent.includes('bell')")
    person.tab_to("#st-event-add")
    for _ in range(page.locator("#st-events tr").count()):
        person.press("#st-events tr:last-child button", back=True)
        assert page.evaluate("document.activeElement.id") == "st-event-add"
    assert page.locator("#st-events tr").count() == 0
    page.wait_for_function("!document.getElementById('st-prose').textContent.includes('bell')")
    before = person.finished()
    person.press("#st-think")
    person.wait_finished(before + 1)
    # the cross in the picture: 18 steps of a fiftieth of the width to the left of the middle
    person.tab_to("#st-overlay", back=True)
    for _ in range(18):
        page.keyboard.press("ArrowLeft")
    region = person.followed(lambda: page.keyboard.press("Enter"))
    assert page.evaluate(FOLLOWED) and abs(_middle(_box_at(region, 0.0)) - 18) < 4
    # an edit, its comparison, its export
    person.tab_to("#st-words")
    page.keyboard.type("add a bell at 1 s")
    page.keyboard.press("Enter")
    page.wait_for_function("document.activeElement.id === 'st-apply'")
    before = person.finished()
    page.keyboard.press("Enter")
    person.wait_finished(before + 1)
    assert len(person.versions()) == 2
    person.tab_to("#st-tree .st-actions button")
    for _ in range(page.locator("#st-tree .st-actions button").count()):
        if page.evaluate("document.activeElement.textContent") == "Compare with 1":
            break
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_selector("#st-compare:not([hidden])")
    said = page.inner_text("#st-compare-said")
    person.press("#st-switch")
    assert page.inner_text("#st-compare-said") != said
    person.press("#st-compare-end")
    assert page.locator("#st-compare").is_hidden()
    name, _ = person.downloaded(lambda: person.press("#st-tree a[download]", back=True), tmp_path / "2.wav")
    assert name == "film-2.wav"
    _, file = person.downloaded(lambda: person.press("#st-save", back=True), tmp_path / "project.zip")
    person.choose_by_key(file, back=True)
    page.wait_for_function("document.getElementById('st-projects').options.length === 3")
    page.wait_for_function("document.querySelectorAll('.st-version').length === 2")


def _box_at(region: list[dict[str, float]], at_s: float) -> dict[str, float]:
    return min(region, key=lambda box: abs(box["at_s"] - at_s))


def _middle(box: dict[str, float]) -> float:
    return box["x"] + box["width"] / 2
