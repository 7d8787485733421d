"""Speech of a talker, frame by frame, of many answers side by side.

What is drawn for an answer depends on its prompt and its seed alone, up to rounding.

Shapes: R answers that go on, K codebooks, T frames, C hidden size, V entries of a codebook.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from audiollm.families.talkers.kind import PromptRows, TalkerKind, TalkerSampling
from audiollm.families.talkers.packed_steps import TalkerSteps
from audiollm.families.talkers.rows import join_inputs
from audiollm.families.talkers.talker import Talker
from audiollm.generation.engine.request import SampledTokens
from audiollm.generation.engine.sampling import SamplingConfig, sample_codes

MAX_SLOTS = 64
"""Most answers side by side."""
FEWEST_PLACES, MOST_PLACES = 64, 8192
"""The cache grows by doubling from the first number of places a row."""


@dataclass(eq=False)
class Speaking:
    """An answer while it is spoken."""

    prompt: PromptRows
    sampling: TalkerSampling
    max_frames: int
    seed: int
    number: int = 0
    """Of the request, for whoever asked."""
    codes: list[Tensor] = field(default_factory=list)
    """Codes `[K]` of each frame."""
    logprobs: list[Tensor] = field(default_factory=list)
    """Of each action: the codes of each frame, and the end."""
    has_ended: bool = False

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    @property
    def is_over(self) -> bool:
        """Whether nothing is to be drawn any more."""
        return self.has_ended or len(self.codes) >= self.max_frames

    def codes_KT(self, num_codebooks: int) -> Tensor:
        """Codes of all frames."""
        if not self.codes:
            return torch.zeros(num_codebooks, 0, dtype=torch.long)
        return torch.stack(self.codes, dim=1)

    def tokens(self, num_codebooks: int, is_greedy: bool) -> SampledTokens:
        """The answer as policies encode it: one stretch of speech, without drawn text."""
        no_text = torch.zeros(0, dtype=torch.long)
        logprob_A = None if is_greedy else torch.cat([torch.zeros(0), *self.logprobs])
        codes = (self.codes_KT(num_codebooks),)
        return SampledTokens("audio", no_text, no_text.bool(), codes, (self.has_ended,), logprob_A)


class TalkerDecoder:
    """Goes on with answers by a frame at a time.

    Args:
        model: in eval mode; its present weights are read.
        slots: most answers side by side.
        steps: the model's, from before; None: they are made of its present weights.
    """

    def __init__(
        self, model: Talker, kind: TalkerKind, slots: int = MAX_SLOTS, steps: TalkerSteps | None = None
    ) -> None:
        self._model, self._kind, self._slots = model, kind, slots
        self._steps = steps or TalkerSteps(model)
        self._device = model.backbone.norm.weight.device
        self._cache = model.backbone.new_cache(slots, FEWEST_PLACES)
        self._depth = self._steps.depth_passes(model.depth.new_cache(slots, model.num_codebooks))
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
        """Draw a frame of each answer, or its end; return them all. Answers that are over leave their slots."""
        answers = list(self.speaking)
        if not answers:
            return []
        codes_RK, logprob_RK = self._draw_frames(answers)
        for answer, codes_K, logprob_K in zip(answers, codes_RK, logprob_RK, strict=True):
            self._take_frame(answer, codes_K, logprob_K)
        self._leave([row for row, answer in enumerate(answers) if answer.is_over])
        if self.speaking:
            self._make_room(max(self._cache.lengths[: len(self.speaking)]) + 2)
            blocks = [
                answer.prompt.frames(answer.codes[-1][:, None], len(answer.codes) - 1)
                for answer in self.speaking
            ]
            inputs = join_inputs(blocks).to(self._device)
            self._hidden_RC = self._steps.extend_backbone(self._model.embed_rows(inputs), self._cache)
        return answers

    def drop(self, answer: Speaking) -> None:
        """Leave an answer unfinished."""
        if answer in self.speaking:
            self._leave([self.speaking.index(answer)])

    def _draw_frames(self, answers: Sequence[Speaking]) -> tuple[Tensor, Tensor]:
        """Codes and their log-probabilities, `[R, K]` on the CPU."""
        model = self._model
        uniform_R2K = torch.stack(
            [torch.rand(2, model.num_codebooks, generator=answer.generator) for answer in answers]
        ).to(self._device)
        first_RV: Tensor = model.first_head(self._hidden_RC).float()
        self._leave_out(first_RV, answers)
        firsts, depths = (
            [getattr(answer.sampling, name) for answer in answers] for name in ("first", "depth")
        )
        codes, rest = [_draw_codes(first_RV, firsts, uniform_R2K[..., 0])], list[Tensor]()
        # an end without other codes draws them for nothing: its answer leaves its slot afterwards
        self._depth.extend(model.project_depth(self._hidden_RC), 0)
        for book in range(1, model.num_codebooks):
            hidden_RC = self._depth.extend(model.project_depth(model.embed_code(codes[-1], book - 1)), book)
            logits_RV = model.through_rest_head(hidden_RC, book).float()
            if self._kind.suppressed_depth:
                logits_RV[:, list(self._kind.suppressed_depth)] = -torch.inf
            codes.append(_draw_codes(logits_RV, depths, uniform_R2K[..., book]))
            rest.append(logits_RV)
        codes_RK = torch.stack(codes, 1)
        logprobs = [_logprobs_of(first_RV[:, None], codes_RK[:, :1], firsts)]
        if rest:
            logprobs.append(_logprobs_of(torch.stack(rest, 1), codes_RK[:, 1:], depths))
        return codes_RK.cpu(), torch.cat(logprobs, 1).cpu()

    def _leave_out(self, logits_RV: Tensor, answers: Sequence[Speaking]) -> None:
        """Take from the first codebook what is never drawn, in place."""
        kind = self._kind
        if kind.suppressed:
            logits_RV[:, list(kind.suppressed)] = -torch.inf
        for row, answer in enumerate(answers):
            if len(answer.codes) < answer.sampling.min_frames:
                logits_RV[row, kind.end] = -torch.inf
            penalty = answer.sampling.repetition_penalty
            if penalty != 1.0 and answer.codes:
                said = torch.stack(answer.codes)[:, 0].unique().to(self._device)
                logits_RV[row, said] = torch.where(
                    logits_RV[row, said] < 0, logits_RV[row, said] * penalty, logits_RV[row, said] / penalty
                )

    def _take_frame(self, answer: Speaking, codes_K: Tensor, logprob_K: Tensor) -> None:
        answer.has_ended = self._kind.is_end(codes_K)
        if not answer.has_ended:
            answer.codes.append(codes_K)
            answer.logprobs.append(logprob_K)
        else:
            parts = logprob_K[:1] if self._kind.end_codes is None else logprob_K
            answer.logprobs.append(parts.sum()[None])

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


def _draw_codes(logits_RV: Tensor, configs: Sequence[SamplingConfig], uniform_R2: Tensor) -> Tensor:
    """A code of each row."""
    different = dict.fromkeys(configs)
    if len(different) == 1:
        return sample_codes(logits_RV[:, None], configs[0], uniform_R2[..., None])[:, 0]
    code_R = torch.zeros(len(logits_RV), dtype=torch.long, device=logits_RV.device)
    for config in different:
        rows = torch.tensor([row for row, other in enumerate(configs) if other == config])
        code_R[rows] = sample_codes(logits_RV[rows, None], config, uniform_R2[rows][..., None])[:, 0].to(
            code_R.device
        )
    return code_R


def _logprobs_of(logits_RKV: Tensor, codes_RK: Tensor, configs: Sequence[SamplingConfig]) -> Tensor:
    """Log-probabilities of codes at the row's temperature, under all codes that are not -inf."""
    heat_R = torch.tensor([config.temperature or 1.0 for config in configs], device=logits_RKV.device)
    warm_RKV = logits_RKV / heat_R[:, None, None]
    return warm_RKV.log_softmax(2).gather(2, codes_RK[..., None])[..., 0]
