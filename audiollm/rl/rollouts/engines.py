"""The engine that samples the rollouts of a training: that of the model's family, a server, or one of a user's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from audiollm.errors import ConfigError, StageError, error_line
from audiollm.families.policy import Policy
from audiollm.families.registry import open_model_folder
from audiollm.families.rollout import Rollout, RolloutEngine, RolloutSettings
from audiollm.families.serving import ServedFolder, ServedPolicy
from audiollm.generation.engine.request import SampledTokens
from audiollm.models.pretrained import model_folder
from audiollm.recipe.plug_ins import import_named
from audiollm.rl.rollouts.served.engine import ServedRollouts
from audiollm.rl.rollouts.settings import EngineChoice

REMEDY = "give package.module:name of a class or function f(policy, folder) that returns a RolloutEngine"

EngineFactory = Callable[[Policy[Any, Any, Any], Path], RolloutEngine[Any]]
"""Makes the engine of a policy. The folder is that of the model that the training begins from; the weights to sample
from are those that `policy.root` has at each call of `weights_changed`."""


def load_engine(
    policy: Policy[Any, Any, Any], folder: Path, choice: EngineChoice | None = None
) -> RolloutEngine[Any]:
    """Make the engine of a training.

    Args:
        folder: of the model that the training begins from.
        choice: vLLM, SGLang, or a user's engine; None: that of the model's family.

    Raises:
        ConfigError: the engine cannot be imported or made, or cannot sample this model.
        StageError: the server does not open the model.
    """
    if choice is None:
        return policy.rollout_engine()
    if choice.is_server:
        if not isinstance(policy, ServedPolicy):
            raise not_served(folder, choice.name)
        return CheckedRollouts(
            ServedRollouts(policy.served_model(), model_folder(folder), choice), choice.name
        )
    rollouts = choice.name
    factory = import_engine(rollouts)
    try:
        engine = factory(policy, model_folder(folder))
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"rollouts: cannot be made: {error_line(error)}", rollouts, REMEDY) from error
    for method in ("sample", "weights_changed"):
        if not callable(getattr(engine, method, None)):
            raise ConfigError(f"rollouts: {type(engine).__name__} has no method {method}", rollouts, REMEDY)
    return CheckedRollouts(engine, rollouts)


def check_engine(choice: EngineChoice | None, folder: Path) -> None:
    """Check, before any work, that an engine is there and can sample the model in a folder.

    Raises:
        ConfigError: it is not, or cannot.
    """
    if choice is None:
        return
    if not choice.is_server:
        import_engine(choice.name)
        return
    choice.facts()  # the server is installed
    opened = open_model_folder(folder)
    if not isinstance(opened, ServedFolder):
        raise not_served(folder, choice.name)
    opened.check_served()


def not_served(folder: Path, server: str) -> ConfigError:
    """The refusal of a model that vLLM and SGLang cannot sample."""
    return ConfigError(
        f"rollouts: {server} samples audio LLMs of transformers, which answer in words; this model writes codes of "
        "speech, or its family has no ServedPolicy",
        str(folder),
        "leave rollouts out: the engine of the model's family samples it",
    )


def import_engine(path: str) -> EngineFactory:
    """Import what makes a user's engine.

    Raises:
        ConfigError: it cannot be imported, or cannot be called.
    """
    imported = import_named(path, REMEDY)
    if not callable(imported):
        raise ConfigError(f"rollouts: {type(imported).__name__} cannot be called", path, REMEDY)
    factory: EngineFactory = imported
    return factory


class CheckedRollouts:
    """An engine whose answers are checked: what is trained on must be what was asked for.

    Args:
        name: of the engine, for errors.
    """

    def __init__(self, engine: RolloutEngine[Any], name: str) -> None:
        self._engine, self._name = engine, name

    def sample(
        self, prompts: Sequence[Any], numbers: Sequence[Sequence[int]], settings: RolloutSettings
    ) -> list[list[Rollout]]:
        """See `RolloutEngine.sample`.

        Raises:
            StageError: the engine gave other answers than it was asked for, or answers without log-probabilities.
        """
        groups = self._engine.sample(prompts, numbers, settings)
        if len(groups) != len(prompts):
            raise self._error(f"{len(groups)} groups for {len(prompts)} prompts")
        for prompt, requested, group in zip(prompts, numbers, groups, strict=True):
            sampled = [(rollout.prompt, rollout.number) for rollout in group]
            if sampled != [(prompt.id, number) for number in requested]:
                raise self._error(
                    f"prompt {prompt.id!r}: answers {sampled}, and asked for were {list(requested)}, in this order"
                )
            for rollout in group:
                if reason := fault_of(rollout, settings):
                    raise self._error(f"prompt {prompt.id!r}, answer {rollout.number}: {reason}")
        return groups

    def weights_changed(self) -> None:
        """See `RolloutEngine.weights_changed`."""
        self._engine.weights_changed()

    def close(self) -> None:
        """End the engine, where it has a method `close`."""
        close = getattr(self._engine, "close", None)
        if close is not None:
            close()

    def _error(self, reason: str) -> StageError:
        return StageError(
            f"rollouts: {self._name}: {reason}", "mend the engine: see RolloutEngine and Rollout"
        )


def fault_of(rollout: Rollout, settings: RolloutSettings) -> str:
    """Return the reason why a rollout cannot be trained on; empty: it can."""
    tokens = rollout.tokens
    if not isinstance(tokens, SampledTokens):
        return f"tokens are {type(tokens).__name__}, not SampledTokens"
    if settings.temperature == 0:
        return ""
    if tokens.logprob_A is None:
        return "no log-probability of its tokens"
    if tokens.logprob_A.shape != (tokens.num_actions,):
        return f"log-probabilities {tuple(tokens.logprob_A.shape)} for {tokens.num_actions} sampled tokens"
    if not bool((tokens.logprob_A <= 1e-4).all()):  # false for NaN, too
        return "log-probabilities above 0, or NaN"
    return ""
