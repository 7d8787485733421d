"""Runs mlx-audio's class of Higgs Audio v3 STT in a process of its own: recordings in, what it gave out.

    python mlx_higgs_stt.py MODEL PROMPT.txt CHUNKS.safetensors OUT.safetensors

A recording comes as the mel frames of its chunks: mlx-audio's window is symmetric, that of whisper-large-v3's
extractor, which the published model uses, is periodic. Chunks are of 4 s, without voice
detection, whose weights are elsewhere.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_audio.stt.models.higgs_audio_3 import Model, ModelConfig
from transformers import PreTrainedTokenizerFast

STEPS = 12


def main(folder: Path, prompt: Path, chunks: Path, out: Path) -> None:
    """Run all recordings on the model of a folder."""
    model = Model(
        ModelConfig.from_dict({**json.loads((folder / "config.json").read_text()), "vad_cut": False})
    )
    weights: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        weights |= mx.load(str(path))
    model.load_weights(list(model.sanitize(weights).items()), strict=True)
    model.set_dtype(mx.float32)
    model.eval()
    model._tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder))
    results: dict[str, Any] = {}
    recordings: dict[str, list[Any]] = {}
    for name, mel in sorted(mx.load(str(chunks)).items()):
        recordings.setdefault(name.partition(".")[0], []).append(mel[None])
    for name, mels in recordings.items():
        for key, value in run(model, mels, prompt.read_text()).items():
            results[f"{name}.{key}"] = value
    mx.save_safetensors(str(out), results)


def run(model: Any, mels: list[Any], prompt: str) -> dict[str, Any]:
    """One recording: its rows by chunk, the prompt's ids and logits, the likeliest ids behind it."""
    results = {f"rows{number}": model.get_audio_features(mel)[0] for number, mel in enumerate(mels)}
    remaining = iter(mels)
    model._extract_features = lambda samples: next(remaining)
    ids, rows, _ = model.get_input_embeddings(np.zeros(64_000 * (len(mels) - 1) + 1, np.float32), prompt)
    results["ids"], results["logits"] = mx.array(ids), model(None, input_embeddings=rows)[0]
    written: list[int] = []
    for _ in range(STEPS):
        logits = model(None, input_embeddings=rows)
        written.append(int(logits[0, -1].argmax()))
        rows = mx.concatenate([rows, model.model.embed_tokens(mx.array([[written[-1]]]))], axis=1)
    results["greedy"] = mx.array(written)
    return results


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
