"""A recipe takes a corpus that `audiollm annotate` wrote as it is, with the corrections of people."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from audiollm.commands.cli import build_app
from audiollm.files.atomic import read_json, read_jsonl
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import Recipe
from pipelines.annotate.execution.config import AnnotationConfig
from pipelines.annotate.execution.plan import plan_annotation
from pipelines.annotate.input.synthetic import PATTERN, CorpusConfig, speak_corpus
from pipelines.annotate.stage import STAGE
from pipelines.review.corrections import CorrectedFields, CorrectionLedger, CorrectionRequest, identity_of


def _annotate(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    recipe = Recipe("test", folder, "tiny", 0, folder, (), {})
    config = AnnotationConfig.model_validate({"workers": 1, "quality_sample": 0, **settings})
    return STAGE.run(config, Context(folder, recipe, Console(quiet=True), {}))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("annotated")
    spoken = CorpusConfig(words=["one", "two"], voices=1, takes=2, test_takes=1)
    speak_corpus(folder / "spoken", spoken, seed=0, on_done=lambda done: None)
    _annotate(folder / "corpus", {"input": str(folder / "spoken"), "transcripts": PATTERN, "recognizers": []})
    assert read_jsonl(folder / "corpus" / "segments.jsonl")
    return folder / "corpus"


def test_segments_are_those_of_the_corpus(corpus: Path, tmp_path: Path) -> None:
    funnel = _annotate(tmp_path / "stage", {"input": str(corpus)})
    assert read_jsonl(tmp_path / "stage" / "segments.jsonl") == read_jsonl(corpus / "segments.jsonl")
    assert funnel == read_json(corpus / "funnel.json")
    assert all((tmp_path / "stage" / name).exists() for name in STAGE.artifacts.values())
    assert (tmp_path / "stage" / "report.html").is_file()


def test_corrections_come_along(corpus: Path, tmp_path: Path) -> None:
    rows = read_jsonl(corpus / "segments.jsonl")
    ledger = CorrectionLedger(corpus)
    for row, fields in zip(
        rows, (CorrectedFields(text="mended by hand"), CorrectedFields(keep=False)), strict=False
    ):
        ledger.put(CorrectionRequest(identity_of(row), fields, 0, f"operation-{row['id']}".replace("/", "-")))
    try:
        funnel = _annotate(tmp_path / "stage", {"input": str(corpus)})
    finally:
        (corpus / "corrections.jsonl").unlink()
    texts = {row["id"]: row["text"] for row in read_jsonl(tmp_path / "stage" / "segments.jsonl")}
    assert texts[rows[0]["id"]] == "mended by hand" and rows[1]["id"] not in texts
    assert funnel["segments"] == len(rows) - 1
    assert rows[1]["id"] in {row["id"] for row in read_jsonl(tmp_path / "stage" / "filtered.jsonl")}


def test_the_plan_counts_its_segments(corpus: Path) -> None:
    plan = plan_annotation(AnnotationConfig(input=str(corpus)), {})
    funnel = read_json(corpus / "funnel.json")
    assert plan.facts["clips"] == funnel["segments"] and plan.facts["audio_s"] == funnel["seconds"]


@pytest.mark.parametrize("extra", [{"transcripts": "{text}_{take}.wav"}, {"shards": True}])
def test_what_it_cannot_use_is_refused(corpus: Path, extra: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="is an annotated corpus, which is taken as it is"):
        AnnotationConfig.model_validate({"input": str(corpus), **extra})


def test_a_folder_that_was_annotated_into_itself_is_one_of_recordings(tmp_path: Path) -> None:
    """Annotating it again goes on in the same folder."""
    folder = tmp_path / "recordings"
    spoken = CorpusConfig(words=["one", "two"], voices=1, takes=2, test_takes=1)
    speak_corpus(folder, spoken, seed=0, on_done=lambda done: None)
    settings = {"input": str(folder), "transcripts": PATTERN, "recognizers": []}
    first = _annotate(folder, settings)
    assert first["segments"] == _annotate(folder, settings)["segments"] > 0


def test_the_command_says_how_to_go_on(corpus: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(
        build_app("annotate"), ["annotate", str(corpus), "-o", str(tmp_path / "again")]
    )
    assert result.exit_code != 0
    assert "is an annotated corpus" in str(result.exception)
