"""Measures of generated sounds against closed forms, and against audioldm-eval's functions.

The package needs encoders and weights: its code is put in a folder of its own (`pip install --no-deps --target FOLDER
audioldm-eval==0.0.3`), which `AUDIOLLM_AUDIOLDM` names; the test that needs it skips without.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch

from audiollm.evaluate.judges.taggers import probabilities
from audiollm.evaluate.report.metric_error import MetricError
from audiollm.evaluate.sound.sound_measures import (
    band_distance,
    border_excess,
    class_divergence,
    cosines,
    desync,
    frechet_distance,
    gaussian_distance,
    inception_score,
    match_onsets,
    nearest_distances,
)

DRAW = np.random.default_rng(0)


def test_distance_of_gaussians_in_closed_form() -> None:
    """Of diagonal covariances: ‖μ₁ − μ₂‖² + Σ (σ₁ − σ₂)²."""
    first, second = np.array([1.0, 2.0, 0.5]), np.array([2.0, 0.1, 0.5])
    gap = np.array([3.0, 0.0, -1.0])
    wanted = gap @ gap + ((first - second) ** 2).sum()
    assert gaussian_distance(gap, np.diag(first**2), np.diag(second**2)) == pytest.approx(wanted, rel=1e-12)


def test_distance_of_samples_by_scipys_matrix_root() -> None:
    first, second = DRAW.normal(size=(40, 6)), DRAW.normal(size=(55, 6)) @ DRAW.normal(size=(6, 6)) + 0.3
    covariances = [np.cov(values, rowvar=False) for values in (first, second)]
    root = scipy.linalg.sqrtm(covariances[0] @ covariances[1]).real
    gap = first.mean(0) - second.mean(0)
    wanted = gap @ gap + np.trace(covariances[0] + covariances[1] - 2 * root)
    assert frechet_distance(first, second) == pytest.approx(wanted, rel=1e-9)
    assert frechet_distance(first, first) == pytest.approx(0, abs=1e-9)
    assert frechet_distance(first, second) == pytest.approx(frechet_distance(second, first), rel=1e-9)


def test_many_samples_come_near_the_distance_of_their_gaussians() -> None:
    first, second = DRAW.normal(size=(40_000, 2)), 2 * DRAW.normal(size=(40_000, 2)) + 1
    assert frechet_distance(first, second) == pytest.approx(2 * 1 + 2 * (2 - 1) ** 2, rel=0.03)


@pytest.mark.parametrize("sounds", [1, 6])
def test_too_few_sounds_have_no_covariance(sounds: int) -> None:
    with pytest.raises(MetricError, match="needs 7"):
        frechet_distance(DRAW.normal(size=(sounds, 6)), DRAW.normal(size=(20, 6)))
    with pytest.raises(MetricError, match="not finite"):
        frechet_distance(np.full((9, 2), np.nan), DRAW.normal(size=(9, 2)))


def test_no_measure_is_nan() -> None:
    values, nan = DRAW.normal(size=(3, 21)), np.full((3, 21), np.nan)
    for measure in (
        lambda: class_divergence(values, nan, "softmax"),
        lambda: inception_score(nan),
        lambda: cosines(values, nan),
        lambda: desync(values, nan),
        lambda: nearest_distances(nan, values),
    ):
        with pytest.raises(MetricError, match="not finite|no numbers"):
            measure()


def test_divergence_of_classes() -> None:
    p, q = np.array([[0.7, 0.2, 0.1]]), np.array([[0.1, 0.3, 0.6]])
    wanted = sum(a * math.log(a / b) for a, b in zip(p[0], q[0], strict=True))
    assert class_divergence(np.log(p), np.log(q), "softmax")[0] == pytest.approx(wanted, rel=1e-12)
    assert class_divergence(np.log(q), np.log(p), "softmax")[0] != pytest.approx(wanted, rel=1e-3)
    logits = np.log(p / (1 - p)), np.log(q / (1 - q))
    assert class_divergence(*logits, "sigmoid")[0] == pytest.approx(wanted, rel=1e-9)
    assert class_divergence(logits[0], logits[0], "sigmoid")[0] == 0
    with pytest.raises(MetricError, match="cannot be paired"):
        class_divergence(np.zeros((2, 3)), np.zeros((2, 4)), "softmax")


def test_inception_score_is_between_1_and_the_number_of_classes() -> None:
    sure = 50.0 * np.eye(5)
    assert inception_score(sure) == pytest.approx(5, rel=1e-6)
    assert inception_score(np.repeat(sure[:1], 4, axis=0)) == pytest.approx(1, rel=1e-6)
    assert inception_score(np.zeros((4, 5))) == pytest.approx(1, rel=1e-9)
    with pytest.raises(MetricError):
        inception_score(sure[:1])


def test_offsets_are_sizes_of_the_best_class_at_both_ends() -> None:
    first, last = np.zeros((2, 21)), np.zeros((2, 21))
    first[0, 10] = last[0, 10] = 1  # in time
    first[1, 0], last[1, 15] = 1, 1  # two seconds early, one late
    assert desync(first, last).tolist() == pytest.approx([0.0, 1.5])
    with pytest.raises(MetricError, match="20 offsets"):
        desync(first[:, :20], last)


def test_each_heard_onset_answers_one_wanted_onset() -> None:
    errors = match_onsets(np.array([0.52, 1.0, 2.9]), np.array([0.5, 0.6, 1.8, 3.0]), 0.5)
    assert errors[0] == pytest.approx(0.02) and errors[1] == pytest.approx(0.4)
    assert np.isnan(errors[2]) and errors[3] == pytest.approx(-0.1)
    assert np.isnan(match_onsets(np.zeros(0), np.array([1.0]), 0.5)).all()


def test_copies_are_nearer_than_other_sounds() -> None:
    known = DRAW.normal(size=(30, 8))
    others = DRAW.normal(size=(5, 8))
    distances = nearest_distances(np.concatenate([2 * known[:2], others]), known)
    assert distances[:2].max() < 1e-6 and distances[2:].min() > 0.2
    assert nearest_distances(-known[:1], known[:1])[0] == pytest.approx(2.0)
    assert cosines(known[:2], np.stack([3 * known[0], -known[1]])).tolist() == pytest.approx([1.0, -1.0])
    with pytest.raises(MetricError):
        cosines(np.zeros((1, 2)), np.ones((1, 2)))


def test_a_click_at_a_border_stands_out_and_no_border_does_not() -> None:
    rate, draw = 16_000, np.random.default_rng(0)
    noise_N = draw.normal(0, 0.1, 3 * rate).astype(np.float32)
    kept = [border_excess(np.roll(noise_N, 999 * n), rate, (1.0, 2.0)) for n in range(20)]
    assert 0.7 < float(np.median(kept)) < 1.3, (
        "of noise, some ten values near the borders are like all others"
    )
    clicked_N = noise_N.copy()
    clicked_N[2 * rate] += 5
    assert border_excess(clicked_N, rate, (1.0, 2.0)) > 3
    assert border_excess(clicked_N, rate, (0.0, 1.0)) < 1.5, "the click is elsewhere"
    for samples_N, span, reason in (
        (noise_N, (0.0, 3.0), "no border inside"),
        (noise_N[:1000], (0.0, 0.03), "no border inside"),
        (noise_N[:100], (0.0, 0.001), "shorter than two"),
        (noise_N, (0.05, 2.95), "too little"),
        (0 * noise_N, (1.0, 2.0), "silent"),
    ):
        with pytest.raises(MetricError, match=reason):
            border_excess(samples_N, rate, span)


@pytest.fixture(scope="module")
def audioldm() -> Callable[[str], Any]:
    """Loads a module of measures by itself: the package's own imports are those of its encoders."""
    folder = Path(os.environ.get("AUDIOLLM_AUDIOLDM", "")) / "audioldm_eval" / "metrics"
    if not folder.is_dir():
        pytest.skip("AUDIOLLM_AUDIOLDM does not name a folder with the package audioldm-eval 0.0.3")

    def module(name: str) -> Any:
        spec = importlib.util.spec_from_file_location(f"audioldm_eval_{name}", folder / f"{name}.py")
        assert spec is not None and spec.loader is not None
        made = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made)
        return made

    return module


def test_measures_are_those_of_audioldm_eval(audioldm: Callable[[str], Any]) -> None:
    draw = np.random.default_rng(3)
    first, second = draw.normal(size=(40, 6)), draw.normal(size=(55, 6)) @ draw.normal(size=(6, 6)) + 0.3
    features = [{"f": torch.from_numpy(values)} for values in (first, second)]
    theirs = audioldm("fid").calculate_fid(*features, "f")["frechet_distance"]
    assert frechet_distance(first, second) == pytest.approx(theirs, rel=1e-9)
    logits = 3 * draw.normal(size=(30, 9))
    theirs = audioldm("isc").calculate_isc({"f": torch.from_numpy(logits)}, "f", 0, False, 1)
    assert inception_score(logits) == pytest.approx(theirs["inception_score_mean"], rel=1e-9)


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_divergence_is_that_of_audioldm_eval_without_its_offset(
    audioldm: Callable[[str], Any], kind: str
) -> None:
    """It adds 1e-6 to the shares of the generated sound: where those are far above, the two are equal to 1e-4."""
    draw, files = np.random.default_rng(4), [f"{number}.wav" for number in range(30)]
    for scale in (1.0, 12.0):
        generated, reference = scale * draw.normal(size=(2, 30, 9))
        named = [{"f": torch.from_numpy(each), "file_path_": files} for each in (generated, reference)]
        theirs = audioldm("kl").calculate_kl(*named, "f")[0][f"kullback_leibler_divergence_{kind}"]
        p, q = (probabilities(each, kind == "softmax") for each in (reference, generated))
        assert theirs == pytest.approx((p * np.log(p / (q + 1e-6))).sum(axis=1).mean(), rel=1e-9)
        ours = class_divergence(reference, generated, kind).mean()
        if scale == 1.0:
            assert ours == pytest.approx(theirs, abs=1e-4)
        else:
            assert ours > theirs + 0.1


@pytest.mark.parametrize("rate", [8_000, 16_000, 44_100])
def test_distance_of_bands(rate: int) -> None:
    """A gain is its decibels; takes of one noise are near; silence is as far as the noise is above -70 dBFS."""
    noise, other = DRAW.normal(size=(2, 2 * rate)) * 0.05
    assert band_distance(noise, noise, rate) == 0.0
    assert band_distance(noise, 2 * noise, rate) == pytest.approx(20 * math.log10(2), rel=1e-6)
    assert band_distance(noise, other, rate) < 2.0
    assert band_distance(noise, 0 * noise, rate) > 20.0
    hum = 1e-5 * np.sin(np.arange(2 * rate))
    assert band_distance(hum, 0 * hum, rate) == 0.0
    with pytest.raises(MetricError, match="cannot be compared"):
        band_distance(noise, noise[:-1], rate)
    with pytest.raises(MetricError, match="shorter than a fifth"):
        band_distance(noise[: rate // 8], noise[: rate // 8], rate)
