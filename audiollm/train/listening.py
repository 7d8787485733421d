"""The same few prompts, spoken at every evaluation: what a curve does not tell."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from audiollm.audio import save
from audiollm.codec import Codec
from audiollm.data.source import LoadedSample
from audiollm.data.template import Template
from audiollm.files import safe_name
from audiollm.generation.engine import Prompt, generate_codes
from audiollm.generation.sampling import SamplingConfig
from audiollm.models.dual_ffn import DualFFN
from audiollm.train.survey import frames_of

LONGEST_S = 10.0
"""An untrained model does not stop by itself."""


class Listening:
    """Speaks held-out prompts into `folder/step-000100/<sample>.wav` and into TensorBoard.

    Args:
        samples: spoken ones; the last turn of each is what is to be said.
    """

    def __init__(
        self, model: DualFFN, codec: Codec, template: Template, samples: Sequence[LoadedSample], folder: Path
    ) -> None:
        self._model, self._codec, self._template, self._folder = model, codec, template, folder
        self._samples = [loaded.sample for loaded in samples]
        self._prompts = [prompt_of(loaded, seed) for seed, loaded in enumerate(samples)]
        longest = max(sum(frames_of(loaded)) for loaded in samples)
        self._max_frames = min(2 * longest, round(LONGEST_S * codec.frame_rate))

    def __call__(self, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        spoken = generate_codes(
            self._model, self._template, self._prompts, SamplingConfig(), self._max_frames
        )
        writer = SummaryWriter(str(self._folder / "tensorboard"))
        for sample, each in zip(self._samples, spoken, strict=True):
            samples_1N = self._codec.decode(each.codes_KT).cpu()
            name = safe_name(sample.id)
            save(self._folder / f"step-{step:06d}" / f"{name}.wav", samples_1N, self._codec.sample_rate)
            writer.add_audio(name, samples_1N, step, sample_rate=self._codec.sample_rate)
        writer.close()


def prompt_of(loaded: LoadedSample, seed: int) -> Prompt:
    """What comes before the last turn, with the codes of the recordings in it."""
    messages = loaded.sample.messages[:-1]
    heard = sum(part.type == "audio" for message in messages for part in message.content)
    return Prompt(list(messages), seed, tuple(loaded.encodings[0][:heard]))
