"""A corpus of the texts of a file: what is spoken, by whom, in which set, and what is set aside."""

from __future__ import annotations

import json
import shlex
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from pydantic import ValidationError
from rich.console import Console

from audiollm.audio import load
from audiollm.errors import ConfigError, StageError
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import Recipe
from pipelines.annotate.execution.config import AnnotationConfig
from pipelines.annotate.execution.plan import plan_annotation
from pipelines.annotate.input.spoken_corpus import plan_corpus
from pipelines.annotate.input.spoken_texts import read_texts
from pipelines.annotate.input.synthetic import CorpusConfig, speak_corpus
from pipelines.annotate.stage import STAGE
from pipelines.annotate.synthesizers import command
from pipelines.annotate.synthesizers.synthesizer import SpeechFault, SynthesizedSpeech, check_speech

SENTENCES = [
    "The north wind and the sun were quarrelling.",
    "A traveller came along in a warm cloak.",
    "They agreed that the first would win.",
    "Then the north wind blew as hard as it could.",
    "The more it blew, the closer he held his cloak.",
    "At last the north wind gave up the attempt.",
    "Then the sun shone out warmly.",
    "At once the traveller took off his cloak.",
]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(SENTENCES) + "\n")
    return path


def annotate(folder: Path, corpus: dict[str, Any], **settings: Any) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    recipe = Recipe("test", folder / "test.yaml", "tiny", 0, folder, (), {})
    config = AnnotationConfig.model_validate(
        {"workers": 0, "quality_sample": 0, "recognizers": [], "corpus": corpus, **settings}
    )
    return STAGE.run(config, Context(folder, recipe, Console(quiet=True), {}))


def rows_of(folder: Path, name: str = "segments") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def clips_of(folder: Path) -> dict[str, bytes]:
    corpus = folder / "corpus"
    return {str(path.relative_to(corpus)): path.read_bytes() for path in corpus.rglob("*.wav")}


# ---------------------------------------------------------------------------------------------- defaults


def test_the_corpus_of_words_sounds_as_ever(tmp_path: Path) -> None:
    """Takes of the six voices as they were before texts could be spoken: samples, and root mean squares."""
    speak_corpus(tmp_path, CorpusConfig(words=["zero", "seven"], takes=2, test_takes=1), 0, lambda done: None)
    expected = {
        "anna": (11916, 0.11695),
        "bruno": (12886, 0.06493),
        "clara": (10630, 0.15434),
        "duncan": (14144, 0.09824),
        "edith": (14564, 0.07792),
        "frank": (12707, 0.09508),
    }
    for name, (length, level) in expected.items():
        samples_N = soundfile.read(tmp_path / f"seven_{name}_1.wav")[0]
        assert len(samples_N) == length
        assert np.sqrt(np.square(samples_N).mean()) == pytest.approx(level, rel=1e-3)
    assert len(list(tmp_path.iterdir())) == 24


# ------------------------------------------------------------------------------------------------- texts


def test_lines_that_nobody_says_are_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "wikitext.txt"
    lines = {
        " = Valkyria Chronicles III = ": "a heading",
        "## History": "a heading",
        "It has a <unk> and a role @-@ playing system .": "markup",
        "See [[the other page]] .": "markup",
        "Read https://example.org now.": "markup",
        "| 1 | 2 | 3 |": "symbols",
        "* * *": "no words",
        "so long " * 100: "a text too long",
        "the North Wind and the sun were quarrelling": "a text twice",
        "\udcff\udcfe broken": "text encoding",
    }
    spoken_lines = [SENTENCES[0], "", "  Cafés open at 8 a.m., and cost $5 & up.  ", "यह हिन्दी है"]
    path.write_bytes("\n".join([*spoken_lines, *lines]).encode(errors="surrogateescape"))
    listed = read_texts(path, None, 30.0)
    assert [item.text for item in listed.texts] == [" ".join(line.split()) for line in spoken_lines if line]
    assert [row["kind"] for row in listed.set_aside] == list(lines.values())
    assert [row["place"] for row in listed.set_aside] == [f"{path}:{number}" for number in range(5, 15)]
    assert f"{path}:1" in listed.set_aside[8]["reason"]


@pytest.mark.parametrize(
    ("name", "content", "column"),
    [
        ("a.csv", 'id,sentence\n1,"One, and two."\n2,Three.\n', None),
        ("a.tsv", "caption\tid\nOne, and two.\t1\nThree.\t2\n", "caption"),
        ("a.jsonl", '{"text": "One, and two."}\n{"text": ""}\n{"text": "Three."}\n', None),
        ("a.json", '[{"text": "One, and two."}, {"text": "Three."}]', None),
    ],
)
def test_texts_of_tables(tmp_path: Path, name: str, content: str, column: str | None) -> None:
    (tmp_path / name).write_text(content)
    listed = read_texts(tmp_path / name, column, None)
    assert [item.text for item in listed.texts] == ["One, and two.", "Three."]
    assert all(row["kind"] == "no text" for row in listed.set_aside)


def test_files_without_texts_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("caption,id\nA dog barks.,1\n")
    with pytest.raises(ConfigError, match=r"no column of texts among caption, id\n.*corpus\.text_column"):
        read_texts(tmp_path / "a.csv", None, None)
    (tmp_path / "a.txt").write_text("= One =\n\n= Two =\n")
    with pytest.raises(
        ConfigError, match="none of its 2 texts can be spoken: .*a.txt:1: '= One =' is a heading"
    ):
        read_texts(tmp_path / "a.txt", None, None)
    with pytest.raises(ConfigError, match="a text per line"):
        read_texts(tmp_path / "a.txt", "text", None)


# ------------------------------------------------------------------------------------------- who says what


def config_of(texts: Path, **settings: Any) -> CorpusConfig:
    return CorpusConfig.model_validate({"texts": texts, **settings})


def test_voices_and_texts_that_are_held_out_are_in_no_training_clip(texts: Path) -> None:
    plan = plan_corpus(config_of(texts, test_voices=2, test_texts=3, voices_per_text=3), 0, None)
    sets = {split: [clip for clip in plan.clips if clip.split == split] for split in ("train", "test")}
    assert len(sets["train"]) == 5 * 3 and len(sets["test"]) == 3 * 3 + 3 * 2
    texts_of = {split: {clip.text for clip in clips} for split, clips in sets.items()}
    voices_of = {split: {clip.voice for clip in clips} for split, clips in sets.items()}
    assert not texts_of["train"] & texts_of["test"] and len(texts_of["test"]) == 3
    assert len(voices_of["test"] - voices_of["train"]) == 2
    assert len(set(plan.clips)) == len(plan.clips)
    # trained voices say them, too: a sentence never heard of a voice in training
    assert voices_of["test"] & voices_of["train"]


def test_voices_that_are_held_out_say_all_texts_where_none_is_held_out(texts: Path) -> None:
    plan = plan_corpus(config_of(texts, test_voices=1), 0, None)
    assert {clip.text for clip in plan.clips if clip.split == "test"} == set(SENTENCES)
    assert all(clip.split is None for clip in plan_corpus(config_of(texts), 0, None).clips)


def test_a_plan_follows_from_the_seed_and_hardly_changes_with_more_texts(texts: Path) -> None:
    config = config_of(texts, test_voices=1, test_texts=2, rates=(0.8, 1.25))
    plan = plan_corpus(config, 0, None)
    assert plan_corpus(config, 0, None).clips == plan.clips
    assert plan_corpus(config, 1, None).clips != plan.clips
    assert (
        all(0.8 <= clip.rate <= 1.25 for clip in plan.clips) and len({clip.rate for clip in plan.clips}) > 5
    )
    texts.write_text("\n".join([*reversed(SENTENCES), "And so the sun was the stronger of the two."]))
    more, fewer = (
        {
            (clip.text, clip.voice, clip.rate)
            for clip in plan_corpus(config_of(texts, num_texts=n), 0, None).clips
        }
        for n in (None, 4)
    )
    assert fewer < more and len(fewer) == 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"synthesizer": "festival"}, "'festival' is no synthesizer: give espeak, hibari, kokoro=FOLDER"),
        ({"synthesizer": "hibari", "texts": None}, "give `texts`"),
        ({"takes": 3}, "takes is for words, and texts is set"),
        ({"texts": None, "test_texts": 3}, "test_texts is for texts, and texts is null"),
        ({"voices": 7}, "espeak has 6 voices"),
        ({"voices": 0}, "at least one"),
        ({"voices": ["anna", "anna"]}, "a name occurs twice"),
        ({"voices": ["hal"]}, "espeak has no voice 'hal'; known: anna, bruno"),
        ({"rates": [1.2, 0.8]}, "between 0.5 and 2"),
        ({"synthesizer": "command:say {text}"}, "lacks {out}"),
        ({"synthesizer": "command:say {speaker} {text} {out}"}, "{speaker} is no placeholder"),
        ({"synthesizer": "command:say {text} {out}", "rates": [0.9, 1.1]}, "the command has no {rate}"),
        ({"synthesizer": "command:say '{text} {out}"}, "No closing quotation"),
    ],
)
def test_settings_that_do_not_go_together(texts: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        config_of(**{"texts": texts, **settings})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"test_voices": 6}, "test_voices: 6 of 6 voices"),
        ({"test_texts": 8}, "test_texts: 8 of 8 texts"),
        ({"synthesizer": "hibari", "voices": 2}, "hibari has 1 voices"),
        ({"synthesizer": "command:say {voice} {text} {out}"}, "give a list of names"),
        (
            {"synthesizer": "command:say {voice} {text} {out}", "voices": ["../up"]},
            "a name is up to 100 letters",
        ),
        ({"synthesizer": "command:say {text} {out}", "voices": ["a", "b"]}, "has no {voice}"),
    ],
)
def test_voices_and_texts_that_there_are_not(texts: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_corpus(config_of(texts, **settings), 0, None)


# -------------------------------------------------------------------------------------------------- runs


def test_texts_are_spoken_and_annotated_and_resumed(tmp_path: Path, texts: Path) -> None:
    texts.write_text(texts.read_text() + "= A heading =\n")
    corpus = {"texts": str(texts), "voices": 3, "voices_per_text": 2, "test_voices": 1, "test_texts": 2}
    funnel = annotate(tmp_path / "run", corpus)
    rows = rows_of(tmp_path / "run")
    assert len(rows) == 6 * 2 + 2 * 2 + 2
    assert Counter(row["split"] for row in rows) == {"train": 12, "test": 6}
    assert {row["text"] for row in rows} == set(SENTENCES)
    assert {row["speaker"] for row in rows} == {"anna", "bruno", "clara"}
    assert {row["language"] for row in rows} == {"en"}
    assert {row["text_source"] for row in rows} == {"given"}
    assert all(row["file"].startswith(f"{row['speaker']}/") for row in rows)
    (aside,) = rows_of(tmp_path / "run", "set_aside")
    assert (aside["kind"], aside["place"]) == ("a heading", f"{texts}:9")
    assert funnel["reasons"] == {"a heading": 1} and funnel["audio_files"] == 18
    contents = clips_of(tmp_path / "run")
    assert len(contents) == 18 and len(set(contents.values())) == 18
    # cut short, and gone on with on two workers
    for name in sorted(contents)[::2]:
        (tmp_path / "run" / "corpus" / name).unlink()
    annotate(tmp_path / "run", corpus, workers=2)
    assert clips_of(tmp_path / "run") == contents
    assert rows_of(tmp_path / "run") == rows


def test_clips_of_other_settings_are_not_taken_for_these(tmp_path: Path, texts: Path) -> None:
    annotate(tmp_path / "run", {"texts": str(texts), "num_texts": 2, "voices": ["anna"]})
    annotate(tmp_path / "run", {"texts": str(texts), "num_texts": 2, "voices": ["anna"], "rates": [1.5, 1.5]})
    rows = rows_of(tmp_path / "run")
    assert len(rows) == 2 and len(clips_of(tmp_path / "run")) == 4
    slow_s = sum(soundfile.info(path).duration for path in (tmp_path / "run" / "corpus").rglob("*.wav"))
    assert sum(row["duration_s"] for row in rows) < 0.5 * slow_s


def test_a_plan_counts_clips_and_minutes(texts: Path) -> None:
    settings = {"corpus": {"texts": str(texts), "voices_per_text": 2, "test_texts": 2}, "recognizers": []}
    plan = plan_annotation(AnnotationConfig.model_validate(settings), {})
    assert plan.facts["clips"] == 16 and 30 < plan.facts["audio_s"] < 90
    assert (
        "speaks 16 clips, about 0." in plan.note
        and "of 8 texts in 6 voices; 4 clips are held out" in plan.note
    )
    settings["corpus"] |= {"synthesizer": "command:no-such-program {text} {out}"}
    with pytest.raises(ConfigError, match="no program 'no-such-program': install it"):
        plan_annotation(AnnotationConfig.model_validate(settings), {})
    with pytest.raises(ValidationError, match="no such file or folder: .*none.txt"):
        AnnotationConfig.model_validate({"corpus": {"texts": str(texts.with_name("none.txt"))}})


# ---------------------------------------------------------------------------------------------- commands

PROGRAM = """
import sys, numpy, soundfile
text, voice, out = sys.argv[1:4]
if "quarrelling" in text:
    sys.exit(f"cannot say it: {text}")
pitch = {"low": 100, "high": 200}[voice]
seconds = 0.07 * len(text) * (0 if "agreed" in text else 6 if "attempt" in text else 1) + 0.1
times = numpy.arange(round(seconds * 16000)) / 16000
level = 0 if "warmly" in text else 0.3
soundfile.write(out, numpy.stack([level * numpy.sin(6.28 * pitch * times)] * 2, 1), 16000)
"""


def test_a_command_speaks_and_its_failures_are_set_aside(tmp_path: Path, texts: Path) -> None:
    program = tmp_path / "speak it.py"
    program.write_text(PROGRAM)
    texts.write_text(texts.read_text() + 'It\'s "quoted" and $(touch /tmp/never) `id` {voice}; rm -rf.\n')
    line = f"command:{shlex.quote(sys.executable)} {shlex.quote(str(program))} {{text}} {{voice}} {{out}}"
    corpus = {"texts": str(texts), "synthesizer": line, "voices": ["low", "high"]}
    annotate(tmp_path / "run", corpus, steps={"segments": {"cover": "all"}})
    aside = [row for row in rows_of(tmp_path / "run", "set_aside") if row["place"].startswith(str(texts))]
    assert Counter(row["kind"] for row in aside) == {
        "command failed": 1,
        "too short for its text": 1,
        "too long for its text": 1,
        "silent": 1,
    }
    failure = next(row for row in aside if row["kind"] == "command failed")
    assert failure["reason"].endswith(
        "exit code 1: cannot say it: The north wind and the sun were quarrelling."
    )
    listed = rows_of(tmp_path / "run" / "corpus", "clips")
    assert len(listed) == 5 and "split" not in listed[0] and "language" not in listed[0]
    assert any("`id` {voice}" in row["text"] for row in listed)
    sound = load(tmp_path / "run" / "corpus" / listed[0]["path"])
    assert sound.samples_CN.shape[0] == 1 and sound.sample_rate == 16000


def test_a_command_that_always_fails_ends_the_run(tmp_path: Path, texts: Path) -> None:
    calls = tmp_path / "calls"
    failing = f"command:sh -c 'echo >> {calls}; echo no licence >&2; exit 3' sh {{text}} {{out}}"
    texts.write_text("".join(f"This is sentence number {number}.\n" for number in range(40)))
    with pytest.raises(
        StageError, match="speak failed on all of the first 24 items .*exit code 3: no licence"
    ):
        annotate(tmp_path / "run", {"texts": str(texts), "synthesizer": failing})
    assert len(calls.read_text().splitlines()) == 24
    assert not (tmp_path / "run" / "corpus" / "clips.jsonl").exists()
    failing = "command:sh -c 'echo cannot say $0; exit 1' {text} {out}"
    with pytest.raises(
        StageError, match="none of the 5 clips could be spoken; the last: voice: exit code 1: cannot"
    ):
        annotate(tmp_path / "other", {"texts": str(texts), "synthesizer": failing, "num_texts": 5})


def test_a_command_that_hangs_or_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "TIMEOUT_S", 0.2)
    waiting = command.CommandSynthesizer("sh -c 'sleep 9' {text} {out}")
    with pytest.raises(SpeechFault, match="no end after 0.2 s"):
        waiting.speak("Hello.", "voice", rate=1.0, seed=0)
    with pytest.raises(SpeechFault, match="ended without writing"):
        command.CommandSynthesizer("true {text} {out}").speak("Hello.", "voice", rate=1.0, seed=0)
    with pytest.raises(SpeechFault, match="what it wrote cannot be read"):
        command.CommandSynthesizer("cp /etc/hostname {out} {text}").speak("-v", "voice", rate=1.0, seed=0)


def test_clips_are_as_long_as_their_texts() -> None:
    random = np.random.default_rng(0)
    sound_N = random.normal(0, 0.1, 3 * 16000).astype(np.float32)
    text = "A sentence of some forty-five letters is this."
    check_speech(SynthesizedSpeech(sound_N, 16000), text, 1.0)
    padded_N = np.concatenate([np.zeros(160000, np.float32), sound_N[:8000], np.zeros(160000, np.float32)])
    for samples_N, kind in (
        (sound_N * 0, "silent"),
        (padded_N, "too short"),
        (np.tile(sound_N, 5), "too long"),
    ):
        with pytest.raises(SpeechFault, match=kind):
            check_speech(SynthesizedSpeech(samples_N, 16000), text, 1.0)
    with pytest.raises(SpeechFault, match="NaN"):
        check_speech(SynthesizedSpeech(sound_N * np.nan, 16000), text, 1.0)
