"""Rollouts by an installed SGLang, that of `SGLANG_PYTHON`, on the CPU: weights, prompts, log-probabilities."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from audiollm.errors import ConfigError
from audiollm.families.listener.policy import ListenerPolicy
from audiollm.families.logprobs.token_figures import TokenRequest
from audiollm.families.policies import plain_model
from audiollm.rl.rollouts.served.engine import ServedRollouts
from audiollm.rl.rollouts.settings import EngineChoice, server_version
from tests.audiollm.rl.rollouts.server_stand_ins import save_served
from tests.audiollm.rl.rollouts.test_served_rollouts import SETTINGS, change, ids_of, prompts

ON_CPU = {
    "device": "cpu", "attention_backend": "torch_native", "disable_cuda_graph": True, "max_total_tokens": 4096,
    "disable_overlap_schedule": True, "enable_deterministic_inference": False,
}  # fmt: skip


def hear_padding(policy: ListenerPolicy, patch: pytest.MonkeyPatch) -> None:
    """Hear the padding of recordings as SGLang's encoder of Qwen2-Audio does, which has no mask."""
    model: Any = plain_model(policy.root)
    tower = model.get_submodule("audio_tower" if hasattr(model, "audio_tower") else "model.audio_tower")
    masked = tower.forward
    patch.setattr(
        tower, "forward", lambda *inputs, **more: masked(*inputs, **{**more, "attention_mask": None})
    )


def test_sglang_samples_from_the_pushed_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = os.environ.get("SGLANG_PYTHON")
    try:
        server_version("sglang", python)
    except ConfigError:
        pytest.skip("SGLANG_PYTHON names no Python of an environment with sglang")
    save_served("qwen2_audio", tmp_path)
    torch.manual_seed(0)
    policy = ListenerPolicy.load(tmp_path, needs_reference=False)
    hear_padding(policy, monkeypatch)
    change(policy)
    choice = EngineChoice(
        name="sglang",
        python=python,
        dtype="float32",
        bucket_mb=0.5,
        max_length=512,
        memory=0.1,
        options=ON_CPU,
    )
    served_prompts = [prompts()[0], prompts()[2]]
    greedy, numbers = replace(SETTINGS, temperature=0.0), [[0]] * 2
    engine = ServedRollouts(policy.served_model(), tmp_path, choice)
    try:
        for _ in range(2):
            engine.weights_changed()
            learned = ids_of(policy.rollout_engine().sample(served_prompts, numbers, greedy))
            assert ids_of(engine.sample(served_prompts, numbers, greedy)) == learned
            change(policy)
            assert ids_of(policy.rollout_engine().sample(served_prompts, numbers, greedy)) != learned
            assert ids_of(engine.sample(served_prompts, numbers, greedy)) == learned
        engine.weights_changed()
        for temperature in (1.0, 0.7):
            settings = replace(SETTINGS, temperature=temperature)
            groups = engine.sample(served_prompts, [range(4)] * 2, settings)
            for prompt, group in zip(served_prompts, groups, strict=True):
                batch = policy.batch(policy.encode_sampled(prompt, [rollout.tokens for rollout in group]))
                request = TokenRequest(reference=False, temperature=temperature)
                old = policy.answer_logprobs(policy.root, batch, request)
                behaviour_T = torch.cat([rollout.tokens.logprob_A for rollout in group])  # type: ignore[misc]
                torch.testing.assert_close(old.policy_T.detach(), behaviour_T, rtol=0, atol=1e-4)
    finally:
        engine.close()
