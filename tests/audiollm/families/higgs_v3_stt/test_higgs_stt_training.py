"""Higgs Audio v3 STT in `train`: clips by heart, whole and by adapters of its parts, asked alone and beside others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import Tensor
from typer.testing import CliRunner

from audiollm.audio import save
from audiollm.commands.ask import ask
from audiollm.data.records.opening import open_source
from audiollm.data.records.sample import AudioPart, Message, Sample, TextPart, write_samples
from audiollm.families.answering import AnswerRequest
from audiollm.families.family import PolicySettings
from audiollm.families.logprobs.token_figures import TokenRequest
from audiollm.families.policy import PromptedAnswers
from audiollm.families.prompts import with_last_message_as_answer
from audiollm.families.registry import open_model_folder
from audiollm.families.rollout import RolloutSettings
from audiollm.train.loop.modules import checkpoint_activations
from tests.audiollm.families.higgs_v3_stt.tiny_higgs_stt import (
    TEXTS,
    change_config,
    stored_weights,
    tone,
    write_tiny_higgs_stt,
)
from tests.audiollm.families.talkers.talker_runs import curve_of, run_stage

CLIPS = {
    text: tone(seconds, hertz)
    for text, seconds, hertz in zip(TEXTS, (0.6, 1.3, 0.43), (300, 900, 2500), strict=True)
}
DECODER = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PARTS: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "encoder": (["audio_tower.*"], ("audio_tower.",)),
    "projector": (["audio_encoder_proj.*"], ("audio_encoder_proj.",)),
    "decoder": (["layers.*", "norm.*"], ("layers.", "norm.")),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("higgs_stt")
    write_tiny_higgs_stt(place / "model", spread=1.5)
    change_config(place / "model", chunk_size_seconds=1.0)
    samples = []
    for number, (text, clip) in enumerate(CLIPS.items()):
        save(place / f"{number}.wav", clip.samples_CN, clip.sample_rate)
        messages = [
            Message(role="user", content=[AudioPart(path=f"{number}.wav"), TextPart(text="Transcribe.")]),
            Message(role="assistant", content=[TextPart(text=text)]),
        ]
        samples.append(Sample(id=f"s{number}", task="asr", messages=messages))
    write_samples(place / "asr.jsonl", samples)
    return place


def learn(folder: Path, name: str, **settings: Any) -> Path:
    """Train on the clips; return the model's folder."""
    fixed = {"start": str(folder / "model"), "samples": str(folder / "asr.jsonl"), "batch_size": 3}
    run_stage(folder, name, "train", **{**fixed, **settings})
    return folder / name / "train" / "model"


def asked(model: Path, texts: tuple[str, ...] = TEXTS) -> list[str]:
    """What a model answers to the clips."""
    requests = [AnswerRequest([("user", [CLIPS[text], "Transcribe."])], max_tokens=12) for text in texts]
    return [answer.text for answer in open_model_folder(model).answering_model().answer(requests)]


@pytest.fixture(scope="module")
def by_heart(folder: Path) -> Path:
    return learn(folder, "sft", steps=50, learning_rate=5e-3)


def test_clips_by_heart_are_answered_and_end(folder: Path, by_heart: Path) -> None:
    assert asked(folder / "model") != list(TEXTS)
    losses = curve_of(folder, "sft", "train", "loss")
    assert losses[-1] < 0.1
    assert asked(by_heart) == list(TEXTS)
    start, trained = stored_weights(folder / "model"), stored_weights(by_heart)
    assert set(start) == set(trained)
    changed = {name for name in start if not torch.equal(start[name], trained[name])}
    assert {
        "embed_tokens.weight",
        "audio_decoder_proj.text_lm_head.weight",
        "audio_tower.conv1.weight",
    } < changed
    unchanged = {"audio_tower.embed_positions.weight", "audio_codebook_embeddings.weight"}
    assert set(start) - changed == unchanged


def test_the_command_asks_and_a_sample_is_shown_row_by_row(folder: Path, by_heart: Path) -> None:
    app = typer.Typer()
    app.command()(ask)
    result = CliRunner().invoke(app, [str(folder / "1.wav"), "Transcribe.", "--model", str(by_heart)])
    assert result.exit_code == 0 and result.output.splitlines()[-1] == TEXTS[1]
    prompt = with_last_message_as_answer(open_source(str(folder / "asr.jsonl"))[1])
    (rows,) = open_model_folder(by_heart).sample_rows(prompt, [0], "")
    assert sum(row.kind == "features" for row in rows) == 13 + 4  # a chunk of 1 s, and one of 0.3 s
    assert "".join(row.token for row in rows if row.is_target[0]) == f"{TEXTS[1]}<|im_end|>"


def test_answers_side_by_side_are_those_alone(by_heart: Path) -> None:
    policy = open_model_folder(by_heart).policy(PolicySettings())
    prompts = [PromptedAnswers(text, [("user", [CLIPS[text], "Transcribe."])], []) for text in TEXTS]
    settings = RolloutSettings(temperature=0.0, answer="text", max_text_tokens=12, seed=0, step=0)
    together = policy.rollout_engine().sample(prompts, [[0, 1]] * len(prompts), settings)
    assert [[rollout.text for rollout in group] for group in together] == [[text, text] for text in TEXTS]


def test_a_batch_has_the_log_probabilities_of_its_samples_alone(folder: Path) -> None:
    policy = open_model_folder(folder / "model").policy(PolicySettings())
    encoded = [
        answer
        for text in TEXTS
        for answer in policy.encode(PromptedAnswers(text, [("user", [CLIPS[text]])], [text, "seven"]))
    ]

    def scores(answers: list[Any]) -> Tensor:
        figures = policy.answer_logprobs(policy.root, policy.batch(answers), TokenRequest(reference=False))
        return figures.policy_T

    alone_T = torch.cat([scores([answer]) for answer in encoded])
    together_T = scores(encoded)
    torch.testing.assert_close(together_T, alone_T, atol=1e-5, rtol=1e-5)
    together_T.sum().backward()
    gradients = [parameter.grad for parameter in policy.root.parameters() if parameter.requires_grad]
    plain = [gradient.clone() for gradient in gradients if gradient is not None]
    assert len(plain) == len(gradients)
    policy.root.zero_grad()
    checkpoint_activations({"policy": policy.root})
    policy.root.train()
    scores(encoded).sum().backward()
    for parameter, gradient in zip(
        [p for p in policy.root.parameters() if p.requires_grad], plain, strict=True
    ):
        torch.testing.assert_close(parameter.grad, gradient, atol=1e-3, rtol=1e-3)


def test_a_batch_without_recordings_leaves_the_encoder_in_the_step(folder: Path) -> None:
    policy = open_model_folder(folder / "model").policy(PolicySettings())
    encoded = policy.encode(PromptedAnswers("s", [("user", ["Hello."])], ["one two"]))
    figures = policy.answer_logprobs(policy.root, policy.batch(encoded), TokenRequest(reference=False))
    figures.policy_T.sum().backward()
    gradients = {name: p.grad for name, p in policy.root.named_parameters() if p.requires_grad}
    assert all(gradient is not None for gradient in gradients.values())
    assert not any(gradient.any() for name, gradient in gradients.items() if "audio_tower" in name)


@pytest.mark.parametrize("part", PARTS)
def test_a_part_is_trained_and_the_others_stay(folder: Path, part: str) -> None:
    patterns, names = PARTS[part]
    trained = stored_weights(learn(folder, part, trained=patterns, steps=10))
    start = stored_weights(folder / "model")
    changed = {name for name in start if not torch.equal(start[name], trained[name])}
    assert changed and all(name.startswith(names) for name in changed)


@pytest.mark.parametrize(
    ("name", "targets", "excluded", "names"),
    [
        ("lora", DECODER, ["audio_tower"], "layers."),
        ("lora_encoder", ["fc1", "fc2", "out_proj"], [], "audio_tower."),
        ("lora_projector", ["linear1", "linear2"], [], "audio_encoder_proj."),
        ("lora_head", ["text_lm_head"], [], "audio_decoder_proj.text_lm_head."),
    ],
)  # fmt: skip
def test_an_adapter_learns_in_its_part(
    folder: Path, name: str, targets: list[str], excluded: list[str], names: str
) -> None:
    lora = {"rank": 8, "alpha": 32, "target_modules": targets, "excluded": excluded}
    steps = 60 if name == "lora" else 10
    model = learn(folder, name, trained="adapter", lora=lora, steps=steps, learning_rate=1e-2)
    start, trained = stored_weights(folder / "model"), stored_weights(model)
    changed = {name for name in start if not torch.equal(start[name], trained[name])}
    assert set(trained) == set(start) and changed and all(name.startswith(names) for name in changed)
    assert (model.parent / "adapter" / "adapter_model.safetensors").is_file()
    if name == "lora":
        assert asked(model) == list(TEXTS)


@pytest.mark.parametrize("dtype", [pytest.param(torch.float16, marks=pytest.mark.slow), torch.bfloat16])
def test_half_precision_is_trained_in_float32_and_written_as_it_was(
    folder: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    start = write_tiny_higgs_stt(tmp_path / "model", dtype, spread=1.5)
    change_config(
        start, dtype=str(dtype).removeprefix("torch."), answer_after_think=True, chunk_size_seconds=1.0
    )
    model = learn(
        folder,
        f"half_{dtype}".replace(".", "_"),
        start=str(start),
        steps=50,
        precision="bf16" if dtype == torch.bfloat16 else "fp32",
        learning_rate=5e-3,
    )
    assert {value.dtype for value in stored_weights(model).values()} == {dtype}
    assert asked(model) == list(TEXTS)
