"""The language of a segment: scripts that decide, texts of real benchmarks, witnesses together by hand."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from audiollm.errors import ConfigError
from pipelines.annotate.step import RecordingMetadata, Segment
from pipelines.annotate.steps.language import (
    Language,
    LanguageConfig,
    joint_probability,
    label_language,
)
from pipelines.steps.step import Listener
from tests.pipelines.annotate.steps.stand_ins import language_folder
from tests.pipelines.annotate.steps.tiny_recognizers import segment as noise_segment

SHARED = Path(
    os.environ.get("AUDIOLLM_SHARED_DATA") or Path(__file__).resolve().parents[5] / "shared" / "data"
)
NOTHING = {"language": None, "probability": None, "source": None}


@pytest.fixture(scope="module")
def step() -> Language:
    pytest.importorskip("py3langid")
    made = Language(LanguageConfig(), ["whisper", "other"])
    assert made.missing() is None
    made.setup()
    return made


def segment(text: str, given: RecordingMetadata | None = None, **told: Any) -> Segment:
    values = {"consensus": {"text": text}, **told}
    return Segment("x", 0.0, 2.0, "speech", None, given or RecordingMetadata(), values, Listener("x"))


def says(language: str | None, probability: float | None = None) -> dict[str, Any]:
    return {"text": "", "language": language, "language_probability": probability}


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("안녕", "ko"),
        ("ありがとう", "ja"),
        ("東京に行きます", "ja"),
        ("สวัสดี", "th"),
        ("Γεια", "el"),
        ("שלום", "he"),
        ("OK 안녕하세요 여러분", "ko"),
    ],
)
def test_a_script_of_one_language_decides_alone(step: Language, text: str, language: str) -> None:
    value = step.process(segment(text, whisper=says("en", 0.99)))
    assert value["language"] == language and value["source"] == "script"
    assert value["probability"] >= 0.85


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("she had your dark suit in greasy wash water all year", "en"),
        ("HELLO HOW ARE YOU TODAY", "en"),
        ("nous allons à la plage demain avec les enfants", "fr"),
        ("ich gehe heute nach hause und esse etwas", "de"),
        ("привет как дела сегодня мой друг", "ru"),
        ("今天我们去哪里吃饭", "zh"),
        ("एक बार फिर हम आज बाजार जा रहे हैं", "hi"),
        ("هذا هو البيت الكبير", "ar"),
    ],
)
def test_a_text_tells(step: Language, text: str, language: str) -> None:
    value = step.process(segment(text))
    assert (value["language"], value["source"]) == (language, "text") and 0.5 < value["probability"] <= 1


def test_what_is_too_short_tells_nothing(step: Language) -> None:
    assert step.process(segment("seven")) == NOTHING
    assert step.process(segment("")) == NOTHING and step.process(segment("7 7 7")) == NOTHING
    assert step.process(segment("你好")) == NOTHING  # Chinese or Japanese
    assert step.process(segment("seven", whisper=says("en", 0.93))) == {
        "language": "en",
        "probability": 0.93,
        "source": "whisper",
    }


def test_what_is_given_wins(step: Language) -> None:
    value = step.process(segment("안녕하세요", RecordingMetadata(language="en"), whisper=says("ko", 0.9)))
    assert value == {"language": "en", "probability": 1.0, "source": "given"}


def test_witnesses_together(step: Language) -> None:
    text = "hello how are you today"
    alone = step.process(segment(text))["probability"]
    agreed = step.process(segment(text, whisper=says("en", 0.9)))
    against = step.process(segment(text, whisper=says("fr", 0.99), other=says("fr", 0.99)))
    assert agreed["source"] == "text and whisper" and agreed["probability"] >= alone
    assert against["language"] == "fr" or against["probability"] < alone
    assert step.process(segment("seven", whisper=says("en-US", 1.0)))["probability"] == 0.99
    assert step.process(segment("你好", whisper=says("yue", 0.8)))["language"] == "zh"
    assert step.process(segment("seven", whisper=says("tlh", 0.8))) == NOTHING


def test_the_joint_probability_by_hand() -> None:
    joint = joint_probability([{"en": 0.8, "de": 0.2}, {"en": 0.4, "de": 0.6}], ["en", "de"])
    assert joint == pytest.approx({"en": 0.32 / 0.44, "de": 0.12 / 0.44})
    flat = joint_probability([{"en": 0.7, "de": 0.3}, {"en": 0.5, "de": 0.5}], ["en", "de"])
    assert flat == pytest.approx({"en": 0.7, "de": 0.3})


def test_candidates_bound_the_answer() -> None:
    pytest.importorskip("py3langid")
    step = Language(LanguageConfig(languages=["en", "yue"]))
    step.setup()
    assert step.process(segment("我哋今日去邊度食飯"))["language"] == "yue"
    assert step.process(segment("안녕하세요 여러분")) == NOTHING
    wrong = Language(LanguageConfig(languages=["en", "klingon"]))
    with pytest.raises(ConfigError, match="klingon"):
        wrong.setup()


def test_the_steps_that_it_reads() -> None:
    assert Language(LanguageConfig(), ["a", "b"]).needs == ("a", "b", "consensus")


def test_real_transcripts(step: Language) -> None:
    """Texts that go with recordings, of five languages."""
    files = {
        "ru": ("speech_other_lang/DeepSpeech/data/smoke_test/russian_sample_data/ru.csv", "utf-8"),
        "zh": ("speech_zh/FireRedASR/examples/wav/text", "utf-8"),
        "ja": ("speech_other_lang/SimulEval/examples/speech_to_speech/reference/ja.txt", "utf-8"),
        "de": ("speech_other_lang/SimulEval/examples/speech_to_speech/reference/de.txt", "utf-8"),
        "en": ("speech_other_lang/SimulEval/examples/speech_to_speech/reference/en.txt", "utf-8"),
    }
    if not all((SHARED / name).is_file() for name, _ in files.values()):
        pytest.skip(f"the transcripts are not here: {SHARED}")
    for language, (name, encoding) in files.items():
        line = (SHARED / name).read_text(encoding).splitlines()[-1]
        text = max(line.replace(",", " ").split(" ", 1), key=len) if language in ("ru", "zh") else line
        assert step.process(segment(text))["language"] == language, text


# ------------------------------------------------------------------------------------------------- by sound

MMS = {"eng": 0.6, "deu": 0.3, "cmn": 0.06, "mai": 0.04}
"""Labels of MMS-LID, of which py3langid does not know the last."""


def _listening(folder: Path, shares: dict[str, float], **settings: Any) -> Language:
    pytest.importorskip("py3langid")
    model = language_folder(folder / "model", shares)
    step = Language(
        LanguageConfig.model_validate({"model": f"transformers={model}", **settings}), ["whisper"]
    )
    assert step.missing() is None and not step.reads_text
    step.setup()
    return step


def _heard(folder: Path, seconds: float = 1.0, text: str | None = None, **told: Any) -> Segment:
    values = {**({} if text is None else {"consensus": {"text": text}}), **told}
    return noise_segment(folder, seconds, values=values)


def test_a_model_tells_the_language_of_sound_without_a_text(tmp_path: Path) -> None:
    step = _listening(tmp_path, MMS)
    expected = {"language": "en", "probability": pytest.approx(0.6 / 0.96, abs=1e-3), "source": "sound"}
    assert step.process(_heard(tmp_path)) == expected
    # a text that was refused is not among the values: neither it nor its recognizer's language counts
    refused = _heard(
        tmp_path, whisper={**says("de", 0.99), "text": "ich gehe heute nach hause und esse etwas"}
    )
    assert step.process(refused) == expected
    assert step.process(_heard(tmp_path, 0.05)) == NOTHING


def test_a_model_and_a_text_are_witnesses(tmp_path: Path) -> None:
    step = _listening(tmp_path, MMS)
    german = step.process(_heard(tmp_path, text="ich gehe heute nach hause und esse etwas"))
    assert (german["language"], german["source"]) == ("de", "text and sound")
    korean = step.process(_heard(tmp_path, text="안녕하세요 여러분"))
    assert (korean["language"], korean["source"]) == ("ko", "script")
    bounded = _listening(tmp_path / "bounded", MMS, languages=["en", "de", "fr"])
    value = bounded.process(_heard(tmp_path, text="seven", whisper=says("de", 0.6)))
    # whisper: 0.6 and 0.2, 0.2; the sound: 0.3 / 0.9 and 0.6 / 0.9, 0
    assert value == {
        "language": "de",
        "probability": pytest.approx(0.6, abs=1e-3),
        "source": "whisper and sound",
    }


def test_a_language_that_no_text_tells_is_the_models(tmp_path: Path) -> None:
    step = _listening(tmp_path, {"eng": 0.2, "mai": 0.8})
    value = step.process(_heard(tmp_path, text="hello how are you today"))
    assert value == {"language": "mai", "probability": 0.8, "source": "sound"}
    bounded = _listening(tmp_path / "bounded", {"eng": 0.2, "mai": 0.8}, languages=["en", "de"])
    assert bounded.process(_heard(tmp_path))["language"] == "en"


@pytest.mark.parametrize(
    ("label", "language"),
    [
        ("eng", "en"), ("cmn", "zh"), ("en_us", "en"), ("German", "de"), ("en: English", "en"), ("pt-BR", "pt"),
        ("yue", "yue"), ("LABEL_0", None), ("happiness", None), ("und", None),
    ],
)  # fmt: skip
def test_languages_of_classes(label: str, language: str | None) -> None:
    assert label_language(label) == language


def test_models_of_other_classes_are_refused(tmp_path: Path) -> None:
    model = language_folder(tmp_path / "model", {"happiness": 0.5, "anger": 0.5})
    with pytest.raises(ConfigError, match="its classes are no languages: happiness, anger"):
        Language(LanguageConfig(model=model)).setup()
    assert "language.model: no folder" in (Language(LanguageConfig(model=tmp_path / "gone")).missing() or "")
