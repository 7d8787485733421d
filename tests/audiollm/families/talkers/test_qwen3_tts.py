"""Qwen3-TTS against its published class: prompts row by row, hidden states, logits, greedy speech; folders."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from audiollm.audio import Waveform, load, save
from audiollm.data.packing import SegmentLayout
from audiollm.data.records.sample import AudioPart, Message, Sample, TextPart, write_samples
from audiollm.errors import ConfigError, StageError
from audiollm.families.qwen3_tts.kind import Qwen3TTSKind
from audiollm.families.registry import open_model_folder
from audiollm.families.talkers.decoding import speak_to_end
from audiollm.families.talkers.drawing import Speaking
from audiollm.families.talkers.kind import TalkerSampling
from audiollm.families.talkers.policy import load_talker
from audiollm.families.talkers.rows import SpeechRows, join_inputs
from audiollm.families.talkers.turns import PromptForm, SpeechPrompt, SpokenTurn
from audiollm.train.settings import PromptMix
from tests.audiollm.families.talkers.talker_runs import random_codes, run_stage
from tests.audiollm.families.talkers.tiny_qwen3_tts import (
    BOOKS,
    CODES,
    SIZE,
    ask_published,
    tiny_config,
    write_tiny_qwen3_tts,
)

TEXT, REFERENCE = "one two three", "and a four"
VECTOR = torch.linspace(-1, 1, SIZE)
FORMS: tuple[PromptForm, ...] = ("whole", "interleaved")


@pytest.fixture(scope="module", params=[True, False], ids=["projected", "plain"])
def named(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with named voices; with and without a projection to a smaller code predictor."""
    return write_tiny_qwen3_tts(tmp_path_factory.mktemp("named"), request.param, "custom_voice")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3_tts(tmp_path_factory.mktemp("base"))


PROMPTS = [
    SpeechPrompt(TEXT, speaker, instruction, language=language, form=form)
    for form, language, speaker, instruction in itertools.product(
        FORMS, (None, "english", "chinese"), (None, "Ann", "bob"), ("", "slowly")
    )
]
CLONES = [
    SpeechPrompt(TEXT, None, language=language, form=form, vector_C=VECTOR, before=before)
    for form, language, before in itertools.product(
        FORMS,
        (None, "english"),
        ((), *((SpokenTurn(REFERENCE, random_codes(BOOKS, CODES, frames, frames)),) for frames in (3, 40))),
    )
]


def check_prompts(folder: Path, prompts: Sequence[SpeechPrompt], place: Path) -> None:
    kind = Qwen3TTSKind(folder)
    model = load_talker(kind)
    for prompt, seen in zip(prompts, ask_published(folder, prompts, 2, place), strict=True):
        laid_out = kind.prompt_rows(prompt)
        with torch.no_grad():
            rows_SC = model.embed_rows(join_inputs([laid_out.rows]))
            torch.testing.assert_close(rows_SC, seen["rows"], atol=1e-6, rtol=1e-5)
            beside = laid_out.beside if len(laid_out.beside) else torch.tensor([laid_out.after])
            torch.testing.assert_close(model.embed_text(beside), seen["beside"], atol=1e-6, rtol=1e-5)
            position_S, layout = (
                torch.arange(len(rows_SC)),
                SegmentLayout.in_order([len(rows_SC)], rows_SC.device),
            )
            hidden_SC = model.backbone(rows_SC, position_S, model.backbone.attend_packed(rows_SC, layout))
            torch.testing.assert_close(hidden_SC, seen["hidden"], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(model.first_head(hidden_SC), seen["logits"], atol=1e-5, rtol=1e-5)
            depth_FKC = model.depth.over_frames(model.depth_rows(hidden_SC[-1:], seen["codes"][:1]))
            depth_JV = torch.cat(
                [model.through_rest_head(depth_FKC[:, book], book) for book in range(1, BOOKS)]
            )
            torch.testing.assert_close(depth_JV, seen["depth"], atol=2e-5, rtol=1e-5)


def test_prompts_of_named_voices_are_the_published_ones(named: Path, tmp_path: Path) -> None:
    check_prompts(named, PROMPTS, tmp_path)


def test_prompts_of_clones_are_the_published_ones(base: Path, tmp_path: Path) -> None:
    check_prompts(base, CLONES, tmp_path)


def test_greedy_speech_is_that_of_the_published_class(named: Path, tmp_path: Path) -> None:
    prompts = [SpeechPrompt(TEXT, "ann", language="english", form=form) for form in FORMS]
    kind, greedy = Qwen3TTSKind(named), TalkerSampling.plain(0.0)
    sampling = TalkerSampling(greedy.first, greedy.depth, 1.05, min_frames=2)
    answers = [Speaking(kind.prompt_rows(prompt), sampling, 20, 0) for prompt in prompts]
    speak_to_end(load_talker(kind), kind, answers)
    for answer, theirs in zip(answers, ask_published(named, prompts, 21, tmp_path), strict=True):
        codes_TK = answer.codes_KT(BOOKS).T
        assert len(theirs["codes"]) >= 2
        torch.testing.assert_close(codes_TK, theirs["codes"][:20])


def test_rows_of_every_form(base: Path) -> None:
    """Words of the interleaved form stand beside frames, in training as in generation."""
    kind, codes_KT = Qwen3TTSKind(base), random_codes(BOOKS, CODES, 30, 1)
    for form in FORMS:
        rows: SpeechRows = kind.answer_rows(SpeechPrompt("abcd", form=form), codes_KT)
        assert rows.num_targets == 30 * BOOKS + 1
        frames = rows.first_L[-30:]
        assert torch.equal(frames, codes_KT[0])
        beside = rows.text_L[-30:].tolist()
        words = kind.text.marked_ids("bcd") if form == "interleaved" else []
        eos, pad = 260, 258
        expected = [*words, *([eos] if words else [])]
        assert beside == expected + [pad] * (30 - len(expected))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokenizer_type": "qwen3_tts_tokenizer_25hz"}, "12Hz"),
        ({"talker_config": {"rope_theta": None}}, "rope_theta"),
        ({"talker_config": {"codec_eos_token_id": None}}, "codec_eos_token_id"),
    ],
)
def test_a_folder_of_another_kind_is_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    import json

    folder = write_tiny_qwen3_tts(tmp_path / "model")
    data = tiny_config()
    for key, value in change.items():
        data[key] = {**data[key], **value} if isinstance(value, dict) else value
    (folder / "config.json").write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=words):
        load_talker(Qwen3TTSKind(folder))


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (SpeechPrompt(TEXT, "eve"), "no named voices"),
        (SpeechPrompt(TEXT, language="klingon"), "klingon"),
        (SpeechPrompt("one <|im_end|>"), "a mark of the model's own"),
    ],
)
def test_a_prompt_that_the_model_does_not_know_is_refused(
    base: Path, prompt: SpeechPrompt, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        Qwen3TTSKind(base).prompt_rows(prompt)


def test_the_family_is_found(base: Path) -> None:
    assert open_model_folder(base).speaks


def test_speaker_vectors_are_those_of_the_published_class(base: Path, tmp_path: Path) -> None:
    samples_N = 0.2 * torch.randn(30_000, generator=torch.Generator().manual_seed(2))
    (theirs,) = ask_published(base, [], 1, tmp_path, samples_N)
    ours = Qwen3TTSKind(base).vector_of(Waveform(samples_N[None], 24_000))
    assert ours.shape == (SIZE,) and float(ours.std()) > 1e-4
    torch.testing.assert_close(ours, theirs["vector"], atol=1e-5, rtol=1e-5)


def test_the_mix_shows_prompts_in_other_forms(base: Path) -> None:
    kind, prompt = Qwen3TTSKind(base), SpeechPrompt(TEXT, language="en", instruction="slowly")
    mix = PromptMix(interleaved=0.5, no_language=0.25, no_instruction=1.0, no_voice=0.5)
    shown = [kind.complete(prompt, VECTOR, mix, f"sample {number}") for number in range(400)]
    shares = [
        sum(map(bool, values)) / 400
        for values in zip(
            *(
                (one.form == "interleaved", one.language is None, not one.instruction, one.vector_C is None)
                for one in shown
            ),
            strict=True,
        )
    ]
    assert shares == pytest.approx([0.5, 0.25, 1.0, 0.5], abs=0.07)
    assert kind.complete(prompt, VECTOR, mix, "sample 3") == shown[3]


def said_by(name: str, number: int) -> Sample:
    """A spoken sample with the name of its speaker."""
    system = f"Generate audio following instruction.\n\nSpeaker: {name}"
    messages = [
        *([Message(role="system", content=[TextPart(text=system)])] if name else []),
        Message(role="user", content=[TextPart(text="one")]),
        Message(role="assistant", content=[AudioPart(path=f"{number}.wav")]),
    ]
    return Sample(id=str(number), messages=messages, task="tts")


def test_voices_are_added_to_a_base_model(base: Path, tmp_path: Path) -> None:
    samples = [said_by(name, number) for number, name in enumerate(["Ann", "Bob", "Ann"])]
    for number in range(len(samples)):
        sound = 0.2 * torch.randn(1, 24_000, generator=torch.Generator().manual_seed(number))
        save(tmp_path / f"{number}.wav", sound, 24_000)
    write_samples(tmp_path / "samples.jsonl", samples)
    run_stage(tmp_path, "voices", "add_voices", {}, start=str(base), samples=str(tmp_path / "samples.jsonl"))
    kind = Qwen3TTSKind(tmp_path / "voices" / "add_voices" / "model")
    assert kind.speakers == ["ann", "bob"] and kind.is_base
    rows = kind.talker_config["spk_id"]
    before, after = (load_file(folder / "model.safetensors") for folder in (base, kind.folder))
    table = "talker.model.codec_embedding.weight"
    changed = (before[table] != after[table]).any(dim=1).nonzero()[:, 0].tolist()
    assert sorted(changed) == sorted(rows.values())
    assert all(torch.equal(before[name], after[name]) for name in before if name != table)
    vectors = [kind.vector_of(load(tmp_path / f"{number}.wav")) for number in (0, 2)]
    torch.testing.assert_close(after[table][rows["ann"]], torch.stack(vectors).mean(0), atol=1e-6, rtol=1e-5)
    prompt = kind.prompt_rows(SpeechPrompt(TEXT, "ANN"))
    assert int(rows["ann"]) in prompt.rows.first_L.tolist()
    doubled = [sample.model_copy(update={"id": f"{sample.id}b"}) for sample in samples[:1]]
    text = doubled[0].messages[0].content[0].text.replace("Ann", "ANN")  # type: ignore[union-attr]
    shout = doubled[0].model_copy(
        update={"messages": [Message(role="system", content=[TextPart(text=text)]), *doubled[0].messages[1:]]}
    )
    write_samples(tmp_path / "case.jsonl", [*samples, shout])
    with pytest.raises(StageError, match="differ in case alone"):
        run_stage(tmp_path, "case", "add_voices", {}, start=str(base), samples=str(tmp_path / "case.jsonl"))


def test_a_voice_beside_named_ones_begins_as_their_mean(tmp_path: Path) -> None:
    folder, table = (
        write_tiny_qwen3_tts(tmp_path / "named", kind="custom_voice"),
        "talker.model.codec_embedding.weight",
    )
    before, voices = load_file(folder / "model.safetensors"), Qwen3TTSKind(folder).talker_config["spk_id"]
    write_samples(tmp_path / "samples.jsonl", [said_by("carl", 0)])
    run_stage(
        tmp_path, "voices", "add_voices", {}, start=str(folder), samples=str(tmp_path / "samples.jsonl")
    )
    kind = Qwen3TTSKind(tmp_path / "voices" / "add_voices" / "model")
    assert kind.speakers == sorted([*voices, "carl"]) and not kind.is_base
    after = load_file(kind.folder / "model.safetensors")
    row = kind.talker_config["spk_id"]["carl"]
    assert (before[table] != after[table]).any(dim=1).nonzero()[:, 0].tolist() == [row]
    torch.testing.assert_close(after[table][row], before[table][list(voices.values())].mean(dim=0))
    write_samples(tmp_path / "unnamed.jsonl", [said_by("", 1)])
    with pytest.raises(StageError, match="no sample has a speaker's name"):
        run_stage(
            tmp_path, "none", "add_voices", {}, start=str(folder), samples=str(tmp_path / "unnamed.jsonl")
        )
