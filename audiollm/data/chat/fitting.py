"""Samples longer than the context: cut in a way that teaches nothing false, or refused. The caller counts.

A stream that is cut is a beginning of the true one, so every target that is left is right, but for one: the EOS
of an audio part whose end is gone. Those are left out, so that a cut clip never teaches a stop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from torch import Tensor

from audiollm.data.chat.delay import IGNORE
from audiollm.data.chat.template import Kind, RowSpan, Template, TokenStream
from audiollm.data.hearing.features import FeatureWindow, PartAudio, PartSize, size_of
from audiollm.data.records.sample import AudioPart, Message

Policy = Literal["cut", "refuse"]


class Fitting(StrEnum):
    """Actions by which a sample was made to fit."""

    COMPLETE = "whole"
    FEWER_TURNS = "fewer turns"
    CUT_SHORT = "cut short"
    REFUSED = "refused"


@dataclass(frozen=True)
class FitPlan:
    """The plan by which a sample fits; `rows` is 0 where it is refused."""

    fitting: Fitting
    rows: int
    num_messages: int
    """The messages that are kept, from the first on."""


def plan_fit(
    template: Template,
    messages: Sequence[Message],
    sizes: Sequence[PartSize],
    max_length: int,
    policy: Policy,
) -> FitPlan:
    """Plan how a sample fits into `max_length` rows, from its text and the sizes of its audio parts alone.

    `cut` first leaves out whole turns from the end, up to the end of an assistant's turn. Where its first turn is too
    long already, the rows end at `max_length`; a stream ends with the last chunk whose action fits. A sample without a
    remaining target is refused.
    """
    spans = template.layout(messages, sizes)
    rows = sum(span.rows for span in spans)
    if rows <= max_length:
        return FitPlan(Fitting.COMPLETE, rows, len(messages))
    if policy == "refuse":
        return FitPlan(Fitting.REFUSED, 0, 0)
    if boundary := _chunk_boundary(spans, max_length):
        return FitPlan(Fitting.CUT_SHORT, *boundary)
    ends = _turn_ends(messages, spans)
    short = [number for number, end in ends.items() if end <= max_length]
    if short:
        return FitPlan(Fitting.FEWER_TURNS, ends[short[-1]], short[-1] + 1)
    if not _teaches(spans, max_length, template.num_codebooks):
        return FitPlan(Fitting.REFUSED, 0, 0)
    return FitPlan(Fitting.CUT_SHORT, max_length, min(ends, default=len(messages) - 1) + 1)


def fit_stream(
    template: Template,
    messages: Sequence[Message],
    audio: Sequence[PartAudio],
    max_length: int,
    policy: Policy,
) -> tuple[TokenStream | None, FitPlan]:
    """The stream of `template.compile` in at most `max_length` rows, and what was done; None where it is refused.

    Raises:
        ValueError: as `Template.compile`.
    """
    plan = plan_fit(template, messages, [size_of(audio_input) for audio_input in audio], max_length, policy)
    if plan.fitting == Fitting.REFUSED:
        return None, plan
    fitting_messages = messages[: plan.num_messages]
    parts = sum(
        isinstance(content_part, AudioPart)
        for message in fitting_messages
        for content_part in message.content
    )
    stream = template.compile(fitting_messages, audio[:parts])
    return (_cut_stream(stream, plan.rows, template.audio_eos) if len(stream) > plan.rows else stream), plan


def _cut_stream(stream: TokenStream, rows: int, audio_eos: int) -> TokenStream:
    """The first rows; where they end inside of an audio part, its EOS are no targets."""
    cut = {name: value[:rows].clone() for name, value in stream.__dict__.items() if isinstance(value, Tensor)}
    feature_rows = int((stream.kinds_S[:rows] == Kind.FEATURE).sum())
    shortened_stream = TokenStream(
        **cut,
        features=_first_windows(stream.features, feature_rows),
        pinned_rows=min(stream.pinned_rows, rows),
    )
    if int(stream.kinds_S[rows]) == Kind.AUDIO_OUT == int(stream.kinds_S[rows - 1]):
        non_audio_rows = (shortened_stream.kinds_S != Kind.AUDIO_OUT).nonzero()
        start = int(non_audio_rows[-1]) + 1 if len(non_audio_rows) else 0
        part_FK = shortened_stream.audio_targets_SK[start:]
        part_FK[part_FK == audio_eos] = IGNORE
    return shortened_stream


def _first_windows(windows: Sequence[FeatureWindow], rows: int) -> tuple[FeatureWindow, ...]:
    """The windows of the first rows; of the last one, its first rows alone are given to the model."""
    first_windows: list[FeatureWindow] = []
    for window in windows:
        if rows > 0:
            first_windows.append(window._replace(rows=min(window.rows, rows)))
            rows -= window.rows
    return tuple(first_windows)


def _turn_ends(messages: Sequence[Message], spans: Sequence[RowSpan]) -> dict[int, int]:
    """Message number -> rows up to its end, for the last message of every turn of the assistant."""
    ends: dict[int, int] = {}
    end = 0
    for span in spans:
        end += span.rows
        ends[span.message] = end
    roles = [*(message.role for message in messages), None]
    return {n: rows for n, rows in ends.items() if roles[n] == "assistant" and roles[n + 1] != "assistant"}


def _chunk_boundary(spans: Sequence[RowSpan], max_length: int) -> tuple[int, int] | None:
    """Rows up to the last end of an action that fits, and the messages up to there; None where there is none."""
    end, boundary = 0, None
    for span in spans:
        end += span.rows
        if span.ends_action and end <= max_length:
            boundary = end, span.message + 1
    return boundary


def _teaches(spans: Sequence[RowSpan], rows: int, num_codebooks: int) -> bool:
    """Return whether the first rows hold a target besides marks: a text token, or a code of every codebook."""
    start = 0
    for span in spans:
        min_rows = 1 if span.kind == Kind.TEXT else num_codebooks + 1
        if span.is_target and span.is_content and span.rows and start + min_rows <= rows:
            return True
        start += span.rows
    return False
