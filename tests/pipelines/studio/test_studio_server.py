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
from audiollm.files.atomic import write_jsonl
from audiollm.flow.service import Job
from audiollm.video.decoders import VideoError
from audiollm.video.writing import write_video
from pipelines.studio import browsing
from pipelines.studio.browsing import (
    ClipFilter,
    ShownClip,
    ShownFiles,
    clip_html,
    clips_html,
    curves_html,
    drop_reasons,
    give_verdict,
    listed_clips,
    report_html,
    review_next,
    run_folder,
    run_mark,
    samples_html,
)
from pipelines.studio.editor import MakeRequest, sentence_of
from pipelines.studio.limits import StudioLimits, StudioRefusal, told_length
from tests.audiollm.flow.toy import tone
from tests.pipelines.studio.tiny_studio import (
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

from pipelines.studio.gate import COOKIE, OWNER, StudioGate, is_allowed  # noqa: E402
from pipelines.studio.routes import OpenWindows, add_refusals, add_routes  # noqa: E402
from pipelines.studio.server import studio_app  # noqa: E402
from pipelines.studio.shown_routes import add_shown_routes  # noqa: E402
from pipelines.studio.tabs import StudioFolders, studio_page  # noqa: E402

PAGE = "0123456789abcdef"
CHANGES = {"x-studio": "1"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The editor and the whole app with Gradio's page."""
    folder = tmp_path_factory.mktemp("studio")
    limits = StudioLimits(upload_mb=2, followed_s=1.5, patience_s=0.2)
    editor = made_editor(folder / "work", tiny_generator(folder / "model"), limits)
    app = studio_app(editor, folder / "runs", (folder / "data",))
    yield editor, app
    editor.service.close()


def browser(app: Any) -> Any:
    """A new browser that has opened the page."""
    client = testclient.TestClient(app, base_url="http://127.0.0.1:7860")
    assert client.get("/").status_code == 200
    return client


def upload(client: Any, path: Path) -> Any:
    return client.post(f"/studio/api/projects?name={path.name}", content=path.read_bytes(), headers=CHANGES)


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
    plan = client.post(
        f"{root}/plan", json={"page": PAGE, "version": 1, "instruction": "add a bell at 2 s"}, headers=CHANGES
    ).json()["plan"]
    asked = {
        "page": PAGE, "version": 1, "kind": plan["kind"], "caption": plan["caption"], "start_s": 2.0, "end_s": 2.5,
        "region": region, "steps": 2,
    }  # fmt: skip
    job = client.post(f"{root}/edit", json=asked, headers=CHANGES).json()
    while job["state"] not in ("done", "failed"):
        time.sleep(0.02)
        (job,) = client.get(f"/studio/api/jobs?page={PAGE}").json()["jobs"]
    assert job["result"] == {"version": 2} and job["steps"] == 2
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
    body = {"page": PAGE, "version": 1, "kind": "add", "caption": "rain", "steps": 1}
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


def test_a_window_that_outlives_the_server_takes_no_old_request_for_a_new_one(
    served: Any, tmp_path: Path
) -> None:
    editor, _ = served
    keys = []
    for _ in "ab":  # a server, and the one after it
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


def test_a_closed_window_stops_its_requests_and_no_others(served: Any, tmp_path: Path) -> None:
    editor, _ = served
    project = opened(editor, write_recording(tmp_path / "a.wav"))
    first = editor.store.version(project, 1)
    windows = OpenWindows(editor)
    windows.enter("a/1")
    windows.enter("a/1")
    closed = editor.edit(project, "a/1", first, "add", MakeRequest("rain", steps=500))
    other = editor.edit(project, "b/2", first, "add", MakeRequest("rain", steps=2))
    windows.leave("a/1")
    while closed.step < 2:
        time.sleep(0.005)
    windows.leave("a/1")
    windows.enter("a/1")
    time.sleep(0.5)
    assert not closed._stop.is_set()  # the window has come back
    windows.close("a/1")
    step = closed.step
    other.value()
    assert closed.state == "stopped" and closed.step <= step + 2 and other.state == "done"


def test_a_deleted_project_stops_its_requests_and_no_others(served: Any, tmp_path: Path) -> None:
    _, app = served
    client = browser(app)
    sound = write_recording(tmp_path / "a.wav")
    gone, kept = (f"/studio/api/projects/{upload(client, sound).json()['id']}" for _ in "ab")
    windows = ("0123456789-one", "0123456789-two")
    asked = {"version": 1, "kind": "add", "caption": "rain", "steps": 500}
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


def test_the_stream_of_events_ends_with_its_window(served: Any) -> None:
    """The server itself notices a closed connection, and stops the requests."""
    editor, _ = served
    app = FastAPI()
    add_routes(app, editor)

    def forever(job: Job) -> None:
        while True:
            time.sleep(0.005)
            job.check_stop()

    job = editor.service.submit(forever, f"{'0' * 64}/{PAGE}")
    told: list[bytes] = []

    async def connect() -> None:
        scope = {
            "type": "http", "http_version": "1.1", "method": "GET", "path": "/studio/api/events", "headers": [],
            "query_string": f"page={PAGE}".encode(), "root_path": "", "scheme": "http", OWNER: "0" * 64,
        }  # fmt: skip
        closed = asyncio.Event()

        async def receive() -> dict[str, Any]:
            await closed.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            if body := message.get("body"):
                told.append(body)
                closed.set()

        await app(scope, receive, send)

    asyncio.run(connect())
    assert b'"state": "running"' in told[0] or b'"state": "waiting"' in told[0]
    assert job.wait(5) and job.state == "stopped"


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

    monkeypatch.setattr(browsing, "listed_clips", slowly)
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
        function
        for function in page.fns.values()
        if any(event == "tick" for _, event in function.targets)
        and any(type(part).__name__ == "Dropdown" for part in function.outputs)
    ]
    (tmp_path / "runs" / "new").mkdir(parents=True)
    choice, hint, known = tick.fn(None, [])
    assert (choice["choices"], choice["value"], hint["visible"]) == (["new"], "new", False)
    (tmp_path / "runs" / "newer").mkdir()
    choice, _, known = tick.fn("new", known)
    assert sorted(choice["choices"]) == ["new", "newer"] == known and choice["value"] == "new"
    assert "choices" not in tick.fn("new", known)[0]


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
        listed.index(each)
        for each in (
            "answers of step 1,200",
            "answers of step 0",
            "sounds of step 1,000",
            "sounds of step 900",
            "tokenizer/examples/a.wav",
        )
    ]
    assert places == sorted(places)
    assert listed.count("<audio") == 5 and listed.count("seven &lt;b&gt;rains") == 4 and "out" not in listed
    assert samples_html(ShownFiles(), tmp_path) == ""


def test_refusals_tell_a_remedy_and_no_path_and_lose_nothing(served: Any, tmp_path: Path) -> None:
    editor, app = served
    client = browser(app)
    film = write_film(tmp_path / "film.mp4")
    project = upload(client, film).json()
    root = f"/studio/api/projects/{project['id']}"
    late = {"events": [{"sound": "bell", "start_s": 1.0, "end_s": 9.0}]}
    click = {"at_s": 1.0, "x": 42, "y": 48}
    edit = {"page": PAGE + "r", "version": 1, "kind": "add", "caption": "rain", "steps": 1}

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
        (lambda: post("/plan", {"page": PAGE, "version": 1, "instruction": "a nice day"}), 400, "fit no operation"),
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
