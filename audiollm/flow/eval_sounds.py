"""Sounds that a training makes of the same few held-out samples at every evaluation, to be listened to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from audiollm.audio import save, to_mono
from audiollm.autoencoder import Autoencoder
from audiollm.data.records.mixture import evenly
from audiollm.data.records.shards import Shards
from audiollm.files.atomic import safe_name, write_jsonl
from audiollm.flow.conditions.reading import sound_request
from audiollm.flow.corpus import CorpusFacts, EncodedSound, UsableSounds, read_sound
from audiollm.flow.editing.levels import below_ceiling
from audiollm.flow.generator import noise_generator
from audiollm.flow.model.packed import pack_conditions
from audiollm.flow.model.rows import rows_of
from audiollm.flow.model.sampling import SamplerSettings, sample_latents
from audiollm.flow.sound_model import SoundModel
from audiollm.recipe.ranks import Ranks
from audiollm.train.loop.task import Board
from audiollm.train.loop.whole import Read, WholeCopy


class EvalSoundPrompt(NamedTuple):
    """A held-out sound's conditions."""

    sound: EncodedSound
    text: str
    """The CoT of the sample, else its caption; shown beside the sound."""


class EvalSounds:
    """Makes held-out sounds into `folder/step-000100/<name>.wav` and onto the boards; called on every rank.

    `folder/prompts.jsonl` says what they are: the `name` of each one's files, its sample's `id`, `text`.

    Args:
        model: that is trained.
        copy: a whole model that sounds are made with where `model` is in parts, on the first rank; None: `model` is
            whole on every rank.
        asked: on the first rank; empty on the others.
    """

    def __init__(
        self,
        model: SoundModel,
        copy: SoundModel | None,
        autoencoder: Autoencoder,
        prompts: Sequence[EvalSoundPrompt],
        folder: Path,
        ranks: Ranks,
        *,
        in_parts: bool,
    ) -> None:
        self._boards: Sequence[Board] = ()
        self._speaker = copy or model
        self._whole_copy = WholeCopy(model, copy) if in_parts else None
        self._autoencoder, self._prompts, self._folder, self._ranks = autoencoder, prompts, folder, ranks
        hidden = model.config.dropout_each or model.config.dropout_together
        self._settings = SamplerSettings() if hidden else SamplerSettings(guidance=1.0)
        self._names = [safe_name(f"{number}-{prompt.sound.id}") for number, prompt in enumerate(prompts)]
        if ranks.first:
            rows = [
                {"name": name, "id": prompt.sound.id, "text": prompt.text}
                for name, prompt in zip(self._names, prompts, strict=True)
            ]
            write_jsonl(folder / "prompts.jsonl", rows)

    def read_by(self, read: Read) -> None:
        """Take `Strategy.read`."""
        if self._whole_copy is not None:
            self._whole_copy.read_by(read)

    def draw_on(self, boards: Sequence[Board]) -> None:
        """See `DrawsOnBoards`."""
        self._boards = boards

    def __call__(self, step: int) -> None:
        if self._whole_copy is not None:
            self._whole_copy.fill()
        if self._ranks.first:
            self._make(step)
        if self._whole_copy is not None:
            self._ranks.barrier()

    def _make(self, step: int) -> None:
        device = next(self._speaker.parameters()).device
        lengths = [len(prompt.sound) for prompt in self._prompts]
        noise_LD = torch.cat(
            [
                torch.randn(prompt.sound.mean_TD.shape, generator=noise_generator(prompt.sound.id))
                for prompt in self._prompts
            ]
        )
        packed = pack_conditions([prompt.sound.conditions for prompt in self._prompts], device)
        with torch.autocast(device.type, enabled=False):
            made_LD = sample_latents(
                self._speaker, noise_LD.to(device), packed, rows_of(lengths, device), self._settings
            ).cpu()
        codec = self._autoencoder
        for name, latent_TD in zip(self._names, made_LD.split(lengths), strict=True):
            latent_DT = codec.denormalize(latent_TD.T.contiguous())
            samples_CN = codec.decode(latent_DT, len(latent_TD) * codec.hop_samples)
            samples_CN, _ = below_ceiling(samples_CN, codec.sample_rate)
            save(self._folder / f"step-{step:06d}" / f"{name}.wav", samples_CN, codec.sample_rate)
            for board in self._boards:
                board.audio(step, name, to_mono(samples_CN), codec.sample_rate)


def select_sound_prompts(
    model: SoundModel,
    sources: Sequence[Shards],
    facts: CorpusFacts,
    usable: UsableSounds,
    window: int | None,
    max_sounds: int,
) -> list[EvalSoundPrompt]:
    """Held-out sounds, picked evenly among those that are no edits; of longer ones the first window."""
    some = (usable.test[place] for place in evenly(len(usable.test), 4 * max_sounds))
    loaded = [
        candidate
        for source, index in some
        if "input_mean" not in (candidate := sources[source][index]).arrays
    ]
    prompts = []
    for candidate in (loaded[place] for place in evenly(len(loaded), max_sounds)):
        sound = read_sound(candidate, facts, model.words)
        request = sound_request(candidate.sample, candidate.sample.id)
        text = request.cot or request.caption
        if window is not None and len(sound) > window:
            sound, text = sound.window(0, window, facts.latent_rate), request.caption
        prompts.append(EvalSoundPrompt(sound, text))
    return prompts
