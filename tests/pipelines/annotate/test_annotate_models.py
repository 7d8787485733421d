"""Our calls of Silero VAD and DNSMOS against the packages' own, and how speech is cut by hand-made rules."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.annotate.steps.quality import SAMPLE_RATE, Dnsmos
from pipelines.annotate.synthesizers.espeak import Espeak
from pipelines.annotate.voice.activity import FRAME_S, VoiceActivity, VoicedSpan, cut, speech_spans


@pytest.fixture(scope="module")
def speech_N() -> np.ndarray:
    """9.6 s at 16 kHz: sentences with pauses."""
    from audiollm.audio import resample

    with Espeak() as synthesizer:
        said = [
            synthesizer.speak(text, "en-us") for text in ("The first sentence.", "And another one.", "Three.")
        ]
    quiet = np.random.default_rng(0).normal(0, 1e-3, 30000)
    joined = torch.from_numpy(
        np.concatenate([quiet, *(part for one in said for part in (one, quiet))])
    ).float()
    samples_N = resample(joined[None], 22050, SAMPLE_RATE)[0].numpy()
    return np.resize(samples_N, round(9.6 * SAMPLE_RATE))


def test_voice_activity_is_that_of_silero(speech_N: np.ndarray) -> None:
    from silero_vad import get_speech_timestamps, load_silero_vad

    model = load_silero_vad(onnx=True)
    stamps = get_speech_timestamps(
        torch.from_numpy(speech_N),
        model,
        min_speech_duration_ms=100,
        speech_pad_ms=0,
        min_silence_duration_ms=100,
    )
    assert len(stamps) >= 3
    spans = speech_spans(VoiceActivity().probabilities(speech_N), len(speech_N) / SAMPLE_RATE)
    expected = [(stamp["start"] / SAMPLE_RATE, stamp["end"] / SAMPLE_RATE) for stamp in stamps]
    assert spans == [pytest.approx(pair) for pair in expected]


def test_blocks_are_heard_like_the_whole(speech_N: np.ndarray) -> None:
    whole = VoiceActivity().probabilities(speech_N)
    listener = VoiceActivity()
    blocks = [
        listener.probabilities(speech_N[start : start + 512 * 40])
        for start in range(0, len(speech_N), 512 * 40)
    ]
    np.testing.assert_allclose(np.concatenate(blocks), whole, atol=1e-6)


@settings(max_examples=200)
@given(st.lists(st.sampled_from([0.0, 0.3, 0.4, 0.6, 1.0]), max_size=60))
def test_the_rule_of_on_and_off_is_that_of_silero(probabilities: list[float]) -> None:
    from silero_vad.utils_vad import get_speech_timestamps_from_probs

    stamps = get_speech_timestamps_from_probs(
        probabilities, min_speech_duration_ms=100, speech_pad_ms=0, min_silence_duration_ms=100
    )
    spans = speech_spans(np.array(probabilities, np.float32), len(probabilities) * FRAME_S)
    assert spans == [pytest.approx((s["start"] / SAMPLE_RATE, s["end"] / SAMPLE_RATE)) for s in stamps]


@settings(max_examples=200)
@given(
    st.lists(st.sampled_from([0.0, 0.3, 0.4, 0.6, 1.0]), min_size=1, max_size=300),
    st.floats(1.0, 4.0),
    st.floats(0.0, 1.0),
)
def test_cutting_keeps_all_speech_in_order_within_the_limit(
    probabilities: list[float], max_duration_s: float, merge_gap_s: float
) -> None:
    probabilities_F, duration_s = np.array(probabilities, np.float32), len(probabilities) * FRAME_S
    spans = speech_spans(probabilities_F, duration_s)
    pieces = [piece for piece, _ in cut(spans, probabilities_F, duration_s, max_duration_s, merge_gap_s)]
    assert all(0 <= p.start_s < p.end_s <= duration_s + 1e-9 for p in pieces)
    assert all(p.end_s - p.start_s <= max_duration_s + 1e-9 for p in pieces)
    assert all(a.end_s <= b.start_s + 1e-9 for a, b in pairwise(pieces))
    kept_s = sum(max(0.0, min(p.end_s, s.end_s) - max(p.start_s, s.start_s)) for p in pieces for s in spans)
    assert kept_s == pytest.approx(sum(s.end_s - s.start_s for s in spans))


def test_short_pauses_join_and_long_ones_part() -> None:
    spans = [VoicedSpan(1.0, 2.0), VoicedSpan(2.4, 3.0), VoicedSpan(3.6, 4.0)]
    silent_F = np.zeros(200, np.float32)
    assert cut(spans, silent_F, 6.4, 30.0) == [((0.8, 3.2), None), ((pytest.approx(3.4), 4.2), None)]
    assert cut(spans, silent_F, 6.4, 2.3)[0][0] == pytest.approx((0.8, 2.2))


def test_speech_of_two_speakers_never_goes_together() -> None:
    spans = [VoicedSpan(1.0, 2.0), VoicedSpan(2.0, 3.0), VoicedSpan(3.1, 4.0)]
    found = cut(spans, np.zeros(200, np.float32), 6.4, 30.0, labels=["a", "b", "b"])
    assert found == [((0.8, 2.0), "a"), ((2.0, pytest.approx(4.2)), "b")]


@pytest.mark.parametrize("seconds", [5.0, 9.6])
def test_quality_is_that_of_speechmos(speech_N: np.ndarray, seconds: float) -> None:
    from speechmos import dnsmos

    clip_N = speech_N[: round(seconds * SAMPLE_RATE)]
    theirs = dnsmos.run(clip_N, SAMPLE_RATE)
    ours = Dnsmos().score(clip_N)
    assert (ours.sig, ours.bak, ours.ovr) == pytest.approx(
        (theirs["sig_mos"], theirs["bak_mos"], theirs["ovrl_mos"]), abs=1e-4
    )


def test_noise_lowers_the_quality(speech_N: np.ndarray) -> None:
    meter = Dnsmos()
    noisy_N = (
        (speech_N + np.random.default_rng(0).normal(0, 0.05, len(speech_N))).clip(-1, 1).astype(np.float32)
    )
    assert meter.score(noisy_N, 1).ovr < meter.score(speech_N, 1).ovr - 0.3
    with pytest.raises(ValueError, match="empty"):
        meter.score(speech_N[:0])
