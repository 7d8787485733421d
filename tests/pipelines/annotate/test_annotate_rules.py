"""Decisions of the annotation: rules, presets, missing scorers, work redone after a change, and the fate of files."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
from rich.console import Console

from audiollm.audio import load, save
from audiollm.commands.cli import build_app
from audiollm.errors import ConfigError, StageError
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import Recipe
from pipelines.annotate import command
from pipelines.annotate.execution import chain as chains
from pipelines.annotate.execution.config import AnnotationConfig
from pipelines.annotate.execution.rules import PRESETS, RULES, Thresholds, first_broken
from pipelines.annotate.execution.walk import Run
from pipelines.annotate.input.sources import RecordingSource
from pipelines.annotate.input.synthetic import CorpusConfig, speak_corpus
from pipelines.annotate.stage import STAGE
from pipelines.annotate.step import Recording, RecordingMetadata, Segment
from pipelines.annotate.steps.signal import Probe, ProbeConfig
from pipelines.execution.ledger import Ledger
from pipelines.steps.command import validate_settings
from pipelines.steps.results import Spool
from pipelines.steps.step import Resources, StepConfig, Value

CORPUS = CorpusConfig(words=["one", "seven"], voices=2, takes=2, test_takes=1)
PATTERN = "{text}_{speaker}_{take}.wav"


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("spoken")
    speak_corpus(folder, CORPUS, seed=0, on_done=lambda done: None)
    return folder


def _context(folder: Path) -> Context:
    folder.mkdir(parents=True, exist_ok=True)
    return Context(
        folder, Recipe("test", folder, "tiny", 0, folder, (), {}), Console(quiet=True, file=None), {}
    )


def _annotate(folder: Path, **settings: Any) -> dict[str, Any]:
    config = AnnotationConfig.model_validate({"workers": 0, "quality_sample": 0, **settings})
    return STAGE.run(config, _context(folder))


def _rows(folder: Path, name: str = "segments") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def _calls(folder: Path) -> Counter[str]:
    with closing(sqlite3.connect(folder / "ledger" / "ledger.sqlite")) as ledger:
        return Counter(dict(ledger.execute("select step, count(*) from calls group by step")))


# ------------------------------------------------------------------------------------------------- rules


def test_every_threshold_has_one_rule_and_every_rule_a_threshold() -> None:
    assert Counter(rule.threshold for rule in RULES) == Counter(list(Thresholds.model_fields))


@pytest.mark.parametrize(
    ("threshold", "limit", "step", "value", "breaks"),
    [
        ("min_duration_s", 3.0, "segment", {"duration_s": 2.9}, True),
        ("min_duration_s", 3.0, "segment", {"duration_s": 3.0}, False),
        ("max_duration_s", 30.0, "segment", {"duration_s": 30.0000001}, False),
        ("max_duration_s", 30.0, "segment", {"duration_s": 30.1}, True),
        ("min_dnsmos_ovr", 3.0, "quality", {"dnsmos": {"ovr": 2.99}}, True),
        ("min_dnsmos_ovr", 3.0, "quality", {"dnsmos": None}, False),
        ("languages", ["en", "de"], "language", {"language": "fr"}, True),
        ("languages", ["en", "de"], "language", {"language": "de"}, False),
        ("no_known_hallucination", True, "repetition", {"phrase": "thanks for watching"}, True),
        ("no_known_hallucination", True, "repetition", {"phrase": None}, False),
        ("no_known_hallucination", False, "repetition", {"phrase": "thanks for watching"}, False),
        ("max_pairwise_wer", 0.1, "consensus", {"pairwise_wer": 0.2}, True),
        ("max_pairwise_wer", 0.1, "quality", {"pairwise_wer": 0.2}, False),
    ],
)
def test_a_rule_compares_a_value_with_its_threshold(
    threshold: str, limit: Any, step: str, value: Value, breaks: bool
) -> None:
    drop = first_broken(RULES, Thresholds(**{threshold: limit}), step, value, "speech")
    assert (drop is not None) == breaks
    if drop:
        assert (drop.rule, drop.threshold, drop.step) == (threshold, limit, step)


def test_rules_of_speech_do_not_hold_for_sounds() -> None:
    limits = Thresholds(min_dnsmos_ovr=3.0, min_level_dbfs=-40.0)
    assert first_broken(RULES, limits, "quality", {"dnsmos": {"ovr": 1.0}}, "sound") is None
    assert first_broken(RULES, limits, "signal", {"level_dbfs": -50.0}, "sound") is not None


# ----------------------------------------------------------------------------------------------- presets


@pytest.mark.parametrize("name", list(PRESETS))
def test_every_preset_builds_and_measures_what_its_rules_compare(name: str) -> None:
    config = AnnotationConfig.model_validate({"preset": name, "recognizers": ["pocketsphinx"]})
    chain = chains.build(config.step_settings(), config.recognizer_settings(), {})
    lacking = {rule.threshold for each in chains.missing(chain, config.limits) for rule in each.rules}
    known = {"segment", *chain.steps}
    measured = {rule.threshold for rule in RULES if rule.step in known or rule.of_text}
    asked = {threshold for threshold, limit in config.limits if limit is not None}
    assert asked <= measured | lacking


def test_a_preset_without_its_scorer_fails_in_plan_naming_it_before_any_work(
    tmp_path: Path, spoken: Path
) -> None:
    settings = {"input": str(spoken), "preset": "curator-tts", "steps": {"speakers": None}}
    assert STAGE.plan is not None
    with pytest.raises(ConfigError, match=r"min_utmos: needs steps\.quality\.utmos"):
        STAGE.plan(AnnotationConfig.model_validate(settings), {})
    with pytest.raises(StageError, match=r"(?s)utmos.*sigmos.*missing_scorer=skip") as caught:
        _annotate(tmp_path, **settings)
    assert caught.value.exit_code == 2
    assert not (tmp_path / "segments.jsonl").exists()
    assert not _calls(tmp_path)


def test_it_goes_on_without_a_scorer_if_told_and_says_what_was_not_applied(
    tmp_path: Path, spoken: Path
) -> None:
    _annotate(
        tmp_path,
        input=str(spoken),
        preset="curator-asr",
        transcripts=PATTERN,
        missing_scorer="skip",
        thresholds={"min_duration_s": 0.1},
    )
    skipped = json.loads((tmp_path / "not_applied.json").read_text())
    assert [(row["threshold"], row["value"]) for row in skipped] == [("max_pairwise_wer", 0.1)]
    assert "two recognizers" in skipped[0]["reason"]
    assert len(_rows(tmp_path)) == 8
    applied = {row["rule"] for row in json.loads((tmp_path / "rules.json").read_text())}
    assert "max_pairwise_wer" not in applied and "min_unique_word_share" in applied


# ------------------------------------------------------------------------------------ what is done again


def test_a_changed_setting_redoes_its_step_and_what_reads_it_alone(tmp_path: Path, spoken: Path) -> None:
    settings = {"input": str(spoken), "transcripts": PATTERN, "steps": {"repetition": {}}}
    _annotate(tmp_path, **settings)
    first = _calls(tmp_path)
    assert first["probe"] == first["pocketsphinx"] == first["repetition"] == 8
    _annotate(tmp_path, **{**settings, "steps": {"repetition": {"ngram": 3}}})
    second = _calls(tmp_path)
    assert second - first == Counter({"repetition": 8})
    # a threshold is no setting of a step
    _annotate(tmp_path, **{**settings, "thresholds": {"max_longest_loop": 2}})
    assert _calls(tmp_path) == second
    # another pause cut: the segments come out the same, so nothing that reads them is done again
    _annotate(tmp_path, **{**settings, "steps": {"repetition": {}, "segments": {"merge_gap_s": 0.6}}})
    assert _calls(tmp_path) - second == Counter({"segments": 8})


def test_another_annotation_knows_what_need_not_be_measured_again(tmp_path: Path, spoken: Path) -> None:
    source = tmp_path / "in"
    shutil.copytree(spoken, source)
    (source / "bad_anna_9.wav").write_bytes(b"RIFF    WAVEfmt broken")
    settings = {"input": str(source), "transcripts": PATTERN}
    _annotate(tmp_path / "first", **settings)
    earlier = tmp_path / "first" / "ledger" / "ledger.sqlite"
    more = {**settings, "steps": {"repetition": {}}}
    _annotate(tmp_path / "second", **more, earlier=str(earlier))
    _annotate(tmp_path / "afresh", **more)
    for name in ("segments", "filtered", "files", "set_aside"):
        ours, theirs = ((tmp_path / run / f"{name}.jsonl").read_bytes() for run in ("second", "afresh"))
        assert ours == theirs
    timings = json.loads((tmp_path / "second" / "timings.json").read_text())
    measured = sum(step["calls"] for step in timings["steps"].values()) - timings["known"]
    assert measured == 8 + 1, "the new step, and the file that failed"
    text = tmp_path / "none.sqlite"
    text.write_text("no ledger")
    with pytest.raises(StageError, match="none.sqlite.*damaged"):
        _annotate(tmp_path / "third", **settings, earlier=str(text))


def test_content_and_not_names_decides_what_is_known(tmp_path: Path, spoken: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    for path in spoken.iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    _annotate(tmp_path / "out", input=str(source), transcripts=PATTERN)
    before = _calls(tmp_path / "out")
    source.rename(tmp_path / "moved")
    _annotate(tmp_path / "out", input=str(tmp_path / "moved"), transcripts=PATTERN)
    assert _calls(tmp_path / "out") - before == Counter({"digest": 8})
    changed = tmp_path / "moved" / "one_anna_0.wav"
    save(changed, load(changed).samples_CN * 0.5, load(changed).sample_rate)
    _annotate(tmp_path / "out", input=str(tmp_path / "moved"), transcripts=PATTERN)
    assert (_calls(tmp_path / "out") - before)["voice_activity"] == 1


def test_what_failed_is_tried_again_only_on_demand(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "bad.wav").write_bytes(b"RIFF    WAVEfmt broken")
    _annotate(tmp_path / "out", input=str(tmp_path / "in"))
    assert json.loads((tmp_path / "out" / "timings.json").read_text())["known"] == 0
    _annotate(tmp_path / "out", input=str(tmp_path / "in"))
    assert json.loads((tmp_path / "out" / "timings.json").read_text())["known"] == 1
    _annotate(tmp_path / "out", input=str(tmp_path / "in"), retry_failed=True)
    assert json.loads((tmp_path / "out" / "timings.json").read_text())["known"] == 0


# ------------------------------------------------------------------------------------- where files end


def test_a_file_that_repeats_another_is_filtered_by_name(tmp_path: Path, spoken: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    for name in ("a.wav", "b.wav", "c.wav"):
        (source / name).write_bytes((spoken / "one_anna_0.wav").read_bytes())
    funnel = _annotate(tmp_path / "out", input=str(source), grammar=["one", "seven"])
    assert (funnel["files_kept"], funnel["files_filtered"], funnel["files_failed"]) == (1, 2, 0)
    assert [row["reason"] for row in _rows(tmp_path / "out", "files")] == ["", *["the same as a.wav"] * 2]


def test_a_recording_is_never_in_the_training_set_and_in_the_test_set(tmp_path: Path) -> None:
    step = Fixed("voice_activity", {"spans": [], "duration_s": 0.2})
    chain = chains.Chain(
        (Fixed("probe", FORM), step, Fixed("segments", {"segments": [PART]})), (), (), {}, {
            name: name for name in ("probe", "voice_activity", "segments")
        }
    )  # fmt: skip
    sources = [
        RecordingSource(
            f"/{name}.wav", f"{name}.wav", "same content", "ann", RecordingMetadata("one", "ann"), split
        )
        for name, split in (("a", "train"), ("b", "test"), ("c", None))
    ]
    config = AnnotationConfig.model_validate({"workers": 1, "recognizers": []})
    spool = Spool(tmp_path / "spool.sqlite")
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        Run(config, _context(tmp_path), chain, Thresholds(), sources, ledger, spool).annotate()
    assert [row.get("repeats") for row in spool.files()] == [None, "a.wav", "a.wav"]
    assert [row["split"] for _, _, row in spool.parts()] == ["train"]


def test_the_settings_of_a_file_are_not_replaced_by_the_defaults_of_the_command(
    tmp_path: Path, spoken: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[AnnotationConfig] = []
    validate = command.validate_settings
    monkeypatch.setattr(
        command, "validate_settings", lambda *settings: (asked.append(validate(*settings)), asked[-1])[1]
    )
    (tmp_path / "own.yaml").write_text("engine: ray\nretry_failed: true\nshards: false\n")
    arguments = ["annotate", str(spoken), "-o", str(tmp_path / "out"), "--dry-run"]
    for more in ([], ["--settings", str(tmp_path / "own.yaml")], ["--engine", "ray", "--retry-failed"]):
        build_app("annotate")([*arguments, *more], standalone_mode=False)
    assert [(one.engine, one.retry_failed, one.shards) for one in asked] == [
        ("local", False, True),
        ("ray", True, False),
        ("ray", True, True),
    ]


class NoConfig(StepConfig):
    """None."""


class Deadly:
    """Dies over one file, fails over another one, is fine with the rest."""

    name = "deadly"
    needs: tuple[str, ...] = ("probe",)
    version: ClassVar[int] = 1
    resources = Resources()
    measures_sounds, reads_text = False, False

    def __init__(self, level: Literal["recording", "segment"]) -> None:
        self.level: Literal["recording", "segment"] = level

    def missing(self) -> str | None:
        return None

    def setup(self) -> None:
        pass

    def process(self, item: Recording | Segment) -> Value:
        if "one_anna_0" in item.path:
            os._exit(9)
        if "one_anna_1" in item.path:
            raise ValueError("no good\nat all")
        return {"fine": True}


FORM = {"duration_s": 0.2, "sample_rate": 16000, "num_channels": 1, "codec": "PCM_16"}
PART = {"start_s": 0.0, "end_s": 0.2, "kind": "speech", "speaker": None, "speech_s": 0.2, "overlap_s": 0.0}


class Fixed:
    """Finds the same in every recording."""

    level: ClassVar[Literal["recording"]] = "recording"
    needs: tuple[str, ...] = ()
    version: ClassVar[int] = 1
    resources = Resources()

    def __init__(self, name: str, value: Value) -> None:
        self.name, self._value = name, value

    def missing(self) -> str | None:
        return None

    def setup(self) -> None:
        pass

    def process(self, item: Recording) -> Value:
        return self._value


@pytest.mark.parametrize(
    ("level", "engine"),
    [
        ("recording", "local"),
        ("segment", "local"),
        pytest.param("recording", "ray", marks=pytest.mark.slow),
        pytest.param("segment", "ray", marks=pytest.mark.slow),
    ],
)
def test_a_step_that_kills_its_process_loses_that_file_only(
    tmp_path: Path, spoken: Path, level: Literal["recording", "segment"], engine: str
) -> None:
    if engine == "ray":
        ray = pytest.importorskip("ray")
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # its workers do not find tests
    paths = sorted(spoken.iterdir())
    activity = Fixed("voice_activity", {"spans": [[0.0, 0.2]], "duration_s": 0.2})
    steps = [Probe(ProbeConfig()), activity, Fixed("segments", {"segments": [PART]}), Deadly(level)]
    chain = chains.Chain(
        tuple(step for step in steps if step.level == "recording"),
        tuple(step for step in steps if step.level == "segment"),
        (),
        {step.name: NoConfig() for step in steps},
        {step.name: step.name for step in steps},
    )
    rows, files = _run(tmp_path, chain, paths, engine)
    if level == "recording":
        failed = {row["name"]: row["failed"]["reason"] for row in files if "failed" in row}
    else:
        failed = {row["file"]: row["errors"]["deadly"] for row in rows if "errors" in row}
    assert set(failed) == {"one_anna_0.wav", "one_anna_1.wav"}
    assert "died 2 times" in failed["one_anna_0.wav"]
    assert failed["one_anna_1.wav"] == "ValueError: no good at all"
    assert len(files) == 8 and len(rows) == (6 if level == "recording" else 8)


def _run(
    folder: Path, chain: chains.Chain, paths: Sequence[Path], engine: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    config = AnnotationConfig.model_validate({"workers": 2, "engine": engine, "recognizers": []})
    sources = [RecordingSource(str(path), path.name, path.name, "speaker") for path in paths]
    spool = Spool(folder / "spool.sqlite")
    with Ledger(folder / "ledger.sqlite") as ledger:
        Run(config, _context(folder), chain, Thresholds(), sources, ledger, spool).annotate()
    return [row for _, _, row in spool.parts()], list(spool.files())


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("segments.cover=all", "steps.segments.cover"),
        ("min_duration_s=1", "thresholds.min_duration_s"),
        ("steps.segments.cove=all", "steps.segments.cover"),
        ("worker=2", "workers"),
    ],
)
def test_a_setting_in_the_wrong_place_is_told_its_own(wrong: str, meant: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"{wrong.partition('=')[0].rpartition('.')[2]}.*no such setting"
    ) as told:
        validate_settings(AnnotationConfig, {}, [wrong], {}, Thresholds)
    assert f"did you mean {meant!r}?" in str(told.value)
