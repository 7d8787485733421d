"""Lists of generated sounds: what was asked for, what came out, and what is real beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from audiollm.errors import ConfigError
from audiollm.files.atomic import read_jsonl
from audiollm.files.spelled_paths import as_spelled


@dataclass(frozen=True)
class TargetEvent:
    """A sound that was asked for by name and time."""

    label: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class GeneratedSound:
    """A generated sound with its condition."""

    id: str
    path: Path
    reference: Path | None
    """The real sound of the same condition."""
    video: Path | None
    caption: str | None
    thought: str | None
    events: tuple[TargetEvent, ...] | None
    """The events of the real sound, in order of time; None: not known."""
    has_backdrop: bool = False
    video_start_s: float = 0.0
    """The second of the video at which the sound begins."""


def read_generated(listing: Path) -> list[GeneratedSound]:
    """Read the `generated.jsonl` of `generate_sound`, or a list of one's own in its columns.

    A row has `id` and `audio` (or `path`), and may have `reference`, `video`, `video_start_s` (the second of the video
    at which the sound begins), `caption`, `thought`, and `events` with `label`, `start_s` and `end_s`, in `metadata` or
    beside it. Paths are relative to the list, or to the working directory.

    Raises:
        ConfigError: a row without a sound, or with events that are none.
    """
    rows = read_jsonl(listing, "give a list with a JSON object per line")
    return [
        _read_generated_sound(row, f"{listing}:{number}", listing.parent)
        for number, row in enumerate(rows, start=1)
    ]


def beside_list(path: str, folder: Path) -> Path:
    """A path of a list: relative to the folder of the list where such a file is there, else as it stands."""
    beside = as_spelled(folder / path)
    return beside if beside.exists() else Path(path)


def parse_target_event(row: Mapping[str, Any]) -> TargetEvent:
    """An event of a list; one without a label goes by its name.

    Raises:
        KeyError, TypeError, ValueError: it has neither, or no times.
    """
    label = row["label"] if "label" in row else row["name"]
    return TargetEvent(str(label), float(row["start_s"]), float(row["end_s"]))


# Private


def _read_generated_sound(row: Mapping[str, Any], where: str, folder: Path) -> GeneratedSound:
    metadata = row.get("metadata")
    facts = metadata if isinstance(metadata, dict) else {}
    facts = {**facts, **{key: value for key, value in row.items() if value is not None}}
    audio = facts.get("audio") or facts.get("path")
    if not isinstance(audio, str):
        raise ConfigError("no sound", where, "each row needs audio: the file of a generated sound")
    try:
        events = None
        if facts.get("events") is not None:
            unordered_events = [parse_target_event(event) for event in facts["events"]]
            events = tuple(sorted(unordered_events, key=lambda event: event.start_s))
    except (KeyError, TypeError, ValueError) as error:
        remedy = "events are a list of objects with label, start_s and end_s"
        raise ConfigError(f"unreadable events ({error!r})", where, remedy) from None
    start_s = facts.get("video_start_s", 0.0)
    if not isinstance(start_s, int | float):
        raise ConfigError(f"video_start_s {start_s!r} is no number", where, "give seconds")
    return GeneratedSound(
        id=str(facts.get("id", audio)),
        path=beside_list(audio, folder),
        reference=beside_list(facts["reference"], folder) if facts.get("reference") else None,
        video=beside_list(facts["video"], folder) if facts.get("video") else None,
        caption=facts.get("caption"),
        thought=facts.get("thought"),
        events=events,
        has_backdrop=facts.get("backdrop") is not None,
        video_start_s=start_s,
    )
