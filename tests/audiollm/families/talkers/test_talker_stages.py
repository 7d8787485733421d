"""Talkers in the stages: clips by heart, adapters, preferences, rewards, rollouts, `inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from audiollm.data.records.opening import open_source
from audiollm.families.family import PolicySettings
from audiollm.families.logprobs.token_figures import TokenRequest
from audiollm.families.policies import load_policy
from audiollm.families.prompts import with_last_message_as_answer
from audiollm.families.registry import open_model_folder
from audiollm.families.rollout import RolloutSettings
from audiollm.families.talkers.decoding import speak_to_end
from audiollm.families.talkers.drawing import Speaking
from audiollm.families.talkers.kind import TalkerSampling
from audiollm.families.talkers.turns import SpeechPrompt
from audiollm.rl.rewards.batch import RewardBatch
from audiollm.train.settings import LoRASettings
from tests.audiollm.families.talkers.talker_runs import curve_of, random_codes, run_stage, write_clips
from tests.audiollm.families.talkers.tiny_csm import BOOKS, write_tiny_csm
from tests.audiollm.families.talkers.tiny_qwen3_tts import ask_published, write_tiny_qwen3_tts

FRAMES = (2, 7, 8, 9, 40)
CODES = 16
"""Codes of both tiny codecs."""
FAMILIES = {"csm": write_tiny_csm, "qwen3_tts": write_tiny_qwen3_tts}
GROUPS = {"csm": ["backbone", "depth_decoder"], "qwen3_tts": ["talker", "code_predictor"]}


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp(request.param)
    FAMILIES[request.param](made / "model", spread=0.1)
    clips = {f"{frames} clip": [random_codes(BOOKS, CODES, frames, frames)] for frames in FRAMES}
    write_clips(made / "clips", clips, BOOKS, CODES)
    pairs = {
        text: [takes[0], random_codes(BOOKS, CODES, 5, number)]
        for number, (text, takes) in enumerate(clips.items())
    }
    write_clips(made / "pairs", pairs, BOOKS, CODES)
    return made


def family_of(folder: Path) -> str:
    return next(name for name in FAMILIES if name in folder.name)


def lora_of(folder: Path) -> dict[str, Any]:
    targets = [*GROUPS[family_of(folder)], "text_projection"]
    return {"trained": "adapter", "lora": {"rank": 8, "alpha": 16, "target_modules": targets}}


@pytest.fixture(scope="module")
def by_heart(folder: Path) -> Path:
    run_stage(
        folder, "sft", "train", start=str(folder / "model"), samples=str(folder / "clips"), steps=150, batch_size=5,
        normalization="token",
    )  # fmt: skip
    return folder / "sft" / "train" / "model"


def greedy(model: Path, texts: list[str], limit: int = 60) -> list[Speaking]:
    """The likeliest speech of texts."""
    from audiollm.families.talkers.policy import TalkerPolicy

    policy = open_model_folder(model).policy(PolicySettings())
    assert isinstance(policy, TalkerPolicy)
    kind = policy._kind
    answers = [
        Speaking(kind.prompt_rows(SpeechPrompt(text)), TalkerSampling.plain(0.0), limit, 0) for text in texts
    ]
    speak_to_end(policy.root.model, kind, answers)
    return answers


def clip(folder: Path, frames: int) -> Tensor:
    return random_codes(BOOKS, CODES, frames, frames)


def test_clips_by_heart_come_out_whole_and_end(folder: Path, by_heart: Path) -> None:
    losses = curve_of(folder, "sft", "train", "audio_loss")
    assert losses[-1] < 0.1
    parts = [curve_of(folder, "sft", "train", name)[-1] for name in ("first_codebook_loss", "depth_loss")]
    weight = 1.0 if family_of(folder) == "csm" else 0.3
    assert losses[-1] == pytest.approx(parts[0] + weight * parts[1], rel=1e-4)
    for frames, answer in zip(FRAMES, greedy(by_heart, [f"{frames} clip" for frames in FRAMES]), strict=True):
        assert answer.has_ended, frames
        torch.testing.assert_close(answer.codes_KT(BOOKS), clip(folder, frames))


def test_the_public_class_speaks_from_the_folder(folder: Path, by_heart: Path, tmp_path: Path) -> None:
    if family_of(folder) == "qwen3_tts":
        prompts = [SpeechPrompt(f"{frames} clip", form="interleaved") for frames in FRAMES]
        answers = ask_published(by_heart, prompts, 60, tmp_path, penalty=1.0)
        for frames, answer in zip(FRAMES, answers, strict=True):
            torch.testing.assert_close(answer["codes"].T, clip(folder, frames))
        return
    from transformers import CsmForConditionalGeneration

    from audiollm.families.csm.kind import CsmKind

    model = CsmForConditionalGeneration.from_pretrained(by_heart).eval()
    model.generation_config.max_length = None
    for frames in FRAMES:
        ids = torch.tensor(
            CsmKind(by_heart).text.marked_ids(f"<|begin_of_text|>[0]{frames} clip<|end_of_text|>")
        )
        with torch.no_grad():
            made_BTK = model.generate(
                input_ids=ids[None], attention_mask=torch.ones(1, len(ids), dtype=torch.long), max_new_tokens=60,
                do_sample=False, depth_decoder_do_sample=False, depth_decoder_min_new_tokens=BOOKS - 1,
                depth_decoder_max_new_tokens=BOOKS - 1,
            )  # fmt: skip
        assert not made_BTK[0, -1].any()
        torch.testing.assert_close(made_BTK[0, :-1].T, clip(folder, frames))


def test_an_adapter_learns_by_heart(folder: Path) -> None:
    start = str(folder / "model")
    run_stage(
        folder, "lora", "train", start=start, samples=str(folder / "clips"), steps=60, batch_size=5, **lora_of(folder),
        normalization="token", learning_rate=3e-2,
    )  # fmt: skip
    losses = curve_of(folder, "lora", "train", "audio_loss")
    assert losses[-1] < 0.8 * losses[0]
    assert (folder / "lora" / "train" / "adapter" / "adapter_model.safetensors").is_file()
    merged = load_policy(folder / "lora" / "train" / "model")
    adapted = load_policy(
        folder / "model",
        "adapter",
        LoRASettings(rank=8, alpha=16, target_modules=(GROUPS[family_of(folder)][0],)),
    )
    assert {name for name, _ in merged.root.named_parameters()} < {
        name.replace(".base_layer", "") for name, _ in adapted.root.named_parameters()
    }


@pytest.mark.parametrize("trained", ["all", "adapter"])
def test_preferences_are_learned(folder: Path, trained: str) -> None:
    name, changed = f"dpo_{trained}", lora_of(folder) if trained == "adapter" else {}
    run_stage(
        folder, name, "train_preference", start=str(folder / "model"), samples=str(folder / "pairs"), objective="dpo",
        steps=12, learning_rate=3e-3, **changed,
    )  # fmt: skip
    margins = curve_of(folder, name, "train_preference", "margin")
    assert margins[-1] > 1


@pytest.mark.parametrize("trained", ["all", "adapter"])
def test_rollouts_have_the_log_probabilities_of_the_policy(
    folder: Path, by_heart: Path, trained: Any
) -> None:
    policy = load_policy(
        by_heart, trained, LoRASettings(target_modules=(GROUPS[family_of(folder)][1],)), needs_reference=True
    )
    loaded = [
        with_last_message_as_answer(sample)
        for sample in map(open_source(str(folder / "clips")).__getitem__, range(2))
    ]
    prompts = [policy.take(sample, []) for sample in loaded]
    settings = RolloutSettings(seed=1, step=0, temperature=1.3, answer="audio", max_frames=12)
    engine = policy.rollout_engine()
    groups = engine.sample(prompts, [[0, 1, 2], [0]], settings)
    (alone,) = engine.sample(prompts[:1], [[2]], settings)
    assert torch.equal(alone[0].tokens.codes[0], groups[0][2].tokens.codes[0])
    assert any(rollout.tokens.ended[0] for group in groups for rollout in group)
    request = TokenRequest(temperature=1.3, kl=True, entropy=True)
    for prompt, group in zip(prompts, groups, strict=True):
        encoded = policy.encode_sampled(prompt, [rollout.tokens for rollout in group])
        logprobs = policy.answer_logprobs(policy.root, policy.batch(encoded), request)
        drawn = torch.cat([rollout.tokens.logprob_A for rollout in group])  # type: ignore[misc]
        assert [policy.num_answer_tokens(answer) for answer in encoded] == [
            rollout.tokens.num_actions for rollout in group
        ]
        torch.testing.assert_close(logprobs.policy_T.detach(), drawn, atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(logprobs.required("reference_T"), drawn, atol=2e-4, rtol=1e-4)


def test_rewards_raise_what_is_drawn(folder: Path, by_heart: Path) -> None:
    figures = run_stage(
        folder, "grpo", "train_policy", start=str(by_heart), samples=str(folder / "clips"), answer="audio",
        rewards={"tests.audiollm.families.talkers.test_talker_stages:many_frames": 1.0}, group_size=4, steps=10,
        max_frames=12, learning_rate=1e-4,
    )  # fmt: skip
    assert figures


def many_frames(batch: RewardBatch) -> list[float]:
    """A reward: frames of an answer."""
    return [0.0 if answer.codes_KT is None else float(answer.codes_KT.shape[1]) for answer in batch]


def test_rows_are_shown(folder: Path) -> None:
    sample = with_last_message_as_answer(open_source(str(folder / "clips"))[0])
    (rows,) = open_model_folder(folder / "model").sample_rows(sample, [0], "here")
    end = ("EOS", "0", "0", "0") if family_of(folder) == "csm" else ("EOS",)
    first = "<|begin_of_text|>" if family_of(folder) == "csm" else "<|im_start|>"
    assert [row.kind for row in rows[-3:]] == ["audio out"] * 3
    assert rows[-1].token == "<end>" and rows[-1].codes == end
    assert rows[0].token == first and not any(rows[0].is_target)
    assert sum(row.weights[0] for row in rows) == pytest.approx(1.0)
