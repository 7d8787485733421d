"""Recognized text is kept only where it is trusted; the segment stays, and every refusal has its reason."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from rich.console import Console

from audiollm.models.recognition.transcript import SpokenWord
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import Recipe
from pipelines.annotate.execution.config import AnnotationConfig
from pipelines.annotate.execution.rules import PRESETS, Thresholds
from pipelines.annotate.execution.trust import judge_text
from pipelines.annotate.input.synthetic import CorpusConfig, speak_corpus
from pipelines.annotate.recognizers.value import transcript_value
from pipelines.annotate.stage import STAGE
from pipelines.compose.stage import STAGE as COMPOSE
from pipelines.compose.stage import ComposeConfig
from pipelines.steps.step import Value

SHARED = Path(
    os.environ.get("AUDIOLLM_SHARED_DATA") or Path(__file__).resolve().parents[4] / "shared" / "data"
)
TEXT = "one of the first things that he did"


@pytest.fixture(scope="module")
def backwards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Speech that is no language: synthetic English, played backwards."""
    spoken, folder = tmp_path_factory.mktemp("spoken"), tmp_path_factory.mktemp("backwards")
    speak_corpus(
        spoken, CorpusConfig(words=[TEXT], voices=2, takes=1, test_takes=0), seed=0, on_done=lambda done: None
    )
    for path in sorted(spoken.glob("*.wav")):
        samples_N, rate = soundfile.read(path)
        speaker = path.stem.split("_")[-2]
        soundfile.write(folder / f"{speaker}.wav", np.flip(samples_N), rate)
    return folder


@pytest.fixture(scope="module")
def annotated(tmp_path_factory: pytest.TempPathFactory, backwards: Path) -> tuple[Path, dict[str, Any]]:
    """The annotation of it, for tests that change nothing in its folder, and its funnel."""
    folder = tmp_path_factory.mktemp("annotated")
    return folder, _annotate(folder, input=str(backwards))


def _annotate(folder: Path, **settings: Any) -> dict[str, Any]:
    config = AnnotationConfig.model_validate({"workers": 0, "quality_sample": 0, **settings})
    return STAGE.run(config, _context(folder))


def _context(folder: Path) -> Context:
    folder.mkdir(parents=True, exist_ok=True)
    return Context(
        folder, Recipe("test", folder, "tiny", 0, folder, (), {}), Console(quiet=True, file=None), {}
    )


def _rows(folder: Path, name: str = "segments") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def _calls(folder: Path) -> Counter[str]:
    with closing(sqlite3.connect(folder / "ledger" / "ledger.sqlite")) as ledger:
        return Counter(dict(ledger.execute("select step, count(*) from calls group by step")))


# ------------------------------------------------------------------------------------------- a whole run


def test_nonsense_is_no_text_its_segment_stays_and_the_reason_is_counted_everywhere(
    annotated: tuple[Path, dict[str, Any]],
) -> None:
    folder, funnel = annotated
    rows = _rows(folder)
    assert len(rows) == 2 and not _rows(folder, "filtered")
    assert [row["text"] for row in rows] == ["", ""]
    assert all(row["text_source"] is None and row["language"] is None for row in rows)
    assert any(row["heard"]["pocketsphinx"] for row in rows)
    reasons = Counter(row["text_refused"]["kind"] for row in rows)
    counts = funnel["recognized_texts"]
    assert (counts["kept"], counts["refused"], counts["reasons"]) == (0, 2, dict(reasons))
    assert counts["refused_s"] == pytest.approx(sum(row["duration_s"] for row in rows), abs=1e-3)
    page = (folder / "report.html").read_text()
    assert "Refused in 2 kept segments" in page and "--recognizer FOLDER" in page
    assert all(reason in page for reason in reasons)


def test_a_changed_threshold_keeps_or_refuses_without_measuring_anything_again(
    tmp_path: Path, backwards: Path, annotated: tuple[Path, dict[str, Any]]
) -> None:
    shutil.copytree(annotated[0], tmp_path, dirs_exist_ok=True)
    calls = _calls(tmp_path)
    anything: dict[str, Any] = dict.fromkeys(
        ("min_pocketsphinx_words", "min_pocketsphinx_confidence", "min_pocketsphinx_fit")
    )
    _annotate(tmp_path, input=str(backwards), thresholds=anything)
    assert _calls(tmp_path) == calls
    rows = _rows(tmp_path)
    assert [row["text"] for row in rows] == [row["heard"]["pocketsphinx"] for row in rows]
    assert any(row["text"] and row["text_source"] == "pocketsphinx" for row in rows)
    _annotate(tmp_path, input=str(backwards))
    assert _calls(tmp_path) == calls and not any(row["text"] for row in _rows(tmp_path))


def test_a_given_text_is_never_refused(tmp_path: Path, backwards: Path) -> None:
    settings = {"input": str(backwards), "transcripts": "{text}.wav", "grammar": "open"}
    funnel = _annotate(tmp_path, **settings, thresholds={"min_pocketsphinx_confidence": 1.0})
    rows = _rows(tmp_path)
    assert sorted(row["text"] for row in rows) == sorted(path.stem for path in backwards.iterdir())
    assert all(row["text_source"] == "given" and row["text_refused"] is None for row in rows)
    assert funnel["recognized_texts"]["refused"] == 0
    assert "Refused in" not in (tmp_path / "report.html").read_text()


def test_what_is_refused_is_not_measured_by_its_text_and_no_rule_of_texts_drops_it(
    tmp_path: Path, backwards: Path, annotated: tuple[Path, dict[str, Any]]
) -> None:
    shutil.copytree(annotated[0], tmp_path, dirs_exist_ok=True)
    steps: dict[str, Any] = {"repetition": {}, "language": {}, "prosody": {}}
    limits = {"min_characters": 500, "languages": ["fi"]}
    _annotate(tmp_path, input=str(backwards), steps=steps, thresholds=limits)
    rows = _rows(tmp_path)
    assert len(rows) == 2
    for row in rows:
        assert not {"repetition", "language"} & set(row["measured"])
        assert row["measured"]["prosody"]["syllables"] is None


@pytest.mark.parametrize("name", list(PRESETS))
def test_every_preset_refuses_by_default(name: str) -> None:
    limits = AnnotationConfig.model_validate({"preset": name}).limits
    assert limits.min_pocketsphinx_confidence is not None and limits.min_pocketsphinx_fit is not None


@pytest.mark.slow
@pytest.mark.skipif(not (SHARED / "speech_zh").is_dir(), reason="no shared data")
def test_chinese_and_a_chainsaw_have_no_text_and_english_keeps_its_own(tmp_path: Path) -> None:
    chainsaw = next((SHARED / "esc10").rglob("3-151080-A.ogg"))
    chinese = next((SHARED / "speech_zh").rglob("BAC009S0764W0121.wav"))
    english = next((SHARED / "ljspeech_32").rglob("LJ001-0016.flac"))
    _annotate(tmp_path, input=[str(chainsaw), str(chinese), str(english)])
    texts: dict[str, str] = {}
    for row in _rows(tmp_path):
        name = Path(row["path"]).name
        texts[name] = f"{texts.get(name, '')} {row['text']}".strip()
    assert texts[chainsaw.name] == texts[chinese.name] == ""
    assert "the middle ages brought" in texts[english.name]


# ------------------------------------------------------------------------------------------------ compose


def test_compose_leaves_refused_segments_out_of_tasks_of_text_and_counts_them_by_reason(
    tmp_path: Path,
) -> None:
    refused = {"kind": "unsure words", "reason": "0.25, the limit is 0.6"}
    rows = [
        {
            "id": f"s{number}", "path": f"/data/{number}.wav", "file": f"{number}.wav", "start_s": 0.0,
            "end_s": 3.0, "speaker": "ann", "split": "test" if number == 1 else "train", "emotion": "calm",
            "text": "" if number > 2 else "said", "text_refused": refused if number > 2 else None,
            "events": ["Speech"],
        }
        for number in range(1, 6)
    ]  # fmt: skip
    source = tmp_path / "segments.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"segments": str(source), "min_seconds": 1}
    alone = COMPOSE.run(ComposeConfig.model_validate(settings), _context(tmp_path / "tts"))
    assert (alone["train_samples"], alone["test_samples"], alone["set_aside"]) == (1, 1, 3)
    aside = _rows(tmp_path / "tts", "set_aside")
    assert {(row["kind"], row["id"]) for row in aside} == {
        ("no text: unsure words", f"s{number}") for number in (3, 4, 5)
    }
    mixed = ComposeConfig.model_validate({**settings, "tasks": {"tts": 1, "tag": 1}})
    both = COMPOSE.run(mixed, _context(tmp_path / "both"))
    assert both["tasks"] == {"tts": 2, "tag": 5}
    assert both["text_refused"] == {"unsure words": 3}


# ------------------------------------------------------------------------------------- rules by recognizer


def _sphinx(text: str, confidence: float | None, fit: float | None) -> Value:
    words = [SpokenWord(word, 0.0, 1.0, confidence) for word in text.split()]
    return {**transcript_value(text, words, "en", None, confidence), "acoustic_fit": fit}


def _judged(values: dict[str, Value], language: str | None = None, share: float = 0.9, **limits: Any) -> Any:
    texts = [value["text"] for value in values.values() if "text" in value]
    agreed = 1.0 if len(set(texts)) == 1 else 0.5
    shares = agreed if len(texts) > 1 else None
    consensus = {"text": max(texts, key=len), "vote_share": shares}
    names = [name for name in values if name != "events"]
    kinds = {name: name.partition("-")[0] for name in names}
    return judge_text({**values, "consensus": consensus}, kinds, language, share, Thresholds(**limits))


SURE, UNSURE = _sphinx("one of the men", 0.9, -2.5), _sphinx("one of the men", 0.2, -2.5)


@pytest.mark.parametrize(
    ("values", "language", "rule"),
    [
        ({"pocketsphinx": SURE}, None, None),
        ({"pocketsphinx": SURE}, "en-GB", None),
        ({"pocketsphinx": SURE}, "fr", "no_foreign_text"),
        ({"pocketsphinx": UNSURE}, None, "min_pocketsphinx_confidence"),
        ({"pocketsphinx": _sphinx("one of the men", 0.9, -6.0)}, None, "min_pocketsphinx_fit"),
        ({"pocketsphinx": _sphinx("men", 0.9, -2.0)}, None, "min_pocketsphinx_words"),
        ({"pocketsphinx": _sphinx("", None, None)}, None, ""),
        # a grammar has no posteriors, and its texts may be single words
        ({"pocketsphinx": _sphinx("seven", None, -2.0)}, None, None),
        ({"pocketsphinx": _sphinx("seven", None, -8.0)}, None, "min_grammar_fit"),
        # of models: their own scale, and nothing is refused for want of a figure
        ({"endpoint": transcript_value("seven")}, None, None),
        ({"audio_llm": transcript_value("你好", language="zh")}, None, None),
        ({"faster_whisper": transcript_value("seven", (), "en", 0.9, 0.6)}, None, None),
        (
            {"faster_whisper": transcript_value("seven", (), "en", 0.3, 0.6)},
            None,
            "min_text_language_probability",
        ),
        ({"faster_whisper": transcript_value("seven", (), "en", 0.9, 0.1)}, None, "min_token_confidence"),
        # Whisper's own signals, whoever runs it: an utterance, and what it writes over a bark, a tone and a cat
        ({"faster_whisper": transcript_value("ten of clubs", (), "en", 0.96, 0.46, -0.77, 0.05)}, None, None),
        ({"transformers": transcript_value("ten of clubs", (), "en", None, 0.46, -0.77, 0.05)}, None, None),
        (
            {"faster_whisper": transcript_value("I'm sorry, " * 14, (), "en", 0.97, 0.6, -0.53, 0.05)},
            None,
            "no_text_loop",
        ),
        (
            {"transformers": transcript_value("no " * 448, (), "en", None, 0.9, -0.1, 0.05)},
            None,
            "no_text_loop",
        ),
        (
            {
                "endpoint": transcript_value(
                    "and we go and we go and we go and we go and we go and we go and we go and we stay"
                )
            },
            None,
            "max_text_compression_ratio",
        ),
        (
            {"faster_whisper": transcript_value("Thank you.", (), "en", 0.97, 0.6, -0.4, 0.77)},
            None,
            "max_no_speech_probability",
        ),
        (
            {"endpoint": transcript_value("Thank you.", (), "en", None, None, None, 0.77)},
            None,
            "max_no_speech_probability",
        ),
        (
            {"transformers": transcript_value("Yeah!", (), "en", None, 0.9, -1.2, 0.05)},
            None,
            "min_mean_log_probability",
        ),
        # sounds, where events were measured
        (
            {"pocketsphinx": SURE, "events": {"tags": [{"label": "Chainsaw", "score": 0.9}]}},
            None,
            "max_text_other_sound",
        ),
        (
            {
                "pocketsphinx": SURE,
                "events": {
                    "tags": [
                        {"label": "Music", "score": 0.9},
                        {"label": "Male speech, man speaking", "score": 0.1},
                    ]
                },
            },
            None,
            None,
        ),
    ],
)
def test_a_text_is_judged_by_the_rules_of_its_recognizer(
    values: dict[str, Value], language: str | None, rule: str | None
) -> None:
    judged = _judged(values, language)
    assert (judged.refused.rule if judged.refused else None) == rule
    assert bool(judged.text) == (rule is None)


def test_more_text_than_a_segment_can_hold_is_a_loop() -> None:
    text = "the quick brown fox jumps over a lazy dog while seven other animals sleep beside every river of this valley"
    value = transcript_value(text, (), "en", 0.97, 0.6, -0.5, 0.05)
    limits = Thresholds()
    values: dict[str, Value] = {"faster_whisper": value, "consensus": {"text": text, "vote_share": None}}
    kinds = {"faster_whisper": "faster_whisper"}
    assert judge_text(values, kinds, None, 0.9, limits, 6.0).refused is None
    refused = judge_text(values, kinds, None, 0.9, limits, 0.5).refused
    assert refused is not None and refused.rule == "no_text_loop" and "can hold" in refused.reason


def test_the_language_of_the_kept_text_is_kept() -> None:
    chinese = transcript_value("你好", (), "zh", 0.95, 0.8, -0.3, 0.05)
    assert _judged({"faster_whisper": chinese}).language == "zh"
    assert _judged({"pocketsphinx": UNSURE, "faster_whisper": chinese}).language == "zh"
    same = transcript_value("one of the men", (), "en", 0.95, 0.8, -0.3, 0.05)
    assert _judged({"endpoint": transcript_value("one of the men"), "faster_whisper": same}).language == "en"
    assert _judged({"faster_whisper": transcript_value("x", (), "nn", 0.2, 0.8, -0.3, 0.05)}).language is None


class Listens:
    """An audio LLM that hears the same in all clips."""

    fingerprint = "1"

    def answer(self, wave: Any, question: str) -> str:
        return "eins zwei drei"


def test_rows_keep_the_recognizers_language_and_the_report_names_its_weights(tmp_path: Path) -> None:
    corpus = CorpusConfig(words=["one"], voices=1, takes=2, test_takes=1)
    speak_corpus(tmp_path / "spoken", corpus, seed=0, on_done=lambda done: None)
    recognizer = {"kind": "audio_llm", "model": f"{__name__}:Listens", "language": "de"}
    settings = {
        "input": str(tmp_path / "spoken"),
        "recognizers": [recognizer],
        "workers": 1,
        "quality_sample": 0,
    }
    folder = tmp_path / "out"
    folder.mkdir()
    recipe = Recipe("test", folder, "tiny", 0, folder, (), {})
    STAGE.run(AnnotationConfig.model_validate(settings), Context(folder, recipe, Console(quiet=True), {}))
    rows = [json.loads(line) for line in (folder / "segments.jsonl").read_text().splitlines()]
    assert rows and all((row["text"], row["language"]) == ("eins zwei drei", "de") for row in rows)
    (weights,) = json.loads((folder / "recognizers.json").read_text())
    assert (weights["name"], weights["weights"]) == ("audio_llm", f"{__name__}:Listens")
    assert f"{__name__}:Listens" in (folder / "report.html").read_text()


def test_a_published_whisper_writes_nothing_over_barks_and_tones_and_keeps_its_language(
    tmp_path: Path,
) -> None:
    """Kept before: "I'm sorry, I'm sorry, …", without a language."""
    pytest.importorskip("faster_whisper", reason="faster-whisper is not installed (extra whisper)")
    weights = Path(os.environ.get("AUDIOLLM_REAL") or "") / "whisper-base" / "ctranslate2"
    chinese = SHARED / "speech_zh" / "speech_recognition" / "tests" / "chinese.flac"
    if not os.environ.get("AUDIOLLM_REAL") or not weights.is_dir() or not chinese.is_file():
        pytest.skip("AUDIOLLM_REAL names no folder with whisper-base, or the recordings are not there")
    barks = [
        path for name in ("2-122104-A", "4-182368-A") for path in (SHARED / "esc10").rglob(f"{name}.ogg")
    ]
    time_N = np.arange(5 * 16000) / 16000
    soundfile.write(tmp_path / "tone.wav", 0.3 * np.sin(2 * np.pi * 120 * time_N), 16000)
    recognizer = {"kind": "faster_whisper", "model": weights, "beam_size": 1, "word_timestamps": False}
    inputs = [str(path) for path in (*barks, tmp_path / "tone.wav", chinese)]
    folder = tmp_path / "out"
    folder.mkdir()
    config = {"input": inputs, "recognizers": [recognizer], "workers": 1, "quality_sample": 0}
    recipe = Recipe("test", folder, "tiny", 0, folder, (), {})
    STAGE.run(AnnotationConfig.model_validate(config), Context(folder, recipe, Console(quiet=True), {}))
    rows = [json.loads(line) for line in (folder / "segments.jsonl").read_text().splitlines()]
    spoken = [row for row in rows if "chinese" in row["path"]]
    assert len(rows) > len(spoken) == 1
    assert spoken[0]["text"] and spoken[0]["language"] == "zh"
    assert not any(row["text"] or row["language"] for row in rows if row not in spoken)
    (named,) = json.loads((folder / "recognizers.json").read_text())
    assert named["weights"] == "whisper-base/ctranslate2" and len(named["digest"]) == 12


def test_of_several_recognizers_those_that_are_not_trusted_do_not_count() -> None:
    chinese = transcript_value("你好", (), "zh", 0.95, 0.8)
    judged = _judged({"pocketsphinx": SURE, "faster_whisper": chinese})
    assert (judged.text, judged.source, judged.refused) == ("你好", "faster_whisper", None)
    other = transcript_value("quite another thing", (), "en", 0.95, 0.8)
    judged = _judged({"pocketsphinx": SURE, "faster_whisper": other})
    assert judged.refused.rule == "min_text_vote_share" and not judged.text
    same = transcript_value("one of the men", (), "en", 0.95, 0.8)
    assert _judged({"pocketsphinx": SURE, "faster_whisper": same}).source == "consensus"
    assert _judged({"pocketsphinx": UNSURE, "faster_whisper": same}).source == "faster_whisper"
    none = _judged({"pocketsphinx": UNSURE, "faster_whisper": transcript_value("x", (), "en", 0.95, 0.01)})
    assert none.refused.rule == "min_pocketsphinx_confidence"


def test_text_on_hardly_any_speech_is_refused_and_a_threshold_of_null_refuses_nothing() -> None:
    assert _judged({"pocketsphinx": SURE}, share=0.05).refused.rule == "min_text_speech_share"
    assert _judged({"pocketsphinx": SURE}, share=0.05, min_text_speech_share=None).refused is None
