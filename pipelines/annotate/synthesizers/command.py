"""A user's own program as a synthesizer: one call per clip, without a shell.

Shapes: N samples.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from audiollm.audio.discovery import AudioError
from pipelines.annotate.synthesizers.synthesizer import (
    SpeechFault,
    SynthesizedSpeech,
    Synthesizer,
    check_voice_name,
)

PLACEHOLDERS = ("text", "voice", "out", "rate")
TIMEOUT_S = 300.0
DEFAULT_VOICE = "voice"
_MAX_REASON = 300
_PLACEHOLDER = re.compile(r"\{(\w+)\}")


class CommandSynthesizer(Synthesizer):
    """A command with `{text}`, `{out}` (a .wav file to write) and, where wanted, `{voice}` and `{rate}`.

    Args:
        command: words as a shell reads them, with quotation marks; a text is always one argument.

    Raises:
        ValueError: quotation marks that do not close, no program, an unknown placeholder, or a missing one.
    """

    characters_per_cpu_s = 15.0

    def __init__(self, command: str) -> None:
        self.command = command
        self.arguments = shlex.split(command)
        if not self.arguments:
            raise ValueError(
                "command: names no program; example: command:espeak-ng -v {voice} -w {out} {text}"
            )
        names = {name for argument in self.arguments for name in _PLACEHOLDER.findall(argument)}
        forms = " ".join(f"{{{name}}}" for name in PLACEHOLDERS)
        for name in names.difference(PLACEHOLDERS):
            raise ValueError(f"command: {{{name}}} is no placeholder; there are {forms}")
        for name in ("text", "out"):
            if name not in names:
                raise ValueError(f"command: lacks {{{name}}}; placeholders are {forms}")
        self.has_rates, self._has_voices = "rate" in names, "voice" in names

    def missing(self) -> str | None:
        if shutil.which(self.arguments[0]) is None:
            return f"no program {self.arguments[0]!r}: install it, or give its path"
        return None

    def pick_voices(self, voices: int | Sequence[str] | None, seed: int) -> list[str]:
        if isinstance(voices, int) and voices > 1:
            raise ValueError(
                f"{voices} voices of a command: give a list of their names, which {{voice}} stands for"
            )
        if voices is None or isinstance(voices, int):
            if self._has_voices:
                raise ValueError("the command has {voice}: give a list of names")
            return [DEFAULT_VOICE]
        if len(voices) > 1 and not self._has_voices:
            raise ValueError(f"{len(voices)} voices, and the command has no {{voice}}")
        return [check_voice_name(name) for name in voices]

    def fingerprint(self) -> str:
        return f"command {self.command}"

    def speak(self, text: str, voice: str, *, rate: float, seed: int) -> SynthesizedSpeech:
        from audiollm.audio import load

        with tempfile.TemporaryDirectory(prefix="audiollm-speech-") as folder:
            out = Path(folder) / "clip.wav"
            values = {"text": text, "voice": voice, "out": str(out), "rate": f"{rate:g}"}
            self._run([_fill_placeholders(argument, values) for argument in self.arguments])
            if not out.is_file():
                raise SpeechFault("command failed", "it ended without writing {out}")
            try:
                sound = load(out, mono=True)
            except AudioError as error:
                raise SpeechFault("command failed", f"what it wrote cannot be read: {error.reason}") from None
        return SynthesizedSpeech(sound.samples_CN[0].numpy().astype(np.float32), sound.sample_rate)

    def _run(self, arguments: list[str]) -> None:
        try:
            result = subprocess.run(
                arguments, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise SpeechFault("command failed", f"no end after {TIMEOUT_S:g} s") from None
        except OSError as error:
            raise SpeechFault("command failed", f"{arguments[0]}: {error.strerror}") from None
        if result.returncode:
            output = (result.stderr or result.stdout).decode(errors="replace").split("\n")
            last_line = next((line.strip() for line in reversed(output) if line.strip()), "no message")
            raise SpeechFault("command failed", f"exit code {result.returncode}: {last_line[:_MAX_REASON]}")


def _fill_placeholders(argument: str, values: dict[str, str]) -> str:
    """An argument with its placeholders replaced, once: what stands for one is not searched again."""
    return _PLACEHOLDER.sub(lambda match: values[match[1]], argument)
