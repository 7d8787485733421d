"""`/v1/models`, `/health` and `/metrics`: what is served, whether it answers, and how much it did."""

# no `from __future__ import annotations`: FastAPI reads the types

import json
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, PlainTextResponse

from audiollm.serve.app_state import AppState
from audiollm.serve.interpreters import ServedInterpreter
from audiollm.serve.model import ServerModel


def add_status_routes(router: APIRouter, state: AppState) -> None:
    """Add the routes."""

    @router.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        models: list[ServerModel | ServedInterpreter] = list(state.models.values())
        models += state.interpreters.values()
        return {"object": "list", "data": [model_row(model) for model in models]}

    @router.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        return model_row(state.interpreters.get(name) or state.model(name))

    @router.get("/health")
    async def health() -> JSONResponse:
        status = "draining" if state.server.is_draining else "ready"
        return JSONResponse({"status": status}, 503 if state.server.is_draining else 200)

    @router.get("/metrics")
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(metrics_text(state), media_type="text/plain; version=0.0.4")


def model_row(model: ServerModel | ServedInterpreter) -> dict[str, Any]:
    """Describe a model in OpenAI's form, with what it can do."""
    row = {"id": model.name, "object": "model", "created": model.created, "owned_by": "audiollm"}
    if isinstance(model, ServedInterpreter):
        return {**row, "speaks": False, "hears": False, "interprets": True, "voices": []}
    return {
        **row, "speaks": model.speaks, "hears": model.hears, "interprets": False, "voices": model.speakers,
    }  # fmt: skip


def metrics_text(state: AppState) -> str:
    """Figures in the text form of Prometheus."""
    lines = ["# TYPE audiollm_requests_total counter"]
    for (path, status), count in sorted(state.server.requests.items()):
        lines.append(f'audiollm_requests_total{{path="{path}",status="{status}"}} {count}')
    lines += [
        "# TYPE audiollm_jobs gauge", f"audiollm_jobs {state.service.num_jobs}",
        "# TYPE audiollm_open_streams gauge", f"audiollm_open_streams {state.open_streams}",
        "# TYPE audiollm_jobs_total counter",
    ]  # fmt: skip
    models = list(state.models.values())
    for model in models:
        for outcome in ("done", "failed", "cancelled"):
            label = f'model={json.dumps(model.name)},outcome="{outcome}"'
            lines.append(f"audiollm_jobs_total{{{label}}} {model.lane.counts[outcome]}")
    for name in ("steps", "frames"):
        lines.append(f"# TYPE audiollm_{name}_total counter")
        lines += [
            f'audiollm_{name}_total{{model="{model.name}"}} {model.lane.counts[name]}' for model in models
        ]
    return "\n".join([*lines, ""])
