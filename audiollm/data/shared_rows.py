"""Rows that streams begin with alike, such as the prompt of several answers: a pack computes them once.

A row depends on itself and on those before it, so two streams that begin with the same inputs have the same hidden
states there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from torch import Tensor

from audiollm.data.chat.template import Kind, TokenStream


def shared_lengths(streams: Sequence[TokenStream]) -> list[int]:
    """Return how many rows each stream has in common with the one before it, from the first row on.

    Rows of features are the same where their windows are the same objects.
    """
    return [0, *(_count_shared_rows(*pair) for pair in pairwise(streams))] if streams else []


def without_first_rows(stream: TokenStream, count: int) -> TokenStream:
    """Return the stream without its first rows and their windows of features; none of these is cut in two."""
    if not count:
        return stream
    rows = int((stream.kinds_S[:count] == Kind.FEATURE).sum())
    remaining_windows = list(stream.features)
    while rows > 0:
        rows -= remaining_windows.pop(0).rows
    return replace(
        stream,
        text_ids_S=stream.text_ids_S[count:],
        codes_SK=stream.codes_SK[count:],
        kinds_S=stream.kinds_S[count:],
        text_targets_S=stream.text_targets_S[count:],
        audio_targets_SK=stream.audio_targets_SK[count:],
        features=tuple(remaining_windows),
    )


def _count_shared_rows(first: TokenStream, second: TokenStream) -> int:
    shorter_length = min(len(first), len(second))
    is_same_S = (first.kinds_S[:shorter_length] == second.kinds_S[:shorter_length]) & (
        first.text_ids_S[:shorter_length] == second.text_ids_S[:shorter_length]
    )
    is_same_S &= (first.codes_SK[:shorter_length] == second.codes_SK[:shorter_length]).all(dim=1)
    return _first_rows(first, second, _leading(is_same_S))


def _first_rows(first: TokenStream, second: TokenStream, count: int) -> int:
    """The same count, or where the first window that the streams do not share begins."""
    shared_rows = 0
    for window, like in zip(first.features, second.features, strict=False):
        if window.content is not like.content:
            break
        shared_rows += window.rows
    is_heard_S = first.kinds_S[:count] == Kind.FEATURE
    beyond = (is_heard_S.cumsum(0) > shared_rows).nonzero()
    return int(beyond[0]) if len(beyond) else count


def _leading(flag_S: Tensor) -> int:
    """The number of flags that are set before the first that is not."""
    return int(flag_S.long().cumprod(0).sum())
