"""Rewards of steps: where steps end in the text, their values, and failures."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from audiollm.data.records.sample import Message, Sample, TextPart
from audiollm.errors import ConfigError
from audiollm.rl.rewards.batch import RewardBatch, SampledAnswer, ScoredStep, thought_steps
from audiollm.rl.rewards.catalog import RewardTerm, reward_terms
from audiollm.rl.rewards.registry import load_rewards
from audiollm.rl.rewards.scoring import RewardScores, RewardSuite
from audiollm.rl.rewards.settings import RewardSettings, StepSplit


def answer(text: str, num_tokens: int = 10, **metadata: Any) -> SampledAnswer:
    messages = [
        Message(role="user", content=[TextPart(text="What?")]),
        Message(role="assistant", content=[TextPart(text="dog")]),
    ]
    return SampledAnswer(Sample(id="q", messages=messages, task="t", metadata=metadata), text, num_tokens)


def scores_of(rewards: dict[str, Any], *answers: SampledAnswer) -> RewardScores:
    terms = reward_terms(rewards)
    return RewardSuite(terms, load_rewards(terms)).score(RewardBatch(answers))


@pytest.mark.parametrize(
    ("text", "split", "expected"),
    [
        ("<think> One. Two!\nthree </think>x", "sentences", ["One.", "Two!", "three"]),
        ("One. Two.</think><answer>x</answer>", "sentences", ["One.", "Two."]),
        ("<think>think. think", "sentences", ["think.", "think"]),
        ("<think>猫。鳥。</think>x", "sentences", ["猫。", "鳥。"]),
        ("<think>One. Two.\n\nthree</think>x", "lines", ["One. Two.", "three"]),
        ("<think>1. A cat. Loud.\n2) rain\n of many drops\nStep 3: so</think>x", "numbered",
         ["1. A cat. Loud.", "2) rain\n of many drops", "Step 3: so"]),
        ("no tags at all", "sentences", []),
        ("<think></think>x", "sentences", []),
    ],
)  # fmt: skip
def test_steps_end_where_they_stand(text: str, split: StepSplit, expected: list[str]) -> None:
    steps = thought_steps(answer(text), split)
    assert [step.text for step in steps] == expected
    for step in steps:
        assert text[: step.end].endswith(step.text)
    assert [step.end for step in steps] == sorted({step.end for step in steps})


def test_steps_name_what_is_heard_or_the_right_answer() -> None:
    text = "<think>Rain. A dog. The dog again.</think>dog"
    heard = scores_of({"steps": {"keys": ["facts"]}}, answer(text, facts=["rain"]), answer("dog", facts="x"))
    assert heard.by_name["steps"] == [pytest.approx(1 / 3), 0.0]
    assert [step.score for step in heard.steps_by_name["steps"][0] or []] == [1, 0, 0]
    assert heard.steps_by_name["steps"][1] == [ScoredStep("", 0.0, None)], "no thought: the answer is a step"
    both = scores_of({"steps": {"answer": True}}, answer(text, heard="rain"), answer(text))
    assert [[step.score for step in own or []] for own in both.steps_by_name["steps"]] == [
        [1, 1, 0],
        [0, 1, 0],
    ]


def test_steps_that_cannot_be_used_are_named() -> None:
    answers = [answer("a"), answer("b"), answer("c"), answer("d"), answer("e")]
    values = [[], [ScoredStep("x", math.nan)], [1.0], [ScoredStep("x", 1.0, 1), ScoredStep("y", 0.0)], 2]
    suite = RewardSuite([RewardTerm("own", 2.0, RewardSettings())], {"own": lambda batch: values})
    scores = suite.score(RewardBatch(answers))
    assert [problem.reason for problem in scores.problems] == [
        "gave no steps",
        "gave nan for the step 'x'",
        "gave a list of float, not of ScoredStep",
    ]
    assert scores.by_name["own"] == [None, None, None, 0.5, 2.0] and scores.total_A[3:] == [1.0, 4.0]
    assert [own is not None for own in scores.steps_by_name["own"]] == [False, False, False, True, False]


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (ScoredStep("x", None), "gave None for the step 'x'"),  # type: ignore[arg-type]
        (ScoredStep("x", "good"), "gave str, no number for the step 'x'"),  # type: ignore[arg-type]
        (ScoredStep("x", 1.0, "3"), "gave str as the end of the step 'x', no number of characters"),  # type: ignore[arg-type]
    ],
)
def test_a_step_without_a_number_is_named(step: ScoredStep, reason: str) -> None:
    suite = RewardSuite(
        [RewardTerm("own", 1.0, RewardSettings())], {"own": lambda batch: [[step]] * len(batch)}
    )
    scores = suite.score(RewardBatch([answer("a")]))
    assert [problem.reason for problem in scores.problems] == [reason] and scores.kept_A == [False]


def test_overlong_answers_by_hand() -> None:
    words = [answer("x", length) for length in (4, 6, 8, 9, 12)]
    assert scores_of({"overlong": {"buffer": 4, "max_tokens": 10}}, *words).by_name["overlong"] == [
        0.0, 0.0, -0.5, -0.75, -1.0,
    ]  # fmt: skip
    spoken = SampledAnswer(words[0].sample, "", 20 + 4, codes_KT=torch.zeros(2, 20))
    settings = {"buffer": 8, "max_tokens": 10, "max_frames": 24}
    assert scores_of({"overlong": settings}, spoken).by_name["overlong"] == [-0.5], (
        "20 of 24 frames, 4 of 10 tokens"
    )
    with pytest.raises(ConfigError, match="buffer must be at most the limit of an answer, 10"):
        reward_terms({"overlong": {"buffer": 11, "max_tokens": 10}})
    with pytest.raises(ConfigError, match="max_tokens or max_frames must be given"):
        reward_terms({"overlong": {}})
