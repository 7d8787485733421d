"""Steps of a user's own, named as `module:Name`: the example of docs/extending.md, and what cannot be used."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from rich.console import Console

from audiollm.recipe.plug_ins import load_catalog
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import Recipe, RecipeStage
from pipelines.annotate.execution.chain import STEPS, build
from pipelines.annotate.execution.config import AnnotationConfig
from pipelines.annotate.input.synthetic import CorpusConfig, speak_corpus
from pipelines.annotate.stage import STAGE
from pipelines.audiocot.settings import AudioCotConfig
from tests.pipelines.audiocot.cot_run import compose, rows, think

GUIDE = Path(__file__).parents[3] / "docs" / "extending.md"
PARTS = """
from pipelines.annotate.step import SegmentStep
from pipelines.audiocot.clip import ClipStep
from pipelines.steps.step import StepConfig

class Loudest(ClipStep[StepConfig]):
    name = "loudest"
    needs = ("levels",)

    def process(self, item):
        return {"dbfs": max(item.values["levels"]["curve_dbfs"])}

class Signal(SegmentStep[StepConfig]):
    name = "signal"

    def process(self, item):
        return {}

class Unfinished(SegmentStep[StepConfig]):
    name = "unfinished"

class Nameless(SegmentStep[StepConfig]):
    def process(self, item):
        return {}

def function(item):
    return {}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the example of the guide in `my_parts.py`, other steps in `more_parts.py`."""
    section = GUIDE.read_text(encoding="utf-8").partition("## A step of an annotation")[2]
    example = re.findall(r"```python\n(.*?)```", section, flags=re.S)[0]
    (tmp_path / "my_parts.py").write_text(example)
    (tmp_path / "more_parts.py").write_text(PARTS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_the_step_of_the_guide_measures_segments(folder: Path, workers: int) -> None:
    speak_corpus(
        folder / "spoken", CorpusConfig(words=["one"], voices=1, takes=3, test_takes=0), 0, lambda done: None
    )
    settings: dict[str, Any] = {
        "input": str(folder / "spoken"),
        "transcripts": "{text}_{speaker}_{take}.wav",
        "recognizers": [],
        "quality_sample": 0,
        "workers": workers,
        "steps": {"my_parts:Pauses": {"below_dbfs": -45}},
        "resources": {"pauses": {"cpus": 1.0, "gpus": 0.0}},
    }
    out = folder / "out"
    context = Context(out, Recipe("test", folder, "tiny", 0, out, (), {}), Console(quiet=True), {})
    out.mkdir()
    counts = []
    for below_dbfs, source in ((-45, ""), (-45, ""), (200, ""), (200, "# another source\n")):
        settings["steps"] = {"my_parts:Pauses": {"below_dbfs": below_dbfs}}
        if source:
            with (folder / "my_parts.py").open("a") as file:
                file.write(source)
        STAGE.run(AnnotationConfig.model_validate(settings), context)
        shares = [row["measured"]["pauses"]["share"] for row in rows(out, "segments.jsonl")]
        assert len(shares) == 3 and all(0 <= share <= 1 for share in shares)
        assert all(share == 1 for share in shares) == (below_dbfs == 200)
        with closing(sqlite3.connect(out / "ledger" / "ledger.sqlite")) as ledger:
            counts.append(ledger.execute("select count(*) from calls where step = 'pauses'").fetchone()[0])
    assert counts == [3, 3, 6, 9], "calls are known until settings or source change"


def test_the_source_of_a_step_belongs_to_the_fingerprint(folder: Path) -> None:
    def fingerprint() -> str:
        config = AnnotationConfig.model_validate({"steps": {"my_parts:Pauses": {}}})
        return RecipeStage("annotate", STAGE, config, folder, (), ()).fingerprint({})

    first = fingerprint()
    assert fingerprint() == first
    (folder / "my_parts.py").write_text((folder / "my_parts.py").read_text() + "# changed\n")
    assert fingerprint() != first


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("pauses", {}, "no step 'pauses': known: alignment, attributes"),
        ("qualty", {}, "did you mean 'quality'?"),
        ("my_parts:Pausen", {}, "cannot be imported.*derives from RecordingStep or SegmentStep"),
        ("my_part:Pauses", {}, "cannot be imported"),
        ("more_parts:function", {}, "is no class that derives from RecordingStep or SegmentStep"),
        ("more_parts:Loudest", {}, "is no class that derives from RecordingStep or SegmentStep"),
        ("more_parts:Unfinished", {}, "has no method `process`"),
        ("more_parts:Nameless", {}, "has no `name`"),
        ("more_parts:Signal", {}, "its name 'signal' is that of a step of annotate"),
        ("my_parts:Pauses", {"below": 1}, "Extra inputs are not permitted"),
    ],
)
def test_a_step_that_cannot_be_used_is_refused_before_any_work(
    folder: Path, name: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        AnnotationConfig.model_validate({"steps": {name: settings}})


def test_own_steps_run_after_the_built_in_ones(folder: Path) -> None:
    config = AnnotationConfig.model_validate({"steps": {"my_parts:Pauses": {}, "prosody": {}}})
    chain = build(config.step_settings(), config.recognizer_settings(), {})
    assert [step.name for step in chain.segment][-2:] == ["prosody", "pauses"]


def test_an_own_step_measures_clips(folder: Path) -> None:
    scenes = compose(folder, scenes=2)
    think(folder / "out", scenes, steps={"more_parts:Loudest": {}})
    measured = [row["measured"] for row in rows(folder / "out", "clips.jsonl")]
    assert measured and all(row["loudest"]["dbfs"] == max(row["levels"]["curve_dbfs"]) for row in measured)
    with pytest.raises(ValidationError, match="no step 'loudest'"):
        AudioCotConfig.model_validate({"input": str(folder), "steps": {"loudest": {}}})


@pytest.mark.parametrize("kind", ["annotation_steps", "audiocot_steps"])
def test_steps_are_listed(kind: str) -> None:
    catalog = load_catalog(kind)
    assert len(catalog.entries) > 10 and all(catalog.entries.values()) and "Step" in catalog.own
    assert kind == "audiocot_steps" or list(catalog.entries) == list(STEPS.built_in)
