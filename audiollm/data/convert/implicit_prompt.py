"""The prompt that two answers begin with: conversations and texts in which prompt and answer are one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


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
