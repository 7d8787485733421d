"""What recipes name: the catalogues of built-in names, and a user's own by `package.module:name`. Loads no torch."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module, util
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar

from audiollm.errors import ConfigError, suggestion

Kind = TypeVar("Kind")
FILE_REMEDY = (
    "name my_rewards.py in the folder where you start as my_rewards:function, or install its package"
)
GROUP = "audiollm.catalogs"


@dataclass(frozen=True)
class Catalog:
    """The names of a kind."""

    entries: Mapping[str, str]
    """Each name with a sentence about it; empty where its name says all."""
    own: str
    """How a user adds one: a sentence."""


def catalog_kinds() -> list[str]:
    """The kinds that can be listed, in alphabetical order."""
    return sorted(entry.name for entry in entry_points(group=GROUP))


def load_catalog(kind: str) -> Catalog:
    """Load the catalog of a kind.

    Raises:
        ConfigError: there is no such kind, with the nearest that there is.
    """
    entries = {entry.name: entry for entry in entry_points(group=GROUP)}
    if kind not in entries:
        raise ConfigError(f"no such kind: {kind!r}", "list", suggestion(kind, entries))
    load: Callable[[], Catalog] = entries[kind].load()
    return load()


def entry_point_catalog(group: str, own: str) -> Catalog:
    """The catalog of a kind that is added by entry points."""
    return Catalog({entry.name: entry.value for entry in sorted(entry_points(group=group))}, own)


def documented(objects: Mapping[str, Any]) -> dict[str, str]:
    """Names with the first sentence of their docstrings."""
    return {name: _first_sentence(documented_object) for name, documented_object in objects.items()}


def _first_sentence(documented_object: Any) -> str:
    paragraph = " ".join((documented_object.__doc__ or "").split("\n\n")[0].split())
    return paragraph.split(". ")[0].removesuffix(".")


def is_import_path(text: str) -> bool:
    """Whether a text is `package.module:name` and no file or folder."""
    module, colon, name = text.partition(":")
    dotted = all(word.isidentifier() for word in module.split("."))
    return bool(colon) and dotted and name.isidentifier() and not Path(text).exists()


def import_named(path: str, remedy: str) -> Any:
    """The object at `package.module:name`; modules in the working directory are found, too.

    Raises:
        ConfigError: it cannot be imported.
    """
    module, _, name = path.partition(":")
    try:
        with working_directory():
            return getattr(import_module(module), name)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"cannot be imported: {reason}", path, remedy) from error


def import_of_class(path: str, kind: type[Kind], remedy: str) -> Kind:
    """The object at `package.module:name`, which must be of a class.

    Raises:
        ConfigError: it cannot be imported, or is something else.
    """
    plug_in = import_named(path, remedy)
    if not isinstance(plug_in, kind):
        raise ConfigError(f"is a {type(plug_in).__name__}, and no {kind.__name__}", path, remedy)
    return plug_in


def source_digest(path: str) -> str:
    """SHA-256 of the file of the module in `package.module:name`: a stage's fingerprint changes with it.

    The modules that this one imports do not count. The module is not imported: a run reads the digest before its first
    stage, and again at the stage that uses it.

    Raises:
        ConfigError: there is no such module, it has no source, or its source does not mention the name.
    """
    module, _, name = path.partition(":")
    try:
        with working_directory():
            spec = util.find_spec(module)
    except Exception as error:
        raise ConfigError(
            f"cannot be imported: {type(error).__name__}: {error}", path, FILE_REMEDY
        ) from error
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        raise ConfigError(f"no module {module!r}", path, FILE_REMEDY)
    source = Path(spec.origin).read_bytes()
    words = set(re.findall(r"\w+", source.decode(errors="replace")))
    if name not in words and b"import *" not in source:
        remedy = f"it is looked for in {spec.origin}; {suggestion(name, _definitions(source))}"
        raise ConfigError(f"cannot be imported: the module {module!r} has no {name!r}", path, remedy)
    return hashlib.sha256(source).hexdigest()


def plug_in_facts(names: Iterable[str]) -> list[str]:
    """A line with the digest of its source for each name that is an import path, for a stage's fingerprint."""
    return [f"{name}={source_digest(name)}" for name in names if is_import_path(name)]


def _definitions(source: bytes) -> list[str]:
    """The names of the functions and classes that a module defines."""
    return re.findall(r"^(?:async def|def|class) (\w+)", source.decode(errors="replace"), re.MULTILINE)


@contextmanager
def working_directory() -> Iterator[None]:
    """The working directory as the first place where modules are looked for."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)
