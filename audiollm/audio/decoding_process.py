"""Decoders in processes of their own: a file on which a decoder crashes or hangs is an `AudioError` like any other.

FFmpeg and libsndfile are written in C, and some damaged or strange file crashes them together with the process that
they run in. So `audio_decoding` has decoded here what is not plain WAV or FLAC. A process is started at the first
such file, serves one file after the other, and ends with the process that it belongs to. If it dies over a file and
has served others before, the file is tried again in a new one: those others may have damaged its memory.

The process imports no torch.

Shapes: C channels, N samples.
"""

from __future__ import annotations

import atexit
import importlib
import mmap
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryFile
from typing import IO, Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from audiollm.audio.decoders import (
    AudioInfo,
    Block,
    DecodeRequest,
    av_blocks,
    has_last_frame,
    info_of_either,
    soundfile_blocks,
    soundfile_info,
)
from audiollm.audio.discovery import AudioError, is_plain
from audiollm.processes import interrupts_held_back

LONGEST_SILENCE_S = 120.0
"""A decoder that has given nothing for so long hangs: a block of sound takes it well under a second."""
WAIT_S = 0.5
"""So long is waited at a time: an interrupt that comes just before a wait is noticed after it."""
START_S = 120.0
"""So long may a process take to start; on an idle machine it takes some 0.3 s."""


class FileRequest(Protocol):
    """A read request for a file, or its content, that is called `name` in errors."""

    @property
    def source(self) -> str | bytes: ...

    @property
    def name(self) -> str | Path: ...


Task: TypeAlias = tuple[str, FileRequest]
"""A task for the decoding process: `soundfile`, `av`, `info`, or a function by its import path, and its request."""

_PROGRAM = """import sys
sys.path[:] = sys.argv[3:]
import audiollm
del sys.path[0]
from audiollm.audio.decoding_process import serve
serve(int(sys.argv[1]), int(sys.argv[2]))"""
_OWN_ROOT = str(Path(__file__).parents[1])  # the process must not find another audiollm first
_DESK_BYTES = 1 << 22
"""Size of the shared memory. A larger block (more than 16 channels) is sent through the connection."""
_NEXT, _CLOSE = "next", "close"


class DecoderCrash(AudioError):
    """A file that kills the process that decodes it, or on which it hangs."""


def contained_blocks(decoder: Literal["soundfile", "av"], request: DecodeRequest) -> Iterator[Block]:
    """`soundfile_blocks` or `av_blocks` of `audio_decoders`, in another process.

    Raises:
        DecoderCrash: the decoder crashes or hangs on the file.
        Exception: what the decoder has against the file.
    """
    return _results((decoder, request))


def read_info(source: str | bytes, name: str | Path) -> AudioInfo:
    """Read the header of a file, or of its content, without decoding samples; in another process where it is not plain.

    Raises:
        AudioError: it is not audio, or a decoder crashes or hangs on it.
    """
    try:
        if is_plain(source):
            return soundfile_info(source)
    except Exception:  # whatever libsndfile has against the file, FFmpeg decides
        pass
    info: AudioInfo = next(_results(("info", DecodeRequest(source, name, 0.0, None, None, False))))
    return info


def visible_difference(path: Path) -> str | None:
    """Name the difference between a file's header and its sound, as far as it shows without decoding; None: none does.

    Raises:
        AudioError: it is not audio, or a decoder crashes or hangs on it.
    """
    info = read_info(str(path), path)
    if info.format == "FLAC" and info.num_samples and not has_last_frame(str(path)):
        return f"is cut off: its header tells {info.duration_s:.2f} s, and its last frame is missing"
    return None if info.duration_s is None else info.difference(info.duration_s)


def contained_results(function: str, request: FileRequest, remember: bool = True) -> Iterator[Any]:
    """Results of a generator function, given by its import path (`module:function`), in another process.

    Args:
        remember: refuse a file on which it crashed without another process, until the file changes.

    Raises:
        DecoderCrash: the function crashes or hangs on the file.
        Exception: what it raises.
    """
    return _results((function, request), remember)


# Private: the side that asks


class _DeadError(Exception):
    """The process is no more."""


class _Helper:
    """A process that decodes, and the way to it."""

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        with theirs, _shared_file() as file:
            file.truncate(_DESK_BYTES)
            self._desk = mmap.mmap(file.fileno(), _DESK_BYTES)
            descriptors = theirs.fileno(), file.fileno()
            command = [sys.executable, "-c", _PROGRAM, *map(str, descriptors), _OWN_ROOT, *sys.path]
            with interrupts_held_back(by_multiprocessing=False):
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, pass_fds=descriptors, env=environment
                )
        self.is_new, self.is_ready = True, False
        try:
            self._receive(START_S)
        except BaseException as error:
            self.end()
            if isinstance(error, (_DeadError, TimeoutError)):
                raise RuntimeError(f"the process that decodes sound does not start: {self.death}") from None
            raise

    @property
    def death(self) -> str:
        """Describe how the decoding process ended; it must have ended."""
        code = self._process.wait()
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"

    def results(self, task: Task) -> Iterator[Any]:
        """Yield the task's results one by one, each computed on demand.

        Raises:
            _DeadError: the process has died.
            TimeoutError: it hangs.
            Exception: what the decoder raises.
        """
        message: Task | str = task
        try:
            while True:
                kind, content = self._ask(message)
                self.is_new = False
                if kind == "error":
                    raise content
                if kind == "end":
                    return
                message = _NEXT
                yield _from_desk(self._desk, *content) if kind == "block" else content
        except GeneratorExit:
            with suppress(OSError):  # it has died: the next one who asks will find out
                self._connection.send(_CLOSE)
            raise

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._connection.close()

    def _ask(self, message: Task | str) -> Any:
        self.is_ready = False
        try:
            self._connection.send(message)
        except OSError:
            raise _DeadError from None
        return self._receive(LONGEST_SILENCE_S)

    def _receive(self, longest_s: float) -> Any:
        try:
            ends = time.monotonic() + longest_s
            while not self._connection.poll(WAIT_S):
                if time.monotonic() > ends:
                    raise TimeoutError
            answer = self._connection.recv()
        except (EOFError, ConnectionError):
            raise _DeadError from None
        self.is_ready = True
        return answer


def _shared_file() -> IO[bytes]:
    """A file in memory, on Linux; /dev/shm is often too small in containers."""
    return os.fdopen(os.memfd_create("audiollm"), "r+b") if sys.platform == "linux" else TemporaryFile()


def _from_desk(desk: mmap.mmap, shape: tuple[int, int], rate: int) -> Block:
    return np.frombuffer(desk, np.float32, shape[0] * shape[1]).reshape(shape).copy(), rate


_idle: list[_Helper] = []
"""Processes that wait for a file. Each thread that decodes at a time has taken one out."""


_crashes: dict[Any, str] = {}
"""Error of each file that crashed or hung the decoder, so that drawing it again costs no further process or wait."""


def _results(task: Task, remember: bool = True) -> Iterator[Any]:
    source, name = task[1].source, task[1].name
    if isinstance(source, str):  # the process may have been started in another folder
        request: Any = task[1]
        task = task[0], replace(request, source=str(Path(source).absolute()))
    if remember and _crashes and (reason := _crashes.get(_identity(source))):
        raise DecoderCrash(name, reason)
    done = 0
    for again in (False, True):
        helper = _Helper() if again else _take()
        was_new = helper.is_new
        try:
            for result in islice(helper.results(task), done, None):
                done += 1
                yield result
            return
        except _DeadError:
            if again or was_new:
                raise _crash(task[1], f"crashes its decoder ({helper.death})", remember) from None
        except TimeoutError:
            what = f"its decoder has given nothing for {LONGEST_SILENCE_S:g} s"
            raise _crash(task[1], what, remember) from None
        finally:
            if helper.is_ready:
                _idle.append(helper)
            else:
                helper.end()


def _crash(request: FileRequest, what: str, remember: bool) -> DecoderCrash:
    reason = f"{what}: convert it with another program, or leave it out"
    if remember:
        _crashes[_identity(request.source)] = reason
    return DecoderCrash(request.name, reason)


def _identity(source: str | bytes) -> Any:
    """Changes with the content of a file, or of the bytes of one."""
    if isinstance(source, bytes):
        return len(source), hash(source)
    try:
        stat = Path(source).stat()
    except OSError:  # it is gone: reading it will say so
        return None
    return source, stat.st_size, stat.st_mtime_ns


def _take() -> _Helper:
    try:
        return _idle.pop()
    except IndexError:  # another thread was faster
        return _Helper()


def end_all() -> None:
    """End the processes that wait; the next file starts a new one."""
    while _idle:
        _idle.pop().end()


atexit.register(end_all)
os.register_at_fork(after_in_child=_idle.clear)  # they serve the process that was forked


# Private: the side that answers


def serve(connection_descriptor: int, desk_descriptor: int) -> None:
    """The life of the process: decodes what comes through the connection, and ends when that is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is the process that asks who ends this one
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection = Connection(connection_descriptor)
    desk = mmap.mmap(desk_descriptor, _DESK_BYTES)
    requests: SimpleQueue[Task | str] = SimpleQueue()
    threading.Thread(target=_receive_all, args=(connection, requests), daemon=True).start()
    silence = os.open(os.devnull, os.O_WRONLY)
    for output in (1, 2):  # a crash is reported by who asks, not by the C library
        os.dup2(silence, output)
    connection.send("ready")
    results: Iterator[Any] = iter(())
    while True:
        message = requests.get()
        if message == _CLOSE:
            results = iter(())
            continue
        if not isinstance(message, str):
            kind, request = message
            results = _function(kind)(request)
        connection.send(_next_of(results, desk))


def _receive_all(connection: Connection, requests: SimpleQueue[Task | str]) -> None:
    """Receive all messages in a separate thread, which notices the death of the other side in the middle of a file."""
    with suppress(EOFError, OSError):
        while True:
            requests.put(connection.recv())
    os._exit(0)


def _next_of(results: Iterator[Any], desk: mmap.mmap) -> tuple[str, Any]:
    try:
        result = next(results)
        on_desk = isinstance(result, tuple) and result[0].nbytes <= _DESK_BYTES
        return ("block", _to_desk(desk, *result)) if on_desk else ("result", result)
    except StopIteration:
        return "end", None
    except AudioError as error:
        return "error", error
    except Exception as error:  # libsndfile's own need not survive the way between processes
        return "error", ValueError(f"{type(error).__name__}: {error}")


def _to_desk(desk: mmap.mmap, block_CN: NDArray[np.float32], rate: int) -> tuple[tuple[int, ...], int]:
    np.frombuffer(desk, np.float32, block_CN.size).reshape(block_CN.shape)[:] = block_CN
    return block_CN.shape, rate


def _info(request: DecodeRequest) -> Iterator[AudioInfo]:
    yield info_of_either(request.source, request.name)


def _function(kind: str) -> Callable[[Any], Iterator[Any]]:
    if kind in _TASKS:
        return _TASKS[kind]
    module, _, name = kind.partition(":")
    function: Callable[[Any], Iterator[Any]] = getattr(importlib.import_module(module), name)
    return function


_TASKS: dict[str, Callable[[DecodeRequest], Iterator[Any]]] = {
    "soundfile": soundfile_blocks,
    "av": av_blocks,
    "info": _info,
}
