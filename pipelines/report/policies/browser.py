"""The browser of rollouts: of some steps the groups whose answers differ most, with the best and the worst answer.

Shapes: K codebooks, T frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from audiollm.evaluate.report.clips import Gallery, PageClip
from audiollm.evaluate.report.formats import without_home
from audiollm.rl.rollouts.records import AnswerRecord, DrawnToken, GroupRecord
from pipelines.report.curves import spread_places
from pipelines.report.material import Material, Row
from pipelines.report.policies.history import FreshTraining, short_name
from pipelines.report.preferences.cases import words_and_clips
from pipelines.report.preferences.sounds import RecordSounds

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

    def __init__(self, training: FreshTraining, gallery: Gallery) -> None:
        self._training, self._gallery = training, gallery

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


def rollout_browser(material: Material, training: FreshTraining, gallery: Gallery, max_steps: int) -> Row:
    """Steps with their groups; `absent` where there are none.

    Args:
        max_steps: steps that are shown.
    """
    if training.stage.result is None:
        return {"steps": [], "absent": "", "num_steps": 0}
    numbers = training.rollouts.steps
    read = [
        step_groups
        for place in spread_places(len(numbers), max_steps)
        if (step_groups := _step_at(training, place))
    ]
    sounds = RecordSounds(material, training.stage, gallery)
    answer_sounds = AnswerSounds(training, gallery)
    sounds.find({group.id for _, groups in read for group in _select_groups(groups)})
    return {
        "steps": [_build_step_entry(step, groups, sounds, answer_sounds) for step, groups in read],
        "num_steps": len(numbers),
        "absent": "" if read else NO_ROLLOUTS,
    }


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


def _build_step_entry(
    step: int, groups: Sequence[GroupRecord], sounds: RecordSounds, answer_sounds: AnswerSounds
) -> Row:
    visible_groups = _select_groups(groups)
    rewards = [answer.reward for group in groups for answer in group.answers if answer.reward is not None]
    advantages = [
        abs(value) for group in visible_groups for answer in group.answers for value in answer.advantage or ()
    ]
    largest = max(advantages, default=0.0)
    return {
        "step": step,
        "mean": sum(rewards) / len(rewards) if rewards else None,
        "num_groups": len(groups),
        "groups": [_build_group_entry(group, sounds, answer_sounds, largest) for group in visible_groups],
    }


def _build_group_entry(
    group: GroupRecord, sounds: RecordSounds, answer_sounds: AnswerSounds, largest: float
) -> Row:
    scored = [answer for answer in group.answers if answer.reward is not None]
    ends = [scored[0], scored[-1]] if group.spread > 0 else group.answers[:1]
    titles = ("best", "worst") if group.spread > 0 else ("one of equal answers",)
    row = {"id": group.id}
    return {
        "id": group.id,
        "size": len(group.answers),
        "mean": group.mean,
        "asked": words_and_clips(group.question, row, sounds),
        "key": words_and_clips(group.key, row, sounds),
        "ends": [
            {
                **_build_answer_entry(answer, largest),
                "title": title,
                "good": title != "worst",
                "clips": answer_sounds.clips(answer),
            }
            for title, answer in zip(titles, ends, strict=True)
        ],
        "all": [_summarize_answer(answer) for answer in group.answers],
        "names": [short_name(name) for name in group.answers[0].rewards],
    }


def _summarize_answer(answer: AnswerRecord) -> Row:
    return {
        "number": answer.number,
        "text": answer.text,
        "reward": answer.reward,
        "rewards": list(answer.rewards.values()),
        "tokens": answer.row.get("tokens"),
        "advantage": _advantage_text(answer),
        "cut": answer.is_truncated,
    }


def _build_answer_entry(answer: AnswerRecord, largest: float) -> Row:
    tokens = answer.tokens[:MAX_TOKENS]
    return {
        **_summarize_answer(answer),
        "functions": [(short_name(name), value) for name, value in answer.rewards.items()],
        "steps": answer.steps,
        "pieces": [_build_token_entry(token, largest) for token in tokens],
        "more": len(answer.tokens) - len(tokens),
    }


def _advantage_text(answer: AnswerRecord) -> str:
    """`+0.71`, or `−0.10 to +0.71 by token`; empty without advantages."""
    if answer.advantage is None:
        return ""
    low, high = answer.advantage
    return signed(high) if high - low < 5e-4 else f"{signed(low)} to {signed(high)} by token"


def signed(value: float) -> str:
    """A number with its sign, as it is read: `+0.71`, `−0.10`, `0.00`."""
    return f"{value:+.2f}".replace("-", "−") if round(value, 2) else "0.00"


def _build_token_entry(token: DrawnToken, largest: float) -> Row:
    advantage = token.figures.get("advantages")
    labels = [f"{_TITLES[name]} {signed(value)}" for name, value in token.figures.items()]
    return {
        "text": token.text,
        "speech": token.actions if token.is_speech else 0,
        "share": 0.0 if not advantage or not largest else abs(advantage) / largest,
        "up": (advantage or 0.0) >= 0,
        "title": ", ".join(labels),
    }


_TITLES: dict[str, Any] = {
    "advantages": "advantage",
    "behaviour": "log-probability when sampled",
    "old": "before the update",
    "reference": "by the reference",
    "values": "value",
    "returns": "return",
}
