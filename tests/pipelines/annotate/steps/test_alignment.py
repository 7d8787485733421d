"""Forced alignment: paths worked out by brute force, boundaries that are known, and real speech where it is there."""

from __future__ import annotations

import os
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from audiollm.audio import load, save
from audiollm.errors import ConfigError
from audiollm.evaluate.alignment.word_times import Aligned, ctc_spans, filled_in
from audiollm.evaluate.alignment.written_words import written_words
from pipelines.annotate.step import RecordingMetadata, Segment
from pipelines.annotate.steps.alignment import Alignment, AlignmentConfig
from pipelines.steps.step import Listener
from tests.pipelines.annotate.steps.stand_ins import WINDOW, tone_ctc_folder
from tests.pipelines.annotate.steps.tiny_recognizers import ctc_folder, segment

SHARED = Path(
    os.environ.get("AUDIOLLM_SHARED_DATA") or Path(__file__).resolve().parents[5] / "shared" / "data"
)
DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def _check(value: dict[str, Any], duration_s: float) -> None:
    times = [time for word in value["words"] for time in (word["start_s"], word["end_s"])]
    assert times == sorted(times) and all(0 <= time <= duration_s + 1e-3 for time in times)
    assert all(word["score"] is None or 0 <= word["score"] <= 1 for word in value["words"])


@pytest.fixture(scope="module")
def sphinx() -> Alignment:
    step = Alignment(AlignmentConfig())
    assert step.missing() is None
    step.setup()
    return step


# -------------------------------------------------------------------------------------------------- CTC


def _likeliest_path(log_probs_TV: torch.Tensor, tokens: list[int]) -> float:
    """Find the likeliest path of the tokens by trying every path."""
    frames, size = log_probs_TV.shape
    best = -np.inf
    for path in product(range(size), repeat=frames):
        said = [
            token for place, token in enumerate(path) if token and (not place or path[place - 1] != token)
        ]
        if said == tokens:
            best = max(best, float(log_probs_TV[range(frames), list(path)].sum()))
    return best


@settings(max_examples=15)
@given(st.integers(0, 1000), st.lists(st.integers(1, 2), min_size=1, max_size=3))
def test_the_spans_are_those_of_the_likeliest_path(seed: int, tokens: list[int]) -> None:
    log_probs_TV = (3 * torch.randn(6, 3, generator=torch.Generator().manual_seed(seed))).log_softmax(-1)
    spans = ctc_spans(log_probs_TV, tokens, blank=0)
    path = [0] * 6
    for token, span in zip(tokens, spans, strict=True):
        path[span.start : span.end] = [token] * (span.end - span.start)
    assert float(log_probs_TV[range(6), path].sum()) == pytest.approx(
        _likeliest_path(log_probs_TV, tokens), abs=1e-4
    )


def test_a_wildcard_takes_what_the_words_leave() -> None:
    frames = [1, 1, 0, 2, 2, 2, 0, 1]
    log_probs_TV = torch.full((8, 3), -9.0)
    log_probs_TV[range(8), frames] = -0.01
    first, wild, last = ctc_spans(log_probs_TV, [1, 3, 1], blank=0)
    assert (first.start, last.end) == (0, 8) and first.end <= wild.start <= 3 and wild.end >= 6
    assert (wild.probability, last.start) == (1.0, 7)


def test_a_text_that_is_longer_than_the_sound_has_no_path() -> None:
    log_probs_TV = torch.zeros(3, 3).log_softmax(-1)
    assert ctc_spans(log_probs_TV, [1, 1], 0) and not ctc_spans(log_probs_TV, [1, 1, 1], 0)
    assert not ctc_spans(log_probs_TV, [], 0)


@pytest.mark.parametrize("text", ["It's a café, isn't it?", "naïve", "one", "çà one ñ two ü ö", "a " * 200])
def test_a_model_gives_every_word_a_time_in_order(tmp_path: Path, text: str) -> None:
    step = Alignment(AlignmentConfig(model=ctc_folder(tmp_path / "ctc")))
    assert step.missing() is None
    step.setup()
    value = step.process(segment(tmp_path, 1.5, given=RecordingMetadata(text, None, "en")))
    _check(value, 1.5)
    unspelled = {"café,", "naïve", "çà", "ñ", "ü", "ö"}
    if text == "naïve":
        assert value == {"words": [], "score": None}
    elif text.startswith("a a"):
        assert value == {"words": [], "score": 0.0}
    else:
        assert [word["word"] for word in value["words"]] == text.split()
        assert [word["score"] is None for word in value["words"]] == [
            word in unspelled for word in text.split()
        ]


def test_a_model_hears_where_the_letters_are(tmp_path: Path) -> None:
    """The alignment finds each word where the model itself wrote it."""
    from pipelines.annotate.recognizers.folder_models import TransformersConfig, TransformersRecognizer

    folder = ctc_folder(tmp_path / "ctc")
    recognizer = TransformersRecognizer(TransformersConfig(model=folder))
    recognizer.setup()
    said = segment(tmp_path, 2.0)
    heard = recognizer.process(said)
    step = Alignment(AlignmentConfig(model=folder))
    step.setup()
    value = step.process(segment(tmp_path, 2.0, given=RecordingMetadata(heard["text"].lower(), None, "en")))
    kept = [word for word in heard["words"] if word["word"].strip("'")]
    assert len(kept) > 1 and len(value["words"]) == len(kept)
    for word, wanted in zip(value["words"], kept, strict=True):
        assert word["start_s"] == pytest.approx(wanted["start_s"], abs=0.05)


def test_a_folder_without_a_model_is_told(tmp_path: Path) -> None:
    step = Alignment(AlignmentConfig(model=tmp_path / "gone"))
    assert "alignment.model: no folder" in (step.missing() or "")
    with pytest.raises(ConfigError, match="CTC model"):
        step.setup()


# ---------------------------------------------------------------------------------------------- filling


def test_words_without_a_time_share_what_their_neighbours_leave_by_length() -> None:
    words = written_words("x one aa bbbb two y", "en")
    found = [None, Aligned(1.0, 2.0, 0.5), None, None, Aligned(5.0, 6.0, 0.7), None]
    assert filled_in(words, found, 8.0) == [
        (0.0, 1.0, None), (1.0, 2.0, 0.5), (2.0, 3.0, None), (3.0, 5.0, None), (5.0, 6.0, 0.7), (6.0, 8.0, None),
    ]  # fmt: skip


TIMES = st.tuples(st.floats(0, 12), st.floats(0, 12), st.floats(0, 1))


@given(st.lists(st.none() | TIMES, min_size=1, max_size=8))
def test_times_are_in_order_and_inside_whatever_was_found(
    found: list[tuple[float, float, float] | None],
) -> None:
    words = written_words(" ".join("abcdefgh"[: len(found)]), "en")
    spans = filled_in(words, [Aligned(*each) if each else None for each in found], 10.0)
    times = [time for start_s, end_s, _ in spans for time in (start_s, end_s)]
    assert len(spans) == len(found) and times == sorted(times)
    assert times[0] >= 0 and times[-1] <= 10.0


# ------------------------------------------------------------------------------------------ pocketsphinx


def test_pocketsphinx_aligns_english_alone(sphinx: Alignment, tmp_path: Path) -> None:
    for about in (
        RecordingMetadata("guten tag", None, "de"),
        RecordingMetadata("你好"),
        RecordingMetadata("..."),
        RecordingMetadata("xqzzt"),
        RecordingMetadata(None),
    ):
        assert sphinx.process(segment(tmp_path, 0.5, given=about)) == {"words": [], "score": None}


def test_a_text_that_was_not_said_has_no_score(sphinx: Alignment, tmp_path: Path) -> None:
    text = "this is a long sentence that nobody could ever say in half a second"
    value = sphinx.process(segment(tmp_path, 0.3, given=RecordingMetadata(text)))
    assert value == {"words": [], "score": 0.0}


def _spoken_in_a_row(folder: Path, said: list[str], seed: int) -> tuple[Segment, list[tuple[float, float]]]:
    """Digits with pauses of known length between; and where each recording begins and ends."""
    recordings = SHARED / "fsdd" / "recordings"
    if not recordings.is_dir():
        pytest.skip(f"no digit recordings at {recordings}")
    random = np.random.default_rng(seed)
    speaker = random.choice(["george", "jackson", "lucas", "nicolas", "theo", "yweweler"])
    parts, borders = [np.zeros(0, np.float32)], []
    for word in said:
        pause_N = random.normal(0, 1e-3, int(random.uniform(0.1, 0.4) * 8000)).astype(np.float32)
        path = recordings / f"{DIGITS.index(word)}_{speaker}_{random.integers(5)}.wav"
        clip_N = load(path).samples_CN[0].numpy()
        start = sum(map(len, parts)) + len(pause_N)
        borders.append((start / 8000, (start + len(clip_N)) / 8000))
        parts += [pause_N, clip_N]
    parts.append(random.normal(0, 1e-3, 2000).astype(np.float32))
    samples_N = np.concatenate(parts)
    save(folder / f"row{seed}.wav", torch.from_numpy(samples_N)[None], 8000)
    path = str(folder / f"row{seed}.wav")
    given = RecordingMetadata(" ".join(said), None, "en")
    return Segment(path, 0.0, len(samples_N) / 8000, "speech", None, given, {}, Listener(path)), borders


def test_digits_in_a_row_are_found_where_they_were_put(sphinx: Alignment, tmp_path: Path) -> None:
    errors = []
    for seed in range(8):
        said = [DIGITS[index] for index in np.random.default_rng(100 + seed).permutation(10)[:5]]
        row, borders = _spoken_in_a_row(tmp_path, said, seed)
        value = sphinx.process(row)
        _check(value, row.duration_s)
        assert [word["word"] for word in value["words"]] == said
        for word, (start_s, end_s) in zip(value["words"], borders, strict=True):
            errors += [abs(word["start_s"] - start_s), abs(word["end_s"] - end_s)]
    # of 80 borders; recordings have some silence of their own at either end
    assert np.median(errors) < 0.06 and np.percentile(errors, 90) < 0.2


def test_read_speech_fits_its_own_text_better_than_another(sphinx: Alignment) -> None:
    folder = SHARED / "ljspeech_32"
    if not folder.is_dir():
        pytest.skip(f"no read speech at {folder}")
    rows = [line.split("|") for line in (folder / "metadata.csv").read_text().splitlines()]
    rows = [row for row in rows if (folder / "wavs" / f"{row[0]}.flac").is_file()][:6]
    for (name, text, _), (_, other, _) in pairwise(rows):
        path = str(folder / "wavs" / f"{name}.flac")
        duration_s = soundfile.info(path).duration
        scores = []
        for said in (text, other):
            value = sphinx.process(
                Segment(path, 0.0, duration_s, "speech", None, RecordingMetadata(said), {}, Listener(path))
            )
            _check(value, duration_s)
            scores.append(value["score"])
        assert scores[0] > 0.2 > 0.1 > scores[1]


# ---------------------------------------------------------------------------------- an answer that is known


def test_words_of_tones_are_found_where_they_sound(tmp_path: Path) -> None:
    """A CTC model whose letters are tones: its times are known to a frame. The sound is longer than what it hears at
    once, and between the words of the second half are other pauses."""
    hertz = {"A": 400, "B": 800, "C": 1200, "|": 1600}
    folder = tone_ctc_folder(tmp_path / "tones", hertz)
    written = [(1.0, "AB"), (2.0, "CA"), (28.5, "B"), (33.0, "CAB"), (39.25, "AC")]
    samples_N = np.zeros(41 * 16_000, np.float32)
    borders = []
    for start_s, word in written:
        letters = [
            (start_s - 0.3, "|"),
            *((start_s + 0.2 * place, letter) for place, letter in enumerate(word)),
        ]
        for at_s, letter in letters:
            length = 1_600 if letter == "|" else 3_200
            tone_N = 0.3 * np.sin(2 * np.pi * hertz[letter] * np.arange(length) / 16_000)
            samples_N[round(at_s * 16_000) :][:length] = tone_N
        borders.append((start_s, start_s + 0.2 * len(word)))
    save(tmp_path / "tones.wav", torch.from_numpy(samples_N)[None], 16_000)
    step = Alignment(AlignmentConfig.model_validate({"model": f"transformers={folder}"}))
    step.setup()
    path = str(tmp_path / "tones.wav")
    given = RecordingMetadata("ab ca b cab ac", None, "en")
    value = step.process(Segment(path, 0.0, 41.0, "speech", None, given, {}, Listener(path)))
    frame_s = WINDOW / 16_000
    assert [word["word"] for word in value["words"]] == given.text.split()
    for word, (start_s, end_s) in zip(value["words"], borders, strict=True):
        assert word["start_s"] == pytest.approx(start_s, abs=frame_s) and word["score"] > 0.9
        assert word["end_s"] == pytest.approx(end_s, abs=frame_s)


@pytest.mark.parametrize("model", ["pyannote=folder", "transformer=folder"])
def test_another_kind_of_aligner_is_refused(model: str) -> None:
    with pytest.raises(ValueError, match="give transformers=FOLDER"):
        AlignmentConfig.model_validate({"model": model})
