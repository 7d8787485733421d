"""The stage `compose_streams`: recordings and their translations to streams of an interpreter."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from audiollm.errors import BadSample, StageError, first_problem
from audiollm.files.set_aside import SetAside
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import InputModel, InputPath, Stage, StageConfig, StagePlan, planned_fact

if TYPE_CHECKING:
    from audiollm.data.records.aligned_recording import AlignedRecording
    from audiollm.data.records.sample import Sample
    from audiollm.interpret.aligned_records import DueText, StreamShape
    from audiollm.interpret.aligners import Aligner
    from audiollm.interpret.spoken_targets import SpokenTargets

OUTPUT, SPEECH = "streams.jsonl", "speech"
FRAME_RATE = 25
"""Code frames per second, as `codec.FRAME_RATE`, whose module loads torch."""


class AlignConfig(BaseModel):
    """Settings of an aligner: a command, or a model of ours."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, protected_namespaces=())

    command: str = ""
    """A program that answers JSON lines with seconds (`audiollm/interpret/aligners.py`), in any environment."""
    timeout_s: float = Field(600.0, gt=0)
    """Longest wait for its answer to a recording."""
    model: InputModel | None = None
    """A model of ours, trained to translate whole recordings, whose attention aligns."""
    codec: InputModel | None = None
    """The model's codec; by default the run's own `train_tokenizer`."""
    prompt: str = ""
    """System message that the model was trained with."""
    layers: int | None = Field(None, ge=1)
    """Last layers that are looked at; None: the upper half."""
    min_logprob: float | None = None
    """Mean log-probability per token below which a translation is set aside; None: none is."""

    @model_validator(mode="after")
    def _is_one(self) -> AlignConfig:
        if bool(self.command) == (self.model is not None):
            raise ValueError("align takes either a command or a model")
        of_other = {"command": ("codec", "prompt", "layers", "min_logprob"), "model": ("timeout_s",)}
        setting, owner = ("command", "model") if self.command else ("model", "command")
        for name in of_other[setting]:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"align.{name} is of align.{owner}: leave it out")
        return self


class SpeakConfig(BaseModel):
    """Settings of the model that speaks the translations."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, protected_namespaces=())

    model: InputModel
    """A model of ours that speaks in the voice of a reference."""
    codec: InputModel | None = None
    """The model's codec; by default the run's own `train_tokenizer`."""
    temperature: float | None = Field(None, ge=0)
    """Temperature of the codes; None: that of the model's folder."""
    max_duration_s: float | None = Field(None, gt=0, le=600)
    """Longest speech of an action; None: three times what its text should take."""


class ComposeStreamsConfig(StageConfig):
    """Settings of `compose_streams`."""

    recordings: InputPath
    """JSON lines, as `audiollm convert realsi|duplex|translations` writes them: `id`, `audio` (relative to the file),
    and `segments` (`start_s`, `end_s`, `text`, `target`, where known `speaker` and `said`), or `target` with `words`
    (`start_s`, `end_s`, `text`) for `wait_k`, or `target` alone for `align`, or with the times of its words
    (`target_ends_s`, as `translate` writes them); `split: test` holds out."""
    chunk_s: float = Field(0.96, gt=0)
    """Seconds of a chunk, a whole number of frames."""
    frame_rate: float = Field(FRAME_RATE, gt=0)
    """Frames per second in which the model hears: 25 code frames, or the rows of its audio encoder, 50 / `stride` of a
    Whisper."""
    wait_k: int | None = Field(None, ge=1)
    """Spread the translation over the words of the source, k words behind; None: by segments."""
    align: AlignConfig | None = None
    """Aligner of recordings that have a translation and no segments; None: they are set aside."""
    speak: SpeakConfig | None = None
    """Speak translations that are not recorded, in the voice of the source's speaker; None: they stay text."""
    lag: tuple[int, int] = (0, 0)
    """Least and largest lag of a stream in chunks, drawn once for each."""
    speaker_tags: bool = False
    """Begin a segment of another speaker with `[SPEAKER0]`, `[SPEAKER1]`, ..."""
    instruction: str = "Interpret what you hear."
    """System message of every stream; empty for none."""
    seed: int = 0
    """Seed of the lags and of the speech."""
    strict: bool = False
    """Stop at the first recording that cannot be used; otherwise it is set aside and named."""

    @model_validator(mode="after")
    def _check_chunks(self) -> ComposeStreamsConfig:
        frames = self.chunk_s * self.frame_rate
        if abs(frames - round(frames)) > 1e-6 or round(frames) < 1:
            raise ValueError(f"chunk_s must be a multiple of {1 / self.frame_rate:g} s, not {self.chunk_s:g}")
        if not 0 <= self.lag[0] <= self.lag[1]:
            raise ValueError(f"lag must rise from 0, not {self.lag[0]} to {self.lag[1]}")
        if self.wait_k is not None and self.align is not None:
            raise ValueError("wait_k and align both say when a word is due: leave one out")
        if self.wait_k is not None and self.speaker_tags:
            raise ValueError("speaker_tags mark segments, which wait_k does not read: leave one out")
        return self


def _compose_streams(config: ComposeStreamsConfig, context: Context) -> dict[str, Any]:
    from pydantic import ValidationError

    from audiollm.data.records.aligned_recording import AlignedRecording
    from audiollm.data.records.sample import write_samples
    from audiollm.data.tables.rows import checked_rows

    set_aside = SetAside(context.folder / "set_aside.jsonl", "compose_streams", strict=config.strict)
    composer = _Composer(config, context.folder / SPEECH)
    samples: list[Sample] = []
    ids: set[str] = set()
    seconds = 0.0
    try:
        for where, row in checked_rows(Path(config.recordings)).rows:
            values = {key: value for key, value in row.items() if value != ""}
            try:
                recording = AlignedRecording.model_validate(values)
                if recording.id in ids:
                    raise BadSample(where, recording.id, "its id was used before", "doubled id")
                ids.add(recording.id)
                sample, duration_s = composer.stream(recording, where)
            except ValidationError as error:
                id = str(values.get("id", ""))
                set_aside.add([BadSample(where, id, first_problem(error), "no aligned recording")])
                continue
            except BadSample as bad:
                set_aside.add([bad])
                continue
            samples.append(sample)
            seconds += duration_s
    finally:
        composer.close()
    if not samples:
        raise StageError("no recording can be made a stream", "see set_aside.jsonl", 2)
    write_samples(context.folder / OUTPUT, samples)
    actions = [action for sample in samples for action in sample.messages[-1].actions()]
    num_spoken = sum(len(action) > 1 or bool(getattr(action[0], "text", "")) for action in actions)
    return {
        "streams": len(samples),
        "hours": seconds / 3600,
        "chunks": len(actions),
        "segments": num_spoken,
        "speech_hours": sum(sum(sample.metadata.get("durations_s", ())) for sample in samples) / 3600,
        "set_aside": len(set_aside.rows),
    }


class _Composer:
    """Makes streams of recordings by the settings; the models are loaded once, when they are first needed.

    Args:
        folder: where speech is written.
    """

    def __init__(self, config: ComposeStreamsConfig, folder: Path) -> None:
        from audiollm.interpret.aligned_records import StreamShape

        self._config, self._folder = config, folder
        self._shape: StreamShape = StreamShape(
            round(config.chunk_s * config.frame_rate),
            config.frame_rate,
            config.lag,
            config.seed,
            config.instruction,
        )
        self._aligner = _aligner(config.align)
        self._targets = _spoken_targets(config, folder)

    def stream(self, recording: AlignedRecording, where: str) -> tuple[Sample, float]:
        """Return the stream of a recording, and its duration in seconds.

        Raises:
            BadSample: it cannot be read, aligned or spoken.
        """
        from audiollm.interpret.aligned_records import check_times, stream_sample

        path, info = self._probed(recording, recording.audio, where)
        duration_s = info.num_samples / info.sample_rate
        placed = recording.model_copy(update={"audio": str(path)})
        if recording.target_audio is not None:
            target, its = self._probed(recording, recording.target_audio, where)
            check_times(recording, recording.target_words, its.num_samples / its.sample_rate, where)
            placed = placed.model_copy(update={"target_audio": str(target)})
        placed = placed.model_copy(update={"segments": self._resolve_speech_paths(recording, where)})
        try:
            due = self._due(placed, path, duration_s, where)
            frames = _count_frames(info.num_samples, info.sample_rate, self._config.frame_rate)
            speak = None if self._targets is None else self._targets.of(placed, path)
            return stream_sample(placed, due, frames, self._shape, speak), duration_s
        except BadSample as bad:
            raise BadSample(where, bad.id, bad.reason, bad.kind) from None

    def close(self) -> None:
        """End the aligner's process, where it has one."""
        close = getattr(self._aligner, "close", None)
        if close is not None:
            close()

    def _due(self, recording: AlignedRecording, path: Path, duration_s: float, where: str) -> list[DueText]:
        from audiollm.interpret.aligned_records import check_recording, segments_due, units_due, wait_k_due

        config = self._config
        if self._aligner is not None and not recording.segments and recording.target.strip():
            ends_s = self._aligner.source_ends(recording, path)
            return units_due(recording, [min(end_s, duration_s) for end_s in ends_s])
        if recording.target_ends_s and config.wait_k is None and not recording.segments:
            return units_due(recording, [min(end_s, duration_s) for end_s in recording.target_ends_s])
        check_recording(recording, duration_s, config.wait_k, where)
        if config.wait_k is not None:
            return wait_k_due(recording, config.wait_k)
        return segments_due(recording, config.speaker_tags)

    def _resolve_speech_paths(self, recording: AlignedRecording, where: str) -> list[Any]:
        """Return the segments with the paths of their speech as seen from anywhere."""
        segments = []
        for segment in recording.segments:
            if segment.said is not None:
                path, info = self._probed(recording, segment.said.path, where)
                if segment.said.end_s > info.num_samples / info.sample_rate + 0.05 or (
                    segment.said.end_s <= segment.said.start_s
                ):
                    reason = f"{segment.target!r}: its speech is no span of {path.name}"
                    raise BadSample(where, recording.id, reason, "longer than its recording")
                segment = segment.model_copy(
                    update={"said": segment.said.model_copy(update={"path": str(path)})}
                )
            segments.append(segment)
        return segments

    def _probed(self, recording: AlignedRecording, name: str, where: str) -> tuple[Path, Any]:
        """Return the path of a recording, and what its header tells, its length among it."""
        from audiollm.audio import AudioError, probe

        path = (Path(self._config.recordings).parent / name).resolve()
        try:
            info = probe(path)
        except AudioError as error:
            raise BadSample(where, recording.id, f"audio: {error.reason}", "cannot be read") from None
        if not info.num_samples:
            reason = f"audio: the header of {path.name} does not tell its length: convert it to .flac"
            raise BadSample(where, recording.id, reason, "unknown length")
        return path, info


def _count_frames(num_samples: int, sample_rate: int, frame_rate: float) -> int:
    """Code frames of a recording, or rows of features where the rate is another."""
    from audiollm.codec import FRAME_SAMPLES, SAMPLE_RATE
    from audiollm.data.hearing.features import SAMPLE_RATE as HEARD_RATE

    if frame_rate == FRAME_RATE:
        return math.ceil(math.ceil(num_samples * SAMPLE_RATE / sample_rate) / FRAME_SAMPLES)
    return max(
        1, math.ceil(math.ceil(num_samples * HEARD_RATE / sample_rate) * frame_rate / HEARD_RATE - 1e-9)
    )


def _aligner(config: AlignConfig | None) -> Aligner | None:
    if config is None:
        return None
    if config.command:
        from audiollm.interpret.aligners import CommandAligner

        return CommandAligner(config.command.removeprefix("command:"), config.timeout_s)
    from audiollm.families.registry import load_interpreter
    from audiollm.interpret.attention_aligner import AttentionAligner
    from audiollm.recipe.stages import required

    model = load_interpreter(required(config.model), config.codec)
    return AttentionAligner(model, config.prompt, config.layers, config.min_logprob)


def _spoken_targets(config: ComposeStreamsConfig, folder: Path) -> SpokenTargets | None:
    if config.speak is None:
        return None
    from dataclasses import replace

    from audiollm.families.registry import load_speech_generator
    from audiollm.interpret.spoken_targets import SpokenTargets

    generator = load_speech_generator(config.speak.model, config.speak.codec)
    sampling = generator.defaults.sampling
    if config.speak.temperature is not None:
        sampling = replace(sampling, temperature=config.speak.temperature)
    return SpokenTargets(generator, folder, config.seed, sampling, config.speak.max_duration_s)


def _plan_streams(config: ComposeStreamsConfig, plans: Mapping[str, StagePlan]) -> StagePlan:
    how = "by segments" if config.wait_k is None else f"wait-{config.wait_k}"
    if config.align is not None:
        how = f"aligned by {config.align.command or config.align.model}"
    voice_note = "" if config.speak is None else f", spoken by {config.speak.model}"
    facts = {name: planned_fact(plans, config.recordings, name) for name in ("clips", "audio_s")}
    return StagePlan(
        facts={**facts, "samples": facts["clips"], "chunk_s": config.chunk_s},
        core_seconds=2.0,
        note=f"chunks of {config.chunk_s:g} s, {how}{voice_note}, lag {config.lag[0]} to {config.lag[1]} chunks",
    )


STAGE = Stage(
    kind="compose_streams",
    config=ComposeStreamsConfig,
    run=_compose_streams,
    artifacts={"streams": OUTPUT},
    help="make streams of an interpreter from recordings and their translations",
    plan=_plan_streams,
)
