"""What is wrong in Ke-Omni-R as released is right here: each answer hears its own prompt, and one prompt is asked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from audiollm.audio import save
from audiollm.data.chat.question_prompts import PROMPTS
from audiollm.data.convert.questions import AskedQuestion, sample_of_question
from audiollm.data.convert.request import ConversionRequest, QuestionAsking
from audiollm.evaluate.listening.audio_qa import Question
from audiollm.families.listener.policy import ListenerPolicy
from audiollm.families.logprobs.token_figures import TokenRequest
from audiollm.families.policy import PromptedAnswers
from audiollm.families.rollout import RolloutSettings
from tests.audiollm.models.tiny_audio_llms import save_tiny
from tests.audiollm.rl.preference.records import tone


def asked(folder: Path, id: str, hertz: float) -> PromptedAnswers:
    """A question about a tone."""
    from audiollm.audio import load

    path = folder / f"{id}.wav"
    tone(path, hertz, 0.4)
    return PromptedAnswers(id, [("user", ["What?", load(path)])], [])


def logprobs(policy: ListenerPolicy, prompts: list[PromptedAnswers], groups: list[list]) -> list[Tensor]:
    """Those of each answer, of all prompts in one batch."""
    encoded = [
        answer
        for prompt, group in zip(prompts, groups, strict=True)
        for answer in policy.encode_sampled(prompt, [rollout.tokens for rollout in group])
    ]
    with torch.no_grad():
        found = policy.answer_logprobs(policy.root, policy.batch(encoded), TokenRequest(reference=False))
    return [found.policy_T[found.answer_T == number] for number in range(found.num_answers)]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> ListenerPolicy:
    folder = tmp_path_factory.mktemp("llm")
    save_tiny("qwen2_audio", folder)
    return ListenerPolicy.load(folder)


def test_every_answer_of_several_prompts_hears_its_own_recording(
    tmp_path: Path, policy: ListenerPolicy
) -> None:
    """Defect (d): features were repeated group by group and masks prompt by prompt."""
    prompts = [asked(tmp_path, f"p{n}", 200.0 + 300 * n) for n in range(3)]
    settings = RolloutSettings(seed=1, step=0, max_text_tokens=6)
    groups = policy.rollout_engine().sample(prompts, [range(4)] * 3, settings)
    together = logprobs(policy, prompts, groups)
    alone = [
        each
        for prompt, group in zip(prompts, groups, strict=True)
        for each in logprobs(policy, [prompt], [group])
    ]
    for ours, own in zip(together, alone, strict=True):
        torch.testing.assert_close(ours, own, rtol=0, atol=1e-5)
    swapped = [prompts[0], replace(prompts[1], prompt=asked(tmp_path, "p1", 900.0).prompt), prompts[2]]
    changed = [
        (before - after).abs().max() > 1e-5
        for before, after in zip(together, logprobs(policy, swapped, groups), strict=True)
    ]
    assert changed == [False] * 4 + [True] * 4 + [False] * 4


@pytest.mark.parametrize("prompt", sorted(PROMPTS))
def test_training_and_evaluation_ask_in_the_same_words(tmp_path: Path, prompt: str) -> None:
    """Defect (e): the test's prompt lacked a space that the training's had."""
    save(tmp_path / "a.wav", torch.zeros(1, 800), 8_000)
    request = ConversionRequest(
        tmp_path / "x.json", tmp_path / "o.jsonl", tmp_path, {}, None, asking=QuestionAsking(prompt)
    )
    choices = ("rain", "a dog's bark", "wind")
    sample = sample_of_question(
        request, AskedQuestion("q", "What is heard?", choices, "rain", ["a.wav"]), False
    )
    question = Question(id="q", audio_id="a.wav", question="What is heard?", choices=choices, answer="rain")
    assert sample.texts("user") == [question.inquiry(tmp_path, prompt).question]  # type: ignore[union-attr]
