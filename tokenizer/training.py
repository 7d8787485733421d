"""Training the tokenizer: plain autoencoder first, then k-means codebooks, then everything together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from audiollm.train.loop import step_generator
from tokenizer.data import ClipStore, random_crops
from tokenizer.losses import WINDOWS, ReconstructionLoss
from tokenizer.model import AudioTokenizer
from tokenizer.quantizer import perplexity


@dataclass(frozen=True)
class TokenizerTaskConfig:
    """What the loss is made of. Weights: see `tokenizer/README.md`."""

    seed: int
    batch_size: int
    crop_frames: int
    autoencoder_share: float = 0.08
    """Share of the steps before the codebooks begin."""
    commitment_weight: float = 0.25
    quantizer_dropout: float = 0.3
    """Share of the steps that use only the first 1 to K codebooks, so that every prefix decodes."""
    revive_every: int = 10
    revive_until: float = 0.8
    """No code is moved after this share of the steps."""
    kmeans_batches: int = 24


class TokenizerTask:
    """A `Task` of the training loop."""

    def __init__(
        self, model: AudioTokenizer, train: ClipStore, test: ClipStore, config: TokenizerTaskConfig
    ) -> None:
        self.model, self.config = model, config
        self._train, self._test = train, test
        self._device = next(model.parameters()).device
        self._loss = ReconstructionLoss(model.sample_rate).to(self._device)
        self._last_revived = 0

    def modules(self) -> dict[str, nn.Module]:
        return {"tokenizer": self.model}

    def batch(self, step: int, generator: torch.Generator) -> Tensor:
        length = self.config.crop_frames * self.model.config.hop_samples
        return random_crops(self._train, self.config.batch_size, length, generator).to(self._device)

    def loss(self, batch_BN: Tensor, step: int, steps: int) -> tuple[Tensor, Mapping[str, float | Tensor]]:
        begin = round(self.config.autoencoder_share * steps)
        dice = step_generator(self.config.seed, step, "quantizer")
        if step == begin:
            self._initialize_codebooks(dice)
        used = self._codebooks_of_step(dice)
        out = self.model(batch_BN, used, quantize=step >= begin)
        parts = self._loss(out.samples_BN, batch_BN, self._scales_of_step(dice))
        loss = parts["mel"] + parts["stft"] + self.config.commitment_weight * out.commitment
        figures: dict[str, float | Tensor] = {**{k: v.detach() for k, v in parts.items()}}
        figures["commitment"] = out.commitment.detach()
        if out.codes_BKT is not None:
            if begin < step < self.config.revive_until * steps and step % self.config.revive_every == 0:
                self._last_revived = self.model.quantizer.revive(out.latent_BTD.detach(), dice)
            figures["revived"] = self._last_revived
        return loss, figures

    def evaluate(self, step: int) -> Mapping[str, float]:
        """Mel and STFT distance on held-out clips, and the codebooks' perplexity there."""
        return evaluate_tokenizer(self.model, self._test, self._loss)

    def _codebooks_of_step(self, dice: torch.Generator) -> int:
        total = self.model.num_codebooks
        if float(torch.rand(1, generator=dice)) >= self.config.quantizer_dropout:
            return total
        return 1 + int(torch.randint(total, (1,), generator=dice))

    def _scales_of_step(self, dice: torch.Generator) -> list[int]:
        """Two of the four scales: the same loss on average, at half its cost."""
        return [WINDOWS[i] for i in torch.randperm(len(WINDOWS), generator=dice)[:2].tolist()]

    @torch.no_grad()
    def _initialize_codebooks(self, dice: torch.Generator) -> None:
        latents = []
        for index in range(self.config.kmeans_batches):
            crops_BN = self.batch(index, step_generator(self.config.seed, index, "kmeans"))
            latents.append(self.model.latent(crops_BN).float().flatten(0, 1))
        self.model.quantizer.initialize(torch.cat(latents), dice)


@torch.no_grad()
def evaluate_tokenizer(
    model: AudioTokenizer, clips: ClipStore, loss: ReconstructionLoss, most: int = 100
) -> dict[str, float]:
    """Distances (natural-log L1) and perplexity over at most `most` clips, evenly picked."""
    picked = sorted({round(i * (len(clips) - 1) / max(1, most - 1)) for i in range(min(most, len(clips)))})
    distances: dict[str, list[float]] = {"mel": [], "stft": []}
    codes = []
    device = next(model.parameters()).device
    for index in picked:
        samples_1N = clips[index][None].to(device)
        codes.append(model.encode(samples_1N))
        decoded_1N = model.decode(codes[-1])[:, : samples_1N.shape[1]]
        for key, value in loss(decoded_1N, samples_1N).items():
            distances[key].append(float(value))
    use = perplexity(torch.cat(codes, dim=1), model.codebook_size)
    figures: dict[str, Any] = {key: sum(values) / len(values) for key, values in distances.items()}
    return {**figures, "perplexity_first": float(use[0]), "perplexity_mean": float(use.mean())}
