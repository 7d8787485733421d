"""The hub's cache on this machine, and requests to the hub, by `huggingface_hub` and its own settings."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from audiollm.errors import ConfigError
from audiollm.hub_models.names import HubId
from audiollm.hub_models.needed_files import Contents, absent_files, needed_files

MAIN, CONFIG = "main", "config.json"
REQUEST_TIMEOUT_S = 20.0
"""Longest wait for the hub's description of a model."""
_PICKLES = (".bin", ".ckpt", ".h5", ".msgpack", ".pt", ".pth")
_OTHER_WEIGHTS = (".gguf", ".onnx")
_CONVERTED = (
    "take a revision that has safetensors (NAME@REVISION; pull requests of the hub's converter are refs/pr/N), or "
    "save the model with save_pretrained(FOLDER) elsewhere and give FOLDER"
)


class HubError(ConfigError, ValueError):
    """A model of the hub that cannot be had; also a `ValueError`, as pydantic expects of a wrong setting."""


def cached_snapshot(name: HubId, contents: Contents = "model") -> Path | None:
    """The snapshot of a model in the hub's cache, perhaps not whole; None: it has none. No request is made."""
    from huggingface_hub import try_to_load_from_cache

    file = "tokenizer.json" if contents == "tokenizer" else CONFIG
    path = try_to_load_from_cache(name.repository, file, revision=name.revision or MAIN)
    return Path(path).parent if isinstance(path, str) else None


def download_model(name: HubId, contents: Contents, snapshot: Path | None) -> Path:
    """Fetch what the cache lacks of a model, and tell size, licence and number of files before.

    Args:
        snapshot: the one in the cache, if any, whose commit is kept.

    Returns:
        The snapshot's folder. One that is whole is returned also where the hub does not answer.

    Raises:
        HubError: no such model or revision, no access, no network, or no weights in safetensors.
    """
    from huggingface_hub import snapshot_download

    revision = name.revision or MAIN if snapshot is None else snapshot.name
    try:
        info = _fetch_model_info(name, revision)
    except HubError:
        if snapshot is None or absent_files(snapshot, contents):
            raise
        return snapshot
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    names = needed_files(sizes, contents)
    if not names:
        raise _unreadable(name, sizes, contents)
    missing = [file for file in names if snapshot is None or not (snapshot / file).is_file()]
    if snapshot is not None and not missing:
        return snapshot
    _announce(name, info, {file: sizes[file] for file in missing})
    with _mapped_hub_errors(name):
        patterns = [glob.escape(file) for file in names]
        folder = Path(snapshot_download(name.repository, revision=revision, allow_patterns=patterns))
    if lacking := [file for file in names if not (folder / file).is_file()]:
        raise HubError(f"{name}: {lacking[0]} has not arrived", "", "run the same command again: it goes on")
    return folder


def download_config(name: HubId) -> Path:
    """Fetch config.json alone, which a plan is made from.

    Raises:
        HubError: as `download_model`.
    """
    from huggingface_hub import hf_hub_download

    info = _fetch_model_info(name, name.revision or MAIN)
    if CONFIG not in {file.rfilename for file in info.siblings or ()}:
        raise HubError(f"{name}: the repository has no {CONFIG}", "", "name a model, or give a folder")
    with _mapped_hub_errors(name):
        return Path(hf_hub_download(name.repository, CONFIG, revision=name.revision)).parent


def _fetch_model_info(name: HubId, revision: str) -> Any:
    """The hub's description of a model: its commit, files with their sizes, and card."""
    from huggingface_hub import HfApi

    with _mapped_hub_errors(name):
        return HfApi().model_info(
            name.repository, revision=revision, files_metadata=True, timeout=REQUEST_TIMEOUT_S
        )


def _unreadable(name: HubId, sizes: Mapping[str, int], contents: Contents) -> HubError:
    if contents == "ctranslate2":
        text = f"{name} is no Whisper in CTranslate2's format (model.bin beside vocabulary.json)"
        return HubError(text, "", "name one such as Systran/faster-whisper-base, or give a folder")
    if contents == "tokenizer":
        return HubError(f"{name} has no tokenizer", "", "name another model, or give a folder")
    weights = [file for file in sizes if file.endswith((*_PICKLES, *_OTHER_WEIGHTS))]
    if not weights:
        return HubError(
            f"{name} has no weights in safetensors", "", "check the name; " + _CONVERTED.partition(", or")[0]
        )
    reason = "pickles, which are never opened" if weights[0].endswith(_PICKLES) else "another format"
    return HubError(
        f"{name} has no safetensors: its weights are {reason} ({', '.join(sorted(weights)[:3])})",
        "",
        _CONVERTED,
    )


def _announce(name: HubId, info: Any, sizes: Mapping[str, int]) -> None:
    """Print on stderr what is about to be fetched."""
    from huggingface_hub import constants

    total, card = sum(sizes.values()), info.card_data
    licences = [tag.removeprefix("license:") for tag in info.tags or () if tag.startswith("license:")]
    licence = (card.get("license_name") or card.get("license")) if card else None
    size = f"{total / 1e9:.2f} GB" if total >= 1e9 else f"{total / 1e6:.1f} MB"
    Console(stderr=True, soft_wrap=True).print(
        f"downloading {name}: {len(sizes)} files, {size}, licence {licence or ', '.join(licences) or 'not stated'}, "
        f"commit {info.sha[:8]}, from {constants.ENDPOINT} to {constants.HF_HUB_CACHE}",
        highlight=False,
        markup=False,
    )


@contextmanager
def _mapped_hub_errors(name: HubId) -> Iterator[None]:
    """Turn the library's errors into sentences with a remedy.

    Raises:
        HubError: whatever the block met.
    """
    from huggingface_hub import constants, errors

    hub = constants.ENDPOINT
    access = "log in with `hf auth login`, or set HF_TOKEN"
    try:
        yield
    except errors.GatedRepoError as error:
        text = f"{name}: its authors grant access on request"
        raise HubError(text, "", f"accept their terms at {hub}/{name.repository}, then {access}") from error
    except errors.RepositoryNotFoundError as error:
        remedy = f"check the spelling, or give a folder; a private model: {access}"
        raise HubError(f"{name}: {hub} has no such model, or it is private", "", remedy) from error
    except errors.RevisionNotFoundError as error:
        remedy = f"{hub}/{name.repository}/commits/main lists revisions; without @REVISION it is main"
        raise HubError(f"{name}: no such revision of {name.repository}", "", remedy) from error
    except errors.LocalEntryNotFoundError as error:  # the connection ended in the midst of a download
        raise _unreachable(name, hub, error) from error
    except errors.OfflineModeIsEnabled as error:
        remedy = "unset HF_HUB_OFFLINE (and TRANSFORMERS_OFFLINE) to download, or give a folder"
        raise HubError(
            f"{name}: HF_HUB_OFFLINE is set, and the cache has no whole copy", "", remedy
        ) from error
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        remedy = access if status in (401, 403) else "try again later, or give a folder"
        raise HubError(f"{name}: {hub} answers {status}", "", remedy) from error
    except errors.HTTPError as error:
        raise _unreachable(name, hub, error) from error
    except OSError as error:
        if error.errno is not None:  # of this machine: a full disk, a folder without the right to write
            raise
        raise _unreachable(name, hub, error) from error  # the file that has arrived is not the one announced


def _unreachable(name: HubId, hub: str, error: Exception) -> HubError:
    reason = " ".join(str(error).split())[:160]
    remedy = "check the network and HF_ENDPOINT, and run the same command again: it goes on; or give a folder"
    return HubError(f"{name}: {hub} cannot be reached ({reason})", "", remedy)
