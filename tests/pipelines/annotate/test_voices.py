"""hibari and Kokoro: mixtures of styles by name, pieces of long texts, and folders that lack something.

Kokoro stands here as a tiny graph with the inputs of the published one: 60 ms of a tone per phoneme, whose pitch and
level the style sets.

Shapes: P positions, S style values.
"""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from audiollm.audio.pitch import track_pitch
from audiollm.errors import ConfigError
from pipelines.annotate.execution.config import AnnotationConfig
from pipelines.annotate.execution.plan import plan_annotation
from pipelines.annotate.synthesizers import synthesizer as synthesizers
from pipelines.annotate.synthesizers.hibari import HibariSynthesizer
from pipelines.annotate.synthesizers.kokoro import KokoroSynthesizer, draw_mixtures, parse_mixture
from pipelines.annotate.synthesizers.synthesizer import SpeechFault, check_speech

TEXT = "The north wind and the sun were quarrelling."
STYLES = ("af_low", "am_mid", "bf_high")
MAX_PHONEMES, SAMPLES_PER_TOKEN = 60, 1440


@pytest.fixture(scope="module")
def kokoro(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kokoro")
    _write_model(folder / "model.onnx")
    letters = "abcdefghijklmnopqrstuvwxyzæðŋɐɑɔəɛɜɡɪɹɾʃʊʌʒʤʧˈˌːθᵊAIOQSTWY .,!?;:—"
    (folder / "vocab.json").write_text(json.dumps({"vocab": {c: n + 1 for n, c in enumerate(letters)}}))
    np.savez(folder / "voices.npz", **_styles())
    return folder


def _styles() -> dict[str, NDArray[np.float32]]:
    """Frequency in Hz and level; the level also says how many phonemes the row is for."""
    rows = np.arange(1, MAX_PHONEMES + 1, dtype=np.float32) / 1000
    values = zip(STYLES, (100.0, 150.0, 220.0), strict=True)
    return {name: np.stack([np.full_like(rows, hz), 0.2 + rows], axis=1)[:, None] for name, hz in values}


def _write_model(path: Path) -> None:
    """`audio = level * sin(2 pi hz n / 24000)` for n below 1440 samples per token, over the speed."""
    from onnx import TensorProto, helper, save_model

    def constant(name: str, values: NDArray[np.generic]) -> object:
        return helper.make_node("Constant", [], [name], value=helper.make_tensor(
            name, helper.np_dtype_to_tensor_dtype(values.dtype), values.shape, values.reshape(-1)))  # fmt: skip

    nodes = [
        constant("per_token", np.array(float(SAMPLES_PER_TOKEN), np.float32)),
        constant("step", np.array(2 * np.pi / 24000, np.float32)),
        constant("zero", np.array(0.0, np.float32)),
        constant("one", np.array(1.0, np.float32)),
        constant("index0", np.array(0)),
        constant("index1", np.array(1)),
        helper.make_node("Size", ["tokens"], ["count"]),
        helper.make_node("Cast", ["count"], ["count_f"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["count_f", "per_token"], ["length"]),
        helper.make_node("ReduceMean", ["speed"], ["speed0"], keepdims=0),
        helper.make_node("Div", ["length", "speed0"], ["end"]),
        helper.make_node("Range", ["zero", "end", "one"], ["n"]),
        helper.make_node("Gather", ["style", "index0"], ["hz"], axis=1),
        helper.make_node("Gather", ["style", "index1"], ["level"], axis=1),
        helper.make_node("Mul", ["n", "hz"], ["turns"]),
        helper.make_node("Mul", ["turns", "step"], ["phase"]),
        helper.make_node("Sin", ["phase"], ["tone"]),
        helper.make_node("Mul", ["tone", "level"], ["audio"]),
    ]
    inputs = [
        helper.make_tensor_value_info("tokens", TensorProto.INT64, [1, "length"]),
        helper.make_tensor_value_info("style", TensorProto.FLOAT, [1, 2]),
        helper.make_tensor_value_info("speed", TensorProto.FLOAT, [1]),
    ]
    output = helper.make_tensor_value_info("audio", TensorProto.FLOAT, ["samples"])
    graph = helper.make_graph(nodes, "kokoro", inputs, [output])
    save_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), str(path))


def _hz(samples_N: NDArray[np.float32]) -> float:
    spectrum = np.abs(np.fft.rfft(samples_N, 240_000))
    return float(np.argmax(spectrum)) / 10


# ---------------------------------------------------------------------------------------------- mixtures


@pytest.mark.parametrize(
    ("name", "mixture"),
    [
        ("am_mid", {"am_mid": 100}),
        ("70af_low+30am_mid", {"af_low": 70, "am_mid": 30}),
        ("130bf_high-30am_mid", {"bf_high": 130, "am_mid": -30}),
        ("60af_low+60am_mid-20bf_high", {"af_low": 60, "am_mid": 60, "bf_high": -20}),
    ],
)
def test_a_name_says_its_mixture(name: str, mixture: dict[str, int]) -> None:
    assert parse_mixture(name, dict.fromkeys(STYLES)) == mixture


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("theo", "neither a style nor a mixture as in 70af_heart"),
        ("70af_low 30am_mid", "neither a style nor a mixture"),
        ("70af_low+30nobody", "no style 'nobody'; known: af_low, am_mid, bf_high"),
        ("70af_low+40am_mid", "110 percent in all"),
    ],
)
def test_names_that_say_no_mixture(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_mixture(name, dict.fromkeys(STYLES))


def test_mixtures_are_drawn_apart_and_repeat() -> None:
    random = np.random.default_rng(0)
    styles = {name: random.normal(size=8).astype(np.float32) for name in (*STYLES, "jf_d", "jm_e")}
    names = draw_mixtures(styles, 100, 0)
    assert len(set(names)) == 100
    assert draw_mixtures(styles, 30, 0) == names[:30] != draw_mixtures(styles, 30, 1)
    mixtures = [parse_mixture(name, styles) for name in names]
    percents = [percent for mixture in mixtures for percent in mixture.values()]
    assert min(percents) >= -35 and max(percents) <= 160 and min(percents) < 0
    assert all(len(mixture) <= 3 for mixture in mixtures)
    points = np.array([[mixture.get(name, 0) for name in styles] for mixture in mixtures])
    apart = np.abs(points[:, None] - points[None]).sum(axis=2)[np.triu_indices(100, 1)]
    assert apart.min() >= 10
    with pytest.raises(ValueError, match="mixtures need two styles"):
        draw_mixtures({"af_low": styles["af_low"]}, 3, 0)
    with pytest.raises(ValueError, match="there are only"):
        draw_mixtures({name: styles[name] for name in STYLES[:2]}, 1000, 0)


# ------------------------------------------------------------------------------------------------ Kokoro


def test_kokoro_speaks_a_mixture_at_a_rate(kokoro: Path) -> None:
    pytest.importorskip("hibari")
    speaker = KokoroSynthesizer(kokoro)
    assert speaker.missing() is None
    assert speaker.pick_voices(None, 0) == list(STYLES)
    assert speaker.pick_voices(["130af_low-30am_mid"], 0) == ["130af_low-30am_mid"]
    assert len(speaker.pick_voices(12, 0)) == 12
    plain = speaker.speak(TEXT, "am_mid", rate=1.0, seed=0)
    mixed = speaker.speak(TEXT, "130af_low-30am_mid", rate=1.0, seed=0)
    fast = speaker.speak(TEXT, "am_mid", rate=1.25, seed=0)
    assert plain.sample_rate == 24000 and plain.samples_N.dtype == np.float32
    assert _hz(plain.samples_N) == pytest.approx(150, abs=0.5)
    assert _hz(mixed.samples_N) == pytest.approx(1.3 * 100 - 0.3 * 150, abs=0.5)
    assert len(fast.samples_N) == pytest.approx(len(plain.samples_N) / 1.25, abs=2)
    phonemes = len(plain.samples_N) // SAMPLES_PER_TOKEN - 2  # a zero at both ends
    assert np.abs(plain.samples_N).max() == pytest.approx(
        0.2 + phonemes / 1000, rel=1e-3
    )  # the row of that number
    again = copy.deepcopy(speaker).speak(TEXT, "am_mid", rate=1.0, seed=1)
    assert np.array_equal(again.samples_N, plain.samples_N)
    check_speech(plain, TEXT, 1.0)


def test_a_text_beyond_the_positions_is_cut_at_clauses_or_set_aside(kokoro: Path) -> None:
    pytest.importorskip("hibari")
    speaker = KokoroSynthesizer(kokoro)
    clause = "the north wind and the sun were quarrelling"
    long = f"{clause}, {clause}, {clause}. {clause}."
    speech = speaker.speak(long, "am_mid", rate=1.0, seed=0)
    tokens = len(speech.samples_N) / SAMPLES_PER_TOKEN
    assert tokens > 2.5 * MAX_PHONEMES  # several calls, none beyond the rows of the style
    with pytest.raises(
        SpeechFault, match=f"a clause too long: .* phonemes without a comma: at most {MAX_PHONEMES}"
    ):
        speaker.speak(f"{clause} {clause} {clause}.", "am_mid", rate=1.0, seed=0)
    for text, kind in (("Привет, мир.", "other letters"), ("你好。", "other letters"), ("...", "no words")):
        with pytest.raises(SpeechFault, match=kind):
            speaker.speak(text, "am_mid", rate=1.0, seed=0)


def test_phonemes_that_the_vocabulary_lacks_are_named(kokoro: Path, tmp_path: Path) -> None:
    pytest.importorskip("hibari")
    for path in kokoro.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "vocab.json").write_text('{"n": 1, "d": 2, " ": 3}')
    with pytest.raises(SpeechFault, match="unknown phonemes: not in vocab.json: .*w"):
        KokoroSynthesizer(tmp_path).speak(TEXT, "am_mid", rate=1.0, seed=0)


@pytest.mark.parametrize(
    ("without", "message"),
    [
        ("model.onnx", "no .onnx file, where one is the model"),
        ("vocab.json", "no vocab.json"),
        ("voices.npz", "no voices.npz"),
    ],
)
def test_a_folder_that_lacks_a_file_is_named(
    kokoro: Path, tmp_path: Path, without: str, message: str
) -> None:
    pytest.importorskip("hibari")
    for path in kokoro.iterdir():
        if path.name != without:
            (tmp_path / path.name).write_bytes(path.read_bytes())
    reason = KokoroSynthesizer(tmp_path).missing() or ""
    assert message in reason and str(tmp_path) in reason and "docs/models.md" in reason
    (tmp_path / "texts.txt").write_text(TEXT)
    corpus = {"synthesizer": f"kokoro={tmp_path}", "texts": str(tmp_path / "texts.txt")}
    with pytest.raises(ConfigError, match=message):
        plan_annotation(AnnotationConfig.model_validate({"corpus": corpus, "recognizers": []}), {})


def test_a_folder_of_two_models_or_of_no_styles_is_refused(kokoro: Path, tmp_path: Path) -> None:
    pytest.importorskip("hibari")
    for path in kokoro.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "other.onnx").write_bytes(b"")
    assert "2 .onnx files (model.onnx, other.onnx)" in (KokoroSynthesizer(tmp_path).missing() or "")
    (tmp_path / "other.onnx").unlink()
    (tmp_path / "voices.npz").write_bytes(b"no archive")
    assert "voices.npz cannot be read" in (KokoroSynthesizer(tmp_path).missing() or "")
    assert "no such folder" in (KokoroSynthesizer(tmp_path / "none").missing() or "")


# ------------------------------------------------------------------------------------------------ hibari


def test_hibari_speaks_with_its_seed_and_rate() -> None:
    pytest.importorskip("hibari")
    speaker = HibariSynthesizer()
    assert speaker.missing() is None and speaker.pick_voices(None, 0) == ["heart"]
    speech = speaker.speak(TEXT, "heart", rate=1.0, seed=0)
    check_speech(speech, TEXT, 1.0)
    again = HibariSynthesizer().speak(TEXT, "heart", rate=1.0, seed=0)
    assert np.array_equal(speech.samples_N, again.samples_N)
    assert not np.array_equal(speech.samples_N, speaker.speak(TEXT, "heart", rate=1.0, seed=1).samples_N)
    fast = speaker.speak(TEXT, "heart", rate=1.3, seed=0)
    assert len(fast.samples_N) < 0.9 * len(speech.samples_N)
    twice = speaker.speak(f"{TEXT} {TEXT}", "heart", rate=1.0, seed=0)
    assert 1.5 * len(speech.samples_N) < len(twice.samples_N) < 2.2 * len(speech.samples_N)


def test_a_missing_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch, kokoro: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert HibariSynthesizer().missing() == "the package hibari is not here: pip install 'audiollm[voices]'"
    assert "Kokoro's phonemes are hibari's" in (KokoroSynthesizer(kokoro).missing() or "")
    assert synthesizers.package_missing("hibari", "voices") is not None


# --------------------------------------------------------------------------------------- published weights


@pytest.mark.slow
def test_mixtures_of_kokoro_are_voices_that_whisper_understands() -> None:
    import jiwer
    import soxr

    from audiollm.data.text.forms import comparison_form
    from audiollm.models.recognition.recognizer import open_recognizer

    root = Path(os.environ.get("AUDIOLLM_REAL") or "")
    names = ("kokoro", "whisper-base")
    if not os.environ.get("AUDIOLLM_REAL") or not all((root / name).is_dir() for name in names):
        pytest.skip("AUDIOLLM_REAL names no folder with kokoro and whisper-base")
    speaker = KokoroSynthesizer(root / "kokoro")
    recognizer = open_recognizer(str(root / "whisper-base"), "en")
    pitches, clips = [], []
    for voice in speaker.pick_voices(6, 0):
        speech = speaker.speak(TEXT, voice, rate=1.0, seed=0)
        check_speech(speech, TEXT, 1.0)
        clips.append(soxr.resample(speech.samples_N, speech.sample_rate, recognizer.sample_rate))
        pitch_F, voiced_F = track_pitch(soxr.resample(speech.samples_N, speech.sample_rate, 16_000))
        pitches.append(float(np.median(pitch_F[voiced_F])))
    assert max(pitches) > 1.5 * min(pitches)
    hypotheses = [comparison_form(result.text, "en") for result in recognizer.transcribe(clips)]
    assert jiwer.wer([comparison_form(TEXT, "en")] * 6, hypotheses) < 0.15
