"""The same few held-out prompts, synthesized at every evaluation: what a curve does not tell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from audiollm.audio import save
from audiollm.codec import Codec, codec_digest, load_codec
from audiollm.data.chat.conditions import is_spoken
from audiollm.data.chat.template import Template
from audiollm.data.hearing.features import PartAudio
from audiollm.data.records.mixture import evenly
from audiollm.data.records.sample import Sample
from audiollm.data.records.source import LoadedSample
from audiollm.errors import StageError
from audiollm.families.packed_training import PackedModel
from audiollm.files.atomic import safe_name, write_jsonl
from audiollm.generation.engine.defaults import guidance_of
from audiollm.generation.engine.request import Limits, Request
from audiollm.generation.engine.sampling import SamplingConfig
from audiollm.generation.speaking.phrases import limited_phrases
from audiollm.models.pretrained import model_folder
from audiollm.recipe.ranks import Ranks
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import required
from audiollm.supervised.corpus.batches import read_usable
from audiollm.supervised.corpus.sources import TrainingCorpus
from audiollm.supervised.corpus.survey import frames_of
from audiollm.train.loop.task import Board
from audiollm.train.loop.whole import Read, WholeCopy
from audiollm.train.supervised_settings import TrainConfig

SHARDING = ("fsdp2", "zero2", "zero3")
"""Strategies that spread the weights over ranks."""
MAX_SPEECH_S = 10.0
"""An untrained model does not stop by itself."""


class EvalAudio:
    """Synthesizes held-out prompts into `folder/step-000100/<name>.wav` and into TensorBoard.

    `folder/prompts.jsonl` says what they are: the `name` of each one's files, its sample's `id`, `text`, `speaker`.

    Args:
        samples: spoken ones, with what their audio parts are given as; the last turn of each is what is to be said.
        sampling: how codes are drawn.
    """

    def __init__(
        self,
        model: PackedModel,
        codec: Codec,
        template: Template,
        samples: Sequence[tuple[LoadedSample, Sequence[PartAudio]]],
        folder: Path,
        sampling: SamplingConfig,
    ) -> None:
        self._boards: Sequence[Board] = ()
        self._model, self._codec, self._template, self._folder = model, codec, template, folder
        self._samples = [loaded.sample for loaded, _ in samples]
        longest = max(sum(frames_of(loaded)) for loaded, _ in samples)
        limits = Limits(max_frames=min(2 * longest, round(MAX_SPEECH_S * codec.frame_rate)))
        self._requests = [
            reply_request(loaded.sample, audio, seed, sampling, limits, codec.frame_rate)
            for seed, (loaded, audio) in enumerate(samples)
        ]
        self._names = _file_names(self._samples)
        write_jsonl(folder / "prompts.jsonl", map(_describe_prompt, self._names, self._samples))

    def draw_on(self, boards: Sequence[Board]) -> None:
        """See `DrawsOnBoards`."""
        self._boards = boards

    def __call__(self, step: int) -> None:
        engine = self._model.engine(self._template, self._requests)
        for name, answer in zip(self._names, engine.run(self._requests), strict=True):
            samples_1N = self._codec.decode(answer.codes_KT).cpu()
            save(self._folder / f"step-{step:06d}" / f"{name}.wav", samples_1N, self._codec.sample_rate)
            for board in self._boards:
                board.audio(step, name, samples_1N, self._codec.sample_rate)


class ShardedEvalAudio:
    """`EvalAudio` of a model whose weights are spread over ranks: the first rank speaks with a whole copy.

    Called on every rank, and told once how to read whole weights (`read_by`).

    Args:
        model: that is trained.
        copy: the model that `audio` speaks with; None on the other ranks.
        audio: None on the other ranks.
    """

    def __init__(
        self, model: PackedModel, copy: PackedModel | None, audio: EvalAudio | None, ranks: Ranks
    ) -> None:
        self._whole_copy, self._audio, self._ranks = WholeCopy(model, copy), audio, ranks

    def read_by(self, read: Read) -> None:
        """Take `Strategy.read`."""
        self._whole_copy.read_by(read)

    def draw_on(self, boards: Sequence[Board]) -> None:
        """See `DrawsOnBoards`."""
        if self._audio is not None:
            self._audio.draw_on(boards)

    def __call__(self, step: int) -> None:
        self._whole_copy.fill()
        if self._audio is not None:
            with torch.autocast("cuda" if torch.cuda.is_available() else "cpu", enabled=False):
                self._audio(step)
        self._ranks.barrier()


def _file_names(samples: Sequence[Sample]) -> list[str]:
    """A name for each by its id, with a number where samples of several sources have the same one."""
    id_counts: Counter[str] = Counter()
    names = []
    for sample in samples:
        id_counts[sample.id] += 1
        again = f" {id_counts[sample.id]}" if id_counts[sample.id] > 1 else ""
        names.append(safe_name(f"{sample.id}{again}"))
    return names


def _describe_prompt(name: str, sample: Sample) -> dict[str, str]:
    """By the metadata where it tells, else what the user wrote, and nobody."""
    text = str(sample.metadata.get("text", " ".join(sample.texts("user"))))
    speaker = str(sample.metadata.get("speaker") or "")
    return {"name": name, "id": sample.id, "text": text, "speaker": speaker}


def reply_request(
    sample: Sample,
    audio: Sequence[PartAudio],
    seed: int,
    sampling: SamplingConfig,
    limits: Limits,
    frame_rate: float,
) -> Request:
    """To say the last turn: what comes before it, with the codes of the recordings in it, or their features.

    Args:
        frame_rate: code frames per second.
    """
    messages = sample.messages[:-1]
    before = sum(content_part.type == "audio" for message in messages for content_part in message.content)
    phrases = limited_phrases(
        ((phrase.text, phrase.reading) for phrase in sample.messages[-1].phrases), frame_rate
    )
    return Request(messages, seed, audio[:before], sampling, limits, phrases=phrases)


def make_eval_audio(
    config: TrainConfig, model: PackedModel, corpus: TrainingCorpus, context: Context
) -> EvalAudio | ShardedEvalAudio | None:
    """Pick the held-out prompts to synthesize; None where it cannot be done, and the reason is told.

    Where every rank holds the whole model, the first rank speaks and the others have None, too.

    Raises:
        StageError: `codec` is not the codec of the sources.
    """
    ranks = context.ranks
    if ranks.world == 1 or config.strategy not in SHARDING:
        return _eval_audio(config, model, corpus, context)
    weight = next(model.parameters())
    copy = (
        model.empty_copy(weight.device, weight.dtype)
        if ranks.first and not _find_eval_audio_obstacle(config)
        else None
    )
    audio = _eval_audio(config, copy or model, corpus, context)
    if not ranks.of_first(audio is not None):
        return None
    return ShardedEvalAudio(model, copy, audio, ranks)


def _eval_audio(
    config: TrainConfig, speaker: PackedModel, corpus: TrainingCorpus, context: Context
) -> EvalAudio | None:
    """Return the prompts that `speaker` synthesizes; on the first rank alone."""
    obstacle = _find_eval_audio_obstacle(config)
    spoken_samples: list[tuple[LoadedSample, list[PartAudio]]] = []
    if not obstacle and context.ranks.first:
        for place, source in enumerate(corpus.sources):
            used = corpus.survey.used(place, held_out=True)
            some = used[evenly(len(used), 4 * config.eval_audio_samples)]
            usable = read_usable(source, some, corpus.encoder, corpus.set_aside)
            spoken_samples += [
                (loaded, audio) for loaded, audio in usable if is_spoken(loaded.sample.messages)
            ]
        obstacle = "" if spoken_samples else "no held-out sample is spoken"
    if obstacle and config.eval_audio_samples:
        context.say(f"no prompts are synthesized at evaluations: {obstacle}")
    if not spoken_samples:
        return None
    picked = [spoken_samples[place] for place in evenly(len(spoken_samples), config.eval_audio_samples)]
    codec = load_codec(model_folder(required(config.codec)))
    digest = corpus.codec.get("digest")
    if digest is not None and codec_digest(codec) != digest:
        problem = f"codec: {config.codec} is another codec than that of the shards"
        raise StageError(problem, "give the folder of the codec that the shards were tokenized with", 2)
    sampling = SamplingConfig(**guidance_of(config.text_dropout, config.speaker_dropout))
    return EvalAudio(speaker, codec, corpus.template, picked, context.folder / "listening", sampling)


def _find_eval_audio_obstacle(config: TrainConfig) -> str:
    if config.codec is None:
        return "set `codec` to that of the shards"
    return "" if config.eval_audio_samples else "eval_audio_samples is 0"
