"""Settings of `placement`: the models of `train_policy` that run in Ray actors, and their shares. Loads no torch."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

RANKS: Literal["ranks"] = "ranks"
"""The word for the training ranks in `placement`."""

CRITIC_REASON = (
    "the critic is trained in one root module with the policy, by one optimizer and in one backward pass: it stays "
    "with the training ranks"
)


class ActorShare(BaseModel):
    """Equal Ray actors, and the share of a machine that each takes."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
    actors: int = Field(1, ge=1)
    """Actors over all training ranks, which have equally many each."""
    cpus: float = Field(1.0, gt=0)
    """CPUs of each actor; it computes with as many threads, at least one."""
    gpus: float = Field(0.0, ge=0)
    """GPUs of each actor, or the share of one (0.5: two actors on a GPU)."""

    @field_validator("gpus")
    @classmethod
    def _whole_above_one(cls, value: float) -> float:
        if value > 1 and value != int(value):
            raise ValueError("more than one GPU must be a whole number of them")
        return value

    @property
    def workers(self) -> int:
        """How many there are (`audiollm.cluster.Workers`)."""
        return self.actors

    @property
    def threads(self) -> int:
        """Threads of each."""
        return max(1, int(self.cpus))


class RolloutShare(ActorShare):
    """Actors that sample rollouts; the weights reach them after every update."""

    bucket_mb: float = Field(256.0, gt=0)
    """Weights that travel together, in MB; at most two such buckets are in memory at a time."""
    verify: bool = False
    """Compare SHA-256 of every tensor in every actor with the policy's after each update, which takes time."""


class PlacementChoice(BaseModel):
    """Where rollouts are sampled, rewards scored and the reference computed."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
    rollout: RolloutShare | None = None
    """The actors that sample the answers; None or `ranks`: the training ranks do."""
    reward: ActorShare | None = None
    """The actors that score the answers, as `rollout` has it. Each reward is loaded by one of a rank's actors, in
    turns."""
    reference: ActorShare | None = None
    """The actors that compute the reference's log-probabilities, as `rollout` has it."""
    critic: Literal["ranks"] = RANKS
    """The critic is trained with the policy, by the training ranks."""
    address: str | None = None
    """A running Ray cluster (`auto`, `host:port`, `ray://...`); None: one on this machine, which ends with the run."""

    @field_validator("rollout", "reward", "reference", mode="before")
    @classmethod
    def _ranks_or_shares(cls, value: Any) -> Any:
        if isinstance(value, str):
            if value != RANKS:
                raise ValueError(
                    f"{value!r} is neither `ranks` nor a share of actors, as {{actors: 2, gpus: 0.5}}"
                )
            return None
        return value

    @field_validator("critic", mode="before")
    @classmethod
    def _stays(cls, value: Any) -> Any:
        if value != RANKS:
            raise ValueError(f"{CRITIC_REASON}: leave it out")
        return value

    @model_validator(mode="after")
    def _check_address(self) -> PlacementChoice:
        if self.address is not None and not self.shares:
            raise ValueError("address is set, but nothing is placed in actors: leave it out")
        return self

    @property
    def shares(self) -> dict[str, ActorShare]:
        """The roles that are placed in actors."""
        shares = {"rollout": self.rollout, "reward": self.reward, "reference": self.reference}
        return {role: share for role, share in shares.items() if share is not None}
