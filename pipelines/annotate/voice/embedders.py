"""Voice embedders: networks that turn a second or two of speech into a point on the unit sphere.

`Ge2eVoices` is the network that the package resemblyzer bundles, rebuilt here because the package itself wants a second
voice activity detector; `XVectorVoices` is any speaker verification model of transformers in a local folder.

Shapes: W windows, N samples at 16 kHz, F frames of 10 ms, M mel bands, D embedding dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

SAMPLE_RATE = 16000
_FRAME, _HOP, _MELS, _HIDDEN = 400, 160, 40, 256
_LEVEL_DBFS = -30.0
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


def _select_weights(prefix: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
