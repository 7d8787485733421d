"""Prompts of a training on fresh answers: samples whose last message, the right answer, is taken away."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from audiollm.data.hearing.features import MISSING_CODES, MISSING_ROWS
from audiollm.data.records.mixture import StepDraws, evenly
from audiollm.data.records.sample import AudioPart, Sample, check_without_phrases, check_without_video
from audiollm.data.records.source import LoadedSample, Source
from audiollm.data.records.step_records import RecordPlace, StepPlaces, find_usable, name_of
from audiollm.data.text.option_forms import are_told_apart
from audiollm.errors import BadSample
from audiollm.evaluate.listening.stage import choices_of, question_of
from audiollm.families.policy import Policy
from audiollm.families.streams import check_stream
from audiollm.files.set_aside import SetAside
from audiollm.recipe.ranks import ALONE, Ranks
from audiollm.rl.preference.held_out import described_messages

REFILL_SEED = 7919
"""Added to the seed for the stream of prompts that take the place of others."""
_CHECKED_PROMPTS = 4
"""Prompts of the first step that are read before the training begins."""


@dataclass(frozen=True)
class Prompt:
    """A prompt as the policy takes it, and what its answers are compared with."""

    place: RecordPlace
    sample: Sample
    """With the right answer as its last message, and the options of its question in `metadata.choices`."""
    prompted: Any
    """What the policy's `take` made of the messages before the right answer."""
    messages: list[dict[str, Any]]
    """Those of the sample as plain data, with the addresses of their recordings."""
    question: LoadedSample
    """The messages before the right answer with their sound, for rewards that hear it."""


class PromptMaker:
    """`maker(step)` gives this rank's prompts of a step, as arithmetic on the step's number.

    Args:
        draws: how the prompts of a step are drawn.
        set_aside: where records go that cannot be asked.

    Raises:
        BadSample: the first bad record, where `set_aside` is strict.
    """

    def __init__(
        self,
        policy: Policy[Any, Any, Any],
        sources: Sequence[Source],
        draws: StepDraws,
        set_aside: SetAside,
        ranks: Ranks = ALONE,
        advance: Callable[[], None] = lambda: None,
    ) -> None:
        self._policy, self._sources, self._batch_size = policy, sources, draws.batch_size
        self._ranks = ranks
        samples: list[Sample] = []

        def check(sample: Sample, place: str) -> None:
            check_question(sample, place)
            samples.append(sample)

        usable = find_usable(sources, check, set_aside, advance)
        answered = [sample for sample in samples if sample.messages[-1].role == "assistant"]
        question_answers = choices_of(answered).items()
        self._choices = {
            question: answers for question, answers in question_answers if are_told_apart(answers)
        }
        self.samples = [self._with_choices(sample) for sample in samples]
        """All that can be asked."""
        self.usable = usable
        """The records of each source that can be asked."""
        self.trained = usable.num_trained
        """Number of the records that are trained on."""
        self._held_out = [
            (number, int(index)) for number, used in enumerate(usable.held_out) for index in used
        ]
        self.held_out = len(self._held_out)
        if self.trained:
            self._places = StepPlaces(usable, draws)
            self._refills = StepPlaces(usable, replace(draws, seed=draws.seed + REFILL_SEED))

    def __call__(self, step: int) -> tuple[list[Prompt], list[BadSample]]:
        """Return this rank's prompts of a step, each once, and those that turned out bad."""
        return self.read(self.places(step))

    @property
    def batch_size(self) -> int:
        """Prompts of a step, over all ranks."""
        return self._batch_size

    def places(self, step: int) -> list[RecordPlace]:
        """Return the prompts of a step over all ranks, each once."""
        return list(dict.fromkeys(self._places(step)))

    def missing_codes(self) -> BadSample | None:
        """Return the problem of the first prompt, where the first few have recordings without the codes that the model
        reads."""
        prompts, bad = self._read(self.places(0)[:_CHECKED_PROMPTS])
        is_missing = bad and not prompts and all(error.kind in (MISSING_CODES, MISSING_ROWS) for error in bad)
        return bad[0] if is_missing else None

    def refill_places(self, step: int, number: int, max_refills: int) -> list[RecordPlace]:
        """Return prompts that may take the place of others of a step, each once.

        They are drawn as the prompts of steps are, from a stream of their own, at a place that the step and the number
        of the refill give alone.

        Args:
            number: of the refill, from 0.
            max_refills: refills of a step.
        """
        return list(dict.fromkeys(self._refills(step * max_refills + number)))

    def read(self, places: Sequence[RecordPlace]) -> tuple[list[Prompt], list[BadSample]]:
        """Return this rank's share of prompts that all ranks read together, and those that turned out bad."""
        return self._read(places[self._ranks.rank :: self._ranks.world])

    def held_out_prompts(self, max_prompts: int) -> tuple[list[Prompt], list[BadSample]]:
        """Return this rank's held-out prompts, evenly picked."""
        places = evenly(self.held_out, max_prompts)
        return self._read([self._held_out[place] for place in places][self._ranks.rank :: self._ranks.world])

    def _read(self, places: Sequence[RecordPlace]) -> tuple[list[Prompt], list[BadSample]]:
        prompts: list[Prompt] = []
        bad: list[BadSample] = []
        for place in places:
            try:
                prompts.append(self._prompt(place))
            except BadSample as error:
                bad.append(error.with_traceback(None))
        return prompts, bad

    def _prompt(self, place: RecordPlace) -> Prompt:
        source, index = place
        loaded = self._sources[source][index]
        check_without_phrases(loaded.sample, name_of(self._sources, place))
        question = without_right_answer(loaded)
        prompted = self._policy.take(question, [], name_of(self._sources, place))
        chunk_frames = loaded.sample.messages[-1].chunk_frames
        if chunk_frames is not None:
            if not hasattr(prompted, "chunk_frames"):
                raise BadSample(
                    name_of(self._sources, place),
                    loaded.sample.id,
                    "is a stream, which this model cannot hear",
                )
            prompted = replace(prompted, chunk_frames=chunk_frames)
            check_stream(prompted, len(loaded.sample.messages[-1].actions()))
        # rollouts are told apart by their prompt's id: records of two sources may share one
        return Prompt(
            place,
            self._with_choices(loaded.sample),
            replace(prompted, id=f"{source}/{prompted.id}"),
            described_messages(loaded),
            question,
        )

    def _with_choices(self, sample: Sample) -> Sample:
        """The sample with the options of its question: its own, or the answers that all samples give to it.

        Answers that a reply cannot tell apart (`low` and `Low.`) are no options."""
        if sample.metadata.get("choices") or sample.messages[-1].role != "assistant":
            return sample
        choices = self._choices.get(question_of(sample))
        return (
            sample.model_copy(update={"metadata": {**sample.metadata, "choices": list(choices)}})
            if choices
            else sample
        )


def check_question(sample: Sample, place: str) -> None:
    """Raises: BadSample: nothing stands before the assistant's last message, or there is a video part."""
    check_without_video(sample, place)
    messages = sample.messages[:-1] if sample.messages[-1].role == "assistant" else sample.messages
    if not any(message.role == "user" for message in messages):
        raise BadSample(place, sample.id, "has no question", "no question")


def without_right_answer(loaded: LoadedSample) -> LoadedSample:
    """The sample without the assistant's last message, and without the sound and codes of it."""
    *messages, last = loaded.sample.messages
    if last.role != "assistant":
        return loaded.without_answers()
    num_answer_recordings = sum(isinstance(content_part, AudioPart) for content_part in last.content)
    num_prompt_recordings = loaded.num_asked - num_answer_recordings
    sample = loaded.sample.model_copy(update={"messages": messages, "answers": []})
    return replace(
        loaded,
        sample=sample,
        encodings=[encoding[:num_prompt_recordings] for encoding in loaded.encodings],
        audio=loaded.audio[:num_prompt_recordings],
    )
