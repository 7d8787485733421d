"""`compose_soundscapes`: answers follow from the sound, no constant answer beats chance, splits share nothing."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from pydantic import ValidationError
from rich.console import Console

from audiollm.audio.files import load, save
from audiollm.data.records.manifest import read_samples
from audiollm.data.records.sample import Sample
from audiollm.errors import ConfigError
from audiollm.files.atomic import read_jsonl, write_jsonl
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import Recipe
from pipelines.soundscapes.questions import KINDS
from pipelines.soundscapes.settings import ComposeSoundscapesConfig, Kind
from pipelines.soundscapes.stage import run_compose_soundscapes
from tests.pipelines.soundscapes.clip_inputs import LABELS, RATE, tone, write_inputs

NAMES = {label.split(" - ")[1].lower() for label in LABELS}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def compose(inputs: dict[str, Any], folder: Path, **changes: Any) -> list[Sample]:
    config = ComposeSoundscapesConfig.model_validate({**inputs, **changes})
    folder.mkdir(parents=True, exist_ok=True)
    context = Context(folder, Recipe("test", folder, "tiny", 0, folder, (), {}), Console(quiet=True), {})
    figures = run_compose_soundscapes(config, context)
    samples, bad = read_samples(folder / "samples.jsonl")
    assert not bad and figures["clips"] == len(samples)
    return samples


@pytest.fixture(scope="module")
def samples(inputs: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> list[Sample]:
    return compose(inputs, tmp_path_factory.mktemp("soundscapes"))


def test_every_kind_is_in_the_table_and_is_asked_equally_often(samples: list[Sample]) -> None:
    assert set(KINDS) == set(get_args(Kind))
    for split, count in (("train", 30), ("test", 20)):
        kinds = Counter(s.metadata["category"] for s in samples if s.metadata["split"] == split)
        assert kinds == dict.fromkeys(KINDS, count)


def test_no_constant_answer_and_no_place_of_the_right_option_beats_chance(samples: list[Sample]) -> None:
    by_kind: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        if sample.is_held_out:
            by_kind[sample.metadata["category"]].append(sample)
    for kind, questions in by_kind.items():
        rights = [(q.metadata["choices"], q.texts("assistant")[0]) for q in questions]
        chance = sum(1 / len(choices) for choices, _ in rights) / len(rights)
        places = Counter(choices.index(right) for choices, right in rights)
        answers = Counter(right for _, right in rights)
        assert max(places.values()) / len(rights) <= chance + 0.06, kind
        for answer in answers:  # wherever it is an option, it is right as often as chance has it
            options = [1 / len(choices) for choices, _ in rights if answer in choices]
            assert answers[answer] <= sum(options) + 2.5, (kind, answer)


def true_answer(sample: Sample) -> str:
    """The answer, from the events alone."""
    events: list[dict[str, Any]] = sample.metadata["events"]
    names = [event["name"] for event in events]
    name = sample.texts("user")[0].removesuffix("?").split(": ")[-1]
    answers = {
        "which": names[0],
        "presence": "yes" if name in names else "no",
        "count": ["one", "two", "three"][len(set(names)) - 1],
        "order": names[0],
        "loudness": max(events, key=lambda event: event["dbfs"])["name"],
        "voice": "yes" if events[0].get("speaker") == events[-1].get("speaker") else "no",
        "words": events[0].get("text", ""),
    }
    return answers[sample.metadata["category"]]


def test_answers_and_thoughts_follow_from_the_events(samples: list[Sample]) -> None:
    for sample in samples:
        events, answer = sample.metadata["events"], sample.texts("assistant")[0]
        names = [event["name"] for event in events]
        assert answer in sample.metadata["choices"] and sample.metadata["heard"] == list(dict.fromkeys(names))
        assert sample.metadata["thought"].startswith(f"I hear {names[0]}")
        assert answer == true_answer(sample), sample


def test_recordings_take_turns_where_one_sound_is_asked_about(samples: list[Sample]) -> None:
    """Then as many held-out questions as there are recordings ask about each recording once."""
    recordings: dict[str, Counter[str]] = defaultdict(Counter)
    for sample in samples:
        if sample.metadata["category"] == "which" and not sample.is_held_out:
            [event] = sample.metadata["events"]
            recordings[event["name"]][event["recording"]] += 1
    counts = [list(counter.values()) for name, counter in recordings.items() if name in NAMES]
    assert len(counts) == len(NAMES)
    assert all(max(each) - min(each) <= 1 and len(each) == 3 for each in counts)


def test_sounds_are_where_and_as_loud_as_the_metadata_says(samples: list[Sample]) -> None:
    """The strongest frequency of each event is that of its label, and its level is the listed one."""
    hertz = {label.split(" - ")[1].lower(): value for label, value in LABELS.items()}
    for sample in samples[:40]:
        sound_N = load(sample.audio("user")[0].path).samples_CN[0].numpy()
        assert len(sound_N) <= 4 * RATE
        for event in sample.metadata["events"]:
            part_N = sound_N[round(event["start_s"] * RATE) : round(event["end_s"] * RATE)]
            level = 10 * np.log10(np.mean(part_N.astype(np.float64) ** 2))
            assert level == pytest.approx(event["dbfs"], abs=0.3)
            if event["name"] in hertz:
                peak = np.argmax(np.abs(np.fft.rfft(part_N))) * RATE / len(part_N)
                assert peak == pytest.approx(hertz[event["name"]], rel=0.03)


def test_splits_share_no_recording_and_no_speaker(samples: list[Sample]) -> None:
    used: dict[bool, set[str]] = {True: set(), False: set()}
    for sample in samples:
        for event in sample.metadata["events"]:
            is_speech = event["name"] == "speech"
            used[sample.is_held_out].add(event["speaker"] if is_speech else event["recording"])
        assert sample.metadata["background"] == ("a.wav" if sample.is_held_out else "b.wav")
    assert used[True] == {"a.wav", "cid", "dan"} and not used[True] & used[False]


def test_the_same_seed_gives_the_same_clips(
    inputs: dict[str, Any], samples: list[Sample], tmp_path: Path
) -> None:
    again = compose(inputs, tmp_path, clips=14, test_clips=7)
    few = compose(inputs, tmp_path / "few", clips=14, test_clips=7)
    assert [sample.metadata for sample in again] == [sample.metadata for sample in few]
    first, second = (Path(sample.audio("user")[0].path) for sample in (again[0], few[0]))
    assert first.read_bytes() == second.read_bytes()


def test_silent_recordings_and_speakers_of_two_splits_are_set_aside(
    inputs: dict[str, Any], tmp_path: Path
) -> None:
    for label, take in itertools.product(LABELS, "ab"):
        sound = tone(0.3, LABELS[label]) * (label != "001 - Bell" or take == "a")
        save(tmp_path / "events" / label / f"{take}.wav", sound, RATE)
    rows = read_jsonl(inputs["segments"])
    rows[0]["split"] = "test"  # one of ann's, who is trained on
    write_jsonl(tmp_path / "segments.jsonl", rows)
    events = [{"folder": tmp_path / "events", "held_out": "a.*"}]
    found = compose(
        inputs,
        tmp_path / "out",
        events=events,
        segments=[tmp_path / "segments.jsonl"],
        clips=70,
        test_clips=7,
    )
    set_aside = {row["kind"]: row for row in read_jsonl(tmp_path / "out" / "set_aside.jsonl")}
    assert set_aside["speaker of two splits"]["id"] == "ann-0"
    assert "is silent" in set_aside["cannot be read"]["reason"]
    assert len(found) == 77 and not any("bell" in s.metadata["heard"] for s in found if not s.is_held_out)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"events": [], "segments": []}, "nothing to compose"),
        ({"duration_s": 2.0}, "duration_s is 2"),
        ({"gap_s": [0.5, 0.1]}, "gap_s must rise"),
        ({"segments": [], "kinds": ["words"]}, "words: 4 texts are needed, not 0"),
        ({"events": "unlabelled"}, "all recordings have the label"),
        ({"events": "not held out"}, "has no held-out recordings"),
    ],
)
def test_inputs_that_cannot_serve_are_refused(
    inputs: dict[str, Any], tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    folder = inputs["events"][0]["folder"]
    if changes.get("events") == "unlabelled":
        changes = {"events": [{"folder": folder / "001 - Bell", "held_out": "a.*"}]}
    elif changes.get("events") == "not held out":
        changes = {"events": [{"folder": folder, "held_out": "z*"}]}
    with pytest.raises((ConfigError, ValidationError), match=problem):
        compose(inputs, tmp_path, **changes)
