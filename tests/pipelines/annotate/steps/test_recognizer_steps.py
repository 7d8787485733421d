"""Every kind of recognizer on models that are made here: what others decode with them is the oracle."""

from __future__ import annotations

import importlib.util
import io
import json
import logging
import os
import re
import zlib
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from audiollm.errors import ConfigError
from audiollm.models.recognition.ctc import joined_tokens
from audiollm.models.recognition.cutting import cut_points
from audiollm.models.recognition.transcript import SpokenWord
from pipelines.annotate.recognizers.choice import RecognizerChoice, make_recognizer
from pipelines.annotate.recognizers.folder_models import unquoted
from pipelines.annotate.recognizers.value import transcript_value
from pipelines.annotate.step import RecordingMetadata, Segment
from pipelines.steps.step import Listener
from tests.audiollm.supervised.heard_samples import small_model, small_template
from tests.pipelines.annotate.steps.tiny_recognizers import check, ctc_folder, made, segment, whisper_folder

SHARED = Path(
    os.environ.get("AUDIOLLM_SHARED_DATA") or Path(__file__).resolve().parents[5] / "shared" / "data"
)


# ---------------------------------------------------------------------------------------------- settings


def test_a_kind_that_is_not_there_and_a_setting_of_another_kind_are_refused() -> None:
    for settings in (
        {"kind": "kaldi"},
        {"kind": "pocketsphinx", "model": "x"},
        {"kind": "endpoint", "url": "x"},
    ):
        with pytest.raises(ValidationError):
            TypeAdapter(RecognizerChoice).validate_python(settings)


@pytest.mark.parametrize("url", ["localhost:8000", "file:///etc", "http://me:secret@host/v1"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValidationError, match="address"):
        TypeAdapter(RecognizerChoice).validate_python({"kind": "chat_endpoint", "url": url, "model": "m"})


@pytest.mark.parametrize("kind", ["faster_whisper", "transformers", "audio_llm"])
def test_a_model_that_is_not_there_is_named_with_its_setting(kind: str, tmp_path: Path) -> None:
    settings = {"kind": kind, "name": "mine", "model": str(tmp_path / "gone")}
    step = make_recognizer(TypeAdapter(RecognizerChoice).validate_python(settings))
    assert step.name == "mine"
    if kind != "faster_whisper" or importlib.util.find_spec("faster_whisper"):
        assert (step.missing() or "").startswith("mine.model: ") and "gone" in (step.missing() or "")
    with pytest.raises(ConfigError):
        step.setup()


def test_a_name_cannot_leave_its_folder() -> None:
    for name in ("../x", "a/b", "", "."):
        with pytest.raises(ValidationError):
            TypeAdapter(RecognizerChoice).validate_python({"kind": "pocketsphinx", "name": name})


# ------------------------------------------------------------------------------------------------- value


def test_broken_figures_are_left_out_of_a_value() -> None:
    words = [SpokenWord(" a", float("nan"), -1.0, 1.2), SpokenWord("b", 0.12345, float("inf"), None)]
    value = transcript_value(" a \n b ", words, "en", float("nan"), -0.1, float("-inf"), 1.5)
    assert value == {
        "text": "a b",
        "language": "en",
        "language_probability": None,
        "words": [
            {"word": "a", "start_s": None, "end_s": 0.0, "confidence": 1.0},
            {"word": "b", "start_s": 0.123, "end_s": None, "confidence": None},
        ],
        "confidence": 0.0,
        "mean_log_probability": None,
        "no_speech_probability": 1.0,
        "compression_ratio": round(3 / len(zlib.compress(b"a b")), 3),
    }


@given(st.integers(0, 5000), st.integers(0, 3))
def test_cuts_cover_the_sound_in_pieces_that_are_short_enough(count: int, seed: int) -> None:
    cuts = cut_points(np.random.default_rng(seed).normal(size=count).astype(np.float32), 100, 5.0)
    assert cuts[0] == 0 and cuts[-1] == count
    assert all(0 < b - a <= 500 for a, b in pairwise(cuts)) or count == 0


def test_cuts_are_where_it_is_quiet() -> None:
    samples_N = np.ones(900, np.float32)
    samples_N[440:444] = 0
    assert cut_points(samples_N, 100, 5.0)[1] in range(440, 445)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ('"Hello there."', "Hello there."),
        ("“Hi”", "Hi"),
        ('"Yes" and "no"', '"Yes" and "no"'),
        ("it's", "it's"),
        ('"', '"'),
    ],
)
def test_quotation_marks_around_an_answer_are_taken_off(answer: str, text: str) -> None:
    assert unquoted(answer) == text


@pytest.mark.parametrize(("tokens", "delimiter"), [("A B|C", "|"), ("▁A B ▁C", None), ("A B ĠC", None)])
def test_tokens_are_joined_into_words(tokens: str, delimiter: str | None) -> None:
    pieces = re.findall(r"\||[▁Ġ]?\w", tokens.replace(" ", ""))
    spoken = [SpokenWord(piece, i, i + 1, 0.1 * i) for i, piece in enumerate(pieces)]
    first, second = joined_tokens(spoken, delimiter)
    assert (first.word, first.start_s, first.end_s) == ("AB", 0, 2) and first.confidence == pytest.approx(
        0.05
    )
    assert second.word == "C"


# ------------------------------------------------------------------------------------------ pocketsphinx


def _fsdd(name: str) -> Segment:
    path = SHARED / "fsdd" / "recordings" / name
    if not path.is_file():
        pytest.skip(f"no digit recordings at {path}")
    return Segment(
        str(path),
        0.0,
        soundfile.info(path).duration,
        "speech",
        None,
        RecordingMetadata(),
        {},
        Listener(str(path)),
    )


def test_pocketsphinx_hears_a_digit_with_its_time() -> None:
    said = _fsdd("7_jackson_3.wav")
    value = made(kind="pocketsphinx", grammar=["seven", "nine"]).process(said)
    assert (value["text"], value["language"], value["confidence"]) == ("seven", "en", None)
    check(value, said.duration_s)
    assert value["words"][0]["end_s"] - value["words"][0]["start_s"] > 0.2


def test_pocketsphinx_with_the_open_vocabulary_says_how_sure_it_is() -> None:
    path = SHARED / "ljspeech_32" / "wavs" / "LJ001-0002.flac"
    if not path.is_file():
        pytest.skip(f"no read speech at {path}")
    said = Segment(
        str(path),
        0.0,
        soundfile.info(path).duration,
        "speech",
        None,
        RecordingMetadata(),
        {},
        Listener(str(path)),
    )
    value = made(kind="pocketsphinx").process(said)
    assert value["text"].endswith("being comparatively modern")  # "in" is heard as "him"
    check(value, said.duration_s)
    assert (
        0.2 < value["confidence"] < 1 and [word["word"] for word in value["words"]] == value["text"].split()
    )


def test_pocketsphinx_hears_nothing_in_silence(tmp_path: Path) -> None:
    value = made(kind="pocketsphinx", grammar=["seven"]).process(segment(tmp_path, 0.01))
    assert (value["text"], value["words"], value["confidence"]) == ("", [], None)


def test_times_are_of_one_decoding_alone() -> None:
    from audiollm.evaluate.judges.recognizers import PocketsphinxRecognizer

    with pytest.raises(ValueError, match="votes=1"):
        PocketsphinxRecognizer(["seven"], votes=3).recognize_words(torch.zeros(1, 8000), 8000)


# ------------------------------------------------------------------------------------------ transformers


@pytest.mark.parametrize("tells_padding", [True, False])
def test_ctc_writes_what_transformers_decodes(tmp_path: Path, tells_padding: bool) -> None:
    from transformers import Wav2Vec2ForCTC, Wav2Vec2Processor

    folder = ctc_folder(tmp_path / "ctc", tells_padding)
    clips = [segment(tmp_path, seconds, seed) for seed, seconds in enumerate((1.0, 0.4, 1.7))]
    step = made(kind="transformers", model=folder, batch_size=3)
    found = step.process_batch(clips)
    processor, model = (
        Wav2Vec2Processor.from_pretrained(folder),
        Wav2Vec2ForCTC.from_pretrained(folder).eval(),
    )
    for clip, value in zip(clips, found, strict=True):
        inputs = processor(clip.samples(16_000), sampling_rate=16_000, return_tensors="pt")
        with torch.no_grad():
            logits_TV = model(**inputs).logits[0]
        wanted = processor.tokenizer.decode(logits_TV.argmax(-1), output_word_offsets=True)
        check(value, clip.duration_s)
        assert len(value["text"]) > 3 and value["text"] == wanted["text"]
        frame_s = clip.duration_s / len(logits_TV)
        for word, offset in zip(value["words"], wanted["word_offsets"], strict=True):
            assert word["word"] == offset["word"]
            assert word["start_s"] == pytest.approx(offset["start_offset"] * frame_s, abs=2e-3)
            assert word["end_s"] == pytest.approx(offset["end_offset"] * frame_s, abs=frame_s + 2e-3)
        alone = step.process(clip)
        assert alone["text"] == value["text"]
        assert alone["confidence"] == pytest.approx(value["confidence"], abs=2e-3)


def test_ctc_cuts_long_sound_and_keeps_time(tmp_path: Path) -> None:
    step = made(kind="transformers", model=ctc_folder(tmp_path / "ctc"), language="en")
    long = segment(tmp_path, 65.0)
    value = step.process(long)
    check(value, 65.0)
    starts = [word["start_s"] for word in value["words"]]
    assert starts == sorted(starts) and starts[-1] > 55 and value["language"] == "en"


def test_whisper_writes_what_transformers_decodes_and_how_sure_it_is(tmp_path: Path) -> None:
    from transformers import WhisperForConditionalGeneration, WhisperProcessor

    folder = whisper_folder(tmp_path / "whisper")
    step = made(kind="transformers", model=folder, batch_size=2, max_tokens=12)
    clips = [segment(tmp_path, 1.0, 0), segment(tmp_path, 2.0, 1)]
    processor = WhisperProcessor.from_pretrained(folder)
    model = WhisperForConditionalGeneration.from_pretrained(folder).eval()
    for clip, value in zip(clips, step.process_batch(clips), strict=True):
        inputs = processor(clip.samples(16_000), sampling_rate=16_000, return_tensors="pt")
        made_1S = model.generate(**inputs, task="transcribe", max_new_tokens=12)
        wanted = processor.batch_decode(made_1S, skip_special_tokens=True)[0]
        assert len(value["text"]) > 3 and value["text"] == " ".join(wanted.split())
        check(value, clip.duration_s)
        language = model.detect_language(inputs.input_features)[0]
        assert f"<|{value['language']}|>" == processor.tokenizer.convert_ids_to_tokens([int(language)])[0]
        assert 1 / 99 <= value["language_probability"] < 1
        prompt = processor.tokenizer.convert_tokens_to_ids(
            ["<|startoftranscript|>", f"<|{value['language']}|>", "<|transcribe|>", "<|notimestamps|>"]
        )
        written = processor.tokenizer(wanted, add_special_tokens=False).input_ids
        with torch.no_grad():  # the probability of each letter when the text is given
            logits_SV = model(
                inputs.input_features, decoder_input_ids=torch.tensor([[*prompt, *written]])
            ).logits[0]
        sure_S = logits_SV[3:-1].softmax(-1)[range(len(written)), written]
        letters = [float(sure) for sure, token in zip(sure_S, written, strict=True)]
        weights = [word["confidence"] * (len(word["word"]) + 1) for word in value["words"]]
        spaces = sum(len(word["word"]) + 1 for word in value["words"])
        assert sum(weights) / spaces == pytest.approx(sum(letters) / len(letters), abs=0.08)


def test_a_whisper_that_suppresses_tokens_writes_no_warning_of_its_library(tmp_path: Path) -> None:
    folder = whisper_folder(tmp_path / "whisper")
    settings = json.loads((folder / "generation_config.json").read_text())
    settings |= {"suppress_tokens": [5], "begin_suppress_tokens": [6]}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    logger, stream = logging.getLogger("transformers"), io.StringIO()
    logger.addHandler(handler := logging.StreamHandler(stream))
    level = logger.level
    logger.setLevel(logging.WARNING)  # a test before this one may have asked the library for errors alone
    try:
        made(kind="transformers", model=folder, max_tokens=4).process(segment(tmp_path, 0.5))
        logging.getLogger("transformers.generation.utils").warning("another warning")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert stream.getvalue() == "another warning\n"


def test_a_told_language_is_kept(tmp_path: Path) -> None:
    step = made(kind="transformers", model=whisper_folder(tmp_path / "w"), language="fr", max_tokens=4)
    value = step.process(segment(tmp_path, 0.5))
    assert (value["language"], value["language_probability"]) == ("fr", None)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    folder = ctc_folder(tmp_path / "ctc")
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="CTC model"):
        made(kind="transformers", model=folder)


# ---------------------------------------------------------------------------------------- faster-whisper


@pytest.fixture(scope="module")
def ct2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("faster_whisper", reason="faster-whisper is not installed (extra whisper)")
    from ctranslate2.converters import TransformersConverter

    folder = tmp_path_factory.mktemp("whisper")
    made = whisper_folder(folder / "transformers")
    copied = ["tokenizer.json", "preprocessor_config.json"]
    TransformersConverter(str(made), copy_files=copied).convert(str(folder / "ct2"))
    return folder / "ct2"


def test_faster_whisper_tells_words_language_and_confidence(ct2_folder: Path, tmp_path: Path) -> None:
    step = made(kind="faster_whisper", model=ct2_folder, beam_size=1)
    said = segment(tmp_path, 3.0)
    value = step.process(said)
    check(value, 3.0)
    assert value["text"] and value["words"] and value["confidence"] is not None
    # CTranslate2 takes so small a vocabulary for that of an English model
    assert (value["language"], value["language_probability"]) == ("en", 1.0)
    assert step.process(said) == value
    told = made(kind="faster_whisper", model=ct2_folder, language="en", word_timestamps=False)
    other = told.process(said)
    assert (other["language"], other["language_probability"], other["words"]) == ("en", None, [])


@pytest.mark.parametrize("lost", ["model.bin", "tokenizer.json"])
def test_faster_whisper_is_not_asked_to_look_on_the_hub(ct2_folder: Path, tmp_path: Path, lost: str) -> None:
    for path in ct2_folder.iterdir():
        if path.name != lost:
            (tmp_path / path.name).symlink_to(path)
    settings = {"kind": "faster_whisper", "model": str(tmp_path)}
    step = make_recognizer(TypeAdapter(RecognizerChoice).validate_python(settings))
    assert f"holds no {lost}" in (step.missing() or "")
    with pytest.raises(ConfigError, match=lost):
        step.setup()


# --------------------------------------------------------------------------------------------- audio LLM


def test_our_own_checkpoint_is_asked_what_is_said(tmp_path: Path) -> None:
    from audiollm.generation.speaking.generator import Generator
    from audiollm.models.hub import save_pretrained

    template = small_template()
    save_pretrained(small_model(template).float(), tmp_path / "run" / "train" / "model", template.tokenizer)
    stage = tmp_path / "run" / "train"
    said = segment(tmp_path, 0.5)
    step = made(kind="audio_llm", model=str(stage), prompt="what is it?", max_tokens=5, language="en")
    wanted = Generator.from_pretrained(stage).answer(said.waveform(), "what is it?", max_tokens=5)
    value = step.process(said)
    assert value["text"] == " ".join(wanted.split()) and (value["language"], value["words"]) == ("en", [])
