"""Rewards of sampled streams: each action of a rollout gets one number, from rewards standardised over all ranks.

Shapes: B streams of this rank, T chunks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from audiollm.codec import FRAME_RATE
from audiollm.data.records.sample import AudioPart, Message, Sample, TextPart
from audiollm.errors import StageError
from audiollm.evaluate.interpret.logged_outputs import counted_unit
from audiollm.evaluate.judges.text_scorers import choose_text_scorer
from audiollm.families.rollout import Rollout
from audiollm.generation.engine.request import SampledTokens
from audiollm.interpret.rewards import action_rewards, sequence_rewards
from audiollm.interpret.rewards.action_rewards import similarity_by
from audiollm.interpret.rewards.combining import GateChoice, gated, grouped, seqpo, sum_z, table_moments
from audiollm.interpret.rewards.sentence_scores import lagging_latency, sentence_scores
from audiollm.interpret.rewards.stream_actions import (
    ChunkAction,
    InterpretedStream,
    RewardTable,
    StreamBatch,
)
from audiollm.interpret.training.settings import SEQUENCE_REWARDS, InterpreterTrainingConfig
from audiollm.recipe.ranks import Ranks
from audiollm.rl.online.steps import StepReward
from audiollm.rl.policy_gradient.moments import Moments
from audiollm.rl.rewards.scoring import RewardProblem, RewardScores

SENTENCES = "quality of sentences"
"""Name of what `gated` compares, where its scorer fails."""


@dataclass(frozen=True)
class SampledAction:
    """An action of a rollout, and the number of the drawn token that ends it."""

    action: ChunkAction
    last: int


class StreamRewarder:
    """Scores the streams of a step. Called on every rank, at the same time.

    Args:
        frame_s: duration of a frame, or a row of features, that is heard.
    """

    def __init__(
        self,
        config: InterpreterTrainingConfig,
        tokenizer: Tokenizer,
        opens_speech: int,
        frame_s: float,
        ranks: Ranks,
    ) -> None:
        self._config, self._tokenizer, self._ranks = config, tokenizer, ranks
        self._opens_speech, self._frame_s = opens_speech, frame_s
        self._scorer = choose_text_scorer(
            config.similarity, config.language, config.reward_timeout_s, "similarity"
        )
        self._similarity = similarity_by(self._scorer, *config.similarity_range)

    def __call__(
        self, samples: Sequence[Sample], rollouts: Sequence[Rollout], group_B: Tensor
    ) -> tuple[RewardScores, list[list[StepReward]]]:
        """Return the scores of each rollout, and the rewards of its actions.

        A value that a scorer did not give is one that is not defined: its action, or its stream, has a standard score
        of 0 for it. It is among the problems of the scores.

        Args:
            samples: of each rollout, with the reference's actions as the last message.
            group_B: int64: the stream that each rollout belongs to, from 0.

        Raises:
            StageError: a value is missing, and `on_error` is `stop`.
        """
        acted = [
            actions_of(rollout.tokens, self._tokenizer, self._opens_speech, 1 / FRAME_RATE)
            for rollout in rollouts
        ]
        streams = [
            interpreted(sample, [sampled_action.action for sampled_action in sampled_actions])
            for sample, sampled_actions in zip(samples, acted, strict=True)
        ]
        batch = StreamBatch(streams)
        tables = {name: self._table(name, batch) for name in self._config.rewards}
        chunk_s = [self._frame_s * (sample.messages[-1].chunk_frames or 1) for sample in samples]
        total_BT, of_sentences = self._combined(tables, batch, group_B, chunk_s)
        problems_by_name = {
            **{name: table.problems for name, table in tables.items()},
            SENTENCES: of_sentences,
        }
        problems = [
            RewardProblem(name, samples[b].id, rollouts[b].number, reason)
            for name, reasons in problems_by_name.items()
            for b, reason in reasons.items()
        ]
        if problems and self._config.on_error == "stop":
            raise StageError(
                str(problems[0]), "mend the scorer, or go on without such values by on_error: skip"
            )
        steps = [
            [
                StepReward(sampled_action.action.text, float(total_BT[b, t]), sampled_action.last)
                for t, sampled_action in enumerate(sampled_actions)
            ]
            for b, sampled_actions in enumerate(acted)
        ]
        by_name: dict[str, list[float | None]] = {name: _per_stream(table) for name, table in tables.items()}
        raw = [
            math.fsum(weight * (by_name[name][b] or 0.0) for name, weight in self._config.rewards.items())
            for b in range(len(streams))
        ]
        is_kept = [True] * len(streams)
        return RewardScores(total_BT.sum(1).tolist(), is_kept, by_name, problems, raw_A=raw), steps

    def close(self) -> None:
        """End the scorer's process, where it has one."""
        self._scorer.close()

    def _combined(
        self, tables: Mapping[str, RewardTable], batch: StreamBatch, group_B: Tensor, chunk_s: Sequence[float]
    ) -> tuple[Tensor, Mapping[int, str]]:
        """Return the reward `[B, T]` of each action, and why qualities of sentences are missing, by stream.

        A number for a whole rollout stands at its last action.

        Args:
            chunk_s: duration of a chunk of each stream.
        """
        config, choice = self._config, self._config.combine
        of_sequences = {name: table for name, table in tables.items() if name in SEQUENCE_REWARDS}
        of_actions = {name: table for name, table in tables.items() if name not in SEQUENCE_REWARDS}
        groups = int(group_B.max()) + 1 if len(group_B) else 0
        if choice.name == "grouped":
            return grouped(of_actions, of_sequences, config.rewards, batch.exists_BT(), group_B, groups), {}
        if choice.name == "sum_z":
            names = list(tables)
            sums = self._ranks.sum(torch.stack([table_moments(tables[name]).sums for name in names]))
            moments = {name: Moments(sums[place]) for place, name in enumerate(names)}
            return sum_z(of_actions, of_sequences, config.rewards, moments, batch.last_BT()), {}
        weights = float(config.rewards["sequence_quality"]), float(config.rewards["lagging"])
        problems: Mapping[int, str] = {}
        unit = counted_unit(config.language)
        if choice.name == "seqpo":
            latency = tables["lagging"]
            if config.latency == "lagging":
                latency = RewardTable(-latency.values, latency.defined)
            else:
                latency = lagging_latency(batch, config.latency, chunk_s, unit)
            total_B = seqpo(
                tables["sequence_quality"], latency, group_B, groups, weights[0], choice.floor, weights[1]
            )
        else:
            sentences = sentence_scores(batch, self._similarity, chunk_s, choice.max_latency_s, unit)
            scores = sentences.quality_BS, sentences.latency_BS, sentences.defined_BS
            gate = GateChoice(choice.threshold, choice.max_latency_s, *weights)
            total_B = gated(*scores, group_B, groups, gate)
            problems = sentences.problems
        return torch.where(batch.last_BT(), total_B[:, None], 0.0), problems

    def _table(self, name: str, batch: StreamBatch) -> RewardTable:
        config = self._config
        if not batch.streams:
            return RewardTable(torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.bool))
        if name == "detection":
            return action_rewards.detection(batch)
        if name == "initiative":
            return action_rewards.initiative(batch)
        if name == "quality":
            return action_rewards.quality(batch, self._similarity)
        if name == "timing":
            return action_rewards.timing(batch, config.timing_target)
        if name == "format":
            return action_rewards.format_match(batch, config.pattern)
        if name == "process_quality":
            return sequence_rewards.process_quality(
                batch, self._similarity, config.process_share, config.process_every
            )
        if name == "lagging":
            return sequence_rewards.lagging(batch, config.allowed_wait, config.waiting)
        return sequence_rewards.sequence_quality(batch, self._similarity)


def interpreted(sample: Sample, actions: Sequence[ChunkAction]) -> InterpretedStream:
    """Return the actions of a rollout beside those of its sample.

    `metadata.source_ends` are the chunks in which the source of each segment is over, `metadata.source_durations_s` the
    durations of the source of each chunk's action, `metadata.durations_s` those of the reference's speech.
    """
    metadata = sample.metadata
    return InterpretedStream(
        actions,
        _reference_of(sample),
        metadata.get("source_ends") or (),
        metadata.get("source_durations_s") or (),
    )


def check_streams(samples: Sequence[Sample], config: InterpreterTrainingConfig) -> None:
    """Check that samples are streams with what the rewards read.

    Raises:
        StageError: the first that is not.
    """
    for sample in samples:
        if reason := _fault_of(sample, config):
            raise StageError(
                f"sample {sample.id!r} {reason}", "compose the streams again, or leave this one out", 2
            )


def _reference_of(sample: Sample) -> list[ChunkAction]:
    actions = sample.messages[-1].actions()
    durations = sample.metadata.get("durations_s") or [0.0] * len(actions)
    texts = [
        "".join(content_part.text for content_part in action if isinstance(content_part, TextPart))
        for action in actions
    ]
    return [
        ChunkAction(text.strip(), float(duration)) for text, duration in zip(texts, durations, strict=True)
    ]


def _fault_of(sample: Sample, config: InterpreterTrainingConfig) -> str:
    """The reason why a sample cannot be rewarded as a stream; empty where it can."""
    last, metadata = sample.messages[-1], sample.metadata
    if last.chunk_frames is None:
        return "is no stream: its last message has no chunk_frames (see `compose_streams`)"
    chunks = len(last.actions())
    required_keys = ["durations_s"] if metadata.get("durations_s") else []
    by_source = config.timing_target == "source"
    if not required_keys and _needs_durations(last, "timing" in config.rewards and not by_source):
        return "speaks, and has no metadata.durations_s, the seconds of its speech in each chunk"
    if "timing" in config.rewards and by_source:
        required_keys.append("source_durations_s")
    for name in required_keys:
        if len(metadata.get(name) or ()) != chunks:
            return f"metadata.{name} needs a value for each of its {chunks} chunks"
    segments = sum(action.speaks for action in _reference_of(sample))
    ends = metadata.get("source_ends") or ()
    if segments and not ends and "lagging" in config.rewards and config.waiting == "lag":
        return "has no metadata.source_ends, which waiting: lag reads; set waiting: run"
    if any(not 0 <= end < chunks for end in ends):
        return f"metadata.source_ends must be chunks from 0 to {chunks - 1}"
    if ends and len(ends) != segments:
        return f"metadata.source_ends has {len(ends)} chunks for {segments} segments"
    return ""


def _needs_durations(message: Message, are_timed: bool) -> bool:
    """Return whether durations of recorded actions are needed: they are timed, or one has no text and seems silent."""
    for action in message.actions():
        has_text = any(
            isinstance(action_part, TextPart) and action_part.text.strip() for action_part in action
        )
        if any(isinstance(action_part, AudioPart) for action_part in action) and (are_timed or not has_text):
            return True
    return False


def actions_of(
    tokens: SampledTokens, tokenizer: Tokenizer, opens_speech: int, frame_s: float
) -> list[SampledAction]:
    """Divide the tokens of a stream into its actions."""
    places = [place for place, _ in tokens.input_frames] + [len(tokens.ids_N)]
    ids, is_action = tokens.ids_N.tolist(), tokens.is_action_N.tolist()
    stretches = iter(zip(tokens.codes, tokens.ended, strict=True))
    actions: list[SampledAction] = []
    num_drawn = 0
    for first, end in pairwise(places):
        frames = 0
        for token, is_drawn in zip(ids[first:end], is_action[first:end], strict=True):
            num_drawn += is_drawn
            if token == opens_speech:
                codes, ended = next(stretches)
                frames += codes.shape[1]
                num_drawn += codes.numel() + ended
        text: str = tokenizer.decode(ids[first:end], skip_special_tokens=True).strip()
        actions.append(SampledAction(ChunkAction(text, frames * frame_s), num_drawn - 1))
    return actions


def _per_stream(table: RewardTable) -> list[float | None]:
    """Mean of the defined values of each stream; None where there is none."""
    if table.values.ndim == 1:
        return [
            value if is_defined else None for value, is_defined in _zip_defined(table.values, table.defined)
        ]
    means = []
    for values, defined in zip(table.values, table.defined, strict=True):
        means.append(float(values[defined].mean()) if bool(defined.any()) else None)
    return means


def _zip_defined(values: Tensor, defined: Tensor) -> Any:
    return zip(values.tolist(), defined.tolist(), strict=True)
