"""Latencies of interpretation: reference vectors, closed forms, and SimulEval's own functions on random logs."""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from audiollm.errors import ConfigError
from audiollm.evaluate.interpret.latency import (
    SPEECH_TO_SPEECH,
    SPEECH_TO_TEXT,
    TEXT_TO_TEXT,
    EmissionTimes,
    OutputPiece,
    TokenDurations,
    average_lagging,
    average_proportion,
    average_token_delay,
    differentiable_average_lagging,
    first_letter_appearance_lagging,
    length_adaptive_average_lagging,
    long_yaal,
    yaal,
)
from audiollm.evaluate.interpret.latency_scores import LatencyOptions, latencies_of
from audiollm.evaluate.interpret.logged_outputs import LoggedOutput, Playback, read_log, write_log
from audiollm.evaluate.report.metric_error import MetricError

# D, X, R: AL, LAAL, AP, DAL, as SimulEval 1.1.4 computes them
VECTORS: dict[str, tuple[list[float], float, int, tuple[float, float, float, float]]] = {
    "wait-1": ([1, 2, 3, 4, 5], 5, 5, (1, 1, 0.6, 1)),
    "wait-3": ([3, 4, 5, 5, 5], 5, 5, (3, 3, 0.88, 3)),
    "wait-3 of ten": ([3, 4, 5, 6, 7, 8, 9, 10, 10, 10], 10, 10, (3, 3, 0.72, 3)),
    "offline": ([5] * 5, 5, 5, (5, 5, 1, 5)),
    "more than asked": ([1, 2, 3, 4, 5, 5, 5, 5], 5, 5, (1, 1.75, 1.2, 2.03125)),
    "twice as much": ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 10, 5, (-3.5, 1, 1.1, 1)),
    "too little": ([2, 4, 6], 6, 6, (3, 3, 1 / 3, 2)),
    "late start": ([7, 7], 6, 4, (7, 7, 0.5833333333, 7)),
    "milliseconds": ([1000, 1000, 2000, 3000, 3000, 4000], 4000, 5, (1000 / 3, 2000 / 3, 0.7, 1000)),
    "never ends": ([1, 2, 3], 6, 6, (1, 1, 1 / 6, 1)),
    "bursts": ([960, 960, 1920, 1920, 1920, 3840, 3840], 4000, 7, (480, 480, 0.5485714286, 966.5306122)),
    "past the end": ([500, 1500, 4200, 4300], 4000, 4, (3200 / 3, 3200 / 3, 0.65625, 1350)),
    "single": ([4], 4, 1, (4, 4, 1, 4)),
    "burst": ([2, 2, 5, 5, 5], 5, 5, (2, 2, 0.76, 2.6)),
}


@pytest.mark.parametrize("name", VECTORS)
def test_lagging_of_the_reference_vectors(name: str) -> None:
    times, source, reference, expected = VECTORS[name]
    output = EmissionTimes(tuple(times), source, reference)
    found = (
        average_lagging(output),
        length_adaptive_average_lagging(output),
        average_proportion(output),
        differentiable_average_lagging(output),
    )
    assert found == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize(
    ("times", "durations", "expected"),
    [
        ([1, 2, 3, 4, 5], TEXT_TO_TEXT, 1.0),
        ([3, 4, 5, 5, 5], TEXT_TO_TEXT, 3.0),
        ([5] * 5, TEXT_TO_TEXT, 5.0),
        ([2, 2, 5, 5, 5], TEXT_TO_TEXT, 2.6),
        ([1000, 1000, 2000, 3000, 3000, 4000], SPEECH_TO_TEXT, 1383.3333333),
        ([960, 960, 1920, 1920, 1920, 3840, 3840], SPEECH_TO_TEXT, 1131.4285714),
        ([4000] * 4, SPEECH_TO_TEXT, 3250.0),
    ],
)
def test_token_delay_of_text(times: list[float], durations: TokenDurations, expected: float) -> None:
    pieces = [OutputPiece(time) for time in times]
    assert average_token_delay(pieces, durations, speech=False) == pytest.approx(expected)


def test_speech_is_played_when_the_piece_before_it_is_over() -> None:
    times, durations = [1000.0, 2000.0, 5000.0], [1500.0, 800.0, 500.0]
    heard = Playback.of(times, durations)
    assert heard.intervals == ((1000, 1500), (2500, 800), (5000, 500))
    assert heard.gaps == [1700]
    pieces = [OutputPiece(*each) for each in zip(times, durations, strict=True)]
    assert average_token_delay(pieces, SPEECH_TO_SPEECH, speech=True) == pytest.approx(1600)
    output = logged(delays=times, durations=durations, source_length=4000, prediction="out.wav")
    scores = latencies_of(output, LatencyOptions("segment"))
    assert (scores["StartOffset"], scores["EndOffset"], scores["ATD"]) == (1000, 1500, 1600)


def test_yaal_stops_before_the_end_of_the_source_or_of_the_recording() -> None:
    assert yaal(EmissionTimes((3, 4, 5, 5, 5), 5, 5)) == pytest.approx(3)
    assert yaal(EmissionTimes((1000, 1000, 2000, 3000, 3000, 4000), 4000, 5)) == pytest.approx(2000 / 3)
    late = EmissionTimes((4000,) * 4, 4000, 4)
    assert length_adaptive_average_lagging(late) == 4000
    with pytest.raises(MetricError, match="after the end"):
        yaal(late)
    in_a_talk = EmissionTimes((1000, 2500, 4500, 5200), 4000, 4, recording_end=10000)
    assert long_yaal(in_a_talk) == pytest.approx(1800)
    assert length_adaptive_average_lagging(in_a_talk) == pytest.approx(5000 / 3)


def test_first_letter_is_the_first_that_is_never_revised() -> None:
    assert first_letter_appearance_lagging([1.2, 1.2, 2.0]) == 1.2
    assert first_letter_appearance_lagging([1.2, 1.2, 2.0], onset=0.5) == pytest.approx(0.7)
    shown = [(0.8, ["He"]), (1.6, ["She"]), (2.0, ["She", "is"])]
    assert first_letter_appearance_lagging([], shown) == 1.6
    with pytest.raises(MetricError, match="no output"):
        first_letter_appearance_lagging([])


def logged(**values: Any) -> LoggedOutput:
    made: dict[str, Any] = {"index": 0, "prediction": "", "reference": "a b c d", "source_length": 4000.0}
    return LoggedOutput.model_validate(made | values)


def test_empty_outputs_are_counted_or_scored_as_said_at_the_end() -> None:
    """SimulEval leaves them out of the mean: silence would be the best policy."""
    silent = logged(delays=[])
    assert set(latencies_of(silent, LatencyOptions()).values()) == {"no output"}
    scores = latencies_of(silent, LatencyOptions(score_empty=True))
    offline = latencies_of(logged(prediction="a b c d", delays=[4000.0] * 4), LatencyOptions())
    assert scores == offline
    assert scores["AL"] == scores["LAAL"] == scores["DAL"] == scores["StartOffset"] == scores["FLAL"] == 4000
    assert scores["AP"] == 1
    assert scores["EndOffset"] == 0


def test_units_are_words_characters_and_frames() -> None:
    chinese = logged(prediction="我爱AI", reference="我 爱 AI", delays=[1.0, 2.0, 3.0, 3.0], source_length=4)
    by_character = latencies_of(chinese, LatencyOptions("character"))
    assert by_character["AP"] == pytest.approx(9 / (4 * 4))  # spaces of the reference are no characters
    assert "times for 1 words" in str(latencies_of(chinese, LatencyOptions("word"))["AL"])
    words = logged(prediction="ab c", reference="abc", delays=[1.0, 4.0], source_length=4)
    assert latencies_of(words, LatencyOptions("character"))["AP"] == pytest.approx((1 + 1 + 4) / (4 * 3))
    speech = logged(
        prediction="x.wav", delays=[1000.0, 1000.0], durations=[80.0, 40.0], reference_duration=160.0
    )
    frames = latencies_of(speech, LatencyOptions("frame"))
    assert frames["AP"] == pytest.approx((1000 + 1040 + 1080) / (4000 * 4))
    assert latencies_of(words, LatencyOptions("frame"))["AL"] == "text has no frames"


def test_computation_aware_latencies_stand_beside_the_plain_ones() -> None:
    """In SimulEval 1.1.4 the plain ones become computation-aware, too."""
    output = logged(prediction="a b", delays=[1000.0, 2000.0], elapsed=[1100.0, 2300.0], reference="a b")
    scores = latencies_of(output, LatencyOptions())
    assert (scores["StartOffset"], scores["StartOffset_CA"]) == (1000, 1100)
    assert (scores["AL"], scores["AL_CA"]) == (500, 700)
    # ends of tokens: 1000 + 100 and max(2000, 1100) + 200; source tokens 1 and 5 end at 300 and 1300
    assert scores["ATD_CA"] - scores["ATD"] == pytest.approx((100 + 200) / 2)  # type: ignore[operator]


def test_a_log_is_written_and_read_again_and_bad_lines_are_named(tmp_path: Path) -> None:
    outputs = [
        logged(
            index=0, prediction="a b", delays=[1.0, 2.0], elapsed=[1.0, 2.0], source_length=3, speaker="A"
        ),
        logged(index=1, prediction="x.wav", delays=[5.0], durations=[80.0], transcript="c"),
    ]
    path = tmp_path / "instances.log"
    write_log(path, outputs)
    again, bad = read_log(tmp_path)
    assert again == outputs
    assert not bad
    assert again[0].model_extra == {"speaker": "A"}
    lines = [
        {"index": 2, "prediction": "a b", "delays": [2, 1], "source_length": 3},
        {"index": 3, "prediction": "a", "delays": [float("nan")], "source_length": 3},
        {"index": 4, "prediction": "a", "delays": [1], "elapsed": [1, 2], "source_length": 3},
        {"index": 0, "prediction": "a", "delays": [1], "source_length": 3},
        {"prediction": "a", "delays": [1], "source_length": 3},
        {"index": 5, "prediction": "a", "delays": [1], "source_length": 0},
    ]
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    again, bad = read_log(path)
    assert [output.index for output in again] == [0, 1]
    assert bad[0].reason == "delays are out of order"
    assert len(bad) == 6
    assert "twice" in bad[3].reason
    path.write_text(json.dumps(lines[0]) + "\n")
    with pytest.raises(ConfigError, match="out of order"):
        read_log(path)


# ------------------------------------------------------------------------------------------- SimulEval


@pytest.fixture(scope="module")
def simuleval(monkeypatch_module: pytest.MonkeyPatch) -> Any:
    """Its latency scorers. The folder of an unpacked wheel is enough; `textgrid` is for alignments alone."""
    folder = os.environ.get("AUDIOLLM_SIMULEVAL", "")
    if folder:
        monkeypatch_module.syspath_prepend(folder)
    monkeypatch_module.setitem(sys.modules, "textgrid", types.ModuleType("textgrid"))
    try:
        return importlib.import_module("simuleval.evaluator.scorers.latency_scorer")
    except ImportError as error:
        pytest.skip(f"simuleval cannot be imported ({error}): name the folder of it in AUDIOLLM_SIMULEVAL")


@pytest.fixture(scope="module")
def monkeypatch_module() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def random_log(draw: random.Random, index: int) -> LoggedOutput:
    """A log of text or speech with increasing times, bursts, and output past the end of its source."""
    count = draw.randint(0 if index % 10 == 0 else 1, 12)
    source = draw.uniform(500, 8000)
    times, clock = [], []
    time = late = 0.0
    for _ in range(count):
        time += draw.choice([0.0, draw.uniform(100, 1500)])
        late += draw.choice([0.0, draw.uniform(0, 200)])
        times.append(max(time, 1.0))
        clock.append(max(time, 1.0) + late)
    reference = " ".join("w" * draw.randint(1, 4) for _ in range(draw.randint(1, 12)))
    values: dict[str, Any] = {"prediction": " ".join("v" * count)}
    if index % 2:
        durations = [draw.uniform(50, 1500) for _ in range(count)]
        values = {
            "prediction": "out.wav",
            "durations": durations,
            "intervals": Playback.of(times, durations).intervals,
        }
    return logged(
        index=index, delays=times, elapsed=clock, reference=reference, source_length=source, **values
    )


def test_random_logs_score_as_in_simuleval(simuleval: Any, tmp_path: Path) -> None:
    """The two traps of its logs are left out by construction: ATD is asked of its typed instances, and empty outputs,
    which it leaves out of the mean, are compared as such."""
    instances = importlib.import_module("simuleval.evaluator.instance")

    class Speech(instances.SpeechOutputInstance):  # type: ignore[misc, name-defined]
        """A spoken output that was read from a log."""

        source_length = 0.0
        reference_length = 0

        def __init__(self) -> None:
            self.metrics = {}

    draw = random.Random(0)
    outputs = [random_log(draw, index) for index in range(200)]
    write_log(tmp_path / "instances.log", outputs)
    lines = (tmp_path / "instances.log").read_text().splitlines()
    empty = compared = 0
    for output, line in zip(outputs, lines, strict=True):
        theirs: Any = instances.LogInstance(line)
        if output.is_speech:
            spoken: Any = Speech()
            for key, value in vars(theirs).items():
                if key not in ("info", "prediction", "prediction_length"):
                    setattr(spoken, key, value)
            spoken.reference_length = theirs.reference_length
            theirs = spoken
        ours = latencies_of(output, LatencyOptions("word"))
        for name in ("AL", "LAAL", "AP", "DAL", "StartOffset", "EndOffset", "ATD"):
            for aware, suffix in ((False, ""), (True, "_CA")):
                scorer = simuleval.LATENCY_SCORERS_DICT[name](computation_aware=aware)
                if not output.delays:
                    with pytest.raises(Exception):  # noqa: B017 - a mean of nothing
                        scorer({0: theirs})
                    empty += 1
                    continue
                expected = scorer({0: theirs})
                if name == "EndOffset" and aware and output.is_speech:
                    continue  # its intervals are those of the plain times
                assert ours[name + suffix] == pytest.approx(expected, rel=1e-9, abs=1e-6), (
                    name,
                    suffix,
                    output,
                )
                compared += 1
    assert compared > 2000
    assert empty > 0
