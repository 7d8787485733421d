"""The rows of a talker's sample as `inspect` shows them."""

from __future__ import annotations

from audiollm.data.inspection import StreamRow
from audiollm.families.talkers.kind import TalkerKind
from audiollm.families.talkers.rows import NONE, SpeechRows


def speech_rows(kind: TalkerKind, answer: SpeechRows) -> list[StreamRow]:
    """Every row of a prompt with its answer: the word, the mark or the codes; targets stand in the row that they are,
    the end in a row of its own.

    The weight of a target is its share in the mean of its decoder's loss, that of the depth decoder times its weight.
    """
    others = int(answer.has_depth_F.sum()) * answer.target_FJ.shape[1]
    weights = 1 / max(1, len(answer.target_F)), kind.depth_weight / max(1, others)
    target_of = {int(row) + 1: number for number, row in enumerate(answer.source_F.tolist())}
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
        codes = (str(first), *map(str, rest.tolist())) if is_frame else ()
        learned = position in target_of
        count = max(1, len(codes))
        rows.append(
            StreamRow(
                position,
                ("audio out" if learned else "audio in") if is_frame else "text",
                max(text, 0),
                token or "<frame>",
                codes,
                (learned,) * count,
                (weights[0], *[weights[1]] * (count - 1)) if learned else (0.0,) * count,
            )
        )
    ended = [number for row, number in target_of.items() if row == answer.num_rows]
    for number in ended:
        codes_J = [code for code in answer.target_FJ[number].tolist() if code != NONE]
        rows.append(
            StreamRow(
                answer.num_rows, "audio out", 0, "<end>", ("EOS", *map(str, codes_J)),
                (True,) * (1 + len(codes_J)), (weights[0], *[weights[1]] * len(codes_J)),
            )
        )  # fmt: skip
    return rows
