"""A day with the page in a real Chromium: one clock, ten windows, a server that dies, projects that are found again.

`make -C benchmarks studio-check` runs it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from audiollm.audio import Waveform
from audiollm.video.writing import write_video
from pipelines.studio.limits import StudioLimits
from tests.audiollm.flow.toy import AUTOENCODER, tone
from tests.pipelines.studio.real_browser import PATIENCE_MS, Person, Server
from tests.pipelines.studio.tiny_studio import moving_pictures, write_film, write_model, write_recording

pytestmark = pytest.mark.slow
WINDOWS = 10
FILM_S, FILM_FPS = 64, 25
DRIFT_S = 0.02
"""Longest that the picture may be before or behind the sound."""
SETTLED_S = 1.5
"""Seconds after a start in which the picture may still be on its way."""
SAID_WITHIN_S = 3.0
STEPPING = "/step \\d+ of 500/.test(document.getElementById('st-jobs').textContent)"
WATCH = """() => {
  const [video, sound] = ['st-video', 'st-audio-a'].map((id) => document.getElementById(id));
  window.drift = [];
  const tick = () => {
    if (!sound.paused && !video.paused && !video.seeking) {
      window.drift.push([performance.now() / 1000, video.currentTime - sound.currentTime]);
    }
    requestAnimationFrame(tick);
  };
  tick();
}"""


@pytest.fixture
def person(server: Server, chromium: Any) -> Iterator[Person]:
    opened = Person(chromium, server.url)
    yield opened
    opened.check()
    opened.context.close()


@pytest.fixture
def own_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that may be killed."""
    folder = tmp_path_factory.mktemp("studio")
    model = write_model(folder / "model")
    started = Server(
        folder / "work", "--model", str(model), "--autoencoder", AUTOENCODER, "--runs", str(folder)
    )
    yield started
    started.end()


def generate(person: Person, steps: int) -> None:
    person.page.evaluate("document.querySelector('#studio details').open = true")
    person.page.fill("#st-caption", "rain")
    person.page.fill("#st-steps", str(steps))
    person.page.click("#st-generate")


def medians_of_drift(page: Any) -> np.ndarray:
    """Seconds of the picture before the sound in each quarter of a second, after the start: on a busy machine the
    clocks of a browser jump for a moment, and what is seen does not."""
    rows = np.array(page.evaluate("window.drift.splice(0)"))
    rows = rows[rows[:, 0] > rows[0, 0] + SETTLED_S]
    quarters = np.floor(rows[:, 0] * 4)
    return np.array([np.median(rows[quarters == quarter, 1]) for quarter in np.unique(quarters)])


def test_picture_and_sound_keep_one_clock_for_a_minute_and_after_seeking(
    person: Person, tmp_path: Path
) -> None:
    page, film = person.page, tmp_path / "film.mp4"
    pictures = moving_pictures()
    shown = [pictures[number % len(pictures)] for number in range(FILM_S * FILM_FPS)]
    write_video(film, shown, FILM_FPS, Waveform(tone(100.0, float(FILM_S)), 8000))
    person.open(film)
    page.wait_for_function("document.getElementById('st-video').readyState === 4")
    page.evaluate(WATCH)
    page.click("#st-play")
    page.wait_for_timeout(60_000)
    minute = medians_of_drift(page)
    place = page.locator("#st-wave").bounding_box()
    for share in (0.5, 0.1):  # while it plays
        page.mouse.click(place["x"] + share * place["width"], place["y"] + 60)
        page.wait_for_timeout(100)
        page.evaluate("window.drift.length = 0")
        page.wait_for_timeout(6000)
        after_seeking = medians_of_drift(page)
        assert len(after_seeking) > 8 and np.quantile(np.abs(after_seeking), 0.97) < DRIFT_S, after_seeking
    assert len(minute) > 200 and np.quantile(np.abs(minute), 0.97) < DRIFT_S, minute
    # the clock of the page is the sound's
    assert page.inner_text("#st-clock").endswith("of 1:04.00")
    page.click("#st-play")
    assert abs(page.evaluate("document.getElementById('st-video').playbackRate") - 1) < 1e-9


def test_ten_windows_of_one_browser_work(person: Person, tmp_path: Path) -> None:
    person.open(write_film(tmp_path / "film.mp4"))
    pages = [person.page]
    for _ in range(WINDOWS - 1):
        page = person.context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.goto(person.page.url)
        page.wait_for_selector("#studio[data-ready=yes]")
        page.select_option("#st-projects", index=1)
        page.wait_for_function("document.getElementById('st-wave').dataset.drawn === 'yes'")
        pages.append(page)
    names = [page.evaluate("sessionStorage.getItem('st-page')") for page in pages]
    assert len(set(names)) == WINDOWS
    last = pages[-1]
    last.click("role=tab[name=Data]")
    last.get_by_label("Words").fill("slides")
    last.wait_for_selector("text=1 clip; page 1 of 1.")
    for page in (pages[2], pages[6]):
        before = page.locator(".st-version").count()
        page.bring_to_front()
        page.evaluate("document.querySelector('#studio details').open = true")
        page.fill("#st-caption", "rain")
        page.fill("#st-steps", "1")
        page.click("#st-generate")
        page.wait_for_function(f"document.querySelectorAll('.st-version').length > {before}")


def test_a_kill_at_every_step_is_told_and_its_request_is_not_forgotten(
    own_server: Server, chromium: Any, tmp_path: Path
) -> None:
    person = Person(chromium, own_server.url)
    page = person.page
    person.open(write_recording(tmp_path / "street.wav", 3.0))

    def killed() -> None:
        own_server.kill()
        begun = time.monotonic()
        page.wait_for_selector("#st-offline:not([hidden])")
        assert time.monotonic() - begun < SAID_WITHIN_S
        assert "does not answer" in page.inner_text("#st-offline")

    # while steps are counted
    generate(person, 500)
    page.wait_for_function(STEPPING)
    killed()
    page.wait_for_function(
        "/no word since step \\d+ of 500/.test(document.getElementById('st-jobs').textContent)"
    )
    person.screen("18-cut-off")
    own_server.start()
    page.wait_for_selector(".st-lost")
    page.wait_for_selector("#st-offline", state="hidden")
    assert "started anew" in page.inner_text("#st-status")
    assert "Lost: generating" in page.inner_text(".st-lost")
    person.screen("19-lost")
    # it is started again, with one that waits behind it
    page.click("text=Start it again")
    page.wait_for_function(STEPPING)
    page.click("#st-think")
    page.wait_for_function("document.getElementById('st-jobs').textContent.includes('1 before it')")
    # the page is loaded again while the server is dead
    killed()
    own_server.start()
    page.reload()
    page.wait_for_selector("#studio[data-ready=yes]")
    page.wait_for_function("document.querySelectorAll('.st-lost').length === 2")
    assert page.locator("#st-projects option:checked").inner_text() == "street.wav"
    while page.locator(".st-lost").count():
        page.click(".st-lost >> nth=0 >> text=Dismiss")
    # finished, but the page has not heard of it
    page.route("**/jobs?*", lambda route: route.abort())
    generate(person, 1)
    page.wait_for_selector("#st-offline:not([hidden])")
    latest = time.monotonic() + PATIENCE_MS / 1000
    while not list(own_server.folder.glob("projects/*/versions/2.json")):
        assert time.monotonic() < latest
        time.sleep(0.1)
    own_server.kill()
    own_server.start()
    page.unroute("**/jobs?*")
    page.wait_for_selector(".st-version >> nth=1")
    assert "made: rain" in person.versions()[1] and not page.locator(".st-lost").count()
    person.context.close()


EDITS = ("add bell from 0.50 to 1.00 s", "add rain from 1.20 to 1.70 s", "add bell from 2.00 to 2.50 s")


def test_a_kill_between_edits_of_a_sentence_tells_which_were_applied(
    own_server: Server, chromium: Any, tmp_path: Path
) -> None:
    person = Person(chromium, own_server.url)
    page = person.page

    def wait_for_version(number: int) -> None:
        latest = time.monotonic() + PATIENCE_MS / 1000
        while not list(own_server.folder.glob(f"projects/*/versions/{number}.json")):
            assert time.monotonic() < latest
            time.sleep(0.01)

    def restarted() -> str:
        own_server.kill()
        page.wait_for_selector("#st-offline:not([hidden])")
        own_server.start()
        page.wait_for_selector("#st-offline", state="hidden")
        page.wait_for_selector(".st-lost")
        return str(page.inner_text(".st-lost"))

    person.open(write_recording(tmp_path / "street.wav", 3.0))
    page.evaluate("document.querySelector('#studio details').open = true")
    page.fill("#st-steps", "500")
    person.say("add bell from 0.5 to 1 s, add rain from 1.2 to 1.7 s and add bell from 2 to 2.5 s")
    # before the first
    page.click("#st-apply")
    page.wait_for_function(STEPPING)
    assert "nothing was changed" in restarted()
    # between the first and the second
    page.click("text=Start it again")
    wait_for_version(2)
    sentence = restarted()
    assert "after 1 of 3 edits. Applied: version 2, add bell, 0.5 to 1.0 s. " in sentence
    assert f"Not applied: {EDITS[1]}; {EDITS[2]}." in sentence
    page.reload()  # it is told until it is dismissed
    page.wait_for_selector("#studio[data-ready=yes]")
    page.wait_for_selector(".st-version >> nth=1")
    page.wait_for_selector(".st-lost >> text=Apply the rest")
    person.screen("22-edits-cut-off")
    # between the second and the third
    page.click("text=Apply the rest")
    wait_for_version(3)
    sentence = restarted()
    assert "after 1 of 2 edits. Applied: version 3, add rain, 1.2 to 1.7 s. " in sentence
    assert f"Not applied: {EDITS[2]}." in sentence
    # after the last, of which the page has not heard
    page.route("**/jobs?*", lambda route: route.abort())
    page.click("text=Apply the rest")
    wait_for_version(4)
    own_server.kill()
    own_server.start()
    page.unroute("**/jobs?*")
    page.wait_for_selector(".st-version >> nth=3")
    assert not page.locator(".st-lost").count()
    assert [version["parent"] for version in person.detail()["versions"]] == [None, 1, 2, 3]
    # stopped between two
    before = person.finished()
    page.evaluate("document.querySelector('#studio details').open = true")
    page.fill("#st-steps", "500")
    person.say("mute 0 to 0.2 s and add rain from 1 to 2 s")
    page.click("#st-apply")
    page.wait_for_function(STEPPING)
    page.click("#st-jobs button:text('Stop')")
    person.wait_finished(before + 1)
    assert "It was stopped after 1 of 2 edits. Applied: version 5, mute" in page.inner_text(".st-lost")
    assert len(person.versions()) == 5
    person.context.close()


def test_requests_of_a_window_that_is_away_for_long_go_on_when_it_is_back(
    person: Person, server: Server, tmp_path: Path
) -> None:
    page = person.page
    person.open(write_recording(tmp_path / "street.wav", 3.0))
    for _ in range(3):
        generate(person, 500)
    page.wait_for_function(STEPPING)
    page.goto("about:blank")
    page.wait_for_timeout(1000 * (1.5 * StudioLimits().reload_s + 1))  # as a page does on a slow machine
    page.goto(server.url)
    page.wait_for_selector("#studio[data-ready=yes]")
    page.wait_for_function("document.querySelectorAll('#st-jobs li').length >= 2")
    page.wait_for_function(STEPPING)
    assert not page.locator(".st-lost").count() and not page.inner_text("#st-status")
    while page.locator("#st-jobs button").count():
        page.click("#st-jobs button >> nth=-1")
        page.wait_for_timeout(300)


def test_requests_outlast_a_reload_and_end_with_their_window(
    person: Person, server: Server, tmp_path: Path
) -> None:
    page = person.page
    person.open(write_recording(tmp_path / "street.wav", 3.0))
    for _ in range(StudioLimits().waiting):  # a quiet machine ends 500 steps before the page is there again
        generate(person, 500)
    page.wait_for_function(STEPPING)
    for _ in "ab":
        page.reload()
        page.wait_for_selector("#studio[data-ready=yes]")
        page.wait_for_function(STEPPING)
    page.wait_for_timeout(7000)  # longer than a closed window's requests last
    assert page.evaluate(STEPPING)
    # a copy of the window has the same storage, and another name
    copy = person.context.new_page()
    name = page.evaluate("sessionStorage.getItem('st-page')")
    copy.add_init_script(f"sessionStorage.setItem('st-page', '{name}')")
    copy.goto(server.url)
    copy.wait_for_selector("#studio[data-ready=yes]", timeout=PATIENCE_MS)
    assert copy.evaluate("sessionStorage.getItem('st-page')") != name
    copy.close(run_before_unload=True)
    page.click("#st-jobs button")
    page.wait_for_function("document.getElementById('st-status').textContent.startsWith('Stopped')")
    page.evaluate("document.querySelectorAll('#st-jobs button').forEach((stop) => stop.click())")
    page.wait_for_selector("#st-jobs li", state="detached")


def test_the_box_that_is_corrected_is_that_of_the_shown_time(person: Person, tmp_path: Path) -> None:
    page = person.page
    person.open(write_film(tmp_path / "film.mp4"))
    page.wait_for_function("document.getElementById('st-overlay').clientWidth > 50")
    box = page.locator("#st-overlay").bounding_box()
    place = {"x": box["width"] * 18 / 128, "y": box["height"] * 48 / 96}
    region = person.followed(lambda: page.locator("#st-overlay").click(position=place))
    at_two = min(region, key=lambda each: abs(each["at_s"] - 2.0))
    page.focus("#st-wave")
    page.keyboard.press("Shift+ArrowRight")
    page.keyboard.press("Shift+ArrowRight")
    assert abs(float(page.input_value("#st-box-x")) - at_two["x"]) <= 1
    corrected = person.followed(lambda: page.click("#st-box-set"))
    after = min(corrected, key=lambda each: abs(each["at_s"] - 2.0))
    assert abs(after["x"] - at_two["x"]) < 3 and abs(after["width"] - at_two["width"]) < 3


def test_words_do_not_go_on_to_another_film(person: Person, tmp_path: Path) -> None:
    page = person.page
    person.open(write_recording(tmp_path / "first.wav"))
    person.say("remove the bell between 0.5 and 1 s")
    page.fill("#st-caption", "a bell")
    person.open(write_recording(tmp_path / "second.wav"))
    for field in ("words", "sound", "caption", "from", "to"):
        assert page.input_value(f"#st-{field}") == "", field
    assert page.text_content("#st-plan-said") == "" and page.input_value("#st-kind") == "add"


def test_a_wrong_row_blocks_nothing_but_itself(person: Person, tmp_path: Path) -> None:
    page = person.page
    person.open(write_recording(tmp_path / "street.wav", 3.0))
    while page.locator("#st-events tr").count():
        page.click("#st-events tr:first-child button")
    for name, begin_s, end_s, key in (("bell", "0.5", "1", "Home"), ("dog", "2", "1", "End")):
        page.focus("#st-wave")
        page.keyboard.press(key)  # where the new row begins
        page.click("#st-event-add")
        row = page.locator("#st-events tr").last
        row.locator("input").nth(2).fill("2.5")
        row.locator("input").nth(1).fill(begin_s)
        row.locator("input").nth(2).fill(end_s)
        row.locator("input").nth(0).fill(name)
        page.keyboard.press("Tab")
    page.wait_for_function(
        "document.getElementById('st-rows-said').textContent.startsWith('Row 2 (dog) must end')"
    )
    assert page.locator("#st-events input[aria-invalid=true]").count() == 3
    latest = time.monotonic() + PATIENCE_MS / 1000
    # the new row's first name is in the record until it becomes wrong
    while [event["sound"] for event in person.detail()["thought"]["events"]] != ["bell"]:
        assert time.monotonic() < latest
        page.wait_for_timeout(100)
    person.say("add rain at 1 s")
    assert page.input_value("#st-kind") == "add" and person.problem() == ""
    page.click("#st-generate")
    page.wait_for_function("document.getElementById('st-problem').textContent.includes('Row 2 (dog)')")
    page.locator("#st-events tr").last.locator("input").nth(2).fill("2.5")
    page.keyboard.press("Tab")
    page.wait_for_selector("#st-rows-said", state="hidden")
    page.wait_for_function("document.getElementById('st-prose').textContent.includes('dog')")


def test_what_was_deleted_is_asked_for_and_comes_back(person: Person, tmp_path: Path) -> None:
    page = person.page
    person.open(write_recording(tmp_path / "street.wav", 3.0))
    page.click("#st-event-add")  # a steady sound is background, and no row
    before = person.finished()
    generate(person, 1)
    person.wait_finished(before + 1)
    asked: list[str] = []
    answers = [False, True, True]

    def answer(dialog: Any) -> None:
        asked.append(dialog.message)
        if answers.pop(0):
            dialog.accept()
        else:
            dialog.dismiss()

    page.on("dialog", answer)
    remove = "#st-tree button:text-is('Delete')"
    page.click(remove)
    page.wait_for_timeout(300)
    assert len(person.versions()) == 2 and "version 2" in asked[0]
    page.click(remove)
    page.wait_for_function("document.querySelectorAll('.st-version').length === 1")
    page.click("#st-status button:text-is('Undo')")
    page.wait_for_function("document.querySelectorAll('.st-version').length === 2")
    page.click(remove)
    page.wait_for_function("document.querySelectorAll('.st-version').length === 1")
    page.focus("#st-wave")
    page.keyboard.press("Control+z")
    page.wait_for_function("document.querySelectorAll('.st-version').length === 2")
    # a row of the table, and the selection of an edit
    count = page.locator("#st-events tr").count()
    page.click("#st-events tr:first-child button")
    page.wait_for_function(f"document.querySelectorAll('#st-events tr').length === {count - 1}")
    page.keyboard.press("Control+z")
    page.wait_for_function(f"document.querySelectorAll('#st-events tr').length === {count}")
    page.keyboard.press("Control+z")
    page.wait_for_selector(".st-version[data-version='1'][aria-pressed=true]")


def test_localhost_has_the_same_projects(person: Person, server: Server, tmp_path: Path) -> None:
    page = person.page
    person.open(write_recording(tmp_path / "street.wav"))
    page.goto(f"http://localhost:{server.port}/")
    page.wait_for_selector("#studio[data-ready=yes]")
    assert page.url.startswith(server.url)
    page.wait_for_selector("#st-projects option:text-is('street.wav')", state="attached")
    # from a page of another site
    other = "data:text/html,<a id='go' href='" + server.url + "'>studio</a>"
    page.goto(other)
    page.click("#go")
    page.wait_for_selector("#studio[data-ready=yes]")
    page.wait_for_selector("#st-projects option:text-is('street.wav')", state="attached")
    person.foreign.clear()  # the other names of this machine were meant


def test_projects_come_back_by_the_link_of_the_console(
    own_server: Server, chromium: Any, tmp_path: Path
) -> None:
    person = Person(chromium, own_server.url)
    page = person.page
    person.open(write_recording(tmp_path / "street.wav"))
    person.context.clear_cookies()
    page.goto(own_server.url)
    page.wait_for_selector("#studio[data-ready=yes]")
    page.wait_for_selector("#st-projects option:text-is('none yet')", state="attached")
    page.goto(own_server.recovery_link())
    page.wait_for_selector("#st-recover:not([hidden])")
    assert "recover" not in page.url and "street.wav" in page.inner_text("#st-recover-list")
    person.screen("20-recover")
    page.click("#st-recover-take")
    page.wait_for_selector("#st-projects option:text-is('street.wav')", state="attached")
    page.select_option("#st-projects", label="street.wav")
    page.wait_for_selector(".st-version")
    person.check()
    person.context.close()


def test_times_of_an_hour_and_an_edit_of_all(person: Person, tmp_path: Path) -> None:
    page = person.page
    person.open(write_recording(tmp_path / "hour.wav", 3720.0), versions=0)
    page.wait_for_selector(".st-version")
    assert "1:02:00.00" in person.versions()[0]
    assert page.inner_text("#st-clock") == "0.00 of 1:02:00.00"
    page.fill("#st-from", "1:00:00")
    page.fill("#st-to", "3605.5")
    page.keyboard.press("Tab")
    page.focus("#st-wave")
    page.keyboard.press("End")
    assert page.inner_text("#st-clock") == "1:02:00.00 of 1:02:00.00"
    page.keyboard.press("]")
    assert page.input_value("#st-from") == "1:00:00.00" and page.input_value("#st-to") == "1:02:00.00"
    page.fill("#st-from", "noon")
    page.keyboard.press("Tab")
    page.wait_for_function("document.getElementById('st-problem').textContent.includes('is no time')")
    # nothing is compared where the edit covers all
    person.open(write_recording(tmp_path / "street.wav"))
    page.evaluate("document.querySelector('#studio details').open = true")
    page.fill("#st-steps", "1")
    page.select_option("#st-kind", "add")
    page.fill("#st-sound", "rain")
    page.evaluate("document.getElementById('st-apply').click()")
    page.wait_for_function("document.getElementById('st-problem').textContent.includes('Nothing says where')")
    assert len(person.versions()) == 1, "without a selection, an object or words nothing starts"
    person.say("add rain everywhere")
    before = person.finished()
    page.evaluate("document.getElementById('st-apply').click()")
    person.wait_finished(before + 1)
    assert "the edit covers the whole sound" in person.versions()[1] and "✓" not in person.versions()[1]


def test_run_state_report_curves_and_grid_stand_in_this_order(person: Person, server: Server) -> None:
    stage = server.runs / "tiny" / "train_flow"
    record = {"name": "train_flow", "kind": "train_flow", "state": "running", "seconds": 30.0}
    (stage / "stage.json").write_text(json.dumps({**record, "settings": {"steps": 100}}))
    (stage / "performance.jsonl").write_text('{"step": 49, "seconds_per_step": 2.0}\n')
    (stage / "alarms.jsonl").write_text('{"step": 20, "kind": "loss spike", "text": "4 deviations"}\n')
    for step in (100, 200):
        folder = stage / "listening" / f"step-{step:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("one", "two"):
            write_recording(folder / f"{name}.wav", 0.2)
    page = person.page
    page.click("role=tab[name=Runs]")
    page.wait_for_selector("text=alarm at step 21, loss spike: 4 deviations")
    page.wait_for_selector("text=about 1.7 min left")
    page.wait_for_selector(".st-grid audio")
    tops = [
        page.locator(selector).first.bounding_box()["y"]
        for selector in (".st-run-state", ".st-stages", ".st-report", ".st-curve", ".st-grid")
    ]
    assert tops == sorted(tops) and tops[2] < 900
    grid = page.locator(".st-grid").first
    assert grid.locator("tbody tr").count() >= 2
    grid.locator("audio").first.evaluate("sound => { sound.muted = true; return sound.play(); }")
    person.screen("21-run")
