"""A recipe is a list of stages. This file: what a stage is, and a recipe read, typed and checked before any work.

`runner.py` executes what `load_recipe` returns.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, ValidationError, ValidationInfo
from pydantic_core import ErrorDetails, InitErrorDetails

from audiollm.errors import ConfigError, suggestion
from audiollm.files.atomic import file_digest
from audiollm.hub_models.downloads import HubError
from audiollm.hub_models.folders import hub_access, hub_folder, hub_source
from audiollm.hub_models.names import SNAPSHOT_PATTERN, hub_id, snapshot_name
from audiollm.hub_models.needed_files import Contents
from audiollm.recipe.config import (
    METHOD,
    Document,
    KeyPath,
    apply_overrides,
    lay_method,
    load_document,
    referenced_keys,
    resolve,
    resolve_settings,
    show_path,
    split_stage,
)
from audiollm.recipe.other_names import our_name
from audiollm.recipe.plug_ins import Catalog, import_of_class, is_import_path, plug_in_facts
from audiollm.recipe.repeat import expand, override_targets

HERE = "here"
DOWNLOAD = "download"
"""Top-level key of a recipe: whether models that are named as on the hub are fetched."""
_SHARD_INDEX = ("index.json", "index.safetensors")
_HASHED_BYTES = 2**20
"""A file of at most so many bytes is known by its content, a larger one by size and time."""

Value = TypeVar("Value")
Size = Literal["tiny", "small", "300m", "1b", "3b"]
ON_THIS_MACHINE = ("tiny", "small")
"""Sizes of recipes that are planned for the machine in front of the user, whose speed is measured."""


def check_input(path: Path, info: ValidationInfo) -> Path:
    """Accept an earlier stage's artifact or something that exists, and note the latter for the fingerprint."""
    return checked_path(path, info.context or {})


def checked_path(path: Path, context: Mapping[str, Any]) -> Path:
    """Accept an earlier stage's artifact or something that exists.

    Args:
        context: the context in which a recipe's settings are validated. What exists is added to its `inputs`.

    Raises:
        ValueError: it is neither, and `context` has no list `absent` that receives it.
    """
    path = path.expanduser()
    if str(path) in context.get("artifacts", ()):
        return path
    if not path.exists():
        if "absent" not in context:
            raise ValueError(f"no such file or folder: {path}")
        context["absent"].append(path)
        return path
    context.get("inputs", []).append(path)
    return path


@contextmanager
def located(*path: str | int) -> Iterator[None]:
    """Complaints about settings that are validated by themselves name these settings' place in the stage.

    Raises:
        ValidationError: the same, or a `ValueError` as one, below `path`.
    """
    try:
        yield
    except ValidationError as error:
        problems = [
            InitErrorDetails(
                type=problem["type"],
                loc=(*path, *problem["loc"]),
                input=problem["input"],
                ctx=problem.get("ctx", {}),
            )
            for problem in error.errors(include_url=False)
        ]
        raise ValidationError.from_exception_data(error.title, problems) from None
    except ValueError as error:
        problem = InitErrorDetails(type="value_error", loc=path, input={}, ctx={"error": error})
        raise ValidationError.from_exception_data("settings", [problem]) from None


def plain_problem(problem: ErrorDetails) -> str:
    """What pydantic has against a setting, in words that need no knowledge of its types."""
    if problem["type"] == "union_tag_invalid":
        context = problem["ctx"]
        expected_tags = [name.strip("' ") for name in context["expected_tags"].split(",")]
        return f"{context['tag']!r} is none of {', '.join(expected_tags)}"
    if problem["type"] in ("dict_type", "model_type"):
        return "input should be a group of settings (`name: value` lines, or {name: value})"
    if problem["type"] == "extra_forbidden":
        return "no such setting"
    message = problem["msg"].removeprefix("Value error, ")
    return message[:1].lower() + message[1:]


InputPath = Annotated[Path, AfterValidator(check_input)]
"""A file or folder that a stage reads: an earlier stage's artifact, or a path that exists when the run starts."""


def from_hub(contents: Contents) -> BeforeValidator:
    """The part of a setting's type that turns a model's name on the hub into a folder; other values stay."""

    def resolve_name(place: Any) -> Any:
        is_name = isinstance(place, str | Path) and hub_id(str(place)) is not None
        return hub_folder(place, contents) if is_name else place

    return BeforeValidator(resolve_name)


FROM_HUB = from_hub("model")
InputModel = Annotated[InputPath, FROM_HUB]
"""A model's folder: as `InputPath`, or by its name on the hub (`openai/whisper-base`, `NAME@REVISION`)."""
ModelPath = Annotated[Path, FROM_HUB]
"""A model's folder, or its name on the hub. Whether the folder is there is seen later."""


def _check_source(source: str, info: ValidationInfo) -> str:
    return source if is_import_path(source) else str(check_input(hub_folder(source), info))


InputSource = Annotated[str, BeforeValidator(str), AfterValidator(_check_source)]
"""A model's file or folder, its name on the hub, or `package.module:name` of a function that returns it."""
ModelSource = Annotated[str, BeforeValidator(str), AfterValidator(hub_source)]
"""A model's folder (`KIND=FOLDER`, too), its name on the hub, an import path, or a word of the setting's own."""


class StageConfig(BaseModel):
    """Base of every stage's settings. Fields named `size` and `seed` default to the recipe's."""

    incidental: ClassVar[frozenset[str]] = frozenset()
    """Settings that change how a stage runs, and not what it makes: a changed one does not start it afresh."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, protected_namespaces=())


def required(value: Value | None) -> Value:
    """The setting's value: optional in a recipe, and filled in by the stage's rules of `size`."""
    assert value is not None
    return value


@dataclass
class StagePlan:
    """The figures that `audiollm plan` prints for one stage, before anything runs."""

    parameters: int = 0
    tokens: float = 0.0
    memory_mb: float = 0.0
    """Memory of one device that does the work alone."""
    memory_mb_on: Callable[[int], float] | None = None
    """Memory of each of several devices, with their number; None: the stage runs on one."""
    disk_mb: float = 0.0
    seconds: float | None = None
    """As measured on CPUs, or the budget; None: by `flops`, or not known."""
    core_seconds: float | None = None
    """Seconds of work that does not scale with operations, on one core of the machine that they were measured on
    (`audiollm.commands.machine_speed.REFERENCE`)."""
    seconds_on: Callable[[int, float], float] | None = None
    """Seconds on several devices, with their number and 10^12 operations per second of each; None: by `flops`."""
    flops: float = 0.0
    """Floating-point operations of a training, all devices together."""
    gradient_bytes: float = 0.0
    """Gradients that each of several devices sums with the others in a training, by `flops`."""
    sound_s: float = 0.0
    """Seconds of sound that a training goes through, all devices together; 0: not known."""
    details: Callable[[int, float], Sequence[str]] | None = None
    """Lines that stand below the table, as `seconds_on` has it."""
    note: str = ""
    facts: dict[str, float] = field(default_factory=dict)
    """For later stages' plans."""
    model: Mapping[str, Any] | None = None
    """The config.json of the model that it makes, for stages that start from it."""
    artifacts: Mapping[str, Path] = field(default_factory=dict)
    """Where they will be; told by who asks for the plans, for stages that read them."""


def planned_fact(plans: Mapping[str, StagePlan], path: Path, fact: str) -> float:
    """A fact of the planned stage that makes a file or folder; 0 where none does, or where it is not known."""
    return sum(plan.facts.get(fact, 0.0) for plan in plans.values() if path in plan.artifacts.values())


@dataclass(frozen=True)
class Stage:
    """One kind of stage, as found through the entry-point group `audiollm.stages`.

    Args:
        kind: its name in a recipe.
        config: the pydantic model of its settings.
        run: does the work below `context.folder`, resumes what it finds there, and returns its figures (JSON
            values) for the report.
        artifacts: name -> path below the stage's folder of what it makes; checked after the run.
        help: one line.
        plan: estimates from the settings and the plans of earlier stages, by name.
        reads_run: depends on every earlier stage, and runs also after one of them has failed (the report).
        publish: artifacts that are copied to the run's own folder.
        all_ranks: `run` is called on every rank of a distributed run (it trains), and the first one alone writes;
            else it is called on the first one while the others wait.
        facts: lines from the settings that the fingerprint depends on beside them (the source of a user's functions).
        keeps: names in the stage's folder that stay when it starts afresh: what it knows to be right by itself.
        by_hand: files in the stage's folder that people write: they count in the fingerprint, and nothing deletes them.
        more_artifacts: further artifacts, which its settings ask for.
        refuse: raises a ConfigError before the first stage runs, where the plans of the stages that it reads, by name,
            show that it must end with one.
    """

    kind: str
    config: type[StageConfig]
    run: Callable[[Any, Any], dict[str, Any]]
    artifacts: Mapping[str, str]
    help: str
    plan: Callable[[Any, Mapping[str, StagePlan]], StagePlan] | None = None
    reads_run: bool = False
    publish: tuple[str, ...] = ()
    all_ranks: bool = False
    keeps: tuple[str, ...] = ()
    by_hand: tuple[str, ...] = ()
    facts: Callable[[Any], Sequence[str]] | None = None
    more_artifacts: Callable[[Any], Mapping[str, str]] | None = None
    refuse: Callable[[Any, Mapping[str, StagePlan]], None] | None = None


@dataclass(frozen=True)
class SharedStages:
    """Stages of a recipe whose folders are those of another run: a trial of a sweep has most of its stages so."""

    folders: Mapping[str, Path]
    """The folder of each such stage, by its name."""
    root: Path
    """Fingerprints name paths as seen from here."""


@dataclass(frozen=True)
class RecipeStage:
    """A stage in its place in a recipe, settings typed and references resolved."""

    name: str
    stage: Stage
    config: StageConfig
    folder: Path
    upstream: tuple[str, ...]
    inputs: tuple[Path, ...]
    source: str = ""
    """`module:name` of a user's own stage, whose source the fingerprint depends on; empty: it is an installed one."""
    shared: SharedStages | None = None
    """Stages of its recipe that are those of another run."""

    @property
    def artifacts(self) -> dict[str, Path]:
        more = self.stage.more_artifacts(self.config) if self.stage.more_artifacts else {}
        return {name: self.folder / path for name, path in {**self.stage.artifacts, **more}.items()}

    def settings(self) -> dict[str, Any]:
        return self.config.model_dump(mode="json")

    def hub_models(self) -> list[str]:
        """The models of the hub that it reads, `ORGANIZATION/MODEL@COMMIT`."""
        spelled = re.findall(f'"({SNAPSHOT_PATTERN})"', self.config.model_dump_json())
        names = map(snapshot_name, (*self.inputs, *spelled))
        return sorted({name for name in names if name is not None})

    def fingerprint(self, upstream: Mapping[str, str]) -> str:
        """Changes when the settings that matter, an input file or an upstream fingerprint does.

        A small input counts by path and content, others by path, size and time. The stage's own `facts` count, too. A
        path counts as the place that it names, relative or absolute, from whatever working directory; a model of the
        hub by its commit. What people wrote into the stage's folder counts by its content.
        """
        parts = [self.stage.kind, self._settings_from_root()]
        parts += [f"{name}={upstream[name]}" for name in self.upstream]
        parts += [line for path in self.inputs for line in _stat_lines(path, self._from_root(path))]
        parts += self.stage.facts(self.config) if self.stage.facts else []
        parts += plug_in_facts([self.source])
        by_hand = [path for name in self.stage.by_hand if (path := self.folder / name).is_file()]
        parts += [f"{path.name} {file_digest(path)}" for path in by_hand]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:20]

    def _settings_from_root(self) -> str:
        """The settings that matter as JSON, with inputs and earlier stages' artifacts as `_from_root` names them."""
        settings = self.config.model_dump_json(exclude=set(self.config.incidental))
        spellings = [re.escape(_in_json(str(path))) for path in self.inputs]
        elsewhere = self.shared.folders.values() if self.shared else ()
        spellings += [rf'{re.escape(_in_json(str(folder)))}(?:/[^"]*)?' for folder in elsewhere]
        spellings += [re.escape(_in_json(str(self.folder.parent))) + r'/[^"]*', SNAPSHOT_PATTERN]
        return re.sub(
            f'"({"|".join(spellings)})"',
            lambda match: f'"{_in_json(self._from_root(Path(json.loads(match[0]))))}"',
            settings,
        )

    def _from_root(self, path: Path) -> str:
        """The path as seen from the folder that holds the folder of all runs; a path outside of it is absolute.

        Links count as they are named: their targets may differ between machines. A snapshot in the hub's cache is known
        by model and commit.
        """
        if (name := snapshot_name(path)) is not None:
            return name
        top = self.shared.root if self.shared else self.folder / "../../.."
        root, place = (Path(os.path.normpath(p.absolute())) for p in (top, path))
        return str(place.relative_to(root) if place.is_relative_to(root) else place)


@dataclass(frozen=True)
class Recipe:
    name: str
    path: Path
    size: Size
    seed: int
    folder: Path
    stages: tuple[RecipeStage, ...]
    parameters: dict[str, Any]
    """The top-level keys, resolved (`audio`, `transcripts`, ...)."""


STAGE_REMEDY = "name my_parts.py in the folder where you start as my_parts:stage, or install its package"


@cache
def stage_entry_points() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group="audiollm.stages")}


def stage_catalog() -> Catalog:
    """Stages of recipes."""
    stages = sorted(stage_entry_points().items())
    own = "Your own: a `Stage` at `module:name`, or named by an entry point of the group audiollm.stages."
    return Catalog({kind: entry.load().help for kind, entry in stages}, own)


def find_stage(kind: str, where: str = "", key: str = "") -> Stage:
    """The stage of that kind, or a user's own at `module:name`.

    Raises:
        ConfigError: no installed package has it, with the nearest that there is; or it cannot be imported.
    """
    if is_import_path(kind):
        return import_of_class(kind, Stage, STAGE_REMEDY)
    entries = stage_entry_points()
    if kind not in entries:
        raise ConfigError(f"{key or kind}: no such stage: {kind!r}", where, suggestion(kind, entries))
    stage = entries[kind].load()
    assert isinstance(stage, Stage)
    return stage


def load_recipe(
    path: Path,
    overrides: Sequence[str] = (),
    name: str | None = None,
    runs: Path = Path("runs"),
    absent: list[Path] | None = None,
    shared: SharedStages | None = None,
) -> Recipe:
    """Read, override, resolve and type a whole recipe.

    Args:
        path: the YAML file. `${here}` in it is its folder.
        overrides: `key=value` and `stage.key=value`; a stage of a `repeat` by its own name for all rounds, or with the
            round behind it (`train_2.steps=5`) for one.
        name: the run's name in place of the recipe's.
        runs: the folder of all runs.
        absent: receives the inputs that do not exist (for a plan, which reads none); None: they are an error.
        shared: stages that stay in the folders of another run.

    Raises:
        ConfigError: anything at all that is wrong with it.
    """
    document, replaced = overridden_document(path, overrides)
    used = {METHOD}
    top = resolve(document, used)
    recipe_name = _read_text_key(top, "name", path.stem) if name is None else name
    if not recipe_name.strip() or Path(recipe_name).name != recipe_name or recipe_name.startswith("."):
        raise ConfigError(
            f"name: {recipe_name!r} is not a folder name",
            document.where(("name",)) if name is None else "--name",
            "a word without slashes that does not begin with a dot",
        )
    size, seed = _read_size(top), _read_seed(top)
    folder = runs / recipe_name
    defaults = {"size": size, "seed": seed}
    is_plan = None if absent is None else True
    with hub_access(_read_download(top), config_alone=is_plan, may_lack=is_plan):
        stages = _build_stages(document, folder, defaults, used, absent, shared)
    _refuse_unused(document, used | replaced)
    parameters = {key: value for key, value in top.data.items() if key not in ("stages", HERE)}
    return Recipe(recipe_name, path, size, seed, folder, tuple(stages), parameters)


def overridden_document(path: Path, overrides: Sequence[str]) -> tuple[Document, set[str]]:
    """Read a recipe and override it; its references stand as they are.

    Returns:
        The document, with the recipe's folder below `HERE`, and the top-level keys that it refers to and no override
        names.

    Raises:
        ConfigError: as `load_recipe`, from the file and the keys of the overrides.
    """
    document = lay_method(load_document(path), overrides)
    if HERE in document.data:
        raise ConfigError(f"{HERE}: is the recipe's folder", document.where((HERE,)), "call it otherwise")
    document.data[HERE] = str(path.parent)
    # an override may replace the only setting that refers to a key: the recipe is right all the same
    replaced = referenced_keys(document.data) - {_head(text) for text in overrides}
    targets = override_targets(document)
    early = [text for text in overrides if _head(text) in targets or _head(text) in document.data]
    apply_overrides(document, early, targets)
    expand(document)
    _stage_entries(document)  # what an override cannot name is told first
    apply_overrides(document, [text for text in overrides if text not in early], override_targets(document))
    return document, replaced


# --------------------------------------------------------------------------------------------- top level


def _stage_entries(document: Document) -> list[tuple[str, str, dict[str, Any]]]:
    entries = document.data.get("stages")
    if not isinstance(entries, list) or not entries:
        raise ConfigError("stages: a recipe needs a list of stages", document.where(("stages",)))
    result: list[tuple[str, str, dict[str, Any]]] = []
    for index, entry in enumerate(entries):
        parts = split_stage(entry)
        where, key = document.where(("stages", index)), f"stages[{index}]"
        if parts is None:
            raise ConfigError(f"{key}: not a stage", where, "write it as  - kind: {setting: value}")
        if parts[1] not in stage_entry_points():
            find_stage(parts[1], where, key)
        if parts[0] in [earlier[0] for earlier in result]:
            raise ConfigError(
                f"{key}: a second stage named {parts[0]!r}", where, "give it a `name:` of its own"
            )
        if parts[0] in document.data or Path(parts[0]).name != parts[0] or parts[0].startswith("."):
            raise ConfigError(
                f"{key}: {parts[0]!r} cannot be a stage's name", where, "it is a folder, not a key"
            )
        result.append(parts)
    return result


def _head(override: str) -> str:
    return override.partition("=")[0].partition(".")[0]


def _read_text_key(document: Document, key: str, default: str) -> str:
    value = document.data.get(key, default)
    if not isinstance(value, str):
        raise ConfigError(f"{key}: must be text, not {value!r}", document.where((key,)))
    return value


def _read_size(document: Document) -> Size:
    value = document.data.get("size", "tiny")
    sizes = ("tiny", "small", "300m", "1b", "3b")
    if value not in sizes:
        raise ConfigError(
            f"size: no such size: {value!r}", document.where(("size",)), f"known: {', '.join(sizes)}"
        )
    return value


def _read_seed(document: Document) -> int:
    value = document.data.get("seed", 0)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError(f"seed: must be a whole number from 0, not {value!r}", document.where(("seed",)))
    return value


def _read_download(document: Document) -> bool | None:
    """Whether models of the hub are fetched; None: as the command says."""
    value = document.data.get(DOWNLOAD)
    if value is not None and not isinstance(value, bool):
        where = document.where((DOWNLOAD,))
        raise ConfigError(f"{DOWNLOAD}: must be true or false, not {value!r}", where)
    return value or None  # false is what a recipe has without the key, and --download fetches all the same


def _refuse_unused(document: Document, used: set[str]) -> None:
    reserved = {"name", "size", "seed", "stages", "description", DOWNLOAD, HERE}
    for key in document.data:
        if key not in reserved and key not in used:
            raise ConfigError(
                f"{key}: nothing in this recipe refers to it",
                document.where((key,)),
                suggestion(key, reserved),
            )


# ----------------------------------------------------------------------------------------------- stages


def _build_stages(
    document: Document,
    folder: Path,
    recipe_defaults: Mapping[str, Any],
    used: set[str],
    absent: list[Path] | None,
    shared: SharedStages | None,
) -> list[RecipeStage]:
    stages: list[RecipeStage] = []
    artifacts_by_stage: dict[str, dict[str, str]] = {}
    elsewhere = shared.folders if shared else {}
    for index, (name, kind, settings) in enumerate(_stage_entries(document)):
        path: KeyPath = ("stages", index, kind)
        stage = find_stage(kind)
        referred: set[str] = set()
        resolved = resolve_settings(settings, path, document, artifacts_by_stage, referred)
        used |= referred
        for key, value in recipe_defaults.items():
            if key in stage.config.model_fields:
                resolved.setdefault(key, value)
        config, inputs = _typed(stage, resolved, path, document, artifacts_by_stage, absent)
        if stage.facts is not None:
            stage.facts(config)  # a user's function that is not there ends a run before its first stage
        upstream = tuple(s.name for s in stages if stage.reads_run or s.name in referred)
        source = kind if is_import_path(kind) else ""
        place = elsewhere.get(name, folder / name)
        stages.append(RecipeStage(name, stage, config, place, upstream, tuple(inputs), source, shared))
        artifacts_by_stage[name] = {artifact: str(where) for artifact, where in stages[-1].artifacts.items()}
    return stages


def _typed(
    stage: Stage,
    settings: dict[str, Any],
    path: KeyPath,
    document: Document,
    artifacts_by_stage: Mapping[str, Mapping[str, str]],
    absent: list[Path] | None,
) -> tuple[StageConfig, list[Path]]:
    inputs: list[Path] = []
    artifacts = {
        where for stage_artifacts in artifacts_by_stage.values() for where in stage_artifacts.values()
    }
    lacking: list[Path] = []
    context = {"artifacts": artifacts, "inputs": inputs} | ({} if absent is None else {"absent": lacking})
    try:
        config = stage.config.model_validate(settings, context=context)
    except ValidationError as error:
        raise _explain(error, stage, path, document) from None
    if absent is not None:
        used = set(_paths(config.model_dump()))
        absent += [path for path in lacking if path in used and path not in absent]
    return config, inputs


def _paths(value: Any) -> Iterator[Path]:
    """All paths in settings, written as a path, as an address or as a file's name with its ending; a setting's own
    words (`none`) are neither."""
    if isinstance(value, Mapping):
        value = value.values()
    if isinstance(value, Path) or (isinstance(value, str) and ("/" in value or Path(value).suffix)):
        yield Path(value)
    elif not isinstance(value, str) and isinstance(value, Iterable):
        for inner in value:
            yield from _paths(inner)


def _explain(error: ValidationError, stage: Stage, path: KeyPath, document: Document) -> ConfigError:
    """The first of pydantic's complaints, as a person should meet it; a wrong key comes before one that is missing."""
    problems = error.errors(include_url=False)
    problem = next((entry for entry in problems if entry["type"] == "extra_forbidden"), problems[0])
    location = tuple(problem["loc"])
    full: KeyPath = (*path, *location)
    where, key = document.where(full), show_path(full)
    listing = f"settings of this stage: audiollm run --help-stage {stage.kind}"
    if problem["type"] == "extra_forbidden":
        field_names = _fields_at(stage.config, location[:-1])
        name = str(location[-1])
        near = f"{our_name(name, field_names) or suggestion(name, field_names)}   " if field_names else ""
        return ConfigError(f"{key}: {plain_problem(problem)}", where, f"{near}{listing}")
    if problem["type"] == "missing":
        return ConfigError(f"{key}: required", where, listing)
    message, value = plain_problem(problem), problem.get("input")
    cause = problem.get("ctx", {}).get("error")
    if isinstance(cause, HubError):
        return ConfigError(f"{key}: {cause.message}", where, cause.remedy)
    if "no such file" in message:
        place = show_path(location) if all(isinstance(element, str) for element in location) else location[0]
        return ConfigError(
            f"{key}: {message}", where, f"check the path, or give another: {stage.kind}.{place}=PATH"
        )
    suffix = "" if isinstance(value, (dict, list)) else f", not {value!r}"
    return ConfigError(f"{key}: {message}{suffix}", where, listing)


def _fields_at(model: type[BaseModel], location: Sequence[str | int]) -> list[str]:
    for key in location:
        annotation = model.model_fields[key].annotation if key in model.model_fields else None
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        inner = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
        if not inner:
            return []
        model = inner[0]
    return list(model.model_fields)


def _in_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _stat_lines(path: Path, name: str) -> list[str]:
    """Name, size and time of a file, or of each file of a folder; of one small file its content, which a copy keeps.

    Args:
        name: stands for the path.
    """
    if snapshot_name(path) is not None:  # whose content its commit tells
        return [name]
    if path.is_file():
        stat = path.stat()
        if stat.st_size <= _HASHED_BYTES:
            return [f"{name}\t{hashlib.sha256(path.read_bytes()).hexdigest()}"]
        return [f"{name}\t{stat.st_size}\t{stat.st_mtime_ns}"]
    lines = []
    for folder, folders, files in os.walk(path):
        folders.sort()
        # made beside the tars when they are first opened: a run that goes on would find its input changed by itself
        generated_files = _SHARD_INDEX if any(file.endswith(".tar") for file in files) else ()
        for file in sorted(set(files).difference(generated_files)):
            full = os.path.join(folder, file)
            stat = os.lstat(full)
            lines.append(f"{name}{full.removeprefix(str(path))}\t{stat.st_size}\t{stat.st_mtime_ns}")
    return lines
