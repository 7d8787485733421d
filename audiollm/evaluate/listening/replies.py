"""Replies of models to questions about recordings: obtained here, or read from a file of replies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from audiollm.audio import Waveform
from audiollm.data.records.sample import Message, TextPart
from audiollm.data.tables.columns import is_missing, rename_columns
from audiollm.data.tables.rows import checked_rows
from audiollm.errors import ConfigError
from audiollm.evaluate.judges.judging import Recognizer, digest, failures_of, load_clip
from audiollm.evaluate.report.metric_error import MetricError
from audiollm.evaluate.report.store import RowStore
from audiollm.evaluate.speech.clips import Advance
from audiollm.evaluate.subjects.protocols import BatchConversant, Conversant, Subject
from audiollm.failures import note_success

_ID_KEYS = ("id", "path", "audio")
"""Keys of a reply that name its recording, the first that is there."""


@dataclass(frozen=True)
class Reply:
    """The text of a reply, or why there is none."""

    text: str = ""
    problem: str = ""


@dataclass(frozen=True)
class Inquiry:
    """A question about a recording, or a span of it."""

    id: str
    path: Path
    question: str
    start_s: float = 0.0
    end_s: float | None = None
    messages: tuple[Message, ...] = ()
    """The chat with recording and question that a `Conversant` is asked in. Empty: the question alone is asked."""


Write = Callable[[Waveform, Inquiry], str]
"""Writes the reply to an inquiry about its sound."""


def ask_all(
    write: Write,
    fingerprint: str,
    inquiries: Sequence[Inquiry],
    store: RowStore,
    advance: Advance,
    subject: str = "the model",
) -> dict[str, Reply]:
    """The replies by id. Replies of an earlier run are kept; failed ones are asked for again.

    Args:
        subject: name of what replies, for errors.
    """
    replies: dict[str, Reply] = {}
    for inquiry in inquiries:
        replies[inquiry.id] = _ask_inquiry(write, fingerprint, inquiry, store, subject)
        advance(inquiry.id)
    return replies


def ask_in_batches(
    subject: Subject,
    inquiries: Sequence[Inquiry],
    store: RowStore,
    advance: Advance,
    batch_size: int,
) -> dict[str, Reply]:
    """The replies to inquiries with chats, as `ask_all` has them, several at a time.

    Where a batch fails, its inquiries are asked one by one, so that each failure is that of its own recording.

    Raises:
        ConfigError: several at a time, of a model that is no `BatchConversant`.
    """
    if batch_size == 1:
        return ask_all(by_answerer(subject), subject.fingerprint, inquiries, store, advance)
    model, write = subject.model, by_answerer(subject)
    if not isinstance(model, BatchConversant):
        raise ConfigError(f"{subject.name} answers one question at a time", "batch_size", "set batch_size: 1")
    replies: dict[str, Reply] = {}
    waiting = iter(inquiries)
    while batch := list(islice(waiting, batch_size)):
        fresh = [inquiry for inquiry in batch if not _has_reply(subject.fingerprint, inquiry, store)]
        texts = _batch_replies(model, fresh)
        known_text = partial(_known_text, texts)
        for inquiry in batch:
            ask = known_text if inquiry.id in texts else write
            replies[inquiry.id] = _ask_inquiry(ask, subject.fingerprint, inquiry, store, "the model")
            advance(inquiry.id)
    return replies


def by_answerer(subject: Subject) -> Write:
    """Replies by an `Answerer`; a `Conversant` is given the chat where the inquiry has one."""

    def write(wave: Waveform, inquiry: Inquiry) -> str:
        if inquiry.messages and isinstance(subject.model, Conversant):
            return str(subject.model.reply(inquiry.messages, wave))
        return str(subject.model.answer(wave, inquiry.question))

    return write


def by_recognizer(judge: Recognizer) -> Write:
    """Replies by a recognizer; the question is ignored."""
    return lambda wave, inquiry: judge.recognize(wave.samples_CN, wave.sample_rate)


def read_replies(path: Path, ids: Sequence[str], keys: Sequence[str]) -> dict[str, Reply]:
    """Replies from a list of records with `id` and one of `keys`; a missing reply is a `Reply` with a problem.

    Raises:
        ConfigError: the list cannot be read, a record has no id or none of the keys, or not one id is known.
    """
    replies: dict[str, Reply] = {}
    for where, row in checked_rows(path, (*_ID_KEYS, *keys)).rows:
        values = rename_columns(row, (*_ID_KEYS, *keys))
        key = next((key for key in keys if key in values), None)
        named = (values[name] for name in _ID_KEYS if not is_missing(values.get(name), is_name=True))
        id = next(map(str, named), None)
        if key is None or id is None:
            raise ConfigError(
                "no id, or no reply", where, f"a record has the keys id and {' or '.join(keys)}"
            )
        text = values[key]
        if id in replies:
            raise ConfigError(f"{id}: a second reply of this id", where, "give each recording one")
        replies[id] = Reply(problem="no reply") if text is None else Reply(str(text))
    if not replies.keys() & set(ids):
        raise ConfigError(
            f"not one of its ids is asked for; the first is {next(iter(replies), '(none)')!r}",
            str(path),
            f"the ids are those of the list, {ids[0]!r} for example",
        )
    return {id: replies.get(id, Reply(problem="no reply")) for id in ids}


def _ask_inquiry(write: Write, fingerprint: str, inquiry: Inquiry, store: RowStore, subject: str) -> Reply:
    try:
        depends_on = _reply_key(fingerprint, inquiry)
        earlier_row = store.get(*depends_on)
        if earlier_row is not None:
            note_success(subject)
            return Reply(str(earlier_row["reply"]))
        wave = load_clip(inquiry.path, inquiry.start_s, inquiry.end_s)
    except MetricError as error:
        return Reply(problem=error.reason)
    try:
        with failures_of(subject):  # whatever it raises is its result for this recording
            text = write(wave, inquiry)
    except MetricError as error:
        return Reply(problem=error.reason)
    store.add({"id": inquiry.id, "path": str(inquiry.path), "reply": text}, *depends_on)
    return Reply(text)


def _reply_key(fingerprint: str, inquiry: Inquiry) -> list[Any]:
    """What a reply depends on.

    Raises:
        MetricError: the recording is not there.
    """
    span = [digest(inquiry.path), inquiry.start_s, inquiry.end_s, inquiry.question]
    return ["reply", fingerprint, *span, *_wording(inquiry.messages)]


def _has_reply(fingerprint: str, inquiry: Inquiry, store: RowStore) -> bool:
    try:
        return store.get(*_reply_key(fingerprint, inquiry)) is not None
    except MetricError:
        return False


def _batch_replies(model: BatchConversant, inquiries: Sequence[Inquiry]) -> dict[str, str]:
    """Replies by id, of the recordings that can be read; none where the batch fails."""
    readable: list[tuple[Inquiry, Waveform]] = []
    for inquiry in inquiries:
        try:
            readable.append((inquiry, load_clip(inquiry.path, inquiry.start_s, inquiry.end_s)))
        except MetricError:
            continue  # its reply has this problem when it is asked alone
    if not readable:
        return {}
    try:
        texts = model.reply_many(
            [inquiry.messages for inquiry, _ in readable], [wave for _, wave in readable]
        )
    except Exception:
        return {}
    return {inquiry.id: text for (inquiry, _), text in zip(readable, texts, strict=True)}


def _known_text(texts: Mapping[str, str], wave: Waveform, inquiry: Inquiry) -> str:
    return texts[inquiry.id]


def _wording(messages: Sequence[Message]) -> list[Any]:
    """A chat as plain data: its texts, with None in the place of the recording."""
    return [
        [
            message.role,
            [
                content_part.text if isinstance(content_part, TextPart) else None
                for content_part in message.content
            ],
        ]
        for message in messages
    ]
