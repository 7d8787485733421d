"""Higgs Audio v3 TTS in the stages: clips by heart, guards, adapters, rollouts, speech through its codec."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from audiollm.codec import load_codec
from audiollm.commands.cli import build_app
from audiollm.errors import ConfigError
from audiollm.families.family import PolicySettings
from audiollm.families.higgs_v3_tts.kind import CODEC_PREFIX, HiggsV3Kind
from audiollm.families.higgs_v3_tts.model import CODE_TABLE
from audiollm.families.higgs_v3_tts.new_model import write_higgs_v3
from audiollm.families.logprobs.token_figures import TokenRequest
from audiollm.families.registry import open_model_folder
from audiollm.families.rollout import RolloutSettings
from audiollm.families.talkers.new_talker import TalkerShape
from audiollm.families.talkers.policy import TalkerPolicy
from audiollm.families.talkers.scorer import SpeechScorer
from audiollm.families.talkers.turns import SpeechPrompt
from audiollm.supervised.guards.leak import test_leak as run_leak_test
from audiollm.supervised.guards.offsets import offset_table
from audiollm.supervised.guards.stop import FRAMES
from audiollm.supervised.guards.stop import test_stop as run_stop_test
from audiollm.supervised.guards.trials import TEXTS, TrialSettings, spoken_prompt
from audiollm.train.settings import LoRASettings
from recipes.finetune_higgs.random_weights import write_tokenizer
from tests.audiollm.families.higgs_v3_tts.tiny_higgs_v3 import BOOKS, CODES, ask_mlx, write_tiny_higgs_v3
from tests.audiollm.families.talkers.talker_runs import curve_of, random_codes, run_stage, write_clips

LORA: dict[str, Any] = {
    "trained": "adapter",
    "lora": {"rank": 8, "alpha": 16, "target_modules": ["backbone"]},
}


def clip(frames: int) -> Tensor:
    return random_codes(BOOKS, CODES, frames, frames)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("higgs_v3")
    write_tiny_higgs_v3(place / "model", spread=0.05)
    clips = {text: [clip(frames)] for text, frames in zip(TEXTS, FRAMES, strict=False)}
    write_clips(place / "clips", clips, BOOKS, CODES)
    return place


@pytest.fixture(scope="module")
def by_heart(folder: Path) -> Path:
    run_stage(
        folder, "sft", "train", start=str(folder / "model"), samples=str(folder / "clips"), steps=150, batch_size=5,
        normalization="token",
    )  # fmt: skip
    return folder / "sft" / "train" / "model"


def policy_of(folder: Path, **settings: Any) -> TalkerPolicy:
    policy = open_model_folder(folder).policy(PolicySettings(**settings))
    assert isinstance(policy, TalkerPolicy)
    return policy


def test_clips_by_heart_come_out_whole_and_end(folder: Path, by_heart: Path) -> None:
    losses = curve_of(folder, "sft", "train", "audio_loss")
    assert losses[-1] < 0.05
    assert not curve_of(folder, "sft", "train", "depth_loss")  # one decoder, and one mean
    settings = RolloutSettings(seed=0, step=0, temperature=0.0, answer="audio", max_frames=60)
    prompts = [spoken_prompt(text, clip(frames)) for text, frames in zip(TEXTS, FRAMES, strict=False)]
    groups = policy_of(by_heart).rollout_engine().sample(prompts, [[0]] * len(prompts), settings)
    for frames, (rollout,) in zip(FRAMES, groups, strict=True):
        assert not rollout.truncated, frames
        torch.testing.assert_close(rollout.tokens.codes[0], clip(frames))


def test_mlx_speaks_from_the_folder(by_heart: Path, tmp_path: Path) -> None:
    """Its sampler ignores an end in the first rows: a clip of fewer frames than codebooks gets as many as these."""
    clips = list(zip(TEXTS, FRAMES, strict=False))
    prompts = [SpeechPrompt(text) for text, _ in clips]
    results = ask_mlx(by_heart, prompts, [clip(frames) for _, frames in clips], 60, tmp_path)
    kind = HiggsV3Kind(by_heart)
    for (_, frames), result in zip(clips, results, strict=True):
        rows_LK = result["said"].long()
        assert len(rows_LK) == max(frames, BOOKS) + BOOKS - 1
        expected = kind.delayed_rows(clip(frames))
        torch.testing.assert_close(rows_LK[: expected.num_rows, 0], expected.first_L)
        torch.testing.assert_close(rows_LK[: expected.num_rows, 1:], expected.rest_LJ)


@pytest.mark.slow
def test_the_guard_passes(folder: Path) -> None:
    call = ["guard", str(folder / "model"), "--steps", "150", "--learning-rate", "1e-2"]
    result = CliRunner().invoke(build_app(), call)
    assert result.exit_code == 0, result.output
    assert "no test failed" in result.output


class HiddenOfTheRow(SpeechScorer):
    """Defect: labels are not shifted; the row that holds a code is the one that predicts it."""

    def _through_heads(self, batch: Any, hidden_SC: Tensor, uses: Any) -> list[Any]:
        return super()._through_heads(batch, torch.cat([hidden_SC[1:], hidden_SC[-1:]]), uses)


class RowsWithoutDelay(SpeechScorer):
    """Defect: all codes of a frame are predicted by one row, the last one before its first."""

    def _through_heads(self, batch: Any, hidden_SC: Tensor, uses: Any) -> list[Any]:
        hidden_FC = hidden_SC.index_select(0, batch.source_F)
        unshifted = [hidden_FC[batch.depth_D]] * (BOOKS - 1)
        assert not isinstance(self.model, torch.Tensor)
        return self.model.through_heads([hidden_FC, *unshifted], uses)  # type: ignore[attr-defined, no-any-return]


def test_unshifted_labels_leak(folder: Path) -> None:
    policy = policy_of(folder / "model")
    policy._root = HiddenOfTheRow(policy.root.model, None, policy.root._suppressed)
    leaks = run_leak_test(policy, TrialSettings(60, 1e-2))
    assert all(leak.leaks for leak in leaks), leaks


def test_codes_that_are_predicted_too_early_are_caught(folder: Path) -> None:
    policy = policy_of(folder / "model")
    policy._root = RowsWithoutDelay(policy.root.model, None, policy.root._suppressed)
    stop = run_stop_test(policy, TrialSettings(100, 1e-2), FRAMES[:3])
    assert not any(recited.is_whole for recited in stop.clips), stop


def test_the_table_of_offsets_is_that_of_the_trained_places(folder: Path, by_heart: Path) -> None:
    policy = policy_of(by_heart)
    prompts = [spoken_prompt(text, clip(frames)) for text, frames in zip(TEXTS, FRAMES, strict=False)]
    table = offset_table(policy, policy.root, [policy.batch([policy.encode(clip)[0] for clip in prompts])])
    assert not table.shifted
    for losses in table.loss_KP:
        trained, *rest = losses[1], losses[0], *losses[2:]
        assert trained is not None and trained < 0.1
        assert all(loss is None or loss > 1 for loss in rest)


def test_an_untrained_model_raises_no_alarm(folder: Path) -> None:
    """Whose heads are its embeddings, and so predict the codes that the row holds."""
    policy = policy_of(folder / "model")
    torch.nn.init.normal_(policy.root.model.get_parameter(CODE_TABLE), std=0.5)
    clips = [policy.encode(spoken_prompt(text, random_codes(BOOKS, CODES, 9, 7)))[0] for text in TEXTS]
    table = offset_table(policy, policy.root, [policy.batch(clips)])
    assert not table.shifted
    assert set(replace(table, has_tied_heads=False).shifted.values()) == {(-1, 0)}


def test_rollouts_have_the_log_probabilities_of_the_policy(folder: Path) -> None:
    policy = policy_of(folder / "model", needs_reference=True)
    prompted = spoken_prompt("one", clip(3))
    with torch.no_grad():  # ends are likely
        weight = policy.root.model.get_parameter(CODE_TABLE).unflatten(0, (BOOKS, CODES + 2))
        weight[0, -1] = weight[0, :CODES].mean(0)
    settings = RolloutSettings(seed=0, step=0, temperature=0.8, answer="audio", max_frames=12)
    (group,) = policy.rollout_engine().sample([prompted], [list(range(12))], settings)
    assert {rollout.truncated for rollout in group} == {True, False}
    assert all(
        int(rollout.tokens.codes[0].max()) < CODES for rollout in group if rollout.tokens.codes[0].numel()
    )
    encoded = policy.encode_sampled(prompted, [rollout.tokens for rollout in group])
    batch = policy.batch(encoded)
    logprobs = policy.answer_logprobs(policy.root, batch, TokenRequest(temperature=0.8))
    drawn_T = torch.cat([rollout.tokens.logprob_A for rollout in group])  # type: ignore[misc]
    torch.testing.assert_close(logprobs.policy_T, drawn_T, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(logprobs.reference_T.shape, drawn_T.shape)  # type: ignore[union-attr]
    for rollout, rows in zip(group, encoded, strict=True):
        assert policy.num_answer_tokens(rows) == rollout.tokens.num_actions


def test_an_adapter_learns_and_leaves_the_table_alone(folder: Path) -> None:
    run_stage(
        folder, "lora", "train", start=str(folder / "model"), samples=str(folder / "clips"), steps=60, batch_size=5,
        normalization="token", **LORA, learning_rate=1e-2,
    )  # fmt: skip
    losses = curve_of(folder, "lora", "train", "audio_loss")
    assert losses[-1] < 0.95 * losses[0]  # the frozen table of small numbers allows no more
    before, after = (
        load_file(path / "model.safetensors")
        for path in (folder / "model", folder / "lora" / "train" / "model")
    )
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "_proj." in name}


def test_an_adapter_of_the_table_is_refused(folder: Path) -> None:
    lora = LoRASettings(target_modules=("modality_embeddings.0.embedding",))
    with pytest.raises(ConfigError):
        policy_of(folder / "model", trained="adapter", lora=lora)


@pytest.mark.parametrize("setting", [{"depth_weight": 0.5}, {"prompt_mix": {"no_language": 0.2}}])
def test_settings_of_other_talkers_are_refused(folder: Path, setting: dict[str, Any]) -> None:
    start, samples = str(folder / "model"), str(folder / "clips")
    with pytest.raises(ConfigError, match=f"{next(iter(setting))}: is for talkers with two decoders"):
        run_stage(folder, "refused", "train", start=start, samples=samples, steps=10, **setting)


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with as many codes as the published one, and Higgs Audio V2's tokenizer beside it."""
    place = tmp_path_factory.mktemp("speaking")
    write_higgs_v3(place, TalkerShape(BOOKS, 1024, 64, 1, 0, 0))
    write_tokenizer(place / "audio_tokenizer")
    return place


def test_it_speaks_through_a_codec_beside_it(speaking: Path) -> None:
    generator = open_model_folder(speaking).generator()
    speech = generator.speak("one two", seed=3, max_duration_s=0.4)
    assert speech.sample_rate == 24_000 and 0 < speech.duration_s <= 0.44
    pieces = [piece.samples_CN for piece in generator.stream("one two", seed=3, max_duration_s=0.4)]
    assert sum(piece.shape[1] for piece in pieces) == speech.samples_1N.shape[1]
    with pytest.raises(ConfigError, match=r"<\|audio\|>"):
        generator.speak("one <|audio|> two")
    with pytest.raises(ConfigError, match="voices by recordings alone"):
        generator.speak("one two", speaker="ann", max_duration_s=0.4)


def test_a_codec_of_another_shape_is_refused(folder: Path, speaking: Path) -> None:
    with pytest.raises(ConfigError, match="the codec has 8 codebooks of 1024 codes, the model 8 of 16"):
        open_model_folder(folder / "model").generator(speaking / "audio_tokenizer")


def test_the_bundled_codec_is_that_of_the_weights(
    speaking: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a small codec in place of the published shape, which files of a model do not say."""
    beside = load_codec(speaking / "audio_tokenizer")
    monkeypatch.setattr("tokenizer.codecs.higgs_v3.published_config", lambda: beside.config)  # type: ignore[attr-defined]
    shutil.copytree(speaking, tmp_path / "model", ignore=shutil.ignore_patterns("audio_tokenizer"))
    weights = load_file(tmp_path / "model" / "model.safetensors")
    codec_weights = load_file(speaking / "audio_tokenizer" / "model.safetensors")
    weights |= {CODEC_PREFIX + name: value for name, value in codec_weights.items()}
    save_file(weights, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    bundled = load_codec(tmp_path / "model")
    samples_1N = 0.1 * torch.randn(1, 4_000, generator=torch.Generator().manual_seed(0))
    codes_KT = bundled.encode(samples_1N)
    torch.testing.assert_close(codes_KT, beside.encode(samples_1N))
    torch.testing.assert_close(bundled.decode(codes_KT), beside.decode(codes_KT))
    assert open_model_folder(tmp_path / "model").generator().codec.num_codebooks == BOOKS
    del weights[CODEC_PREFIX + "fc2.weight"]
    save_file(weights, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="fc2.weight"):
        load_codec(tmp_path / "model")
