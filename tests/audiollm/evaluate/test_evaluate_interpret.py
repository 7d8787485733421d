"""The command `evaluate interpret`: several systems, sentences of a long output, speech, verdicts, bad lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from audiollm.audio import load, save
from audiollm.commands.cli import build_app
from audiollm.evaluate.interpret.fragment_judge import FragmentVerdict, tally
from audiollm.evaluate.interpret.interpretation_suite import (
    InterpretationBench,
    LogOfSystem,
    evaluate_interpretation,
)
from audiollm.evaluate.interpret.latency import length_adaptive_average_lagging
from audiollm.evaluate.interpret.latency_scores import LatencyOptions
from audiollm.evaluate.interpret.logged_outputs import LoggedOutput, write_log
from audiollm.evaluate.interpret.quality import HeardOutput
from audiollm.evaluate.interpret.resegment import ReferenceSegment, resegment
from audiollm.evaluate.report.text_errors import choose_form


def line(index: int, prediction: str, delays: list[float], **values: Any) -> LoggedOutput:
    made = {"reference": "ein zwei drei vier", "source_length": 4000.0} | values
    return LoggedOutput.model_validate({"index": index, "prediction": prediction, "delays": delays} | made)


def test_sentences_of_a_long_output_keep_their_own_words() -> None:
    segments = [
        ReferenceSegment(0, 4000, ("a", "b", "c", "d")),
        ReferenceSegment(5000, 9000, ("e", "f", "g", "h")),
        ReferenceSegment(9000, 10000, ("i",)),
    ]
    units = ["a", "x", "c", "d", "d", "e", "f", "g", "h"]
    times = [1000.0 * place for place in range(1, 10)]
    first, second, third = resegment(units, times, segments)
    assert first.units == ("a", "x", "c", "d", "d")
    assert second.units == ("e", "f", "g", "h")
    assert third.units == ()
    assert second.emissions(10000).times_H == (1000, 2000, 3000, 4000)
    assert second.emissions(10000).recording_end == 5000
    assert length_adaptive_average_lagging(second.emissions(10000)) == pytest.approx(1000)
    assert sum(len(part.units) for part in resegment(["z"] * 7, [1.0] * 7, segments)) == 7


def test_a_tally_counts_judged_fragments() -> None:
    verdicts = [
        FragmentVerdict(index=0, fragment="x", vip=place < 3, svip=None if place else True)
        for place in range(4)
    ]
    found = tally(verdicts)
    assert found["vip"]["accuracy"] == 0.75
    assert (found["svip"]["accuracy"], found["svip"]["n"]) == (1.0, 1)


def test_two_systems_in_one_report(tmp_path: Path) -> None:
    """Text beside speech; an empty output, a bad line; sentences; the page has both pictures and the mixed sound."""
    save(tmp_path / "source.wav", torch.sin(torch.arange(32000) * 0.05)[None] * 0.1, 8000)
    text, speech = tmp_path / "text", tmp_path / "speech"
    segments = [
        {"start": 0, "end": 2000, "reference": "ein zwei"},
        {"start": 2000, "end": 4000, "reference": "drei vier"},
    ]
    write_log(
        text / "instances.log",
        [
            line(
                0,
                "ein zwei drei vier",
                [1000, 2000, 3000, 4000],
                elapsed=[1100, 2100, 3100, 4500],
                segments=segments,
            ),
            line(1, "", []),
        ],
    )
    with (text / "instances.log").open("a") as file:
        file.write('{"index": 2, "prediction": "a b", "delays": [2, 1], "source_length": 3}\n')
    save(speech / "out.wav", torch.full((1, 8000), 0.5), 8000)
    spoken: dict[str, Any] = {
        "durations": [500, 500], "transcript": "ein zwei drei vier", "source": "../source.wav",
    }  # fmt: skip
    said = [
        line(number, "out.wav", [1000, 2000], **spoken, **begins)
        for number, begins in enumerate([{}, {"prediction_offset": 0.0}])
    ]
    write_log(speech / "instances.log", said)
    verdicts = tmp_path / "verdicts.csv"
    verdicts.write_text("system,index,fragment,vip\nwords,0,ein,true\nwords,0,zwei,false\n")
    command = [
        "evaluate",
        "interpret",
        f"words={text}",
        f"speech={speech}",
        "--language",
        "de",
        "-o",
        str(tmp_path / "o"),
    ]
    result = CliRunner().invoke(build_app(), [*command, "--verdicts", str(verdicts), "--scorer", "chrf"])
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "o" / "results.json").read_text())
    words, spoken = found["systems"]["words"], found["systems"]["speech"]
    assert (words["outputs"], words["empty"], words["set_aside"]) == (2, 1, 1)
    assert words["latency"]["LAAL"]["mean"] == 1000
    assert words["latency"]["LAAL"]["reasons"] == {"no output": 1}
    assert words["latency"]["LAAL_CA"]["mean"] == pytest.approx((1100 * 3 + 1500) / 4)
    assert words["latency"]["LongYAAL of sentences"]["n"] == 2
    assert words["quality"]["BLEU"] < spoken["quality"]["BLEU"] == pytest.approx(100)
    assert spoken["gaps"] == {"per_output": 1.0, "mean": 500.0}
    assert spoken["scorers"]["chrf"]["mean"] == pytest.approx(100)
    assert found["verdicts"]["words"]["vip"]["accuracy"] == 0.5
    page = (tmp_path / "o" / "report.html").read_text()
    assert page.count("<svg") == 5  # quality over latency, and a timeline for each output
    assert page.count("<audio") == 2
    # a file whose beginning is not told begins with its first piece, as SimulEval writes it
    for number, first in ((0, 8000), (1, 0)):
        right_N = load(tmp_path / "o" / "audio" / f"speech-{number}.wav").samples_CN[1]
        assert right_N[first : first + 8000].tolist() == pytest.approx([0.5] * 8000, abs=1e-3)
        assert float(right_N.sum()) == pytest.approx(4000, abs=1)
    assert "out of order" in (tmp_path / "o" / "set_aside.jsonl").read_text()
    scored = CliRunner().invoke(build_app(), [*command[:3], *command[4:], "--score-empty"])
    assert scored.exit_code == 0, scored.output
    found = json.loads((tmp_path / "o" / "results.json").read_text())
    assert found["systems"]["words"]["latency"]["LAAL"]["mean"] == (1000 + 4000) / 2


def test_sentences_by_character_have_the_times_of_their_words(tmp_path: Path) -> None:
    """A log by word is scored by character, as a whole output is; damaged sentences are named."""
    segments = [
        {"start": 0, "end": 2000, "reference": "你好"},
        {"start": 2000, "end": 4000, "reference": "再见了"},
    ]
    values: dict[str, Any] = {"reference": "你好再见了", "segments": segments}
    outputs = [line(0, "你好 再见了", [2000, 4000], **values), line(1, "你 好 再", [1000, 4000], **values)]
    write_log(tmp_path / "instances.log", outputs)
    with (tmp_path / "instances.log").open("a") as file:
        damaged = {
            "index": 2,
            "prediction": "你",
            "delays": [1],
            "source_length": 3,
            "segments": [{"start": 0}],
        }
        file.write(json.dumps(damaged) + "\n")
    out = tmp_path / "scores"
    command = ["evaluate", "interpret", f"ours={tmp_path}", "--language", "zh", "-o", str(out)]
    result = CliRunner().invoke(build_app(), command)
    assert result.exit_code == 0, result.exception
    found = json.loads((out / "results.json").read_text())["systems"]["ours"]
    assert (found["outputs"], found["set_aside"]) == (2, 1)
    scores = found["latency"]["LAAL of sentences"]
    assert (scores["n"], scores["mean"]) == (2, 2000)
    assert scores["reasons"] == {"2 times are neither of the characters nor of the words": 2}
    assert "segments.0.end" in (out / "set_aside.jsonl").read_text()


def test_each_system_is_heard_with_its_own_speech(tmp_path: Path) -> None:
    """Both logs have a source of number 0."""
    save(tmp_path / "source.wav", torch.zeros(1, 8000), 8000)
    values: dict[str, Any] = {"durations": [500], "source": "../source.wav", "prediction_offset": 0.0}
    command = ["evaluate", "interpret", "-o", str(tmp_path / "o")]
    for name, level in (("quiet", 0.25), ("loud", 0.5)):
        save(tmp_path / name / "out.wav", torch.full((1, 4000), level), 8000)
        write_log(tmp_path / name / "instances.log", [line(0, "out.wav", [1000], **values)])
        command.append(str(tmp_path / name))
    result = CliRunner().invoke(build_app(), command)
    assert result.exit_code == 0, result.output
    for name, level in (("quiet", 0.25), ("loud", 0.5)):
        mixed = load(tmp_path / "o" / "audio" / f"{name}-0.wav").samples_CN
        assert float(mixed[1].max()) == pytest.approx(level, abs=1e-3)


def scored(
    *outputs: LoggedOutput, unit: Any = "word", heard: dict[int, HeardOutput] | None = None, **options: bool
) -> Any:
    """The outcome of one system, empty outputs scored at the source's end."""
    latency = LatencyOptions(unit, **{"score_empty": True, **options})
    bench = InterpretationBench("en", latency, choose_form("spoken", "en"))
    return evaluate_interpretation([LogOfSystem("ours", Path(), outputs, transcripts=heard or {})], bench)


def test_silence_is_not_free_by_the_clock(tmp_path: Path) -> None:
    """An empty output has no times; it is scored at the source's end by both clocks."""
    times = [1000.0, 2000.0, 3000.0, 4000.0]
    spoken = line(0, "ein zwei drei vier", times, elapsed=[time + 100 for time in times])
    latency = scored(spoken, line(1, "", [])).result["systems"]["ours"]["latency"]
    assert latency["AL"]["mean"] == (1000 + 4000) / 2
    assert (latency["AL_CA"]["n"], latency["AL_CA"]["mean"]) == (2, (1100 + 4000) / 2)


@pytest.mark.parametrize("elapsed", [[0.0] * 4, [31.0, 35.0, 42.0, 60.0], [1000.0, 1900.0, 3100.0, 4100.0]])
def test_a_log_without_times_on_the_clock_has_no_computation_aware_latency(elapsed: list[float]) -> None:
    """SimulEval writes zeros, or the computation alone, for a text: lags of minus six seconds came of it."""
    times = [1000.0, 2000.0, 3000.0, 4000.0]
    outcome = scored(line(0, "ein zwei drei vier", times, elapsed=elapsed))
    assert not [name for name in outcome.result["systems"]["ours"]["latency"] if name.endswith("_CA")]
    assert not any("Computation-aware" in table.title for table in outcome.tables)
    measured = scored(line(0, "ein zwei drei vier", times, elapsed=[time + 5 for time in times]))
    assert measured.result["systems"]["ours"]["latency"]["AL_CA"]["mean"] == 1005
    written = scored(line(0, "ein zwei", [1, 2], elapsed=[10, 20], source_length=4), text_source=True)
    assert not [name for name in written.result["systems"]["ours"]["latency"] if name.endswith("_CA")]


def test_one_empty_output_is_told_once() -> None:
    outcome = scored(line(0, "ein zwei", [1000, 2000]), line(1, "", []), score_empty=False)
    (table,) = [table for table in outcome.tables if table.title.startswith("Latency")]
    assert table.note == "n/a: 1 × no output."
    assert outcome.missing == [("ours 1", "no output")]
    by_frame = scored(line(0, "ein zwei", [1000, 2000]), unit="frame")
    assert by_frame.missing == [("ours 0", "text has no frames")]


def test_outputs_without_a_reference_are_told() -> None:
    with_one, without = line(0, "ein zwei", [1000, 2000]), line(1, "ein zwei", [1000, 2000], reference="")
    assert any("1 of 2 outputs have no reference" in each for each in scored(with_one, without).about)
    assert not any("no reference" in each for each in scored(with_one).about)


def test_speech_that_cannot_be_heard_is_named_and_has_no_score() -> None:
    pieces: dict[str, Any] = {"durations": [500], "reference": "one two three four"}
    outputs = [line(0, "a.wav", [1000], **pieces), line(1, "gone.wav", [1000], **pieces)]
    heard = {0: HeardOutput("one two three four"), 1: HeardOutput("", "does not exist")}
    outcome = scored(*outputs, heard=heard)
    quality = outcome.result["systems"]["ours"]["quality"]
    assert quality["ASR-BLEU"] == pytest.approx(100)
    assert quality["not_heard"] == 1
    assert ("ours 1 ASR-BLEU", "does not exist") in outcome.missing
    none = scored(outputs[1], heard=heard)
    assert "ASR-BLEU" not in none.result["systems"]["ours"]["quality"]


def test_the_timeline_of_a_log_by_word_has_its_words(tmp_path: Path) -> None:
    """Languages without spaces are counted by character; a log of a model of ours has a time for each action's text."""
    output = line(0, "你好 再见了", [1000, 4000], reference="你好再见了")
    (example,) = scored(output, unit="character").examples
    assert ">你好<" in example.picture and ">再见了<" in example.picture
    by_character = line(0, "你好", [1000, 4000], reference="你好")
    (example,) = scored(by_character, unit="character").examples
    assert ">你<" in example.picture and ">好<" in example.picture


def test_a_wrong_unit_is_named(tmp_path: Path) -> None:
    result = CliRunner().invoke(build_app(), ["evaluate", "interpret", str(tmp_path), "--unit", "words"])
    assert "did you mean 'word'" in str(result.exception)
