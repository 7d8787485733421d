"""Optuna's side of a sweep: the parameters of the next trial, pruning, the front, and the importance of parameters.

The study is in memory alone. When a sweep goes on, it is built from the ledger again, by the same calls in the same
order.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import random
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

from audiollm.errors import ConfigError
from audiollm.sweep.figures import Figure
from audiollm.sweep.ledger import SweepRecord, Trial
from audiollm.sweep.spaces import CHOICES, Parameter, Parameters, Space

if TYPE_CHECKING:
    import optuna

Sampler = Literal["random", "tpe", "grid"]
Pruning = Literal["none", "median", "halving"]
SAMPLERS: tuple[Sampler, ...] = get_args(Sampler)
PRUNINGS: tuple[Pruning, ...] = get_args(Pruning)
REMEDY = "pip install 'audiollm[sweep]'"
MAX_GRID = 100_000
"""Most combinations of a grid."""
RANDOM_TRIALS = 10
"""Trials before TPE learns from those before it."""
UNPRUNED_TRIALS = 4
"""Finished trials before the median prunes."""
FIRST_PRUNED_EVALUATION = 2
"""Evaluation from which on the median prunes: the first one says little."""
MIN_IMPORTANCE_TRIALS = 4
"""Finished trials from which on the importance of parameters is estimated."""


def require_optuna() -> Any:
    """The package optuna, which says nothing on its own.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import optuna
    except ImportError:
        raise ConfigError("needs the package optuna", "sweep", REMEDY) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def grid_of(spaces: Sequence[Space], seed: int) -> list[dict[str, Parameter]]:
    """Every combination of the spaces' values, shuffled by the seed: a part of a grid covers all of its spaces.

    Raises:
        ConfigError: a space is a range of real numbers, or there are too many combinations.
    """
    size = math.prod(len(space.grid()) for space in spaces)
    if size > MAX_GRID:
        problem = f"a grid of {size:,} combinations, more than {MAX_GRID:,}"
        raise ConfigError(problem, "command line", "give choices in place of ranges, or --sampler random")
    combinations = [
        dict(zip([space.key for space in spaces], values, strict=True))
        for values in itertools.product(*(space.grid() for space in spaces))
    ]
    random.Random(seed).shuffle(combinations)
    return combinations


class SweepStudy:
    """Trials as optuna sees them, by the sweep's numbers.

    Args:
        seed: with a trial's number it gives what is random in the trial's parameters.
    """

    def __init__(
        self,
        spaces: Sequence[Space],
        figures: Sequence[Figure],
        sampler: Sampler,
        pruning: Pruning,
        seed: int,
    ) -> None:
        self._optuna = require_optuna()
        self._spaces, self._figures, self._sampler, self._seed = spaces, figures, sampler, seed
        self._grid = grid_of(spaces, seed) if sampler == "grid" else []
        self._distributions = {space.key: self._distribution(space) for space in spaces}
        directions = ["maximize" if figure.is_larger_better else "minimize" for figure in figures]
        self._study = self._optuna.create_study(directions=directions, pruner=self._pruner(pruning))
        self._trials: dict[int, optuna.Trial] = {}
        self._reported: dict[int, int] = {}

    @property
    def grid_size(self) -> int:
        """Combinations of the grid; 0 for another sampler."""
        return len(self._grid)

    def replay(
        self, record: SweepRecord, events: Sequence[Mapping[str, Any]], prune_by: Figure | None
    ) -> None:
        """Take in the trials of a ledger, in the order of their events."""
        ended: set[int] = set()
        for event in events:
            if event["event"] == "begin":
                self.begin(event["trial"], event["parameters"])
            elif event["event"] == "end":
                trial = record.trials[event["trial"]]
                if trial.number in ended or trial.state == "running":  # it runs again after a failure
                    continue
                ended.add(trial.number)
                if prune_by is not None:
                    self.report(trial.number, [value for _, value in trial.evaluations], prune_by)
                self.end(trial)

    def propose(self, number: int) -> dict[str, Parameter]:
        """Begin a trial with parameters of the sampler's choice."""
        if self._sampler == "grid":
            parameters = self._grid[number]
            self.begin(number, parameters)
            return parameters
        samplers, seed = self._optuna.samplers, _seed_of(self._seed, number)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a part of the sampler is experimental
            if self._sampler == "random":
                self._study.sampler = samplers.RandomSampler(seed=seed)
            else:
                self._study.sampler = samplers.TPESampler(
                    seed=seed, n_startup_trials=RANDOM_TRIALS, constant_liar=True
                )
            self._trials[number] = self._study.ask(self._distributions)
        return dict(self._trials[number].params)

    def begin(self, number: int, parameters: Parameters) -> None:
        """Begin a trial with these parameters."""
        self._study.enqueue_trial(dict(parameters))
        self._trials[number] = self._study.ask(self._distributions)

    def report(self, number: int, values: Sequence[float], prune_by: Figure) -> int | None:
        """Show the evaluations of a running trial to the pruner.

        Args:
            values: of all evaluations so far; those that were shown before are passed over.
            prune_by: what they are values of.

        Returns:
            The number of evaluations after which the trial is to be pruned; None: it goes on.
        """
        trial = self._trials[number]
        sign = prune_by.sign * self._figures[0].sign
        for index in range(self._reported.get(number, 0), len(values)):
            self._reported[number] = index + 1
            trial.report(sign * values[index], index + 1)
            if trial.should_prune():
                return index + 1
        return None

    def end(self, trial: Trial) -> None:
        """Take in what a trial ended with."""
        states = self._optuna.trial.TrialState
        if trial.state == "done":
            self._study.tell(self._trials[trial.number], [trial.figures[str(f)] for f in self._figures])
        else:
            state = states.PRUNED if trial.state == "pruned" else states.FAIL
            self._study.tell(self._trials[trial.number], state=state)

    def importance(self, figure: Figure) -> dict[str, float]:
        """How much each parameter decides whether a trial is among the best tenth, as shares of 1.

        Empty where there are too few trials.

        Source: Watanabe, Bansal, Hutter: PED-ANOVA: Efficiently Quantifying Hyperparameter Importance in Arbitrary
        Subspaces (IJCAI 2023), as optuna has it.
        """
        complete = [trial for trial in self._study.trials if trial.state.name == "COMPLETE"]
        place = self._figures.index(figure)
        values = {trial.values[place] for trial in complete}
        if len(complete) < MIN_IMPORTANCE_TRIALS or len(values) < 2:
            return {}
        importance = self._optuna.importance
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that smaller values of the target are better
            shares = importance.get_param_importances(
                self._study,
                evaluator=importance.PedAnovaImportanceEvaluator(),
                target=lambda trial: figure.sign * trial.values[place],
            )
        return {key: float(share) for key, share in shares.items()}

    def _distribution(self, space: Space) -> optuna.distributions.BaseDistribution:
        distributions = self._optuna.distributions
        if space.kind == CHOICES:
            return distributions.CategoricalDistribution(space.choices)
        if space.kind == "int":
            return distributions.IntDistribution(int(space.low), int(space.high))
        return distributions.FloatDistribution(space.low, space.high, log=space.kind == "log")

    def _pruner(self, pruning: Pruning) -> optuna.pruners.BasePruner:
        pruners = self._optuna.pruners
        if pruning == "median":
            return pruners.MedianPruner(
                n_startup_trials=UNPRUNED_TRIALS, n_warmup_steps=FIRST_PRUNED_EVALUATION
            )
        if pruning == "halving":
            return pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2)
        return pruners.NopPruner()


def front(trials: Sequence[Trial], figures: Sequence[Figure]) -> list[Trial]:
    """The finished trials than which none is better: of a single figure the best, of several the Pareto front.

    A trial is better than another one if it is so by a figure and worse by none; of equal ones the first is in the
    front.
    """

    def costs(trial: Trial) -> list[float]:
        return [figure.sign * trial.figures[str(figure)] for figure in figures]

    finished = sorted((trial for trial in trials if trial.state == "done"), key=lambda trial: trial.number)
    best: list[Trial] = []
    for trial in finished:
        rivals = [rival for rival in finished if rival is not trial and _at_most(costs(rival), costs(trial))]
        if not any(costs(rival) != costs(trial) or rival.number < trial.number for rival in rivals):
            best.append(trial)
    return best


def _at_most(costs: Sequence[float], limits: Sequence[float]) -> bool:
    return all(cost <= limit for cost, limit in zip(costs, limits, strict=True))


def _seed_of(seed: int, number: int) -> int:
    """32 bits that depend on both."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{number}".encode()).digest()[:4], "big")
