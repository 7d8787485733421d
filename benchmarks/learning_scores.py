"""Scores of one side of `learn_tokenizer.py`: distances, speech quality, use of the codes, linear probes.

Shapes: K codebooks, T frames, D latent dimension.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, Protocol

import librosa
import numpy as np
import torch
from learning_data import Recording
from rich.console import Console
from rich.progress import track
from scipy.signal import lfilter
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from audiollm.evaluate.codec.signal_metrics import MetricError, mel_distance, pesq, stft_distance, stoi
from audiollm.evaluate.judges.voicing import (
    RATE,
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
PAUSE_FRAME, PAUSE_DB = 640, 30.0
"""Samples at 16 kHz, and decibels below the loudest frame, of a pause."""
WHISPER_FRAME, WHISPER_ORDER, WHISPER_WIDENING = 720, 16, 0.97
"""Samples of a frame (30 ms), order of linear prediction, and the factor on the poles' radii, which
widens the resonances so that none follows a single harmonic."""


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
    for name, selected in (
        ("codes_used", [r for r in recordings if not r.held_out]),
        ("perplexity", held_out),
    ):
        all_KT = torch.cat([codes[id(r)] for r in selected], dim=1)
        if name == "perplexity":
            result[name] = perplexity(all_KT, codec.codebook_size).tolist()
        else:
            result[name] = [len(codes_T.unique()) / codec.codebook_size for codes_T in all_KT]
    return result


def _codes(codec: Scored, recording: Recording) -> Tensor:
    return codec.encode(load_levelled(_middle(recording), codec.sample_rate)[None])


def _middle(recording: Recording) -> Any:
    clip = recording.clip
    if not recording.held_out or clip.end_s is None:
        return clip
    spare = clip.end_s - clip.start_s - SCORED_S
    if spare <= 0:
        return clip
    start_s = clip.start_s + spare / 2
    return type(clip)(clip.path, start_s, start_s + SCORED_S)


def _reconstruction(
    codec: Scored, held_out: Sequence[Recording], codes: dict[int, Tensor], console: Console
) -> dict[str, dict[str, float]]:
    """Distances by kind, and PESQ and STOI of read speech (digits are too short for both), of every clip."""
    distances: dict[str, dict[str, float]] = defaultdict(dict)
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
        if recording.kind == "music":
            metrics |= _voiced_shares(real_1N, made_1N, codec.sample_rate, "music")
        if recording.task == "speaker":
            whisper_1N = whispered(real_1N)
            made_whisper_1N = codec.decode(codec.encode(whisper_1N))[:, : whisper_1N.shape[1]]
            metrics |= _voiced_shares(whisper_1N, made_whisper_1N, codec.sample_rate, "whispers")
        for name, metric in metrics.items():
            try:
                distances[name][_name(recording)] = metric(real_1N, made_1N, codec.sample_rate)
            except MetricError as error:
                console.print(f"  {recording.clip.path.name}: {name}: {error.reason}")
    return dict(sorted(distances.items()))


def _voicing_metrics(
    real_1N: Tensor, made_1N: Tensor, sample_rate: int, kind: str
) -> dict[str, Callable[[Tensor, Tensor, int], float]]:
    """Voicing and pitch by pYIN, which shares nothing with the tracker of the training labels."""
    tracks = cache(lambda is_made: track_voicing(made_1N if is_made else real_1N, sample_rate))
    pairs = {
        "voicing F1": voicing_f1,
        "voiced frames within 50 cents": close_pitch_share,
        "periodicity error": periodicity_error,
    }
    of_pair = {
        name: lambda *_, measure=measure: measure(tracks(False), tracks(True))
        for name, measure in pairs.items()
    }
    pauses_F = cache(lambda: quiet(tracks(False).samples_N, len(tracks(False).voiced_F)))
    of_pauses = {
        "voiced share, pauses, original": lambda *_: _mean_of_pauses(tracks(False).voiced_F[pauses_F()]),
        "voiced share, pauses": lambda *_: _mean_of_pauses(tracks(True).voiced_F[pauses_F()]),
    }
    of_one = {
        "periodicity 1 to 4 kHz, original": lambda *_: harmonicity(tracks(False)),
        "periodicity 1 to 4 kHz": lambda *_: harmonicity(tracks(True)),
    }
    measures = of_pair | of_one | (of_pauses if kind == "read speech" else {})
    return {f"{name}, {kind}": measure for name, measure in measures.items()}


def quiet(samples_N: np.ndarray, frames: int) -> np.ndarray:
    """Whether each of pYIN's frames lies `PAUSE_DB` or more below the loudest, `[frames]`."""
    energy_F = librosa.feature.rms(y=samples_N, frame_length=PAUSE_FRAME, hop_length=RATE // 100)[0][:frames]
    level_F = 20 * np.log10(np.maximum(energy_F, 1e-9))
    below_F: np.ndarray = level_F < level_F.max() - PAUSE_DB
    return below_F


def _mean_of_pauses(values_F: np.ndarray) -> float:
    """Raises: MetricError: there are no values."""
    if not len(values_F):
        raise MetricError("no pause")
    return float(values_F.mean())


def _voiced_shares(
    real_1N: Tensor, made_1N: Tensor, sample_rate: int, kind: str
) -> dict[str, Callable[[Tensor, Tensor, int], float]]:
    return {
        f"voiced share, {kind}, original": lambda *_: track_voicing(real_1N, sample_rate).voiced_share,
        f"voiced share, {kind}": lambda *_: track_voicing(made_1N, sample_rate).voiced_share,
    }


def whispered(samples_1N: Tensor) -> Tensor:
    """The speech with its harmonics removed: noise through the filters of linear prediction, frame by frame."""
    samples_N = samples_1N[0].double().numpy()
    noise_N = np.random.default_rng(0).standard_normal(len(samples_N))
    window_W = np.hanning(WHISPER_FRAME + 1)[:-1]
    whisper_N = np.zeros(len(samples_N))
    for start in range(0, len(samples_N) - WHISPER_FRAME, WHISPER_FRAME // 2):
        span = slice(start, start + WHISPER_FRAME)
        frame_W = samples_N[span] * window_W + 1e-6 * noise_N[span]
        filter_X = librosa.lpc(frame_W, order=WHISPER_ORDER)
        filter_X = filter_X * WHISPER_WIDENING ** np.arange(len(filter_X))
        level = np.sqrt(np.mean(lfilter(filter_X, [1.0], frame_W) ** 2) / np.mean(window_W**2))
        whisper_N[span] += lfilter([1.0], filter_X, level * noise_N[span]) * window_W
    return torch.from_numpy(whisper_N).float()[None]


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
