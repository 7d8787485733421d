"""Versions of a project: sound, waveform, exports, deletion."""

# no `from __future__ import annotations`: FastAPI reads the types of the functions

import shutil
from typing import Any

from fastapi import APIRouter
from fastapi.responses import FileResponse, Response

from pipelines.studio.limits import StudioRefusal
from pipelines.studio.routes.answers import MadeFile, file_stem
from pipelines.studio.routes.dependencies import Editor, Project, Version
from pipelines.studio.waveforms import drawn_columns

router = APIRouter(prefix="/studio")
_EXPORTS = {".wav": "audio/wav", ".mp4": "video/mp4", ".mkv": "video/x-matroska", ".mov": "video/quicktime"}
_MOST_COLUMNS, _LATEST_S = 8000, 1e6


@router.get("/api/projects/{id}/versions/{number}/sound.wav")
def get_sound(project: Project, version: Version, editor: Editor) -> Response:
    """The sound of a version, to be played."""
    return FileResponse(editor.store.sound(project, version), media_type="audio/wav")


@router.get("/api/projects/{id}/versions/{number}/waveform")
def get_waveform(
    project: Project, version: Version, start: float, end: float, width: int, editor: Editor
) -> Response:
    """Lowest and highest samples of each column of a part of the time line, as 16-bit numbers."""
    if not (0 <= start < end <= _LATEST_S and 1 <= width <= _MOST_COLUMNS):
        raise StudioRefusal("The waveform has no such part.")
    columns = drawn_columns(
        editor.store.sound(project, version), editor.store.peaks(project, version), start, end, width
    )
    return Response(columns.astype("<i2").tobytes(), media_type="application/octet-stream")


@router.get("/api/projects/{id}/versions/{number}/export")
def get_export(project: Project, version: Version, editor: Editor, format: str = "wav") -> Response:
    """A version as a file to be saved."""
    ending = _export_ending(format)
    name = f"{file_stem(project)}-{version.id}{ending}"
    folder = editor.store.incoming()
    path = folder / f"export{ending}"
    write = editor.export_sound if ending == ".wav" else editor.export_video
    try:
        write(project, version, path)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return MadeFile(path, media_type=_EXPORTS[ending], filename=name)


@router.get("/api/projects/{id}/versions/{number}/lost")
def get_lost(project: Project, version: Version, editor: Editor, format: str = "wav") -> dict[str, Any]:
    """What an export does not take over from the opened file."""
    return {"lost": editor.lost_by_export(project, version, _export_ending(format))}


@router.delete("/api/projects/{id}/versions/{number}")
def delete_stored_version(project: Project, version: Version, editor: Editor) -> dict[str, Any]:
    """Delete a version that no other was made from."""
    editor.store.delete_version(project, version)
    return {}


@router.post("/api/projects/{id}/versions/{number}/restore")
def post_restore(number: int, project: Project, editor: Editor) -> dict[str, Any]:
    """Bring back the version that was deleted last."""
    editor.store.restore_version(project, number)
    return {}


# Private


def _export_ending(format: str) -> str:
    """
    Raises:
        StudioRefusal: nothing is exported as that.
    """
    if f".{format}" not in _EXPORTS:
        raise StudioRefusal(f"There is no export as {format!r}: choose wav, mp4, mkv or mov.")
    return f".{format}"
