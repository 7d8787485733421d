"""The step `quality`: estimates against sounds whose noise, bandwidth and room are known; models by interface."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.fft
import soxr
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from scipy.signal import fftconvolve

from audiollm.audio import load, save
from audiollm.errors import ConfigError
from pipelines.annotate.execution.rules import RULES, Thresholds, first_broken
from pipelines.annotate.step import RecordingMetadata, Segment
from pipelines.annotate.steps.quality import (
    SIGMOS_SCORES,
    Dnsmos,
    Quality,
    QualityConfig,
    Sigmos,
    Utmos,
    band_energies,
    bandwidth_hz,
    reverberation,
    sigmos_features,
    signal_to_noise_db,
)
from pipelines.steps.step import Listener

onnx = pytest.importorskip("onnx", reason="the package onnx makes the small models of these tests")
SHARED = Path(
    os.environ.get("AUDIOLLM_SHARED_DATA") or Path(__file__).resolve().parents[5] / "shared" / "data"
)
RATE = 16000
Signal = NDArray[np.float32]


def speechlike(seconds: float = 6.0, seed: int = 0, rate: int = RATE) -> Signal:
    """Bursts of noise, 150 ms on and 150 ms off, with silence in between: what is noise is known to be none."""
    dice = np.random.default_rng(seed)
    times_N = np.arange(round(seconds * rate)) / rate
    on_N = (times_N % 0.3 < 0.15).astype(float)
    return (0.1 * dice.normal(size=len(times_N)) * on_N).astype(np.float32)


def snr(samples_N: Signal) -> float:
    energies_FB = band_energies(samples_N)
    assert energies_FB is not None
    return signal_to_noise_db(energies_FB)


def segment(folder: Path, samples_N: Signal, rate: int = RATE) -> Segment:
    path = folder / "clip.wav"
    save(path, torch.from_numpy(samples_N)[None], rate)
    return Segment(
        str(path), 0.0, len(samples_N) / rate, "speech", None, RecordingMetadata(), {}, Listener(str(path))
    )


def model(path: Path, nodes: list[Any], inputs: list[Any], outputs: list[Any], constants: list[Any]) -> Path:
    graph = onnx.helper.make_graph(nodes, "test", inputs, outputs, constants)
    opsets = [onnx.helper.make_opsetid("", 13)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    return path


def tensor(name: str, shape: list[Any]) -> Any:
    return onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)


def utmos_model(path: Path, gain: float = 3.0) -> Path:
    """`[batch, time]` to the mean of the clip times `gain`, plus nothing: an answer that is known."""
    node = onnx.helper.make_node
    nodes = [
        node("ReduceMean", ["wave"], ["mean"], axes=[1], keepdims=0),
        node("Mul", ["mean", "gain"], ["mos"]),
    ]
    constant = onnx.helper.make_tensor("gain", onnx.TensorProto.FLOAT, [1], [gain])
    return model(path, nodes, [tensor("wave", ["batch", "time"])], [tensor("mos", ["batch"])], [constant])


def sigmos_model(path: Path) -> Path:
    """`[1, 3, F, 481]` to seven scores: the means of the first feature over seven bins of the spectrum."""
    node = onnx.helper.make_node
    nodes = [
        node("ReduceMean", ["features"], ["mean"], axes=[2], keepdims=0),
        node("Gather", ["mean", "first"], ["magnitude"], axis=1),
        node("Gather", ["magnitude", "bins"], ["mos"], axis=1),
    ]
    constants = [
        onnx.helper.make_tensor("first", onnx.TensorProto.INT64, [], [0]),
        onnx.helper.make_tensor("bins", onnx.TensorProto.INT64, [7], [0, 10, 20, 30, 40, 50, 60]),
    ]
    entry = tensor("features", ["batch", 3, "frames", 481])
    return model(path, nodes, [entry], [tensor("mos", ["batch", 7])], constants)


@pytest.mark.parametrize("truth_db", [0.0, 5.0, 10.0, 20.0, 30.0, 40.0])
def test_noise_of_known_level_is_found(truth_db: float) -> None:
    clean_N = speechlike()
    power = (clean_N[clean_N != 0].astype(float) ** 2).mean()
    noise_N = np.random.default_rng(1).normal(0, np.sqrt(power / 10 ** (truth_db / 10)), len(clean_N))
    assert snr((clean_N + noise_N).astype(np.float32)) == pytest.approx(truth_db, abs=1.5)


def test_noise_is_a_ratio_and_offsets_are_none() -> None:
    noisy_N = speechlike() + np.random.default_rng(1).normal(0, 0.005, 6 * RATE).astype(np.float32)
    assert snr(0.01 * noisy_N) == pytest.approx(snr(noisy_N), abs=0.01)
    assert snr(noisy_N - np.float32(0.2)) == pytest.approx(snr(noisy_N), abs=0.3)


def test_noise_stays_in_its_range_at_the_extremes() -> None:
    assert snr(np.random.default_rng(0).normal(0, 0.1, 4 * RATE).astype(np.float32)) <= 0.0
    assert snr(speechlike()) == 80.0
    assert band_energies(np.zeros(RATE * 3, np.float32)) is None
    assert band_energies(speechlike(0.2)) is None


def test_bandwidth_of_narrow_sound_at_a_wide_rate() -> None:
    narrow_N = speechlike(rate=8000)
    wide_N = np.round(soxr.resample(narrow_N, 8000, 24000) * 2**15) / 2**15
    hiss_N = np.random.default_rng(2).normal(0, 1e-3, len(wide_N))
    assert bandwidth_hz(wide_N.astype(np.float32), 24000) == pytest.approx(4000, abs=250)
    assert bandwidth_hz((wide_N + hiss_N).astype(np.float32), 24000) == pytest.approx(4000, abs=250)
    assert bandwidth_hz(narrow_N, 8000) == 4000


@pytest.mark.parametrize("rate", [8000, 11025, 16000, 24000, 44100, 48000])
def test_bandwidth_of_full_sound_is_half_the_rate(rate: int) -> None:
    assert bandwidth_hz(speechlike(rate=rate), rate) == pytest.approx(rate / 2, abs=250)
    steady_N = np.random.default_rng(3).normal(0, 0.1, 3 * rate).astype(np.float32)
    assert bandwidth_hz(steady_N, rate) == pytest.approx(rate / 2, abs=250)


def test_longer_rooms_sound_longer() -> None:
    """Exponential rooms, whose time is known: the estimate follows, and is right within a third."""
    dice = np.random.default_rng(4)
    found = []
    for rt60_s in (0.3, 0.6, 1.2):
        times_N = np.arange(round(1.2 * rt60_s * RATE)) / RATE
        response_N = dice.normal(size=len(times_N)) * np.exp(-np.log(1000) * times_N / rt60_s)
        response_N[0] = 6.0
        dry_N = speechlike(8.0, seed=5) * np.tile(np.repeat([1.0, 0.0], RATE), 4)
        wet_N = fftconvolve(dry_N, response_N)[: len(dry_N)].astype(np.float32)
        energies_FB = band_energies(0.5 * wet_N / np.abs(wet_N).max())
        assert energies_FB is not None
        room = reverberation(energies_FB)
        assert room is not None
        found.append((rt60_s, room))
    assert [room.rt60_s for _, room in found] == pytest.approx([truth for truth, _ in found], rel=0.34)
    assert found[0][1].c50_db > found[1][1].c50_db > found[2][1].c50_db


def test_noise_alone_has_no_room() -> None:
    energies_FB = band_energies(np.random.default_rng(0).normal(0, 0.1, 4 * RATE).astype(np.float32))
    assert energies_FB is not None and reverberation(energies_FB) is None


def test_dnsmos_takes_what_is_beyond_full_scale_as_clipped() -> None:
    scorer, loud_N = Dnsmos(), 20 * speechlike(3.0)
    assert np.abs(loud_N).max() > 1
    assert scorer.score(loud_N, 1) == scorer.score(np.clip(loud_N, -1, 1), 1)


def test_utmos_hears_the_waveform_as_it_is(tmp_path: Path) -> None:
    scorer = Utmos(utmos_model(tmp_path / "utmos.onnx"))
    samples_N = speechlike(1.0) + np.float32(0.3)
    assert scorer.score(samples_N) == pytest.approx(3.0 * float(samples_N.mean()), rel=1e-4)


def test_sigmos_gets_the_features_of_its_authors(tmp_path: Path) -> None:
    """Against the formula of sigmos.py, written out with scipy's transform, frame by frame."""
    samples_N = speechlike(0.333, rate=48000)
    window_N = np.sqrt(np.hanning(961)[:-1])
    padded_N = np.pad(samples_N, (480, 960 - (len(samples_N) % 480 or 480)))
    for frame in (0, 7, (len(padded_N) - 960) // 480):
        spectrum_K = scipy.fft.rfft(padded_N[480 * frame :][:960] * window_N)
        power_K = np.maximum(np.abs(spectrum_K) ** 2, 1e-12)
        expected = [power_K**0.15, power_K**-0.35 * spectrum_K.real, power_K**-0.35 * spectrum_K.imag]
        assert sigmos_features(samples_N)[0, :, frame] == pytest.approx(np.array(expected), abs=1e-4)
    assert sigmos_features(samples_N).shape == (1, 3, (len(padded_N) - 960) // 480 + 1, 481)
    scores = Sigmos(sigmos_model(tmp_path / "sigmos.onnx")).score(samples_N)
    means = sigmos_features(samples_N)[0, 0].mean(axis=0)[::10][:7]
    assert scores == pytest.approx(dict(zip(SIGMOS_SCORES, means.tolist(), strict=True)), rel=1e-4)


def test_a_file_with_another_interface_is_refused(tmp_path: Path) -> None:
    utmos, sigmos = utmos_model(tmp_path / "utmos.onnx"), sigmos_model(tmp_path / "sigmos.onnx")
    with pytest.raises(ValueError, match=r"sigmos\.onnx: not UTMOS.*481"):
        Utmos(sigmos)
    with pytest.raises(ValueError, match=r"utmos\.onnx: not SIGMOS.*time"):
        Sigmos(utmos)


def test_the_step_measures_what_is_asked_for(tmp_path: Path) -> None:
    clip = segment(tmp_path, speechlike(3.0))
    paths = {"utmos": utmos_model(tmp_path / "u.onnx"), "sigmos": sigmos_model(tmp_path / "s.onnx")}
    step = Quality(QualityConfig(windows=1, **paths))
    assert step.missing() is None
    step.setup()
    value = step.process(clip)
    assert json.loads(json.dumps(value, allow_nan=False)) == value == step.process(clip)
    assert set(value) == {"snr_db", "rt60_s", "c50_db", "bandwidth_hz", "dnsmos", "utmos", "sigmos"}
    assert set(value["sigmos"]) >= {"noise", "ovrl"}
    step = Quality(QualityConfig(dnsmos=False, snr=False, reverberation=False))
    step.setup()
    assert step.process(clip) == {"bandwidth_hz": value["bandwidth_hz"]}


def test_what_cannot_be_told_is_null(tmp_path: Path) -> None:
    step = Quality(QualityConfig(dnsmos=False))
    step.setup()
    nothing = {"snr_db": None, "rt60_s": None, "c50_db": None, "bandwidth_hz": None}
    assert step.process(segment(tmp_path, np.zeros(3 * RATE, np.float32))) == nothing
    assert step.process(segment(tmp_path, speechlike(0.01))) == nothing


def test_a_missing_model_is_named_before_the_run(tmp_path: Path) -> None:
    message = Quality(QualityConfig(sigmos=tmp_path / "absent.onnx")).missing()
    assert message is not None and message.startswith("quality.sigmos") and "absent.onnx" in message


def test_the_module_is_light() -> None:
    code = (
        "import sys, pipelines.annotate.steps.quality as q; q.Quality(q.QualityConfig()).missing(); "
        "print({'torch', 'onnxruntime'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"


@pytest.mark.skipif(not (SHARED / "noisy_pairs").is_dir(), reason="needs the shared data: noisy_pairs")
def test_real_pairs_are_told_apart(tmp_path: Path) -> None:
    step = Quality(QualityConfig(windows=1))
    step.setup()
    heard = []
    for name in ("speech.wav", "speech_bab_0dB.wav"):
        path = SHARED / "noisy_pairs/PESQ/audio" / name
        end_s = load(path).duration_s
        heard.append(
            step.process(
                Segment(str(path), 0.0, end_s, "speech", None, RecordingMetadata(), {}, Listener(str(path)))
            )
        )
    assert heard[0]["snr_db"] > heard[1]["snr_db"] + 15
    assert heard[0]["dnsmos"]["ovr"] > heard[1]["dnsmos"]["ovr"] + 1


# ------------------------------------------------------------------------------------ a scorer of one's own

SCORERS = """
import numpy as np

class Loudness:
    sample_rate = 8000

    def score(self, samples_N):
        return float(np.abs(samples_N).max()) if len(samples_N) > 800 else float("nan")

class Broken:
    def __init__(self):
        raise OSError("no weights at /gone")

    def score(self, samples_N):
        return 1.0

class Rateless:
    def score(self, samples_N):
        return 1.0

def function(samples_N):
    return 1.0
"""


@pytest.fixture
def scorers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module with scorers in the working directory, of a name that no other test has imported."""
    name = f"scorers_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(SCORERS)
    (tmp_path / f"{name}_lacking.py").write_text(
        "import a_package_that_is_not_there\n\nclass Mos:\n    pass\n"
    )
    monkeypatch.chdir(tmp_path)
    return name


def test_a_scorer_hears_at_its_rate_and_its_score_has_a_threshold(tmp_path: Path, scorers: str) -> None:
    quiet = {"dnsmos": False, "snr": False, "bandwidth": False, "reverberation": False}
    step = Quality(QualityConfig.model_validate({**quiet, "scorer": f"{scorers}:Loudness"}))
    assert step.missing() is None
    step.setup()
    tone_N = (0.5 * np.sin(2 * np.pi * 200 * np.arange(RATE) / RATE)).astype(np.float32)
    assert step.process(segment(tmp_path, tone_N)) == {"score": pytest.approx(0.5, abs=0.01)}
    assert step.process(segment(tmp_path, tone_N[:1000])) == {"score": None}
    for limit, is_broken in ((0.4, False), (0.6, True)):
        limits = Thresholds(min_quality_score=limit)
        assert (first_broken(RULES, limits, "quality", {"score": 0.5}, "speech") is not None) == is_broken


def test_scorers_that_cannot_be_used_are_told_before_the_work(scorers: str) -> None:
    for name, message in (
        ("no path", "give package.module:Class"),
        (f"{scorers}:Absent", "has no 'Absent'"),
        ("module_that_is_not_there:Mos", "no module 'module_that_is_not_there'"),
    ):
        with pytest.raises(ValidationError, match=message):
            QualityConfig(scorer=name)
    lacking = Quality(QualityConfig(scorer=f"{scorers}_lacking:Mos")).missing() or ""
    assert "No module named 'a_package_that_is_not_there'" in lacking and "install" in lacking
    function = Quality(QualityConfig(scorer=f"{scorers}:function")).missing() or ""
    assert "is no class with a method `score`" in function
    for name, message in (("Broken", "OSError: no weights at /gone"), ("Rateless", "has no `sample_rate`")):
        with pytest.raises(ConfigError, match=message):
            Quality(QualityConfig(dnsmos=False, scorer=f"{scorers}:{name}")).setup()


UTMOSV2 = '''
"""UTMOSv2 (sarulab-speech/UTMOSv2, README.md): `create_model(pretrained=True)`, and `predict(data=...)` with an array
[samples] that gives an array [1]. This one hears a second drawn at random."""
import numpy as np


class _Model:
    def predict(self, *, data=None, input_path=None, input_dir=None):
        start = np.random.randint(0, max(len(data) - 16_000, 1))
        return np.array([1.0 + float(np.abs(data[start : start + 16_000]).mean())])


def create_model(pretrained=True, config="fusion_stage3", fold=0, checkpoint_path=None):
    return _Model()
'''


def test_the_scorer_of_the_guide_gives_the_same_score_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guide = (Path(__file__).parents[4] / "docs" / "extending.md").read_text(encoding="utf-8")
    example = guide.partition("## A quality score")[2].partition("```python\n")[2].partition("```")[0]
    name = f"guide_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(example)
    (tmp_path / "utmosv2.py").write_text(UTMOSV2)
    monkeypatch.chdir(tmp_path)
    quiet = dict.fromkeys(("dnsmos", "snr", "bandwidth", "reverberation"), False)
    step = Quality(QualityConfig.model_validate({**quiet, "scorer": f"{name}:Utmosv2"}))
    with pytest.raises(ConfigError, match="cannot be made: ModuleNotFoundError: No module named 'utmosv2'"):
        step.setup()
    monkeypatch.syspath_prepend(str(tmp_path))
    step.setup()
    clip = segment(tmp_path, speechlike())
    value = step.process(clip)
    assert 1 < value["score"] < 2 and step.process(clip) == value
