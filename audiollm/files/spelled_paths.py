"""Names of files in other Unicode characters that look the same: accents decomposed (NFD, as of macOS) or composed."""

from __future__ import annotations

import unicodedata
from pathlib import Path


def as_spelled(path: Path) -> Path:
    """The path as it is spelled on the disk, where a file or folder of its name is there in NFC or NFD; else itself."""
    if str(path).isascii() or path.exists():
        return path
    spelled = Path(path.anchor)
    for component in path.parts[1 if path.anchor else 0 :]:
        forms = [component, *(unicodedata.normalize(form, component) for form in ("NFC", "NFD"))]
        spelled = next((place for form in forms if (place := spelled / form).exists()), spelled / component)
    return spelled if spelled.exists() else path
