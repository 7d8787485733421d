"""The studio's server: who gets which file, what is refused, and a whole edit through its addresses."""

from __future__ import annotations

import asyncio
import io
import re
import secrets
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from audiollm.audio import save
from audiollm.errors import ConfigError
from audiollm.files.atomic import write_json, write_jsonl
from audiollm.video.decoders import VideoError
from audiollm.video.writing import write_video
from pipelines.review.row_facts import measures_of, sort_columns, sorted_rows
from pipelines.studio.browse import clips
from pipelines.studio.browse.clips import (
    ClipFilter,
    clip_html,
    clips_html,
    drop_reasons,
    give_verdict,
    listed_clips,
    review_next,
)
from pipelines.studio.browse.files import ShownClip, ShownFiles
from pipelines.studio.browse.runs import (
    curves_html,
    report_html,
    run_folder,
    run_mark,
    samples_html,
    stage_statuses,
    state_html,
)
from pipelines.studio.editor import MakeRequest, sentence_of
from pipelines.studio.limits import StudioLimits, StudioRefusal, told_length
from pipelines.studio.store import ProjectStore, owner_of
from tests.audiollm.flow.toy import tone
from tests.pipelines.studio.tiny_studio import (
    copied_version,
    made_editor,
    moving_pictures,
    opened,
    tiny_generator,
    write_film,
    write_recording,
    write_still,
)

pytest.importorskip("gradio", reason="the extra `studio` is not installed")
testclient = pytest.importorskip("starlette.testclient", reason="the extra `studio` is not installed")

from fastapi import FastAPI  # noqa: E402

from pipelines.studio.browse.routes import add_shown_routes  # noqa: E402
from pipelines.studio.gate import COOKIE, StudioGate, is_allowed  # noqa: E402
from pipelines.studio.routes import add_refusals, add_routes  # noqa: E402
from pipelines.studio.routes.dependencies import OpenWindows  # noqa: E402
from pipelines.studio.server import studio_app  # noqa: E402
from pipelines.studio.tabs import StudioFolders, studio_page  # noqa: E402

PAGE = "0123456789abcdef"
CHANGES = {"x-studio": "1"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The editor and the whole app with Gradio's page."""
    folder = tmp_path_factory.mktemp("studio")
    limits = StudioLimits(upload_mb=2, followed_s=1.5, patience_s=0.4, reload_s=0.2)
    editor = made_editor(folder / "work", tiny_generator(folder / "model"), limits)
    app = studio_app(editor, folder / "runs", (folder / "data",))
    yield editor, app
    editor.close()


def browser(app: Any) -> Any:
    """A new browser that has opened the page."""
    client = testclient.TestClient(app, base_url="http://127.0.0.1:7860")
    assert client.get("/").status_code == 200
    return client


def owner_of_client(client: Any) -> str:
    return owner_of(client.cookies[COOKIE])


def upload(client: Any, path: Path) -> Any:
    return client.post(f"/studio/api/projects?name={path.name}", content=path.read_bytes(), headers=CHANGES)


def test_words_become_edits_that_are_made_in_turn(served: Any, tmp_path: Path) -> None:
    _, app = served
    client = browser(app)
    project = upload(client, write_recording(tmp_path / "street.wav", 3.0)).json()
    root = f"/studio/api/projects/{project['id']}"
    events = [{"sound": "dog bark", "start_s": start, "end_s": start + 0.3} for start in (0.5, 2.0)]
    record = {"events": [*events[:1], {"sound": "bell", "start_s": 1.2, "end_s": 1.6}, events[1]]}
    assert client.put(f"{root}/thought", json={"record": record}, headers=CHANGES).status_code == 200

    def reading(words: str, **more: Any) -> Any:
        body = {"page": PAGE, "version": 1, "instruction": words, **more}
        return client.post(f"{root}/plan", json=body, headers=CHANGES).json()

    asked = reading("a nice day")
    assert "fit no operation" in asked["question"] and asked["choices"][0] == "remove the dog bark"
    assert reading("remove this")["question"] and reading("remove this", has_object=True)["edits"]
    edits = reading("mute the first 100 ms and replace the dog with a cat")["edits"]
    assert [(edit["kind"], edit["caption"], edit["start_s"]) for edit in edits] == [
        ("mute", "", 0.0), ("inpaint", "a cat", 0.5), ("inpaint", "a cat", 2.0),
    ]  # fmt: skip
    assert len(client.get(root).json()["versions"]) == 1, "reading starts nothing"
    body = {"page": PAGE, "version": 1, "edits": edits, "steps": 1}
    job = client.post(f"{root}/edits", json=body, headers=CHANGES).json()
    while job["state"] not in ("done", "failed"):
        time.sleep(0.02)
        job = client.get(f"/studio/api/jobs?page={PAGE}").json()["jobs"][-1]
    assert job["result"]["version"] == 4
    versions = client.get(root).json()["versions"]
    assert [version["parent"] for version in versions[1:]] == [1, 2, 3]
    assert all(version["is_same_outside"] for version in versions[1:])
    refused = client.post(f"{root}/edit", json={"page": PAGE, "version": 1, "kind": "mute"}, headers=CHANGES)
    assert refused.status_code == 400 and "Select the seconds to mute" in refused.json()["sentence"]


def test_a_film_is_opened_edited_and_exported(served: Any, tmp_path: Path) -> None:
    _, app = served
    client = browser(app)
    project = upload(client, write_film(tmp_path / "film.mp4")).json()
    root = f"/studio/api/projects/{project['id']}"
    assert project["has_pictures"] and [each["id"] for each in project["versions"]] == [1]
    record = {"events": [{"sound": "bell", "start_s": 1.0, "end_s": 2.0}], "background": ["rain"]}
    kept = client.put(f"{root}/thought", json={"record": record}, headers=CHANGES).json()
    assert kept["prose"].startswith("First, at 1.0 seconds, bell.")
    other = {"record": {"background": ["snow"]}, "known": {"background": ["hail"]}}
    refused = client.put(f"{root}/thought", json=other, headers=CHANGES)
    assert refused.status_code == 409 and "changed meanwhile" in refused.json()["sentence"]
    late = {"events": [{"sound": "bell", "start_s": 1.0, "end_s": 9.0}]}
    answer = client.put(f"{root}/thought", json={"record": late}, headers=CHANGES)
    assert answer.status_code == 400 and "the clip has 3.0" in answer.json()["sentence"]
    region = client.post(
        f"{root}/region", json={"clicks": [{"at_s": 1.0, "x": 42, "y": 48}]}, headers=CHANGES
    ).json()["region"]
    (plan,) = client.post(
        f"{root}/plan", json={"page": PAGE, "version": 1, "instruction": "add a bell at 2 s"}, headers=CHANGES
    ).json()["edits"]
    asked = {
        "page": PAGE, "version": 1, "kind": plan["kind"], "caption": plan["caption"], "start_s": 2.0, "end_s": 2.5,
        "region": region, "steps": 2,
    }  # fmt: skip
    job = client.post(f"{root}/edit", json=asked, headers=CHANGES).json()
    while job["state"] not in ("done", "failed"):
        time.sleep(0.02)
        (job,) = client.get(f"/studio/api/jobs?page={PAGE}").json()["jobs"]
    assert job["result"]["version"] == 2 and job["steps"] == 2
    version = client.get(root).json()["versions"][1]
    assert version["is_same_outside"] and version["span"] == [2.0, 2.5]
    sound = client.get(f"{root}/versions/2/sound.wav")
    part = client.get(f"{root}/versions/2/sound.wav", headers={"range": "bytes=0-99"})
    assert part.status_code == 206 and part.content == sound.content[:100]
    columns = np.frombuffer(client.get(f"{root}/versions/2/waveform?start=0&end=3&width=300").content, "<i2")
    assert columns.shape == (600,) and columns.any()
    for kind, first in (("frame?at=1", b"\xff\xd8"), ("strip", b"\xff\xd8"), ("source", b"\x00\x00")):
        assert client.get(f"{root}/{kind}").content.startswith(first)
    exported = client.get(f"{root}/versions/2/export?format=mkv")
    assert exported.status_code == 200 and "attachment" in exported.headers["content-disposition"]
    assert soundfile.info(io.BytesIO(client.get(f"{root}/versions/2/export").content)).frames == round(
        8000 * version["duration_s"]
    )
    again = client.post(
        "/studio/api/projects", content=client.get(f"{root}/export").content, headers=CHANGES
    ).json()
    # a person's chain of thought comes back, and no measured one takes its place
    assert project["thinks"] and not again["thinks"] and again["prose"] == kept["prose"]
    assert [each["title"] for each in again["versions"]] == ["as it was opened", version["title"]]
    assert (
        client.delete(f"{root}/versions/1", headers=CHANGES).status_code == 400
    )  # version 2 was made from it
    assert client.delete(root, headers=CHANGES).status_code == 200 and client.get(root).status_code == 404


def test_a_film_of_one_picture_and_one_without_sound(served: Any, tmp_path: Path) -> None:
    _, app = served
    client = browser(app)
    write_video(tmp_path / "one.mp4", moving_pictures(1), 8, None)
    project = upload(client, tmp_path / "one.mp4").json()
    root = f"/studio/api/projects/{project['id']}"
    assert project["versions"] == [] and 0 < project["duration_s"] < 0.2
    assert (
        client.get(f"{root}/strip").status_code == 200
        and client.get(f"{root}/frame?at=0.1").status_code == 200
    )
    region = client.post(
        f"{root}/region", json={"clicks": [{"at_s": 0.1, "x": 18, "y": 48}]}, headers=CHANGES
    )
    assert region.status_code == 200 and region.json()["region"]
    job = client.post(f"{root}/think", json={"page": PAGE + "9"}, headers=CHANGES).json()
    while job["state"] not in ("done", "failed"):
        time.sleep(0.02)
        (job,) = client.get(f"/studio/api/jobs?page={PAGE}9").json()["jobs"]
    assert job["state"] == "failed" and job["sentence"].endswith("give a video with sound, or a recording.")
    body = {"page": PAGE, "version": 1, "kind": "add", "caption": "rain", "end_s": 1.0, "steps": 1}
    assert (
        client.post(f"{root}/edit", json=body, headers=CHANGES)
        .json()["sentence"]
        .startswith("There is no version 1")
    )


def test_clicks_that_lie_far_apart_are_refused(served: Any, tmp_path: Path) -> None:
    _, app = served
    client = browser(app)
    project = upload(client, write_film(tmp_path / "film.mp4")).json()
    clicks = [{"at_s": at_s, "x": 42, "y": 48} for at_s in (2.9, 0.1)]
    answer = client.post(
        f"/studio/api/projects/{project['id']}/region", json={"clicks": clicks}, headers=CHANGES
    )
    assert answer.status_code == 400 and "forget the object" in answer.json()["sentence"]


def test_a_still_picture_under_a_long_sound(served: Any, tmp_path: Path) -> None:
    _, app = served
    client = browser(app)
    write_still(tmp_path / "still.mp4", 4.0)
    project = upload(client, tmp_path / "still.mp4").json()
    root = f"/studio/api/projects/{project['id']}"
    assert project["duration_s"] >= 4.0
    for path in ("strip", "frame?at=0", "frame?at=3.9"):
        assert client.get(f"{root}/{path}").content.startswith(b"\xff\xd8"), path
    click = {"clicks": [{"at_s": 3.0, "x": 18, "y": 48}]}
    assert client.post(f"{root}/region", json=click, headers=CHANGES).json()["region"]


def test_a_strip_that_was_cut_off_is_made_again(
    served: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, app = served
    client = browser(app)
    project = upload(client, write_film(tmp_path / "film.mp4")).json()
    write_bytes = Path.write_bytes

    def cut_off(path: Path, content: bytes) -> int:
        write_bytes(path, content[: len(content) // 2])
        raise OSError(28, "No space left on device")

    root = f"/studio/api/projects/{project['id']}"
    with monkeypatch.context() as full_disk:
        full_disk.setattr(Path, "write_bytes", cut_off)
        answer = client.get(f"{root}/strip")
        assert answer.status_code == 507 and "make room" in answer.json()["sentence"]
    assert client.get(f"{root}/strip").content.endswith(b"\xff\xd9")


def test_a_very_wide_film_has_a_strip(served: Any, tmp_path: Path) -> None:
    _, app = served
    client = browser(app)
    picture = np.zeros((16, 1280, 3), np.uint8)
    write_video(tmp_path / "wide.mp4", [picture] * 8, 8, None)
    project = upload(client, tmp_path / "wide.mp4").json()
    answer = client.get(f"/studio/api/projects/{project['id']}/strip")
    assert answer.status_code == 200 and answer.content.endswith(b"\xff\xd9")


def test_clicks_of_many_people_wait_in_few_threads(
    served: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    editor, app = served
    client = browser(app)
    project = upload(client, write_film(tmp_path / "film.mp4")).json()
    go_on, begun = threading.Event(), threading.Semaphore(0)

    def slow(*given: Any) -> list[Any]:
        begun.release()
        go_on.wait(20)
        return []

    monkeypatch.setattr(editor.regions, "follow", slow)

    def click() -> Any:
        asked = {"clicks": [{"at_s": 1.0, "x": 42, "y": 48}]}
        return client.post(f"/studio/api/projects/{project['id']}/region", json=asked, headers=CHANGES)

    with ThreadPoolExecutor(32) as pool:
        waiting = [pool.submit(click) for _ in range(editor.store.limits.waiting)]
        for _ in waiting:
            assert begun.acquire(timeout=20)
        refused = click()
        go_on.set()
        assert refused.status_code == 429 and "in a moment" in refused.json()["sentence"]
        assert all(each.result().status_code == 200 for each in waiting)


def test_exports_leave_nothing_behind(served: Any, tmp_path: Path) -> None:
    editor, app = served
    client = browser(app)
    project = upload(client, write_film(tmp_path / "film.mp4")).json()
    root = f"/studio/api/projects/{project['id']}"
    for path in ("export", "versions/1/export?format=mkv"):
        for asked in ("bytes=0-9", "bytes=999999999-", "pages=1"):
            status = client.get(f"{root}/{path}", headers={"range": asked}).status_code
            assert status in (206, 400, 416)
    assert not list((editor.store.folder / "projects").glob(".new-*"))


def test_a_window_that_outlives_the_server_takes_no_old_request_for_a_new_one(tmp_path: Path) -> None:
    keys = []
    for _ in "ab":  # a server, and the one after it
        editor = made_editor(tmp_path / "studio", None)
        app = FastAPI()
        add_routes(app, editor)
        app.add_middleware(StudioGate)
        client = testclient.TestClient(app, base_url="http://127.0.0.1:7860")
        client.get("/")
        project = upload(client, write_recording(tmp_path / "a.wav", 0.5)).json()
        job = client.post(
            f"/studio/api/projects/{project['id']}/think", json={"page": PAGE}, headers=CHANGES
        ).json()
        stopped = client.post(f"/studio/api/jobs/{job['number']}/stop?page={PAGE}", headers=CHANGES).json()
        assert stopped["key"] == job["key"]
        keys.append(job["key"].replace(f"-{job['number']}", ""))
        editor.close()
    assert keys[0] != keys[1]


def test_nobody_gets_a_file_that_is_not_their_own(served: Any, tmp_path: Path) -> None:
    editor, app = served
    alice, bob = browser(app), browser(app)
    project = upload(alice, write_film(tmp_path / "film.mp4")).json()
    root = f"/studio/api/projects/{project['id']}"
    own = [
        "", "/source", "/frame?at=1", "/strip", "/export", "/versions/1/sound.wav", "/versions/1/export",
        "/versions/1/waveform?start=0&end=1&width=10",
    ]  # fmt: skip
    for path in own:
        assert alice.get(root + path).status_code == 200, path
        assert bob.get(root + path).status_code == 404, path
    assert bob.delete(root, headers=CHANGES).status_code == 404
    assert project["id"] not in bob.get("/studio/api/state").text
    place = editor.store.folder / "projects" / project["id"]
    (place / "link.wav").symlink_to("/etc/passwd")
    for path in (
        f"/gradio_api/file={place}/source.mp4",
        "/gradio_api/file=/etc/passwd",
        "/gradio_api/file=pyproject.toml",
        f"/gradio_api/file={place}/link.wav",
        f"/gradio_api/file/{place}/source.mp4",
        "/file=/etc/passwd",
        "/gradio_api/proxy=http://example.org/",
        "/gradio_api/stream/x/y/z/playlist.m3u8",
        "/gradio_api/custom_component/a/b/c/d",
        "/gradio_api/upload_progress?upload_id=x",
        "/gradio_api/openapi.json",
        "/monitoring/summary",
        "/docs",
        "/runs",
        "/login",
        "/studio/static/../store.py",
        "/studio/static/%2e%2e/store.py",
        "/studio/static/..%2fstore.py",
        "/studio/static/editor.html",
        f"{root}/versions/../project.json",
        f"{root}/versions/1/../../project.json",
        f"{root}/link.wav",
        f"/studio/api/projects/..%2f{project['id']}",
        "/studio/reports/nobody/report.html",
        "//etc/passwd",
        "/assets/../../../../etc/passwd",
        "/static/..%2f..%2f..%2froutes.py",
    ):
        for client in (alice, bob):
            answer = client.get(path)
            assert answer.status_code in (400, 403, 404), (path, answer.status_code)
            assert "root:" not in answer.text and "OWNER" not in answer.text
    for path in ("/gradio_api/upload", "/gradio_api/run/predict", "/gradio_api/call/x", "/gradio_api/api/x"):
        assert alice.post(path, json={}).status_code == 403


def test_other_pages_and_other_names_of_the_machine_are_refused(served: Any, tmp_path: Path) -> None:
    _, app = served
    client = browser(app)
    sound = write_recording(tmp_path / "a.wav", 0.5).read_bytes()
    assert client.get("/", headers={"host": "evil.example"}).status_code == 421
    assert client.post("/studio/api/projects", content=sound).status_code == 403
    elsewhere = {**CHANGES, "origin": "http://evil.example"}
    assert client.post("/studio/api/projects", content=sound, headers=elsewhere).status_code == 403
    stranger = testclient.TestClient(app, base_url="http://127.0.0.1:7860")
    assert stranger.get("/studio/api/state").status_code == 401
    # the cookie of another server on this machine, which breaks the grammar of cookies
    theirs = {"cookie": f'theirs={{"a": 1}}; audiollm_studio={client.cookies["audiollm_studio"]}'}
    assert stranger.get("/studio/api/state", headers=theirs).status_code == 200
    cookie = stranger.get("/").headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
    assert "default-src 'self'" in client.get("/").headers["content-security-policy"]


def test_uploads_beyond_the_limits_are_refused_and_leave_nothing(served: Any, tmp_path: Path) -> None:
    editor, app = served
    client = browser(app)
    before = sorted((editor.store.folder / "projects").iterdir())

    def without_length() -> Iterator[bytes]:
        for _ in range(30):
            yield bytes(100_000)

    for content in (bytes(2_000_001), without_length()):
        answer = client.post("/studio/api/projects", content=content, headers=CHANGES)
        assert answer.status_code == 413 and "larger than 2 MB" in answer.json()["sentence"]
    answer = client.post("/studio/api/projects", content=b"#EXTM3U\n/etc/passwd", headers=CHANGES)
    assert answer.status_code == 415 and "neither a recording nor a video" in answer.json()["sentence"]
    assert sorted((editor.store.folder / "projects").iterdir()) == before
    huge = {**CHANGES, "content-type": "application/json"}
    project = upload(client, write_recording(tmp_path / "a.wav", 0.5)).json()
    root = f"/studio/api/projects/{project['id']}"
    assert client.put(f"{root}/thought", content=b"[" * 1_100_000, headers=huge).status_code == 413
    assert client.put(f"{root}/thought", content=b"[" * 900_000, headers=huge).status_code in (400, 422)
    body = {"page": PAGE, "version": 1, "kind": "sudo", "steps": 2}
    assert client.post(f"{root}/edit", json=body, headers=CHANGES).status_code == 422
    assert client.get(f"{root}/frame?at=0").json() == {
        "sentence": "The project has no pictures: open a video."
    }


def test_a_closed_window_holds_its_requests_and_no_others(served: Any, tmp_path: Path) -> None:
    editor, _ = served
    project = opened(editor, write_recording(tmp_path / "a.wav"))
    first = editor.store.version(project, 1)
    now_s = [0.0]
    windows = OpenWindows(editor, lambda: now_s[0])
    windows.ask("a/1")
    closed = editor.edit(project, "a/1", first, "add", MakeRequest("rain", end_s=1.0, steps=500))
    other = editor.edit(project, "b/2", first, "add", MakeRequest("rain", end_s=1.0, steps=2))
    while closed.step < 2:
        time.sleep(0.005)
    windows.leave("a/1")
    now_s[0] = 0.19
    windows.ask("a/1")  # the page was loaded again
    now_s[0] = 0.3
    time.sleep(0.3)
    assert not closed._stop.is_set()
    windows.leave("a/1")
    now_s[0] = 0.6
    other.value()
    assert closed.state == "held" and closed.step < 500 and other.state == "done"
    now_s[0] = 1e6
    windows.ask("a/1")  # on a slow machine the page may be there at any time
    while closed.state == "waiting" or closed.step < 2:
        time.sleep(0.005)
    assert closed.state == "running" and closed.result is None
    editor.service.stop_job(closed)
    assert closed.wait(60) and closed.state == "stopped"


def test_a_window_that_falls_silent_counts_as_closed(served: Any, tmp_path: Path) -> None:
    editor, app = served
    client = browser(app)
    project = upload(client, write_recording(tmp_path / "a.wav")).json()["id"]
    asked = {"page": PAGE + "s", "version": 1, "kind": "add", "caption": "rain", "end_s": 1.0, "steps": 500}

    def state() -> Any:
        return client.get(f"/studio/api/jobs?page={PAGE}s").json()["jobs"][-1]["state"]

    state_before = client.get(f"/studio/api/jobs?page={PAGE}s").json()
    assert state_before == {"run": editor.run, "jobs": []}
    client.post(f"/studio/api/projects/{project}/edit", json=asked, headers=CHANGES)
    latest = time.monotonic() + 3 * editor.store.limits.patience_s
    while time.monotonic() < latest:  # it asks on: an open window
        assert state() in ("waiting", "running")
        time.sleep(0.05)
    (job,) = editor.service.jobs(f"{owner_of_client(client)}/{PAGE}s")
    while job.state != "held":
        time.sleep(0.02)
    assert state() in ("waiting", "running")  # it asks again, and goes on
    editor.service.stop_job(job)


def test_a_deleted_project_stops_its_requests_and_no_others(served: Any, tmp_path: Path) -> None:
    _, app = served
    client = browser(app)
    sound = write_recording(tmp_path / "a.wav")
    gone, kept = (f"/studio/api/projects/{upload(client, sound).json()['id']}" for _ in "ab")
    windows = ("0123456789-one", "0123456789-two")
    asked = {"version": 1, "kind": "add", "caption": "rain", "end_s": 1.0, "steps": 500}
    for page in windows:
        assert client.post(f"{gone}/edit", json={**asked, "page": page}, headers=CHANGES).status_code == 200
    client.post(f"{kept}/edit", json={**asked, "page": PAGE + "k", "steps": 1}, headers=CHANGES)

    def job_of(page: str) -> Any:
        return client.get(f"/studio/api/jobs?page={page}").json()["jobs"][0]

    while job_of(windows[0])["step"] < 2:
        time.sleep(0.02)
    assert client.delete(gone, headers=CHANGES).status_code == 200
    while job_of(PAGE + "k")["state"] not in ("done", "failed"):
        time.sleep(0.02)
    ended = [job_of(page) for page in windows]
    assert [job["state"] for job in ended] == ["stopped"] * 2 and ended[0]["step"] < 400
    assert job_of(PAGE + "k")["state"] == "done"


def test_no_connection_is_kept_open(served: Any) -> None:
    """A browser has six for all its windows: neither the page nor Gradio holds one."""
    _, app = served
    client = browser(app)
    assert client.get("/config").json()["connect_heartbeat"] is False
    assert client.get(f"/studio/api/events?page={PAGE}").status_code == 404


def test_a_finished_request_is_found_by_its_version(served: Any, tmp_path: Path) -> None:
    """What became of a request is seen in the project when the server that knew it is gone."""
    editor, app = served
    client = browser(app)
    root = f"/studio/api/projects/{upload(client, write_recording(tmp_path / 'a.wav')).json()['id']}"
    body = {"page": PAGE + "f", "version": 1, "kind": "add", "caption": "rain", "end_s": 1.0, "steps": 1}
    key = client.post(f"{root}/edit", json=body, headers=CHANGES).json()["key"]
    while client.get(f"/studio/api/jobs?page={PAGE}f").json()["jobs"][0]["state"] != "done":
        time.sleep(0.02)
    assert [version["request"] for version in client.get(root).json()["versions"]] == ["", key]
    assert key.startswith(f"{editor.run}-")


def test_there_is_one_address(served: Any) -> None:
    """Under another name of this machine a browser would keep another cookie, and not see its projects."""
    _, app = served
    for host in ("localhost:7860", "[::1]:7860"):
        client = testclient.TestClient(app, base_url=f"http://{host}", follow_redirects=False)
        answer = client.get("/?recover=x")
        assert answer.status_code == 307 and answer.headers["location"] == "http://127.0.0.1:7860/?recover=x"
        assert "set-cookie" not in answer.headers
        assert client.get("/studio/api/state").status_code == 421
        assert client.post("/", headers=CHANGES).status_code == 421
    client = testclient.TestClient(app, base_url="http://evil.example", follow_redirects=False)
    assert client.get("/").status_code == 421


def test_a_link_on_another_page_gives_no_new_cookie(served: Any) -> None:
    """Browsers follow it without the cookie: the page loads itself, and they send it then."""
    _, app = served
    client = testclient.TestClient(app, base_url="http://127.0.0.1:7860")
    answer = client.get("/", headers={"sec-fetch-site": "cross-site"})
    assert "set-cookie" not in answer.headers and 'http-equiv="refresh"' in answer.text
    assert "set-cookie" in client.get("/", headers={"sec-fetch-site": "same-origin"}).headers


def test_the_recovery_link_gives_projects_of_other_browsers(served: Any, tmp_path: Path) -> None:
    editor, app = served
    before, after = browser(app), browser(app)
    lost, other = (
        upload(before, write_recording(tmp_path / f"{name}.wav")).json()["id"] for name in ("lost", "other")
    )

    def recover(key: str, ids: list[str]) -> Any:
        return after.post("/studio/api/recover", json={"key": key, "projects": ids}, headers=CHANGES)

    assert recover("x" * 32, [lost]).status_code == 403
    assert after.get(f"/studio/api/projects/{lost}").status_code == 404
    listed = [project["id"] for project in recover(editor.recovery_key, []).json()["projects"]]
    assert {lost, other} <= set(listed)
    assert other in [project["id"] for project in recover(editor.recovery_key, [lost]).json()["projects"]]
    assert after.get(f"/studio/api/projects/{lost}").status_code == 200
    assert before.get(f"/studio/api/projects/{lost}").status_code == 404
    assert before.get(f"/studio/api/projects/{other}").status_code == 200


def test_a_wrong_row_is_named_as_the_table_shows_it(served: Any, tmp_path: Path) -> None:
    _, app = served
    client = browser(app)
    root = f"/studio/api/projects/{upload(client, write_recording(tmp_path / 'a.wav')).json()['id']}"
    events = [{"sound": "bell", "start_s": 0.1, "end_s": 0.5}, {"sound": "dog", "start_s": 1.5, "end_s": 1.0}]
    answer = client.put(f"{root}/thought", json={"record": {"events": events}}, headers=CHANGES)
    assert answer.status_code == 422
    assert answer.json()["sentence"].startswith("Row 2 of the chain of thought: 'dog' ends at 1 s")


def test_a_deleted_version_comes_back_until_the_next_deletion(served: Any, tmp_path: Path) -> None:
    editor, app = served
    client = browser(app)
    project = opened(editor, write_recording(tmp_path / "a.wav"), owner_of_client(client))
    first = editor.store.version(project, 1)
    second, third = (copied_version(editor.store, project, first) for _ in "ab")
    root = f"/studio/api/projects/{project.id}"

    def numbers() -> list[int]:
        return [version["id"] for version in client.get(root).json()["versions"]]

    assert client.delete(f"{root}/versions/3", headers=CHANGES).status_code == 200 and numbers() == [1, 2]
    assert copied_version(editor.store, project, first).id == 4  # not the number that may come back
    assert client.post(f"{root}/versions/3/restore", headers=CHANGES).status_code == 200
    assert numbers() == [1, 2, 3, 4] and editor.store.version(project, 3) == third
    for number in (3, 2):
        client.delete(f"{root}/versions/{number}", headers=CHANGES)
    answer = client.post(f"{root}/versions/3/restore", headers=CHANGES)
    assert answer.status_code == 404 and "only the last deletion" in answer.json()["sentence"]
    assert client.post(f"{root}/versions/2/restore", headers=CHANGES).status_code == 200
    assert numbers() == [1, 2, 4] and editor.store.version(project, 2) == second
    client.delete(f"{root}/versions/2", headers=CHANGES)
    ProjectStore(editor.store.folder, editor.store.limits)  # a start
    versions = editor.store.place(project) / "versions"
    assert sorted(path.name for path in versions.iterdir()) == sorted(
        f"{number}.{ending}" for number in (1, 4) for ending in ("json", "npy", "wav")
    )


def test_addresses_that_the_gate_lets_through() -> None:
    assert all(is_allowed(path) for path in ("/", "/config", "/assets/a.js", "/gradio_api/queue/join"))
    assert not any(
        is_allowed(path) for path in ("/gradio_api/file=x", "/assets/../x", "/a", "\\", "/studio/..", "/x")
    )


def test_websockets_are_closed() -> None:
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(StudioGate(None)({"type": "websocket", "headers": [], "path": "/"}, None, send))
    assert sent == [{"type": "websocket.close", "code": 1008}]


def test_reports_are_shown_in_an_origin_of_their_own_and_nothing_else_is(served: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "clips").mkdir(parents=True)
    (run / "report.html").write_text("<script>parent.document</script>")
    (run / "secret.yaml").write_text("key: x")
    (run / ".hidden.html").write_text("x")
    (run / "out.html").symlink_to("/etc/passwd")
    save(run / "clips" / "a.wav", tone(100.0, 0.1), 8000)
    shown, app = ShownFiles(), FastAPI()
    add_shown_routes(app, shown, None)
    add_refusals(app)
    app.add_middleware(StudioGate)
    stranger = testclient.TestClient(app, base_url="http://127.0.0.1:7860")
    frame = report_html(shown, run)
    assert 'sandbox="allow-scripts"' in frame  # without allow-same-origin
    root = f"/studio/reports/{shown.report(run)}"
    answer = stranger.get(f"{root}/report.html")
    policy = answer.headers["content-security-policy"]
    assert (
        answer.status_code == 200
        and policy.startswith("sandbox allow-scripts;")
        and "connect-src 'none'" in policy
    )
    assert stranger.get(f"{root}/clips/a.wav").headers["content-type"] == "audio/wav"
    outside = ("../x.html", "..%2fx.html", "%2fetc%2fpasswd", "clips/..%2f..%2fx.html")
    for path in ("secret.yaml", ".hidden.html", "out.html", *outside):
        assert stranger.get(f"{root}/{path}").status_code in (403, 404), path
    assert stranger.get("/studio/reports/nobody/report.html").status_code == 404
    token = shown.clip(ShownClip(run / "clips" / "a.wav", 0.02, 0.08))
    assert stranger.get(f"/studio/api/clips/{token}/sound.wav").status_code == 401
    client = testclient.TestClient(served[1], base_url="http://127.0.0.1:7860")
    client.get("/")
    assert client.get(f"/studio/api/clips/{token}/sound.wav").status_code == 404  # of another server
    assert "--live MODEL" in client.post("/studio/api/live", headers=CHANGES).json()["sentence"]


def test_clips_are_filtered_and_reviewed(tmp_path: Path) -> None:
    save(tmp_path / "a.wav", tone(100.0, 1.0), 8000)
    part = {"path": str(tmp_path / "a.wav"), "start_s": 0.0, "end_s": 1.0}
    silent = {"kind": "silent", "reason": "-60 dBFS"}
    write_jsonl(
        tmp_path / "clips.jsonl", ({"id": f"clip-{n}", "thought": "<b>rain</b>", **part} for n in range(30))
    )
    write_jsonl(
        tmp_path / "filtered.jsonl",
        [{"id": "x", "dropped": silent, **part}, {"id": "y", "dropped": {}, **part}],
    )
    write_jsonl(
        tmp_path / "review.jsonl", [{"id": n, "thought": "rain", "verdict": None, **part} for n in "ab"]
    )
    shown = ShownFiles()
    listed, counted = clips_html(shown, tmp_path, ClipFilter(page=2))
    assert counted == "30 clips; page 2 of 2." and listed.count("<li>") == 10 and "&lt;b&gt;rain" in listed
    assert clips_html(shown, tmp_path, ClipFilter(words="CLIP-7 rain"))[1] == "1 clip; page 1 of 1."
    assert drop_reasons(listed_clips(tmp_path, "dropped")) == [("silent", 1)]
    dropped, _ = clips_html(shown, tmp_path, ClipFilter("dropped", "silent"))
    assert "silent: -60 dBFS" in dropped and dropped.count("<li>") == 1
    first = review_next(tmp_path)
    assert first is not None and first["id"] == "a"
    give_verdict(tmp_path, "a", "rejected", "no\nrain")
    assert [(row["verdict"], row.get("note")) for row in listed_clips(tmp_path, "to review")] == [
        ("rejected", "no rain"), (None, None)
    ]  # fmt: skip
    assert (review_next(tmp_path) or {})["id"] == "b" and (review_next(tmp_path, "b") or {})["id"] == "b"
    with pytest.raises(StudioRefusal):
        give_verdict(tmp_path, "a", "perfect", "")
    assert review_next(None) is None and run_folder(tmp_path, "../etc") is None


def test_who_reviews_a_film_sees_it(tmp_path: Path) -> None:
    path = str(write_film(tmp_path / "film.mp4"))
    part = {"id": "a", "path": path, "start_s": 0.0, "end_s": 1.0}
    write_jsonl(tmp_path / "clips.jsonl", [{**part, "video": path}])
    write_jsonl(tmp_path / "review.jsonl", [{**part, "verdict": None}])
    shown, row = ShownFiles(), review_next(tmp_path)
    assert row is not None
    listed = clip_html(shown, row)
    assert "/picture" in listed and '/film#t=0,1"' in listed
    app = FastAPI()
    add_shown_routes(app, shown, None)
    add_refusals(app)
    app.add_middleware(StudioGate)
    (place,) = re.findall(r'src="([^"#]+)/film', listed)
    client = testclient.TestClient(app, base_url="http://127.0.0.1:7860")
    assert client.get(f"{place}/film").status_code == 401
    client.cookies.set(COOKIE, secrets.token_urlsafe(32))
    film = client.get(f"{place}/film")
    assert (
        film.content == (tmp_path / "film.mp4").read_bytes() and film.headers["content-type"] == "video/mp4"
    )
    other = shown.clip(ShownClip(tmp_path / "a.wav", 0.0, 1.0, tmp_path / "clips.jsonl"))
    assert client.get(f"/studio/api/clips/{other}/film").status_code == 404
    assert "/picture" in clips_html(shown, tmp_path, ClipFilter("to review"))[0]
    give_verdict(tmp_path, "a", "accepted", "")
    assert listed_clips(tmp_path, "to review") == [{**part, "verdict": "accepted", "note": ""}]


def test_a_verdict_deletes_no_line_that_a_person_has_mistyped(tmp_path: Path) -> None:
    written = '{"id": "a", "verdict": null}\n{"id": "b", "verdict": "rejected" "note": "no rain"}\n'
    (tmp_path / "review.jsonl").write_text(written)
    with pytest.raises(StudioRefusal, match="line 2"):
        give_verdict(tmp_path, "a", "accepted", "")
    assert (tmp_path / "review.jsonl").read_text() == written


def test_two_people_review_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jsonl(tmp_path / "review.jsonl", [{"id": n, "verdict": None} for n in "ab"])

    def slowly(folder: Path, state: Any) -> list[dict[str, Any]]:
        rows = listed_clips(folder, state)
        time.sleep(0.2)
        return rows

    monkeypatch.setattr(clips, "listed_clips", slowly)
    people = [threading.Thread(target=give_verdict, args=(tmp_path, id, "accepted", "")) for id in ("a", "b")]
    for person in people:
        person.start()
    for person in people:
        person.join()
    assert [row["verdict"] for row in listed_clips(tmp_path, "to review")] == ["accepted", "accepted"]


def test_a_run_that_begins_while_the_studio_is_open_is_listed(tmp_path: Path) -> None:
    """The function that the page's timer calls brings the new run into the choice of runs."""
    page = studio_page(StudioFolders(tmp_path / "runs"), ShownFiles())
    (tick,) = [
        function for function in page.fns.values() if any(event == "tick" for _, event in function.targets)
    ]
    (tmp_path / "runs" / "new").mkdir(parents=True)
    *_, choice, hint, known = tick.fn(None, "", "")
    assert (choice["choices"], choice["value"], hint["visible"]) == (["new"], "new", False)
    (tmp_path / "runs" / "newer").mkdir()
    *_, mark, choice, _, known = tick.fn("new", "", known)
    assert sorted(choice["choices"]) == ["new", "newer"] == known.split("\n") and choice["value"] == "new"
    assert "choices" not in tick.fn("new", mark, known)[-3]


def test_curves_grow_with_the_metrics(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "train"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(
        '{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n{"step": 3, "lo'
    )
    drawn = curves_html(tmp_path / "run")
    assert "train: step 2" in drawn and "<svg" in drawn and "<script" not in drawn
    mark = run_mark(tmp_path / "run")
    assert mark == run_mark(tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('ss": 0.5}\n')
    assert mark != run_mark(tmp_path / "run") and "train: step 3" in curves_html(tmp_path / "run")
    mark = run_mark(tmp_path / "run")
    (tmp_path / "run" / "report.html").write_text("<p>done</p>")
    assert mark != run_mark(tmp_path / "run")


def test_what_a_model_said_is_listed_by_step_the_newest_first(tmp_path: Path) -> None:
    listening = tmp_path / "run" / "train" / "listening"
    for step in (900, 1000):
        (listening / f"step-{step:06d}").mkdir(parents=True)
        save(listening / f"step-{step:06d}" / "seven.wav", tone(100.0, 0.1), 8000)
    write_jsonl(listening / "prompts.jsonl", [{"name": "seven", "text": "seven <b>rains</b>"}])
    (tmp_path / "run" / "tokenizer" / "examples").mkdir(parents=True)
    save(tmp_path / "run" / "tokenizer" / "examples" / "a.wav", tone(100.0, 0.1), 8000)
    (listening / "step-001000" / "out.wav").symlink_to("/etc/passwd")
    asked = [
        {"role": "user", "content": [{"type": "audio", "path": "a.wav"}, {"type": "text", "text": "What?"}]}
    ]
    rows = [{"step": step, "messages": asked, "answer": f"<i>{step}</i>"} for step in (0, 1200)]
    write_jsonl(tmp_path / "run" / "train" / "answers.jsonl", rows)
    save(tmp_path / "run" / "train" / "a.wav", tone(100.0, 0.1), 8000)
    listed = samples_html(ShownFiles(), tmp_path / "run")
    assert "&lt;i&gt;1200" in listed and "What?" in listed
    places = [
        listed.index(text)
        for text in (
            "answers by prompt and step",
            "step 1,200",
            "step 0<",
            "sounds by prompt and step",
            "step 1,000",
            "step 900",
            "tokenizer/examples/a.wav",
        )
    ]
    assert places == sorted(places)
    # one row for a prompt: its recording once, a sound of each step
    assert listed.count("<audio") == 4 and listed.count(">seven &lt;b&gt;rains") == 1 and "out" not in listed
    assert samples_html(ShownFiles(), tmp_path) == ""


def test_answers_play_no_file_outside_of_their_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "train").mkdir(parents=True)
    (tmp_path / "private").mkdir()
    for folder in (run, run / "train", tmp_path, tmp_path / "private"):
        save(folder / "a.wav", tone(100.0, 0.1), 8000)
    (run / "train" / "linked").symlink_to(tmp_path / "private")
    (run / "train" / "link.wav").symlink_to(tmp_path / "a.wav")
    (run / "train" / "examples").symlink_to(tmp_path / "private")
    inside = ("a.wav", "../a.wav")
    outside = ("../../a.wav", str(tmp_path / "a.wav"), "linked/a.wav", "link.wav", "linked/../a.wav")
    rows = [
        {"step": 0, "id": path, "messages": [{"role": "user", "content": [{"type": "audio", "path": path}]}]}
        for path in (*inside, *outside)
    ]
    write_jsonl(run / "train" / "answers.jsonl", rows)
    listed = samples_html(ShownFiles(), run)
    assert listed.count("<audio") == len(inside), listed


def test_the_state_of_a_run_is_told(tmp_path: Path) -> None:
    def write_stage(name: str, state: str, seconds: float, **columns: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        record = {"name": name, "kind": name, "state": state, "seconds": seconds, "cpu_seconds": 30.0}
        write_json(folder / "stage.json", {**record, **columns})
        return folder

    assert "has begun" in state_html(tmp_path) and state_html(None) == ""
    write_stage("annotate", "done", 500.0, settings={"steps": {}})
    train = write_stage("train", "running", 60.0, settings={"steps": 200})
    write_jsonl(train / "performance.jsonl", [{"step": 79, "seconds_per_step": 0.5}])
    write_jsonl(train / "alarms.jsonl", [{"step": 40, "kind": "loss spike", "text": "<3 deviations"}])
    shown = state_html(tmp_path)
    assert "Running: train, about 60 s left. 1 alarm." in shown and "80 of 200" in shown
    assert "alarm at step 41, loss spike: &lt;3 deviations" in shown
    assert [status.name for status in stage_statuses(tmp_path)] == ["annotate", "train"]
    (late,) = [
        status for status in stage_statuses(tmp_path, time.time() + 60) if status.state == "interrupted"
    ]
    assert late.name == "train" and late.remaining_s is None
    write_stage("train", "running", 60.0, settings={"steps": None, "minutes": 2})
    assert "about 60 s left" in state_html(tmp_path)
    write_stage("train", "running", 60.0, settings={"cpu_minutes": 1})
    assert "about 60 s left" in state_html(tmp_path)
    write_stage("train", "failed", 60.0, error="a <b> is missing")
    assert "Failed in train: a &lt;b&gt; is missing" in state_html(tmp_path)
    write_stage("train", "done", 90.0)
    assert "All 2 stages that have begun are done. 1 alarm." in state_html(tmp_path)
    mark = run_mark(tmp_path)
    (tmp_path / "train" / "stage.json").write_text("{")
    assert len(stage_statuses(tmp_path)) == 1 and mark != run_mark(tmp_path)


def test_rows_show_what_they_know_and_are_sorted_and_searched_by_it(tmp_path: Path) -> None:
    refused = {"kind": "recognizers disagree", "reason": "0.5, the limit is 0.4"}
    rows = [
        {
            "id": id, "path": "a.wav", "start_s": 0.0, "end_s": 1.0, "text": text, "speaker": speaker,
            "heard": {"first": text, "second": "moose"}, "text_refused": refused if id == "b" else None,
            "duration_s": duration_s,
            "measured": {"quality": {"dnsmos": {"ovr": ovr}}, "signal": {"clipped": True, "level_dbfs": None}},
        }
        for id, text, speaker, duration_s, ovr in (
            ("a", "two cats", "theo", 3.0, 2.5), ("b", "one dog", "anna", 1.0, 3.5), ("c", "a bird", "", 2.0, None)
        )
    ]  # fmt: skip
    write_jsonl(tmp_path / "segments.jsonl", rows)
    listed = clip_html(ShownFiles(), rows[1])
    for text in ("one dog", "anna", "<dt>second</dt><dd>moose</dd>", "text refused, recognizers disagree",
                 "the limit is 0.4", "quality.dnsmos.ovr <b>3.5</b>", "duration_s <b>1</b>"):  # fmt: skip
        assert text in listed, text
    assert measures_of(rows[2]) == {"duration_s": 2.0}
    assert sort_columns(rows) == ["id", "text", "speaker", "duration_s", "quality.dnsmos.ovr"]

    def ids(**options: Any) -> list[str]:
        shown, _ = clips_html(ShownFiles(), tmp_path, ClipFilter(**options))
        return re.findall(r"<strong>(\w)</strong>", shown)

    assert ids(sort="duration_s") == ["b", "c", "a"] and ids(sort="duration_s", is_descending=True) == [
        "a",
        "c",
        "b",
    ]
    assert ids(sort="quality.dnsmos.ovr", is_descending=True) == ["b", "a", "c"]  # c has none
    assert ids(sort="speaker") == ["b", "a", "c"] and ids(is_descending=True) == ["c", "b", "a"]
    assert ids(words="moose dog") == ["b"] and ids(words="disagree") == ["b"] and ids(words="theo") == ["a"]
    assert sorted_rows(rows, "nothing") == rows


def test_refusals_tell_a_remedy_and_no_path_and_lose_nothing(served: Any, tmp_path: Path) -> None:
    editor, app = served
    client = browser(app)
    film = write_film(tmp_path / "film.mp4")
    project = upload(client, film).json()
    root = f"/studio/api/projects/{project['id']}"
    late = {"events": [{"sound": "bell", "start_s": 1.0, "end_s": 9.0}]}
    click = {"at_s": 1.0, "x": 42, "y": 48}
    edit = {"page": PAGE + "r", "version": 1, "kind": "add", "caption": "rain", "end_s": 1.0, "steps": 1}

    def post(path: str, body: Any) -> Any:
        return client.post(root + path, json=body, headers=CHANGES)

    def opened_from(content: bytes) -> Any:
        return client.post("/studio/api/projects", content=content, headers=CHANGES)

    def kept() -> Any:
        place = editor.store.folder / "projects"
        return client.get(root).json(), sorted(path for path in place.rglob("*") if path.name != "strip.jpg")

    before = kept()
    for asked, status, sentence in (
        (lambda: opened_from(film.read_bytes()[:900]), 415, "ffmpeg -i IN -c copy OUT.mp4"),
        (lambda: opened_from(b"RIFF\0\0\0\0WAVEbroken"), 415, "Copy or export it anew"),
        (lambda: client.put(f"{root}/thought", json={"record": late}, headers=CHANGES), 400, "Change its times"),
        (lambda: client.get(f"{root}/frame?at=9"), 400, "give an earlier time"),
        (lambda: post("/region", {"clicks": [{**click, "at_s": 9.0}]}), 400, "go to an earlier time"),
        (lambda: post("/region", {"clicks": [{**click, "x": 500}]}), 400, "click the object in it"),
        (lambda: post("/region", {"clicks": [{**click, "x": 100, "y": 90}]}), 400, "or drag a box"),
        (lambda: post("/edit", {**edit, "steps": 501}), 400, "1 to 500 steps, not 501: change Steps"),
        (lambda: post("/generate", {"page": PAGE + "r", "steps": 0}), 400, "change Steps"),
        (lambda: post("/edit", {**edit, "start_s": 2.0, "end_s": 9.0}), 400, "select a part of the waveform"),
        (lambda: post("/edit", {**edit, "kind": "extend", "end_s": 1.0}), 400, "Give an end after"),
        (lambda: post("/edit", {**edit, "caption": ""}), 400, "or click its object"),
    ):  # fmt: skip
        answer = asked()
        told = answer.json()["sentence"]
        assert answer.status_code == status and sentence in told, told
        assert str(tmp_path) not in told and str(editor.store.folder) not in told and "Errno" not in told
        assert kept() == before, told
    # a disk that damages the film later
    (editor.store.folder / "projects" / project["id"] / "source.mp4").write_bytes(b"\0\0\0\x18ftypmp42")
    told = [client.get(f"{root}/frame?at=1").json()["sentence"]]
    job = post("/generate", {"page": PAGE + "r", "caption": "rain", "steps": 1}).json()
    while job["state"] not in ("done", "failed"):
        time.sleep(0.02)
        job = client.get(f"/studio/api/jobs?page={PAGE}r").json()["jobs"][-1]
    told.append(job["sentence"])
    for sentence in told:
        assert "cannot be opened" in sentence and "get it anew" in sentence and "Errno" not in sentence
        assert str(editor.store.folder) not in sentence and "/" not in sentence
    assert kept() == before


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (VideoError("studio/p/source.mp4", "cannot be opened ([Errno 22] Invalid: 'studio/p/source.mp4')"),
         "the file: cannot be opened (Invalid: 'the file')"),
        (ValueError("Error opening '/srv/studio/p/1.wav': System error."), "Error opening 'the file': System error."),
        (ValueError("16/9 of http://127.0.0.1:7860/x and 3 / 4"), "16/9 of http://127.0.0.1:7860/x and 3 / 4"),
        (OSError(28, "No space left on device", "studio/p/2.wav"), "No space left on device: 'the file'"),
        (ConfigError("there is no model", "model", "train one"), "there is no model. train one."),
        (KeyError(), "KeyError"),
    ],
)  # fmt: skip
def test_an_error_is_told_without_paths(error: Exception, told: str) -> None:
    assert sentence_of(error) == told


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (1.0, "1 second"),
        (0.5, "0.5 seconds"),
        (119, "119 seconds"),
        (600, "10 minutes"),
        (600.6, "10.01 minutes"),
    ],
)
def test_lengths_are_told_in_seconds_below_two_minutes(seconds: float, told: str) -> None:
    assert told_length(seconds) == told
