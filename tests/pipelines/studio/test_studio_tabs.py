"""The tabs Data and Runs in a real Chromium, the page without a model, and what axe-core finds at two widths."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.pipelines.studio.real_browser import Person, Server, needs_axe
from tests.pipelines.studio.tiny_studio import write_film, write_recording

pytestmark = pytest.mark.slow


@pytest.fixture
def person(server: Server, chromium: Any) -> Iterator[Person]:
    found = Person(chromium, server.url)
    yield found
    found.check()
    found.context.close()


def test_a_report_is_shown_and_its_scripts_do_not_reach_the_page(person: Person) -> None:
    page = person.page
    page.click("role=tab[name=Runs]")
    frame = page.frame_locator("iframe.st-report")
    frame.locator("text=Report of tiny").wait_for()
    assert frame.locator("body").get_attribute("data-kept") == "yes" and page.title() == "audiollm studio"


def test_curves_grow_and_samples_come_while_a_model_trains(person: Person, server: Server) -> None:
    page = person.page
    page.click("role=tab[name=Runs]")
    page.wait_for_selector(".st-curve svg")
    assert "step 4,321" not in page.inner_text("body")
    stage = server.runs / "tiny" / "train_flow"
    for step in (900, 4000):
        write_recording(_made(stage / "listening" / f"step-{step:06d}") / "seven.wav", 0.2)
    with (stage / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4321, "loss": 0.5, "learning_rate": 1e-3}) + "\n")
    page.wait_for_selector("text=train_flow: step 4,321")
    assert page.locator(".st-grid thead th").all_inner_texts() == ["prompt", "step 4,000", "step 900"]
    assert page.locator(".st-grid audio").count() == 2
    page.locator(".st-grid audio").first.evaluate("sound => { sound.muted = true; return sound.play(); }")
    person.screen("12-runs")


def test_clips_are_seen_heard_and_reviewed(person: Person, server: Server) -> None:
    page = person.page
    page.click("role=tab[name=Data]")
    page.wait_for_selector("text=First, a bell.")
    page.wait_for_function("document.querySelector('.st-clips audio').readyState > 0")
    page.eval_on_selector(".st-clips video", "film => { film.muted = true; film.play(); }")
    page.wait_for_function("document.querySelector('.st-clips video').currentTime > 0.1")
    person.screen("13-data")
    page.get_by_label("Words").fill("slides")
    page.wait_for_selector("text=1 clip; page 1 of 1.")
    assert page.locator(".st-clips li").all_inner_texts()[0].startswith("film-0")
    page.get_by_label("Words").fill("")
    page.click("text=dropped")
    page.wait_for_selector("text=the limit is -50 dBFS")
    page.click("text=to review")
    page.wait_for_selector("button:has-text('Accept')")
    person.screen("14-to-review")
    page.click("button:has-text('Accept')")
    page.wait_for_selector("text=Every listed clip has a verdict")
    assert page.locator("button:has-text('Accept')").is_hidden()  # nothing is left to judge
    person.screen("14-reviewed")
    assert json.loads((server.data / "review.jsonl").read_text())["verdict"] == "accepted"


def test_an_annotation_is_filtered_by_words_and_reason(person: Person) -> None:
    page = person.page
    page.click("role=tab[name=Data]")
    page.get_by_label("Folder").click()
    page.get_by_role("option", name="annotated").click()
    page.wait_for_selector("text=8 clips; page 1 of 1.")
    page.get_by_label("Words").fill("eleven ships")
    page.wait_for_selector("text=1 clip; page 1 of 1.")
    page.get_by_label("Words").fill("")
    page.click("text=dropped")
    page.wait_for_selector("text=7 clips; page 1 of 1.")
    page.get_by_label("Reason of the drop").click()
    page.get_by_role("option", name="recognizers disagree (2)").click()
    page.wait_for_selector("text=2 clips; page 1 of 1.")
    assert (
        page.locator(".st-dropped").all_inner_texts() == ["recognizers disagree: 0.45 , the limit is 0.4"] * 2
    )
    page.wait_for_function("document.querySelector('.st-clips audio').readyState > 0")
    page.click("text=to review")
    page.wait_for_selector("text=This folder lists no clips to review")
    assert page.locator("button:has-text('Accept')").is_hidden()


def test_the_segments_of_an_annotation_are_corrected_in_a_window_of_their_own(
    person: Person, server: Server
) -> None:
    page = person.page
    page.click("role=tab[name=Data]")
    page.get_by_label("Folder").click()
    page.get_by_role("option", name="annotated").click()
    with person.context.expect_page() as opened:
        page.click("text=Correct these segments")
    review = opened.value
    review.wait_for_selector("body[data-ready=yes]")
    review.keyboard.press("r")
    review.wait_for_selector("body[data-waiting='0']")
    review.locator("#counts", has_text=re.compile("^1 of")).wait_for()
    review.keyboard.press("u")
    review.locator("#counts", has_text=re.compile("^0 of")).wait_for()
    review.close()


def test_tabs_are_chosen_by_keyboard(person: Person) -> None:
    page = person.page
    person.tab_to("[role=tab]")
    for name, shown, key in (
        ("Data", "text=First, a bell.", "Tab"),
        ("Runs", ".st-curve svg", "Tab"),
        ("Sound", "#st-empty", "Shift+Tab"),
    ):
        for _ in range(4):
            if page.evaluate("document.activeElement.textContent").strip() == name:
                break
            page.keyboard.press(key)
        page.keyboard.press("Enter")
        page.wait_for_selector(shown)
        assert page.locator(f"role=tab[name={name}]").get_attribute("aria-selected") == "true"


def test_without_a_model_the_page_says_which_command_makes_one(
    chromium: Any, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    server = Server(tmp_path_factory.mktemp("bare") / "work", "--runs", str(tmp_path))
    try:
        person = Person(chromium, server.url)
        page = person.page
        page.wait_for_selector("#st-model:not([hidden])")
        said = page.inner_text("#st-model")
        assert "audiollm run recipes/thinksound/tiny.yaml" in said and "audiollm studio --model" in said
        person.open(write_recording(tmp_path / "street.wav", 1.0))  # all but making sound works
        for name in ("generate", "apply", "object-add"):
            assert page.is_disabled(f"#st-{name}"), name
        assert page.locator("#st-model code").count() >= 2 and "`" not in said
        assert len(person.versions()) == 1
        person.check()
        person.context.close()
    finally:
        server.end()


@needs_axe
@pytest.mark.parametrize("width", [1440, 390])
def test_nothing_serious_is_found_by_axe(server: Server, chromium: Any, tmp_path: Path, width: int) -> None:
    person = Person(chromium, server.url, width)
    page = person.page
    person.check_access()
    person.open(write_film(tmp_path / "film.mp4"))
    # an object, a comparison and a refusal are shown
    page.wait_for_function("document.getElementById('st-overlay').clientWidth > 50")
    person.followed(lambda: _click_square(page))
    page.evaluate("document.querySelector('#studio details').open = true")
    page.fill("#st-steps", "1")
    page.fill("#st-from", "1")
    page.fill("#st-to", "2")
    person.click_and_wait("#st-object-add")
    page.click("button:has-text('Compare with 1')")
    page.wait_for_selector("#st-compare:not([hidden])")
    person.say("mute 0.2 to 0.4 s and add a bell at 1 s")
    person.screen(f"15-read-{width}")
    person.say("cut the last second")
    assert "does not shorten" in page.inner_text("#st-plan-said")
    page.click("#st-choices >> text=mute")
    page.wait_for_function(
        "document.getElementById('st-plan-said').textContent.startsWith('Understood: mute')"
    )
    person.say("what a nice day")
    page.fill("#st-from", "noon")
    page.keyboard.press("Tab")
    page.wait_for_selector("#st-problem:not([hidden])")
    person.screen(f"16-all-{width}")
    person.check_access()
    for name in ("Data", "Runs", "Live"):
        tab = page.locator(f"role=tab[name={name}]")
        if not tab.is_visible():  # on a narrow screen some are in a menu
            page.click("[aria-label='More tabs']")
            tab = page.locator(f"button:text-is('{name}'):visible")
        tab.click()
        page.wait_for_timeout(500)
        person.screen(f"17-{name.lower()}-{width}")
        person.check_access()
    person.check()
    person.context.close()


def _click_square(page: Any) -> None:
    """Click the red square of `moving_pictures` in the first picture."""
    box = page.locator("#st-overlay").bounding_box()
    page.locator("#st-overlay").click(position={"x": box["width"] * 18 / 128, "y": box["height"] * 48 / 96})


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder
