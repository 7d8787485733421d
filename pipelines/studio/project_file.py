"""Project files: a project in one ZIP, which another browser or machine can open again; nothing in it is trusted."""

from __future__ import annotations

import json
import re
import secrets
import shutil
import stat
import time
import zipfile
from pathlib import Path
from typing import Any

import soundfile
from pydantic import ValidationError

from audiollm.data.records.thoughts import ThoughtRecord, record_json
from audiollm.files.atomic import write_json
from pipelines.studio.intake import check_room, check_source, shown_name, source_ending
from pipelines.studio.limits import MB, StudioLimits, StudioRefusal
from pipelines.studio.store import ProjectStore, SoundVersion, StoredProject

_MEMBER = re.compile(
    r"project\.json|thought\.json|source\.(?:mp4|mkv|avi|sound)|versions/[1-9][0-9]{0,5}\.(?:wav|json)"
)
_MOST_JSON = 1_000_000
_MOST_MEMBERS = 5000


def write_project_file(store: ProjectStore, project: StoredProject, path: Path) -> None:
    """Write a project as a ZIP; sound and pictures are stored as they are."""
    folder = store.place(project)
    shown = {**project.model_dump(mode="json"), "owner": "0" * 64}  # whose it was, is nobody's business
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        archive.writestr("project.json", json.dumps(shown, ensure_ascii=False, indent=2))
        archive.writestr("thought.json", json.dumps(record_json(store.thought(project)), ensure_ascii=False))
        if project.source is not None:
            archive.write(folder / project.source, project.source)
        for version in store.versions(project):
            archive.write(store.sound(project, version), f"versions/{version.id}.wav")
            archive.writestr(f"versions/{version.id}.json", version.model_dump_json())


def open_project_file(store: ProjectStore, owner: str, upload: Path, limits: StudioLimits) -> StoredProject:
    """Make a project of a ZIP in a folder of `ProjectStore.incoming`.

    Raises:
        StudioRefusal: it is no project file, is damaged, or unpacks to more than is allowed.
    """
    folder = upload.parent
    try:
        if len(store.projects(owner)) >= limits.projects:
            raise StudioRefusal(f"There are {limits.projects} projects already: delete some.", 507)
        with zipfile.ZipFile(upload) as archive:
            _unpack(archive, folder, limits)
        upload.unlink()
        return store.adopt(folder, _checked(folder, owner, limits))
    except (
        zipfile.BadZipFile,
        zipfile.LargeZipFile,
        NotImplementedError,
        RuntimeError,
        EOFError,
        ValueError,
    ) as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise StudioRefusal(f"The project file cannot be read ({error}): export it anew.", 415) from None
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


# Private


def _unpack(archive: zipfile.ZipFile, folder: Path, limits: StudioLimits) -> None:
    members = archive.infolist()
    names = [member.filename for member in members]
    if len(members) > _MOST_MEMBERS or len(set(names)) != len(names):
        raise StudioRefusal("The project file holds too many files, or one twice: export it anew.", 415)
    for member in members:
        if not _MEMBER.fullmatch(member.filename) or stat.S_ISLNK(member.external_attr >> 16):
            raise StudioRefusal(
                "The project file holds something that is no part of a project: it was not opened.", 415
            )
    left = limits.upload_mb * MB
    check_room(folder, min(left, sum(member.file_size for member in members)), limits)
    (folder / "versions").mkdir()
    for member in members:
        most = min(left, _MOST_JSON) if member.filename.endswith(".json") else left
        size = 0
        with archive.open(member) as packed, (folder / member.filename).open("xb") as out:
            while block := packed.read(1 << 20):  # counted here: a header may lie about the size
                size += len(block)
                if size > most:
                    raise StudioRefusal(
                        f"The project file unpacks to more than {limits.upload_mb:g} MB: it was not opened.",
                        413,
                    )
                out.write(block)
        left -= size


def _checked(folder: Path, owner: str, limits: StudioLimits) -> StoredProject:
    """Check every file, and write the JSON files anew from what was understood."""
    try:
        given: dict[str, Any] = json.loads((folder / "project.json").read_text(encoding="utf-8"))
        old = StoredProject.model_validate(given)
        record = ThoughtRecord.model_validate_json((folder / "thought.json").read_text(encoding="utf-8"))
        versions = [
            SoundVersion.model_validate_json(path.read_text(encoding="utf-8"))
            for path in sorted((folder / "versions").glob("*.json"), key=lambda path: int(path.stem))
        ]
    except (OSError, ValueError, ValidationError):
        raise StudioRefusal(
            "The project file is damaged, or of another program: export it anew.", 415
        ) from None
    known = {version.id for version in versions}
    for version in versions:
        path = folder / "versions" / f"{version.id}.wav"
        if not path.with_suffix(".json").is_file():
            raise StudioRefusal("The versions of the project file have wrong numbers: export it anew.", 415)
        try:
            info = soundfile.info(path)
        except (soundfile.LibsndfileError, OSError):
            raise StudioRefusal(
                f"Version {version.id} of the project file has no sound: export it anew.", 415
            ) from None
        same = (info.format, info.samplerate, info.channels) == ("WAV", version.sample_rate, version.channels)
        if not same or abs(info.frames / info.samplerate - version.duration_s) > 0.01:
            raise StudioRefusal(f"Version {version.id} of the project file is damaged: export it anew.", 415)
        if version.duration_s > limits.duration_s + limits.made_s or (
            version.parent is not None and not (version.parent in known and version.parent < version.id)
        ):
            raise StudioRefusal(
                f"Version {version.id} of the project file cannot be used: export it anew.", 415
            )
    has_pictures, width, height, frame_rate = False, 0, 0, 0.0
    sources = list(folder.glob("source.*"))
    if len(sources) > 1 or [path.name for path in sources] != [old.source] * len(sources):
        raise StudioRefusal("The project file holds another source than it names: export it anew.", 415)
    if sources:
        if f"source{source_ending(sources[0])}" != sources[0].name:
            raise StudioRefusal(
                "The source in the project file is of another kind than its name: export it anew.", 415
            )
        facts = check_source(sources[0], limits)
        has_pictures, width, height, frame_rate = (
            facts.has_pictures,
            facts.width,
            facts.height,
            facts.frame_rate,
        )
    elif not versions:
        raise StudioRefusal("The project file is empty.", 415)
    project = StoredProject(
        id=secrets.token_hex(8),
        name=shown_name(old.name),
        owner=owner,
        created=time.time(),
        source=sources[0].name if sources else None,
        duration_s=min(old.duration_s, limits.duration_s),
        has_pictures=has_pictures,
        width=width,
        height=height,
        frame_rate=frame_rate,
    )
    write_json(folder / "project.json", project.model_dump(mode="json"))
    write_json(folder / "thought.json", record_json(record))
    return project
