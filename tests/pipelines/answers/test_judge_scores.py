"""Scores that a language model gives: over an endpoint, by a model in a folder, by the model itself."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from audiollm.data.records.manifest import read_samples
from audiollm.data.records.sample import (
    AudioPart,
    Message,
    RatedAnswer,
    Sample,
    TextPart,
    VideoPart,
    write_samples,
)
from audiollm.errors import ConfigError, StageError
from audiollm.evaluate.subjects.chat import FolderChat
from audiollm.recipe.runner import run_recipe
from audiollm.recipe.stages import load_recipe
from pipelines.answers.judge import DEFAULT_PROMPT, UNSEEN_VIDEO, judge_message, load_judge, read_score
from pipelines.answers.settings import SampleAnswersConfig
from tests.audiollm.families.dual_ffn.packed_samples import save_model
from tests.audiollm.models.tiny_audio_llms import save_tiny
from tests.audiollm.rl.preference.records import tone

KEY = "a-key-that-nobody-may-read"


class Judge(ThreadingHTTPServer):
    """Gives points by the number of the request; some verdicts have none."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.seen: list[dict[str, Any]] = []
        self.status = 200
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: Judge

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.seen.append(body)
            number = len(self.server.seen)
        self.send_response(self.server.status)
        self.end_headers()
        said = (
            f"Good. Score: {number % 5}"
            if number % 3
            else f"{self.headers['Authorization']}: I would not say."
        )
        answer = {"choices": [{"message": {"content": said}}]}
        self.wfile.write((json.dumps(answer) if self.server.status == 200 else KEY).encode())

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Iterator[Judge]:
    monkeypatch.setenv("MY_KEY", KEY)
    server = Judge()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    save_tiny("qwen2_audio", tmp_path / "model")
    samples = []
    for n in range(3):
        tone(tmp_path / f"{n}.wav", 200.0 + 100 * n)
        asked = Message(role="user", content=[AudioPart(path=f"{n}.wav"), TextPart(text="High or low?")])
        samples.append(Sample(id=f"t{n}", messages=[asked], task="question", metadata={}))
    write_samples(tmp_path / "samples.jsonl", samples)
    return tmp_path


def sampled(place: Path, name: str, **settings: Any) -> tuple[dict[str, Any], list[Sample]]:
    given = {
        "samples": str(place / "samples.jsonl"), "model": str(place / "model"), "max_answer_tokens": 5,
        "score": {"judge": 1.0}, **settings,
    }  # fmt: skip
    recipe = place / f"{name}.yaml"
    recipe.write_text(yaml.safe_dump({"name": name, "stages": [{"sample_answers": given}]}))
    loaded = load_recipe(recipe, runs=place / "runs")
    run_recipe(loaded, Console(quiet=True))
    found, _ = read_samples(loaded.folder / "sample_answers" / "samples.jsonl")
    return json.loads((loaded.folder / "sample_answers" / "stage.json").read_text())["figures"], found


@pytest.mark.parametrize(
    ("verdict", "points"),
    [
        ("Right and short.\nScore: 4", 4.0),
        ("**Score:** 3.5/5", 3.5),
        ("score 0", 0.0),
        ("Score: 5. As I said, score: 5", 5.0),
        ("Score: 2 or Score: 4", None),
        ("Score: 7", None),
        ("Score: -1", None),
        ("four", None),
        ("", None),
    ],
)
def test_verdicts_are_read_or_not(verdict: str, points: float | None) -> None:
    assert read_score(verdict) == points


def test_what_a_judge_is_shown() -> None:
    messages = [Message(role="user", content=[AudioPart(path="q.wav"), TextPart(text="What {answer}?")])]
    written = RatedAnswer(content=[TextPart(text="A {question}.")])
    message = judge_message("Q: {question} A: {answer}", messages, written)
    assert message.content == [AudioPart(path="q.wav"), TextPart(text="Q: What {answer}? A: A {question}.")]
    spoken = RatedAnswer(content=[AudioPart(path="a.wav")])
    *recordings, text = judge_message(DEFAULT_PROMPT, messages, spoken).content
    assert [part.path for part in recordings if isinstance(part, AudioPart)] == ["q.wav", "a.wav"]
    assert isinstance(text, TextPart) and "<response>(spoken)</response>" in text.text
    asked = [
        message.model_copy(update={"content": [VideoPart(path="q.mp4"), *message.content]})
        for message in messages
    ]
    heard, told = judge_message("Q: {question} A: {answer}", asked, written).content
    assert heard == AudioPart(path="q.wav")
    assert told == TextPart(text=f"Q: What {{answer}}?\n{UNSEEN_VIDEO} A: A {{question}}.")


def test_verdicts_of_an_endpoint(place: Path, judge: Judge) -> None:
    settings = {"judge": {"url": judge.url, "model": "wise", "key_variable": "MY_KEY"}, "group_size": 3}
    figures, found = sampled(place, "asked", **settings)
    answers = [answer for sample in found for answer in sample.answers]
    assert figures["answers_without_score"] == len(judge.seen) // 3 > 0
    assert len(answers) == len(judge.seen) - figures["answers_without_score"]
    assert all(answer.metadata["notes"]["judge"].startswith("Good. Score:") for answer in answers)
    assert not any(
        answer.score == 0.0 and "Score: 0" not in answer.metadata["notes"]["judge"] for answer in answers
    )
    kinds = [part["type"] for part in judge.seen[0]["messages"][0]["content"]]
    assert kinds == ["input_audio", "text"]
    asked = len(judge.seen)
    sampled(place, "asked", **{**settings, "score": {"judge": 2.0}})
    assert len(judge.seen) == asked, "unreadable verdicts are not asked for again either"


def test_no_file_holds_the_key(place: Path, judge: Judge) -> None:
    settings = {"judge": {"url": judge.url, "model": "wise", "key_variable": "MY_KEY", "attempts": 1}}
    judge.status = 401
    with pytest.raises(StageError, match="no sample was answered and scored"):
        sampled(place, "refused", **settings)
    files = [path for path in (place / "runs").rglob("*") if path.is_file()]
    assert any("HTTP 401" in path.read_text(errors="replace") for path in files)
    assert not any(KEY in path.read_text(errors="replace") for path in files)
    judge.status = 200
    asked = len(judge.seen)
    sampled(place, "refused", **settings)
    assert len(judge.seen) > asked, "what failed on the way is asked for again"


def test_a_model_judges_its_own_answers(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []

    def go_on(self: FolderChat, turns: Any) -> str:
        shown.append(turns)
        return "Score: 3"

    monkeypatch.setattr(FolderChat, "go_on", go_on)
    figures, _ = sampled(
        place, "own", judge=str(place / "model"), judge_prompt="Rate: {answer}", group_size=2
    )
    assert figures["mean_score"] == 3.0
    ((role, parts),) = shown[0]
    assert role == "user" and parts[-1].startswith("Rate: ")
    monkeypatch.undo()
    with pytest.raises(StageError, match="no sample was answered and scored"):
        sampled(place, "random", judge=str(place / "model"), judge_tokens=3)  # random weights say nothing


def test_our_own_model_is_a_judge(tmp_path: Path) -> None:
    save_model(tmp_path / "own", "features")
    tone(tmp_path / "a.wav", 300.0)
    judge = load_judge(tmp_path / "own", None, 4)
    said = judge.reply(
        Message(role="user", content=[AudioPart(path=str(tmp_path / "a.wav")), TextPart(text="what is it?")])
    )
    assert isinstance(said, str) and read_score(said) is None


def test_prompts_of_judges_are_checked(place: Path) -> None:
    with pytest.raises(ConfigError, match="answer"):
        sampled(place, "prompt", judge=str(place / "model"), judge_prompt="Rate it")
    with pytest.raises(ConfigError, match="no address"):
        sampled(place, "address", judge={"url": "localhost", "model": "x"})


def test_settings_of_finished_stages_are_written_as_before(place: Path) -> None:
    """A stage that was finished before there were spoken answers keeps its fingerprint."""
    config = SampleAnswersConfig(model=place, samples=place / "samples.jsonl")
    assert list(config.model_dump()) == [
        "model", "codec", "samples", "group_size", "temperature", "top_p", "max_answer_tokens", "seed", "add_right",
        "score", "reward_model", "max_samples", "strict",
    ]  # fmt: skip
