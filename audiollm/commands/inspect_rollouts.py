"""The rollouts of a step of `train_policy`, as `inspect` shows them: groups, with best and worst answer first."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.padding import Padding
from rich.text import Text

from audiollm.errors import ConfigError
from audiollm.rl.rollouts.records import FOLDER, AnswerRecord, GroupRecord, RolloutRecords

if TYPE_CHECKING:
    from rich.console import Console

MAX_GROUPS = 4
"""Groups that are shown where no number is asked for."""
BEST, WORST = "best", "worst"


def rollouts_in(target: str) -> RolloutRecords | None:
    """The rollouts in a stage's folder; None where it has none."""
    records = RolloutRecords(Path(target) / FOLDER)
    return records if records.steps else None


def groups_of_step(target: str, step: int, sample: str | None) -> list[GroupRecord]:
    """The groups of a step, those whose rewards differ most first.

    Args:
        step: a negative number counts from the last.
        sample: id of a prompt, or its number among the groups; None: all.

    Raises:
        ConfigError: no rollouts, no such step, or no such prompt.
    """
    records = rollouts_in(target)
    if records is None:
        raise ConfigError("no rollouts here", target, "give the folder of a stage train_policy")
    numbers = records.steps
    step_number = numbers[step] if -len(numbers) <= step < 0 else step
    if step_number not in numbers:
        raise ConfigError(
            f"--step {step}: this stage has no such step", target, f"steps are {numbers[0]} to {numbers[-1]}"
        )
    groups = sorted(records.groups(step_number), key=lambda group: -group.spread)
    if not groups:
        raise ConfigError(f"step {step_number} has no answers", str(records.folder), "see set_aside.jsonl")
    if sample is None:
        return groups
    named = [group for group in groups if group.id == sample]
    if not named and sample.isdecimal() and int(sample) < len(groups):
        named = [groups[int(sample)]]
    if not named:
        raise ConfigError(
            f"--sample {sample}: step {step_number} has no such prompt",
            target,
            f"for example {groups[0].id}; numbers are 0 to {len(groups) - 1}",
        )
    return named


def rollout_json_lines(groups: Sequence[GroupRecord]) -> Iterator[str]:
    """The row of each answer as it is in the file, with its place in the group (`rank`, from 1)."""
    for group in groups:
        for rank, answer in enumerate(group.answers, start=1):
            yield json.dumps({**answer.row, "rank": rank}, ensure_ascii=False)


def print_rollouts(groups: Sequence[GroupRecord], limit: int | None, console: Console) -> None:
    """Print groups one below the other, at any width of the terminal."""
    printed_groups = groups[: limit or MAX_GROUPS]
    rewards = [answer.reward for group in groups for answer in group.answers if answer.reward is not None]
    mean = f", mean reward {sum(rewards) / len(rewards):.3f}" if rewards else ""
    step = groups[0].answers[0].row.get("step")
    console.print(Text(f"step {step}: {len(groups)} groups{mean}", style="bold"))
    for number, group in enumerate(printed_groups):
        console.print()
        _print_group(number, group, console)
    if len(groups) > len(printed_groups):
        console.print()
        more = f"{len(groups) - len(printed_groups)} more groups (--limit, --sample)"
        console.print(Text(more, style="dim"))


# Private


def _print_group(number: int, group: GroupRecord, console: Console) -> None:
    replaced = ", replaced by another prompt" if group.answers[0].is_replaced else ""
    console.print(Text(f"{number}  {group.id}{replaced}", style="bold cyan"))
    console.print(Padding(_format_content(group.question), (0, 0, 0, 2)))
    if group.key:
        key = Text("right answer: ", style="dim").append_text(_format_content(group.key))
        console.print(Padding(key, (0, 0, 0, 2)))
    for answer, title in _order_answers(group):
        console.print(Padding(_heading(answer, title), (0, 0, 0, 2)))
        console.print(Padding(_format_tokens(answer), (0, 0, 0, 4)))
        for text, reward, advantage in answer.steps:
            line = f"{_format_figure(reward)}  {_format_figure(advantage)}  {text}"
            console.print(Padding(Text(f"step  {line}", style="dim"), (0, 0, 0, 6)))


def _order_answers(group: GroupRecord) -> Iterator[tuple[AnswerRecord, str]]:
    """The best answer, the worst, and then the others from the best on."""
    scored = [answer for answer in group.answers if answer.reward is not None]
    if group.spread <= 0:
        yield from ((answer, "") for answer in group.answers)
        return
    yield scored[0], BEST
    yield scored[-1], WORST
    yield from ((answer, "") for answer in group.answers if answer not in (scored[0], scored[-1]))


def _heading(answer: AnswerRecord, title: str) -> Text:
    """Number, reward, rewards by function, advantage and length of an answer."""
    style = {BEST: "green", WORST: "red"}.get(title, "")
    line = Text(f"answer {answer.number}", style="bold")
    line.append(f" {title}" if title else "", style=f"bold {style}")
    line.append(f"  reward {_format_figure(answer.reward)}", style=style)
    for name, value in answer.rewards.items():
        line.append(f"  {name.rpartition(':')[2]} {_format_figure(value)}")
    if answer.advantage is not None:
        low, high = answer.advantage
        text = _signed(high) if high - low < 5e-4 else f"{_signed(low)} to {_signed(high)}"
        line.append(f"  advantage {text}", style="yellow")
    line.append(
        f"  {answer.row.get('tokens')} tokens" + (", cut" if answer.is_truncated else ""), style="dim"
    )
    return line


def _format_tokens(answer: AnswerRecord) -> Text:
    """The text of an answer with the size of its speech; each token in the colour of its advantage."""
    text = Text()
    tokens = answer.tokens
    largest = max((abs(token.figures.get("advantages", 0.0)) for token in tokens), default=0.0)
    for token in tokens:
        advantage = token.figures.get("advantages", 0.0)
        style = "" if abs(advantage) < 0.05 * largest or not largest else "green" if advantage > 0 else "red"
        text.append(f"<speech: {token.actions} codes>" if token.is_speech else _printable(token.text), style)
    if not tokens:
        text.append(_printable(answer.text) or "(nothing)")
    return text


def _format_content(parts: Sequence[dict[str, Any]]) -> Text:
    """Texts, and recordings by their files."""
    text = Text()
    for content_part in parts:
        if content_part.get("type") == "audio":
            end = content_part.get("end_s")
            span = f" {content_part.get('start_s') or 0:g}-{end:g} s" if isinstance(end, int | float) else ""
            text.append(f" <{content_part.get('path')}{span}> ", style="magenta")
        else:
            text.append(_printable(str(content_part.get("text"))))
    return text[1:] if text.plain.startswith(" ") else text


def _printable(text: str) -> str:
    """The text without characters that would steer the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else f"\\u{ord(c):04x}" for c in text)


def _format_figure(value: float | None) -> str:
    return "none" if value is None else f"{value:.3g}"


def _signed(value: float) -> str:
    return f"{value:+.2f}" if round(value, 2) else "0"
