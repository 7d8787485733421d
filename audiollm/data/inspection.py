"""A token stream as rows that a person can read: kind, token, target or masked, weight.

Shapes: S positions, K codebooks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from audiollm.data.chat.delay import IGNORE
from audiollm.data.chat.template import Kind, Template, TokenStream
from audiollm.data.packing import pack

KIND_NAMES = {
    Kind.TEXT: "text",
    Kind.AUDIO_IN: "audio in",
    Kind.AUDIO_OUT: "audio out",
    Kind.FEATURE: "features",
}


@dataclass(frozen=True)
class StreamRow:
    """A position of a sample. `is_target` and `weights` have one entry for text and features, and K for audio codes."""

    position: int
    kind: str
    text_id: int
    token: str
    """Readable: control characters escaped; of audio the placeholder's name."""
    codes: tuple[str, ...]
    """Numbers, `BOS` or `EOS`, one a codebook; empty for text and features."""
    is_target: tuple[bool, ...]
    weights: tuple[float, ...]
    """Weights of the targets at this position when the sample is packed alone; 0 where masked."""


@dataclass(frozen=True)
class KindSummary:
    """Totals over all rows of a kind."""

    kind: str
    rows: int
    targets: int
    """Text tokens, or codes."""
    eos_targets: int
    weight: float


def stream_rows(template: Template, stream: TokenStream) -> list[StreamRow]:
    """Every position of the stream."""
    text_weights_S, audio_weights_SK = target_weights(stream)
    marks = {template.audio_bos: "BOS", template.audio_eos: "EOS"}
    columns = zip(
        stream.kinds_S.tolist(),
        stream.text_ids_S.tolist(),
        stream.codes_SK.tolist(),
        (stream.text_targets_S != IGNORE).tolist(),
        (stream.audio_targets_SK != IGNORE).tolist(),
        text_weights_S.tolist(),
        audio_weights_SK.tolist(),
        strict=True,
    )
    rows = []
    for position, (kind, text_id, codes, text, audio, text_weight, audio_weights) in enumerate(columns):
        has_codes = kind in (Kind.AUDIO_IN, Kind.AUDIO_OUT)
        rows.append(
            StreamRow(
                position=position,
                kind=KIND_NAMES[Kind(kind)],
                text_id=text_id,
                token=readable_token(template.tokenizer, text_id),
                codes=tuple(marks.get(code, str(code)) for code in codes) if has_codes else (),
                is_target=tuple(audio) if has_codes else (text,),
                weights=tuple(audio_weights) if has_codes else (text_weight,),
            )
        )
    return rows


def summarize_stream(template: Template, stream: TokenStream) -> list[KindSummary]:
    """Rows, targets and weight of each kind that the stream has."""
    text_weights_S, audio_weights_SK = target_weights(stream)
    summaries = []
    for kind, name in KIND_NAMES.items():
        chosen_S = stream.kinds_S == kind
        if not bool(chosen_S.any()):
            continue
        has_codes = kind in (Kind.AUDIO_IN, Kind.AUDIO_OUT)
        targets = (stream.audio_targets_SK if has_codes else stream.text_targets_S)[chosen_S]
        summaries.append(
            KindSummary(
                kind=name,
                rows=int(chosen_S.sum()),
                targets=int((targets != IGNORE).sum()),
                eos_targets=int((targets == template.audio_eos).sum()) if has_codes else 0,
                weight=float((audio_weights_SK if has_codes else text_weights_S)[chosen_S].sum()),
            )
        )
    return summaries


def target_weights(stream: TokenStream) -> tuple[Tensor, Tensor]:
    """The weight of each target, `[S]` of text and `[S, K]` of audio, at the target's own position.

    They are `pack`'s, undone: there a row holds the target of the position after it, and text rows come first.
    """
    batch = pack([stream])
    place_of_row = batch.row_of_S.argsort()
    text_S = torch.zeros(len(stream), dtype=torch.float64)
    audio_SK = torch.zeros(stream.codes_SK.shape, dtype=torch.float64)
    for index, weights, target in (
        (batch.text_target_index, batch.text_weights, text_S),
        (batch.audio_target_index, batch.audio_weights_XK, audio_SK),
    ):
        # idle rows, which pack may add, have no weight and stand after the stream's
        places = place_of_row[index] + 1
        is_in_stream = places < len(stream)
        target.index_add_(0, places[is_in_stream], weights[is_in_stream].double())
    return text_S, audio_SK


def readable_token(tokenizer: Tokenizer, text_id: int) -> str:
    """The text of one token, control characters escaped; the vocabulary's own name for a part of a character."""
    text: str = tokenizer.decode([text_id], skip_special_tokens=False)
    if not text or "\ufffd" in text:
        text = tokenizer.id_to_token(text_id) or f"id {text_id}"
    escaped = json.dumps(text, ensure_ascii=False)[1:-1].replace('\\"', '"').replace("\\\\", "\\")
    return "".join(c if c.isprintable() or c == " " else f"\\u{ord(c):04x}" for c in escaped)


def elide(rows: Sequence[StreamRow], ends: int) -> Iterator[StreamRow | list[StreamRow]]:
    """The rows with the middle of long audio as one list: `ends` rows stay on either side of it."""
    start = 0
    while start < len(rows):
        stop = start
        while stop < len(rows) and rows[stop].kind == rows[start].kind:
            stop += 1
        if rows[start].kind != KIND_NAMES[Kind.TEXT] and stop - start > 2 * ends + 1:
            yield from rows[start : start + ends]
            yield list(rows[start + ends : stop - ends])
            yield from rows[stop - ends : stop]
        else:
            yield from rows[start:stop]
        start = stop
