"""The running level: the same whatever the pieces, of loud and quiet speakers, from what was heard alone."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from audiollm.audio import rms_dbfs
from audiollm.audio.level import MAX_GAIN_DB, PEAK, TARGET_DBFS, RunningLevel, running_level

RATE = 16_000


def words(seed: int, seconds: float = 6.0) -> Tensor:
    """Bursts of noise of half a second with pauses between them."""
    draw = torch.Generator().manual_seed(seed)
    samples_1N = 0.1 * torch.randn(1, round(seconds * RATE), generator=draw)
    on_N = (torch.arange(samples_1N.shape[1]) // (RATE // 2)) % 2 == 1
    return samples_1N * on_N


def test_pieces_of_any_size_have_the_level_of_the_whole() -> None:
    samples_1N, draw = words(0), random.Random(0)
    whole_1N = running_level(samples_1N, RATE)
    assert whole_1N.shape == samples_1N.shape
    for _ in range(3):
        level, found, start = RunningLevel(RATE), [], 0
        while start < samples_1N.shape[1]:
            size = draw.choice([1, 7, 159, 160, 5000])
            found.append(level.push(samples_1N[:, start : start + size]))
            start += size
        assert torch.equal(torch.cat([*found, level.flush()], dim=1), whole_1N)
    # what is to come changes nothing that was heard
    other_1N = torch.cat([samples_1N[:, :RATE], 10 * samples_1N[:, RATE:]], dim=1)
    assert torch.equal(running_level(other_1N, RATE)[:, :RATE], whole_1N[:, :RATE])


@pytest.mark.parametrize("gain_db", [-30.0, -10.0, 0.0, 15.0])
def test_quiet_and_loud_speakers_are_heard_alike(gain_db: float) -> None:
    """From the first tenth of a second of speech on."""
    samples_1N = words(1)
    heard_1N = running_level(samples_1N * 10 ** (gain_db / 20), RATE)
    speech_1N = heard_1N[:, round(0.6 * RATE) : RATE]
    assert rms_dbfs(speech_1N) == pytest.approx(TARGET_DBFS, abs=1.5)
    assert heard_1N.abs().max() <= PEAK


def test_pauses_and_faint_noise_stay_quiet_and_a_quiet_speaker_after_a_loud_one_returns() -> None:
    silent_1N = torch.zeros(1, RATE)
    assert not running_level(silent_1N, RATE).any()
    faint_1N = 1e-5 * torch.randn(1, RATE, generator=torch.Generator().manual_seed(0))
    assert rms_dbfs(running_level(faint_1N, RATE)) < -100 + MAX_GAIN_DB + 1
    noise_1N = 0.1 * torch.randn(1, RATE, generator=torch.Generator().manual_seed(1))
    pause_1N = running_level(torch.cat([noise_1N, 0.01 * noise_1N], dim=1), RATE)[:, RATE + 1000 :]
    assert rms_dbfs(pause_1N) < TARGET_DBFS - 38, "a pause is no reason to turn up the noise in it"
    minute_1N = torch.cat([noise_1N, *[0.2 * noise_1N] * 60], dim=1)
    assert rms_dbfs(running_level(minute_1N, RATE)[:, -RATE:]) == pytest.approx(TARGET_DBFS, abs=1.5)
