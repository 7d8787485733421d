"""How good a recording sounds: DNSMOS P.835 (signal, background, overall; 1 to 5), the model of speechmos.

Shapes: N samples at 16 kHz.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipelines.annotate.voice_activity import package_file, single_thread_session

SAMPLE_RATE = 16000
WINDOW_S = 9.01
_WINDOW = int(WINDOW_S * SAMPLE_RATE)
# speechmos/dnsmos.py, `get_polyfit_val`: from the network's outputs to opinion scores
_SIG = (-0.08397278, 1.22083953, 0.0052439)
_BAK = (-0.13166888, 1.60915514, -0.39604546)
_OVR = (-0.06766283, 1.11546468, 0.04602535)


@dataclass(frozen=True)
class Quality:
    """Opinion scores of P.835, 1 (bad) to 5 (excellent)."""

    sig: float
    bak: float
    ovr: float


class Dnsmos:
    """The `sig_bak_ovr` model in one single-thread session (speechmos opens two, and runs P.808 as well)."""

    def __init__(self) -> None:
        self._session = single_thread_session(package_file("speechmos", "dnsmos_models/sig_bak_ovr.onnx"))

    def score(self, samples_N: NDArray[np.float32], max_windows: int | None = None) -> Quality:
        """Mean scores over windows of 9.01 s, a second apart; a shorter clip is doubled until it fills one.

        Args:
            samples_N: mono at 16 kHz in [-1, 1], not empty.
            max_windows: at most so many windows, spread evenly (each costs 0.2 s); None: all, as speechmos.

        Source: Reddy et al., DNSMOS P.835, and speechmos/dnsmos.py.
        """
        if len(samples_N) == 0:
            raise ValueError("an empty clip has no quality")
        while len(samples_N) < _WINDOW:
            samples_N = np.append(samples_N, samples_N)
        num_windows = int(len(samples_N) // SAMPLE_RATE - WINDOW_S) + 1
        starts = [
            s for s in range(0, num_windows * SAMPLE_RATE, SAMPLE_RATE) if s + _WINDOW <= len(samples_N)
        ] or [0]
        if max_windows is not None and len(starts) > max_windows:
            chosen = np.linspace(0, len(starts) - 1, max_windows).round().astype(int)
            starts = [starts[index] for index in chosen]
        raw = np.array([self._run(samples_N[start : start + _WINDOW]) for start in starts])
        scores = [np.polyval(fit, raw[:, i]).mean() for i, fit in enumerate((_SIG, _BAK, _OVR))]
        return Quality(*(float(score) for score in scores))

    def _run(self, window_N: NDArray[np.float32]) -> NDArray[np.float32]:
        outputs: NDArray[np.float32] = self._session.run(
            None, {"input_1": window_N[None].astype(np.float32)}
        )[0][0]
        return outputs
