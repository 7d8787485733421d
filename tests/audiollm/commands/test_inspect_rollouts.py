"""`inspect --step` shows the rollouts of a step of `train_policy`, at any width."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from audiollm.commands.inspect_rollouts import groups_of_step, print_rollouts, rollout_json_lines
from audiollm.errors import ConfigError
from audiollm.files.atomic import write_jsonl


def row(id: str, number: int, reward: float | None, step: int = 3, **more: Any) -> dict[str, Any]:
    heard = {"type": "audio", "path": "a.wav", "start_s": 0.5, "end_s": 2.0, "part": 0}
    messages = [
        {"role": "user", "content": [heard, {"type": "text", "text": f"What is {id}?"}]},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "<think>I hear it.</think><answer>the key</answer>"}],
        },
    ]
    told = {
        "step": step, "id": id, "messages": messages, "number": number, "answer": f"answer {number}\x1b[2J",
        "tokens": 2, "truncated": number == 1, "rewards": {"accuracy": reward, "mine:brevity": 0.25}, "reward": reward,
        "pieces": [f"answer {number}", "\x1b[2J"], "advantages": [reward or 0.0, 0.5],
    }  # fmt: skip
    return {**told, **more}


@pytest.fixture
def stage(tmp_path: Path) -> str:
    rows = [row("flat", n, 1.0) for n in range(2)] + [
        row("varied", n, v) for n, v in enumerate((0.5, None, 2.0, -1.0))
    ]
    write_jsonl(tmp_path / "rollouts" / "000003.jsonl", rows)
    write_jsonl(tmp_path / "rollouts" / "000004.jsonl", [row("later", 0, 1.0, 4)])
    return str(tmp_path)


def printed(stage: str, width: int, **options: Any) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    print_rollouts(groups_of_step(stage, options.pop("step", 3), None), options.get("limit"), console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_best_and_the_worst_come_first(stage: str) -> None:
    text = printed(stage, 100)
    assert text.index("varied") < text.index("flat")  # what differs most
    places = [text.index(f"answer {n}  reward" if n in (0, 1) else f"answer {n} ") for n in (2, 3, 0, 1)]
    assert places == sorted(places)
    for part in (
        "answer 2 best  reward 2  accuracy 2  brevity 0.25  advantage +0.50 to +2.00  2 tokens",
        "answer 3 worst  reward -1", "right answer: the key", "<a.wav 0.5-2 s> What is varied?", "reward none",
        "2 tokens, cut", "step 3: 2 groups, mean reward 0.700",
    ):  # fmt: skip
        assert part in text, part
    assert "\x1b" not in text and "\\u001b" in text


def test_steps_without_words_are_told_from_the_outcome(stage: str) -> None:
    steps = [
        {"text": "I hear it.", "reward": 0.5, "action": 0, "is_outcome": False},
        {"text": "", "reward": 0.0, "action": 1, "is_outcome": False},
        {"text": "", "reward": 3.0, "action": 1, "is_outcome": True},
    ]
    write_jsonl(Path(stage) / "rollouts" / "000005.jsonl", [row("wise", 0, 1.0, 5, steps=steps)])
    lines = [line.strip() for line in printed(stage, 100, step=5).splitlines()]
    assert [line for line in lines if line.startswith("step  ")] == [
        "step  0.5  1  I hear it.",
        "step  0  0.5  (no words)",
        "step  3  0.5  (the whole answer)",
    ]


@pytest.mark.parametrize("width", [20, 33, 80, 200])
def test_lines_fit_the_terminal(stage: str, width: int) -> None:
    assert max(map(len, printed(stage, width).splitlines())) <= width


def test_steps_and_prompts_are_found_or_named(stage: str) -> None:
    assert groups_of_step(stage, -1, None)[0].id == "later"
    assert [group.id for group in groups_of_step(stage, 3, "flat")] == ["flat"]
    assert [group.id for group in groups_of_step(stage, 3, "1")] == ["flat"]
    assert "1 more groups" in printed(stage, 80, limit=1)
    with pytest.raises(ConfigError, match="steps are 3 to 4"):
        groups_of_step(stage, 9, None)
    with pytest.raises(ConfigError, match="for example varied"):
        groups_of_step(stage, 3, "nobody")
    with pytest.raises(ConfigError, match="train_policy"):
        groups_of_step(str(Path(stage) / "rollouts"), 3, None)


def test_json_has_every_answer_with_its_rank(stage: str) -> None:
    rows = [json.loads(line) for line in rollout_json_lines(groups_of_step(stage, 3, "varied"))]
    assert [(each["number"], each["rank"]) for each in rows] == [(2, 1), (0, 2), (3, 3), (1, 4)]
