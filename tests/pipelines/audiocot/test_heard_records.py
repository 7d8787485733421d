"""Records by measurements: names, times, places and what is not heard, by a tagger that knows tones and by YAMNet."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from audiollm.audio.files import save
from audiollm.audio.samples import Waveform
from audiollm.data.records.thoughts import ThoughtEvent, ThoughtRecord, check_record_times, prose_of
from audiollm.evaluate.judges.taggers import WindowScores
from audiollm.video.writing import write_video
from pipelines.audiocot.answers.evidence import Evidence, contradiction
from pipelines.audiocot.answers.measured import has_little_evidence, heard_record
from pipelines.audiocot.thinking import MeasuredThinker, ThoughtRequest
from tests.pipelines.audiocot.cot_run import RATE, made, rows, think

TONES = {"Chicken, rooster": 400.0, "Siren": 700.0, "Speech": 1000.0, "Rain": 1300.0}
CLIP_S = 5.0


class ToneTagger:
    """Hears each class whose tone is loud in a window; of `DOUBTFUL` it is not sure."""

    labels, sample_rate, window_s = list(TONES), 16_000, 0.96

    def hear(self, windows: Iterable[NDArray[np.float32]]) -> WindowScores:
        scores = []
        for window_N in windows:
            seconds_N = np.arange(len(window_N)) / self.sample_rate
            amplitudes = [
                2 * abs(np.mean(window_N * np.exp(-2j * np.pi * hertz * seconds_N)))
                for hertz in TONES.values()
            ]
            scores.append([0.95 * (amplitude > 0.01) for amplitude in amplitudes])
        return WindowScores(self.labels, np.array(scores, np.float32))


class WholeToneTagger(ToneTagger):
    """Hears a tone only where a window has nearly all of its 0.9 seconds."""

    def hear(self, windows: Iterable[NDArray[np.float32]]) -> WindowScores:
        whole = [
            window_N * (np.mean(np.abs(window_N) > 1e-3) > 0.85 * 0.9 / self.window_s) for window_N in windows
        ]
        return super().hear(whole)


@pytest.fixture
def tagger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("pipelines.annotate.steps.events.load_tagger", lambda config: ToneTagger())
    path = tmp_path / "tones.onnx"
    path.touch()
    return path


def sound(parts: list[tuple[float, float, float, float]], noise: float = 0.0) -> torch.Tensor:
    """Tones (hertz, start, end, amplitude) in a clip with white noise, `[1, N]`."""
    seconds_N = np.arange(round(CLIP_S * RATE)) / RATE
    sound_N = noise * np.random.default_rng(0).standard_normal(len(seconds_N))
    for hertz, start_s, end_s, amplitude in parts:
        on_N = (seconds_N >= start_s) & (seconds_N < end_s)
        sound_N += on_N * amplitude * np.sin(2 * np.pi * hertz * seconds_N)
    return torch.from_numpy(sound_N.astype(np.float32))[None]


def record_of(
    path: Path, tagger: Path | None, *tones: tuple[float, float, float, float], noise: float = 0.0
) -> Any:
    """The answer about a clip of these tones."""
    save(path, sound(list(tones), noise), RATE)
    return MeasuredThinker(tagger).think(ThoughtRequest(path))


def test_events_have_whole_names_beginnings_and_ends(tmp_path: Path, tagger: Path) -> None:
    answer = record_of(tmp_path / "a.wav", tagger, (400, 0.8, 1.7, 0.3), (700, 3.0, 3.5, 0.3))
    events = answer.record.events
    assert [event.sound for event in events] == ["chicken or rooster", "siren"]
    times = [time_s for event in events for time_s in (event.start_s, event.end_s)]
    assert times == pytest.approx([0.8, 1.7, 3.0, 3.5], abs=0.11)
    assert answer.record.background == [] and not answer.little_evidence


def test_a_short_sound_is_heard_whole_where_the_windows_of_the_hop_cut_it(
    tmp_path: Path, tagger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The windows begin every 0.48 s: each of them has 0.72 s of the tone at most."""
    monkeypatch.setattr("pipelines.annotate.steps.events.load_tagger", lambda config: WholeToneTagger())
    answer = record_of(tmp_path / "a.wav", tagger, (700, 1.2, 2.1, 0.3))
    assert [event.sound for event in answer.record.events] == ["siren"]


def test_a_sound_without_a_name_is_an_event_with_its_level(tmp_path: Path, tagger: Path) -> None:
    parts = ((2000, 1.0, 1.4, 0.5), (2000, 3.0, 3.4, 0.03))
    answer = record_of(tmp_path / "a.wav", tagger, *parts)
    found = [(event.sound, event.manner) for event in answer.record.events]
    assert found == [("a sound", "loud"), ("a sound", "quiet")] and answer.little_evidence
    assert [event.start_s for event in answer.record.events] == pytest.approx([1.0, 3.0], abs=0.05)
    assert prose_of(answer.record).startswith("First, at 1.0 seconds, a loud sound.")


def test_a_named_event_among_others_is_enough_where_it_is_the_loudest(tmp_path: Path, tagger: Path) -> None:
    named, unnamed = (400, 1.0, 1.5, 0.4), (2000, 3.0, 3.4, 0.1)
    assert not record_of(tmp_path / "a.wav", tagger, named, unnamed).little_evidence
    louder = (2000, 3.0, 3.4, 0.8)
    assert record_of(tmp_path / "b.wav", tagger, named, louder).little_evidence


def test_a_steady_sound_is_background_with_or_without_a_name(tmp_path: Path, tagger: Path) -> None:
    rain = record_of(tmp_path / "a.wav", tagger, (1300, 0.0, CLIP_S, 0.2))
    assert (rain.record.events, rain.record.background) == ([], ["rain"]) and not rain.little_evidence
    brief = record_of(tmp_path / "b.wav", tagger, (1300, 1.0, 2.0, 0.02), noise=0.1)
    assert (brief.record.events, brief.record.background) == ([], ["rain"])
    noise = record_of(tmp_path / "c.wav", tagger, noise=0.1)
    assert (noise.record.events, noise.record.background) == ([], ["a steady sound"])
    assert noise.little_evidence
    both = record_of(tmp_path / "d.wav", tagger, (1300, 0.0, CLIP_S, 0.1), (700, 2.0, 2.5, 0.6))
    assert [event.sound for event in both.record.events] == ["siren"] and both.record.background == ["rain"]
    without = record_of(tmp_path / "e.wav", None, noise=0.1)
    assert without.record.background == ["a steady sound"] and not without.little_evidence


def test_what_lies_between_loud_events_is_background(tmp_path: Path, tagger: Path) -> None:
    answer = record_of(tmp_path / "a.wav", tagger, (400, 1.0, 1.5, 0.6), noise=0.01)
    assert answer.record.background == ["a quiet steady sound"]


def test_repeated_events_with_pauses_are_no_background(tmp_path: Path, tagger: Path) -> None:
    barks = [(400, 0.5 + second, 0.7 + second, 0.4) for second in range(4)]
    answer = record_of(tmp_path / "a.wav", tagger, *barks)
    assert [event.start_s for event in answer.record.events] == pytest.approx([0.5, 1.5, 2.5, 3.5], abs=0.11)
    assert answer.record.background == []


def test_silence_alone_is_nothing(tmp_path: Path, tagger: Path) -> None:
    answer = record_of(tmp_path / "a.wav", tagger, (2000, 1.0, 2.0, 1e-4))
    assert answer.record.sounds() == [] and not answer.little_evidence
    assert prose_of(answer.record) == "In the background: nothing. No human voice, no music."


def test_no_voice_is_written_where_none_is_heard(tmp_path: Path, tagger: Path) -> None:
    voice = record_of(tmp_path / "a.wav", tagger, (1000, 1.0, 2.0, 0.3))
    assert voice.record.avoid == ["music"] and voice.record.events[0].sound == "speech"
    other = record_of(tmp_path / "b.wav", tagger, (700, 1.0, 2.0, 0.3))
    assert other.record.avoid == ["human voice", "music"]


@pytest.mark.parametrize(("score", "avoid"), [(0.04, ["human voice"]), (0.06, []), (0.6, [])])
def test_no_voice_follows_from_its_score(score: float, avoid: list[str]) -> None:
    levels = {"level_dbfs": -20.0, "curve_dbfs": [-20.0] * 50, "onsets_s": []}
    tags = {"events": [], "tags": [], "sounds": [], "kinds": {"voice": score, "music": 0.5}}
    assert heard_record({"levels": levels, "tags": tags}, CLIP_S).avoid == avoid


def test_any_levels_onsets_and_sounds_give_a_record_of_the_clip() -> None:
    """Events lie in the clip, and a loud clip has a sound, whatever a tagger of short windows hears."""
    dice = np.random.default_rng(0)
    for _ in range(300):
        steps = int(dice.integers(1, 60))
        duration_s = (steps - dice.uniform(0, 0.9)) / 10
        curve = dice.choice([-110.0, -70.0, -45.0, -30.0, -10.0], steps).tolist()
        levels = {
            "level_dbfs": max(curve),
            "curve_dbfs": curve,
            "onsets_s": np.sort(dice.uniform(0, duration_s, 9)),
        }
        starts_s = dice.uniform(0, 0.99 * duration_s, 6)
        lengths_s = dice.uniform(0.01, 1.0, 6)
        sounds = [
            {"label": label, "start_s": start_s, "end_s": min(start_s + length_s, duration_s), "score": 0.9}
            for label, start_s, length_s in zip([*TONES, None, "Dog"], starts_s, lengths_s, strict=True)
        ]
        tags = {"events": [], "tags": [], "sounds": sounds, "kinds": {"voice": 0.0, "music": 0.0}}
        record = heard_record({"levels": levels, "tags": tags}, duration_s)
        check_record_times(record, duration_s)
        assert bool(record.sounds()) == (max(curve) > -60.0)
        assert heard_record({"levels": levels}, duration_s).sounds() or max(curve) <= -60.0


@pytest.mark.parametrize(("left", "place"), [(4, "on the left"), (28, "in the middle"), (52, "on the right")])
def test_an_event_is_where_something_moves(tmp_path: Path, left: int, place: str) -> None:
    frames = [np.full((64, 64, 3), 40, np.uint8) for _ in range(24)]
    for frame_HWC in frames[12:]:
        frame_HWC[28:36, left : left + 8] = 230
    path = tmp_path / "a.mkv"
    beep_1N = sound([(400, 1.0, 1.3, 0.4)])[:, : 2 * RATE]
    write_video(path, frames, 12, Waveform(beep_1N, RATE))
    (event,) = MeasuredThinker(None).think(ThoughtRequest(path)).record.events
    assert event.place == place


def test_a_loudest_sound_beside_an_event_is_that_of_the_background() -> None:
    levels = {"curve_dbfs": [-30.0] * 40 + [-20.0] + [-30.0] * 9}
    event = ThoughtEvent(sound="a sound", start_s=1.0, end_s=1.5)
    assert not has_little_evidence(ThoughtRecord(events=[event], background=["rain"]), levels)
    assert has_little_evidence(ThoughtRecord(events=[event], background=["a steady sound"]), levels)
    late = ThoughtEvent(sound="a sound", start_s=4.0, end_s=4.1)
    assert has_little_evidence(ThoughtRecord(events=[event, late], background=["rain"]), levels)


def test_clips_with_little_evidence_are_marked_and_not_in_thinking(tmp_path: Path, tagger: Path) -> None:
    save(made(tmp_path / "in" / "dog.wav"), sound([(400, 1.0, 1.5, 0.4)]), RATE)
    save(made(tmp_path / "in" / "unknown.wav"), sound([(2000, 1.0, 1.5, 0.4)]), RATE)
    run: dict[str, Any] = {"steps": {"tags": {"model": str(tagger)}}, "thresholds": {"max_voice": None}}
    funnel = think(tmp_path / "out", tmp_path / "in", **run)
    clips = {row["id"]: row["little_evidence"] for row in rows(tmp_path / "out", "clips.jsonl")}
    assert clips == {"dog": False, "unknown": True} and funnel["little_evidence"] == 1
    thinking = [row["metadata"] for row in rows(tmp_path / "out", "thinking.jsonl")]
    assert {facts["clip"] for facts in thinking} == {"dog"} and funnel["shard_samples"] == 1
    sounds = {row["id"]: row["metadata"] for row in rows(tmp_path / "out", "cot.jsonl")}
    assert sounds["unknown"]["little_evidence"] is True and "little_evidence" not in sounds["dog"]
    funnel = think(tmp_path / "out", tmp_path / "in", **run, little_evidence="keep")
    thinking = [row["metadata"] for row in rows(tmp_path / "out", "thinking.jsonl")]
    assert {facts["clip"] for facts in thinking} == {"dog", "unknown"} and funnel["shard_samples"] == 2


def test_a_model_that_names_nothing_in_a_loud_clip_is_contradicted() -> None:
    loud, silent = Evidence(1.0, curve_dbfs=[-80.0, -30.0]), Evidence(1.0, curve_dbfs=[-80.0, -75.0])
    assert contradiction(ThoughtRecord(), loud) == "no sound is named, and the clip has a level of -30 dBFS"
    assert contradiction(ThoughtRecord(), silent) is None
    assert contradiction(ThoughtRecord(background=["wind"]), loud) is None


@pytest.mark.parametrize(
    ("sound_name", "manner", "words"),
    [("a dog", "loud", "a loud dog"), ("A dog", "old", "an old dog"), ("an owl", "quiet", "a quiet owl"),
     ("dog", "loud", "loud dog"), ("a dog", None, "a dog"), ("a", "loud", "loud a")],
)  # fmt: skip
def test_a_manner_stands_behind_the_article(sound_name: str, manner: str | None, words: str) -> None:
    event = ThoughtEvent(sound=sound_name, start_s=0.0, end_s=1.0, manner=manner)
    assert prose_of(ThoughtRecord(events=[event])).startswith(f"First, at 0.0 seconds, {words}. ")


# ------------------------------------------------------------------------------------------------------- YAMNet


REAL = {
    "009 - Rooster/1-26806-A.ogg": ("rooster", False),
    "002 - Rain/1-17367-A.ogg": ("rain", True),
    "010 - Fire crackling/1-17565-A.ogg": (None, True),
}
"""Recordings of ESC-10: a word of a name that the record has, and whether it is background."""


@pytest.mark.parametrize("recording", REAL)
def test_real_recordings_are_named_or_sound_without_a_name(shared_data: Path, recording: str) -> None:
    pytest.importorskip("ai_edge_litert", reason="pip install 'audiollm[events]'")
    yamnet = next((shared_data / "judge_models").rglob("yamnet*.tflite"), None)
    path = shared_data / "esc10" / recording
    if yamnet is None or not path.is_file():
        pytest.skip("no YAMNet or no ESC-10")
    word, is_background = REAL[recording]
    record = MeasuredThinker(yamnet).think(ThoughtRequest(path)).record
    names = record.background if is_background else [event.sound for event in record.events]
    assert names and (word is None or any(word in name for name in names))
