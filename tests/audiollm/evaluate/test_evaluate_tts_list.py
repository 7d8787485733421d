"""`evaluate tts`: errors as jiwer and Seed-TTS-eval count them, likeness in closed form, what is missing or kept."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import jiwer
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from scipy import stats
from typer.testing import CliRunner

from audiollm.audio import Waveform, load, save
from audiollm.commands.cli import build_app
from audiollm.errors import ConfigError
from audiollm.evaluate.judges.choosing import choose_recognizer, choose_speaker_judge
from audiollm.evaluate.judges.judging import SpeechClip, SpeechJudges
from audiollm.evaluate.report.metric_error import MetricError
from audiollm.evaluate.report.statistics import bootstrap_ratio, mean_of_shares, metric_table
from audiollm.evaluate.report.store import RowStore
from audiollm.evaluate.report.suite import conclude
from audiollm.evaluate.report.text_errors import Errors, choose_form, count_errors, error_table, seed_tts_form
from audiollm.evaluate.speech.clips import SpeechRequest, clips_in_folder, speak_all
from audiollm.evaluate.speech.scoring import Bench
from audiollm.evaluate.speech.tts import SpeechItem, evaluate_list, read_list
from audiollm.evaluate.subjects.folder_model import FolderSpeaker
from audiollm.evaluate.subjects.loading import load_answerer, load_speaker
from audiollm.evaluate.subjects.protocols import Subject
from audiollm.recipe.plug_ins import is_import_path
from tests.audiollm.evaluate.marked_clips import Book, Compass, Reader
from tests.audiollm.generation.toy_speech import a_voice, toy_generator

WORDS = st.lists(st.sampled_from(["a", "b", "c", "d"]), max_size=7).map(" ".join)


# --------------------------------------------------------------------------------------------- the errors


@given(reference=WORDS.filter(bool), hypothesis=WORDS)
@settings(max_examples=60)
def test_errors_are_those_of_jiwer(reference: str, hypothesis: str) -> None:
    errors = count_errors(reference, hypothesis)
    assert (
        errors.rate == pytest.approx(jiwer.wer(reference, hypothesis or "\u2400"), abs=1e-12)
        or not hypothesis
    )
    assert errors.units == len(reference.split())
    assert errors.deletions - errors.insertions == errors.units - len(hypothesis.split())


def test_words_over_an_empty_text_are_made_up_and_nothing_heard_is_all_wrong() -> None:
    assert count_errors("", "a b") == Errors(0, 2, 0, 0)
    assert count_errors("", "a b").rate == jiwer.wer("", "a b") == 2.0
    assert count_errors("", "") == Errors(0, 0, 0, 0)
    assert count_errors("a b", "") == Errors(0, 0, 2, 2)


@pytest.mark.parametrize(
    ("language", "text", "form"),
    [
        ("en", "Hello, World! It's 5-ish.", "hello world it's 5ish"),  # nothing takes the hyphen's place
        ("en", "Don’t “stop”", "dont stop"),  # the typographic apostrophe goes, there as here
        ("en", "a - b", "a b"),
        ("zh", "今天，天气 很好。OK", "今 天 天 气 很 好 O K"),
        ("zh", "“一二三”——四！", "一 二 三 四"),
    ],
)
def test_the_form_of_seed_tts_eval(language: str, text: str, form: str) -> None:
    """Worked by hand from `process_one` of its run_wer.py."""
    assert seed_tts_form(text, language) == form


def test_published_mean_is_of_utterances_and_the_corpus_has_its_own() -> None:
    errors = [Errors(1, 0, 0, 2), Errors(0, 1, 1, 8), Errors(0, 0, 0, 10), Errors(3, 1, 0, 4)]
    table = error_table(errors)
    assert table["utterance_mean"] == pytest.approx(np.mean([1 / 2, 2 / 8, 0, 4 / 4]))
    assert table["rate"] == pytest.approx(7 / 24)
    assert table["above_half"] == 1 / 4
    assert table["utterance_substitutions"] == pytest.approx((1 / 2 + 3 / 4) / 4)
    assert (table["substitutions"], table["insertions"], table["deletions"], table["n"]) == (4, 2, 1, 4)
    assert error_table([])["rate"] is None


def test_the_forms_of_whisper_and_of_this_project(tmp_path: Path) -> None:
    whisper = choose_form("whisper", "en").apply
    assert whisper("I've got twenty-one [noise] dollars, um.") == whisper("i have got 21 dollars")
    assert whisper("the colour") != whisper("the color")
    (tmp_path / "normalizer.json").write_text('{"colour": "color"}')
    with_spelling = choose_form("whisper", "en", tmp_path / "normalizer.json").apply
    assert with_spelling("the colour") == "the color"
    assert choose_form("whisper", "de").apply("Schöne (äh) Grüße!") == "schöne grüße"
    assert choose_form("whisper", "zh").apply("你好，世界") == "你 好 世 界"
    assert choose_form("whisper", "zh").unit == "character"
    assert choose_form("spoken", "en").apply("Take 7!") == "take seven"
    with pytest.raises(ConfigError, match="did you mean 'whisper'"):
        choose_form("wisper", "en")
    with pytest.raises(ConfigError, match="not a table of spellings"):
        (tmp_path / "list.json").write_text("[1]")
        choose_form("whisper", "en", tmp_path / "list.json")


# ----------------------------------------------------------------------------------------- the statistics


def test_intervals_are_those_of_scipy() -> None:
    table = mean_of_shares([1.0] * 7 + [0.0] * 5)
    wilson = stats.binomtest(7, 12).proportion_ci(method="wilson")
    assert (table["low"], table["high"]) == (pytest.approx(wilson.low), pytest.approx(wilson.high))
    rng = np.random.default_rng(0)
    wholes = rng.integers(3, 20, 60)
    parts = rng.binomial(wholes, 0.2)
    expected = stats.bootstrap(
        (parts, wholes), lambda a, b: a.sum() / b.sum(), paired=True, vectorized=False, method="percentile",
        n_resamples=4000, rng=1,
    ).confidence_interval  # fmt: skip
    low, high = bootstrap_ratio(parts.tolist(), wholes.tolist(), draws=4000) or (0, 0)
    assert (low, high) == (pytest.approx(expected.low, abs=0.006), pytest.approx(expected.high, abs=0.006))
    assert bootstrap_ratio([1], [2]) is None


def test_reasons_are_counted_and_left_out_of_the_mean() -> None:
    table = metric_table([1.0, "broken", 3.0, "broken", "silent"], [1, 9, 3, 9, 9])
    assert (table["mean"], table["median"], table["n"], table["not_available"]) == (2.5, 2.0, 2, 3)
    assert table["reasons"] == {"broken": 2, "silent": 1}


# ------------------------------------------------------------------------------------------------- lists


def test_lists_of_every_published_form(tmp_path: Path) -> None:
    lines = ["a|said|p/a.wav|to say", "b|said|p/a.wav|more|real.wav", "c.wav|text|p/a.wav", "d|text", ""]
    (tmp_path / "x.lst").write_text("\n".join(lines), encoding="utf-8")
    a, b, c, d = read_list(tmp_path / "x.lst")
    assert a == SpeechItem("a", "to say", tmp_path / "p/a.wav", "said")
    assert b.target == tmp_path / "real.wav"
    assert (c.id, c.text, c.prompt, c.prompt_text) == ("c", "text", tmp_path / "p/a.wav", None)
    assert d == SpeechItem("d", "text")
    for line, problem in (("a|b|c|d|e|f", r"x\.lst:1  6 fields"), ("a|x\na|y", "used before"), ("", "empty")):
        (tmp_path / "x.lst").write_text(line)
        with pytest.raises(ConfigError, match=problem):
            read_list(tmp_path / "x.lst")


def test_the_published_example_list(shared_data: Path) -> None:
    folder = shared_data / "text_benchmarks" / "tts-eval" / "examples" / "seedtts_en"
    if not folder.is_dir():
        pytest.skip(f"no list at {folder}")
    items = read_list(folder / "meta.lst")
    assert len(items) >= 5
    assert all(item.prompt is not None and load(item.prompt).duration_s > 1 for item in items)
    assert all(count_errors(form, form).total == 0 for form in (seed_tts_form(i.text, "en") for i in items))


# ------------------------------------------------------------------------------------------------- suite


@pytest.fixture
def book() -> Book:
    return Book()


def bench(book: Book, store: Path | None = None, fingerprint: str = "x") -> Bench:
    form = choose_form("seed-tts", "en")
    return Bench(form, SpeechJudges(Reader(book), Compass()), fingerprint, RowStore(store))


def items_and_clips(book: Book, folder: Path) -> tuple[list[SpeechItem], dict[str, SpeechClip]]:
    prompt = book.write(folder / "prompt.wav", "the prompt", 0)
    texts = {"a": "One two, three four.", "b": "five six", "c": "seven eight", "d": "nine"}
    items = [SpeechItem(id, text, prompt) for id, text in texts.items()]
    clips = {
        "a": SpeechClip(
            "a", texts["a"], book.write(folder / "a.wav", "one too three four", 20)
        ),  # 1 of 4 wrong
        "b": SpeechClip("b", texts["b"], book.write(folder / "b.wav", "five six seven", 60)),  # 1 of 2
        "c": SpeechClip("c", texts["c"], problem="the model failed: it is tired"),
        "d": SpeechClip("d", texts["d"], book.write(folder / "d.wav", "(fails)", 90)),
    }
    return items, clips


def test_words_and_likeness_in_closed_form(book: Book, tmp_path: Path) -> None:
    items, clips = items_and_clips(book, tmp_path)
    outcome = evaluate_list(items, clips, bench(book))
    words = outcome.result["generated"]["words"]
    assert words["utterance_mean"] == pytest.approx((1 / 4 + 1 / 2) / 2)
    assert (words["rate"], words["n"], words["missing"]) == (pytest.approx(2 / 6), 2, 1)
    assert words["rate_with_missing"] == pytest.approx((2 + 2) / (6 + 2)), (
        "two words that were not said at all"
    )
    assert words["reasons"] == {
        "the model failed: it is tired": 1,
        "reader failed: RuntimeError: out of breath": 1,
    }
    likeness = outcome.result["generated"]["similarity"]
    cosines = [math.cos(math.radians(degrees)) for degrees in (20, 60, 90)]
    assert likeness["mean"] == pytest.approx(np.mean(cosines), abs=2e-4)
    assert (likeness["n"], likeness["not_available"]) == (3, 1)
    assert [example.title for example in outcome.examples] == ["c", "d", "b", "a"], "the worst first"
    assert [row["id"] for row in outcome.rows] == ["a", "b", "c", "d"]


def test_real_recordings_are_the_scale(book: Book, tmp_path: Path) -> None:
    prompt = book.write(tmp_path / "prompt.wav", "the prompt", 0)
    real = book.write(tmp_path / "real.wav", "one two", 10)
    item = SpeechItem("a", "one two", prompt, None, real)
    clip = item.request().clip(book.write(tmp_path / "a.wav", "one", 50))
    result = evaluate_list([item], {"a": clip}, bench(book)).result
    assert (result["real"]["words"]["rate"], result["generated"]["words"]["rate"]) == (0, 0.5)
    assert result["real"]["similarity"]["mean"] > result["generated"]["similarity"]["mean"]


def test_rows_are_kept_by_content(book: Book, tmp_path: Path) -> None:
    items, clips = items_and_clips(book, tmp_path)
    store = tmp_path / "out" / "kept.jsonl"

    def run(fingerprint: str = "x") -> tuple[int, Any]:
        with_reader = bench(book, store, fingerprint)
        outcome = evaluate_list(items, clips, with_reader)
        assert isinstance(with_reader.judges.recognizer, Reader)
        return with_reader.judges.recognizer.asked, outcome.result

    asked, first = run()
    assert asked == 3
    assert run() == (0, first)
    store.write_text(store.read_text()[:-30])  # killed in the middle of a line
    assert run() == (1, first)
    assert run("another judge")[0] == 3
    assert clips["a"].path is not None
    clips["a"] = items[0].request().clip(clips["a"].path.rename(tmp_path / "renamed.wav"))
    assert run()[0] == 0
    book.write(tmp_path / "renamed.wav", "one two three four", 20)
    assert run()[0] == 1
    items[1] = SpeechItem("b", "another text", items[1].prompt)
    assert run()[0] == 1


class Parrot:
    """A speaker that says what it is asked, and counts."""

    def __init__(self, book: Book) -> None:
        self.book, self.spoken = book, 0

    def speak(self, text: str, reference: Path | None, reference_text: str | None, seed: int) -> Waveform:
        self.spoken += 1
        if text == "hard":
            raise MemoryError("too hard")
        return self.book.sound(text, seed)


def test_what_is_said_is_kept_and_what_fails_is_tried_again(book: Book, tmp_path: Path) -> None:
    parrot = Parrot(book)
    items = [SpeechItem("../../a/b", "one"), SpeechItem("..", "two"), SpeechItem("c", "hard")]
    requests = [item.request() for item in items]

    def run(fingerprint: str = "p", seed: int = 0) -> tuple[int, dict[str, SpeechClip]]:
        before = parrot.spoken
        clips = speak_all(
            Subject("parrot", fingerprint, parrot), requests, tmp_path / "audio", seed, lambda _: None
        )
        return parrot.spoken - before, clips

    spoken, clips = run()
    assert spoken == 3
    assert clips["c"] == requests[2].clip(problem="the model failed: MemoryError: too hard")
    paths = [clips[id].path for id in ("../../a/b", "..")]
    assert all(path is not None and path.parent == tmp_path / "audio" for path in paths), (
        "no name leaves the folder"
    )
    assert run()[0] == 1
    assert run(seed=1)[0] == 3
    assert run("other weights")[0] == 3
    assert run()[1] == clips


def test_clips_of_a_folder_stay_in_it(book: Book, tmp_path: Path) -> None:
    book.write(tmp_path / "in" / "a.flac", "one", 0)
    book.write(tmp_path / "secret.wav", "two", 0)
    requests = [SpeechRequest(id, "one") for id in ("a", "b", "../secret")]
    clips = clips_in_folder(tmp_path / "in", requests)
    assert clips["a"].path == tmp_path / "in" / "a.flac"
    assert list(clips.values())[1:] == [request.clip(problem="no clip") for request in requests[1:]]


def test_the_page_is_whole_and_escapes(book: Book, tmp_path: Path) -> None:
    prompt = book.write(tmp_path / "prompt.wav", "p", 0)
    item = SpeechItem("<script>alert(1)</script>", "<b>one</b> [red]two[/red]", prompt)
    clip = item.request().clip(book.write(tmp_path / "a.wav", "<i>three</i>", 5))
    outcome = evaluate_list([item], {item.id: clip}, bench(book))
    conclude(outcome, tmp_path / "out", 4, Console(quiet=True))
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<script>alert" not in page and "<b>one" not in page and "<i>three" not in page
    assert page.count("<audio") == page.count("data:image/png;base64,") == 2
    assert not re.search(r'(?:src|href)="(?!data:|#)', page)
    (row,) = [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()]
    assert (row["heard"], row["set"]) == ("<i>three</i>", "generated")


PLUGGED = """
from pathlib import Path
import torch
from audiollm.audio import Waveform

class Speaker:
    def speak(self, text, reference, reference_text, seed):
        with open("spoken.txt", "a") as file:
            file.write(text + "\\n")
        return Waveform(torch.full((1, 1600 * len(text.split())), 0.2), 16000)

class Recognizer:
    name = "counter"
    def recognize(self, samples_CN, sample_rate):
        return " ".join(["word"] * round(samples_CN.shape[1] / 1600))

class Voices:
    name = "same"
    def embed(self, samples_1N, sample_rate):
        return torch.ones(3)

def mute():
    return object()
"""


def test_the_command_with_models_by_import_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, book: Book
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plugged_suite.py").write_text(PLUGGED)
    book.write(Path("p.wav"), "p", 0)
    Path("x.lst").write_text("a|said|p.wav|word word\nb|said|p.wav|word other word\n")
    command = ["evaluate", "tts", "--list", "x.lst", "--model", "plugged_suite:Speaker", "-o", "out"]
    command += ["--recognizer", "plugged_suite:Recognizer", "--speaker-judge", "plugged_suite:Voices"]
    for _ in range(2):
        answer = CliRunner().invoke(build_app(), command, catch_exceptions=False)
        assert answer.exit_code == 0, answer.output
    assert Path("spoken.txt").read_text().splitlines() == ["word word", "word other word"], "said once"
    result = json.loads(Path("out/results.json").read_text())
    assert result["generated"]["words"]["rate"] == pytest.approx(1 / 5)
    assert result["generated"]["similarity"]["mean"] == pytest.approx(1.0)
    assert result["judges"] == {"recognizer": "counter", "voices": "same"}
    assert "20.00 %" in answer.output, "the table fits a terminal of 80 columns"
    assert Path("out/report.html").exists() and len(Path("out/rows.jsonl").read_text().splitlines()) == 2
    with pytest.raises(ConfigError, match=r"has no speak\(text, reference"):
        load_speaker("plugged_suite:mute", None, None)
    with pytest.raises(ConfigError, match="cannot be imported: AttributeError"):
        load_answerer("plugged_suite:nothing", None, 8)
    with pytest.raises(ConfigError, match="nothing to score"):
        CliRunner().invoke(build_app(), ["evaluate", "tts", "--list", "x.lst"], catch_exceptions=False)
    with pytest.raises(ConfigError, match="no such folder"):
        CliRunner().invoke(build_app(), [*command[:4], "--audio", "nowhere"], catch_exceptions=False)


def test_import_paths_are_told_from_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_import_path("package.module:factory")
    assert not is_import_path("runs/tts/train")
    assert not is_import_path("C:model") or not Path("C:model").exists()
    assert not is_import_path("../evil:thing")
    Path("a:b").mkdir()
    assert not is_import_path("a:b")


def test_a_model_of_a_folder_speaks_and_converses(tmp_path: Path) -> None:
    own = FolderSpeaker(toy_generator(), "toy", max_duration_s=0.4)
    save(tmp_path / "voice.wav", a_voice(0.6).samples_CN, 8000)
    first = own.speak("one two", tmp_path / "voice.wav", "three", seed=1)
    again = own.speak("one two", tmp_path / "voice.wav", "three", seed=1)
    assert torch.equal(first.samples_CN, again.samples_CN)
    assert 0 < first.duration_s <= 0.45
    turns = own.converse([("x", "one"), ("anna", "two"), ("x", "three")], {}, seed=0)
    assert [turn.sample_rate for turn in turns] == [8000] * 3


def test_the_trained_classifier_of_speakers_is_a_judge_of_voices(tmp_path: Path) -> None:
    from audiollm.evaluate.judges.classifier import ClassifierConfig, train_classifier
    from audiollm.evaluate.judges.judging import cosine, embed
    from tests.audiollm.generation.melodies import RATE, melody, toy_set

    clips, _, speakers = toy_set(range(5, 13))
    train_classifier(clips, speakers, ClassifierConfig(steps=30)).save(tmp_path / "judges" / "speaker")
    chosen = choose_speaker_judge(str(tmp_path / "judges" / "speaker"))
    assert chosen is not None
    anna, same, bert = (
        embed(chosen.judge, Waveform(melody(text, name, 0), RATE))
        for text, name in (("one", "anna"), ("three", "anna"), ("two", "bert"))
    )
    assert cosine(anna, same) > 0.5 > cosine(anna, bert)
    with pytest.raises(MetricError, match="the clip is silent"):
        embed(chosen.judge, Waveform(torch.zeros(1, 8000), RATE))


def test_judges_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no speech recognizer loads"):
        choose_recognizer(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="no speaker judge"):
        choose_speaker_judge(str(tmp_path / "none"))
    assert choose_recognizer(None) is None
