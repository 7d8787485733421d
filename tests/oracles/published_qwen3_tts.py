"""Runs the published class of Qwen3-TTS in an environment of its own: jobs in, what it gave out.

    python published_qwen3_tts.py MODEL JOBS.json TENSORS.safetensors OUT.safetensors

A job is a prompt: ids, form, voice, language, frames. Out: what its talker was given, and the codes that it said.
"""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

sys.modules.setdefault("sox", types.ModuleType("sox"))  # of a tokenizer that is not used here
# ruff: noqa: E402

import torch
from qwen_tts.core.models.configuration_qwen3_tts import Qwen3TTSConfig
from qwen_tts.core.models.modeling_qwen3_tts import Qwen3TTSForConditionalGeneration
from safetensors.torch import load_file, save_file


def main(folder: Path, jobs: Path, tensors: Path, out: Path) -> None:
    """Run all jobs on the model of a folder."""
    data = json.loads((folder / "config.json").read_text())
    model = Qwen3TTSForConditionalGeneration(Qwen3TTSConfig(**data))
    missing, unexpected = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    assert not unexpected and all(name.startswith("speaker_encoder.") for name in missing), (
        missing,
        unexpected,
    )
    given, results = load_file(tensors), dict[str, torch.Tensor]()
    for number, job in enumerate(json.loads(jobs.read_text())):
        for name, value in run(model.eval(), job, given, number).items():
            results[f"{number}.{name}"] = value.contiguous()
    if "samples" in given:
        results["vector"] = model.extract_speaker_embedding(given["samples"].numpy(), 24_000)
    save_file(results, out)


def run(
    model: Any, job: dict[str, Any], given: dict[str, torch.Tensor], number: int
) -> dict[str, torch.Tensor]:
    """One prompt, greedily."""
    seen: dict[str, torch.Tensor] = {}
    generate = type(model.talker).generate

    def record(**arguments: Any) -> Any:
        seen["rows"] = arguments["inputs_embeds"][0]
        seen["beside"] = arguments["trailing_text_hidden"][0]
        return generate(model.talker, **arguments)

    model.talker.generate = record
    clone = None
    if f"{number}.vector" in given:
        reference = given.get(f"{number}.codes")
        clone = {
            "ref_spk_embedding": [given[f"{number}.vector"]], "x_vector_only_mode": [reference is None],
            "icl_mode": [reference is not None], "ref_code": [reference],
        }  # fmt: skip
    ids = {
        name: None if job[name] is None else [torch.tensor([job[name]])]
        for name in ("text", "instruct", "reference")
    }
    codes, _ = model.generate(
        input_ids=ids["text"], instruct_ids=ids["instruct"], ref_ids=ids["reference"], voice_clone_prompt=clone,
        languages=[job["language"] or "auto"], speakers=[job["speaker"]], non_streaming_mode=job["form"] == "whole",
        max_new_tokens=job["frames"], repetition_penalty=job["penalty"], do_sample=False, subtalker_dosample=False,
    )  # fmt: skip
    with torch.no_grad():
        hidden_1SC = model.talker.model(inputs_embeds=seen["rows"][None]).last_hidden_state
        logits_FJV, _ = model.talker.forward_sub_talker_finetune(codes[0][:1], hidden_1SC[0, -1:])
        seen |= {
            "hidden": hidden_1SC[0],
            "logits": model.talker.codec_head(hidden_1SC[0]),
            "depth": logits_FJV[0],
        }
    return {**seen, "codes": codes[0]}


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
