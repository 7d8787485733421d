"""Limits of what the studio takes, and the refusals that a person reads."""

from __future__ import annotations

from dataclasses import dataclass

MB = 1_000_000


class StudioRefusal(Exception):
    """Something that the studio does not do: one sentence that says what to do instead.

    Args:
        status: the HTTP status that it is answered with.
    """

    def __init__(self, sentence: str, status: int = 400) -> None:
        self.status = status
        super().__init__(sentence)

    @property
    def sentence(self) -> str:
        return str(self)


def told_length(seconds: float) -> str:
    """A length as a person reads it: "45 seconds", "1 second", "2.5 minutes"."""
    value, unit = (seconds, "second") if seconds < 120 else (seconds / 60, "minute")
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return f"{text} {unit}" if text == "1" else f"{text} {unit}s"


@dataclass(frozen=True)
class StudioLimits:
    """The largest files and requests."""

    upload_mb: float = 2000.0
    """Megabytes of an uploaded file, and of a project file with all that it unpacks to."""
    duration_s: float = 2 * 3600.0
    """Seconds of a recording or video."""
    made_s: float = 600.0
    """Seconds of a sound that is made, or of a clip that is described, at once."""
    picture_pixels: int = 4096 * 2304
    """Pixels of a picture of a video."""
    channels: int = 8
    sample_rates: tuple[int, int] = (1000, 768_000)
    """Lowest and highest sample rate of a sound, in Hz."""
    projects: int = 200
    """Projects of one person."""
    versions: int = 1000
    """Versions of a project."""
    waiting: int = 8
    """Requests of one window in the queue."""
    patience_s: float = 150.0
    """Seconds without a question from a window after which it counts as closed: hidden windows ask once a minute."""
    reload_s: float = 5.0
    """Seconds after which the requests of a window that was left are held: a page that is loaded again is there before,
    and on a slow machine they go on when it comes."""
    followed_s: float = 120.0
    """Seconds between the first and the last click on an object: all pictures of them are held in memory."""
    spare_mb: float = 200.0
    """Megabytes that are left free on the disk."""
