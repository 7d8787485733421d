"""Every pass of a step on fresh answers hears the recording of its own prompt, and no other: 3 prompts x 4 answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from audiollm.data.records.manifest import ManifestSource
from audiollm.data.records.mixture import StepDraws
from audiollm.data.records.sample import AudioPart, Message, Sample, TextPart, write_samples
from audiollm.families.logprobs.token_figures import TokenRequest
from audiollm.families.rollout import Rollout, RolloutSettings
from audiollm.files.set_aside import SetAside
from audiollm.rl.critic.model import ActorCritic
from audiollm.rl.online.prompts import Prompt, PromptMaker
from audiollm.rl.online.rollout_step import RolloutGroup, RolloutMaker, sampled_answers
from audiollm.rl.online.settings import PolicyTrainingConfig
from audiollm.rl.reward_models.model import RewardModel
from audiollm.rl.rewards.catalog import reward_terms
from audiollm.rl.rewards.registry import load_rewards
from audiollm.rl.rewards.scoring import RewardSuite
from tests.audiollm.families.dual_ffn.packed_samples import save_model
from tests.audiollm.models.tiny_audio_llms import save_tiny
from tests.audiollm.rl.online.fresh_tasks import load_critic, load_policy
from tests.audiollm.rl.preference.records import tone

MODELS = ("qwen2_audio", "qwen2_5_omni", "dual")
PROMPTS, ANSWERS = 3, 4
SETTINGS = RolloutSettings(seed=1, step=0, max_text_tokens=6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("audio")
    save_model(made / "dual", "features")
    for name in MODELS[:2]:
        save_tiny(name, made / name)
    for number in range(2 * PROMPTS):  # the second three take the place of the first
        tone(made / f"{number}.wav", 200.0 + 130 * number, 0.4 + 0.1 * (number % PROMPTS))
    return made


def write_prompts(folder: Path, swapped: int | None) -> Path:
    samples = []
    for number in range(PROMPTS):
        heard = AudioPart(path=f"{number + (PROMPTS if number == swapped else 0)}.wav")
        messages = [
            Message(role="user", content=[heard, TextPart(text="low or high?")]),
            Message(role="assistant", content=[TextPart(text="low")]),
        ]
        samples.append(Sample(id=f"q{number}", messages=messages, task="question"))
    path = folder / f"swapped-{swapped}.jsonl"
    write_samples(path, samples)
    return path


class Step:
    """The passes of a step with all prompts and answers together."""

    def __init__(self, folder: Path, model: str) -> None:
        self._folder = folder
        self._policy = load_policy(folder, model)
        config: Any = {
            "samples": str(write_prompts(folder, None)), "start": folder / model, "advantage": "gae", "critic": {},
            "rewards": {"format": 1.0},
        }  # fmt: skip
        self._root = ActorCritic(
            self._policy.root,
            load_critic(PolicyTrainingConfig(**config)),
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            RewardModel.begin(folder / model).save(folder / f"judge-{model}")
        terms = reward_terms({"reward_model": {"folder": str(folder / f"judge-{model}")}})
        self._rewards = RewardSuite(terms, load_rewards(terms))
        engine = self._policy.rollout_engine()
        self._maker = RolloutMaker(engine, self._rewards, SETTINGS, ANSWERS, needs_greedy=False)

    def prompts(self, swapped: int | None) -> list[Prompt]:
        aside = SetAside(self._folder / "aside.jsonl", "test", strict=True)
        path = write_prompts(self._folder, swapped)
        maker = PromptMaker(self._policy, [ManifestSource(str(path))], StepDraws(PROMPTS), aside)
        return sorted(maker(0)[0], key=lambda prompt: prompt.sample.id)

    def rollouts(self, prompts: list[Prompt]) -> list[list[Rollout]]:
        """The groups that are sampled."""
        return [group.rollouts for group in self._maker(prompts, 0).groups]

    def figures(self, prompts: list[Prompt], answers: list[list[Rollout]]) -> dict[str, list[list[float]]]:
        """By pass and answer, the figures of its tokens, for answers that are given."""
        encoded = [
            each
            for prompt, group in zip(prompts, answers, strict=True)
            for each in self._policy.encode_sampled(prompt.prompted, [own.tokens for own in group])
        ]
        batch = self._policy.batch(encoded)
        with torch.no_grad():
            first = self._policy.answer_logprobs(
                self._root, batch, TokenRequest(reference=True, entropy=True, value=True)
            )
        now = self._policy.answer_logprobs(self._root, batch, TokenRequest(reference=False, value=True))
        assert now.policy_T.requires_grad
        flat = {
            "old": first.policy_T, "reference": first.required("reference_T"), "value": first.required("value_T"),
            "entropy": first.required("entropy_T"), "current": now.policy_T, "value now": now.required("value_T"),
        }  # fmt: skip
        found = {name: self._by_answer(value_T, first.answer_T) for name, value_T in flat.items()}
        groups = [RolloutGroup(prompt, group) for prompt, group in zip(prompts, answers, strict=True)]
        scores = self._rewards.score(sampled_answers(groups, None))
        self.problems = scores.problems
        # a reward model gives an answer without words no score
        found["reward"] = [[] if value is None else [value] for value in scores.by_name["reward_model"]]
        return found

    @staticmethod
    def _by_answer(value_T: Tensor, answer_T: Tensor) -> list[list[float]]:
        return [value_T[answer_T == number].tolist() for number in range(PROMPTS * ANSWERS)]


@pytest.mark.parametrize("model", MODELS)
def test_a_swapped_recording_changes_its_own_answers_and_no_others(folder: Path, model: str) -> None:
    step = Step(folder, model)
    prompts = step.prompts(None)
    sampled = step.rollouts(prompts)
    before = step.figures(prompts, sampled)
    assert all(len(each) == PROMPTS * ANSWERS for each in before.values())
    assert sum(map(len, before["reward"])) >= PROMPTS * ANSWERS // 2, step.problems[:2]
    for swapped in range(PROMPTS):
        others = step.prompts(swapped)
        fresh = step.rollouts(others)
        for place, (group, other) in enumerate(zip(sampled, fresh, strict=True)):
            for one, two in zip(group, other, strict=True):
                assert one.seed == two.seed
                values = [each.tokens.logprob_A.tolist() for each in (one, two)]  # type: ignore[union-attr]
                if place == swapped:
                    assert abs(values[0][0] - values[1][0]) > 1e-7, "behaviour hears the recording"
                else:
                    assert one.text == two.text and values[1] == pytest.approx(values[0], abs=1e-6)
        after = step.figures(others, sampled)
        for name, values_before in before.items():
            for number, own in enumerate(values_before):
                now = after[name][number]
                assert len(own) == len(now) and (own or name == "reward")
                if number // ANSWERS == swapped:
                    assert all(abs(a - b) > 1e-9 for a, b in zip(own, now, strict=True)), (name, number)
                else:
                    assert now == pytest.approx(own, rel=0, abs=1e-6 if name == "reward" else 1e-12), (
                        name,
                        number,
                    )
