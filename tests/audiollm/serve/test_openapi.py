"""The schema that the server gives of itself: forms are in it, and what is drawn from it never fails the server."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from audiollm.serve.limits import ServeLimits
from tests.audiollm.serve.running import RunningServer, running_server, wait_for
from tests.audiollm.serve.test_clients import echo_model

SCHEMATHESIS = os.environ.get("SCHEMATHESIS") or shutil.which("schemathesis")


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    limits = ServeLimits(max_length=4096, answer_tokens=20, speech_s=3)
    with running_server(limits, more_models=[echo_model]) as running:
        yield running


def schema_of(server: RunningServer) -> dict[str, Any]:
    schema: dict[str, Any] = httpx.get(f"{server.address}/openapi.json").json()
    return schema


def test_forms_are_described(server: RunningServer) -> None:
    paths = schema_of(server)["paths"]
    for path, file_name, required in (
        ("/v1/audio/transcriptions", "file", {"file", "model"}),
        ("/v1/audio/translations", "file", {"file", "model"}),
        ("/v1/audio/voices", "audio_sample", {"audio_sample", "name"}),
    ):
        form = paths[path]["post"]["requestBody"]["content"]["multipart/form-data"]["schema"]
        assert form["properties"][file_name] == {"type": "string", "format": "binary"}
        assert set(form["required"]) == required and not form["additionalProperties"]
    formats = paths["/v1/audio/transcriptions"]["post"]["requestBody"]["content"]["multipart/form-data"][
        "schema"
    ]
    assert formats["properties"]["response_format"]["enum"] == ["json", "text", "verbose_json", "srt", "vtt"]


@pytest.mark.slow
def test_what_is_drawn_from_the_schema_never_fails_the_server(server: RunningServer, tmp_path: Path) -> None:
    if SCHEMATHESIS is None:
        pytest.skip("schemathesis is not installed: make -C benchmarks serve-check")
    schema = schema_of(server)
    name_models(schema)
    (tmp_path / "openapi.json").write_text(json.dumps(schema))
    command = [SCHEMATHESIS, "run", str(tmp_path / "openapi.json"), "--url", server.address]
    command += ["--max-examples", "100", "--checks", "not_a_server_error", "--request-timeout", "60"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stdout[-3000:]
    counts = server.state.server.requests
    assert sum(counts.values()) >= 1000 and not [key for key in counts if key[1] >= 500]
    wait_for(server.is_idle)


def name_models(schema: object) -> None:
    """Let each request name a served model, and little speech: others are refused before anything is done."""
    if isinstance(schema, dict):
        properties = schema.get("properties", {})
        if "model" in properties:
            properties["model"] = {"type": "string", "enum": ["toy", "echo"]}
        if "max_new_tokens" in properties:
            properties["max_new_tokens"] = {"type": "integer", "minimum": 1, "maximum": 30}
    for value in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        name_models(value)
