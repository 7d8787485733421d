"""The guards pass on right objectives, and each defect of public scripts that is put in is caught."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from audiollm.commands.cli import build_app
from audiollm.families.family import PolicySettings
from audiollm.families.registry import open_model_folder
from audiollm.families.talkers.policy import TalkerPolicy
from audiollm.families.talkers.rows import NONE, SpeechBatch
from audiollm.families.talkers.scorer import SpeechScorer
from audiollm.supervised.guards.leak import test_leak as run_leak_test
from audiollm.supervised.guards.offsets import offset_table
from audiollm.supervised.guards.stop import FRAMES, StopTest
from audiollm.supervised.guards.stop import test_stop as run_stop_test
from audiollm.supervised.guards.trials import TEXTS, TrialSettings, spoken_prompt
from audiollm.train.settings import LoRASettings
from tests.audiollm.families.talkers.talker_runs import random_codes, run_stage, write_clips
from tests.audiollm.families.talkers.tiny_csm import write_tiny_csm
from tests.audiollm.families.talkers.tiny_qwen3_tts import write_tiny_qwen3_tts

FAMILIES = {"csm": write_tiny_csm, "qwen3_tts": write_tiny_qwen3_tts}
Learned = Callable[[str], tuple[TalkerPolicy, StopTest]]
LEAK, STOP = TrialSettings(160, 5e-3), TrialSettings(150, 1e-2)


@pytest.fixture(scope="module", params=["qwen3_tts", pytest.param("csm", marks=pytest.mark.slow)])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    written: Path = FAMILIES[request.param](tmp_path_factory.mktemp(request.param), spread=0.1)
    return written


def policy_of(folder: Path, trained: str = "all") -> TalkerPolicy:
    lora = LoRASettings(rank=16, alpha=32) if trained == "adapter" else None
    policy = open_model_folder(folder).policy(PolicySettings(trained=trained, lora=lora))  # type: ignore[arg-type]
    assert isinstance(policy, TalkerPolicy)
    return policy


class HiddenOfTheFrame(SpeechScorer):
    """Defect: the depth decoder reads the hidden state of the frame itself, which has consumed its codes."""

    def _through_depth(self, batch: SpeechBatch, hidden_DC: Tensor, uses: Any) -> list[Any]:
        x_SC = self.model.embed_rows(batch.inputs)
        hidden_SC = self.model.backbone(
            x_SC, batch.position_S, self.model.backbone.attend_packed(x_SC, batch.layout)
        )
        frame_D = (batch.source_F[batch.depth_D] + 1).clamp_max(len(hidden_SC) - 1)
        return super()._through_depth(batch, hidden_SC[frame_D], uses)


class TwoFramesAhead(TalkerPolicy):
    """Defect: the talker's labels are shifted twice."""

    def batch(self, encoded: Any) -> SpeechBatch:
        batch = super().batch(encoded)
        answer_F = batch.answer_T[batch.codebook_T == 0]
        next_F = torch.arange(1, len(answer_F) + 1).clamp_max(len(answer_F) - 1)
        stays_F = answer_F[next_F] == answer_F
        return replace(batch, target_F=torch.where(stays_F, batch.target_F[next_F], batch.target_F))


class NextCodebook(TalkerPolicy):
    """Defect: head i of the depth decoder learns codebook i + 1; the last one learns nothing."""

    def batch(self, encoded: Any) -> SpeechBatch:
        batch = super().batch(encoded)
        shifted_DJ = torch.cat([batch.target_DJ[:, 1:], batch.target_DJ[:, :1]], dim=1)
        return replace(batch, target_DJ=shifted_DJ)


def with_defect(folder: Path, defect: str) -> TalkerPolicy:
    policy = policy_of(folder)
    if defect == "hidden":
        policy._root = HiddenOfTheFrame(policy.root.model, None, policy.root._suppressed)
    else:
        policy.__class__ = {"talker": TwoFramesAhead, "predictor": NextCodebook}[defect]  # type: ignore[assignment]
    return policy


@pytest.fixture(scope="module")
def by_heart(folder: Path) -> Callable[[str], tuple[TalkerPolicy, StopTest]]:
    """A policy with a defect (or with none) that has learned clips by heart."""

    @cache
    def learn(defect: str) -> tuple[TalkerPolicy, StopTest]:
        policy = with_defect(folder, defect) if defect else policy_of(folder)
        return policy, run_stop_test(policy, STOP)

    return learn


@pytest.mark.parametrize("trained", ["all", pytest.param("adapter", marks=pytest.mark.slow)])
def test_the_objective_does_not_leak(folder: Path, trained: str) -> None:
    settings = LEAK if trained == "all" else replace(LEAK, learning_rate=2e-2)
    leaks = run_leak_test(policy_of(folder, trained), settings)
    assert [leak.codebook for leak in leaks] == [0, 1, 2, 3]
    for leak in leaks:
        assert not leak.leaks, leak
        if trained == "all":  # it has learned what there is to learn
            assert leak.cross_entropy < leak.entropy + 0.15, leak


def test_a_hidden_state_that_knows_the_frame_is_caught(folder: Path) -> None:
    leaks = run_leak_test(with_defect(folder, "hidden"), TrialSettings(250, 3e-3))
    assert any(leak.leaks for leak in leaks[1:]), leaks


def test_clips_by_heart_are_whole(by_heart: Learned) -> None:
    _, result = by_heart("")
    assert all(clip.is_whole for clip in result.clips), result


@pytest.mark.parametrize("defect", ["talker", "predictor"])
def test_shifted_labels_are_caught_by_heart(by_heart: Learned, defect: str) -> None:
    _, result = by_heart(defect)
    assert result.loss < 0.3  # it learns what it is told
    assert not any(clip.is_whole for clip in result.clips[1:]), result
    assert sum(clip.right for clip in result.clips) / len(result.clips) < 0.6, result


@pytest.mark.parametrize(("defect", "place"), [("talker", (1, 0)), ("predictor", (0, 1)), ("", None)])
def test_the_table_of_offsets_shows_what_was_learned(
    folder: Path, by_heart: Learned, defect: str, place: tuple[int, int] | None
) -> None:
    policy, _ = by_heart(defect)
    plain = policy_of(folder)
    plain.root.model.load_state_dict(policy.root.model.state_dict())
    generator = torch.Generator().manual_seed(0)
    clips = [
        spoken_prompt(text, torch.randint(1, 16, (4, frames), generator=generator))
        for text, frames in zip(TEXTS, FRAMES, strict=False)
    ]
    table = offset_table(plain, plain.root, [plain.batch([plain.encode(clip)[0] for clip in clips])])
    if place is None:
        assert not table.shifted and not table.sentence()
    else:
        assert table.shifted[0 if defect == "talker" else 1] == place, table
        assert "predict the labels of another place" in table.sentence()
    assert table.loss_KP[3][5] is None  # there is no codebook behind the last


def test_the_command_tells_of_a_shifted_checkpoint(by_heart: Learned, tmp_path: Path) -> None:
    policy, _ = by_heart("talker")
    policy.save(tmp_path)
    generator = torch.Generator().manual_seed(0)
    clips = {
        text: [torch.randint(1, 16, (4, frames), generator=generator)]
        for text, frames in zip(TEXTS, FRAMES, strict=False)
    }
    write_clips(tmp_path / "clips", clips, 4, 16, held_out=2)
    result = CliRunner().invoke(
        build_app(), ["guard", str(tmp_path / "model"), "--data", str(tmp_path / "clips"), "--steps", "0"]
    )
    assert result.exit_code == 1
    assert "head 0 those of frame +1" in " ".join(result.output.split())
    run_stage(
        tmp_path,
        "sft",
        "train",
        start=str(tmp_path / "model"),
        samples=str(tmp_path / "clips"),
        steps=10,
        learning_rate=1e-5,
    )
    assert "shifted labels" in (tmp_path / "sft" / "train" / "alarms.jsonl").read_text()


def test_an_untrained_model_raises_no_alarm(folder: Path) -> None:
    policy = policy_of(folder)
    for parameter in policy.root.parameters():
        torch.nn.init.normal_(parameter, std=0.4)  # sure of itself, and wrong everywhere
    clips = [policy.encode(spoken_prompt(text, random_codes(4, 16, 9, 7)))[0] for text in TEXTS]
    assert not offset_table(policy, policy.root, [policy.batch(clips)]).shifted


def test_chance_on_a_few_clips_raises_no_alarm(folder: Path) -> None:
    policy = policy_of(folder)  # its logits are small: by chance some place is better than the trained one
    for seed in range(30):
        clips = [
            policy.encode(spoken_prompt(text, random_codes(4, 16, 4, seed + 50)))[0] for text in TEXTS[:2]
        ]
        table = offset_table(policy, policy.root, [policy.batch(clips)])
        assert not table.shifted, (seed, table)


def test_offsets_stay_within_their_answer(folder: Path) -> None:
    policy = policy_of(folder)
    clips = [policy.encode(spoken_prompt(text, random_codes(4, 16, 1, 7)))[0] for text in TEXTS[:2]]
    table = offset_table(policy, policy.root, [policy.batch(clips)])
    assert table.loss_KP[0][1] is not None
    if policy._kind.end_codes is None:  # else the end is a frame behind it
        assert (
            table.loss_KP[0][2] is None
        )  # behind the one frame there is none: the next one is another answer's


def test_places_of_offsets(folder: Path) -> None:
    """Against labels of the same place the table is the loss."""
    policy = policy_of(folder)
    batch = policy.batch([policy.encode(spoken_prompt("one", random_codes(4, 16, 6, 1)))[0]])
    table = offset_table(policy, policy.root, [batch])
    from audiollm.families.logprobs.token_figures import TokenRequest

    logprobs = policy.answer_logprobs(policy.root, batch, TokenRequest(reference=False))
    codes_T = logprobs.codebook_T == 2
    target_T = torch.cat([batch.target_F, batch.target_DJ.flatten()])[batch.order_T]
    is_code_T = codes_T & (target_T != 0) & (target_T != NONE)
    assert table.loss_KP[2][1] == pytest.approx(float(-logprobs.policy_T[is_code_T].mean()), rel=0.2)
