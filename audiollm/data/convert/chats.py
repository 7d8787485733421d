"""Chats of others, with audio in them or not: Alpaca's instructions and ShareGPT's (or OpenAI's) conversations.

Audio files are listed in `audios` (or `audio`) and stand where a text says `<audio>`; without such a mark they come
before the first user's text. `kto_tag` goes to the metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from audiollm.data.convert.request import (
    ConversionRequest,
    SourceRows,
    bad_row,
    bad_rows_sample,
    known_split,
    row_id,
)
from audiollm.data.convert.turns import SourceTurn, messages_of, turns_of_conversation, turns_of_instruction
from audiollm.data.records.sample import AudioPart, Sample
from audiollm.data.tables.columns import is_missing
from audiollm.data.tables.rows import read_json_rows
from audiollm.data.tables.table import BadRow
from audiollm.errors import BadSample, first_problem


def alpaca(request: ConversionRequest) -> SourceRows:
    """`instruction`, `input`, `output`, and if given `system`, `history`, `audios`, `kto_tag`."""
    return _convert(request, turns_of_instruction)


def sharegpt(request: ConversionRequest) -> SourceRows:
    """`conversations` of `from` and `value`, or `messages` of `role` and `content`; `system`, `audios`, `kto_tag`."""
    return _convert(request, turns_of_conversation)


# Private


def _convert(
    request: ConversionRequest, turns: Callable[[Mapping[str, Any]], list[SourceTurn]]
) -> SourceRows:
    rows = read_json_rows(request.source)

    def results() -> Iterator[Sample | BadSample]:
        for place, record in rows.rows:
            if isinstance(record, BadRow):
                yield bad_rows_sample(place, record)
                continue
            label = row_id(request.source, place)
            id = str(record["id"] if not is_missing(record.get("id"), is_name=True) else label)
            try:
                yield _convert_chat(request, id, record, turns(record))
            except ValidationError as error:
                yield bad_row(place, id, first_problem(error))
            except KeyError as error:
                yield bad_row(place, id, f"has no {error}")
            except (TypeError, AttributeError) as error:
                yield bad_row(place, id, f"has another form than such chats have ({error})")
            except ValueError as error:
                yield bad_row(place, id, str(error))

    return SourceRows(len(rows.rows), results(), rows.notes)


def _convert_chat(
    request: ConversionRequest, id: str, record: Mapping[str, Any], turns: Sequence[SourceTurn]
) -> Sample:
    listed = record.get("audios") or record.get("audio") or []
    sounds = [request.audio_part(str(name)) for name in ([listed] if isinstance(listed, str) else listed)]
    messages = messages_of(turns, sounds, lambda value: _make_file_part(request, value))
    answers = [message for message in messages if message.role == "assistant"]
    if not any(message.weight for message in answers):
        reason = "every assistant's turn has weight 0" if answers else "no assistant's turn"
        raise ValueError(f"{reason}: nothing to learn from it")
    has_audio = any(
        isinstance(content_part, AudioPart) for message in messages for content_part in message.content
    )
    task = request.task.name if request.task else ("audio_qa" if has_audio else "text")
    return Sample(id=id, messages=messages, task=task, metadata=_collect_chat_metadata(request, record))


def _make_file_part(request: ConversionRequest, value: Any) -> AudioPart:
    if not isinstance(value, str) or value.startswith("data:"):
        raise ValueError("audio that is no file: save it to one first")
    return request.audio_part(value)


def _collect_chat_metadata(request: ConversionRequest, record: Mapping[str, Any]) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    if record.get("kto_tag") is not None:
        if not isinstance(record["kto_tag"], bool):
            raise ValueError(f"kto_tag must be true or false, not {record['kto_tag']!r}")
        metadata["kto_tag"] = record["kto_tag"]
    if not is_missing(record.get("split"), is_name=True):
        metadata["split"] = known_split(str(request.source), str(record["split"]))
    return metadata
