"""A small closed-set clip classifier: the judge of generated speech that is trained on real recordings only.

It shares nothing with the models it judges: its own front end (`features.py`), network and training loop.

Shapes: B clips, T frames of 10 ms, M mel bands, C channels, N samples or clips, K labels, S segments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from audiollm.evaluate.judges.features import (
    NUM_MELS,
    Clip,
    augment_mel,
    estimate_bandwidth,
    judge_mel_filters,
    log_features,
    mel_power,
    pad_clips,
)
from audiollm.evaluate.report.metric_error import MetricError
from audiollm.files.atomic import DamagedFile, atomic_path, read_record, write_json
from audiollm.files.tensors import load_tensors


class UntrainableError(ValueError):
    """No classifier can be trained on the given clips and labels."""


@dataclass(frozen=True)
class ClassifierConfig:
    """Architecture and training of a classifier; README.md has the accuracy of the defaults."""

    steps: int = 400
    batch_size: int = 64
    learning_rate: float = 3e-3
    weight_decay: float = 0.05
    label_smoothing: float = 0.05
    channels: int = 96
    blocks: int = 3
    segments: int = 4
    seed: int = 0


# --------------------------------------------------------------------------------------------- network


class ClipNet(nn.Module):
    """Two convolutions over time and frequency, residual blocks over time, pooling over parts of the clip."""

    def __init__(self, num_labels: int, config: ClassifierConfig) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 24, 5, stride=2, padding=2)
        self.down = nn.Conv2d(24, 32, 3, stride=2, padding=1)
        self.project = nn.Linear(32 * (NUM_MELS // 4), config.channels)
        self.norm = nn.LayerNorm(config.channels)
        self.blocks = nn.ModuleList(Block(config.channels) for _ in range(config.blocks))
        self.segments = config.segments
        self.head = nn.Linear(config.channels * (config.segments + 1), num_labels)

    def forward(self, features_BTM: Tensor, frames_B: Tensor) -> Tensor:
        """Logits `[B, K]`; frames after a clip's end have no effect."""
        x_BCTM = F.relu(self.stem((features_BTM * _frame_mask(frames_B, features_BTM.shape[1]))[:, None]))
        frames_B = (frames_B + 1) // 2
        x_BCTM = F.relu(self.down(x_BCTM * _frame_mask(frames_B, x_BCTM.shape[2])[:, None]))
        frames_B = (frames_B + 1) // 2
        mask_BT1 = _frame_mask(frames_B, x_BCTM.shape[2])
        x_BTC = self.norm(self.project(x_BCTM.permute(0, 2, 1, 3).flatten(2)))
        for block in self.blocks:
            x_BTC = block(x_BTC * mask_BT1)
        logits_BK: Tensor = self.head(self._pool(x_BTC, mask_BT1, frames_B))
        return logits_BK

    def _pool(self, x_BTC: Tensor, mask_BT1: Tensor, frames_B: Tensor) -> Tensor:
        """Means over overlapping segments of the clip, and its deviation as a whole: `[B, (S + 1) * C]`."""
        place_BT = (torch.arange(x_BTC.shape[1]) + 0.5) / frames_B[:, None] * self.segments
        centre_S = torch.arange(self.segments) + 0.5
        weights_BTS = (1 - (place_BT[..., None] - centre_S).abs() * 0.8).clamp(min=1e-3) * mask_BT1
        weights_BTS = weights_BTS / weights_BTS.sum(dim=1, keepdim=True)
        means_BSC = torch.einsum("bts,btc->bsc", weights_BTS, x_BTC)
        count_B1 = frames_B[:, None].float()
        mean_BC = (x_BTC * mask_BT1).sum(dim=1) / count_B1
        variance_BC = ((x_BTC - mean_BC[:, None]).square() * mask_BT1).sum(dim=1) / count_B1
        return torch.cat([means_BSC.flatten(1), torch.sqrt(variance_BC + 1e-5)], dim=1)


def _frame_mask(frames_B: Tensor, length: int) -> Tensor:
    """The mask `[B, T, 1]`: 1 within a clip, 0 after its end."""
    return (torch.arange(length) < frames_B[:, None])[..., None].float()


class Block(nn.Module):
    """ConvNeXt block (arXiv 2201.03545) over time."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv1d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels)
        self.up = nn.Linear(channels, 2 * channels)
        self.down = nn.Linear(2 * channels, channels)

    def forward(self, x_BTC: Tensor) -> Tensor:
        y_BTC = self.norm(self.depthwise(x_BTC.transpose(1, 2)).transpose(1, 2))
        change_BTC: Tensor = self.down(F.gelu(self.up(y_BTC)))
        return x_BTC + change_BTC


# ---------------------------------------------------------------------------------- training and using


class ClipClassifier:
    """A trained judge: the label of a clip, and its probability."""

    def __init__(
        self, network: ClipNet, labels: Sequence[str], bandwidth_hz: float, config: ClassifierConfig
    ) -> None:
        self.network, self.labels = network.eval(), list(labels)
        self.bandwidth_hz, self.config = bandwidth_hz, config
        self._filters_FM = judge_mel_filters(bandwidth_hz)

    def predict(self, samples_CN: Tensor, sample_rate: int) -> tuple[str, float]:
        """The most probable label of one clip and its probability; `("", 0.0)` for silence."""
        return self.predict_many([(samples_CN, sample_rate)])[0]

    def predict_many(self, clips: Sequence[Clip], batch_size: int = 64) -> list[tuple[str, float]]:
        """Label and probability of many clips; neither order nor batch has an effect."""
        powers = [mel_power(samples_CN, rate, self._filters_FM) for samples_CN, rate in clips]
        answers: list[tuple[str, float]] = [("", 0.0)] * len(powers)
        audible = sorted((i for i, power in enumerate(powers) if len(power)), key=lambda i: len(powers[i]))
        for start in range(0, len(audible), batch_size):
            indices = audible[start : start + batch_size]
            power_BTM, frames_B = pad_clips([powers[i] for i in indices])
            with torch.inference_mode():
                best = self.network(log_features(power_BTM), frames_B).softmax(dim=1).max(dim=1)
            for i, label, probability in zip(
                indices, best.indices.tolist(), best.values.tolist(), strict=True
            ):
                answers[i] = (self.labels[label], probability)
        return answers

    def logits(self, samples_CN: Tensor, sample_rate: int) -> Tensor:
        """The scores of the labels for one clip, `[K]`.

        Raises:
            MetricError: the clip is silent.
        """
        power_TM = mel_power(samples_CN, sample_rate, self._filters_FM)
        if not len(power_TM):
            raise MetricError("the clip is silent")
        power_BTM, frames_B = pad_clips([power_TM])
        with torch.inference_mode():
            logits_BK: Tensor = self.network(log_features(power_BTM), frames_B)
        return logits_BK[0].clone()

    def save(self, folder: Path) -> None:
        """Write `classifier.safetensors`, then `classifier.json` (its presence says that both are whole)."""
        with atomic_path(folder / "classifier.safetensors") as temporary:
            save_file(self.network.state_dict(), temporary)
        facts = {"labels": self.labels, "bandwidth_hz": self.bandwidth_hz, "config": asdict(self.config)}
        write_json(folder / "classifier.json", facts)

    @classmethod
    def load(cls, folder: Path) -> ClipClassifier:
        """Read what `save` wrote.

        Raises:
            DamagedFile: one of the two files is something else.
        """
        facts_file, weights_file = folder / "classifier.json", folder / "classifier.safetensors"
        remedy = f"restore it, or remove {folder}: the classifier is trained again"
        facts = read_record(facts_file, remedy)
        try:
            config = ClassifierConfig(**facts["config"])
            judge = cls(ClipNet(len(facts["labels"]), config), facts["labels"], facts["bandwidth_hz"], config)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise DamagedFile(facts_file, f"it describes no classifier ({error})", remedy) from None
        try:
            judge.network.load_state_dict(load_tensors(weights_file, remedy))
        except RuntimeError as error:
            raise DamagedFile(weights_file, f"not of this classifier ({error})", remedy) from None
        return judge


def train_classifier(
    clips: Sequence[Clip],
    labels: Sequence[str],
    config: ClassifierConfig | None = None,
    on_step: Callable[[int, float], None] | None = None,
) -> ClipClassifier:
    """Train a judge from its beginning; the same arguments and thread count give the same judge.

    Args:
        clips: real training clips, any rates and lengths (beyond 15 s the rest is not looked at).
        labels: one a clip; at least two different ones.
        on_step: called after every step with the steps done and the loss.

    Raises:
        UntrainableError: numbers of clips and labels differ, fewer than two labels, or one has only silent clips.
    """
    config = config or ClassifierConfig()
    names = sorted(set(labels))
    if len(clips) != len(labels) or len(names) < 2:
        raise UntrainableError(
            f"{len(clips)} clips and {len(labels)} labels, {len(names)} different: at least 2 needed"
        )
    bandwidth_hz = estimate_bandwidth(clips)
    filters_FM = judge_mel_filters(bandwidth_hz)
    powers = [mel_power(samples_CN, rate, filters_FM) for samples_CN, rate in clips]
    audible = [i for i, power in enumerate(powers) if len(power)]
    if len({labels[i] for i in audible}) < len(names):
        silent = sorted(set(names) - {labels[i] for i in audible})
        raise UntrainableError(f"all clips of {silent[0]!r} are silent")
    powers = [powers[i] for i in audible]
    targets_N = torch.tensor([names.index(labels[i]) for i in audible])
    network = ClipNet(len(names), config)
    _fit_classifier(network, powers, targets_N, config, on_step)
    return ClipClassifier(network, names, bandwidth_hz, config)


def _fit_classifier(
    network: ClipNet,
    powers: Sequence[Tensor],
    targets_N: Tensor,
    config: ClassifierConfig,
    on_step: Callable[[int, float], None] | None,
) -> None:
    random = torch.Generator().manual_seed(config.seed)
    _initialize_clip_net(network, random)
    optimizer = torch.optim.AdamW(
        network.parameters(), lr=config.learning_rate, betas=(0.9, 0.98), weight_decay=config.weight_decay
    )
    batch_size = min(config.batch_size, len(powers))
    frames_N = torch.tensor([len(power) for power in powers])
    batches: list[list[int]] = []
    for step in range(config.steps):
        batches = batches or _draw_batches(targets_N, frames_N, batch_size, random)
        indices = batches.pop()
        power_BTM, frames_B = augment_mel(*pad_clips([powers[index] for index in indices]), random)
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * _learning_rate_factor(step, config.steps)
        logits_BK = network(log_features(power_BTM), frames_B)
        loss = F.cross_entropy(logits_BK, targets_N[indices], label_smoothing=config.label_smoothing)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        if on_step is not None:
            on_step(step + 1, loss.item())


def _initialize_clip_net(network: ClipNet, random: torch.Generator) -> None:
    """Initialize with torch's default scales from an own generator: judges trained in parallel stay independent."""
    for name, parameter in network.named_parameters():
        if parameter.ndim > 1:
            nn.init.kaiming_uniform_(parameter, a=math.sqrt(5), generator=random)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)


def _learning_rate_factor(step: int, steps: int) -> float:
    """Warm-up over the first twentieth, then a cosine to zero."""
    warm_up = max(1, steps // 20)
    return min((step + 1) / warm_up, 0.5 * (1 + math.cos(math.pi * step / steps)))


def _draw_batches(
    targets_N: Tensor, frames_N: Tensor, batch_size: int, random: torch.Generator
) -> list[list[int]]:
    """Eight batches in which every label is equally likely and lengths are alike, in random order."""
    weights_N = 1.0 / torch.bincount(targets_N).float()[targets_N]
    indices = torch.multinomial(weights_N, 8 * batch_size, replacement=True, generator=random)
    indices = indices[torch.argsort(frames_N[indices], stable=True)]
    batches = indices.view(8, batch_size)[torch.randperm(8, generator=random)]
    return batches.tolist()
