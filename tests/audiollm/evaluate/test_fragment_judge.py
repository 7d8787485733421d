"""VIP and SVIP by a judge that is asked: the division is checked, nothing judged is asked again, failures are named."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from audiollm.audio import Waveform, save
from audiollm.commands.cli import build_app
from audiollm.endpoints import EndpointClient
from audiollm.errors import ConfigError
from audiollm.evaluate.interpret.fragment_judge import (
    FragmentJudge,
    FragmentVerdict,
    check_systems,
    read_fragments,
)
from audiollm.evaluate.interpret.logged_outputs import LoggedOutput, write_log
from audiollm.evaluate.judges.ticketed_answers import VerdictError
from audiollm.evaluate.report.store import RowStore
from audiollm.models.audio_llms.inputs import Parts

REFERENCE = "Ein Hund bellt, zwei Katzen nicht."


def answer(fragments: Sequence[Any], ticket: str = "t1") -> str:
    return json.dumps({"ticket": ticket, "fragments": list(fragments)})


def judged(text: str, vip: Any = True, **more: Any) -> dict[str, Any]:
    return {"fragment": text, "vip": vip} | more


def test_fragments_are_the_whole_reference() -> None:
    said = answer([judged("Ein Hund bellt"), judged("zwei Katzen nicht", False)])
    form = answer([])  # the form repeated before it is filled
    found = read_fragments(f"{form} {said}", "t1", REFERENCE, False)
    assert [(each["fragment"], each["vip"]) for each in found] == [
        ("Ein Hund bellt", True),
        ("zwei Katzen nicht", False),
    ]
    heard = answer([judged("ein hund bellt", svip=False), judged("zwei Katzen nicht", False, svip=True)])
    assert [each["svip"] for each in read_fragments(heard, "t1", REFERENCE, True)] == [False, False]


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        (answer([judged("Ein Hund bellt")]), "not the words of the reference"),  # the rest does not count
        (answer([judged("zwei Katzen nicht"), judged("Ein Hund bellt")]), "not the words of the reference"),
        (answer([judged(REFERENCE), judged(REFERENCE)]), "not the words of the reference"),
        (answer([judged(REFERENCE)], "guessed"), "no verdict"),
        (answer([judged(REFERENCE)]) + answer([judged(REFERENCE, False)]), "several verdicts"),
        (answer([judged(REFERENCE, "true")]), "without fragment or vip"),
        (answer([judged(REFERENCE), judged(" ")]), "without fragment or vip"),
        (answer([REFERENCE]), "without fragment or vip"),
        (answer([]), "no fragment"),
        ('{"ticket": "t1", "fragments": {"vip": true}}', "without fragment or vip"),
        ("All is conveyed.", "no verdict"),
    ],
)
def test_answers_that_do_not_count(said: str, problem: str) -> None:
    with pytest.raises(VerdictError, match=problem):
        read_fragments(said, "t1", REFERENCE, False)


class Listener:
    """Divides a reference at its commas; a fragment is conveyed where the output has its first word.

    Args:
        first: answers that come before those.
    """

    name = "listener"

    def __init__(self, *first: str) -> None:
        self.first, self.asked = list(first), list[Parts]()

    def ask(self, parts: Parts) -> str:
        self.asked.append(parts)
        if self.first:
            return self.first.pop(0)
        text = "\n".join(part for part in parts if isinstance(part, str))
        reference, output = (json.loads(found) for found in re.findall(r'a JSON string: (".*")', text))
        (ticket,) = re.findall(r'"ticket": "(\w+)"', text)
        svip = {"svip": "well" in output} if any(isinstance(part, Waveform) for part in parts) else {}
        fragments = reference.split(",")
        return answer([judged(each, each.split()[0] in output, **svip) for each in fragments], ticket)


class Gullible(Listener):
    """Finds everything conveyed."""

    def ask(self, parts: Parts) -> str:
        said = json.loads(super().ask(parts))
        return json.dumps({**said, "fragments": [{**each, "vip": True} for each in said["fragments"]]})


def output(index: int = 0, text: str = "zwei Katzen", **values: Any) -> LoggedOutput:
    made = {"reference": REFERENCE, "source_length": 4000.0, "delays": [float(len(text))] if text else []}
    return LoggedOutput.model_validate({"index": index, "prediction": text} | made | values)


def test_a_judge_is_asked_until_it_divides_the_reference(tmp_path: Path) -> None:
    chat = Listener("{}", answer([judged("all of it")]))
    judge = FragmentJudge(chat, "x", RowStore(tmp_path / "kept.jsonl"))
    for _ in range(2):
        found = judge.judge("ours", output(), "zwei Katzen", tmp_path)
        assert [(each.fragment.strip(), each.vip, each.svip) for each in found] == [
            ("Ein Hund bellt", False, None),
            ("zwei Katzen nicht.", True, None),
        ]
    assert len(chat.asked) == 3, "what was judged is not asked again"
    with pytest.raises(VerdictError, match="no verdict in the answer, 3 times"):
        FragmentJudge(Listener("{}", "{}", "{}"), "x").judge("ours", output(), "zwei", tmp_path)


def test_an_output_of_nothing_conveys_nothing(tmp_path: Path) -> None:
    (found,) = FragmentJudge(Listener(), "x").judge("ours", output(text="", reference=" ein"), "", tmp_path)
    assert not found.vip
    (found,) = FragmentJudge(Gullible(), "x").judge("ours", output(text="", reference="ein"), "", tmp_path)
    assert not found.vip


def test_sentences_of_a_long_output_are_judged_beside_their_own_words(tmp_path: Path) -> None:
    segments = [
        {"start": 0, "end": 2000, "reference": "eins zwei, drei"},
        {"start": 2000, "end": 4000, "reference": "vier fünf, eins"},
    ]
    chat = Listener()
    found = FragmentJudge(chat, "x").judge("s", output(segments=segments), "eins zwei vier fünf", tmp_path)
    assert [each.vip for each in found] == [True, False, True, False]
    assert len(chat.asked) == 2


def test_what_a_judge_hears(tmp_path: Path) -> None:
    for name in ("source", "said"):
        save(tmp_path / f"{name}.wav", torch.full((1, 8000), 0.1), 8000)
    chat, spoken = Listener(), {"durations": [500.0], "delays": [1500.0], "transcript": "zwei well"}
    heard = output(text="said.wav", source="source.wav", **spoken)
    found = FragmentJudge(chat, "x", hears=True).judge("s", heard, "zwei well", tmp_path)
    assert [(each.vip, each.svip) for each in found] == [(False, False), (True, True)]
    (parts,) = chat.asked
    assert [part.num_samples for part in parts if isinstance(part, Waveform)] == [8000, 8000]
    assert "begins 1.5 s after" in str(parts[0]) and "1.5 to 2.0" in str(parts[0])
    with pytest.raises(VerdictError, match="cannot be heard"):
        lost = output(text="lost.wav", source="source.wav", **spoken)
        FragmentJudge(chat, "x", hears=True).judge("s", lost, "zwei", tmp_path)
    with pytest.raises(VerdictError, match="longer than 600 s"):
        long = output(text="said.wav", source="source.wav", source_length=700_000.0, **spoken)
        FragmentJudge(chat, "x", hears=True).judge("s", long, "zwei", tmp_path)


def test_each_verdict_is_about_a_log() -> None:
    verdict = FragmentVerdict(index=0, fragment="x", vip=True)
    check_systems([verdict], ["ours"], Path("v.csv"))
    with pytest.raises(ConfigError, match="of which system"):
        check_systems([verdict], ["ours", "other"], Path("v.csv"))
    with pytest.raises(ConfigError, match="their: no log"):
        check_systems([verdict.model_copy(update={"system": "their"})], ["ours"], Path("v.csv"))


def test_the_command_asks_an_endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listener = Listener()

    def post_json(self: EndpointClient, path: str, values: dict[str, Any], check_stop: Any = None) -> bytes:
        (message,) = values["messages"]
        said = listener.ask([part["text"] for part in message["content"]])
        return json.dumps({"choices": [{"message": {"content": said}}]}).encode()

    monkeypatch.setattr(EndpointClient, "post_json", post_json)
    for name, text in (("ours", "Ein zwei"), ("other", "zwei")):
        write_log(tmp_path / name / "instances.log", [output(text=text, delays=[1.0] * len(text.split()))])
    command = ["evaluate", "interpret", *(str(tmp_path / name) for name in ("ours", "other"))]
    command += ["--language", "de", "-o", str(tmp_path / "out")]
    endpoint = ["--endpoint", "http://127.0.0.1:9/v1", "--endpoint-model", "listener"]
    for _ in range(2):
        result = CliRunner().invoke(build_app(), [*command, *endpoint])
        assert result.exit_code == 0, result.output
    assert len(listener.asked) == 2
    found = json.loads((tmp_path / "out" / "results.json").read_text())["verdicts"]
    assert (found["ours"]["vip"]["accuracy"], found["other"]["vip"]["accuracy"]) == (1.0, 0.5)
    assert "fragments judged by listener" in (tmp_path / "out" / "report.html").read_text()
    again = CliRunner().invoke(
        build_app(), [*command, "--verdicts", str(tmp_path / "out" / "verdicts.jsonl")]
    )
    assert again.exit_code == 0, again.output
    assert json.loads((tmp_path / "out" / "results.json").read_text())["verdicts"] == found
    for wrong, problem in (
        ([*endpoint, "--verdicts", "x.csv"], "give one of"),
        (["--judge-hears"], "there is no judge"),
    ):
        refused = CliRunner().invoke(build_app(), [*command, *wrong])
        assert isinstance(refused.exception, ConfigError) and problem in str(refused.exception)
