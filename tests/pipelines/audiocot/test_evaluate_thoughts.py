"""The stage `evaluate_thoughts` on a new thinker: rows, tables, controls, answers in batches, the report."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from rich.console import Console

from audiollm.audio import Waveform
from audiollm.data.records.manifest import read_samples
from audiollm.data.records.sample import AudioPart, Message, Sample, TextPart, VideoPart, write_samples
from audiollm.families.listener import rollouts as by_transformers
from audiollm.models.audio_llms.inputs import InputsError
from audiollm.models.audio_llms.loading import load_audio_llm
from audiollm.models.audio_llms.new_thinker import NewThinkerConfig, write_thinker
from audiollm.recipe.runner import run_recipe
from audiollm.recipe.stages import load_recipe
from audiollm.video.writing import write_video
from pipelines.audiocot.writer.answering import ThoughtWriter, read_thought_questions
from pipelines.audiocot.writer.settings import EvaluateThoughtsConfig
from tests.audiollm.models.tiny_audio_llms import save_tiny

SMALL = {
    "vocabulary": 320, "width": 32, "layers": 1, "encoder_width": 32, "audio_layers": 1, "vision_layers": 1,
    "mel_bins": 16, "window_s": 1, "min_pixels": 784, "max_pixels": 3136,
}  # fmt: skip
RECORD = {"events": [{"sound": "bell", "start_s": 0.1, "end_s": 0.4}]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Questions about four clips of other lengths and pictures, and a thinker with random weights."""
    place = tmp_path_factory.mktemp("thoughts")
    dice, made = np.random.default_rng(0), []
    for number in range(4):
        frames = list(dice.integers(0, 256, (4 + number, 32, 32, 3), dtype=np.uint8))
        noise = torch.from_numpy(dice.normal(0, 0.1, (1, 2_000 * len(frames))).astype(np.float32))
        write_video(place / f"{number}.mkv", frames, 8, Waveform(noise, 16_000))
        part = {"path": f"{number}.mkv", "start_s": 0.0, "end_s": len(frames) / 8}
        edit = {"operation": "remove", "span": [0.1, 0.4], "record": RECORD}
        for question, truth in (("clip", RECORD), ("instruction", edit)):
            content = [VideoPart(**part), AudioPart(**part), TextPart(text=f"Number {number}?")]
            answer = Message(role="assistant", content=[TextPart(text=json.dumps(truth))])
            facts = {"clip": str(number), "question": question, "duration_s": 0.5 + number / 8}
            split = {"split": "test" if number else "train"}
            asked = Message(role="user", content=content)
            made.append(Sample(id=f"{question}-{number}", task="think", messages=[asked, answer],
                               metadata={**facts, **split}))  # fmt: skip
    write_samples(place / "thinking.jsonl", made)
    config = NewThinkerConfig.model_validate({"samples": str(place / "thinking.jsonl"), **SMALL})
    write_thinker(place / "model", config, [json.dumps(RECORD)] * 3)
    disturb(place / "model")
    return place


def disturb(model: Path) -> None:
    """Weights whose answers differ from prompt to prompt, and have no token with a meaning of its own."""
    llm: Any = load_audio_llm(model).model
    dice = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in llm.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=dice))
        llm.get_output_embeddings().weight[:10] = 0
    llm.save_pretrained(model)


def config_of(folder: Path, **changes: Any) -> EvaluateThoughtsConfig:
    return EvaluateThoughtsConfig.model_validate(
        {
            "model": str(folder / "model"),
            "samples": str(folder / "thinking.jsonl"),
            "pictures": {"per_second": 8, "side": 28},
            "max_answer_tokens": 16,
            **changes,
        }
    )


def test_answers_in_batches_are_those_of_single_questions(folder: Path) -> None:
    config = config_of(folder, batch_size=6)
    questions = read_thought_questions(config)
    assert [asked.id for asked in questions] == [
        f"{kind}-{number}" for kind in ("clip", "instruction") for number in (1, 2, 3)
    ]
    writer = ThoughtWriter(config)
    together = writer.answers(questions)
    assert together == [writer.answers([asked])[0] for asked in questions]
    assert not writer.problems
    assert len(set(together)) == 3  # two questions about each clip are in the same words
    # a clip that cannot be read has no answer, and takes nobody else's
    missing = replace(questions[1].loaded, videos=(VideoPart(path="nothing.mkv"),))
    found = writer.answers([questions[0], replace(questions[1], loaded=missing), *questions[2:]])
    assert found == [together[0], "", *together[2:]] and "nothing.mkv" in writer.problems["clip-2"]


def test_what_the_processor_refuses_takes_nobody_elses_answer(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = read_thought_questions(config_of(folder))
    writer = ThoughtWriter(config_of(folder, batch_size=6))
    wanted = writer.answers(questions)
    encode = by_transformers.encode_prompt

    def refusing(processor: Any, prompt: Any) -> Any:
        if prompt.id == "clip-2":
            raise InputsError("too long", "too long")
        return encode(processor, prompt)

    monkeypatch.setattr(by_transformers, "encode_prompt", refusing)
    assert writer.answers(questions) == [wanted[0], "", *wanted[2:]]
    assert writer.problems == {"clip-2": "too long"}


def test_of_operations_that_take_turns_none_is_left_out(tmp_path: Path) -> None:
    operations, made = ("extend", "inpaint", "add", "remove"), []
    for number in range(40):
        answer = {"operation": operations[number % 4], "span": [0.1, 0.4], "record": RECORD}
        messages = [
            Message(role="user", content=[TextPart(text="?")]),
            Message(role="assistant", content=[TextPart(text=json.dumps(answer))]),
        ]
        facts = {"clip": str(number), "question": "instruction", "duration_s": 1.0, "split": "test"}
        made.append(Sample(id=f"q-{number}", task="think", messages=messages, metadata=facts))
    write_samples(tmp_path / "thinking.jsonl", made)
    (tmp_path / "model").mkdir()
    asked = read_thought_questions(config_of(tmp_path, max_questions=30))
    assert len(asked) == 30 and {each.truth["operation"] for each in asked} == set(operations)
    assert [each.id for each in asked] == sorted((each.id for each in asked), key=lambda id: int(id[2:]))


def test_splits_of_other_names_are_held_out_too(folder: Path, tmp_path: Path) -> None:
    samples = read_samples(folder / "thinking.jsonl")[0]
    for sample in samples:
        sample.metadata["split"] = {"test": "validation", "train": "train-clean"}[sample.metadata["split"]]
    write_samples(folder / "renamed.jsonl", samples)
    asked = {
        split: [
            each.id
            for each in read_thought_questions(
                config_of(folder, samples=str(folder / "renamed.jsonl"), split=split)
            )
        ]
        for split in ("test", "train")
    }
    assert len(asked["test"]) == 6 and asked["train"] == ["clip-0", "instruction-0"]


def test_a_model_that_sees_alone_is_asked_without_the_sound(folder: Path, tmp_path: Path) -> None:
    save_tiny("video_llama3", tmp_path)
    config = config_of(folder, model=str(tmp_path), max_answer_tokens=16, batch_size=3)
    questions = read_thought_questions(config)
    writer = ThoughtWriter(config)
    assert len(writer.answers(questions)) == len(questions) == 6 and not writer.problems


def test_a_run_has_tables_rows_and_a_section(folder: Path) -> None:
    ask = config_of(folder, questions=["clip"]).model_dump(mode="json", exclude_unset=True)
    stages = [
        {"name": "asked", "evaluate_thoughts": {**ask, "questions": ["clip", "instruction"]}},
        {"name": "exchanged", "evaluate_thoughts": {**ask, "exchange": ["video", "sound"], "shuffle_frames": True}},
        {"report": {}},
    ]  # fmt: skip
    (folder / "r.yaml").write_text(yaml.safe_dump({"name": "r", "stages": stages}))
    run_recipe(load_recipe(folder / "r.yaml", runs=folder), Console(quiet=True))
    result = json.loads((folder / "r" / "asked" / "results.json").read_text())
    assert set(result["tables"]) == {"clip", "instruction"} and result["questions"] == 6
    assert result["tables"]["clip"]["answers that are records"]["n"] == 3
    rows = [json.loads(line) for line in (folder / "r" / "exchanged" / "rows.jsonl").open()]
    assert [(row["clip"], Path(row["sound"]).name) for row in rows] == [
        ("1", "2.mkv"),
        ("2", "3.mkv"),
        ("3", "1.mkv"),
    ]
    page = (folder / "r" / "report" / "report.html").read_text()
    assert "Chains of thought" in page and "operation and span" in page
    assert "video and sound of another clip; pictures in random order" in page
