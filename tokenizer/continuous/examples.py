"""Clips before and after an autoencoder, for the report."""

from __future__ import annotations

from pathlib import Path

from audiollm.audio import save
from audiollm.autoencoder import Autoencoder
from audiollm.files.atomic import write_json
from tokenizer.continuous.data import StereoStore


def write_examples(model: Autoencoder, clips: StereoStore, folder: Path, count: int = 4) -> None:
    """Write `examples.json`: clips before and after, for the report."""
    rows = []
    for number, (_, samples_CN) in enumerate(clips.picked(count)):
        decoded_CN = model.decode(model.encode_distribution(samples_CN).mean, samples_CN.shape[1])
        row = {}
        for name, audio_CN in (("original", samples_CN), ("decoded", decoded_CN)):
            row[name] = f"examples/{number}_{name}.wav"
            save(folder / row[name], audio_CN, model.sample_rate)
        rows.append(row)
    write_json(folder / "examples.json", rows)
