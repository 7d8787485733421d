"""Requests to the models: chains of thought, sounds, edits, exports. Each becomes a job of the service.

Shapes: C channels, N samples.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import soundfile

from audiollm.audio import Waveform, load, save, set_channels
from audiollm.data.records.sample import Region, VideoPart
from audiollm.data.records.thoughts import (
    ThoughtRecord,
    caption_of_record,
    check_record_times,
    prose_of,
    record_json,
)
from audiollm.errors import ConfigError, StageError
from audiollm.flow.editing.operations import EditSpan, find_operation, find_span
from audiollm.flow.editing.requests import EditRequest
from audiollm.flow.model.sampling import SamplerSettings
from audiollm.flow.service import (
    Job,
    SoundOrder,
    SoundService,
    default_guidance,
    edit_ordered,
    extract_ordered,
    make_ordered,
)
from audiollm.video.decoders import VideoError
from audiollm.video.writing import replace_sound
from pipelines.audiocot.thinking import ThoughtAnswer, ThoughtRequest
from pipelines.studio.instructions import EditKind, EditPlan, names_times, read_instruction
from pipelines.studio.intake import check_room
from pipelines.studio.limits import StudioLimits, StudioRefusal, told_length
from pipelines.studio.regions import RegionFinder
from pipelines.studio.store import MAX_CAPTION, MAX_COT, ProjectStore, SoundVersion, StoredProject
from pipelines.studio.waveforms import read_part, splice

_AROUND_S = 60.0
"""Seconds of a track on each side of a span that are read for an edit: models hear less."""
_PICTURE_LATE_S = 0.05
"""Seconds after the last picture in which it still stands for what is heard."""
_SEAM_S = 0.1
"""Seconds behind a span that its seam is fitted to."""


class Thinker(Protocol):
    """A writer of chains of thought."""

    def think(self, asked: ThoughtRequest) -> ThoughtAnswer: ...


@dataclass(frozen=True)
class MakeRequest:
    """A sound to make from words and pictures, or an edit of a version."""

    caption: str = ""
    region: tuple[Region, ...] = ()
    start_s: float | None = None
    end_s: float | None = None
    seed: int = 0
    steps: int = 24


class SoundEditor:
    """The requests to the models on projects.

    Args:
        thinker: writes chains of thought: a model, or measurements.
        writer_understands: whether the thinker turns instructions into operations and looks at regions.
    """

    def __init__(
        self,
        service: SoundService,
        store: ProjectStore,
        regions: RegionFinder,
        thinker: Thinker,
        writer_understands: bool,
        limits: StudioLimits,
    ) -> None:
        self.service, self.store, self.regions = service, store, regions
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

        known = self.store.thought(project)  # a person may go on writing while this waits

        def work(job: Job) -> dict[str, Any]:
            asked = ThoughtRequest(source, region=tuple(region), check_stop=job.check_stop)
            answer = self._thinker.think(asked)
            job.check_stop()
            if not region:
                self.store.keep_thought(project, answer.record, known)
            return {
                "record": record_json(answer.record),
                "caption": caption_of_record(answer.record),
                "of_object": bool(region),
            }

        return self._submit(project, work, owner, "writing the chain of thought")

    def understand(
        self,
        project: StoredProject,
        owner: str,
        version: SoundVersion,
        instruction: str,
        span: tuple[float, float] | None = None,
    ) -> Job:
        """Ask the model that writes which operation on a version an instruction is; its words are read without it where
        they ask for an extraction, which the model does not know, in a long sound, or where no answer can be used.

        Args:
            span: the selected seconds, which are taken where the words name none.
        """
        heard = self.store.sound(project, version)
        video = self.store.source(project) if project.has_pictures else None
        is_long = version.duration_s > self._limits.made_s

        def by_words() -> EditPlan:
            return read_instruction(instruction, self.store.thought(project), version.duration_s, span)

        def by_model(job: Job) -> EditPlan:
            asked = ThoughtRequest(heard, instruction=instruction, check_stop=job.check_stop, video=video)
            answer = self._thinker.think(asked)
            assert answer.operation is not None and answer.span is not None
            start_s, end_s = answer.span
            if span is not None and answer.operation != "extend" and not names_times(instruction):
                start_s, end_s = span
            return EditPlan(
                find_operation(answer.operation), caption_of_record(answer.record), start_s, end_s
            )

        def work(job: Job) -> dict[str, Any]:
            if is_long:
                return {"plan": vars(by_words())}
            plan: EditPlan | None = None
            with suppress(StudioRefusal):
                plan = by_words()
            if plan is None or plan.kind != "extract":
                try:
                    plan = by_model(job)
                except (StageError, ConfigError):
                    if plan is None:
                        raise
            job.check_stop()
            return {"plan": vars(plan)}

        return self._submit(project, work, owner, "understanding the instruction")

    def generate(self, project: StoredProject, owner: str, asked: MakeRequest) -> Job:
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
        video = self._video(project, asked.region)
        caption = asked.caption.strip() or caption_of_record(record)
        if not (caption or record.events or video):
            raise StudioRefusal(
                "There is nothing to make a sound from: write a caption or a chain of thought."
            )
        self._check_length(duration_s, "clip", "cut it, or edit spans of its sound")
        cot = record if record.events or record.background else ""
        prose = prose_of(record) if cot else ""
        order = SoundOrder(caption, duration_s, cot, video, project.name)
        settings = self._settings(asked.steps)

        def work(job: Job) -> dict[str, Any]:
            made_CN = make_ordered(generator, order, job.watched(settings), f"{asked.seed}/sound")
            job.check_stop()
            with self.store.new_version(project) as (number, path):
                save(path, made_CN, generator.sample_rate)
                facts = _facts(asked, caption, prose, self.key(job))
                title = f"made: {caption or 'from the pictures'}"
                self.store.finish(project, number, None, "generate", title, None, facts)
            return {"version": number}

        return self._submit(project, work, owner, "generating")

    def edit(
        self, project: StoredProject, owner: str, version: SoundVersion, kind: EditKind, asked: MakeRequest
    ) -> Job:
        """Edit a version: the result is a new one below it.

        Raises:
            StudioRefusal: a span, or words, that the operation cannot have.
            ConfigError: there is no model.
        """
        generator = self.service.generator
        caption = asked.caption.strip()
        if kind in ("add", "remove", "extract") and not (caption or asked.region):
            raise StudioRefusal(f"Say which sound to {kind}, or click its object in the picture.")
        span_s = self._span(version, kind, asked)
        self._check_length(span_s[1] - span_s[0], "span", "select less of the waveform")
        settings, sound = self._settings(asked.steps), self.store.sound(project, version)
        if kind == "extract":
            return self._submit(
                project,
                lambda job: self._extract(job, project, version, asked, caption, settings, span_s),
                owner,
                "extracting",
            )
        operation = find_operation(kind)

        def work(job: Job) -> dict[str, Any]:
            rate, frames = version.sample_rate, soundfile.info(sound).frames
            first = max(0, round((span_s[0] - _AROUND_S) * rate))
            last = min(frames, round((span_s[1] + _AROUND_S) * rate))
            video = self._video(project, asked.region, first / rate)
            if video is not None and max(version.duration_s, span_s[1]) > project.shown_s + _PICTURE_LATE_S:
                if span_s[1] < project.shown_s - _SEAM_S:
                    last = min(last, round(project.shown_s * rate))
                else:
                    _check_named(bool(caption) or kind in ("extend", "inpaint"))
                    video = None
            track, offset_s = read_part(sound, first, last), first / rate
            begin_s = None if kind == "extend" else span_s[0] - offset_s
            span = find_span(track, operation, begin_s, min(span_s[1] - offset_s, 1e9))
            request = EditRequest(operation, caption, span.start / rate, span.end / rate, "", video)
            result = edit_ordered(
                generator, track, request, span, job.watched(settings), f"{asked.seed}/edit", project.name
            )
            job.check_stop()
            whole = EditSpan(first + span.start, first + span.end)
            with self.store.new_version(project, version) as (number, path):
                part_NC = result.track.samples_NC[span.start : span.end]
                splice(sound, path, whole.start, part_NC)
                title = f"{kind} {caption or ('this' if asked.region else '')}".strip()
                title += f", {span_s[0]:.1f} to {span_s[1]:.1f} s"
                facts = _facts(asked, caption, "", self.key(job))
                self.store.finish(project, number, version, kind, title, whole, facts)
            return {"version": number}

        return self._submit(project, work, owner, f"{kind}ing" if kind != "remove" else "removing")

    def delete(self, project: StoredProject) -> None:
        """Delete a project, and stop all requests on it, whichever window made them."""
        self.store.delete(project)
        self.service.stop_all_on(project.id)

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
        sound = load(wav)
        if sound.num_channels > 2 and path.suffix == ".mp4":
            sound = Waveform(set_channels(sound.samples_CN, 1), sound.sample_rate)
        try:
            replace_sound(self.store.source(project), sound, path)
        except VideoError:
            other = "MKV" if path.suffix != ".mkv" else "WAV"
            raise StudioRefusal(
                f"These pictures and this sound do not go into a file {path.suffix}: export {other}."
            ) from None

    # Private

    def _submit(
        self, project: StoredProject, work: Callable[[Job], dict[str, Any]], owner: str, title: str
    ) -> Job:
        """Put a request on a project at the end of the queue."""

        def checked(job: Job) -> dict[str, Any]:
            self.store.check_there(project)  # a deletion stops what is in the queue, not what comes after it
            return work(job)

        return self.service.submit(checked, owner, title, project.id)

    def _extract(
        self,
        job: Job,
        project: StoredProject,
        version: SoundVersion,
        asked: MakeRequest,
        caption: str,
        settings: SamplerSettings,
        span_s: tuple[float, float],
    ) -> dict[str, Any]:
        """A sound alone, from the span; before and after it the new version is silent."""
        generator, sound = self.service.generator, self.store.sound(project, version)
        first, last = (round(second * version.sample_rate) for second in span_s)
        track = read_part(sound, first, last)
        video = self._video(project, asked.region, span_s[0])
        if span_s[1] > project.shown_s + _PICTURE_LATE_S:
            _check_named(bool(caption))
            video = None
        order = SoundOrder(caption or "this", track.duration_s, "", video, project.name)
        made_CN = extract_ordered(generator, track, order, [], job.watched(settings), f"{asked.seed}/extract")
        job.check_stop()
        back_CN = track.fitted(made_CN, generator.sample_rate)
        with self.store.new_version(project, version) as (number, path):
            part_NC = track.stored(back_CN[:, : track.num_samples])
            splice(sound, path, first, part_NC, is_silent_elsewhere=True)
            title = f"extract {caption or 'this'}, {span_s[0]:.1f} to {span_s[1]:.1f} s"
            facts = _facts(asked, caption, "", self.key(job))
            self.store.finish(project, number, version, "extract", title, None, facts)
        return {"version": number}

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

    def _span(self, version: SoundVersion, kind: EditKind, asked: MakeRequest) -> tuple[float, float]:
        """The seconds of an edit.

        Raises:
            StudioRefusal: they do not fit the track or the operation.
        """
        duration_s = version.duration_s
        if kind == "extend":
            if asked.end_s is None or asked.end_s <= duration_s:
                raise StudioRefusal(f"Give an end after {duration_s:.2f} s, where the sound ends now.")
            longest_s = self._limits.duration_s + self._limits.made_s
            if asked.end_s > longest_s:
                raise StudioRefusal(f"A sound may last {told_length(longest_s)}: give an earlier end.")
            return duration_s, asked.end_s
        start_s, end_s = asked.start_s or 0.0, duration_s if asked.end_s is None else asked.end_s
        end_s = min(end_s, duration_s) if end_s <= duration_s + 0.05 else end_s
        if kind == "inpaint" and (start_s <= 0 and end_s >= duration_s):
            raise StudioRefusal(
                "Select the seconds to fill: the rest of the sound is what they are fitted to."
            )
        if not (0 <= start_s < end_s <= duration_s and end_s - start_s >= 2 / version.sample_rate):
            raise StudioRefusal(
                f"The span {start_s:.2f} to {end_s:.2f} s does not lie in the sound of {duration_s:.2f} s: "
                "select a part of the waveform."
            )
        return start_s, end_s


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
        text = ". ".join(part.strip().rstrip(".") for part in (error.message, error.remedy) if part) + "."
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


def _check_named(is_named: bool) -> None:
    """Let an edit after the end of a video do without its pictures.

    Raises:
        StudioRefusal: only an object in the pictures says which sound is meant.
    """
    if not is_named:
        raise StudioRefusal("There are no pictures to these seconds: name the sound.")


def _facts(asked: MakeRequest, caption: str, cot: str, request: str) -> dict[str, Any]:
    return {
        "caption": caption[:MAX_CAPTION], "cot": cot[:MAX_COT], "seed": asked.seed, "steps": asked.steps,
        "region": asked.region[:2000], "request": request,
    }  # fmt: skip
