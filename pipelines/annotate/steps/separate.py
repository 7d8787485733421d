"""The step `separate`: the voices of a recording without music and noise, as a file that all later steps read.

They are separated block by block, by an ONNX file of three kinds, recognized by their inputs:

- a spectrogram `[1, 4, K, T]` of stereo, and no state: the MDX-Net class of UVR (vocals or the rest);
- one frame `[1, K, 1, 2]` of a spectrogram, and states: streaming enhancers such as GTCRN;
- a waveform `[1, N]` or `[1, 1, N]`, with or without states.

A network without states works on pieces that overlap and are faded into each other. Memory does not grow with the
length.

Shapes: K frequency bins, N samples, T frames.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from audiollm.onnx_models import single_thread_session
from pipelines.annotate.step import Recording, RecordingStep
from pipelines.steps.step import StepConfig, Value

if TYPE_CHECKING:
    import torch


class MdxConfig(StepConfig):
    """Parameters of an MDX-Net model that its file lacks and its author publishes."""

    n_fft: int = Field(ge=256)
    """Samples of a frame: 6144 for UVR-MDX-NET-Inst_HQ_3."""
    stem: Literal["vocals", "rest"]
    """Output of the model: the voices, or the accompaniment (`Inst` models)."""
    compensate: float = Field(1.0, gt=0)
    """Gain at which the accompaniment is subtracted from the mixture."""


class SeparateConfig(StepConfig):
    """Settings of `separate`."""

    model: Path | None = None
    """A separator or enhancer as .onnx: UVR's MDX-Net class, GTCRN's streaming export, or waveform to waveform."""
    mdx: MdxConfig | None = None
    """Parameters of an MDX-Net file that was renamed; null: known by the file's name."""
    sample_rate: int | None = Field(None, ge=8000)
    """Sample rate of an enhancer or a waveform network; null: the file's, or 16 kHz. MDX-Net always has 44.1 kHz."""
    folder: Path | None = None
    """Folder of the separated files."""


class Separate(RecordingStep[SeparateConfig]):
    """Writes the voices of a recording, mono, into `folder`; its name follows from content, model and settings.

    It needs nothing of `probe` but that it comes first: what cannot be read is not separated.
    """

    name = "separate"
    settings = SeparateConfig
    needs: tuple[str, ...] = ("probe",)

    def __init__(self, config: SeparateConfig) -> None:
        super().__init__(config)
        self._separator: Separator | None = None
        self._made_by = ""

    def missing(self) -> str | None:
        model = self.config.model
        if model is None:
            return "separate.model: no model: give an .onnx (UVR-MDX-NET-Inst_HQ_3, GTCRN), or leave the step out"
        if not model.is_file():
            return f"separate.model: no file {model}: give the model's .onnx"
        if self.config.folder is None:
            return "separate.folder: no folder for the separated voices: give one"
        if importlib.util.find_spec("onnxruntime") is None:
            return "separate: the package onnxruntime is missing: pip install onnxruntime"
        return None

    def setup(self) -> None:
        """Load the model."""
        from audiollm.files.atomic import file_digest

        if (missing := self.missing()) is not None or self.config.model is None:
            raise FileNotFoundError(missing)
        mdx = self.config.mdx
        mdx_model = MdxModel(mdx.n_fft, mdx.stem, mdx.compensate) if mdx else None
        self._separator = load_separator(self.config.model, mdx_model, self.config.sample_rate)
        settings = self.config.model_dump_json(exclude={"model", "folder"})
        self._made_by = f"{self.version} {file_digest(self.config.model)} {settings}"

    def process(self, item: Recording) -> Value:
        """`path` of the voices, 16-bit FLAC, and their `sample_rate`. What is there already is not made again."""
        from audiollm.audio.streams import save_stream
        from audiollm.files.atomic import file_digest

        if self._separator is None or self.config.folder is None:
            raise RuntimeError("separate: `setup` comes before `process`")
        text = f"{file_digest(Path(item.path))} {self._made_by}"
        path = self.config.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.flac"
        rate = self._separator.sample_rate
        if not path.is_file():
            save_stream(path, _separate_blocks(self._separator, item), rate)
        return {"path": str(path), "sample_rate": rate}


def _separate_blocks(separator: Separator, item: Recording) -> Iterator[torch.Tensor]:
    import torch

    for samples_N in separator.separate(item.blocks(separator.sample_rate)):
        if len(samples_N):
            yield torch.from_numpy(samples_N)[None]


Signal = NDArray[np.float32]
Stem = Literal["vocals", "rest"]

_MDX_RATE, _MDX_HOP, _MDX_CHANNELS = 44100, 1024, 4
_MDX_SILENT_BINS = 3  # below 22 Hz; UVR keeps them from the network
_ENHANCER_RATE = 16000
_PIECE_S, _FADE_SHARE = 10.0, 0.125


class MdxModel(NamedTuple):
    """Parameters that an MDX-Net file lacks: its FFT, its output, and the gain at which that fits the mixture."""

    n_fft: int
    stem: Stem
    compensate: float


MDX_MODELS: dict[str, MdxModel] = {
    "UVR-MDX-NET-Inst_HQ_3": MdxModel(6144, "rest", 1.022),
    "UVR-MDX-NET-Inst_HQ_4": MdxModel(5120, "rest", 1.019),
    "UVR-MDX-NET-Inst_Main": MdxModel(5120, "rest", 1.025),
    "UVR_MDXNET_KARA_2": MdxModel(5120, "rest", 1.065),
    "UVR-MDX-NET-Voc_FT": MdxModel(7680, "vocals", 1.021),
    "Kim_Vocal_2": MdxModel(7680, "vocals", 1.009),
}
"""MDX-Net models by file name, from UVR's own table (`model_data_new.json`)."""


class Separator(Protocol):
    """`sample_rate` of what it takes and gives; both are mono and of the same length."""

    sample_rate: int

    def separate(self, blocks: Iterable[Signal]) -> Iterator[Signal]:
        """Yield the voices of one recording in pieces [N], from pieces of any length."""


def load_separator(path: Path, mdx: MdxModel | None = None, sample_rate: int | None = None) -> Separator:
    """Load the separator in an ONNX file.

    Args:
        mdx: for the MDX-Net class; None: by the file's name.
        sample_rate: of networks on frames and waveforms; None: the file's `sample_rate` among its metadata, or 16 kHz.

    Raises:
        ValueError: the file's inputs are of no kind that is known, or an MDX-Net file of unknown name without `mdx`.
    """
    session = single_thread_session(path)
    first, *states = session.get_inputs()
    shape = list(first.shape)
    if len(shape) == 4 and shape[1] == _MDX_CHANNELS and not states:
        mdx_model = mdx or MDX_MODELS.get(path.stem)
        if mdx_model is None:
            raise ValueError(
                f"{path}: an MDX-Net model of unknown name: give separate.mdx: {{n_fft: ..., stem: vocals or rest, "
                f"compensate: ...}} from its author, or one of {', '.join(MDX_MODELS)}"
            )
        return MdxSeparator(session, mdx_model)
    metadata_rate = session.get_modelmeta().custom_metadata_map.get("sample_rate")
    rate = sample_rate or (int(metadata_rate) if metadata_rate else _ENHANCER_RATE)
    if len(shape) == 4 and shape[2:] == [1, 2] and isinstance(shape[1], int) and states:
        return FrameEnhancer(session, rate)
    if len(shape) in (2, 3) and all(size in (1, None) or isinstance(size, str) for size in shape[:-1]):
        return WaveformSeparator(session, rate)
    raise ValueError(
        f"{path}: takes {first.name} {shape}: known are a spectrogram [1, 4, bins, frames], a frame [1, bins, 1, 2] "
        "with states, and a waveform [1, samples]"
    )


class MdxSeparator:
    """MDX-Net as UVR exports it: the lower bins of a 44.1 kHz stereo spectrogram, hop 1024, Hann window, centred.

    The mono sound goes in on both sides; the voices are what comes out, or the mixture less that.

    Source: Kim et al., "KUIELab-MDX-Net" (2021); kuielab/mdx-net and Anjok07/ultimatevocalremovergui.

    Raises:
        ValueError: a file whose sizes are not fixed, or do not fit `n_fft`.
    """

    def __init__(self, session: Any, model: MdxModel) -> None:
        self.sample_rate = _MDX_RATE
        self._session, self._model = session, model
        entry = session.get_inputs()[0]
        self._input, (_, _, bins, frames) = entry.name, entry.shape
        if not isinstance(bins, int) or not isinstance(frames, int) or bins > model.n_fft // 2 + 1:
            raise ValueError(
                f"MDX-Net: {entry.shape} with n_fft {model.n_fft}: fixed bins, at most n_fft / 2 + 1"
            )
        self._bins = bins
        self._length = _MDX_HOP * (frames - 1)

    def separate(self, blocks: Iterable[Signal]) -> Iterator[Signal]:
        return process_crossfaded(
            blocks, self._length, max(self._model.n_fft // 2, self._length // 8), self._piece
        )

    def _piece(self, mixture_N: Signal) -> Signal:
        import torch

        n_fft = self._model.n_fft
        window = torch.hann_window(n_fft)
        spectrum_KT = torch.stft(
            torch.from_numpy(mixture_N), n_fft, _MDX_HOP, window=window, center=True, return_complex=True
        )
        parts = torch.view_as_real(spectrum_KT[: self._bins]).permute(2, 0, 1).clone()
        parts[:, :_MDX_SILENT_BINS] = 0
        output = self._session.run(None, {self._input: torch.cat([parts, parts])[None].numpy()})[0][0]
        both = torch.from_numpy(output).reshape(2, 2, *output.shape[1:]).mean(dim=0)  # left and right
        made_KT = torch.zeros_like(spectrum_KT)
        made_KT[: self._bins] = torch.complex(both[0], both[1])
        made_N: Signal = torch.istft(
            made_KT, n_fft, _MDX_HOP, window=window, center=True, length=len(mixture_N)
        ).numpy()
        return made_N if self._model.stem == "vocals" else mixture_N - self._model.compensate * made_N


class FrameEnhancer:
    """One frame at a time, `[1, K, 1, 2]` real and imaginary, with states that start at zero and run on.

    Frames of 2 (K - 1) samples, half of that apart, under the root of a Hann window, as GTCRN's.

    Source: Rong et al., "GTCRN" (2024); Xiaobin-Rong/gtcrn, stream/gtcrn_stream.py.
    """

    def __init__(self, session: Any, sample_rate: int) -> None:
        self.sample_rate = sample_rate
        self._session = session
        self._n_fft = 2 * (session.get_inputs()[0].shape[1] - 1)

    def separate(self, blocks: Iterable[Signal]) -> Iterator[Signal]:
        n_fft, hop = self._n_fft, self._n_fft // 2
        window_N = np.sqrt(np.hanning(n_fft + 1)[:-1])
        network = _Stateful(self._session)
        waiting_N, tail_N = np.zeros(0, np.float32), np.zeros(hop)
        begun = False
        skipped = num_received = num_emitted = 0
        for block in _and_silence(blocks, n_fft):
            num_received += len(block.samples_N) if block.real else 0
            waiting_N = np.concatenate([waiting_N, block.samples_N])
            if not begun and len(waiting_N) > hop:  # the first frame is centred on the first sample
                waiting_N, begun = np.concatenate([waiting_N[hop:0:-1], waiting_N]), True
            pieces = []
            for start in range(0, len(waiting_N) - n_fft + 1, hop):
                spectrum_K = np.fft.rfft(waiting_N[start : start + n_fft] * window_N)
                parts = np.stack([spectrum_K.real, spectrum_K.imag], axis=-1)[None, :, None].astype(
                    np.float32
                )
                output = network.run(parts)[0, :, 0]
                frame_N = np.fft.irfft(output[:, 0] + 1j * output[:, 1]) * window_N
                pieces.append(tail_N + frame_N[:hop])
                tail_N = frame_N[hop:]
            waiting_N = waiting_N[len(pieces) * hop :]
            made_N = np.concatenate(pieces).astype(np.float32) if pieces else np.zeros(0, np.float32)
            dropped = min(hop - skipped, len(made_N))  # the mirrored half frame before the first sample
            skipped += dropped
            made_N = made_N[dropped:]
            yield made_N[: num_received - num_emitted]
            num_emitted += len(made_N)


class WaveformSeparator:
    """A waveform in, one of the same length out; with states in order, without them in pieces that overlap.

    A network whose input has a fixed length is given pieces of that length, any other pieces of 10 s.
    """

    def __init__(self, session: Any, sample_rate: int) -> None:
        self.sample_rate = sample_rate
        self._session = session
        entry, *states = session.get_inputs()
        self._with_states, self._dimensions = bool(states), len(entry.shape)
        length = entry.shape[-1]
        self._length = length if isinstance(length, int) else round(_PIECE_S * sample_rate)

    def separate(self, blocks: Iterable[Signal]) -> Iterator[Signal]:
        network = _Stateful(self._session)

        def piece(samples_N: Signal) -> Signal:
            shaped = samples_N.reshape((1,) * (self._dimensions - 1) + (-1,))
            output = network.run(shaped)
            if output.size != samples_N.size:
                raise ValueError(
                    f"the network gives {list(output.shape)} for {list(shaped.shape)}: one voice, as long"
                )
            return output.reshape(-1).astype(np.float32)

        fade = 0 if self._with_states else round(_FADE_SHARE * self._length)
        return process_crossfaded(blocks, self._length, fade, piece)


def process_crossfaded(
    blocks: Iterable[Signal], length: int, fade: int, process: Callable[[Signal], Signal]
) -> Iterator[Signal]:
    """`process` over a stream in pieces of `length`, each faded linearly into the next over `fade` samples.

    Silence fills up the first piece before the start (by `fade`) and the last one after the end. At most one piece and
    one block are held.

    Returns:
        As many samples as came in.
    """
    step = length - fade
    rise_N: Signal = ((np.arange(fade) + 0.5) / max(fade, 1)).astype(np.float32)
    waiting_N: Signal = np.zeros(fade, np.float32)
    tail_N: Signal = np.zeros(fade, np.float32)
    num_received, num_emitted = 0, -fade
    for block in _and_silence(blocks, length):
        num_received += len(block.samples_N) if block.real else 0
        waiting_N = np.concatenate([waiting_N, block.samples_N])
        start = 0
        while start + length <= len(waiting_N) and num_emitted < num_received:
            found_N = process(waiting_N[start : start + length]).copy()
            found_N[:fade] = found_N[:fade] * rise_N + tail_N
            tail_N = found_N[step:] * rise_N[::-1]
            fresh_N = found_N[max(0, -num_emitted) : step][: max(0, num_received - max(num_emitted, 0))]
            num_emitted += step
            start += step
            yield fresh_N
        waiting_N = waiting_N[start:]


# Private


class _Stateful:
    """A network with states, which start at zero: the outputs after the first are their next values."""

    def __init__(self, session: Any) -> None:
        entry, *states = session.get_inputs()
        self._session, self._input = session, entry.name
        self._names = [state.name for state in states]
        self._states = [np.zeros(state.shape, np.float32) for state in states]

    def run(self, value: Signal) -> Signal:
        inputs = {self._input: value, **dict(zip(self._names, self._states, strict=True))}
        output, *states = self._session.run(None, inputs)
        self._states = states[: len(self._names)]
        result: Signal = output
        return result


class _Block(NamedTuple):
    samples_N: Signal
    real: bool


def _and_silence(blocks: Iterable[Signal], length: int) -> Iterator[_Block]:
    """Yield the blocks, then silence, so that the last partial piece is flushed."""
    for samples_N in blocks:
        yield _Block(samples_N, True)
    yield _Block(np.zeros(length, np.float32), False)
