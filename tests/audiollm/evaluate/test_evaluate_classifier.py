"""The trained judges and the statistics: they learn, do not change from run to run, and do not flatter."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from audiollm.evaluate.judges.classifier import (
    ClassifierConfig,
    ClipClassifier,
    UntrainableError,
    train_classifier,
)
from audiollm.evaluate.judges.features import estimate_bandwidth, judge_mel_filters, mel_power
from audiollm.evaluate.report.statistics import NOTHING, confusion, share
from audiollm.evaluate.report.text_errors import word_error_rate
from tests.audiollm.generation.melodies import JUDGE_STEPS, RATE, TEXTS, accuracy, melody, toy_set


@pytest.fixture(scope="module")
def text_judge() -> ClipClassifier:
    clips, texts, _ = toy_set(range(5, 15))
    return train_classifier(clips, texts, ClassifierConfig(steps=JUDGE_STEPS))


def test_classifier_learns_and_is_not_fooled_by_level_dc_silence_or_the_empty_band(
    text_judge: ClipClassifier,
) -> None:
    clips, texts, _ = toy_set(range(5))
    assert accuracy(text_judge, clips, texts) >= 0.95
    silence_CN = torch.zeros(1, 6000)
    changed = [(torch.cat([silence_CN, 0.05 * x, silence_CN], dim=1) + 0.02, rate) for x, rate in clips]
    assert accuracy(text_judge, changed, texts) >= 0.95
    in_24_khz = [
        (torch.nn.functional.interpolate(x[None], scale_factor=1.5, mode="linear")[0], 24_000)
        for x, _ in clips
    ]
    assert accuracy(text_judge, in_24_khz, texts) >= 0.9


def test_classifier_follows_its_labels() -> None:
    """With labels that the sound does not explain, unseen clips are at chance: the tests above can fail."""
    clips, texts, _ = toy_set(range(5, 15))
    shuffled = [
        texts[i] for i in torch.randperm(len(texts), generator=torch.Generator().manual_seed(1)).tolist()
    ]
    judge = train_classifier(clips, shuffled, ClassifierConfig(steps=20))
    test_clips, test_texts, _ = toy_set(range(5))
    assert accuracy(judge, test_clips, test_texts) < 0.7


def test_classifier_is_deterministic_whatever_the_global_generator(text_judge: ClipClassifier) -> None:
    clips, texts, _ = toy_set(range(5, 9))
    config = ClassifierConfig(steps=6)
    torch.manual_seed(1)
    first = train_classifier(clips, texts, config).network.state_dict()
    torch.manual_seed(2)
    second = train_classifier(clips, texts, config).network.state_dict()
    other = train_classifier(clips, texts, ClassifierConfig(steps=6, seed=1)).network.state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_classifier_saved_and_loaded_says_the_same(text_judge: ClipClassifier, tmp_path: Path) -> None:
    clips, _, _ = toy_set(range(3))
    text_judge.save(tmp_path / "judge")
    assert ClipClassifier.load(tmp_path / "judge").predict_many(clips) == text_judge.predict_many(clips)


def test_the_company_of_a_clip_has_no_effect(text_judge: ClipClassifier) -> None:
    clips, _, _ = toy_set(range(2))
    longer = (torch.cat([clips[0][0]] * 4, dim=1), RATE)
    together = text_judge.predict_many([*clips, longer])
    for clip, (label, probability) in zip([*clips, longer], together, strict=True):
        alone = text_judge.predict(*clip)
        assert alone[0] == label
        assert alone[1] == pytest.approx(probability, abs=1e-5)


def test_silence_and_tiny_clips(text_judge: ClipClassifier) -> None:
    assert text_judge.predict(torch.zeros(1, 8000), RATE) == ("", 0.0)
    assert text_judge.predict(torch.full((1, 8000), 0.3), RATE) == ("", 0.0)
    assert text_judge.predict(torch.zeros(1, 0), RATE) == ("", 0.0)
    assert text_judge.predict(0.1 * torch.randn(2, 30), RATE)[0] in TEXTS


def test_untrainable_material_is_refused() -> None:
    clips, texts, _ = toy_set(range(2))
    with pytest.raises(UntrainableError, match="at least 2"):
        train_classifier(clips, ["one"] * len(clips))
    with pytest.raises(UntrainableError, match="'silence' are silent"):
        train_classifier([*clips, (torch.zeros(1, 8000), RATE)], [*texts, "silence"])


def test_bandwidth_is_that_of_the_recording_not_of_its_container() -> None:
    from audiollm.audio import resample

    noise = torch.randn(1, 16_000, generator=torch.Generator().manual_seed(0)) * 0.1
    narrow = resample(resample(noise, 16_000, 8_000), 8_000, 24_000)
    assert estimate_bandwidth([(narrow, 24_000)]) == pytest.approx(4000, rel=0.07)
    assert estimate_bandwidth([(noise, 16_000)]) == pytest.approx(8000, rel=0.02)
    filters_FM = judge_mel_filters(4000)
    high_hz = torch.nonzero(filters_FM.sum(dim=1)).max() * 16_000 / 512
    assert high_hz < 3800


def test_mel_power_trims_silence_and_ignores_level() -> None:
    filters_FM = judge_mel_filters(8000)
    sound = melody("one", "anna", 0)
    power_TM = mel_power(sound, RATE, filters_FM)
    torch.testing.assert_close(mel_power(0.01 * sound, RATE, filters_FM), power_TM, rtol=1e-3, atol=1e-4)
    padded = torch.cat([torch.zeros(1, 4800), sound, torch.zeros(1, 8000)], dim=1)
    padded_TM = mel_power(padded, RATE, filters_FM)
    assert len(power_TM) <= len(padded_TM) <= len(power_TM) + 4
    torch.testing.assert_close(padded_TM.sum(dim=0), power_TM.sum(dim=0), rtol=0.15, atol=1.0)


# ------------------------------------------------------------------------------------------ statistics


def test_share_has_the_wilson_interval() -> None:
    """Wilson (1927): (p + z²/2n ± z sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n)."""
    z, n, p = 1.959963984540054, 180, 172 / 180
    middle, spread = p + z**2 / (2 * n), z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    table = share([True] * 172 + [False] * 8)
    assert table == {
        "accuracy": pytest.approx(p),
        "low": pytest.approx((middle - spread) / (1 + z**2 / n)),
        "high": pytest.approx((middle + spread) / (1 + z**2 / n)),
        "n": 180,
    }
    assert share([])["accuracy"] is None


def test_confusion_counts_every_clip_once() -> None:
    table = confusion(["a", "a", "b", "b"], ["a", "b", "b", "?"], ["a", "b"])
    assert table == {"asked": ["a", "b"], "heard": ["a", "b", NOTHING], "counts": [[1, 1, 0], [0, 1, 1]]}


def test_word_error_rate_counts_words_not_clips() -> None:
    assert word_error_rate(["one two three", "four"], ["one two", "four five"]) == pytest.approx(2 / 4)
    assert word_error_rate(["one", ""], ["one", "noise"]) == 1.0
    assert word_error_rate([""], ["x"]) is None


# ------------------------------------------------------------------------------------------- real digits


@pytest.mark.slow
@pytest.mark.parametrize(("field", "needed"), [(0, 0.99), (1, 0.98)], ids=["digit", "speaker"])
def test_judges_of_real_digits(field: int, needed: float, shared_data: Path) -> None:
    """On takes that they were not trained on: right, robust to what a codec does, and not to what ruins speech."""
    from audiollm.audio import load

    files = sorted((shared_data / "fsdd" / "recordings").glob("*.wav"))
    clips = {tuple(path.stem.split("_")): load(path, mono=True) for path in files}
    pairs = {n: (clip.samples_CN, clip.sample_rate) for n, clip in clips.items()}
    train = {n: pair for n, pair in pairs.items() if int(n[2]) >= 5}
    test = {n: pair for n, pair in pairs.items() if int(n[2]) < 5}
    judge = train_classifier(list(train.values()), [n[field] for n in train])
    labels = [n[field] for n in test]
    assert accuracy(judge, list(test.values()), labels) >= needed
    random = torch.Generator().manual_seed(0)

    def noisy(samples_CN: Tensor, decibels: float) -> Tensor:
        noise = torch.randn(samples_CN.shape, generator=random) * samples_CN.square().mean().sqrt()
        return samples_CN + noise * 10 ** (decibels / 20)

    at_24_khz = [(clip.resample(24_000).samples_CN, 24_000) for n, clip in clips.items() if int(n[2]) < 5]
    assert accuracy(judge, at_24_khz, labels) >= needed
    assert accuracy(judge, [(noisy(x, -20), rate) for x, rate in at_24_khz], labels) >= needed - 0.02
    only_noise = [(noisy(x, 40), rate) for x, rate in at_24_khz]
    assert accuracy(judge, only_noise, labels) <= 1 / len(set(labels)) + 0.1
