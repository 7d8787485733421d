"""The step `separate` with networks whose answer is known: a gain, a delay of states, the identity on a spectrogram."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.signal import butter, sosfilt

from audiollm.audio import load, save
from pipelines.annotate.step import Recording, RecordingMetadata
from pipelines.annotate.steps.separate import (
    MDX_MODELS,
    MdxConfig,
    MdxModel,
    Separate,
    SeparateConfig,
    Separator,
    load_separator,
    process_crossfaded,
)
from pipelines.steps.step import Listener

onnx = pytest.importorskip("onnx", reason="the package onnx makes the small models of these tests")
Signal = NDArray[np.float32]


def model(path: Path, nodes: list[Any], inputs: dict[str, list[Any]], outputs: dict[str, list[Any]]) -> Path:
    info, float32 = onnx.helper.make_tensor_value_info, onnx.TensorProto.FLOAT
    graph = onnx.helper.make_graph(
        nodes,
        "test",
        [info(name, float32, shape) for name, shape in inputs.items()],
        [info(name, float32, shape) for name, shape in outputs.items()],
        [onnx.helper.make_tensor("half", float32, [1], [0.5])],
    )
    opsets = [onnx.helper.make_opsetid("", 13)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    return path


def halving(path: Path, shape: list[Any]) -> Path:
    node = onnx.helper.make_node("Mul", ["input", "half"], ["output"])
    return model(path, [node], {"input": shape}, {"output": shape})


def echoing_frames(path: Path, bins: int) -> Path:
    """Half of this frame and half of the one before it, which the state holds."""
    make = onnx.helper.make_node
    nodes = [
        make("Add", ["mix", "before"], ["sum"]),
        make("Mul", ["sum", "half"], ["enh"]),
        make("Identity", ["mix"], ["next"]),
    ]
    shape = [1, bins, 1, 2]
    return model(path, nodes, {"mix": shape, "before": shape}, {"enh": shape, "next": shape})


def in_pieces(samples_N: Signal, sizes: list[int]) -> Iterator[Signal]:
    start = 0
    for size in [*sizes, len(samples_N)]:
        yield samples_N[start : start + size]
        start += size


def separated(separator: Separator, samples_N: Signal, sizes: list[int]) -> Signal:
    return np.concatenate(list(separator.separate(in_pieces(samples_N, sizes))))


def noise(length: int, seed: int = 0) -> Signal:
    return np.random.default_rng(seed).normal(0, 0.1, length).astype(np.float32)


@given(
    length=st.integers(1, 3000),
    sizes=st.lists(st.integers(0, 700), max_size=6),
    piece=st.integers(2, 400),
    share=st.floats(0, 0.5),
)
@settings(max_examples=150)
def test_pieces_that_are_left_alone_add_up_to_the_sound(
    length: int, sizes: list[int], piece: int, share: float
) -> None:
    samples_N = noise(length)
    fade = int(share * piece)
    lengths: set[int] = set()

    def process(piece_N: Signal) -> Signal:
        lengths.add(len(piece_N))
        return piece_N

    made_N = np.concatenate(list(process_crossfaded(in_pieces(samples_N, sizes), piece, fade, process)))
    assert made_N == pytest.approx(samples_N, abs=1e-6)
    assert lengths == {piece}


@pytest.mark.parametrize("length", [50, 30_000, 200_001])
def test_mdx_spectrogram_and_back(tmp_path: Path, length: int) -> None:
    """Half of the spectrogram is half of the sound, within the band that the network sees."""
    path = halving(tmp_path / "own.onnx", [None, 4, 1024, 64])
    band = butter(6, [80, 18_000], "bandpass", fs=44100, output="sos")
    samples_N = sosfilt(band, noise(length)).astype(np.float32)
    voices = load_separator(path, MdxModel(2048, "vocals", 1.3))
    assert voices.sample_rate == 44100
    made_N = separated(voices, samples_N, [1000, 7, 90_000])
    assert made_N == pytest.approx(0.5 * samples_N, abs=2e-3)
    assert np.array_equal(made_N, separated(voices, samples_N, []))
    rest = load_separator(path, MdxModel(2048, "rest", 1.6))  # the mixture less 1.6 halves of it
    assert separated(rest, samples_N, []) == pytest.approx(0.2 * samples_N, abs=4e-3)


def test_mdx_channels_are_left_and_right(tmp_path: Path) -> None:
    """A network that keeps only the left side's real part and the right side's imaginary part gives half."""
    make = onnx.helper.make_node
    path = tmp_path / "sides.onnx"
    float32 = onnx.TensorProto.FLOAT
    shape = [1, 4, 1024, 16]
    keep = onnx.helper.make_tensor("keep", float32, [1, 4, 1, 1], [1.0, 0.0, 0.0, 1.0])
    info = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [make("Mul", ["input", "keep"], ["output"])],
        "test",
        [info("input", float32, shape)],
        [info("output", float32, shape)],
        [keep],
    )
    onnx.save(
        onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 13)], ir_version=8), path
    )
    band = butter(6, [200, 8000], "bandpass", fs=44100, output="sos")
    samples_N = sosfilt(band, noise(40_000)).astype(np.float32)
    made_N = separated(load_separator(path, MdxModel(2048, "vocals", 1.0)), samples_N, [])
    # the mean of both sides has half of the real and half of the imaginary part
    assert made_N == pytest.approx(0.5 * samples_N, abs=2e-3)


@given(length=st.integers(1, 2000), sizes=st.lists(st.integers(0, 500), max_size=5))
@settings(max_examples=30)
def test_frames_carry_their_state(
    tmp_path_factory: pytest.TempPathFactory, length: int, sizes: list[int]
) -> None:
    """Half of each frame and of the one before: against torch's transform over the whole sound, in any pieces."""
    path = tmp_path_factory.getbasetemp() / "echo.onnx"
    if not path.exists():
        echoing_frames(path, 33)
    samples_N = noise(length, seed=1)
    made_N = separated(load_separator(path), samples_N, sizes)
    assert len(made_N) == length
    if length > 32:
        window = torch.hann_window(64).sqrt()
        padded = torch.nn.functional.pad(
            torch.from_numpy(samples_N), (0, 64)
        )  # silence after the end, no mirror
        spectrum_KT = torch.stft(padded, 64, 32, window=window, return_complex=True)
        before_KT = torch.nn.functional.pad(spectrum_KT, (1, 0))[:, :-1]
        expected_N = torch.istft(0.5 * (spectrum_KT + before_KT), 64, 32, window=window)[:length]
        assert made_N == pytest.approx(expected_N.numpy(), abs=1e-5)


@pytest.mark.parametrize("shape", [[1, None], ["batch", 1, "time"], [1, 4000]])
def test_waveform_networks(tmp_path: Path, shape: list[Any]) -> None:
    separator = load_separator(halving(tmp_path / "wave.onnx", shape), sample_rate=8000)
    samples_N = noise(12_345)
    assert separator.sample_rate == 8000
    assert separated(separator, samples_N, [100, 5000]) == pytest.approx(0.5 * samples_N, abs=1e-6)


def test_files_that_are_no_separators(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="known are"):
        load_separator(halving(tmp_path / "image.onnx", [1, 3, 224, 224]))
    unknown = halving(tmp_path / "own.onnx", [None, 4, 1024, 64])
    with pytest.raises(ValueError, match=r"separate\.mdx"):
        load_separator(unknown)
    with pytest.raises(ValueError, match="n_fft / 2"):
        load_separator(unknown, MdxModel(1024, "vocals", 1.0))
    name = "UVR-MDX-NET-Inst_HQ_3"
    load_separator(halving(tmp_path / f"{name}.onnx", [None, 4, 3072, 256]))
    assert MDX_MODELS[name].n_fft == 6144


def recording(path: Path) -> Recording:
    return Recording(str(path), RecordingMetadata(), {}, Listener(str(path)))


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    path = tmp_path / "clip.wav"
    save(path, torch.from_numpy(noise(24_000))[None].repeat(2, 1), 16000)
    return path


def test_the_voices_are_written_once(tmp_path: Path, clip: Path) -> None:
    settings_ = SeparateConfig(model=halving(tmp_path / "wave.onnx", [1, None]), folder=tmp_path / "voices")
    step = Separate(settings_)
    assert step.missing() is None
    step.setup()
    value = step.process(recording(clip))
    path = Path(value["path"])
    assert path.parent == tmp_path / "voices" and path.suffix == ".flac" and value["sample_rate"] == 16000
    made = load(path)
    assert made.samples_CN.numpy() == pytest.approx(0.5 * load(clip, mono=True).samples_CN.numpy(), abs=1e-4)
    written = path.stat().st_mtime_ns
    copy = clip.with_name("other name.wav")
    copy.write_bytes(clip.read_bytes())
    assert step.process(recording(copy)) == value
    assert path.stat().st_mtime_ns == written
    assert list(path.parent.iterdir()) == [path]


def test_another_model_or_setting_makes_another_file(tmp_path: Path, clip: Path) -> None:
    paths = set()
    mdx = halving(tmp_path / "own.onnx", [None, 4, 1024, 64])
    for stem in ("vocals", "rest"):
        config = MdxConfig.model_validate({"n_fft": 2048, "stem": stem})
        step = Separate(SeparateConfig(model=mdx, mdx=config, folder=tmp_path / "voices"))
        step.setup()
        paths.add(step.process(recording(clip))["path"])
    assert len(paths) == 2


def test_a_failing_network_leaves_no_file(tmp_path: Path, clip: Path) -> None:
    make = onnx.helper.make_node
    path = model(
        tmp_path / "shorter.onnx",
        [make("ReduceMean", ["input"], ["output"], axes=[1], keepdims=1)],
        {"input": [1, None]},
        {"output": [1, 1]},
    )
    step = Separate(SeparateConfig(model=path, folder=tmp_path / "voices"))
    step.setup()
    with pytest.raises(ValueError, match="as long"):
        step.process(recording(clip))
    assert list((tmp_path / "voices").iterdir()) == []


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    assert "separate.model" in str(Separate(SeparateConfig()).missing())
    assert "absent.onnx" in str(Separate(SeparateConfig(model=tmp_path / "absent.onnx")).missing())
    present = halving(tmp_path / "wave.onnx", [1, None])
    assert "separate.folder" in str(Separate(SeparateConfig(model=present)).missing())
