"""The pictures of a project, and objects that are followed in them."""

# no `from __future__ import annotations`: FastAPI reads the types of the functions

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse, Response
from PIL import Image

from audiollm.files.atomic import atomic_path
from audiollm.video.frames import frame_times, read_frames
from pipelines.studio.limits import StudioRefusal
from pipelines.studio.regions import PictureClick
from pipelines.studio.routes.answers import jpeg_bytes
from pipelines.studio.routes.bodies import RegionBody
from pipelines.studio.routes.dependencies import Editor, Project
from pipelines.studio.store import StoredProject

router = APIRouter(prefix="/studio")
_SOURCE_KINDS = {".mp4": "video/mp4", ".mkv": "video/webm"}
_THUMBNAILS, _THUMBNAIL_HEIGHT, _THUMBNAIL_WIDTH = 16, 64, 512
_FRAME_SIDE = 960


@router.get("/api/projects/{id}/source")
def get_source(project: Project, editor: Editor) -> Response:
    """The file as it was opened."""
    path = editor.store.source(project)
    return FileResponse(path, media_type=_SOURCE_KINDS.get(path.suffix, "application/octet-stream"))


@router.get("/api/projects/{id}/frame")
def get_frame(project: Project, at: float, editor: Editor) -> Response:
    """A picture of the film, for browsers that cannot play it."""
    _need_pictures(project)
    if not 0 <= at <= project.duration_s:
        raise StudioRefusal(
            f"There is no picture at {at:g} s: the video ends at {project.duration_s:.2f} s, give an earlier time."
        )
    picture = Image.fromarray(next(iter(read_frames(editor.store.source(project), [_shown_at(project, at)]))))
    picture.thumbnail((_FRAME_SIDE, _FRAME_SIDE))
    return Response(jpeg_bytes(picture), media_type="image/jpeg")


@router.get("/api/projects/{id}/strip")
def get_strip(project: Project, editor: Editor) -> Response:
    """Pictures beside each other for the time line."""
    _need_pictures(project)
    path = editor.store.place(project) / "strip.jpg"
    if not path.is_file():
        steps = frame_times(0.0, project.shown_s, _THUMBNAILS / project.shown_s)
        times = [_shown_at(project, time_s) for time_s in steps]
        times = [t for n, t in enumerate(times) if n == 0 or t > times[n - 1]]
        width = round(_THUMBNAIL_HEIGHT * project.width / project.height)
        width = min(max(1, width), _THUMBNAIL_WIDTH)
        sheet = Image.new("RGB", (width * _THUMBNAILS, _THUMBNAIL_HEIGHT))
        for number, time_s in enumerate(times):  # one by one: what lies between is not decoded
            picture = next(iter(read_frames(editor.store.source(project), [time_s])))
            small = Image.fromarray(picture).resize((width, _THUMBNAIL_HEIGHT))
            sheet.paste(small, (number * width, 0))
        with editor.store.writing(project), atomic_path(path) as temporary:
            temporary.write_bytes(jpeg_bytes(sheet))
    return FileResponse(path, media_type="image/jpeg")


@router.post("/api/projects/{id}/region")
def post_region(body: RegionBody, project: Project, editor: Editor, request: Request) -> dict[str, Any]:
    """The way of an object that was clicked."""
    _need_pictures(project)
    followed_s, following = editor.store.limits.followed_s, request.app.state.following
    clicks = [PictureClick(c.at_s, c.x, c.y, c.width, c.height) for c in body.clicks]
    late = [click.at_s for click in clicks if click.at_s > project.duration_s]
    if late:
        raise StudioRefusal(
            f"The click lies at {late[0]:g} s, and the video ends at {project.duration_s:.2f} s: go to an earlier "
            "time, then click the object there."
        )
    times = [click.at_s for click in clicks]
    apart_s = max(times) - min(times) if times else 0.0
    if apart_s > followed_s:
        raise StudioRefusal(
            f"The clicks lie {apart_s:.0f} seconds apart, and an object is followed for {followed_s:.0f} "
            "at most: forget the object, then click it here."
        )
    if not following.acquire(blocking=False):
        raise StudioRefusal("Other objects are being followed: click again in a moment.", 429)
    try:
        regions = editor.regions.follow(editor.store.source(project), project.shown_s, clicks)
    finally:
        following.release()
    return {"region": [box.model_dump() for box in regions]}


# Private


def _need_pictures(project: StoredProject) -> None:
    if not project.has_pictures:
        raise StudioRefusal("The project has no pictures: open a video.")


def _shown_at(project: StoredProject, at_s: float) -> float:
    """A time at which a picture is still shown."""
    last_s = project.shown_s - 1 / (project.frame_rate or 25.0)
    return max(0.0, min(at_s, last_s))
