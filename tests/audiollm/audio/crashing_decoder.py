"""A decoder that crashes, hangs, or damages its process, on files that say so; for tests of what contains it.

Every Python process that is started with the folder of `install` on its path has FFmpeg do that.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from audiollm.audio import decoding_process

CRASHES, HANGS, DAMAGES = b"CRASHES!", b"HANGS!!!", b"DAMAGES!"
"""First bytes of files that make the decoder crash, hang, or return damage."""
_HOOK = """
import os, signal, time
import av
_open, _is_damaged = av.open, False

def _open_or_die(file, *args, **settings):
    global _is_damaged
    if isinstance(file, str):  # it is written
        return _open(file, *args, **settings)
    start = file.read(8)
    file.seek(0)
    if _is_damaged or start == b"CRASHES!":
        os.kill(os.getpid(), signal.SIGSEGV)
    if start == b"HANGS!!!":
        time.sleep(1000)
    _is_damaged = start == b"DAMAGES!"
    return _open(file, *args, **settings)

av.open = _open_or_die
"""


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the decoder in processes started from now on."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(_HOOK)
    path = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    decoding_process.end_all()


def write(path: Path, start: bytes) -> Path:
    """A file that looks like audio, by its name at least."""
    path.write_bytes(start + bytes(4000))
    return path
