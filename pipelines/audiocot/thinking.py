"""The chain of thought of one clip: by measurements, or by a model that was trained on `thinking.jsonl`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from audiollm.audio.discovery import AudioError
from audiollm.data.records.sample import Region, VideoPart
from audiollm.data.records.thoughts import (
    ThoughtError,
    ThoughtRecord,
    caption_of_record,
    check_record_times,
    parse_answer,
    parse_thought,
    record_json,
)
from audiollm.data.records.video_clips import MAX_PICTURES, PictureReader, PictureSettings
from audiollm.errors import ConfigError, StageError
from audiollm.evaluate.judges.yamnet import checked_tagger
from audiollm.video.frames import VideoError, frame_times, pictures_end_s
from pipelines.audiocot.clip import FileFacts, SoundClip, SoundFile
from pipelines.audiocot.output import WHAT_IS_HEARD, WHAT_TO_DO, region_prompt
from pipelines.instructions import EditPlan, InstructionQuestion, names_times, read_instruction
from pipelines.steps.step import Listener, Value

if TYPE_CHECKING:
    from audiollm.audio import Waveform
    from audiollm.generation.service.service import GenerationService

Answer = TypeVar("Answer")
_MAX_TOKENS = 1024
_EXTEND_AT_MOST_S = 60.0
_UNTOLD = PictureSettings(side=448)
"""For models that do not tell how they were shown pictures, as endpoints: the full ones of a film fill the memory."""


class EditAnswer(BaseModel):
    """An instruction as an operation on a track."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    operation: Literal["extend", "inpaint", "add", "remove"]
    span: list[float] = Field(min_length=2, max_length=2)
    record: ThoughtRecord

    @model_validator(mode="after")
    def _span_is_positive(self) -> EditAnswer:
        if not 0 <= self.span[0] < self.span[1]:
            raise ValueError(f"the span {self.span[0]:g} to {self.span[1]:g} s is none")
        return self


@dataclass(frozen=True)
class ThoughtRequest:
    """A clip, and what is asked about it.

    Args:
        end_s: None: the end of the file.
        video: the file of its pictures, where that is another one.
        region: a box around an object; none: the whole picture.
        instruction: what is to be done with the sound, in everyday words.
        pictures: how the pictures of a video are shown; None: as the model was trained, else 2 per second.
        check_stop: called between the steps of the work, after each picture and each token; what it raises ends the
            work. It must be no `Exception`, which would be taken for an error of the model. None: work to the end.
    """

    source: Path
    start_s: float = 0.0
    end_s: float | None = None
    region: Sequence[Region] = ()
    instruction: str | None = None
    pictures: PictureSettings | None = None
    check_stop: Callable[[], None] | None = None
    video: Path | None = None


@dataclass(frozen=True)
class ThoughtAnswer:
    """A record and, for an instruction, the operation and its span.

    Args:
        little_evidence: the tagger has no name for what is loudest in the clip.
    """

    record: ThoughtRecord
    operation: str | None = None
    span: tuple[float, float] | None = None
    little_evidence: bool = False

    def as_json(self) -> dict[str, Any]:
        """The answer as JSON values."""
        if self.operation is None or self.span is None:
            return record_json(self.record)
        return {"operation": self.operation, "span": list(self.span), "record": record_json(self.record)}


def parse_edit(answer: str, duration_s: float) -> EditAnswer:
    """Read the operation in a model's answer: one JSON object, whose times fit a clip of this length.

    Raises:
        ThoughtError: no operation, or a span that it cannot have.
    """
    edit_answer = parse_answer(answer, EditAnswer)
    start_s, end_s = edit_answer.span
    longest_s = _EXTEND_AT_MOST_S if edit_answer.operation == "extend" else 0.0
    if end_s > duration_s + longest_s + 0.05 or (edit_answer.operation != "extend" and start_s >= duration_s):
        raise ThoughtError(
            f"the span {start_s:g} to {end_s:g} s does not lie in the clip of {duration_s:.2f} s"
        )
    check_record_times(edit_answer.record, max(end_s, duration_s))
    return edit_answer


class Thinker(Protocol):
    """A writer of chains of thought."""

    def think(self, request: ThoughtRequest) -> ThoughtAnswer: ...


def understand(
    request: ThoughtRequest,
    record: ThoughtRecord,
    duration_s: float,
    writer: Thinker | None,
    span: tuple[float, float] | None = None,
    has_object: bool = False,
) -> list[EditPlan]:
    """The edits of an instruction: by its words, or by a model where they leave open what a model can hear.

    Args:
        request: the recording and the instruction.
        record: the recording's chain of thought.
        writer: a model that understands instructions; None: words alone count.
        span: the selected seconds; they count where the words name none.
        has_object: whether an object in the pictures is pointed at.

    Raises:
        InstructionQuestion: neither reads them.
    """
    from audiollm.flow.editing.operations import find_operation

    assert request.instruction is not None
    try:
        return read_instruction(request.instruction, record, duration_s, span, has_object)
    except InstructionQuestion as question:
        if writer is None or not question.is_open:
            raise
        try:
            answer = writer.think(request)
        except (StageError, ConfigError) as error:
            sentence = f"{question.sentence} The model could not answer it: {error}"
            raise InstructionQuestion(sentence, question.choices) from error
    assert answer.operation is not None and answer.span is not None
    start_s, end_s = answer.span
    if span is not None and answer.operation != "extend" and not names_times(request.instruction):
        start_s, end_s = span
    return [EditPlan(find_operation(answer.operation), caption_of_record(answer.record), start_s, end_s)]


class MeasuredThinker:
    """Writes from measurements, as `audiocot` does with `measured`.

    Args:
        tagger: a tagger of sounds, or `auto` for YAMNet; None: sounds have no names.
    """

    def __init__(self, tagger: str | Path | None) -> None:
        self._tagger = tagger

    def think(self, request: ThoughtRequest) -> ThoughtAnswer:
        """
        Raises:
            ConfigError: a file or a tagger that cannot be used.
        """
        from pipelines.audiocot.answers.measured import has_little_evidence, heard_record, placed_record
        from pipelines.audiocot.steps.built_in import Levels, LevelsConfig, Motion, MotionConfig
        from pipelines.audiocot.steps.tags import Tags, TagsConfig

        clip = open_clip(request)
        values: dict[str, Value] = {"levels": Levels(LevelsConfig()).process(clip)}
        if self._tagger is not None:
            tags = Tags(TagsConfig(model=checked_tagger(self._tagger)))
            if reason := tags.missing():
                raise ConfigError(reason, "--tagger", "give a .tflite, an .onnx or a folder")
            tags.setup()
            values["tags"] = tags.process(replace(clip, values={**clip.values, **values}))
        try:
            moments = Motion(MotionConfig()).process(clip)["moments"]
        except VideoError:  # the pictures end before the sound: what is heard is measured all the same
            moments = []
        record = placed_record(heard_record(values, clip.duration_s), moments)
        little_evidence = "tags" in values and has_little_evidence(record, values["levels"])
        return ThoughtAnswer(record, little_evidence=little_evidence)


class ModelThinker:
    """Asks a model, and asks again with what was wrong.

    Args:
        chat: a chat of any number of turns.
        asks: the most requests.
        pictures: how the model was shown pictures in its training; fewer a second where a clip would have too many.
        hears: whether it takes recordings; one that sees alone is shown the pictures.
    """

    def __init__(
        self, chat: Any, asks: int, pictures: PictureSettings | None = None, hears: bool = True
    ) -> None:
        self._chat, self._asks, self._pictures = chat, asks, pictures or _UNTOLD
        self._hears = hears

    def think(self, request: ThoughtRequest) -> ThoughtAnswer:
        """
        Raises:
            ConfigError: a file that cannot be used.
            StageError: no answer of the model could be used.
        """
        clip = open_clip(request)
        if not self._hears and clip.video is None:
            raise ConfigError(
                f"{request.source}: has no pictures, and the model takes no recordings",
                "--model",
                "give a model that hears",
            )
        if request.instruction is not None and request.region:
            raise ConfigError(
                "an instruction is about the whole clip",
                "--region",
                "ask about the object or give the instruction",
            )
        if request.instruction is not None:
            prompt = f"{WHAT_TO_DO}{request.instruction}"
            edit_answer = self._ask(request, clip, prompt, lambda answer: _edit_of(answer, clip.duration_s))
            return ThoughtAnswer(
                edit_answer.record, edit_answer.operation, (edit_answer.span[0], edit_answer.span[1])
            )
        if request.region and clip.video is None:
            raise ConfigError(
                f"{request.source}: has no pictures", "--region", "leave it out for a recording"
            )

        def check(answer: str) -> ThoughtRecord:
            return parse_thought(answer, clip.duration_s)

        record = self._ask(replace(request, region=()), clip, WHAT_IS_HEARD, check)
        if request.region:
            record = self._ask(request, clip, region_prompt(record_json(record)), check)
        return ThoughtAnswer(record)

    def _ask(
        self, request: ThoughtRequest, clip: SoundClip, prompt: str, check: Callable[[str], Answer]
    ) -> Answer:
        from audiollm.evaluate.subjects.chat import ChatError
        from audiollm.evaluate.subjects.stored_answers import RefusedAnswer, ask_checked
        from audiollm.models.audio_llms.inputs import Pictures

        parts: list[Any] = []
        if clip.video is not None:
            settings = request.pictures or self._pictures
            try:
                end_s = _shown_until(clip, clip.video, settings.per_second)
                video_part = VideoPart(
                    path=clip.video, start_s=clip.start_s, end_s=end_s, region=list(request.region)
                )
                max_per_second = MAX_PICTURES / max(end_s - clip.start_s, 1e-3)
                settings = settings.model_copy(
                    update={"per_second": min(settings.per_second, max_per_second)}
                )
                read_pictures = PictureReader(settings).read(video_part, request.check_stop)
            except (VideoError, ValueError) as error:
                raise ConfigError(
                    str(error), str(request.source), "give another span, rate or region"
                ) from None
            parts.append(Pictures(read_pictures.frames, read_pictures.times_s))
        if self._hears:
            parts.append(clip.waveform().mono())
        parts.append(prompt)
        try:
            return ask_checked(
                lambda turns: str(self._chat.go_on(turns, request.check_stop)), parts, check, self._asks
            )[0]
        except RefusedAnswer as error:
            raise StageError(
                f"think: {error}", "train the model longer (recipes/audiocot_writer), or raise --asks"
            ) from None
        except ChatError as error:
            raise StageError(
                f"think: {error}",
                "give a shorter part (--start, --end), or look after the endpoint: address, model, key",
            ) from None


def model_thinker(model: str, asks: int, service: GenerationService | None = None) -> ModelThinker:
    """A thinker by the folder of a model of transformers, or `endpoint=MODEL@URL`.

    Args:
        service: carries out the answers of a folder's model, so that several threads may ask it at once; None: one
            thread asks it.

    Raises:
        ConfigError: it is neither, or does not load.
    """
    from audiollm.evaluate.subjects.chat import EndpointChat, FolderChat
    from audiollm.evaluate.subjects.service_chat import ServiceChat
    from audiollm.families.registry import open_model_folder
    from audiollm.models.pretrained import model_folder

    kind, _, where = model.partition("=")
    name, at, url = where.partition("@")
    if kind == "endpoint":
        if not (name and at and url):
            raise ConfigError(
                f"{model!r} names no endpoint", "--model", "write endpoint=MODEL@http://HOST:PORT/v1"
            )
        return ModelThinker(EndpointChat(url, name, max_tokens=_MAX_TOKENS), asks)
    answering = open_model_folder(model_folder(Path(model))).answering_model()
    chat = (
        FolderChat(answering, _MAX_TOKENS)
        if service is None
        else ServiceChat(answering, _MAX_TOKENS, service)
    )
    return ModelThinker(chat, asks, pictures_of_model(model), answering.hears)


def pictures_of_model(model: str) -> PictureSettings:
    """How a model was shown pictures in its training; 2 a second, in squares of 448, where nothing tells."""
    if model.startswith("endpoint="):
        return _UNTOLD
    from audiollm.models.pretrained import model_folder

    return PictureSettings.beside(model_folder(Path(model))) or _UNTOLD


def open_clip(request: ThoughtRequest) -> SoundClip:
    """The clip of a request.

    Raises:
        ConfigError: a file without sound, or a span outside of it.
    """
    from pipelines.audiocot.steps.built_in import SourceProbe, SourceProbeConfig

    listener = Listener(str(request.source))
    facts = FileFacts(video=None if request.video is None else str(request.video))
    try:
        file = SoundFile(str(request.source), facts, {}, listener)
        probe = SourceProbe(SourceProbeConfig()).process(file)
    except AudioError as error:
        raise ConfigError(str(error), "", "give a video with sound, or a recording") from None
    end_s = probe["duration_s"] if request.end_s is None else request.end_s
    if not request.start_s < end_s <= probe["duration_s"] + 0.05:
        raise ConfigError(
            f"the span {request.start_s:g} to {end_s:g} s does not lie in {request.source} of "
            f"{probe['duration_s']:.2f} s",
            "--start, --end",
            "give seconds from its beginning",
        )
    end_s = min(end_s, probe["duration_s"])
    place = (str(request.source), request.start_s, end_s, facts, {"probe": probe}, listener)
    return SoundClip(*place) if request.check_stop is None else _WatchedClip(*place, request.check_stop)


# Private


def _edit_of(answer: str, duration_s: float) -> EditAnswer:
    """The operation in an answer about a whole sound, which an extension goes beyond.

    Raises:
        ThoughtError: see `parse_edit`.
    """
    edit_answer = parse_edit(answer, duration_s)
    if edit_answer.operation == "extend" and edit_answer.span[1] <= duration_s:
        raise ThoughtError(
            f"an extension must end after {duration_s:.2f} s, and this one ends at {edit_answer.span[1]:g} s"
        )
    return edit_answer


def _shown_until(clip: SoundClip, video: str, per_second: float) -> float:
    """The second up to which a clip's pictures are shown: its end, or theirs where the sound goes on after them."""
    end_s = pictures_end_s(video)
    return clip.end_s if frame_times(clip.start_s, clip.end_s, per_second)[-1] <= end_s else end_s


@dataclass(frozen=True)
class _WatchedClip(SoundClip):
    """A clip whose reading checks whether it is still wanted: steps that measure it read it as they go on."""

    check_stop: Callable[[], None]

    def waveform(self) -> Waveform:
        self.check_stop()
        return super().waveform()

    def samples(self, sample_rate: int) -> NDArray[np.float32]:
        self.check_stop()
        return super().samples(sample_rate)

    def pictures(
        self, frame_rate: float, side: int | None, region: Sequence[Region] = ()
    ) -> Iterator[tuple[float, NDArray[np.uint8]]]:
        for timed_picture in super().pictures(frame_rate, side, region):
            self.check_stop()
            yield timed_picture
