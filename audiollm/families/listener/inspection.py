"""Samples as a listener reads them, token by token, without its weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from audiollm.data.inspection import StreamRow
from audiollm.data.records.source import LoadedSample
from audiollm.data.records.video_clips import PictureReader, PictureSettings
from audiollm.families.listener.encoding import EncodedAnswer, encode_answers
from audiollm.families.listener.prompts import end_tokens, prompted_answers
from audiollm.models.audio_llms.inputs import placeholder_ids
from audiollm.models.audio_llms.loading import load_inputs


def rows_of_answers(
    folder: Path, loaded: LoadedSample, answers: Sequence[int], place: str
) -> list[list[StreamRow]]:
    """Return the rows of a prompt with each of some answers, as `ModelFolder.sample_rows` does.

    A token that stands for sound or pictures is a row of features; the weight of a target is its share in the mean over
    the answer's tokens.

    Raises:
        BadSample: the model cannot take the sample.
        ConfigError: the folder holds no processor that loads.
    """
    inputs = load_inputs(folder)
    pictures = PictureSettings.beside(folder)
    reader = None if pictures is None else PictureReader(pictures)
    ends = end_tokens(inputs.generation_config, inputs.processor, folder)
    prompted = prompted_answers(inputs.processor, reader, loaded, loaded, answers, place)
    stand_ins = frozenset(placeholder_ids(inputs.config))
    return [
        _list_stream_rows(inputs.processor.tokenizer, encoded, stand_ins)
        for encoded in encode_answers(inputs.processor, ends, prompted)
    ]


def _list_stream_rows(tokenizer: Any, encoded: EncodedAnswer, stand_ins: frozenset[int]) -> list[StreamRow]:
    first_target = encoded.num_tokens - encoded.num_answer_tokens
    return [
        StreamRow(
            position=position,
            kind="features" if token in stand_ins else "text",
            text_id=token,
            token=json.dumps(tokenizer.decode([token]), ensure_ascii=False)[1:-1],
            codes=(),
            is_target=(position >= first_target,),
            weights=(1 / encoded.num_answer_tokens if position >= first_target else 0.0,),
        )
        for position, token in enumerate(encoded.tokens["input_ids"].tolist())
    ]
