"""Chats of others, with audio in them or not: Alpaca's instructions and ShareGPT's (or OpenAI's) conversations.

Audio files are listed in `audios` (or `audio`) and stand where a text says `<audio>`; without such a mark they come
before the first user's text. `kto_tag` goes to the metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from audiollm.data.convert.objects import read_objects
from audiollm.data.convert.request import ConversionRequest, SourceRows, bad_row
from audiollm.data.convert.turns import Turn, messages_of, turns_of_conversation, turns_of_instruction
from audiollm.data.records.sample import AudioPart, Sample
from audiollm.errors import BadSample


def alpaca(request: ConversionRequest) -> SourceRows:
    """`instruction`, `input`, `output`, and if given `system`, `history`, `audios`, `kto_tag`."""
    return _convert(request, turns_of_instruction)


def sharegpt(request: ConversionRequest) -> SourceRows:
    """`conversations` of `from` and `value`, or `messages` of `role` and `content`; `system`, `audios`, `kto_tag`."""
    return _convert(request, turns_of_conversation)


# Private


def _convert(request: ConversionRequest, turns: Callable[[Mapping[str, Any]], list[Turn]]) -> SourceRows:
    records = read_objects(request.source)

    def results() -> Iterator[Sample | BadSample]:
        for number, record in records:
            place = f"{request.source}{number}"
            if isinstance(record, BadSample):
                yield record
                continue
            id = str(record.get("id") or f"{request.source.stem}-{number.lstrip(':[').rstrip(']')}")
            try:
                yield _sample(request, id, record, turns(record))
            except ValidationError as error:
                yield bad_row(place, id, str(error.errors(include_url=False)[0]["msg"]))
            except KeyError as error:
                yield bad_row(place, id, f"has no {error}")
            except (TypeError, AttributeError) as error:
                yield bad_row(place, id, f"has another form than such chats have ({error})")
            except ValueError as error:
                yield bad_row(place, id, str(error))

    return SourceRows(len(records), results())


def _sample(request: ConversionRequest, id: str, record: Mapping[str, Any], turns: Sequence[Turn]) -> Sample:
    listed = record.get("audios") or record.get("audio") or []
    sounds = [request.audio_part(str(name)) for name in ([listed] if isinstance(listed, str) else listed)]
    messages = messages_of(turns, sounds, lambda value: _file(request, value))
    if not any(message.role == "assistant" for message in messages):
        raise ValueError("no assistant's turn: nothing to learn from it")
    has_audio = any(isinstance(part, AudioPart) for message in messages for part in message.content)
    task = request.task.name if request.task else ("audio_qa" if has_audio else "text")
    return Sample(id=id, messages=messages, task=task, metadata=_metadata(record))


def _file(request: ConversionRequest, value: Any) -> AudioPart:
    if not isinstance(value, str) or value.startswith("data:"):
        raise ValueError("audio that is no file: save it to one first")
    return request.audio_part(value)


def _metadata(record: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: record[key] for key in ("kto_tag", "split") if record.get(key) is not None}
    if not isinstance(kept.get("kto_tag", True), bool):
        raise ValueError(f"kto_tag must be true or false, not {kept['kto_tag']!r}")
    return kept
