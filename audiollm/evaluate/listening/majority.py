"""Replies to several inquiries at a time, sampled several times, and the option that most samples name."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any

from audiollm.errors import ConfigError
from audiollm.evaluate.judges.judging import digest, failures_of, load_clip
from audiollm.evaluate.listening.audio_qa import Question
from audiollm.evaluate.listening.choices import read_choice
from audiollm.evaluate.listening.replies import Inquiry, Reply
from audiollm.evaluate.report.metric_error import MetricError
from audiollm.evaluate.report.store import RowStore
from audiollm.evaluate.speech.clips import Advance
from audiollm.evaluate.subjects.protocols import SamplingAnswerer, Subject
from audiollm.failures import note_success


@dataclass(frozen=True)
class ReplySampling:
    """How replies are sampled."""

    samples: int = 1
    """Replies to each question."""
    temperature: float = 0.0
    """0: the likeliest words."""
    together: int = 1
    """Questions that are answered at a time."""
    seed: int = 0


def check_sampling(sampling: ReplySampling, model: object) -> SamplingAnswerer:
    """Refuse a sampling that makes no sense, and a model that cannot sample.

    Raises:
        ConfigError: several samples at temperature 0, or a model without `answer_many`.
    """
    if sampling.samples > 1 and sampling.temperature <= 0:
        raise ConfigError(
            "all samples would be the same at temperature 0", "--samples", "give --temperature 1"
        )
    if not isinstance(model, SamplingAnswerer):
        raise ConfigError(
            f"{type(model).__name__} answers one question at a time, at temperature 0",
            "--samples, --temperature, --batch",
            "give a model's folder, or an object with answer_many(recordings, questions, seeds, temperature)",
        )
    return model


def sample_all(
    subject: Subject, inquiries: Sequence[Inquiry], sampling: ReplySampling, store: RowStore, advance: Advance
) -> dict[str, list[Reply]]:
    """All samples of the reply to each inquiry, by id; those of an earlier run are kept.

    Raises:
        ConfigError: see `check_sampling`.
    """
    model = check_sampling(sampling, subject.model)
    replies: dict[str, list[Reply]] = {}
    waiting = iter(inquiries)
    while block := list(islice(waiting, sampling.together)):
        replies |= _sample_block(model, subject.fingerprint, block, sampling, store)
        for inquiry in block:
            advance(inquiry.id)
    return replies


def majority_replies(
    questions: Sequence[Question], replies: Mapping[str, Sequence[Reply]]
) -> dict[str, Reply]:
    """For each question the first reply that names the option which most of its replies name.

    Of options with as many votes the one that was named first wins. Where no reply names one, it is the first reply.
    """
    majority: dict[str, Reply] = {}
    for question in questions:
        question_replies = replies[question.id]
        votes = [
            None if reply.problem else read_choice(reply.text, question.choices) for reply in question_replies
        ]
        counts = Counter(vote for vote in votes if vote is not None)
        winner = counts.most_common(1)[0][0] if counts else votes[0]
        majority[question.id] = question_replies[votes.index(winner)]
    return majority


def _sample_block(
    model: SamplingAnswerer,
    fingerprint: str,
    block: Sequence[Inquiry],
    sampling: ReplySampling,
    store: RowStore,
) -> dict[str, list[Reply]]:
    replies: dict[str, list[Reply | None]] = {}
    work: list[tuple[Inquiry, int, Any, list[Any]]] = []
    for inquiry in block:
        try:
            keys = [
                _sampled_reply_key(fingerprint, inquiry, sampling, number)
                for number in range(sampling.samples)
            ]
            rows = [store.get(*key) for key in keys]
            replies[inquiry.id] = [None if row is None else Reply(str(row["reply"])) for row in rows]
            if None not in rows:
                note_success("the model")
            else:
                wave = load_clip(inquiry.path, inquiry.start_s, inquiry.end_s)
                work += [(inquiry, n, wave, keys[n]) for n, row in enumerate(rows) if row is None]
        except MetricError as error:
            replies[inquiry.id] = [Reply(problem=error.reason)] * sampling.samples
    if work:
        texts = _sample_answers(model, work, sampling)
        for (inquiry, number, _, key), reply in zip(work, texts, strict=True):
            replies[inquiry.id][number] = reply
            if not reply.problem:
                store.add({"id": inquiry.id, "path": str(inquiry.path), "reply": reply.text}, *key)
    return {
        id: [reply for reply in inquiry_replies if reply is not None]
        for id, inquiry_replies in replies.items()
    }


def _sample_answers(
    model: SamplingAnswerer, work: Sequence[tuple[Inquiry, int, Any, list[Any]]], sampling: ReplySampling
) -> list[Reply]:
    waves, questions = [wave for _, _, wave, _ in work], [inquiry.question for inquiry, _, _, _ in work]
    seeds = [_reply_seed(sampling.seed, inquiry.id, number) for inquiry, number, _, _ in work]
    try:
        with failures_of("the model"):  # whatever it raises is its result for this recording
            return [Reply(text) for text in model.answer_many(waves, questions, seeds, sampling.temperature)]
    except MetricError as error:
        groups = [list(group) for _, group in groupby(work, key=lambda item: item[0].id)]
        if len(groups) > 1:  # and no result for the others of its batch
            return [reply for group in groups for reply in _sample_answers(model, group, sampling)]
        return [Reply(problem=error.reason)] * len(work)


def _sampled_reply_key(fingerprint: str, inquiry: Inquiry, sampling: ReplySampling, number: int) -> list[Any]:
    span = [digest(inquiry.path), inquiry.start_s, inquiry.end_s, inquiry.question]
    return ["sampled reply", fingerprint, *span, sampling.temperature, sampling.seed, number]


def _reply_seed(seed: int, id: str, number: int) -> int:
    """A seed that depends on neither the order of the questions nor the batches."""
    return int.from_bytes(hashlib.sha256(f"{seed} {number} {id}".encode()).digest()[:4], "little")
