"""Pieces of one text as one clip.

Shapes: N samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pipelines.annotate.synthesizers.synthesizer import SynthesizedSpeech


def join_speech(pieces_N: Sequence[NDArray[np.float32]], sample_rate: int) -> SynthesizedSpeech:
    """Join pieces with the pause between sentences; a single piece stays as it is."""
    if len(pieces_N) == 1:
        return SynthesizedSpeech(pieces_N[0], sample_rate)
    import torch

    from audiollm.generation.speaking.long_text import SENTENCE_PAUSE_S, join_pieces

    pauses_s = [*[SENTENCE_PAUSE_S] * (len(pieces_N) - 1), 0.0]
    joined_1N = join_pieces([torch.from_numpy(piece_N)[None] for piece_N in pieces_N], pauses_s, sample_rate)
    return SynthesizedSpeech(joined_1N[0].numpy(), sample_rate)
