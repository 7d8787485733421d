"""How codes are drawn where nobody says: each source by itself, their order, and who goes by it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from audiollm.data.text.tokenizer import train_text_tokenizer
from audiollm.errors import ConfigError
from audiollm.families import registry
from audiollm.files.atomic import read_json, write_json
from audiollm.generation.engine.defaults import PLAIN, Defaults, read_defaults, read_trained
from audiollm.generation.engine.request import Request
from audiollm.generation.engine.sampling import SamplingConfig
from audiollm.models.decoder import DualFFNConfig
from audiollm.models.dual_ffn import DualFFN
from audiollm.models.hub import save_pretrained
from audiollm.synthesis.command import generate
from audiollm.synthesis.run import defaults_of
from audiollm.synthesis.settings import GenerateConfig
from tests.audiollm.generation.toy_speech import requests_of, toy_generator
from tests.audiollm.supervised.train_samples import run_stage, write_shards

transformers = pytest.importorskip("transformers")


def test_nothing_is_known() -> None:
    assert SamplingConfig(0.7, 0, 0.9, text_guidance=1, speaker_guidance=1, ras_window=0) == PLAIN
    assert PLAIN.branches == [(False, False)] and Defaults().sampling == PLAIN


@pytest.mark.parametrize(
    ("trained", "text", "speaker"),
    [
        ({"text_dropout": 0.15, "speaker_dropout": 0.15}, 3, 2),
        ({"text_dropout": 0.1, "speaker_dropout": 0}, 3, 1),
        ({"text_dropout": 0.0, "speaker_dropout": 0.2}, 1, 2),
        ({"longest_positions": 90}, 1, 1),
        (None, 1, 1),
    ],
)
def test_guidance_needs_a_condition_that_was_hidden_in_training(
    tmp_path: Path, trained: dict[str, float] | None, text: float, speaker: float
) -> None:
    if trained is not None:
        write_json(tmp_path / "trained.json", trained)
    sampling = read_defaults(tmp_path).sampling
    assert (sampling.text_guidance, sampling.speaker_guidance) == (text, speaker)
    assert (sampling.temperature, sampling.top_p, sampling.ras_window) == (0.7, 0.9, 0)


def test_phrases_are_drawn_at_a_lower_temperature(tmp_path: Path) -> None:
    write_json(tmp_path / "trained.json", {"phrase_words": 2})
    defaults = read_defaults(tmp_path)
    assert (defaults.sampling.temperature, defaults.sources) == (0.4, {"temperature": "trained.json"})
    write_json(tmp_path / "generation_config.json", {"do_sample": True, "temperature": 0.6})
    assert read_defaults(tmp_path).sampling.temperature == 0.6


def test_the_authors_settings(tmp_path: Path) -> None:
    """The file is read as transformers writes it."""
    settings = transformers.GenerationConfig(
        do_sample=True, temperature=0.3, top_p=0.95, top_k=50, eos_token_id=4, repetition_penalty=1.2
    )
    settings.ras_win_len, settings.ras_win_max_num_repeat = 7, 3
    settings.save_pretrained(tmp_path)
    assert read_defaults(tmp_path).sampling == SamplingConfig(
        0.3, 50, 0.95, text_guidance=1, speaker_guidance=1, ras_window=7, ras_repeats=3
    )
    write_json(tmp_path / "generation_config.json", {"do_sample": False, "temperature": 0.5, "top_p": None})
    assert read_defaults(tmp_path).sampling == SamplingConfig(0, text_guidance=1, speaker_guidance=1)


def test_published_weights_of_both_layouts(tmp_path: Path) -> None:
    """transformers' conversion writes the window of repetitions; Boson's files leave it to their code."""
    higgs = {"bos_token_id": 1, "eos_token_id": 128009, "ras_win_len": 7, "ras_win_max_num_repeat": 2}
    write_json(tmp_path / "hf" / "generation_config.json", {**higgs, "use_text_head": True})
    write_json(tmp_path / "boson" / "config.json", {"model_type": "higgs_audio"})
    for folder in (tmp_path / "hf", tmp_path / "boson"):
        assert read_defaults(folder).sampling == SamplingConfig(
            text_guidance=1, speaker_guidance=1, ras_window=7, ras_repeats=2
        )


def test_the_order_and_what_is_said_of_it(tmp_path: Path) -> None:
    write_json(tmp_path / "trained.json", {"text_dropout": 0.15, "speaker_dropout": 0.0})
    write_json(tmp_path / "generation_config.json", {"temperature": 0.5, "top_p": 0.8, "ras_win_len": 7})
    chosen = read_defaults(tmp_path).over(top_p=0.7, text_guidance=None, top_k=None)
    assert chosen.sampling == SamplingConfig(0.5, 0, 0.7, 3, 1, 7, 2)
    assert str(chosen) == (
        "temperature 0.5 (generation_config.json), top_p 0.7 (given), text_guidance 3 (trained.json), "
        "ras_window 7 (generation_config.json), ras_repeats 2"
    )
    assert chosen.over(text_guidance=1.0).sampling.branches == [(False, False)]
    assert str(chosen.over(temperature=0.0)) == "temperature 0 (given), text_guidance 3 (trained.json)"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("generation_config.json", {"temperature": -1}),
        ("generation_config.json", {"temperature": float("nan")}),
        ("generation_config.json", {"top_k": 1.5}),
        ("generation_config.json", {"top_p": 0}),
        ("generation_config.json", {"ras_win_len": "7"}),
        ("generation_config.json", {"ras_win_max_num_repeat": 0}),
        ("generation_config.json", {"top_k": True}),
        ("trained.json", {"speaker_dropout": -0.1}),
        ("trained.json", {"text_dropout": "0.1"}),
        ("trained.json", {"longest_positions": [1]}),
        ("trained.json", {"stream_speaks": "yes"}),
        ("trained.json", {"words": "seven"}),
        ("trained.json", {"words": [7]}),
    ],
)
def test_what_cannot_be_is_named(tmp_path: Path, name: str, content: dict[str, Any]) -> None:
    write_json(tmp_path / name, content)
    with pytest.raises(ConfigError, match=re.escape(f"{name}  {next(iter(content))}: ")):
        read_defaults(tmp_path)


# Who writes it, and who goes by it


def test_a_training_notes_what_it_hid_and_keeps_the_settings_that_it_began_with(tmp_path: Path) -> None:
    shards = str(write_shards(tmp_path / "a", 7))
    run_stage(tmp_path / "first", shards, shape={"hidden_size": 32, "num_layers": 1}, speaker_dropout=0.0)
    model = tmp_path / "first" / "model"
    assert read_trained(model)[1:7] == (0.15, 0.0, None, None, None, None)
    assert read_defaults(model).sampling == SamplingConfig(text_guidance=3, speaker_guidance=1)
    settings = read_json(model / "generation_config.json")
    write_json(model / "generation_config.json", {**settings, "ras_win_len": 7, "ras_win_max_num_repeat": 2})
    run_stage(tmp_path / "second", shards, start=str(model), text_dropout=0.0, speaker_dropout=0.0)
    assert read_defaults(tmp_path / "second" / "model").sampling == SamplingConfig(
        text_guidance=1, speaker_guidance=1, ras_window=7
    )
    write_json(model / "generation_config.json", {"top_p": 7})
    with pytest.raises(ConfigError, match="top_p: 7"):  # before anything is trained
        run_stage(tmp_path / "third", shards, start=str(model))
    assert not (tmp_path / "third" / "checkpoint").exists()


def test_a_language_models_settings_are_those_of_words(tmp_path: Path) -> None:
    from audiollm.families.dual_ffn.start import start_generation

    write_json(tmp_path / "config.json", {"model_type": "llama"})
    write_json(tmp_path / "generation_config.json", {"temperature": 0.6, "top_p": 0.9})
    assert start_generation(tmp_path) == {} == start_generation(None)


def test_a_saved_model_says_what_it_is_told(tmp_path: Path) -> None:
    words = train_text_tokenizer(["one two"] * 3, 300)
    model = DualFFN(DualFFNConfig(words.get_vocab_size(), 4, 34, 32, 1, 2, 2, 16, 64))
    save_pretrained(model, tmp_path / "a", words)
    assert read_defaults(tmp_path / "a") == Defaults()
    save_pretrained(model, tmp_path / "b", words, generation={"ras_win_len": 7, "ras_win_max_num_repeat": 2})
    peer = transformers.HiggsAudioV2ForConditionalGeneration.from_pretrained(tmp_path / "b")
    assert peer.generation_config.ras_win_len == 7 and read_defaults(tmp_path / "b").sampling.ras_window == 7


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """The requests that reach the engine, of a model whose folder says something."""
    toy = toy_generator()
    toy.defaults = Defaults(SamplingConfig(0.5, text_guidance=3, speaker_guidance=2), {"temperature": "file"})
    return requests_of(monkeypatch, toy)


def test_the_command(asked: list[Request], tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(generate)
    said = ["--model", "m", "--text", "one", "--speaker", "anna", "--max-duration-s", "0.2"]
    result = CliRunner().invoke(app, [*said, "-o", str(tmp_path / "a.wav")])
    assert asked[-1].sampling == SamplingConfig(0.5, text_guidance=3, speaker_guidance=2)
    assert (
        "drawn with temperature 0.5 (file), top_p 0.9, text_guidance 3, speaker_guidance 2" in result.stdout
    )
    extra = [
        "--text-guidance",
        "1",
        "--speaker-guidance",
        "1",
        "--top-k",
        "9",
        "--ras",
        "7",
        "--temperature",
        "1",
    ]
    result = CliRunner().invoke(app, [*said, *extra, "-o", str(tmp_path / "b.wav")])
    assert asked[-1].sampling == SamplingConfig(1.0, 9, 0.9, 1, 1, 7)
    assert "temperature 1 (given), top_k 9 (given), top_p 0.9, ras_window 7 (given)" in result.stdout
    shown = " ".join(
        re.sub(r"[│\s]+", " ", CliRunner().invoke(app, ["--help"], terminal_width=200).output).split()
    )
    assert "generation_config.json (temperature, top_k, top_p, do_sample, ras_win_len" in shown
    assert "trained.json (text_dropout, speaker_dropout)" in shown


def test_python(asked: list[Request]) -> None:
    generator = registry.load_speech_generator("m")
    generator.speak("one", speaker="anna", max_duration_s=0.2)
    assert asked[-1].sampling == generator.defaults.sampling
    generator.dialogue([("Ann", "one")], max_duration_s=0.2)
    assert asked[-1].sampling == SamplingConfig(0.5, text_guidance=3, speaker_guidance=1)  # nobody's name
    generator.speak("one", sampling=PLAIN, max_duration_s=0.2)
    assert asked[-1].sampling == PLAIN


def test_the_stage(asked: list[Request], tmp_path: Path) -> None:
    generator = registry.load_speech_generator("m")
    names = {"artifacts": {"model", "codec", "samples"}, "inputs": []}
    paths = {name: name for name in ("model", "codec", "samples")}
    silent = GenerateConfig.model_validate(paths, context=names)
    assert defaults_of(silent, generator) == generator.defaults
    told = GenerateConfig.model_validate({**paths, "top_p": 0.95, "ras_window": 7}, context=names)
    assert defaults_of(told, generator).sampling == SamplingConfig(0.5, 0, 0.95, 3, 2, 7)
