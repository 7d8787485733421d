"""Settings of the records that trainings on answers read. Loads no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from audiollm.train.supervised_settings import SourceConfig


def _one_or_many(value: Any) -> Any:
    sources = value if isinstance(value, list) else [value]
    return [{"path": source} if not isinstance(source, dict | SourceConfig) else source for source in sources]


def _all_or_no_weights(sources: list[SourceConfig]) -> list[SourceConfig]:
    if 0 < sum(source.weight is not None for source in sources) < len(sources):
        raise ValueError("give every one of the samples a weight, or none")
    return sources


SourceList = Annotated[
    list[SourceConfig], Field(min_length=1), BeforeValidator(_one_or_many), AfterValidator(_all_or_no_weights)
]
"""A path, or a list of paths and of `{path, weight}`."""


def weights_of(sources: Sequence[SourceConfig]) -> list[float] | None:
    """Return the weights of sources; None: they follow from their sizes."""
    return [source.weight for source in sources if source.weight is not None] or None


class PTXChoice(BaseModel):
    """Supervised samples beside the answers of a step: a cross entropy term in every update (PTX)."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
    samples: SourceList
    """Samples whose last message is the answer to learn; as `samples` of the stage."""
    weight: float = Field(1.0, gt=0)
    """Weight of the mean cross entropy per token beside the loss of the answers (InstructGPT: 27.8)."""
    batch_size: int | None = Field(None, ge=1)
    """Samples of a step, over all ranks; None: as many as the stage's own."""
