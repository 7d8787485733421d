"""The studio in a real Chromium: the way of a person with a film, on a narrow screen, two at once, after a kill.

`make -C benchmarks studio-check` runs it; screens go to STUDIO_SCREENS. It needs gradio, playwright, chromium.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import soundfile

from tests.pipelines.studio.real_browser import Person, Server
from tests.pipelines.studio.tiny_studio import write_film, write_recording

pytestmark = pytest.mark.slow
PLANNED = """() => {
  const wave = document.getElementById('st-wave');
  const { data } = wave.getContext('2d').getImageData(0, 0, wave.width, wave.height);
  let count = 0;
  for (let n = 0; n < data.length; n += 4) {
    if (Math.abs(data[n] - 109) + Math.abs(data[n + 1] - 40) + Math.abs(data[n + 2] - 217) < 40) count++;
  }
  return count;
}"""
"""Pixels of the time line in the colour of an edit that was read and not yet applied."""


def _film(folder: Path) -> Path:
    """A scene of `compose_scenes`: three objects that sound when they strike."""
    from pipelines.scenes.stage import STAGE
    from tests.audiollm.flow.toy import context_of

    STAGE.run(STAGE.config(scenes=1, held_out_scenes=1), context_of(folder))
    return folder / "train-000000" / "video.mp4"


def test_from_a_film_to_an_edited_film(server: Server, chromium: Any, tmp_path: Path) -> None:
    person = Person(chromium, server.url)
    page = person.page
    person.screen("1-empty")
    person.open(_film(tmp_path / "scene"))
    page.wait_for_timeout(500)
    person.screen("2-opened")
    # read and change the chain of thought
    rows = page.locator("#st-events tr").count()
    assert rows >= 2
    page.fill("#st-events tr:first-child input[type=text]", "bell")
    page.fill("#st-background", "rain")
    page.keyboard.press("Tab")
    page.wait_for_function("document.getElementById('st-prose').textContent.includes('rain')")
    assert "bell" in page.inner_text("#st-prose")
    # generate
    page.click("summary")
    page.fill("#st-steps", "3")
    person.click_and_wait("#st-generate")
    assert len(person.versions()) == 2 and "made" in person.versions()[1]
    person.screen("3-generated")
    # click, refine
    page.locator("#st-overlay").click(position=_object_place(page))
    followed = "document.getElementById('st-object-state').textContent.startsWith('Followed')"
    page.wait_for_function(followed)
    person.screen("4-object")
    page.click("#st-box-set")
    page.wait_for_function("document.getElementById('st-status').textContent === ''")
    page.fill("#st-from", "1")
    page.fill("#st-to", "1.5")
    page.keyboard.press("Tab")
    person.click_and_wait("#st-object-add")
    # by words
    selected = page.input_value("#st-from")
    for words, kind in (
        ("add a bell at 2 s", "add"),
        ("remove the bell between 0.5 and 1 s", "remove"),
        ("fill 1-1.4 s with rain", "inpaint"),
        ("let it rain on for one second", "extend"),
    ):
        person.say(words)
        assert page.input_value("#st-kind") == kind
        if words.startswith("add"):
            person.screen("5-words")
        assert page.evaluate(PLANNED) > 20, "what is understood is drawn before it is applied"
        person.click_and_wait("#st-apply")
        assert page.evaluate(PLANNED) == 0
        assert page.input_value("#st-from") == selected, "a reading leaves the selection as it is"
    texts = person.versions()
    assert len(texts) == 7 and sum("unchanged elsewhere ✓" in text for text in texts) == 5
    assert "Unchanged elsewhere" in page.inner_text("#st-changes")
    person.screen("6-edited")
    # compare, alternately
    page.select_option("#studio select[aria-label='Compare with another version']", index=1)
    page.click("#st-play")
    page.wait_for_timeout(300)
    heard = page.inner_text("#st-compare-said")
    page.click("#st-switch")
    assert page.inner_text("#st-compare-said") != heard
    playing = page.evaluate("[...document.querySelectorAll('#studio audio')].map(a => !a.paused)")
    assert playing == [False, True]
    person.screen("7-compared")
    page.click("#st-play")
    # export, reopen
    wav = person.download("text=Export WAV", tmp_path / "out.wav")
    assert soundfile.info(wav).duration > 3.5
    assert person.download("text=Export MP4", tmp_path / "out.mp4").stat().st_size > 1000
    file = person.download("#st-save", tmp_path / "project.zip")
    person.open(file, 0)
    page.wait_for_function("document.querySelectorAll('.st-version').length === 7")
    person.check()
    person.context.close()


def _object_place(page: Any) -> dict[str, float]:
    """The place of the first object of the scene: the middle of the left third, above."""
    box = page.locator("#st-overlay").bounding_box()
    return {"x": box["width"] * 0.17, "y": box["height"] * 0.25}


def test_a_recording_on_a_narrow_screen_by_keyboard_alone(
    server: Server, chromium: Any, tmp_path: Path
) -> None:
    person = Person(chromium, server.url, width=390)
    page = person.page
    person.open(write_recording(tmp_path / "street.wav", 3.0))
    page.wait_for_timeout(300)
    person.screen("8-narrow")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    page.focus("#st-wave")
    for key in ("Home", "Shift+ArrowRight", "[", "Shift+ArrowRight", "]"):
        page.keyboard.press(key)
    assert (page.input_value("#st-from"), page.input_value("#st-to")) == ("1.00", "2.00")
    page.focus("#st-words")
    page.keyboard.type("add rain")
    page.keyboard.press("Enter")
    page.wait_for_function("document.activeElement.id === 'st-apply'")
    before = person.finished()
    page.keyboard.press("Enter")
    person.wait_finished(before + 1)
    assert len(person.versions()) == 2 and "1.0 to 2.0 s" in person.versions()[1]
    reached = set()
    page.focus("#st-open")
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.textContent"))
    wanted = {
        "st-play",
        "st-wave",
        "st-from",
        "st-think",
        "st-generate",
        "st-words",
        "st-apply",
        "Export WAV",
        "Delete",
    }
    assert wanted <= reached, wanted - reached
    person.screen("9-narrow-edited")
    person.check()
    person.context.close()


def test_two_people_and_one_who_closes_the_window(server: Server, chromium: Any, tmp_path: Path) -> None:
    alice, bob = Person(chromium, server.url), Person(chromium, server.url)
    for person, seconds in (
        (alice, 30.0),
        (bob, 3.0),
    ):  # hers takes longer than until her window counts as closed
        person.open(write_recording(tmp_path / "street.wav", seconds))
        person.page.click("summary")
    assert len(alice.page.locator("#st-projects option").all()) == 2  # her own, and the choice of none
    alice.page.fill("#st-steps", "500")
    alice.page.fill("#st-caption", "rain")
    alice.page.click("#st-generate")
    alice.page.wait_for_function("/step \\d+ of 500/.test(document.getElementById('st-jobs').textContent)")
    bob.page.fill("#st-steps", "2")
    bob.page.fill("#st-caption", "a bell")
    bob.page.click("#st-generate")
    bob.page.wait_for_function("document.getElementById('st-jobs').textContent.includes('1 before it')")
    bob.screen("10-queue")
    before, closed = bob.finished(), alice.page.input_value("#st-projects")
    alice.page.close(run_before_unload=True)
    bob.wait_finished(before + 1)
    assert len(bob.versions()) == 2
    made = [json.loads(path.read_text()) for path in server.folder.glob(f"projects/{closed}/versions/*.json")]
    assert len(made) == 1  # the closed window's request is held
    bob.check()
    for person in (alice, bob):
        person.context.close()


def test_after_a_kill_finished_versions_are_there(server: Server, chromium: Any, tmp_path: Path) -> None:
    person = Person(chromium, server.url)
    page = person.page
    person.open(write_recording(tmp_path / "street.wav", 3.0))
    person.say("add a bell at 1 s")
    person.click_and_wait("#st-apply")
    page.click("summary")
    page.fill("#st-steps", "500")
    person.say("add a bell at 1 s")
    page.click("#st-apply")
    page.wait_for_function("/step \\d+ of 500/.test(document.getElementById('st-jobs').textContent)")
    server.kill()
    page.click("#st-think")
    page.wait_for_selector("#st-problem:not([hidden])")
    assert "does not answer" in person.problem()
    server.start()
    page.goto(server.url)
    page.wait_for_selector("#studio[data-ready=yes]")
    page.wait_for_selector(".st-version >> nth=1")  # what was open is open again
    assert len(person.versions()) == 2
    assert page.locator("#st-projects option:checked").inner_text() == "street.wav"
    person.context.close()


def test_bad_input_is_answered_with_a_sentence(server: Server, chromium: Any, tmp_path: Path) -> None:
    person = Person(chromium, server.url)
    page = person.page
    (tmp_path / "broken.mp4").write_bytes(write_film(tmp_path / "film.mp4").read_bytes()[:900])
    (tmp_path / "page.html").write_text("<script>alert(1)</script>")
    for name, sentence in (
        ("broken.mp4", "cannot be read"),
        ("page.html", "neither a recording nor a video"),
    ):
        page.set_input_files("#st-open", str(tmp_path / name))
        page.wait_for_function(f"document.getElementById('st-problem').textContent.includes('{sentence}')")
    person.open(write_film(tmp_path / "silent.mp4", with_sound=False), 0)
    page.wait_for_selector("#st-tree >> text=There is no sound yet")
    page.fill("#st-words", "add a bell")
    page.click("#st-plan")
    page.wait_for_function("document.getElementById('st-problem').textContent.includes('generate one first')")
    page.wait_for_function("document.getElementById('st-overlay').clientWidth > 50")
    page.locator("#st-overlay").click(position={"x": 3, "y": 3})
    page.wait_for_function("document.getElementById('st-problem').textContent.includes('Nothing stands out')")
    person.screen("11-refused")
    person.check()
    person.context.close()
