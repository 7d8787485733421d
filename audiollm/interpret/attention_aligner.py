"""An aligner built in: where a model of ours that translates whole recordings looks while it writes each word.

The model reads the recording and its translation in one forward pass. For each unit of the translation, the attention
of the rows that predict its tokens over the rows of the recording is averaged over heads and upper layers. Each heard
row is then standardised over the units (as Whisper's word timing does), which removes rows that every word looks at;
the source of a unit is over where its smoothed attention, behind its largest value, falls below half of that.
Simultaneous translation by such attention is AlignAtt (arXiv 2305.11408).

Shapes: N units or tokens of the translation, T heard rows, S rows of the pass, Q rows that predict a token, H heads, G
key and value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from audiollm.audio import AudioError, load
from audiollm.data.chat.template import Kind
from audiollm.data.hearing.features import PartAudio, size_of
from audiollm.data.packing import PackedBatch, pack
from audiollm.data.records.aligned_recording import AlignedRecording, target_units
from audiollm.data.records.sample import AudioPart, Message, TextPart
from audiollm.errors import BadSample
from audiollm.generation.speaking.generator import Generator
from audiollm.interpret.aligners import NOT_ALIGNED
from audiollm.models.decoder import AttendPacked, Rows
from audiollm.models.dual_ffn import DualFFN

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
        self, generator: Generator, prompt: str, layers: int | None = None, min_logprob: float | None = None
    ) -> None:
        self._generator, self._prompt, self._min_logprob = generator, prompt, min_logprob
        count = generator.model.config.num_layers
        self._layers = range(count - min(count, layers or (count + 1) // 2), count)

    def source_ends(self, recording: AlignedRecording, path: Path) -> list[float]:
        """Return the end of each unit's source, as `Aligner` says."""
        try:
            waveform = load(path, mono=True)
        except AudioError as error:
            raise BadSample(
                recording.audio, recording.id, f"audio: {error.reason}", "cannot be read"
            ) from None
        input_audio = self._generator.encode_input_audio(waveform)
        try:
            attention = heard_attention(
                self._generator, self._prompt, input_audio, recording.target, self._layers
            )
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


@dataclass(frozen=True)
class HeardAttention:
    """Attention of a translation's tokens over the rows of its recording."""

    tokens_NT: Tensor
    """Mean over heads and layers; a row's share of all that the token looks at."""
    offsets: list[tuple[int, int]]
    """First and last place (exclusive) of each token in the text."""
    heard_rows: int
    """T: rows of the recording, of which each lasts the same time."""
    logprob: float
    """Mean log-probability of the tokens."""


@torch.inference_mode()
def heard_attention(
    generator: Generator, prompt: str, input_audio: PartAudio, target: str, layers: Sequence[int]
) -> HeardAttention:
    """Run the model over a recording and its translation, and return what the translation looks at.

    Raises:
        ValueError: control tokens in the translation, or an empty one.
    """
    model, template = generator.model, generator.template
    if not target.strip():
        raise ValueError("there is no translation")
    system = [Message(role="system", content=[TextPart(text=prompt)])] if prompt else []
    prompt_messages = [*system, Message(role="user", content=[AudioPart(path="(heard)")])]
    messages = [*prompt_messages, Message(role="assistant", content=[TextPart(text=target)])]
    spans = template.layout(messages, [size_of(input_audio)])
    starts = [0]
    for span in spans:
        starts.append(starts[-1] + span.rows)
    heard_at = next(
        start for span, start in zip(spans, starts, strict=False) if span.kind in (Kind.AUDIO_IN, Kind.FEATURE)
        and span.is_content
    )  # fmt: skip
    text_at, count = next(
        (start, span.rows)
        for span, start in zip(spans, starts, strict=False)
        if span.is_content and span.is_target and span.kind == Kind.TEXT
    )
    if isinstance(input_audio, Tensor):
        rows = input_audio.shape[1]
        heard_at += 1 + (template.num_codebooks - 1) // 2  # BOS, and half of the delay of the last codebook
    else:
        rows = next(span.rows for span in spans if span.kind == Kind.FEATURE)
    batch = pack([template.compile(messages, [input_audio])]).to(next(model.parameters()).device)
    looking = _RecordedAttention(
        model.attend_packed(batch, model.embed_rows(batch)),
        batch,
        torch.arange(text_at - 1, text_at + count - 1),
        torch.arange(heard_at, heard_at + rows),
        layers,
    )
    hidden_SC = _run_recording_attention(model, batch, looking)
    target_positions = batch.text_weights > 0
    logits_XV = model.text_logits(hidden_SC[batch.text_target_index[target_positions]]).float()
    logprob_X = logits_XV.log_softmax(-1).gather(1, batch.text_targets[target_positions][:, None])
    encoded = template.tokenizer.encode(target, add_special_tokens=False)
    return HeardAttention(
        torch.stack(looking.recorded).mean(0).cpu(),
        [(int(start), int(end)) for start, end in encoded.offsets],
        rows,
        float(logprob_X.mean()),
    )


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


# Private


@dataclass
class _RecordedAttention:
    """Attends as a pack does, and keeps the attention of some rows over others, averaged over heads."""

    attend: AttendPacked
    batch: PackedBatch
    query_Q: Tensor
    """Positions of the rows that look."""
    heard_T: Tensor
    """Positions of the rows that are looked at."""
    layers: Sequence[int]
    recorded: list[Tensor] = field(default_factory=list)

    def __call__(self, layer: int, q_SHD: Tensor, k_SGD: Tensor, v_SGD: Tensor) -> Tensor:
        if layer in self.layers:
            row_of_S = self.batch.row_of_S
            q_QHD = q_SHD.index_select(0, row_of_S[self.query_Q.to(row_of_S.device)])
            k_SHD = k_SGD.index_select(0, row_of_S).repeat_interleave(q_SHD.shape[1] // k_SGD.shape[1], 1)
            scores_HQS = torch.einsum("qhd,shd->hqs", q_QHD.float(), k_SHD.float()) * q_SHD.shape[2] ** -0.5
            behind_QS = self.query_Q[:, None] - torch.arange(len(row_of_S))
            window = self.attend.config.window_of(layer)
            hidden_QS = (behind_QS < 0) | (behind_QS >= (window or len(row_of_S)))
            scores_HQS = scores_HQS.masked_fill(hidden_QS.to(scores_HQS.device), -torch.inf)
            self.recorded.append(scores_HQS.softmax(-1).mean(0)[:, self.heard_T.to(row_of_S.device)])
        return self.attend(layer, q_SHD, k_SGD, v_SGD)


def _run_recording_attention(model: DualFFN, batch: PackedBatch, attend: _RecordedAttention) -> Tensor:
    """Hidden states of all rows, as `DualFFN.forward` with another attention."""
    cosine, sine = model.row_angles(batch)
    rows = Rows(batch.num_text, cosine[:, None], sine[:, None], attend)
    x_SC = model.embed_rows(batch)
    for layer in model.model.layers:
        x_SC = layer(x_SC, rows)
    normed: Tensor = model.model.norm(x_SC)
    return normed
