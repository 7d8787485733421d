"""Spectrograms of clips: the original, and what each of several tokenizers decodes of it, side by side.

    python benchmarks/spectrograms.py --codec before=OLD/train_tokenizer after=NEW/train_tokenizer \\
        --clips a.wav b.wav -o voices.png

A row is a clip, a column the original or a tokenizer. Harmonics are even lines; a whisper has the shapes without lines.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib
import torch
from torch import Tensor

from audiollm.codec import Codec, load_codec
from audiollm.models.pretrained import model_folder
from tokenizer.clips import Clip, load_levelled

matplotlib.use("Agg")
from matplotlib import pyplot

WINDOW_S, STEP_S = 0.04, 0.005
HIGHEST_HZ = 6_000
RANGE_DB = 60


def main() -> None:
    arguments = _parse_spectrogram_arguments()
    codecs = {
        name: load_codec(model_folder(Path(folder)))
        for name, _, folder in (c.partition("=") for c in arguments.codec)
    }
    columns = ["original", *codecs]
    figure, axes = pyplot.subplots(
        len(arguments.clips),
        len(columns),
        figsize=(4 * len(columns), 1.9 * len(arguments.clips)),
        squeeze=False,
    )
    for row, path in zip(axes, arguments.clips, strict=True):
        sounds = _decode_sounds(path, codecs, arguments.seconds)
        for axis, (name, (samples_N, rate)) in zip(row, sounds.items(), strict=True):
            _draw(axis, samples_N, rate)
            if path == arguments.clips[0]:
                axis.set_title(name)
        row[0].set_ylabel(f"{path.stem}\nkHz", fontsize=8)
    for axis in axes[-1]:
        axis.set_xlabel("s")
    figure.tight_layout()
    figure.savefig(arguments.output, dpi=62)


def _decode_sounds(path: Path, codecs: dict[str, Codec], seconds: float) -> dict[str, tuple[Tensor, int]]:
    sounds: dict[str, tuple[Tensor, int]] = {}
    for name, codec in codecs.items():
        real_N = load_levelled(Clip(path, 0.0, None), codec.sample_rate)[: round(seconds * codec.sample_rate)]
        sounds.setdefault("original", (real_N, codec.sample_rate))
        with torch.no_grad():
            made_N = codec.decode(codec.encode(real_N[None]))[0, : len(real_N)]
        sounds[name] = (made_N, codec.sample_rate)
    return sounds


def _draw(axis: pyplot.Axes, samples_N: Tensor, rate: int) -> None:
    window = round(WINDOW_S * rate)
    spectrum_FT = torch.stft(
        samples_N, 4 * window, round(STEP_S * rate), window, torch.hann_window(window), return_complex=True
    )
    level_FT = 20 * spectrum_FT.abs().clamp_min(1e-6).log10()
    shown_FT = level_FT[: round(HIGHEST_HZ / rate * 4 * window)]
    top = float(shown_FT.max())
    extent = (0, len(samples_N) / rate, 0, HIGHEST_HZ / 1000)
    axis.imshow(
        shown_FT.numpy(),
        origin="lower",
        aspect="auto",
        vmin=top - RANGE_DB,
        vmax=top,
        extent=extent,
        cmap="magma",
    )
    axis.tick_params(labelsize=7)


def _parse_spectrogram_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--codec", nargs="+", required=True, metavar="NAME=FOLDER")
    parser.add_argument("--clips", nargs="+", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=2.0, help="longest part of a clip that is shown")
    parser.add_argument("-o", "--output", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
