"""Long audio through the tokenizer, file to codes to file: peak memory, and what is heard at the borders of the pieces.

    python benchmarks/long_audio.py [--codec FOLDER] [--full] [--minutes 10]

Without `--codec` an untrained tokenizer of the tiny size: neither memory nor seams depend on what it has learned.
Reading, encoding, decoding and writing go block by block in a process of its own, whose peak memory is told. Seams are
judged twice: the codes of the first two minutes against those of these two minutes alone (equal or not), and the
decoded waveform against one pass over all of them: its largest difference within 10 ms of a border, and elsewhere.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from measure import bench_parser, in_own_process, parse_options, print_row, status_mb
from safetensors.torch import load_file, save_file

from audiollm.audio.streams import save_stream, stream_mono
from tokenizer.native.model import DECODE_FRAMES, AudioTokenizer, TokenizerConfig
from tokenizer.native.streaming import StreamingDecoder

MEMORY_LIMIT_MB = 1500
PART_S = 120


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--codec", type=Path, help="a trained tokenizer's folder")
    parser.add_argument("--minutes", type=float, default=10)
    arguments = parse_options(parser, minutes=60)
    torch.set_num_threads(1)  # as in `through`: sums in another order give other codes
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        codec = arguments.codec or _untrained(folder / "codec")
        _write_sound(folder / "in.flac", arguments.minutes)
        used_mb = in_own_process(through, codec, folder)
        print_row("long_audio", "peak memory", used_mb, MEMORY_LIMIT_MB, "MB, limit as peer", digits=1)
        same, border, elsewhere = seams(AudioTokenizer.from_pretrained(codec), folder)
        equal = "codes of a part equal to the part's alone"
        print_row("long_audio", equal, same, 1.0, "share", more_is_better=True)
        error = "decoding error at borders, elsewhere"
        print_row("long_audio", error, border, elsewhere, "largest difference", digits=9)


def through(codec_folder: Path, folder: Path) -> float:
    """File to codes to file; returns this process's peak memory in MB."""
    torch.set_num_threads(1)
    codec = AudioTokenizer.from_pretrained(codec_folder)
    codes_KT = torch.cat(list(codec.encode_stream(stream_mono(folder / "in.flac", codec.sample_rate))), dim=1)
    save_file({"codes_KT": codes_KT.short()}, folder / "codes.safetensors")
    save_stream(folder / "out.flac", codec.decode_stream([codes_KT]), codec.sample_rate)
    return status_mb("VmHWM")


@torch.no_grad()
def seams(codec: AudioTokenizer, folder: Path) -> tuple[float, float, float]:
    """Share of equal codes; largest decoding error near the borders of the pieces, and away from them."""
    samples_1N = torch.cat(list(stream_mono(folder / "in.flac", codec.sample_rate, 0.0, PART_S)), dim=1)
    frames = PART_S * 25
    codes_KT = load_file(folder / "codes.safetensors")["codes_KT"].long()[:, :frames]
    # the last frame looks 45 ms ahead, where the part ends and the hour goes on
    same = float((codec.encode(samples_1N)[:, : frames - 2] == codes_KT[:, : frames - 2]).float().mean())
    pieces_N = codec.decode(codes_KT)[0]
    whole_N = codec.synthesize(codec.quantizer.decode(codes_KT[None]))[0].clamp(-1, 1)
    error_N = (pieces_N - whole_N).abs()
    step = DECODE_FRAMES * codec.hop_samples
    late = round(
        StreamingDecoder(codec).latency_s * codec.sample_rate
    )  # a piece ends that much before its codes
    near_N = (torch.arange(len(error_N)) + late + 240) % step < 480
    return same, max(1e-9, float(error_N[near_N].max())), float(error_N[~near_N].max())


def _untrained(folder: Path) -> Path:
    """Random weights, and codebooks started on what the encoder makes of noise."""
    dice = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = AudioTokenizer(TokenizerConfig()).eval()
    with torch.no_grad():
        latent_BTD = model.latent(torch.randn(8, 24_000 * 8, generator=dice) * 0.1)
    model.quantizer.initialize(latent_BTD.flatten(0, 1), dice)
    model.save_pretrained(folder)
    return folder


def _write_sound(path: Path, minutes: float) -> None:
    """Swelling noise in 44.1 kHz, so that resampling takes part."""
    dice = torch.Generator().manual_seed(1)
    swell_N = torch.sin(torch.arange(44_100 * 10) / 20_000).square()
    pieces = (0.1 * torch.randn(1, len(swell_N), generator=dice) * swell_N for _ in range(round(minutes * 6)))
    save_stream(path, pieces, 44_100)


if __name__ == "__main__":
    main()
