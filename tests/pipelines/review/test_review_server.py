"""The addresses of the page: rows, sorting, filters, conflicts, who may ask; and a server that is killed."""

from __future__ import annotations

import io
import json
import shutil
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import soundfile
from PIL import Image
from typer.testing import CliRunner

from audiollm.errors import ConfigError
from pipelines.review.corrections import CORRECTIONS, read_corrections
from pipelines.review.table import ReviewTable
from tests.pipelines.review.annotation import ReviewServer, write_annotation

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_annotation(tmp_path / "corpus")


@pytest.fixture
def client(folder: Path) -> Iterator[Any]:
    from starlette.testclient import TestClient

    from pipelines.review.server import review_app

    with TestClient(review_app(ReviewTable(folder)), base_url="http://127.0.0.1:7870") as made:
        yield made


def ask_rows(client: Any, **query: Any) -> dict[str, Any]:
    answer = client.get("/rows", params={"query": json.dumps(query)})
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


def where(column: str, operation: str, value: str) -> dict[str, str]:
    return {"column": column, "operation": operation, "value": value}


def edit_of(row: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"operation": uuid.uuid4().hex, "key": row["key"], "revision": row["revision"], "fields": fields}


def test_rows_are_sorted_and_filtered_by_any_column(client: Any) -> None:
    everything = ask_rows(client, limit=200)
    assert everything["total"] == 16 and len(everything["rows"]) == 16
    facts = client.get("/facts").json()
    assert facts["rows"] == 16 and facts["judged"] == 0
    columns = [column["name"] for column in facts["columns"]]
    assert {
        "state",
        "text",
        "speaker",
        "heard.whisper",
        "signal.level_dbfs",
        "duration_s",
        "judgement",
    } <= set(columns)
    for column in columns:
        assert len(ask_rows(client, sort=column, limit=200)["rows"]) == 16
    levels = [
        row["measures"]["signal.level_dbfs"] for row in ask_rows(client, sort="signal.level_dbfs")["rows"]
    ]
    assert levels == sorted(levels)
    down = ask_rows(client, sort="text", is_descending=True)["rows"]
    assert [row["text"] for row in down if row["text"]] == sorted(
        (r["text"] for r in down if r["text"]), reverse=True
    )
    assert not down[-1]["text"]  # those without a text come last in either order
    assert ask_rows(client, filters=[where("state", "=", "dropped")])["total"] == 4
    assert ask_rows(client, filters=[where("refusal", "!=", "")])["total"] == 5
    assert ask_rows(client, filters=[where("heard.pocketsphinx", "contains", "DOG")])["total"] == 4
    assert ask_rows(client, filters=[where("signal.level_dbfs", ">=", "-22")])["total"] == 3
    both = [where("quality.snr_db", "<=", "1"), where("speaker", "=", "S1")]
    assert {row["speaker"] for row in ask_rows(client, filters=both)["rows"]} == {"S1"}
    assert ask_rows(client, words="too quiet r1")["total"] == 1
    refused = client.get(
        "/rows", params={"query": json.dumps({"filters": [where("duration_s", ">=", "long")]})}
    )
    assert refused.status_code == 400 and "'long' is no number" in refused.json()["sentence"]


def test_judging_the_rows_of_a_page_skips_none_of_the_next(client: Any) -> None:
    query = {"filters": [where("judgement", "=", "")], "limit": 5}
    seen: list[str] = []
    page = ask_rows(client, **query)
    while page["rows"]:
        for row in page["rows"]:
            seen.append(row["key"])
            assert client.post("/corrections", json=edit_of(row, keep=True)).status_code == 200
        page = ask_rows(client, **query, after=seen[-1])
    assert len(seen) == len(set(seen)) == 16
    back = ask_rows(client, before=seen[10], limit=5)
    assert [row["key"] for row in back["rows"]] == seen[5:10] and back["offset"] == 5


def test_a_correction_is_shown_to_all_and_conflicts_are_told(client: Any, folder: Path) -> None:
    first, *_ = ask_rows(client)["rows"]
    anna = edit_of(first, text="nine ships", speaker="anna", start_s=0.2, end_s=0.8, keep=True) | {
        "by": "Anna"
    }
    saved = client.post("/corrections", json=anna).json()
    assert (saved["text"], saved["state"], saved["judgement"], saved["revision"]) == (
        "nine ships",
        "kept",
        "accepted",
        1,
    )
    assert saved["machine"]["text"] == "seven ships sailed" and saved["duration_s"] == 0.6
    assert client.post("/corrections", json=anna).json() == saved  # its answer was lost
    conflict = client.post("/corrections", json=edit_of(first, text="ten ships"))
    assert conflict.status_code == 409
    assert conflict.json()["row"] == saved and "Anna corrected this segment" in conflict.json()["sentence"]
    assert len((folder / CORRECTIONS).read_text().splitlines()) == 1
    assert client.get(f"/rows/{first['key']}").json() == saved
    undone = client.post("/corrections", json=edit_of(saved)).json()
    assert undone | {"revision": 0, "by": ""} == first


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"start_s": 0.5}, "go together"), ({"start_s": 0.0, "end_s": 99.0}, "ends at 5.000 s"),
        ({"speaker": ""}, "speaker: is empty"), ({"texts": "a"}, "texts"), ({"text": 7}, "text"),
    ],
)  # fmt: skip
def test_wrong_corrections_are_refused_with_a_sentence(
    client: Any, folder: Path, fields: Any, sentence: str
) -> None:
    first, *_ = ask_rows(client)["rows"]
    answer = client.post("/corrections", json=edit_of(first, **fields))
    assert answer.status_code in (400, 422) and sentence in answer.json()["sentence"], answer.text
    assert not (folder / CORRECTIONS).exists()


def test_sound_and_spectrogram_of_a_span(client: Any, folder: Path) -> None:
    first, *_ = ask_rows(client)["rows"]
    sound = client.get(f"/sounds/{first['key']}.wav", params={"start_s": 0.0, "end_s": 1.5})
    samples, rate = soundfile.read(io.BytesIO(sound.content))
    assert (len(samples), rate) == (12_000, 8000) and abs(samples).max() > 0.01
    picture = client.get(f"/pictures/{first['key']}.png", params={"start_s": 0.0, "end_s": 1.5})
    assert Image.open(io.BytesIO(picture.content)).format == "PNG"
    too_long = client.get(f"/sounds/{first['key']}.wav", params={"start_s": 0.0, "end_s": 500.0})
    assert too_long.status_code == 400 and "120 s" in too_long.json()["sentence"]
    shutil.rmtree(folder.parent / "corpus-audio")
    gone = client.get(f"/sounds/{first['key']}.wav", params={"start_s": 0.0, "end_s": 1.5})
    assert gone.status_code == 404 and "r0.wav. Restore it" in gone.json()["sentence"]
    assert client.post("/corrections", json=edit_of(first, text="from memory")).status_code == 200


def test_an_annotation_that_runs_meanwhile_is_read_anew(client: Any, folder: Path) -> None:
    rows = ask_rows(client, limit=200)["rows"]
    assert client.post("/corrections", json=edit_of(rows[3], text="kept")).status_code == 200
    lines = (folder / "segments.jsonl").read_text().splitlines()
    (folder / "segments.jsonl").write_text("\n".join(lines[3:]) + "\n")
    assert ask_rows(client)["total"] == 13
    (lost,) = client.get("/facts").json()["lost"]
    assert lost == {"file": "r0.wav", "span": "3.10 to 3.90 s", "fields": {"text": "kept"}}
    gone = client.post("/corrections", json=edit_of(rows[3], text="again"))
    assert gone.status_code == 404 and "no longer in the annotation" in gone.json()["sentence"]


@pytest.mark.parametrize(
    "headers",
    [{"host": "evil.example"}, {"origin": "http://evil.example"}, {"host": "127.0.0.1.evil.example:7870"}],
)
def test_other_names_and_other_origins_are_refused(
    client: Any, folder: Path, headers: dict[str, str]
) -> None:
    first, *_ = ask_rows(client)["rows"]
    assert client.post("/corrections", json=edit_of(first, text="a"), headers=headers).status_code in (
        403,
        421,
    )
    assert client.get("/rows", headers=headers).status_code in (403, 421)
    assert not (folder / CORRECTIONS).exists()


@pytest.mark.parametrize(
    "address",
    ["/../segments.jsonl", "/%2e%2e/segments.jsonl", "/segments.jsonl",
     "/sounds/..%2fsegments.jsonl.wav?start_s=0&end_s=1",
     "/sounds/%2fetc%2fpasswd.wav?start_s=0&end_s=1", "/pictures/r0.wav.png?start_s=0&end_s=1", "/rows/..%2f..%2fx",
     "/corrections.jsonl", "/page/review.js"],
)  # fmt: skip
def test_no_address_holds_a_path(client: Any, address: str) -> None:
    assert client.get(address).status_code in (404, 405)


def test_the_page_loads_its_own_files_alone(client: Any) -> None:
    for address in ("/", "/review.js", "/review.css", "/queue.js"):
        answer = client.get(address)
        assert answer.status_code == 200
        assert answer.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
        assert "http://" not in answer.text and "https://" not in answer.text


def test_a_folder_that_is_no_annotation_is_refused_with_the_remedy(tmp_path: Path) -> None:
    for folder, problem in (
        (tmp_path / "none", "no such folder"),
        (tmp_path, "no annotation: segments.jsonl"),
    ):
        with pytest.raises(ConfigError, match=f"(?s){problem}.*output folder of `audiollm annotate`"):
            ReviewTable(folder)
    write_annotation(tmp_path / "run" / "annotate")
    with pytest.raises(ConfigError, match="did you mean .*run/annotate"):
        ReviewTable(tmp_path / "run")


def test_corrections_that_are_removed_from_the_disk_are_no_longer_shown(client: Any, folder: Path) -> None:
    first, *_ = ask_rows(client)["rows"]
    client.post("/corrections", json=edit_of(first, text="nine ships"))
    (folder / CORRECTIONS).unlink()
    assert client.get(f"/rows/{first['key']}").json() == first


def test_the_help_teaches() -> None:
    import typer

    from pipelines.review.command import review

    app = typer.Typer()
    app.command()(review)
    shown = " ".join(CliRunner().invoke(app, ["--help"]).output.split())
    for words in (
        "corrections.jsonl",
        "next, previous, accept, reject, play",
        "audiollm review corpus",
        "ssh -L",
    ):
        assert words in shown


def test_nothing_acknowledged_is_lost_or_doubled_when_the_server_is_killed(folder: Path) -> None:
    """Two writers send corrections on and on, each until it is acknowledged, while the server is killed."""
    server = ReviewServer(folder)
    acknowledged: dict[str, dict[str, Any]] = {}
    keys = [
        row["key"]
        for row in httpx.get(f"{server.url}/rows", params={"query": '{"limit": 200}'}).json()["rows"]
    ]
    ended = threading.Event()

    def write(own_keys: list[str]) -> None:
        client, revisions = httpx.Client(base_url=server.url, timeout=5), dict.fromkeys(own_keys, 0)
        while not ended.is_set():
            for key in own_keys:
                edit = edit_of({"key": key, "revision": revisions[key]}, text=f"text {revisions[key]}")
                while True:
                    try:
                        answer = client.post("/corrections", json=edit)
                    except httpx.TransportError:
                        if ended.wait(0.02):
                            return
                        continue
                    assert answer.status_code == 200, answer.text
                    acknowledged[edit["operation"]] = edit
                    revisions[key] += 1
                    break

    writers = [threading.Thread(target=write, args=(keys[place::2],)) for place in range(2)]
    for writer in writers:
        writer.start()
    for _ in range(2):  # before the kill and after it
        enough = len(acknowledged) + 40
        while len(acknowledged) < enough:
            ended.wait(0.01)
        if server.starts == 1:
            server.kill()
            server.start()
    ended.set()
    for writer in writers:
        writer.join()
    server.kill()
    lines = [json.loads(line) for line in (folder / CORRECTIONS).read_text().splitlines()]
    written = {line["operation"]: line["fields"] for line in lines}
    assert len(written) == len(lines) and len(acknowledged) >= 60
    assert {name: written.get(name) for name in acknowledged} == {
        n: e["fields"] for n, e in acknowledged.items()
    }
    assert len(lines) - len(acknowledged) <= 2  # of each writer at most the one that it was told nothing of
    assert len(read_corrections(folder)) == 16
