"""A sample with answers to choose among, as `inspect` shows it: every answer's scores, then chosen beside rejected."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from rich.text import Text

from audiollm.commands.inspect_table import OFF, ON, left_out, row_cells, row_line
from audiollm.errors import BadSample, ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from audiollm.data.chat.template import Template
    from audiollm.data.hearing.features import FeatureShape
    from audiollm.data.inspection import StreamRow
    from audiollm.data.records.sample import RatedAnswer, Sample
    from audiollm.data.records.source import LoadedSample

TEXT_WIDTH = 48
"""Characters of an answer's text in the list of answers."""
CHOSEN_ROLE, REJECTED_ROLE = "chosen", "rejected"


@dataclass(frozen=True)
class AnswerRows:
    """The rows of one answer, from the first that is predicted on."""

    rows: list[StreamRow]
    step_ends: dict[int, float]
    """Position of the last row of each step, and the step's score."""

    @property
    def num_targets(self) -> int:
        """Text tokens and codes to predict."""
        return sum(sum(row.is_target) for row in self.rows)


@dataclass(frozen=True)
class AnswersView:
    """A sample with answers, compiled."""

    heading: str
    notes: list[str]
    books: int
    sample: Sample
    prompt: list[StreamRow]
    """Rows before the answer, none of them a target."""
    answers: list[AnswerRows]
    compared: tuple[int, ...]
    """The two answers to show beside each other, chosen and rejected; one where there is one."""
    has_codes: bool


def view_answers(
    template: Template,
    loaded: LoadedSample,
    encoder: FeatureShape | None,
    answer_numbers: str | None,
    heading: str,
    notes: list[str],
    has_codes: bool,
) -> AnswersView:
    """Compile the prompt with each answer.

    Args:
        loaded: a sample with answers, and one encoding of its audio where it has codes.
        encoder: shape of the features that stand for heard audio; None: it is given as codes.
        answer_numbers: numbers of the two answers to compare, like "0,2"; None: the best and the worst.
        notes: what cannot be compared is added.

    Raises:
        BadSample, ValueError: an answer does not compile.
        ConfigError: `answer_numbers` names no two answers.
    """
    compiled = [_compile(template, loaded, index, encoder) for index in range(len(loaded.sample.answers))]
    return AnswersView(
        heading=heading,
        notes=notes,
        books=template.num_codebooks,
        sample=loaded.sample,
        prompt=compiled[0][0],
        answers=[rows for _, rows in compiled],
        compared=compared_answers(loaded.sample, answer_numbers, notes),
        has_codes=has_codes,
    )


def answer_json_lines(view: AnswersView, limit: int | None) -> Iterable[str]:
    """A JSON line for each row, with the number of its answer (null in the prompt), and one that sums up."""
    rows = [(None, row, None) for row in view.prompt] + [
        (index, row, answer.step_ends.get(row.position))
        for index, answer in enumerate(view.answers)
        for row in answer.rows
    ]
    for index, row, step in rows[:limit]:
        record: dict[str, Any] = {"answer": index, **asdict(row)}
        del record["weights"]  # what a target weighs is the objective's choice
        if row.codes and not view.has_codes:
            record["codes"] = None
        yield json.dumps(record if step is None else {**record, "step": step}, ensure_ascii=False)
    yield json.dumps(
        {
            "sample": view.heading,
            "notes": view.notes,
            "prompt_rows": len(view.prompt),
            "answers": [
                {
                    **answer.model_dump(mode="json", exclude={"content"}),
                    "rows": len(answer_rows.rows),
                    "targets": answer_rows.num_targets,
                }
                for answer, answer_rows in zip(view.sample.answers, view.answers, strict=True)
            ],
            "compared": view.compared,
        },
        ensure_ascii=False,
    )


def print_answers(view: AnswersView, limit: int | None, console: Console) -> None:
    """Print the judgements, the prompt, and the compared answers row by row."""
    has_audio = any(
        row.codes
        for row in [*view.prompt, *(row for answer_rows in view.answers for row in answer_rows.rows)]
    )
    width = max(24, 5 * view.books - 1) if has_audio else 24
    console.print(Text(view.heading, style="bold"))
    for note in view.notes:
        console.print(Text(note, style="yellow"))
    for line in _judgements(view):
        console.print(line)
    head = f"{'kind':<9}  {'token or codes':<{width}}  {'target':<{max(view.books, 6)}}"
    names = "".join(f"  {_format_answer_name(view, index):<{len(head)}}" for index in view.compared)
    lines = [
        Text(f"\n{'':>6}  prompt\n{'row':>6}  {head}", "bold"),
        *_prompt_lines(view, width),
        Text(f"\n{'':>6}{names}\n{'row':>6}{f'  {head}' * len(view.compared)}", "bold"),
        *_beside_lines(view, width),
    ]
    for line in lines[:limit]:
        console.print(line)
    if limit is not None and len(lines) > limit:
        console.print(Text(f"{'':>6}  {len(lines) - limit} more lines (--limit)", style="dim"))
    console.print(Text(f"\n{ON} target   {OFF} masked", style="dim"))


# Private


def _compile(
    template: Template, loaded: LoadedSample, index: int, encoder: FeatureShape | None
) -> tuple[list[StreamRow], AnswerRows]:
    """The rows of the prompt, and those of the answer."""
    from audiollm.data.hearing.features import part_audio, size_of
    from audiollm.data.inspection import stream_rows

    answered = loaded.answered(index)
    messages = answered.sample.messages
    audio = part_audio(answered, (answered.encodings or [[]])[0], encoder)
    rows = stream_rows(template, template.compile(messages, audio))
    spans = template.layout(messages, [size_of(audio_input) for audio_input in audio])
    last, position, first = len(messages) - 1, 0, 0
    ends: list[int] = []
    for span in spans:
        position += span.rows
        if span.message < last or (span.message == last and not span.is_target and not ends):
            first = position  # the header of the answer's turn is given, too
        elif span.is_content:
            ends.append(position - 1)
    scores = loaded.sample.answers[index].steps or [None] * len(ends)
    steps = {end: score for end, score in zip(ends, scores, strict=True) if score is not None}
    prompt_rows = [replace(row, is_target=(False,) * len(row.is_target), weights=()) for row in rows[:first]]
    return prompt_rows, AnswerRows(rows[first:], steps)


def compared_answers(sample: Sample, answer_numbers: str | None, notes: list[str]) -> tuple[int, ...]:
    from audiollm.rl.groups import best_and_worst

    size = len(sample.answers)
    if answer_numbers is not None:
        numbers = [int(text) for text in answer_numbers.split(",") if text.strip().isdecimal()]
        if len(numbers) != 2 or max(numbers) >= size or "," not in answer_numbers:
            raise ConfigError(
                f"{answer_numbers}: two answers are compared",
                "--answers",
                f"numbers are 0 to {size - 1}: 0,1",
            )
        return tuple(numbers)
    try:
        pair = best_and_worst(sample)
    except BadSample as bad:
        if size > 1:
            notes.append(f"no answer is better than another: {bad.reason}")
        return tuple(range(min(2, size)))
    return pair.chosen, pair.rejected


def _format_answer_name(view: AnswersView, index: int) -> str:
    role = ""
    if len(view.compared) == 2 and not any(note.startswith("no answer is better") for note in view.notes):
        role = f" ({CHOSEN_ROLE})" if index == view.compared[0] else f" ({REJECTED_ROLE})"
    return f"answer {index}{role}"


def _judgements(view: AnswersView) -> Iterator[Text]:
    """A line for each answer: its judgements, its size and its text."""
    head = f"{'answer':>6}  {'rank':>4}  {'score':>8}  {'verdict':<11}  {'rows':>5}  {'targets':>7}  text"
    yield Text(f"\n{head}", "bold")
    for index, (answer, answer_rows) in enumerate(zip(view.sample.answers, view.answers, strict=True)):
        rank = OFF if answer.rank is None else str(answer.rank)
        score = OFF if answer.score is None else f"{answer.score:.4g}"
        line = Text(f"{index:>6}  {rank:>4}  {score:>8}  {answer.verdict or OFF:<11}  ")
        line.append(
            f"{len(answer_rows.rows):>5}  {answer_rows.num_targets:>7}  {_format_answer_text(answer)}"
        )
        if answer.steps is not None:
            scores = ", ".join(f"{score:g}" for score in answer.steps if score is not None)
            line.append(f"  steps {scores}", style="yellow")
        yield line.append(f"  by {answer.origin}" if answer.origin else "", style="dim")


def _format_answer_text(answer: RatedAnswer) -> str:
    from audiollm.data.records.sample import TextPart

    texts = [
        content_part.text if isinstance(content_part, TextPart) else f"<{content_part.path}>"
        for content_part in answer.content
    ]
    text = json.dumps(" ".join(texts), ensure_ascii=False)[1:-1]
    text = "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text)
    return text if len(text) <= TEXT_WIDTH else f"{text[: TEXT_WIDTH - 1]}…"


def _prompt_lines(view: AnswersView, width: int) -> Iterator[Text]:
    from audiollm.data.inspection import elide

    for item in elide(view.prompt, view.books + 1 if view.has_codes else 0):
        if isinstance(item, list):
            yield left_out(item, width, view.books, view.has_codes)
        else:
            yield row_line(item, width, view.books)


def _beside_lines(view: AnswersView, width: int) -> Iterator[Text]:
    """The compared answers beside each other; rows that both leave out are counted."""
    sides = [view.answers[index] for index in view.compared]
    visible_rows = set().union(*(_find_visible_rows(side, view) for side in sides))
    blank = Text(" " * (9 + 2 + width + 2 + max(view.books, 6)))
    hidden = 0
    for place, rows in enumerate(zip_longest(*(side.rows for side in sides))):
        if place not in visible_rows:
            hidden += 1
            continue
        if hidden:
            yield Text(f"{'':>6}  … {hidden} rows of audio", style="dim")
            hidden = 0
        line = Text(f"{len(view.prompt) + place:>6}", style="dim")
        for side, row in zip(sides, rows, strict=True):
            line.append("  ").append_text(blank.copy() if row is None else row_cells(row, width, view.books))
            step = None if row is None else side.step_ends.get(row.position)
            line.append("" if step is None else f"  step {step:g}", style="yellow")
        yield line


def _find_visible_rows(answer: AnswerRows, view: AnswersView) -> set[int]:
    """Places of the rows that end a step, or are not in the middle of long audio."""
    from audiollm.data.inspection import elide

    first = len(view.prompt)
    items = elide(answer.rows, view.books + 1 if view.has_codes else 0)
    ends = {position - first for position in answer.step_ends}
    return ends | {item.position - first for item in items if not isinstance(item, list)}
