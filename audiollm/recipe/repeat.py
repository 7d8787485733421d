"""`repeat:` in a recipe: stages that are written once and stand there several times.

Blocks are expanded into ordinary stages before anything else sees them: resuming, fingerprints, plans and reports
know nothing of them.

    - repeat:                                           - repeat:
        times: 3                                            each:
        start: {policy: "${train.checkpoint}"}                dpo: {objective: dpo}
        stages:                                               simpo: {objective: {name: simpo, beta: 2}}
          - sample_answers: {model: "${policy}"}            stages:
          - ...                                               - train_preference: {objective: "${objective}", ...}
        next: {policy: "${train_preference.checkpoint}"}

In the rounds of the first, `${round}` counts from 1, `${policy}` is what `start` gives and then what `next` gives, and
the stages are called `sample_answers_1`, `sample_answers_2`, ...; in the second, `${key}` is `dpo`, `${objective}` its
value, and the stages are `train_preference_dpo`, .... A reference to a stage of the block means that of the same round
or key; behind rounds, the plain name (and `${policy}`) means the last one's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any, NamedTuple, NoReturn

from audiollm.errors import ConfigError, suggestion
from audiollm.recipe.config import Document, KeyPath, Targets, split_stage

REPEAT = "repeat"
_KEYS = ("times", "each", "start", "next", "stages")
_REFERENCE = re.compile(r"\$\{([^{}]*)\}")
_FORM = "see recipes/align/iterative_dpo.yaml and compare.yaml"


class _Pass(NamedTuple):
    """One round, or one key."""

    suffix: str
    values: dict[str, Any]
    """What `${name}` is replaced with."""


class _Block(NamedTuple):
    settings: dict[str, Any]
    path: KeyPath
    stages: list[tuple[str, str, dict[str, Any]]]

    @property
    def names(self) -> list[str]:
        return [name for name, _, _ in self.stages]


def override_targets(document: Document) -> Targets:
    """The settings that the first word of an override may name: of stages, of blocks, and of the stages in blocks."""
    targets: Targets = {}
    entries = document.data.get("stages")
    for index, settings, kind in _normalize_entries(entries, targets, ("stages",)):
        if kind == REPEAT:
            path: KeyPath = ("stages", index, REPEAT, "stages")
            for _ in _normalize_entries(settings.get("stages"), targets, path):
                pass
    return targets


def expand(document: Document) -> None:
    """Replace the blocks of a document by the stages that they stand for.

    Raises:
        ConfigError: a block that is not one.
    """
    entries = document.data.get("stages")
    if not isinstance(entries, list):
        return  # told by who reads the stages
    plain = {parts[0] for entry in entries if (parts := split_stage(entry)) and parts[1] != REPEAT}
    expanded: list[tuple[Any, KeyPath]] = []
    after: dict[str, Any] = {}
    for index, entry in enumerate(entries):
        parts = split_stage(entry)
        if parts is None or parts[1] != REPEAT:
            expanded.append((_replaced(entry, after), ("stages", index)))
            continue
        block = _read_block(document, index, parts[2], plain | after.keys())
        settings: dict[str, Any] = _replaced(block.settings, after)
        passes = list(_passes(document, block, settings))
        for block_pass in passes:
            names = {name: f"{name}_{block_pass.suffix}" for name in block.names}
            for number, (name, kind, inner) in enumerate(block.stages):
                filled_settings = _replaced(_replaced(inner, after), {**block_pass.values, **names})
                expanded.append(
                    ({"name": names[name], kind: filled_settings}, (*block.path, "stages", number))
                )
        if "times" in settings:
            last = passes[-1]
            names = {name: f"{name}_{last.suffix}" for name in block.names}
            carried = _replaced(settings.get("next", {}), {**last.values, **names})
            after |= {**names, **carried}
    _rewrite(document, expanded)


def _normalize_entries(
    entries: Any, targets: Targets, path: KeyPath
) -> Iterator[tuple[int, dict[str, Any], str]]:
    """Write every entry as `{name, kind: settings}`, and note where its settings are."""
    for index, entry in enumerate(entries if isinstance(entries, list) else []):
        parts = split_stage(entry)
        if parts is not None:
            name, kind, settings = parts
            entries[index] = {"name": name, kind: settings}
            targets.setdefault(name, (settings, (*path, index, kind)))
            yield index, settings, kind


def _read_block(document: Document, index: int, settings: dict[str, Any], used_names: set[str]) -> _Block:
    path: KeyPath = ("stages", index, REPEAT)
    for key in settings:
        if key not in _KEYS:
            where = document.where((*path, key))
            raise ConfigError(
                f"stages[{index}].{REPEAT}.{key}: no such setting", where, suggestion(key, _KEYS)
            )
    if ("times" in settings) == ("each" in settings):
        _refuse(document, path, "", "takes `times` or `each`, one of them")
    if ("start" in settings or "next" in settings) and "each" in settings:
        _refuse(
            document,
            path,
            "each",
            "`start` and `next` carry something from round to round: they go with `times`",
        )
    for key in ("each", "start", "next"):
        if not isinstance(settings.get(key, {}), dict):
            _refuse(document, path, key, "must be a mapping of names to values")
    if settings.get("start", {}).keys() != settings.get("next", {}).keys():
        _refuse(document, path, "next", "must give what `start` gives, and nothing else")
    entries = settings.get("stages")
    if not isinstance(entries, list) or not entries:
        _refuse(document, path, "stages", "a block needs a list of stages")
    stages: list[tuple[str, str, dict[str, Any]]] = []
    for number, entry in enumerate(entries):
        parts = split_stage(entry)
        if parts is None or parts[1] == REPEAT:
            reason = "not a stage" if parts is None else "a block in a block"
            _refuse(document, (*path, "stages", number), "", reason)
        if parts[0] in used_names or parts[0] in [name for name, _, _ in stages]:
            _refuse(document, (*path, "stages", number), "", f"a second stage named {parts[0]!r}")
        stages.append(parts)
    return _Block(settings, path, stages)


def _passes(document: Document, block: _Block, settings: dict[str, Any]) -> Iterator[_Pass]:
    if "each" in settings:
        if not settings["each"]:
            _refuse(document, block.path, "each", "must name at least one")
        for key, values in settings["each"].items():
            if not isinstance(values, dict):
                _refuse(document, (*block.path, "each", key), "", "must be a mapping of names to values")
            pass_values = {"key": key, **values}
            _refuse_hidden(document, block, pass_values)
            yield _Pass(str(key), pass_values)
        return
    times = settings["times"]
    if not isinstance(times, int) or isinstance(times, bool) or times < 1:
        _refuse(document, block.path, "times", f"must be a whole number from 1, not {times!r}")
    carried = settings.get("start", {})
    for number in range(1, times + 1):
        values = {"round": number, **carried}
        _refuse_hidden(document, block, values)
        yield _Pass(str(number), values)
        names = {name: f"{name}_{number}" for name in block.names}
        carried = _replaced(settings.get("next", {}), {**values, **names})


def _refuse_hidden(document: Document, block: _Block, values: Mapping[str, Any]) -> None:
    for name in values:
        if name in document.data or name in block.names:
            _refuse(
                document, block.path, "", f"{name!r} is a key of the recipe or a stage: call it otherwise"
            )


def _replaced(value: Any, by: Mapping[str, Any]) -> Any:
    """The value with `${name}` and `${name.artifact}` of these names replaced; all other references stay."""
    if isinstance(value, dict):
        return {key: _replaced(inner, by) for key, inner in value.items()}
    if isinstance(value, list):
        return [_replaced(inner, by) for inner in value]
    if not isinstance(value, str):
        return value
    reference = _REFERENCE.fullmatch(value)
    if reference and reference[1] in by:
        return deepcopy(by[reference[1]])

    def substitute(match: re.Match[str]) -> str:
        head, dot, artifact = match[1].partition(".")
        if head not in by:
            return match[0]
        return f"${{{by[head]}.{artifact}}}" if dot else str(by[head])

    return _REFERENCE.sub(substitute, value)


def _rewrite(document: Document, expanded: list[tuple[Any, KeyPath]]) -> None:
    """Put the stages in place, each with the places in the file that it came from."""
    origins = {
        path: where for path, where in document.origins.items() if path[:1] != ("stages",) or len(path) == 1
    }
    for index, (_, source) in enumerate(expanded):
        for path, where in document.origins.items():
            if path[: len(source)] == source:
                origins[("stages", index, *path[len(source) :])] = where
    document.data["stages"] = [entry for entry, _ in expanded]
    document.origins = origins


def _refuse(document: Document, path: KeyPath, key: str, reason: str) -> NoReturn:
    full = (*path, key) if key else path
    index = path[1]
    inner = "".join(f"[{element}]" if isinstance(element, int) else f".{element}" for element in full[2:])
    raise ConfigError(f"stages[{index}]{inner}: {reason}", document.where(full), _FORM)
