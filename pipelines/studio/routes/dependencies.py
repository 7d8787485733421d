"""Who asks, from which window, and for which project and version: what the functions of the addresses depend on.

While a window is closed, its requests are held.
"""

# no `from __future__ import annotations`: FastAPI reads the types of the functions

import threading
import time
from collections.abc import Callable
from typing import Annotated

from fastapi import Depends, Request

from pipelines.studio.editor import SoundEditor
from pipelines.studio.gate import OWNER
from pipelines.studio.limits import StudioRefusal
from pipelines.studio.store import SoundVersion, StoredProject


class OpenWindows:
    """Windows of browsers that are open: the requests of one that is closed are held, after their present step, and go
    on when it comes back.

    An open window asks for its requests again and again. One that tells that it is left has a few seconds to come back:
    it may have been loaded again. One that falls silent has longer: a tunnel that fails for a while costs no work. How
    long a slow machine takes decides how much of the running request is done twice, and not whether one is lost.

    Args:
        clock: seconds.
    """

    def __init__(self, editor: SoundEditor, clock: Callable[[], float] = time.monotonic) -> None:
        self._editor, self._clock = editor, clock
        self._closing_s: dict[str, float] = {}
        """When a window counts as closed unless it asks again, on the clock."""
        self._timer: threading.Timer | None = None
        self._guard = threading.Lock()

    def ask(self, window: str) -> None:
        """The window is open: it asked for something."""
        self._expect(window, self._editor.store.limits.patience_s)
        self._editor.service.resume(window)

    def leave(self, window: str) -> None:
        """The window tells that it is closed or loaded again."""
        self._expect(window, self._editor.store.limits.reload_s)

    def _expect(self, window: str, seconds: float) -> None:
        with self._guard:
            self._closing_s[window] = self._clock() + seconds
            if self._timer is None:
                self._start_timer()

    def _start_timer(self) -> None:
        limits = self._editor.store.limits
        self._timer = threading.Timer(min(limits.patience_s, limits.reload_s) / 4, self._close_silent)
        self._timer.daemon = True
        self._timer.start()

    def _close_silent(self) -> None:
        with self._guard:
            now_s = self._clock()
            closed = [window for window, closing_s in self._closing_s.items() if closing_s <= now_s]
            for window in closed:
                del self._closing_s[window]
            self._timer = None
            if self._closing_s:
                self._start_timer()
        for window in closed:
            self._editor.service.hold(window)


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
