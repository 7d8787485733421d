"""Families: found by `model_type`, added from outside, and the only place that knows a model's kind."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file

from audiollm.audio import Waveform, save
from audiollm.data.hearing.features import PartAudio
from audiollm.errors import ConfigError
from audiollm.families.answering import AnswerError, AnswerRequest
from audiollm.families.dual_ffn.answering import DualFFNAnswers
from audiollm.families.registry import (
    ANY_OTHER,
    GROUP,
    family_of,
    is_packed,
    load_interpreter,
    open_model_folder,
)
from audiollm.models.layouts import BOSON, HIGGS, LANGUAGE_MODELS, OURS
from tests.audiollm.families.dual_ffn.packed_samples import save_model
from tests.audiollm.families.dual_ffn.test_start import CHATML, plain_vocabulary
from tests.audiollm.families.toy_families import install
from tests.audiollm.generation.toy_speech import a_voice, toy_generator
from tests.audiollm.models.tiny_audio_llms import save_tiny

ROOT = Path(__file__).parent.parent.parent.parent
FAMILIES = ("dual_ffn", "listener")


def test_every_model_that_is_read_as_a_dual_ffn_has_an_entry_point() -> None:
    names = {entry.name for entry in entry_points(group=GROUP)}
    assert {OURS, HIGGS, BOSON, *LANGUAGE_MODELS, ANY_OTHER} == names - {
        "csm",
        "qwen3_tts",
        "higgs_multimodal_qwen3",
    }


def test_a_folder_is_opened_by_its_model_type(tmp_path: Path) -> None:
    save_model(tmp_path / "ours", "codes")
    save_tiny("qwen2_audio", tmp_path / "listener")
    ours, listener = open_model_folder(tmp_path / "ours"), open_model_folder(tmp_path / "listener")
    assert (ours.speaks, is_packed(tmp_path / "ours")) == (True, True)
    assert (listener.speaks, is_packed(tmp_path / "listener")) == (False, False)
    with pytest.raises(ConfigError, match="in words alone"):
        listener.generator()
    with pytest.raises(ConfigError, match="cannot act while they listen"):
        load_interpreter(tmp_path / "listener")
    assert family_of("something new", tmp_path) is family_of(ANY_OTHER, tmp_path)
    with pytest.raises(ConfigError):
        open_model_folder(tmp_path / "nothing")


def test_a_plain_language_model_answers_in_words_and_does_not_hear(tmp_path: Path) -> None:
    (tmp_path / "llm").mkdir()
    words = plain_vocabulary(tmp_path / "llm", CHATML).get_vocab_size()
    config = transformers.Qwen3Config(
        vocab_size=words, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    transformers.Qwen3ForCausalLM(config).save_pretrained(tmp_path / "llm")
    model = open_model_folder(tmp_path / "llm").answering_model()
    request = AnswerRequest([("user", ["Which?"])], max_tokens=4)
    (answer,) = model.answer([request])
    assert answer.tokens > 4 and not model.hears
    recording = Waveform(torch.zeros(1, 16_000), 16_000)
    with pytest.raises(AnswerError, match="does not hear"):
        model.answer([AnswerRequest([("user", [recording, "Which?"])])])
    with pytest.raises(ConfigError, match="in words alone"):
        open_model_folder(tmp_path / "llm").generator()


def test_a_recording_is_encoded_once_for_all_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = toy_generator()
    model = DualFFNAnswers(generator, Path("toy"), "")
    encoded: list[Waveform] = []
    encode = generator.encode_input_audio

    def counted(waveform: Waveform) -> PartAudio:
        encoded.append(waveform)
        return encode(waveform)

    monkeypatch.setattr(generator, "encode_input_audio", counted)
    recording = a_voice(0.6)
    requests = [
        AnswerRequest([("user", [recording, question])], seed, 1.0, max_tokens=4)
        for seed, question in enumerate(("what", "what", "who"))
    ]
    together = model.answer(requests)
    assert len(encoded) == 1 and [model.answer([each])[0] for each in requests] == together


def test_a_family_is_imported_by_its_own_folder_alone() -> None:
    found = []
    for path in sorted(
        each for package in ("audiollm", "pipelines", "tokenizer") for each in (ROOT / package).rglob("*.py")
    ):
        place = path.relative_to(ROOT).as_posix()
        for family in FAMILIES:
            inside = place.startswith(f"audiollm/families/{family}/")
            if not inside and _imports(path, f"audiollm.families.{family}"):
                found.append(place)
    assert found == []


def test_generate_of_transformers_is_called_in_three_places() -> None:
    """By the family of listeners, by the recognizers, whose outputs are scores, and by the translators of texts."""
    called = [
        path.relative_to(ROOT).as_posix()
        for package in ("audiollm", "pipelines", "tokenizer")
        for path in sorted((ROOT / package).rglob("*.py"))
        if re.search(r"model\.generate\(", path.read_text(encoding="utf-8"))
    ]
    assert called == [
        "audiollm/families/listener/generating.py",
        "audiollm/models/recognition/decoder.py",
        "pipelines/translate/translators.py",
    ]


def test_the_family_of_the_guide_answers(tmp_path: Path) -> None:
    """`docs/adding_a_model.md`: its module, its line, its command."""
    guide = (ROOT / "docs" / "adding_a_model.md").read_text(encoding="utf-8")
    code, line = (re.findall(rf"```{kind}\n(.*?)```", guide, flags=re.S)[0] for kind in ("python", "toml"))
    (tmp_path / "loudness.py").write_text(code)
    name, target = re.findall(r'^(\w+) = "(.+)"$', line, flags=re.M)[0]
    install(tmp_path, name, target)
    model = tmp_path / "loudness-model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": name, "words": ["quiet", "loud"]}))
    weights = {"weight_W": torch.tensor([-1.0, 1.0]), "bias_W": torch.tensor([-3.0, 3.0])}
    save_file(weights, model / "model.safetensors")
    for word, level in (("loud", 0.5), ("quiet", 0.001)):
        save(tmp_path / f"{word}.wav", level * torch.sin(torch.arange(8000) / 5)[None], 16_000)
        done = subprocess.run(
            [sys.executable, "-m", "audiollm.commands.cli", "ask", f"{word}.wav", "How loud?", "--model",
             "loudness-model"],
            cwd=tmp_path, env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stdout.strip()) == (0, word), done.stderr


def _imports(path: Path, module: str) -> bool:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(f"{module}."):
            return True
        if isinstance(node, ast.ImportFrom) and any(
            f"{node.module}.{alias.name}" == module for alias in node.names
        ):
            return True
    return False
