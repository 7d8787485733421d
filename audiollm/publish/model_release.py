"""A model or a codec as a release: its files, its card and the samples to play."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from audiollm.codec import codec_digest, default_codec_folder, load_codec
from audiollm.errors import ConfigError
from audiollm.files.json_files import config_folder, read_json_file
from audiollm.files.tensors import open_tensors
from audiollm.generation.engine.defaults import read_trained
from audiollm.hub_models.names import snapshot_name
from audiollm.hub_models.needed_files import CODEC_FOLDER
from audiollm.models.layouts import BOSON, HIGGS, OURS
from audiollm.models.model_card import MARK
from audiollm.models.processor_files import CODEC_KIND
from audiollm.publish.licences import Licence, front_matter
from audiollm.publish.lineage import ModelOrigin, base_models, find_origin, generated_samples
from audiollm.publish.published_card import PUSH_MARK, SECTIONS_MARK, ModelFacts, render_model_card
from audiollm.publish.release_files import (
    README,
    ReleaseFile,
    select_model_files,
    without_machine_paths,
)
from audiollm.publish.scores import run_evaluations, score_folders
from audiollm.rl.critic.model import FACTS_FILE

NUM_SAMPLES = 6
LANGUAGE_CODE = re.compile(r"[a-z]{2,3}")
"""ISO 639, as hubs take it."""
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_TEMPLATE_MARK = "[More Information Needed]"
"""Stands in cards that libraries write, and that nobody has filled in."""
_CODEC_GROUPS = ("audiollm.codecs", "audiollm.autoencoders")


@dataclass(frozen=True)
class Release:
    """All that goes up to a repository."""

    repository_type: str
    """`model` or `dataset`."""
    files: tuple[ReleaseFile, ...]
    card: str
    """The content of README.md, which is one of the files."""
    omitted: tuple[tuple[str, str], ...] = ()
    """Names of files, stages and folders that are left out, each with the reason."""


@dataclass(frozen=True)
class ReleaseOptions:
    """What a person says of a release.

    Raises:
        ConfigError: a language that is no code, or a name that no hub has.
    """

    name: str
    """`ORGANIZATION/NAME`."""
    languages: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ()
    """Data sets on the hub that it was trained on or made from."""
    bases: tuple[str, ...] = ()
    """Models on the hub that it began from; empty: as its run says."""
    scores: tuple[Path, ...] = field(default=())
    """Folders of `audiollm evaluate`."""

    def __post_init__(self) -> None:
        for language in self.languages:
            if not LANGUAGE_CODE.fullmatch(language):
                raise ConfigError(
                    f"{language!r} is no code of a language", "--language", "give en, de, yue, ..."
                )
        for option, names in (("--dataset", self.datasets), ("--base", self.bases)):
            for name in names:
                if not _HUB_NAME.fullmatch(name):
                    raise ConfigError(f"{name!r} is no name on a hub", option, "give ORGANIZATION/NAME")


def model_release(
    folder: Path, licence: Licence, options: ReleaseOptions, samples: bool = True, codec: bool = True
) -> Release:
    """Gather the release of a model's folder.

    Args:
        folder: with config.json.
        samples: whether clips that the model generated in its run go up.
        codec: whether the codec of a language model goes up beside it.

    Raises:
        ConfigError: see `select_model_files` and `score_folders`.
        DamagedFile: weights are not whole.
    """
    origin, kind = find_origin(folder), _card_kind(folder)
    selection = select_model_files(folder)
    files, omitted = list(selection.files), list(selection.refused)
    codec_name = ""
    if kind in ("speech", "hearing"):
        codec_folder = _find_model_codec(folder)
        if codec_folder is not None and codec:
            _check_codec(folder, codec_folder)
        codec_name = _published_codec(codec_folder)
        if codec and codec_folder is not None and not codec_name:
            inner = select_model_files(codec_folder, f"{CODEC_FOLDER}/")
            files, omitted = [*files, *inner.files], [*omitted, *inner.refused]
    clips = generated_samples(origin, NUM_SAMPLES) if samples else []
    files += [ReleaseFile(clip.name, clip.path) for clip in clips]
    evaluations, stages_left_out = run_evaluations(origin)
    evaluations += score_folders(options.scores)
    has_codec = any(file.name.startswith(f"{CODEC_FOLDER}/") for file in files)
    in_transformers = kind == "speech" and has_codec and _loads_in_transformers(folder, files)
    facts = ModelFacts(
        name=options.name,
        kind=kind if kind != "speech" or has_codec or codec_name else "text",
        rows=tuple(_fact_rows(folder, origin)),
        licence=licence,
        languages=options.languages,
        datasets=options.datasets,
        bases=options.bases or tuple(base_models(origin)),
        codec_name=codec_name,
        has_codec=has_codec,
        in_transformers=in_transformers,
        clips=tuple(clips),
        evaluations=tuple(evaluations),
        prose=_prose_of_people(folder),
        architecture=_architecture(folder),
    )
    card = render_model_card(facts)
    if licence.file is not None:
        files = [file for file in files if file.name != licence.file.name] + [licence.file]
    files = [ReleaseFile(README, card.encode()), *files]
    return Release("model", tuple(files), card, (*omitted, *stages_left_out))


def _card_kind(folder: Path) -> str:
    """`codec`, `speech` or `hearing` (a DualFFN), or `listener`.

    Raises:
        ConfigError: a model of another kind.
    """
    config = read_json_file(folder / "config.json", dict)
    model_type = str(config.get("model_type"))
    if any(entry.name == model_type for group in _CODEC_GROUPS for entry in entry_points(group=group)):
        return "codec"
    if (folder / FACTS_FILE).exists():
        raise ConfigError(
            "a reward model or critic has no card yet: its head would stay here",
            str(folder / FACTS_FILE),
            "push the model that it judged, or its policy",
        )
    if model_type in (HIGGS, OURS, BOSON):
        return "hearing" if config.get("audio_encoder") else "speech"
    families = {entry.name for entry in entry_points(group="audiollm.families")}
    if model_type.startswith("audiollm_") or model_type in families:
        raise ConfigError(
            f"model_type {model_type!r} has no card yet",
            str(folder / "config.json"),
            "push takes language models of `train`, audio LLMs of transformers, codecs and autoencoders",
        )
    return "listener"


def _loads_in_transformers(folder: Path, files: Sequence[ReleaseFile]) -> bool:
    """Whether the layouts of the model and of the codec among the files are those of transformers' classes."""
    settings = next(file.source for file in files if file.name == f"{CODEC_FOLDER}/config.json")
    codec = json.loads(settings if isinstance(settings, bytes) else settings.read_bytes())
    is_higgs = read_json_file(folder / "config.json", dict).get("model_type") == HIGGS
    return is_higgs and codec.get("model_type") == CODEC_KIND and (folder / "processor_config.json").is_file()


def _find_model_codec(folder: Path) -> Path | None:
    """The folder of a language model's codec: that in its config.json, or the one beside it or of its run."""
    named = read_json_file(folder / "config.json", dict).get("audio_tokenizer_id")
    places = [Path(named)] if isinstance(named, str) and named else []
    for place in (*places, default_codec_folder(folder)):
        if place.is_dir():
            return config_folder(place, "codec", "give the folder of a saved codec")
    return None


def _check_codec(folder: Path, codec_folder: Path) -> None:
    """See that a codec is the one that a model was trained with: another's codes stand for other sounds.

    Raises:
        ConfigError: it is not.
    """
    digest = read_trained(folder).codec_digest
    if digest is not None and codec_digest(load_codec(codec_folder)) != digest:
        raise ConfigError(
            f"another codec than that of the model {folder}: its codes stand for other sounds",
            str(codec_folder),
            "train the model again on its codes, or push without it (--no-codec)",
        )


def _published_codec(folder: Path | None) -> str:
    """The hub's name of a codec that others published; empty: it is of this machine."""
    name = snapshot_name(folder) if folder is not None else None
    return "" if name is None else name.partition("@")[0]


def _fact_rows(folder: Path, origin: ModelOrigin) -> list[tuple[str, str]]:
    """Rows of the table of facts: from the card that was saved with the model, else from its files."""
    saved = front_matter(folder / README)[1]
    rows = [
        (cells[1].strip(), cells[2].strip())
        for line in (saved.splitlines() if MARK in saved else ())
        if line.startswith("| ") and len(cells := line.split("|")) == 4 and cells[1].strip()
    ]
    if not rows:
        config = read_json_file(folder / "config.json", dict)
        rows = [("Parameters", f"{_num_parameters(folder):,}"), ("Layout", f"`{config.get('model_type')}`")]
        if origin.result is not None:
            rows.append(("Made by", f"stage `{origin.result.kind}`"))
    begun_from = _start_name(origin)
    rows = [(key, begun_from if key == "Begun from" and begun_from else text) for key, text in rows]
    return [row for row in rows if row[0] != "Licence of the weights" and row[1] != "not stated"]


def _start_name(origin: ModelOrigin) -> str:
    """The name of the model that a stage began from: the hub's, or that of its stage; empty: none is known."""
    start = origin.result.settings.get("start") if origin.result is not None else None
    if not isinstance(start, str) or not start:
        return ""
    path = Path(start)
    return snapshot_name(path) or (path.parent.name if path.name == "model" else path.name)


def _architecture(folder: Path) -> str:
    """The class in config.json; empty where it names none."""
    names = read_json_file(folder / "config.json", dict).get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def _num_parameters(folder: Path) -> int:
    total = 0
    for path in sorted(folder.glob("*model*.safetensors")):
        with open_tensors(path, "numpy") as file:
            for name in file.keys():  # noqa: SIM118  a method, not a mapping
                shape: Sequence[int] = file.get_slice(name).get_shape()
                size = 1
                for length in shape:
                    size *= length
                total += size
    return total


def _prose_of_people(folder: Path) -> tuple[dict[str, Any], str] | None:
    """The card that a person wrote in the folder; None: there is none."""
    front, body = front_matter(folder / README)
    if not body.strip() or any(mark in body for mark in (MARK, PUSH_MARK, _TEMPLATE_MARK)):
        return None
    prose, mark, _ = body.partition(SECTIONS_MARK)
    if mark:  # of an earlier push, whose scores were those of that time
        front.pop("model-index", None)
    return without_machine_paths(front), prose
