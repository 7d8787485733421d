"""Rows of measurements, kept in a file so that none is taken twice, and their summary.

Shapes: K codebooks, V codebook size, T frames.
"""

from __future__ import annotations

import base64
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from audiollm.evaluate.report.statistics import bootstrap_ratio, metric_table
from audiollm.evaluate.report.store import Row, RowStore

KINDS = ("speech", "sound", "music", "unknown")
VERSION = 2
"""Version of the rows: raise it when a metric changes or is added, so that old rows are computed anew."""

MIN_COMPARED_CLIPS = 8
"""Clips from which one codec may be told to be better than another: an interval of fewer, drawn anew, is too narrow."""


@dataclass(frozen=True)
class Metric:
    """The title, direction, precision and scope of a metric."""

    title: str
    higher_is_better: bool
    digits: int
    speech_only: bool = False
    needs_reference: bool = True
    unit: str = ""
    is_as_original: bool = False
    """Whether the original's value is the aim, so that neither more nor less is better."""

    @property
    def direction(self) -> str:
        """The sign behind its title."""
        return "≈ original" if self.is_as_original else "↑" if self.higher_is_better else "↓"


METRICS: dict[str, Metric] = {
    "mel_distance": Metric("mel distance", False, 3),
    "stft_distance": Metric("STFT distance", False, 3),
    "si_sdr": Metric("SI-SDR", True, 2, unit="dB"),
    "pesq": Metric("PESQ", True, 2, speech_only=True),
    "stoi": Metric("STOI", True, 3, speech_only=True),
    "voicing_f1": Metric("voiced/unvoiced F1", True, 3),
    "close_pitch": Metric("voiced frames within 50 cents", True, 3),
    "pitch_error": Metric("pitch error", False, 1, unit="cents"),
    "periodicity_error": Metric("periodicity error", False, 3),
    "voiced_share": Metric("voiced share", True, 3, needs_reference=False, is_as_original=True),
    "harmonicity": Metric("periodicity, 1 to 4 kHz", True, 3, needs_reference=False, is_as_original=True),
    "dnsmos": Metric("DNSMOS", True, 2, speech_only=True, needs_reference=False),
    "speaker_similarity": Metric("speaker similarity", True, 3, speech_only=True),
    "word_error_rate": Metric("word error rate", False, 3, speech_only=True, needs_reference=False),
}


class CodecRows:
    """Rows by codec and clip, kept in a `RowStore`; `path=None` keeps nothing.

    Args:
        path: the file of rows.
        fingerprints: of each codec and, as `""`, of everything else that rows depend on (the judges).
    """

    def __init__(self, path: Path | None, fingerprints: Mapping[str, str]) -> None:
        self.path, self._store, self._fingerprints = path, RowStore(path), fingerprints

    def get(self, codec: str, content: str, prefixes: Sequence[int]) -> Row | None:
        """The finished row, under the codec's present name; None where it is not there."""
        row = self._store.get(*self._depends_on(codec, content, prefixes))
        return None if row is None else {**row, "codec": codec}

    def add(self, codec: str, content: str, prefixes: Sequence[int], row: Row) -> None:
        self._store.add(row, *self._depends_on(codec, content, prefixes))

    def _depends_on(self, codec: str, content: str, prefixes: Sequence[int]) -> list[Any]:
        return [VERSION, self._fingerprints.get(codec), self._fingerprints.get(""), content, list(prefixes)]


def count_codes(codes_KT: Tensor, codebook_size: int) -> NDArray[np.int64]:
    """Count how often each code of each codebook occurs, `[K, V]`."""
    rows = [torch.bincount(codes_T.long(), minlength=codebook_size) for codes_T in codes_KT]
    counts_KV: NDArray[np.int64] = torch.stack(rows).numpy()
    return counts_KV


def pack_counts(counts_KV: NDArray[np.int64]) -> dict[str, Any]:
    """The counts as plain data for a line of JSON: mostly zeros, a few kilobytes."""
    data = base64.b64encode(zlib.compress(counts_KV.astype("<u4").tobytes())).decode()
    return {"shape": list(counts_KV.shape), "zlib": data}


def unpack_counts(packed: Mapping[str, Any]) -> NDArray[np.int64]:
    data = zlib.decompress(base64.b64decode(packed["zlib"]))
    counts_KV: NDArray[np.int64] = np.frombuffer(data, dtype="<u4").reshape(packed["shape"]).astype(np.int64)
    return counts_KV


def codebook_statistics(counts_KV: NDArray[np.int64]) -> dict[str, Any]:
    """Use of each codebook: the share of its codes that occur, and the perplexity, exp of the entropy in nats.

    Over few frames both are bounded by their number, which is there as `frames`.
    """
    totals_K1 = counts_KV.sum(axis=1, keepdims=True)
    share_KV = counts_KV / np.maximum(totals_K1, 1)
    logs_KV = np.log(share_KV, out=np.zeros_like(share_KV), where=share_KV > 0)
    return {
        "frames": int(totals_K1.max(initial=0)),
        "usage": [float(value) for value in (counts_KV > 0).mean(axis=1)],
        "perplexity": [float(value) for value in np.exp(-(share_KV * logs_KV).sum(axis=1))],
    }


def summarize_codecs(
    rows: Sequence[Row],
    facts: Mapping[str, Mapping[str, Any]],
    metrics: Sequence[str],
    set_aside: Sequence[Mapping[str, str]],
) -> dict[str, Any]:
    """The content of `results.json`.

    Args:
        rows: of all clips and codecs; those of a codec that is not in `facts` are of the originals.
        facts: what is known of each codec without a clip.

    Returns:
        `clips` (number and seconds by kind), `original` (by kind, the metrics without a reference),
        `codecs` (each with its facts, `kinds`, `prefixes`, `codebooks`, `speed`), `best` (by kind and metric, the
        codec that is better than each other one beyond chance) and `set_aside`. A metric
        is a table of `mean`, `median`, `n`, `not_available` and `reasons`; the mean of the word error rate
        is that of the whole: all errors over all words.
    """
    of_codec: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        of_codec[row["codec"]].append(row)
    originals = [row for name, codec_rows in of_codec.items() if name not in facts for row in codec_rows]
    own_metrics = [name for name in metrics if not METRICS[name].needs_reference]
    return {
        "clips": _summarize_clips(originals),
        "metrics": list(metrics),
        "original": _by_kind(originals, "0", own_metrics),
        "codecs": {
            name: _summarize_codec(of_codec[name], codec_facts, metrics)
            for name, codec_facts in facts.items()
        },
        "best": {
            kind: dict(_best_codecs(of_codec, facts, kind, metrics)) for kind in _summarize_clips(originals)
        },
        "set_aside": list(set_aside),
    }


def _best_codecs(
    of_codec: Mapping[str, Sequence[Row]],
    facts: Mapping[str, Mapping[str, Any]],
    kind: str,
    metrics: Sequence[str],
) -> Iterator[tuple[str, str]]:
    """Each metric that one codec is the best in, over clips of a kind, and that codec."""
    for metric in metrics:
        if METRICS[metric].is_as_original or len(facts) < 2:
            continue
        sign = 1.0 if METRICS[metric].higher_is_better else -1.0
        least_gain = 0.5 * 10.0 ** -METRICS[metric].digits  # what is less is equal as it is printed
        scores = {
            name: _signed_scores(
                [row for row in of_codec[name] if row["kind"] == kind],
                str(facts[name]["num_codebooks"]),
                metric,
                sign,
            )
            for name in facts
        }
        for name in facts:
            if all(_is_better(scores[name], scores[rival], least_gain) for rival in facts if rival != name):
                yield metric, name


def _signed_scores(
    rows: Sequence[Row], prefix: str, metric: str, sign: float
) -> dict[tuple[Any, ...], tuple[float, float]]:
    """Score, of which more is better, and weight of each clip that has one."""
    return {
        (row["path"], row["start_s"], row["end_s"]): (
            sign * value,
            float(row["words"]) if metric == "word_error_rate" else 1.0,
        )
        for row in rows
        if not isinstance(value := row["scores"][prefix][metric], str)
    }


def _is_better(
    scores: Mapping[tuple[Any, ...], tuple[float, float]],
    rivals: Mapping[tuple[Any, ...], tuple[float, float]],
    least_gain: float,
) -> bool:
    """Whether the 95 % interval of the mean difference over clips that both have, drawn anew, lies above a gain."""
    clips = [clip for clip in scores if clip in rivals]
    if len(clips) < MIN_COMPARED_CLIPS:
        return False
    weights = [scores[clip][1] for clip in clips]
    gains = [(scores[clip][0] - rivals[clip][0]) * scores[clip][1] for clip in clips]
    interval = bootstrap_ratio(gains, weights)
    return interval is not None and interval[0] > least_gain


def _summarize_codec(rows: Sequence[Row], facts: Mapping[str, Any], metrics: Sequence[str]) -> dict[str, Any]:
    full = str(facts["num_codebooks"])
    prefixes = {number: _by_kind(rows, number, metrics) for number in facts["prefix_bitrates_bps"]}
    coded = [row for row in rows if "counts" in row]
    seconds = sum(row["duration_s"] for row in coded)
    counts_KV = np.zeros((facts["num_codebooks"], facts["codebook_size"]), dtype=np.int64)
    for row in coded:
        counts_KV += unpack_counts(row["counts"])
    return {
        **facts,
        "kinds": prefixes[full],
        "prefixes": prefixes,
        "codebooks": codebook_statistics(counts_KV),
        "speed": {
            "audio_s": seconds,
            "encode_cpu_s_per_audio_s": _ratio(sum(row["encode_cpu_s"] for row in coded), seconds),
            "decode_cpu_s_per_audio_s": _ratio(sum(row["decode_cpu_s"] for row in coded), seconds),
        },
        "failed_clips": len(rows) - len(coded),
    }


def _by_kind(rows: Sequence[Row], prefix: str, metrics: Sequence[str]) -> dict[str, Any]:
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["kind"]].append(row)
    return {
        kind: {name: _tabulate_metric(groups[kind], prefix, name) for name in metrics}
        for kind in _order_kinds(groups)
    }


def _tabulate_metric(rows: Sequence[Row], prefix: str, name: str) -> dict[str, Any]:
    """The table of one metric over rows, whose `scores[prefix][metric]` is a number or the reason for n/a."""
    weights = [row["words"] for row in rows] if name == "word_error_rate" else None
    return metric_table([row["scores"][prefix][name] for row in rows], weights)


def _summarize_clips(rows: Sequence[Row]) -> dict[str, Any]:
    kinds = _order_kinds({row["kind"] for row in rows})
    lengths = {kind: [row["duration_s"] for row in rows if row["kind"] == kind] for kind in kinds}
    return {kind: {"clips": len(durations), "seconds": sum(durations)} for kind, durations in lengths.items()}


def _order_kinds(kinds: Iterable[str]) -> list[str]:
    return sorted(kinds, key=KINDS.index)


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator > 0 else None
