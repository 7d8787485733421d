"""The page at `/`: its files alone, answered without a key; in a browser every form gives what its address gives."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from audiollm.serve.limits import ServeLimits
from audiollm.serve.page_routes import PAGE_FILES
from tests.audiollm.serve.running import RunningServer, running_server, voice_wav
from tests.audiollm.serve.test_clients import echo_model

KEY = "a key of this test"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    limits = ServeLimits(max_length=4096, answer_tokens=40)
    with running_server(limits, more_models=[echo_model], key=KEY) as running:
        yield running


def test_its_files_load_nothing_of_others_and_need_no_key(server: RunningServer) -> None:
    contents = {}
    for path, (_, media_type) in PAGE_FILES.items():
        answer = httpx.get(server.address + path)
        assert answer.status_code == 200 and answer.headers["content-type"].startswith(media_type)
        assert answer.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
        contents[path] = answer.text
        assert httpx.get(server.address + path, params={"page": "of the caller"}).text == answer.text
    assert not any(re.search(r"https?://|@import|\burl\(", text) for text in contents.values())
    addresses = {
        path.lstrip("/")
        for path in httpx.get(f"{server.address}/openapi.json", headers=header()).json()["paths"]
    }
    called = set(re.findall(r'"(v1/[\w/]+)"', contents["/page.js"]))
    assert called <= addresses and len(called) == 6
    ids = set(re.findall(r'(?:byId|onSubmit)\("([\w-]+)"', contents["/page.js"]))
    assert ids <= set(re.findall(r'id="([\w-]+)"', contents["/"]))


@pytest.mark.slow
def test_each_form_in_a_browser(server: RunningServer) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if (chromium := shutil.which("chromium") or shutil.which("chromium-browser")) is None:
        pytest.skip("no chromium: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"], timeout=240_000)
        try_page(browser.new_page(), server)
        browser.close()


def try_page(page: Any, server: RunningServer) -> None:
    page.set_default_timeout(120_000)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(server.address)
    page.get_by_text("401: the key is missing").wait_for()
    page.fill("#key", KEY)
    page.press("#key", "Tab")
    page.get_by_text("toy: writes, speaks, hears · echo: writes, hears").wait_for()
    page.fill("#speech textarea", "hello")
    page.click("#speech button")
    page.wait_for_selector("#speech ~ .answer audio")
    assert '"input":"hello"' in page.text_content("#speech ~ .curl")
    recording = {"name": "a.wav", "mimeType": "audio/wav", "buffer": voice_wav(1.0)}
    page.select_option("#transcription select[name=model]", "echo")
    page.set_input_files("#transcription input[type=file]", recording)
    page.click("#transcription button")
    page.get_by_text('"text":"1.0 s Transcribe the speech."').wait_for()
    page.check("#transcription input[name=translated]")
    page.click("#transcription button")
    page.get_by_text('"text":"1.0 s Translate what is said into English."').wait_for()
    page.select_option("#chat select", "echo")
    page.fill("#chat textarea", "what is it?")
    page.set_input_files("#chat input[type=file]", recording)
    page.click("#chat button")
    page.get_by_text("1.0 s what is it?", exact=True).wait_for()
    page.fill("#voice input[name=name]", "mine")
    page.set_input_files("#voice input[type=file]", {**recording, "buffer": voice_wav(2.0)})
    page.fill("#voice input[name=consent]", "It is a tone.")
    page.click("#voice button")
    page.wait_for_selector("#speech option[value=mine]", state="attached")
    page.click("#voice button")
    page.wait_for_selector("#voice ~ .answer.error")
    assert "there is such a voice" in page.text_content("#voice ~ .answer")
    assert errors == []


def header() -> dict[str, str]:
    return {"Authorization": f"Bearer {KEY}"}
