"""Live in a real Chromium: a talk from a file and one from the microphone, which plays a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import soundfile

from audiollm.interpret.live.live_model import LiveModel
from tests.audiollm.interpret.test_live import noise, run_folder  # noqa: F401
from tests.pipelines.studio.real_browser import Person, Server, launched, needs_axe

pytestmark = pytest.mark.slow
RATE = 24_000


@pytest.fixture(scope="module")
def talk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("talk") / "talk.wav"
    soundfile.write(path, noise(3.0, 3, RATE)[0].numpy(), RATE, subtype="PCM_16")
    return path


@pytest.fixture(scope="module")
def person(
    run_folder: Path,  # noqa: F811
    talk: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Any]:
    server = Server(tmp_path_factory.mktemp("studio") / "work", "--live", str(run_folder / "train"))
    fake = ("--use-fake-ui-for-media-stream", "--use-fake-device-for-media-stream",
            f"--use-file-for-fake-audio-capture={talk}")  # fmt: skip
    with launched(*fake) as chromium:
        found = Person(chromium, server.url)
        found.page.click("role=tab[name=Live]")
        found.page.wait_for_selector("#live[data-ready=yes]")
        yield found
        found.check()
        found.context.close()
    server.end()


def test_a_talk_from_a_file(person: Person, talk: Path, run_folder: Path) -> None:  # noqa: F811
    page = person.page
    page.set_input_files("#lv-file", str(talk))
    page.wait_for_selector("#lv-state >> text=The talk has ended.")
    session = LiveModel.load(run_folder / "train").session()
    samples_N, _ = soundfile.read(talk, dtype="float32")
    heard_1N = noise(3.0, 3, RATE).new_tensor(samples_N)[None]
    wanted = [action.text for action in [*session.hear(heard_1N), *session.finish()] if action.text.strip()]
    said = page.locator("#lv-said li span:nth-child(2)").all_text_contents()
    assert said == wanted and wanted
    person.screen("15-live")


@needs_axe
def test_live_is_accessible(person: Person) -> None:
    person.check_access()


def test_a_talk_from_the_microphone(person: Person) -> None:
    page = person.page
    page.click("#lv-microphone")
    page.wait_for_selector("#lv-stop:not([disabled])")
    assert page.locator("#lv-microphone").is_disabled()
    page.wait_for_function(
        "parseFloat((document.getElementById('lv-state').textContent.match(/heard (\\d+)/) || [])[1]) >= 4"
    )
    page.click("#lv-stop")
    page.wait_for_selector("#lv-state >> text=The talk has ended.")
    assert page.locator("#lv-said li").count() > 0
    assert page.locator("#lv-microphone").is_enabled() and page.locator("#lv-stop").is_disabled()


def test_a_file_that_is_no_sound(person: Person, tmp_path: Path) -> None:
    (tmp_path / "talk.wav").write_text("no sound")
    person.page.set_input_files("#lv-file", str(tmp_path / "talk.wav"))
    person.page.wait_for_selector("#lv-state >> text=cannot be decoded by this browser")
    assert person.page.locator("#lv-file").is_enabled()
