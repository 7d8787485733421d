"""The words and pictures of an edit, as the training has them: of the whole track, and of each of its windows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from audiollm.data.records.sample import Message, Sample, TextPart, VideoPart
from audiollm.flow.conditions.edit_texts import THIS, edit_thought, edit_words
from audiollm.flow.conditions.reading import COT, TASK
from audiollm.flow.editing.operations import Operation
from audiollm.flow.generator import ConditionsAt, SoundGenerator
from audiollm.flow.model.packed import Conditions


@dataclass(frozen=True)
class EditRequest:
    """An edit in words and pictures."""

    operation: Operation
    caption: str
    """The sound to add or remove, empty where the video's region shows it; for `extend` and `inpaint` the sounds of the
    whole."""
    start_s: float
    """Where the span begins in the track."""
    end_s: float
    cot: str = ""
    """A chain of thought; empty: for `add` and `remove` it follows from the caption and the span."""
    video: VideoPart | None = None
    """The pictures of the track, with the region of an object."""

    def sample(self, window_s: float, length_s: float) -> Sample:
        """The request for a window of the track, which begins at `window_s` and is `length_s` long.

        A chain of thought tells times from the beginning of what is made: that of a later window follows from the span
        alone.
        """
        caption, cot = self.caption, "" if window_s else self.cot
        pointed = self.video is not None and bool(self.video.region)
        if self.operation in ("add", "remove") and (self.caption or pointed):
            caption = edit_words("overlay" if self.operation == "add" else "remove", self.caption or THIS, [])
            start_s, end_s = max(0.0, self.start_s - window_s), min(length_s, self.end_s - window_s)
            if self.caption and not cot:
                cot = edit_thought(caption, start_s, end_s)
        content: list[Any] = [TextPart(text=caption)]
        if self.video is not None:
            begin_s = self.video.start_s + window_s
            content.insert(0, self.video.model_copy(update={"start_s": begin_s, "end_s": None}))
        message = Message(role="user", content=content)
        return Sample(id="edit", task=TASK, messages=[message], metadata={COT: cot} if cot else {})


def edit_conditions(generator: SoundGenerator, request: EditRequest, place: str) -> ConditionsAt:
    """The conditions of an edit for any window of the track; they raise `BadSample` where the video cannot be read.

    Args:
        place: the video or the command, for errors.
    """

    def conditions_at(window_s: float, length_s: float) -> Conditions:
        return generator.conditions(request.sample(window_s, length_s), length_s, place)

    return conditions_at
