"""Process reward models: scores stand at the ends of steps, and a stage learns them from labelled steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console
from torch.nn import functional

from audiollm.data.records.manifest import ManifestSource
from audiollm.errors import BadSample
from audiollm.families.dual_ffn.policy import DualFFNPolicy
from audiollm.families.listener.policy import ListenerPolicy
from audiollm.families.policy import PromptedAnswers
from audiollm.models.audio_llms import inputs
from audiollm.recipe.runner import run_recipe
from audiollm.recipe.stages import load_recipe
from audiollm.rl.reward_models.model import RewardModel, load_reward_model
from audiollm.rl.reward_models.task import reliability_of
from tests.audiollm.families.dual_ffn.packed_samples import codes, prompted, save_model, speech, text
from tests.audiollm.models.tiny_audio_llms import save_tiny
from tests.audiollm.rl.reward_models.step_records import HELD_OUT, write_steps


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("steps")
    save_tiny("qwen2_audio", made / "model")
    write_steps(made)
    return made


def test_the_token_at_a_step_s_end_holds_its_last_character(place: Path) -> None:
    """The tokenizer has a token per byte: `ö` has two, and the second one ends the part."""
    policy = ListenerPolicy.load(place / "model", needs_reference=False)
    parts = [["Grö", "ße \n", "ist ", "7"], [" a", "b"]]
    given = PromptedAnswers("s", [("user", ["How big?"])], ["".join(each) for each in parts], parts=parts)
    encoded = policy.encode(given)
    for own, answer, ends in zip(parts, encoded, policy.part_ends(given, encoded), strict=True):
        first = answer.num_tokens - answer.num_answer_tokens
        ids = answer.tokens["input_ids"].tolist()
        begins = [first, *(end + 1 for end in ends[:-1])]
        said = [
            policy.processor.tokenizer.decode(ids[begin : end + 1])
            for begin, end in zip(begins, ends, strict=True)
        ]
        assert said == own and ends[-1] == answer.num_tokens - 2


def test_a_template_that_strips_or_rewrites_an_answer(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = ListenerPolicy.load(place / "model", needs_reference=False)
    template = policy.processor.chat_template
    given = PromptedAnswers("s", [("user", ["Say."])], ["  one two "], parts=[["  one", " two "]])
    policy.processor.chat_template = template.replace("content['text'] }}", "content['text'].strip() }}")
    encoded = policy.encode(given)
    (ends,) = policy.part_ends(given, encoded)
    first = encoded[0].num_tokens - encoded[0].num_answer_tokens
    assert [end - first for end in ends] == [2, 6]  # of `one two`
    monkeypatch.setattr("audiollm.families.listener.encoding.template_text", _upper)
    with pytest.raises(BadSample, match="rewrites"):
        policy.part_ends(given, encoded)


def _upper(*given: object) -> str:
    return inputs.template_text(*given).upper()  # type: ignore[arg-type]


def test_steps_of_packed_answers_end_with_text_and_with_the_mark_behind_speech(tmp_path: Path) -> None:
    policy = DualFFNPolicy.load(save_model(tmp_path, "codes"), needs_reference=False)
    given = prompted("p", [codes(6, 1)], [text("a dog"), speech(4, 4, "high")])
    streams = policy.encode(given)
    written, spoken = policy.part_ends(given, streams)
    style = policy.template
    behind = int(streams[1].text_ids_S[spoken[1]])
    assert behind == style.tokenizer.token_to_id("<|audio_eos|>")
    assert int(streams[1].kinds_S[spoken[1] - 1]) == 2  # a frame of speech
    for stream, end, words in ((streams[0], written[0], "a dog"), (streams[1], spoken[0], "high")):
        ids = style.tokenizer.encode(words, add_special_tokens=False).ids
        assert stream.text_ids_S[end + 1 - len(ids) : end + 1].tolist() == ids


def test_a_process_reward_model_is_trained_and_loaded(place: Path) -> None:
    stage = {
        "samples": str(place / "steps.jsonl"),
        "start": str(place / "model"),
        "objective": "process",
        "learning_rate": 1e-2,
        "steps": 60,
        "batch_size": 8,
    }
    recipe = place / "process.yaml"
    recipe.write_text(yaml.safe_dump({"name": "process", "stages": [{"train_reward": stage}]}))
    loaded = load_recipe(recipe, runs=place / "runs")
    run_recipe(loaded, Console(quiet=True))
    folder = loaded.folder / "train_reward"
    figures = json.loads((folder / "stage.json").read_text())["figures"]
    assert figures["accuracy"] >= 0.9 and figures["set_aside"] == 0
    told = json.loads((folder / "reliability.json").read_text())
    assert sum(each["count"] for each in told["bins"]) == 4 * HELD_OUT
    model = load_reward_model(folder)
    source = ManifestSource(str(place / "steps.jsonl"))
    held_out = [source[n] for n in range(len(source) - HELD_OUT, len(source))]
    steps = [model.step_scores(sample) for sample in held_out]
    assert [[len(answer) for answer in sample] for sample in steps] == [[2, 2]] * HELD_OUT
    right = [
        (answer[0] > 0) == (n == 0) and (answer[1] > 0) == (n == 1)
        for s in steps
        for n, answer in enumerate(s)
    ]
    assert sum(right) / len(right) >= 0.8
    together = model.score_many(held_out, max_tokens=200)
    for sample, own, scores in zip(held_out, steps, together, strict=True):
        expected = [float(functional.logsigmoid(torch.tensor(each)).sum()) for each in own]
        assert scores == pytest.approx(expected, abs=1e-5)
        assert model.score(sample) == pytest.approx(expected, abs=1e-5)


def test_an_answer_without_labels_has_a_score_for_every_part(place: Path) -> None:
    torch.manual_seed(0)
    model = RewardModel.begin(place / "model", scored="steps", bias=True)
    (loaded,) = [ManifestSource(str(place / "steps.jsonl"))[0]]
    bare = [answer.model_copy(update={"steps": None}) for answer in loaded.sample.answers]
    other = type(loaded)(loaded.sample.model_copy(update={"answers": bare}), loaded.encodings, loaded.audio)
    assert [len(each) for each in model.step_scores(loaded)] == [2, 2]
    assert [len(each) for each in model.step_scores(other)] == [2, 3]
    with pytest.raises(ValueError, match="whole answers"):
        RewardModel.begin(place / "model").step_scores(loaded)


def test_calibration_of_steps_counts_soft_labels() -> None:
    found = reliability_of([2.0, -2.0, 0.0], [0.75, 0.25, 1.0])
    assert [(each.count, each.accuracy) for each in found.bins] == [(1, 0.5), (2, 0.75)]
