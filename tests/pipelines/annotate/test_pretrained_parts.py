"""The stage `annotate` with pretrained parts by path: one process and Ray give the same, another model is another
result, the report names them, and what is lacking is told."""

from __future__ import annotations

import importlib
import io
import json
import os
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from audiollm.audio import load, save
from audiollm.commands.cli import build_app
from audiollm.errors import ConfigError, StageError
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import Recipe, RecipeStage
from pipelines.annotate.execution.config import AnnotationConfig
from pipelines.annotate.stage import STAGE
from pipelines.annotate.synthesizers.espeak import Espeak
from tests.pipelines.annotate.steps.stand_ins import (
    language_folder,
    pyannote_folder,
    tone_ctc_folder,
    wespeaker_file,
    write_packages,
)

SCORER = '''
import numpy as np

class Peak:
    """A quality score: how far the loudest sample is from full scale."""

    sample_rate = 16000

    def score(self, samples_N):
        return 5.0 - 4.0 * float(np.abs(samples_N).max())
'''
OF_THE_RUN = {"timings.json", "report.html"}


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Recordings in `in`, and each part; the packages' stand-ins and the scorer's module can be imported here and in
    every worker."""
    folder = tmp_path_factory.mktemp("parts")
    write_packages(folder / "packages")
    (folder / "packages" / "parts_scorer.py").write_text(SCORER)
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(folder / "packages"))
    patch.setenv("PYTHONPATH", os.pathsep.join([str(folder / "packages"), os.environ.get("PYTHONPATH", "")]))
    patch.delenv("PYANNOTE_METRICS_ENABLED", raising=False)
    named = [name for name in sys.modules if name.split(".")[0] in ("pyannote", "nemo")]
    before = {name: sys.modules.pop(name) for name in named}
    importlib.invalidate_caches()
    pyannote_folder(folder / "pipeline")
    wespeaker_file(folder / "voices.onnx")
    language_folder(folder / "languages", {"eng": 0.9, "deu": 0.1})
    tone_ctc_folder(folder / "tones", {letter: 200 + 100 * place for place, letter in enumerate("AEINOST|")})
    (folder / "in").mkdir()
    with Espeak() as synthesizer:
        for place, text in enumerate(
            ("The first sentence of a talk.", "And another one.", "A third sentence.")
        ):
            speech_N = np.asarray(synthesizer.speak(text, "en-us"), np.float32)
            # the stand-in of pyannote tells speakers by the mean
            speech_N = 0.3 * speech_N + np.where(np.arange(len(speech_N)) < len(speech_N) / 2, 0.1, -0.1)
            save(folder / "in" / f"{place}.wav", torch.from_numpy(speech_N).float()[None], 22_050)
    yield folder
    for name in [name for name in sys.modules if name.split(".")[0] in ("pyannote", "nemo")]:
        del sys.modules[name]
    sys.modules.update(before)
    os.environ.pop("PYANNOTE_METRICS_ENABLED", None)
    patch.undo()


OTHER_SCORES = dict.fromkeys(("dnsmos", "snr", "bandwidth", "reverberation"), False)
TRUST = ("min_token_confidence", "min_text_speech_share", "no_text_loop", "max_text_compression_ratio")


def _settings(parts: Path, **settings: Any) -> dict[str, Any]:
    """Every part, and a recognizer whose text is trusted, whatever it hears."""
    tones = f"transformers={parts / 'tones'}"
    steps = {
        "speakers": {
            "diarizer": f"pyannote={parts / 'pipeline'}",
            "embedder": f"wespeaker={parts / 'voices.onnx'}",
        },
        "language": {"model": f"transformers={parts / 'languages'}"},
        "alignment": {"model": tones},
        "quality": {"scorer": "parts_scorer:Peak", **OTHER_SCORES},
    }
    recognizer = {"kind": "transformers", "model": str(parts / "tones")}
    common = {"input": str(parts / "in"), "recognizers": [recognizer], "steps": steps, "link_speakers": 0.9}
    return {**common, "thresholds": dict.fromkeys(TRUST), "quality_sample": 0, **settings}


def _annotate(folder: Path, settings: dict[str, Any]) -> tuple[dict[str, str], str]:
    folder.mkdir(parents=True, exist_ok=True)
    console = Console(width=200, record=True, file=io.StringIO())
    config = AnnotationConfig.model_validate({"workers": 1, **settings})
    STAGE.run(config, Context(folder, Recipe("test", folder, "tiny", 0, folder, (), {}), console, {}))
    digests = {
        path.relative_to(folder).as_posix(): sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and "ledger" not in path.parts and path.name not in OF_THE_RUN
    }
    return digests, console.export_text()


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _calls(folder: Path, step: str) -> int:
    with closing(sqlite3.connect(folder / "ledger" / "ledger.sqlite")) as ledger:
        return int(ledger.execute("select count(*) from calls where step = ?", (step,)).fetchone()[0])


def test_parts_measure_what_rows_and_report_have(parts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    _, told = _annotate(out, _settings(parts))
    rows = _rows(out / "segments.jsonl")
    assert {row["measured"]["language"]["source"].split()[-1] for row in rows} == {"sound"}
    assert {row["language"] for row in rows} <= {"en", "de"} and len({row["file"] for row in rows}) == 3
    assert len({row["speaker"] for row in rows}) >= 2
    assert all(1 <= row["measured"]["quality"]["score"] <= 5 for row in rows)
    aligned = [row for row in rows if "alignment" in row["measured"]]
    for row in aligned:
        words = row["measured"]["alignment"]["words"]
        assert all(0 <= word["start_s"] <= word["end_s"] <= row["duration_s"] + 1e-3 for word in words)
    assert aligned
    models = {row["name"]: row for row in json.loads((out / "models.json").read_text())}
    assert {name: row["kind"] for name, row in models.items()} == {
        "speakers.diarizer": "pyannote",
        "speakers.embedder": "onnx",
        "language.model": "folder",
        "alignment.model": "folder",
        "quality.scorer": "class",
    }
    assert all(len(row["digest"]) == 12 for row in models.values())
    page = (out / "report.html").read_text()
    assert all(row["weights"] in page and row["digest"] in page for row in models.values())
    assert "suit resemblyzer" not in told


def test_another_model_is_another_result(parts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    settings = _settings(parts)
    _annotate(out, settings)
    counts = {step: _calls(out, step) for step in ("speakers", "language", "quality")}
    assert counts["speakers"] == 3
    _annotate(out, settings)
    assert {step: _calls(out, step) for step in counts} == counts, "nothing is done twice"
    other = wespeaker_file(tmp_path / "other.onnx", dimension=4)
    settings["steps"] = {
        **settings["steps"],
        "speakers": {**settings["steps"]["speakers"], "embedder": str(other)},
    }
    _annotate(out, settings)
    assert _calls(out, "speakers") == 6
    source = parts / "packages" / "parts_scorer.py"
    config = AnnotationConfig.model_validate(settings)
    first = RecipeStage("annotate", STAGE, config, tmp_path, (), ()).fingerprint({})
    source.write_text(SCORER + "# another source\n")
    try:
        assert RecipeStage("annotate", STAGE, config, tmp_path, (), ()).fingerprint({}) != first
        before = _calls(out, "quality")
        _annotate(out, settings)
        assert _calls(out, "quality") == 2 * before
    finally:
        source.write_text(SCORER)


@pytest.mark.parametrize("engine", ["local", pytest.param("ray", marks=pytest.mark.slow)])
def test_workers_and_ray_give_what_one_process_gives(parts: Path, tmp_path: Path, engine: str) -> None:
    if engine == "ray":
        pytest.importorskip("ray")
    here, _ = _annotate(tmp_path / "here", _settings(parts, shards=True))
    there, _ = _annotate(tmp_path / "there", _settings(parts, shards=True, workers=2, engine=engine))
    assert here == there and "shards/000000.tar" in here


def test_a_recording_on_which_a_diarizer_fails_has_the_reason(parts: Path, tmp_path: Path) -> None:
    first = load(parts / "in" / "0.wav")
    save(
        tmp_path / "in" / "loud.wav",
        0.99 * first.samples_CN / first.samples_CN.abs().max(),
        first.sample_rate,
    )
    _annotate(tmp_path / "out", _settings(parts, input=[str(parts / "in"), str(tmp_path / "in")]))
    (row,) = _rows(tmp_path / "out" / "set_aside.jsonl")
    assert "loud.wav" in json.dumps(row) and "speakers" in json.dumps(row)
    assert "no speaker is that loud" in json.dumps(row)
    assert len({row["file"] for row in _rows(tmp_path / "out" / "segments.jsonl")}) == 3


def test_unset_cosines_of_another_embedder_are_a_warning(parts: Path, tmp_path: Path) -> None:
    settings = {**_settings(parts), "link_speakers": None}
    _, told = _annotate(tmp_path / "out", settings)
    assert "voices.onnx are compared by the cosines that suit resemblyzer: set link_speakers" in " ".join(
        told.split()
    )
    assert "suit resemblyzer" in (tmp_path / "out" / "report.html").read_text()


def test_a_missing_part_ends_the_run_or_is_gone_on_without(parts: Path, tmp_path: Path) -> None:
    settings = _settings(parts)
    settings["steps"] = {"language": {"model": f"transformers={parts / 'in'}"}}
    with pytest.raises(StageError, match=r"language.model: .* holds no config.json"):
        _annotate(tmp_path / "out", settings)
    _, told = _annotate(tmp_path / "out", {**settings, "missing_scorer": "skip"})
    assert "going on without: language.model" in told


def test_options_of_the_command_name_the_parts(parts: Path, tmp_path: Path, capsys: Any) -> None:
    arguments = ["annotate", str(parts / "in"), "-o", str(tmp_path / "out"), "--dry-run"]
    options = {
        "--speakers": f"pyannote={parts / 'pipeline'}",
        "--voices": f"wespeaker={parts / 'voices.onnx'}",
        "--aligner": f"transformers={parts / 'tones'}",
        "--language": f"transformers={parts / 'languages'}",
        "--quality": "parts_scorer:Peak",
    }
    build_app("annotate")(
        [*arguments, *(word for pair in options.items() for word in pair)], standalone_mode=False
    )
    printed = capsys.readouterr().err
    assert all(step in printed for step in ("speakers", "alignment", "language", "quality"))
    for option, value, message in (
        ("--language", "en", "no such file or folder: en"),
        ("--speakers", "sortformer=folder", "give pyannote=FOLDER or sortformer=FILE.nemo"),
        ("--quality", "utmos", "give package.module:Class"),
        ("--voices", f"wespeaker={tmp_path / 'gone.onnx'}", "gone.onnx"),
    ):
        with pytest.raises(ConfigError) as error:
            build_app("annotate")([*arguments, option, value], standalone_mode=False)
        assert message in str(error.value) and option in str(error.value), str(error.value)
