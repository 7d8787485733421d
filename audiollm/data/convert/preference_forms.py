"""The forms of rows with judged answers: which fields each has, and the answers that it gives.

Pairs (TRL's chosen and rejected), steps (TRL's stepwise supervision), ranked and scored lists (UltraFeedback's objects
among them), and single answers with a label (TRL's unpaired preferences, `kto_tag`) or a score.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from audiollm.data.convert.recordings import is_recording

COMMON_COLUMNS: dict[str, tuple[str, ...]] = {
    "prompt": ("prompt", "question", "query", "instruction"),
    "input": ("input",),
    "history": ("history",),
    "system": ("system",),
    "messages": ("messages", "conversations"),
    "audios": ("audios", "audio"),
    "id": ("id", "uid", "key"),
    "split": ("split",),
}
"""Fields of every form, and the columns that are taken for them, the first that is there."""
ANSWER_COLUMNS: dict[str, tuple[str, ...]] = {
    "chosen": ("chosen", "chosen_response"),
    "rejected": ("rejected", "rejected_response"),
    "chosen_audio": ("chosen_audio",),
    "rejected_audio": ("rejected_audio",),
    "score_chosen": ("score_chosen", "chosen_score", "chosen_rating"),
    "score_rejected": ("score_rejected", "rejected_score", "rejected_rating"),
    "margin": ("margin",),
    "completion": ("completion", "response", "answer", "output"),
    "completion_audio": ("completion_audio", "response_audio", "answer_audio"),
    "label": ("label", "kto_tag"),
    "score": ("score", "rating", "reward"),
    "completions": ("completions", "responses", "answers"),
    "completions_audio": ("completions_audio", "responses_audio", "answers_audio"),
    "labels": ("labels",),
    "scores": ("scores", "ratings", "rewards"),
    "ranks": ("ranks",),
    "ranked": ("ranked",),
}
"""Fields of the answers, as `COMMON_COLUMNS`."""
LIST_FIELDS = ("audios", "completions", "completions_audio", "labels", "scores", "ranks", "ranked")
"""Fields with several values."""
TEXT_KEYS = ("response", "completion", "answer", "text", "content")
SCORE_KEYS = ("score", "overall_score", "rating", "reward")
ORIGIN_KEYS = ("model", "origin", "generator")
"""Keys of an answer that is an object, in lists of answers; its other keys go to the answer's metadata."""
STEP_SEPARATOR = "\n"
"""Stands between steps of reasoning, as TRL's trainer of process reward models puts it."""

Fields = Mapping[str, Any]


class WrongField(ValueError):
    """A field of a row that cannot be used.

    Args:
        name: the field; "" for the row as a whole.
        reason: what is wrong with it.
        kind: the few words that are counted by.
    """

    def __init__(self, name: str, reason: str, kind: str = "unusable row") -> None:
        super().__init__(reason)
        self.name, self.reason, self.kind = name, reason, kind


@dataclass(frozen=True)
class GivenAnswer:
    """An answer as a row gives it."""

    name: str
    """The field that it comes from."""
    value: Any
    """A text, a message, a list of parts, a recording, or None where there is a recording beside it alone."""
    sound: Any = None
    """A recording, or a list of recordings, that is given beside it."""
    judged: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `RatedAnswer` besides the content."""


@dataclass(frozen=True)
class RowForm:
    """A form of rows."""

    needs: tuple[frozenset[str], ...]
    """Sets of fields, of which a row must have one."""
    uses: frozenset[str]
    """The fields that the answers are made of; others are kept as metadata."""
    read: Callable[[Fields], list[GivenAnswer]]
    compares: bool = False
    """Whether its answers are compared, so that there must be two, and no two may be equal."""

    def fits(self, names: Collection[str]) -> bool:
        """Return whether a row of these fields has this form."""
        return any(need <= set(names) for need in self.needs)


def plain_number(name: str, value: Any) -> float:
    """A finite number, or the number that a text holds.

    Raises:
        WrongField: it is something else.
    """
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, bool) or not math.isfinite(number):
        raise WrongField(name, f"a finite number is expected, not {value!r:.60}", "no finite score")
    return number


def cell_value(name: str, cell: str | None) -> Any:
    """The value of a field from the cell of a table: None of an empty one, true or false of a label, a number of a
    margin, and a list where one is written as JSON."""
    text = (cell or "").strip()
    if not text:
        return None
    if name in ("label", "margin") or (name in LIST_FIELDS and text.startswith("[")):
        try:
            return json.loads(text.lower() if name == "label" else text)
        except ValueError:
            return text  # refused, with its column, where it is read
    return text


# Private


def _read_pair_answers(fields: Fields) -> list[GivenAnswer]:
    answers = []
    for rank, name in enumerate(("chosen", "rejected"), start=1):
        judged: dict[str, Any] = {"rank": rank}
        if f"score_{name}" in fields:
            judged["score"] = plain_number(f"score_{name}", fields[f"score_{name}"])
        answers.append(GivenAnswer(name, fields.get(name), fields.get(f"{name}_audio"), judged))
    return answers


def _single(fields: Fields) -> list[GivenAnswer]:
    judged: dict[str, Any] = {}
    if "label" in fields:
        judged["verdict"] = "desirable" if _flag("label", fields["label"]) else "undesirable"
    if "score" in fields:
        judged["score"] = plain_number("score", fields["score"])
    return [GivenAnswer("completion", fields.get("completion"), fields.get("completion_audio"), judged)]


def _steps(fields: Fields) -> list[GivenAnswer]:
    texts = _require_list("completions", fields["completions"])
    labels = _require_list("labels", fields["labels"], len(texts), "wrong scores of steps")
    for text in texts:
        if not isinstance(text, str):
            raise WrongField("completions", f"the text of a step is expected, not {text!r:.60}")
    ends = [STEP_SEPARATOR] * (len(texts) - 1) + [""]
    content = [{"type": "text", "text": text + end} for text, end in zip(texts, ends, strict=True)]
    steps = [float(label) if isinstance(label, bool) else plain_number("labels", label) for label in labels]
    return [GivenAnswer("completions", content, None, {"steps": steps})]


def _scored(fields: Fields) -> list[GivenAnswer]:
    answers = _answers("completions", fields.get("completions"), fields.get("completions_audio"))
    if "scores" in fields:
        scores = _require_list("scores", fields["scores"], len(answers))
        answers = [
            _judge(answer, score=plain_number("scores", score))
            for answer, score in zip(answers, scores, strict=True)
        ]
    if "ranks" in fields:
        ranks = _require_list("ranks", fields["ranks"], len(answers))
        answers = [
            _judge(answer, rank=_read_rank("ranks", rank))
            for answer, rank in zip(answers, ranks, strict=True)
        ]
    if not all({"score", "rank"} & set(answer.judged) for answer in answers):
        reason = "not every answer has a score: give scores or ranks, in a column or in each object"
        raise WrongField("completions", reason, "no judgement")
    return answers


def _ranked(fields: Fields) -> list[GivenAnswer]:
    answers = _answers("ranked", fields["ranked"], None)
    return [_judge(answer, rank=place) for place, answer in enumerate(answers, start=1)]


def _judge(answer: GivenAnswer, **judged: float) -> GivenAnswer:
    return replace(answer, judged={**answer.judged, **judged})


def _answers(name: str, answers: Any, sounds: Any) -> list[GivenAnswer]:
    """The answers of a list, with the recordings beside them: either list may be missing."""
    if answers is None:
        answers = [None] * len(_require_list("completions_audio", sounds))
    listed = _require_list(name, answers)
    beside = (
        [None] * len(listed) if sounds is None else _require_list("completions_audio", sounds, len(listed))
    )
    return [_listed_answer(name, answer, sound) for answer, sound in zip(listed, beside, strict=True)]


def _listed_answer(name: str, answer: Any, sound: Any) -> GivenAnswer:
    """A text, a message or a recording, or an object that holds one of them with its judgements."""
    is_object = (
        isinstance(answer, Mapping) and not is_recording(answer) and not {"role", "from"} & set(answer)
    )
    if not is_object:
        return GivenAnswer(name, answer, sound)
    text, score, origin = (_first(answer, keys) for keys in (TEXT_KEYS, SCORE_KEYS, ORIGIN_KEYS))
    held = answer.get("audio")
    if text is None and held is None and sound is None:
        raise WrongField(name, f"an answer has none of {', '.join(TEXT_KEYS)}", "empty answer")
    judged: dict[str, Any] = {}
    if score is not None:
        judged["score"] = plain_number(name, answer[score])
    if answer.get("rank") is not None:
        judged["rank"] = _read_rank(name, answer["rank"])
    if origin is not None:
        judged["origin"] = str(answer[origin])
    used = {text, score, origin, "rank", "audio"}
    metadata = {key: value for key, value in answer.items() if key not in used and value is not None}
    if metadata:
        judged["metadata"] = metadata
    return GivenAnswer(name, None if text is None else answer[text], held if sound is None else sound, judged)


def _first(record: Fields, keys: Sequence[str]) -> str | None:
    return next((key for key in keys if record.get(key) is not None), None)


def _require_list(name: str, value: Any, size: int | None = None, kind: str = "unusable row") -> list[Any]:
    if not isinstance(value, list) or not value:
        raise WrongField(name, f"a list is expected, not {value!r:.60}", kind)
    if size is not None and len(value) != size:
        raise WrongField(name, f"{len(value)} entries for {size} answers or steps: give one for each", kind)
    return value


def _read_rank(name: str, value: Any) -> int:
    number = plain_number(name, value)
    if number != int(number) or number < 1:
        raise WrongField(name, f"a rank is a whole number, and 1 is the best, not {value!r:.60}")
    return int(number)


def _flag(name: str, value: Any) -> bool:
    if isinstance(value, bool) or (isinstance(value, int | float) and value in (0, 1)):
        return bool(value)
    raise WrongField(name, f"true or false is expected, not {value!r:.60}", "wrong verdict")


def _either(first: Sequence[str], second: Sequence[str]) -> tuple[frozenset[str], ...]:
    return tuple(frozenset({first_name, second_name}) for first_name in first for second_name in second)


FORMS = (
    RowForm(
        _either(("chosen", "chosen_audio", "messages"), ("rejected", "rejected_audio")),
        frozenset(
            {
                "chosen",
                "rejected",
                "chosen_audio",
                "rejected_audio",
                "score_chosen",
                "score_rejected",
                "margin",
            }
        ),
        _read_pair_answers,
        compares=True,
    ),
    RowForm((frozenset({"completions", "labels"}),), frozenset({"completions", "labels"}), _steps),
    RowForm((frozenset({"ranked"}),), frozenset({"ranked"}), _ranked, compares=True),
    RowForm(
        (frozenset({"completions"}), frozenset({"completions_audio"})),
        frozenset({"completions", "completions_audio", "scores", "ranks"}),
        _scored,
        compares=True,
    ),
    RowForm(
        _either(("completion", "completion_audio", "messages"), ("label", "score")),
        frozenset({"completion", "completion_audio", "label", "score"}),
        _single,
    ),
)
"""Of the forms that fit a row the first is taken."""


def split_prompt(chosen: Any, rejected: Any) -> tuple[list[dict[str, Any]], Any, Any]:
    """Take the common beginning off two conversations, or off two texts, as TRL's `extract_prompt` does.

    Texts are parted between words, and the spaces there are left out; TRL parts them between any two characters, and
    leaves a space at the beginning of the answers.

    Returns:
        The prompt as messages, and what is left of chosen and rejected.

    Raises:
        ValueError: they begin differently.
    """
    if isinstance(chosen, str):
        prompt, chosen, rejected = _split_texts(chosen, rejected)
        return [{"role": "user", "content": prompt}], chosen, rejected
    shared = _num_shared(chosen, rejected)
    # a prompt ends before an answer, however much of it is the same
    shared = min(shared, len(chosen) - 1, len(rejected) - 1)
    if shared < 1:
        raise ValueError(
            "no prompt: chosen and rejected begin with different messages; name the prompt's column"
        )
    return list(chosen[:shared]), list(chosen[shared:]), list(rejected[shared:])


# Private


def _num_shared(first_items: Sequence[Any], second_items: Sequence[Any]) -> int:
    pairs = enumerate(zip(first_items, second_items, strict=False))
    return next(
        (number for number, (first, second) in pairs if first != second),
        min(len(first_items), len(second_items)),
    )


def _split_texts(chosen: str, rejected: str) -> tuple[str, str, str]:
    shorter_length = min(len(chosen.rstrip()), len(rejected.rstrip()))
    end = min(_num_shared(chosen, rejected), max(0, shorter_length - 1))
    while end and not (chosen[end - 1].isspace() or (chosen[end].isspace() and rejected[end].isspace())):
        end -= 1
    prompt = chosen[:end].rstrip()
    if not prompt.strip():
        raise ValueError("no prompt: chosen and rejected begin differently; name the prompt's column")
    return prompt, chosen[end:].strip(), rejected[end:].strip()
