"""The addresses of what the tabs beside the editor show: clips, reports, talks."""

# no `from __future__ import annotations`: FastAPI reads the types of the functions inside `add_shown_routes`

from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import FileResponse, Response
from PIL import Image
from starlette.concurrency import run_in_threadpool

from audiollm.audio import encode_bytes, load
from audiollm.video.frames import read_frames
from pipelines.studio.browse.files import FILM_KINDS, ShownFiles, report_policy
from pipelines.studio.gate import OWNER
from pipelines.studio.limits import StudioRefusal
from pipelines.studio.live import LiveDesk
from pipelines.studio.routes.answers import jpeg_bytes

_PICTURE_SIDE = 240


def add_shown_routes(app: FastAPI, shown_files: ShownFiles, desk: LiveDesk | None) -> None:
    """Add the addresses to an app.

    Args:
        desk: None: no model of streams was given.
    """
    router = APIRouter(prefix="/studio")

    def owner_of_request(request: Request) -> str:
        owner: str | None = request.scope.get(OWNER)
        if owner is None:
            raise StudioRefusal("Open the studio's page first.", 401)
        return owner

    Owner = Annotated[str, Depends(owner_of_request)]

    def talking() -> LiveDesk:
        if desk is None:
            raise StudioRefusal("Start the studio with --live MODEL, a model trained by recipes/interpret.")
        return desk

    Desk = Annotated[LiveDesk, Depends(talking)]

    @router.get("/api/clips/{token}/sound.wav")
    def clip_sound(token: str, owner: Owner) -> Response:
        clip = shown_files.found_clip(token)
        waveform = load(clip.path, clip.start_s, clip.end_s)
        return Response(encode_bytes(waveform.samples_CN[:2], waveform.sample_rate), media_type="audio/wav")

    @router.get("/api/clips/{token}/picture")
    def clip_picture(token: str, owner: Owner) -> Response:
        clip = shown_files.found_clip(token)
        if clip.video is None:
            raise StudioRefusal("The clip has no pictures.", 404)
        middle_s = clip.start_s if clip.end_s is None else (clip.start_s + clip.end_s) / 2
        picture = Image.fromarray(next(iter(read_frames(clip.video, [middle_s]))))
        picture.thumbnail((_PICTURE_SIDE, _PICTURE_SIDE))
        return Response(jpeg_bytes(picture), media_type="image/jpeg")

    @router.get("/api/clips/{token}/film")
    def clip_film(token: str, owner: Owner) -> Response:
        clip = shown_files.found_clip(token)
        kind = None if clip.video is None else FILM_KINDS.get(clip.video.suffix.lower())
        if clip.video is None or kind is None or not clip.video.is_file():
            raise StudioRefusal("The clip has no film that a browser plays.", 404)
        return FileResponse(clip.video, media_type=kind)

    @router.get("/reports/{token}/{name:path}")
    def report_file(token: str, name: str, request: Request) -> Response:
        path, kind = shown_files.report_file(token, name)
        policy = {"content-security-policy": report_policy(str(request.base_url))}
        return FileResponse(Path(path), media_type=kind, headers=policy)

    @router.post("/api/live")
    def begin_talk(owner: Owner, live: Desk) -> dict[str, Any]:
        return {"talk": live.begin(owner), "sample_rate": live.sample_rate}

    @router.post("/api/live/{talk}/hear")
    async def hear(talk: str, request: Request, owner: Owner, live: Desk) -> dict[str, Any]:
        return {"said": await run_in_threadpool(live.hear, owner, talk, await request.body())}

    @router.post("/api/live/{talk}/finish")
    def finish(talk: str, owner: Owner, live: Desk) -> dict[str, Any]:
        return {"said": live.finish(owner, talk)}

    app.include_router(router)
