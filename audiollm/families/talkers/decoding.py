"""Speech of a talker, frame by frame, of many answers side by side.

What is drawn for an answer depends on its prompt and its seed alone, up to rounding.

Shapes: R answers that go on, C hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from audiollm.families.talkers.drawing import Speaking, new_drawer
from audiollm.families.talkers.kind import TalkerKind
from audiollm.families.talkers.packed_steps import TalkerSteps
from audiollm.families.talkers.rows import join_inputs
from audiollm.families.talkers.talker import Talker

MAX_SLOTS = 64
"""Most answers side by side."""
FEWEST_PLACES, MOST_PLACES = 64, 8192
"""The cache grows by doubling from the first number of places a row."""


class TalkerDecoder:
    """Goes on with answers by a row at a time.

    Args:
        model: in eval mode; its present weights are read.
        slots: most answers side by side.
        steps: the model's, from before; None: they are made of its present weights.
    """

    def __init__(
        self, model: Talker, kind: TalkerKind, slots: int = MAX_SLOTS, steps: TalkerSteps | None = None
    ) -> None:
        self._model, self._slots = model, slots
        self._steps = steps or TalkerSteps(model)
        self._device = model.backbone.norm.weight.device
        self._cache = model.backbone.new_cache(slots, FEWEST_PLACES)
        self._drawer = new_drawer(model, kind, self._steps, slots)
        self.speaking: list[Speaking] = []
        """Answers that go on, in the order of the cache's rows."""
        self._hidden_RC = torch.zeros(0, model.backbone.shape.hidden_size)

    @property
    def free_slots(self) -> int:
        """Answers that can begin now."""
        return self._slots - len(self.speaking)

    @torch.no_grad()
    def begin(self, answers: Sequence[Speaking]) -> None:
        """Read the prompts of answers; equal ones once.

        Raises:
            ValueError: more answers than free slots.
        """
        if len(answers) > self.free_slots:
            raise ValueError(f"{len(answers)} answers for {self.free_slots} slots")
        if not answers:
            return
        blocks = [answer.prompt.rows for answer in answers]
        inputs, lengths = join_inputs(blocks).to(self._device), [block.num_rows for block in blocks]
        first = len(self.speaking)
        self._make_room(max(lengths) + 1)
        rows = range(first, first + len(answers))
        hidden_RC = self._model.backbone.prefill(self._model.embed_rows(inputs), self._cache, rows, lengths)
        self._hidden_RC = torch.cat([self._hidden_RC.to(hidden_RC), hidden_RC])
        self.speaking += answers

    @torch.no_grad()
    def step(self) -> list[Speaking]:
        """Draw a row of each answer, or its end; return them all. Answers that are over leave their slots."""
        answers = list(self.speaking)
        if not answers:
            return []
        self._drawer.draw(answers, self._hidden_RC)
        self._leave([row for row, answer in enumerate(answers) if answer.is_over])
        if self.speaking:
            self._make_room(max(self._cache.lengths[: len(self.speaking)]) + 2)
            blocks = [
                answer.prompt.frames(answer.rows[-1][:, None], len(answer.rows) - 1)
                for answer in self.speaking
            ]
            inputs = join_inputs(blocks).to(self._device)
            self._hidden_RC = self._steps.extend_backbone(self._model.embed_rows(inputs), self._cache)
        return answers

    def drop(self, answer: Speaking) -> None:
        """Leave an answer unfinished."""
        if answer in self.speaking:
            self._leave([self.speaking.index(answer)])

    def _leave(self, rows: Sequence[int]) -> None:
        """Free rows of the cache; the last ones take their places."""
        for row in sorted(rows, reverse=True):
            last = len(self.speaking) - 1
            if row != last:
                self._cache.move(last, row)
                self.speaking[row] = self.speaking[last]
                self._hidden_RC[row] = self._hidden_RC[last]
            self._cache.clear(last)
            self.speaking.pop()
            self._hidden_RC = self._hidden_RC[:last]

    def _make_room(self, places: int) -> None:
        length = self._cache.length
        if places <= length:
            return
        while length < places:
            length *= 2
        self._cache = self._cache.lengthened(self._model.backbone.shape, length)


def speak_to_end(
    model: Talker,
    kind: TalkerKind,
    answers: Sequence[Speaking],
    slots: int | None = None,
    steps: TalkerSteps | None = None,
) -> None:
    """Speak answers to their ends, as many side by side as there are slots.

    Args:
        steps: the model's, from before; None: they are made of its present weights.
    """
    waiting = list(answers)[::-1]
    training = model.training
    model.eval()
    try:
        decoder = TalkerDecoder(model, kind, min(slots or MAX_SLOTS, max(1, len(waiting))), steps)
        while waiting or decoder.speaking:
            count = min(decoder.free_slots, len(waiting))
            decoder.begin([waiting.pop() for _ in range(count)])
            decoder.step()
    finally:
        model.train(training)
