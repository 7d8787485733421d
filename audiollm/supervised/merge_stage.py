"""The stage `merge_models`: models that were trained side by side become one (PAFT, arXiv 2406.17923)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from audiollm.errors import ConfigError, StageError
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import InputModel, Stage, StageConfig, StagePlan
from audiollm.train.settings import MergeMethod


class MergedModel(BaseModel):
    """A trained model, and the factor of what it learned."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    model: InputModel
    weight: float = 1.0


class MergeModelsConfig(StageConfig):
    """Settings of `merge_models`."""

    base: InputModel
    """The model from which all of these were trained."""
    models: list[MergedModel] = Field(min_length=2)
    """Folders of trained models, or `{model, weight}`; what the first one's says about sampling, speakers and codec is
    said of the merged one."""
    method: MergeMethod = "ties"
    """`linear`: the weighted sum of what they learned; `ties`: the largest changes, where they agree in sign;
    `dare_linear`: a random part of the changes, scaled up."""
    density: float = Field(0.5, gt=0, le=1)
    """Share of the changes that `ties` and `dare_linear` keep."""
    seed: int = 0
    """Of `dare_linear`."""

    @field_validator("models", mode="before")
    @classmethod
    def _paths_or_settings(cls, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        return [item if isinstance(item, dict) else {"model": item} for item in value]

    @model_validator(mode="after")
    def _density_is_read(self) -> MergeModelsConfig:
        if self.method == "linear" and "density" in self.model_fields_set:
            raise ValueError("density is set, but method: linear keeps all changes: leave it out")
        return self


def run_merge_models(config: MergeModelsConfig, context: Context) -> dict[str, Any]:
    """Write the merged model to `model`.

    Raises:
        StageError: a folder without a model, or models that are not of one class, shape and vocabulary.
    """
    from audiollm.models.pretrained import StoredWeights, model_folder
    from audiollm.supervised.merging import merge_models

    try:
        total = len(StoredWeights(model_folder(config.base)).names)
        with context.progress("merging", total) as bar:
            changed = merge_models(
                config.base,
                [trained_model.model for trained_model in config.models],
                [trained_model.weight for trained_model in config.models],
                context.folder / "model",
                config.method,
                config.density,
                config.seed,
                lambda: bar.advance(bar.task_ids[0]),
            )
    except ConfigError as error:
        raise StageError(str(error), "", 2) from error
    return {"models": len(config.models), "tensors": total, "changed_tensors": changed}


def _plan_merge(config: MergeModelsConfig, plans: Mapping[str, StagePlan]) -> StagePlan:
    return StagePlan(
        memory_mb=500, note=f"{len(config.models)} models, {config.method}; memory: one whole model"
    )


STAGE = Stage(
    kind="merge_models",
    config=MergeModelsConfig,
    run=run_merge_models,
    artifacts={"checkpoint": "model"},
    help="merge models that were trained side by side from the same one",
    plan=_plan_merge,
)
