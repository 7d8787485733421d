"""The hub of `loopback_hub`, which also takes pushes: repositories, large files, commits, and cut connections."""

from __future__ import annotations

import base64
import hashlib
import json
import socket
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.audiollm.hub_models.loopback_hub import HubHandler, LoopbackHub, is_large, use_hub

TOKEN = "hf_secretOfTheTest0123456789"


@dataclass
class PushHub(LoopbackHub):
    """A hub that takes pushes of whoever has the token."""

    blobs: dict[str, bytes] = field(default_factory=dict)
    """Large files by SHA-256."""
    cut_after: int | None = None
    """Bytes of a large file after which the connection is cut."""
    uploads: list[str] = field(default_factory=list)
    """SHA-256 of the large files that arrived."""

    def handler_class(self) -> type[HubHandler]:
        return PushHandler

    @property
    def writes(self) -> list[str]:
        """Requests that change something, or prepare it."""
        return [request for request in self.requests if request.startswith(("POST", "PUT"))]

    def files(self, name: str) -> dict[str, bytes]:
        """The files of the last commit."""
        return self.commits[name][-1]


class PushHandler(HubHandler):
    repositories: PushHub

    def do_POST(self) -> None:
        hub, path = self.repositories, urlsplit(self.path).path
        hub.requests.append(f"POST {path}")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if path == "/api/validate-yaml":
            return self._send_json({"errors": [], "warnings": []})
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            message = (
                f"Invalid credentials: {self.headers.get('Authorization')}"  # a hub that repeats the token
            )
            return self.send(401, json.dumps({"error": message}).encode(), {"X-Error-Message": message})
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path.endswith("/info/lfs/objects/batch"):
            return self._offer(json.loads(body))
        parts = path.strip("/").split("/")
        name, action = "/".join(parts[2:4]), parts[4]
        if action == "preupload":
            files = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if is_large(file["path"]) else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
            return self._send_json({"files": files})
        assert action == "commit"
        self._commit(name, [json.loads(line) for line in body.splitlines()])

    def do_PUT(self) -> None:
        hub = self.repositories
        hub.requests.append(f"PUT {self.path}")
        size = int(self.headers["Content-Length"])
        if hub.cut_after is not None and size > hub.cut_after:
            self.rfile.read(hub.cut_after)
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        content = self.rfile.read(size)
        digest = hashlib.sha256(content).hexdigest()
        assert self.path.endswith(f"/lfs/{digest}?X-Signature=secret")
        hub.blobs[digest] = content
        hub.uploads.append(digest)
        self.send(200, b"", {})

    def _create(self, settings: dict[str, Any]) -> None:
        hub, name = self.repositories, f"{settings['organization']}/{settings['name']}"
        assert name not in hub.commits
        hub.commits[name] = [{}]
        if settings.get("private") or settings.get("visibility") == "private":
            hub.private.add(name)
        self._send_json({"url": f"{hub.url}/{name}"})

    def _offer(self, settings: dict[str, Any]) -> None:
        hub = self.repositories
        objects = [
            {
                **entry,
                **(
                    {}
                    if entry["oid"] in hub.blobs
                    else {"actions": {"upload": {"href": f"{hub.url}/lfs/{entry['oid']}?X-Signature=secret"}}}
                ),
            }
            for entry in settings["objects"]
        ]
        self._send_json({"transfer": "basic", "objects": objects})

    def _commit(self, name: str, lines: list[dict[str, Any]]) -> None:
        hub = self.repositories
        files = dict(hub.files(name))
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = hub.blobs[value["oid"]]
            else:
                assert line["key"] == "deletedFile"
                del files[value["path"]]
        commit = hub.publish(name, files)
        self._send_json({"commitUrl": f"{hub.url}/{name}/commit/{commit}", "commitOid": commit})

    def _send_json(self, value: Any) -> None:
        self.send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})


def use_push_hub(hub: PushHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `use_hub`, with the token, without Xet (which the hub does not speak), and without pauses between tries."""
    import huggingface_hub.utils._http as http
    from huggingface_hub import constants, hf_api

    use_hub(hub, monkeypatch)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(hf_api.api, "endpoint", hub.url)
    monkeypatch.setenv("HF_TOKEN", TOKEN)

    class NoPauses:
        @staticmethod
        def sleep(seconds: float) -> None:
            pass

        def __getattr__(self, name: str) -> Any:
            import time

            return getattr(time, name)

    monkeypatch.setattr(http, "time", NoPauses())
