"""A Higgs Audio v3 TTS of random weights in its published layout, small enough for tests, and mlx-audio's class."""

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

from audiollm.families.higgs_v3_tts.model import CODE_HEAD, CODE_TABLE, TEXT_HEAD, TEXT_TABLE
from audiollm.families.higgs_v3_tts.new_model import write_higgs_v3
from audiollm.families.talkers.new_talker import TalkerShape
from audiollm.families.talkers.turns import SpeechPrompt
from audiollm.files.atomic import read_json, write_json

BOOKS, CODES = 8, 16
ORACLE = Path(os.environ.get("AUDIOLLM_MLX_AUDIO", Path(__file__).parents[4] / ".oracles" / "mlx-audio"))
"""The packages `mlx-audio` and `mlx`, where `make -C benchmarks oracles` puts them."""
SCRIPT = str(Path(__file__).parents[3] / "oracles" / "published_higgs_v3.py")
CODEC_WEIGHT = "tied.embedding.modality_embeddings.0.model.fc2.weight"


def write_tiny_higgs_v3(
    folder: Path, spread: float = 0.2, heads: bool = True, dtype: torch.dtype = torch.float32
) -> Path:
    """Write a model with a tokenizer that reads bytes, a weight of a codec, and an index without the heads' copies."""
    write_higgs_v3(folder, TalkerShape(BOOKS, CODES, 64, 2, 0, 0))
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name, value in weights.items():
        if value.ndim > 1:
            weights[name] = torch.randn(value.shape, generator=generator).mul(spread).to(dtype)
    weights[CODEC_WEIGHT] = torch.randn(4, 4, generator=generator).to(dtype)
    names = sorted(weights)
    if heads:
        weights |= {CODE_HEAD: weights[CODE_TABLE].clone(), TEXT_HEAD: weights[TEXT_TABLE].clone()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "model.safetensors")}
    write_json(folder / "model.safetensors.index.json", index)
    return folder


def change_config(folder: Path, part: str, **fields: Any) -> Path:
    """Change fields of a part of config.json."""
    config = read_json(folder / "config.json")
    config[part] |= fields
    write_json(folder / "config.json", config)
    return folder


def ask_mlx(
    folder: Path, prompts: Sequence[SpeechPrompt], clips: Sequence[Tensor], rows: int, place: Path
) -> list[Mapping[str, Tensor]]:
    """What mlx-audio's class makes of prompts with clips behind them, and the rows that it says, greedily.

    It runs in a process and an environment of its own; the test is skipped where that is not at hand.
    """
    if not ORACLE.is_dir():
        pytest.skip(f"no {ORACLE}: `make -C benchmarks oracles` fetches mlx-audio")
    jobs, tensors = [], dict[str, Tensor]()
    for number, (prompt, clip_KT) in enumerate(zip(prompts, clips, strict=True)):
        references = [(turn.text, turn.codes_KT) for turn in prompt.before]
        if prompt.reference_KT is not None:
            references.insert(0, ("", prompt.reference_KT))
        jobs.append({"text": prompt.text, "references": [text for text, _ in references], "rows": rows})
        tensors[f"{number}.clip"] = clip_KT.T.int().contiguous()
        for reference, (_, codes_KT) in enumerate(references):
            tensors[f"{number}.reference{reference}"] = codes_KT.T.int().contiguous()
    (place / "jobs.json").write_text(json.dumps(jobs))
    save_file(tensors, place / "given.safetensors")
    files = [folder, place / "jobs.json", place / "given.safetensors", place / "out.safetensors"]
    subprocess.run(
        [sys.executable, "-W", "ignore", SCRIPT, *map(str, files)], check=True, capture_output=True,
        env={**os.environ, "PYTHONPATH": str(ORACLE)},
    )  # fmt: skip
    results = load_file(files[3])
    return [
        {name.partition(".")[2]: value for name, value in results.items() if name.startswith(f"{number}.")}
        for number in range(len(jobs))
    ]
