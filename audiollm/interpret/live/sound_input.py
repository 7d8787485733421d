"""Where live sound comes from and goes to: files, and the microphone and speaker of the machine."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from audiollm.errors import ConfigError, StageError

MICROPHONE, SPEAKER = "microphone", "speaker"
BLOCK_S = 0.08
"""Seconds of a block of the microphone."""
MAX_PAUSE_S = 5.0
"""Longest wait for a block, after which the microphone counts as vanished."""


def file_pieces(path: Path, sample_rate: int) -> Iterator[Tensor]:
    """Yield a file as mono pieces `[1, N]` of one block each, whatever its own rate.

    Raises:
        ConfigError: it cannot be read; or, after all pieces, it is cut off, or some of its samples are not finite and
            were silence in the pieces.
    """
    from audiollm.audio import AudioError
    from audiollm.audio.decoding import length_difference
    from audiollm.audio.streams import stream_mono

    size = max(1, round(BLOCK_S * sample_rate))
    counts: list[int] = []
    samples = 0
    try:
        for samples_1N in stream_mono(path, sample_rate, on_not_finite=counts.append):
            samples += samples_1N.shape[1]
            yield from samples_1N.split(size, dim=1)
    except AudioError as error:
        raise ConfigError(error.reason, str(path), "give a sound file") from None
    damage = [f"{sum(counts)} samples are NaN or infinite, and were heard as silence"] if counts else []
    if difference := length_difference(str(path), path, 0.0, None, samples / sample_rate):
        damage.append(difference)
    if damage:
        raise ConfigError(
            "; ".join(damage), str(path), "what was heard is kept; take the file anew from its origin"
        )


def microphone_pieces(sample_rate: int, on_loss: Callable[[], None] = lambda: None) -> Iterator[Tensor]:
    """Yield blocks of the microphone until it vanishes or the reader stops. Blocks wait: no sound is dropped.

    Args:
        on_loss: called where the sound system says that it lost sound before a block, on a machine too busy to take it.

    Raises:
        ConfigError: sounddevice or PortAudio is missing, or there is no microphone.
        StageError: the microphone vanished.
    """
    sounddevice = _sounddevice()
    blocks: queue.Queue[Any] = queue.Queue()

    def take(block: Any, frames: int, timing: Any, status: Any) -> None:
        blocks.put((np.array(block[:, 0], dtype=np.float32), status.input_overflow))

    opened = ExitStack()
    try:
        opened.enter_context(
            sounddevice.InputStream(
                samplerate=sample_rate, channels=1, blocksize=round(BLOCK_S * sample_rate), callback=take
            )
        )
    except Exception as error:
        raise ConfigError(
            f"no microphone: {error}", "--from microphone", "connect one, or give a file"
        ) from None
    with opened:
        while True:
            try:
                block_N, has_lost = blocks.get(timeout=MAX_PAUSE_S)
            except queue.Empty:
                raise StageError("the microphone gives no sound any more", "connect it again", 1) from None
            if has_lost:
                on_loss()
            yield torch.from_numpy(block_N)[None]


class LoudSpeaker:
    """Plays samples in the background, in order: who listens meanwhile does not wait.

    Raises:
        ConfigError: sounddevice or PortAudio is missing, or there is no speaker.
    """

    def __init__(self, sample_rate: int) -> None:
        sounddevice = _sounddevice()
        try:
            self._stream = sounddevice.OutputStream(samplerate=sample_rate, channels=1)
            self._stream.start()
        except Exception as error:
            raise ConfigError(f"no speaker: {error}", "--to speaker", "connect one, or give a file") from None
        self._waiting: queue.Queue[Any] = queue.Queue()
        self._problem = ""
        self._player = threading.Thread(target=self._play_all, daemon=True)
        self._player.start()

    def play(self, samples_1N: Tensor) -> None:
        """Play samples `[1, N]` behind those before.

        Raises:
            StageError: the speaker vanished; told once, what follows is not played.
        """
        if self._problem:
            problem, self._problem = self._problem, ""
            raise StageError(f"the speaker plays no sound any more ({problem})", "connect it again", 1)
        self._waiting.put(samples_1N[0].numpy().astype(np.float32)[:, None])

    def close(self) -> None:
        """Wait for the end of what plays."""
        self._waiting.put(None)
        self._player.join()
        with suppress(Exception):  # of one that vanished
            self._stream.stop()
            self._stream.close()

    def _play_all(self) -> None:
        has_vanished = False
        while (block_N1 := self._waiting.get()) is not None:
            if has_vanished:
                continue
            try:
                self._stream.write(block_N1)
            except Exception as error:
                self._problem, has_vanished = str(error) or type(error).__name__, True


def _sounddevice() -> Any:
    try:
        import sounddevice
    except ImportError:
        raise ConfigError(
            "sounddevice is not installed", "microphone and speaker", "pip install 'audiollm[live]'"
        ) from None
    except OSError:
        raise ConfigError(
            "the library PortAudio is missing",
            "microphone and speaker",
            "install the package libportaudio2 (apt) or portaudio (dnf, brew)",
        ) from None
    return sounddevice
