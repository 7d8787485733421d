"""The browser of rollouts: of some steps the groups whose answers differ most, with the best and the worst answer.

Shapes: K codebooks, T frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from audiollm.pages.blocks import (
    Content,
    bold,
    card,
    cell,
    clip,
    details,
    element,
    file_label,
    heading,
    join,
    notice,
    small,
    table,
)  # fmt: skip
from audiollm.pages.clips import PageClip
from audiollm.pages.formats import decimals, without_home
from audiollm.pages.sections import ReportContext
from audiollm.pages.stage_parts import spread_places
from audiollm.rl.online.report.history import FreshTraining, short_name
from audiollm.rl.report.cases import Said, words_and_clips
from audiollm.rl.report.record_sounds import RecordSounds
from audiollm.rl.rollouts.records import AnswerRecord, DrawnToken, GroupRecord

if TYPE_CHECKING:
    from audiollm.codec import Codec

STEPS_SHOWN, GROUPS_SHOWN = 6, 2
"""Steps that the browser of a stage has, and groups of each."""
LOOK_BACK = 4
"""Steps that are looked at, from the chosen one back, for one with groups that differ."""
MAX_TOKENS = 400
"""Tokens of an answer that the page shows."""
NO_ROLLOUTS = "It left no rollouts."


class AnswerSounds:
    """Decodes the speech of answers by the codec of the stage's model."""

    def __init__(self, training: FreshTraining, context: ReportContext) -> None:
        self._training, self._gallery = training, context.gallery

    def clips(self, answer: AnswerRecord) -> list[PageClip]:
        """The sound of an answer; none of one in words."""
        import torch

        from audiollm.audio.samples import Waveform
        from audiollm.errors import ConfigError
        from audiollm.files.atomic import DamagedFile

        if answer.speech_file is None:
            return []
        try:
            codes_KT = answer.codes()
            if codes_KT is None:
                return [PageClip(problem=f"{answer.speech_file[0].name} is no longer there")]
            if not codes_KT.shape[1]:
                return [PageClip(problem="no frame of speech")]
            with torch.inference_mode():
                samples_CN = self._codec.decode(codes_KT).float().cpu().clamp(-1, 1)
        except (ConfigError, DamagedFile, OSError) as error:
            return [PageClip(problem=without_home(str(error).splitlines()[0]))]
        return [self._gallery.clip_of(Waveform(samples_CN, self._codec.sample_rate))]

    @cached_property
    def _codec(self) -> Codec:
        from audiollm.families.registry import load_speech_generator

        settings = self._training.settings
        return load_speech_generator(str(settings["start"]), settings.get("codec") or None).codec


@dataclass(frozen=True)
class AnswerCases:
    """Looks up the recordings of prompts and the speech of answers."""

    sounds: RecordSounds
    answer_sounds: AnswerSounds

    def question(self, group: GroupRecord) -> Said:
        return words_and_clips(group.question, {"id": group.id}, self.sounds)

    def right_answer(self, group: GroupRecord) -> Markup | None:
        """The right answer, where the sample has one."""
        key = words_and_clips(group.key, {"id": group.id}, self.sounds)
        if not (key.text or key.clips):
            return None
        clips = [clip(sound, f"the right answer of {group.id}") for sound in key.clips]
        return join(element("p", small("right answer"), " ", key.text, class_="key"), clips)


def rollout_browser(context: ReportContext, training: FreshTraining, max_steps: int) -> Markup | None:
    """Steps with their groups; None of a stage that has not run.

    Args:
        max_steps: steps that are shown.
    """
    if training.stage.result is None:
        return None
    numbers = training.rollouts.steps
    read = [
        step_groups
        for place in spread_places(len(numbers), max_steps)
        if (step_groups := _step_at(training, place))
    ]
    if not read:
        return notice(NO_ROLLOUTS)
    cases = AnswerCases(RecordSounds(context, training.stage), AnswerSounds(training, context))
    cases.sounds.find({group.id for _, groups in read for group in _select_groups(groups)})
    about = (
        f"{len(read)} of {len(numbers):,} steps, in each the groups whose rewards differ most; all are in "
        f"{training.stage.name}/rollouts and in "
    )
    scale = element(
        "p",
        element("span", "more likely", class_="piece", style="--share:1"),
        " ",
        element("span", "less likely", class_="piece down", style="--share:1"),
        " by the advantage of each token, against the largest of its step; point at a token for its figures",
        class_="scale small",
    )
    picker = element("div", class_="picker", role="group", aria_label="steps", hidden=True)
    steps = [_step(step, groups, cases) for step, groups in read]
    title = heading("Rollouts", [about, element("code", "audiollm inspect")])
    return join(title, element("div", scale, picker, steps, class_="browser"))


def _step_at(training: FreshTraining, place: int) -> tuple[int, list[GroupRecord]] | None:
    """A step at a place of the list of files, or one shortly before it where it has no groups that differ."""
    read = []
    for number in reversed(training.rollouts.steps[max(0, place - LOOK_BACK) : place + 1]):
        try:
            groups = training.rollouts.groups(number)
        except OSError:
            continue
        if any(group.spread > 0 for group in groups):
            return number, groups
        read += [(number, groups)] if groups else []
    return read[0] if read else None


def _select_groups(groups: Sequence[GroupRecord]) -> list[GroupRecord]:
    """Groups that were trained on, whose rewards differ most; among equals the first."""
    trained = [group for group in groups if not group.answers[0].is_replaced] or list(groups)
    return sorted(trained, key=lambda group: -group.spread)[:GROUPS_SHOWN]


def _step(step: int, groups: Sequence[GroupRecord], cases: AnswerCases) -> Markup:
    visible_groups = _select_groups(groups)
    rewards = [answer.reward for group in groups for answer in group.answers if answer.reward is not None]
    advantages = [
        abs(value) for group in visible_groups for answer in group.answers for value in answer.advantage or ()
    ]
    largest = max(advantages, default=0.0)
    mean = sum(rewards) / len(rewards) if rewards else None
    about = f"mean reward {decimals(mean)}, {len(groups)} groups"
    return element(
        "section",
        element("h4", f"step {step:,} ", small(about)),
        element(
            "div", [_group(group, cases, largest) for group in visible_groups], class_="cards rollout-cards"
        ),
        class_="rollout-step",
        data_step=step,
        aria_label=f"step {step}",
    )


def _group(group: GroupRecord, cases: AnswerCases, largest: float) -> Markup:
    """A prompt with its best and its worst answer, and a table of all.

    Args:
        largest: advantage of the step.
    """
    scored = [answer for answer in group.answers if answer.reward is not None]
    ends = [scored[0], scored[-1]] if group.spread > 0 else group.answers[:1]
    titles = ("best", "worst") if group.spread > 0 else ("one of equal answers",)
    answers = [
        _sampled_answer(answer, title, group, cases, largest)
        for title, answer in zip(titles, ends, strict=True)
    ]
    names = [short_name(name) for name in group.answers[0].rewards]
    headings = ["answer", "reward", *names, "advantage", "tokens"]
    rows = [_answer_row(answer) for answer in group.answers]
    return card(
        [file_label(group.id), small(f"mean reward {decimals(group.mean)}")],
        cases.question(group).block(f"the question of {group.id}"),
        cases.right_answer(group),
        element("div", answers, class_="answers"),
        details(
            f"All {len(group.answers)} answers",
            table(headings, rows, "numbers lines", has_row_headings=False),
        ),
    )


def _answer_row(answer: AnswerRecord) -> list[Content]:
    cut = [" ", small("cut")] if answer.is_truncated else None
    rewards = [decimals(value) for value in answer.rewards.values()]
    text = cell(answer.text or "(nothing)", cut, class_="text")
    return [
        text,
        bold(decimals(answer.reward)),
        *rewards,
        advantage_text(answer) or "–",
        answer.row.get("tokens"),
    ]


def _sampled_answer(
    answer: AnswerRecord, title: str, group: GroupRecord, cases: AnswerCases, largest: float
) -> Markup:
    tokens = answer.tokens[:MAX_TOKENS]
    more, advantage = len(answer.tokens) - len(tokens), advantage_text(answer)
    count = f"{answer.row.get('tokens')} tokens" + (", cut" if answer.is_truncated else "")
    pieces = [_piece(token, largest) for token in tokens] or answer.text or "(nothing)"
    functions = [
        element("li", element("span", short_name(name)), " ", bold(decimals(value)))
        for name, value in answer.rewards.items()
    ]
    return element(
        "div",
        element(
            "h5",
            bold(f"{title} of {len(group.answers)}"),
            [" ", element("span", f"reward {decimals(answer.reward)}")],
            [" ", element("span", f"advantage {advantage}")] if advantage else None,
            [" ", element("span", count)],
        ),
        [clip(sound, f"{title} answer to {group.id}") for sound in cases.answer_sounds.clips(answer)],
        element(
            "p", pieces, [" ", small(f"and {more:,} more tokens")] if more > 0 else None, class_="pieces"
        ),
        element("ul", functions, class_="functions"),
        _thought_steps(answer),
        class_=f"answer {'poor' if title == 'worst' else 'good'}",
    )


def _thought_steps(answer: AnswerRecord) -> Markup | None:
    """Rewards and advantages of the steps of a chain of thought."""
    rows = [
        element("tr", [element("td", content) for content in (text, decimals(reward), decimals(advantage))])
        for text, reward, advantage in answer.steps
    ]
    if not rows:
        return None
    head = element("tr", [element("th", title, scope="col") for title in ("step", "reward", "advantage")])
    return element("table", element("thead", head), element("tbody", rows), class_="steps-of-thought")


def advantage_text(answer: AnswerRecord) -> str:
    """`+0.71`, or `−0.10 to +0.71 by token`; empty without advantages."""
    if answer.advantage is None:
        return ""
    low, high = answer.advantage
    return signed(high) if high - low < 5e-4 else f"{signed(low)} to {signed(high)} by token"


def signed(value: float) -> str:
    """A number with its sign, as it is read: `+0.71`, `−0.10`, `0.00`."""
    return f"{value:+.2f}".replace("-", "−") if round(value, 2) else "0.00"


def _piece(token: DrawnToken, largest: float) -> Markup:
    """A token, coloured by its advantage; its figures appear where it is pointed at."""
    advantage = token.figures.get("advantages")
    share = 0.0 if not advantage or not largest else abs(advantage) / largest
    style = "piece speech" if token.is_speech and token.actions else "piece"
    return element(
        "span",
        f"♪ speech, {token.actions} codes" if token.is_speech and token.actions else token.text,
        class_=style if (advantage or 0.0) >= 0 else f"{style} down",
        style=f"--share:{share:.2f}",
        title=", ".join(f"{_TITLES[name]} {signed(value)}" for name, value in token.figures.items()),
    )


_TITLES: dict[str, Any] = {
    "advantages": "advantage",
    "behaviour": "log-probability when sampled",
    "old": "before the update",
    "reference": "by the reference",
    "values": "value",
    "returns": "return",
}
