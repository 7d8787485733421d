"""Held-out records at every evaluation: the pairs that are ordered worst, and greedy answers to the prompts."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from audiollm.data.records.sample import ContentPart, TextPart, VideoPart
from audiollm.data.records.source import LoadedSample
from audiollm.errors import BadSample
from audiollm.families.policy import GreedyAnswer, GreedyRequest, Policy
from audiollm.files.atomic import read_whole_lines, write_jsonl
from audiollm.generation.engine.request import AnswerKind, Limits
from audiollm.recipe.ranks import Ranks
from audiollm.rl.preference.batches import ItemOrigin, MicroBatch, RecordPlace, StepMaker, answers_of
from audiollm.train.loop.task import Board
from audiollm.train.loop.whole import Read, WholeCopy

PAIRS_KEPT = 64
"""Most groups in `pairs.jsonl`."""


@dataclass(frozen=True)
class OrderedItem:
    """A group of held-out answers and the implicit rewards that the policy gives them."""

    origin: ItemOrigin
    rewards: tuple[float | None, ...]
    """Of each answer of the origin; None: not computed (the middle of a list)."""

    @property
    def margin(self) -> float:
        """Reward of the better answer less that of the worse; a single answer's own, negated if undesirable."""
        first, last = self.rewards[0], self.rewards[-1]
        assert first is not None and last is not None
        if self.origin.desirable is not None:
            return first if self.origin.desirable else -first
        return first - last

    @property
    def badness(self) -> tuple[float, Any]:
        """Sorts the worst first; what is no number is the worst."""
        margin = self.margin
        return (-math.inf if math.isnan(margin) else margin, (self.origin.record, self.origin.answers))


class WorstItems:
    """Gathers the items of an evaluation; keeps the worst."""

    def __init__(self) -> None:
        self._items: list[OrderedItem] = []

    def add(self, micro: MicroBatch[Any], metrics: Mapping[str, Tensor]) -> None:
        """Take a micro-batch with the figures of its items, `[I]` each: implicit rewards, or a reward model's scores.

        Figures without either add nothing.
        """
        chosen, rejected = (
            _values(metrics, f"reward_{role}") or _values(metrics, f"score_{role}")
            for role in ("chosen", "rejected")
        )
        single = _values(metrics, "reward")
        for number, origin in enumerate(micro.origins):
            if chosen and rejected:
                between = [None] * (len(origin.answers) - 2)
                self._items.append(OrderedItem(origin, (chosen[number], *between, rejected[number])))
            elif single and origin.desirable is not None:
                self._items.append(OrderedItem(origin, (single[number],)))

    def write(self, path: Path, steps: StepMaker[Any, Any, Any], step: int, ranks: Ranks) -> None:
        """Write the worst items of all ranks, in place of those of the evaluation before. Called on every rank."""
        worst = sorted(self._items, key=lambda item: item.badness)[:PAIRS_KEPT]
        every = [item for items in ranks.gather(worst) for item in items]
        if ranks.first and every:
            worst = sorted(every, key=lambda item: item.badness)[:PAIRS_KEPT]
            write_jsonl(
                path, [_ordered_item_row(item, steps.read(item.origin.record)[0], step) for item in worst]
            )


def described_messages(loaded: LoadedSample) -> list[dict[str, Any]]:
    """Return the messages of a record as plain data, with the addresses of their recordings."""
    numbers = iter(range(loaded.num_asked))
    return [
        {"role": message.role, "content": _describe_content(message.content, loaded, numbers)}
        for message in loaded.sample.messages
    ]


def _ordered_item_row(item: OrderedItem, loaded: LoadedSample, step: int) -> dict[str, Any]:
    origin = item.origin
    answers = [
        {
            "role": role,
            "content": _describe_content(
                loaded.sample.answers[number].content, loaded, iter(_parts_of(loaded, number))
            ),
            "reward": _finite(reward),
            "tokens": tokens,
        }
        for number, role, reward, tokens in zip(
            origin.answers, _roles(origin), item.rewards, origin.num_tokens, strict=True
        )
    ]
    return {
        "step": step,
        "id": loaded.sample.id,
        "messages": described_messages(loaded),
        "answers": answers,
        "margin": _finite(item.margin),
        "right": item.margin > 0,
    }


def _roles(origin: ItemOrigin) -> list[str]:
    if origin.desirable is not None:
        return ["desirable" if origin.desirable else "undesirable"]
    return ["chosen", *["between"] * (len(origin.answers) - 2), "rejected"]


def _parts_of(loaded: LoadedSample, number: int) -> range:
    """The numbers, among all audio parts of the record, of those of an answer."""
    sizes = [len(answer.audio_parts()) for answer in loaded.sample.answers]
    first = loaded.num_asked + sum(sizes[:number])
    return range(first, first + sizes[number])


def _describe_content(
    content: Sequence[ContentPart], loaded: LoadedSample, numbers: Iterator[int]
) -> list[dict[str, Any]]:
    """Parts as plain data: of a recording its number in the record, and its file, or its name in a shard."""
    described: list[dict[str, Any]] = []
    for content_part in content:
        if isinstance(content_part, TextPart):
            described.append({"type": "text", "text": content_part.text})
            continue
        if isinstance(content_part, VideoPart):
            end = "its end" if content_part.end_s is None else f"{content_part.end_s:g} s"
            description = (
                f"[pictures of {Path(content_part.path).name} from {content_part.start_s:g} s to {end}]"
            )
            described.append({"type": "text", "text": description})
            continue
        number = next(numbers)
        content_of = loaded.audio[number].content if loaded.audio else None
        path = content_of if isinstance(content_of, str) else content_part.path
        span = {"start_s": content_part.start_s, "end_s": content_part.end_s}
        described.append({"type": "audio", "path": path, **span, "part": number})
    return described


def _values(metrics: Mapping[str, Tensor], name: str) -> list[float]:
    """The figure of the first objective that has it: in a mix, those of the others have its name before them."""
    values = [value for key, value in metrics.items() if key == name or key.endswith(f"/{name}")]
    return [float(value) for value in values[0].detach().cpu()] if values else []


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


FILE = "answers.jsonl"
LIMIT_FACTOR = 4
"""An answer is cut at this many times the length of its record's longest answer."""
SHOWN_COLUMNS = ("id", "question", "answer", "tokens", "reward")
"""Columns of the answers on a board."""
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
        self.boards: Sequence[Board] = ()
        """Where the answers of an evaluation are shown, too."""

    def before(self, step: int) -> list[dict[str, Any]]:
        """Return the rows of earlier evaluations: an attempt that was killed may have left later ones."""
        if not self._path.exists():
            return []
        return [row for row in read_whole_lines(self._path, {"step": int}).rows if row["step"] < step]

    def write(self, step: int, rows: Sequence[dict[str, Any]]) -> None:
        """Put the rows of an evaluation behind those of earlier ones; no rows leave the file as it is."""
        if not rows:
            return
        write_jsonl(self._path, [*self.before(step), *rows])
        for board in self.boards:
            board.table(step, "evaluation/answers", SHOWN_COLUMNS, [_shown_row(row) for row in rows])


def _shown_row(row: Mapping[str, Any]) -> list[str]:
    """The row of an answer in a table; numbers that it has not are empty."""
    parts = [part for message in row["messages"] for part in message["content"]]
    question = " ".join(str(part["text"]) for part in parts if part.get("text"))
    reward = row.get("reward")
    return [row["id"], question, row["answer"], str(row["tokens"]), "" if reward is None else f"{reward:.3f}"]


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

    def draw_on(self, boards: Sequence[Board]) -> None:
        """See `DrawsOnBoards`."""
        self._file.boards = boards

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
