"""Speaker turns: the rebuilt voice network against the package's own, grouping and linking by closed forms, and real
speakers in turns scored by pyannote.metrics.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from audiollm.audio import load, save
from pipelines.annotate.step import Recording, RecordingMetadata
from pipelines.annotate.steps.speakers import Speakers, SpeakersConfig
from pipelines.annotate.voice import diarization
from pipelines.annotate.voice.diarization import (
    COSTS,
    Window,
    cut_windows,
    diarize,
    join_turns,
    place_windows,
)
from pipelines.annotate.voice.linking import FileSpeaker, group, link
from pipelines.steps.step import Listener

SHARED = Path(
    os.environ.get("AUDIOLLM_SHARED_DATA") or Path(__file__).resolve().parents[5] / "shared" / "data"
)
RATE = 16000
Array = np.ndarray


# --- voices of a world without speech: a "speaker" is a tone, and its voice is the spectrum around it -----------------


def _tone(speaker: int, seconds: float, seed: int = 0) -> Array:
    dice = np.random.default_rng((speaker, seed))
    time_N = np.arange(round(seconds * RATE)) / RATE
    shake_N = 1 + 0.3 * np.sin(2 * np.pi * (3 + dice.random()) * time_N)
    tone_N = 0.1 * shake_N * np.sin(2 * np.pi * (300 + 400 * speaker) * time_N)
    return (tone_N + 1e-3 * dice.standard_normal(len(time_N))).astype(np.float32)


def _bands(windows: Sequence[Array]) -> Array:
    """A voice of eight numbers: the share of amplitude around 300, 700, 1100, … Hz."""
    voices = []
    for window_N in windows:
        amplitude_F = np.abs(np.fft.rfft(window_N * np.hanning(len(window_N))))
        hertz_F = np.fft.rfftfreq(len(window_N), 1 / RATE)
        voice_D = np.array([amplitude_F[np.abs(hertz_F - 300 - 400 * band) < 200].sum() for band in range(8)])
        voices.append(voice_D / np.linalg.norm(voice_D))
    return np.array(voices, np.float32)


def _marked(turns: Sequence[diarization.SpeakerTurn], speaker: int, at_s: float) -> bool:
    return any(turn.speaker == speaker and turn.start_s <= at_s < turn.end_s for turn in turns)


def test_turns_and_overlap_of_tones_are_found() -> None:
    sound_N = np.zeros(40 * RATE, np.float32)
    known = [(0, 9, 0), (9, 17, 1), (15, 24, 0), (24, 32, 2), (32, 40, 1)]  # 15 to 17 s: both
    for start_s, end_s, speaker in known:
        sound_N[start_s * RATE : end_s * RATE] += _tone(speaker, end_s - start_s, start_s)
    found = diarize(_bands, [sound_N], [[0.0, 40.0]], threshold=0.85)
    assert len(found.voices_KD) == 3
    for at_s in np.arange(0.5, 40, 0.5):
        if min(abs(at_s - edge) for turn in known for edge in turn[:2]) < 0.5:
            continue  # windows are 0.9 s long
        expected = {speaker for start_s, end_s, speaker in known if start_s <= at_s < end_s}
        assert {speaker for speaker in range(3) if _marked(found.turns, speaker, at_s)} == expected, at_s
    # at a sharp change a window or two may seem to hold both
    shared = [turn for turn in found.turns if turn.overlap and turn.end_s - turn.start_s > 0.7]
    assert {turn.speaker for turn in shared} == {0, 1}
    assert sum(turn.end_s - turn.start_s for turn in shared) / 2 == pytest.approx(2.0, abs=0.8)


def test_one_tone_is_one_speaker_and_silence_is_none() -> None:
    found = diarize(_bands, [_tone(0, 12)], [[0.0, 5.0], [6.0, 12.0]], threshold=0.85)
    assert found.turns == [
        diarization.SpeakerTurn(0.0, pytest.approx(5.0), 0, False),
        diarization.SpeakerTurn(6.0, pytest.approx(12.0), 0, False),
    ]
    assert diarize(_bands, [_tone(0, 3)], [], threshold=0.85).turns == []


def test_number_of_speakers_can_be_told_and_bounded() -> None:
    sound_N = np.concatenate([_tone(speaker, 6) for speaker in (0, 1, 2, 3)])
    for told in (1, 2, 3):
        found = diarize(_bands, [sound_N], [[0.0, 24.0]], threshold=0.85, num_speakers=told)
        assert len(found.voices_KD) == told
    assert len(diarize(_bands, [sound_N], [[0.0, 24.0]], threshold=0.85, max_speakers=2).voices_KD) == 2
    assert len(diarize(_bands, [sound_N], [[0.0, 24.0]], threshold=0.85, max_speakers=9).voices_KD) == 4


def test_blocks_and_a_bound_on_windows_change_nothing_that_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    sound_N = np.concatenate([_tone(speaker, 5, take) for take in range(4) for speaker in (0, 1)])
    whole = diarize(_bands, [sound_N], [[0.0, 40.0]], threshold=0.85)
    blocks = np.array_split(sound_N, 37)
    assert diarize(_bands, blocks, [[0.0, 40.0]], threshold=0.85).turns == whole.turns
    monkeypatch.setattr(diarization, "MAX_CLUSTERED_WINDOWS", 40)
    few = diarize(_bands, blocks, [[0.0, 40.0]], threshold=0.85)
    long, long_few = ([turn for turn in found.turns if not turn.overlap] for found in (whole, few))
    assert [turn.speaker for turn in long_few] == [turn.speaker for turn in long] == [0, 1] * 4
    assert [turn.start_s for turn in long_few] == pytest.approx([turn.start_s for turn in long], abs=0.41)


# --- windows and turns ------------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.floats(0.02, 2), st.floats(0.1, 4)), min_size=1, max_size=8),
    st.lists(st.integers(1, 40_000), min_size=0, max_size=12),
)
@settings(max_examples=60)
def test_windows_are_the_sound_at_their_times(pieces: list[tuple[float, float]], cuts: list[int]) -> None:
    clock_s, spans = 0.0, []
    for gap_s, length_s in pieces:
        spans.append([clock_s + gap_s, clock_s + gap_s + length_s])
        clock_s = spans[-1][1]
    windows = place_windows(spans)
    for start_s, end_s in spans:  # the cells tile each span
        inside = [w for w in windows if start_s - 1e-9 <= w.cell_start_s and w.cell_end_s <= end_s + 1e-9]
        edges = [start_s, *(w.cell_end_s for w in inside)]
        assert edges[:-1] == pytest.approx([w.cell_start_s for w in inside])
        assert edges[-1] == pytest.approx(end_s)
    sound_N = np.arange(round(clock_s * RATE), dtype=np.float32)
    blocks = np.split(sound_N, sorted(cut for cut in cuts if cut < len(sound_N)))
    for window, cut_N in zip(windows, cut_windows(blocks, windows), strict=True):
        start, end = round(window.start_s * RATE), round(window.end_s * RATE)
        assert len(cut_N) == end - start
        heard = min(end, len(sound_N)) - start
        np.testing.assert_array_equal(cut_N[:heard], sound_N[start : start + heard])
        assert not cut_N[heard:].any()


def test_an_hour_of_silence_between_two_windows_is_not_held() -> None:
    held = []

    def blocks() -> itertools.chain[Array]:
        return itertools.chain(
            (np.zeros(5 * RATE, np.float32) for _ in range(700)), [np.ones(RATE, np.float32)]
        )

    windows = [Window(0.0, 0.9, 0.0, 0.9), Window(3500.0, 3500.9, 3500.0, 3500.9)]
    for window_N in cut_windows(blocks(), windows):
        held.append(window_N.base.nbytes if window_N.base is not None else window_N.nbytes)
    assert window_N.min() == 1.0
    assert max(held) < 8 * RATE * 4


def test_turns_are_joined_by_hand_made_rules() -> None:
    def cell(start_s: float, end_s: float) -> Window:
        return Window(start_s, end_s, start_s, end_s)

    windows = [cell(0, 1), cell(1, 2), cell(2, 2.1), cell(2.1, 3), cell(3.2, 4), cell(5, 5.1)]
    path = [(0,), (0, 1), (0,), (1,), (1,), (0,)]
    assert join_turns(windows, path, 0.3) == [
        (0, 1, 0, False),
        (1, 2, 0, True),
        (1, 2, 1, True),
        (2, 4, 1, False),  # the tenth of a second went to its longer neighbour; a pause of 0.2 s is bridged
        (5, 5.1, 0, False),  # short, and touches nothing
    ]


def test_the_path_is_the_best_of_all_paths() -> None:
    dice = np.random.default_rng(0)
    states = [(0,), (1,), (0, 1)]
    windows = [Window(0, 0, 0.2 * at, 0.2 * at + 0.2) for at in range(4)] + [Window(0, 0, 3.0, 3.2)]
    costs = COSTS._replace(overlap=0.4, doubt=2.0)

    def worth(path: tuple[int, ...], scores_WS: Array) -> float:
        total = sum(scores_WS[at, state] / 2.0 - 0.4 * (state == 2) for at, state in enumerate(path))
        for at, (before, after) in enumerate(itertools.pairwise(path)):
            moves = 0 if before == after else 2 if {before, after} == {0, 1} else 1
            total -= moves * costs.change / 2 * (0.2 / 2.4 if at == 3 else 1.0)
        return float(total)

    for _ in range(20):
        scores_WS = dice.normal(0, 6, (5, 3))
        best = max(itertools.product(range(3), repeat=5), key=lambda path: worth(path, scores_WS))
        assert tuple(diarization._likeliest_path(scores_WS, states, windows, costs)) == best


# --- grouping and linking ---------------------------------------------------------------------------------------------


def _around(centre: int, count: int, spread: float, seed: int) -> Array:
    voices_WD = (
        np.eye(32)[centre] + spread * np.random.default_rng(seed).standard_normal((count, 32)) / 32**0.5
    )
    return (voices_WD / np.linalg.norm(voices_WD, axis=1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize("speakers", [1, 2, 5])
@pytest.mark.parametrize("windows", [8, 60])
def test_speakers_are_counted(speakers: int, windows: int) -> None:
    voices_WD = np.concatenate([_around(speaker, windows, 0.5, speaker) for speaker in range(speakers)])
    means_KD = group(voices_WD, 0.85)
    assert len(means_KD) == speakers
    assert sorted(means_KD.argmax(axis=1)) == list(range(speakers))


@given(st.permutations(range(12)))
@settings(max_examples=30)
def test_link_joins_across_files_whatever_the_order(order: list[int]) -> None:
    voices = [
        FileSpeaker(
            f"file{file}", f"S{person}", _around(person, 1, 0.3, 10 * file + person)[0].tolist(), 1.0 + file
        )
        for file in range(4)
        for person in range(3)
    ]
    names = link(voices[index] for index in order)
    assert names == {(f"file{file}", f"S{person}"): f"V{person}" for file in range(4) for person in range(3)}


def test_link_never_joins_two_of_one_file() -> None:
    same = np.eye(4)[0].tolist()
    voices = [
        FileSpeaker("a", "S0", same, 1),
        FileSpeaker("a", "S1", same, 1),
        FileSpeaker("b", "S0", same, 1),
    ]
    names = link(voices)
    assert names[("a", "S0")] != names[("a", "S1")]
    assert names[("b", "S0")] in (names[("a", "S0")], names[("a", "S1")])
    assert link([]) == {}
    with pytest.raises(ValueError, match="'S0' of a comes twice"):
        link([voices[0], voices[0]])


@given(st.integers(0, 10_000), st.floats(0.2, 0.9))
@settings(max_examples=40)
def test_link_is_average_linkage(seed: int, threshold: float) -> None:
    """With one voice a file and equal seconds nothing is forbidden: then it is scipy's average linkage."""
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import squareform

    voices_WD = np.concatenate([_around(person, 5, 1.2, seed + person) for person in range(4)]).astype(
        np.float64
    )
    voices_WD /= np.linalg.norm(voices_WD, axis=1, keepdims=True)
    names = link(
        [FileSpeaker(f"{at:02d}", "S0", row.tolist(), 1.0) for at, row in enumerate(voices_WD)], threshold
    )
    distance_WW = np.clip(1 - voices_WD @ voices_WD.T, 0, None)
    np.fill_diagonal(distance_WW, 0)
    tree = linkage(squareform(distance_WW, checks=False), "average")
    expected = fcluster(tree, 1 - threshold, "distance")
    ours = [names[(f"{at:02d}", "S0")] for at in range(len(voices_WD))]
    assert {
        (a == b) == (c == d) for (a, c), (b, d) in itertools.pairwise(zip(ours, expected, strict=True))
    } <= {True}
    assert len(set(ours)) == len(set(expected))


# --- the networks, and real speech ------------------------------------------------------------------------------------


def _ready(config: SpeakersConfig) -> Speakers:
    step = Speakers(config)
    if problem := step.missing():
        pytest.skip(problem)
    step.setup()
    return step


def test_the_network_is_the_packages_own() -> None:
    pytest.importorskip("webrtcvad")
    resemblyzer = pytest.importorskip("resemblyzer")
    from audiollm.onnx_models import package_file
    from pipelines.annotate.voice.embedders import Ge2eVoices

    sounds = [_tone(2, 1.6), 1e-3 * _tone(1, 1.6, 1), _tone(3, 0.9)]
    ours_WD = Ge2eVoices(package_file("resemblyzer", "pretrained.pt")).embed(sounds)
    theirs = resemblyzer.VoiceEncoder("cpu", verbose=False)
    for sound_N, voice_D in zip(sounds, ours_WD, strict=True):
        loud_N = resemblyzer.audio.normalize_volume(sound_N, -30, increase_only=True)
        mel_FM = resemblyzer.wav_to_mel_spectrogram(loud_N)[: len(sound_N) // 160]
        import torch

        with torch.no_grad():
            expected_D = theirs(torch.from_numpy(mel_FM[None]))[0].numpy()
        np.testing.assert_allclose(voice_D, expected_D, atol=1e-5)


def test_a_speaker_model_of_transformers_is_an_embedder(tmp_path: Path) -> None:
    import torch
    import transformers

    shape = {
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
        "conv_dim": (8, 8), "conv_kernel": (10, 8), "conv_stride": (5, 8), "num_conv_pos_embedding_groups": 2,
        "num_conv_pos_embeddings": 4, "tdnn_dim": (8, 8, 8, 8, 8), "xvector_output_dim": 8, "vocab_size": 6,
    }  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Wav2Vec2ForXVector(transformers.Wav2Vec2Config(**shape)).eval()
    assert "give a folder" in (Speakers(SpeakersConfig(embedder=tmp_path / "model")).missing() or "")
    model.save_pretrained(tmp_path / "model")
    transformers.Wav2Vec2FeatureExtractor(sampling_rate=RATE).save_pretrained(tmp_path / "model")
    save(tmp_path / "a.wav", torch.from_numpy(_tone(0, 3))[None], RATE)
    step = _ready(SpeakersConfig(embedder=tmp_path / "model", num_speakers=1))
    value = step.process(_recording(tmp_path / "a.wav", [[0.0, 3.0]]))
    assert value["turns"] == [{"start_s": 0.0, "end_s": 3.0, "speaker": "S0", "overlap": False}]
    voice_D = value["speakers"]["S0"]["embedding"]
    assert len(voice_D) == 8
    assert np.linalg.norm(voice_D) == pytest.approx(1, abs=1e-3)


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared/data")
def test_real_speakers_in_turns(tmp_path: Path) -> None:
    """Two readers take turns, with 1.5 s of overlap: scored by pyannote.metrics, and the same at the second time."""
    import torch

    core = pytest.importorskip("pyannote.core")
    metrics = pytest.importorskip("pyannote.metrics.diarization")
    step = _ready(SpeakersConfig())
    root = SHARED / "librispeech_speakers" / "librispeech_test-other"
    first, second = (
        [
            load(path, sample_rate=RATE, mono=True).samples_CN[0]
            for path in sorted((root / name).glob("*.flac"))[3:6]
        ]
        for name in ("1688", "2033")
    )
    sound_N, truth, clock_s = torch.zeros(60 * RATE), core.Annotation(), 0.0
    for turn, (clip_N, name) in enumerate(
        itertools.chain(*(((a, "a"), (b, "b")) for a, b in zip(first, second, strict=True)))
    ):
        begin_s = clock_s - (1.5 if turn == 3 else -0.3)
        begin = round(begin_s * RATE)
        sound_N[begin : begin + len(clip_N)] += clip_N / clip_N.square().mean().sqrt() * 0.05
        clock_s = begin_s + len(clip_N) / RATE
        truth[core.Segment(begin_s, clock_s), turn] = name
    save(tmp_path / "a.flac", sound_N[None, : round(clock_s * RATE)], RATE)
    spans = [[segment.start, segment.end] for segment in truth.get_timeline().support()]
    value = step.process(_recording(tmp_path / "a.flac", spans))
    found = core.Annotation()
    for index, turn in enumerate(value["turns"]):
        found[core.Segment(turn["start_s"], turn["end_s"]), index] = turn["speaker"]
    assert list(value["speakers"]) == ["S0", "S1"]
    whole = core.Timeline([core.Segment(0, clock_s)])
    assert metrics.DiarizationErrorRate(collar=0.5)(truth, found, uem=whole) < 0.15
    one = core.Annotation()
    one[core.Segment(0, clock_s), 0] = "S0"
    assert metrics.DiarizationErrorRate(collar=0.5)(truth, one, uem=whole) > 0.3
    assert step.process(_recording(tmp_path / "a.flac", spans)) == value


def _recording(path: Path, spans: list[list[float]]) -> Recording:
    return Recording(
        str(path), RecordingMetadata(), {"voice_activity": {"spans": spans}}, Listener(str(path))
    )
