"""The benchmark `grpo`: equal logits and tokens on all sides, equal counts of generated tokens, every case printed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("trl")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import grpo as bench

from audiollm.data.records.manifest import ManifestSource
from audiollm.families.dual_ffn.policy import DualFFNPolicy
from audiollm.families.dual_ffn.start import start_model, start_template
from audiollm.families.logprobs.token_figures import TokenRequest
from audiollm.families.rollout import RolloutSettings
from audiollm.models.dual_ffn import DualFFN
from audiollm.rl.online.prompts import without_right_answer

SHAPE = bench.Shape(16, 2, 400)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("grpo") / "models"
    bench.write_models(made, SHAPE)
    return made


@pytest.mark.slow
def test_sides_take_turns_over_equal_work(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "NEW_TOKENS", 6)
    bench.compare_time(folder, SHAPE, 1)
    bench.compare_group(folder, SHAPE, 1)
    bench.measure_audio(folder, SHAPE, 1)
    bench.measure_ahead(folder, SHAPE)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    cases = [line["case"].split(",")[0] for line in lines]
    assert cases == [
        "time", "phases of ours", "adapter", "phases of adapter", "group", "audio of 2 s", "sampling ahead",
    ]  # fmt: skip
    assert ["ratio" in line for line in lines] == [True] + [False] * 6
    assert bench.tokens_generated(folder, "ours", 2) == [8 * 6, 8 * 6]


def test_unequal_logits_end_the_benchmark(folder: Path) -> None:
    bench.check_logits(folder)
    path = folder / "dual_ffn" / "model.safetensors"
    weights = load_file(path)
    weights["model.norm.weight"] = weights["model.norm.weight"] + torch.tensor(0.1)
    save_file(weights, path, {"format": "pt"})
    with pytest.raises(SystemExit, match="logits differ"):
        bench.check_logits(folder)


def test_what_answers_in_text_do_not_reach_is_frozen_and_shared(folder: Path, tmp_path: Path) -> None:
    template = start_template(folder / "qwen2")
    model = start_model(folder / "qwen2", template)  # with an audio feed-forward in every layer
    model.add_audio_encoder(DualFFN.from_pretrained(folder / "hearing").config.audio_encoder)
    model.save_pretrained(tmp_path, template.tokenizer)
    policy = DualFFNPolicy.load(tmp_path)
    loaded = ManifestSource(folder / "audio.jsonl")[0]
    taken = policy.take(without_right_answer(loaded), [])
    (rollouts,) = policy.rollout_engine().sample(
        [taken], [range(2)], RolloutSettings(0, 0, max_text_tokens=3)
    )
    batch = policy.batch(policy.encode_sampled(taken, [each.tokens for each in rollouts]))
    policy.answer_logprobs(policy.root, batch, TokenRequest(reference=False)).policy_T.sum().backward()
    named = dict(policy.root.named_parameters())
    flat = {name for name, weight in named.items() if weight.grad is None or not weight.grad.any()}
    policy.freeze_unreached(has_recordings=True)
    policy.share_frozen()
    frozen = {name for name, weight in named.items() if not weight.requires_grad}
    assert frozen == {name for name in flat if "audio_" in name and "tower" not in name}
    assert len(frozen) == 2 + 2 * 5
    reference = dict(policy.frozen["reference"].named_parameters())
    shared = {name for name, weight in named.items() if weight.data_ptr() == reference[name].data_ptr()}
    assert shared == frozen
    heard_as_codes = DualFFNPolicy.load(folder / "dual_ffn")
    heard_as_codes.freeze_unreached(has_recordings=True)
    assert [n for n, p in heard_as_codes.root.named_parameters() if not p.requires_grad] == [
        "model.audio_lm_head.weight"
    ]
