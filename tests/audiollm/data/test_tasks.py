"""Tasks as data: every built-in one can be filled, phrasings are drawn as promised, mistakes are named."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from audiollm.data.chat.tasks import TaskTemplate, fill_task, load_tasks
from audiollm.data.records.sample import AudioPart, Sample, TextPart
from audiollm.errors import ConfigError

TASKS = load_tasks()
CLIP = AudioPart(path="clip.wav", speaker="ann")


def everything(task: TaskTemplate, needed: frozenset[str]) -> dict[str, Any]:
    return {name: AudioPart(path=f"{name}.wav") if name in task.audio else f"<the {name}>" for name in needed}


def test_all_kinds_of_tasks_are_there() -> None:
    assert {
        "tts", "clone", "asr", "caption", "tag", "attributes", "audio_qa", "dialogue", "speech_translation", "text",
    } <= set(TASKS)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "number"), [(task.name, n) for task in TASKS.values() for n in range(len(task.phrasings))]
)
def test_every_phrasing_can_be_drawn_and_holds_its_fields(name: str, number: int) -> None:
    task = TASKS[name]
    needed = task.fields[number]
    given = everything(task, needed)
    samples = [fill_task(task, f"s{i}", given) for i in range(60)]
    chat = task.phrasings[number]
    wanted = [(role, text) for message in chat for role, text in message.items()]
    assert any(_as_template(sample, given) == wanted for sample in samples)
    for sample in samples:
        held = " ".join(text for _, text in _as_template(sample, given))
        assert all(f"{{{field}}}" in held for field in needed), "of the same fields, one with all of them"
        assert sample.messages[-1].role == "assistant" and sample.task == name


def _as_template(sample: Sample, given: dict[str, Any]) -> list[tuple[str, str]]:
    """The sample with its values turned back into the names of their fields."""
    rows = []
    for message in sample.messages:
        text = ""
        for part in message.content:
            text += part.text if isinstance(part, TextPart) else f"{{{Path(part.path).stem}}}"
        for name, value in given.items():
            text = text.replace(value, f"{{{name}}}") if isinstance(value, str) else text
        rows.append((message.role, text))
    return rows


def test_the_phrasings_that_say_most_are_drawn_from() -> None:
    fields: dict[str, Any] = {"text": "hi", "speaker": "ann", "audio": CLIP}
    plain = fill_task(TASKS["tts"], "a", fields)
    assert plain.texts("system") == ["Generate audio following instruction.\n\nSpeaker: ann"]
    both = fill_task(TASKS["tts"], "a", {**fields, "scene": "A quiet room.", "unused": "x"})
    assert both.texts("system") == [
        "Generate audio following instruction.\n\n"
        "<|scene_desc_start|>\nA quiet room.\n\nSpeaker: ann\n<|scene_desc_end|>"
    ]


def test_the_draw_is_seeded_stable_and_even() -> None:
    fields = {"audio": CLIP, "text": "hi"}

    def drawn(seed: int) -> list[str]:
        return [str(fill_task(TASKS["asr"], f"s{i}", fields, seed).messages[0]) for i in range(400)]

    assert drawn(0) == drawn(0) != drawn(1)
    counts = [drawn(0).count(each) for each in set(drawn(0))]
    assert len(counts) == 4 and min(counts) > 60  # 100 expected each, 8.7 the standard deviation


@given(st.text(alphabet=string.printable, min_size=1))
def test_a_value_is_taken_as_it_stands(text: str) -> None:
    """Braces in it are text, and parts next to one another become one."""
    sample = fill_task(TASKS["text"], "a", {"question": text, "answer": "{audio}"})
    assert sample.texts("user") == [text] and sample.texts("assistant") == ["{audio}"]


def test_parts_in_order_and_no_empty_ones() -> None:
    lines = [TextPart(text="SPEAKER0: "), CLIP, TextPart(text="\nSPEAKER1: "), CLIP]
    sample = fill_task(TASKS["dialogue"], "a", {"text": "[SPEAKER0] hi", "references": lines, "audio": CLIP})
    start = "Generate audio following instruction.\n\n<|scene_desc_start|>\nSPEAKER0: "
    assert [part.text if isinstance(part, TextPart) else part for part in sample.messages[0].content] == [
        start, CLIP, "\nSPEAKER1: ", CLIP, "\n<|scene_desc_end|>",
    ]  # fmt: skip
    assert sample.messages[2].content == [CLIP]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"text": "hi", "speaker": "ann"}, "sample a: task tts needs audio"),
        ({}, "sample a: task tts needs audio, text"),
        ({"text": "hi", "audio": "clip.wav"}, "audio must be a recording, not 'clip.wav'"),
        ({"text": CLIP, "audio": CLIP}, "text must be a text, not "),
        ({"text": "", "audio": CLIP}, "text must be a text, not ''"),
    ],
)
def test_fields_that_lack_or_do_not_fit(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        fill_task(TASKS["tts"], "a", fields)


MINE = """\
sing:
  about: sing a text
  audio: [audio]
  phrasings:
    - - user: "Sing {{loud}}: {text}"
      - assistant: "{audio}"
tts:
  about: mine
  audio: [audio]
  phrasings: [[{user: "{text}"}, {assistant: "{audio}"}]]
"""


def test_a_file_of_ones_own_adds_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(MINE)
    tasks = load_tasks(path)
    assert set(tasks) == {*TASKS, "sing"} and tasks["tts"].about == "mine"
    assert fill_task(tasks["sing"], "a", {"text": "la", "audio": CLIP}).texts("user") == ["Sing {loud}: la"]


@pytest.mark.parametrize(
    ("old", "new", "line", "reason"),
    [
        ("about: sing", "abuot: sing", 2, r"sing\.abuot: .*\n  did you mean 'about'\?"),
        (
            "audio: [audio]\n  phrasings:\n",
            "audio: [audoi]\n  phrasings:\n",
            1,
            "uses {audoi}; did you mean 'audio'",
        ),
        ("    - - user", "    - - usr", 5, r"sing\.phrasings\[0\]\[0\]\.usr: Input should be 'system'"),
        ("{text}", "{text.upper}", 4, r"phrasing 0, user: {text\.upper} is not the name of a field"),
        ("{text}", "{text!r}", 4, "not the name of a field"),
        ("{text}", "{text", 4, "phrasing 0, user: "),
        ('      - assistant: "{audio}"\n', "", 4, "phrasing 0 must end with an assistant's message"),
        ("sing:", "sing: 3\nsong:", 1, "sing: a task has the keys about, over, audio, phrasings"),
        ("tts:", "sing:", 7, "sing: given twice"),
    ],
)
def test_mistakes_are_named_with_file_line_task_and_key(
    tmp_path: Path, old: str, new: str, line: int, reason: str
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(MINE.replace(old, new, 1))
    with pytest.raises(ConfigError, match=reason) as caught:
        load_tasks(path)
    assert str(caught.value).startswith(f"{path}:{line}  ")


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file of tasks"):
        load_tasks(tmp_path / "mine.yaml")


def test_the_built_in_tasks_are_read_once_and_not_changed_by_those_of_a_user(tmp_path: Path) -> None:
    built_in = load_tasks()
    own_tasks = tmp_path / "tasks.yaml"
    own_tasks.write_text("tts: {about: other words, audio: [], phrasings: [[{assistant: '{text}'}]]}\n")
    assert load_tasks(own_tasks)["tts"].about == "other words"
    again = load_tasks()
    assert again is not built_in and again["tts"] is built_in["tts"]
