"""Loud spans of clips, their ends, steady sound and what lies between: by curves of levels and by sounds."""

from __future__ import annotations

import pytest

from pipelines.audiocot.answers.evidence import Loudness, loudness_of


def loudness(curve_dbfs: list[float], onsets_s: tuple[float, ...] = ()) -> Loudness:
    return loudness_of(curve_dbfs, onsets_s, len(curve_dbfs) / 10)


def test_a_sound_ends_where_its_level_falls() -> None:
    curve = [-90.0] * 10 + [-20.0] * 5 + [-90.0] * 15 + [-30.0] * 4 + [-90.0] * 16
    found = loudness(curve, (1.04, 3.02))
    assert found.spans == ((1.04, 1.5), (3.02, 3.4))
    assert not found.is_steady and not found.is_silent and found.bed_dbfs is None


def test_a_decaying_sound_ends_25_db_below_the_loudest() -> None:
    curve = [-100.0] * 10 + [-20.0 - 5 * step for step in range(20)] + [-120.0] * 20
    (span,) = loudness(curve).spans
    assert span == (1.0, pytest.approx(1.6))


def test_a_pause_of_a_tenth_ends_no_sound_and_a_longer_one_does() -> None:
    curve = [-90.0] * 10 + [-20.0] * 3 + [-90.0] + [-20.0] * 3 + [-90.0] * 2 + [-20.0] * 3 + [-90.0] * 20
    assert loudness(curve).spans == ((1.0, 1.7), (1.9, 2.2))


def test_a_sound_that_begins_during_another_begins_a_span() -> None:
    curve = [-90.0] * 10 + [-20.0, -25.0, -32.0, -20.0, -25.0] + [-90.0] * 35
    assert loudness(curve, (1.0, 1.32)).spans == ((1.0, 1.32), (1.32, 1.5))
    level = [-90.0] * 10 + [-20.0] * 5 + [-90.0] * 35
    assert loudness(level, (1.0, 1.32)).spans == ((1.0, 1.5),)


def test_a_steady_sound_is_told_and_what_rises_above_it() -> None:
    curve = [-30.0, -32.0] * 20 + [-18.0] * 3 + [-31.0] * 20
    found = loudness(curve, (4.0,))
    assert found.is_steady and found.spans == ((4.0, 4.3),) and found.bed_dbfs == -31.0
    assert not loudness([-30.0] * 20 + [-50.0] * 20).is_steady


def test_sound_between_the_others_is_heard_from_minus_50_dbfs_on() -> None:
    loud = [-10.0] * 10
    assert loudness([*loud, *[-45.0] * 20, *loud]).bed_dbfs == -45.0
    assert loudness([*loud, *[-55.0] * 20, *loud]).bed_dbfs is None
    assert loudness([*loud, *[-45.0] * 4, *loud, *[-75.0] * 20]).bed_dbfs is None


def test_silence_has_no_span() -> None:
    for curve in ([-120.0] * 20, [-61.0] * 20, []):
        found = loudness(curve)
        assert found.is_silent and not found.is_steady and found.spans == ()
    # a short sound in digital silence: the quietest and the loudest tenth are both silent, and it is not steady
    found = loudness([-120.0] * 48 + [-20.0] * 2)
    assert not found.is_steady and found.spans == ((4.8, 5.0),)


def test_spans_lie_in_the_clip() -> None:
    found = loudness_of([-90.0] * 10 + [-20.0], [1.0, 1.02], 1.03)
    (span,) = found.spans
    assert 0.0 <= span.start_s < span.end_s <= 1.03
