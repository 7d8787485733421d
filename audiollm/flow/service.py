"""A service of models that stay loaded: requests wait in a queue, report each sampling step, can be stopped, and held
until whoever made them is back.

One thread makes sounds, one request at a time: two at once would each take twice as long. Requests that are answered in
words, and do not use the model of sounds, have threads of their own: neither waits for the other. The commands `sound`
and the studio use the same service.

Shapes: C channels, N samples.
"""

from __future__ import annotations

import threading
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import Tensor

from audiollm.autoencoder import autoencoder_of_run
from audiollm.data.records.sample import ContentPart, Message, Sample, TextPart, VideoPart
from audiollm.data.records.thoughts import ThoughtRecord, prose_of
from audiollm.errors import BadSample, ConfigError, StageError
from audiollm.flow.conditions.edit_texts import edit_words
from audiollm.flow.conditions.reading import COT, TASK
from audiollm.flow.editing.levels import below_ceiling
from audiollm.flow.editing.operations import EditResult, EditSpan, edit_track
from audiollm.flow.editing.requests import EditRequest, edit_conditions
from audiollm.flow.editing.tracks import Track
from audiollm.flow.generator import ConditionsAt, SoundGenerator, fill_latents, make_in_windows
from audiollm.flow.model.context import LatentState, span_context
from audiollm.flow.model.packed import Conditions
from audiollm.flow.model.sampling import SamplerSettings
from audiollm.models.pretrained import model_folder

JobState = Literal["waiting", "running", "held", "done", "failed", "stopped"]
Line = Literal["sounds", "words"]
"""Kinds of requests: `sounds` run in the one thread that makes sounds, `words` in threads for answers in words."""
WORDS_AT_ONCE = 4
"""Requests in words that are carried out at once."""
CLIPS_REMEMBERED = 16
"""Windows of videos whose encoded pictures are kept, and as many parts of tracks with their latents."""
_MOST_FINISHED = 200
_MOST_HELD = 200


class JobStopped(BaseException):
    """The request was stopped by the person who made it; no `except Exception` on its way takes it for an error."""


class Job:
    """One request: its place in the queue, its progress, and its end."""

    def __init__(
        self, number: int, owner: str, title: str, work: Callable[[Job], Any], subject: str, line: Line
    ) -> None:
        self.number, self.owner, self.title = number, owner, title
        self.subject, self.line = subject, line
        self.state: JobState = "waiting"
        self.step, self.steps = 0, 0
        """Steps of the sampler that are done, and how many a window takes; 0: none is counted."""
        self.result: Any = None
        """Work of several parts keeps here what is done, and goes on from there when it begins again after a hold."""
        self.remarks: list[str] = []
        """What a listener should know of the result, in words."""
        self.problem: Exception | JobStopped | None = None
        self._work: Callable[[Job], Any] | None = work
        self._stop, self._ended = threading.Event(), threading.Event()
        self.is_to_hold = False
        """Whether it is held, or is to be."""

    def stop(self) -> None:
        """Ask for the end: a running request ends where it checks for it next, after a step of the sampler, a token of
        an answer, or a picture of a film."""
        self.is_to_hold = False
        self._stop.set()

    def hold(self) -> None:
        """Ask for a pause: a running request leaves its work where `stop` would end it, and begins it anew later."""
        if not self._stop.is_set():
            self.is_to_hold = True
            self._stop.set()

    def release(self) -> None:
        """Take a hold back."""
        if self.is_to_hold:
            self.is_to_hold = False
            self._stop.clear()

    @property
    def is_to_stop(self) -> bool:
        """Whether its end was asked for."""
        return self._stop.is_set() and not self.is_to_hold

    def took_step(self, done: int) -> None:
        """Count a step.

        Raises:
            JobStopped: the request is to end.
        """
        self.step = done
        self.check_stop()

    def check_stop(self) -> None:
        """
        Raises:
            JobStopped: the request is to end.
        """
        if self._stop.is_set():
            raise JobStopped(self.title)

    def watched(self, settings: SamplerSettings) -> SamplerSettings:
        """The settings with this request's progress."""
        self.steps = settings.steps
        return replace(settings, on_step=self.took_step)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end; returns whether it has come."""
        return self._ended.wait(timeout_s)

    def value(self) -> Any:
        """Wait for the result.

        Raises:
            JobStopped: the request was stopped.
            Exception: the error of the work.
        """
        self._ended.wait()
        if self.problem is not None:
            raise self.problem
        return self.result

    def run(self) -> None:
        """Do the work; its inputs are let go afterwards, unless it is held."""
        work, self._work = self._work, None
        assert work is not None
        self.state, self.step, self.steps = "running", 0, 0
        try:
            self.check_stop()
            self.result = work(self)
            self.state = "done"
        except JobStopped as stopped:
            _release_frames(stopped)
            if self.is_to_stop:
                self.state, self.problem = "stopped", stopped
            else:  # the hold may have been taken back meanwhile
                self.state, self._work = "held", work
        except Exception as error:
            _release_frames(error)
            self.state, self.problem = "failed", error
        finally:
            work = None  # the error's traceback keeps this frame
            if self.state != "held":
                self._ended.set()

    def cancel(self) -> None:
        """End a request that has not begun, or is held."""
        self._work = None
        self.state, self.problem = "stopped", JobStopped(self.title)
        self._ended.set()


class SoundService:
    """A generator that stays loaded, and the queue of requests to it and of requests in words.

    Args:
        generator: None: there is no model, and only requests that need none are taken.
    """

    def __init__(self, generator: SoundGenerator | None = None) -> None:
        self._generator = generator
        if generator is not None:
            generator.encoders.remember_clips(CLIPS_REMEMBERED)
            generator.tracks_remembered = CLIPS_REMEMBERED
        self._waiting: deque[Job] = deque()
        self._held: deque[Job] = deque()
        self._running: list[Job] = []
        self._finished: deque[Job] = deque(maxlen=_MOST_FINISHED)
        self._count, self._is_closed = 0, False
        self._changed = threading.Condition()
        at_once: dict[Line, int] = {"sounds": 1, "words": WORDS_AT_ONCE}
        self._threads = [
            threading.Thread(target=self._work, args=[line], name=f"service of {line}", daemon=True)
            for line, count in at_once.items()
            for _ in range(count)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def has_model(self) -> bool:
        return self._generator is not None

    @property
    def generator(self) -> SoundGenerator:
        """
        Raises:
            ConfigError: there is no model.
        """
        if self._generator is None:
            raise ConfigError(
                "there is no trained model",
                "model",
                "make one with `audiollm run recipes/thinksound/tiny.yaml`, then name its run: "
                "`audiollm studio --model runs/thinksound-tiny`",
            )
        return self._generator

    def submit(
        self,
        work: Callable[[Job], Any],
        owner: str = "",
        title: str = "",
        subject: str = "",
        line: Line = "sounds",
    ) -> Job:
        """Put a request at the end of the queue.

        Args:
            work: called in a thread of the service with its job; `Job.watched` gives settings that report steps, and
                `Job.check_stop` is for work without them.
            subject: what the request works on; see `stop_all_on`. Requests in words on one subject are carried out one
                after the other.
            line: `words`: the work does not use the generator.

        Raises:
            StageError: the service was closed.
        """
        with self._changed:
            if self._is_closed:
                raise StageError("the service of sounds was closed", "start it anew")
            self._count += 1
            job = Job(self._count, owner, title, work, subject, line)
            self._enqueue(job)
        return job

    def place(self, job: Job) -> int:
        """Requests of its line that came before this one and have not ended; 0: it runs, or has ended."""
        with self._changed:
            if job not in self._waiting:
                return 0
            line = [each for each in (*self._running, *self._waiting) if each.line == job.line]
            return line.index(job)

    def jobs(self, owner: str) -> list[Job]:
        """The requests of an owner, in their order; of finished ones the last."""
        return [job for job in self._all_jobs() if job.owner == owner]

    def stop_all_on(self, subject: str) -> None:
        """Stop all requests that work on a subject, whoever made them."""
        for job in self._all_jobs():
            if job.subject == subject:
                self.stop_job(job)

    def hold(self, owner: str) -> None:
        """Hold all requests of an owner until `resume`: none of them is lost, and none goes on."""
        with self._changed:
            for job in self.jobs(owner):
                job.hold()
                if job in self._waiting:
                    self._waiting.remove(job)
                    self._set_aside(job)

    def resume(self, owner: str) -> None:
        """Put the held requests of an owner at the end of the queue, and let the running one go on."""
        with self._changed:
            for job in self.jobs(owner):
                job.release()
                if job in self._held:
                    self._held.remove(job)
                    self._enqueue(job)

    def stop_job(self, job: Job) -> None:
        """Stop a request: one that waits or is held ends now, one that runs at its next step; see `Job.check_stop`."""
        with self._changed:
            job.stop()
            for queue in (self._waiting, self._held):
                if job in queue:
                    queue.remove(job)
                    self._cancel(job)

    def close(self) -> None:
        """Stop all requests, and end the threads after their present steps."""
        with self._changed:
            self._is_closed = True
            for job in [*self._waiting, *self._running]:
                job.stop()
            while self._held:
                self._cancel(self._held.popleft())
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _all_jobs(self) -> list[Job]:
        with self._changed:
            return [*self._finished, *self._running, *self._waiting, *self._held]

    def _enqueue(self, job: Job) -> None:
        job.state = "waiting"
        self._waiting.append(job)
        self._changed.notify_all()

    def _set_aside(self, job: Job) -> None:
        job.state = "held"
        self._held.append(job)
        if len(self._held) > _MOST_HELD:
            self._cancel(self._held.popleft())

    def _cancel(self, job: Job) -> None:
        job.cancel()
        self._finished.append(job)

    def _work(self, line: Line) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next_in(line) or self._is_closed)
                job = self._next_in(line)
                if job is None:
                    return
                self._waiting.remove(job)
                self._running.append(job)
            job.run()
            with self._changed:
                self._running.remove(job)
                self._put_away(job)

    def _next_in(self, line: Line) -> Job | None:
        """The first request that may begin."""
        subjects = {job.subject for job in self._running if job.line == line}
        for job in self._waiting:
            if job.line == line and job.subject not in subjects:
                return job
        return None

    def _put_away(self, job: Job) -> None:
        """Give a request that no longer runs its place."""
        if job.state != "held":
            self._finished.append(job)
        elif self._is_closed or job.is_to_stop:
            self._cancel(job)
        elif job.is_to_hold:
            self._set_aside(job)
        else:
            self._enqueue(job)


@dataclass(frozen=True)
class SoundOrder:
    """A sound to be made from words and pictures."""

    caption: str
    duration_s: float
    cot: str | ThoughtRecord = ""
    """Words, which the first window alone is told; or a record, of which each window is told its part."""
    video: VideoPart | None = None
    place: str = "command line"
    """The video or command, for errors."""


class MadeSound(NamedTuple):
    """A sound that a model made, below full scale."""

    samples_CN: Tensor
    """At the generator's rate."""
    gain_db: float
    """Gain that brought its peaks below full scale; 0: none was above."""

    def remarks(self) -> list[str]:
        """What a listener should know, in words."""
        if self.gain_db > -0.05:
            return []
        return [f"turned down by {-self.gain_db:.1f} dB: its peaks were above full scale"]


def make_ordered(
    generator: SoundGenerator, order: SoundOrder, settings: SamplerSettings, key: str
) -> MadeSound:
    """The ordered sound, in windows where it is longer than those of the training.

    Raises:
        ConfigError: the video cannot be read, or the model cannot do this.
    """
    content: list[ContentPart] = [*([order.video] if order.video else []), TextPart(text=order.caption)]
    conditions_at = _conditions_at(generator, content, order)
    try:
        made_CN = make_in_windows(generator, conditions_at, order.duration_s, settings, key)
    except BadSample as error:
        raise ConfigError(error.reason, order.place) from error
    return MadeSound(*below_ceiling(made_CN, generator.sample_rate))


def edit_ordered(
    generator: SoundGenerator,
    track: Track,
    request: EditRequest,
    span: EditSpan,
    settings: SamplerSettings,
    key: str,
    place: str = "command line",
) -> EditResult:
    """The edited track.

    Raises:
        ConfigError: the video cannot be read, or the model cannot do this.
    """
    conditions_at = edit_conditions(generator, request, place)
    try:
        return edit_track(generator, track, request.operation, span, conditions_at, settings, key)
    except BadSample as error:
        raise ConfigError(error.reason, place) from error


def extract_ordered(
    generator: SoundGenerator,
    track: Track,
    order: SoundOrder,
    other_names: list[str],
    settings: SamplerSettings,
    key: str,
) -> MadeSound:
    """The sound of `order.caption` alone, out of the whole track.

    Args:
        other_names: sounds that are not to be in it.

    Raises:
        ConfigError: the video cannot be read, or the model cannot do this.
    """
    from audiollm.audio import resample, set_channels

    if not generator.model.config.context_trained:
        raise ConfigError(
            "this model was trained without audio context, and cannot extract a sound",
            "model",
            "train it with audio_context",
        )
    rate, channels = generator.sample_rate, generator.autoencoder.channels
    heard_CN = set_channels(resample(track.waveform(), track.sample_rate, rate), channels)
    mean_TD = generator.encode(heard_CN)
    context = span_context(mean_TD, 0, len(mean_TD), LatentState.VISIBLE)
    words = TextPart(text=edit_words("extract", order.caption, other_names))
    conditions_at = _conditions_at(generator, [*([order.video] if order.video else []), words], order)
    try:
        latents_TD = fill_latents(generator, context, 0.0, conditions_at, settings, key)
    except BadSample as error:
        raise ConfigError(error.reason, order.place) from error
    made_CN = generator.decode(latents_TD, heard_CN.shape[1])
    return MadeSound(*below_ceiling(made_CN, rate))


def load_generator(model: Path, autoencoder: str | None) -> SoundGenerator:
    """The generator of a `train_flow` stage or its run, with the run's own autoencoder where none is given.

    Raises:
        ConfigError: there is no model, or not one autoencoder beside it, or something cannot be loaded.
    """
    folder = model / "train_flow" if (model / "train_flow").is_dir() else model
    model_folder(folder)  # without a model nothing is said of its autoencoder
    if autoencoder is None:
        autoencoder = str(autoencoder_of_run(folder.parent))
    return SoundGenerator.load(folder, autoencoder)


def default_guidance(generator: SoundGenerator) -> float:
    """4.5; 1 for a model that was trained without dropout of conditions."""
    config = generator.model.config
    return 4.5 if config.dropout_each or config.dropout_together else 1.0


# Private


def _release_frames(error: BaseException | None) -> None:
    """Take the frames from an error and from those that it came from: they hold the sounds and pictures of a request.

    An emptied frame still has its function, whose closure holds some, too: the places in the code are kept as a note.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error.add_note("".join(traceback.format_tb(error.__traceback__)))
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _conditions_at(generator: SoundGenerator, content: list[ContentPart], order: SoundOrder) -> ConditionsAt:
    """The conditions of each window of an order."""
    message, record = Message(role="user", content=content), order.cot
    metadata = {COT: record} if isinstance(record, str) else {}
    request_sample = Sample(id="request", messages=[message], task=TASK, metadata=metadata)

    def conditions_at(start_s: float, length_s: float) -> Conditions:
        cot = None if isinstance(record, str) else prose_of(record.cut(start_s, start_s + length_s))
        return generator.conditions(request_sample, length_s, order.place, start_s=start_s, cot=cot)

    return conditions_at
