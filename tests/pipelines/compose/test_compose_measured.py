"""Composing from what was measured: questions with closed answers, sounds without words, balance, splits by group."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import networkx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from rich.console import Console

from audiollm.data.records.manifest import read_samples
from audiollm.data.records.sample import Sample
from audiollm.errors import StageError
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import Recipe
from pipelines.compose.facts import COUNTS, Facts, language_name
from pipelines.compose.rows import SegmentRow
from pipelines.compose.stage import STAGE, Balance, ComposeConfig, connected, draw_kept_ids, split_segments


def row(index: int, **changes: Any) -> dict[str, Any]:
    made = {
        "id": f"s{index}", "path": f"/d/{index}.wav", "file": f"{index}.wav", "start_s": 0.0, "end_s": 2.0,
        "duration_s": 2.0, "kind": "speech", "speaker": "ann", "text": "hello", "split": "train", "heard": {},
        "measured": {},
    }  # fmt: skip
    return {**made, **changes}


def composed(
    tmp_path: Path, rows: list[dict[str, Any]], **changes: Any
) -> tuple[dict[str, Any], list[Sample]]:
    source = tmp_path / "segments.jsonl"
    source.write_text("".join(json.dumps(each) + "\n" for each in rows))
    recipe = Recipe("test", tmp_path / "test.yaml", "tiny", 0, tmp_path, (), {})
    config = ComposeConfig.model_validate({"segments": str(source), "min_seconds": 1, **changes})
    figures = STAGE.run(config, Context(tmp_path, recipe, Console(quiet=True), {}))
    return figures, read_samples(tmp_path / "samples.jsonl")[0]


def question_and_answer(sample: Sample) -> tuple[str, str]:
    return " ".join(sample.texts("user")), sample.texts("assistant")[0]


def sounds(index: int, *labels: str, **changes: Any) -> dict[str, Any]:
    events = [
        {"label": label, "start_s": 0.0, "end_s": 1.0, "score": 0.9 - 0.1 * n}
        for n, label in enumerate(labels)
    ]
    tags = [{"label": each["label"], "score": each["score"]} for each in events] + [
        {"label": "Speech", "score": 0.01}
    ]
    known = {"events": {"events": events, "tags": tags}}
    names = [tag["label"] for tag in tags]
    return row(index, kind="sound", text="", speaker="folder", events=names, measured=known, **changes)


# ------------------------------------------------------------------------------------------ from columns


def test_what_annotation_writes_becomes_captions_tags_and_voices(tmp_path: Path) -> None:
    said = {"scene": "A kitchen", "speakers": "A calm woman.", "content": "She asks for salt"}
    rows = [
        row(1, **said),
        row(2, gender="female", age=34, pitch="high", rate="slowly", language="en"),
        sounds(3, "Dog", "Male speech, man speaking"),
        row(4, split="test", **said),
    ]
    _, samples = composed(tmp_path, rows, tasks={"caption": 1, "tag": 1, "attributes": 1, "tts": 1})
    answers = {(s.task, s.metadata["segment"]): s.texts("assistant") for s in samples}
    assert answers["caption", "s1"] == ["A kitchen. A calm woman. She asks for salt."]
    assert answers["tag", "s3"] == ["Dog; Male speech, man speaking; Speech"]
    assert answers["attributes", "s2"][0] in (
        "female, 34, high pitch, speaks slowly", "female", "34", "English",
    )  # fmt: skip
    systems = {s.metadata["segment"]: s.texts("system")[0] for s in samples if s.task == "tts"}
    assert set(systems) == {"s1", "s2", "s4"}, "what is not said cannot be spoken"
    assert "A kitchen" in systems["s1"] and (
        "A calm woman." in systems["s1"] or "Speaker: ann" in systems["s1"]
    )


def test_a_column_comes_before_what_follows_from_others(tmp_path: Path) -> None:
    rows = [row(1, scene="A hall", caption="Mine."), row(2, caption="Yours.", split="test")]
    _, samples = composed(tmp_path, rows, tasks={"caption": 1})
    assert [s.texts("assistant") for s in samples] == [["Mine."], ["Yours."]]


@pytest.mark.parametrize(
    ("given", "name"),
    [("en", "English"), ("zh-CN", "Chinese"), ("English", "English"), (None, None), ("", None)],
)
def test_a_language_is_called_by_its_name(given: str | None, name: str | None) -> None:
    assert language_name(given) == name


def test_sounds_have_no_speaker_and_no_words(tmp_path: Path) -> None:
    rows = [sounds(n, "Dog" if n % 2 else "Rain") for n in range(6)]
    rows += [row(10), row(11), row(12, split="test"), sounds(13, "Dog", split="test")]
    figures, samples = composed(tmp_path, rows, tasks={"tag": 1, "asr": 1, "clone": 1})
    assert figures["speakers"] == 1 and figures["texts"] == 1
    assert figures["tasks"] == {"tag": 7, "asr": 3, "clone": 2}, "a sound is no reference, and has none"
    assert all(not s.metadata["text"] for s in samples if s.task == "tag")


# ------------------------------------------------------------------------------------- closed questions


def test_answers_of_closed_questions_are_right_and_among_the_choices(tmp_path: Path) -> None:
    labels = [
        "Dog",
        "Rain",
        "Rooster",
        "Helicopter",
        "Sneeze",
        "Male speech, man speaking",
        "Wind",
        "Cat",
        "Bell",
        "Sea",
    ]
    rows: list[dict[str, Any]] = [
        sounds(n, labels[n % 10], split="test" if n < 6 else "train") for n in range(300)
    ]
    rows += [
        row(1000 + n, language=("en", "de", "fr")[n % 3], gender=("male", "female")[n % 2])
        for n in range(200)
    ]
    rows += [row(2000 + n, emotion=("angry", "happy")[n % 2]) for n in range(100)]
    truth = {each["id"]: each for each in rows}
    _, samples = composed(tmp_path, rows, tasks={"facts": 1})
    kinds: Counter[str] = Counter()
    answers: Counter[str] = Counter()
    places: Counter[int] = Counter()
    wrong: Counter[str] = Counter()
    for sample in samples:
        question, answer = question_and_answer(sample)
        own = truth[sample.metadata["segment"]]
        labelled = own.get("events", ["none"])[0]
        if "sounds" in question or "do you hear" in question:
            choices = question.partition(": ")[2].rstrip("?").split("; ")
            assert answer == labelled and len(choices) == len(set(choices)) == 4
            assert "Speech" not in choices, "a tag below the threshold is neither right nor wrong"
            places[choices.index(answer)] += 1
            wrong.update(set(choices) - {answer})
            kinds["which"] += 1
        elif "Answer yes or no" in question:
            assert (f": {labelled}?" in question) == (answer == "Yes")
            answers[answer] += 1
        elif "language" in question:
            assert answer == language_name(own["language"]) and answer in question
            kinds["language"] += 1
        elif "Is this" in question:
            assert answer == {"male": "A man", "female": "A woman"}[own["gender"]]
            kinds["gender"] += 1
        elif "mood" in question:
            assert answer == own["emotion"] and {"angry", "happy"} <= set(
                question.rstrip("?").replace(";", "").split()
            )
            kinds["emotion"] += 1
        else:
            assert own["kind"] == "sound" and answer == "Nobody"
            kinds["count"] += 1
    assert all(kinds[name] > 20 for name in ("which", "language", "gender", "emotion", "count")), kinds
    assert min(answers["Yes"], answers["No"]) > 0.3 * answers.total(), answers
    assert min(places[n] for n in range(4)) > 0.1 * places.total(), "the order does not tell the answer"
    assert set(wrong) == set(labels), "each is sometimes a wrong choice"


def test_a_sound_that_is_a_tag_of_the_clip_is_never_a_wrong_choice() -> None:
    columns = [sounds(1, "Dog"), sounds(2, "Rain", "Dog"), sounds(3, "Wind")]
    facts = Facts(columns, 0)
    fields = facts.of("s2", columns[1], None)
    assert set(fields["sound_choices"].split("; ")) == {"Rain", "Wind"} and fields["sound"] == "Rain"
    alone = Facts(columns[:1], 0).of("s1", columns[0], None)
    assert "sound_choices" not in alone, "there is nothing to choose from"


def test_voices_of_a_conversation_are_counted(tmp_path: Path) -> None:
    talk = [
        row(n, path="/d/talk.wav", file="talk.wav", start_s=3.0 * n, end_s=3.0 * n + 2, speaker="abc"[n % 3])
        for n in range(6)
    ]
    rows = [*talk, row(50, split="test"), row(51, measured={"speakers": {}})]
    _, samples = composed(tmp_path, rows, tasks={"facts_of_conversation": 1, "facts": 1})
    asked = {s.task: (*question_and_answer(s), s.metadata["segment"]) for s in samples}
    assert asked["facts_of_conversation"][1:] == ("Three people", "s0")
    assert all(count in asked["facts_of_conversation"][0] for count in COUNTS)
    assert asked["facts"][1:] == ("One person", "s51"), (
        "where a step has looked for speakers, and not elsewhere"
    )


# ----------------------------------------------------------------------------------------------- balance


def test_a_task_is_balanced_by_a_column_and_the_test_is_left_alone(tmp_path: Path) -> None:
    rows = [sounds(n, "Dog" if n < 80 else "Rain") for n in range(100)]
    rows += [sounds(200 + n, "Dog", split="test") for n in range(30)]
    limit = {"tag": {"by": "events", "most": 15}}
    figures, samples = composed(tmp_path, rows, tasks={"tag": 1}, balance=limit)
    left = Counter(
        s.texts("assistant")[0].partition(",")[0] for s in samples if s.metadata["split"] == "train"
    )
    assert left == {"Dog": 15, "Rain": 15} and figures["test_samples"] == 30
    order = [s.metadata["segment"] for s in samples]
    again, same = composed(tmp_path, list(reversed(rows)), tasks={"tag": 1}, balance=limit)
    assert sorted(order) == sorted(s.metadata["segment"] for s in same) and again["tasks"] == figures["tasks"]


def test_a_balance_is_of_its_task_alone(tmp_path: Path) -> None:
    rows = [row(n, speaker="ann" if n < 90 else "bob") for n in range(100)] + [row(200, split="test")]
    balance = {"tts": {"by": "speaker", "share": 0.5}, "asr": {"by": "task", "most": 40}}
    figures, samples = composed(tmp_path, rows, tasks={"tts": 1, "asr": 1, "clone": 1}, balance=balance)
    speakers = Counter(
        s.metadata["speaker"] for s in samples if s.task == "tts" and s.metadata["split"] == "train"
    )
    assert speakers == {"ann": 10, "bob": 10}
    assert figures["tasks"]["asr"] == 41 and figures["tasks"]["clone"] == 100


def test_balances_that_mean_nothing_are_refused(tmp_path: Path) -> None:
    (tmp_path / "s.jsonl").touch()
    for balance, reason in (
        ({"tts": {"by": "speaker"}}, "give `most`"),
        ({"tts": {"by": "task", "share": 0.5}}, "its weight"),
        ({"tss": {"most": 3}}, "not a task of this stage; did you mean 'tts'"),
        ({"tts": {"most": 0}}, "greater than or equal to 1"),
    ):
        with pytest.raises(ValidationError, match=reason):
            ComposeConfig.model_validate({"segments": str(tmp_path / "s.jsonl"), "balance": balance})


@given(st.lists(st.sampled_from("aabcdde"), max_size=80), st.floats(0.01, 1), st.integers(1, 30))
def test_limits_hold_and_no_more_is_left_out_than_must_be(labels: list[str], share: float, most: int) -> None:
    groups = {f"id{n}": label for n, label in enumerate(labels)}
    stays = draw_kept_ids(groups, Balance(by="x", share=share, most=most), 0)
    left, sizes = Counter(groups[id] for id in stays), Counter(labels)
    assert set(left) == set(sizes), "no group is lost"
    if not labels:
        return
    limit = max(left.values())
    assert limit <= most and all(left[name] == min(size, limit) for name, size in sizes.items())
    fair = max(share, 1 / len(sizes))
    assert limit == 1 or limit <= fair * sum(left.values()) + 1e-6
    larger = {name: min(size, limit + 1) for name, size in sizes.items()}
    grown = max(larger.values())
    assert grown == limit or limit + 1 > most or grown > fair * sum(larger.values()) - 1e-6


# ------------------------------------------------------------------------------------------------- split


def segments_of(pairs: list[tuple[int, int]]) -> list[SegmentRow]:
    """(speaker, file) pairs; speaker 0 is no speaker, but a sound."""
    return [
        SegmentRow.model_validate(
            row(
                n,
                file=f"f{file}.wav",
                speaker=f"v{speaker}" if speaker else "folder",
                split=None,
                kind="speech" if speaker else "sound",
            )
        )
        for n, (speaker, file) in enumerate(pairs)
    ]


def context(tmp_path: Path) -> Context:
    recipe = Recipe("test", tmp_path, "tiny", 0, tmp_path, (), {})
    return Context(tmp_path, recipe, Console(quiet=True), {})


PAIRS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 14)), min_size=2, max_size=50)


@settings(max_examples=150)
@given(PAIRS, st.floats(0.05, 0.6), st.integers(0, 3))
def test_neither_a_speaker_nor_a_file_is_on_both_sides(
    tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[int, int]], share: float, seed: int
) -> None:
    segments = segments_of(pairs)
    folder = tmp_path_factory.getbasetemp()
    (folder / "s.jsonl").touch()
    config = ComposeConfig.model_validate(
        {"segments": str(folder / "s.jsonl"), "split": "group", "test_share": share, "seed": seed}
    )
    if len(set(connected(segments))) < 2:
        with pytest.raises(StageError, match="at least two groups"):
            split_segments(segments, config, context(folder))
        return
    divided = split_segments(segments, config, context(folder))
    files = {side: {s.source for s in divided if s.split == side} for side in ("train", "test")}
    voices = {side: {s.speaker for s in divided if s.split == side and s.kind == "speech"} for side in files}
    assert files["train"] and files["test"]
    assert not files["train"] & files["test"] and not voices["train"] & voices["test"]


@given(PAIRS, st.randoms())
def test_groups_are_the_components_whatever_the_order(pairs: list[tuple[int, int]], random: Any) -> None:
    graph = networkx.Graph()
    segments = segments_of(pairs)
    for segment in segments:
        file = f"file {segment.source}"
        graph.add_edge(file, f"voice {segment.speaker}" if segment.kind == "speech" else file)
    names = connected(segments)
    found = {
        frozenset(f"file {s.source}" for s, n in zip(segments, names, strict=True) if n == name)
        for name in names
    }
    wanted = {
        frozenset(node for node in component if node.startswith("file"))
        for component in networkx.connected_components(graph)
    }
    assert found == wanted
    shuffled = list(segments)
    random.shuffle(shuffled)
    assert dict(zip((s.id for s in shuffled), connected(shuffled), strict=True)) == dict(
        zip((s.id for s in segments), names, strict=True)
    )


def test_the_bulk_is_trained_on(tmp_path: Path) -> None:
    """One group of 95 files and five of one file: whatever the seed, the large one is not the test."""
    (tmp_path / "s.jsonl").touch()
    segments = segments_of([(1, n) for n in range(95)] + [(n - 90, n) for n in range(95, 100)])
    for seed in range(20):
        config = ComposeConfig.model_validate(
            {"segments": str(tmp_path / "s.jsonl"), "split": "group", "seed": seed}
        )
        divided = split_segments(segments, config, context(tmp_path))
        assert 1 <= sum(s.split == "test" for s in divided) <= 5
