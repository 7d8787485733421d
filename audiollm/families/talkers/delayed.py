"""The delay pattern without a row of begin marks: codebook k of a clip stands k rows behind the first.

    codebook 0   a0 a1 a2 E  E
    codebook 1   B  b0 b1 b2 E
    codebook 2   B  B  c0 c1 c2

Targets are all codes and the end marks E, each chosen by the row before; begin marks B are forced in generation, and so
are no targets. Of a drawn answer the end is one action, the first E; the others follow from it.

Shapes: K codebooks, J = K - 1, T frames.
"""

from __future__ import annotations

import torch
from torch import Tensor

from audiollm.data.chat.delay import delay
from audiollm.families.talkers.kind import TalkerKind
from audiollm.families.talkers.rows import (
    NONE,
    SpeechRows,
    SpeechTargets,
    frame_rows,
    join_rows,
    with_targets,
)
from audiollm.families.talkers.turns import SpeechPrompt


class DelayedKind(TalkerKind):
    """A `TalkerKind` of a `DelayedTalker`."""

    depth_weight = None
    delay = 1
    begin: int
    """Entry of each codebook that stands before its first code."""
    num_codebooks: int

    def delayed_rows(self, codes_KT: Tensor) -> SpeechRows:
        """Rows of a clip, `T + K - 1`.

        Raises:
            ValueError: codes of another codec.
        """
        # codes beyond these would be marks, or entries of the next codebook
        if len(codes_KT) != self.num_codebooks or not bool(((codes_KT >= 0) & (codes_KT < self.begin)).all()):
            raise ValueError(
                f"codes of another codec: the model reads {self.num_codebooks} codebooks of {self.begin} codes"
            )
        # the first and the last row of Higgs Audio V2's pattern hold marks alone
        return frame_rows(delay(codes_KT.long(), self.begin, self.end)[1:-1].T)

    def answer_rows(
        self, prompt: SpeechPrompt, codes_KT: Tensor, ended: bool = True, is_sampled: bool = False
    ) -> SpeechRows:
        """See `TalkerKind.answer_rows`."""
        before = self.prompt_rows(prompt).rows
        rows = join_rows([before, self.delayed_rows(codes_KT)])
        codes_TK = codes_KT.T.long()
        blocks = [codes_TK]
        if ended and is_sampled:
            blocks.append(torch.tensor([[self.end, *[NONE] * (self.num_codebooks - 1)]]))
        elif ended:
            blocks.append(self._end_targets())
        targets_FK = torch.cat(blocks)
        span = SpeechTargets(before.num_rows, targets_FK[:, 0], targets_FK[:, 1:])
        return with_targets(rows, [span], is_sampled)

    def _end_targets(self) -> Tensor:
        """End marks `[J, K]` behind the last frame, as far as the rows reach: codebook k has J - k."""
        shape = (self.num_codebooks - 1, self.num_codebooks)
        has_mark_JK = torch.ones(shape, dtype=torch.bool).tril().flip(0)
        return torch.full(shape, NONE).masked_fill(has_mark_JK, self.end)
