"""Pretrained diarizers and voice embedders by path: turns worked out by hand, files that could run code, and the whole
stage on stand-ins of the packages (`stand_ins.py`)."""

from __future__ import annotations

import importlib
import os
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from audiollm.audio import save
from audiollm.errors import ConfigError
from pipelines.annotate.step import Recording, RecordingMetadata
from pipelines.annotate.steps.speakers import Speakers, SpeakersConfig
from pipelines.annotate.voice.diarization import SpeakerTurn
from pipelines.annotate.voice.diarizers import SpeakerSpan, exclusive_turns
from pipelines.annotate.voice.embedders import WespeakerVoices
from pipelines.steps.step import Listener, Value
from tests.pipelines.annotate.steps.stand_ins import pyannote_folder, wespeaker_file, write_packages

RATE = 16000


class RunsCode:
    """Opened by the unrestricted reader, it sets an environment variable."""

    def __reduce__(self) -> object:
        return (os.putenv, ("AUDIOLLM_TEST_PICKLE", "opened"))


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Stand-ins of pyannote.audio and NeMo, first on the path."""
    folder = tmp_path / "packages"
    write_packages(folder)
    monkeypatch.syspath_prepend(str(folder))
    before = {
        name: module for name, module in sys.modules.items() if name.split(".")[0] in ("pyannote", "nemo")
    }
    for name in before:
        del sys.modules[name]
    monkeypatch.delenv("PYANNOTE_METRICS_ENABLED", raising=False)
    importlib.invalidate_caches()
    yield folder
    for name in [name for name in sys.modules if name.split(".")[0] in ("pyannote", "nemo")]:
        del sys.modules[name]
    sys.modules.update(before)
    monkeypatch.setenv("PYANNOTE_METRICS_ENABLED", "")  # what the step sets is undone


def _recording(folder: Path, spans: list[list[float]] | None = None) -> Recording:
    """0 to 2 s: one speaker; 2 to 3 s: both; 3 to 4 s: the other; 4 to 4.51 s: silence, without the last 0.01 s."""
    levels = np.repeat([0.1, 0.4, -0.1, 0.0], [2 * RATE, RATE, RATE, RATE // 2 + 160]).astype(np.float32)
    noise_N = np.random.default_rng(0).normal(0, 0.01, len(levels)).astype(np.float32)
    path = folder / "talk.wav"
    save(path, torch.from_numpy(levels + noise_N)[None], RATE)
    values = {"voice_activity": {"spans": [[0.0, 4.0]] if spans is None else spans}}
    return Recording(str(path), RecordingMetadata(), values, Listener(str(path)))


def _value(config: SpeakersConfig, recording: Recording) -> Value:
    step = Speakers(config)
    assert step.missing() is None
    step.setup()
    return step.process(recording)


def _nemo_file(path: Path, weights: object) -> Path:
    torch.save(weights, path.parent / "model_weights.ckpt")
    (path.parent / "model_config.yaml").write_text(
        "target: nemo.collections.asr.models.SortformerEncLabelModel\n"
    )
    with tarfile.open(path, "w") as archive:
        for name in ("model_weights.ckpt", "model_config.yaml"):
            archive.add(path.parent / name, name)
    return path


# ------------------------------------------------------------------------------------------------ turns


def test_spans_that_overlap_become_turns_of_the_same_times() -> None:
    spans = [SpeakerSpan(-0.2, 3.0, "b"), SpeakerSpan(2.0, 4.5, "a"), SpeakerSpan(6.0, 6.0004, "c")]
    assert exclusive_turns(spans, 4.2) == [
        SpeakerTurn(0.0, 2.0, 0, False),
        SpeakerTurn(2.0, 3.0, 0, True),
        SpeakerTurn(2.0, 3.0, 1, True),
        SpeakerTurn(3.0, 4.2, 1, False),
    ]
    assert exclusive_turns([], 4.2) == []


@given(
    st.lists(
        st.tuples(st.integers(-5, 60), st.integers(0, 30), st.sampled_from("abcd")).map(
            lambda one: SpeakerSpan(one[0] / 10, (one[0] + one[1]) / 10, one[2])
        ),
        max_size=12,
    )
)
@settings(max_examples=100)
def test_turns_have_whoever_speaks_at_every_moment(spans: list[SpeakerSpan]) -> None:
    turns = exclusive_turns(spans, 5.0)
    assert all(0 <= turn.start_s < turn.end_s <= 5.0 for turn in turns)
    assert [turn.start_s for turn in turns] == sorted(turn.start_s for turn in turns)
    for moment_s in np.arange(0.05, 5.0, 0.1):
        speaking = {span.speaker for span in spans if span.start_s <= moment_s < span.end_s}
        at_once = [turn for turn in turns if turn.start_s <= moment_s < turn.end_s]
        assert len({turn.speaker for turn in at_once}) == len(at_once) == len(speaking)
        assert {(turn.start_s, turn.end_s) for turn in at_once} == {t[:2] for t in at_once[:1]}
        assert all(turn.overlap == (len(speaking) > 1) for turn in at_once)


# --------------------------------------------------------------------------------------------- pyannote


def test_a_pyannote_pipeline_gives_turns_and_the_embedder_voices(tmp_path: Path, packages: Path) -> None:
    folder = pyannote_folder(tmp_path / "pipeline")
    voices = wespeaker_file(tmp_path / "voices.onnx")
    config = SpeakersConfig(diarizer=f"pyannote={folder}", embedder=f"wespeaker={voices}")
    value = _value(config, _recording(tmp_path))
    # 0.02 s longer than what is there, as the stand-in has it
    assert value["turns"] == [
        {"start_s": 0.0, "end_s": 2.0, "speaker": "S0", "overlap": False},
        {"start_s": 2.0, "end_s": 3.02, "speaker": "S0", "overlap": True},
        {"start_s": 2.0, "end_s": 3.02, "speaker": "S1", "overlap": True},
        {"start_s": 3.02, "end_s": 4.02, "speaker": "S1", "overlap": False},
    ]
    assert {name: speaker["seconds"] for name, speaker in value["speakers"].items()} == {
        "S0": 3.02,
        "S1": 2.02,
    }
    for speaker in value["speakers"].values():
        assert len(speaker["embedding"]) == 6
        assert np.linalg.norm(speaker["embedding"]) == pytest.approx(1, abs=1e-3)


def test_the_number_of_speakers_reaches_the_pipeline(tmp_path: Path, packages: Path) -> None:
    folder, voices = pyannote_folder(tmp_path / "pipeline"), wespeaker_file(tmp_path / "voices.onnx")
    config = SpeakersConfig(diarizer=folder, embedder=voices, max_speakers=1)
    assert list(_value(config, _recording(tmp_path))["speakers"]) == ["S0"]


def test_a_recording_without_speech_has_no_speakers(tmp_path: Path, packages: Path) -> None:
    config = SpeakersConfig(
        diarizer=pyannote_folder(tmp_path / "pipeline"), embedder=wespeaker_file(tmp_path / "voices.onnx")
    )
    assert _value(config, _recording(tmp_path, spans=[])) == {"turns": [], "speakers": {}}


def test_a_checkpoint_that_could_run_code_is_never_opened(tmp_path: Path, packages: Path) -> None:
    """The package itself asks torch for everything in the file (`weights_only=False`)."""
    folder, voices = (
        pyannote_folder(tmp_path / "pipeline", RunsCode()),
        wespeaker_file(tmp_path / "voices.onnx"),
    )
    step = Speakers(SpeakersConfig(diarizer=folder, embedder=voices))
    with pytest.raises(ConfigError, match="can run code: (posix|nt).putenv"):
        step.setup()
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ


@pytest.mark.parametrize(
    ("text", "replacement", "message"),
    [
        (
            "pyannote.audio.pipelines.SpeakerDiarization",
            "my_code.Pipeline",
            "no speaker diarization alone: my_code",
        ),
        ("params:\n  segmentation", "preprocessors: {}\nparams:\n  segmentation", "with preprocessors"),
        ("$model/plda", "pyannote/plda", "params.plda: pyannote/plda is not in this folder"),
        ("    plda: $model/plda\n", "", "params.plda: nothing is not in this folder"),
        ("$model/embedding", "$model/../../other", "params.embedding: .* is not in this folder"),
        ("pipeline:", "pipelines:", "no pipeline of pyannote: KeyError: 'pipeline'"),
        ("dependencies:", "{", "no pipeline of pyannote: ParserError"),
    ],
)
def test_what_a_config_names_elsewhere_is_refused(
    tmp_path: Path, packages: Path, text: str, replacement: str, message: str
) -> None:
    folder, voices = pyannote_folder(tmp_path / "pipeline"), wespeaker_file(tmp_path / "voices.onnx")
    (tmp_path / "other").mkdir()
    config = (folder / "config.yaml").read_text()
    assert text in config
    (folder / "config.yaml").write_text(config.replace(text, replacement, 1))
    with pytest.raises(ConfigError, match=message):
        Speakers(SpeakersConfig(diarizer=folder, embedder=voices)).setup()


def test_a_model_of_another_package_in_a_checkpoint_is_refused(tmp_path: Path, packages: Path) -> None:
    folder, voices = pyannote_folder(tmp_path / "pipeline"), wespeaker_file(tmp_path / "voices.onnx")
    checkpoint = {"pyannote.audio": {"architecture": {"module": "my_code", "class": "Net"}}}
    torch.save(checkpoint, folder / "embedding" / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"outside of pyannote's models \(my_code\)"):
        Speakers(SpeakersConfig(diarizer=folder, embedder=voices)).setup()


# ------------------------------------------------------------------------------------------- Sortformer


def test_a_sortformer_gives_turns(tmp_path: Path, packages: Path) -> None:
    model = _nemo_file(tmp_path / "diar.nemo", {"weight": torch.zeros(2)})
    config = SpeakersConfig(diarizer=f"sortformer={model}", embedder=wespeaker_file(tmp_path / "voices.onnx"))
    value = _value(config, _recording(tmp_path))
    assert value["turns"] == [
        {"start_s": 0.0, "end_s": 2.255, "speaker": "S0", "overlap": False},
        {"start_s": 2.255, "end_s": 4.51, "speaker": "S0", "overlap": True},
        {"start_s": 2.255, "end_s": 4.51, "speaker": "S1", "overlap": True},
    ]


def test_a_sortformer_that_could_run_code_is_never_opened(tmp_path: Path, packages: Path) -> None:
    model = _nemo_file(tmp_path / "diar.nemo", {"weight": RunsCode()})
    with pytest.raises(ConfigError, match="can run code"):
        Speakers(SpeakersConfig(diarizer=model, embedder=wespeaker_file(tmp_path / "voices.onnx"))).setup()
    (tmp_path / "diar.nemo").write_bytes(b"no archive")
    with pytest.raises(ConfigError, match="no Sortformer loads from it"):
        Speakers(SpeakersConfig(diarizer=model, embedder=wespeaker_file(tmp_path / "voices.onnx"))).setup()


def test_an_old_nemo_is_told(tmp_path: Path, packages: Path) -> None:
    metadata = packages / "nemo_toolkit-3.0.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("3.0.0", "2.4.1"))
    model = _nemo_file(tmp_path / "diar.nemo", {})
    problem = Speakers(SpeakersConfig(diarizer=model)).missing()
    assert problem == (
        "speakers.diarizer: nemo_toolkit 2.4.1 is too old: pip install -U 'audiollm[sortformer]'"
    )


# --------------------------------------------------------------------------------------------- settings


def test_a_missing_package_is_told_with_the_command_that_installs_it(tmp_path: Path) -> None:
    if importlib.util.find_spec("nemo") is not None:
        pytest.skip("NeMo is installed")
    (tmp_path / "diar.nemo").write_bytes(b"")
    problem = Speakers(SpeakersConfig(diarizer=tmp_path / "diar.nemo")).missing() or ""
    assert "pip install 'audiollm[sortformer]'" in problem
    assert "no file" in (Speakers(SpeakersConfig(diarizer=tmp_path / "gone.nemo")).missing() or "")
    assert "config.yaml" in (Speakers(SpeakersConfig(diarizer=tmp_path)).missing() or "")
    assert "no file" in (Speakers(SpeakersConfig(embedder=tmp_path / "gone.onnx")).missing() or "")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"diarizer": "pyanote=folder"}, "give pyannote=FOLDER or sortformer=FILE.nemo"),
        ({"diarizer": "sortformer=folder"}, "give pyannote=FOLDER or sortformer=FILE.nemo"),
        ({"embedder": "wespeaker=folder"}, "give wespeaker=FILE.onnx or transformers=FOLDER"),
        ({"diarizer": "a.nemo", "max_speakers": 3}, "max_speakers: not read by the diarizer a.nemo"),
        ({"diarizer": "folder", "threshold": 0.5}, "threshold: not read by the diarizer folder"),
        ({"gpus": 1}, "gpus: is for a diarizer"),
    ],
)
def test_settings_that_do_not_fit_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SpeakersConfig.model_validate(values)


# -------------------------------------------------------------------------------------------- WeSpeaker


def test_an_onnx_of_wespeaker_hears_what_its_makers_give_it(tmp_path: Path) -> None:
    """Features of wespeakerruntime 1.0.1, `_compute_fbank`, through the same network in NumPy."""
    import onnx
    from onnx import numpy_helper
    from torchaudio.compliance import kaldi

    path = wespeaker_file(tmp_path / "voices.onnx")
    weights = numpy_helper.to_array(onnx.load(str(path)).graph.initializer[0])
    dice = np.random.default_rng(1)
    windows = [dice.normal(0, 0.1, count).astype(np.float32) for count in (14400, 8000, 14400, 100)]
    voices_WD = WespeakerVoices(path).embed(windows)
    for window_N, voice_D in zip(windows[:3], voices_WD[:3], strict=True):
        waveform = torch.from_numpy(window_N)[None] * (1 << 15)
        mat = kaldi.fbank(
            waveform, num_mel_bins=80, frame_length=25, frame_shift=10, dither=0.0, sample_frequency=RATE,
            window_type="hamming", use_energy=False,
        )  # fmt: skip
        expected_D = np.abs((mat - mat.mean(dim=0)).numpy() @ weights).mean(axis=0)
        np.testing.assert_allclose(voice_D, expected_D / np.linalg.norm(expected_D), atol=1e-5)
    assert np.isfinite(voices_WD).all(), "a window shorter than a frame"


def test_another_onnx_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no speaker model of WeSpeaker: it has feats \['B', 'T', 40\]"):
        WespeakerVoices(wespeaker_file(tmp_path / "other.onnx", mels=40))
    (tmp_path / "damaged.onnx").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="no ONNX model"):
        WespeakerVoices(tmp_path / "damaged.onnx")
