"""Rollouts of transformers' models: their policy's log-probabilities, whatever generation_config.json asks for."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch

from audiollm.audio import Waveform
from audiollm.errors import BadSample, ConfigError
from audiollm.families.listener.policy import ListenerPolicy
from audiollm.families.listener.rollouts import ListenerRollouts
from audiollm.families.logprobs.token_figures import TokenRequest
from audiollm.families.policy import PromptedAnswers
from audiollm.families.rollout import RolloutSettings
from audiollm.models.audio_llms.inputs import placeholder_ids
from audiollm.train.settings import LoRASettings
from tests.audiollm.models.tiny_audio_llms import TINY, save_tiny

SETTINGS = RolloutSettings(seed=1, step=2, max_text_tokens=60)


@pytest.fixture(scope="module", params=sorted(set(TINY) - {"qwen2_5_omni"}))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp(request.param)
    save_tiny(request.param, made)
    return Path(made)


def load(folder: Path, trained: str = "all") -> ListenerPolicy:
    """In float32; the end of the turn is drawn now and then, as any of some 260 tokens."""
    torch.manual_seed(0)
    policy = ListenerPolicy.load(
        folder, "adapter" if trained == "adapter" else "all", LoRASettings(rank=2), needs_reference=False
    )
    with torch.no_grad():
        for name, parameter in policy.root.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
        policy.root.model.get_output_embeddings().weight.mul_(0.2)
    return policy


def prompts(folder: Path) -> list[PromptedAnswers]:
    """Of unequal length, with a recording and without."""
    noise = 0.1 * torch.randn(1, 24_000, generator=torch.Generator().manual_seed(0))
    return [
        PromptedAnswers("heard", [("user", ["What is said?", Waveform(noise, 16_000)])], []),
        PromptedAnswers("long", [("user", [Waveform(noise[:, :17_000], 16_000), "What, of all?"])], []),
        PromptedAnswers("read", [("user", ["Hello."])], []),
    ]


def engine_of(policy: ListenerPolicy, max_rows: int = 64) -> ListenerRollouts:
    return ListenerRollouts(policy.root.model, policy.processor, policy.ends, max_rows)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("trained", ["all", "adapter"])
def test_behaviour_equals_old(folder: Path, temperature: float, trained: str) -> None:
    """With warpers in the model's generation config, which are off; for answers that end, and those that are cut."""
    policy = load(folder, trained)
    own = policy.root.model.generation_config
    own.top_k, own.top_p, own.repetition_penalty, own.do_sample, own.temperature = 1, 0.5, 1.7, True, 0.3
    own.suppress_tokens, own.no_repeat_ngram_size = [1, 2, 3], 2
    groups = engine_of(policy).sample(
        prompts(folder), [range(10)] * 3, replace(SETTINGS, temperature=temperature)
    )
    assert policy.root.model.generation_config is own and own.top_k == 1
    truncated = set()
    for prompt, group in zip(prompts(folder), groups, strict=True):
        sampled = [each.tokens for each in group]
        batch = policy.batch(policy.encode_sampled(prompt, sampled))
        answers = policy.answer_logprobs(
            policy.root, batch, TokenRequest(reference=False, temperature=temperature)
        )
        for number, (rollout, tokens) in enumerate(zip(group, sampled, strict=True)):
            ours = answers.policy_T[answers.answer_T == number].detach()
            assert tokens.logprob_A is not None and len(ours) == tokens.num_actions
            torch.testing.assert_close(ours, tokens.logprob_A, rtol=0, atol=1e-4)
            assert not set(tokens.ids_N.tolist()) & set(placeholder_ids(policy.root.model.config))
            assert rollout.truncated == (int(tokens.ids_N[-1]) not in policy.ends)
            truncated.add(rollout.truncated)
    assert truncated == {True, False}


def test_a_rollout_does_not_hang_on_its_batch(folder: Path) -> None:
    policy = load(folder)
    together = engine_of(policy).sample(prompts(folder), [range(4), [2], range(3)], SETTINGS)
    parted = engine_of(policy, max_rows=3).sample(prompts(folder), [range(4), [2], range(3)], SETTINGS)
    (alone,) = engine_of(policy).sample(prompts(folder)[:1], [[3]], SETTINGS)
    for one, other in zip(chain(*together), chain(*parted), strict=True):
        assert (one.prompt, one.number, one.seed) == (other.prompt, other.number, other.seed)
        assert torch.equal(one.tokens.ids_N, other.tokens.ids_N)
    assert torch.equal(alone[0].tokens.ids_N, together[0][3].tokens.ids_N)
    (later,) = engine_of(policy).sample(prompts(folder)[:1], [[3]], replace(SETTINGS, step=3))
    assert not torch.equal(alone[0].tokens.ids_N, later[0].tokens.ids_N)


def test_greedy_and_refusals(folder: Path) -> None:
    policy = load(folder)
    (group,) = engine_of(policy).sample(prompts(folder)[:1], [[0, 1]], replace(SETTINGS, temperature=0.0))
    assert group[0].tokens.logprob_A is None
    assert torch.equal(group[0].tokens.ids_N, group[1].tokens.ids_N)
    with pytest.raises(ConfigError, match="answers in text"):
        engine_of(policy).sample(prompts(folder), [[0]] * 3, replace(SETTINGS, answer="audio"))
    short = PromptedAnswers("x", [("user", [Waveform(torch.zeros(1, 10), 16_000)])], [])
    with pytest.raises(BadSample, match="x"):
        engine_of(policy).sample([short], [[0]], SETTINGS)
