"""A DualFFN that interprets: the engine of its streams, and what a translation looks at in its recording.

Shapes: N tokens of the translation, T heard rows, S rows of the pass, Q rows that predict a token, H heads, G key and
value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from audiollm.audio import Waveform
from audiollm.codec import Codec
from audiollm.data.chat.template import Kind
from audiollm.data.hearing.features import FeatureShape, FeatureWindow, PackedFeatures, PartAudio, size_of
from audiollm.data.packing import PackedBatch, pack
from audiollm.data.records.sample import AudioPart, Message, TextPart
from audiollm.families.interpreting import HeardAttention, InterpretingModel
from audiollm.families.streams import stream_rate
from audiollm.generation.engine.engine import Engine
from audiollm.generation.speaking.generator import Generator
from audiollm.models.decoder import AttendPacked, Rows
from audiollm.models.dual_ffn import DualFFN


class DualFFNInterpreter:
    """An `InterpretingModel` of a DualFFN."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        if generator.encoder is not None:
            generator.model.audio_tower.freeze()  # rows that it made before are fed

    @property
    def codec(self) -> Codec:
        """See `InterpretingModel.codec`."""
        return self._generator.codec

    @property
    def encoder(self) -> FeatureShape | None:
        """See `InterpretingModel.encoder`."""
        return self._generator.encoder

    @torch.inference_mode()
    def encode_window(self, window: FeatureWindow) -> Tensor:
        """See `InterpretingModel.encode_window`."""
        model = self._generator.model
        packed = PackedFeatures.of([window])
        assert packed is not None  # there is a window
        rows_RC: Tensor = model.audio_tower(packed.to(next(model.parameters()).device))
        return rows_RC.cpu()

    def stream_engine(self, messages: Sequence[Message], chunk_frames: int, max_stream_s: float) -> Engine:
        """See `InterpretingModel.stream_engine`; with a sliding window in every layer a stream may go on for ever."""
        model, template = self._generator.model, self._generator.template
        window = model.config.sliding_window
        if window is None or model.config.sliding_window_layers is not None:
            window = 2 * round(max_stream_s * stream_rate(self.encoder))
        chunk = chunk_frames + template.num_codebooks + 4
        return Engine(model, template, 1, len(template.stream_prompt(messages)) + window + chunk)

    def heard_attention(
        self, prompt: str, recording: Waveform, target: str, layers: int | None = None
    ) -> HeardAttention:
        """See `InterpretingModel.heard_attention`."""
        count = self._generator.model.config.num_layers
        last = range(count - min(count, layers or (count + 1) // 2), count)
        input_audio = self._generator.encode_input_audio(recording)
        return heard_attention(self._generator, prompt, input_audio, target, last)


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


_: type[InterpretingModel] = DualFFNInterpreter
