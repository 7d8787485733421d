"""Who wrote a text travels with it to the model, and reports say where the judge's weights taught what they judge."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from audiollm.audio import Waveform, save
from audiollm.data.records.opening import open_source
from audiollm.data.records.sample import AudioPart, Message, Sample, TextPart, write_samples
from audiollm.data.records.text_origin import text_recognizers
from audiollm.data.text.tokenizer import TRAINED_FILE
from audiollm.errors import ConfigError
from audiollm.evaluate.codec.measures import CodecJudges, ReferenceClip
from audiollm.evaluate.judges.choosing import choose_recognizer, recognizer_digest
from audiollm.evaluate.judges.independence import shared_weights_note, taught_references_note
from audiollm.evaluate.judges.judging import SpeechJudges
from audiollm.evaluate.judges.recognizers import PocketsphinxRecognizer
from audiollm.evaluate.report.store import RowStore
from audiollm.evaluate.report.suite import SuiteResult
from audiollm.evaluate.report.text_errors import choose_form
from audiollm.evaluate.speech.commands import _run_with_progress
from audiollm.evaluate.speech.scoring import Bench
from audiollm.files.atomic import read_json, write_json
from audiollm.files.set_aside import SetAside
from audiollm.generation.engine.defaults import read_trained
from audiollm.rl.online.run import _record_reward_recognizers
from audiollm.rl.rewards.settings import LengthSettings, WordsSettings
from audiollm.supervised.corpus.survey import load_survey, save_survey, survey_sources
from pipelines.annotate.output.rows import _text_recognizers
from tests.audiollm.supervised.heard_samples import SHAPE, small_template, sound
from tests.pipelines.annotate.steps.tiny_recognizers import whisper_folder


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return whisper_folder(tmp_path_factory.mktemp("judge") / "whisper")


def trained(folder: Path, recognizers: dict[str, str]) -> Path:
    """A model's folder of which only what it was trained on is known."""
    (folder / "model").mkdir(parents=True)
    write_json(folder / "model" / "config.json", {"model_type": "audiollm_dual_ffn"})
    write_json(folder / "model" / TRAINED_FILE, {"recognizers": recognizers})
    return folder


def sample(number: int, recognizers: list[str], split: str = "train") -> Sample:
    messages = [
        Message(role="user", content=[AudioPart(path=f"{number}.wav"), TextPart(text="what is it?")]),
        Message(role="assistant", content=[TextPart(text="a dog")]),
    ]
    metadata = {"split": split, "text_recognizers": recognizers}
    return Sample(id=f"s{number}", messages=messages, task="asr", metadata=metadata)


def test_a_judge_that_taught_is_told_in_results_and_report(tmp_path: Path, whisper: Path) -> None:
    judge = choose_recognizer(f"transformers={whisper}", "en")
    assert judge is not None
    digest = str(recognizer_digest(str(whisper)))
    assert getattr(judge.judge, "digest") == digest and len(digest) == 12  # noqa: B009
    assert recognizer_digest("pocketsphinx") is None
    pupil, stranger = (
        trained(tmp_path / "pupil", {digest: "transcripts"}),
        trained(tmp_path / "other", {"0" * 12: "rewards"}),
    )
    bench = Bench(choose_form("whisper", "en"), SpeechJudges(judge.judge), judge.fingerprint, RowStore(None))
    for model, is_told in (
        (str(pupil), True),
        (str(stranger), False),
        (None, False),
        ("plug_in:Speaker", False),
    ):
        out = tmp_path / f"out-{model is None}-{Path(model or '').name}"
        out.mkdir()
        _run_with_progress(
            Console(quiet=True),
            bench,
            0,
            lambda b: SuiteResult("s", ["about"], {"n": 0}, []),
            out,
            0,
            model=model,
        )
        warnings = read_json(out / "results.json").get("warnings", [])
        page = (out / "report.html").read_text()
        assert bool(warnings) == is_told == ("judge with other weights" in page)
        assert not warnings or "wrote transcripts that the model was trained on" in warnings[0]
    write_json(pupil / "model" / TRAINED_FILE, {"recognizers": {digest: "guesses"}})
    with pytest.raises(ConfigError, match="recognizers"):
        shared_weights_note(pupil, judge.judge)


def test_words_of_a_codec_are_compared_in_whispers_form_where_a_whisper_judges(whisper: Path) -> None:
    judge = choose_recognizer(f"transformers={whisper}", "en")
    assert judge is not None
    wave = Waveform(sound(0.2), 16_000)
    by_whisper = ReferenceClip(wave, "speech", "I'm twenty-one, colour.", CodecJudges(judge.judge), "en")
    by_others = ReferenceClip(
        wave, "speech", "I'm twenty-one, colour.", CodecJudges(PocketsphinxRecognizer()), "en"
    )
    assert by_whisper.text == "i am 21 colour"
    assert by_others.text == choose_form("spoken", "en").apply("I'm twenty-one, colour.") != by_whisper.text


def test_rewards_by_a_recognizer_are_written_down(tmp_path: Path, whisper: Path) -> None:
    pupil = trained(tmp_path, {"1" * 12: "transcripts"})
    terms = [
        SimpleNamespace(settings=WordsSettings(recognizer=str(whisper))),
        SimpleNamespace(settings=LengthSettings()),
    ]
    config = SimpleNamespace(reward_terms=terms)
    _record_reward_recognizers(config, pupil / "model" / TRAINED_FILE)  # type: ignore[arg-type]
    digest = recognizer_digest(str(whisper))
    assert read_trained(pupil / "model").recognizers == {"1" * 12: "transcripts", digest: "rewards"}


def test_who_wrote_a_text_is_known_from_the_segment_to_the_survey(tmp_path: Path) -> None:
    digests = {"base": "a" * 12, "tiny": "b" * 12}
    row = {"text": "a dog", "text_source": "base"}
    assert _text_recognizers(row, digests) == {"text_recognizers": ["a" * 12]}
    assert _text_recognizers({**row, "text_source": "consensus"}, digests) == {
        "text_recognizers": ["a" * 12, "b" * 12]
    }
    for unknown in ({**row, "text_source": "given"}, {**row, "text": ""}, {**row, "text_source": None}):
        assert _text_recognizers(unknown, digests) == {}
    samples = [sample(0, ["a" * 12]), sample(1, []), sample(2, ["b" * 12], "test")]
    for number in range(3):
        save(tmp_path / f"{number}.wav", sound(0.3, number), 16_000)
    write_samples(tmp_path / "samples.jsonl", samples)
    source = open_source(tmp_path / "samples.jsonl")
    assert text_recognizers(source[0].sample) == ["a" * 12]
    set_aside = SetAside(tmp_path / "set_aside.jsonl", "test")
    survey = survey_sources([source], small_template(), 1000, "cut", set_aside, lambda: None, SHAPE)
    assert survey.recognizers == ("a" * 12,)
    save_survey(tmp_path / "survey.safetensors", survey)
    assert load_survey(tmp_path / "survey.safetensors").recognizers == ("a" * 12,)
    pupil = trained(tmp_path / "pupil", {"a" * 12: "transcripts"})
    note = taught_references_note(pupil, [text_recognizers(s) for s in samples])
    assert note == "1 of 3 references were written by the recognizer that taught the model"
    assert taught_references_note(None, [["a" * 12]]) == ""
    assert json.loads((tmp_path / "samples.jsonl").read_text().splitlines()[0])["metadata"][
        "text_recognizers"
    ]
