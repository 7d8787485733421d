"""Duplicates: real speech in other codings is found, other takes of the same word are not; texts by their speakers."""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from audiollm.audio import Waveform, load
from pipelines.annotate.execution.corpus import DuplicateConfig, bit_errors, find_duplicates, item_of
from pipelines.annotate.step import RecordingMetadata, Segment
from pipelines.annotate.steps.fingerprint import SAMPLE_RATE, Fingerprint, FingerprintConfig, fingerprint
from pipelines.steps.step import Listener

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

from duplicates import coded

SHARED = Path(
    os.environ.get("AUDIOLLM_SHARED_DATA") or Path(__file__).resolve().parents[4] / "shared" / "data"
)


def hexadecimal(bits_F: NDArray[np.uint16]) -> str:
    return bits_F.astype(">u2").tobytes().hex()


def row(id: str, bits_F: NDArray[np.uint16], **changes: Any) -> dict[str, Any]:
    return {
        "id": id, "duration_s": round(len(bits_F) * 0.016, 3), "speaker": "ann", "text": id, "file": id,
        "measured": {"fingerprint": {"bits": hexadecimal(bits_F)}}, **changes,
    }  # fmt: skip


def with_quality(made: dict[str, Any], **quality: Any) -> dict[str, Any]:
    return {**made, "measured": {**made["measured"], "quality": quality}}


def some_bits(frames: int, seed: int) -> NDArray[np.uint16]:
    """Bits that stay for a few frames, as those of sound do."""
    noise = np.random.default_rng(seed).random((frames // 6 + 1, 16)) < 0.5
    return np.packbits(np.repeat(noise, 6, axis=0)[:frames], axis=1).view(">u2")[:, 0].astype(np.uint16)


def damaged(bits_F: NDArray[np.uint16], share: float, seed: int) -> NDArray[np.uint16]:
    wrong = np.random.default_rng(seed).random((len(bits_F), 16)) < share
    flips: NDArray[np.uint16] = np.packbits(wrong, axis=1).view(">u2")[:, 0].astype(np.uint16)
    return bits_F ^ flips


def mono(path: Path) -> Waveform:
    return load(path).mono()


def bits(wave: Waveform) -> NDArray[np.uint16]:
    return fingerprint(wave.resample(SAMPLE_RATE).samples_CN[0].numpy())


def versions(wave: Waveform) -> dict[str, Waveform]:
    def cut(start_s: float, end_s: float) -> Waveform:
        first, last = (round(s * wave.sample_rate) for s in (start_s, wave.duration_s - end_s))
        return Waveform(wave.samples_CN[:, first:last].contiguous(), wave.sample_rate)

    return {
        "-12 dB": Waveform(wave.samples_CN * 10 ** (-12 / 20), wave.sample_rate),
        "8 kHz": wave.resample(8_000),
        "48 kHz": wave.resample(48_000),
        "MP3": coded(wave, "libmp3lame", "mp3", 48_000, 24_000),
        "Opus": coded(wave, "libopus", "ogg", 32_000, 48_000),
        "trimmed": cut(0.043, 0.021),
    }


def speech_clips() -> list[Path]:
    folder = SHARED / "librispeech_speakers"
    if not folder.is_dir():
        pytest.skip(f"real recordings are not here: {folder}")
    return sorted(path for path in folder.rglob("*") if path.suffix in (".flac", ".wav"))[::6][:10]


# ----------------------------------------------------------------------------------------- real recordings


def test_the_same_speech_is_found_whatever_was_done_to_it() -> None:
    rows, paths = [], speech_clips()
    for path in paths:
        wave = mono(path)
        wave = Waveform(wave.samples_CN[:, : 6 * wave.sample_rate], wave.sample_rate)
        rows += [
            row(f"{path.stem} {name}", bits(each)) for name, each in {"": wave, **versions(wave)}.items()
        ]
    found = find_duplicates(rows)
    assert len(rows) == 7 * len(paths) and len(found) == 6 * len(paths)
    assert all(id.split(" ")[0] == stays.split(" ")[0] for id, stays in found.items())


def test_digits_are_found_in_other_codings_and_other_takes_are_left_alone() -> None:
    folder = SHARED / "fsdd" / "recordings"
    if not folder.is_dir():
        pytest.skip(f"real recordings are not here: {folder}")
    takes = [row(path.stem, bits(mono(path))) for path in sorted(folder.glob("*_[0-9].wav"))]
    assert len(takes) > 500 and not find_duplicates(takes), "ten takes of ten digits by six speakers"
    found: Counter[str] = Counter()
    clips = [path for path in sorted(folder.glob("*_1.wav")) if mono(path).duration_s > 0.35][::2]
    for path in clips:
        wave = mono(path)
        for name, each in versions(wave).items():
            found[name] += len(find_duplicates([row("a", bits(wave)), row("b", bits(each))]))
    # 0.4 s leaves few bits: coders may cost one in ten
    assert all(found[name] == len(clips) for name in ("-12 dB", "8 kHz", "48 kHz")), found
    assert all(found[name] >= 0.9 * len(clips) for name in ("MP3", "Opus", "trimmed")), (found, len(clips))


# ------------------------------------------------------------------------------------------- fingerprint


def test_the_step_reads_the_segment_alone_and_the_gain_does_not_matter(tmp_path: Path) -> None:
    from audiollm.audio import save

    generator = torch.Generator().manual_seed(0)
    samples_1N = 0.5 * torch.rand(1, 48_000, generator=generator) * torch.linspace(0, 1, 48_000)
    save(tmp_path / "a.wav", torch.cat([torch.rand(1, 16_000, generator=generator), samples_1N], 1), 16_000)
    save(tmp_path / "b.wav", 0.5 * samples_1N, 16_000)

    def value(name: str, start_s: float) -> Any:
        step, path = Fingerprint(FingerprintConfig()), str(tmp_path / name)
        assert step.missing() is None
        step.setup()
        return step.process(
            Segment(path, start_s, start_s + 3.0, "sound", None, RecordingMetadata(), {}, Listener(path))
        )["bits"]

    first, second = value("a.wav", 1.0), value("b.wav", 0.0)
    assert abs(len(first) / 4 - 3.0 / 0.016) < 5
    assert bit_errors(item_of(row_of_hex(first)).bits_F, item_of(row_of_hex(second)).bits_F) < 0.01


def row_of_hex(text: str) -> dict[str, Any]:
    return {"id": "x", "duration_s": 1.0, "measured": {"fingerprint": {"bits": text}}}


@pytest.mark.parametrize("samples", [0, 1, 100, 2000])
def test_silence_and_next_to_nothing_have_no_bits(samples: int) -> None:
    assert len(fingerprint(np.zeros(samples, np.float32))) == 0
    assert not find_duplicates([row(name, fingerprint(np.zeros(samples, np.float32))) for name in "ab"])


# ---------------------------------------------------------------------------------------------- decisions


def test_the_best_stays_then_the_longest_then_the_first() -> None:
    sound = some_bits(200, 0)
    good = with_quality(row("z", damaged(sound, 0.05, 1)), dnsmos={"ovr": 3.2}, snr_db=10.0)
    poor = with_quality(row("a", sound), dnsmos={"ovr": 3.1}, snr_db=40.0)
    unmeasured = row("b", damaged(sound, 0.05, 2))
    assert find_duplicates([poor, unmeasured, good]) == {"a": "z", "b": "z"}
    longer = row("y", damaged(np.concatenate([sound, some_bits(12, 5)]), 0.03, 3))
    assert find_duplicates([unmeasured, longer]) == {"b": "y"}
    assert find_duplicates([row("d", sound), row("c", sound)]) == {"d": "c"}


@settings(max_examples=15)
@given(st.permutations(range(24)))
def test_the_order_of_the_rows_does_not_matter(order: list[int]) -> None:
    rows = [row(f"s{n}", damaged(some_bits(150, n // 4), 0.04, n)) for n in range(24)]
    found = find_duplicates([rows[place] for place in order])
    assert found == find_duplicates(rows) and len(found) == 18
    assert not set(found.values()) & set(found)


@pytest.mark.parametrize(("bit_errors", "is_duplicate"), [(0.15, True), (0.21, False)])
def test_the_limit_of_bit_errors_is_that_of_the_settings(bit_errors: float, is_duplicate: bool) -> None:
    """Sounds of over 2 s; by default, 0.18 of the bits may differ."""
    sound = some_bits(400, 0)
    same = round(400 * (1 - 2 * bit_errors))
    other = np.concatenate([sound[:same], damaged(sound[same:], 0.5, 1)])
    assert bool(find_duplicates([row("a", sound), row("b", other)])) is is_duplicate


def test_a_chain_of_overlapping_windows_is_not_one_sound() -> None:
    """Each window shares nine tenths with the next, and nothing with one that is far away."""
    long_F = some_bits(2000, 0)
    rows = [row(f"w{n:02d}", long_F[n * 20 : n * 20 + 200]) for n in range(60)]
    found = find_duplicates(rows)
    left = sorted(int(each["id"][1:]) for each in rows if each["id"] not in found)
    assert 20 <= len(left) < 60
    for id, stays in found.items():
        assert abs(int(id[1:]) - int(stays[1:])) <= 2, "four fifths of it are there"


def test_a_sound_that_is_there_very_often_is_left_once() -> None:
    """More copies than are compared with one another in a round."""
    rows = [row(f"s{n:03d}", damaged(some_bits(120, 7), 0.03, n)) for n in range(150)]
    others = [row(f"x{n}", some_bits(120, 1000 + n)) for n in range(50)]
    found = find_duplicates([*rows, *others])
    assert set(found) == {f"s{n:03d}" for n in range(1, 150)} and set(found.values()) == {"s000"}


def test_planted_pairs_among_thousands_are_found_and_nothing_else() -> None:
    rows = [row(f"a{n:04d}", some_bits(60 + n % 300, n)) for n in range(3000)]
    planted = {f"b{n:04d}": f"a{n:04d}" for n in range(0, 3000, 30)}
    copies = [
        row(id, damaged(some_bits(60 + int(of[1:]) % 300, int(of[1:])), 0.06, 9)[2:])
        for id, of in planted.items()
    ]
    found = find_duplicates([*rows, *copies])
    assert set(found) <= set(planted) and all(planted[id] == stays for id, stays in found.items())
    assert len(found) >= 0.98 * len(planted)


def test_the_same_text_counts_within_a_speaker_and_only_on_demand() -> None:
    def said(id: str, text: str, speaker: str, file: str = "f", **quality: Any) -> dict[str, Any]:
        made = {"id": id, "duration_s": 1.0, "speaker": speaker, "file": file, "text": text}
        return {**made, "measured": {"quality": quality}}

    rows = [
        said("1", "Seven!", "ann", snr_db=5.0), said("2", "seven", "ann", snr_db=9.0), said("3", "SEVEN.", "ann", "g"),
        said("4", "seven", "bob"), said("5", "", "ann"), said("6", "", "ann"), said("7", "eight", "ann"),
    ]  # fmt: skip
    assert find_duplicates(rows) == {}
    assert find_duplicates(rows, DuplicateConfig(max_same_text=2)) == {"3": "2"}
    assert find_duplicates(rows, DuplicateConfig(max_same_text=1)) == {"1": "2", "3": "2"}
    assert find_duplicates(rows, DuplicateConfig(max_same_text=1, text_within="file")) == {"1": "2", "4": "2"}
    assert set(find_duplicates(rows, DuplicateConfig(max_same_text=1, text_within="corpus"))) == {
        "1",
        "3",
        "4",
    }


def test_a_text_that_is_dropped_for_its_sound_points_to_what_stays() -> None:
    sound = some_bits(200, 0)
    rows = [
        with_quality(row("a", sound, text="yes"), snr_db=1.0),
        with_quality(row("b", damaged(sound, 0.03, 1), text="yes"), snr_db=2.0),
        with_quality(row("c", some_bits(200, 1), text="yes"), snr_db=3.0),
    ]
    assert find_duplicates(rows, DuplicateConfig(max_same_text=1)) == {"a": "c", "b": "c"}
    assert find_duplicates(rows, DuplicateConfig(max_bit_errors=None)) == {}
