"""A small Higgs Audio v3 STT of random weights in its published files; and `mlx-audio`'s class, where it is at hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from audiollm.audio import Waveform
from audiollm.models.audio_llms.new_transcriber import NewTranscriberConfig, write_transcriber

TEXTS = ("one two", "seven", "three four five")
ORACLE = Path(os.environ.get("AUDIOLLM_MLX_AUDIO", Path(__file__).parents[4] / ".oracles" / "mlx-audio"))
"""The packages `mlx-audio`, `mlx` and `mlx-cpu`, where `make -C benchmarks oracles` puts them."""
SCRIPT = str(Path(__file__).parents[3] / "oracles" / "mlx_higgs_stt.py")
GENERATION_ONLY = "audio_codebook_embeddings.weight"
"""A weight of the published files that recognition does not use."""


def write_tiny_higgs_stt(
    folder: Path, dtype: torch.dtype = torch.float32, spread: float = 3.0, max_shard_size: int | str = "600KB"
) -> Path:
    """Write a model in two files with their index, as published; its samples' words are `TEXTS`.

    Args:
        spread: factor on the matrices, so that a random model has answers of its own.
    """
    config = NewTranscriberConfig.model_construct(
        samples=folder, vocabulary=320, width=64, layers=2, encoder_width=64, encoder_layers=2, seed=0
    )
    write_transcriber(folder, config, TEXTS, max_shard_size)
    generator = torch.Generator().manual_seed(7)
    for number, path in enumerate(sorted(folder.glob("*.safetensors"))):
        weights = load_file(path)
        for name, value in weights.items():
            if "embed_positions" not in name:
                noise = torch.randn(value.shape, generator=generator)
                weights[name] = value * spread if value.ndim > 1 else value + 0.1 * noise
        if number == 0:
            weights[GENERATION_ONLY] = torch.randn(3, 64, generator=generator)
        save_file({name: value.to(dtype) for name, value in weights.items()}, path, metadata={"format": "pt"})
        if number == 0 and (index := folder / "model.safetensors.index.json").exists():
            content = json.loads(index.read_text())
            content["weight_map"][GENERATION_ONLY] = path.name
            index.write_text(json.dumps(content))
    return folder


def change_config(folder: Path, **changes: Any) -> None:
    """Set keys of config.json; a dictionary is laid over the one that is there."""
    path = folder / "config.json"
    content = json.loads(path.read_text())
    for key, value in changes.items():
        content[key] = {**content[key], **value} if isinstance(value, dict) else value
    path.write_text(json.dumps(content))


def stored_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder by name."""
    return {
        name: value
        for path in sorted(folder.glob("*.safetensors"))
        for name, value in load_file(path).items()
    }


def noise(seconds: float, seed: int = 0) -> Waveform:
    """Noise at 16 kHz."""
    generator = torch.Generator().manual_seed(seed)
    return Waveform(0.1 * torch.randn(1, round(16_000 * seconds), generator=generator), 16_000)


def tone(seconds: float, hertz: float) -> Waveform:
    """A tone at 16 kHz."""
    return Waveform(
        0.3 * torch.sin(2 * torch.pi * hertz * torch.arange(round(16_000 * seconds)) / 16_000)[None], 16_000
    )


def ask_mlx(
    folder: Path, inputs: Sequence[Mapping[str, Tensor]], prompt: str, place: Path
) -> list[dict[str, Tensor]]:
    """Give what `mlx-audio` makes of recordings: rows of each chunk, prompt ids, logits of the prompt, greedy ids.

    It runs in a process of its own; the test is skipped where the package is not at hand.

    Args:
        inputs: of the processor, whose mel frames it takes.
    """
    if not ORACLE.is_dir():
        pytest.skip(f"no {ORACLE}: `make -C benchmarks oracles` fetches mlx-audio")
    mels = {
        f"{number}.{chunk:03}": mel_MF[:, mask_F.bool()].contiguous()
        for number, made in enumerate(inputs)
        for chunk, (mel_MF, mask_F) in enumerate(
            zip(made["input_features"], made["input_features_mask"], strict=True)
        )
    }
    save_file(mels, place / "in.safetensors")
    (place / "prompt.txt").write_text(prompt)
    files = [folder, place / "prompt.txt", place / "in.safetensors", place / "out.safetensors"]
    subprocess.run(
        [sys.executable, "-W", "ignore", SCRIPT, *map(str, files)], check=True, capture_output=True,
        env={**os.environ, "PYTHONPATH": str(ORACLE)},
    )  # fmt: skip
    results = load_file(files[3])
    return [
        {name.partition(".")[2]: value for name, value in results.items() if name.startswith(f"{number}.")}
        for number in range(len(inputs))
    ]
