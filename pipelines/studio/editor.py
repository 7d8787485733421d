"""Requests to the models: chains of thought, sounds, edits, exports. Each becomes a job of the service.

Shapes: C channels, N samples.
"""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import soundfile

from audiollm.audio import Waveform, save, set_channels
from audiollm.data.records.sample import Region, VideoPart
from audiollm.data.records.thoughts import (
    ThoughtRecord,
    caption_of_record,
    check_record_times,
    prose_of,
    record_json,
)
from audiollm.errors import ConfigError
from audiollm.flow.editing.operations import EditSpan, find_operation, find_span
from audiollm.flow.editing.requests import EditRequest
from audiollm.flow.editing.tracks import copy_described, lost_in_wav, read_track
from audiollm.flow.model.sampling import SamplerSettings
from audiollm.flow.service import (
    Job,
    Line,
    SoundOrder,
    SoundService,
    default_guidance,
    edit_ordered,
    extract_ordered,
    make_ordered,
)
from audiollm.generation.service.service import GenerationService
from audiollm.video.decoders import VideoError
from audiollm.video.writing import lost_by_replacing, replace_sound
from pipelines.audiocot.thinking import Thinker, ThoughtRequest, understand
from pipelines.instructions import EditKind, InstructionQuestion
from pipelines.studio.intake import check_room
from pipelines.studio.limits import StudioLimits, StudioRefusal, told_length
from pipelines.studio.regions import RegionFinder
from pipelines.studio.store import MAX_CAPTION, MAX_COT, ProjectStore, SoundVersion, StoredProject
from pipelines.studio.waveforms import muted, read_part, splice

_AROUND_S = 60.0
"""Seconds of a track on each side of a span that are read for an edit: models hear less."""
_PICTURE_LATE_S = 0.05
"""Seconds after the last picture in which it still stands for what is heard."""
_MUTE_FADE_S = 0.005
"""Seconds in which a sound fades at the ends of a muted span, inside of it."""
_DOING: dict[EditKind, str] = {
    "extend": "extending", "inpaint": "inpainting", "add": "adding", "remove": "removing", "extract": "extracting",
    "mute": "muting",
}  # fmt: skip
_DONE_TO: dict[EditKind, str] = {
    "inpaint": "fill", "add": "add it to", "remove": "remove it from", "extract": "extract it from", "mute": "mute",
}  # fmt: skip
"""What an edit does to selected seconds."""
_SEAM_S = 0.1
"""Seconds behind a span that its seam is fitted to."""


@dataclass(frozen=True)
class MakeRequest:
    """A sound to make from words and pictures, or an edit of a version."""

    caption: str = ""
    region: tuple[Region, ...] = ()
    start_s: float | None = None
    end_s: float | None = None
    seed: int = 0
    steps: int = 24


@dataclass(frozen=True)
class EditPlace:
    """An edit's place in its request."""

    request: str
    """See `SoundEditor.key`."""
    edit_number: int = 1
    edit_count: int = 1


class SoundEditor:
    """The requests to the models on projects.

    Args:
        thinker: writes chains of thought: a model, or measurements.
        writer_understands: whether the thinker turns instructions into operations and looks at regions; several threads
            then ask it at once.
        answers: carries out the answers of a thinker that is a model of this machine; it is closed with the editor.
    """

    def __init__(
        self,
        service: SoundService,
        store: ProjectStore,
        regions: RegionFinder,
        thinker: Thinker,
        writer_understands: bool,
        limits: StudioLimits,
        answers: GenerationService | None = None,
    ) -> None:
        self.service, self.store, self.regions, self._answers = service, store, regions, answers
        self.writer_understands = writer_understands
        self.run = secrets.token_hex(4)
        """The name of this start of the studio: a page may outlive it, and the numbers of requests begin anew."""
        self.recovery_key = secrets.token_urlsafe(24)
        """Who knows it may take over the projects of all browsers: the console prints it."""
        self._thinker, self._limits = thinker, limits

    def take_over(self, owner: str, key: str, ids: Collection[str]) -> list[StoredProject]:
        """Give an owner projects of other browsers, and return those that are still another's.

        Args:
            key: `recovery_key`, which only the console tells.
            ids: the projects; empty: none is given, and all are listed.

        Raises:
            StudioRefusal: another key.
        """
        if not secrets.compare_digest(key.encode(), self.recovery_key.encode()):
            raise StudioRefusal(
                "This recovery link is of an earlier start: open the one that the studio printed when it was started "
                "last.",
                403,
            )
        for project in self.store.projects_of_others(owner):
            if project.id in ids:
                self.store.give(project, owner)
        return self.store.projects_of_others(owner)

    def key(self, job: Job) -> str:
        """The name of a request that no other has, of this start or another."""
        return f"{self.run}-{job.number}"

    def think(self, project: StoredProject, owner: str, region: Sequence[Region] = ()) -> Job:
        """Write the chain of thought anew: of the clip, or with a region of its object.

        Raises:
            StudioRefusal: a clip that is too long, or a region without a model that looks at it.
        """
        source = self.store.source(project)
        self._check_length(
            project.duration_s, "clip", "write its sounds into the table, or open a part of it"
        )
        if region and not self.writer_understands:
            raise StudioRefusal(
                "Only a model that writes can tell what an object sounds like: start the studio with --writer, "
                "or write it into the table."
            )

        previous = self.store.thought(project)  # a person may go on writing while this waits

        def work(job: Job) -> dict[str, Any]:
            thought_request = ThoughtRequest(source, region=tuple(region), check_stop=job.check_stop)
            answer = self._thinker.think(thought_request)
            job.check_stop()
            if not region:
                self.store.keep_thought(project, answer.record, previous)
            return {
                "record": record_json(answer.record),
                "caption": caption_of_record(answer.record),
                "of_object": bool(region),
            }

        line: Line = "words" if self.writer_understands else "sounds"  # measurements keep a processor busy
        return self._submit(project, work, owner, "writing the chain of thought", line)

    def understand(
        self,
        project: StoredProject,
        owner: str,
        version: SoundVersion,
        instruction: str,
        span: tuple[float, float] | None = None,
        has_object: bool = False,
    ) -> Job:
        """Ask the model that writes what an instruction on a version is, where its words leave that open.

        Args:
            span: the selected seconds, which count where the words name none.
            has_object: whether an object in the pictures is pointed at.
        """
        sound = self.store.sound(project, version)
        video = self.store.source(project) if project.has_pictures else None
        writer = None if version.duration_s > self._limits.made_s else self._thinker

        def work(job: Job) -> dict[str, Any]:
            thought_request = ThoughtRequest(
                sound, instruction=instruction, check_stop=job.check_stop, video=video
            )
            record = self.store.thought(project)
            try:
                plans = understand(thought_request, record, version.duration_s, writer, span, has_object)
            except InstructionQuestion as question:
                return question_json(question)
            job.check_stop()
            return {"edits": [vars(plan) for plan in plans]}

        return self._submit(project, work, owner, "understanding the instruction", "words")

    def generate(self, project: StoredProject, owner: str, request: MakeRequest) -> Job:
        """Make a sound for the project's pictures, words and chain of thought: a new root of the tree.

        Raises:
            StudioRefusal: there is nothing to make it from, or it would be too long.
            ConfigError: there is no model.
        """
        generator = self.service.generator
        duration_s, record = project.shown_s, self.store.thought(project)
        check_thought(record, project.duration_s)
        if duration_s < project.duration_s:
            record = record.cut(0.0, duration_s)
        video = self._video(project, request.region)
        caption = request.caption.strip() or caption_of_record(record)
        if not (caption or record.events or video):
            raise StudioRefusal(
                "There is nothing to make a sound from: write a caption or a chain of thought."
            )
        self._check_length(duration_s, "clip", "cut it, or edit spans of its sound")
        cot = record if record.events or record.background else ""
        prose = prose_of(record) if cot else ""
        order = SoundOrder(caption, duration_s, cot, video, project.name)
        settings = self._settings(request.steps)

        def work(job: Job) -> dict[str, Any]:
            clip = make_ordered(generator, order, job.watched(settings), f"{request.seed}/sound")
            job.check_stop()
            with self.store.new_version(project) as (number, path):
                save(path, clip.samples_CN, generator.sample_rate)
                facts = _describe_version(request, caption, prose, EditPlace(self.key(job)))
                title = f"made: {caption or 'from the pictures'}"
                self.store.finish(project, number, None, "generate", title, None, facts)
            return {"version": number, "remarks": clip.remarks()}

        return self._submit(project, work, owner, "generating")

    def edit(
        self, project: StoredProject, owner: str, version: SoundVersion, kind: EditKind, request: MakeRequest
    ) -> Job:
        """Edit a version: see `edit_in_turn`."""
        return self.edit_in_turn(project, owner, version, [(kind, request)])

    def edit_in_turn(
        self,
        project: StoredProject,
        owner: str,
        version: SoundVersion,
        edits: Sequence[tuple[EditKind, MakeRequest]],
    ) -> Job:
        """Edit a version, and each result in turn: every edit makes a new version below the one before it.

        A server may end between two of them: each version knows its request and its place among the edits. What was
        made stays when a later edit fails or is stopped; the job's result counts the edits.

        Raises:
            StudioRefusal: a span, or words, that an operation cannot have.
            ConfigError: there is no model, and an edit needs one.
        """
        duration_s = version.duration_s
        for kind, request in edits:
            if kind != "mute":
                self._settings(request.steps)
            self._check_edit(kind, request)
            span_s = self._span(duration_s, version.sample_rate, kind, request)
            duration_s = max(duration_s, span_s[1])
        title = " and ".join(dict.fromkeys(_DOING[kind] for kind, _ in edits))

        def work(job: Job) -> dict[str, Any]:
            edited, num_applied = version, 0
            if job.result:  # it was held
                edited, num_applied = (
                    self.store.version(project, job.result["version"]),
                    job.result["applied"],
                )
            for number, (kind, request) in enumerate(edits[num_applied:], start=num_applied + 1):
                place = EditPlace(self.key(job), number, len(edits))
                span_s = self._span(edited.duration_s, edited.sample_rate, kind, request)
                edited = self._edited(job, project, edited, kind, request, span_s, place)
                job.result = {"version": edited.id, "applied": number}
            return {**job.result, "remarks": job.remarks}

        return self._submit(project, work, owner, title)

    def delete(self, project: StoredProject) -> None:
        """Delete a project, and stop all requests on it, whichever window made them."""
        self.store.delete(project)
        self.service.stop_all_on(project.id)

    def export_sound(self, project: StoredProject, version: SoundVersion, path: Path) -> None:
        """Write a version as WAV, with the tags of the file that was opened where it was edited from that."""
        wav = self.store.sound(project, version)
        check_room(path.parent, wav.stat().st_size, self._limits)
        if self.store.is_of_source(project, version):
            copy_described(self.store.source(project), wav, path)
        else:
            shutil.copyfile(wav, path)

    def lost_by_export(self, project: StoredProject, version: SoundVersion, ending: str) -> list[str]:
        """What the file that was opened holds and an export does not take over, in words: some tags, a cover, chapters.

        Raises:
            StudioRefusal: the pictures do not go into such a file.
        """
        if ending != ".wav" and project.has_pictures:
            source, channels = self.store.source(project), _export_channels(version.channels, ending)
            try:
                return lost_by_replacing(source, Path(f"export{ending}"), version.sample_rate, channels)
            except VideoError:
                raise _does_not_go(ending) from None
        is_of_source = self.store.is_of_source(project, version)
        return lost_in_wav(self.store.source(project)) if is_of_source else []

    def export_video(self, project: StoredProject, version: SoundVersion, path: Path) -> None:
        """Write the video with a version as its sound; its pictures are copied.

        Raises:
            StudioRefusal: the project has no pictures, or they do not go into such a file.
        """
        if not project.has_pictures:
            raise StudioRefusal("The project has no pictures: export the sound alone.")
        wav = self.store.sound(project, version)
        sounds = 3 * wav.stat().st_size  # in the file, and beside it as numbers of 32 bits
        check_room(path.parent, sounds + self.store.source(project).stat().st_size, self._limits)
        track = read_track(wav)
        sound = Waveform(track.waveform(), track.sample_rate)
        channels = _export_channels(sound.num_channels, path.suffix)
        if channels != sound.num_channels:
            sound = Waveform(set_channels(sound.samples_CN, channels), sound.sample_rate)
        try:
            replace_sound(self.store.source(project), sound, path)
        except VideoError:
            raise _does_not_go(path.suffix) from None

    def close(self) -> None:
        """Stop all requests, and end the threads that carry them out."""
        self.service.close()
        if self._answers is not None:
            self._answers.close()

    # Private

    def _submit(
        self,
        project: StoredProject,
        work: Callable[[Job], dict[str, Any]],
        owner: str,
        title: str,
        line: Line = "sounds",
    ) -> Job:
        """Put a request on a project at the end of the queue."""

        def checked(job: Job) -> dict[str, Any]:
            self.store.check_there(project)  # a deletion stops what is in the queue, not what comes after it
            return work(job)

        return self.service.submit(checked, owner, title, project.id, line)

    def _check_edit(self, kind: EditKind, request: MakeRequest) -> None:
        """
        Raises:
            StudioRefusal: nothing says which sound, or which seconds, are meant.
        """
        if kind in ("add", "remove", "extract") and not (request.caption.strip() or request.region):
            raise StudioRefusal(f"Say which sound to {kind}, or click its object in the picture.")
        if kind != "extend" and not request.region and request.start_s is None and request.end_s is None:
            raise StudioRefusal(
                f"Select the seconds to {_DONE_TO[kind]} on the waveform, or say them in words and read them first."
            )

    def _edited(
        self,
        job: Job,
        project: StoredProject,
        version: SoundVersion,
        kind: EditKind,
        request: MakeRequest,
        span_s: tuple[float, float],
        place: EditPlace,
    ) -> SoundVersion:
        """A new version below another one."""
        if kind == "mute":
            return self._muted(job, project, version, request, span_s, place)
        settings = self._settings(request.steps)
        if kind == "extract":
            return self._extracted(job, project, version, request, settings, span_s, place)
        operation, caption, generator = find_operation(kind), request.caption.strip(), self.service.generator
        sound = self.store.sound(project, version)
        rate, frames = version.sample_rate, soundfile.info(sound).frames
        first = max(0, round((span_s[0] - _AROUND_S) * rate))
        last = min(frames, round((span_s[1] + _AROUND_S) * rate))
        video = self._video(project, request.region, first / rate)
        if video is not None and max(version.duration_s, span_s[1]) > project.shown_s + _PICTURE_LATE_S:
            if span_s[1] < project.shown_s - _SEAM_S:
                last = min(last, round(project.shown_s * rate))
            else:
                _check_named(bool(caption) or kind in ("extend", "inpaint"))
                video = None
        track, offset_s = read_part(sound, first, last), first / rate
        begin_s = None if kind == "extend" else span_s[0] - offset_s
        span = find_span(track, operation, begin_s, min(span_s[1] - offset_s, 1e9))
        order = EditRequest(operation, caption, span.start / rate, span.end / rate, "", video)
        result = edit_ordered(
            generator, track, order, span, job.watched(settings), f"{request.seed}/edit", project.name
        )
        job.check_stop()
        job.remarks += result.remarks()
        track_span = EditSpan(first + span.start, first + span.end)
        with self.store.new_version(project, version) as (number, path):
            splice(sound, path, track_span.start, result.track.samples_NC[span.start : span.end])
            title = _title_version(f"{kind} {caption or ('this' if request.region else '')}".strip(), span_s)
            return self.store.finish(
                project,
                number,
                version,
                kind,
                title,
                track_span,
                _describe_version(request, caption, "", place),
            )

    def _muted(
        self,
        job: Job,
        project: StoredProject,
        version: SoundVersion,
        request: MakeRequest,
        span_s: tuple[float, float],
        place: EditPlace,
    ) -> SoundVersion:
        """The version with silence in a span, faded at both ends; no model is asked."""
        sound, rate = self.store.sound(project, version), version.sample_rate
        first, last = round(span_s[0] * rate), min(soundfile.info(sound).frames, round(span_s[1] * rate))
        fades = (first > 0, last < soundfile.info(sound).frames)
        muted_NC = muted(read_part(sound, first, last).samples_NC, round(_MUTE_FADE_S * rate), fades)
        job.check_stop()
        with self.store.new_version(project, version) as (number, path):
            splice(sound, path, first, muted_NC)
            return self.store.finish(
                project,
                number,
                version,
                "mute",
                _title_version("mute", span_s),
                EditSpan(first, last),
                _describe_version(request, "", "", place),
            )

    def _extracted(
        self,
        job: Job,
        project: StoredProject,
        version: SoundVersion,
        request: MakeRequest,
        settings: SamplerSettings,
        span_s: tuple[float, float],
        place: EditPlace,
    ) -> SoundVersion:
        """A sound alone, from the span; before and after it the new version is silent."""
        generator, sound, caption = (
            self.service.generator,
            self.store.sound(project, version),
            request.caption.strip(),
        )
        first, last = (round(second * version.sample_rate) for second in span_s)
        track = read_part(sound, first, last)
        video = self._video(project, request.region, span_s[0])
        if span_s[1] > project.shown_s + _PICTURE_LATE_S:
            _check_named(bool(caption))
            video = None
        order = SoundOrder(caption or "this", track.duration_s, "", video, project.name)
        clip = extract_ordered(generator, track, order, [], job.watched(settings), f"{request.seed}/extract")
        job.check_stop()
        job.remarks += clip.remarks()
        back_CN = track.fitted(clip.samples_CN, generator.sample_rate)
        with self.store.new_version(project, version) as (number, path):
            part_NC = track.stored(back_CN[:, : track.num_samples])
            splice(sound, path, first, part_NC, is_silent_elsewhere=True)
            title = _title_version(f"extract {caption or 'this'}", span_s)
            return self.store.finish(
                project,
                number,
                version,
                "extract",
                title,
                None,
                _describe_version(request, caption, "", place),
            )

    def _check_length(self, seconds: float, what: str, remedy: str) -> None:
        """
        Raises:
            StudioRefusal: it lasts too long for a model.
        """
        if seconds > self._limits.made_s:
            raise StudioRefusal(
                f"The {what} lasts {told_length(seconds)}; the limit is {told_length(self._limits.made_s)} at once: "
                f"{remedy}."
            )

    def _video(
        self, project: StoredProject, region: Sequence[Region], start_s: float = 0.0
    ) -> VideoPart | None:
        """The pictures of a project; None: it has none."""
        if not project.has_pictures:
            return None
        return VideoPart(path=str(self.store.source(project)), start_s=start_s, region=list(region))

    def _settings(self, steps: int) -> SamplerSettings:
        if not 1 <= steps <= 500:
            raise StudioRefusal(f"The sampler takes 1 to 500 steps, not {steps}: change Steps below Sampler.")
        return SamplerSettings(steps=steps, guidance=default_guidance(self.service.generator))

    def _span(
        self, duration_s: float, sample_rate: int, kind: EditKind, request: MakeRequest
    ) -> tuple[float, float]:
        """The seconds of an edit of a sound of some length.

        Raises:
            StudioRefusal: they do not fit the track or the operation.
        """
        if kind == "extend":
            span_s = self._extension_span(duration_s, request)
        else:
            span_s = self._inner_span(duration_s, sample_rate, kind, request)
        if kind != "mute":
            self._check_length(span_s[1] - span_s[0], "span", "select less of the waveform")
        return span_s

    def _extension_span(self, duration_s: float, request: MakeRequest) -> tuple[float, float]:
        if request.end_s is None or request.end_s <= duration_s:
            raise StudioRefusal(f"Give an end after {duration_s:.2f} s, where the sound ends now.")
        longest_s = self._limits.duration_s + self._limits.made_s
        if request.end_s > longest_s:
            raise StudioRefusal(f"A sound may last {told_length(longest_s)}: give an earlier end.")
        return duration_s, request.end_s

    def _inner_span(
        self, duration_s: float, sample_rate: int, kind: EditKind, request: MakeRequest
    ) -> tuple[float, float]:
        start_s, end_s = request.start_s or 0.0, duration_s if request.end_s is None else request.end_s
        end_s = min(end_s, duration_s) if end_s <= duration_s + 0.05 else end_s
        if kind == "inpaint" and (start_s <= 0 and end_s >= duration_s):
            raise StudioRefusal(
                "Select the seconds to fill: the rest of the sound is what they are fitted to."
            )
        if not (0 <= start_s < end_s <= duration_s and end_s - start_s >= 2 / sample_rate):
            raise StudioRefusal(
                f"The span {start_s:.2f} to {end_s:.2f} s does not lie in the sound of {duration_s:.2f} s: "
                "select a part of the waveform."
            )
        return start_s, end_s


def question_json(question: InstructionQuestion) -> dict[str, Any]:
    """A question about an instruction, with the instructions that answer it."""
    return {"question": question.sentence, "choices": list(question.choices)}


def check_thought(record: ThoughtRecord, duration_s: float) -> None:
    """
    Raises:
        StudioRefusal: a sound of a chain of thought lies outside of the clip.
    """
    try:
        check_record_times(record, duration_s)
    except ValueError as error:
        raise StudioRefusal(
            f"The chain of thought: {error}. Change its times to lie in the clip, or remove it from the table."
        ) from None


def sentence_of(error: Exception) -> str:
    """An error as a person reads it: without the server's paths and numbers of errors."""
    text = str(error)
    if isinstance(error, ConfigError):
        text = (
            ". ".join(sentence.strip().rstrip(".") for sentence in (error.message, error.remedy) if sentence)
            + "."
        )
    text = _ERRNO.sub("", " ".join(text.split())) or type(error).__name__
    cause: BaseException | None = error
    while cause is not None:
        for path in (getattr(cause, "path", None), getattr(cause, "filename", None)):
            text = text.replace(str(path), "the file") if path else text
        cause = cause.__cause__
    return _PATH.sub("the file", text)


# Private

_ERRNO = re.compile(r"\[Errno -?\d+\] ")
_PATH = re.compile(r"(?<![\w/:.])/(?:[^\s/'\"]+/)+[^\s'\",;:)]*")
"""An absolute path, as libraries write it into their errors."""


def _export_channels(channels: int, ending: str) -> int:
    return 1 if channels > 2 and ending == ".mp4" else channels


def _does_not_go(ending: str) -> StudioRefusal:
    remedy = "MKV" if ending != ".mkv" else "WAV"
    return StudioRefusal(f"These pictures and this sound do not go into a file {ending}: export {remedy}.")


def _check_named(is_named: bool) -> None:
    """Let an edit after the end of a video do without its pictures.

    Raises:
        StudioRefusal: only an object in the pictures says which sound is meant.
    """
    if not is_named:
        raise StudioRefusal("There are no pictures to these seconds: name the sound.")


def _title_version(words: str, span_s: tuple[float, float]) -> str:
    if span_s[1] < 60:
        return f"{words}, {span_s[0]:.1f} to {span_s[1]:.1f} s"
    return f"{words}, {_clock(span_s[0])} to {_clock(span_s[1])}"


def _clock(seconds: float) -> str:
    """A time as the page shows it: "1:04.5", "1:00:00.0"."""
    minutes, tenths = divmod(round(10 * seconds), 600)
    text = f"{minutes % 60:02}:{tenths / 10:04.1f}" if minutes >= 60 else f"{minutes}:{tenths / 10:04.1f}"
    return f"{minutes // 60}:{text}" if minutes >= 60 else text


def _describe_version(request: MakeRequest, caption: str, cot: str, place: EditPlace) -> dict[str, Any]:
    return {
        "caption": caption[:MAX_CAPTION], "cot": cot[:MAX_COT], "seed": request.seed, "steps": request.steps,
        "region": request.region[:2000], **vars(place),
    }  # fmt: skip
