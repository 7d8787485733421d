"""Does the continuous autoencoder keep pitch, and the waveform? With a phase band, a harmonic source, neither.

    make -C benchmarks learn-vae DATA=../shared/data [MINUTES=10]

All sides have the same data, seed, losses and CPU time (MINUTES of one core each, two sides at a time); they differ by
`phase_band_hz` and `harmonic_source`. Scored on audio that none has seen: read speech, babies and cocks of ESC-10's
fold 1, music. The judge of pitch is pYIN, which shares nothing with the tracker of the training labels; SNR and
correlation compare the waveforms sample by sample. A side that is done is not trained again; `--side` trains and
scores one alone.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from learning_data import Recording, read_recordings
from proof import print_table
from rich.console import Console
from rich.progress import track
from sides import parse_side_options, train_sides
from torch import Tensor
from torch.nn import functional

from audiollm.evaluate.codec.signal_metrics import mel_distance, stft_distance
from audiollm.evaluate.judges.voicing import close_pitch_share, track_voicing, voicing_f1
from audiollm.evaluate.report.metric_error import MetricError
from audiollm.files.atomic import read_json, write_json
from audiollm.recipe.runner import Context
from audiollm.train.loop.loop import LoopConfig, train
from tokenizer.continuous.data import StereoStore
from tokenizer.continuous.model import AudioVAE, VAEConfig
from tokenizer.continuous.task import VAETask, VAETaskConfig, waveform_snr_db
from tokenizer.native.pitch import SOUND_HZ, VOICE_HZ

SIDES: dict[str, dict[str, Any]] = {
    "phase": {"phase_band_hz": 1500.0},
    "source": {"harmonic_source": True},
    "magnitudes": {},
    "phase and source": {"phase_band_hz": 1500.0, "harmonic_source": True},
}
SHAPE: dict[str, Any] = {
    "mel_hidden_size": 192,
    "hidden_size": 320,
    "encoder_layers": (2, 4),
    "decoder_layers": (4, 3),
}
"""`train_vae`'s size `tiny`."""
HIGHEST_PITCH_HZ = {"speech": VOICE_HZ, "babies and cocks": SOUND_HZ, "music": SOUND_HZ}
"""Kinds whose pitch is tracked; most other sounds have none."""
PITCHED = ("004", "009")
"""ESC-10's babies and cocks."""
SCORED_S = 6.0
MAX_CLIPS = 10
"""Scored clips of a kind, evenly picked: pYIN takes 2 to 3 s for a clip and its copy."""
CPU = torch.device("cpu")


def main() -> None:
    options = parse_side_options(__doc__, Path("runs/learn_vae"), 10.0, list(SIDES))
    torch.set_num_threads(1)
    console, out = Console(), options.out / f"{options.minutes:g}-minutes"
    recordings = read_recordings(options.data)
    if options.side:
        train_side(options.side, recordings, out / options.side, options.minutes, console)
        _score_vae(out / options.side, recordings)
        return
    train_sides(__file__, list(SIDES), options, out, options.minutes, console)
    scores = {side: _score_vae(out / side, recordings) for side in SIDES}
    report(scores, {side: read_json(out / side / "trained.json") for side in SIDES}, console)


def train_side(
    side: str, recordings: list[Recording], folder: Path, minutes: float, console: Console
) -> None:
    """Train and save to `folder/model`, unless that is done."""
    done = folder / "trained.json"
    if done.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = AudioVAE(VAEConfig(**SHAPE, **SIDES[side]))
    # the task's own evaluation is not what is reported: a clip is enough
    splits = [[r.clip for r in recordings if r.held_out == held_out] for held_out in (False, True)]
    stores = [StereoStore(clips, model.sample_rate) for clips in (splits[0], splits[1][:1])]
    config = VAETaskConfig(
        seed=0,
        batch_size=8,
        crop_frames=16,
        pitch_weight=1.0 if model.config.harmonic_source else 0.0,
        adversary_share=1.0,
    )
    loop = LoopConfig(seed=0, cpu_minutes=minutes, learning_rate=1.5e-3, ema_decay=0.99, evaluations=1)
    context = Context(folder, None, console, {})  # type: ignore[arg-type]
    figures = train(VAETask(model, stores[0], stores[1], config), loop, folder, context, CPU)
    model.save_pretrained(folder / "model")
    write_json(done, figures)


def _score_vae(folder: Path, recordings: list[Recording]) -> dict[str, float]:
    """The scores of a trained side, computed once."""
    path = folder / "scores.json"
    if not path.exists():
        write_json(path, score(AudioVAE.from_pretrained(folder / "model"), recordings))
    scores: dict[str, float] = read_json(path)
    return scores


def score(model: AudioVAE, recordings: list[Recording]) -> dict[str, float]:
    """Means over held-out clips, by kind of sound."""
    values_by_name: dict[str, list[float]] = defaultdict(list)
    for kind, clips in _scored_clips(recordings).items():
        store = StereoStore([recording.clip for recording in clips], model.sample_rate)
        for index in track(range(len(store)), kind, transient=True):
            real_CN = store[index][:, : round(SCORED_S * model.sample_rate)]
            made_CN = model.decode(model.encode(real_CN), real_CN.shape[1])
            highest_hz = HIGHEST_PITCH_HZ.get(kind)
            for name, value in _measures(real_CN, made_CN, model.sample_rate, highest_hz).items():
                values_by_name[f"{name}, {kind}"].append(value)
    return {name: sum(values) / len(values) for name, values in values_by_name.items()}


def _scored_clips(recordings: list[Recording]) -> dict[str, list[Recording]]:
    held_out = [recording for recording in recordings if recording.held_out]
    speech = [recording for recording in held_out if recording.kind == "speech" and recording.task != "digit"]
    kinds = {
        "speech": speech,
        "babies and cocks": [recording for recording in held_out if recording.label.startswith(PITCHED)],
        "music": [recording for recording in held_out if recording.kind == "music"],
        "other sounds": [
            recording
            for recording in held_out
            if recording.kind == "sound" and not recording.label.startswith(PITCHED)
        ],
    }
    return {kind: clips[:: -(-len(clips) // MAX_CLIPS)] for kind, clips in kinds.items()}


def _measures(real_CN: Tensor, made_CN: Tensor, rate: int, highest_hz: float | None) -> dict[str, float]:
    real_1N, made_1N = (x_CN.mean(dim=0, keepdim=True) for x_CN in (real_CN, made_CN))
    figures = {
        "mel distance": mel_distance(real_1N, made_1N, rate),
        "stft distance": stft_distance(real_1N, made_1N, rate),
        "SNR in dB": float(waveform_snr_db(real_CN, made_CN)),
        "correlation": float(functional.cosine_similarity(real_CN.flatten(), made_CN.flatten(), dim=0)),
    }
    if highest_hz is None:
        return figures
    try:
        real, generated = (track_voicing(x_1N, rate, highest_hz) for x_1N in (real_1N, made_1N))
        figures["voiced share, original"], figures["voiced share"] = real.voiced_share, generated.voiced_share
        figures["voicing F1"] = voicing_f1(real, generated)
        figures["voiced frames within 50 cents"] = close_pitch_share(real, generated)
    except MetricError:
        pass  # no voiced frame in the original
    return figures


def report(scores: dict[str, dict[str, float]], trained: dict[str, dict[str, Any]], console: Console) -> None:
    """The table for people, and a JSON line for every figure of `phase` against `source`."""
    rows = [
        [name, *(row.get(name, float("nan")) for row in scores.values())] for name in sorted(scores["phase"])
    ]
    rows.append(["CPU minutes", *(f"{row['cpu_seconds'] / 60:.1f}" for row in trained.values())])
    rows.append(["steps", *(str(row["steps"]) for row in trained.values())])
    print_table(console, "held-out audio", ("", *scores), rows)
    for name, ours in sorted(scores["phase"].items()):
        peer = scores["source"].get(name, 0.0)
        line: dict[str, Any] = {"bench": "learn_vae", "case": name}
        line |= {"ours": round(ours, 4), "peer": round(peer, 4)}
        if min(ours, peer) > 0 and "share" not in name:
            line["ratio"] = round(peer / ours if "distance" in name else ours / peer, 3)
        print(json.dumps({**line, "unit": "score"}))


if __name__ == "__main__":
    main()
