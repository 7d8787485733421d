"""`corrections.jsonl` of an annotation: what people corrected, by segment, in a file that is only appended to.

A line is written and synced under a lock before it is acknowledged, so no kill of the server loses it; what a kill cut
short was acknowledged to nobody, and is removed by the next writer.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    ValidationError,
    field_validator,
    model_validator,
)

from audiollm.data.text.words import settle_characters
from audiollm.errors import first_problem
from audiollm.files.atomic import DamagedFile, is_unicode, sync

CORRECTIONS = "corrections.jsonl"
PERSON = "person"
"""`text_source` of a corrected text."""
MAX_TEXT_CHARACTERS = 20_000
MIN_SPAN_S = 0.02
_MENDING = "mend that line, or restore the file: it holds work of people"


class SegmentIdentity(NamedTuple):
    """The segment that a correction is of, as the annotation cut it."""

    digest: str
    """SHA-256 of the recording's content."""
    file: str
    """Name of the recording."""
    start_ms: int
    end_ms: int

    @property
    def key(self) -> str:
        """A short name for addresses, without a path in it."""
        return sha256(json.dumps(self).encode(errors="backslashreplace")).hexdigest()[:24]


class CorrectedFields(BaseModel):
    """The corrected fields of a segment; those that are None are the machine's."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    text: str | None = Field(None, max_length=MAX_TEXT_CHARACTERS)
    speaker: str | None = Field(None, max_length=200)
    start_s: FiniteFloat | None = Field(None, ge=0)
    end_s: FiniteFloat | None = None
    keep: bool | None = None
    """True: whatever the rules say; False: dropped; None: the rules decide."""

    @field_validator("text", "speaker")
    @classmethod
    def _can_be_written(cls, value: str | None) -> str | None:
        if value is None:
            return None
        if not is_unicode(value):
            raise ValueError("holds characters that cannot be written as UTF-8")
        return " ".join(settle_characters(value).split())

    @field_validator("speaker")
    @classmethod
    def _names_somebody(cls, value: str | None) -> str | None:
        if value == "":
            raise ValueError("is empty: give a name")
        return value

    @field_validator("start_s", "end_s")
    @classmethod
    def _in_milliseconds(cls, value: float | None) -> float | None:
        return None if value is None else round(value, 3)

    @model_validator(mode="after")
    def _is_a_span(self) -> CorrectedFields:
        if (self.start_s is None) != (self.end_s is None):
            raise ValueError("start_s and end_s go together")
        if self.start_s is not None and self.end_s is not None and self.end_s - self.start_s < MIN_SPAN_S:
            raise ValueError(f"end_s must be at least {MIN_SPAN_S} s behind start_s")
        return self

    def as_row(self) -> dict[str, Any]:
        """The fields that are corrected."""
        return self.model_dump(exclude_none=True)


NO_FIELDS = CorrectedFields()


class Correction(BaseModel):
    """A line of the file: the corrected fields of one segment, in place of those of its earlier lines."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    operation: str = Field(pattern=r"^[A-Za-z0-9_-]{8,64}$")
    """Name that the page gave to it: sent again, it is written once."""
    digest: str
    file: str
    start_ms: int = Field(ge=0)
    end_ms: int
    revision: int = Field(ge=1)
    """Number of the segment's corrections up to this one."""
    fields: CorrectedFields
    by: str = Field("", max_length=60)
    """Name that the person gave."""
    at: str
    """Time in UTC, ISO 8601."""

    @property
    def identity(self) -> SegmentIdentity:
        return SegmentIdentity(self.digest, self.file, self.start_ms, self.end_ms)


class CorrectionRequest(NamedTuple):
    """A correction that a person asks for.

    Args:
        revision: the one that the person saw; 0: none.
    """

    identity: SegmentIdentity
    fields: CorrectedFields
    revision: int
    operation: str
    by: str = ""


class CorrectionConflict(Exception):
    """Somebody else corrected the segment since it was shown.

    Args:
        correction: the one that stands.
    """

    def __init__(self, correction: Correction | None) -> None:
        self.correction = correction
        super().__init__("the segment was corrected since it was shown")


class CorrectionLedger:
    """The corrections of one annotation. Threads, and other processes with ledgers of their own, may use it together.

    Args:
        folder: of the annotation.

    Raises:
        DamagedFile: a line that is no correction.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / CORRECTIONS
        self._guard = threading.RLock()
        self._inode, self._size, self._lines = -1, 0, 0
        self._latest: dict[SegmentIdentity, Correction] = {}
        self._operations: dict[str, Correction] = {}
        self.refresh()

    def refresh(self) -> int:
        """Read what was appended since the last call; returns the number of all corrections.

        Raises:
            DamagedFile: a line that is no correction.
        """
        with self._guard:
            try:
                with self.path.open("rb") as file:
                    self._read_new(file.fileno())
            except FileNotFoundError:
                self._forget()
            return len(self._operations)

    def latest(self) -> dict[SegmentIdentity, Correction]:
        """The correction that stands of each segment that ever had one."""
        with self._guard:
            return dict(self._latest)

    def put(self, request: CorrectionRequest) -> Correction:
        """Write a correction; it is on the disk when this returns.

        Raises:
            CorrectionConflict: the segment has another revision than the request was made upon.
            DamagedFile: the file cannot be gone on with.
            OSError: it cannot be written.
        """
        with self._guard, self._locked() as file:
            self._read_new(file)
            if (written := self._operations.get(request.operation)) is not None:
                return written
            standing = self._latest.get(request.identity)
            if request.revision != (standing.revision if standing is not None else 0):
                raise CorrectionConflict(standing)
            correction = Correction(
                operation=request.operation,
                **request.identity._asdict(),
                revision=request.revision + 1,
                fields=request.fields,
                by=request.by,
                at=datetime.now(UTC).isoformat(timespec="seconds"),
            )
            row = {**correction.model_dump(), "fields": correction.fields.as_row()}
            self._append(file, json.dumps(row, ensure_ascii=False).encode() + b"\n")
            return correction

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """The file, made where it is absent, with no other writer; a line that a kill cut short is removed."""
        is_new = not self.path.exists()
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if is_new:
                sync(self.path.parent)
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                os.ftruncate(descriptor, os.pread(descriptor, size, 0).rfind(b"\n") + 1)
            yield descriptor
        finally:
            os.close(descriptor)

    def _append(self, file: int, line: bytes) -> None:
        size = os.fstat(file).st_size
        try:
            if os.write(file, line) < len(line):
                raise OSError(f"{self.path} cannot grow")
            os.fsync(file)
        except OSError:
            os.ftruncate(file, size)
            raise
        self._read_new(file)

    def _read_new(self, file: int) -> None:
        state = os.fstat(file)
        if state.st_ino != self._inode or state.st_size < self._size:
            self._forget()
        self._inode = state.st_ino
        content = os.pread(file, state.st_size - self._size, self._size)
        complete = content[: content.rfind(b"\n") + 1]
        for line in complete.split(b"\n")[:-1]:
            self._lines += 1
            correction = self._parsed_line(line)
            if correction is not None:
                self._latest[correction.identity] = correction
                self._operations[correction.operation] = correction
        self._size += len(complete)

    def _parsed_line(self, line: bytes) -> Correction | None:
        if not line.strip():
            return None
        try:
            correction = Correction.model_validate_json(line)
        except ValidationError as error:
            reason = f"line {self._lines}: no correction ({first_problem(error)})"
            raise DamagedFile(self.path, reason, _MENDING) from None
        before = self._latest.get(correction.identity)
        if correction.revision != (before.revision if before is not None else 0) + 1:
            reason = f"line {self._lines}: revision {correction.revision} does not follow on the line before"
            raise DamagedFile(self.path, reason, _MENDING)
        return correction

    def _forget(self) -> None:
        self._inode, self._size, self._lines = -1, 0, 0
        self._latest, self._operations = {}, {}


def read_corrections(folder: Path) -> dict[SegmentIdentity, Correction]:
    """The correction that stands of each segment of an annotation; empty where nothing was corrected.

    Raises:
        DamagedFile: a line that is no correction.
    """
    return CorrectionLedger(folder).latest()


def identity_of(row: Mapping[str, Any]) -> SegmentIdentity:
    """The segment of a row of `segments.jsonl` or `filtered.jsonl`.

    Raises:
        KeyError, TypeError, ValueError: the row is of no annotation.
    """
    correction = row.get("correction")
    if isinstance(correction, Mapping):
        digest, file, start_ms, end_ms = correction["identity"]
        return SegmentIdentity(str(digest), str(file), int(start_ms), int(end_ms))
    file = str(row.get("file") or row["path"])
    return segment_identity(str(row.get("digest") or ""), file, float(row["start_s"]), float(row["end_s"]))


def segment_identity(digest: str, file: str, start_s: float, end_s: float) -> SegmentIdentity:
    """The identity of a segment that a recording was cut into."""
    return SegmentIdentity(digest, file, round(1000 * start_s), round(1000 * end_s))
