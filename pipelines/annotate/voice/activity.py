"""Voice activity: Silero VAD in one single-thread ONNX session, and the cutting of a recording by it.

Shapes: F frames of 32 ms, N samples at 16 kHz.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from audiollm.onnx_models import package_file, single_thread_session

SAMPLE_RATE = 16000
FRAME = 512
_CONTEXT = 64
FRAME_S = FRAME / SAMPLE_RATE
_THRESHOLD, _EXIT_THRESHOLD = 0.5, 0.35
_MIN_SPEECH_S, _MIN_SILENCE_S = 0.1, 0.1

Label = TypeVar("Label")


class VoicedSpan(NamedTuple):
    start_s: float
    end_s: float


class State(NamedTuple):
    """Memory of the network: its recurrent state, and the last 4 ms of the frame before."""

    recurrent: NDArray[np.float32]
    context_N: NDArray[np.float32]


class VoiceActivity:
    """Speech probability by frame of 32 ms; `state` runs on from block to block, until another one is set.

    The model is that of silero-vad, whose own wrapper needs torch and crawls with more than one thread.
    """

    def __init__(self) -> None:
        self._session = single_thread_session(package_file("silero_vad", "data/silero_vad.onnx"))
        self.state = State(np.zeros((2, 1, 128), np.float32), np.zeros(_CONTEXT, np.float32))

    def probabilities(self, samples_N: NDArray[np.float32]) -> NDArray[np.float32]:
        """Probability of speech in each frame, [F]; a last frame that is not full is filled with zeros.

        Args:
            samples_N: mono at 16 kHz in [-1, 1].
        """
        frames_FN = np.pad(samples_N, (0, -len(samples_N) % FRAME)).astype(np.float32).reshape(-1, FRAME)
        rate = np.array(SAMPLE_RATE, np.int64)
        result_F = np.zeros(len(frames_FN), np.float32)
        for index, frame_N in enumerate(frames_FN):
            input_1N = np.concatenate([self.state.context_N, frame_N])[None]
            inputs = {"input": input_1N, "state": self.state.recurrent, "sr": rate}
            output, recurrent = self._session.run(None, inputs)
            self.state = State(recurrent, frame_N[-_CONTEXT:])
            result_F[index] = output[0, 0]
        return result_F


def speech_spans(
    probabilities_F: NDArray[np.float32],
    duration_s: float,
    min_speech_s: float = _MIN_SPEECH_S,
    min_silence_s: float = _MIN_SILENCE_S,
) -> list[VoicedSpan]:
    """Spans of speech by hysteresis: on at 0.5, off when below 0.35 for `min_silence_s`.

    The rule is that of silero_vad.get_speech_timestamps (without its padding and its cut of long spans).
    """
    spans: list[VoicedSpan] = []
    start: int | None = None
    quiet_since: int | None = None
    for index, probability in enumerate(probabilities_F):
        if probability >= _THRESHOLD:
            quiet_since = None
            start = index if start is None else start
        elif start is not None and (probability < _EXIT_THRESHOLD):
            quiet_since = index if quiet_since is None else quiet_since
            if (index - quiet_since) * FRAME_S >= min_silence_s:
                spans.append(VoicedSpan(start * FRAME_S, quiet_since * FRAME_S))
                start = quiet_since = None
    if start is not None:
        spans.append(VoicedSpan(start * FRAME_S, duration_s))
    return [span for span in spans if span.end_s - span.start_s > min_speech_s]


def cut(
    spans: Sequence[VoicedSpan],
    probabilities_F: NDArray[np.float32],
    duration_s: float,
    max_duration_s: float,
    merge_gap_s: float = 0.5,
    margin_s: float = 0.2,
    labels: Sequence[Label] | None = None,
) -> list[tuple[VoicedSpan, Label | None]]:
    """Cut into segments of at most `max_duration_s`; spans less than `merge_gap_s` apart join while they fit.

    Each keeps up to `margin_s` of what is around it. Speech without a pause for longer than `max_duration_s`
    is cut where the probability of speech is lowest in the second half of what is allowed.

    Args:
        labels: of each span (its speaker); only spans of the same label go together.

    Returns:
        The segments in order, each with its label.
    """
    longest_s = max(max_duration_s - 2 * margin_s, FRAME_S)
    short: list[tuple[VoicedSpan, Label | None]] = []
    named: Sequence[Label | None] = labels or [None] * len(spans)
    for span, label in zip(spans, named, strict=True):
        start_s = span.start_s
        while span.end_s - start_s > longest_s:
            low, high = int((start_s + longest_s / 2) / FRAME_S) + 1, int((start_s + longest_s) / FRAME_S)
            window_F = probabilities_F[low:high]
            cut_s = (low + int(window_F.argmin())) * FRAME_S if len(window_F) else start_s + longest_s
            short.append((VoicedSpan(start_s, cut_s), label))
            start_s = cut_s
        short.append((VoicedSpan(start_s, span.end_s), label))
    merged: list[tuple[VoicedSpan, Label | None]] = []
    for span, label in short:
        last = merged[-1][0] if merged and merged[-1][1] == label else None
        if last and span.start_s - last.end_s < merge_gap_s and span.end_s - last.start_s <= longest_s:
            merged[-1] = (VoicedSpan(last.start_s, span.end_s), label)
        else:
            merged.append((span, label))
    result = []
    for index, (span, label) in enumerate(merged):
        before_s = (merged[index - 1][0].end_s + span.start_s) / 2 if index else 0.0
        after_s = (span.end_s + merged[index + 1][0].start_s) / 2 if index + 1 < len(merged) else duration_s
        segment = VoicedSpan(max(span.start_s - margin_s, before_s), min(span.end_s + margin_s, after_s))
        result.append((segment, label))
    return result
