"""Models by their names on a hub that the test runs: cache, downloads, refusals."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from loopback_hub import LICENCE, LoopbackHub, llama_folder, use_hub

from audiollm.hub_models.downloads import HubError
from audiollm.hub_models.folders import hub_access, hub_folder, hub_source
from audiollm.hub_models.names import snapshot_name

NAME = "tiny/llama"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_folder(tmp_path_factory.mktemp("llama"))


@pytest.fixture()
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path) -> Iterator[LoopbackHub]:
    monkeypatch.chdir(tmp_path)
    with LoopbackHub(tmp_path / "cache") as running:
        use_hub(running, monkeypatch)
        weights = (model / "model.safetensors").read_bytes()
        junk = {"pytorch_model.bin": b"pickle", "modeling_own.py": b"print('ran')", "README.md": b"about"}
        junk |= {"model.fp32.safetensors": weights, "tf_model.h5": b"h", "onnx/model.onnx": b"o"}
        running.publish(NAME, junk | {path.name: path.read_bytes() for path in model.iterdir()})
        yield running


def download(name: str, contents: str = "model") -> Path:
    with hub_access(download=True):
        return hub_folder(name, contents)  # type: ignore[arg-type]


def test_a_download_takes_what_is_needed_and_says_what_it_is(
    hub: LoopbackHub, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = download(NAME)
    assert {path.name for path in folder.iterdir()} == {path.name for path in model.iterdir()}
    assert snapshot_name(folder) == f"{NAME}@{hub.commit_of(NAME, 0)}"
    first_line = capsys.readouterr().err.splitlines()[0]
    size = sum(path.stat().st_size for path in model.iterdir())
    wanted = f"downloading {NAME}: {len(list(model.iterdir()))} files, {size / 1e6:.1f} MB, licence {LICENCE}, commit "
    assert first_line.startswith(wanted) and hub.url in first_line
    for name in ("config.json", "model.safetensors"):
        assert (folder / name).read_bytes() == (model / name).read_bytes()


def test_the_cache_is_used_without_a_request(hub: LoopbackHub) -> None:
    folder = download(NAME)
    hub.requests.clear()
    assert hub_folder(NAME) == hub_folder(f"{NAME}@main") == folder
    assert hub_folder(f"{NAME}@{folder.name}") == folder and hub.requests == []
    hub.stop()
    assert hub_folder(NAME) == folder


def test_without_download_nothing_is_asked_and_the_two_ways_are_told(hub: LoopbackHub) -> None:
    with pytest.raises(HubError) as error:
        hub_folder(NAME)
    assert f"no such file or folder: {NAME}" in error.value.message
    assert "give a folder" in error.value.remedy and "--download" in error.value.remedy and hub.requests == []


def test_what_exists_or_is_spelled_like_a_path_is_no_name(hub: LoopbackHub, tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir(parents=True)
    assert download(NAME) == Path(NAME)
    for text in ("./tiny/other", "~/tiny/other", "/tiny/other", "tiny/other/model"):
        assert download(text) == Path(text)
    assert hub.requests == []


def test_a_new_commit_does_not_change_a_model_that_is_here(hub: LoopbackHub, tmp_path: Path) -> None:
    folder = download(NAME)
    new_commit = hub.publish(NAME, llama_folder(tmp_path / "other", seed=1))
    from audiollm.hub_models import folders

    folders._downloaded.clear()  # as in another process
    hub.requests.clear()
    assert download(NAME) == folder and hub.fetched == []
    newer = download(f"{NAME}@{new_commit}")
    assert newer.name == new_commit and newer != folder and hub_folder(NAME) == folder
    assert (newer / "model.safetensors").read_bytes() != (folder / "model.safetensors").read_bytes()


def test_what_is_missing_in_the_cache_is_fetched_at_its_commit(hub: LoopbackHub, tmp_path: Path) -> None:
    with hub_access(download=True, config_alone=True):
        planned = hub_folder(NAME)
    assert [path.name for path in planned.iterdir()] == ["config.json"] and set(hub.fetched) == {
        "config.json"
    }
    hub.publish(NAME, llama_folder(tmp_path / "other", seed=1))
    with pytest.raises(HubError, match=r"has no model\.safetensors of it"):
        hub_folder(NAME)
    assert download(NAME) == planned and (planned / "tokenizer.json").is_file()


def test_a_plan_takes_a_name_that_is_nowhere_as_a_path(hub: LoopbackHub) -> None:
    with hub_access(config_alone=True, may_lack=True):
        assert hub_folder(NAME) == Path(NAME) and hub.requests == []


def test_a_vocabulary_needs_no_weights(hub: LoopbackHub) -> None:
    folder = download(NAME, "tokenizer")
    assert (folder / "tokenizer.json").is_file() and not list(folder.glob("*.safetensors"))
    assert hub_folder(NAME, "tokenizer") == folder


def test_a_kind_before_the_name_stays(hub: LoopbackHub) -> None:
    folder = download(NAME)
    assert hub_source(f"transformers={NAME}") == f"transformers={folder}" and hub_source(NAME) == str(folder)
    for text in ("pocketsphinx", "auto", "my.module:factory", "endpoint=org/model@http://127.0.0.1/v1"):
        assert hub_source(text) == text


def test_a_whisper_of_ctranslate2_is_fetched_where_it_is_asked_for(hub: LoopbackHub) -> None:
    files = ["config.json", "model.bin", "tokenizer.json", "vocabulary.txt"]
    hub.publish("tiny/faster", dict.fromkeys([*files, "own.py", "README.md"], b"{}"))
    with pytest.raises(HubError, match="pickles"):
        download("tiny/faster")
    with hub_access(download=True):
        kind, _, folder = hub_source("faster_whisper=tiny/faster").partition("=")
    assert kind == "faster_whisper" and sorted(path.name for path in Path(folder).iterdir()) == files
    assert hub_folder("tiny/faster", "recognizer") == Path(folder)


@pytest.mark.parametrize(
    ("files", "contents", "message", "remedy"),
    [
        (
            ["config.json", "pytorch_model.bin"],
            "model",
            "pickles, which are never opened (pytorch_model.bin)",
            "refs/pr",
        ),
        (["config.json", "model.gguf"], "model", "another format (model.gguf)", "save_pretrained"),
        (["README.md"], "model", "no weights in safetensors", "check the name"),
        (
            ["config.json", "model.safetensors"],
            "ctranslate2",
            "no Whisper in CTranslate2's format",
            "Systran",
        ),
        (["config.json", "pytorch_model.bin"], "recognizer", "pickles", "refs/pr"),
        (["model.safetensors"], "tokenizer", "has no tokenizer", "another model"),
    ],
)
def test_a_repository_that_cannot_be_read_is_refused_before_a_file_is_fetched(
    hub: LoopbackHub, files: list[str], contents: str, message: str, remedy: str
) -> None:
    hub.publish("tiny/other", dict.fromkeys(files, b"{}"))
    with pytest.raises(HubError) as error:
        download("tiny/other", contents)
    assert message in error.value.message and "tiny/other" in error.value.message
    assert remedy in error.value.remedy and hub.fetched == []


@pytest.mark.parametrize(
    ("problem", "name", "message", "remedy"),
    [
        ("gated", NAME, "grant access on request", "hf auth login"),
        ("no login", NAME, "no such model, or it is private", "HF_TOKEN"),
        ("no repository", NAME, "no such model, or it is private", "check the spelling"),
        ("broken", NAME, "answers 500", "try again later"),
        (None, f"{NAME}@{'0' * 40}", "no such revision", "lists revisions"),
        ("stopped", NAME, "cannot be reached", "HF_ENDPOINT"),
        ("offline", NAME, "HF_HUB_OFFLINE is set", "unset HF_HUB_OFFLINE"),
    ],
)
def test_each_failure_says_how_it_is_mended(
    hub: LoopbackHub,
    monkeypatch: pytest.MonkeyPatch,
    problem: str | None,
    name: str,
    message: str,
    remedy: str,
) -> None:
    from huggingface_hub import constants

    if problem == "stopped":
        hub.stop()
    elif problem == "offline":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    elif problem is not None:
        hub.errors[NAME] = problem
    for config_alone in (False, True):
        with pytest.raises(HubError) as error, hub_access(download=True, config_alone=config_alone):
            hub_folder(name)
        assert message in error.value.message and name in error.value.message, str(error.value)
        assert remedy in error.value.remedy


@pytest.mark.parametrize("problem", ["stopped", "gated", "broken"])
def test_a_whole_copy_serves_where_the_hub_does_not(hub: LoopbackHub, problem: str) -> None:
    folder = download(NAME)
    from audiollm.hub_models import folders

    folders._downloaded.clear()
    if problem == "stopped":
        hub.stop()
    else:
        hub.errors[NAME] = problem
    assert download(NAME) == folder
