"""The family of a model: by the `model_type` in its folder, through the entry points `audiollm.families`."""

from __future__ import annotations

from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from audiollm.errors import ConfigError
from audiollm.families.family import (
    InterpreterFolder,
    ModelFamily,
    ModelFolder,
    PackedFamily,
    SmallGeneratorFolder,
)
from audiollm.files.json_files import read_json_file
from audiollm.models.pretrained import model_folder
from audiollm.recipe.plug_ins import Catalog, entry_point_catalog

if TYPE_CHECKING:
    from audiollm.families.interpreting import InterpretingModel
    from audiollm.families.packed_training import PackedTraining
    from audiollm.generation.speaking.speech_generator import SpeechGenerator
    from audiollm.models.frozen.formats import GenerationFormat
    from audiollm.train.supervised_settings import TrainConfig

GROUP = "audiollm.families"
ANY_OTHER = "transformers"
"""Entry point of the family of all models that no other entry point names."""


def open_model_folder(folder: Path | str) -> ModelFolder:
    """Open the folder of a model, or of the stage that trained it.

    Raises:
        ConfigError: no model is there, or no installed package knows its `model_type`.
    """
    path = model_folder(Path(folder))
    return _family_in(path).open(path)


def is_packed(folder: Path | str) -> bool:
    """Whether `train` packs the samples of the model in a folder as rows of text and codes.

    Raises:
        ConfigError: as `open_model_folder`.
    """
    return isinstance(_family_in(model_folder(Path(folder))), PackedFamily)


def packed_training(config: TrainConfig) -> PackedTraining | None:
    """How `train` packs samples for the model in `start`, or for one from scratch; None: it trains a policy.

    A `start` that is not there yet is of the kind that `train` makes from scratch.
    """
    family = family_of(config.shape.model_type, Path("shape.kind"))
    if config.start is not None:
        with suppress(ConfigError):
            family = _family_in(model_folder(config.start))
    return family.packed_training(config) if isinstance(family, PackedFamily) else None


def load_speech_generator(
    folder: Path | str, codec: Path | str | None = None, dtype: GenerationFormat = "fp32"
) -> SpeechGenerator:
    """Load the model in a folder to speak, on the default device.

    Args:
        codec: folder of its codec; None: that of its run, where it needs one.
        dtype: how its linear layers are held in memory.

    Raises:
        ConfigError: no model is there, it answers in words alone, it or its codec does not load, or its family holds
            weights in float32 alone.
    """
    model = open_model_folder(folder)
    place = None if codec is None else Path(codec)
    if dtype == "fp32":
        return model.generator(place)
    if not isinstance(model, SmallGeneratorFolder):
        raise ConfigError("models of this family are held in float32 alone", str(folder), "leave out --dtype")
    return model.small_generator(place, dtype)


def load_interpreter(folder: Path | str, codec: Path | str | None = None) -> InterpretingModel:
    """Load the model in a folder to interpret speech, on the default device.

    Args:
        codec: as `load_speech_generator` has it.

    Raises:
        ConfigError: no model is there, its family cannot act while it listens, or it or its codec does not load.
    """
    model = open_model_folder(folder)
    if not isinstance(model, InterpreterFolder):
        raise ConfigError(
            "models of this family cannot act while they listen, nor tell what they look at in a recording",
            str(folder),
            "give a DualFFN, as `train` makes them from scratch",
        )
    return model.interpreter(None if codec is None else Path(codec))


def family_catalog() -> Catalog:
    """Families of models, by `model_type`."""
    own = "Your own: a `ModelFamily`, named by an entry point of the group audiollm.families; docs/adding_a_model.md."
    return entry_point_catalog(GROUP, own)


def family_of(model_type: str, place: Path) -> ModelFamily:
    """Return the family of a `model_type`.

    Args:
        place: where it was read, for errors.

    Raises:
        ConfigError: no installed package knows it.
    """
    entries = {entry.name: entry for entry in entry_points(group=GROUP)}
    entry = entries.get(model_type) or entries.get(ANY_OTHER)
    if entry is None:
        raise ConfigError(
            f"model_type {model_type!r}: no family of models is installed",
            str(place),
            "install audiollm again (`make setup`)",
        )
    family: ModelFamily = entry.load()
    return family


def _family_in(path: Path) -> ModelFamily:
    kind = str(read_json_file(path / "config.json", dict).get("model_type"))
    return family_of(kind, path / "config.json")
