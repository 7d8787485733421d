"""The page's own files, and projects: opened, listed, saved, deleted, their chain of thought."""

# no `from __future__ import annotations`: FastAPI reads the types of the functions

import shutil
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse, Response
from starlette.concurrency import run_in_threadpool

from audiollm.data.records.thoughts import prose_of, record_json
from audiollm.errors import ConfigError
from pipelines.studio.editor import check_thought, sentence_of
from pipelines.studio.intake import check_room
from pipelines.studio.limits import MB, StudioRefusal
from pipelines.studio.project_file import is_project_file, open_project_file, write_project_file
from pipelines.studio.routes.answers import MadeFile, file_stem, listed_project, project_detail
from pipelines.studio.routes.bodies import RecoverBody, ThoughtBody
from pipelines.studio.routes.dependencies import Editor, Owner, Project

router = APIRouter(prefix="/studio")
_STATIC = Path(__file__).parent.parent / "page"
_STATIC_KINDS = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


@router.get("/static/{name}")
def get_static(name: str) -> Response:
    """A file of the page."""
    path = _STATIC / name
    if path.suffix not in _STATIC_KINDS or path not in set(_STATIC.iterdir()):
        raise StudioRefusal("There is no such file.", 404)
    return FileResponse(path, media_type=_STATIC_KINDS[path.suffix], headers={"cache-control": "no-cache"})


@router.get("/api/state")
def get_state(owner: Owner, editor: Editor) -> dict[str, Any]:
    """What the page shows before a project is open."""
    sentence = ""
    try:
        _ = editor.service.generator
    except ConfigError as error:
        sentence = sentence_of(error)
    return {
        "model": sentence,
        "projects": [listed_project(project) for project in editor.store.projects(owner)],
        "upload_mb": editor.store.limits.upload_mb,
        "writer": editor.writer_understands,
    }


@router.post("/api/recover")
def post_recover(body: RecoverBody, owner: Owner, editor: Editor) -> dict[str, Any]:
    """Projects of other browsers, those that are named given to this one."""
    return {
        "projects": [listed_project(project) for project in editor.take_over(owner, body.key, body.projects)]
    }


@router.post("/api/projects")
async def post_project(request: Request, owner: Owner, editor: Editor, name: str = "") -> dict[str, Any]:
    """Open an uploaded recording, video or project file."""
    limits = editor.store.limits
    max_bytes = limits.upload_mb * MB
    length = request.headers.get("content-length", "")
    too_large = StudioRefusal(
        f"The file is larger than {limits.upload_mb:g} MB: cut or compress it, or start the studio with a larger "
        "--upload-mb.",
        413,
    )
    if length.isdigit() and int(length) > max_bytes:
        raise too_large
    await run_in_threadpool(check_room, editor.store.folder, int(length) if length.isdigit() else 0, limits)
    folder = await run_in_threadpool(editor.store.incoming)
    upload, size = folder / "upload", 0
    try:
        with upload.open("wb") as file:
            async for block in request.stream():
                size += len(block)
                if size > max_bytes:
                    raise too_large
                await run_in_threadpool(file.write, block)
        is_new = not await run_in_threadpool(is_project_file, upload)
        if is_new:
            project = await run_in_threadpool(editor.store.create, owner, name, upload)
        else:
            project = await run_in_threadpool(open_project_file, editor.store, owner, upload, limits)
    finally:
        if folder.exists():
            await run_in_threadpool(shutil.rmtree, folder, True)
    detail = await run_in_threadpool(project_detail, editor.store, project)
    # the chain of thought of a project file is a person's: it is not written anew
    thinks = is_new and bool(detail["versions"]) and project.duration_s <= limits.made_s
    return {**detail, "thinks": thinks}


@router.get("/api/projects/{id}")
def get_project(project: Project, editor: Editor) -> dict[str, Any]:
    """An open project."""
    return project_detail(editor.store, project)


@router.delete("/api/projects/{id}")
def delete_project_folder(project: Project, editor: Editor) -> dict[str, Any]:
    """Delete a project, and stop its requests."""
    editor.delete(project)
    return {}


@router.get("/api/projects/{id}/export")
def get_project_file(project: Project, editor: Editor) -> Response:
    """A project in one file, to be saved."""
    size = sum(path.stat().st_size for path in editor.store.place(project).rglob("*") if path.is_file())
    check_room(editor.store.folder, size, editor.store.limits)
    folder = editor.store.incoming()
    path = folder / "project.zip"
    try:
        write_project_file(editor.store, project, path)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return MadeFile(path, media_type="application/zip", filename=f"{file_stem(project)}.studio.zip")


@router.put("/api/projects/{id}/thought")
def put_thought(body: ThoughtBody, project: Project, editor: Editor) -> dict[str, Any]:
    """Keep a chain of thought as it was edited."""
    check_thought(body.record, project.duration_s)
    editor.store.keep_thought(project, body.record, body.known)
    return {"record": record_json(body.record), "prose": prose_of(body.record)}
