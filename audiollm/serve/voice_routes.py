"""`/v1/audio/voices`: voices by name are listed, added with a recording and a stated consent, and removed."""

# no `from __future__ import annotations`: FastAPI reads the types

from typing import Annotated, Any

import torch
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import Field

from audiollm.audio import peak_dbfs
from audiollm.audio.samples import SILENCE_DBFS
from audiollm.serve.app_state import AppState
from audiollm.serve.bodies import Name, ServeBody
from audiollm.serve.errors import ApiError
from audiollm.serve.forms import form_description, read_form
from audiollm.serve.voices import DEFAULT_VOICE, Reference


class VoiceFields(ServeBody):
    """The fields of the form beside `audio_sample`."""

    name: Name
    consent: Annotated[str, Field(max_length=4096)] = ""
    text: Annotated[str, Field(max_length=4096)] | None = None
    """The words of the recording."""
    language: Annotated[str, Field(max_length=16)] | None = None


def add_voice_routes(router: APIRouter, state: AppState) -> None:
    """Add the routes."""

    @router.get("/v1/audio/voices")
    async def list_voices() -> dict[str, Any]:
        added = [voice.row() for voice in state.voices.voices()]
        speakers = [
            {"id": speaker, "name": speaker, "object": "audio.voice", "model": model.name}
            for model in state.models.values()
            for speaker in model.speakers
        ]
        default = {"id": DEFAULT_VOICE, "name": DEFAULT_VOICE, "object": "audio.voice"}
        return {"object": "list", "data": [default, *speakers, *added]}

    @router.post("/v1/audio/voices", openapi_extra=form_description(VoiceFields, ("audio_sample",)))
    async def add_voice(request: Request) -> JSONResponse:
        fields, files = await read_form(request, VoiceFields, ("audio_sample",))
        if any(fields.name in model.speakers for model in state.models.values()):
            raise ApiError(409, f"{fields.name}: a model has a speaker of this name: give another", "name")
        recording = await state.read_recording(files["audio_sample"], "audio_sample")
        if not torch.isfinite(recording.samples_CN).all() or peak_dbfs(recording.samples_CN) < SILENCE_DBFS:
            raise ApiError(400, "the recording is silent: give one of a voice", "audio_sample", "silent")
        reference = Reference.of(recording, fields.text, fields.language)
        return JSONResponse(state.voices.add(fields.name, reference, fields.consent).row())

    @router.delete("/v1/audio/voices/{name}")
    async def remove_voice(name: str) -> dict[str, Any]:
        state.voices.remove(name)
        return {"id": name, "object": "audio.voice", "deleted": True}
