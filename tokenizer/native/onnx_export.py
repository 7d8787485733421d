"""Writes a codec for onnxruntime and compares it with ours before it says done."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from audiollm.errors import ConfigError
from audiollm.files.atomic import write_json, write_text
from tokenizer.native import onnx_codec
from tokenizer.native.autoencoder import FUTURE_FRAMES
from tokenizer.native.onnx_graph import GraphState, write_graphs

if TYPE_CHECKING:
    from tokenizer.native.model import AudioTokenizer

CHECKED_S = 60.0
SOUND_TOLERANCE = 1e-4
MAX_CHANGED_FRAMES = 0.002
"""Share of the frames whose codes may be others: where two vectors are equally near, rounding decides."""
MOST_FRAMES = 64
README = """# A codec for onnxruntime

{codebooks} codebooks of {size} codes, {rate:g} frames a second, sound of {sample_rate} Hz. It needs numpy and
onnxruntime alone:

```python
import numpy as np
from onnx_codec import OnnxCodec

codec = OnnxCodec(".")
samples = np.zeros(codec.sample_rate, np.float32)
codes = codec.encode(samples)
sound = codec.decode(codes)
```

`codec.encoder()` and `codec.decoder()` take pieces of any size by `push`, and end with `flush`; what they give is
together what `encode` and `decode` give.

For other languages than Python: `onnx_codec.json` lists the states of both graphs with their shapes at the beginning
of a clip (zeros); each step gives the next ones as `next_NAME`. A window of the encoder is {step} frames with {context}
samples more on each side (silence beyond the clip). The decoder is {ahead} frames behind: its first step takes more
than {ahead}, the first {delay} samples lie before the clip, and at its end {ahead} frames of -1 and the output `rest`
give the last of it.

{checked}
"""


@dataclass(frozen=True)
class OnnxComparison:
    """How near the exported codec is to ours, over a minute of sound."""

    frames: int
    changed_frames: int
    largest_difference: float

    def __str__(self) -> str:
        return (
            f"codes of {self.frames - self.changed_frames} of {self.frames} frames equal, "
            f"decoded sound within {self.largest_difference:.1e}, pieces as the whole"
        )


def export_codec(tokenizer: AudioTokenizer, folder: Path) -> OnnxComparison:
    """Write both halves, what runs them and what they are, and compare them with ours.

    Args:
        folder: is there, and empty.

    Raises:
        ConfigError: the exported codec differs.
    """
    states = write_graphs(tokenizer, folder)
    write_json(folder / onnx_codec.ABOUT_FILE, _codec_facts(tokenizer, states))
    shutil.copyfile(onnx_codec.__file__, folder / "onnx_codec.py")
    comparison = compare_codecs(tokenizer, folder)
    write_text(folder / "README.md", _usage_text(tokenizer, comparison))
    return comparison


def compare_codecs(tokenizer: AudioTokenizer, folder: Path, seconds: float = CHECKED_S) -> OnnxComparison:
    """Codes and sound of both, whole and in pieces.

    Raises:
        ConfigError: they differ by more than rounding explains.
    """
    exported = onnx_codec.OnnxCodec(folder)
    samples_N = _varied_sound(tokenizer.sample_rate, seconds)
    codes_KT = tokenizer.encode(samples_N[None])
    exported_KT = exported.encode(samples_N.numpy())
    encoder, decoder = exported.encoder(), exported.decoder()
    pieces = [encoder.push(piece) for piece in np.array_split(samples_N.numpy(), 61)]
    if not np.array_equal(np.concatenate([*pieces, encoder.flush()], axis=1), exported_KT):
        raise ConfigError("the exported encoder gives other codes in pieces than for the whole", str(folder))
    changed = int((torch.from_numpy(exported_KT) != codes_KT).any(dim=0).sum())
    sound_N = tokenizer.decode(codes_KT)[0].numpy()
    exported_N = exported.decode(codes_KT.numpy())
    parts = [decoder.push(piece) for piece in np.array_split(codes_KT.numpy(), 37, axis=1)]
    pieces_N = np.concatenate([*parts, decoder.flush()])
    if len(exported_N) != len(sound_N) or len(pieces_N) != len(sound_N):
        raise ConfigError("the exported decoder gives sound of another length", str(folder))
    difference = float(max(np.abs(exported_N - sound_N).max(), np.abs(pieces_N - sound_N).max()))
    comparison = OnnxComparison(codes_KT.shape[1], changed, difference)
    if changed > MAX_CHANGED_FRAMES * codes_KT.shape[1] or not difference <= SOUND_TOLERANCE:
        raise ConfigError(f"the exported codec differs: {comparison}", str(folder))
    return comparison


def _codec_facts(tokenizer: AudioTokenizer, states: dict[str, list[GraphState]]) -> dict[str, Any]:
    rows = {
        half: [
            {
                "name": state.name,
                "shape": list(state.start.shape),
                "dtype": str(state.start.dtype).removeprefix("torch."),
            }
            for state in each
        ]
        for half, each in states.items()
    }
    return {
        "sample_rate": tokenizer.sample_rate,
        "frame_rate": tokenizer.frame_rate,
        "hop_samples": tokenizer.hop_samples,
        "num_codebooks": tokenizer.num_codebooks,
        "codebook_size": tokenizer.codebook_size,
        "encoder": {
            "step_frames": tokenizer.config.step_frames,
            "context_samples": tokenizer.encoder.shape.context_samples,
            "states": rows["encoder"],
        },
        "decoder": {
            "ahead_frames": FUTURE_FRAMES,
            "delay_samples": tokenizer.decoder.head.delay_samples,
            "most_frames": MOST_FRAMES,
            "states": rows["decoder"],
        },
    }


def _usage_text(tokenizer: AudioTokenizer, comparison: OnnxComparison) -> str:
    return README.format(
        codebooks=tokenizer.num_codebooks,
        size=tokenizer.codebook_size,
        rate=tokenizer.frame_rate,
        sample_rate=tokenizer.sample_rate,
        step=tokenizer.config.step_frames,
        context=tokenizer.encoder.shape.context_samples,
        ahead=FUTURE_FRAMES,
        delay=tokenizer.decoder.head.delay_samples,
        checked=f"Compared with the codec that it was made from: {comparison}.",
    )


def _varied_sound(sample_rate: int, seconds: float) -> Tensor:
    """A gliding tone with harmonics, noise whose level moves, and silence, `[N]`."""
    generator = torch.Generator().manual_seed(0)
    time_N = torch.arange(round(seconds * sample_rate), dtype=torch.float64) / sample_rate
    turns_N = torch.cumsum((150 + 80 * torch.sin(2 * math.pi * 0.4 * time_N)) / sample_rate, dim=0)
    tone_N = sum(torch.sin(2 * math.pi * harmonic * turns_N) / harmonic for harmonic in range(1, 12))
    noise_N = torch.randn(len(time_N), generator=generator, dtype=torch.float64)
    level_N = (0.5 + 0.5 * torch.sin(2 * math.pi * 1.3 * time_N)) * ((time_N % 7) < 6)
    return (level_N * (0.1 * tone_N + 0.02 * noise_N)).float()
