"""`audiollm convert preferences`: columns of TRL, lists, steps and tags become answers, and every bad row is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from audiollm.audio import encode_bytes, save
from audiollm.commands.cli import build_app
from audiollm.data.convert.preference_forms import split_prompt
from audiollm.data.convert.preferences import PREFERENCE_COLUMNS, preferences
from audiollm.data.convert.request import ConversionRequest
from audiollm.data.records.opening import open_source
from audiollm.data.records.sample import RatedAnswer, Sample, TextPart, parse_sample
from audiollm.errors import BadSample, ConfigError, StageError
from audiollm.files.atomic import read_jsonl
from audiollm.rl.groups import AnswerPair, AnswerSteps, JudgedAnswer, RankedAnswers, groups_of


def convert(*arguments: object) -> None:
    build_app("convert")(["convert", "preferences", *map(str, arguments)], standalone_mode=False)


def write(folder: Path, *rows: Any, name: str = "p.jsonl") -> Path:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / name


def read(path: Path) -> list[Sample]:
    source = open_source(path)
    return [source[index].sample for index in range(len(source))]


def converted(folder: Path, *rows: Any, arguments: tuple[object, ...] = ()) -> list[Sample]:
    convert(write(folder, *rows), "-o", folder / "out.jsonl", *arguments)
    return read(folder / "out.jsonl")


def parts(content: Any) -> str:
    return "|".join(part.text if isinstance(part, TextPart) else f"<{part.path}>" for part in content)


def flat(sample: Sample) -> list[str]:
    return [f"{message.role}: {parts(message.content)}" for message in sample.messages]


def said(sample: Sample) -> list[str]:
    return [parts(answer.content) for answer in sample.answers]


def sounds(folder: Path, *names: str) -> None:
    for number, name in enumerate(names):
        save(folder / name, torch.full((1, 800 * (number + 1)), 0.25), 8_000)


USER, GOOD, BAD = (
    {"role": "user", "content": "Which colour is the sky?"},
    {"role": "assistant", "content": "It is blue."},
    {"role": "assistant", "content": "It is green."},
)
TRL_ROWS = {
    "standard": {"prompt": "The sky is", "chosen": "blue.", "rejected": "green."},
    "implicit": {"chosen": "The sky is blue.", "rejected": "The sky is green."},
    "conversational": {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
    "implicit conversational": {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
    "prompt beside it": {"prompt": USER["content"], "chosen": [USER, GOOD], "rejected": [USER, BAD]},
}


@pytest.mark.parametrize("form", TRL_ROWS)
def test_pairs_mean_what_they_mean_to_trl(tmp_path: Path, form: str) -> None:
    data_utils = pytest.importorskip("trl.data_utils")
    datasets = pytest.importorskip("datasets")
    row = TRL_ROWS[form]
    (sample,) = converted(tmp_path, row)
    explicit = data_utils.maybe_extract_prompt(row)

    def text(value: Any) -> str:
        return str(value if isinstance(value, str) else value[0]["content"]).strip()

    assert flat(sample) == [f"user: {text(explicit['prompt'])}"]
    assert said(sample) == [text(explicit["chosen"]), text(explicit["rejected"])]
    assert groups_of(sample, "pairs") == [AnswerPair(0, 1)]
    unpaired = data_utils.maybe_unpair_preference_dataset(datasets.Dataset.from_list([explicit]))
    singles = groups_of(sample, "singles", {"desirable_N"})
    assert [
        (said(sample)[one.answer], one.desirable) for one in singles if isinstance(one, JudgedAnswer)
    ] == [(text(one["completion"]), one["label"]) for one in unpaired]
    # the unpaired rows are read as single answers with the same verdicts
    both = converted(tmp_path, *({**one, "id": str(n)} for n, one in enumerate(unpaired)))
    assert [(said(one)[0].strip(), one.answers[0].verdict == "desirable") for one in both] == [
        (text(one["completion"]), one["label"]) for one in unpaired
    ]


turns = st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=4)


@given(turns, turns, turns)
def test_implicit_prompts_of_conversations_are_those_of_trl(
    shared: list[str], chosen: list[str], rejected: list[str]
) -> None:
    data_utils = pytest.importorskip("trl.data_utils")
    roles = ("user", "assistant")

    def conversation(texts: list[str]) -> list[dict[str, str]]:
        return [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]

    one, other = conversation([*shared, "x", *chosen]), conversation([*shared, "y", *rejected])
    expected = data_utils.extract_prompt({"chosen": one, "rejected": other})
    assert split_prompt(one, other) == (expected["prompt"], expected["chosen"], expected["rejected"])


words = st.lists(st.sampled_from(["sky", "is", "blue", "black", "b"]), min_size=1, max_size=5)


@given(words, words, words)
def test_texts_are_parted_between_words(shared: list[str], chosen: list[str], rejected: list[str]) -> None:
    """TRL may part them within a word; nothing but the spaces between is lost."""
    one, other = " ".join(["start", *shared, *chosen, "x"]), " ".join(["start", *shared, *rejected, "y"])
    prompt, left, right = split_prompt(one, other)
    text = prompt[0]["content"]
    assert f"{text} {left}" == one and f"{text} {right}" == other
    assert left.split()[0] != right.split()[0] or min(len(left.split()), len(right.split())) == 1


def test_pairs_that_repeat_the_better_conversation(tmp_path: Path) -> None:
    """UltraFeedback binarized has it once more, as `messages`, for SFT."""
    row = {**TRL_ROWS["prompt beside it"], "messages": [USER, GOOD], "score_chosen": 8.5, "score_rejected": 2}
    (sample,) = converted(tmp_path, row)
    assert flat(sample) == ["user: Which colour is the sky?"]
    assert said(sample) == ["It is blue.", "It is green."]
    assert groups_of(sample, "pairs") == [AnswerPair(0, 1, 6.5)]


def test_pairs_with_scores_margins_and_other_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = {"prompt": "q", "chosen": "a", "rejected": "b", "source": {"name": "x"}}
    scored, margin = converted(
        tmp_path,
        {**first, "score_chosen": 8.5, "score_rejected": "3", "id": "one", "label": "kept"},
        {**first, "margin": 0.5, "system": "Be brief.", "split": "test"},
    )
    assert (scored.id, margin.id, scored.task) == ("one", "p-2", "text")
    assert scored.answers == [
        RatedAnswer(content=[TextPart(text="a")], rank=1, score=8.5),
        RatedAnswer(content=[TextPart(text="b")], rank=2, score=3),
    ]
    assert scored.metadata == {"source": {"name": "x"}, "label": "kept"}, "a field of another form is kept"
    assert flat(margin) == ["system: Be brief.", "user: q"]
    assert groups_of(margin, "pairs") == [AnswerPair(0, 1, 0.5)] and margin.metadata["split"] == "test"
    assert "kept as metadata: source" in capsys.readouterr().out


def test_rows_that_share_an_id_and_columns_that_are_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """TRL's `unpair_preference_dataset` gives both rows of a pair the columns of the pair."""
    rows = [{"id": "x", "prompt": "q", "completion": text, "label": text == "a"} for text in "abc"]
    assert [sample.id for sample in converted(tmp_path, *rows)] == ["x", "x-2", "x-3"]
    row = {"prompt": "q", "completions": ["a", "b"], "better": ["c", "d"], "scores": [1, 2]}
    (sample,) = converted(tmp_path, row, arguments=("--columns", "completions=better"))
    assert said(sample) == ["c", "d"] and "not read: completions" in capsys.readouterr().out
    (tmp_path / "p.jsonl").write_text("{\n")
    with pytest.raises(ConfigError, match="no usable sample.*wrong JSON"):
        convert(tmp_path / "p.jsonl", "-o", tmp_path / "out.jsonl")


def test_single_answers(tmp_path: Path) -> None:
    good, bad = converted(
        tmp_path,
        {"prompt": "q", "completion": "a", "label": True},
        {"prompt": [USER], "completion": [BAD], "label": 0},
    )
    (rated,) = converted(tmp_path, {"prompt": "q", "response": "a", "score": 0.25})
    assert [s.answers[0].verdict for s in (good, bad, rated)] == ["desirable", "undesirable", None]
    assert rated.answers[0].score == 0.25 and said(bad) == ["It is green."]


def test_kto_tags_of_chats(tmp_path: Path) -> None:
    sounds(tmp_path, "a.wav")
    chat = [{"from": "human", "value": "What is <audio>?"}, {"from": "gpt", "value": "A dog."}]
    tagged = {"conversations": chat, "audios": ["a.wav"], "kto_tag": False, "system": "Listen."}
    (heard,), (listed,) = (
        converted(tmp_path, row) for row in (tagged, {"messages": [USER, GOOD], "kto_tag": True})
    )
    assert flat(heard) == ["system: Listen.", "user: What is |<a.wav>|?"] and said(heard) == ["A dog."]
    assert (heard.task, heard.answers[0].verdict) == ("audio_qa", "undesirable")
    assert flat(listed) == [f"user: {USER['content']}"] and listed.answers[0].verdict == "desirable"
    alpaca = {"instruction": "Add.", "input": "1+1", "output": "2", "history": [["q", "a"]], "kto_tag": True}
    (sample,) = converted(tmp_path, alpaca)
    assert flat(sample) == ["user: q", "assistant: a", "user: Add.\n1+1"] and said(sample) == ["2"]


def test_pairs_of_chats(tmp_path: Path) -> None:
    """LLaMA-Factory's ranking rows, and ms-swift's `rejected_response`."""
    asked = [{"from": "human", "value": "q"}]
    good, bad = {"from": "gpt", "value": "a"}, {"from": "gpt", "value": "b"}
    (factory,) = converted(tmp_path, {"conversations": asked, "chosen": good, "rejected": bad})
    (swift,) = converted(tmp_path, {"messages": [USER, GOOD], "rejected_response": "no idea"})
    assert (flat(factory), said(factory)) == (["user: q"], ["a", "b"])
    assert said(swift) == ["It is blue.", "no idea"] and swift.answers[0].rank == 1


def test_lists(tmp_path: Path) -> None:
    objects = [
        {
            "response": "a",
            "model": "m1",
            "overall_score": 7.5,
            "fine-grained_score": 4,
            "annotations": {"x": "y"},
        },
        {"response": "b", "model": "m2", "overall_score": 9.0, "critique": None},
    ]
    (ultra,) = converted(tmp_path, {"instruction": "q", "completions": objects, "models": ["m1", "m2"]})
    assert groups_of(ultra, "lists") == [RankedAnswers((1, 0), (9.0, 7.5))]
    assert [answer.origin for answer in ultra.answers] == ["m1", "m2"]
    assert ultra.answers[0].metadata == {"fine-grained_score": 4, "annotations": {"x": "y"}}
    assert ultra.metadata == {"models": ["m1", "m2"]}
    scored, ranked, both = converted(
        tmp_path,
        {"prompt": "q", "responses": ["a", "b", "c"], "scores": [1, 3, 2]},
        {"prompt": "q", "responses": ["a", "b", [BAD]], "ranks": [2, 1, 2]},
        {"prompt": "q", "responses": ["a", "b"], "scores": [1, 3], "ranks": [2, 1]},
    )
    assert groups_of(scored, "lists") == [RankedAnswers((1, 2, 0), (3.0, 2.0, 1.0))]
    assert [answer.rank for answer in ranked.answers] == [2, 1, 2] and said(ranked)[2] == "It is green."
    assert groups_of(both, "pairs") == [AnswerPair(1, 0, 2.0)]
    (best_first,) = converted(tmp_path, {"prompt": "q", "ranked": ["x", "y", "z"]})
    assert groups_of(best_first, "pairs", pairs="adjacent") == [AnswerPair(0, 1), AnswerPair(1, 2)]
    (named,) = converted(
        tmp_path, {"q": "q", "outs": ["x", "y"], "how": [1, 2]},
        arguments=("--columns", "prompt=q,completions=outs,scores=how", "--task", "caption"),
    )  # fmt: skip
    assert groups_of(named, "pairs") == [AnswerPair(1, 0, 1.0)] and named.task == "caption"


def test_steps(tmp_path: Path) -> None:
    texts = ["9 is larger.", "No, 9.8 is."]
    flags, shares = converted(
        tmp_path,
        {"prompt": "q", "completions": texts, "labels": [False, True]},
        {"prompt": "q", "completions": texts, "labels": [0.25, 1]},
    )
    assert said(flags) == ["9 is larger.\n|No, 9.8 is."]
    assert groups_of(flags, "steps") == [AnswerSteps(0, (0.0, 1.0), (0, 1))]
    assert groups_of(shares, "steps") == [AnswerSteps(0, (0.25, 1.0), (0, 1))]


def test_recordings_of_prompts_and_answers(tmp_path: Path) -> None:
    sounds(tmp_path, "a.wav", "b.wav", "c.wav")
    held = [{"type": "audio", "audio": "a.wav"}, {"type": "text", "text": "and"}, {"type": "audio"}]
    rows = [
        {"prompt": "Compare.", "audios": ["a.wav", "b.wav"], "chosen": "alike", "rejected": "unlike"},
        {"prompt": "<audio> or <audio>?", "audios": ["a.wav", "b.wav"], "chosen": "1", "rejected": "2"},
        {"prompt": [{"role": "user", "content": held}], "audios": "b.wav", "chosen": "1", "rejected": "2"},
        {"prompt": "say it", "chosen_audio": "b.wav", "rejected_audio": "c.wav"},
        {"prompt": "say it", "chosen": "so: <audio>!", "rejected": "no", "chosen_audio": "b.wav",
         "rejected_audio": ["c.wav", "a.wav"]},
        {"prompt": "say it", "chosen": [{"role": "assistant", "content": [{"type": "audio", "path": "b.wav"}]}],
         "rejected": "in text"},
        {"audios": ["a.wav"], "chosen": "heard alone", "rejected": "x"},
    ]  # fmt: skip
    samples = converted(tmp_path, *rows)
    assert [flat(sample)[0] for sample in samples] == [
        "user: <a.wav>|<b.wav>|Compare.",
        "user: <a.wav>| or |<b.wav>|?",
        "user: <a.wav>|and|<b.wav>",
        "user: say it",
        "user: say it",
        "user: say it",
        "user: <a.wav>",
    ]
    assert [said(sample) for sample in samples[3:6]] == [
        ["<b.wav>", "<c.wav>"],
        ["so: |<b.wav>|!", "no|<c.wav>|<a.wav>"],
        ["<b.wav>", "in text"],
    ]
    assert [sample.task for sample in samples] == ["audio_qa"] * 3 + ["tts"] * 3 + ["audio_qa"]
    (listed,) = converted(
        tmp_path, {"prompt": "say", "completions_audio": ["a.wav", "b.wav"], "scores": [0, 1]}
    )
    assert said(listed) == ["<a.wav>", "<b.wav>"]
    (objects,) = converted(
        tmp_path,
        {
            "prompt": "say",
            "answers": [{"audio": "a.wav", "score": 1}, {"text": "b", "audio": "b.wav", "score": 2}],
        },
    )
    assert said(objects) == ["<a.wav>", "b|<b.wav>"]


def hugging_face(folder: Path, form: str) -> Path:
    """Recordings as Hugging Face stores them: a column, a list of them, and one inside of a message."""
    datasets = pytest.importorskip("datasets")

    def stored(samples: int) -> dict[str, Any]:
        return {"bytes": encode_bytes(torch.full((1, samples), 0.25), 8_000, "wav"), "path": None}

    message = {"role": "assistant", "content": [{"type": "audio", "audio": stored(2400), "text": None}]}
    rows = [
        {"prompt": "say it", "audios": [stored(800), stored(1600)], "chosen": [message],
         "rejected": [{**message, "content": [{"type": "audio", "audio": stored(3200), "text": None}]}], "n": n}
        for n in range(2)
    ]  # fmt: skip
    answer = [{"role": datasets.Value("string"), "content": [
        {"type": datasets.Value("string"), "audio": datasets.Audio(), "text": datasets.Value("string")}]}]  # fmt: skip
    features = datasets.Features(
        {"prompt": datasets.Value("string"), "audios": datasets.List(datasets.Audio()), "chosen": answer,
         "rejected": answer, "n": datasets.Value("int64")}
    )  # fmt: skip
    stored_as = {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}

    def plain(feature: Any) -> Any:
        if isinstance(feature, datasets.Audio):
            return stored_as
        if isinstance(feature, dict):
            return {name: plain(inner) for name, inner in feature.items()}
        return datasets.List(plain(feature.feature)) if isinstance(feature, datasets.List) else feature

    unmarked = datasets.Features({name: plain(feature) for name, feature in features.items()})
    dataset = datasets.Dataset.from_list(rows, features=unmarked).cast(features)
    if form == "saved":
        datasets.DatasetDict({"train": dataset, "test": dataset}).save_to_disk(str(folder / "data"))
    else:
        (folder / "data").mkdir()
        dataset.to_parquet(str(folder / "data" / "train-0.parquet"))
    return folder / "data"


@pytest.mark.parametrize("form", ["saved", "parquet"])
def test_datasets_of_hugging_face(tmp_path: Path, form: str) -> None:
    convert(hugging_face(tmp_path, form), "-o", tmp_path / "out" / "s.jsonl")
    source = open_source(tmp_path / "out" / "s.jsonl")
    assert len(source) == (4 if form == "saved" else 2)
    loaded = source[0]
    assert [clip.load().num_samples for clip in loaded.audio] == [800, 1600, 2400, 3200]
    assert [clip.load().num_samples for clip in loaded.answered(1).audio] == [800, 1600, 3200]
    assert loaded.sample.metadata == {"n": 0, "split": "train"} and loaded.sample.id == "train-00000000"
    assert len({clip.content for index in range(len(source)) for clip in source[index].audio}) == 4 * len(
        source
    )


def test_held_out_splits_of_hugging_face_are_not_trained_on(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_list([{"prompt": "q", "chosen": "a", "rejected": "b"}])
    (tmp_path / "data").mkdir()
    for name in ("train_prefs-00000-of-00001", "test_prefs-00000-of-00001", "validation-00000-of-00001"):
        dataset.to_parquet(str(tmp_path / "data" / f"{name}.parquet"))
    convert(tmp_path / "data", "-o", tmp_path / "out" / "s.jsonl")
    source = open_source(tmp_path / "out" / "s.jsonl")
    samples = [source[n].sample for n in range(len(source))]
    assert {sample.id: sample.metadata["split"] for sample in samples} == {
        "train_prefs-00000000": "train",
        "test_prefs-00000000": "test",
        "validation-00000000": "test",
    }


def test_decoded_sound_is_written(tmp_path: Path) -> None:
    array = {"array": [0.5, -0.5, 0.25, 0.0] * 100, "sampling_rate": 8000}
    two = {"array": [[0.5] * 100, [0.25] * 100], "sampling_rate": 16000}
    bad = {"array": [float("nan")], "sampling_rate": 8000}
    samples = converted(
        tmp_path,
        {"prompt": "q", "audio": array, "chosen": "a", "rejected": "b"},
        {"prompt": "q", "audio": [two], "chosen": "a", "rejected": "b"},
        {"prompt": "q", "audio": bad, "chosen": "a", "rejected": "b"},
        {"prompt": "q", "audio": {**array, "sampling_rate": 0}, "chosen": "a", "rejected": "b"},
    )
    assert len(samples) == 2
    source = open_source(tmp_path / "out.jsonl")
    wave = source[0].audio[0].load()
    assert (wave.sample_rate, wave.num_samples) == (8000, 400) and wave.samples_CN[0, 1] == pytest.approx(
        -0.5, abs=1e-4
    )
    assert source[1].audio[0].load().samples_CN.shape == (2, 100)
    aside = read_jsonl(tmp_path / "out.set_aside.jsonl")
    assert ["column audio: decoded audio must be finite" in row["reason"] for row in aside] == [True, False]
    assert aside[1]["kind"] == "unusable recording"


PAIR = {"prompt": "q", "chosen": "a", "rejected": "b"}


@pytest.mark.parametrize(
    ("row", "kind", "reason"),
    [
        ({**PAIR, "rejected": " a\n"}, "equal answers", "chosen and rejected are equal"),
        ({**PAIR, "rejected": "  "}, "empty answer", "column rejected: the answer is empty"),
        ({**PAIR, "chosen": ""}, "empty answer", "column chosen: the answer is empty"),
        ({**PAIR, "rejected": None}, "no judgement", "rejected"),
        ({**PAIR, "chosen": 7}, "unusable row", "column chosen: a text, a message or a recording"),
        ({**PAIR, "prompt": 7}, "unusable row", "column prompt: a text or a list of messages"),
        ({**PAIR, "prompt": ""}, "no prompt", "no prompt: chosen and rejected begin differently"),
        ({**PAIR, "prompt": "z", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, "unusable row", "is not in the"),
        ({**PAIR, "prompt": [USER], "chosen": [GOOD, USER, GOOD]}, "unusable row", "column chosen: one message, of"),
        ({**PAIR, "prompt": [{"role": "tool", "content": "x"}]}, "unusable row", "role 'tool'"),
        ({**PAIR, "prompt": [USER, GOOD]}, "two answers in one", "the last message is the assistant's"),
        ({**PAIR, "score_chosen": float("nan")}, "no finite score", "column score_chosen: a finite number"),
        ({**PAIR, "score_chosen": "N/A"}, "no finite score", "not 'N/A'"),
        ({**PAIR, "margin": True}, "no finite score", "column margin"),
        ({**PAIR, "audios": ["none.wav"]}, "unusable recording", "column audios: none.wav: no such file"),
        ({**PAIR, "chosen_audio": "none.wav"}, "unusable row", "column chosen: none.wav"),
        ({**PAIR, "audios": ["data:audio/wav;base64,AA"]}, "unusable recording", "save it to one first"),
        ({**PAIR, "prompt": "<audio>"}, "unusable row", "0 audio files for 1 marks"),
        ({**PAIR, "chosen": "<audio>"}, "unusable row", "column chosen: 0 recordings for 1 marks"),
        ({**PAIR, "other": {"bytes": "x", "path": "y"}}, "unusable row", "column other: holds a recording"),
        ({**PAIR, "prompt": [{"role": "user"}]}, "unusable row", "column prompt: a message or a part has no 'content'"),
        ({**PAIR, "prompt": [USER, 7]}, "unusable row", "column prompt: a text, or a list of messages"),
        ({**PAIR, "chosen": ["x"]}, "unusable row", "column chosen: a text, or a list of messages"),
        ({**PAIR, "history": ["x"]}, "unusable row", "column history"),
        ({**PAIR, "system": ["x"]}, "unusable row", "column system: a text is expected"),
        ({**PAIR, "audios": 7}, "unusable recording", "column audios"),
        ({"messages": 7, "label": True}, "unusable row", "column messages"),
        ({"prompt": "q", "completion": "a", "label": "good"}, "wrong verdict", "column label: true or false"),
        ({"prompt": "q", "completion": "", "label": True}, "empty answer", "column completion"),
        ({"prompt": "q", "completions": ["a"], "scores": [1]}, "one answer", "column completions: a list of one"),
        ({"prompt": "q", "completions": ["a", "b"], "scores": [1]}, "unusable row", "column scores: 1 entries for 2"),
        ({"prompt": "q", "completions": ["a", "b"]}, "no judgement", "not every answer has a score"),
        ({"prompt": "q", "completions": ["a", "a "], "scores": [1, 2]}, "equal answers", "answers 0 and 1 are equal"),
        ({"prompt": "q", "completions": ["a", "b"], "ranks": [0, 1]}, "unusable row", "column ranks: a rank is"),
        ({"prompt": "q", "completions": [{"x": 1}, "b"], "ranks": [1, 2]}, "empty answer", "has none of response"),
        ({"prompt": "q", "ranked": "a"}, "unusable row", "column ranked: a list is expected"),
        ({"prompt": "q", "completions": ["a", "b"], "labels": [True]}, "wrong scores of steps", "1 entries for 2"),
        ({"prompt": "q", "completions": ["a"], "labels": ["yes"]}, "no finite score", "column labels"),
        ({"prompt": "q", "completions": ["a", 7], "labels": [1, 0]}, "unusable row", "the text of a step"),
        ("no object", "unusable row", "no object"),
    ],
)  # fmt: skip
def test_bad_rows_are_named_counted_and_set_aside(tmp_path: Path, row: Any, kind: str, reason: str) -> None:
    samples = converted(tmp_path, {**PAIR, "id": "first"}, row, {**PAIR, "id": "last"})
    assert [sample.id for sample in samples] == ["first", "last"]
    (bad,) = read_jsonl(tmp_path / "out.set_aside.jsonl")
    assert (bad["place"], bad["kind"], bad["stage"]) == (f"{tmp_path}/p.jsonl:2", kind, "convert")
    assert reason in bad["reason"]
    with pytest.raises(StageError, match=r"p\.jsonl:2"):
        convert(tmp_path / "p.jsonl", "-o", tmp_path / "strict.jsonl", "--strict")


@pytest.mark.parametrize(
    ("row", "arguments", "message"),
    [
        ({"prompt": "q", "chosen": "a", "rejcted": "b"}, (), "no column rejected.*did you mean 'rejcted'"),
        ({"prompt": "q", "completion": "a"}, (), "no column label"),
        ({"text": "x"}, (), "no judged answers; its columns: text"),
        (PAIR, ("--columns", "chosen=chozen"), "no such column"),
        (PAIR, ("--seed", 3), "draws no phrasings"),
    ],
)
def test_columns_that_hold_no_preferences_are_an_error_before_any_work(
    tmp_path: Path, row: Any, arguments: tuple[object, ...], message: str
) -> None:
    import re

    with pytest.raises(ConfigError) as caught:
        converted(tmp_path, row, arguments=arguments)
    assert re.search(message, str(caught.value), flags=re.DOTALL)
    assert not (tmp_path / "out.jsonl").exists()


def test_the_help_teaches_the_forms(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_app()(["convert", "--help"], standalone_mode=True)
    shown = capsys.readouterr().out
    for word in ("chosen, rejected", "kto_tag", "ranked", "completions, labels", "convert preferences"):
        assert word in shown


answers = st.lists(st.text("abc ", min_size=1).filter(str.strip), min_size=2, max_size=5, unique_by=str.strip)


@settings(max_examples=20)
@given(answers, st.data())
def test_every_scored_list_arrives(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], data: st.DataObject
) -> None:
    scores = data.draw(st.lists(st.floats(-9, 9), min_size=len(texts), max_size=len(texts)))
    folder = tmp_path_factory.mktemp("lists")
    (sample,) = converted(folder, {"prompt": "q", "completions": texts, "scores": scores})
    assert said(sample) == texts and [answer.score for answer in sample.answers] == scores


message = st.dictionaries(
    st.sampled_from(
        ["role", "from", "content", "value", "type", "text", "audio", "score", "response", "bytes"]
    ),
    st.sampled_from(["user", "assistant", "gpt", "audio", "text", "x", "<audio>", 1, None, [], {}]),
)
anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 3)
    | st.floats()
    | st.sampled_from(["", "a", "b", "<audio>"])
    | message,
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)
wild_row = st.dictionaries(st.sampled_from([*PREFERENCE_COLUMNS, "other"]), anything).filter(
    lambda row: not isinstance(row.get("split"), str)  # an unknown split stops the conversion
)


@settings(max_examples=100)
@given(st.lists(wild_row, min_size=1, max_size=4))
def test_no_row_stops_the_others(
    tmp_path_factory: pytest.TempPathFactory, wild: list[dict[str, Any]]
) -> None:
    """Whatever JSON the columns hold, a row is a sample that reads back, or a reason."""
    folder = tmp_path_factory.getbasetemp()
    first = dict.fromkeys(PREFERENCE_COLUMNS) | PAIR
    source = write(folder, {**first, "label": None}, *wild, name="wild.jsonl")
    request = ConversionRequest(source, folder / "wild_out.jsonl", folder, {}, None)
    results = list(preferences(request).results)
    assert len(results) == 1 + len(wild) and isinstance(results[0], Sample)
    for result in results:
        if isinstance(result, BadSample):
            assert result.place.startswith(str(source)) and result.reason
            assert (
                "column" in result.reason
                or result.kind in ("no judgement", "no prompt", "equal answers")
                or ("the last message is the assistant's" in result.reason)
            )
        else:
            assert parse_sample(result.model_dump_json().encode(), "p") == result and result.answers


def test_a_table_becomes_pairs(tmp_path: Path) -> None:
    sounds(tmp_path, "a.wav", "b.wav")
    table = tmp_path / "p.csv"
    table.write_bytes(
        b"path,prompt,chosen,rejected,margin,split,room\n"
        b'a.wav,"Which, a or b?",7,"no, ""six""",0.5,test,k\n'
        b'"[""a.wav"", ""b.wav""]",Both?,yes,no,,,\n'
        b"a.wav,Why?,yes\n\n"
        b"b.wav,Who?,\xff,no,,,\n"
        b"b.wav,W\xc3\xa9r?,same,same,,,\n"
        b"b.wav,Who?,one,two,far,,\n"
    )
    convert(table, "-o", tmp_path / "out.jsonl")
    first, second = read(tmp_path / "out.jsonl")
    assert flat(first) == ["user: <a.wav>|Which, a or b?"] and said(first) == ["7", 'no, "six"']
    assert first.metadata == {"margin": 0.5, "split": "test", "room": "k"} and first.id == "p-2"
    assert flat(second) == ["user: <a.wav>|<b.wav>|Both?"] and second.metadata == {}
    bad = read_jsonl(tmp_path / "out.set_aside.jsonl")
    assert [row["place"].rpartition(":")[2] for row in bad] == ["4", "6", "7", "8"]
    assert [row["kind"] for row in bad][1:] == ["text encoding", "equal answers", "no finite score"]


def test_a_table_has_verdicts(tmp_path: Path) -> None:
    (tmp_path / "t.tsv").write_text(
        "question\tanswer\tlabel\nSky?\tblue\tTRUE\nSky?\tred\t0\nSky?\tgreen\tmaybe\n"
    )
    convert(tmp_path / "t.tsv", "-o", tmp_path / "out.jsonl")
    verdicts = [sample.answers[0].verdict for sample in read(tmp_path / "out.jsonl")]
    assert verdicts == ["desirable", "undesirable"]
