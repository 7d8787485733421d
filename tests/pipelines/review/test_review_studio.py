"""The same page behind the studio's gate, and the clips of the tab Data as people corrected them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipelines.review.corrections import read_corrections
from pipelines.review.table import ReviewTable
from pipelines.studio.browse.clips import listed_clips, review_link_html, review_prefix
from pipelines.studio.gate import StudioGate
from tests.pipelines.annotate.annotation_report_run import annotated
from tests.pipelines.review.annotation import write_annotation
from tests.pipelines.review.test_review_server import edit_of

testclient = pytest.importorskip("starlette.testclient", reason="the extra `studio` is not installed")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_annotation(tmp_path / "corpus")


def gated_app(folder: Path) -> Any:
    from fastapi import FastAPI
    from fastapi.responses import PlainTextResponse

    from pipelines.review.routes import add_review_routes

    app = FastAPI()
    app.add_api_route("/", lambda: PlainTextResponse("the studio's page"))
    add_review_routes(app, review_prefix(0), ReviewTable(folder))
    app.add_middleware(StudioGate)
    return app


def test_the_page_asks_for_the_studios_cookie_and_header(folder: Path) -> None:
    client = testclient.TestClient(gated_app(folder), base_url="http://127.0.0.1:7860")
    place = review_prefix(0)
    assert client.get(f"{place}/rows").status_code == 401
    client.get("/")
    assert "audiollm review" in client.get(f"{place}/").text
    first, *_ = client.get(f"{place}/rows").json()["rows"]
    edit = edit_of(first, text="nine ships", keep=True)
    assert client.post(f"{place}/corrections", json=edit).status_code == 403
    elsewhere = {"x-studio": "1", "origin": "http://evil.example"}
    assert client.post(f"{place}/corrections", json=edit, headers=elsewhere).status_code == 403
    assert not read_corrections(folder)
    assert (
        client.post(f"{place}/corrections", json=edit, headers={"x-studio": "1"}).json()["text"]
        == "nine ships"
    )
    assert len(read_corrections(folder)) == 1


def test_the_tab_shows_clips_as_corrected_and_links_to_the_page(folder: Path, tmp_path: Path) -> None:
    table = ReviewTable(folder)
    from pipelines.review.table import SegmentEdit, TableQuery

    dropped, kept, *_ = table.page(TableQuery())["rows"]
    assert (dropped["state"], kept["state"]) == ("dropped", "kept")
    before = {state: len(listed_clips(folder, state)) for state in ("kept", "dropped")}
    table.correct(SegmentEdit(**edit_of(dropped, keep=True, text="nine ships")))
    assert "nine ships" in [row["text"] for row in listed_clips(folder, "kept")]
    assert len(listed_clips(folder, "dropped")) == before["dropped"] - 1
    table.correct(SegmentEdit(**edit_of(kept, keep=False)))
    assert {row["dropped"]["kind"] for row in listed_clips(folder, "dropped")} == {
        "too quiet",
        "rejected by a person",
    }
    assert 'href="/studio/review/1/"' in review_link_html([tmp_path, folder], folder)
    assert review_link_html([tmp_path, folder], tmp_path) == ""


def test_rows_with_hostile_names_are_shown_as_text(tmp_path: Path) -> None:
    (tmp_path / "audio").mkdir()
    annotated(tmp_path / "annotated", tmp_path / "audio")
    client = testclient.TestClient(gated_app(tmp_path / "annotated"), base_url="http://127.0.0.1:7860")
    client.get("/")
    answer = client.get(f"{review_prefix(0)}/rows", params={"query": json.dumps({"limit": 200})})
    names = {row["file"] for row in answer.json()["rows"]}
    assert "bad\\udcff.wav" in names and '"><script>alert(1)</script>.wav' in names
    bad = next(row for row in answer.json()["rows"] if "udcff" in row["file"])
    refused = client.post(
        f"{review_prefix(0)}/corrections", json=edit_of(bad, keep=True), headers={"x-studio": "1"}
    )
    assert refused.status_code == 400 and "rename it" in refused.json()["sentence"]
