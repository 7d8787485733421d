"""Actors of one training rank: started, given work, and replaced when they die."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from audiollm.cluster import Cluster, cause_of_death
from audiollm.errors import BadSample, ConfigError, StageError, error_line
from audiollm.rl.placement.settings import ActorShare

MAX_DEATHS = 3
"""Deaths of actors at the same work that end the run."""


@dataclass(frozen=True)
class ActorCall:
    """A call that was sent to an actor."""

    place: int
    method: str
    arguments: tuple[Any, ...]
    actor: Any
    reference: Any


class ActorPool:
    """Equal actors of a class with a method `set_up(place)`, which gets the actor's number, may take long, and raise.

    An actor that dies is replaced and set up, and its calls are sent again. An actor's calls are worked on in order.

    Args:
        role: for messages: `rollout`, `reward`, `reference`.
        count: actors of this rank.
        kind, arguments: class of the actors, and what it is made with.
        tell: is told of deaths.
        concurrency: most calls that an actor works on at a time.
    """

    def __init__(
        self,
        cluster: Cluster,
        role: str,
        share: ActorShare,
        count: int,
        kind: type,
        arguments: Sequence[Any],
        tell: Callable[[str], None],
        concurrency: int = 1,
    ) -> None:
        self._cluster, self._share, self._kind, self._arguments = cluster, share, kind, list(arguments)
        self._role, self._tell, self._concurrency = role, tell, concurrency
        self._lock = threading.Lock()
        self.prepare: Callable[[int], object] = lambda place: None
        """Called with the number of a replaced actor, before it works again."""
        self._actors = [self._start() for _ in range(count)]
        ready = [actor.set_up.remote(place) for place, actor in enumerate(self._actors)]
        for reference in ready:
            try:
                self.result_of(reference)
            except self.died as error:
                raise StageError(
                    f"a {self._role} actor died while it was set up: {cause_of_death(error)}"
                ) from None

    @property
    def count(self) -> int:
        """Number of actors."""
        return len(self._actors)

    @property
    def ray(self) -> Any:
        """The library."""
        return self._cluster.ray

    @property
    def died(self) -> Any:
        """The type of Ray's errors about actors that died or cannot be reached."""
        return self.ray.exceptions.RayActorError

    def actor(self, place: int) -> Any:
        """Return Ray's handle of an actor."""
        return self._actors[place]

    def ask(self, place: int, method: str, *arguments: Any) -> ActorCall:
        """Call a method of an actor, without waiting for the result."""
        actor = self._actors[place]
        return ActorCall(place, method, arguments, actor, getattr(actor, method).remote(*arguments))

    def answer(self, call: ActorCall) -> Any:
        """Wait for the result of a call.

        Raises:
            StageError: actors died at it `MAX_DEATHS` times.
            Exception: what the method raised.
        """
        cause = ""
        for _ in range(MAX_DEATHS):
            try:
                return self.result_of(call.reference)
            except self.died as error:
                cause = cause_of_death(error)
            with self._lock:
                if self._actors[call.place] is call.actor:
                    self.replace(call.place, cause)
            call = self.ask(call.place, call.method, *call.arguments)
        raise StageError(
            f"{self._role} actors died {MAX_DEATHS} times at the same work: {cause}",
            "give each more memory, or a larger share of a GPU",
        )

    def result_of(self, reference: Any) -> Any:
        """Wait for a result; raises what the method raised."""
        try:
            return self.ray.get(reference)
        except self.ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, BadSample | ConfigError | StageError):
                raise cause from None
            raise StageError(f"a {self._role} actor failed: {error_line(cause)}") from error

    def replace(self, place: int, cause: str) -> None:
        """Start another actor in the place of one that died."""
        self._tell(f"a {self._role} actor died ({cause}); it is replaced")
        self._kill(self._actors[place])
        self._actors[place] = self._start()
        with suppress(self.died):  # whoever asks it next finds it dead, too
            self.result_of(self._actors[place].set_up.remote(place))
            self.prepare(place)

    def close(self) -> None:
        """End all actors."""
        for actor in self._actors:
            self._kill(actor)

    def _start(self) -> Any:
        return self._cluster.start(
            self._kind,
            self._share,
            *self._arguments,
            threads=self._share.threads,
            concurrency=self._concurrency,
        )

    def _kill(self, actor: Any) -> None:
        with suppress(Exception):  # it is dead already
            self.ray.kill(actor)
