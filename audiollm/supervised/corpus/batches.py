"""The batch of a step: its samples, how they are shown, their packs, and the packs of this rank. Made in workers.

A step is a pure function of its number: nothing here has a state.

Shapes: K items of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from pydantic import ConfigDict
from torch import Tensor

from audiollm.data.chat.conditions import corrupt, draw_conditions, hide_conditions
from audiollm.data.chat.fitting import Policy, fit_stream
from audiollm.data.chat.template import Template, TokenStream
from audiollm.data.hearing.augment import augment_features
from audiollm.data.hearing.augmentation import Augmentation
from audiollm.data.hearing.features import ClipFeatures, FeatureShape, HeardClips, PartAudio, part_audio
from audiollm.data.packing import Pack, PackedBatch, SilenceWeight, idle_pack, pack, plan_step
from audiollm.data.records.mixture import Mixture, evenly
from audiollm.data.records.sample import Message
from audiollm.data.records.source import LoadedSample, Source
from audiollm.errors import BadSample
from audiollm.files.set_aside import SetAside
from audiollm.supervised.corpus.survey import SourceSurvey
from audiollm.train.loop.task import step_generator
from audiollm.train.supervised_settings import PackingSettings

ROWS_MULTIPLE = 128
WINDOW_RUNS = 64
"""Runs of 64 samples that are shuffled together (4,096 samples); a smaller source is shuffled as a whole."""
KEPT_BYTES = 128 * 2**20
"""Bytes of features that each worker keeps: those of small data are computed once and not in every pass."""
EVALUATED = 256
"""Held-out samples of a source that an evaluation looks at, at most."""


class Batching(PackingSettings):
    """The samples of a step, and how they are shown and packed."""

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)

    batch_size: int
    """Samples of an optimizer step, over all ranks and packs."""
    max_tokens: int
    max_length: int
    encoder: FeatureShape | None = None
    """The features in which recordings are given to the model's audio encoder; None: they are given as codes."""
    augment: tuple[Augmentation | None, ...] = ()
    """How features are varied in training, for each source; evaluations hear what there is."""
    views: tuple[int, ...] = ()
    """Augmented views of each source that were encoded before, from which training draws; 0: none."""


@dataclass(frozen=True)
class StepBatch:
    """This rank's packs of a step, at least one, and as many as every other rank's."""

    packs: list[PackedBatch]
    bad: list[BadSample] = field(default_factory=list)
    """Left out of it."""

    def pin_memory(self) -> StepBatch:
        """Copy the tensors to pinned memory, from which a GPU takes them while the host goes on."""
        return StepBatch(_pinned(self.packs), self.bad)

    def __reduce__(self) -> tuple[Any, ...]:
        """Between processes as plain arrays: as tensors, each would hold a file descriptor open."""
        return _restore_step_batch, (_as_arrays(self.packs), self.bad)


class BatchMaker:
    """`maker(step)` is the step's `StepBatch`; goes to worker processes, which open the sources themselves."""

    def __init__(
        self,
        sources: Sequence[Source],
        weights: Sequence[float] | None,
        survey: SourceSurvey,
        template: Template,
        batching: Batching,
        seed: int,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self._sources, self._template, self._batching = sources, template, batching
        self._seed, self._rank, self._world = seed, rank, world
        self._clip_features = HeardClips(batching.encoder, KEPT_BYTES) if batching.encoder else None
        self._rows = survey.rows
        self._used = [survey.used(place, held_out=False) for place in range(len(sources))]
        self.mixture = Mixture([len(used) for used in self._used], weights, seed, window_runs=WINDOW_RUNS)

    def __call__(self, step: int) -> StepBatch:
        size = self._batching.batch_size
        first = step * size
        items = [
            (item.source, int(self._used[item.source][item.index]))
            for item in self.mixture.items(first, first + size)
        ]
        lengths = [int(self._rows[source][index]) for source, index in items]
        plan = plan_step(lengths, self._batching.max_tokens, self._world, self._batching.packing)
        bad: list[BadSample] = []
        packs = [self._pack(pack, first, items, bad) for pack in plan[self._rank]]
        return StepBatch(packs, bad)

    def passes(self, steps: int) -> list[float]:
        """Return the number of passes through each source in so many steps."""
        drawn_S = self.mixture.source_counts(steps * self._batching.batch_size)
        return [float(n) / max(1, len(used)) for n, used in zip(drawn_S, self._used, strict=True)]

    def _pack(
        self, pack: Pack, first: int, items: Sequence[tuple[int, int]], bad: list[BadSample]
    ) -> PackedBatch:
        streams = []
        for place in pack:
            source, index = items[place]
            generator = step_generator(self._seed, first + place, "draw")
            try:
                streams.append(self._draw(source, index, generator))
            except BadSample as error:
                bad.append(error.with_traceback(None))
        return packed(streams, self._template, self._batching)

    def _draw(self, source: int, index: int, generator: torch.Generator) -> TokenStream:
        """The sample as it is shown this time: one of its encodings, conditions hidden or not, codes corrupted.

        No longer than the step's plan has it: with its text hidden more of its turns could fit.

        Raises:
            BadSample: it can no longer be read, or is not what was measured.
        """
        loaded, config = self._sources[source][index], self._batching
        conditions = draw_conditions(
            generator, config.text_dropout, config.speaker_dropout, config.corrupt_codes
        )
        audio = self._audio(source, index, loaded, conditions.choose(loaded.encodings, []), generator)
        messages, audio = hide_conditions(
            loaded.sample.messages, audio, conditions.no_text, conditions.no_speaker
        )
        place, length = f"{self._sources[source].name} [{index}]", int(self._rows[source][index])
        stream = _fit_usable_sample(
            self._template, place, loaded.sample.id, messages, audio, length, config.too_long
        )
        if not conditions.corrupted:
            return stream
        return corrupt(stream, conditions.corrupted, self._template.codebook_size, generator)

    def _audio(
        self, source: int, index: int, loaded: LoadedSample, codes: list[Tensor], generator: torch.Generator
    ) -> list[PartAudio]:
        """Return the codes or features of the audio parts, computed once and varied as the source asks.

        Of a recording that was encoded before, one of its views is drawn.

        Raises:
            BadSample: it can no longer be read.
        """
        clip_features, shape = self._clip_features, self._batching.encoder
        if clip_features is None or shape is None:
            return part_audio(loaded, codes, None)
        views = self._batching.views[source] if self._batching.views else 0
        view = 1 + int(torch.randint(views, (), generator=generator)) if views else 0
        audio = part_audio(
            loaded, codes, shape, lambda number, clip: clip_features((source, index, number), clip), view
        )
        config = self._batching.augment[source] if self._batching.augment else None
        if config is None:
            return audio
        return [
            augment_features(recording, config, shape, generator)
            if isinstance(recording, ClipFeatures) and not recording.is_encoded
            else recording
            for recording in audio
        ]


def evaluation_packs(
    sources: Sequence[Source],
    survey: SourceSurvey,
    template: Template,
    batching: Batching,
    set_aside: SetAside,
    rank: int = 0,
    world: int = 1,
) -> dict[str, list[PackedBatch]]:
    """By task, this rank's packs of held-out samples (evenly picked), conditions all shown and no code corrupted."""
    streams: dict[str, list[TokenStream]] = {}
    for place, source in enumerate(sources):
        used = survey.used(place, held_out=True)
        numbers = used[evenly(len(used), EVALUATED)]
        for loaded, audio in read_usable(source, numbers, batching.encoder, set_aside):
            sample, length = loaded.sample, batching.max_length
            try:
                stream = _fit_usable_sample(
                    template, source.name, sample.id, sample.messages, audio, length, batching.too_long
                )
            except BadSample as bad:
                set_aside.add([bad])
                continue
            streams.setdefault(sample.task, []).append(stream)
    packs = {}
    for task, task_streams in sorted(streams.items()):
        plan = plan_step([len(stream) for stream in task_streams], batching.max_tokens, world)
        packs[task] = [packed([task_streams[i] for i in pack], template, batching) for pack in plan[rank]]
    return packs


def read_usable(
    source: Source, numbers: np.ndarray, encoder: FeatureShape | None, set_aside: SetAside
) -> Iterator[tuple[LoadedSample, list[PartAudio]]]:
    """These samples with what their audio parts are given as; one that can no longer be read is set aside."""
    for number in numbers:
        try:
            loaded = source[int(number)]
            audio = part_audio(loaded, (loaded.encodings or [[]])[0], encoder)
        except BadSample as bad:
            set_aside.add([bad])
        else:
            yield loaded, audio


def packed(streams: Sequence[TokenStream], template: Template, batching: Batching) -> PackedBatch:
    """One pack of them; an idle one of none."""
    if not streams:
        return idle_pack(template.num_codebooks, ROWS_MULTIPLE, batching.encoder)
    silence = SilenceWeight(template.end_of_turn, batching.silence_weight)
    return pack(
        streams,
        ROWS_MULTIPLE,
        batching.normalization,
        batching.audio_reduction,
        batching.encoder,
        silence=silence,
    )


def _fit_usable_sample(
    template: Template,
    place: str,
    id: str,
    messages: Sequence[Message],
    audio: Sequence[PartAudio],
    max_length: int,
    policy: Policy,
) -> TokenStream:
    """The stream of a sample that the survey found usable, in at most `max_length` rows.

    Raises:
        BadSample: its recordings or codes were changed since then.
    """
    reason = "a recording is longer than it was"
    try:
        stream, _ = fit_stream(template, messages, audio, max_length, policy)
    except ValueError as error:
        stream, reason = None, str(error)
    if stream is None:
        raise BadSample(place, id, f"changed since it was measured: {reason}; put it back", "changed sample")
    return stream


def _pinned(value: Any) -> Any:
    """Copy lists and dataclasses, with their tensors in pinned memory."""
    if isinstance(value, Tensor):
        return value.pin_memory()
    if isinstance(value, list):
        return [_pinned(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: _pinned(getattr(value, field.name)) for field in fields(value)})
    return value


def _restore_step_batch(packs: list[Any], bad: list[BadSample]) -> StepBatch:
    return StepBatch(_as_tensors(packs), bad)


class _Plain(NamedTuple):
    """A dataclass taken apart."""

    kind: Callable[..., Any]
    values: dict[str, Any]


def _as_arrays(value: Any) -> Any:
    """Dataclasses of tensors, taken apart, with arrays in their place."""
    if isinstance(value, Tensor):
        return value.numpy()
    if isinstance(value, list):
        return [_as_arrays(item) for item in value]
    if is_dataclass(value):
        return _Plain(
            type(value), {field.name: _as_arrays(getattr(value, field.name)) for field in fields(value)}
        )
    return value


def _as_tensors(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, list):
        return [_as_tensors(item) for item in value]
    if isinstance(value, _Plain):
        return value.kind(**{name: _as_tensors(item) for name, item in value.values.items()})
    return value
