"""Composed scenes of tones, runs of the stage, and a server that answers as a test says."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from audiollm.audio.files import save
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import Recipe
from pipelines.audiocot.settings import AudioCotConfig
from pipelines.audiocot.stage import run_audiocot
from pipelines.scenes.settings import ComposeScenesConfig
from pipelines.scenes.stage import run_compose_scenes

RATE = 8_000
SCENE_S = 1.5
SCENES, HELD_OUT = 6, 2


def tone(seconds: float, hertz: float, level: float = 0.4) -> torch.Tensor:
    time = torch.arange(round(seconds * RATE)) / RATE
    return (level * torch.sin(2 * torch.pi * hertz * time) * torch.exp(-4 * time))[None]


def compose(folder: Path, scenes: int = SCENES) -> Path:
    """Scenes of five tones, one or two in each, over rain or nothing, two of them held out; returns their list."""
    for number, (label, take) in enumerate(
        itertools.product(["bell", "horn", "drum", "click", "gong"], "abc")
    ):
        save(made(folder / "sounds" / label / f"{take}.wav"), tone(0.3, 300 + 100 * number), RATE)
    noise = 0.1 * torch.randn(1, RATE, generator=torch.Generator().manual_seed(0))
    for take in "ab":
        save(made(folder / "behind/rain" / f"{take}.wav"), noise, RATE)
    config = ComposeScenesConfig.model_validate(
        {
            "events": [{"folder": folder / "sounds", "held_out": "a.*"}],
            "backdrops": [{"folder": folder / "behind", "held_out": "a.*"}],
            "scenes": scenes, "held_out_scenes": HELD_OUT, "max_events": 2,
            "duration_s": SCENE_S, "event_s": 0.3, "apart_s": 0.2,
            "sample_rate": RATE, "side": 32, "frame_rate": 8,
        }
    )  # fmt: skip
    run_compose_scenes(config, context(made(folder / "scenes" / "scenes.jsonl").parent))
    return folder / "scenes" / "scenes.jsonl"


def made(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def context(folder: Path) -> Context:
    folder.mkdir(parents=True, exist_ok=True)
    recipe = Recipe("test", folder, "tiny", 0, folder, (), {})
    return Context(folder, recipe, Console(quiet=True), {})


def think(out: Path, source: Path | list[Path], **settings: Any) -> dict[str, Any]:
    """Run the stage in this process; returns the funnel."""
    given = [str(source)] if isinstance(source, Path) else [str(path) for path in source]
    plain = {"preset": "everything", "workers": 1, "made": {"sample_rate": RATE, "channels": 1}}
    config = AudioCotConfig.model_validate({"input": given, **plain, **settings})
    return run_audiocot(config, context(out))


def rows(out: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / name).read_text(encoding="utf-8").splitlines()]


class ChatServer:
    """An endpoint whose replies a function makes of the request: a text, or a status."""

    def __init__(self, reply: Callable[[dict[str, Any]], str | int]) -> None:
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.requests.append(request)
                server.keys.append(self.headers.get("Authorization"))
                answer = reply(request)
                self.send_response(answer if isinstance(answer, int) else 200)
                self.end_headers()
                content = {"choices": [{"message": {"content": answer}}], "usage": {"total_tokens": 10}}
                if isinstance(answer, int):
                    content = {"error": f"no: {server.keys[-1]}"}  # a careless server says the key
                self.wfile.write(json.dumps(content).encode())

            def log_message(self, *arguments: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}/v1"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def step(self, **more: Any) -> dict[str, Any]:
        """Settings of a step that this server answers."""
        return {
            "by": "endpoint", "url": self.url, "endpoint_model": "m", "key_variable": "A_KEY", "attempts": 2,
            "pause_s": 0.0, "frame_rate": 2.0, "frame_side": 32, **more,
        }  # fmt: skip


def texts_of(request: dict[str, Any]) -> str:
    """All texts of a request."""
    found = []
    for message in request["messages"]:
        found += [part["text"] for part in message["content"] if part["type"] == "text"]
    return "\n".join(found)
