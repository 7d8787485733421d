"""Runs mlx-audio's class of Higgs Audio v3 TTS in an environment of its own: jobs in, what it gave out.

    python published_higgs_v3.py MODEL JOBS.json TENSORS.safetensors OUT.safetensors

A job is a text, with references or without. Out: the rows of its prompt and the clip behind it, their logits, and the
rows that it said, greedily.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_audio.lm.models.cache import make_prompt_cache
from mlx_audio.tts.models.higgs_audio_v3 import (
    HiggsAudioV3Config,
    HiggsAudioV3PromptBuilder,
    HiggsSamplerState,
    Model,
    ReferenceCodes,
    apply_delay_pattern,
    step,
)


class BytesTokenizer:
    """The tokenizer of a folder, as the prompt's builder asks for it; made without transformers."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def get_added_vocab(self) -> dict[str, int]:
        return {token.content: number for number, token in self._tokenizer.get_added_tokens_decoder().items()}

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids


def main(folder: Path, jobs: Path, tensors: Path, out: Path) -> None:
    """Run all jobs on the model of a folder."""
    data = json.loads((folder / "config.json").read_text())
    if data["text_config"]["rope_theta"] is None:  # which this class does not take, unlike the servers
        del data["text_config"]["rope_theta"]
    model = Model(HiggsAudioV3Config.from_dict(data))
    weights = model.sanitize(mx.load(str(folder / "model.safetensors")))
    model.load_weights(list(weights.items()), strict=True)
    model.eval()
    model._prompt_builder = HiggsAudioV3PromptBuilder(BytesTokenizer(folder))
    given, results = mx.load(str(tensors)), dict[str, mx.array]()
    for number, job in enumerate(json.loads(jobs.read_text())):
        for name, value in run(model, job, given, number).items():
            results[f"{number}.{name}"] = value
    mx.save_safetensors(str(out), results)


def run(model: Any, job: dict[str, Any], given: dict[str, Any], number: int) -> dict[str, Any]:
    """One prompt."""
    marks = {"boc_id": model.config.audio_boc_token_id, "eoc_id": model.config.audio_eoc_token_id}
    references = [
        ReferenceCodes(apply_delay_pattern(given[f"{number}.reference{place}"], **marks), text)
        for place, text in enumerate(job["references"])
    ]
    prompt, _ = model._build_prompt_embeddings(job["text"], references)
    clip = apply_delay_pattern(given[f"{number}.clip"], **marks)
    rows = mx.concatenate([prompt, model._embed_audio_codes(clip)[None]], axis=1)
    dummy = mx.zeros((1, rows.shape[1]), dtype=mx.int32)
    logits = model._audio_logits(model.backbone(dummy, input_embeddings=rows))[0]
    return {"rows": rows[0], "logits": logits, "said": speak(model, prompt, marks, job["rows"])}


def speak(model: Any, prompt: Any, marks: dict[str, int], limit: int) -> Any:
    """The rows that the sampler draws greedily, until it says that they are all."""
    cache, rows = make_prompt_cache(model), []
    state = HiggsSamplerState(num_codebooks=model.config.audio_num_codebooks)
    embeds = prompt
    while len(rows) < limit and not state.generation_done:
        dummy = mx.zeros((1, embeds.shape[1]), dtype=mx.int32)
        hidden = model.backbone(dummy, cache=cache, input_embeddings=embeds)
        codes = step(
            model._audio_logits(hidden[:, -1, :])[0], state, temperature=0.0, top_p=None, top_k=None, **marks
        )
        rows.append(np.array(codes))
        embeds = model._embed_audio_codes(codes)[None]
    return mx.array(np.stack(rows))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
