"""Licences: the identifiers that model hubs know, and where the licence of a folder is stated."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from audiollm.errors import ConfigError, suggestion
from audiollm.publish.release_files import README, ReleaseFile, licence_file

_IDENTIFIERS = """
    afl-3.0 agpl-3.0 apache-2.0 apple-amlr apple-ascl artistic-2.0 bigcode-openrail-m bigscience-bloom-rail-1.0
    bigscience-openrail-m bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear bsl-1.0 c-uda cc cc-by-2.0 cc-by-2.5
    cc-by-3.0 cc-by-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0
    cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cc-by-nd-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc0-1.0 cdla-permissive-1.0
    cdla-permissive-2.0 cdla-sharing-1.0 creativeml-openrail-m deepfloyd-if-license ecl-2.0 epl-1.0 epl-2.0
    etalab-2.0 eupl-1.1 eupl-1.2 gemma gfdl gpl gpl-2.0 gpl-3.0 intel-research isc lgpl lgpl-2.1 lgpl-3.0 lgpl-lr
    llama2 llama3 llama3.1 llama3.2 llama3.3 llama4 lppl-1.3c mit mpl-2.0 ms-pl ncsa odbl odc-by ofl-1.1 openrail
    openrail++ osl-3.0 pddl postgresql unlicense wtfpl zlib
"""
IDENTIFIERS = frozenset(_IDENTIFIERS.split())
"""Licences that the Hugging Face hub shows by name."""
_REMEDY = "--license IDENTIFIER (apache-2.0, cc-by-4.0, ...), or --license FILE with its text"


@dataclass(frozen=True)
class Licence:
    """The licence of a release."""

    front: dict[str, str]
    """The licence's fields in the front matter of a card."""
    file: ReleaseFile | None = None
    """The licence's text, where the hub has no identifier for it."""

    @property
    def name(self) -> str:
        """The name for people."""
        return self.front.get("license_name", self.front["license"])


def read_licence(option: str | None, folder: Path) -> Licence:
    """Read the licence of a release from the option, else from the card or a LICENSE file in its folder.

    Args:
        option: an identifier, or a file with the licence's text.

    Raises:
        ConfigError: there is none, or no such identifier or file.
    """
    if option is not None:
        return _named_licence(option)
    front = front_matter(folder / README)[0]
    path = licence_file(folder)
    stated = {key: str(front[key]) for key in ("license", "license_name", "license_link") if front.get(key)}
    if stated.get("license") in IDENTIFIERS:
        return Licence({"license": stated["license"]})
    if path is not None:
        return _licence_of_text(path)
    raise ConfigError("nothing goes up without a licence, and none is stated", str(folder), _REMEDY)


def front_matter(path: Path) -> tuple[dict[str, Any], str]:
    """The front matter and the text of a Markdown file; both empty where it is absent.

    Raises:
        ConfigError: the front matter is no YAML mapping, or the file no text.
    """
    if path.is_symlink() or not path.is_file():
        return {}, ""
    try:
        text = path.read_text(encoding="utf-8")
        start, _, remaining = text.partition("---\n")
        fields, mark, body = remaining.partition("\n---")
        if start.strip() or not mark:
            return {}, text
        front = yaml.safe_load(fields) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"no front matter in YAML: {reason:.120}", str(path), "mend or remove it") from None
    if not isinstance(front, dict):
        raise ConfigError("the front matter is no mapping", str(path), "mend or remove it")
    return front, body.partition("\n")[2]


def _named_licence(option: str) -> Licence:
    identifier, path = option.strip().lower(), Path(option)
    if identifier in IDENTIFIERS:
        return Licence({"license": identifier})
    if path.is_file():
        return _licence_of_text(path)
    raise ConfigError(
        f"{option!r} is no licence that the hub knows, and no file", "--license", suggestion(identifier, IDENTIFIERS)
        if len(identifier) < 40 and "known" not in suggestion(identifier, IDENTIFIERS) else _REMEDY,
    )  # fmt: skip


def _licence_of_text(path: Path) -> Licence:
    """Read a licence's text; its first line is the name."""
    try:
        lines = [line.strip(" #*=") for line in path.read_text(encoding="utf-8").splitlines()]
    except UnicodeDecodeError:
        raise ConfigError("no text in UTF-8", str(path), _REMEDY) from None
    name = next((line for line in lines if line), "")
    if not name:
        raise ConfigError("an empty file is no licence", str(path), _REMEDY)
    front = {"license": "other", "license_name": name[:80], "license_link": "LICENSE"}
    return Licence(front, ReleaseFile("LICENSE", path.read_bytes()))
