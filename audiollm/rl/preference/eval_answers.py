"""The policy's own greedy answers to the same held-out prompts at every evaluation: `answers.jsonl`.

They show what pairs do not: whether answers grow, and what they say by now. Nothing is drawn at random, and weights and
random state stay as they are.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from audiollm.data.records.sample import TextPart
from audiollm.data.records.source import LoadedSample
from audiollm.errors import BadSample
from audiollm.families.policy import GreedyAnswer, GreedyRequest, Policy
from audiollm.files.atomic import read_whole_lines, write_jsonl
from audiollm.generation.engine.request import AnswerKind, Limits
from audiollm.recipe.ranks import Ranks
from audiollm.rl.preference.batches import RecordPlace, StepMaker, answers_of
from audiollm.rl.preference.held_out_pairs import described_messages
from audiollm.train.loop.whole import Read, WholeCopy

FILE = "answers.jsonl"
LIMIT_FACTOR = 4
"""An answer is cut at this many times the length of its record's longest answer."""
MIN_LIMIT, MAX_LIMIT = 16, 512
"""Bounds of that length, in tokens or code frames."""


@dataclass(frozen=True)
class EvalPrompt:
    """A held-out prompt."""

    place: RecordPlace
    id: str
    messages: list[dict[str, Any]]
    """As plain data, for `answers.jsonl`."""
    request: GreedyRequest


class AnswersFile:
    """`answers.jsonl` in a stage's folder: rows of one evaluation after the other, told apart by `step`."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE

    def before(self, step: int) -> list[dict[str, Any]]:
        """Return the rows of earlier evaluations: an attempt that was killed may have left later ones."""
        if not self._path.exists():
            return []
        return [row for row in read_whole_lines(self._path, {"step": int}).rows if row["step"] < step]

    def write(self, step: int, rows: Sequence[dict[str, Any]]) -> None:
        """Put the rows of an evaluation behind those of earlier ones; no rows leave the file as it is."""
        if rows:
            write_jsonl(self._path, [*self.before(step), *rows])


class EvalAnswers:
    """Has the policy answer held-out prompts, and keeps the answers of all evaluations in `answers.jsonl`.

    The first rank alone answers, with weights that it holds whole: those that are trained, or a copy of them.

    Args:
        steps: gives the held-out records.
        count: prompts, at most.
        folder: of the stage.
        speaker: on the first rank, a policy of `whole_copy`'s copy that answers in place of `policy`.
        whole_copy: where a strategy spreads the weights over ranks; on every rank.
    """

    def __init__(
        self,
        policy: Policy[Any, Any, Any],
        steps: StepMaker[Any, Any, Any],
        count: int,
        folder: Path,
        ranks: Ranks,
        speaker: Policy[Any, Any, Any] | None = None,
        whole_copy: WholeCopy | None = None,
    ) -> None:
        self._speaker, self._whole_copy = speaker or policy, whole_copy
        self._file, self._ranks = AnswersFile(folder), ranks
        self._rates = steps.code_rate
        self._prompts = list(_prompts(policy, steps, count)) if ranks.first else []

    def begin(self) -> None:
        """Answer with the model that the training begins from, as step 0; a resumed run has done so."""
        self._fill()
        if self._ranks.first and not self._file.before(1):
            self._answer(0)
        self._ranks.barrier()

    def read_by(self, read: Read) -> None:
        """Take `Strategy.read`."""
        if self._whole_copy is not None:
            self._whole_copy.read_by(read)

    def __call__(self, step: int) -> Mapping[str, float]:
        """Answer, write the answers, and return their mean length in tokens and seconds. Called on every rank."""
        self._fill()
        figures: Mapping[str, float] = self._ranks.of_first(self._answer(step) if self._ranks.first else {})
        return figures

    @torch.no_grad()
    def _answer(self, step: int) -> Mapping[str, float]:
        root = self._speaker.root
        was_training = root.training
        root.eval()
        device = next(root.parameters()).device.type
        with nullcontext() if self._whole_copy is None else torch.autocast(device, enabled=False):
            answers = self._speaker.greedy_answers([prompt.request for prompt in self._prompts])
        root.train(was_training)
        rows = [
            self._row(step, prompt, answer) for prompt, answer in zip(self._prompts, answers, strict=True)
        ]
        self._file.write(step, rows)
        seconds = [row["seconds"] for row in rows if row["seconds"] is not None]
        return {
            **({"answer_length": fmean(row["tokens"] for row in rows)} if rows else {}),
            **({"answer_seconds": fmean(seconds)} if seconds else {}),
        }

    def _fill(self) -> None:
        if self._whole_copy is not None:
            self._whole_copy.fill()

    def _row(self, step: int, prompt: EvalPrompt, answer: GreedyAnswer) -> dict[str, Any]:
        rate = self._rates(prompt.place)
        seconds = round(answer.frames / rate, 3) if rate and prompt.request.kind != "text" else None
        return {
            "step": step,
            "id": prompt.id,
            "messages": prompt.messages,
            "answer": answer.text,
            "tokens": answer.tokens,
            "seconds": seconds,
            "stopped": answer.stopped,
        }


def _prompts(
    policy: Policy[Any, Any, Any], steps: StepMaker[Any, Any, Any], count: int
) -> Iterable[EvalPrompt]:
    """Held-out prompts; those that the policy cannot take are left out (evaluations name them).

    They are drawn, the same ones in every training: of records that take turns, an even choice would see one kind.
    """
    places = steps.held_out_places()
    for number in sorted(random.Random(0).sample(range(len(places)), min(count, len(places)))):
        place = places[number]
        try:
            loaded, groups = steps.read(place)
            used = sorted({answer for group in groups for answer in answers_of(group)})
            encoded = policy.encode(policy.take(loaded, used, steps.name_of(place)))
            prompted = policy.take(loaded, [], steps.name_of(place))
        except BadSample:
            continue
        tokens = max(policy.num_answer_tokens(answer) for answer in encoded)
        kind = _greedy_answer_kind(loaded, used)
        yield EvalPrompt(
            place,
            loaded.sample.id,
            described_messages(loaded),
            GreedyRequest(prompted, kind, _limits(loaded, kind, tokens)),
        )


def _greedy_answer_kind(loaded: LoadedSample, used: Sequence[int]) -> AnswerKind:
    """As the record's answers are: speech alone, text alone, or both."""
    contents = [loaded.sample.answers[number] for number in used]
    if not any(answer.audio_parts() for answer in contents):
        return "text"
    has_text = any(
        isinstance(content_part, TextPart) for answer in contents for content_part in answer.content
    )
    return "any" if has_text else "audio"


def _limits(loaded: LoadedSample, kind: AnswerKind, tokens: int) -> Limits:
    frames = 0
    if kind != "text" and loaded.encodings:
        frames = max((codes_KT.shape[1] for codes_KT in loaded.encodings[0][loaded.num_asked :]), default=0)
    most_text, most_frames = (
        min(MAX_LIMIT, max(MIN_LIMIT, LIMIT_FACTOR * longest)) for longest in (tokens, frames)
    )
    return Limits(most_frames, most_text)
