"""Spoken answers of a model: sampled, kept with their codes, scored, selected and trained on, by recipes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console
from torch import Tensor

from audiollm.audio import load, save
from audiollm.data.records.manifest import read_samples
from audiollm.data.records.opening import open_source
from audiollm.data.records.sample import AudioPart, ContentPart, Message, Sample, TextPart, write_samples
from audiollm.errors import ConfigError, StageError
from audiollm.generation.engine.request import Answer, Request
from audiollm.generation.speaking.generator import Generator
from audiollm.models.hub import save_pretrained
from audiollm.recipe.runner import run_recipe
from audiollm.recipe.stages import load_recipe
from audiollm.rl.reward_models.model import RewardModel
from pipelines.answers import spoken, voices
from tests.audiollm.generation.toy_speech import ToyCodec, a_voice, toy_generator
from tests.audiollm.models.tiny_audio_llms import save_tiny
from tests.pipelines.answers import toy_judges

JUDGES = "tests.pipelines.answers.toy_judges"
WORDS = {"recognizer": f"{JUDGES}:ToyRecognizer"}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model that speaks, and samples that ask for speech: by a speaker's name, and by a recording."""
    toy = toy_generator()
    save_pretrained(toy.model, tmp_path / "model", toy.template.tokenizer)
    monkeypatch.setattr(Generator, "from_pretrained", classmethod(lambda cls, model, codec: toy))
    samples = []
    for n in range(4):
        voice = a_voice(0.4, 0.2 + 0.1 * n)
        save(tmp_path / f"{n}.wav", voice.samples_CN, voice.sample_rate)
        asked: list[ContentPart] = [TextPart(text="one two")]
        if n == 3:
            asked.insert(0, AudioPart(path="0.wav"))
        messages = [
            Message(role="system", content=[TextPart(text="Speaker anna")]),
            Message(role="user", content=asked),
            Message(role="assistant", content=[AudioPart(path=f"{n}.wav")]),
        ]
        about = {"text": "one two", "speaker": "anna", "split": "test" if n == 2 else "train"}
        samples.append(Sample(id=f"s{n}", messages=messages, task="tts", metadata=about))
    write_samples(tmp_path / "samples.jsonl", samples)
    toy_judges.HEARD.clear()
    return tmp_path


def run(place: Path, name: str, *stages: dict[str, Any]) -> Path:
    recipe = place / f"{name}.yaml"
    recipe.write_text(yaml.safe_dump({"name": name, "stages": list(stages)}))
    loaded = load_recipe(recipe, runs=place / "runs")
    run_recipe(loaded, Console(quiet=True))
    return loaded.folder


def sampling(place: Path, **settings: Any) -> dict[str, Any]:
    given = {"samples": str(place / "samples.jsonl"), "model": str(place / "model"), "modality": "speech"}
    limits = {"group_size": 4, "max_duration_s": 0.4}
    return {"sample_answers": {**given, **limits, **({} if "score" in settings else WORDS), **settings}}


def found_in(folder: Path) -> tuple[dict[str, Any], list[Sample]]:
    found, bad = read_samples(folder / "samples.jsonl")
    assert not bad
    return json.loads((folder / "stage.json").read_text())["figures"], found


def codes_said(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The codes of everything that is said from now on."""
    said: list[Tensor] = []
    answer_all = Generator.answer_all

    def listen(self: Generator, requests: list[Request], *rest: Any) -> list[Answer]:
        answers = answer_all(self, requests, *rest)
        said.extend(answer.codes_KT for answer in answers)
        return answers

    monkeypatch.setattr(Generator, "answer_all", listen)
    return said


def test_codes_reach_the_training_as_the_model_said_them(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = codes_said(monkeypatch)
    selected = {"select_answers": {"samples": "${sample_answers.samples}", "select": "best_worst"}}
    trained = {
        "train_preference": {
            "start": str(place / "model"), "samples": "${select_answers.samples}", "objective": "dpo",
            "steps": 10, "batch_size": 2, "eval_answers": 1,
        }
    }  # fmt: skip
    folder = run(place, "all", sampling(place), selected, trained)
    figures, sampled = found_in(folder / "sample_answers")
    assert figures["answers"] == 16 and figures["set_aside"] == 0 and len(sampled) == 4
    known = {codes_KT.numpy().tobytes() for codes_KT in said}
    source = open_source(folder / "select_answers" / "samples.jsonl")
    assert len(source) == found_in(folder / "select_answers")[0]["selected"] > 0
    for index in range(len(source)):
        loaded = source[index]
        (encoding,) = loaded.encodings
        assert len(encoding) == len(loaded.audio) and loaded.num_asked == (loaded.sample.id == "s3")
        for codes_KT, clip in zip(
            encoding[loaded.num_asked :], loaded.audio[loaded.num_asked :], strict=True
        ):
            assert codes_KT.numpy().tobytes() in known
            assert torch.allclose(clip.load().samples_CN, ToyCodec().decode(codes_KT), atol=2**-14)
        better, worse = loaded.sample.answers
        assert (better.score, worse.score) == (1.0, 0.5) and better.metadata["notes"] == {"words": "one two"}
        assert better.metadata["seconds"] == better.metadata["frames"] / 25
    figures = json.loads((folder / "train_preference" / "stage.json").read_text())["figures"]
    assert figures["records"] + figures["held_out_records"] == len(source) and not figures["set_aside"]


def test_a_killed_stage_goes_on_between_answers(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = found_in(run(place, "whole", sampling(place)) / "sample_answers")[1]
    original, written = spoken.save_part_codes, []

    def killed(path: Path, codes_KT: Tensor) -> None:
        written.append(path)
        if len(written) == 7:
            raise KeyboardInterrupt
        original(path, codes_KT)

    monkeypatch.setattr(spoken, "save_part_codes", killed)
    monkeypatch.setattr(spoken, "MAX_TOGETHER", 4)
    with pytest.raises(KeyboardInterrupt):
        run(place, "killed", sampling(place))
    said = codes_said(monkeypatch)
    resumed = found_in(run(place, "killed", sampling(place)) / "sample_answers")[1]
    assert len(said) == 16 - 6
    assert [_plain(sample) for sample in resumed] == [_plain(sample) for sample in whole]
    audio = sorted((place / "runs/killed/sample_answers/audio").glob("*.flac"))
    audio[0].unlink()  # a file that is gone is made again, and no other
    said.clear()
    (place / "runs/killed/sample_answers/stage.json").unlink()
    run(place, "killed", sampling(place))
    assert len(said) == 1 and audio[0].is_file()


def _plain(sample: Sample) -> str:
    """A sample with the names of its files, wherever they lie."""
    return sample.with_parts(
        lambda part: (
            part
            if isinstance(part, TextPart)
            else part.model_copy(update={"path": Path(part.path).name, "codes": Path(part.codes or "").name})
        )
    ).model_dump_json()


def test_a_model_that_cannot_speak_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny("qwen2_audio", place / "listener")
    with pytest.raises(ConfigError, match="answers in words alone"):
        run(place, "listener", sampling(place, model=str(place / "listener")))
    toy = toy_generator()
    toy._codec = None
    monkeypatch.setattr(Generator, "from_pretrained", classmethod(lambda cls, model, codec: toy))
    with pytest.raises(ConfigError, match="without a codec"):
        run(place, "silent", sampling(place))


def test_empty_answers_are_left_out(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer_all = Generator.answer_all

    def quiet(self: Generator, requests: list[Request], *rest: Any) -> list[Answer]:
        answers = answer_all(self, requests, *rest)
        none = torch.zeros(3, 0, dtype=torch.long)
        return [
            replace(answer, parts=(none,), codes_KT=none) if number % 4 == 0 or number >= 12 else answer
            for number, answer in enumerate(answers)
        ]

    monkeypatch.setattr(Generator, "answer_all", quiet)
    figures, found = found_in(run(place, "quiet", sampling(place)) / "sample_answers")
    assert len(found) == 3 and figures["answers"] == 9 and figures["set_aside"] == 1
    (row,) = map(json.loads, (place / "runs/quiet/sample_answers/set_aside.jsonl").open())
    assert row["kind"] == "empty answer"


def test_bad_prompts_of_speech_are_set_aside(place: Path) -> None:
    rows = [json.loads(line) for line in (place / "samples.jsonl").open()]
    rows[0]["messages"][-1]["content"] = [{"type": "text", "text": "in words"}]
    rows[3]["messages"][1]["content"][0]["path"] = "absent.wav"
    (place / "samples.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    figures, found = found_in(run(place, "bad", sampling(place)) / "sample_answers")
    assert figures["set_aside"] == 2 and [sample.id for sample in found] == ["s2", "s1"]
    kinds = [json.loads(line)["kind"] for line in (place / "runs/bad/sample_answers/set_aside.jsonl").open()]
    assert sorted(kinds) == ["asks for words", "unreadable file"]
    with pytest.raises(StageError, match="s0"):
        run(place, "strict", sampling(place, strict=True))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"score": {"choice": 1.0}}, "judges no answers in speech"),
        ({"modality": "text", "score": {"words": 1.0}}, "judges no answers in text"),
        (
            {"modality": "text", "score": {"exact": 1.0}, "text_guidance": 2.0},
            "only modality: speech reads it",
        ),
        ({"score": {"voice": 1.0}}, "0 speakers have 5 training recordings"),
        ({"score": {"words": 1.0}, "voice_judge": "x:y"}, "score has no voice"),
        ({"score": {"voice": 1.0}, "voice_judge": "gone"}, "no such file"),
        ({"score": {"reward_model": 1.0}}, "go together"),
        ({"score": {"judge": 1.0}}, "go together"),
        ({"judge_prompt": "{answer}?"}, "score has no judge"),
    ],
)
def test_settings_that_do_not_fit_are_refused(place: Path, settings: dict[str, Any], problem: str) -> None:
    given = {name: value for name, value in settings.items() if name != "max_duration_s"}
    stage = sampling(place, **given)
    if settings.get("modality") == "text":
        del stage["sample_answers"]["max_duration_s"]
    with pytest.raises(ConfigError, match=problem):
        run(place, "refused", stage)


def test_the_right_answer_is_its_recording_encoded(place: Path) -> None:
    _, found = found_in(run(place, "right", sampling(place, add_right=True)) / "sample_answers")
    source = open_source(place / "runs/right/sample_answers/samples.jsonl")
    for index, sample in enumerate(found):
        (number,) = [n for n, answer in enumerate(sample.answers) if answer.origin == "right answer"]
        assert sample.answers[number].metadata["times"] == 0
        answered = source[index].answered(number)
        recording = load(answered.audio[-1].content)  # type: ignore[arg-type]
        assert torch.equal(answered.encodings[0][-1], toy_generator().encode(recording))


def test_likeness_to_the_voice_that_was_asked_for(place: Path) -> None:
    """By the prompt's recording where there is one, else by recordings of the speaker in the training split."""
    stage = sampling(place, score={"voice": 1.0}, voice_judge=f"{JUDGES}:ToyVoices")
    _, found = found_in(run(place, "voice", stage) / "sample_answers")
    judge = toy_judges.ToyVoices()

    def embedding(path: str) -> Tensor:
        clip = load(path, mono=True)
        return judge.embed(clip.samples_CN, clip.sample_rate)

    of_anna = [embedding(str(place / f"{n}.wav")) for n in (0, 1, 3)]
    mean_D = torch.stack([one_D / one_D.norm() for one_D in of_anna]).mean(0)
    for sample in found:
        reference_D = embedding(str(place / "0.wav")) if sample.id == "s3" else mean_D
        for answer in sample.answers:
            (part,) = answer.audio_parts()
            likeness = torch.nn.functional.cosine_similarity(reference_D, embedding(part.path), dim=0)
            assert answer.score == pytest.approx(float(likeness), abs=1e-6)


def test_a_judge_of_voices_is_trained_where_none_is_given(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(voices, "STEPS", 30)
    noise = torch.Generator().manual_seed(0)
    samples = []
    for n in range(12):
        hum_1N = a_voice(0.4).samples_CN if n % 2 else 0.1 * torch.randn(1, 3200, generator=noise)
        save(place / f"v{n}.wav", hum_1N, 8000)
        messages = [
            Message(role="user", content=[TextPart(text="one two")]),
            Message(role="assistant", content=[AudioPart(path=f"v{n}.wav")]),
        ]
        about = {"text": "one two", "speaker": ("noise", "tone")[n % 2], "split": "train"}
        samples.append(Sample(id=f"v{n}", messages=messages, task="tts", metadata=about))
    write_samples(place / "samples.jsonl", samples)
    stage = sampling(place, score={"voice": 1.0}, group_size=2, max_samples=4, add_right=True)
    _, found = found_in(run(place, "trained", stage) / "sample_answers")
    right = [a.score for sample in found for a in sample.answers if a.origin == "right answer"]
    assert len(right) == 4 and min(score or 0.0 for score in right) > 0.9
    assert (place / "runs/trained/sample_answers/judges/speaker/classifier.json").is_file()


def test_no_answer_is_scored_twice(place: Path) -> None:
    """In another stage of the run with other weights, and in one that begins afresh."""
    first = sampling(place)
    run(place, "rounds", first)
    heard = len(toy_judges.HEARD)
    assert heard == 16
    second = {"name": "again", **sampling(place, score={"words": 2.0}, **WORDS)}
    folder = run(place, "rounds", first, second)
    assert len(toy_judges.HEARD) == heard
    before, after = (found_in(folder / name)[1] for name in ("sample_answers", "again"))
    assert [[2 * (a.score or 0) for a in s.answers] for s in before] == [
        [a.score for a in s.answers] for s in after
    ]
    run(place, "rounds", sampling(place, score={"words": 3.0}, **WORDS), second)
    assert len(toy_judges.HEARD) == heard


def test_an_answer_without_a_score_is_counted_and_left_out(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recognize = toy_judges.ToyRecognizer.recognize

    def fails_at_times(self: Any, samples_CN: Tensor, sample_rate: int) -> str:
        if len(toy_judges.HEARD) % 4 == 1:
            toy_judges.HEARD.append(0)
            raise ValueError("not now")
        return recognize(self, samples_CN, sample_rate)

    monkeypatch.setattr(toy_judges.ToyRecognizer, "recognize", fails_at_times)
    figures, found = found_in(run(place, "some", sampling(place)) / "sample_answers")
    assert figures["answers_without_score"] == 4 and figures["set_aside"] == 0 and figures["answers"] == 12
    assert all(len(sample.answers) == 3 for sample in found)
    rows = [json.loads(line) for line in (place / "runs/some/sample_answers/set_aside.jsonl").open()]
    assert {row["kind"] for row in rows} == {"no score"} and "not now" in rows[0]["reason"]
    toy_judges.HEARD.clear()
    with pytest.raises(StageError, match="not now"):
        run(place, "some-strict", sampling(place, strict=True))


def test_a_reward_model_scores_the_codes(place: Path) -> None:
    torch.manual_seed(0)
    RewardModel.begin(place / "model").save(place / "reward")
    stage = sampling(place, score={"reward_model": 1.0}, reward_model=str(place / "reward"))
    folder = run(place, "reward", stage) / "sample_answers"
    model = RewardModel.load(place / "reward")
    source = open_source(folder / "samples.jsonl")
    for index in range(len(source)):
        loaded = source[index]
        scores = [answer.score for answer in loaded.sample.answers]
        assert scores == pytest.approx(model.score(loaded), abs=1e-5) and len(set(scores)) > 1


def test_right_answers_in_speech_become_conversations_to_train_on(place: Path) -> None:
    selected = {"samples": "${sample_answers.samples}", "select": "right", "most": 2}
    trained = {
        "start": str(place / "model"),
        "samples": "${select_answers.samples}",
        "steps": 10,
        "batch_size": 2,
    }
    stages = [{"select_answers": selected}, {"train": {**trained, "eval_audio_samples": 0}}]
    folder = run(place, "rft", sampling(place), *stages)
    source = open_source(folder / "select_answers" / "samples.jsonl")
    assert len(source) and all(
        len(source[n].encodings[0]) == len(source[n].audio) for n in range(len(source))
    )
    held_out = sum(source[n].sample.metadata["split"] == "test" for n in range(len(source)))
    figures = json.loads((folder / "train" / "stage.json").read_text())["figures"]
    assert figures["steps"] == 10 and figures["sequences"] == len(source) - held_out
