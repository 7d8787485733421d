"""Reconstruction quality, bitrate and cost of codecs: `evaluate_codec` and, for one codec, `score_codec`.

All metrics compare at 24 kHz, whatever the codec's rate: a codec with a narrower band is charged for what it
leaves out, and one that invents a band above that of the recording is charged for that.

Shapes: N samples, K codebooks, T frames.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from audiollm.audio import AudioError, Waveform, load, probe, resample
from audiollm.codec import Codec
from audiollm.evaluate.codec.measures import CodecJudges, ReferenceClip, score_clip
from audiollm.evaluate.codec.scores import METRICS, CodecRows, count_codes, pack_counts, summarize_codecs
from audiollm.evaluate.judges.judging import judge_label
from audiollm.evaluate.report.store import Row
from audiollm.failures import failed_calls, note_success, noted_outcome
from audiollm.files.atomic import file_digest

Kind = Literal["speech", "sound", "music", "unknown"]
COMPARISON_RATE = 24_000
ORIGINAL = "original"
"""The name under which the references themselves are heard by what needs no reference (DNSMOS, the recognizer)."""


@dataclass(frozen=True)
class EvaluationClip:
    """A recording, or a span of it, to be coded. `end_s=None` is the end of the file."""

    path: Path
    start_s: float = 0.0
    end_s: float | None = None
    kind: Kind = "unknown"
    text: str | None = None
    """The transcript of the span, for the word error rate."""
    language: str | None = None
    """Language of the transcript; None: by its script."""


@dataclass(frozen=True)
class UnreadableFile:
    """A file that could not be read, and why."""

    path: str
    reason: str


@dataclass(frozen=True)
class Evaluation:
    """Settings of an evaluation.

    Args:
        metrics: names out of `METRICS`.
        codebooks: also with these numbers of leading codebooks; those that a codec has not are left out.
    """

    metrics: Sequence[str] = tuple(METRICS)
    judges: CodecJudges = field(default_factory=CodecJudges)
    codebooks: Sequence[int] = ()

    def prefixes(self, codec: Codec) -> list[int]:
        """Numbers of codebooks in ascending order; the full set is always the last."""
        fewer = {number for number in self.codebooks if number < codec.num_codebooks}
        return [*sorted(fewer), codec.num_codebooks]


def evaluate_codec(
    codecs: Mapping[str, Codec],
    clips: Sequence[EvaluationClip],
    evaluation: Evaluation,
    store: CodecRows | None = None,
    advance: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """Code and decode every clip with every codec, one clip at a time, and summarize.

    A file that cannot be read is set aside with the reason. A codec that fails on a clip gets a row in which
    every metric is n/a for that reason.

    Args:
        clips: of bounded length; see `split_clips`.
        store: keeps finished rows: they are not measured again.
        advance: called with what was done after each pair of a clip and a codec (or `ORIGINAL`).

    Returns:
        The content of `results.json`; see `codec_scores.summarize`.
    """
    store = store or CodecRows(None, {})
    rows: list[Row] = []
    set_aside: list[UnreadableFile] = []
    warm: set[str] = set()
    for clip in clips:
        clip_rows: list[Row] = []
        try:
            for row in _clip_rows(codecs, clip, evaluation, store, warm):
                clip_rows.append(row)
                advance(f"{clip.path.name} · {row['codec']}")
            rows += clip_rows
        except AudioError as error:
            set_aside.append(UnreadableFile(str(error.path), error.reason))
            for _ in range(len(codecs) + 1 - len(clip_rows)):
                advance(f"{clip.path.name} · set aside")
    facts = {name: describe_codec(codec, evaluation.prefixes(codec)) for name, codec in codecs.items()}
    return summarize_codecs(rows, facts, evaluation.metrics, [vars(item) for item in set_aside])


def score_codec(
    codec: Codec,
    clips: Sequence[EvaluationClip],
    metrics: Sequence[str] = tuple(METRICS),
    judges: CodecJudges | None = None,
    codebooks: Sequence[int] = (),
    max_seconds: float = 30.0,
) -> dict[str, Any]:
    """One codec's scores, without files or a page: what a benchmark needs.

    Returns:
        `kinds` (metric tables by kind of clip), `prefixes`, `codebooks` (usage and perplexity), `speed`, the
        codec's shape, and `set_aside`, as in `evaluate_codec`'s `codecs`.
    """
    pieces, set_aside = split_clips(clips, max_seconds)
    evaluation = Evaluation(metrics, judges or CodecJudges(), codebooks)
    result = evaluate_codec({"codec": codec}, pieces, evaluation)
    scores: dict[str, Any] = result["codecs"]["codec"]
    return {**scores, "set_aside": [*(vars(item) for item in set_aside), *result["set_aside"]]}


def split_clips(
    clips: Sequence[EvaluationClip], max_seconds: float
) -> tuple[list[EvaluationClip], list[UnreadableFile]]:
    """Clips in equal pieces of at most `max_seconds`; a piece has no transcript, since the text is the whole's.

    Returns:
        The pieces, and the files whose header cannot be read.
    """
    pieces: list[EvaluationClip] = []
    set_aside: list[UnreadableFile] = []
    for clip in clips:
        try:
            duration_s = _clip_duration_s(clip)
        except AudioError as error:
            set_aside.append(UnreadableFile(str(error.path), error.reason))
            continue
        number = max(1, math.ceil(duration_s / max_seconds - 1e-6))
        if number == 1:
            pieces.append(clip)
            continue
        edges = [clip.start_s + duration_s * index / number for index in range(number)]
        for start_s, end_s in zip(edges, [*edges[1:], clip.end_s], strict=True):
            pieces.append(replace(clip, start_s=start_s, end_s=end_s, text=None))
    return pieces, set_aside


def describe_codec(codec: Codec, prefixes: Sequence[int]) -> dict[str, Any]:
    """Rate, shape and bitrate (frames a second x codebooks x log2 of their size) of a codec."""
    bits = math.log2(codec.codebook_size)
    weights = codec.parameters() if isinstance(codec, torch.nn.Module) else None
    parameters = None if weights is None else sum(weight.numel() for weight in weights)
    return {
        "sample_rate": codec.sample_rate,
        "frame_rate": codec.frame_rate,
        "num_codebooks": codec.num_codebooks,
        "codebook_size": codec.codebook_size,
        "bitrate_bps": codec.frame_rate * codec.num_codebooks * bits,
        "parameters": parameters,
        "prefix_bitrates_bps": {str(number): codec.frame_rate * number * bits for number in prefixes},
    }


def match_reference(decoded_1M: Tensor, sample_rate: int, reference: Waveform) -> Tensor:
    """A codec's output at the rate and length of `reference`, in [-1, 1] as a file would hold it.

    What a codec returns beyond the end is cut; what it leaves short is silence, and counts against it.
    """
    decoded_1N = resample(decoded_1M.float(), sample_rate, reference.sample_rate).clamp(-1.0, 1.0)
    missing = reference.num_samples - decoded_1N.shape[1]
    return functional.pad(decoded_1N, (0, missing))


# --------------------------------------------------------------------------------------------------- rows


def _clip_rows(
    codecs: Mapping[str, Codec],
    clip: EvaluationClip,
    evaluation: Evaluation,
    store: CodecRows,
    warm: set[str],
) -> Iterator[Row]:
    """The row of the original and of each codec; the file is read only if one of them is missing."""
    content = _content_key(clip, evaluation) if store.path else ""
    recording: Waveform | None = None
    reference: ReferenceClip | None = None
    for name, codec in ((ORIGINAL, None), *codecs.items()):
        books = [] if codec is None else evaluation.prefixes(codec)
        row = store.get(name, content, books)
        if row is not None:
            _note_earlier_scores(name, evaluation.judges)
        else:
            failed_before = failed_calls()
            if recording is None or reference is None:
                recording = load(clip.path, clip.start_s, clip.end_s, mono=True)
                wave = recording.resample(COMPARISON_RATE)
                reference = ReferenceClip(wave, clip.kind, clip.text, evaluation.judges, clip.language)
            if codec is None:
                scores = score_clip(reference, reference.wave.samples_CN, evaluation.metrics, original=True)
                measured: dict[str, Any] = {"scores": {"0": scores}}
            else:
                if name not in warm:
                    _warm_up(codec)
                    warm.add(name)
                measured = _score_codec(name, codec, recording, reference, evaluation)
            row = {
                "codec": name,
                "path": str(clip.path),
                "start_s": clip.start_s,
                "end_s": clip.end_s,
                "kind": clip.kind,
                "duration_s": recording.duration_s,
                "words": reference.num_words,
                **measured,
            }
            if failed_calls() == failed_before:  # else the next run measures it again
                store.add(name, content, books, row)
        yield row


def _note_earlier_scores(codec: str, judges: CodecJudges) -> None:
    """Record that a codec has coded a clip, and judges have judged it, in an earlier run."""
    note_success(f"the codec {codec}")
    for judge in (judges.recognizer, judges.speaker):
        if judge is not None:
            note_success(judge_label(judge))


def _score_codec(
    name: str, codec: Codec, recording: Waveform, reference: ReferenceClip, evaluation: Evaluation
) -> dict[str, Any]:
    """Encode once, decode each prefix, score; the times are CPU-seconds of this process."""
    prefixes = evaluation.prefixes(codec)
    scores: dict[str, dict[str, float | str]] = {}
    samples_1N = recording.resample(codec.sample_rate).samples_CN
    decode_s = 0.0
    try:
        with noted_outcome(f"the codec {name}"):
            codes_KT, encode_s = _time_codec_call(codec.encode, samples_1N)
            if codes_KT.ndim != 2 or codes_KT.shape[0] != codec.num_codebooks:
                raise CodecFailure(f"codes {list(codes_KT.shape)}, not [{codec.num_codebooks}, frames]")
            for number in prefixes:
                decoded_1M, decode_s = _time_codec_call(codec.decode, codes_KT[:number])
                decoded_1N = match_reference(decoded_1M, codec.sample_rate, reference.wave)
                scores[str(number)] = score_clip(reference, decoded_1N, evaluation.metrics)
    except CodecFailure as error:
        reason = f"the codec failed: {error}"
        return {"scores": {str(number): dict.fromkeys(evaluation.metrics, reason) for number in prefixes}}
    counts_KV = count_codes(codes_KT, codec.codebook_size)
    return {
        "scores": scores,
        "encode_cpu_s": encode_s,
        "decode_cpu_s": decode_s,
        "counts": pack_counts(counts_KV),
    }


class CodecFailure(Exception):
    """A codec that raises on a clip, or gives codes of the wrong shape."""


def _time_codec_call(call: Callable[[Tensor], Tensor], argument: Tensor) -> tuple[Tensor, float]:
    """The result on the CPU, and its CPU-seconds; whatever a codec raises is its result for this clip."""
    started = time.process_time()
    try:
        with torch.no_grad():
            result = call(argument).cpu()
    except Exception as error:
        raise CodecFailure(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from error
    return result, time.process_time() - started


def _warm_up(codec: Codec) -> None:
    """Run the codec once untimed, for its lazy set-up. A failure here fails again where it is reported."""
    with suppress(CodecFailure):
        codes_KT, _ = _time_codec_call(codec.encode, torch.zeros(1, codec.sample_rate))
        _time_codec_call(codec.decode, codes_KT)


# --------------------------------------------------------------------------------------------------- keys


def _content_key(clip: EvaluationClip, evaluation: Evaluation) -> str:
    """The key of a row, made of the clip and the scoring: the file's content counts, not its name.

    Raises:
        AudioError: the file cannot be read.
    """
    try:
        digest = file_digest(clip.path)
    except OSError as error:
        raise AudioError(clip.path, f"cannot be read ({error.strerror})") from error
    return json.dumps(
        [
            digest,
            clip.start_s,
            clip.end_s,
            clip.kind,
            clip.text,
            sorted(evaluation.metrics),
        ]
    )


def _clip_duration_s(clip: EvaluationClip) -> float:
    if clip.end_s is not None:
        probe(clip.path)
        return clip.end_s - clip.start_s
    duration_s = probe(clip.path).duration_s
    if duration_s is None:
        duration_s = load(clip.path).duration_s
    return duration_s - clip.start_s
