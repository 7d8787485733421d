"""Uploads to a hub by `huggingface_hub`: what has changed, in one commit, and errors without tokens."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from audiollm.errors import ConfigError
from audiollm.hub_models.downloads import HubError
from audiollm.hub_models.names import hub_id
from audiollm.publish.model_release import Release
from audiollm.publish.published_card import PUSH_MARK, SECTIONS_MARK
from audiollm.publish.release_files import README, ReleaseFile

ACCESS = "log in with `hf auth login` (a token with the right to write), or set HF_TOKEN"
GOES_ON = "run the same command again: it goes on"
_TOKEN = re.compile(r"hf_[A-Za-z0-9]{4,}|(?<=Bearer )\S+")
_QUERY = re.compile(r"(https?://[^\s?'\"]+)\?[^\s'\"]*")
_WEIGHTS = (".safetensors", ".safetensors.index.json")


@dataclass(frozen=True)
class RepositoryState:
    """The files of a repository on the hub, with their digests."""

    exists: bool
    private: bool = True
    digests: dict[str, str] = field(default_factory=dict)
    """Git's SHA-1, or the SHA-256 of a large file, by name."""


@dataclass(frozen=True)
class PushOutcome:
    """What a push has sent."""

    url: str
    sent: tuple[ReleaseFile, ...]
    removed: tuple[str, ...]


def check_repository_name(name: str) -> str:
    """Return the name of a repository.

    Raises:
        ConfigError: it is not `ORGANIZATION/NAME`.
    """
    parsed = hub_id(name)
    if parsed is None or parsed.revision is not None:
        raise ConfigError(f"{name!r} is no name on a hub", "NAME", "give ORGANIZATION/NAME, or USER/NAME")
    return parsed.repository


def push_release(release: Release, name: str, public: bool) -> PushOutcome:
    """Send what a repository lacks of a release, in one commit; nothing is visible of a push that was cut.

    Args:
        public: of a repository that is created; one that exists has to be so already.

    Raises:
        HubError: no login, no right, a hub that is not reached, or a repository with other visibility or weights.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants

    api, kind = HfApi(), release.repository_type
    with _filtered_logs(), _mapped_push_errors(name):
        state = _read_state(api, name, kind)
        _check_visibility(state, name, public)
        changed = [file for file in release.files if not _is_there(file, state.digests)]
        removed = _stale_weights(api, name, release, state)
        if not state.exists:
            api.create_repo(name, repo_type=kind, private=not public, exist_ok=True)
        if changed or removed:
            operations: list[Any] = [CommitOperationAdd(file.name, file.source) for file in changed]
            operations += [CommitOperationDelete(path) for path in removed]
            title = f"{len(changed)} files by audiollm push"
            api.create_commit(name, operations, commit_message=title, repo_type=kind)
    folder = "datasets/" if kind == "dataset" else ""
    return PushOutcome(f"{constants.ENDPOINT}/{folder}{name}", tuple(changed), tuple(removed))


class _SecretsFilter(logging.Filter):
    """Takes tokens and signatures out of what the library logs: it names the addresses of large files in full."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = without_secrets(record.getMessage()), ()
        return True


@contextmanager
def _filtered_logs() -> Iterator[None]:
    """Filter the logs of `huggingface_hub` inside."""
    secrets = _SecretsFilter()
    names = [name for name in logging.root.manager.loggerDict if name.startswith("huggingface_hub")]
    for name in names:
        logging.getLogger(name).addFilter(secrets)
    try:
        yield
    finally:
        for name in names:
            logging.getLogger(name).removeFilter(secrets)


def without_secrets(text: str) -> str:
    """A text without tokens and without the signatures of addresses."""
    from huggingface_hub import get_token

    token = get_token()
    text = text.replace(token, "***") if token else text
    return _QUERY.sub(r"\1", _TOKEN.sub("***", text))


def _read_state(api: Any, name: str, kind: str) -> RepositoryState:
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        info = api.repo_info(name, repo_type=kind)
    except RepositoryNotFoundError as error:
        if getattr(error.response, "status_code", None) == 404:
            return RepositoryState(exists=False)
        raise
    entries = api.list_repo_tree(name, repo_type=kind, recursive=True)
    digests = {
        entry.path: entry.lfs.sha256 if entry.lfs is not None else entry.blob_id
        for entry in entries
        if hasattr(entry, "blob_id")
    }
    return RepositoryState(True, bool(info.private), digests)


def _check_visibility(state: RepositoryState, name: str, public: bool) -> None:
    if not state.exists or state.private is not public:
        return
    if public:
        text, remedy = "exists and is private", "make it public on the hub, or leave --public out"
    else:
        text, remedy = "exists and is public", "add --public, or take another name"
    raise HubError(f"{name} {text}", "--public", remedy)


def _is_there(file: ReleaseFile, digests: dict[str, str]) -> bool:
    return digests.get(file.name) in file.digests


def _stale_weights(api: Any, name: str, release: Release, state: RepositoryState) -> list[str]:
    """Weights of an earlier push that this release no longer has: they would be loaded beside or instead of the new.

    Raises:
        HubError: weights that `push` has not sent.
    """
    names = {file.name for file in release.files}
    stale = sorted(path for path in state.digests if path.endswith(_WEIGHTS) and path not in names)
    if not stale:
        return []
    if README in state.digests:
        card = api.hf_hub_download(name, README, repo_type=release.repository_type)
        with open(card, encoding="utf-8") as file:
            text = file.read()
        if PUSH_MARK in text or SECTIONS_MARK in text:
            return stale
    raise HubError(f"{name} holds weights of another model: {stale[0]}", "NAME", "take another name")


@contextmanager
def _mapped_push_errors(name: str) -> Iterator[None]:
    """Turn the errors of the libraries into sentences with a remedy, without tokens.

    Raises:
        HubError: whatever the block met.
    """
    from huggingface_hub import constants, errors

    hub = constants.ENDPOINT
    try:
        yield
    except HubError:
        raise
    except errors.OfflineModeIsEnabled:
        raise HubError(f"{name}: HF_HUB_OFFLINE is set", "", "unset HF_HUB_OFFLINE to push") from None
    except errors.HfHubHTTPError as error:
        raise _refusal_of_hub(name, hub, error) from None
    except (errors.HTTPError, ConnectionError, TimeoutError) as error:
        raise _cut_upload(name, hub, error) from None
    except ValueError as error:  # a card that the hub refuses
        reason = without_secrets(" ".join(str(error).split()))
        raise HubError(
            f"{name}: {hub} refuses it: {reason:.300}", "", "mend README.md in the folder"
        ) from None
    except RuntimeError as error:  # of the library that sends large files in pieces
        raise _cut_upload(name, hub, error) from None
    except OSError as error:
        if error.errno is not None:  # of this machine: a file that cannot be read
            raise
        if isinstance(error, PermissionError):  # that library's word for a login that is refused
            raise HubError(f"{name}: {hub} lets this login not write there", "", ACCESS) from None
        raise _cut_upload(name, hub, error) from None


def _refusal_of_hub(name: str, hub: str, error: Any) -> HubError:
    status = getattr(error.response, "status_code", None)
    if status == 401:
        return HubError(f"{name}: {hub} knows no such login", "", ACCESS)
    if status in (403, 404):
        return HubError(f"{name}: {hub} lets this login not write there", "", f"check the name; {ACCESS}")
    if status is not None and (status >= 500 or status == 429):
        return HubError(f"{name}: the upload was cut: {hub} answers {status}", "", GOES_ON)
    reason = without_secrets(" ".join(str(error).split()))
    return HubError(f"{name}: {hub} answers {status}: {reason:.200}", "", "see the reason")


def _cut_upload(name: str, hub: str, error: Exception) -> HubError:
    reason = without_secrets(" ".join(str(error).split()) or type(error).__name__)
    text = f"{name}: the upload was cut: {hub} cannot be reached ({reason:.160})"
    return HubError(text, "", f"check the network and HF_ENDPOINT, and {GOES_ON}")
