"""The page in a real Chromium while requests are on their way: stops, other projects, late answers, refusals."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.pipelines.studio.real_browser import Person, Server
from tests.pipelines.studio.tiny_studio import write_film, write_recording

pytestmark = pytest.mark.slow
STEPPING = "/step \\d+ of 500/.test(document.getElementById('st-jobs').textContent)"


@pytest.fixture
def person(server: Server, chromium: Any) -> Iterator[Person]:
    """A browser that has opened the page."""
    found = Person(chromium, server.url)
    yield found
    found.context.close()


def opened(person: Person, path: Path) -> str:
    """Open a recording; returns its project's number."""
    person.open(path)
    person.page.wait_for_function("document.getElementById('st-projects').value !== ''")
    person.page.evaluate("document.querySelector('#studio details').open = true")
    return str(person.page.input_value("#st-projects"))


def detail(person: Person, project: str) -> Any:
    return person.page.evaluate(f"fetch('/studio/api/projects/{project}').then((answer) => answer.json())")


def late(page: Any, pattern: str, seconds: float) -> None:
    """Let requests to an address arrive late."""

    def hold(route: Any) -> None:
        time.sleep(seconds)
        route.continue_()

    page.route(pattern, hold)


def test_stop_is_pressed_while_steps_are_counted(person: Person, tmp_path: Path) -> None:
    page = person.page
    opened(person, write_recording(tmp_path / "street.wav", 3.0))
    page.fill("#st-caption", "rain")
    for press in (lambda: page.keyboard.press("Enter"), lambda: (page.mouse.down(), page.mouse.up())):
        page.fill("#st-steps", "500")
        before = person.finished()
        page.click("#st-generate")
        page.wait_for_function(STEPPING)
        page.focus("#st-jobs button")
        page.hover("#st-jobs button")
        said = page.inner_text("#st-jobs")
        page.wait_for_function("said => document.getElementById('st-jobs').innerText !== said", arg=said)
        assert page.evaluate("document.activeElement.textContent") == "Stop"
        press()
        person.wait_finished(before + 1)
        assert page.inner_text("#st-status").startswith("Stopped")
    assert len(person.versions()) == 1
    person.check()


def test_what_is_done_in_one_project_changes_nothing_in_another(person: Person, tmp_path: Path) -> None:
    page = person.page
    first = opened(person, write_recording(tmp_path / "first.wav"))
    for _ in "ab":
        page.fill("#st-caption", "a bell")
        page.fill("#st-steps", "1")
        person.click_and_wait("#st-generate")
    second = opened(person, write_recording(tmp_path / "second.wav"))
    before = person.finished()
    page.fill("#st-steps", "60")
    page.click("#st-generate")
    page.wait_for_selector("#st-jobs li")
    page.select_option("#st-projects", first)
    page.wait_for_selector(".st-version >> nth=2")
    page.click(".st-version >> nth=0")
    person.wait_finished(before + 1)
    page.wait_for_timeout(300)
    assert page.get_attribute(".st-version >> nth=0", "aria-pressed") == "true"
    assert page.inner_text("#st-status") == "Done in second.wav: generating."
    # an answer that comes when another project is open
    late(page, f"**/projects/{first}/thought", 0.5)
    measured = detail(person, second)["thought"]["background"]
    page.fill("#st-background", "wind")
    page.keyboard.press("Tab")
    page.select_option("#st-projects", second)
    page.wait_for_timeout(900)
    assert page.input_value("#st-background") == ", ".join(measured)
    assert "wind" not in page.inner_text("#st-prose")
    assert detail(person, first)["thought"]["background"] == ["wind"]
    assert detail(person, second)["thought"]["background"] == measured
    person.check()


def test_a_sound_is_made_from_the_chain_of_thought_as_it_is_shown(person: Person, tmp_path: Path) -> None:
    page = person.page
    project = opened(person, write_recording(tmp_path / "street.wav"))
    late(page, "**/thought", 0.5)
    page.fill("#st-steps", "1")
    page.fill("#st-background", "thunder")
    person.click_and_wait("#st-generate")
    assert person.versions()[1].startswith("2 · made:") and "thunder" in person.versions()[1]
    # two saves keep their order, and what cannot be kept makes no sound
    page.unroute("**/thought")
    held: list[Any] = []

    def hold_the_first(route: Any) -> None:
        held.append(route)
        if len(held) > 1:
            route.continue_()

    page.route("**/thought", hold_the_first)
    for words in ("rain", "snow"):
        page.fill("#st-background", words)
        page.keyboard.press("Tab")
    page.wait_for_timeout(300)
    held[0].continue_()
    page.wait_for_function("document.getElementById('st-prose').textContent.includes('snow')")
    assert detail(person, project)["thought"]["background"] == ["snow"]
    page.fill("#st-background", "x" * 300)
    page.click("#st-generate")
    page.wait_for_function("document.getElementById('st-problem').textContent.includes('characters')")
    page.wait_for_timeout(300)
    assert len(person.versions()) == 2 and page.locator("#st-jobs li").count() == 0
    person.check()


def test_what_another_tab_has_written_is_not_replaced_unseen(person: Person, tmp_path: Path) -> None:
    page = person.page
    project = opened(person, write_recording(tmp_path / "street.wav"))
    for words in ("rain", "snow"):
        page.fill("#st-background", words)
        page.keyboard.press("Tab")
        page.wait_for_function(f"document.getElementById('st-prose').textContent.includes('{words}')")
    changed = {
        "method": "PUT",
        "headers": {"Content-Type": "application/json", "x-studio": "1"},
        "body": json.dumps({"record": {"background": ["hail"]}}),
    }
    address = f"/studio/api/projects/{project}/thought"
    assert page.evaluate(
        "([address, asked]) => fetch(address, asked).then((answer) => answer.ok)", [address, changed]
    )
    page.fill("#st-background", "wind")
    page.keyboard.press("Tab")
    page.wait_for_function("document.getElementById('st-problem').textContent.includes('changed meanwhile')")
    assert detail(person, project)["thought"]["background"] == ["hail"]
    page.reload()
    page.wait_for_selector("#st-work:not([hidden])")
    page.wait_for_function("document.getElementById('st-background').value === 'hail'")
    page.fill("#st-background", "wind")
    page.keyboard.press("Tab")
    page.wait_for_function("document.getElementById('st-prose').textContent.includes('wind')")
    assert detail(person, project)["thought"]["background"] == ["wind"]


def test_a_new_sound_is_named_in_its_own_row_and_the_focus_stays(person: Person, tmp_path: Path) -> None:
    page = person.page
    project = opened(person, write_recording(tmp_path / "street.wav", 3.0))
    page.click("#st-event-add")
    for _ in range(page.locator("#st-events tr").count()):
        page.click("#st-events tr:first-child button")
    assert page.locator("#st-events tr").count() == 0
    assert page.evaluate("document.activeElement.id") == "st-event-add"
    for at_s, name in (("2", "bell"), ("0.5", "dog")):
        page.fill("#st-from", at_s)
        page.fill("#st-to", str(float(at_s) + 0.5))
        page.keyboard.press("Tab")
        page.click("#st-event-add")
        page.wait_for_timeout(100)
        page.keyboard.press("Control+A")
        page.keyboard.type(name)
        page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Beginning of sound 1"
    page.wait_for_function("document.getElementById('st-prose').textContent.includes('dog')")
    events = detail(person, project)["thought"]["events"]
    assert [(event["sound"], event["start_s"]) for event in events] == [("dog", 0.5), ("bell", 2.0)]
    # a time that moves the row
    page.keyboard.press("Tab")
    page.keyboard.press("Control+A")
    page.keyboard.type("2.9")
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Control+A")
    page.keyboard.type("2.4")
    page.keyboard.press("Tab")
    page.wait_for_timeout(100)
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "End of sound 2"
    person.check()


def test_words_that_are_being_typed_outlast_a_measurement(person: Person, tmp_path: Path) -> None:
    page = person.page
    project = opened(person, write_recording(tmp_path / "street.wav"))
    before = person.finished()
    page.click("#st-think")
    page.focus("#st-background")
    page.keyboard.press("Control+A")  # measured when it was opened
    page.keyboard.type("rain")
    person.wait_finished(before + 1)
    page.wait_for_timeout(300)
    assert page.input_value("#st-background") == "rain"
    page.keyboard.press("Tab")
    page.wait_for_function("document.getElementById('st-prose').textContent.includes('rain')")
    assert detail(person, project)["thought"]["background"] == ["rain"]
    person.check()


def test_refusals_are_read_where_the_person_looks(person: Person, tmp_path: Path) -> None:
    page = person.page
    person.open(write_film(tmp_path / "film.mp4"))
    (tmp_path / "page.html").write_text("<script>alert(1)</script>")
    page.set_input_files("#st-open", str(tmp_path / "page.html"))
    page.wait_for_selector("#st-problem:not([hidden])")
    assert page.inner_text("#st-status") == ""
    # pictures that do not go into such a file
    refusal = {"sentence": "These pictures and this sound do not go into a file .mp4: export MKV."}
    page.route("**/export?format=mp4", lambda route: route.fulfill(status=400, body=json.dumps(refusal)))
    page.click("text=Export MP4")
    page.wait_for_function("document.getElementById('st-problem').textContent.includes('export MKV')")
    assert person.download("button:has-text('Export MKV')", tmp_path / "out.mkv").stat().st_size > 1000
    page.wait_for_function("document.getElementById('st-status').textContent === ''")
    # far down on a small screen
    page.set_viewport_size({"width": 390, "height": 700})
    page.select_option("#st-kind", "extend")
    page.locator("#st-apply").scroll_into_view_if_needed()
    page.click("#st-apply")
    page.wait_for_function("document.getElementById('st-problem').textContent.includes('Give an end')")
    box = page.locator("#st-problem").bounding_box()
    assert 0 <= box["y"] < 700 - box["height"]
    person.check()


def test_keys_of_the_browser_are_left_to_it(person: Person, tmp_path: Path) -> None:
    page = person.page
    opened(person, write_recording(tmp_path / "street.wav"))
    taken = """(modifiers) => {
      const press = (key) => !document.getElementById('st-wave').dispatchEvent(
        new KeyboardEvent('keydown', { key, bubbles: true, cancelable: true, ...modifiers }));
      return ['+', '-', 'ArrowLeft', '['].map(press);
    }"""
    assert page.evaluate(taken, {"ctrlKey": True}) == [False] * 4
    assert page.evaluate(taken, {"altKey": True}) == [False] * 4
    assert page.evaluate(taken, {"ctrlKey": True, "altKey": True, "modifierAltGraph": True}) == [True] * 4
    assert page.evaluate(taken, {}) == [True] * 4
    person.check()
