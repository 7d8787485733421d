"""Files of a policy's answers: those of every step with their tokens, and greedy ones to held-out prompts.

Shapes: A answers of this rank, group after group; K codebooks, T frames.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from audiollm.files.atomic import atomic_path, write_jsonl
from audiollm.generation.engine.request import SampledTokens
from audiollm.recipe.ranks import Ranks
from audiollm.rl.online.progress import StartMeasure
from audiollm.rl.online.rollout_step import RolloutStep
from audiollm.rl.online.scored_packs import ScoredPack
from audiollm.rl.preference.held_out import AnswersFile
from audiollm.train.loop.task import Board

Pieces = Callable[[SampledTokens], list[str | int]]
"""The texts of the tokens of an answer: `Policy.pieces`."""
Coded = tuple[dict[str, Any], Tensor | None]
"""The row of an answer, and the codes `[K, T]` of its speech where it has any."""


class RolloutFiles:
    """`rollouts/000012.jsonl`: the answers of step 12, by the first rank. A step done again replaces its file.

    Codes of speech are in `000012.safetensors` beside it, by the name that the row has in `speech`.
    """

    def __init__(self, folder: Path, ranks: Ranks, pieces: Pieces) -> None:
        self._folder, self._ranks, self._pieces = folder, ranks, pieces

    def write(
        self,
        step: int,
        rollout_step: RolloutStep,
        figures: Sequence[Mapping[str, Sequence[float]]],
    ) -> None:
        """Write a row for each answer. Called on every rank.

        Args:
            figures: of each answer's tokens, by name: the advantage, the log-probability before the updates, ...
        """
        coded = self._rows(step, rollout_step, figures)
        if rollout_step.replaced is not None:
            none: list[dict[str, list[float]]] = [
                {"advantages": [], "old": []} for _ in rollout_step.replaced.rollouts
            ]
            replaced = self._rows(step, rollout_step.replaced, none)
            coded += [({**row, "replaced": True}, codes_KT) for row, codes_KT in replaced]
        rows = _gather_answer_rows(coded, self._folder / f"{step:06d}.safetensors", self._ranks)
        if self._ranks.first:
            write_jsonl(self._folder / f"{step:06d}.jsonl", rows)

    def _rows(
        self, step: int, rollout_step: RolloutStep, figures: Sequence[Mapping[str, Sequence[float]]]
    ) -> list[Coded]:
        coded = answer_rows(step, rollout_step)
        for place, ((row, _), rollout) in enumerate(zip(coded, rollout_step.rollouts, strict=True)):
            if rollout_step.steps:
                row["steps"] = [vars(step_reward) for step_reward in rollout_step.steps[place]]
            row["pieces"] = self._pieces(rollout.tokens)
            row |= {name: [round(value, 4) for value in values] for name, values in figures[place].items()}
            behaviour = rollout.tokens.logprob_A
            row["behaviour"] = [] if behaviour is None else [round(v, 4) for v in behaviour.tolist()]
        return coded


def answer_token_figures(
    scored: Sequence[ScoredPack], num_answers: int, has_advantages: bool
) -> list[dict[str, list[float]]]:
    """Figures of the tokens of each answer of this rank, by name.

    Answers without a part in the loss have none.

    Args:
        has_advantages: False for an objective on pairs or single answers.
    """
    figures: list[dict[str, list[float]]] = [{"advantages": [], "old": []} for _ in range(num_answers)]
    for scored_pack in scored:
        columns = {"old": scored_pack.old_T}
        if has_advantages:
            columns["advantages"] = scored_pack.advantage_T.masked_fill(~scored_pack.kept_T, 0.0)
        if scored_pack.reference_T is not None:
            columns["reference"] = scored_pack.reference_T
        if scored_pack.values is not None:
            columns |= {"values": scored_pack.values.old_T, "returns": scored_pack.values.return_T}
        for name, value_T in columns.items():
            for value, answer in zip(value_T.tolist(), scored_pack.answer_T.tolist(), strict=True):
                figures[scored_pack.pack.places[answer]].setdefault(name, []).append(value)
    return figures


class GreedyAnswerFiles:
    """`answers.jsonl`: greedy answers to the same held-out prompts at every evaluation, with their rewards.

    Step 0 is the model that the training begins from. Codes of speech are in `answers/000012.safetensors`.
    """

    def __init__(self, folder: Path, ranks: Ranks) -> None:
        self._file, self._folder, self._ranks = AnswersFile(folder), folder / "answers", ranks
        self._stage_folder = folder

    def draw_on(self, boards: Sequence[Board]) -> None:
        """See `DrawsOnBoards`."""
        self._file.boards = boards

    @property
    def has_begun(self) -> bool:
        """Whether the model that the training begins from has answered. Called on every rank."""
        return bool(self._ranks.of_first(bool(self._ranks.first and self._file.before(1))))

    @property
    def start(self) -> StartMeasure | None:
        """The measure of the start, where it has been written. Called on every rank."""
        start: StartMeasure | None = self._ranks.of_first(
            StartMeasure.read(self._stage_folder) if self._ranks.first else None
        )
        return start

    def write_start(self, start: StartMeasure) -> None:
        """Write the measure of the start, `start.json`. Called on every rank."""
        if self._ranks.first:
            start.write(self._stage_folder)

    def rows_until(self, step: int) -> list[dict[str, Any]]:
        """Return the rows of the evaluations up to a step; other ranks than the first have none."""
        return self._file.before(step + 1) if self._ranks.first else []

    def write(self, step: int, rollout_step: RolloutStep) -> None:
        """Write a row for each answer, behind those of earlier evaluations. Called on every rank."""
        rows = _gather_answer_rows(
            answer_rows(step, rollout_step), self._folder / f"{step:06d}.safetensors", self._ranks
        )
        if self._ranks.first:
            self._file.write(step, rows)


def answer_rows(step: int, rollout_step: RolloutStep) -> list[Coded]:
    """Return what is told of each answer: the prompt, the answer, and its rewards."""
    scores = rollout_step.scores
    coded: list[Coded] = []
    for group in rollout_step.groups:
        for rollout in group.rollouts:
            place, tokens = len(coded), rollout.tokens
            row = {
                "step": step,
                "id": group.prompt.sample.id,
                "messages": group.prompt.messages,
                "number": rollout.number,
                "answer": rollout.text,
                "tokens": tokens.num_actions,
                "truncated": rollout.truncated,
                "rewards": {name: values[place] for name, values in scores.by_name.items()},
                "reward": scores.reported_A[place] if scores.kept_A[place] else None,
            }
            coded.append((row, torch.cat(tokens.codes, 1) if tokens.codes else None))
    return coded


def _gather_answer_rows(coded: Sequence[Coded], path: Path, ranks: Ranks) -> list[dict[str, Any]]:
    """The rows of all ranks; the first rank writes the codes of their speech. Called on every rank."""
    every = [coded_row for rank_rows in ranks.gather(list(coded)) for coded_row in rank_rows]
    codes = {}
    for number, (row, codes_KT) in enumerate(every):
        if codes_KT is not None:
            row["speech"] = str(number)
            codes[str(number)] = codes_KT.to("cpu", torch.int32).contiguous()
    if ranks.first and codes:
        with atomic_path(path) as temporary:
            save_file(codes, temporary)
    return [row for row, _ in every]
