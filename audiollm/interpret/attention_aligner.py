"""An aligner built in: where a model that translates whole recordings looks while it writes each word.

The model reads the recording and its translation in one forward pass. For each unit of the translation, the attention
of the rows that predict its tokens over the rows of the recording is averaged over heads and upper layers. Each heard
row is then standardised over the units (as Whisper's word timing does), which removes rows that every word looks at;
the source of a unit is over where its smoothed attention, behind its largest value, falls below half of that.
Simultaneous translation by such attention is AlignAtt (arXiv 2305.11408).

Shapes: N units or tokens of the translation, T heard rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from audiollm.audio import AudioError, load
from audiollm.data.records.aligned_recording import AlignedRecording, target_units
from audiollm.errors import BadSample
from audiollm.families.interpreting import InterpretingModel
from audiollm.interpret.aligners import NOT_ALIGNED

SMOOTHED_ROWS = 3
"""Heard rows that are averaged before the largest one is looked for."""


class AttentionAligner:
    """Aligns by the attention of a model that was trained to translate whole recordings.

    Args:
        prompt: the system message of its training; empty for none.
        layers: how many of the last layers are looked at; None: the upper half.
        min_logprob: mean log-probability per token below which a translation is not one of its recording; None: none.
    """

    def __init__(
        self,
        model: InterpretingModel,
        prompt: str,
        layers: int | None = None,
        min_logprob: float | None = None,
    ) -> None:
        self._model, self._prompt, self._layers, self._min_logprob = model, prompt, layers, min_logprob

    def source_ends(self, recording: AlignedRecording, path: Path) -> list[float]:
        """Return the end of each unit's source, as `Aligner` says."""
        try:
            waveform = load(path, mono=True)
        except AudioError as error:
            raise BadSample(
                recording.audio, recording.id, f"audio: {error.reason}", "cannot be read"
            ) from None
        try:
            attention = self._model.heard_attention(self._prompt, waveform, recording.target, self._layers)
        except ValueError as error:
            raise BadSample(recording.audio, recording.id, str(error), NOT_ALIGNED) from None
        if self._min_logprob is not None and attention.logprob < self._min_logprob:
            logprob = f"{attention.logprob:.2f} nats per token, below {self._min_logprob:g}"
            reason = f"the model gives the translation {logprob}"
            raise BadSample(recording.audio, recording.id, reason, NOT_ALIGNED)
        units_NT = unit_attention(attention.tokens_NT, attention.offsets, recording.target)
        rows = attended_rows(units_NT)
        row_s = waveform.duration_s / attention.heard_rows
        return [min(waveform.duration_s, (row + 1) * row_s) for row in rows]


def unit_attention(tokens_NT: Tensor, offsets: Sequence[tuple[int, int]], target: str) -> Tensor:
    """Return the mean attention of the tokens of each unit of a text, `[N, T]`."""
    rows = []
    units = target_units(target)
    for unit in units:
        end = unit.start + len(unit.text)
        token_places = [
            place for place, (first, last) in enumerate(offsets) if first < end and last > unit.start
        ]
        rows.append(tokens_NT[token_places].mean(0) if token_places else torch.zeros_like(tokens_NT[0]))
    return torch.stack(rows)


def attended_rows(units_NT: Tensor) -> list[int]:
    """Return for each unit the last of the heard rows at which it looks, after rows that all look at are levelled.

    These are the row with the largest value and those behind it with at least half of it.
    """
    levelled_NT = units_NT.double()
    if len(units_NT) > 1:
        deviation_T = levelled_NT.std(0, correction=0)
        levelled_NT = (levelled_NT - levelled_NT.mean(0)) / deviation_T.clamp(min=1e-12)
    padded_N1T = torch.nn.functional.pad(levelled_NT[:, None], (SMOOTHED_ROWS // 2,) * 2, mode="replicate")
    smoothed_NT = torch.nn.functional.avg_pool1d(padded_N1T, SMOOTHED_ROWS, 1)[:, 0]
    last_rows = []
    for values_T in smoothed_NT:
        row = int(values_T.argmax())
        below = (values_T[row:] < values_T[row] / 2).nonzero()
        last_rows.append(row + int(below[0]) - 1 if len(below) else len(values_T) - 1)
    return last_rows
