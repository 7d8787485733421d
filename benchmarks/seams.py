"""Are the borders of an edit heard? Real tracks, edited by a model that makes the true sound, through three decoders.

    python benchmarks/seams.py --data ../shared/data [--tracks 60]

The made sound of a span is the track's own, so that only the decoder and the seam can be heard: `exact` gives every
sample back; `magnitudes` has the true magnitudes with phases of its own (32 rounds of Griffin and Lim from random
ones), as an autoencoder decodes that hears magnitudes alone; `phase band` the same above 1,500 Hz, and below it the
waveform itself (`phase_band_hz: 1500`). A share is that of the edits whose spectral flux at the borders lies within its
95th percentile elsewhere in the track; `untouched` are the same places of the tracks that nobody edited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import bench_parser, print_row
from torch import Tensor

from audiollm.audio import AudioError, find_audio, load
from audiollm.evaluate.report.metric_error import MetricError
from audiollm.evaluate.report.statistics import share
from audiollm.evaluate.sound.sound_measures import border_excess
from audiollm.flow.editing.operations import EditSpan, Operation, edit_track
from audiollm.flow.editing.tracks import Track
from audiollm.flow.generator import SoundGenerator
from audiollm.flow.model.context import AudioContext
from audiollm.flow.model.sampling import SamplerSettings
from audiollm.flow.sound_model import SoundModelConfig

RATE, HOP = 16_000, 512
FFT, ROUNDS, BAND_HZ = 1024, 32, 1500.0
Decoder = Callable[[Tensor], Tensor]


class Frames:
    """An autoencoder whose latents are the samples themselves; `decode` puts the sound through a decoder."""

    sample_rate, channels, hop_samples, latent_dim, digest = RATE, 1, HOP, HOP, "frames"

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    def encode_distribution(self, samples_CN: Tensor) -> Any:
        padded_CN = torch.nn.functional.pad(samples_CN, (0, -samples_CN.shape[1] % HOP))
        mean_DT = padded_CN[0].unflatten(0, (-1, HOP)).T
        return type("Made", (), {"mean": mean_DT, "log_variance": torch.full_like(mean_DT, -20.0)})()

    def decode(self, latent_DT: Tensor, num_samples: int | None = None) -> Tensor:
        return self.decoder(latent_DT.T.flatten()[None])[:, :num_samples]

    def normalize(self, latent_DT: Tensor) -> Tensor:
        return latent_DT

    def denormalize(self, latent_DT: Tensor) -> Tensor:
        return latent_DT


class TrueSound(SoundGenerator):
    """Makes the latents of the true track from a given second on."""

    def __init__(self, true_CN: Tensor, decoder: Decoder) -> None:
        config = SoundModelConfig("native", {}, "frames", RATE, 1, HOP, context_trained=True, longest_s=10.0)
        model = type("Model", (), {"config": config, "latent_dim": HOP})()
        super().__init__(model, Frames(decoder), None, torch.device("cpu"))  # type: ignore[arg-type]
        self.true_CN, self.start_s = true_CN, 0.0

    def sample_latents(
        self,
        conditions: Any,
        count: int,
        settings: SamplerSettings,
        key: str,
        context: AudioContext | None = None,
    ) -> Tensor:
        first = round(self.start_s * RATE)
        part_CN = torch.nn.functional.pad(self.true_CN, (0, HOP))[:, first : first + count * HOP]
        part_CN = torch.nn.functional.pad(part_CN, (0, count * HOP - part_CN.shape[1]))
        return part_CN[0].unflatten(0, (-1, HOP))


def exact(samples_CN: Tensor) -> Tensor:
    return samples_CN


def magnitudes(samples_CN: Tensor) -> Tensor:
    """The true magnitudes with phases that are consistent and not the sound's own."""
    return _phases_made_up(samples_CN, 0)


def phase_band(samples_CN: Tensor) -> Tensor:
    """The waveform below `BAND_HZ`, magnitudes above it."""
    return _phases_made_up(samples_CN, round(BAND_HZ * FFT / RATE))


DECODERS: dict[str, Decoder] = {"exact": exact, "magnitudes": magnitudes, "phase band": phase_band}


def _phases_made_up(samples_CN: Tensor, kept_bins: int) -> Tensor:
    window, length = torch.hann_window(FFT), samples_CN.shape[1]

    def transform(waves_CN: Tensor) -> Tensor:
        return torch.stft(waves_CN, FFT, FFT // 4, window=window, return_complex=True)

    true_CFT = transform(samples_CN)
    dice = torch.Generator().manual_seed(0)
    made_CFT = torch.polar(true_CFT.abs(), 2 * torch.pi * torch.rand(true_CFT.shape, generator=dice))
    for _ in range(ROUNDS):
        made_CFT[:, :kept_bins] = true_CFT[:, :kept_bins]
        wave_CN = torch.istft(made_CFT, FFT, FFT // 4, window=window, length=length)
        made_CFT = torch.polar(true_CFT.abs(), transform(wave_CN).angle())
    made_CFT[:, :kept_bins] = true_CFT[:, :kept_bins]
    return torch.istft(made_CFT, FFT, FFT // 4, window=window, length=length)


def real_tracks(data: Path, count: int) -> Iterator[Tensor]:
    """Five seconds of real sounds and speech, mono, whose middle is not silent."""
    folders = [data / "esc10", data / "librispeech_speakers"]
    paths_by_folder = [find_audio(folder)[0] for folder in folders if folder.is_dir()]
    if not paths_by_folder:
        raise SystemExit(f"no recordings in {' and '.join(map(str, folders))}: give their folder with --data")
    for paths in paths_by_folder:
        stride = max(1, len(paths) * len(paths_by_folder) // count)
        for path in paths[::stride]:
            try:
                samples_CN = load(path, 0.0, 5.0, sample_rate=RATE, mono=True).samples_CN
            except AudioError:
                continue
            middle_CN = samples_CN[:, 2 * RATE : 3 * RATE]
            if samples_CN.shape[1] >= 4 * RATE and float(middle_CN.square().mean().sqrt()) > 0.003:
                yield samples_CN


def is_smooth(samples_CN: Tensor, span: EditSpan) -> bool | None:
    try:
        seconds = span.start / RATE, span.end / RATE
        return border_excess(samples_CN[0].numpy(), RATE, seconds) <= 1
    except MetricError:
        return None


def edited(true_CN: Tensor, operation: Operation, span: EditSpan, decoder: Decoder) -> Tensor:
    """The track after the edit: all of it but the span is given, and a continuation's begins where the span does."""
    empty = Track(np.zeros((0, 1), np.int32), RATE, "WAV", "PCM_16")
    given_CN = true_CN[:, : span.start] if operation == "extend" else true_CN
    generator = TrueSound(true_CN, decoder)

    def conditions_at(begin_s: float, length_s: float) -> Any:
        generator.start_s = begin_s
        return {}

    track = empty.replaced(0, given_CN)
    return edit_track(
        generator, track, operation, span, conditions_at, SamplerSettings(steps=1), "0"
    ).track.waveform()


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--tracks", type=int, default=60)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dice = np.random.default_rng(0)
    operations: tuple[Operation, ...] = ("inpaint", "extend", "remove")
    smooth: dict[str, list[bool]] = {}
    for true_CN in real_tracks(arguments.data, arguments.tracks):
        first = int(dice.integers(round(1.6 * RATE), round(2.2 * RATE)))
        span = EditSpan(first, first + int(dice.integers(round(0.4 * RATE), round(1.0 * RATE))))
        for operation in operations:
            end = span.end if operation == "extend" else true_CN.shape[1]
            sides = {name: edited(true_CN, operation, span, decoder) for name, decoder in DECODERS.items()}
            for name, made_CN in {"untouched": true_CN[:, :end], **sides}.items():
                is_seamless = is_smooth(made_CN, span)
                if is_seamless is not None:
                    smooth.setdefault(f"{operation}, {name}", []).append(is_seamless)
    for case, values in smooth.items():
        table = share(values)
        untouched = share(smooth[f"{case.split(',')[0]}, untouched"])["accuracy"]
        bounds = {"low": round(table["low"], 4), "high": round(table["high"], 4), "n": table["n"]}
        print_row("seams", case, table["accuracy"], untouched, "share", more_is_better=True, **bounds)


if __name__ == "__main__":
    main()
