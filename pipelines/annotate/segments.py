"""One recording to its segments: the work that runs in parallel, file by file.

Shapes: C channels, N samples, F frames of 32 ms.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from audiollm.set_aside import UNREADABLE, Row, set_aside_row
from pipelines.annotate.voice_activity import FRAME_S, SAMPLE_RATE, Span, VoiceActivity, cut, speech_spans

if TYPE_CHECKING:
    from audiollm.audio import Waveform
    from audiollm.evaluate.recognizers import PocketsphinxRecognizer

_BLOCK_S = 300.0
_OVERLAP_S = 1.0
_PADDING_FRAMES = 10
_DITHER = 1e-3
_LONG_EDGE_S, _EDGE_MARGIN_S = 0.5, 0.2
_CLIPPED = 0.999
_FLOOR_DBFS = -120.0
_UNITS = {"too short": " s", "too long": " s", "too quiet": " dBFS", "clipped": " of the samples"}


@dataclass(frozen=True)
class Thresholds:
    """What a segment must keep to. Written by preset in `stage.PRESETS`; each may be set by hand."""

    min_duration_s: float
    max_duration_s: float
    min_level_dbfs: float
    max_clipped_share: float


class Recording(NamedTuple):
    """A file to annotate, and what is given to be said in it."""

    path: str
    text: str | None


@dataclass
class Annotator:
    """Finds, measures and recognizes the segments of recordings; a `Worker` of `pipelines.engine`.

    Args:
        recognizers: their names; the first one's text is used where none is given.
        grammar: the texts that a recognizer may hear; None: any.
    """

    thresholds: Thresholds
    recognizers: Sequence[str]
    grammar: Sequence[str] | None

    def setup(self) -> None:
        self._voice_activity = VoiceActivity()
        # faint noise goes before every recording, for those that are tiny or cut tightly
        noise = np.random.default_rng(0).normal(0.0, _DITHER, round(_PADDING_FRAMES * FRAME_S * SAMPLE_RATE))
        self._voice_activity.probabilities(noise.astype(np.float32))
        self._after_noise = self._voice_activity.state
        self._recognizers = {name: make_recognizer(name, self.grammar) for name in self.recognizers}

    def process(self, recording: Recording) -> dict[str, Any]:
        """`{"segments": [...], "set_aside": [...]}`; the former without id, speaker, split and quality."""
        from audiollm.audio import AudioError

        try:
            if recording.text is None:
                return self._annotate_unknown(recording.path)
            return self._annotate_given(recording.path, recording.text)
        except AudioError as error:
            return _rows(set_aside(recording.path, UNREADABLE, error.reason))

    def _annotate_given(self, path: str, text: str) -> dict[str, Any]:
        """One segment: the file, without long stretches of non-speech at its ends."""
        from audiollm.audio import load, probe

        duration_s = probe(path).duration_s or 0.0
        if (
            duration_s > 2 * self.thresholds.max_duration_s + 60.0
        ):  # trimming would not save it: not worth reading
            span = Span(0.0, duration_s)
            return _rows(_filtered(path, "too long", span, duration_s, self.thresholds.max_duration_s))
        waveform = load(path)
        spans = speech_spans(self._probabilities([_mono_16k(waveform)]), waveform.duration_s)
        span = _trim(waveform.duration_s, spans)
        row = self._describe(path, span, spans, _slice(waveform, span), text)
        if not spans and "text" in row:
            row["note"] = "no speech heard in it, kept whole"
        return _rows(row)

    def _annotate_unknown(self, path: str) -> dict[str, Any]:
        """The stretches of speech in a file of any length; their text is what the first recognizer heard."""
        from audiollm.audio import load

        durations: list[float] = []
        whole: list[Waveform] = []

        def blocks() -> Iterator[NDArray[np.float32]]:
            for block in _blocks(path):
                whole[:] = [block] if not durations else []
                durations.append(block.duration_s)
                yield _mono_16k(block)

        probabilities_F = self._probabilities(blocks())
        duration_s = sum(durations)
        spans = speech_spans(probabilities_F, duration_s)
        rows = []
        for span in cut(spans, probabilities_F, duration_s, self.thresholds.max_duration_s):
            waveform = _slice(whole[0], span) if whole else load(path, span.start_s, span.end_s)
            rows.append(self._describe(path, span, spans, waveform, None))
        return _rows(*rows or [set_aside(path, "no speech found")])

    def _probabilities(self, blocks: Iterable[NDArray[np.float32]]) -> NDArray[np.float32]:
        """Speech probability by frame of one recording, given in blocks at 16 kHz."""
        self._voice_activity.state = self._after_noise
        return np.concatenate([self._voice_activity.probabilities(block_N) for block_N in blocks])

    def _describe(
        self, path: str, span: Span, spans: Sequence[Span], waveform: Waveform, given: str | None
    ) -> dict[str, Any]:
        """The row of a segment, or of what a filter or the recognizer sets aside."""
        from audiollm.audio import peak_dbfs, rms_dbfs

        samples_CN, limits = waveform.samples_CN, self.thresholds
        duration_s = span.end_s - span.start_s
        level_dbfs = max(rms_dbfs(samples_CN), _FLOOR_DBFS)
        clipped_share = float((samples_CN.abs() >= _CLIPPED).double().mean())
        for kind, value, threshold, is_wrong in (
            ("too short", duration_s, limits.min_duration_s, duration_s < limits.min_duration_s),
            ("too long", duration_s, limits.max_duration_s, duration_s > limits.max_duration_s + 1e-6),
            ("too quiet", level_dbfs, limits.min_level_dbfs, level_dbfs < limits.min_level_dbfs),
            ("clipped", clipped_share, limits.max_clipped_share, clipped_share > limits.max_clipped_share),
        ):
            if is_wrong:
                return _filtered(path, kind, span, value, threshold)
        heard = {
            name: recognizer.recognize(samples_CN, waveform.sample_rate)
            for name, recognizer in self._recognizers.items()
        }
        first = next(iter(heard), None)
        if given is None and first is None:
            return _filtered(path, "no text given and no recognizer asked for", span)
        if given is None and not heard[str(first)]:
            return _filtered(path, "no words recognized", span)
        inside = (min(s.end_s, span.end_s) - max(s.start_s, span.start_s) for s in spans)
        return {
            "path": path,
            "start_s": round(span.start_s, 6),
            "end_s": round(span.end_s, 6),
            "duration_s": round(duration_s, 6),
            "text": given if given is not None else heard[str(first)],
            "text_source": "given" if given is not None else first,
            "heard": heard,
            "speech_s": round(sum(max(seconds, 0.0) for seconds in inside), 6),
            "level_dbfs": round(level_dbfs, 2),
            "peak_dbfs": round(max(peak_dbfs(samples_CN), _FLOOR_DBFS), 2),
            "clipped_share": round(clipped_share, 6),
            "sample_rate": waveform.sample_rate,
            "num_channels": waveform.num_channels,
        }


def make_recognizer(name: str, grammar: Sequence[str] | None) -> PocketsphinxRecognizer:
    """A recognizer by its name.

    Raises:
        ValueError: it cannot hear what the grammar holds.
    """
    from audiollm.evaluate.recognizers import PocketsphinxRecognizer

    return {"pocketsphinx": PocketsphinxRecognizer}[name](grammar)


def set_aside(path: str, kind: str, reason: str = "", **figures: float | None) -> Row:
    """A recording's row of `set_aside.jsonl`."""
    return set_aside_row("annotate", path, kind, reason, "", **figures)


def _filtered(
    path: str, kind: str, span: Span, value: float | None = None, threshold: float | None = None
) -> Row:
    """The row of a part of a recording, with its span in seconds and, of a filter, what it compared."""
    where = f"from {span.start_s:.2f} to {span.end_s:.2f} s"
    figures: dict[str, float | None] = {"start_s": round(span.start_s, 6), "end_s": round(span.end_s, 6)}
    if value is None:
        return set_aside(path, kind, where, **figures)
    unit = _UNITS[kind]
    reason = f"{value:.4g}{unit}, the limit is {threshold}{unit}; {where}"
    return set_aside(path, kind, reason, **figures, value=round(value, 6), threshold=threshold)


def _rows(*rows: dict[str, Any]) -> dict[str, Any]:
    return {
        "segments": [row for row in rows if "text" in row],
        "set_aside": [row for row in rows if "text" not in row],
    }


def _trim(duration_s: float, spans: Sequence[Span]) -> Span:
    """The recording; on a side that is long without speech, only a margin before or after speech is kept."""
    if not spans:
        return Span(0.0, duration_s)
    before_s, after_s = spans[0].start_s, duration_s - spans[-1].end_s
    return Span(
        before_s - _EDGE_MARGIN_S if before_s > _LONG_EDGE_S else 0.0,
        spans[-1].end_s + _EDGE_MARGIN_S if after_s > _LONG_EDGE_S else duration_s,
    )


def _blocks(path: str) -> Iterator[Waveform]:
    """A recording in blocks of five minutes. Each is read with a second of the one before it, so that a read
    at the very end finds that second alone, and an error is never taken for the end."""
    from audiollm.audio import Waveform, load

    block, start_s = load(path, 0.0, _BLOCK_S), 0.0
    while block.num_samples > 0:
        yield block
        start_s += _BLOCK_S
        if block.num_samples < round(_BLOCK_S * block.sample_rate):
            return
        block = load(path, start_s - _OVERLAP_S, start_s + _BLOCK_S)
        block = Waveform(block.samples_CN[:, round(_OVERLAP_S * block.sample_rate) :], block.sample_rate)


def _mono_16k(waveform: Waveform) -> NDArray[np.float32]:
    samples_N: NDArray[np.float32] = waveform.mono().resample(SAMPLE_RATE).samples_CN[0].numpy()
    return samples_N


def _slice(waveform: Waveform, span: Span) -> Waveform:
    from audiollm.audio import Waveform

    start, end = (round(seconds * waveform.sample_rate) for seconds in span)
    return Waveform(waveform.samples_CN[:, start : max(end, start + 1)], waveform.sample_rate)
