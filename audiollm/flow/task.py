"""Flow matching as a task of the training loop.

Everything random of a sample is drawn by (seed, its number in the stream): neither packs nor ranks change it.

Shapes: B samples, L latents of all samples, T latents of one, D latent dimension, E context channels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from audiollm.data.records.mixture import Mixture, evenly
from audiollm.data.records.shards import Shards
from audiollm.errors import BadSample, StageError
from audiollm.flow.conditions.own import Words
from audiollm.flow.corpus import CorpusFacts, EncodedSound, UsableSounds, read_sound
from audiollm.flow.eval_sounds import EvalSounds
from audiollm.flow.model.context import (
    AudioContext,
    ContextShares,
    LatentState,
    hidden_context,
    training_context,
)
from audiollm.flow.model.objective import (
    ConditionDropout,
    TimeDensity,
    hide,
    losses_by_sample,
    on_path,
    velocity_loss,
    velocity_target,
)
from audiollm.flow.model.packed import Conditions, PackedConditions, pack_conditions
from audiollm.flow.model.rows import SampleRows, rows_of
from audiollm.flow.sound_model import SoundModel
from audiollm.recipe.ranks import ALONE, Ranks
from audiollm.train.loop.loop import Figures, Update, step_generator
from audiollm.train.loop.task import Board
from audiollm.train.loop.whole import Read

EVAL_TIMES = (0.0, 0.03, 0.1, 0.3, 0.7)
"""Times at which the loss on held-out sounds is measured: most of them near noise, where the conditions decide."""


@dataclass(frozen=True)
class FlowTaskConfig:
    """Batch and objective of a training."""

    seed: int
    batch_size: int
    density: TimeDensity = field(default_factory=TimeDensity)
    dropout: ConditionDropout = field(default_factory=ConditionDropout)
    context: ContextShares | None = field(default_factory=ContextShares)
    """None: the model takes no audio context."""
    window: int | None = None
    """Latents of a random window of longer sounds; None: sounds are taken whole."""
    max_eval_samples: int = 64


class TrainingSound(NamedTuple):
    """A sound with all that was drawn for it."""

    data_TD: Tensor
    noise_TD: Tensor
    time: float
    context: AudioContext
    conditions: Conditions


class FlowBatch(NamedTuple):
    """This rank's share of a step."""

    x_LD: Tensor
    target_LD: Tensor
    t_B: Tensor
    wanted_L: Tensor
    """Latents that count in the loss: all but the kept ones."""
    context_LE: Tensor | None
    conditions: PackedConditions
    latents: SampleRows
    total: float
    """Latents that count in the step, on all ranks."""


class FlowTask:
    """A `Task` of the training loop: the sound model alone."""

    def __init__(
        self,
        model: SoundModel,
        sources: Sequence[Shards],
        facts: CorpusFacts,
        usable: UsableSounds,
        config: FlowTaskConfig,
        weights: Sequence[float] | None = None,
        ranks: Ranks = ALONE,
        listen: EvalSounds | None = None,
    ) -> None:
        """`listen` makes held-out sounds at every evaluation."""
        if config.batch_size < ranks.world:
            raise StageError(
                f"batch_size is {config.batch_size}, and {ranks.world} processes train",
                "raise batch_size to the number of processes, or start fewer",
                2,
            )
        self.model, self.config, self._listen = model, config, listen
        self._wrapped: nn.Module = model
        self._sources, self._facts, self._usable, self._ranks = sources, facts, usable, ranks
        self._words: Words | None = model.words
        self._device = next(model.parameters()).device
        sizes = [len(indices) for indices in usable.train]
        self._mixture = Mixture(sizes, weights, config.seed, run_samples=1, window_runs=max(1, *sizes))

    def modules(self) -> dict[str, nn.Module]:
        return {"model": self.model}

    def optimizers(self) -> dict[str, list[str]]:
        return {"main": ["model"]}

    def adopt(self, modules: Mapping[str, nn.Module]) -> None:
        self._wrapped = modules["model"]

    def read_by(self, read: Read) -> None:
        """Take `Strategy.read`."""
        if self._listen is not None:
            self._listen.read_by(read)

    def draw_on(self, boards: Sequence[Board]) -> None:
        """See `DrawsOnBoards`."""
        if self._listen is not None:
            self._listen.draw_on(boards)

    def batch(self, step: int, generator: torch.Generator, ranks: Ranks = ALONE) -> FlowBatch:
        size, (rank, world) = self.config.batch_size, (self._ranks.rank, self._ranks.world)
        item_numbers = range(step * size + rank * size // world, step * size + (rank + 1) * size // world)
        return self.packed([self.sound(item) for item in item_numbers])

    def sound(self, item: int) -> TrainingSound:
        """The sound at a place of the endless stream, and all that is drawn for it.

        Raises:
            StageError: it can no longer be read.
        """
        source, index, _ = self._mixture.item(item)
        try:
            loaded = self._sources[source][self._usable.train[source][index]]
            sound = read_sound(loaded, self._facts, self._words)
        except BadSample as error:
            raise StageError(f"{error}", "it could be read when training began: restore it") from error
        return self._draw_training_sound(sound, step_generator(self.config.seed, item, "sound"))

    def packed(self, sounds: Sequence[TrainingSound]) -> FlowBatch:
        """Put sounds end to end on the device."""
        device = self._device
        latents = rows_of([len(sound.data_TD) for sound in sounds], device)
        data_LD = torch.cat([sound.data_TD for sound in sounds]).to(device)
        noise_LD = torch.cat([sound.noise_TD for sound in sounds]).to(device)
        t_B = torch.tensor([sound.time for sound in sounds], device=device)
        context = AudioContext(
            torch.cat([sound.context.latents_LD for sound in sounds]).to(device),
            torch.cat([sound.context.state_L for sound in sounds]).to(device),
        )
        wanted_L = ~context.fixed_L
        return FlowBatch(
            on_path(noise_LD, data_LD, t_B[latents.sample_R][:, None]),
            velocity_target(noise_LD, data_LD),
            t_B,
            wanted_L,
            context.channels() if self.model.takes_context else None,
            pack_conditions([sound.conditions for sound in sounds], device),
            latents,
            float(self._ranks.sum(wanted_L.sum().double())),
        )

    def updates(self, batch: FlowBatch, step: int, steps: int) -> Iterator[Update]:
        velocity_LD = self._wrapped(batch.x_LD, batch.t_B, batch.conditions, batch.latents, batch.context_LE)
        loss = velocity_loss(velocity_LD, batch.target_LD, batch.wanted_L, batch.total)
        figures: Figures = {"tokens": float(batch.latents.total)}
        yield Update(loss, figures)

    def evaluate(self, step: int) -> Mapping[str, float]:
        """The loss on held-out sounds at fixed times and noise: with all conditions, and without any.

        Of a sound longer than a window it is that of the first window. Of an edit the track before it is heard either
        way. Every rank measures its share, in as many passes as the others: where ranks hold parts of the weights, they
        meet in each. `conditions_gain` is the share by which the conditions lower the loss.
        """
        if self._listen is not None:
            self._listen(step)
        held_out, ranks = self._usable.test, self._ranks
        if not held_out:
            return {}
        places = evenly(len(held_out), self.config.max_eval_samples)
        sums_2 = torch.zeros(2, dtype=torch.float64, device=self._device)
        for first in range(0, len(places), ranks.world):
            number = min(first + ranks.rank, len(places) - 1)
            losses_2 = self._held_out_losses(number, *held_out[places[number]])
            if number == first + ranks.rank:
                sums_2 += losses_2
        loss, unconditional = (ranks.sum(sums_2) / len(places)).tolist()
        return {
            "loss": loss,
            "loss_unconditional": unconditional,
            "conditions_gain": 1 - loss / max(unconditional, 1e-9),
        }

    def alarms(self, figures: Mapping[str, float], step: int) -> Mapping[str, str]:
        """Conditions that the model does not use."""
        gain = figures.get("evaluation/conditions_gain")
        if gain is not None and step > 1000 and gain < 0.001:
            return {
                "unused conditions": (
                    f"conditions lower the held-out loss by {gain:.2%}: are words and pictures those of the sounds?"
                )
            }
        return {}

    # Private

    def _draw_training_sound(self, sound: EncodedSound, dice: torch.Generator) -> TrainingSound:
        config = self.config
        if config.window is not None and len(sound) > config.window:
            first = int(torch.randint(0, len(sound) - config.window + 1, (1,), generator=dice))
            sound = sound.window(first, config.window, self._facts.latent_rate)
        latent_noise_TD = torch.randn(sound.mean_TD.shape, generator=dice)
        data_TD = sound.mean_TD + sound.deviation_TD * latent_noise_TD
        input_TD = None
        if sound.input_mean_TD is not None and sound.input_deviation_TD is not None:
            input_TD = sound.input_mean_TD + sound.input_deviation_TD * latent_noise_TD
        noise_TD = torch.randn(data_TD.shape, generator=dice)
        (time,) = config.density.draw([len(data_TD)], dice).tolist()
        context = hidden_context(len(data_TD), data_TD.shape[1])
        if config.context is not None:
            kind = config.context.draw(input_TD is not None, dice)
            context = training_context(kind, data_TD, input_TD, dice)
        hidden = config.dropout.draw(sound.conditions, dice)
        return TrainingSound(data_TD, noise_TD, time, context, hide(sound.conditions, hidden))

    def _heard_channels(self, input_TD: Tensor | None) -> Tensor | None:
        """The channels of a track that is shown whole; None: there is none, or the model takes no context."""
        if input_TD is None or not self.model.takes_context:
            return None
        shown_T = torch.full((len(input_TD),), int(LatentState.VISIBLE))
        return AudioContext(input_TD, shown_T).channels().to(self._device)

    def _held_out_losses(self, number: int, source: int, index: int) -> Tensor:
        """The loss of a held-out sound with its conditions, and without any."""
        sound = read_sound(self._sources[source][index], self._facts, self._words)
        if self.config.window is not None and len(sound) > self.config.window:
            sound = sound.window(0, self.config.window, self._facts.latent_rate)
        dice = step_generator(self.config.seed, number, "evaluation")
        noise_TD = torch.randn(sound.mean_TD.shape, generator=dice).to(self._device)
        data_TD = sound.mean_TD.to(self._device)
        context_TE = self._heard_channels(sound.input_mean_TD)
        return torch.stack(
            [
                self._loss_over_times(data_TD, noise_TD, conditions, context_TE)
                for conditions in (sound.conditions, {})
            ]
        )

    def _loss_over_times(
        self, data_TD: Tensor, noise_TD: Tensor, conditions: Conditions, context_TE: Tensor | None
    ) -> Tensor:
        count = len(EVAL_TIMES)
        latents = rows_of([len(data_TD)] * count, self._device)
        t_B = torch.tensor(EVAL_TIMES, device=self._device)
        noise_LD, data_LD = noise_TD.repeat(count, 1), data_TD.repeat(count, 1)
        packed = pack_conditions([conditions] * count, self._device)
        x_LD = on_path(noise_LD, data_LD, t_B[latents.sample_R][:, None])
        context_LE = None if context_TE is None else context_TE.repeat(count, 1)
        velocity_LD = self._wrapped(x_LD, t_B, packed, latents, context_LE)
        everywhere_L = torch.ones(latents.total, dtype=torch.bool, device=self._device)
        losses_B = losses_by_sample(velocity_LD, velocity_target(noise_LD, data_LD), everywhere_L, latents)
        return losses_B.double().mean()
