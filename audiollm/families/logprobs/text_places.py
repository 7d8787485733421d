"""Texts of sampled tokens, and the tokens that complete given parts of a text. Nothing is encoded again."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from audiollm.generation.engine.request import SampledTokens

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def actions_at(
    sampled: SampledTokens,
    text: str,
    ends: Sequence[int],
    decode: Callable[[list[int]], str],
    opens_speech: int | None = None,
) -> list[int]:
    """Return, for each number of characters, the action that completes so much of the text.

    Prefixes of the ids are decoded, so that places are exact where a token holds a part of a character (byte-level
    BPE) or parts of two words. A token that holds the ends of two places counts for both.

    Args:
        text: the answer's words, as `decode` gives them for all ids but for white space around them.
        ends: numbers of characters of `text`.
        decode: ids -> words, without control tokens.
        opens_speech: id of the token behind which a stretch of speech stands.

    Returns:
        Numbers of actions, from 0; the last one for places beyond the text.
    """
    ids = sampled.ids_N.tolist()
    if not ids:
        return [0] * len(ends)
    last_actions = _last_actions(sampled, opens_speech)
    full_text = decode(ids)
    offset = max(0, full_text.find(text))

    def length(count: int) -> int:
        """Whole characters of the first tokens."""
        return len(decode(ids[:count]).rstrip(REPLACEMENT) if count < len(ids) else full_text)

    counts = [bisect_left(range(len(ids)), offset + end, lo=1, key=length) for end in ends]
    return [last_actions[min(count, len(ids)) - 1] for count in counts]


def pieces_of(
    sampled: SampledTokens,
    decode: Callable[[list[int]], str],
    name: Callable[[int], str | None],
    opens_speech: int | None = None,
) -> list[str | int]:
    """Return the text of each drawn token, and for each stretch of speech the number of its actions, in order.

    Strings count 1 each, so that they and the numbers add up to `num_actions`. A character of several tokens stands
    with the last of them; a control token is shown by its name.

    Args:
        decode: ids -> words, without control tokens.
        name: id -> the token as the vocabulary writes it.
        opens_speech: id of the token behind which a stretch of speech stands.
    """
    ids = sampled.ids_N.tolist()
    speech = [codes.numel() + ended for codes, ended in zip(sampled.codes, sampled.ended, strict=True)]
    pieces: list[str | int] = []
    # first tokens of the last whole piece, from which words are decoded for the space between, and of the next one
    start = first = 0
    alone = ""
    for number, (token, is_action) in enumerate(zip(ids, sampled.is_action_N.tolist(), strict=True)):
        alone_before, alone = alone, decode([token])
        if alone:
            before = alone_before if start == number - 1 else decode(ids[start:number])
            text = decode(ids[start : number + 1])
            piece = "" if text.endswith(REPLACEMENT) else text[len(before.rstrip(REPLACEMENT)) :]
            if not text.endswith(REPLACEMENT):
                start, first = first, number + 1
        else:
            piece, first = name(token) or "", number + 1
        if is_action:
            pieces.append(piece)
        if token == opens_speech and speech:
            pieces.append(speech.pop(0))
    return pieces + speech


def _last_actions(sampled: SampledTokens, opens_speech: int | None) -> list[int]:
    """The number of the last action at or before each text token, at least 0."""
    speech = [codes.numel() + ended for codes, ended in zip(sampled.codes, sampled.ended, strict=True)]
    last_actions, number = [], -1
    for token, is_action in zip(sampled.ids_N.tolist(), sampled.is_action_N.tolist(), strict=True):
        number += is_action
        last_actions.append(max(0, number))
        if token == opens_speech and speech:
            number += speech.pop(0)
    return last_actions
