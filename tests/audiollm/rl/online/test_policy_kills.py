"""`train_policy` and rounds of it, killed at random moments for real: they end as if nothing had been, bit for bit."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import yaml

from audiollm.data.records.manifest import read_samples
from audiollm.data.records.sample import RatedAnswer, TextPart, write_samples
from audiollm.files.atomic import read_json, read_jsonl
from audiollm.rl.reward_models.model import RewardModel
from tests.audiollm.families.dual_ffn.packed_samples import save_model
from tests.audiollm.rl.online.killed_runs import MOMENTS, KilledRuns, assert_same_files
from tests.audiollm.rl.online.prompt_records import OWN, write_prompts

STAGE: dict[str, Any] = {
    "samples": "prompts.jsonl", "start": "llm", "rewards": {f"{OWN}evenness": 1.0}, "steps": 30, "batch_size": 2,
    "group_size": 2, "max_answer_tokens": 4, "learning_rate": 1e-3, "precision": "fp32", "report_to": [],
    "evaluations": 3, "checkpoint_seconds": 0,
}  # fmt: skip
KL = {"controller": {"name": "proportional", "coefficient": 0.1, "target": 0.05}}
CASES: dict[str, dict[str, Any]] = {
    "ppo": {
        "advantage": "gae", "objective": "clip", "critic": {"learning_rate": 2e-3}, "updates": 2,
        "kl": {**KL, "place": "reward", "estimator": "k1"},
    },
    "ahead": {
        "ahead": 1, "correction": {"level": "token", "mode": "truncate"}, "kl": KL, "trained": "adapter",
        "lora": {"rank": 2, "alpha": 4}, "refresh_reference": {"every": 3, "mix": 0.6},
    },
}  # fmt: skip
ROUND = ("rollout", "reward", "reference", "written", "update", "replay", "sync")
"""Moments of a round of policy, answers and reward model, in an order in which they come."""
SLOW = (("ppo", 2), ("ppo", 20), ("ahead", 20))
OWN_MOMENTS = {"ppo": MOMENTS, "ahead": (*MOMENTS, "ahead", "refresh")}


def write_recipe(folder: Path, *stages: dict[str, Any]) -> None:
    recipe = {"name": "any", "size": "tiny", "seed": 2, "stages": list(stages)}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "kills"),
    [("ahead", 2), *SLOW],
)
def test_kills_at_random_moments_change_nothing(tmp_path: Path, case: str, kills: int) -> None:
    save_model(tmp_path / "llm", "features")
    write_prompts(tmp_path)
    write_recipe(tmp_path, {"train_policy": {**STAGE, "steps": 12 if kills < 10 else 60, **CASES[case]}})
    runs, moments = KilledRuns(tmp_path, kills), OWN_MOMENTS[case]
    for kill in range(kills):
        runs.kill(moments[(3 * kill + 1) % len(moments)])
    found, expected = runs.finish()
    names = assert_same_files(found, expected)
    assert {
        f"train_policy/{name}" for name in ("model/model.safetensors", "metrics.jsonl", "answers.jsonl")
    } < names
    figures = [row for row in read_jsonl(expected / "train_policy" / "metrics.jsonl") if "kl_weight" in row]
    assert len({row["kl_weight"] for row in figures}) > 3  # the controller moves
    if case == "ahead":
        assert max(row["mismatch_kl"] for row in figures) > 1e-6  # other weights sampled


def first_pairs(folder: Path) -> None:
    """Two answers to each prompt, the right one and another."""
    samples = []
    for sample in read_samples(folder / "prompts.jsonl")[0]:
        right = sample.messages[-1].content
        answers = [
            RatedAnswer(content=right, score=1.0),
            RatedAnswer(content=[TextPart(text="no")], score=0.0),
        ]
        samples.append(sample.model_copy(update={"messages": sample.messages[:-1], "answers": answers}))
    write_samples(folder / "pairs.jsonl", samples)


def rounds(times: int, steps: int) -> dict[str, Any]:
    """Iterative GRPO: policy, fresh answers, replay, reward model."""
    policy = {
        **STAGE, "start": "${policy}", "rewards": {"reward_model": {"folder": "${judge}"}}, "seed": "${round}",
        "kl": {"controller": {"name": "fixed", "coefficient": 0.04}}, "steps": steps,
    }  # fmt: skip
    reward = {
        "start": "${judge}", "samples": "${replay_samples.samples}", "steps": 10, "batch_size": 3, "seed": "${round}",
        "learning_rate": 1e-3, "precision": "fp32", "report_to": [], "checkpoint_seconds": 0, "evaluations": 1,
    }  # fmt: skip
    stages = [
        {"train_policy": policy},
        {"sample_answers": {"model": "${train_policy.checkpoint}", "samples": "prompts.jsonl", "group_size": 2,
                            "max_answer_tokens": 4, "score": {"exact": 1.0}, "seed": "${round}"}},
        {"select_answers": {"samples": "${sample_answers.samples}"}},
        {"replay_samples": {"fresh": "${select_answers.samples}", "earlier": "${seen}", "share": 0.3,
                            "seed": "${round}"}},
        {"train_reward": reward},
    ]  # fmt: skip
    return {
        "repeat": {
            "times": times,
            "start": {"policy": "llm", "judge": "judge", "seen": "pairs.jsonl"},
            "stages": stages,
            "next": {
                "policy": "${train_policy.checkpoint}",
                "judge": "${train_reward.checkpoint}",
                "seen": "${replay_samples.seen}",
            },
        }
    }


@pytest.mark.slow
@pytest.mark.parametrize("kills", [2, 20])
def test_kills_change_nothing_of_rounds_with_replay(tmp_path: Path, kills: int) -> None:
    save_model(tmp_path / "llm", "features")
    torch.manual_seed(0)
    RewardModel.begin(tmp_path / "llm").save(tmp_path / "judge")
    write_prompts(tmp_path)
    first_pairs(tmp_path)
    times = 1 if kills < 10 else 3
    write_recipe(tmp_path, rounds(times, 10 if kills < 10 else 20))
    runs = KilledRuns(tmp_path, kills)
    moments = ("reward", "replay") if kills < 10 else (3 * ROUND)[:kills]
    for moment in moments:
        runs.kill(moment)
    found, expected = runs.finish()
    names = assert_same_files(found, expected)
    for number in range(1, times + 1):
        assert {f"replay_samples_{number}/seen.jsonl", f"train_reward_{number}/model/reward.json"} < names
        assert read_json(expected / f"replay_samples_{number}" / "stage.json")["figures"]["replayed"] > 0


class Judge(BaseHTTPRequestHandler):
    """Gives points by the length of what it is asked, and counts how often it is asked what."""

    asked: ClassVar[Counter[str]] = Counter()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = json.dumps(body["messages"])
        Judge.asked[text] += 1
        reply = json.dumps(
            {"choices": [{"message": {"content": f"Score: {sum(map(ord, text)) % 11}"}}]}
        ).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def judge() -> Iterator[str]:
    Judge.asked = Counter()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()


@pytest.mark.slow
def test_a_judge_is_not_asked_again_after_kills(tmp_path: Path, judge: str) -> None:
    save_model(tmp_path / "llm", "features")
    write_prompts(tmp_path)
    rewards = {"judge": {"endpoint": judge, "model": "m", "together": 2}}
    write_recipe(tmp_path, {"train_policy": {**STAGE, "rewards": rewards, "steps": 10}})
    runs = KilledRuns(tmp_path, 1)
    runs.kill("update")
    runs.kill("update")
    assert set(Judge.asked.values()) == {1}
    runs.kill("reward")  # at most two requests are on their way
    found, expected = runs.finish()
    assert_same_files(found, expected, ["judge.jsonl"])
    verdicts = [{row["key"]: row["verdict"] for row in read_jsonl(next(folder.rglob("judge.jsonl")))}
                for folder in (found, expected)]  # fmt: skip
    assert verdicts[0] == verdicts[1] and len(verdicts[0]) == len(Judge.asked) > 20
    assert sum(Judge.asked.values()) <= 2 * len(Judge.asked) + 2  # both runs asked everything once
