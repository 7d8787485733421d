"""A third family, a talker with a code predictor, goes through every stage without a line outside its folder."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console
from typer.testing import CliRunner

from audiollm.audio import load
from audiollm.commands.cli import build_app
from audiollm.commands.machine_speed import MachineSpeed
from audiollm.commands.run import stage_plans
from audiollm.data.records.sample import AudioPart, Message, RatedAnswer, Sample, TextPart, write_samples
from audiollm.data.records.shards import ShardWriter
from audiollm.errors import ConfigError, StageError
from audiollm.families.logprobs.token_figures import TokenRequest
from audiollm.families.policies import load_policy
from audiollm.families.prompts import PromptedContents
from audiollm.families.rollout import RolloutSettings
from audiollm.recipe.runner import run_recipe
from audiollm.recipe.stages import load_recipe
from audiollm.train.settings import LoRASettings
from tests.audiollm.families.toy_families import TOYS, talker_installed

__all__ = ["talker_installed"]
WORDS = ("one", "two", "six")
FAST = {"batch_size": 4, "precision": "fp32", "report_to": [], "learning_rate": 1e-2, "evaluations": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, talker_installed: Path) -> Any:
    """A model with random weights, and shards: a word says which code is said, the first answer is the right one."""
    with pytest.MonkeyPatch.context() as patch:
        for place in (talker_installed, TOYS):
            patch.syspath_prepend(place)
        from toy_talker.model import MODEL_TYPE, Talker, TalkerConfig

        from audiollm.models.pretrained import save_model

        made = tmp_path_factory.mktemp("talker")
        torch.manual_seed(0)
        model = Talker(TalkerConfig())
        save_model(made / "model", model, MODEL_TYPE, model.config)
        _write(made / "spoken", pairs=False)
        _write(made / "pairs", pairs=True)
        yield made
        for name in [name for name in sys.modules if name.startswith("toy_talker")]:
            del sys.modules[name]


def _write(folder: Path, pairs: bool) -> None:
    writer = ShardWriter(folder, samples_per_shard=16)
    for number in range(16):
        word = WORDS[number % 3]
        codes = [torch.full((2, 4), 1 + number % 3), torch.full((2, 9), 7)][: 2 if pairs else 1]
        question = Message(role="user", content=[TextPart(text=word)])
        speech = [[AudioPart(path=f"{take}.wav")] for take in range(len(codes))]
        answers = (
            [RatedAnswer(content=part, score=-take) for take, part in enumerate(speech)] if pairs else []
        )
        messages = [question] if pairs else _conversation(word)
        split = {"split": "test" if number >= 12 else "train"}
        sample = Sample(id=f"{word}{number}", messages=messages, task="tts", metadata=split, answers=answers)
        writer.write(number, sample, [[codes_KT.numpy() for codes_KT in codes]])
    writer.close({"codec": {"num_codebooks": 2, "codebook_size": 16}})


def _conversation(word: str) -> list[Message]:
    return [
        Message(role="user", content=[TextPart(text=word)]),
        Message(role="assistant", content=[AudioPart(path="0.wav")]),
    ]


def run(folder: Path, name: str, stage: str, fast: dict[str, Any] = FAST, **settings: Any) -> dict[str, Any]:
    recipe = {"name": "any", "size": "tiny", "seed": 1, "stages": [{stage: {**fast, **settings}}]}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(recipe))
    run_recipe(load_recipe(path, name=name, runs=folder), Console(quiet=True))
    figures: dict[str, Any] = json.loads((folder / name / stage / "stage.json").read_text())["figures"]
    return figures


def curve(folder: Path, run: str, stage: str, key: str) -> list[float]:
    rows = map(json.loads, (folder / run / stage / "metrics.jsonl").read_text().splitlines())
    return [row[key] for row in rows if key in row]


def spoken(folder: Path, model: Path, text: str) -> Any:
    """The likeliest codes of a text."""
    from toy_talker.model import BEGIN, load_talker
    from toy_talker.policy import GREEDY
    from toy_talker.speaking import speak

    (state,) = speak(load_talker(model), torch.tensor([*text.encode(), BEGIN]), [0], GREEDY, 12)
    return state


@pytest.fixture(scope="module")
def trained(folder: Path) -> Path:
    """The model after `train`."""
    run(folder, "sft", "train", start=str(folder / "model"), samples=str(folder / "spoken"), steps=60)
    return folder / "sft" / "train" / "model"


def test_train_teaches_what_is_said(folder: Path, trained: Path) -> None:
    losses = curve(folder, "sft", "train", "audio_loss")
    assert losses[-1] < 0.2
    for number, word in enumerate(WORDS):
        state = spoken(folder, trained, word)
        assert state.has_ended and torch.stack(state.frames, 1).tolist() == [[1 + number] * 4] * 2


@pytest.mark.parametrize(
    "changed", [{}, {"trained": "adapter", "lora": {"target_modules": ["q_proj", "v_proj"]}}]
)
def test_preferences_are_learned(folder: Path, trained: Path, changed: dict[str, Any]) -> None:
    name = f"dpo{len(changed)}"
    run(
        folder, name, "train_preference", start=str(trained), samples=str(folder / "pairs"), objective="dpo",
        steps=10, **changed,
    )  # fmt: skip
    margins = curve(folder, name, "train_preference", "margin")
    assert margins[-1] > 1
    assert (folder / name / "train_preference" / "model" / "config.json").is_file()


def test_rewards_are_learned(folder: Path) -> None:
    """The model with random weights, which says noise for long, learns to say four frames."""
    run(
        folder, "grpo", "train_policy", start=str(folder / "model"), samples=str(folder / "spoken"), answer="audio",
        rewards={"toy_talker.rewards:few_frames": 1.0}, group_size=8, steps=20, max_frames=12,
    )  # fmt: skip
    rewards = curve(folder, "grpo", "train_policy", "reward")
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 1


@pytest.mark.parametrize("trained", ["all", "adapter"])
def test_rollouts_have_the_log_probabilities_of_the_policy(folder: Path, trained: str) -> None:
    from toy_talker.policy import TalkerPolicy

    policy = load_policy(folder / "model", trained, LoRASettings(target_modules=("q_proj",)))  # type: ignore[arg-type]
    assert isinstance(policy, TalkerPolicy)
    question = PromptedContents("a", [Message(role="user", content=[TextPart(text="one")])], [], [])
    settings = RolloutSettings(1, 0, answer="audio", max_frames=20, temperature=0.8)
    (group,) = policy.rollout_engine().sample([question], [[0, 1, 2, 3]], settings)
    (alone,) = policy.rollout_engine().sample([question], [[2]], settings)
    assert torch.equal(alone[0].tokens.codes[0], group[2].tokens.codes[0])
    batch = policy.batch(policy.encode_sampled(question, [rollout.tokens for rollout in group]))
    logprobs = policy.answer_logprobs(policy.root, batch, TokenRequest(reference=False, temperature=0.8))
    sampled = torch.cat([rollout.tokens.logprob_A for rollout in group])
    assert torch.allclose(logprobs.policy_T, sampled, atol=1e-5)
    assert len({len(rollout.tokens.codes[0][0]) for rollout in group}) > 1


def test_codes_are_learned_as_generation_runs(folder: Path) -> None:
    """The row of a frame never sees its own codes: another code at a place leaves the logits before it as they were."""
    from toy_talker.answers import EncodedSpeech, speech_batch
    from toy_talker.model import Talker, TalkerConfig
    from toy_talker.policy import SpeechScorer

    torch.manual_seed(0)
    scorer, codes_KT = SpeechScorer(Talker(TalkerConfig())), torch.randint(0, 16, (2, 5))
    text = torch.tensor([97, 256])

    def logits(codes: Any) -> Any:
        with torch.no_grad():
            batch = speech_batch([EncodedSpeech(text, codes, True)], TalkerConfig())
            return scorer.logits(batch)[:10].unflatten(0, (5, 2))

    other = codes_KT.clone()
    other[0, 3] = (other[0, 3] + 1) % 16
    changed = (logits(codes_KT) - logits(other)).nan_to_num(0).abs().amax(dim=2) > 0
    assert not changed[:3].any() and not changed[3, 0] and changed[3, 1] and changed[4].all()


def test_generate_speaks(folder: Path, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the command, at once and in pieces, and by the stage."""
    monkeypatch.chdir(folder)
    line = ["generate", "--model", str(trained), "--text", "two", "--temperature", "0"]
    for extra in ([], ["--stream"]):
        done = CliRunner().invoke(build_app(None), [*line, "-o", "two.wav", *extra])
        assert done.exit_code == 0, done.output
        assert load(folder / "two.wav").num_samples == 4 * 320
    samples = [
        Sample(id=word, messages=_conversation(word), task="tts", metadata={"split": "test", "text": word})
        for word in WORDS
    ]
    write_samples(folder / "samples.jsonl", samples)
    stage = {"samples": str(folder / "samples.jsonl"), "model": str(trained), "temperature": 0.0, "takes": 1}
    figures = run(folder, "said", "generate", {}, **stage)
    assert figures["clips"] == figures["stopped"] == 3


def test_inspect_shows_rows_as_the_model_reads_them(folder: Path, trained: Path) -> None:
    def rows(*words: str) -> list[dict[str, Any]]:
        done = CliRunner().invoke(build_app("inspect"), ["inspect", *words, "--json"])
        assert done.exit_code == 0, done.output
        return [json.loads(line) for line in done.stdout.splitlines()]

    *sample, summary = rows(str(trained.parent))
    assert [row["kind"] for row in sample] == ["text"] * 4 + ["audio out"] * 5
    assert sample[4]["codes"] == ["1", "1"] and sample[8]["codes"] == ["EOS"]
    assert {item["kind"]: item["targets"] for item in summary["summary"]} == {"text": 0, "audio out": 9}
    *pair, summary = rows(str(folder / "pairs"), "--tokenizer", str(folder / "model"))
    assert [row["answer"] for row in pair] == [None] * 4 + [0] * 5 + [1] * 10
    assert summary["compared"] == [0, 1]


def test_plan_counts_the_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from toy_talker.model import load_talker

    recipe = {
        "name": "any", "size": "tiny",
        "stages": [
            {"train": {**FAST, "start": str(folder / "model"), "samples": str(folder / "spoken"), "steps": 20}},
            {"train_preference": {
                **FAST, "start": "${train.checkpoint}", "samples": str(folder / "pairs"), "objective": "dpo",
                "steps": 20,
            }},
        ],
    }  # fmt: skip
    (folder / "plan.yaml").write_text(yaml.safe_dump(recipe))
    plans = stage_plans(load_recipe(folder / "plan.yaml", name="plan", runs=folder), 1, MachineSpeed(1.0))
    expected = sum(parameter.numel() for parameter in load_talker(folder / "model").parameters())
    assert [plan.parameters for plan in plans.values()] == [expected, expected]


def test_parts_of_a_users_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of `docs/extending.md`: a reward, objectives, an advantage, a controller of the KL's weight and a board."""
    guide = (TOYS.parents[1] / "docs" / "extending.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", guide, flags=re.S)
    (folder / "my_parts.py").write_text("\n".join(blocks))
    monkeypatch.chdir(folder)
    objective = {"name": "my_parts:gap", "gap": 400.0}
    run(
        folder, "gap", "train_preference", start=str(folder / "model"), samples=str(folder / "pairs"),
        objective=objective, steps=20, report_to=["my_parts:TextBoard"],
    )  # fmt: skip
    losses = curve(folder, "gap", "train_preference", "loss")
    assert 0 < losses[-1] < 400
    lines = (folder / "gap" / "train_preference" / "board.txt").read_text().splitlines()
    assert any("margin=" in line for line in lines)
    assert any(" evaluation/answers: " in line for line in lines)
    run(
        folder, "signs", "train_policy", start=str(folder / "model"), samples=str(folder / "spoken"), answer="audio",
        advantage="my_parts:signs", rewards={"my_parts:few_frames": 1.0}, group_size=8, steps=20, max_frames=12,
        objective="my_parts:log_ratio", kl={"controller": {"name": "my_parts:decaying", "coefficient": 0.02}},
    )  # fmt: skip
    rewards = curve(folder, "signs", "train_policy", "reward")
    assert sum(rewards[-4:]) > sum(rewards[:4])
    weights = curve(folder, "signs", "train_policy", "kl_weight")
    assert weights == pytest.approx([0.02 * 0.99**step for step in range(len(weights))], rel=1e-4)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("train_preference", {"objective": "my_parts:gap"}),
        ("train_policy", {"rewards": {"think": 1}, "objective": "my_parts:log_ratio"}),
        ("train_policy", {"rewards": {"think": 1}, "kl": {"controller": "my_parts:decaying"}}),
    ],
)
def test_a_changed_part_is_a_changed_stage(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str, settings: dict[str, Any]
) -> None:
    guide = (TOYS.parents[1] / "docs" / "extending.md").read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"```python\n(.*?)```", guide, flags=re.S))
    monkeypatch.chdir(folder)
    paths = {"start": str(folder / "model"), "samples": str(folder / "pairs")}
    recipe = {"size": "tiny", "stages": [{kind: {**FAST, **paths, **settings, "steps": 10}}]}
    (folder / "own.yaml").write_text(yaml.safe_dump(recipe))
    fingerprints = []
    for text in (code, code, f"{code}\n# changed\n"):
        (folder / "my_parts.py").write_text(text)
        (stage,) = load_recipe(folder / "own.yaml", runs=folder).stages
        fingerprints.append(stage.fingerprint({}))
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]


def test_a_reward_model_is_refused_without_hidden_states(folder: Path) -> None:
    settings = {"start": str(folder / "model"), "samples": str(folder / "pairs"), "steps": 10}
    with pytest.raises(StageError, match="no hidden states"):
        run(folder, "reward", "train_reward", **settings)


@pytest.mark.parametrize(
    ("stage", "settings", "reason"),
    [
        ("train_preference", {"objective": "my_parts:few_frames"}, "is a function, and no OwnObjective"),
        ("train_preference", {"objective": "my_parts:nothing"}, "cannot be imported"),
        ("train_preference", {"objective": {"name": "my_parts:gap", "gape": 1}}, "no setting 'gape'"),
        ("train_preference", {"objective": "dpo", "report_to": ["nowhere"]}, "'nowhere' is none of"),
        ("train_policy", {"advantage": "my_parts:gap", "rewards": {"think": 1}}, "and no OwnAdvantage"),
        (
            "train_policy",
            {"objective": "my_parts:signs", "rewards": {"think": 1}},
            "and no OwnPolicyObjective",
        ),
        (
            "train_policy",
            {"kl": {"controller": "my_parts:signs"}, "rewards": {"think": 1}},
            "and no OwnKLController",
        ),
    ],
)
def test_parts_that_are_none_are_refused_before_any_work(
    folder: Path, monkeypatch: pytest.MonkeyPatch, stage: str, settings: dict[str, Any], reason: str
) -> None:
    guide = (TOYS.parents[1] / "docs" / "extending.md").read_text(encoding="utf-8")
    (folder / "my_parts.py").write_text("\n".join(re.findall(r"```python\n(.*?)```", guide, flags=re.S)))
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigError, match=reason):
        run(
            folder,
            "bad",
            stage,
            start=str(folder / "model"),
            samples=str(folder / "pairs"),
            steps=10,
            **settings,
        )


def test_what_the_model_cannot_take_is_refused(folder: Path) -> None:
    with pytest.raises(StageError, match="set answer: audio|this model speaks"):
        run(
            folder, "text", "train_policy", start=str(folder / "model"), samples=str(folder / "spoken"),
            rewards={"toy_talker.rewards:few_frames": 1.0}, steps=10,
        )  # fmt: skip
