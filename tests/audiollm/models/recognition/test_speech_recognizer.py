"""One call for recognizers of transformers: stored dtypes, languages and tasks, long clips, published weights."""

from __future__ import annotations

import json
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import jiwer
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from audiollm.audio import load
from audiollm.errors import ConfigError
from audiollm.evaluate.judges.choosing import choose_recognizer
from audiollm.evaluate.judges.judging import judge_label
from audiollm.evaluate.report.text_errors import choose_form
from audiollm.models.recognition import ctranslate2_whisper
from audiollm.models.recognition.recognizer import SpeechRecognizer
from audiollm.models.recognition.transcript import RecognizedSpeech, SpokenWord, join_transcripts
from tests.audiollm.half_precision import DTYPES, stored_as
from tests.pipelines.annotate.steps.tiny_recognizers import ctc_folder, made, segment, whisper_folder

SHARED = Path(
    os.environ.get("AUDIOLLM_SHARED_DATA") or Path(__file__).resolve().parents[5] / "shared" / "data"
)
SPEECH = SHARED / "ljspeech_32"


def noise(seconds: float, seed: int = 0) -> NDArray[np.float32]:
    samples_N: NDArray[np.float64] = np.random.default_rng(seed).normal(0, 0.1, int(16_000 * seconds))
    return samples_N.astype(np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["whisper", "ctc"])
def test_weights_stored_in_half_precision_are_heard_with(tmp_path: Path, kind: str, dtype: str) -> None:
    folder = {"whisper": whisper_folder, "ctc": ctc_folder}[kind](tmp_path / kind)
    clips = [noise(1.0), noise(2.0, 1)]
    whole = SpeechRecognizer(folder, max_tokens=12).transcribe(clips)
    half = stored_as(folder, dtype)
    for transcript, reference in zip(SpeechRecognizer(half).transcribe(clips), whole, strict=True):
        assert len(transcript.text) > 3 and transcript.language == reference.language
    step = made(kind="transformers", model=half, batch_size=2, max_tokens=12)
    judge = choose_recognizer(str(half))
    assert judge is not None
    said = segment(tmp_path, 1.0)
    heard = judge.judge.recognize(torch.from_numpy(said.samples(16_000).copy())[None], 16_000)
    text = step.process(said)["text"]
    assert heard == SpeechRecognizer(half).transcribe([said.samples(16_000).copy()])[0].text
    assert len(text) > 3 and heard.startswith(text)  # the step stops after 12 tokens


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["whisper", "ctc"])
def test_a_model_that_computes_in_half_precision_gets_inputs_that_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, dtype: str
) -> None:
    """As on a GPU, where weights keep the dtype in which they are stored."""
    from audiollm.files import transformers_folders

    monkeypatch.setattr(transformers_folders, "working_dtype", lambda device: "auto")
    folder = stored_as({"whisper": whisper_folder, "ctc": ctc_folder}[kind](tmp_path / kind), dtype)
    recognizer: Any = SpeechRecognizer(folder, max_tokens=12)
    inner = recognizer._model._model
    assert getattr(inner, "_model", inner).dtype == DTYPES[dtype]
    transcript = recognizer.transcribe([noise(1.0)])[0]
    assert len(transcript.text) > 3 and 0 < (transcript.confidence or 0) <= 1


def whisper_prompts(recognizer: SpeechRecognizer, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of every call of `generate`, filled as the recognizer is used."""
    inner: Any = recognizer._model
    generate, calls = inner._model.generate, []

    def watched(**arguments: Any) -> Any:
        calls.append(arguments)
        return generate(**arguments)

    monkeypatch.setattr(inner._model, "generate", watched)
    return calls


@pytest.mark.parametrize(
    ("language", "prompted"), [("fr", "fr"), ("French", "fr"), ("pt-BR", "pt"), ("tlh", None), (None, None)]
)
def test_a_multilingual_whisper_is_given_task_and_language(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, language: str | None, prompted: str | None
) -> None:
    recognizer = SpeechRecognizer(whisper_folder(tmp_path / "w"), language, max_tokens=4)
    calls = whisper_prompts(recognizer, monkeypatch)
    transcript = recognizer.transcribe([noise(0.5)])[0]
    detected = transcript.language
    assert calls[0]["task"] == "transcribe" and calls[0]["language"] == [prompted or detected]
    assert (transcript.language_probability is None) == (prompted is not None)
    assert detected is not None and (prompted is None or detected == prompted)


def test_an_english_only_whisper_is_given_neither(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = whisper_folder(tmp_path / "w")
    path = folder / "generation_config.json"
    settings = json.loads(path.read_text()) | {"is_multilingual": False}
    path.write_text(json.dumps({k: v for k, v in settings.items() if k not in ("lang_to_id", "task_to_id")}))
    recognizer = SpeechRecognizer(folder, "de", max_tokens=4)
    calls = whisper_prompts(recognizer, monkeypatch)
    transcript = recognizer.transcribe([noise(0.5)])[0]
    assert calls[0].keys().isdisjoint({"task", "language"}) and len(transcript.text) > 1
    assert SpeechRecognizer(folder, max_tokens=4).transcribe([noise(0.5)])[0].language == "en"


def test_an_old_generation_config_is_completed_from_the_tokenizer(tmp_path: Path) -> None:
    """As whisper-small was published at first: `forced_decoder_ids`, no table of languages."""
    folder = whisper_folder(tmp_path / "w")
    clip = noise(1.0)
    expected = SpeechRecognizer(folder, "fr", max_tokens=8).transcribe([clip])
    path = folder / "generation_config.json"
    settings = json.loads(path.read_text())
    removed = ("lang_to_id", "task_to_id", "is_multilingual", "no_timestamps_token_id")
    old = {key: value for key, value in settings.items() if key not in removed}
    english, task = settings["lang_to_id"]["<|en|>"], settings["task_to_id"]["translate"]
    path.write_text(json.dumps({**old, "forced_decoder_ids": [[1, english], [2, task]]}))
    assert SpeechRecognizer(folder, "fr", max_tokens=8).transcribe([clip]) == expected


def test_long_clips_are_heard_to_their_end(tmp_path: Path) -> None:
    recognizer = SpeechRecognizer(whisper_folder(tmp_path / "w"), max_tokens=4)
    pieces = recognizer.transcribe([noise(65.0)])[0]
    assert len(pieces.words) >= 3 and pieces.num_tokens == 12 and pieces.mean_log_probability is not None
    assert 0 < (pieces.no_speech_probability or 0) < 1


def test_signals_of_pieces_are_joined() -> None:
    first = RecognizedSpeech(" a", (SpokenWord("a", None, None, 0.5),), "en", 0.9, -0.2, 3, 0.8)
    second = RecognizedSpeech(" b ", (), "fr", 0.6, -0.5, 1, 0.1)
    joined = join_transcripts([first, second])
    assert (joined.text, joined.language, joined.num_tokens) == ("a b", "en", 4)
    assert joined.mean_log_probability == pytest.approx((3 * -0.2 - 0.5) / 4)
    assert joined.no_speech_probability == 0.1 and joined.confidence == 0.5


def test_a_judge_is_named_as_in_annotate_and_another_kind_is_refused(tmp_path: Path) -> None:
    folder = ctc_folder(tmp_path / "ctc")
    plain, named = choose_recognizer(str(folder)), choose_recognizer(f"transformers={folder}")
    assert plain is not None and named is not None and plain.fingerprint == named.fingerprint
    with pytest.raises(ConfigError, match="'endpoint' is not opened from a folder") as refused:
        choose_recognizer("endpoint=whisper-1@http://localhost:8000/v1")
    assert "faster_whisper=FOLDER" in refused.value.remedy


@pytest.mark.parametrize("prefix", ["", "faster_whisper="])
def test_a_whisper_of_ctranslate2_is_opened_by_faster_whisper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: str
) -> None:
    """faster-whisper is an extra: its interface, as it is published, stands in its place."""
    opened: dict[str, Any] = {}

    class WhisperModel:
        def __init__(self, folder: str, **options: Any) -> None:
            opened.update(folder=folder, **options)

        def transcribe(self, samples_N: NDArray[np.float32], **options: Any) -> tuple[Any, Any]:
            opened.update(samples=len(samples_N), **options)
            parts = [
                SimpleNamespace(text=text, words=None, tokens=[1, 2], avg_logprob=-0.5, no_speech_prob=0.1)
                for text in (" seven", " eight")
            ]
            return iter(parts), SimpleNamespace(language="en", language_probability=0.9)

    monkeypatch.setitem(sys.modules, "faster_whisper", ModuleType("faster_whisper"))
    sys.modules["faster_whisper"].WhisperModel = WhisperModel  # type: ignore[attr-defined]
    sys.modules["faster_whisper"].__spec__ = ModuleSpec("faster_whisper", None)
    for name in ("model.bin", "config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    chosen = choose_recognizer(f"{prefix}{tmp_path}", "en")
    assert chosen is not None
    assert chosen.judge.recognize(torch.zeros(2, 8000), 8000) == "seven eight"
    assert (opened["folder"], opened["local_files_only"]) == (str(tmp_path), True)
    assert (opened["samples"], opened["language"], opened["temperature"]) == (16_000, "en", 0.0)
    assert judge_label(chosen.judge) == f"{tmp_path.name} ({tmp_path})"


def test_what_a_whisper_of_ctranslate2_lacks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.bin").write_bytes(b"")
    monkeypatch.setattr(ctranslate2_whisper.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="package faster-whisper is not here"):
        choose_recognizer(f"faster_whisper={tmp_path}")
    monkeypatch.setattr(ctranslate2_whisper.importlib.util, "find_spec", lambda name: object())
    with pytest.raises(ConfigError, match=r"holds no config\.json and no tokenizer\.json"):
        choose_recognizer(str(tmp_path))


def test_a_folder_without_a_recognizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no speech recognizer loads from .*gone: no such folder"):
        SpeechRecognizer(tmp_path / "gone")
    folder = whisper_folder(tmp_path / "w")
    weights = next(folder.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ConfigError, match="no speech recognizer loads"):
        SpeechRecognizer(folder)


def test_a_folder_that_lacks_weights_is_refused(tmp_path: Path) -> None:
    """transformers would draw them at random, and say so in its log alone."""
    folder = whisper_folder(tmp_path / "w")
    (path,) = folder.glob("*.safetensors")
    weights = load_file(path)
    name = next(name for name in weights if name.endswith("encoder.layers.1.fc1.weight"))
    save_file({key: value for key, value in weights.items() if key != name}, path, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"1 weights are missing.*encoder\.layers\.1\.fc1\.weight"):
        SpeechRecognizer(folder)


# ------------------------------------------------------------------------------------- published weights


def published(name: str) -> SpeechRecognizer:
    folder = Path(os.environ.get("AUDIOLLM_REAL") or "") / name
    if not (folder / "model.safetensors").is_file():
        pytest.skip(f"AUDIOLLM_REAL names no folder with {name}")
    if not (SPEECH / "metadata.csv").is_file():
        pytest.skip(f"no read speech at {SPEECH}")
    return SpeechRecognizer(folder)


def read_speech(names: list[str]) -> tuple[list[NDArray[np.float32]], str]:
    lines = (SPEECH / "metadata.csv").read_text(encoding="utf-8").splitlines()
    texts = {line.split("|")[0]: line.split("|")[2] for line in lines}
    clips = [load(SPEECH / "wavs" / f"{name}.flac", mono=True).resample(16_000) for name in names]
    return [clip.samples_CN[0].numpy() for clip in clips], " ".join(texts[name] for name in names)


@pytest.mark.parametrize("name", ["whisper-base", "whisper-tiny.en"])
def test_published_weights_hear_read_speech(name: str) -> None:
    recognizer, (clips, text) = published(name), read_speech(["LJ001-0002", "LJ001-0004"])
    transcripts = recognizer.transcribe(clips)
    form = choose_form("whisper", "en").apply
    assert jiwer.wer(form(text), form(" ".join(t.text for t in transcripts))) <= 0.1
    for transcript in transcripts:
        assert transcript.language == "en" and (transcript.no_speech_probability or 1) < 0.1
        assert (transcript.mean_log_probability or -9) > -0.3


def test_published_weights_hear_more_than_thirty_seconds() -> None:
    recognizer = published("whisper-tiny.en")
    clips, text = read_speech([f"LJ001-{number:04}" for number in (1, 3, 4, 5, 6, 7)])
    (transcript,) = recognizer.transcribe([np.concatenate(clips)])
    form = choose_form("whisper", "en").apply
    assert sum(map(len, clips)) > 32 * 16_000
    assert jiwer.wer(form(text), form(transcript.text)) <= 0.2
