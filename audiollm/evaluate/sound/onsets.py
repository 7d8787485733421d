"""The moments at which a sound begins."""

from __future__ import annotations

import numpy as np

from audiollm.audio import Waveform
from audiollm.evaluate.sound.sound_judges import Vector

ONSET_TOLERANCE_S = 0.2
"""An onset this near to the truth is in time."""
_ONSET_RATE, _ONSET_HOP = 16000, 160
_ONSET_RANGE_DB = 40.0
"""Sound that is further below the loudest moment does not begin."""
_RISE_HOPS, _APART_HOPS = 3, 15
_SILENT_PEAK = 1e-4


def energy_onsets(sound: Waveform) -> Vector:
    """Seconds at which the energy rises: peaks of the level's rise, by librosa's detector; none in silence."""
    import librosa
    from librosa.onset import onset_detect

    samples_N = sound.mono().resample(_ONSET_RATE).samples_CN[0].numpy()
    if np.abs(samples_N).max(initial=0.0) < _SILENT_PEAK:
        return np.zeros(0)
    power_T = librosa.feature.rms(y=samples_N, frame_length=2 * _ONSET_HOP, hop_length=_ONSET_HOP)[0] ** 2
    level_T = librosa.power_to_db(power_T, ref=np.max, top_db=_ONSET_RANGE_DB)
    rise_T = np.maximum(0.0, level_T - np.pad(level_T, (_RISE_HOPS, 0), mode="edge")[:-_RISE_HOPS])
    onset_frames = onset_detect(
        onset_envelope=rise_T, sr=_ONSET_RATE, hop_length=_ONSET_HOP, delta=0.2, wait=_APART_HOPS
    )
    return np.asarray(onset_frames * _ONSET_HOP / _ONSET_RATE, np.float64)
