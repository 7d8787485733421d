"""Recipes in YAML to plain data: inheritance, overrides, references, and errors that name file, line and remedy.

Everything here works on safely loaded YAML; typing and unknown keys are the business of `recipe.py`, which
hands every stage's settings to that stage's pydantic model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from audiollm.errors import ConfigError, suggestion

KeyPath = tuple[str | int, ...]
Targets = dict[str, tuple[dict[str, Any], KeyPath]]
"""Names that an override may begin with: the settings that it changes, and their place in the document."""

REQUIRED = "???"
METHOD, METHODS = "method", "methods"
"""Keys of a recipe: the name of a row, and the table of rows that may be laid over the recipe."""
BUDGETS = ("steps", "passes", "minutes", "cpu_minutes")
"""Settings of a training stage of which one may be given: on the command line, it takes the place of the recipe's."""
_SAFE_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""PyYAML's safe loader, in C where it was built so: a tenth of the time."""
_REFERENCE = re.compile(r"\$\$\{|\$\{([^{}]*)\}")


@dataclass
class Document:
    """Plain data with the place that every key came from."""

    data: dict[str, Any]
    origins: dict[KeyPath, str] = field(default_factory=dict)

    def where(self, path: KeyPath) -> str:
        """The origin of the longest known prefix of `path`."""
        for end in range(len(path), -1, -1):
            if path[:end] in self.origins:
                return self.origins[path[:end]]
        return ""


def load_document(path: Path) -> Document:
    """Read a recipe with everything that its `base:` chain says.

    Raises:
        ConfigError: missing file, not YAML, doubled key, circular `base`, or not a mapping.
    """
    return _load_with_base(Path(path), ancestors=())


def lay_method(document: Document, overrides: Sequence[str]) -> Document:
    """Lay the row of `methods` that `method` names over the recipe, as a recipe's keys are over those of its `base`.

    The run is then called `NAME-METHOD`.

    Args:
        overrides: of the command line: `method=ROW` among them comes before the recipe's own.

    Raises:
        ConfigError: there is no such row, with the nearest that there is.
    """
    rows = document.data.pop(METHODS, None)
    if rows is None:
        return document
    names = [value for key, _, value in (text.partition("=") for text in overrides) if key == METHOD]
    method = yaml.safe_load(names[-1]) if names else document.data.get(METHOD)
    if method is None:
        return document
    where = "command line" if names else document.where((METHOD,))
    if not isinstance(rows, dict) or not isinstance(rows.get(method), dict):
        raise ConfigError(f"{METHOD}: no such method: {method!r}", where, suggestion(str(method), rows or ()))
    row = Document(rows[method])
    _copy_origins(document, (METHODS, method), row, ())
    merged = _merge_documents(document, row)
    merged.data["name"] = f"{merged.data['name']}-{method}"
    return merged


def apply_overrides(document: Document, overrides: Sequence[str], targets: Targets) -> None:
    """Write `key.sub=value` overrides into the document; the value is read as YAML.

    The first word is one of the targets (a stage's name) or a top-level key that the recipe has; a new key below a
    stage is allowed here and checked later by the stage's own model.
    """
    for text in overrides:
        key, equals, value = text.partition("=")
        parts = key.split(".")
        if not equals or not all(parts):
            raise ConfigError(f"{text!r} is not key=value", "command line", "example: train.steps=500")
        try:
            parsed, node = yaml.safe_load(value), yaml.compose(value, Loader=yaml.SafeLoader)
        except yaml.YAMLError:
            parsed, node = value, None
        if node is not None:
            _record_lines(node, tuple(parts), "command line", {})  # refuses a key that is given twice
        _write_override(document, parts, parsed, targets)


def resolve(document: Document, used: set[str]) -> Document:
    """The top level with every `${key}` replaced, and nothing left that is `???`.

    Args:
        used: receives the top-level keys that were referred to.
    """
    resolved = Document(dict(document.data), document.origins)
    for key, value in document.data.items():
        if key == "stages":
            continue
        try:
            resolved.data[key] = _resolve_value(value, (key,), document, {}, used)
        except RecursionError:
            raise ConfigError(f"{key}: its references go round in a circle", document.where((key,))) from None
    return resolved


def resolve_settings(
    settings: dict[str, Any],
    path: KeyPath,
    document: Document,
    artifacts: Mapping[str, Mapping[str, str]],
    used: set[str],
) -> dict[str, Any]:
    """One stage's settings, whose place in the document is `path`, with every reference replaced.

    Args:
        artifacts: stage name -> artifact name -> path, of the stages before this one.
        used: receives the top-level keys and stage names that were referred to.
    """
    resolved = _resolve_value(settings, path, document, artifacts, used)
    assert isinstance(resolved, dict)
    return resolved


def referenced_keys(value: Any) -> set[str]:
    """The top-level keys and stage names that the `${references}` in a value name."""
    if isinstance(value, dict | list):
        parts = value.values() if isinstance(value, dict) else value
        return set().union(*map(referenced_keys, parts))
    names = _REFERENCE.findall(value) if isinstance(value, str) else []
    return {name.partition(".")[0] for name in names if name}


def show_path(path: KeyPath) -> str:
    """`('stages', 2, 'train', 'minutes')` as `stages[2].train.minutes`."""
    text = ""
    for key in path:
        text += f"[{key}]" if isinstance(key, int) else f".{key}"
    return text.lstrip(".")


# ---------------------------------------------------------------------------------------------- reading


def _load_with_base(path: Path, ancestors: tuple[Path, ...]) -> Document:
    if path.resolve() in ancestors:
        raise ConfigError(
            f"base: {path} is its own ancestor", str(ancestors[-1]), "remove one of the `base:` lines"
        )
    child = _read_yaml(path)
    base = child.data.pop("base", None)
    if base is None:
        return child
    if not isinstance(base, str):
        raise ConfigError("base: must be the path of a recipe", child.where(("base",)))
    parent_path = path.parent / base
    if not parent_path.is_file():
        raise ConfigError(
            f"base: no such file: {parent_path}",
            child.where(("base",)),
            "the path is relative to this recipe",
        )
    parent = _load_with_base(parent_path, (*ancestors, path.resolve()))
    return _merge_documents(parent, child)


def _read_yaml(path: Path) -> Document:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError("no such recipe", str(path), _recipes_nearby(path)) from None
    except IsADirectoryError:
        raise ConfigError("is a folder", str(path), "give the path of a .yaml file in it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot be read: {error}", str(path), "a recipe is a UTF-8 text file") from None
    try:
        loader = _SAFE_LOADER(text)
        node = loader.get_single_node()
        origins: dict[KeyPath, str] = {}
        if node is not None:  # before it is constructed, which writes what `<<` merges into the node
            _record_lines(node, (), str(path), origins)
        data = None if node is None else loader.construct_document(node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ConfigError(f"not valid YAML: {getattr(error, 'problem', error)}", where) from None
    if not isinstance(data, dict):
        raise ConfigError("must be a mapping of keys to values", str(path), "see recipes/quickstart.yaml")
    return Document(data, origins)


def _record_lines(node: yaml.Node, path: KeyPath, file: str, origins: dict[KeyPath, str]) -> None:
    origins.setdefault(path, f"{file}:{node.start_mark.line + 1}")
    if isinstance(node, yaml.MappingNode):
        keys: set[str] = set()
        for key_node, value_node in node.value:
            key, place = str(key_node.value), f"{file}:{key_node.start_mark.line + 1}"
            if key in keys:
                raise ConfigError(f"{show_path((*path, key))}: given twice", place, "keep one of them")
            keys.add(key)
            origins[(*path, key)] = place
            _record_lines(value_node, (*path, key), file, origins)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _record_lines(item, (*path, index), file, origins)


def _recipes_nearby(path: Path) -> str:
    folder = path.parent if path.parent.is_dir() else Path()
    names = sorted(p.name for p in folder.glob("*.yaml"))
    return suggestion(path.name, names) if names else "give the path of a .yaml file"


# ---------------------------------------------------------------------------------------------- merging


def split_stage(entry: Any) -> tuple[str, str, dict[str, Any]] | None:
    """`{kind: {settings}}` or `{name: n, kind: {settings}}` as (name, kind, settings); None if malformed.

    A stage of a user's own, `module:name`, is called `name` where it has no other.
    """
    if isinstance(entry, str):
        return entry.rpartition(":")[2], entry, {}
    if not isinstance(entry, dict):
        return None
    kinds = [key for key in entry if key != "name"]
    if len(kinds) != 1 or not isinstance(kinds[0], str):
        return None
    kind, settings = kinds[0], entry[kinds[0]]
    name = entry.get("name", kind.rpartition(":")[2])
    if settings is None:
        settings = {}
    return (name, kind, settings) if isinstance(settings, dict) and isinstance(name, str) else None


def _merge_documents(parent: Document, child: Document) -> Document:
    """`child` over `parent`: mappings deeply, stages by name (settings merged, new stages appended)."""
    merged = Document(dict(parent.data), dict(parent.origins))
    merged.origins[()] = child.where(())
    for key, value in child.data.items():
        if key == "stages" and isinstance(value, list) and isinstance(parent.data.get("stages"), list):
            merged.data[key] = _merge_stages(merged, parent.data[key], child, value, (key,), (key,))
        else:
            merged.data[key] = _merge_value(merged.data.get(key), value)
            _copy_origins(child, (key,), merged, (key,))
    return merged


def _merge_stages(
    merged: Document, old: list[Any], child: Document, entries: list[Any], old_path: KeyPath, path: KeyPath
) -> list[Any]:
    """The stages of `old` with those of the child merged in by name; a block's own stages are merged alike."""
    stages = list(old)
    names = [parts[0] if (parts := split_stage(entry)) else None for entry in stages]
    for index, entry in enumerate(entries):
        parts = split_stage(entry)
        target = names.index(parts[0]) if parts and parts[0] in names else len(stages)
        place, new_place = (*path, index), (*old_path, target)
        before = split_stage(stages[target]) if target < len(stages) else None
        if parts is None or before is None:
            stages.append(entry)
            names.append(parts[0] if parts else None)
            _copy_origins(child, place, merged, new_place)
            continue
        name, kind, settings = parts
        if before[1] != kind:
            stages[target] = {"name": name, kind: settings}
            _copy_origins(child, place, merged, new_place)
            continue
        new_settings, inner = dict(settings), settings.get("stages")
        inherited = before[2].get("stages")
        if isinstance(inner, list) and isinstance(inherited, list):
            inner_path, new_path = (*place, kind, "stages"), (*new_place, kind, "stages")
            new_settings["stages"] = _merge_stages(merged, inherited, child, inner, new_path, inner_path)
            _copy_origins(child, place, merged, new_place, but=inner_path)
        else:
            _copy_origins(child, place, merged, new_place)
        stages[target] = {"name": name, kind: _merge_value(before[2], new_settings)}
    return stages


def _merge_value(old: Any, new: Any) -> Any:
    if isinstance(old, dict) and isinstance(new, dict):
        return {**old, **{key: _merge_value(old.get(key), value) for key, value in new.items()}}
    return new


def _copy_origins(
    source: Document, path: KeyPath, target: Document, new_path: KeyPath, but: KeyPath | None = None
) -> None:
    for key, where in source.origins.items():
        if key[: len(path)] == path and (but is None or key[: len(but)] != but):
            target.origins[(*new_path, *key[len(path) :])] = where


# ------------------------------------------------------------------------------------------- overriding


def _write_override(document: Document, parts: list[str], value: Any, targets: Targets) -> None:
    head, where = parts[0], "command line"
    if len(parts) > 1 and head in targets:
        container, path = targets[head]
        inner_keys = parts[1:]
    elif head in document.data and head != "stages":
        path, container, inner_keys = (), document.data, parts
    else:
        known_keys = [key for key in document.data if key != "stages"] + [f"{name}." for name in targets]
        raise ConfigError(
            f"{'.'.join(parts)}: this recipe has no such key", where, suggestion(head, known_keys)
        )
    for inner_key in inner_keys[:-1]:
        inner = container.get(inner_key)
        if not isinstance(inner, dict):
            inner = container[inner_key] = {}
        container, path = inner, (*path, inner_key)
    container[inner_keys[-1]] = value
    document.origins[(*path, inner_keys[-1])] = where
    if path and inner_keys[-1] in BUDGETS and value is not None:
        _drop_budgets(document, container, path, inner_keys[-1])


def _drop_budgets(document: Document, container: dict[str, Any], path: KeyPath, kept_budget: str) -> None:
    """Take the recipe's own budget out of a stage whose command line gives one of another kind."""
    for budget in BUDGETS:
        if budget != kept_budget and document.origins.get((*path, budget)) != "command line":
            container.pop(budget, None)


# -------------------------------------------------------------------------------------------- resolving


def _resolve_value(
    value: Any, path: KeyPath, document: Document, artifacts: Mapping[str, Mapping[str, str]], used: set[str]
) -> Any:
    if isinstance(value, dict):
        return {k: _resolve_value(v, (*path, k), document, artifacts, used) for k, v in value.items()}
    if isinstance(value, list):
        return [_resolve_value(v, (*path, i), document, artifacts, used) for i, v in enumerate(value)]
    if not isinstance(value, str):
        return value
    if value == REQUIRED:
        key = show_path(path)
        raise ConfigError(f"{key}: required", document.where(path), f"give it: {path[-1]}=...")
    reference = _REFERENCE.fullmatch(value)
    if reference and reference.group(1) is not None:
        name = reference.group(1)
        if (name,) in document.origins:  # what is wrong with the value is mended where the key has it
            document.origins[path] = document.origins[(name,)]
        return _look_up(name, path, document, artifacts, used)

    def substitute(match: re.Match[str]) -> str:
        if match.group(1) is None:
            return "${"
        return str(_look_up(match.group(1), path, document, artifacts, used))

    return _REFERENCE.sub(substitute, value)


def _look_up(
    name: str, path: KeyPath, document: Document, artifacts: Mapping[str, Mapping[str, str]], used: set[str]
) -> Any:
    where, head = document.where(path), name.partition(".")[0]
    if "." in name:
        artifact = name.partition(".")[2]
        if head in artifacts:
            if artifact in artifacts[head]:
                used.add(head)
                return artifacts[head][artifact]
            raise ConfigError(
                f"{show_path(path)}: stage {head!r} makes no {artifact!r}",
                where,
                suggestion(artifact, artifacts[head]),
            )
    elif head in document.data and head != "stages":
        used.add(head)
        value = document.data[head]
        if value == REQUIRED:
            raise ConfigError(f"{head}: required", document.where((head,)), f"give it: {head}=...")
        if (head,) == path:
            raise ConfigError(f"{head}: refers to itself", where)
        return _resolve_value(value, (head,), document, artifacts, used)
    known_names = [key for key in document.data if key != "stages"]
    known_names += [
        f"{stage}.{artifact}" for stage, stage_artifacts in artifacts.items() for artifact in stage_artifacts
    ]
    raise ConfigError(
        f"{show_path(path)}: ${{{name}}} refers to nothing above this stage",
        where,
        suggestion(name, known_names),
    )
