"""Our calls of vLLM against an installed one: that of `VLLM_PYTHON`, or of this environment."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from audiollm.errors import ConfigError
from audiollm.families.listener.encoding import encode_prompt
from audiollm.families.listener.policy import ListenerPolicy
from audiollm.rl.rollouts.served.engine import VLLM_SIDE, llm_arguments
from audiollm.rl.rollouts.settings import EngineChoice, python_of, vllm_version
from tests.audiollm.models.tiny_audio_llms import save_tiny
from tests.audiollm.rl.rollouts.test_vllm_rollouts import prompts

KINDS = {"qwen2_audio": 2, "qwen2_5_omni": 2, "audio_flamingo3": 1}
"""Prompts with recordings that each takes: Audio Flamingo 3 has one recording in a prompt."""


def test_vllm_takes_our_calls_and_reads_our_prompts(tmp_path: Path) -> None:
    python = os.environ.get("VLLM_PYTHON")
    try:
        vllm_version(python)
    except ConfigError as error:
        pytest.skip(f"{error.message}: set VLLM_PYTHON to the Python of an environment with vllm")
    for kind, count in KINDS.items():
        write_served(kind, tmp_path / kind, count)
    folders = [str(tmp_path / kind) for kind in KINDS]
    script = Path(__file__).parent / "real_vllm.py"
    ran = subprocess.run(
        [python_of(python), str(script), str(VLLM_SIDE), *folders],
        capture_output=True,
        text=True,
        timeout=240,
    )
    print(ran.stdout)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.splitlines()[-1] == "checked"


def write_served(kind: str, folder: Path, count: int) -> None:
    save_tiny(kind, folder)
    policy = ListenerPolicy.load(folder, needs_reference=False)
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
    arguments = llm_arguments(folder, EngineChoice(name="vllm"))
    (folder / "served.json").write_text(json.dumps({"arguments": arguments, "prompts": rows}))
