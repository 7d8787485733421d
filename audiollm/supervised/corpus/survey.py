"""One look at every sample before training: how long it is, whether it is trained on or held out, what is bad.

Steps are then planned from lengths alone, and every rank comes to the same plan without reading what others read.

Shapes: N samples of a source.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from audiollm.data.chat.fitting import Fitting, Policy, plan_fit
from audiollm.data.chat.template import Template
from audiollm.data.hearing.features import (
    MISSING_ROWS,
    NOT_FROZEN,
    NOT_IN_CHUNKS,
    FeatureRows,
    FeatureShape,
    PartSize,
    encoded_name,
    heard_parts,
    no_codes,
    num_clip_rows,
    read_encoded,
    refuse_missing_sound,
    stream_chunks,
)
from audiollm.data.records.sample import Sample, TextPart
from audiollm.data.records.source import LoadedSample, Source
from audiollm.data.records.text_origin import text_recognizers
from audiollm.data.text.words import words_of
from audiollm.errors import BadSample
from audiollm.files.atomic import DamagedFile, atomic_path
from audiollm.files.set_aside import SetAside
from audiollm.files.tensors import open_tensors

Advance = Callable[[], None]
FITTINGS = tuple(Fitting)
MAX_WORDS = 1000
"""Words of a corpus up to which a model knows these alone: with more it reads others as well."""
VOCABULARY_TEXT = 200_000_000
"""Characters that a vocabulary is learned from, at most: more takes long and changes little."""


@dataclass(frozen=True)
class SourceSurvey:
    """By source, in the order of the sources."""

    rows: list[np.ndarray]
    """int64 `[N]`: positions of each sample, cut as the policy says; 0: it is not used."""
    held_out: list[np.ndarray]
    """bool `[N]`: of a split that trainings leave out."""
    fittings: list[np.ndarray]
    """int64 `[N]`: a place in `FITTINGS`, -1 where the sample is bad."""
    speakers: tuple[str, ...]
    """Names that the samples to train on give in their metadata."""
    digests: tuple[str, ...]
    """Digests of the sources, in their order."""
    words: tuple[str, ...] | None = None
    """Words in samples to train on that speak; None: not known, or more than `MAX_WORDS`."""
    recognizers: tuple[str, ...] = ()
    """Digests of the recognizers that wrote texts of samples to train on."""
    tasks: tuple[str, ...] = ()
    """Names of the tasks of the samples to train on."""

    def used(self, source: int, held_out: bool) -> np.ndarray:
        """Numbers of the samples that are trained on, or held out."""
        return np.flatnonzero((self.rows[source] > 0) & (self.held_out[source] == held_out))

    def counts(self) -> dict[str, int]:
        """Count the samples that fit as they are, those that were cut and how, and those that are refused or bad."""
        kind_counts = Counter(int(kind) for kinds in self.fittings for kind in kinds)
        return {("bad" if kind < 0 else FITTINGS[kind].value): n for kind, n in sorted(kind_counts.items())}


def texts_of(
    sources: Sequence[Source], set_aside: SetAside, advance: Advance, limit: int = VOCABULARY_TEXT
) -> Iterator[str]:
    """The texts and roles of samples that are trained on, for a vocabulary: `limit` characters and no more."""
    for _, _, loaded in _read_samples(sources, set_aside, advance):
        sample = loaded.sample
        if sample.is_held_out:
            continue
        turns = [(message.content, message.role) for message in sample.messages]
        # as a phrase stands in the stream: behind a space
        phonemes = [f" {phrase.phonemes}" for phrase in sample.messages[-1].phrases if phrase.phonemes]
        yield from phonemes
        limit -= sum(map(len, phonemes))
        for content, role in turns + [(answer.content, "assistant") for answer in sample.answers]:
            texts = [
                *(content_part.text for content_part in content if isinstance(content_part, TextPart)),
                role,
            ]
            yield from texts
            limit -= sum(map(len, texts))
        if limit <= 0:
            return


def survey_sources(
    sources: Sequence[Source],
    template: Template,
    max_length: int,
    policy: Policy,
    set_aside: SetAside,
    advance: Advance,
    encoder: FeatureShape | None = None,
) -> SourceSurvey:
    """Read every sample once.

    Args:
        encoder: of the model, where what is heard is given to it as features; None: as codes.

    Raises:
        BadSample: the first bad one, where `set_aside` is strict.
    """
    sizes = [len(source) for source in sources]
    rows = [np.zeros(size, np.int64) for size in sizes]
    held_out = [np.zeros(size, bool) for size in sizes]
    fittings = [np.full(size, -1, np.int64) for size in sizes]
    speakers: set[str] = set()
    words: set[str] = set()
    recognizers: set[str] = set()
    tasks: set[str] = set()
    for place, index, loaded in _read_samples(sources, set_aside, advance):
        try:
            for encoding in loaded.encodings:
                for codes_KT in encoding:
                    template.check_codes(codes_KT)
            _refuse_what_teaches_nothing(loaded.sample, f"{sources[place].name} [{index}]")
            parts = _sizes(loaded, encoder)
            plan = plan_fit(template, loaded.sample.messages, parts, max_length, policy)
        except BadSample as bad:
            set_aside.add([bad.with_traceback(None)])
            continue
        except ValueError as error:
            set_aside.add([_bad(sources[place], index, loaded, str(error), "does not compile")])
            continue
        if plan.fitting == Fitting.REFUSED:
            reason = f"longer than {max_length} positions, and too_long is {policy}"
            set_aside.add([_bad(sources[place], index, loaded, reason, "too long")])
        rows[place][index], held_out[place][index] = plan.rows, loaded.sample.is_held_out
        fittings[place][index] = FITTINGS.index(plan.fitting)
        speaker = loaded.sample.metadata.get("speaker")
        if plan.rows and not loaded.sample.is_held_out:
            speakers |= set() if speaker is None else {str(speaker)}
            recognizers |= set(text_recognizers(loaded.sample))
            tasks.add(loaded.sample.task)
            if len(words) <= MAX_WORDS:
                words |= _words_of_speech(loaded.sample)
    digests = tuple(source.digest for source in sources)
    known_words = tuple(sorted(words)) if len(words) <= MAX_WORDS else None
    return SourceSurvey(
        rows, held_out, fittings, tuple(sorted(speakers)), digests, known_words, tuple(sorted(recognizers)),
        tuple(sorted(tasks)),
    )  # fmt: skip


def _words_of_speech(sample: Sample) -> set[str]:
    """All words of a sample that speaks: its instruction says them, too."""
    if not any(
        content_part.type == "audio" for message in sample.messages[-1:] for content_part in message.content
    ):
        return set()
    texts = [
        content_part.text
        for message in sample.messages
        for content_part in message.content
        if isinstance(content_part, TextPart)
    ]
    return set(words_of(" ".join(texts)))


def save_survey(path: Path, survey: SourceSurvey) -> None:
    arrays = {
        f"{name}/{place:06d}": array
        for name in ("rows", "held_out", "fittings")
        for place, array in enumerate(getattr(survey, name))
    }
    with atomic_path(path) as temporary:
        # in one entry: several would lie in the file in any order
        names: dict[str, Any] = {"speakers": list(survey.speakers), "digests": list(survey.digests)}
        names["words"] = None if survey.words is None else list(survey.words)
        names["recognizers"], names["tasks"] = list(survey.recognizers), list(survey.tasks)
        names["sha256"] = _hash_survey(arrays, names)
        save_file(arrays, temporary, metadata={"names": json.dumps(names)})


def load_survey(path: Path) -> SourceSurvey:
    """Load what `save_survey` wrote; surveys of earlier versions have no digest to be compared with.

    Raises:
        DamagedFile: it is something else.
    """
    with open_tensors(path, "numpy") as file:
        arrays = {name: file.get_tensor(name) for name in sorted(file.keys())}
        metadata = file.metadata() or {}
    try:
        names = json.loads(metadata["names"])
        digest = names.pop("sha256", None)
        if digest is not None and digest != _hash_survey(arrays, names):
            raise ValueError("its SHA-256 is not the one that was written")
        rows, held_out, fittings = (
            [array for name, array in arrays.items() if name.startswith(f"{kind}/")]
            for kind in ("rows", "held_out", "fittings")
        )
        words = None if names.get("words") is None else tuple(names["words"])
        recognizers, tasks = (tuple(names.get(key, ())) for key in ("recognizers", "tasks"))
        return SourceSurvey(
            rows,
            held_out,
            fittings,
            tuple(names["speakers"]),
            tuple(names["digests"]),
            words,
            recognizers,
            tasks,
        )
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise DamagedFile(path, f"it holds no survey ({error})") from None


def frames_of(loaded: LoadedSample) -> list[int]:
    """Code frames of each audio part: those of the longest encoding."""
    encodings_of = zip(*loaded.encodings, strict=True)
    return [max(codes.shape[1] for codes in encodings) for encodings in encodings_of]


def _read_samples(
    sources: Sequence[Source], set_aside: SetAside, advance: Advance
) -> Iterator[tuple[int, int, LoadedSample]]:
    for place, source in enumerate(sources):
        set_aside.add(source.bad)
        for index in range(len(source)):
            advance()
            try:
                loaded = source[index]
            except BadSample as bad:
                set_aside.add([bad])
                continue
            yield place, index, loaded


def _refuse_what_teaches_nothing(sample: Sample, where: str) -> None:
    """Raises: BadSample: no message is the assistant's, or the sample holds answers to choose among."""
    if sample.answers:
        reason = (
            f"holds {len(sample.answers)} answers to choose among, and this training learns from conversations: "
            "train on it by preferences, or write the answer to learn as the last message"
        )
        raise BadSample(where, sample.id, reason, "answers to choose among")
    if all(message.role != "assistant" for message in sample.messages):
        reason = (
            "has no message of the assistant, and only these are learned: add the answer as the last message"
        )
        raise BadSample(where, sample.id, reason, "no answer")


def _sizes(loaded: LoadedSample, encoder: FeatureShape | None) -> list[PartSize]:
    """Return the size of each audio part: its code frames, or the rows of its features."""
    frames, streams = frames_of(loaded), stream_chunks(loaded.sample)
    sizes: list[PartSize] = []
    for number, (clip, is_input) in enumerate(zip(loaded.audio, heard_parts(loaded.sample), strict=True)):
        if is_input and encoder is not None:
            encoded = read_encoded(loaded, number, encoder)
            if encoded is None and number in streams:
                reason = NOT_FROZEN if encoded_name(number, 0) in loaded.arrays else NOT_IN_CHUNKS
                raise BadSample(clip.place, loaded.sample.id, reason, MISSING_ROWS)
            if encoded is None:
                refuse_missing_sound(loaded, number)
            rows = num_clip_rows(clip, encoder) if encoded is None else encoded.rows
            sizes.append(FeatureRows(rows))
        elif number < len(frames):
            sizes.append(frames[number])
        else:
            raise no_codes(clip)
    return sizes


def _bad(source: Source, index: int, loaded: LoadedSample, reason: str, kind: str) -> BadSample:
    return BadSample(f"{source.name} [{index}]", loaded.sample.id, reason, kind)


def _hash_survey(arrays: Mapping[str, np.ndarray], names: Mapping[str, Any]) -> str:
    """Return the SHA-256 over the arrays with their names and types, and over what is written beside them."""
    digest = hashlib.sha256(json.dumps(names, sort_keys=True).encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
