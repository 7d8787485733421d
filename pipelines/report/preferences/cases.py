"""Held-out pairs to read and hear, and a policy's own answers to held-out prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from audiollm.evaluate.report.clips import Gallery, PageClip
from pipelines.report.curves import spread_places
from pipelines.report.material import Material, Row
from pipelines.report.preferences.history import POLICIES, Training
from pipelines.report.preferences.sounds import RecordSounds

STEPS_SHOWN, PROMPTS_COMPARED = 4, 3
"""Answers of a policy to each prompt, and prompts whose answers by all methods stand side by side."""
MAX_CHARACTERS = 600
"""A longer text is cut on the page."""
NO_PAIRS = (
    "It left no pairs (pairs.jsonl): no records are held out, or its objective has no implicit rewards."
)


def cases(material: Material, training: Training, gallery: Gallery, pairs: int, prompts: int) -> Row:
    """Pairs and own answers with their sound, and a sentence where there are none."""
    sounds = RecordSounds(material, training.stage, gallery)
    visible_pairs = training.pairs[:pairs]
    ids = list(dict.fromkeys(str(row.get("id")) for row in training.answers))
    sounds.find([*(str(row.get("id")) for row in visible_pairs), *ids[:prompts]])
    done = training.stage.figures is not None
    return {
        "pairs": [_build_pair_entry(row, sounds) for row in visible_pairs],
        "wrong": sum(row.get("right") is False for row in training.pairs),
        "num_pairs": len(training.pairs),
        "pairs_absent": NO_PAIRS if done and not training.pairs and training.stage.kind == POLICIES else "",
        "prompts": [_build_preference_prompt(id, training.answers_to(id), sounds) for id in ids[:prompts]],
        "num_prompts": len(ids),
        "answers_absent": _answers_absent(training) if done else "",
    }


def _answers_absent(training: Training) -> str:
    if training.answers or training.stage.kind != POLICIES:
        return ""
    settings = training.stage.result.settings if training.stage.result is not None else {}
    if settings.get("eval_answers") == 0:
        return "Its own answers were not asked for (eval_answers: 0)."
    return "It left no answers of its own (answers.jsonl)."


def _build_pair_entry(row: Row, sounds: RecordSounds) -> Row:
    answers = [answer for answer in row["answers"] if isinstance(answer, dict)]
    return {
        "id": str(row.get("id")),
        "right": row.get("right") is True,
        "margin": row.get("margin"),
        "asked": words_and_clips(parts_of_messages(row), row, sounds),
        "answers": [
            {
                "role": str(answer.get("role")),
                "good": answer.get("role") in ("chosen", "desirable"),
                "reward": answer.get("reward"),
                "tokens": answer.get("tokens"),
                **words_and_clips(
                    [
                        content_part
                        for content_part in answer.get("content") or []
                        if isinstance(content_part, dict)
                    ],
                    row,
                    sounds,
                ),
            }
            for answer in answers
        ],
    }


def _build_preference_prompt(id: str, rows: Sequence[Row], sounds: RecordSounds) -> Row:
    answers = [rows[place] for place in spread_places(len(rows), STEPS_SHOWN)]
    return {
        "id": id,
        "asked": words_and_clips(parts_of_messages(rows[0]), rows[0], sounds),
        "answers": [{"name": f"step {row['step']:,}", **given_answer(row)} for row in answers],
    }


def given_answer(row: Row) -> Row:
    """An answer of the policy's own; its sound, where there is some, is added by the caller."""
    return {
        "text": _shorten_words(str(row.get("answer") or "")),
        "tokens": row.get("tokens"),
        "seconds": row.get("seconds"),
        "stopped": row.get("stopped") is not False,
        "clips": [],
    }


def parts_of_messages(row: Mapping[str, Any]) -> list[Row]:
    """The parts of all messages, in order."""
    messages = row.get("messages")
    listed = (
        [message for message in messages if isinstance(message, dict)] if isinstance(messages, list) else []
    )
    return [
        content_part
        for message in listed
        for content_part in message.get("content") or []
        if isinstance(content_part, dict)
    ]


def words_and_clips(parts: Sequence[Row], row: Row, sounds: RecordSounds) -> Row:
    """The words of parts, and a clip for each recording."""
    text = " ".join(
        str(content_part.get("text")) for content_part in parts if content_part.get("type") == "text"
    )
    clips: list[PageClip] = [
        sounds.clip(str(row.get("id")), content_part)
        for content_part in parts
        if content_part.get("type") == "audio"
    ]
    return {"text": _shorten_words(text), "clips": clips}


def _shorten_words(text: str) -> str:
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}…"
