"""Our calls of vLLM against an installed one: that of `VLLM_PYTHON`, or of this environment."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from audiollm.errors import ConfigError
from audiollm.families.listener.encoding import encode_prompt
from audiollm.families.listener.policy import ListenerPolicy
from audiollm.rl.rollouts.served.engine import SERVER_SIDE, llm_arguments
from audiollm.rl.rollouts.settings import EngineChoice, python_of, server_version
from tests.audiollm.rl.rollouts.server_stand_ins import save_served
from tests.audiollm.rl.rollouts.test_served_rollouts import prompts

CHOICE = EngineChoice(name="vllm", dtype="float32", max_length=512)


@pytest.mark.parametrize(("kind", "count"), [("qwen2_audio", 2), ("qwen2_5_omni", 2), ("audio_flamingo3", 1)])
def test_vllm_takes_calls_prompts_and_weights(kind: str, count: int, tmp_path: Path) -> None:
    """Of `count` prompts with recordings: Audio Flamingo 3 takes one recording in a prompt."""
    python = os.environ.get("VLLM_PYTHON")
    try:
        server_version("vllm", python)
    except ConfigError as error:
        pytest.skip(f"{error.message}: set VLLM_PYTHON to the Python of an environment with vllm")
    write_served(kind, tmp_path, count)
    script = Path(__file__).parent / "real_vllm.py"
    ran = subprocess.run(
        [python_of(python), str(script), str(SERVER_SIDE), str(tmp_path)],
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.splitlines()[-1] == "checked", ran.stdout


def write_served(kind: str, folder: Path, count: int) -> None:
    start, trained = folder / "start", folder / "trained"
    save_served(kind, start)
    policy = ListenerPolicy.load(start, needs_reference=False)
    rows = []
    for prompted in prompts()[:count]:
        prompt = policy.served_model().prompt(prompted)
        features = encode_prompt(policy.processor, prompted).features
        rows.append(
            {
                "id": prompt.id,
                "token_ids": list(prompt.token_ids),
                "read_ids": list(prompt.read_ids),
                "recordings": [samples.tolist() for samples in prompt.recordings],
                "sample_rate": prompt.sample_rate,
                "features": features["input_features"].tolist(),
            }
        )
    (folder / "served.json").write_text(
        json.dumps({"arguments": llm_arguments(start, CHOICE), "prompts": rows})
    )
    with torch.no_grad():
        for parameter in policy.root.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    shutil.copytree(start, trained)
    tensors = {name: tensor.contiguous() for name, tensor in policy.served_model().tensors()}
    save_file(tensors, trained / "model.safetensors", metadata={"format": "pt"})
