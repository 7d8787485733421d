"""What a family gives so that a server such as vLLM samples its policy.

Prompts as tokens and recordings, and weights by the names in the folder that the server opened.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from audiollm.families.family import ModelFolder
from audiollm.families.policy import Policy


@dataclass(frozen=True)
class ServedPrompt:
    """A prompt as a server takes it."""

    id: str
    """The id of the sample."""
    place: str
    """Where the sample was read, for errors."""
    token_ids: Sequence[int]
    """One placeholder for each recording."""
    read_ids: Sequence[int]
    """The tokens that the model reads: as many placeholders as a recording has positions."""
    recordings: Sequence[NDArray[np.float32]]
    """Mono, `[samples]`."""
    sample_rate: int
    """The sample rate of the recordings, in Hz: that of the model's features."""


class ServedModel(Protocol):
    """The model of a policy as a server sees it."""

    @property
    def ends(self) -> frozenset[int]:
        """Ids of the tokens that end an answer."""

    @property
    def never_drawn(self) -> Sequence[int]:
        """Ids of the tokens that are never sampled."""

    def prompt(self, prompted: Any) -> ServedPrompt:
        """Make what a server takes of a prompt, as the policy's `take` returned it.

        Raises:
            BadSample: a prompt that the model cannot take, or that a server would read otherwise.
        """

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the words of an answer, without control tokens."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the present weights by the names in the model's folder: whole, adapters merged, tied tables once.

        Raises:
            ValueError: an adapter that cannot be merged.
        """


@runtime_checkable
class ServedPolicy(Policy[Any, Any, Any], Protocol):
    """A policy whose answers a server can sample."""

    def served_model(self) -> ServedModel:
        """Return the model as a server sees it; its weights are read at each call of `ServedModel.tensors`.

        Raises:
            ConfigError: its prompts or weights are not those that a server would have from its folder.
        """


@runtime_checkable
class ServedFolder(ModelFolder, Protocol):
    """The folder of a model that servers open, too."""

    def check_served(self) -> None:
        """Check that a server opens the folder as it is.

        Raises:
            ConfigError: it does not.
        """
