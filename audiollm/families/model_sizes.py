"""Sizes of models and of their data, from files or from the plans of the stages that make them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from audiollm.data.records.opening import open_source
from audiollm.errors import ConfigError
from audiollm.files.tensors import open_tensors
from audiollm.hub_models.folders import is_planned
from audiollm.models.frozen.formats import BYTES_PER_NUMBER
from audiollm.models.pretrained import model_folder
from audiollm.recipe.stages import StagePlan
from audiollm.train.settings import FrozenFormat

TEXT_ROWS = 40
"""Assumed rows of a sample's text, headers and delay together."""
TABLE_SHARE = 0.15
"""Assumed share of a model's parameters that are its table of words, its output head, norms and convolutions."""
ASSUMED_CLIP_S = 10.0
"""Assumed length of a recording, where the data is not there to be looked at."""
ENCODED = "encoded"
"""The fact of a plan: samples whose recordings a frozen encoder has heard before."""


def planned_parameters(model: Path, plans: Mapping[str, StagePlan]) -> int:
    """Parameters of a model that a planned stage makes, or of one that is there; 0 where neither is."""
    maker = next((plan for plan in plans.values() if model in plan.artifacts.values()), None)
    return num_parameters(model) if maker is None else maker.parameters


def frozen_bytes(format: FrozenFormat) -> float:
    """Bytes of a frozen parameter, on average, of a model that is known by its size alone."""
    if format == "fp32":
        return BYTES_PER_NUMBER["fp32"]
    return TABLE_SHARE * BYTES_PER_NUMBER["bf16"] + (1 - TABLE_SHARE) * BYTES_PER_NUMBER[format]


def num_records(source: str) -> int:
    """Return the number of records in a source; 0 where it is not there yet."""
    try:
        return len(open_source(source))
    except ConfigError:
        return 0


def num_parameters(model: Path) -> int:
    """Return the number of parameters in a folder's safetensors; 0 where the folder is not there yet.

    Of a model of the hub whose config.json alone is here, for a plan, they are counted on its class.
    """
    try:
        folder = model_folder(model)
    except ConfigError:
        return 0
    total = 0
    for path in sorted(folder.glob("*.safetensors")):
        with open_tensors(path) as file:
            names = list(file.keys())
            total += sum(math.prod(file.get_slice(name).get_shape()) for name in names)
    return total or (_parameters_of_config(folder) if is_planned(folder) else 0)


def _parameters_of_config(folder: Path) -> int:
    from audiollm.models.audio_llms.loading import parameters_of_config

    try:
        return parameters_of_config(folder)
    except ConfigError:  # of a class that transformers does not have
        return 0
