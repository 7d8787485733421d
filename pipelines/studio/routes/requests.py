"""Requests to the models: asked for, followed, stopped."""

# no `from __future__ import annotations`: FastAPI reads the types of the functions

from typing import Any

from fastapi import APIRouter

from pipelines.instructions import InstructionQuestion, read_instruction
from pipelines.studio.editor import SoundEditor, question_json
from pipelines.studio.limits import StudioRefusal
from pipelines.studio.routes.answers import job_json
from pipelines.studio.routes.bodies import EditBody, EditsBody, MakeBody, PageId, PlanBody, ThinkBody
from pipelines.studio.routes.dependencies import Editor, Owner, Project, Windows

router = APIRouter(prefix="/studio")
_MOST_JOBS = 50


@router.post("/api/projects/{id}/think")
def post_think(body: ThinkBody, project: Project, owner: Owner, editor: Editor) -> dict[str, Any]:
    """Write the chain of thought anew."""
    window = _build_window_key(owner, body.page)
    _check_queue(editor, window)
    return job_json(editor.think(project, window, body.region), editor)


@router.post("/api/projects/{id}/plan")
def post_plan(body: PlanBody, project: Project, owner: Owner, editor: Editor) -> dict[str, Any]:
    """Read an instruction: edits, a question, or a request to the model that writes."""
    window = _build_window_key(owner, body.page)
    version = editor.store.version(project, body.version)
    span = None if body.start_s is None or body.end_s is None else (body.start_s, body.end_s)
    try:
        plans = read_instruction(
            body.instruction, editor.store.thought(project), version.duration_s, span, body.has_object
        )
    except InstructionQuestion as question:
        if not (editor.writer_understands and question.is_open):
            return question_json(question)
        _check_queue(editor, window)
        job = editor.understand(project, window, version, body.instruction, span, body.has_object)
        return {"job": job_json(job, editor)}
    return {"edits": [vars(plan) for plan in plans]}


@router.post("/api/projects/{id}/generate")
def post_generate(body: MakeBody, project: Project, owner: Owner, editor: Editor) -> dict[str, Any]:
    """Make a sound."""
    window = _build_window_key(owner, body.page)
    _check_queue(editor, window)
    return job_json(editor.generate(project, window, body.to_request()), editor)


@router.post("/api/projects/{id}/edit")
def post_edit(body: EditBody, project: Project, owner: Owner, editor: Editor) -> dict[str, Any]:
    """Edit a version."""
    window = _build_window_key(owner, body.page)
    _check_queue(editor, window)
    version = editor.store.version(project, body.version)
    return job_json(editor.edit(project, window, version, body.kind, body.to_request()), editor)


@router.post("/api/projects/{id}/edits")
def post_edits(body: EditsBody, project: Project, owner: Owner, editor: Editor) -> dict[str, Any]:
    """Edit a version, and each result in turn."""
    window = _build_window_key(owner, body.page)
    _check_queue(editor, window)
    version = editor.store.version(project, body.version)
    return job_json(editor.edit_in_turn(project, window, version, body.requests()), editor)


@router.get("/api/jobs")
async def get_jobs(owner: Owner, page: PageId, editor: Editor, windows: Windows) -> dict[str, Any]:
    """The requests of a window, which asks again and again: ten windows of one browser share six connections, so
    that none may keep one open."""
    window = _build_window_key(owner, page)
    windows.ask(window)
    return {
        "run": editor.run,
        "jobs": [job_json(job, editor) for job in editor.service.jobs(window)][-_MOST_JOBS:],
    }


@router.post("/api/jobs/{number}/stop")
def post_stop(number: int, owner: Owner, page: PageId, editor: Editor) -> dict[str, Any]:
    """Stop a request of this window."""
    for job in editor.service.jobs(_build_window_key(owner, page)):
        if job.number == number:
            editor.service.stop_job(job)
            return job_json(job, editor)
    raise StudioRefusal("There is no such request.", 404)


@router.post("/api/close")
def post_close(owner: Owner, page: PageId, windows: Windows) -> dict[str, Any]:
    """The window is closed or loaded again."""
    windows.leave(_build_window_key(owner, page))
    return {}


# Private


def _build_window_key(owner: str, page: str) -> str:
    return f"{owner}/{page}"


def _check_queue(editor: SoundEditor, window: str) -> None:
    """
    Raises:
        StudioRefusal: the window has as many requests as are allowed.
    """
    max_waiting = editor.store.limits.waiting
    active = [job for job in editor.service.jobs(window) if job.state in ("waiting", "running")]
    if len(active) >= max_waiting:
        raise StudioRefusal(
            f"{max_waiting} of your requests wait already: let them finish, or stop some.", 429
        )
