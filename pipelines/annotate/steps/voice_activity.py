"""The step `voice_activity`: the spans of speech in a recording, by Silero VAD in constant memory.

Shapes: F frames of 32 ms, N samples at 16 kHz.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterator
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from pipelines.annotate.step import Recording, RecordingStep
from pipelines.annotate.voice.activity import FRAME, FRAME_S, SAMPLE_RATE, VoiceActivity, speech_spans
from pipelines.steps.step import StepConfig, Value

_PADDING_FRAMES = 10
_DITHER = 1e-3
_BLOCK_FRAMES = 1000


class VoiceActivityConfig(StepConfig):
    """Settings of `voice_activity`."""

    min_speech_s: float = 0.1
    """Shortest speech, in seconds; shorter spans are ignored."""
    min_silence_s: float = 0.1
    """Shortest silence, in seconds; a shorter one belongs to the speech around it."""


class VoiceActivityStep(RecordingStep[VoiceActivityConfig]):
    """Spans of speech, and the probability of speech by frame, by which long speech is cut."""

    name = "voice_activity"
    settings = VoiceActivityConfig
    needs: tuple[str, ...] = ("probe",)
    version: ClassVar[int] = 2

    def setup(self) -> None:
        self._network = VoiceActivity()
        # faint noise goes before every recording, for those that are tiny or cut tightly
        noise = np.random.default_rng(0).normal(0.0, _DITHER, round(_PADDING_FRAMES * FRAME_S * SAMPLE_RATE))
        self._network.probabilities(noise.astype(np.float32))
        self._after_noise = self._network.state

    def process(self, item: Recording) -> Value:
        """`{duration_s, spans: [[start_s, end_s], ...], probabilities}`, the last packed by `encode_probabilities`; and
        `length`, a sentence where the header promises another duration than what was decoded, else null.

        Raises:
            AudioError: the recording is damaged, here or further on.
        """
        self._network.state = self._after_noise
        num_samples = 0
        parts = []
        for block_N in _whole_frames(item.blocks(SAMPLE_RATE)):
            num_samples += len(block_N)
            parts.append(self._network.probabilities(block_N))
        probabilities_F = np.concatenate(parts) if parts else np.zeros(0, np.float32)
        duration_s = num_samples / SAMPLE_RATE
        header = item.values.get("probe", {})
        told_s = header.get("duration_s")
        if told_s is not None and abs(told_s - duration_s) <= 1.0 / SAMPLE_RATE:
            duration_s = told_s  # the same, but for the rounding of another rate
        spans = speech_spans(probabilities_F, duration_s, self.config.min_speech_s, self.config.min_silence_s)
        return {
            "duration_s": round(duration_s, 6),
            "spans": [[round(span.start_s, 6), round(span.end_s, 6)] for span in spans],
            "probabilities": encode_probabilities(probabilities_F),
            "length": _difference(header, duration_s),
        }


def _difference(header: Value, decoded_s: float) -> str | None:
    from audiollm.audio import AudioInfo

    if not header:
        return None
    info = AudioInfo(
        header["sample_rate"],
        header["num_channels"],
        num_samples=None,
        duration_s=header["duration_s"],
        format="",
        codec=header["codec"],
        header_s=header["header_s"],
        damage=header["damage"],
    )
    return info.difference(decoded_s)


def encode_probabilities(probabilities_F: NDArray[np.float32]) -> str:
    """Probabilities in steps of 1/255 as text, 4 kB a minute at most."""
    levels_F = (probabilities_F.clip(0.0, 1.0) * 255).round().astype(np.uint8)
    return base64.b85encode(zlib.compress(levels_F.tobytes(), 6)).decode("ascii")


def unpack(text: str) -> NDArray[np.float32]:
    """Decode the probabilities `[F]` of `encode_probabilities`."""
    levels_F = np.frombuffer(zlib.decompress(base64.b85decode(text)), np.uint8)
    return levels_F.astype(np.float32) / np.float32(255)


def _whole_frames(pieces: Iterator[NDArray[np.float32]]) -> Iterator[NDArray[np.float32]]:
    """Regroup blocks of samples into blocks of whole frames; only the last one may end within a frame."""
    rest_N = np.zeros(0, np.float32)
    for piece_N in pieces:
        rest_N = np.concatenate([rest_N, piece_N])
        if len(rest_N) >= _BLOCK_FRAMES * FRAME:
            num_samples = len(rest_N) // FRAME * FRAME
            yield rest_N[:num_samples]
            rest_N = rest_N[num_samples:]
    if len(rest_N):
        yield rest_N
