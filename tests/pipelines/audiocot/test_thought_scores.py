"""Scores of written records against the truth, counted by hand, and controls that change what is perceived."""

from __future__ import annotations

import json
from typing import Any

import pytest

from audiollm.data.records.sample import AudioPart, Message, Sample, TextPart, VideoPart
from audiollm.data.records.source import AudioClip, LoadedSample
from audiollm.data.records.thoughts import ThoughtEvent, ThoughtRecord
from audiollm.errors import StageError
from pipelines.audiocot.made.plans import MadePlan
from pipelines.audiocot.made.words import instruction_of_plan
from pipelines.audiocot.output import in_hundredths
from pipelines.audiocot.writer.answering import ThoughtQuestion, exchanged_parts
from pipelines.audiocot.writer.scores import AnswerScore, score_answer, score_tables

RECORD, NAMES, ORDER, TIMES, STARTS, BEHIND = (
    "answers that are records",
    "events named (F1)",
    "order of two events",
    "times within 0.25 s",
    "beginnings within 0.25 s",
    "background",
)
OBJECT, OPERATION, EDIT = "its sound and no other", "operation", "operation and span"
LENGTH_S = 3.0


def event(sound: str, start_s: float, end_s: float) -> dict[str, Any]:
    return {"sound": sound, "start_s": start_s, "end_s": end_s}


TRUTH = {
    "events": [event("bell", 0.5, 0.9), event("dog bark", 1.2, 1.6), event("bell", 2.0, 2.4)],
    "background": ["rain"],
}


def scored(question: Any, answer: Any, truth: Any) -> AnswerScore:
    return score_answer(question, truth, answer if isinstance(answer, str) else json.dumps(answer), LENGTH_S)


def accuracies(*scores: AnswerScore) -> dict[str, Any]:
    (table,) = score_tables(scores).values()
    return {name: each["accuracy"] for name, each in table.items() if each["n"]}


def test_the_truth_is_right_in_all() -> None:
    found = accuracies(scored("clip", TRUTH, TRUTH))
    assert set(found) == {RECORD, NAMES, ORDER, TIMES, STARTS, "ends within 0.25 s", BEHIND}
    assert all(value == 1 for value in found.values())


def test_names_order_and_times_are_counted_apart() -> None:
    # the dog comes first, the second bell is missing, a horn is invented, the first bell ends late
    answer = {
        "events": [event("dog bark", 0.2, 1.5), event("Bell", 0.7, 1.5), event("horn", 2.0, 2.2)],
        "background": [],
    }
    found = accuracies(scored("clip", answer, TRUTH))
    assert found[NAMES] == 2 * 2 / 6 and found[ORDER] == 0 and found[BEHIND] == 0
    assert found[STARTS] == 0.5 and found[TIMES] == 0
    both = score_tables([scored("clip", answer, TRUTH), scored("clip", TRUTH, TRUTH)])["clip"]
    assert both[ORDER]["n"] == 3 and both[ORDER]["accuracy"] == pytest.approx(2 / 3)


def test_an_event_is_matched_once_with_the_nearest_of_its_name() -> None:
    answer = {"events": [event("bell", 1.9, 2.4), event("bell", 2.1, 2.5)]}
    score = scored("clip", answer, TRUTH)
    assert (score.named, score.answered, score.wanted) == (2, 2, 3) and score.starts == (False, True)


def test_what_is_no_record_names_nothing() -> None:
    late = {"events": [event("bell", 2.0, 9.0)]}
    for answer in ("I hear a bell", late, {**TRUTH, "more": 1}):
        score = scored("clip", answer, TRUTH)
        assert score.problem and (score.named, score.answered, score.wanted) == (0, 0, 3)
        assert accuracies(score)[RECORD] == 0 and accuracies(score)[NAMES] == 0


def test_a_region_names_its_object_and_no_other() -> None:
    truth = {"events": [event("dog bark", 1.2, 1.6)]}
    assert accuracies(scored("region", truth, truth))[OBJECT] == 1
    assert accuracies(scored("region", TRUTH, truth))[OBJECT] == 0
    assert accuracies(scored("region", {"events": []}, truth))[OBJECT] == 0


def test_an_instruction_needs_operation_and_span() -> None:
    truth = {"operation": "remove", "span": [1.2, 1.6], "record": {"events": [event("dog bark", 1.2, 1.6)]}}
    assert accuracies(scored("instruction", truth, truth))[EDIT] == 1
    for changed, right in (
        ({"span": [1.4, 1.8]}, (1, 1)),
        ({"span": [0.2, 1.6]}, (1, 0)),
        ({"operation": "add"}, (0, 0)),
    ):
        found = accuracies(scored("instruction", {**truth, **changed}, truth))
        assert (found[OPERATION], found[EDIT]) == right
    assert accuracies(scored("instruction", "no", truth))[OPERATION] == 0


def asked(clip: int, videos: int = 1) -> ThoughtQuestion:
    parts = [VideoPart(path=f"{clip}.mp4")] * videos + [AudioPart(path=f"{clip}.wav"), TextPart(text="?")]
    sample = Sample(
        id=f"q{clip}",
        task="think",
        messages=[Message(role="user", content=parts)],
        metadata={"clip": f"c{clip}"},
    )
    sound = AudioClip("", sample.id, f"{clip}.wav")
    loaded = LoadedSample(sample, [], (sound,), {}, tuple(parts[:videos]))  # type: ignore[arg-type]
    return ThoughtQuestion(loaded, "clip", {}, LENGTH_S, loaded)


@pytest.mark.parametrize(
    ("parts", "video", "sound"), [(["video"], 1, 0), (["sound"], 0, 1), (["video", "sound"], 1, 1)]
)
def test_controls_exchange_what_they_say_and_nothing_else(parts: list[str], video: int, sound: int) -> None:
    # the recording alone lends nothing to clips with pictures
    found = exchanged_parts([asked(0), asked(1), asked(2), asked(3, videos=0), asked(4, videos=0)], parts)
    for number, each in enumerate(found[:3]):
        shown, heard = each.loaded.videos[0].path, each.loaded.audio[0].content
        assert shown == f"{(number + video) % 3}.mp4" and heard == f"{(number + sound) % 3}.wav"
        assert each.loaded.sample == each.original.sample
    assert found[3].loaded.audio[0].content == ("4.wav" if sound else "3.wav")
    with pytest.raises(StageError, match="no other question"):
        exchanged_parts([asked(0)], parts)


def test_held_out_wordings_are_new_combinations_of_known_words() -> None:
    about = ThoughtRecord(events=[ThoughtEvent(sound="dog bark", start_s=1.0, end_s=1.5)])
    told: dict[bool, set[str]] = {False: set(), True: set()}
    for operation in ("extend", "inpaint", "add", "remove"):
        for seed in range(3_000):
            plan = MadePlan(
                "p", operation, "c", None, (), (), None, 3.0, (1.5, 4.5), about, about, (), (), f"{seed}"
            )  # type: ignore[arg-type]  # fmt: skip
            for held_out in told:
                told[held_out].add(instruction_of_plan(plan, held_out))
    assert not told[False] & told[True] and len(told[False]) == 362 and len(told[True]) == 116
    words = {kind: set(" ".join(each).lower().replace(",", "").split()) for kind, each in told.items()}
    assert {word.rstrip(".?") for word in words[True]} <= {word.rstrip(".?") for word in words[False]}
    assert "Let dog bark go on for three more seconds." in told[False]
    assert "Between 1.5 and 4.5 seconds, redo the sound." in told[False]
    assert "Redo the sound from 1.5 to 4.5 seconds." in told[True]


def test_what_is_no_record_has_no_right_background_either() -> None:
    silent = {"events": [event("bell", 0.5, 0.9)], "background": []}
    assert accuracies(scored("clip", "no record", silent))[BEHIND] == 0


def test_questions_have_times_in_hundredths() -> None:
    record = {"events": [event("bell", 0.9671, 1.4688), event("click", 2.0011, 2.0013)], "background": []}
    rounded = in_hundredths(record)
    assert [(e["start_s"], e["end_s"]) for e in rounded["events"]] == [(0.97, 1.47), (2.0, 2.01)]
    assert rounded["background"] == [] and ThoughtRecord.model_validate_json(json.dumps(rounded))
