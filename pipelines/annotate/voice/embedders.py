"""Voice embedders: networks that turn a second or two of speech into a point on the unit sphere.

`Ge2eVoices` is the network that the package resemblyzer bundles, rebuilt here because the package itself wants a second
voice activity detector; `WespeakerVoices` is an ONNX file of WeSpeaker; `XVectorVoices` is any speaker verification
model of transformers in a local folder.

Shapes: W windows, N samples at 16 kHz, F frames of 10 ms, M mel bands, D embedding dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from audiollm.errors import ConfigError
from audiollm.onnx_models import single_thread_session

SAMPLE_RATE = 16000
_FRAME, _HOP, _MELS, _HIDDEN = 400, 160, 40, 256
_LEVEL_DBFS = -30.0
_WESPEAKER_MELS, _INT16 = 80, 32768.0
_BATCH = 64


class Voices(Protocol):
    """Interface of a voice embedder for diarization.

    `name` identifies the embedder in the results.
    """

    name: str

    def embed(self, windows: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
        """The voice of each window, `[W, D]`, of length 1. A window is mono at 16 kHz, `[N]`, of any length above 0."""


class Ge2eVoices:
    """Three LSTM layers over mel bands, trained to tell speakers apart (Wan et al., arXiv 1710.10467).

    The weights, and what goes in, are those of resemblyzer/voice_encoder.py: linear mel power of 25 ms frames, a window
    that is too quiet raised to -30 dBFS.

    Args:
        path: `pretrained.pt` of the installed package.

    Raises:
        RuntimeError: the file holds another network.
    """

    name = "resemblyzer"

    def __init__(self, path: Path) -> None:
        from torchaudio.functional import melscale_fbanks

        weights = torch.load(path, map_location="cpu", weights_only=True)["model_state"]
        self._lstm = nn.LSTM(_MELS, _HIDDEN, num_layers=3, batch_first=True).eval()
        self._linear = nn.Linear(_HIDDEN, _HIDDEN).eval()
        self._lstm.load_state_dict(_select_weights("lstm.", weights))
        self._linear.load_state_dict(_select_weights("linear.", weights))
        filters_FM = melscale_fbanks(
            _FRAME // 2 + 1, 0.0, SAMPLE_RATE / 2, _MELS, SAMPLE_RATE, norm="slaney", mel_scale="slaney"
        )
        self._mel_MF: Tensor = filters_FM.T
        self._taper_N = torch.hann_window(_FRAME)

    @torch.no_grad()
    def embed(self, windows: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
        """The voice of each window, `[W, D]`, of length 1."""
        result_WD = np.zeros((len(windows), _HIDDEN), np.float32)
        longest_first = sorted(range(len(windows)), key=lambda index: -len(windows[index]))
        for begin in range(0, len(windows), _BATCH):
            indices = longest_first[begin : begin + _BATCH]
            mels = [self._mels(windows[index]) for index in indices]
            packed = nn.utils.rnn.pack_sequence(mels)
            hidden_WD = self._lstm(packed)[1][0][-1]
            result_WD[indices] = nn.functional.normalize(self._linear(hidden_WD).relu(), dim=1).numpy()
        return result_WD

    def _mels(self, window_N: NDArray[np.float32]) -> Tensor:
        """`[F, M]`, F as many as whole hops fit."""
        frames = max(1, len(window_N) // _HOP)
        level_dbfs = 20 * float(np.log10(max(1e-8, np.sqrt(np.mean(np.square(window_N, dtype=np.float64))))))
        loud_N = torch.from_numpy(window_N * np.float32(10 ** (max(0.0, _LEVEL_DBFS - level_dbfs) / 20)))
        spectrum_FT = torch.stft(
            loud_N, _FRAME, _HOP, window=self._taper_N, pad_mode="constant", return_complex=True
        )
        power_FT = spectrum_FT.real.square() + spectrum_FT.imag.square()
        return (self._mel_MF @ power_FT).T[:frames]


class XVectorVoices:
    """A speaker verification model of transformers (WavLM-SV and other x-vector heads) in a local folder.

    Raises:
        ConfigError: the folder holds none, or holds pickled weights only.
    """

    def __init__(self, folder: Path) -> None:
        from audiollm.evaluate.judges.pretrained import PretrainedSpeakerJudge

        self._judge = PretrainedSpeakerJudge(folder)
        self.name = self._judge.name

    def embed(self, windows: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
        """The voice of each window, `[W, D]`, of length 1."""
        voices = [self._judge.embed(torch.from_numpy(window_N)[None], SAMPLE_RATE) for window_N in windows]
        return nn.functional.normalize(torch.stack(voices), dim=1).numpy()


class WespeakerVoices:
    """A speaker model that WeSpeaker exported: `feats` `[W, F, 80]` in, one vector for each window out.

    What goes in are Kaldi's log mel energies of 25 ms frames every 10 ms, Hamming window, no dither, of samples in the
    range of 16 bits, less their mean over the window.

    Raises:
        ConfigError: the file is no such model.

    Source: wespeakerruntime 1.0.1, `speaker.py`; wenet-e2e/wespeaker, `wespeaker/bin/export_onnx.py`.
    """

    def __init__(self, path: Path) -> None:
        self._session = _open_session(path)
        inputs, outputs = self._session.get_inputs(), self._session.get_outputs()
        shape = list(inputs[0].shape) if len(inputs) == 1 else []
        if len(shape) != 3 or shape[2] not in (_WESPEAKER_MELS, None) or len(outputs) != 1:
            seen = ", ".join(f"{value.name} {value.shape}" for value in (*inputs, *outputs))
            raise ConfigError(
                f"no speaker model of WeSpeaker: it has {seen}",
                str(path),
                f"give a file with one input [windows, frames, {_WESPEAKER_MELS}] and one output",
            )
        self.name, self._input = path.stem, inputs[0].name

    def embed(self, windows: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
        """The voice of each window, `[W, D]`, of length 1.

        Raises:
            ValueError: the model gives something else than a vector for each window.
        """
        features = [self._features(window_N) for window_N in windows]
        voices: dict[int, NDArray[np.float32]] = {}
        for length in sorted({len(feature_FM) for feature_FM in features}):
            same = [index for index, feature_FM in enumerate(features) if len(feature_FM) == length]
            for begin in range(0, len(same), _BATCH):
                indices = same[begin : begin + _BATCH]
                batch = np.stack([features[index] for index in indices])
                (voices_WD,) = self._session.run(None, {self._input: batch})
                if voices_WD.ndim != 2 or len(voices_WD) != len(indices) or not np.isfinite(voices_WD).all():
                    raise ValueError(f"{self.name} gives {voices_WD.shape} for {len(indices)} windows")
                voices |= dict(zip(indices, voices_WD, strict=True))
        joined_WD = torch.from_numpy(
            np.stack([voices[index] for index in range(len(windows))]).astype(np.float32)
        )
        return nn.functional.normalize(joined_WD, dim=1).numpy()

    def _features(self, window_N: NDArray[np.float32]) -> NDArray[np.float32]:
        """`[F, M]`, at least one frame."""
        from torchaudio.compliance.kaldi import fbank

        padded_N = np.pad(window_N, (0, max(0, _FRAME - len(window_N))))
        mels_FM = fbank(
            torch.from_numpy(padded_N * np.float32(_INT16))[None],
            num_mel_bins=_WESPEAKER_MELS,
            sample_frequency=SAMPLE_RATE,
            window_type="hamming",
            dither=0.0,
        ).numpy()
        return np.asarray(mels_FM - mels_FM.mean(axis=0), np.float32)


def _open_session(path: Path) -> Any:
    """Raises: ConfigError: the file is no ONNX model."""
    try:
        return single_thread_session(path)
    except Exception as error:  # onnxruntime has classes of its own
        reason = str(error).splitlines()[0]
        raise ConfigError(f"no ONNX model: {reason}", str(path), "copy the file again") from error


def _select_weights(prefix: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
