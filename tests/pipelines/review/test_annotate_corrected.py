"""`annotate` run again keeps what people corrected, counts it, and reports what has lost its segment."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from audiollm.recipe.runner import Context, run_recipe
from audiollm.recipe.stages import Recipe, load_recipe
from pipelines.annotate.execution.config import AnnotationConfig
from pipelines.annotate.input.synthetic import CorpusConfig, speak_corpus
from pipelines.annotate.stage import STAGE
from pipelines.review.corrections import (
    CORRECTIONS,
    CorrectedFields,
    CorrectionLedger,
    CorrectionRequest,
    identity_of,
)

PATTERN = "{text}_{speaker}_{take}.wav"


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("spoken")
    speak_corpus(
        folder,
        CorpusConfig(words=["one", "seven"], voices=2, takes=2, test_takes=1),
        seed=0,
        on_done=lambda done: None,
    )
    return folder


def annotate(folder: Path, source: Path, **settings: Any) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    recipe = Recipe("test", folder / "test.yaml", "tiny", 0, folder, (), {})
    config = AnnotationConfig.model_validate(
        {"workers": 0, "quality_sample": 0, "input": str(source), "shards": False, **settings}
    )
    return STAGE.run(config, Context(folder, recipe, Console(quiet=True), {}))


def rows_of(folder: Path, name: str = "segments") -> dict[str, dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    return {row["file"]: row for row in rows}


def correct(folder: Path, row: dict[str, Any], **fields: Any) -> None:
    ledger = CorrectionLedger(folder)
    identity = identity_of(row)
    standing = ledger.latest().get(identity)
    revision = standing.revision if standing else 0
    operation = f"{identity.key}-{revision}"
    ledger.put(CorrectionRequest(identity, CorrectedFields(**fields), revision, operation))


def test_corrections_survive_and_are_measured_and_counted(tmp_path: Path, spoken: Path) -> None:
    """Recognized texts: Pocketsphinx keeps none of a single word, which a person then writes."""
    out = tmp_path / "out"
    annotate(out, spoken)
    shortest_s, next_s, *_ = sorted(row["duration_s"] for row in rows_of(out).values())
    settings = {"steps": {"alignment": {}}, "thresholds": {"min_duration_s": (shortest_s + next_s) / 2}}
    annotate(out, spoken, **settings)
    kept, dropped = rows_of(out), rows_of(out, "filtered")
    assert len(kept) >= 4 and len(dropped) == 1, (kept.keys(), dropped.keys())
    span, text, speaker, reject, *_ = sorted(kept, key=lambda file: -kept[file]["duration_s"])
    accept = next(iter(dropped))
    assert kept[text]["text"] == "" and kept[text]["text_refused"]
    end_s = round(kept[span]["end_s"] - 0.05, 3)
    correct(out, kept[text], text="seven")
    correct(out, kept[span], start_s=0.02, end_s=end_s)
    correct(out, kept[speaker], speaker="carla")
    correct(out, kept[reject], keep=False)
    correct(out, dropped[accept], keep=True, text="one")
    for _ in range(2):  # a second run knows all
        funnel = annotate(out, spoken, **settings)
        rows = rows_of(out)
        assert (rows[text]["text"], rows[text]["text_source"], rows[text]["text_refused"]) == (
            "seven",
            "person",
            None,
        )
        assert [word["word"] for word in rows[text]["measured"]["alignment"]["words"]] == ["seven"]
        assert rows[text]["heard"] == kept[text]["heard"]
        assert (rows[span]["start_s"], rows[span]["end_s"]) == (0.02, end_s)
        assert rows[span]["duration_s"] == pytest.approx(end_s - 0.02)
        assert rows[span]["level_dbfs"] != kept[span]["level_dbfs"]  # measured anew
        assert rows[speaker]["speaker"] == "carla" and rows[speaker]["text"] == kept[speaker]["text"]
        assert rows[accept]["text"] == "one" and rows[accept]["correction"]["machine"]["dropped"]["rule"]
        assert rows_of(out, "filtered")[reject]["dropped"]["kind"] == "rejected by a person"
        assert funnel["corrections"] == {
            "segments": 5, "text": 2, "speaker": 1, "span": 1, "accepted": 1, "rejected": 1, "unmatched": 0,
        }  # fmt: skip
        assert funnel["reasons"]["rejected by a person"] == 1
    timings = json.loads((out / "timings.json").read_text())
    assert timings["known"] == sum(step["calls"] for step in timings["steps"].values())
    assert "Corrected by people" in (out / "report.html").read_text()


def test_only_the_corrected_segment_is_measured_and_recognizers_are_not_run_again(
    tmp_path: Path, spoken: Path
) -> None:
    out, source = tmp_path / "out", tmp_path / "source"
    source.mkdir()
    for name in ("one_anna_0.wav", "seven_anna_0.wav"):
        shutil.copy(spoken / name, source)
    annotate(out, source)
    row = next(iter(rows_of(out).values()))
    correct(out, row, text="seven ships", keep=True)
    annotate(out, source)
    timings = json.loads((out / "timings.json").read_text())
    calls = sum(step["calls"] for step in timings["steps"].values())
    # of one segment the steps that read the text: none of the sound, and no recognizer
    assert calls - timings["known"] <= 3


def test_given_texts_are_corrected_and_taken_back(tmp_path: Path, spoken: Path) -> None:
    out = tmp_path / "out"
    annotate(out, spoken, transcripts=PATTERN)
    (file, row), *_ = rows_of(out).items()
    correct(out, row, text="eleven")
    funnel = annotate(out, spoken, transcripts=PATTERN)
    corrected = rows_of(out)[file]
    assert (corrected["text"], corrected["text_source"]) == ("eleven", "person")
    assert corrected["correction"]["machine"]["text_source"] == "given"
    assert funnel["corrections"]["text"] == 1
    correct(out, corrected)
    annotate(out, spoken, transcripts=PATTERN)
    assert rows_of(out)[file] == row


def test_a_person_stands_above_what_the_whole_corpus_shows(tmp_path: Path, spoken: Path) -> None:
    out, settings = tmp_path / "out", {"duplicates": {"max_bit_errors": None, "max_same_text": 1}}
    annotate(out, spoken, transcripts=PATTERN, **settings)
    (file, row), *others = rows_of(out, "filtered").items()
    assert row["dropped"]["kind"] == "duplicate" and len(others) == 3  # the second takes
    correct(out, row, keep=True)
    assert annotate(out, spoken, transcripts=PATTERN, **settings)["reasons"] == {"duplicate": 3}
    accepted = rows_of(out)[file]
    assert accepted["correction"]["machine"]["dropped"]["kind"] == "duplicate"
    correct(out, accepted)
    annotate(out, spoken, transcripts=PATTERN, **settings)
    assert rows_of(out, "filtered")[file] == row


def test_a_correction_without_its_segment_is_reported_and_stays(tmp_path: Path, spoken: Path) -> None:
    out, source = tmp_path / "out", tmp_path / "source"
    shutil.copytree(spoken, source)
    annotate(out, source, transcripts=PATTERN)
    gone, renamed, *_ = rows_of(out).values()
    correct(out, gone, text="eleven")
    correct(out, renamed, text="twelve")
    before = (out / CORRECTIONS).read_bytes()
    (source / gone["file"]).unlink()
    (source / renamed["file"]).rename(source / "one_carla_0.wav")
    funnel = annotate(out, source, transcripts=PATTERN)
    assert rows_of(out)["one_carla_0.wav"]["text"] == "twelve"  # known by its content
    assert funnel["corrections"] | {"segments": 1, "unmatched": 1} == funnel["corrections"]
    (aside,) = [
        row
        for row in map(json.loads, (out / "set_aside.jsonl").read_text().splitlines())
        if row["kind"] == "correction without a segment"
    ]
    assert "'eleven'" in aside["reason"] and "not in the input" in aside["reason"]
    assert any("1 correction matches no segment" in warning for warning in funnel["warnings"])
    report = (out / "report.html").read_text()
    assert "Corrections without a segment" in report and "eleven" in report
    assert (out / CORRECTIONS).read_bytes() == before


def test_a_recipe_goes_on_from_corrections_and_deletes_none(tmp_path: Path, spoken: Path) -> None:
    recipe_file = tmp_path / "recipe.yaml"
    recipe_file.write_text(
        "stages:\n"
        f"  - annotate: {{input: {spoken}, transcripts: '{PATTERN}', workers: 0, quality_sample: 0, shards: false}}\n"
        "  - compose: {segments: '${annotate.segments}', min_seconds: 1}\n"
    )

    def run(**options: Any) -> dict[str, Any]:
        recipe = load_recipe(recipe_file, runs=tmp_path / "runs")
        run_recipe(recipe, Console(quiet=True), **options)
        samples = (tmp_path / "runs" / "recipe" / "compose" / "samples.jsonl").read_text().splitlines()
        return {sample["id"]: sample for sample in map(json.loads, samples)}

    folder = tmp_path / "runs" / "recipe" / "annotate"
    before = run()
    text, reject, *_ = rows_of(folder).values()
    correct(folder, text, text="eleven", speaker="carla", start_s=0.05, end_s=0.4)
    correct(folder, reject, keep=False)
    for options in ({}, {"start": "annotate"}):
        after = run(**options)
        sample = after[text["id"]]
        assert sample["metadata"]["text"] == "eleven" and sample["metadata"]["speaker"] == "carla"
        (audio,) = [
            part for message in sample["messages"] for part in message["content"] if part["type"] == "audio"
        ]
        assert (audio["start_s"], audio["end_s"]) == (0.05, 0.4)
        assert set(before) - set(after) == {reject["id"]}
