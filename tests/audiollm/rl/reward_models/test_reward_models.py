"""Scores of reward models of every kind: each depends on its own recording and on the end of its own answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from audiollm.data.records.sample import AudioPart, Message, RatedAnswer, Sample, TextPart
from audiollm.data.records.source import AudioClip, LoadedSample
from audiollm.errors import ConfigError
from audiollm.files.atomic import write_json
from audiollm.rl.reward_models.model import RewardModel, Scored, load_reward_model
from audiollm.train.settings import LoRASettings, Trained
from tests.audiollm.families.dual_ffn.packed_samples import codes, save_model
from tests.audiollm.models.tiny_audio_llms import save_tiny
from tests.audiollm.rl.preference.records import tone

KINDS = ("qwen2_audio", "qwen2_5_omni_thinker", "features", "codes")
SPOKEN = ("features", "codes")
LORA = LoRASettings(rank=2, alpha=4, dropout=0.3, target_modules=("q_proj", "v_proj"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    for kind, folder in made.items():
        if kind in SPOKEN:
            save_model(folder, kind)
        else:
            save_tiny(kind, folder)
        for n in range(6):
            tone(folder / f"{n}.wav", 150.0 + 90 * n, 0.3 + 0.15 * n)
    return made


def recordings(folder: Path, names: Sequence[int]) -> list[AudioClip]:
    return [AudioClip(f"{n}.wav", "s", str(folder / f"{n}.wav")) for n in names]


def loaded(
    folder: Path, kind: str, name: str, heard: Sequence[int], answers: Sequence[list[Any]]
) -> LoadedSample:
    """A sample; an answer's part is a text, or the number of frames of speech."""
    content = [*(AudioPart(path=f"{n}.wav") for n in heard), TextPart(text="what is it?")]
    rated = [
        RatedAnswer(
            content=[TextPart(text=p) if isinstance(p, str) else AudioPart(path=f"{name}{p}") for p in each]
        )
        for each in answers
    ]
    sample = Sample(id=name, messages=[Message(role="user", content=content)], task="t", answers=rated)
    spoken = [p for each in answers for p in each if not isinstance(p, str)]
    clips = (*recordings(folder, heard), *(AudioClip("codes", name, None) for _ in spoken))
    encodings = [[*(codes(4 + n, n) for n in heard), *(codes(frames, frames) for frames in spoken)]]
    return LoadedSample(sample, encodings if kind in SPOKEN else [], clips)


def samples(folder: Path, kind: str, swapped: int | None = None) -> list[LoadedSample]:
    """One recording, two of other lengths, and none; a DualFFN also speaks. `swapped` has another recording."""
    names = [n if n != swapped else 5 for n in range(4)]
    second: list[list[Any]] = (
        [["a cat"], [4], ["high", 3]] if kind in SPOKEN else [["a cat"], ["a dog or a cat"]]
    )
    return [
        loaded(folder, kind, "one", names[:1], [["a dog"], ["a dig"]]),
        loaded(folder, kind, "two", names[1:3], second),
        loaded(folder, kind, "none", [], [["low"], ["high"]]),
    ]


def begin(
    folder: Path, trained: Trained = "all", scored: Scored = "answers", dtype: torch.dtype = torch.float64
) -> RewardModel:
    torch.manual_seed(0)
    model = RewardModel.begin(folder, trained, LORA, scored=scored, bias=True)
    model.root.to(dtype)
    model.root.train()  # dropout stays off
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.root.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(0.05 * noise.to(dtype))
    return model


def scores(model: RewardModel, given: Sequence[LoadedSample]) -> list[Tensor]:
    """Scores of each sample, all in one batch."""
    encoded = [
        model.policy.encode(model.policy.take(each, list(range(len(each.sample.answers))))) for each in given
    ]
    found = model.root(model.policy.batch([answer for each in encoded for answer in each]))
    sizes = [len(each) if model.scored == "answers" else sum(len(a.ends) for a in each) for each in encoded]
    return list(found.split(sizes))


@pytest.mark.parametrize("scored", ["answers", "steps"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_swapped_recording_changes_its_own_scores_alone(
    folders: dict[str, Path], kind: str, scored: Scored
) -> None:
    model = begin(folders[kind], scored=scored)
    with torch.no_grad():
        before = scores(model, samples(folders[kind], kind))
        for recording, owner in ((0, 0), (1, 1), (2, 1)):
            after = scores(model, samples(folders[kind], kind, recording))
            for number, (old, new) in enumerate(zip(before, after, strict=True)):
                if number == owner:
                    assert ((old - new).abs() > 1e-9).all()
                else:
                    torch.testing.assert_close(old, new, rtol=0, atol=1e-12)


@pytest.mark.parametrize("scored", ["answers", "steps"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_scores_as_single_samples(folders: dict[str, Path], kind: str, scored: Scored) -> None:
    model = begin(folders[kind], scored=scored)
    given = samples(folders[kind], kind)
    many = model.score_many(given)
    for own, each in zip(model.score_many(given, max_tokens=64), many, strict=True):
        assert own == pytest.approx(each, abs=1e-12)
    for each, together in zip(given, many, strict=True):
        alone = [model.score(each, [n])[0] for n in range(len(each.sample.answers))]
        assert together == pytest.approx(alone, abs=1e-12) and len(set(together)) == len(together)


@pytest.mark.parametrize("kind", KINDS)
def test_answers_that_differ_in_their_last_token_have_other_scores(
    folders: dict[str, Path], kind: str
) -> None:
    model = begin(folders[kind])
    pair = loaded(folders[kind], kind, "ends", [0], [["it is a"], ["it is o"]])
    first, other = model.score(pair)
    assert abs(first - other) > 1e-9
    if kind in SPOKEN:
        spoken = loaded(folders[kind], kind, "ends", [0], [[4], [4]])
        last = spoken.encodings[0][-1].clone()
        last[0, -1] = (last[0, -1] + 1) % 32
        changed = replace(spoken, encodings=[[*spoken.encodings[0][:-1], last]])
        first, other = model.score(changed)
        assert abs(first - other) > 1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_that_is_scored_is_the_one_from_which_the_end_is_chosen(
    folders: dict[str, Path], kind: str
) -> None:
    """Behind the end supervised training has no target, and a trained model tells little there."""
    model = begin(folders[kind])
    scorer: Any = model.root.scorer
    given = samples(folders[kind], kind)
    encoded = [
        each
        for own in given
        for each in model.policy.encode(model.policy.take(own, range(len(own.sample.answers))))
    ]
    batch = model.policy.batch(encoded)
    counts = torch.tensor([model.policy.num_answer_tokens(each) for each in encoded])
    with torch.no_grad():
        before_TC = scorer.hidden_before(batch)
        scores_A = model.root.score_of(before_TC[counts.cumsum(0) - 1])
        torch.testing.assert_close(model.root(batch), scores_A, rtol=0, atol=1e-12)


def test_a_head_on_another_state_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    begin(folders["codes"]).save(tmp_path)
    write_json(tmp_path / "model" / "reward.json", {"scored": "answers"})
    with pytest.raises(ConfigError, match="(?s)scores another state.*train it again"):
        load_reward_model(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_reaches_what_hears_and_not_the_output_head(folders: dict[str, Path], kind: str) -> None:
    model = begin(folders[kind])
    torch.cat(scores(model, samples(folders[kind], kind))).square().sum().backward()
    trained = {name: p.grad for name, p in model.root.named_parameters() if p.requires_grad}
    assert not any(grad is None for grad in trained.values())
    assert not any("lm_head" in name for name in trained)
    reached = {name for name, grad in trained.items() if grad is not None and bool(grad.abs().sum() > 0)}
    assert {"score.weight", "score.bias"} <= reached
    hears = "embed_audio_tokens" if kind == "codes" else "audio_tower.layers.0"
    assert any(hears in name for name in reached)
    if kind != "codes":
        assert any(("proj" in name and "audio" in name) or "projector" in name for name in reached)


@pytest.mark.parametrize("trained", ["all", "adapter"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_model_scores_the_same(
    folders: dict[str, Path], kind: str, trained: Trained, tmp_path: Path
) -> None:
    model = begin(folders[kind], trained, dtype=torch.float32)
    given = samples(folders[kind], kind)
    model.save(tmp_path)
    reloaded = load_reward_model(tmp_path)
    assert not any("lora" in name for name, _ in reloaded.root.named_parameters())
    assert (tmp_path / "adapter").is_dir() == (trained == "adapter")
    for own, other in zip(model.score_many(given), reloaded.score_many(given), strict=True):
        assert own == pytest.approx(other, abs=1e-5)  # an adapter is merged: other roundings of float32
    again = RewardModel.begin(tmp_path / "model")  # training goes on from its head
    assert torch.equal(again.root.score.weight, model.root.score.weight)
    other = RewardModel.begin(tmp_path / "model", scored="steps")  # and begins anew where steps are scored
    assert not torch.equal(other.root.score.weight, model.root.score.weight)


def test_an_output_head_is_never_trained(folders: dict[str, Path]) -> None:
    model = RewardModel.begin(folders["codes"], "audio_ffn")
    trained = {name for name, p in model.root.named_parameters() if p.requires_grad}
    assert "score.weight" in trained and not any("lm_head" in name for name in trained)
    lora = LoRASettings(rank=2, target_modules=("q_proj", "text_lm_head"))
    adapted = RewardModel.begin(folders["codes"], "adapter", lora)
    named = {name for name, p in adapted.root.named_parameters() if p.requires_grad}
    assert "score.weight" in named and not any("lm_head" in name for name in named)
