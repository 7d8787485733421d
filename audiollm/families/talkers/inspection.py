"""The rows of a talker's sample as `inspect` shows them."""

from __future__ import annotations

import torch

from audiollm.data.inspection import StreamRow
from audiollm.families.talkers.kind import TalkerKind
from audiollm.families.talkers.rows import NONE, SpeechRows


def speech_rows(kind: TalkerKind, answer: SpeechRows) -> list[StreamRow]:
    """Every row of a prompt with its answer: the word, the mark or the codes; targets stand in the row that they are,
    an end that is no row in one of its own.

    The weight of a target is its share in the mean of its decoder's loss, that of the depth decoder times its weight.
    """
    weights, learned = _target_weights(kind, answer), _learned_places(kind, answer)
    vectors = {row for row, _ in answer.vectors}
    rows = []
    for position in range(answer.num_rows):
        text, first, rest = (
            int(answer.text_L[position]),
            int(answer.first_L[position]),
            answer.rest_LJ[position],
        )
        is_frame = bool(rest[0] != NONE)
        word, mark = kind.readable(text, first)
        token = " + ".join(filter(None, [word, "" if is_frame else mark, "vector" * (position in vectors)]))
        codes = tuple(kind.marks.get(code, str(code)) for code in (first, *rest.tolist())) if is_frame else ()
        targets = tuple((position, book) in learned for book in range(max(1, len(codes))))
        rows.append(
            StreamRow(
                position,
                ("audio out" if any(targets) else "audio in") if is_frame else "text",
                max(text, 0),
                token or "<frame>",
                codes,
                targets,
                tuple(weights[min(book, 1)] if target else 0.0 for book, target in enumerate(targets)),
            )
        )
    if (answer.num_rows, 0) in learned:
        codes_J = [code for code in answer.target_FJ[-1].tolist() if code != NONE]
        rows.append(
            StreamRow(
                answer.num_rows, "audio out", 0, "<end>", ("EOS", *map(str, codes_J)),
                (True,) * (1 + len(codes_J)), (weights[0], *[weights[1]] * len(codes_J)),
            )
        )  # fmt: skip
    return rows


def _target_weights(kind: TalkerKind, answer: SpeechRows) -> tuple[float, float]:
    """The weight of a target of the first codebook, and of another."""
    firsts = len(answer.target_F)
    if kind.depth_weight is None:
        return (1 / max(1, answer.num_targets),) * 2
    return 1 / max(1, firsts), kind.depth_weight / max(1, answer.num_targets - firsts)


def _learned_places(kind: TalkerKind, answer: SpeechRows) -> set[tuple[int, int]]:
    """The row and the codebook of each target."""
    target_FK = torch.cat([answer.target_F[:, None], answer.target_FJ], dim=1)
    frame_T, book_T = (target_FK != NONE).nonzero(as_tuple=True)
    row_T = answer.source_F[frame_T] + 1 + kind.delay * book_T
    return set(zip(row_T.tolist(), book_T.tolist(), strict=True))
