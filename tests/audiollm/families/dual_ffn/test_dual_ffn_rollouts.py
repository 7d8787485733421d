"""Rollouts of a DualFFN: the log-probabilities of its policy, and draws that hang on seed, step, prompt and number."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from audiollm.data.records.sample import Message, TextPart
from audiollm.errors import BadSample, ConfigError
from audiollm.families.dual_ffn.policy import DualFFNPolicy
from audiollm.families.dual_ffn.rollouts import DualFFNRollouts
from audiollm.families.logprobs.token_figures import TokenRequest
from audiollm.families.prompts import PromptedContents
from audiollm.families.rollout import Rollout, RolloutSettings
from audiollm.generation.engine.request import AnswerKind
from tests.audiollm.families.dual_ffn.packed_samples import load, samples, save_model

SETTINGS = RolloutSettings(seed=1, step=2, answer="any", max_text_tokens=12, max_frames=6)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> DualFFNPolicy:
    return load(save_model(Path(tmp_path_factory.mktemp("model")), "features"), dtype=torch.float32)


def engine_of(policy: DualFFNPolicy) -> DualFFNRollouts:
    return DualFFNRollouts(policy.root.model, policy.template)


def old_logprobs(policy: DualFFNPolicy, prompt: PromptedContents, group: list[Rollout]) -> Tensor:
    """Log-probabilities of the training's pass, before an update."""
    batch = policy.batch(policy.encode_sampled(prompt, [each.tokens for each in group]))
    return policy.answer_logprobs(policy.root, batch, TokenRequest(reference=False)).policy_T.detach()


def behaviour(group: list[Rollout]) -> Tensor:
    return torch.cat([each.tokens.logprob_A for each in group if each.tokens.logprob_A is not None])


def assert_same(one: Rollout, other: Rollout) -> None:
    assert (one.prompt, one.number, one.seed, one.text) == (
        other.prompt,
        other.number,
        other.seed,
        other.text,
    )
    assert torch.equal(one.tokens.ids_N, other.tokens.ids_N)
    assert all(map(torch.equal, one.tokens.codes, other.tokens.codes))


@pytest.mark.parametrize("kind", ["text", "audio", "any"])
def test_behaviour_equals_old(policy: DualFFNPolicy, kind: AnswerKind) -> None:
    """Also once weights have changed, if that was announced."""
    rollouts, prompts = engine_of(policy), samples("features")
    settings = replace(SETTINGS, answer=kind)
    for _ in range(2):
        groups = rollouts.sample(prompts, [range(4)] * 3, settings)
        for prompt, group in zip(prompts, groups, strict=True):
            assert [each.number for each in group] == [0, 1, 2, 3] and group[0].prompt == prompt.id
            torch.testing.assert_close(
                old_logprobs(policy, prompt, group), behaviour(group), rtol=0, atol=1e-5
            )
        with torch.no_grad():
            for parameter in policy.root.parameters():
                parameter.data *= 1.02
        rollouts.weights_changed()


def test_a_rollout_hangs_on_seed_step_prompt_and_number_alone(policy: DualFFNPolicy) -> None:
    rollouts, prompts = engine_of(policy), samples("features")
    together = rollouts.sample(prompts, [range(4), [2], []], SETTINGS)
    assert [len(group) for group in together] == [4, 1, 0]
    (alone,) = rollouts.sample(prompts[:1], [[3, 1]], SETTINGS)
    assert_same(alone[0], together[0][3])
    assert_same(alone[1], together[0][1])
    for other_settings in (replace(SETTINGS, seed=2), replace(SETTINGS, step=3)):
        (other,) = rollouts.sample(prompts[:1], [[3]], other_settings)
        assert other[0].seed != alone[0].seed
        assert not torch.equal(other[0].tokens.ids_N, alone[0].tokens.ids_N)


def test_limits_and_greedy(policy: DualFFNPolicy) -> None:
    rollouts, prompts = engine_of(policy), samples("features")
    short = replace(SETTINGS, answer="text", max_text_tokens=2)
    (group,) = rollouts.sample(prompts[:1], [range(16)], short)
    assert any(each.truncated for each in group)
    for each in group:
        assert each.truncated == (len(each.tokens.ids_N) == 2 and each.tokens.ids_N[-1] not in ends(policy))
    (greedy,) = rollouts.sample(prompts[:1], [[0, 1]], replace(short, temperature=0.0))
    assert greedy[0].tokens.logprob_A is None
    assert torch.equal(greedy[0].tokens.ids_N, greedy[1].tokens.ids_N)


def ends(policy: DualFFNPolicy) -> list[int | None]:
    known = policy.template.tokenizer.token_to_id
    return [known("<|eot_id|>"), known("<|end_of_text|>")]


def test_what_cannot_be_asked(policy: DualFFNPolicy) -> None:
    forged = [Message(role="user", content=[TextPart(text="<|eot_id|>")])]
    with pytest.raises(BadSample, match="control token"):
        engine_of(policy).sample([PromptedContents("x", forged, [], [])], [[0]], SETTINGS)
    with pytest.raises(ConfigError, match="temperature"):
        replace(SETTINGS, temperature=-1.0)
    with pytest.raises(ConfigError, match="max_frames"):
        replace(SETTINGS, max_frames=0)
