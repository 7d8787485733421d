"""Scores of one side of `learn_tokenizer.py`: distances, speech quality, use of the codes, linear probes.

Shapes: K codebooks, T frames, D latent dimension.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from learning_data import Recording
from rich.console import Console
from rich.progress import track
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from audiollm.evaluate.codec.signal_metrics import MetricError, mel_distance, pesq, stft_distance, stoi
from audiollm.evaluate.judges.voicing import (
    close_pitch_share,
    harmonicity,
    periodicity_error,
    track_voicing,
    voicing_f1,
)
from tokenizer.clips import load_levelled
from tokenizer.quantizers.residual import Quantizer, perplexity

SCORED_S = 20.0
"""Scored length of a held-out clip: the middle of longer ones."""
SEGMENTS = 4
"""A clip's frames are averaged over as many equal parts for the probe, so that a digit's order counts."""
PROBES = ("digit", "speaker", "sound")


class Scored(Protocol):
    """Codec interface that the scoring needs."""

    sample_rate: int
    codebook_size: int
    quantizer: Quantizer

    def encode(self, samples_CN: Tensor) -> Tensor: ...
    def decode(self, codes_KT: Tensor) -> Tensor: ...


def score_side(codec: Scored, recordings: Sequence[Recording], console: Console) -> dict[str, Any]:
    """All figures of a trained codec."""
    codes = {id(r): _codes(codec, r) for r in track(recordings, "encoding", console=console, transient=True)}
    held_out = [r for r in recordings if r.held_out]
    result: dict[str, Any] = {"clips": _reconstruction(codec, held_out, codes, console)}
    for books, suffix in ((None, ""), (1, " (first codebook)")):
        for task in PROBES:
            rows = [r for r in recordings if r.task == task]
            features = [_pooled(codec, codes[id(r)][:books]) for r in rows]
            result[f"probe {task}{suffix}"] = _probe(rows, features)
    for name, chosen in (("codes_used", [r for r in recordings if not r.held_out]), ("perplexity", held_out)):
        all_KT = torch.cat([codes[id(r)] for r in chosen], dim=1)
        if name == "perplexity":
            result[name] = perplexity(all_KT, codec.codebook_size).tolist()
        else:
            result[name] = [len(codes_T.unique()) / codec.codebook_size for codes_T in all_KT]
    return result


def _codes(codec: Scored, recording: Recording) -> Tensor:
    return codec.encode(load_levelled(_middle(recording), codec.sample_rate)[None])


def _middle(recording: Recording) -> Any:
    clip = recording.clip
    spare = clip.end_s - clip.start_s - SCORED_S if recording.held_out else 0.0
    if spare <= 0:
        return clip
    start_s = clip.start_s + spare / 2
    return type(clip)(clip.path, start_s, start_s + SCORED_S)


def _reconstruction(
    codec: Scored, held_out: Sequence[Recording], codes: dict[int, Tensor], console: Console
) -> dict[str, dict[str, float]]:
    """Distances by kind, and PESQ and STOI of read speech (digits are too short for both), of every clip."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for recording in track(held_out, "decoding", console=console, transient=True):
        real_1N = load_levelled(_middle(recording), codec.sample_rate)[None]
        made_1N = codec.decode(codes[id(recording)])[:, : real_1N.shape[1]]
        metrics: dict[str, Callable[[Tensor, Tensor, int], float]] = {
            f"mel distance {recording.kind}": mel_distance,
            f"stft distance {recording.kind}": stft_distance,
        }
        if recording.kind == "speech" and recording.task != "digit":
            metrics |= {"pesq": pesq, "stoi": stoi}
        if recording.kind == "speech":
            metrics |= _voicing_metrics(
                real_1N, made_1N, codec.sample_rate, "digits" if recording.task == "digit" else "read speech"
            )
        for name, metric in metrics.items():
            try:
                found[name][_name(recording)] = metric(real_1N, made_1N, codec.sample_rate)
            except MetricError as error:
                console.print(f"  {recording.clip.path.name}: {name}: {error.reason}")
    return dict(sorted(found.items()))


def _voicing_metrics(
    real_1N: Tensor, made_1N: Tensor, sample_rate: int, kind: str
) -> dict[str, Callable[[Tensor, Tensor, int], float]]:
    """Voicing and pitch by pYIN, which shares nothing with the tracker of the training labels."""
    tracks = cache(lambda made: track_voicing(made_1N if made else real_1N, sample_rate))
    pairs = {
        "voicing F1": voicing_f1,
        "voiced frames within 50 cents": close_pitch_share,
        "periodicity error": periodicity_error,
    }
    of_pair = {
        name: lambda *_, measure=measure: measure(tracks(False), tracks(True))
        for name, measure in pairs.items()
    }
    of_one = {
        "periodicity 1 to 4 kHz, original": lambda *_: harmonicity(tracks(False)),
        "periodicity 1 to 4 kHz": lambda *_: harmonicity(tracks(True)),
    }
    return {f"{name}, {kind}": measure for name, measure in (of_pair | of_one).items()}


def _name(recording: Recording) -> str:
    return f"{recording.clip.path.name} {recording.clip.start_s:g}"


def _pooled(codec: Scored, codes_KT: Tensor) -> np.ndarray:
    """Mean code vectors of each part of the clip, and their spread over the whole."""
    with torch.no_grad():
        latent_TD = codec.quantizer.decode(codes_KT[None])[0]
    edges = np.linspace(0, len(latent_TD), SEGMENTS + 1)
    parts = [latent_TD[int(a) : max(int(a) + 1, int(b))].mean(0) for a, b in pairwise(edges)]
    return torch.cat([*parts, latent_TD.std(0, unbiased=False)]).numpy()


def _probe(rows: Sequence[Recording], features: Sequence[np.ndarray]) -> float:
    """Accuracy of a linear classifier on what it has not seen: the held-out clips, or every other one of them."""
    if all(row.held_out for row in rows):  # speakers: the tokenizer has seen none of them
        unseen = [index % 2 == 1 for index in range(len(rows))]
    else:
        unseen = [row.held_out for row in rows]
    x, y = np.stack(features), np.array([row.label for row in rows])
    test = np.array(unseen)
    model = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=2000))
    return float(model.fit(x[~test], y[~test]).score(x[test], y[test]))
