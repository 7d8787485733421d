"""Held-out pairs to read and hear, and a model's own answers to held-out prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from audiollm.pages.blocks import (
    Content,
    card,
    cards,
    clip,
    definitions,
    element,
    file_label,
    heading,
    join,
    message,
    notice,
    small,
)  # fmt: skip
from audiollm.pages.clips import PageClip
from audiollm.pages.formats import decimals
from audiollm.pages.run_record import Row
from audiollm.pages.sections import ReportContext
from audiollm.pages.stage_parts import spread_places
from audiollm.rl.report.record_sounds import RecordSounds
from audiollm.rl.report.trainings import POLICIES, Training

STEPS_SHOWN = 4
"""Answers of a policy to each prompt."""
MAX_CHARACTERS = 600
"""A longer text is cut on the page."""
NO_PAIRS = (
    "It left no pairs (pairs.jsonl): no records are held out, or its objective has no implicit rewards."
)


@dataclass(frozen=True)
class Said:
    """The words and the recordings of a message or an answer."""

    text: str
    clips: Sequence[PageClip] = ()

    def block(self, label: str) -> Markup:
        return message(self.text, self.clips, label)


def prompts_and_pairs(context: ReportContext, training: Training, pairs: int, prompts: int) -> Markup:
    """Own answers and pairs with their sound, and a sentence where there are none.

    Args:
        pairs, prompts: most that are shown.
    """
    sounds = RecordSounds(context, training.stage)
    visible_pairs = training.pairs[:pairs]
    ids = list(dict.fromkeys(str(row.get("id")) for row in training.answers))
    sounds.find([*(str(row.get("id")) for row in visible_pairs), *ids[:prompts]])
    is_done = training.stage.figures is not None
    wrong = sum(row.get("right") is False for row in training.pairs)
    shown, total = len(visible_pairs), len(training.pairs)
    about_pairs = f"{shown} of {total} that were kept; {wrong} of these are in the wrong order"
    listed = f"{min(prompts, len(ids))} of {len(ids)} held-out prompts"
    about_prompts = f"{listed}, greedy; step 0 is the model that it began from"
    return join(
        notice(_why_no_answers(training)) if is_done and _why_no_answers(training) else None,
        answer_cards(
            "What it answers as it learns",
            about_prompts,
            [_prompt_card(id, training.answers_to(id), sounds) for id in ids[:prompts]],
        ),
        notice(NO_PAIRS) if is_done and not training.pairs and training.stage.kind == POLICIES else None,
        answer_cards(
            "Held-out pairs, the worst first", about_pairs, [_pair_card(row, sounds) for row in visible_pairs]
        ),
    )


def answer_cards(title: str, about: str, listed: Sequence[Markup]) -> Markup | None:
    """Wide cards below their heading; None without any."""
    return join(heading(title, about), cards(listed, "wide-cards")) if listed else None


def _why_no_answers(training: Training) -> str:
    if training.answers or training.stage.kind != POLICIES:
        return ""
    settings = training.stage.result.settings if training.stage.result is not None else {}
    if settings.get("eval_answers") == 0:
        return "Its own answers were not asked for (eval_answers: 0)."
    return "It left no answers of its own (answers.jsonl)."


def _pair_card(row: Row, sounds: RecordSounds) -> Markup:
    id, is_right = str(row.get("id")), row.get("right") is True
    answers = [
        _judged_answer(answer, id, words_and_clips(_parts(answer.get("content")), row, sounds))
        for answer in row["answers"]
        if isinstance(answer, dict)
    ]
    margin = f"margin {decimals(row['margin'], 3)}" if isinstance(row.get("margin"), int | float) else ""
    return card(
        [file_label(id), small(margin)],
        words_and_clips(parts_of_messages(row), row, sounds).block(f"the question of {id}"),
        element("div", answers, class_="answers"),
        badge="" if is_right else "✗ wrong order",
    )


def _judged_answer(answer: Row, id: str, said: Said) -> Markup:
    role, reward, tokens = str(answer.get("role")), answer.get("reward"), answer.get("tokens")
    side = "good" if role in ("chosen", "desirable") else "poor"
    title = element(
        "h5",
        role,
        [" ", element("span", f"reward {reward:.3f}")] if isinstance(reward, int | float) else None,
        [" ", element("span", f"{tokens} tokens")] if isinstance(tokens, int | float) else None,
    )
    return element("div", title, said.block(f"{role} answer, {id}"), class_=f"answer {side}")


def _prompt_card(id: str, rows: Sequence[Row], sounds: RecordSounds) -> Markup:
    answers = [rows[place] for place in spread_places(len(rows), STEPS_SHOWN)]
    question = words_and_clips(parts_of_messages(rows[0]), rows[0], sounds)
    listed = [(f"step {row['step']:,}", own_answer(row)) for row in answers]
    return prompt_card(id, question, listed)


def prompt_card(
    id: str, question: Said, answers: Sequence[tuple[Content, Content]], key: Content = None
) -> Markup:
    """A prompt with the answers of one model at several steps, or of several models.

    Args:
        key: the right answer.
    """
    asked = question.block(f"the question of {id}")
    return card(file_label(id), asked, key, definitions(answers, "steps"))


def own_answer(
    row: Row, note: str = "", clips: Sequence[PageClip] = (), label: str = "", is_speech: bool = False
) -> Markup:
    """An answer of the policy's own in a list of such.

    Args:
        is_speech: whether it speaks, where the row has no seconds.
    """
    text, tokens, seconds = (
        _shorten_words(str(row.get("answer") or "")),
        row.get("tokens"),
        row.get("seconds"),
    )
    speaks = isinstance(seconds, int | float)
    about = [
        f"{tokens} tokens" if isinstance(tokens, int | float) else "",
        f", {seconds:.2f} s" if isinstance(seconds, int | float) else "",
        ", cut" if row.get("stopped") is False else "",
        f" · {note}" if note else "",
    ]
    said = text or small("speech" if speaks or is_speech else "nothing")
    return join(said, " ", small("".join(about)), [clip(sound, label) for sound in clips])


def parts_of_messages(row: Mapping[str, Any]) -> list[Row]:
    """The parts of all messages, in order."""
    return [part for message in _parts(row.get("messages")) for part in _parts(message.get("content"))]


def words_and_clips(parts: Sequence[Row], row: Row, sounds: RecordSounds) -> Said:
    """The words of parts, and a clip for each recording."""
    text = " ".join(str(part.get("text")) for part in parts if part.get("type") == "text")
    clips = [sounds.clip(str(row.get("id")), part) for part in parts if part.get("type") == "audio"]
    return Said(_shorten_words(text), clips)


def _parts(listed: Any) -> list[Row]:
    return [part for part in listed if isinstance(part, dict)] if isinstance(listed, list) else []


def _shorten_words(text: str) -> str:
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}…"
