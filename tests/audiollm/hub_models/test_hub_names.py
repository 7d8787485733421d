"""Which words are names of the hub, and which files of a repository are fetched."""

from __future__ import annotations

from pathlib import Path

import pytest

from audiollm.hub_models.names import folder_label, hub_id, snapshot_name
from audiollm.hub_models.needed_files import absent_files, needed_files

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("text", "repository", "revision"),
    [
        ("openai/whisper-base", "openai/whisper-base", None),
        ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B", None),
        ("a/b_c.d@main", "a/b_c.d", "main"),
        ("a/b@refs/pr/3", "a/b", "refs/pr/3"),
        (f"a/b@{COMMIT}", "a/b", COMMIT),
    ],
)
def test_a_name_is_read(text: str, repository: str, revision: str | None) -> None:
    name = hub_id(text)
    assert (
        name is not None and (name.repository, name.revision) == (repository, revision) and str(name) == text
    )


@pytest.mark.parametrize(
    "text",
    [
        *(
            "whisper-base",
            "./a/b",
            "../b",
            "/a/b",
            "~/b",
            "a/b/c",
            "a/b/",
            "a/",
            "/a",
            "",
            ".",
            "a b/c",
            "auto",
        ),
        *(
            "models/yamnet.tflite",
            "data/x.jsonl",
            "my.module:factory",
            "kind=a/b",
            "a/b:c",
            "gpt@http://h/v1",
        ),
        *("a--b/c", "a/..", "a/b@../x", "s3://a/b"),
    ],
)
def test_a_path_is_none(text: str) -> None:
    assert hub_id(text) is None


def test_a_snapshot_has_the_name_of_its_model_and_commit(tmp_path: Path) -> None:
    folder = tmp_path / "models--openai--whisper-base" / "snapshots" / COMMIT
    assert snapshot_name(folder) == f"openai/whisper-base@{COMMIT}"
    assert folder_label(folder) == "whisper-base@01234567"
    assert snapshot_name(folder / "model") is None and folder_label(tmp_path / "model") == "model"


JUNK = [
    "README.md",
    "modeling_own.py",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "onnx/model.onnx",
    "a.pt",
]


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (
            [
                "config.json",
                "model.safetensors",
                "tokenizer.json",
                "vocab.txt",
                "chat_template.jinja",
                "spiece.model",
            ],
            [
                "model.safetensors",
                "chat_template.jinja",
                "config.json",
                "spiece.model",
                "tokenizer.json",
                "vocab.txt",
            ],
        ),
        (  # the file that transformers opens; others are the same weights again
            ["config.json", "model.safetensors", "model.fp32.safetensors", "model.safetensors.index.json"],
            ["model.safetensors", "config.json"],
        ),
        (
            [
                *("config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
                *("model.safetensors.index.json", "consolidated.safetensors"),
            ],
            [
                *("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
                *("config.json", "model.safetensors.index.json"),
            ],
        ),
        (["config.json", "diffusion.safetensors"], ["diffusion.safetensors", "config.json"]),
        (["config.json"], []),
    ],
)
def test_safetensors_json_and_tokenizers_are_needed(names: list[str], wanted: list[str]) -> None:
    assert needed_files([*names, *JUNK], "model") == wanted


def test_a_whisper_of_ctranslate2_is_its_own_case() -> None:
    names = [
        "config.json",
        "model.bin",
        "tokenizer.json",
        "vocabulary.txt",
        "preprocessor_config.json",
        "a.bin",
        "x.py",
    ]
    wanted = ["config.json", "model.bin", "preprocessor_config.json", "tokenizer.json", "vocabulary.txt"]
    assert needed_files(names, "ctranslate2") == needed_files(names, "recognizer") == wanted
    assert needed_files(names, "model") == []  # where nobody asks for it, a .bin is a pickle
    assert needed_files(["config.json", "model.bin"], "recognizer") == []
    assert "model.bin" not in needed_files([*names, "model.safetensors"], "recognizer")


@pytest.mark.parametrize(
    ("names", "lacking"),
    [
        (["config.json", "model.safetensors"], []),
        (["config.json"], ["model.safetensors"]),
        (["model.safetensors"], ["config.json"]),
        (["config.json", "model-00001-of-00002.safetensors"], ["model.safetensors.index.json"]),
        (
            ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"],
            ["model-00002-of-00002.safetensors"],
        ),
    ],
)
def test_a_snapshot_that_is_not_whole_is_recognized(
    tmp_path: Path, names: list[str], lacking: list[str]
) -> None:
    for name in names:
        (tmp_path / name).write_text("{}")
    if "model.safetensors.index.json" in names:
        shards = '{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}'
        (tmp_path / "model.safetensors.index.json").write_text(shards)
    assert absent_files(tmp_path, "model") == lacking
