"""What the page is answered: projects, versions and requests as JSON, pictures, files to be saved."""

import io
import shutil
from pathlib import Path
from typing import Any

from fastapi.responses import FileResponse
from PIL import Image
from starlette.types import Receive, Scope, Send

from audiollm.audio import AudioError
from audiollm.data.records.thoughts import prose_of, record_json
from audiollm.errors import ConfigError, StageError
from audiollm.files.atomic import safe_name
from audiollm.flow.service import Job
from pipelines.studio.editor import SoundEditor, sentence_of
from pipelines.studio.limits import StudioRefusal
from pipelines.studio.store import ProjectStore, SoundVersion, StoredProject


def jpeg_bytes(picture: Image.Image) -> bytes:
    """A picture as JPEG."""
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=82)
    return buffer.getvalue()


def listed_project(project: StoredProject) -> dict[str, Any]:
    """A project in the list of all."""
    return {
        "id": project.id,
        "name": project.name,
        "duration_s": project.duration_s,
        "shown_s": project.shown_s,
        "has_pictures": project.has_pictures,
        "created": project.created,
    }


def project_detail(store: ProjectStore, project: StoredProject) -> dict[str, Any]:
    """An open project."""
    record = store.thought(project)
    return {
        **listed_project(project),
        "width": project.width,
        "height": project.height,
        "thought": record_json(record),
        "prose": prose_of(record),
        "versions": [version_json(version) for version in store.versions(project)],
    }


def version_json(version: SoundVersion) -> dict[str, Any]:
    """A version without what only the models read."""
    return version.model_dump(mode="json", exclude={"region", "cot"})


def job_json(job: Job, editor: SoundEditor) -> dict[str, Any]:
    """A request with its place, its progress and its end."""
    problem = job.problem
    return {
        "number": job.number,
        "key": editor.key(job),
        "title": job.title,
        "project": job.subject,
        "state": job.state,
        "place": editor.service.place(job),
        "step": job.step,
        "steps": job.steps,
        "result": job.result,
        "sentence": _failure(job, problem) if isinstance(problem, Exception) else "",
    }


def file_stem(project: StoredProject) -> str:
    """The beginning of the names of a project's exported files."""
    return safe_name(Path(project.name).stem or "sound")


class MadeFile(FileResponse):
    """A file to be saved, which was made for this answer in a folder of its own: both are deleted with it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:  # also where the asked range is none of the file's, or the browser has gone
            shutil.rmtree(Path(self.path).parent, ignore_errors=True)


# Private


def _failure(job: Job, problem: Exception) -> str:
    if isinstance(problem, (StudioRefusal, ConfigError, StageError, AudioError)):
        return sentence_of(problem)
    change = "this edit changed nothing" if job.result else "nothing was changed"
    return f"Something went wrong ({type(problem).__name__}: {sentence_of(problem)}): {change}, try again."
