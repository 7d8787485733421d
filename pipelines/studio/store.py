"""Projects on the disk: an opened file, its chain of thought, and versions of its sound that form a tree.

    FOLDER/projects/ID/project.json    name, owner, facts of the source
                       source.mp4      the file as it was opened
                       thought.json    the chain of thought as it is now
                       versions/7.wav, 7.npy, 7.json    sound, waveform to draw, facts

A version is there when its JSON is: that is written last, in one step, so that a server that is killed loses none.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import soundfile
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from audiollm.data.records.sample import Region
from audiollm.data.records.thoughts import ThoughtRecord, record_json
from audiollm.files.atomic import DamagedFile, read_json, sync, write_json
from pipelines.studio.intake import (
    SourceFacts,
    check_room,
    check_source,
    shown_name,
    source_ending,
    write_sound,
)
from pipelines.studio.limits import MB, StudioLimits, StudioRefusal
from pipelines.studio.waveforms import compare_tracks, measure_loudness, measure_peaks

_ID = re.compile(r"[0-9a-f]{16}")
_SOUND_FILES = (".wav", ".npy")
_DELETED = ".deleted"
"""Ending of the facts of a deleted version, which can be restored."""
_MOST_CHANGES = 500
MAX_CAPTION, MAX_COT = 2000, 20_000
"""Characters of a version's words that are kept; the model may have read more of them."""
Seconds = Annotated[float, Field(ge=0, le=1e6)]
VersionKind = Literal["original", "generate", "extend", "inpaint", "add", "remove", "extract", "mute"]


class _Stored(BaseModel):
    # JSON that the page reads has no NaN and no infinity
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class StoredProject(_Stored):
    """A project's own facts."""

    id: str = Field(pattern=r"^[0-9a-f]{16}$")
    name: str = Field(min_length=1, max_length=80)
    owner: str = Field(pattern=r"^[0-9a-f]{64}$")
    """SHA-256 of the token of its owner's browser."""
    created: float
    source: str | None = Field(default=None, pattern=r"^source\.(mp4|mkv|avi|sound)$")
    duration_s: Seconds
    pictures_s: Seconds = 0.0
    """Seconds after which no picture is shown any more: sound may last longer."""
    has_pictures: bool
    width: int = Field(default=0, ge=0)
    height: int = Field(default=0, ge=0)
    frame_rate: float = Field(default=0.0, ge=0)

    @property
    def shown_s(self) -> float:
        """The length of the film: that of its pictures, or of a recording's sound."""
        return self.pictures_s or self.duration_s


class SoundVersion(_Stored):
    """The facts of one version of the sound."""

    id: int = Field(ge=1)
    parent: int | None = Field(default=None, ge=1)
    """The version that it was edited from; None: it was opened, or made from nothing."""
    kind: VersionKind
    title: str = Field(max_length=200)
    created: float
    duration_s: float = Field(gt=0)
    sample_rate: int = Field(gt=0)
    channels: int = Field(gt=0)
    loudness: float | None = None
    """LUFS; None: silence."""
    caption: str = Field(default="", max_length=MAX_CAPTION)
    cot: str = Field(default="", max_length=MAX_COT)
    """The prose that the model read."""
    span: tuple[Seconds, Seconds] | None = None
    """Seconds that the edit was allowed to change."""
    changed: tuple[tuple[Seconds, Seconds], ...] = ()
    """Seconds in which samples differ from the parent's."""
    checked_samples: int | None = None
    """Samples outside of the span that were compared with the parent's; None: there was nothing to compare."""
    is_same_outside: bool | None = None
    seed: int = 0
    steps: int = 0
    region: tuple[Region, ...] = ()
    request: str = Field(default="", max_length=40)
    """The request that made it: a page that was cut off finds its result by it."""
    edit_number: int = Field(default=1, ge=1)
    """Its place among the edits of the request, from 1."""
    edit_count: int = Field(default=1, ge=1)
    """Edits of the request, each of which makes a version: without the last one the request was not finished."""


class ProjectStore:
    """All projects below a folder.

    Args:
        folder: where they are kept; it is made where it is missing, for its owner's eyes alone.
    """

    def __init__(self, folder: Path, limits: StudioLimits) -> None:
        self.folder, self.limits = folder, limits
        self._projects = folder / "projects"
        self._projects.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._locks: dict[str, threading.RLock] = {}
        self._guard = threading.Lock()
        self._clear_leftovers()

    def incoming(self) -> Path:
        """A new folder for a file that is coming in, which becomes a project or is deleted."""
        folder = self._projects / f".new-{secrets.token_hex(8)}"
        folder.mkdir(mode=0o700)
        return folder

    def create(self, owner: str, name: str, upload: Path) -> StoredProject:
        """Make a project from a file in a folder of `incoming`.

        Raises:
            StudioRefusal: the file cannot be used, or there are too many projects.
        """
        folder = upload.parent
        try:
            if len(self.projects(owner)) >= self.limits.projects:
                raise StudioRefusal(f"There are {self.limits.projects} projects already: delete some.", 507)
            ending = source_ending(upload)
            source = upload.rename(folder / f"source{ending}")
            facts = check_source(source, self.limits)
            (folder / "versions").mkdir()
            duration_s = facts.duration_s
            if facts.has_sound:
                num_bytes = max(facts.duration_s, 1) * facts.sample_rate * facts.channels * 4
                check_room(folder, num_bytes, self.limits)
                sound_s = write_sound(source, folder / "versions" / "1.wav", self.limits)
                duration_s = max(duration_s, sound_s) if facts.has_pictures else sound_s
                difference = facts.sound.difference(sound_s) if facts.sound else None
                title = "; ".join(filter(None, ("as it was opened", difference)))
                self._finish(folder, 1, None, "original", title, None, {})
            project = _project(owner, shown_name(name), source.name, facts, duration_s)
            write_json(folder / "project.json", project.model_dump(mode="json"))
            write_json(folder / "thought.json", record_json(ThoughtRecord()))
            return self.adopt(folder, project)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def adopt(self, folder: Path, project: StoredProject) -> StoredProject:
        """Give an incoming folder that holds a whole project its place."""
        sync(folder / "project.json")
        os.replace(folder, self._projects / project.id)
        sync(self._projects)
        return project

    def projects(self, owner: str) -> list[StoredProject]:
        """The projects of an owner, the newest first; damaged ones are left out."""
        projects = []
        for folder in self._projects.iterdir():
            if _ID.fullmatch(folder.name):
                with contextlib.suppress(StudioRefusal):
                    projects.append(self.project(owner, folder.name))
        return sorted(projects, key=lambda project: -project.created)

    def project(self, owner: str, id: str) -> StoredProject:
        """
        Raises:
            StudioRefusal: the owner has no such project: whether another has, is not told.
        """
        missing = StudioRefusal(
            "There is no such project here: it was deleted, or belongs to another browser. The recovery link that "
            "the studio prints when it starts gives projects to this one.",
            404,
        )
        if not _ID.fullmatch(id):
            raise missing
        project = self._read_project(id)
        if project is None or project.owner != owner:
            raise missing
        return project

    def projects_of_others(self, owner: str) -> list[StoredProject]:
        """The projects of all browsers but the owner's, the newest first."""
        folders = [folder for folder in self._projects.iterdir() if _ID.fullmatch(folder.name)]
        projects = [self._read_project(folder.name) for folder in folders]
        foreign = [project for project in projects if project is not None and project.owner != owner]
        return sorted(foreign, key=lambda project: -project.created)

    def give(self, project: StoredProject, owner: str) -> None:
        """Make a project another owner's."""
        with self.writing(project):
            owned = project.model_copy(update={"owner": owner})
            write_json(self.place(project) / "project.json", owned.model_dump(mode="json"))

    def _read_project(self, id: str) -> StoredProject | None:
        """A project by its folder's name; None: there is none, or it is damaged."""
        try:
            project = StoredProject.model_validate(read_json(self._projects / id / "project.json"))
        except (OSError, DamagedFile, ValidationError):
            return None
        return project if project.id == id else None

    def place(self, project: StoredProject) -> Path:
        """The folder of a project."""
        return self._projects / project.id

    def source(self, project: StoredProject) -> Path:
        """The file as it was opened.

        Raises:
            StudioRefusal: there is none.
        """
        if project.source is None:
            raise StudioRefusal("The project has no source file.", 404)
        return self.place(project) / project.source

    def delete(self, project: StoredProject) -> None:
        """Delete a project with everything in it."""
        with self.writing(project):
            doomed = self._projects / f".new-{secrets.token_hex(8)}"
            os.replace(self.place(project), doomed)
            shutil.rmtree(doomed, ignore_errors=True)

    @contextlib.contextmanager
    def writing(self, project: StoredProject) -> Iterator[None]:
        """One writer per project.

        Raises:
            StudioRefusal: it was deleted.
        """
        with self._guard:
            lock = self._locks.setdefault(project.id, threading.RLock())
        with lock:
            self.check_there(project)
            yield

    def check_there(self, project: StoredProject) -> None:
        """
        Raises:
            StudioRefusal: it was deleted.
        """
        if not (self.place(project) / "project.json").is_file():
            raise StudioRefusal("The project was deleted meanwhile: nothing was kept.", 404)

    # the chain of thought

    def thought(self, project: StoredProject) -> ThoughtRecord:
        """The chain of thought as it is now; an empty one where the file is damaged."""
        try:
            return ThoughtRecord.model_validate_json(
                (self.place(project) / "thought.json").read_text(encoding="utf-8")
            )
        except (OSError, ValueError):
            return ThoughtRecord()

    def keep_thought(
        self, project: StoredProject, record: ThoughtRecord, previous: ThoughtRecord | None = None
    ) -> None:
        """Store a chain of thought.

        Args:
            previous: the one that it was to replace; None: it replaces any.

        Raises:
            StudioRefusal: it was changed since.
        """
        with self.writing(project):
            if previous is not None and self.thought(project) not in (previous, record):
                raise StudioRefusal(
                    "The chain of thought was changed meanwhile, and stays as it is: open the project again to see it, "
                    "and repeat what you did.",
                    409,
                )
            write_json(self.place(project) / "thought.json", record_json(record))

    # versions

    def versions(self, project: StoredProject) -> list[SoundVersion]:
        """Finished versions, in the order of their numbers."""
        paths = (self.place(project) / "versions").glob("*.json")
        versions = [version for version in map(_read_version, paths) if version is not None]
        return sorted(versions, key=lambda version: version.id)

    def version(self, project: StoredProject, id: int) -> SoundVersion:
        """
        Raises:
            StudioRefusal: there is none with that number.
        """
        version = _read_version(self.place(project) / "versions" / f"{id}.json")
        if version is None:
            raise StudioRefusal(f"There is no version {id} in this project.", 404)
        return version

    def is_of_source(self, project: StoredProject, version: SoundVersion) -> bool:
        """Whether a version was edited from the sound that was opened, and not from one that was made."""
        versions = {stored.id: stored for stored in self.versions(project)}
        while version.parent is not None and version.parent in versions:
            version = versions[version.parent]
        return version.kind == "original" and project.source is not None

    def sound(self, project: StoredProject, version: SoundVersion) -> Path:
        """The WAV file of a version."""
        return self.place(project) / "versions" / f"{version.id}.wav"

    def peaks(self, project: StoredProject, version: SoundVersion) -> NDArray[np.int16]:
        """The waveform of a version `[B, 2]`, see `measure_peaks`; measured anew where its file is damaged."""
        path = self.place(project) / "versions" / f"{version.id}.npy"
        try:
            peaks: NDArray[np.int16] = np.load(path, mmap_mode="r", allow_pickle=False)
            if peaks.ndim == 2 and peaks.shape[1] == 2:
                return peaks
        except (OSError, ValueError):
            pass
        measured = measure_peaks(self.sound(project, version))
        with contextlib.suppress(OSError):  # a full disk: it is measured again next time
            _save_peaks(path, measured)
        return measured

    @contextlib.contextmanager
    def new_version(
        self, project: StoredProject, parent: SoundVersion | None = None
    ) -> Iterator[tuple[int, Path]]:
        """The number of a new version and the path that its sound is to be written to; see `finish`.

        Args:
            parent: the version that it is made from.

        Raises:
            StudioRefusal: the project has as many as are allowed, the disk is full, or project or parent were deleted.
        """
        with self.writing(project):
            # its number may be another version's by now
            if parent is not None and parent not in self.versions(project):
                raise StudioRefusal(f"Version {parent.id} was deleted meanwhile: nothing was kept.", 404)
            folder = self.place(project) / "versions"
            numbers = [int(path.stem) for path in folder.glob("*.*") if path.stem.isdecimal()]
            if len(self.versions(project)) >= self.limits.versions:
                raise StudioRefusal(
                    f"The project has {self.limits.versions} versions: delete some, or open it anew."
                )
            largest = max((path.stat().st_size for path in folder.glob("*.wav")), default=0)
            check_room(folder, largest + 10 * MB, self.limits)
            number = max(numbers, default=0) + 1
            path = folder / f"{number}.wav"
            try:
                yield number, path
            except BaseException:
                for ending in _SOUND_FILES:
                    path.with_suffix(ending).unlink(missing_ok=True)
                raise

    def finish(
        self,
        project: StoredProject,
        number: int,
        parent: SoundVersion | None,
        kind: VersionKind,
        title: str,
        span: tuple[int, int] | None,
        facts: dict[str, Any],
    ) -> SoundVersion:
        """Measure a sound that was written, compare it with its parent, and make it a version.

        Args:
            span: samples that were allowed to change; None: it is not compared.
            facts: other fields of `SoundVersion`.
        """
        return self._finish(self.place(project), number, parent, kind, title, span, facts)

    def delete_version(self, project: StoredProject, version: SoundVersion) -> None:
        """Delete a version that no other was made from. It can be restored until the next deletion, or the next start.

        Raises:
            StudioRefusal: others were.
        """
        with self.writing(project):
            if any(later.parent == version.id for later in self.versions(project)):
                raise StudioRefusal("Other versions were made from this one: delete those first.")
            folder = self.place(project) / "versions"
            for deleted in folder.glob(f"*{_DELETED}"):
                for ending in (_DELETED, *_SOUND_FILES):
                    deleted.with_suffix(ending).unlink(missing_ok=True)
            os.replace(folder / f"{version.id}.json", folder / f"{version.id}{_DELETED}")

    def restore_version(self, project: StoredProject, id: int) -> None:
        """Bring back the version that was deleted last.

        Raises:
            StudioRefusal: it was another, or the studio was started anew since.
        """
        with self.writing(project):
            path = self.place(project) / "versions" / f"{id}{_DELETED}"
            if not path.is_file():
                raise StudioRefusal(f"Version {id} is gone: only the last deletion can be taken back.", 404)
            os.replace(path, path.with_suffix(".json"))

    def _finish(
        self,
        folder: Path,
        number: int,
        parent: SoundVersion | None,
        kind: VersionKind,
        title: str,
        span: tuple[int, int] | None,
        facts: dict[str, Any],
    ) -> SoundVersion:
        path = folder / "versions" / f"{number}.wav"
        sync(path)
        compared = path.with_name(f"{parent.id}.wav") if parent is not None and span is not None else None
        version = SoundVersion(
            id=number,
            parent=parent.id if parent else None,
            kind=kind,
            title=title[:200],
            created=time.time(),
            **{**facts, **_measure_version(path, compared, span)},
        )
        write_json(path.with_suffix(".json"), version.model_dump(mode="json"))
        return version

    def _clear_leftovers(self) -> None:
        """Delete what a server that was killed has left of files that came in, and of versions that it was making."""
        for leftover in self._projects.glob(".new-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        for folder in self._projects.iterdir():
            if not _ID.fullmatch(folder.name):
                continue
            sounds = [path for ending in _SOUND_FILES for path in (folder / "versions").glob(f"*{ending}")]
            parts = [path for path in sounds if not path.with_suffix(".json").exists()]
            deleted = (folder / "versions").glob(f"*{_DELETED}")
            for path in {*folder.glob(".*"), *(folder / "versions").glob(".*"), *parts, *deleted}:
                path.unlink(missing_ok=True)


def measured_anew(path: Path, version: SoundVersion) -> SoundVersion:
    """A version with nothing of its JSON file but what cannot be measured in its sound, and its parent's beside it.

    Raises:
        ValueError: its sound holds NaN, or is of another form than its parent's.
    """
    span, parent = None, None
    if version.span is not None and version.parent is not None:
        begin, end = (round(second * soundfile.info(path).samplerate) for second in version.span)
        span, parent = (begin, end), path.with_name(f"{version.parent}.wav")
    return SoundVersion.model_validate({**version.model_dump(), **_measure_version(path, parent, span)})


def owner_of(token: str) -> str:
    """The name that a browser's token is stored under: the token itself is nowhere on the disk."""
    return hashlib.sha256(token.encode()).hexdigest()


# Private


def _read_version(path: Path) -> SoundVersion | None:
    """A version by its JSON file; None: it is not there, is damaged, or has lost its sound."""
    try:
        version = SoundVersion.model_validate(read_json(path))
    except (OSError, DamagedFile, ValidationError):
        return None
    return version if path.stem == str(version.id) and path.with_suffix(".wav").is_file() else None


def _measure_version(path: Path, parent: Path | None, span: tuple[int, int] | None) -> dict[str, Any]:
    """The facts of a sound that are measured; its waveform to draw is written beside it."""
    info = soundfile.info(path)
    rate = info.samplerate
    _save_peaks(path.with_suffix(".npy"), measure_peaks(path))
    facts: dict[str, Any] = {
        "duration_s": info.frames / rate,
        "sample_rate": rate,
        "channels": info.channels,
        "loudness": measure_loudness(path),
        "span": None,
        "changed": (),
        "checked_samples": None,
        "is_same_outside": None,
    }
    if parent is None or span is None:
        return facts
    compared = compare_tracks(parent, path, span)
    return {
        **facts,
        "span": (span[0] / rate, span[1] / rate),
        "changed": compared.changed_s[:_MOST_CHANGES],
        "checked_samples": compared.samples_outside,
        "is_same_outside": compared.is_same_outside,
    }


def _save_peaks(path: Path, peaks_B2: NDArray[np.int16]) -> None:
    # two windows may ask for the waveform of one version at the same time
    temporary = path.with_name(f".{path.stem}.{secrets.token_hex(4)}.npy")
    try:
        np.save(temporary, peaks_B2, allow_pickle=False)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _project(
    owner: str, name: str, source: str | None, facts: SourceFacts, duration_s: float
) -> StoredProject:
    return StoredProject(
        id=secrets.token_hex(8),
        name=name,
        owner=owner,
        created=time.time(),
        source=source,
        duration_s=duration_s,
        pictures_s=facts.pictures_s,
        has_pictures=facts.has_pictures,
        width=facts.width,
        height=facts.height,
        frame_rate=facts.frame_rate,
    )
