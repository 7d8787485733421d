"""Who asks, and for which project and version: what the functions of the addresses depend on."""

# no `from __future__ import annotations`: FastAPI reads the types of the functions

from typing import Annotated

from fastapi import Depends, Request

from pipelines.studio.editor import SoundEditor
from pipelines.studio.gate import OWNER
from pipelines.studio.limits import StudioRefusal
from pipelines.studio.routes.windows import OpenWindows
from pipelines.studio.store import SoundVersion, StoredProject


async def editor_of_app(request: Request) -> SoundEditor:
    """The editor of the app that was asked."""
    editor: SoundEditor = request.app.state.editor
    return editor


async def windows_of_app(request: Request) -> OpenWindows:
    """The open windows of the app that was asked."""
    windows: OpenWindows = request.app.state.windows
    return windows


async def owner_of_request(request: Request) -> str:
    """Whose browser asks.

    Raises:
        StudioRefusal: the gate has not seen its cookie.
    """
    owner: str | None = request.scope.get(OWNER)
    if owner is None:
        raise StudioRefusal("Open the studio's page first.", 401)
    return owner


Editor = Annotated[SoundEditor, Depends(editor_of_app)]
Windows = Annotated[OpenWindows, Depends(windows_of_app)]
Owner = Annotated[str, Depends(owner_of_request)]


def project_of_owner(id: str, owner: Owner, editor: Editor) -> StoredProject:
    """The project of an address; see `ProjectStore.project`."""
    return editor.store.project(owner, id)


Project = Annotated[StoredProject, Depends(project_of_owner)]


def version_of_project(number: int, project: Project, editor: Editor) -> SoundVersion:
    """The version of an address; see `ProjectStore.version`."""
    return editor.store.version(project, number)


Version = Annotated[SoundVersion, Depends(version_of_project)]
