"""The same few prompts, spoken at every evaluation: what a curve does not tell."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from audiollm.audio import save
from audiollm.codec import Codec
from audiollm.data.chat.template import Template
from audiollm.data.hearing.features import PartAudio
from audiollm.data.records.sample import Sample
from audiollm.data.records.source import LoadedSample
from audiollm.files.atomic import safe_name, write_jsonl
from audiollm.generation.engine.engine import Engine
from audiollm.generation.engine.request import Limits, Request
from audiollm.generation.engine.sampling import SamplingConfig
from audiollm.models.dual_ffn import DualFFN
from audiollm.supervised.survey import frames_of

LONGEST_S = 10.0
"""An untrained model does not stop by itself."""


class Listening:
    """Speaks held-out prompts into `folder/step-000100/<name>.wav` and into TensorBoard.

    `folder/prompts.jsonl` says what they are: the `name` of each one's files, its sample's `id`, `text`, `speaker`.

    Args:
        samples: spoken ones, with what their audio parts are given as; the last turn of each is what is to be said.
        sampling: how codes are drawn.
    """

    def __init__(
        self,
        model: DualFFN,
        codec: Codec,
        template: Template,
        samples: Sequence[tuple[LoadedSample, Sequence[PartAudio]]],
        folder: Path,
        sampling: SamplingConfig,
    ) -> None:
        self._model, self._codec, self._template, self._folder = model, codec, template, folder
        self._samples = [loaded.sample for loaded, _ in samples]
        longest = max(sum(frames_of(loaded)) for loaded, _ in samples)
        limits = Limits(max_frames=min(2 * longest, round(LONGEST_S * codec.frame_rate)))
        self._requests = [
            reply_request(loaded.sample, audio, seed, sampling, limits)
            for seed, (loaded, audio) in enumerate(samples)
        ]
        write_jsonl(folder / "prompts.jsonl", map(_described, self._samples))

    def __call__(self, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        engine = Engine.sized_for(self._model, self._template, self._requests)
        writer = SummaryWriter(str(self._folder / "tensorboard"))
        for sample, each in zip(self._samples, engine.run(self._requests), strict=True):
            samples_1N = self._codec.decode(each.codes_KT).cpu()
            name = safe_name(sample.id)
            save(self._folder / f"step-{step:06d}" / f"{name}.wav", samples_1N, self._codec.sample_rate)
            writer.add_audio(name, samples_1N, step, sample_rate=self._codec.sample_rate)
        writer.close()


def _described(sample: Sample) -> dict[str, str]:
    """By the metadata where it tells, else what the user wrote, and nobody."""
    text = str(sample.metadata.get("text", " ".join(sample.texts("user"))))
    speaker = str(sample.metadata.get("speaker") or "")
    return {"name": safe_name(sample.id), "id": sample.id, "text": text, "speaker": speaker}


def reply_request(
    sample: Sample, audio: Sequence[PartAudio], seed: int, sampling: SamplingConfig, limits: Limits
) -> Request:
    """To say the last turn: what comes before it, with the codes of the recordings in it, or their features."""
    messages = sample.messages[:-1]
    before = sum(part.type == "audio" for message in messages for part in message.content)
    return Request(messages, seed, audio[:before], sampling, limits)
