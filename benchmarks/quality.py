"""Accuracy and cost of the estimates of `quality`, on speech whose noise, bandwidth and room are known.

    python benchmarks/quality.py [--data ../shared/data] [--fit]

- noise: clean recordings mixed with white noise, rain, sea, a helicopter and babble at 0 to 30 dB; mean error in dB and
  correlation with the truth, beside WADA-SNR's (Kim and Stern, 2008).
- bandwidth: the same recordings limited to 4 kHz and brought to 24 kHz, at 16 bits and under faint hiss.
- reverberation: recordings in measured and simulated rooms that took no part in the fit.
- DNSMOS: the share of the steps from 40 dB down to 0 dB at which the overall score falls.
- pitch: gross errors (20 %) on made voices of known pitch from 80 to 380 Hz, and cost, beside librosa's pyin.
- real time factor of each, on one thread.

`--fit` prints the weights of `pipelines/annotate/steps/quality.py`, fitted on other recordings in
rooms of decaying noise.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import soxr
from measure import print_row
from numpy.typing import NDArray
from scipy.signal import butter, fftconvolve, lfilter, sosfilt

from audiollm.audio import load
from audiollm.audio.pitch import CENTRE_S, track_pitch
from pipelines.annotate.steps.quality import (
    SAMPLE_RATE,
    Dnsmos,
    band_energies,
    bandwidth_hz,
    log_decay_times,
    reverberation,
    signal_to_noise_db,
)

Signal = NDArray[np.float32]
CLEAN = ("1624-142933", "19-198", "118-121721", "1447-130550", "1183-124566", "254-12312")
ROOMS = {
    "small": "audiomentations/demo/ir/impulse_response_0.wav",
    "large": "audiomentations/demo/ir/rir48000.wav",
    "hall": "audiomentations/demo/ir/stereo_impulse_response.wav",
    "simulated": "DeepFilterNet/assets/rir_sim_1001_w11.7_l2.6_h2.5_rt60_0.7919.wav",
}

_print_quality_line = partial(print_row, "quality", more_is_better=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--fit", action="store_true")
    arguments = parser.parse_args()
    libri = sorted((arguments.data / "librispeech_speakers/librispeech_train-clean-100").glob("*.flac"))
    if not libri:
        parser.error(f"no recordings below {arguments.data}: give the folder of the shared data")
    if arguments.fit:
        fit([_sound(path) for path in libri[:26]])
        return
    clean = [_sound(next(path for path in libri if path.name.startswith(name))) for name in CLEAN]
    noise(clean, arguments.data, libri[30:38])
    bandwidth(clean)
    rooms([_sound(path) for path in libri[26:]], arguments.data / "noisy_pairs")
    dnsmos(clean)
    pitch()
    speed(clean)


def noise(clean: list[Signal], data: Path, babble_paths: list[Path]) -> None:
    """Error and correlation of `snr_db`, for each noise and over all of them."""
    dice = np.random.default_rng(0)
    esc10 = data / "esc10"
    noises: dict[str, Callable[[int], Signal]] = {
        "white": lambda length: dice.normal(size=length).astype(np.float32),
        "rain": lambda length: np.resize(_sound(_nth(esc10, "002*", 0)), length),
        "sea": lambda length: np.resize(_sound(_nth(esc10, "003*", 1)), length),
        "helicopter": lambda length: np.resize(_sound(_nth(esc10, "007*", 2)), length),
        "babble": lambda length: np.sum([np.resize(_sound(path), length) for path in babble_paths], axis=0),
    }
    wada = _wada()
    truth, estimates, peer = [], [], []
    for name, make in noises.items():
        errors, peer_errors = [], []
        for speech_N in clean:
            noise_N = make(len(speech_N))
            for snr_db in (0, 5, 10, 15, 20, 25, 30):
                mixture_N = _mix(speech_N, noise_N, snr_db)
                ours, theirs = _snr(mixture_N), wada(mixture_N)
                errors.append(abs(ours - snr_db))
                peer_errors.append(abs(theirs - snr_db))
                truth.append(snr_db)
                estimates.append(ours)
                peer.append(theirs)
        means = float(np.mean(errors)), float(np.mean(peer_errors))
        _print_quality_line(f"snr, mean error, {name}", *means, "dB, WADA as peer", more_is_better=False)
    ours_r, peer_r = (float(np.corrcoef(truth, values)[0, 1]) for values in (estimates, peer))
    _print_quality_line("snr, correlation", ours_r, peer_r, "r, WADA as peer")


def bandwidth(clean: list[Signal]) -> None:
    """Mean distance from 8,000 Hz of what is whole, and from 4,000 Hz of what was once at 8 kHz."""
    dice = np.random.default_rng(1)
    wide = [bandwidth_hz(samples_N, SAMPLE_RATE) or 0.0 for samples_N in clean]
    narrow, noisy = [], []
    for samples_N in clean:
        small_M = soxr.resample(samples_N, SAMPLE_RATE, 8000)
        wide_N = np.round(soxr.resample(small_M, 8000, 24000) * 2**15) / 2**15
        narrow.append(bandwidth_hz(wide_N.astype(np.float32), 24000) or 0.0)
        hissing_N = wide_N + dice.normal(0, 10 ** (-60 / 20), len(wide_N))
        noisy.append(bandwidth_hz(hissing_N.astype(np.float32), 24000) or 0.0)
    for case, values, target in (
        ("whole", wide, 8000),
        ("8 kHz at 24 kHz", narrow, 4000),
        ("the same and hiss at -60 dBFS", noisy, 4000),
    ):
        error = float(np.mean(np.abs(np.array(values) - target)))
        _print_quality_line(
            f"bandwidth, mean error, {case}", error, 0.0, f"Hz of {target}", more_is_better=False
        )


def rooms(speech: list[Signal], folder: Path) -> None:
    """Reverberation time and clarity heard in rooms, beside those of the rooms' impulse responses."""
    truths, estimates = [], []
    for name, file in ROOMS.items():
        response_N = load(folder / file, sample_rate=SAMPLE_RATE).samples_CN[0].numpy()
        measured = [reverberation(_energies(_in_room(samples_N, response_N))) for samples_N in speech]
        values = np.array([room for room in measured if room is not None])
        truth = (_rt60_s(response_N), _c50_db(response_N))
        _print_quality_line(
            f"rt60, median, {name}", float(np.median(values[:, 0])), truth[0], "s, room's own as peer"
        )
        _print_quality_line(
            f"c50, median, {name}", float(np.median(values[:, 1])), truth[1], "dB, room's own as peer"
        )
        truths += [truth] * len(values)
        estimates += values.tolist()
    truth_2, found_2 = np.array(truths), np.array(estimates)
    errors = np.abs(truth_2 - found_2).mean(axis=0)
    _print_quality_line(
        "rt60, mean error",
        errors[0],
        float(truth_2[:, 0].mean()),
        "s, mean truth as peer",
        more_is_better=False,
    )
    _print_quality_line(
        "c50, mean error", errors[1], float(np.ptp(truth_2[:, 1])), "dB, range as peer", more_is_better=False
    )
    for index, name in enumerate(("rt60", "c50")):
        correlation = float(np.corrcoef(truth_2[:, index], found_2[:, index])[0, 1])
        _print_quality_line(f"{name}, correlation", correlation, 1.0, "r")


def dnsmos(clean: list[Signal]) -> None:
    """Share of steps of 10 dB at which the overall score falls, and the mean scores from clean to 0 dB."""
    model, dice = Dnsmos(), np.random.default_rng(2)
    scores = []
    for samples_N in clean:
        noise_N = dice.normal(size=len(samples_N)).astype(np.float32)
        mixtures = [_mix(samples_N, noise_N, snr_db) for snr_db in (40, 30, 20, 10, 0)]
        scores.append([model.score(mixture_N, 1).ovr for mixture_N in mixtures])
    falls = float((np.diff(np.array(scores), axis=1) < 0).mean())
    means = " ".join(f"{value:.2f}" for value in np.mean(scores, axis=0))
    _print_quality_line("DNSMOS falls with noise", falls, 1.0, f"share of steps; 40 30 20 10 0 dB: {means}")


def pitch() -> None:
    """Share of voiced frames that are more than 20 % off, and seconds of work a second of sound."""
    import librosa

    def theirs(samples_N: Signal) -> tuple[NDArray[np.float64], NDArray[np.bool_], float]:
        tracked = librosa.pyin(
            samples_N, fmin=60, fmax=500, sr=SAMPLE_RATE, frame_length=1280, hop_length=160
        )
        return tracked[0], tracked[1], 0.0

    def ours(samples_N: Signal) -> tuple[NDArray[np.float64], NDArray[np.bool_], float]:
        return *track_pitch(samples_N), CENTRE_S

    theirs(_voice(100, 40)[0][:SAMPLE_RATE])  # compiles
    for snr_db in (40, 10):
        gross: dict[str, list[float]] = {"ours": [], "theirs": []}
        cost = {"ours": 0.0, "theirs": 0.0}
        for base_hz in (80, 120, 160, 200, 250, 300, 380):
            samples_N, pitch_N = _voice(base_hz, snr_db)
            for name, track in (("ours", ours), ("theirs", theirs)):
                start = time.process_time()
                pitch_hz_F, voiced_F, offset_s = track(samples_N)
                cost[name] += time.process_time() - start
                places_F = ((np.arange(len(pitch_hz_F)) * 0.01 + offset_s) * SAMPLE_RATE).astype(int)
                truth_F = pitch_N[np.minimum(places_F, len(pitch_N) - 1)]
                gross[name].append(float((np.abs(pitch_hz_F / truth_F - 1)[voiced_F] > 0.2).mean()))
        share, peer_share = (float(np.mean(gross[name])) for name in ("ours", "theirs"))
        _print_quality_line(
            f"pitch, gross errors at {snr_db} dB",
            share,
            peer_share,
            "share, pyin as peer",
            more_is_better=False,
        )
        seconds = 7 * 4.0
        ours_cost, peer = (cost[name] / seconds for name in ("ours", "theirs"))
        _print_quality_line(
            f"pitch, cost at {snr_db} dB",
            ours_cost,
            peer,
            "real time factor, pyin as peer",
            more_is_better=False,
        )


def speed(clean: list[Signal]) -> None:
    """Seconds of work a second of sound."""
    model = Dnsmos()
    seconds = sum(len(samples_N) for samples_N in clean) / SAMPLE_RATE
    works: dict[str, Callable[[Signal], object]] = {
        "band energies": band_energies,
        "snr (with band energies)": _snr,
        "reverberation (with band energies)": lambda samples_N: reverberation(_energies(samples_N)),
        "bandwidth": lambda samples_N: bandwidth_hz(samples_N, SAMPLE_RATE),
        "DNSMOS, 3 windows": lambda samples_N: model.score(samples_N, 3),
    }
    for name, work in works.items():
        start = time.process_time()
        for samples_N in clean:
            work(samples_N)
        _print_quality_line(
            f"cost, {name}",
            (time.process_time() - start) / seconds,
            1.0,
            "real time factor",
            more_is_better=False,
        )


def fit(speech: list[Signal]) -> None:
    """Least squares (ridge 1) from the decays heard to the logarithm of rt60 and to c50, 20 rooms a recording.

    The reverberation time follows from the two medians alone: with all six decays it errs more in real rooms.
    """
    dice = np.random.default_rng(3)
    features, rt60_logs, c50s = [], [], []
    for samples_N in speech:
        for _ in range(20):
            rt60_s = float(np.exp(dice.uniform(np.log(0.12), np.log(1.8))))
            response_N = _noise_room(rt60_s, float(dice.uniform(-8, 14)), dice)
            length = round(SAMPLE_RATE * dice.uniform(3, 10))
            start = int(dice.integers(0, max(1, len(samples_N) - length)))
            heard_N = _in_room(samples_N, response_N)[start : start + length]
            hiss_N = dice.normal(size=len(heard_N)).astype(np.float32)
            decays = log_decay_times(_energies(_mix(heard_N, hiss_N, dice.uniform(15, 50))))
            if decays is not None:
                features.append(decays)
                rt60_logs.append(np.log(rt60_s))
                c50s.append(_c50_db(response_N))
    design, late = np.array(features), np.array(c50s) < 25  # what is later than 50 ms is heard
    medians = (0, len(design[0]) // 2)
    for name, targets, columns in (
        ("_RT60_WEIGHTS", np.array(rt60_logs), medians),
        ("_C50_WEIGHTS", np.array(c50s), tuple(range(len(design[0])))),
    ):
        inputs, expected = design[late][:, columns], targets[late]
        centred = inputs - inputs.mean(axis=0)
        weights = np.linalg.solve(
            centred.T @ centred + np.eye(len(columns)), centred.T @ (expected - expected.mean())
        )
        constant = expected.mean() - inputs.mean(axis=0) @ weights
        error = np.abs(inputs @ weights + constant - expected).mean()
        print(f"{name} = ({', '.join(f'{w:.4g}' for w in (*weights, constant))})  # mean error {error:.3g}")


# Private


def _sound(path: Path) -> Signal:
    samples_N: Signal = load(path, 0.0, 12.0, SAMPLE_RATE, mono=True).samples_CN[0].numpy()
    return samples_N - samples_N.mean()


def _nth(folder: Path, pattern: str, index: int) -> Path:
    return sorted(path for path in folder.glob(f"{pattern}/*") if path.is_file())[index]


def _mix(speech_N: Signal, noise_N: Signal, snr_db: float) -> Signal:
    """Speech's power while somebody speaks over the noise's, both above 62 Hz."""
    high_pass = butter(4, 62, "highpass", fs=SAMPLE_RATE, output="sos")
    frames_FN = sosfilt(high_pass, speech_N)[: len(speech_N) // 320 * 320].reshape(-1, 320)
    power_F = (frames_FN**2).mean(axis=1)
    speech_power = power_F[power_F > np.percentile(power_F, 95) / 1000].mean()
    gain = np.sqrt(speech_power / (sosfilt(high_pass, noise_N) ** 2).mean() / 10 ** (snr_db / 10))
    mixture_N = speech_N + gain * noise_N
    return (mixture_N / max(1.0, float(np.abs(mixture_N).max()))).astype(np.float32)


def _voice(base_hz: float, snr_db: float) -> tuple[Signal, NDArray[np.float64]]:
    """Four seconds of pulses through three resonances, in noise, and their pitch, [N] each."""
    dice = np.random.default_rng(round(base_hz))
    times_N = np.arange(4 * SAMPLE_RATE) / SAMPLE_RATE
    pitch_N = base_hz * 2 ** ((2 * np.sin(4.4 * times_N) + 1.5 * np.sin(14.5 * times_N + 1)) / 12)
    sound_N = np.diff(np.floor(np.cumsum(pitch_N) / SAMPLE_RATE), prepend=0)
    sound_N = lfilter([1], np.convolve([1, -0.95], [1, -0.9]), sound_N)
    for formant_hz, width_hz in ((500, 80), (1500, 100), (2500, 140)):
        radius = np.exp(-np.pi * width_hz / SAMPLE_RATE)
        angle = 2 * np.pi * formant_hz / SAMPLE_RATE
        sound_N = lfilter([1], [1, -2 * radius * np.cos(angle), radius**2], sound_N)
    sound_N *= 0.5 / np.abs(sound_N).max()
    sound_N += dice.normal(0, np.sqrt((sound_N**2).mean() / 10 ** (snr_db / 10)), len(sound_N))
    return sound_N.astype(np.float32), pitch_N


def _energies(samples_N: Signal) -> NDArray[np.float64]:
    energies_FB = band_energies(samples_N)
    assert energies_FB is not None, "a second of sound at least"
    return energies_FB


def _snr(samples_N: Signal) -> float:
    return signal_to_noise_db(_energies(samples_N))


def _wada() -> Callable[[Signal], float]:
    """WADA-SNR: speech as a gamma law of shape 0.4, noise as a normal one; its table is simulated here."""
    dice = np.random.default_rng(4)
    speech_N = dice.gamma(0.4, 1, 1_000_000) * dice.choice([-1, 1], 1_000_000)
    speech_N /= speech_N.std()
    noise_N = dice.normal(size=1_000_000)
    grid = np.arange(-20, 101)

    def statistic(samples_N: NDArray[np.floating]) -> float:
        sizes_N = np.maximum(np.abs(samples_N), 1e-10)
        return float(np.log(sizes_N.mean()) - np.log(sizes_N).mean())

    table = np.maximum.accumulate([statistic(speech_N * 10 ** (db / 20) + noise_N) for db in grid])
    return lambda samples_N: float(np.interp(statistic(samples_N), table, grid))


def _noise_room(rt60_s: float, direct_db: float, dice: np.random.Generator) -> Signal:
    """A direct sound, and from 2.5 ms on noise that decays; `direct_db` is the first over the second."""
    times_N = np.arange(round(SAMPLE_RATE * rt60_s * 1.2)) / SAMPLE_RATE
    tail_N = dice.normal(size=len(times_N)) * np.exp(-np.log(1000) * times_N / rt60_s)
    tail_N[: round(0.0025 * SAMPLE_RATE)] = 0
    tail_N *= np.sqrt(10 ** (-direct_db / 10) / (tail_N**2).sum())
    tail_N[0] = 1
    return tail_N.astype(np.float32)


def _in_room(samples_N: Signal, response_N: Signal) -> Signal:
    heard_N = fftconvolve(samples_N, response_N)[: len(samples_N)]
    return (0.5 * heard_N / np.abs(heard_N).max()).astype(np.float32)


def _rt60_s(response_N: Signal) -> float:
    """Return the reverberation time from a line through -5 to -25 dB of Schroeder's backward integral (ISO 3382)."""
    energy_N = np.cumsum(response_N[np.abs(response_N).argmax() :][::-1].astype(float) ** 2)[::-1]
    level_N = 10 * np.log10(energy_N / energy_N[0] + 1e-12)
    inside = np.flatnonzero((level_N < -5) & (level_N > -25))
    return float(-60 / np.polyfit(inside / SAMPLE_RATE, level_N[inside], 1)[0])


def _c50_db(response_N: Signal) -> float:
    start = int(np.abs(response_N).argmax())
    energy_N = response_N.astype(float) ** 2
    border = start + round(0.05 * SAMPLE_RATE)
    return float(10 * np.log10(energy_N[:border].sum() / max(energy_N[border:].sum(), 1e-12)))


if __name__ == "__main__":
    main()
