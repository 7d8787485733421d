"""A linear autoencoder of 8 kHz for tests, 20 latents per second; scenes of two tones, and settings for them."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from rich.console import Console
from scipy.fft import dct
from torch import Tensor

from audiollm.audio import save
from audiollm.data.records.sample import AudioPart, Message, Sample, TextPart, VideoPart, write_samples
from audiollm.flow.settings import EncodeLatentsConfig, PicturesConfig, TrainFlowConfig
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import Recipe
from audiollm.video.writing import write_video

RATE, HOP, DIM = 8000, 400, 24
AUTOENCODER = f"{__name__}:autoencoder"


class ToyDistribution:
    def __init__(self, mean: Tensor) -> None:
        self.mean, self.log_variance = mean, torch.full_like(mean, -6.0)


class ToyAutoencoder:
    """Frames of 400 samples to 24 numbers and back; sound of few low frequencies passes through it unchanged."""

    sample_rate, channels, hop_samples, latent_dim, digest = RATE, 1, HOP, DIM, "toy"

    def __init__(self) -> None:
        basis = torch.from_numpy(dct(torch.eye(HOP, dtype=torch.float64).numpy(), norm="ortho")).float()
        self.basis_HD = basis[:, :DIM]

    def encode_distribution(self, samples_CN: Tensor) -> ToyDistribution:
        missing = -samples_CN.shape[1] % HOP
        frames = torch.nn.functional.pad(samples_CN, (0, missing))[0].unflatten(0, (-1, HOP))
        return ToyDistribution((frames @ self.basis_HD).T)

    def encode_stream(self, pieces_CN: Iterable[Tensor]) -> Iterator[ToyDistribution]:
        yield self.encode_distribution(torch.cat(list(pieces_CN), dim=1))

    def decode(self, latent_DT: Tensor, num_samples: int | None = None) -> Tensor:
        return (latent_DT.T @ self.basis_HD.T).flatten()[None, :num_samples]

    def decode_stream(self, pieces_DT: Iterable[Tensor]) -> Iterator[Tensor]:
        yield self.decode(torch.cat(list(pieces_DT), dim=1))

    def normalize(self, latent_DT: Tensor) -> Tensor:
        return latent_DT / 0.5

    def denormalize(self, latent_DT: Tensor) -> Tensor:
        return latent_DT * 0.5


def autoencoder() -> ToyAutoencoder:
    return ToyAutoencoder()


def tone(hz: float, seconds: float, level: float = 0.3) -> Tensor:
    return level * torch.sin(2 * torch.pi * hz * torch.arange(round(seconds * RATE)) / RATE)[None]


def write_scenes(folder: Path, count: int = 8, with_video: bool = True) -> Path:
    """Scenes of a second: a low or a high tone over a hum, each with its solo track; every fourth is held out."""
    samples = []
    for number in range(count):
        kind, hz = (("low", 60.0), ("high", 200.0))[number % 2]
        track_CN, hum_CN = tone(hz, 1.0, 0.3 + 0.01 * number), tone(20.0, 1.0, 0.1)
        paths = {name: f"{number}-{name}.wav" for name in ("mix", "event", "hum")}
        for name, each_CN in (("mix", track_CN + hum_CN), ("event", track_CN), ("hum", hum_CN)):
            save(folder / paths[name], each_CN, RATE)
        content: list[TextPart | VideoPart] = [TextPart(text=f"a {kind} tone over a hum")]
        if with_video:
            level = 40 if kind == "low" else 220
            pictures = [torch.full((32, 32, 3), level, dtype=torch.uint8).numpy()] * 8
            write_video(folder / f"{number}.mp4", pictures, 8)
            content.insert(0, VideoPart(path=f"{number}.mp4"))
        held_out = number % 4 == 3
        times = (0.6, 0.85) if held_out else (0.0, 1.0)
        event = {
            "path": paths["event"], "label": kind, "name": f"a {kind} tone", "start_s": times[0], "end_s": times[1],
            "region": [{"x": 4, "y": 4, "width": 16, "height": 16}] if with_video else [],
        }  # fmt: skip
        samples.append(
            Sample(
                id=f"scene-{number}",
                task="sound",
                messages=[
                    Message(role="user", content=list(content)),
                    Message(role="assistant", content=[AudioPart(path=paths["mix"])]),
                ],
                metadata={
                    "split": "test" if held_out else "train",
                    "thought": f"first a {kind} tone, at 0.0 s",
                    "events": [event],
                    "backdrop": {"path": paths["hum"]},
                },
            )
        )
    write_samples(folder / "scenes.jsonl", samples)
    return folder / "scenes.jsonl"


def encode_config(samples: Path, **changes: object) -> EncodeLatentsConfig:
    pictures = PicturesConfig(frame_side=16, sync_rate=16, sync_side=16)
    given = {
        "samples": samples,
        "autoencoder": AUTOENCODER,
        "pictures": pictures,
        "samples_per_shard": 3,
        **changes,
    }
    return EncodeLatentsConfig(**given)  # type: ignore[arg-type]


def train_config(latents: Path, **changes: object) -> TrainFlowConfig:
    given = {
        "samples": latents, "hidden_size": 32, "num_heads": 2, "multi_stream_blocks": 1, "single_stream_blocks": 1,
        "encoder_width": 32, "batch_size": 4, "steps": 10, "learning_rate": 2e-3, "precision": "fp32", "report_to": (),
        **changes,
    }  # fmt: skip
    return TrainFlowConfig(**given)  # type: ignore[arg-type]


def context_of(folder: Path) -> Context:
    folder.mkdir(parents=True, exist_ok=True)
    recipe = Recipe("test", Path("test.yaml"), "tiny", 0, folder, (), {})
    return Context(folder, recipe, Console(file=io.StringIO()), {})
