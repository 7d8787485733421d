"""The addresses of the studio: projects, versions, jobs. Each answers for the browser's own projects alone.

Shapes: W columns of pixels.
"""

# no `from __future__ import annotations`: FastAPI reads the types of the functions inside `add_routes`

import io
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response
from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from soundfile import SoundFileError
from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from audiollm.audio import AudioError
from audiollm.data.records.sample import Region
from audiollm.data.records.thoughts import ThoughtRecord, prose_of, record_json
from audiollm.errors import ConfigError, StageError
from audiollm.files.atomic import atomic_path, safe_name
from audiollm.flow.service import Job
from audiollm.video.frames import frame_times, read_frames
from pipelines.instructions import EditKind, InstructionQuestion, read_instruction
from pipelines.studio.editor import MakeRequest, SoundEditor, check_thought, question_json, sentence_of
from pipelines.studio.gate import OWNER
from pipelines.studio.intake import check_room
from pipelines.studio.limits import MB, StudioRefusal
from pipelines.studio.project_file import is_project_file, open_project_file, write_project_file
from pipelines.studio.regions import PictureClick
from pipelines.studio.store import SoundVersion, StoredProject
from pipelines.studio.waveforms import drawn_columns

_STATIC = Path(__file__).parent / "page"
_STATIC_KINDS = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_EXPORTS = {".wav": "audio/wav", ".mp4": "video/mp4", ".mkv": "video/x-matroska", ".mov": "video/quicktime"}
_SOURCE_KINDS = {".mp4": "video/mp4", ".mkv": "video/webm"}
_THUMBNAILS, _THUMBNAIL_HEIGHT, _THUMBNAIL_WIDTH = 16, 64, 512
_FRAME_SIDE = 960
_MOST_JOBS = 50
_MOST_COLUMNS, _LATEST_S = 8000, 1e6
PageId = Annotated[str, Field(pattern=r"^[A-Za-z0-9-]{8,64}$")]
"""The number that a window of a browser draws for itself, and keeps when it is loaded again: its requests are held
while it is closed."""


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ThoughtBody(_Body):
    record: ThoughtRecord
    known: ThoughtRecord | None = None
    """The one that it replaces, as the page knows it: another tab may have changed it since."""


class MakeBody(_Body):
    page: PageId
    caption: str = Field(default="", max_length=1000)
    region: list[Region] = Field(default_factory=list, max_length=5000)
    start_s: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    end_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    seed: int = Field(default=0, ge=0, le=2**31)
    steps: int = 24
    """Checked where the sampler's settings are made, in a sentence that says what to do."""

    def asked(self) -> MakeRequest:
        """The request without the window that made it."""
        return MakeRequest(self.caption, tuple(self.region), self.start_s, self.end_s, self.seed, self.steps)


class EditBody(MakeBody):
    version: int
    kind: EditKind


class PlannedEdit(_Body):
    """An edit as words were read."""

    kind: EditKind
    caption: str = Field(default="", max_length=1000)
    start_s: float = Field(ge=0, allow_inf_nan=False)
    end_s: float = Field(gt=0, allow_inf_nan=False)


class EditsBody(_Body):
    """Edits in turn, each of the result of the one before it."""

    page: PageId
    version: int
    edits: list[PlannedEdit] = Field(min_length=1, max_length=32)
    region: list[Region] = Field(default_factory=list, max_length=5000)
    """The object in the pictures, for the edits without a caption."""
    seed: int = Field(default=0, ge=0, le=2**31)
    steps: int = 24

    def requests(self) -> list[tuple[EditKind, MakeRequest]]:
        """The operations and what is asked of each."""
        return [
            (edit.kind, MakeRequest(edit.caption, () if edit.caption else tuple(self.region), edit.start_s, edit.end_s,
                                    self.seed, self.steps))
            for edit in self.edits
        ]  # fmt: skip


class PlanBody(_Body):
    page: PageId
    version: int
    instruction: str = Field(max_length=1000)
    start_s: float | None = None
    end_s: float | None = None
    has_object: bool = False


class ClickBody(_Body):
    at_s: float = Field(ge=0, allow_inf_nan=False)
    x: float = Field(ge=0, allow_inf_nan=False)
    y: float = Field(ge=0, allow_inf_nan=False)
    width: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    height: float = Field(default=0.0, ge=0, allow_inf_nan=False)


class RegionBody(_Body):
    clicks: list[ClickBody] = Field(max_length=50)


class RecoverBody(_Body):
    key: str = Field(max_length=100)
    projects: list[str] = Field(default_factory=list, max_length=100_000)
    """Those that are to be this browser's; none: they are listed."""


class ThinkBody(_Body):
    page: PageId
    region: list[Region] = Field(default_factory=list, max_length=5000)


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


def add_routes(app: FastAPI, editor: SoundEditor) -> None:
    """Add the addresses below /studio to an app."""
    store, limits, service = editor.store, editor.store.limits, editor.service
    windows = OpenWindows(editor)
    following = threading.Semaphore(
        limits.waiting
    )  # one is followed at a time: more would take the server's threads
    router = APIRouter(prefix="/studio")

    def owner_of_request(request: Request) -> str:
        found: str | None = request.scope.get(OWNER)
        if found is None:
            raise StudioRefusal("Open the studio's page first.", 401)
        return found

    Owner = Annotated[str, Depends(owner_of_request)]

    def own_project(id: str, owner: Owner) -> StoredProject:
        return store.project(owner, id)

    def own_version(number: int, project: Annotated[StoredProject, Depends(own_project)]) -> SoundVersion:
        return store.version(project, number)

    Project = Annotated[StoredProject, Depends(own_project)]
    Version = Annotated[SoundVersion, Depends(own_version)]

    def window_of(owner: str, page: str) -> str:
        return f"{owner}/{page}"

    def check_queue(window: str) -> None:
        active = [job for job in service.jobs(window) if job.state in ("waiting", "running")]
        if len(active) >= limits.waiting:
            raise StudioRefusal(
                f"{limits.waiting} of your requests wait already: let them finish, or stop some.", 429
            )

    @router.get("/static/{name}")
    def static(name: str) -> Response:
        path = _STATIC / name
        if path.suffix not in _STATIC_KINDS or path not in set(_STATIC.iterdir()):
            raise StudioRefusal("There is no such file.", 404)
        return FileResponse(
            path, media_type=_STATIC_KINDS[path.suffix], headers={"cache-control": "no-cache"}
        )

    @router.get("/api/state")
    def state(owner: Owner) -> dict[str, Any]:
        sentence = ""
        try:
            _ = service.generator
        except ConfigError as error:
            sentence = sentence_of(error)
        return {
            "model": sentence,
            "projects": [_listed(project) for project in store.projects(owner)],
            "upload_mb": limits.upload_mb,
            "writer": editor.writer_understands,
        }

    # projects

    @router.post("/api/recover")
    def recover(body: RecoverBody, owner: Owner) -> dict[str, Any]:
        return {
            "projects": [_listed(project) for project in editor.take_over(owner, body.key, body.projects)]
        }

    @router.post("/api/projects")
    async def open_file(request: Request, owner: Owner, name: str = "") -> dict[str, Any]:
        most = limits.upload_mb * MB
        length = request.headers.get("content-length", "")
        too_large = StudioRefusal(
            f"The file is larger than {limits.upload_mb:g} MB: cut or compress it, or start the studio with a larger "
            "--upload-mb.",
            413,
        )
        if length.isdigit() and int(length) > most:
            raise too_large
        await run_in_threadpool(check_room, store.folder, int(length) if length.isdigit() else 0, limits)
        folder = await run_in_threadpool(store.incoming)
        upload, size = folder / "upload", 0
        try:
            with upload.open("wb") as file:
                async for block in request.stream():
                    size += len(block)
                    if size > most:
                        raise too_large
                    await run_in_threadpool(file.write, block)
            is_new = not await run_in_threadpool(is_project_file, upload)
            if is_new:
                project = await run_in_threadpool(store.create, owner, name, upload)
            else:
                project = await run_in_threadpool(open_project_file, store, owner, upload, limits)
        finally:
            if folder.exists():
                await run_in_threadpool(shutil.rmtree, folder, True)
        found = await run_in_threadpool(detail, project)
        # the chain of thought of a project file is a person's: it is not written anew
        thinks = is_new and bool(found["versions"]) and project.duration_s <= limits.made_s
        return {**found, "thinks": thinks}

    def detail(project: StoredProject) -> dict[str, Any]:
        record = store.thought(project)
        return {
            **_listed(project),
            "width": project.width,
            "height": project.height,
            "thought": record_json(record),
            "prose": prose_of(record),
            "versions": [_shown(version) for version in store.versions(project)],
        }

    @router.get("/api/projects/{id}")
    def project_detail(project: Project) -> dict[str, Any]:
        return detail(project)

    @router.delete("/api/projects/{id}")
    def delete_project(project: Project) -> dict[str, Any]:
        editor.delete(project)
        return {}

    @router.get("/api/projects/{id}/export")
    def export_project(project: Project) -> Response:
        size = sum(path.stat().st_size for path in store.place(project).rglob("*") if path.is_file())
        check_room(store.folder, size, limits)
        folder = store.incoming()
        path = folder / "project.zip"
        try:
            write_project_file(store, project, path)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return _MadeFile(path, media_type="application/zip", filename=f"{_file_stem(project)}.studio.zip")

    @router.put("/api/projects/{id}/thought")
    def keep_thought(body: ThoughtBody, project: Project) -> dict[str, Any]:
        check_thought(body.record, project.duration_s)
        store.keep_thought(project, body.record, body.known)
        return {"record": record_json(body.record), "prose": prose_of(body.record)}

    # pictures

    @router.get("/api/projects/{id}/source")
    def source(project: Project) -> Response:
        path = store.source(project)
        return FileResponse(path, media_type=_SOURCE_KINDS.get(path.suffix, "application/octet-stream"))

    @router.get("/api/projects/{id}/frame")
    def frame(project: Project, at: float) -> Response:
        _need_pictures(project)
        if not 0 <= at <= project.duration_s:
            raise StudioRefusal(
                f"There is no picture at {at:g} s: the video ends at {project.duration_s:.2f} s, give an earlier time."
            )
        picture = Image.fromarray(next(iter(read_frames(store.source(project), [_shown_at(project, at)]))))
        picture.thumbnail((_FRAME_SIDE, _FRAME_SIDE))
        return Response(jpeg_bytes(picture), media_type="image/jpeg")

    @router.get("/api/projects/{id}/strip")
    def strip(project: Project) -> Response:
        _need_pictures(project)
        path = store.place(project) / "strip.jpg"
        if not path.is_file():
            steps = frame_times(0.0, project.shown_s, _THUMBNAILS / project.shown_s)
            times = [_shown_at(project, time_s) for time_s in steps]
            times = [t for n, t in enumerate(times) if n == 0 or t > times[n - 1]]
            width = round(_THUMBNAIL_HEIGHT * project.width / project.height)
            width = min(max(1, width), _THUMBNAIL_WIDTH)
            sheet = Image.new("RGB", (width * _THUMBNAILS, _THUMBNAIL_HEIGHT))
            for number, time_s in enumerate(times):  # one by one: what lies between is not decoded
                picture = next(iter(read_frames(store.source(project), [time_s])))
                small = Image.fromarray(picture).resize((width, _THUMBNAIL_HEIGHT))
                sheet.paste(small, (number * width, 0))
            with store.writing(project), atomic_path(path) as temporary:
                temporary.write_bytes(jpeg_bytes(sheet))
        return FileResponse(path, media_type="image/jpeg")

    @router.post("/api/projects/{id}/region")
    def follow_region(body: RegionBody, project: Project) -> dict[str, Any]:
        _need_pictures(project)
        clicks = [PictureClick(c.at_s, c.x, c.y, c.width, c.height) for c in body.clicks]
        late = [click.at_s for click in clicks if click.at_s > project.duration_s]
        if late:
            raise StudioRefusal(
                f"The click lies at {late[0]:g} s, and the video ends at {project.duration_s:.2f} s: go to an earlier "
                "time, then click the object there."
            )
        times = [click.at_s for click in clicks]
        apart_s = max(times) - min(times) if times else 0.0
        if apart_s > limits.followed_s:
            raise StudioRefusal(
                f"The clicks lie {apart_s:.0f} seconds apart, and an object is followed for {limits.followed_s:.0f} "
                "at most: forget the object, then click it here."
            )
        if not following.acquire(blocking=False):
            raise StudioRefusal("Other objects are being followed: click again in a moment.", 429)
        try:
            found = editor.regions.follow(store.source(project), project.shown_s, clicks)
        finally:
            following.release()
        return {"region": [box.model_dump() for box in found]}

    # versions

    @router.get("/api/projects/{id}/versions/{number}/sound.wav")
    def sound(project: Project, version: Version) -> Response:
        return FileResponse(store.sound(project, version), media_type="audio/wav")

    @router.get("/api/projects/{id}/versions/{number}/waveform")
    def waveform(project: Project, version: Version, start: float, end: float, width: int) -> Response:
        if not (0 <= start < end <= _LATEST_S and 1 <= width <= _MOST_COLUMNS):
            raise StudioRefusal("The waveform has no such part.")
        columns = drawn_columns(
            store.sound(project, version), store.peaks(project, version), start, end, width
        )
        return Response(columns.astype("<i2").tobytes(), media_type="application/octet-stream")

    @router.get("/api/projects/{id}/versions/{number}/export")
    def export_version(project: Project, version: Version, format: str = "wav") -> Response:
        ending = _export_ending(format)
        name = f"{_file_stem(project)}-{version.id}{ending}"
        folder = store.incoming()
        path = folder / f"export{ending}"
        write = editor.export_sound if ending == ".wav" else editor.export_video
        try:
            write(project, version, path)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return _MadeFile(path, media_type=_EXPORTS[ending], filename=name)

    @router.get("/api/projects/{id}/versions/{number}/lost")
    def lost_by_export(project: Project, version: Version, format: str = "wav") -> dict[str, Any]:
        return {"lost": editor.lost_by_export(project, version, _export_ending(format))}

    @router.delete("/api/projects/{id}/versions/{number}")
    def delete_version(project: Project, version: Version) -> dict[str, Any]:
        store.delete_version(project, version)
        return {}

    @router.post("/api/projects/{id}/versions/{number}/restore")
    def restore_version(number: int, project: Project) -> dict[str, Any]:
        store.restore_version(project, number)
        return {}

    # requests to the models

    @router.post("/api/projects/{id}/think")
    def think(body: ThinkBody, project: Project, owner: Owner) -> dict[str, Any]:
        window = window_of(owner, body.page)
        check_queue(window)
        return _job(editor.think(project, window, body.region), editor)

    @router.post("/api/projects/{id}/plan")
    def plan(body: PlanBody, project: Project, owner: Owner) -> dict[str, Any]:
        window = window_of(owner, body.page)
        version = store.version(project, body.version)
        span = None if body.start_s is None or body.end_s is None else (body.start_s, body.end_s)
        try:
            plans = read_instruction(
                body.instruction, store.thought(project), version.duration_s, span, body.has_object
            )
        except InstructionQuestion as question:
            if not (editor.writer_understands and question.is_open):
                return question_json(question)
            check_queue(window)
            job = editor.understand(project, window, version, body.instruction, span, body.has_object)
            return {"job": _job(job, editor)}
        return {"edits": [vars(plan) for plan in plans]}

    @router.post("/api/projects/{id}/generate")
    def generate(body: MakeBody, project: Project, owner: Owner) -> dict[str, Any]:
        window = window_of(owner, body.page)
        check_queue(window)
        return _job(editor.generate(project, window, body.asked()), editor)

    @router.post("/api/projects/{id}/edit")
    def edit(body: EditBody, project: Project, owner: Owner) -> dict[str, Any]:
        window = window_of(owner, body.page)
        check_queue(window)
        version = store.version(project, body.version)
        return _job(editor.edit(project, window, version, body.kind, body.asked()), editor)

    @router.post("/api/projects/{id}/edits")
    def edit_in_turn(body: EditsBody, project: Project, owner: Owner) -> dict[str, Any]:
        window = window_of(owner, body.page)
        check_queue(window)
        version = store.version(project, body.version)
        return _job(editor.edit_in_turn(project, window, version, body.requests()), editor)

    @router.get("/api/jobs")
    async def jobs(owner: Owner, page: PageId) -> dict[str, Any]:
        """The requests of a window, which asks again and again: ten windows of one browser share six connections, so
        that none may keep one open."""
        window = window_of(owner, page)
        windows.ask(window)
        return {"run": editor.run, "jobs": [_job(job, editor) for job in service.jobs(window)][-_MOST_JOBS:]}

    @router.post("/api/jobs/{number}/stop")
    def stop_job(number: int, owner: Owner, page: PageId) -> dict[str, Any]:
        for job in service.jobs(window_of(owner, page)):
            if job.number == number:
                service.stop_job(job)
                return _job(job, editor)
        raise StudioRefusal("There is no such request.", 404)

    @router.post("/api/close")
    def close_window(owner: Owner, page: PageId) -> dict[str, Any]:
        windows.leave(window_of(owner, page))
        return {}

    app.include_router(router)
    add_refusals(app)


def add_refusals(app: FastAPI) -> None:
    """Answer everything that a person can mend with a sentence."""

    def refusal(request: Request, error: StudioRefusal) -> Response:
        return JSONResponse({"sentence": error.sentence}, error.status)

    def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        place = _place_in_words(first["loc"][1:])
        message = str(first["msg"]).removeprefix("Value error, ")
        return JSONResponse({"sentence": f"{place}: {message}." if place else f"{message}."}, 422)

    def bad_input(request: Request, error: Exception) -> Response:
        return JSONResponse({"sentence": sentence_of(error)}, 400)

    def full_disk(request: Request, error: OSError) -> Response:
        if isinstance(error, FileNotFoundError):
            return JSONResponse({"sentence": "It was deleted meanwhile: choose the project anew."}, 404)
        return JSONResponse(
            {"sentence": f"The disk refused it ({error.strerror}): make room, then try again."}, 507
        )

    app.add_exception_handler(StudioRefusal, refusal)
    app.add_exception_handler(RequestValidationError, invalid)
    for kind in (ConfigError, StageError, AudioError, ValidationError, ValueError, SoundFileError):
        app.add_exception_handler(kind, bad_input)
    app.add_exception_handler(OSError, full_disk)


def jpeg_bytes(picture: Image.Image) -> bytes:
    """A picture as JPEG."""
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=82)
    return buffer.getvalue()


# Private


def _listed(project: StoredProject) -> dict[str, Any]:
    return {
        "id": project.id,
        "name": project.name,
        "duration_s": project.duration_s,
        "shown_s": project.shown_s,
        "has_pictures": project.has_pictures,
        "created": project.created,
    }


def _shown(version: SoundVersion) -> dict[str, Any]:
    return version.model_dump(mode="json", exclude={"region", "cot"})


def _job(job: Job, editor: SoundEditor) -> dict[str, Any]:
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


def _failure(job: Job, problem: Exception) -> str:
    if isinstance(problem, (StudioRefusal, ConfigError, StageError, AudioError)):
        return sentence_of(problem)
    change = "this edit changed nothing" if job.result else "nothing was changed"
    return f"Something went wrong ({type(problem).__name__}: {sentence_of(problem)}): {change}, try again."


def _place_in_words(parts: Sequence[str | int]) -> str:
    """The place of a wrong value as a person sees it: rows of the table are counted from 1."""
    if tuple(parts[:2]) == ("record", "events") and len(parts) > 2:
        return " ".join([f"Row {int(parts[2]) + 1} of the chain of thought", *map(str, parts[3:4])])
    if parts[:1] == ("record",):
        return " ".join(["The chain of thought", *map(str, parts[1:2])])
    return ".".join(map(str, parts))


def _export_ending(format: str) -> str:
    """
    Raises:
        StudioRefusal: nothing is exported as that.
    """
    if f".{format}" not in _EXPORTS:
        raise StudioRefusal(f"There is no export as {format!r}: choose wav, mp4, mkv or mov.")
    return f".{format}"


def _need_pictures(project: StoredProject) -> None:
    if not project.has_pictures:
        raise StudioRefusal("The project has no pictures: open a video.")


def _shown_at(project: StoredProject, at_s: float) -> float:
    """A time at which a picture is still shown."""
    last_s = project.shown_s - 1 / (project.frame_rate or 25.0)
    return max(0.0, min(at_s, last_s))


def _file_stem(project: StoredProject) -> str:
    return safe_name(Path(project.name).stem or "sound")


class _MadeFile(FileResponse):
    """A file to be saved, which was made for this answer in a folder of its own: both are deleted with it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:  # also where the asked range is none of the file's, or the browser has gone
            shutil.rmtree(Path(self.path).parent, ignore_errors=True)
