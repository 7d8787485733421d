"""A hub of models on this machine, with the addresses that `huggingface_hub` asks for, and small models for it."""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
import torch

LICENCE = "apache-2.0"
_ERRORS = {
    "no repository": (404, {"X-Error-Code": "RepoNotFound"}),
    "gated": (403, {"X-Error-Code": "GatedRepo"}),
    "no login": (401, {"X-Error-Code": "RepoNotFound"}),
    "broken": (500, {}),
}


@dataclass
class LoopbackHub:
    """Repositories by name: a list of commits, each a folder's files. The last commit is `main`."""

    cache: Path
    commits: dict[str, list[dict[str, bytes]]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    private: set[str] = field(default_factory=set)
    requests: list[str] = field(default_factory=list)
    """Addresses that were asked for, `METHOD /path`."""
    url: str = ""

    def publish(self, name: str, files: Path | dict[str, bytes]) -> str:
        """Add a commit to a repository, and return its hash."""
        if isinstance(files, Path):
            files = {path.name: path.read_bytes() for path in files.iterdir() if path.is_file()}
        self.commits.setdefault(name, []).append(files)
        return self.commit_of(name, len(self.commits[name]) - 1)

    def commit_of(self, name: str, number: int) -> str:
        return hashlib.sha1(f"{name} {number}".encode(), usedforsecurity=False).hexdigest()

    def files_at(self, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        commits = {self.commit_of(name, number): files for number, files in enumerate(self.commits[name])}
        commit = [*commits][-1] if revision == "main" else revision
        return (commit, commits[commit]) if commit in commits else None

    @property
    def fetched(self) -> list[str]:
        """Names of the files that were sent."""
        return [
            request.rpartition("/")[2]
            for request in self.requests
            if request.startswith("GET /") and "/resolve/" in request
        ]

    def __enter__(self) -> LoopbackHub:
        hub = self

        class Handler(self.handler_class()):  # type: ignore[misc]
            repositories = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()
        return self

    def handler_class(self) -> type[HubHandler]:
        """The class that answers requests."""
        return HubHandler

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """From now on nobody answers."""
        self._server.shutdown()
        self._server.server_close()

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which another process asks this hub."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HUB_CACHE": str(self.cache),
            "NO_PROXY": "127.0.0.1",
            "HF_TOKEN": "",
        }


class HubHandler(BaseHTTPRequestHandler):
    repositories: LoopbackHub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def _answer(self) -> None:
        hub, address = self.repositories, urlsplit(self.path)
        hub.requests.append(f"{self.command} {address.path}")
        parts = [unquote(part) for part in address.path.strip("/").split("/")]
        parts = parts[1:] if parts[0] == "datasets" else parts
        is_api = parts[:2] in (["api", "models"], ["api", "datasets"])
        name, rest = "/".join(parts[2:4] if is_api else parts[:2]), parts[4:] if is_api else parts[2:]
        error = hub.errors.get(name) or (None if name in hub.commits else "no repository")
        if error is not None:
            status, headers = _ERRORS[error]
            return self.send(status, b"{}", headers)
        at_revision = hub.files_at(name, rest[1] if len(rest) > 1 else "main")
        if at_revision is None:
            return self.send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        commit, files = at_revision
        if is_api:
            tree, folder = rest[:1] == ["tree"], "/".join(rest[2:])
            if tree and folder:
                files = {file: content for file, content in files.items() if file.startswith(f"{folder}/")}
                if not files:
                    return self.send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
            info = _info(name, commit, files, parse_qs(address.query))
            content = _tree(files) if tree else {**info, "private": name in hub.private}
            return self.send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})
        content = files.get("/".join(rest[2:]))
        if content is None:
            return self.send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        self.send(200, content, {"ETag": f'"{_digest(content)}"', "X-Repo-Commit": commit})

    def send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _info(name: str, commit: str, files: dict[str, bytes], query: dict[str, list[str]]) -> dict[str, Any]:
    with_sizes = query.get("blobs", ["false"])[0].lower() in ("true", "1")
    siblings = [
        {"rfilename": file, **({"size": len(content), "blobId": _digest(content)} if with_sizes else {})}
        for file, content in files.items()
    ]
    about = {
        "tags": [f"license:{LICENCE}"],
        "cardData": {"license": LICENCE},
        "gated": False,
    }
    return {
        "id": name,
        "modelId": name,
        "sha": commit,
        "siblings": siblings,
        "downloads": 0,
        "likes": 0,
        **about,
    }


def _tree(files: dict[str, bytes]) -> list[dict[str, Any]]:
    return [
        {
            "type": "file",
            "path": file,
            "size": len(content),
            "oid": _digest(content),
            **large_file(file, content),
        }
        for file, content in files.items()
    ]


def is_large(file: str) -> bool:
    """Whether the hub keeps a file outside of git."""
    return file.endswith((".safetensors", ".wav", ".flac"))


def large_file(file: str, content: bytes) -> dict[str, Any]:
    """The entry of a large file in the description of its tree; empty for a small one."""
    oid = hashlib.sha256(content).hexdigest()
    return {"lfs": {"oid": oid, "size": len(content), "pointerSize": 134}} if is_large(file) else {}


def _digest(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def use_hub(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `huggingface_hub` of this process ask a hub, with an empty cache; it reads its variables when imported."""
    from huggingface_hub import constants

    from audiollm.hub_models import folders

    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hub.cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(folders, "_downloaded", {})
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def llama_folder(folder: Path, seed: int = 0) -> Path:
    """A small Llama with a vocabulary, as transformers saves it."""
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from audiollm.data.text.tokenizer import train_text_tokenizer

    torch.manual_seed(seed)
    tokenizer = train_text_tokenizer(["system user assistant what is it? which tone? high low"] * 3, 320)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder
