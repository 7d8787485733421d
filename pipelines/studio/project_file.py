"""Project files: a project in one ZIP, which another browser or machine can open again; nothing in it is trusted."""

from __future__ import annotations

import json
import re
import secrets
import shutil
import stat
import time
import zipfile
import zlib
from pathlib import Path
from typing import Any

import soundfile
from pydantic import ValidationError

from audiollm.audio.discovery import is_plain
from audiollm.data.records.thoughts import ThoughtRecord, record_json
from audiollm.files.atomic import write_json
from pipelines.studio.intake import (
    WAV_SUBTYPES,
    SourceFacts,
    check_room,
    check_sound,
    check_source,
    shown_name,
    source_ending,
)
from pipelines.studio.limits import MB, StudioLimits, StudioRefusal
from pipelines.studio.store import ProjectStore, SoundVersion, StoredProject, measured_anew

_MEMBER = re.compile(
    r"project\.json|thought\.json|source\.(?:mp4|mkv|avi|sound)|versions/[1-9][0-9]{0,5}\.(?:wav|json)"
)
_MOST_JSON = 1_000_000
_MOST_MEMBERS = 5000
_MOST_DIRECTORY = 1_000_000
"""Bytes of the list of members, which is read into memory at once."""
_PACKED = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


def write_project_file(store: ProjectStore, project: StoredProject, path: Path) -> None:
    """Write a project as a ZIP; sound and pictures are stored as they are."""
    folder = store.place(project)
    exported = {**project.model_dump(mode="json"), "owner": "0" * 64}  # whose it was, is nobody's business
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        archive.writestr("project.json", json.dumps(exported, ensure_ascii=False, indent=2))
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
        _check_directory(upload)
        with zipfile.ZipFile(upload) as archive:
            _unpack_project(archive, folder, limits)
        upload.unlink()
        return store.adopt(folder, _check_unpacked(folder, owner, limits))
    except (
        zipfile.BadZipFile,
        zipfile.LargeZipFile,
        NotImplementedError,
        RuntimeError,
        EOFError,
        zlib.error,
    ):
        shutil.rmtree(folder, ignore_errors=True)
        raise StudioRefusal(
            "The project file cannot be read: it is damaged or incomplete. Copy it again, or export it anew.",
            415,
        ) from None
    except ValueError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise StudioRefusal(f"The project file cannot be used ({error}): export it anew.", 415) from None
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def is_project_file(path: Path) -> bool:
    """Return whether a file begins as a ZIP does; a recording or video with a ZIP behind it is none."""
    with path.open("rb") as file:
        return file.read(4) in (b"PK\x03\x04", b"PK\x05\x06")


# Private


def _check_directory(upload: Path) -> None:
    """
    Raises:
        StudioRefusal: the list of members alone would fill the memory.
    """
    with upload.open("rb") as file:
        end = zipfile._EndRecData(file)  # type: ignore[attr-defined]  # what ZipFile itself goes by
    if end and end[zipfile._ECD_SIZE] > _MOST_DIRECTORY:  # type: ignore[attr-defined]
        raise StudioRefusal("The project file holds too many files: export it anew.", 415)


def _unpack_project(archive: zipfile.ZipFile, folder: Path, limits: StudioLimits) -> None:
    members = archive.infolist()
    names = [member.filename for member in members]
    if len(members) > _MOST_MEMBERS or len(set(names)) != len(names):
        raise StudioRefusal("The project file holds too many files, or one twice: export it anew.", 415)
    for member in members:
        is_link = stat.S_ISLNK(member.external_attr >> 16)
        if not _MEMBER.fullmatch(member.filename) or is_link or member.compress_type not in _PACKED:
            raise StudioRefusal(
                "The project file holds something that is no part of a project: it was not opened.", 415
            )
    remaining_bytes = limits.upload_mb * MB
    check_room(folder, min(remaining_bytes, sum(member.file_size for member in members)), limits)
    (folder / "versions").mkdir()
    for member in members:
        max_bytes = min(remaining_bytes, _MOST_JSON) if member.filename.endswith(".json") else remaining_bytes
        size = 0
        with archive.open(member) as packed, (folder / member.filename).open("xb") as out:
            while block := packed.read(1 << 20):  # counted here: a header may lie about the size
                size += len(block)
                if size > max_bytes:
                    raise StudioRefusal(
                        f"The project file unpacks to more than {limits.upload_mb:g} MB: it was not opened.",
                        413,
                    )
                out.write(block)
        remaining_bytes -= size


def _check_unpacked(folder: Path, owner: str, limits: StudioLimits) -> StoredProject:
    """Check every file, and write the JSON files anew from what was understood."""
    try:
        content: dict[str, Any] = json.loads((folder / "project.json").read_text(encoding="utf-8"))
        old = StoredProject.model_validate(content)
        record = ThoughtRecord.model_validate_json((folder / "thought.json").read_text(encoding="utf-8"))
        versions = [
            SoundVersion.model_validate_json(path.read_text(encoding="utf-8"))
            for path in sorted((folder / "versions").glob("*.json"), key=lambda path: int(path.stem))
        ]
    except (OSError, ValueError, ValidationError):
        raise StudioRefusal(
            "The project file is damaged, or of another program: export it anew.", 415
        ) from None
    _check_versions(folder, versions, limits)
    facts = _source_facts(folder, old, limits)
    if facts is None and not versions:
        raise StudioRefusal("The project file is empty.", 415)
    for version in versions:
        measured = measured_anew(folder / "versions" / f"{version.id}.wav", version)
        write_json(folder / "versions" / f"{version.id}.json", measured.model_dump(mode="json"))
    source_facts = facts or SourceFacts(0.0, False, False)
    project = StoredProject(
        id=secrets.token_hex(8),
        name=shown_name(old.name),
        owner=owner,
        created=time.time(),
        source=old.source if facts is not None else None,
        duration_s=_measure_project_s(facts, versions),
        pictures_s=source_facts.pictures_s,
        has_pictures=source_facts.has_pictures,
        width=source_facts.width,
        height=source_facts.height,
        frame_rate=source_facts.frame_rate,
    )
    write_json(folder / "project.json", project.model_dump(mode="json"))
    write_json(folder / "thought.json", record_json(record))
    return project


def _measure_project_s(facts: SourceFacts | None, versions: list[SoundVersion]) -> float:
    """The length of a project: that of its sound as it was opened, or of the film around it."""
    durations = [version.duration_s for version in versions if version.kind == "original"][:1]
    if facts is not None and (facts.has_pictures or not durations):
        durations.append(facts.duration_s)
    return max(durations or [version.duration_s for version in versions])


def _check_versions(folder: Path, versions: list[SoundVersion], limits: StudioLimits) -> None:
    """
    Raises:
        StudioRefusal: a version without its sound, a sound without its version, or one that edits cannot work with.
    """
    names = [f"{version.id}.{ending}" for version in versions for ending in ("json", "wav")]
    if sorted(names) != sorted(path.name for path in (folder / "versions").iterdir()):
        raise StudioRefusal(
            "The versions of the project file have wrong numbers, or lack their sound: export it anew.", 415
        )
    if len(versions) > limits.versions:
        raise StudioRefusal(
            f"The project file has {len(versions)} versions, and {limits.versions} are the most: delete some, then "
            "export it anew.",
            413,
        )
    ids = {version.id for version in versions}
    for version in versions:
        damaged = StudioRefusal(f"Version {version.id} of the project file is damaged: export it anew.", 415)
        path = folder / "versions" / f"{version.id}.wav"
        try:
            # any other format would be read by less tested code, in this process
            info = soundfile.info(path) if is_plain(str(path)) else None
        except (soundfile.LibsndfileError, OSError):
            raise damaged from None
        if info is None or info.format != "WAV" or info.subtype not in WAV_SUBTYPES or not info.frames:
            raise damaged
        check_sound(info.samplerate, info.channels, limits)
        if abs(info.frames / info.samplerate - version.duration_s) > 0.01:
            raise damaged
        if version.duration_s > limits.duration_s + limits.made_s or (
            version.parent is not None and not (version.parent in ids and version.parent < version.id)
        ):
            raise StudioRefusal(
                f"Version {version.id} of the project file cannot be used: export it anew.", 415
            )


def _source_facts(folder: Path, old: StoredProject, limits: StudioLimits) -> SourceFacts | None:
    """The facts of the file that was opened; None: the project has none.

    Raises:
        StudioRefusal: it is another one than the project names, or cannot be used.
    """
    sources = list(folder.glob("source.*"))
    if len(sources) > 1 or [path.name for path in sources] != [old.source] * len(sources):
        raise StudioRefusal("The project file holds another source than it names: export it anew.", 415)
    if not sources:
        return None
    if f"source{source_ending(sources[0])}" != sources[0].name:
        raise StudioRefusal(
            "The source in the project file is of another kind than its name: export it anew.", 415
        )
    return check_source(sources[0], limits)
