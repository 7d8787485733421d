"""Files that the page may show, by random tokens that the server gives out: no address holds a path."""

from __future__ import annotations

import html
import secrets
import threading
from pathlib import Path
from typing import Any, NamedTuple

from pipelines.studio.limits import StudioRefusal

_REPORT_KINDS = {
    ".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".png": "image/png", ".jpg": "image/jpeg",
    ".svg": "image/svg+xml", ".wav": "audio/wav", ".flac": "audio/flac", ".mp3": "audio/mpeg", ".ogg": "audio/ogg",
    ".mp4": "video/mp4",
}  # fmt: skip
FILM_KINDS = {
    ".mp4": "video/mp4",
    ".m4v": "video/mp4",
    ".mov": "video/mp4",
    ".webm": "video/webm",
    ".mkv": "video/webm",
}
"""Endings of films that browsers play, as they are told to."""
_MOST_TOKENS = 20_000


class ShownClip(NamedTuple):
    """Part of a file that may be heard; a video may be seen, too."""

    path: Path
    start_s: float
    end_s: float | None
    video: Path | None = None


class ShownFiles:
    """Files that the page may show, by tokens."""

    def __init__(self) -> None:
        self._clips: dict[str, ShownClip] = {}
        self._reports: dict[str, Path] = {}
        self._tokens: dict[ShownClip | Path, str] = {}
        self._guard = threading.Lock()

    def clip(self, clip: ShownClip) -> str:
        """The token of a clip."""
        return self._named(clip, self._clips)

    def report(self, folder: Path) -> str:
        """The token of a folder with a report."""
        return self._named(folder, self._reports)

    def found_clip(self, token: str) -> ShownClip:
        """
        Raises:
            StudioRefusal: there is no such token.
        """
        clip = self._clips.get(token)
        if clip is None:
            raise StudioRefusal("This clip is no longer shown: choose it anew.", 404)
        return clip

    def report_file(self, token: str, name: str) -> tuple[Path, str]:
        """A file of a report and its kind.

        Raises:
            StudioRefusal: it is none of the report's: outside of its folder, hidden, or of another kind.
        """
        missing = StudioRefusal("There is no such file in the report.", 404)
        folder = self._reports.get(token)
        path = Path(name)
        if folder is None or path.is_absolute() or any(component.startswith(".") for component in path.parts):
            raise missing
        file = (folder / path).resolve()
        kind = _REPORT_KINDS.get(file.suffix.lower())
        if kind is None or not file.is_relative_to(folder.resolve()) or not file.is_file():
            raise missing
        return file, kind

    def _named(self, value: Any, registry: dict[str, Any]) -> str:
        with self._guard:
            token = self._tokens.get(value)
            if token is None:
                token = self._tokens[value] = secrets.token_urlsafe(18)
                registry[token] = value
            while len(registry) > _MOST_TOKENS:
                self._tokens.pop(registry.pop(next(iter(registry))), None)
            return token


def report_policy(base_url: str) -> str:
    """Content-Security-Policy of a report: its scripts run in an origin of their own, and reach its files alone."""
    studio_url = base_url.rstrip("/")
    return (
        f"sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline' {studio_url}/studio/reports/; "
        f"style-src 'unsafe-inline' {studio_url}/studio/reports/; img-src data: {studio_url}/studio/reports/; "
        f"media-src data: {studio_url}/studio/reports/; font-src data:; connect-src 'none'; form-action 'none'; "
        "base-uri 'none'; frame-ancestors 'self'"
    )


def audio_html(shown_files: ShownFiles, clip: ShownClip, name: str, preload: str = "metadata") -> str:
    """A player of a clip.

    Args:
        name: a text that is not escaped yet.
    """
    return (
        f'<audio controls preload="{preload}" aria-label="{html.escape(name)}" '
        f'src="/studio/api/clips/{shown_files.clip(clip)}/sound.wav"></audio>'
    )
